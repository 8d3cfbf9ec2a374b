"""make_fx of the call, its graphs, and what the ops say of themselves."""

import itertools

import pytest
import torch
from tests.transformer_block import assert_equal, config, operands, serving
from torch._higher_order_ops.effects import has_effects
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dist_moe import (
    BlockScaledConfig,
    ExecutionOptions,
    RMSNormPostprocess,
    create_context,
    prepare_block_scaled_weight,
    routed_experts,
)

MXFP8, NVFP4 = BlockScaledConfig(), BlockScaledConfig("nvfp4")
PRECISIONS = pytest.mark.parametrize("precision", [None, MXFP8], ids=["bf16", "mxfp8"])
TRACINGS = pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])


def context_of(config, **how):
    return create_context(group=None, config=config, device="cpu", backend="reference", **how)


def training_step(context, options=None):
    def step(x, ids, scores, w13, w2, grad):
        leaves = [t.detach().requires_grad_() for t in (x, scores, w13, w2)]
        out_TD = routed_experts(leaves[0], ids, *leaves[1:], context, options=options)
        return [out_TD.detach(), *torch.autograd.grad(out_TD, leaves, grad)]

    return step


def inference(context):
    def serve(x, ids, scores, w13, w2, _):
        with torch.no_grad():
            return [routed_experts(x, ids, scores, w13, w2, context)]

    return serve


def ops_of(graph) -> list[str]:
    return [name.split(".")[1] for n in graph.graph.nodes if (name := str(n.target)).startswith("dist_moe.")]


@TRACINGS
@PRECISIONS
def test_a_traced_training_step_has_the_eager_bits(precision, tracing):
    with context_of(config(block_scaled=precision)) as context:
        step = training_step(context)
        graph = make_fx(step, tracing_mode=tracing)(*operands())
        name = "bf16" if precision is None else "block_scaled"
        assert ops_of(graph) == [f"{name}_forward", f"{name}_backward"]
        for seed in range(3):
            assert_equal(graph(*operands(seed=seed)), step(*operands(seed=seed)))
        assert not context.ranks[0].slot_layers_N.any()


@TRACINGS
@PRECISIONS
@pytest.mark.parametrize("how", [serving, config], ids=["inference", "training"])
def test_a_traced_evaluation_has_the_eager_bits(how, precision, tracing):
    with context_of(how(block_scaled=precision)) as context:
        serve = inference(context)
        graph = make_fx(serve, tracing_mode=tracing)(*operands())
        assert ops_of(graph) == ["bf16_forward" if precision is None else "block_scaled_forward"]
        (node,) = (n for n in graph.graph.nodes if "dist_moe" in str(n.target))
        assert node.args[5] is False  # nothing is saved
        for seed in range(3):
            assert_equal(graph(*operands(seed=seed)), serve(*operands(seed=seed)))


@pytest.mark.parametrize("precision", [MXFP8, NVFP4], ids=lambda how: how.format)
def test_a_traced_call_of_prepared_weights_has_the_eager_bits(precision):
    with context_of(serving(block_scaled=precision)) as context:
        prepared = [prepare_block_scaled_weight(w, precision, inference=True) for w in operands()[3:5]]
        serve = lambda x, ids, scores: inference(context)(x, ids, scores, *prepared, None)  # noqa: E731
        graph = make_fx(serve)(*operands()[:3])
        assert ops_of(graph) == ["block_scaled_forward"]
        for seed in range(3):
            assert_equal(graph(*operands(seed=seed)[:3]), serve(*operands(seed=seed)[:3]))


@TRACINGS
def test_a_traced_step_with_a_norm_counts_into_the_tensor_of_the_caller(tracing):
    with context_of(config(route_outputs=True)) as context:

        def step(stats, *given):
            norm = RMSNormPostprocess(1e-6, torch.float32, torch.bfloat16)
            options = ExecutionOptions(
                experts_output_postprocess=norm, swiglu_clip_stats_out_3=stats, swiglu_clip_limit=1.0
            )
            return training_step(context, options)(*given)

        graph = make_fx(step, tracing_mode=tracing)(torch.zeros(3), *operands())
        assert ops_of(graph) == ["bf16_forward", "bf16_backward"]
        assert sum(n.target == torch.ops.aten.copy_.default for n in graph.graph.nodes) == 1
        for seed in range(2):
            found, wanted = torch.zeros(3), torch.zeros(3)
            assert_equal(graph(found, *operands(seed=seed)), step(wanted, *operands(seed=seed)))
            assert torch.equal(found, wanted) and found[0] > 0


def accumulation_step(context):
    def step(x, ids, scores, w13, w2, grad, grad_w13, grad_w2):
        w13, w2 = (w.detach().requires_grad_() for w in (w13, w2))
        w13.grad, w2.grad = grad_w13, grad_w2
        x = x.detach().requires_grad_()
        out_TD = routed_experts(x, ids, scores, w13, w2, context, options=ExecutionOptions(inplace_wgrad_accum=True))
        out_TD.backward(grad)
        return [out_TD.detach(), x.grad]

    return step


@PRECISIONS
def test_graphs_of_training_accumulation_and_inference_on_one_context_run_in_any_order(precision):
    """What a CPU can show of CUDA graphs: each holds its calls and nothing of the host's between them."""
    with context_of(config(block_scaled=precision)) as context:
        functions = {
            "train": training_step(context),
            "accumulate": accumulation_step(context),
            "serve": inference(context),
        }

        def given(name, seed):
            grads = [torch.full_like(w, 0.5) for w in operands(seed=seed)[3:5]] if name == "accumulate" else []
            return [*operands(seed=seed), *grads]

        graphs = {name: make_fx(function)(*given(name, 0)) for name, function in functions.items()}
        context.reset()
        for seed, order in enumerate(itertools.permutations(functions)):
            for name in order:
                found, wanted = given(name, seed), given(name, seed)
                assert_equal(graphs[name](*found), functions[name](*wanted))
                assert_equal(found[6:], wanted[6:])  # the gradients that are added to
            assert not context.ranks[0].slot_layers_N.any()


# What the ops say of themselves


def ops_for(precision) -> tuple:
    """Forward, backward, accumulating backward, and what else the forward takes: that no weight is prepared."""
    name, more = ("bf16", ()) if precision is None else ("block_scaled", ([],))
    kinds = ("forward", "backward", "backward_accumulate_")
    return *(getattr(torch.ops.dist_moe, f"{name}_{kind}").default for kind in kinds), more


@PRECISIONS
def test_fakes_of_every_op_have_the_shapes_of_the_real_thing(precision):
    """For gradients of both kinds of weights' dtypes, one of the two and none."""
    with context_of(config(block_scaled=precision)) as context:
        forward, backward, accumulate, more = ops_for(precision)
        saving = (True, 0, 1, context.name, *more)

        def run(x, ids, scores, w13, w2, grad):
            found = []
            for needs, dtype in itertools.product(
                ((True, True), (False, True), (False, False)), (w13.dtype, torch.float32)
            ):
                out_TD, state = forward(x, ids, scores, w13, w2, *saving)
                given = (grad, ids, scores, w13, w2, state)
                found += [out_TD, *state, *backward(*given, *needs, dtype, 0, context.name)]
            _, state = forward(x, ids, scores, w13, w2, *saving)
            given = (grad, ids, scores, w13, w2, state)
            return [*found, *accumulate(*given, torch.zeros_like(w13), None, True, False, 0, context.name)]

        with torch.no_grad():
            real = run(*operands())
            with FakeTensorMode() as mode:
                fake = run(*map(mode.from_tensor, operands()))
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


@PRECISIONS
def test_ops_are_ordered_and_change_nothing_that_their_schemas_do_not_say(precision):
    """The bytes of all arguments before and after: what test_schema of opcheck cannot ask of FP8."""
    with context_of(config(block_scaled=precision)) as context:
        forward, backward, accumulate, more = ops_for(precision)
        assert has_effects(forward) and has_effects(backward)
        assert [a.name for a in accumulate._schema.arguments if a.alias_info is not None and a.alias_info.is_write] == [
            "accumulator_grad_w13",
            "accumulator_grad_w2",
        ]
        x, ids, scores, w13, w2, grad = operands()

        def unchanged(op, *given):
            flat = [t for part in given for t in (part if isinstance(part, list) else [part])]
            kept = [t for t in flat if isinstance(t, torch.Tensor)]
            before = [t.contiguous().view(torch.uint8).clone() for t in kept]
            found = op(*given)
            assert_equal([t.contiguous().view(torch.uint8) for t in kept], before)
            mine = {t.untyped_storage().data_ptr() for t in kept if t.numel()}
            made = [t for part in found for t in (part if isinstance(part, list) else [part]) if t.numel()]
            places = [t.untyped_storage().data_ptr() for t in made]
            assert len(set(places)) == len(places) and mine.isdisjoint(places)
            assert all(r.own.untyped_storage().data_ptr() not in places for r in context.buffers.values())
            assert context.activation_buffer.untyped_storage().data_ptr() not in places
            return found

        with torch.no_grad():
            _, state = unchanged(forward, x, ids, scores, w13, w2, True, 0, 1, context.name, *more)
            unchanged(backward, grad, ids, scores, w13, w2, state, True, True, w13.dtype, 0, context.name)
            _, state = forward(x, ids, scores, w13, w2, True, 0, 1, context.name, *more)
            into = [torch.zeros_like(w) for w in (w13, w2)]
            adds = lambda *given: accumulate(*given, *into, True, True, 0, context.name)  # noqa: E731
            unchanged(adds, grad, ids, scores, w13, w2, state)
            assert all(t.any() for t in into)


def test_a_second_derivative_is_refused_by_name():
    with context_of(config()) as context:
        x, ids, scores, w13, w2, grad = operands()
        x.requires_grad_()
        out_TD = routed_experts(x, ids, scores, w13, w2, context)
        (grad_x,) = torch.autograd.grad(out_TD, x, grad.requires_grad_(), create_graph=True)
        with pytest.raises(NotImplementedError, match="backward of a backward"):
            grad_x.float().square().sum().backward()

"""Block-scaled calls of one rank through the public API: prepared weights, what is refused, and the ops beneath."""

import subprocess
import sys

import pytest
import torch
from tests.rank_calls import memory_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from dist_moe import (
    BlockScaledConfig,
    Config,
    create_context,
    plan_memory,
    prepare_block_scaled_weight,
    routed_experts,
)
from dist_moe.weights import prepared_operands

T, D, F, K, E = 8, 64, 96, 2, 4
MXFP8, NVFP4 = BlockScaledConfig(), BlockScaledConfig("nvfp4")
INFERENCE = {"inference": True, "activation_slot_capacity_factor": None}


def config(block_scaled=MXFP8, **changes) -> Config:
    fields = {"max_moe_layers_per_activation_slot": 1, "activation_slot_capacity_factor": 1.0}
    return Config(T, D, F, K, E, block_scaled=block_scaled, **fields | changes)


def context_of(config: Config):
    return create_context(group=None, config=config, device="cpu", backend="reference")


def inputs(requires_grad: bool = False) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    fields = {
        "x_TD": torch.randn(T, D, generator=g).bfloat16(),
        "topk_expert_ids_TK": torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)]),
        "topk_scores_TK": torch.rand(T, K, generator=g),
        "w13_weight": (torch.randn(E, 2 * F, D, generator=g) * D**-0.5).bfloat16(),
        "w2_weight": (torch.randn(E, D, F, generator=g) * F**-0.5).bfloat16(),
    }
    for name, value in fields.items():
        if name != "topk_expert_ids_TK":
            value.requires_grad_(requires_grad)
    return fields


def prepared(fields: dict, how=MXFP8, *, inference: bool = False) -> dict:
    weights = {
        name: prepare_block_scaled_weight(fields[name], how, inference=inference)
        for name in ("w13_weight", "w2_weight")
    }
    return fields | weights


def op_arguments(context, save: bool, ready=()) -> tuple:
    return (*inputs(save).values(), save, *context.saved.selected, context.name, list(ready))


@pytest.fixture
def context():
    with context_of(config()) as context:
        yield context


# Prepared weights


def grads(fields: dict, context, given=None) -> list[torch.Tensor]:
    out = routed_experts(**(given or fields), context=context)
    out.float().square().sum().backward()
    context.check()
    return [out.detach(), *(value.grad for value in fields.values() if value.grad is not None)]


def test_gradients_go_to_the_sources_of_prepared_weights(context):
    dynamic, fields = inputs(True), inputs(True)
    want, found = grads(dynamic, context), grads(fields, context, prepared(fields))
    assert len(want) == 5 and all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
    assert all(tensor.any() for tensor in want)


@pytest.mark.parametrize("layout", [((E, 2, F, D), (E, D, F)), ((E * 2 * F, D), (E * D, F))], ids=["stacked", "flat"])
def test_layouts_of_dynamic_weights(context, layout):
    want, fields = grads(inputs(True), context), inputs(True)
    for name, shape in zip(("w13_weight", "w2_weight"), layout, strict=True):
        fields[name] = fields[name].detach().view(shape).requires_grad_()
    found = grads(fields, context)
    assert all(torch.equal(a.reshape(b.shape), b) for a, b in zip(want, found, strict=True))
    assert found[3].shape == layout[0] and found[4].shape == layout[1]


def test_weights_refilled_between_forward_and_backward_are_an_error(context):
    fields = inputs(True)
    ready = prepared(fields)
    out = routed_experts(**ready, context=context)
    with torch.no_grad():
        prepare_block_scaled_weight(fields["w13_weight"], MXFP8, out=ready["w13_weight"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_changes_the_weights_and_prepared_ones_are_refilled(fused, context):
    fields = inputs(True)
    ready = prepared(fields)
    before = routed_experts(**ready, context=context)
    before.sum().backward()
    torch.optim.AdamW([fields["w13_weight"]], lr=0.1, fused=fused).step()
    with pytest.raises(RuntimeError, match="changed since it was prepared"):
        routed_experts(**ready, context=context)
    context.reset()
    prepare_block_scaled_weight(fields["w13_weight"], MXFP8, out=ready["w13_weight"])
    with torch.no_grad():
        after = routed_experts(**ready, context=context)
        assert torch.equal(after, routed_experts(**fields, context=context)) and not torch.equal(after, before)


def test_evaluation_before_between_and_after(context):
    """The training step has the bits it has alone, and evaluation those of training, in whatever order they come."""
    want, outs = grads(inputs(True), context), []

    def evaluate():
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                outs.append(routed_experts(**inputs(), context=context))
                routed_experts(**inputs() | {"x_TD": torch.randn(T, D).bfloat16()}, context=context)

    fields = inputs(True)
    evaluate()
    out = routed_experts(**fields, context=context)
    evaluate()
    out.float().square().sum().backward()
    evaluate()
    context.check()
    found = [out.detach(), *(value.grad for value in fields.values() if value.grad is not None)]
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
    assert all(torch.equal(one, want[0]) and not one.requires_grad for one in outs)
    assert not context.ranks[0].slot_used_NW.any()


def test_tiles_are_chosen_by_rows_without_padding(context):
    assert context.path.rows_per_expert == T * K // E < context.path.capacity_rows // E


@pytest.mark.parametrize("how", [config(), config(NVFP4, **INFERENCE)], ids=["training", "inference"])
def test_a_context_takes_what_its_plan_says(how):
    with context_of(how) as context:
        plan = plan_memory(how, 1)
        assert context.memory_plan == plan and context.activation_buffer.numel() == plan.total_device_buffer_bytes
        found = {name: region.own.numel() * region.own.element_size() for name, region in context.buffers.items()}
        assert found == dict(plan.symmetric_bytes)


# What is refused


def test_refused_weights():
    fields = inputs()
    with context_of(config(NVFP4, **INFERENCE)) as serving:
        with pytest.raises(ValueError, match="nvfp4 requires pre-quantized weights"):
            routed_experts(**fields, context=serving)
        serving.reset()
        with pytest.raises(ValueError, match="w13_weight was prepared as mxfp8_e4m3, the context runs nvfp4"):
            routed_experts(**prepared(fields), context=serving)
    with context_of(config()) as training:
        one = prepared(fields) | {"w2_weight": fields["w2_weight"]}
        with pytest.raises(TypeError, match="both weights must be prepared or both tensors"):
            routed_experts(**one, context=training)
        training.reset()
        trained = inputs(True)
        with pytest.raises(ValueError, match="must provide dgrad operands"):
            routed_experts(**prepared(trained, inference=True), context=training)
        training.reset()
        with torch.no_grad():  # without a backward any prepared weight will do
            assert routed_experts(**prepared(trained, inference=True), context=training).isfinite().all()
        never = prepared(fields)
        object.__setattr__(never["w2_weight"], "_filled", None)
        with pytest.raises(RuntimeError, match="it was never filled"):
            routed_experts(**never, context=training)
    with create_context(group=None, config=config(None), device="cpu", backend="reference") as bf16:
        with pytest.raises(ValueError, match="prepared weights require block-scaled execution"):
            routed_experts(**prepared(fields), context=bf16)


def test_prepared_weights_of_other_shapes_are_refused(context):
    fields = inputs()
    short = fields | {"w13_weight": fields["w13_weight"][:, :F].contiguous()}
    with pytest.raises(ValueError, match=r"w13_weight must be \[4, 192, 64\]"):
        routed_experts(**prepared(short), context=context)


@pytest.mark.parametrize("how", [MXFP8, NVFP4], ids=lambda how: how.format)
def test_inference_contexts_take_no_gradients(how):
    with context_of(config(how, **INFERENCE)) as context:
        with pytest.raises(RuntimeError, match="inference contexts do not support autograd"):
            routed_experts(**prepared(inputs(True), how, inference=True), context=context)


# Checkpoints, ops


def test_a_checkpoint_recomputes_the_same_bits(context):
    fields, again = inputs(True), inputs(True)
    want = grads(fields, context)
    out = checkpoint(lambda: routed_experts(**again, context=context), use_reentrant=False)
    out.float().square().sum().backward()
    found = [out.detach(), *(value.grad for value in again.values() if value.grad is not None)]
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))


# Without test_schema, which looks for writes by arithmetic that torch does not have for FP8.
UTILITIES = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def test_ops_mutate_nothing_and_return_nothing_of_their_arguments(context):
    for op in (torch.ops.dist_moe.block_scaled_forward, torch.ops.dist_moe.block_scaled_backward):
        schema = op.default._schema
        assert not schema.is_mutable
        assert all(value.alias_info is None for value in [*schema.arguments, *schema.returns])


def test_nothing_that_ops_return_lies_in_the_contexts_memory(context):
    with torch.no_grad():
        out, state = torch.ops.dist_moe.block_scaled_forward(*op_arguments(context, True))
        given = (*list(inputs().values())[1:], state, True, True, torch.float32, 0, context.name)
        grads = torch.ops.dist_moe.block_scaled_backward(torch.randn(T, D).bfloat16(), *given)
    places = {t.untyped_storage().data_ptr() for t in (out, *state, *grads) if t.numel()}
    assert len(places) > 5 and not memory_of(context) & places


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("ready", [False, True], ids=["dynamic", "prepared"])
def test_forward_op_passes_opcheck(save, ready):
    deep = config(max_moe_layers_per_activation_slot=64)  # opcheck runs forwards whose backward never comes
    with context_of(deep) as context:
        weights = prepared(inputs()) if ready else {}
        operands = prepared_operands(weights["w13_weight"], weights["w2_weight"]) if ready else ()
        op = torch.ops.dist_moe.block_scaled_forward.default
        utilities = UTILITIES[:2] if save and not ready else UTILITIES  # the last one compares outputs
        torch.library.opcheck(op, op_arguments(context, save, operands), test_utils=utilities)


@pytest.mark.parametrize("save", [False, True])
def test_ops_by_route_and_counting_pass_opcheck(save):
    deep = config(max_moe_layers_per_activation_slot=64, route_outputs=True)
    with context_of(deep) as context:
        op = torch.ops.dist_moe.block_scaled_forward.default
        arguments = (*op_arguments(context, save), True, 1.0)
        torch.library.opcheck(op, arguments, test_utils=UTILITIES[:2])
        if not save:
            return
        context.reset()
        with torch.no_grad():
            _, state = op(*arguments)
        state.pop()  # the clip statistics
        given = (*list(inputs().values())[1:], state, True, True, torch.float32, 0, context.name)
        backward = torch.ops.dist_moe.block_scaled_backward
        torch.library.opcheck(backward, (torch.randn(T, K, D).bfloat16(), *given), test_utils="test_faketensor")


def test_ops_with_a_norm_pass_opcheck():
    deep = config(max_moe_layers_per_activation_slot=64, route_outputs=True)
    norm = (torch.rand(D).bfloat16(), [1e-6, 1.0, 0.0, 0.0, 1.0])
    with context_of(deep) as context, torch.no_grad():
        arguments = (*op_arguments(context, True), False, 1.0, *norm)
        op = torch.ops.dist_moe.block_scaled_forward.default
        torch.library.opcheck(op, arguments, test_utils=UTILITIES[:2])
        context.reset()
        _, state = op(*arguments)
        state.pop()  # the clip statistics
        given = (*list(inputs().values())[1:], state, True, True, torch.float32, 0, context.name)
        backward = torch.ops.dist_moe.block_scaled_backward
        torch.library.opcheck(
            backward, (torch.randn(T, D).bfloat16(), *given, *norm, True), test_utils="test_faketensor"
        )


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)])
def test_backward_op_passes_opcheck(needs, context):
    with torch.no_grad():
        _, state = torch.ops.dist_moe.block_scaled_forward(*op_arguments(context, True))
    given = list(inputs().values())
    arguments = (torch.randn(T, D).bfloat16(), *given[1:], state, *needs, torch.float32, 0, context.name)
    torch.library.opcheck(torch.ops.dist_moe.block_scaled_backward, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("wanted", ["x_TD", "topk_scores_TK", "w13_weight", "w2_weight"])
def test_each_gradient_alone(wanted, context):
    want = inputs(True)
    grads(want, context)
    fields = inputs()
    fields[wanted].requires_grad_()
    grads(fields, context)
    assert torch.equal(fields[wanted].grad, want[wanted].grad)


def test_fakes_have_the_shapes_of_the_real_thing(context):
    op = torch.ops.dist_moe.block_scaled_forward
    with torch.no_grad():
        real = op(*op_arguments(context, True))
        context.reset()
        with FakeTensorMode() as mode:
            fields = [mode.from_tensor(value) for value in inputs().values()]
            fake = op(*fields, True, *context.saved.selected, context.name, [])
    for a, b in zip([real[0], *real[1]], [fake[0], *fake[1]], strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("how", [MXFP8, NVFP4], ids=lambda how: how.format)
def test_a_compiled_function_gives_the_eager_bits(how):
    with context_of(config(how, **INFERENCE)) as context, torch.no_grad():
        ready = prepared(inputs(), how, inference=True)

        def block(x_TD):
            return routed_experts(**ready | {"x_TD": 2 * x_TD}, context=context) + 1

        x_TD = inputs()["x_TD"]
        assert torch.equal(torch.compile(block, backend="aot_eager")(x_TD), block(x_TD))


def test_a_bf16_program_registers_no_op_of_the_formats():
    program = (
        "import torch, dist_moe\n"
        "c = dist_moe.create_context(group=None, config=dist_moe.Config(4, 32, 32, 1, 2, 1), device='cpu')\n"
        "assert not hasattr(torch.ops.dist_moe, 'block_scaled_forward')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

"""Options of one call that meet: what is behind the experts, where weight gradients go, weights in another form, and
counts. Each does in company what it does alone, to the bit."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dist_moe import ExecutionOptions, RMSNormPostprocess, create_context
from dist_moe.path_oracle import Case
from dist_moe.symm import World
from dist_moe.virtual import routed_experts as virtual_experts
from dist_moe.virtual import run_virtual

from .path_cases import expand_columns
from .wgrad_layer import BF16, FP32, NAMES, PRECISIONS, D, Layer, assert_equal, context_of, rounded_sum

SCALED = {name: block_scaled for name, (block_scaled, _) in PRECISIONS.items()}
EACH_PRECISION = pytest.mark.parametrize("precision", PRECISIONS)
POSTS = pytest.mark.parametrize("behind", ["norm", "observed", "callable"])


@pytest.fixture(autouse=True)
def _columns(request, monkeypatch):
    """As the precision of a test says."""
    expand_columns(monkeypatch, PRECISIONS[request.getfixturevalue("precision")][1])


def post_of(behind: str):
    """What is behind the experts, and the parameter of it."""
    weight = torch.linspace(0.5, 1.5, D).bfloat16().requires_grad_()
    if behind == "callable":
        return lambda rows_ND: rows_ND * weight, weight
    observers = {"observe_expert_output_fn": lambda rows: None} if behind == "observed" else {}
    return RMSNormPostprocess(1e-6, FP32, BF16, weight=weight, **observers), weight


def half(layer: Layer) -> Layer:
    with torch.no_grad():
        layer.w13 /= 2
        layer.w2 /= 2
    return layer


def results_of(layer: Layer, out, weight) -> list[torch.Tensor]:
    return [out.detach(), layer.x.grad, layer.scores.grad, weight.grad]


def alone(behind: str, precision: str) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Of the call with nothing else asked: its results, and its FP32 weight gradients."""
    post, weight = post_of(behind)
    with context_of(FP32, SCALED[precision], route_outputs=True) as context:
        layer = Layer(grad_dtype=FP32)
        out = layer.forward(context, ExecutionOptions(experts_output_postprocess=post))
        out.backward(layer.grad_TD)
    return results_of(layer, out, weight), layer.grads()


def counts(precision: str) -> torch.Tensor:
    stats = torch.zeros(3)
    with context_of(None, SCALED[precision]) as context, torch.no_grad():
        Layer().forward(context, ExecutionOptions(swiglu_clip_stats_out_3=stats, swiglu_clip_limit=1.0))
    assert 0 < stats[0] < stats[2]
    return stats


@EACH_PRECISION
@POSTS
@pytest.mark.parametrize("where", ["in place", "destination", "postprocess"])
@pytest.mark.parametrize("call", ["plain", "checkpoint"])
def test_each_does_in_company_what_it_does_alone(call, where, behind, precision):
    """With halved weights, which the call doubles."""
    (wanted, grads), stats_wanted = alone(behind, precision), counts(precision)
    layer, (post, weight), stats = half(Layer()), post_of(behind), torch.zeros(3)
    seen = {name: torch.full_like(grad, 7.0) for name, grad in zip(NAMES, grads, strict=True)}
    if where == "in place":
        previous = layer.seed_grads(BF16)
        asked, grads_wanted = {"inplace_wgrad_accum": True}, rounded_sum(previous, grads)
    elif where == "destination":
        asked, grads_wanted = {"wgrad_destination_fn": lambda name, *_: (seen[name], False)}, grads
    else:
        asked, grads_wanted = {"wgrad_postprocess_fn": lambda name, grad: -grad}, [-grad.bfloat16() for grad in grads]
    options = ExecutionOptions(
        experts_output_postprocess=post,
        weights_preprocess_fn=lambda w: w * 2,
        swiglu_clip_stats_out_3=stats,
        swiglu_clip_limit=1.0,
        **asked,
    )
    with context_of(None, SCALED[precision], route_outputs=True) as context:
        if call == "checkpoint":
            out = checkpoint(layer.forward, context, options, use_reentrant=False)
        else:
            out = layer.forward(context, options)
        out.backward(layer.grad_TD)
        context.check()
    assert_equal(results_of(layer, out, weight), wanted)
    assert torch.equal(stats, stats_wanted)
    if where == "destination":
        assert layer.grads() == (None, None)
        assert_equal([seen[name] for name in NAMES], grads_wanted)
    else:
        assert_equal(layer.grads(), grads_wanted)


@EACH_PRECISION
@POSTS
def test_evaluation(behind, precision):
    (wanted, _), (post, _) = alone(behind, precision), post_of(behind)
    layer, stats, made = half(Layer()), torch.ones(3), []

    def double(weight):
        made.append(weight)
        return weight * 2

    options = ExecutionOptions(
        experts_output_postprocess=post,
        weights_preprocess_fn=double,
        inplace_wgrad_accum=True,
        swiglu_clip_stats_out_3=stats,
        swiglu_clip_limit=1.0,
    )
    with context_of(None, SCALED[precision], route_outputs=True) as context, torch.no_grad():
        assert torch.equal(layer.forward(context, options), wanted[0])
    assert len(made) == 2 and torch.equal(stats, counts(precision)) and layer.grads() == (None, None)


@EACH_PRECISION
def test_a_split_backward_behind_a_norm_adds_in_place(precision):
    wanted, grads = alone("norm", precision)
    layer, (post, weight) = Layer(), post_of("norm")
    previous = layer.seed_grads(BF16)
    options = ExecutionOptions(experts_output_postprocess=post, inplace_wgrad_accum=True)
    with context_of(None, SCALED[precision], route_outputs=True) as context:
        out = layer.forward(context, options)
        out.backward(layer.grad_TD, inputs=[layer.x, layer.scores], retain_graph=True)
        assert_equal(layer.grads(), previous)
        assert weight.grad is None
        out.backward(layer.grad_TD, inputs=[layer.w13, layer.w2, weight])
    assert_equal(results_of(layer, out, weight), wanted)
    assert_equal(layer.grads(), rounded_sum(previous, grads))


@EACH_PRECISION
@POSTS
def test_virtual_ranks(behind, precision):
    """One options object for all ranks, de-duplicated but for the postprocess."""
    case = Case("two ranks", T=5, D=64, F=32, K=4, E=8)
    config = case.config(block_scaled=SCALED[precision], route_outputs=True, wgrad_dtype=FP32)
    inputs, (post, weight) = case.inputs(), post_of(behind)
    options = ExecutionOptions(experts_output_postprocess=post)
    wanted = run_virtual(case.W, config, inputs, backend="reference", options=options)
    weight_wanted, weight.grad = weight.grad, None
    options = ExecutionOptions(
        experts_output_postprocess=post, inplace_wgrad_accum=True, weights_preprocess_fn=lambda w: w * 2
    )
    for rank in inputs:
        for name in ("w13_L2FD", "w2_LDF"):
            leaf = torch.nn.Parameter(getattr(rank, name) / 2)
            leaf.grad_dtype, leaf.grad = None, torch.ones(leaf.shape)
            setattr(rank, name, leaf)
    with create_context(group=World.virtual(case.W, "cpu"), config=config, backend="reference") as context:
        outs = virtual_experts(inputs, context, options=options)
        torch.autograd.backward(outs, [rank.grad_out_TD for rank in inputs])
        context.check()
    assert torch.equal(weight.grad, weight_wanted)
    for out, rank, result in zip(outs, inputs, wanted, strict=True):
        assert torch.equal(out, result.out_TD)
        found = (rank.w13_L2FD.grad, rank.w2_LDF.grad)
        assert_equal(found, [1.0 + result.grad_w13_L2FD, 1.0 + result.grad_w2_LDF])


@pytest.mark.parametrize("needs_norm_weight", [True, False])
@EACH_PRECISION
def test_accumulating_ops_with_a_norm_pass_opcheck(precision, needs_norm_weight):
    layer, norm = Layer(), (torch.rand(D).bfloat16(), [1e-6, 1.0, 0.0, 0.0, 1.0])
    weights = (layer.w13.detach(), layer.w2.detach())
    tokens = (layer.ids, layer.scores.detach(), *weights)
    fields = {"block_scaled": SCALED[precision], "max_moe_layers_per_activation_slot": 64, "route_outputs": True}
    with context_of(**fields) as context:
        name, more = ("bf16", ()) if precision == "bf16" else ("block_scaled", ([],))
        # test_schema looks for writes by arithmetic that torch does not have for FP8
        for utility in ("test_schema", "test_faketensor")[precision != "bf16" :]:
            context.reset()
            forward = getattr(torch.ops.dist_moe, f"{name}_forward")
            saving = (True, *context.saved.selected, context.name)
            _, state = forward(layer.x.detach(), *tokens, *saving, *more, False, None, *norm)
            into = [torch.ones_like(w, dtype=FP32) for w in weights]
            arguments = (layer.grad_TD, *tokens, state, *into, True, False, 0, context.name, *norm, needs_norm_weight)
            op = getattr(torch.ops.dist_moe, f"{name}_backward_accumulate_").default
            torch.library.opcheck(op, arguments, test_utils=utility)

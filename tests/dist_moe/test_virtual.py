"""Virtual ranks are checked as real ones are."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from tests.path_cases import Case

from dist_moe import create_context, testing
from dist_moe.symm import World
from dist_moe.virtual import routed_experts

CASE = Case("virtual")


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    "changed, words",
    [
        (lambda r: {"x_TD": r.x_TD.repeat(40, 1)}, "320 tokens"),
        (lambda r: {"ids_TK": r.ids_TK[:, :1]}, r"topk_expert_ids_TK must be \[8, 2\]"),
        (lambda r: {"w13_L2FD": r.w13_L2FD[:1]}, r"w13_weight must be \[2, 192, 64\]"),
        (lambda r: {"x_TD": r.x_TD.float()}, "x_TD must be bfloat16"),
    ],
)
def test_a_bad_argument_of_one_rank_is_refused(changed, words, backend, device):
    inputs = [
        type(rank)(*(tensor.to(device if backend == "triton" else "cpu") for tensor in vars(rank).values()))
        for rank in CASE.inputs()
    ]
    inputs[1] = replace(inputs[1], **changed(inputs[1]))
    with pytest.raises((TypeError, ValueError), match=words):
        testing.run_virtual(2, CASE.config(), inputs, device=inputs[0].x_TD.device, backend=backend)


def test_a_gradient_of_some_ranks_only_is_refused():
    inputs = CASE.inputs()
    inputs[0] = replace(inputs[0], grad_out_TD=None)
    with pytest.raises(ValueError, match="some ranks only"):
        testing.run_virtual(2, CASE.config(), inputs, backend="reference")


def test_an_inference_context_takes_no_gradients():
    serve = CASE.config(inference=True, activation_slot_capacity_factor=None, num_activation_slots=0)
    with pytest.raises(RuntimeError, match="do not support autograd"):
        testing.run_virtual(2, serve, CASE.inputs(), backend="reference")


def test_a_weight_changed_before_backward_is_caught():
    with create_context(group=World.virtual(2), config=CASE.config(), backend="reference") as context:
        inputs = [replace(rank, w2_LDF=rank.w2_LDF.clone().requires_grad_()) for rank in CASE.inputs()]
        outs = routed_experts(inputs, context)
        with torch.no_grad():
            inputs[1].w2_LDF.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(outs, [rank.grad_out_TD for rank in inputs])


def test_flattened_weights_get_their_gradients_in_their_shape():
    inputs = CASE.inputs()
    flat = [replace(r, w13_L2FD=r.w13_L2FD.flatten(0, 1), w2_LDF=r.w2_LDF.flatten(0, 1)) for r in inputs]
    results, expected = (testing.run_virtual(2, CASE.config(), which, backend="reference") for which in (flat, inputs))
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result.grad_w13_L2FD, wanted.grad_w13_L2FD.flatten(0, 1))
        assert torch.equal(result.grad_w2_LDF, wanted.grad_w2_LDF.flatten(0, 1))


def test_what_a_forward_made_dies_with_its_outputs():
    """No cycle holds it until a garbage collection: memory stays flat, captures meet no node of another stream."""
    inputs = CASE.inputs()
    leaf = inputs[0].x_TD.requires_grad_()
    gc.collect()
    gc.disable()
    try:
        with create_context(group=World.virtual(2, "cpu"), config=CASE.config(), backend="reference") as context:
            outs = routed_experts(inputs, context)
            alive = [weakref.ref(out.grad_fn) for out in outs]
            torch.autograd.grad(outs, [leaf], [torch.ones_like(out) for out in outs])
            del outs
            assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()

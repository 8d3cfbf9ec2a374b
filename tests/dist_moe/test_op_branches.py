"""torch.library.opcheck of what a norm, a checkpoint and a compiled program make of the ops."""

import itertools

import pytest
import torch
from tests.transformer_block import D, config, operands

from dist_moe import BlockScaledConfig, create_context
from dist_moe.node import NO_SLOT, SELECTED

T = 9
DEPTH = 64  # opcheck runs forwards whose backward never comes
PRECISIONS = pytest.mark.parametrize("precision", [None, BlockScaledConfig()], ids=["bf16", "mxfp8"])
# Numbers of norm.norm_of: eps, gain_center, and whether rows are bf16, sums compensated, 1 / rms kept.
NORMS = {
    "rstd made again": [1e-6, 1.0, 0.0, 0.0, 0.0],
    "bf16": [1e-6, 1.0, 1.0, 0.0, 1.0],
    "bf16, rstd made again": [1e-6, 1.0, 1.0, 0.0, 0.0],
    "kahan": [1e-6, 0.0, 0.0, 1.0, 1.0],
    "kahan, rstd made again": [1e-6, 0.0, 0.0, 1.0, 0.0],
}


def context_of(precision):
    how = config(block_scaled=precision, route_outputs=True, max_moe_layers_per_activation_slot=DEPTH)
    return create_context(group=None, config=how, device="cpu", backend="reference")


def ops_for(precision) -> tuple:
    """Forward, backward, accumulating backward, and what else the forward takes: that no weight is prepared."""
    name, more = ("bf16", ()) if precision is None else ("block_scaled", ([],))
    kinds = ("forward", "backward", "backward_accumulate_")
    return *(getattr(torch.ops.dist_moe, f"{name}_{kind}").default for kind in kinds), more


def utilities_for(precision) -> tuple[str, ...]:
    """test_schema looks for writes by arithmetic that torch does not have for FP8."""
    return ("test_schema", "test_faketensor") if precision is None else ("test_faketensor",)


def norm_arguments(numbers: list[float]) -> tuple[torch.Tensor | None, list[float]]:
    has_weight = not numbers[3]  # compensated sums exclude one
    return torch.linspace(-0.5, 0.5, D).bfloat16() if has_weight else None, numbers


def check_backwards(precision, context, slot: int, norm=(None, None)):
    """Both backward ops, each after a forward of its own, which it uses up."""
    forward, backward, accumulate, more = ops_for(precision)
    x, *rest = operands(T)[:5]
    for utility, op in itertools.product(utilities_for(precision), (backward, accumulate)):
        context.reset()
        with torch.no_grad():
            _, state = forward(x, *rest, True, slot, DEPTH, context.name, *more, False, None, *norm)
        into = [torch.ones_like(w, dtype=torch.float32) for w in rest[2:]]
        how = (True, True, torch.float32) if op is backward else (*into, True, False)
        given = (torch.ones_like(x), *rest, state, *how, slot, context.name, *norm, norm[0] is not None)
        torch.library.opcheck(op, given, test_utils=utility)
        assert not context.ranks[0].slot_layers_N.any()


@PRECISIONS
@pytest.mark.parametrize("numbers", NORMS.values(), ids=NORMS)
def test_norms(numbers, precision):
    norm = norm_arguments(numbers)
    with context_of(precision) as context:
        forward, *_, more = ops_for(precision)
        for save in (False, True):
            given = (*operands(T)[:5], save, 0, DEPTH, context.name, *more, False, None, *norm)
            torch.library.opcheck(forward, given, test_utils=("test_schema", "test_faketensor"))
        check_backwards(precision, context, 0, norm)


@PRECISIONS
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("slot", [NO_SLOT, SELECTED], ids=["no slot", "selected"])
def test_what_stands_for_a_slot(slot, trains, precision):
    with context_of(precision) as context:
        forward, *_, more = ops_for(precision)
        x, *rest = operands(T)[:5]
        given = (x.requires_grad_(trains), *rest, True, slot, DEPTH, context.name, *more)
        torch.library.opcheck(forward, given, test_utils=("test_autograd_registration", "test_faketensor"))
        assert bool(context.ranks[0].slot_layers_N.any()) == (slot == SELECTED)
        if slot == SELECTED:
            check_backwards(precision, context, slot)

"""Ranks that use their slots differently: a backward would pull what its peers did not publish, so it is a fault."""

import pytest
import torch

import dist_moe

from .fault_cases import CASE, Step, assert_error, error_of, join
from .path_cases import assert_results_close, dense
from .rank_calls import on_ranks, run_rank

TWO = CASE[2]


def _swapped_backwards(rank, context):
    """Two forwards in two slots; rank 1 runs their backwards in the other order."""
    steps, outs = [Step(rank, context, TWO) for _ in range(2)], []
    for slot, step in enumerate(steps):
        context.select_activation_slot(slot, 1)
        outs.append(step.forward())
    for which in (1, 0) if rank else (0, 1):
        steps[which].backward(outs[which])
        context.check()


def _depths_that_differ(rank, context):
    """Rank 0 says that the slot will hold one layer, and keeps its rows; rank 1 says four, and keeps x."""
    context.select_activation_slot(0, 4 if rank else 1)
    step = Step(rank, context, TWO)
    out = step.forward()
    with torch.no_grad():
        Step(rank, context, TWO).forward()  # another call overwrites the published x
    step.backward(out)
    context.check()


def _slots_that_differ(rank, context):
    """The second layer goes to a full slot on rank 0 and to an empty one on rank 1."""
    context.select_activation_slot(0, 2)
    Step(rank, context, TWO).forward()
    context.select_activation_slot(rank, 2)
    step = Step(rank, context, TWO)
    out = step.forward()
    step.backward(out)
    context.check()


CALLS = {
    "swapped backwards": (_swapped_backwards, "activation slot of a backward of rank 0 is 0, of rank 1 1"),
    "depths that differ": (_depths_that_differ, "of rank 0 is rows of x and h1 kept, of rank 1 x and h1 kept"),
    "slots that differ": (_slots_that_differ, "rank 0 .* rank 1"),
}


def _run(rank, group, name, backend):
    # Room for the rows of one layer and the x of two others.
    full = TWO.config(activation_slot_capacity_factor=1.0)
    slot_bytes = dist_moe.plan_memory(full, 2).activation_slot_bytes + 2 * 2 * TWO.T * TWO.D
    config = TWO.config(
        max_moe_layers_per_activation_slot=4,
        num_activation_slots=2,
        activation_slot_capacity_factor=None,
        activation_slot_bytes=slot_bytes,
        device_scratch_capacity_factor=1.0,
    )
    with join(group, config, backend=backend) as context:
        error = error_of(CALLS[name][0], rank, context)
        check = error_of(context.check)
        context.reset()
        return error, check, run_rank(TWO.inputs()[rank], context)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_ranks_that_disagree_about_a_backward_all_fail(name, backend):
    errors, checks, after = zip(*on_ranks(2, _run, name, backend), strict=True)
    for error in (*errors, *checks):
        assert_error(error, dist_moe.RankMismatchError, CALLS[name][1])
    assert_results_close(list(after), dense(TWO, TWO.inputs()))

"""context.memory_stats() against counts made from the routing itself."""

import os
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dist_moe import RoutingOverflowError, SlotError, create_context, plan_memory, routed_experts
from dist_moe.plan_report import Report
from dist_moe.planner import saved_full_bytes, saved_h1_bytes, saved_input_bytes, scratch_bytes
from dist_moe.symm import World
from dist_moe.virtual import RankInputs
from dist_moe.virtual import routed_experts as virtual_experts

from .path_cases import Case
from .rank_calls import forward, leaves_of, on_ranks

CASE = Case("counted", W=2, T=8, K=2, E=8, routing="zipf(1.0)")
L = 4
DEVICE = {"reference": "cpu", "triton": "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"}


@pytest.fixture(params=["reference", "triton"])
def backend(request) -> str:
    return request.param


def rows_of(cases: list[Case], rank: int) -> list[torch.Tensor]:
    """By call, the rows of every expert of a rank: an expert that a token names twice gets one."""
    calls = []
    for case in cases:
        count = torch.zeros(case.E, dtype=torch.int64)
        for inputs in case.inputs():
            for ids in inputs.ids_TK.tolist():
                count[sorted({e for e in ids if e >= 0})] += 1
        calls.append(count[rank * L : (rank + 1) * L])
    return calls


def there(case: Case, device: str) -> list[RankInputs]:
    return [RankInputs(*(tensor.to(device) for tensor in vars(rank).values())) for rank in case.inputs()]


def open_context(backend: str, **changes):
    return create_context(
        group=World.virtual(2, DEVICE[backend]), config=CASE.config(**changes), device=DEVICE[backend], backend=backend
    )


@pytest.mark.parametrize("routing", ["zipf(1.0)", "duplicates", "dropped(0.5)", "one_rank"])
def test_counts_are_those_of_the_routing(routing, backend):
    cases = [replace(CASE, routing=routing, seed=seed) for seed in range(2)]
    with open_context(backend) as context, torch.no_grad():
        for case in cases:
            virtual_experts(there(case, DEVICE[backend]), context)
        for rank in range(2):
            found, calls = context.memory_stats(rank), rows_of(cases, rank)
            assert found.expert_rows == tuple(sum(calls).tolist())
            rows = [int(call.sum()) for call in calls]
            assert (found.calls, found.rows_max, found.rows_mean) == (2, max(rows), sum(rows) / 2)
            least = max(rows) * scratch_bytes(context.config, 0)  # a row of each region
            assert least <= found.scratch_peak_bytes <= scratch_bytes(context.config, max(rows))
            assert scratch_bytes(context.config, max(rows)) <= context.memory_plan.device_scratch_bytes
            assert found.host_overflow_peak_bytes == 0 and found.slot_peak_bytes == (0,)
            assert sum(found.layers_kept.values()) == found.layers_recomputed == 0
        assert context.memory_stats() == context.memory_stats(0)
        context.reset()
        assert context.memory_stats().calls == 2
        context.reset_memory_stats()
        assert context.memory_stats().calls == 0 and not any(context.memory_stats().expert_rows)


def test_slots_and_what_they_kept(backend):
    """Three layers of balanced rows in a slot that holds rows once and x and h1 twice."""
    case = replace(CASE, routing="balanced")
    config, balanced = case.config(), case.T * case.K
    rows, x_h1 = saved_full_bytes(config, balanced), saved_h1_bytes(config, balanced)
    sizes = {"activation_slot_bytes": rows + 2 * x_h1, "activation_slot_capacity_factor": None}
    with open_context(backend, max_moe_layers_per_activation_slot=3, num_activation_slots=2, **sizes) as context:
        inputs = there(case, DEVICE[backend])
        inputs[0].x_TD.requires_grad_()
        context.select_activation_slot(1, 3)
        outs = [virtual_experts(inputs, context) for _ in range(3)]
        for out in reversed(outs):
            torch.autograd.backward(out, [rank.grad_out_TD for rank in inputs])
        found = context.memory_stats()
        assert found.layers_kept == {"x": 0, "x and h1": 2, "rows of x and h1": 1} and found.layers_recomputed == 2
        assert found.slot_peak_bytes == (0, rows + 2 * x_h1) and saved_input_bytes(config) < x_h1
        x_h2_h3 = 2 * case.D + 2 * case.F + 2 * case.D  # bytes a row of what is in scratch while h1 is not
        assert balanced * x_h2_h3 <= found.scratch_peak_bytes <= (balanced + 1) * x_h2_h3


def _checkpointed(rank, group, case):
    inputs = case.inputs()[rank]
    with create_context(group=group, config=case.config(), device="cpu", backend="reference") as context:
        leaves = leaves_of(inputs, context.config)

        def layer(x_TD):
            return forward(leaves | {"x_TD": x_TD}, inputs.ids_TK, context)

        checkpoint(layer, leaves["x_TD"], use_reentrant=False).backward(inputs.grad_out_TD)
        context.check()
        return context.memory_stats()


def test_a_checkpointed_layer_counts_once():
    for rank, found in enumerate(on_ranks(2, _checkpointed, CASE)):
        (rows,) = rows_of([CASE], rank)
        assert found.calls == 1 and found.expert_rows == tuple(rows.tolist())
        assert sum(found.layers_kept.values()) == 1


def test_a_call_that_ends_in_a_fault_is_not_counted(backend):
    with open_context(backend, device_scratch_capacity_factor=0.5) as context, torch.no_grad():
        virtual_experts(there(replace(CASE, routing="one_rank"), DEVICE[backend]), context)
        with pytest.raises(RoutingOverflowError):
            context.check()
        assert context.memory_stats().calls == 0


def test_ranks_that_live_elsewhere_are_named():
    with open_context("reference") as context, pytest.raises(ValueError, match=r"rank 5 .*\[0, 1\]"):
        context.memory_stats(5)


@pytest.mark.gpu
def test_replays_are_counted():
    case = replace(CASE, W=1)
    with create_context(group=None, config=case.config()) as context, torch.no_grad():
        (inputs,) = there(case, "cuda")
        arguments = (inputs.x_TD, inputs.ids_TK, inputs.scores_TK, inputs.w13_L2FD, inputs.w2_LDF, context)
        routed_experts(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            routed_experts(*arguments)
            with pytest.raises(RuntimeError, match="capture"):
                context.memory_stats()
        for _ in range(3):
            graph.replay()
        assert context.memory_stats().calls == 4


def test_a_slot_that_grows_beyond_its_room_is_a_fault(backend):
    """A layer saved as the only one of its slot, then one more: no byte of another slot is touched."""
    case = replace(CASE, routing="balanced")
    rows = saved_full_bytes(case.config(), case.T * case.K)
    sizes = {"activation_slot_bytes": rows, "activation_slot_capacity_factor": None}
    with open_context(backend, max_moe_layers_per_activation_slot=2, num_activation_slots=2, **sizes) as context:
        inputs = there(case, DEVICE[backend])
        inputs[0].x_TD.requires_grad_()
        for slot, layers in ((1, 1), (0, 1), (0, 2)):
            context.select_activation_slot(slot, layers)
            virtual_experts(inputs, context)
        with pytest.raises(SlotError, match=r"slot 0 has no room for layer 1 of 2"):
            context.check()


@pytest.mark.parametrize("factor", [0.3, 0.5, 1.0, 2.0])
def test_the_useful_slot_keeps_all_rows_that_fit(factor):
    config = CASE.config(max_moe_layers_per_activation_slot=3, device_scratch_capacity_factor=factor)
    plan = plan_memory(config, 2)
    useful = {"activation_slot_bytes": plan.maximum_useful_activation_slot_bytes}
    config = replace(config, activation_slot_capacity_factor=None, **useful)
    report = Report(config, 2)
    for rows in (0, 1, plan.total_scratch_capacity_rows // 2, plan.total_scratch_capacity_rows):
        assert report.layers_kept(rows) == {"x": 0, "x and h1": 0, "rows of x and h1": 3}

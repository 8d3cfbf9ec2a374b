"""Faults of running calls on ranks as processes: who gets which exception, how soon, and that reset() repairs it."""

import os
import time
from dataclasses import dataclass

import pytest
import torch

import dist_moe
from dist_moe.path_oracle import FORWARD_ONLY, forward_only, prepared
from dist_moe.virtual import RankResults

from .fault_cases import (
    CASE,
    DEADLINE_S,
    FAULTS,
    LATE,
    PATIENT_S,
    REFUSALS,
    SHARED,
    Step,
    assert_error,
    error_of,
    is_nan,
    join,
    overflow,
)
from .path_cases import Case, assert_results_close, dense
from .process_group import Died, ranks
from .rank_calls import NAMES, on_ranks, run_rank


@dataclass
class Report:
    raised: Exception | None  # by the faulty step itself
    returned: list  # what it returned where it did not raise: is each tensor NaN throughout?
    check: Exception | None  # by context.check() after it, twice
    check_again: Exception | None
    next_call: Exception | None
    seconds: float  # of the faulty step and the check
    after: RankResults | None  # of a good step after reset()


def _run_fault(rank, group, case, backend, fault, timeout_s):
    config = case.config(device_scratch_capacity_factor=1.0, max_moe_layers_per_activation_slot=2)
    with join(group, config, timeout_s, backend) as context:
        run_rank(case.inputs()[rank], context)  # so that generations are not those of a new context
        ops, returned = vars(context.path.ops).copy(), []
        start = time.monotonic()

        def faulty_step():
            returned.extend(FAULTS[fault](rank, context, Step(rank, context, case)) or [])

        raised = error_of(faulty_step)
        check = error_of(context.check)
        seconds = time.monotonic() - start
        vars(context.path.ops).update(ops)
        next_call = error_of(Step(rank, context, case).forward)
        again = error_of(context.check)
        context.reset()
        after = [run_rank(case.inputs()[rank], context) for _ in range(2)][-1]
        return Report(raised, [is_nan(value) for value in returned], check, again, next_call, seconds, after)


def run_fault(W, backend, fault, timeout_s=PATIENT_S) -> list[Report]:
    reports = on_ranks(W, _run_fault, CASE[W], backend, fault, timeout_s)
    assert_results_close([report.after for report in reports], dense(CASE[W], CASE[W].inputs()))
    return reports


# ---- faults that all ranks find together

ON_KERNELS = ("overflow", "invalid id", "backward meets forward")


@pytest.mark.parametrize(
    "W, backend, fault",
    [(W, "reference", fault) for W in (2, 3) for fault in SHARED] + [(2, "triton", fault) for fault in ON_KERNELS],
)
def test_a_fault_of_the_call_is_the_same_on_all_ranks(W, backend, fault):
    _, kind, words = SHARED[fault]
    words = words.format(all=W * CASE[W].T * 2, room=CASE[W].T * 2)
    for report in run_fault(W, backend, fault):
        assert report.raised is None and report.returned and all(report.returned)
        for error in (report.check, report.next_call, report.check_again):
            assert_error(error, kind, words)


def _overflow_attributes(rank, group, case):
    config = case.config(device_scratch_capacity_factor=1.0)
    with join(group, config) as context:
        step = Step(rank, context, case)
        accumulators = [torch.full_like(step.leaves[name], 3.0, dtype=step.leaves[name].grad_dtype) for name in NAMES]
        for name, accumulator in zip(NAMES, accumulators, strict=True):
            step.leaves[name].grad = accumulator
        out = overflow(rank, context, step)[0]
        by_backward = error_of(step.backward, out)
        untouched = all(
            grad is accumulator and bool((grad == 3.0).all())
            for grad, accumulator in zip(step.grads(), accumulators, strict=True)
        )
        error = error_of(context.check)
        return by_backward, untouched, error, (error.rank, error.needed_rows, error.available_rows, error.needed_factor)


@pytest.mark.parametrize("W", [2, 3])
def test_backward_raises_the_overflow_of_its_forward_and_leaves_the_accumulators(W):
    rows = CASE[W].T * 2
    for by_backward, untouched, error, attributes in on_ranks(W, _overflow_attributes, CASE[W]):
        assert untouched
        assert attributes == (0, W * rows, rows, W)
        assert_error(by_backward, dist_moe.RoutingOverflowError, f"factor of {W} would have fitted")
        # It came here by pickle, as it would from a worker of any launcher.
        assert (error.rank, error.needed_rows, error.available_rows, error.needed_factor) == attributes


def _all_to_expert_0(rank, group, case, block_scaled):
    """A forward at half of the balanced rows: of training in BF16, in MXFP8 of inference with prepared weights."""
    inference = FORWARD_ONLY if block_scaled else {}
    config = case.config(block_scaled=block_scaled, device_scratch_capacity_factor=0.5, **inference)
    inputs = forward_only(case.inputs())
    if block_scaled:
        inputs = prepared(inputs, config, inference=True)
    own = inputs[rank]
    ids_TK = torch.where(torch.arange(case.K) > 0, -1, torch.zeros_like(own.ids_TK))
    with join(group, config) as context:
        out = dist_moe.routed_experts(own.x_TD, ids_TK, own.scores_TK, own.w13_L2FD, own.w2_LDF, context)
        return is_nan(out), error_of(context.check), context.memory_plan.total_scratch_capacity_rows


@pytest.mark.parametrize(
    "case, block_scaled",
    [
        (Case("bf16", W=4, T=8, D=128, F=128, K=1, E=4), None),
        (Case("mxfp8", W=4, T=512, D=256, F=256, K=1, E=4), dist_moe.BlockScaledConfig()),
    ],
    ids=str,
)
def test_an_overflow_says_what_a_log_is_searched_for(case, block_scaled):
    """The words of dist-moe 0.1.0, whose process ended with them, on every rank."""
    for broken, error, capacity in ranks(4).run(_all_to_expert_0, case, block_scaled):
        assert broken and isinstance(error, dist_moe.RoutingOverflowError)
        needed = case.W * case.T
        assert (error.rank, error.needed_rows, error.available_rows) == (0, needed, capacity) and capacity < needed
        assert "DistMoE scratch capacity exceeded" in str(error)
        assert f"required_receive_rows: {needed}" in str(error)
        assert f"total_scratch_capacity_rows: {capacity}" in str(error)


# ---- faults of one rank

REFUSED_ON_KERNELS = ("wrong dtype", "combine breaks")


@pytest.mark.parametrize(
    "W, backend, fault",
    [(W, "reference", fault) for W in (2, 3) for fault in REFUSALS]
    + [(2, "triton", fault) for fault in REFUSED_ON_KERNELS],
)
def test_a_rank_that_raises_in_a_call_is_named_with_its_cause_on_the_others(W, backend, fault):
    _, kind, words, stage = REFUSALS[fault]
    for rank, report in enumerate(run_fault(W, backend, fault)):
        assert report.seconds < PATIENT_S / 2
        if rank == 1:
            assert_error(report.raised, kind, words)
            this_one = rf"rank 1 \(this one\) refused an earlier call: {kind.__name__}: .*{words}"
            for error in (report.check, report.next_call, report.check_again):
                assert_error(error, dist_moe.PeerAbortedError, this_one)
        else:
            assert report.raised is None and report.returned and all(report.returned)
            for error in (report.check, report.next_call, report.check_again):
                cause = rf"rank 1 gave up this call before '{stage}': {kind.__name__}: .*{words}"
                assert_error(error, dist_moe.PeerAbortedError, cause)


@pytest.mark.parametrize("W", [2, 3])
def test_a_rank_that_raises_at_the_end_of_a_call_is_named_in_the_next(W):
    """Its peers have all they need of this call, whose results are right."""
    for rank, report in enumerate(run_fault(W, "reference", "reduce breaks")):
        if rank == 1:
            assert_error(report.raised, MemoryError, "no room in reduce")
        else:
            assert report.raised is report.check is report.next_call is None and report.returned == [False]
            cause = "rank 1 gave up this call before 'published': MemoryError: no room in reduce"
            assert_error(report.check_again, dist_moe.PeerAbortedError, cause)


def _leaves_the_block(rank, group, case):
    with join(group, case.config()) as context:
        step = Step(rank, context, case)
        out = step.forward()
        if rank == 1:
            raise KeyError("no such sample")
        step.backward(out)
        context.check()


def _error_of_rank(rank, group, fn, *args):
    return error_of(fn, rank, group, *args)


@pytest.mark.parametrize("W", [2, 3])
def test_an_exception_between_calls_that_leaves_the_with_block_is_told(W):
    for rank, error in enumerate(on_ranks(W, _error_of_rank, _leaves_the_block, CASE[W])):
        if rank == 1:
            assert_error(error, KeyError, "no such sample")
        else:
            assert_error(error, dist_moe.PeerAbortedError, "rank 1 gave up .*KeyError: 'no such sample'")


# ---- ranks that are late or dead


@pytest.mark.parametrize(
    "W, backend, fault", [(3, "reference", "slow"), (3, "reference", "slow in the call"), (2, "triton", "slow")]
)
def test_a_peer_that_is_slow_but_in_time_is_no_fault(W, backend, fault):
    for report in run_fault(W, backend, fault, 2 * DEADLINE_S[backend]):
        assert report.raised is report.check is report.next_call is None
        assert not any(report.returned)


@pytest.mark.parametrize(
    "W, backend, fault, stage",
    [(W, "reference", *late) for W in (2, 3) for late in (("late", "published"), ("late in the call", "combined"))]
    + [(2, "triton", "late", "published")],
)
def test_a_peer_that_is_late_is_named_and_hears_of_it(W, backend, fault, stage):
    deadline_s = DEADLINE_S[backend]
    for rank, report in enumerate(run_fault(W, backend, fault, deadline_s)):
        asleep_s = LATE * deadline_s if rank == 1 else deadline_s
        assert report.seconds < asleep_s + deadline_s
        if rank == 1:  # late for x it hears in this very call, late with its rows in the next
            error, heard = (report.raised, "combined") if stage == "published" else (report.check, "published")
            words = f"rank [02] gave up this call before '{heard}': PeerTimeoutError"
            assert_error(error, dist_moe.PeerAbortedError, words)
        else:
            words = rf"rank 1 did not signal '{stage}' in time \(generation 3, epoch 0\)"
            for error in (report.raised, report.check, report.next_call):
                assert_error(error, dist_moe.PeerTimeoutError, words)


def _dies(rank, group, case, backend, timeout_s, where):
    with join(group, case.config(), timeout_s, backend) as context:
        run_rank(case.inputs()[rank], context)
        if rank == 1 and where is None:
            os._exit(3)
        if rank == 1:
            setattr(context.path.ops, where, lambda *args, **options: os._exit(3))
        step = Step(rank, context, case)
        times, errors = [], []
        for act in (lambda: [step.forward(), context.check()], step.forward, context.reset):
            start = time.monotonic()
            errors.append(error_of(act))
            times.append(time.monotonic() - start)
        return errors, times


@pytest.mark.parametrize(
    "W, backend, where, stage",
    [
        (2, "reference", None, "published"),
        (3, "reference", None, "published"),
        (3, "reference", "combine", "combined"),
        (2, "triton", None, "published"),
    ],
)
def test_a_dead_peer_is_named_within_twice_the_deadline(W, backend, where, stage):
    deadline_s = DEADLINE_S[backend]
    results = on_ranks(W, _dies, CASE[W], backend, deadline_s, where, may_die=[1])
    assert results.pop(1) == Died(3)
    for (call, next_call, reset), times in results:
        assert max(times) < 2 * deadline_s
        for error in (call, next_call):
            words = rf"rank 1 did not signal '{stage}' in time \(generation 3, epoch 0\)"
            assert_error(error, dist_moe.PeerTimeoutError, words)
        assert_error(reset, dist_moe.PeerTimeoutError, r"rank 1 did not signal 'reset' in time \(generation 1")

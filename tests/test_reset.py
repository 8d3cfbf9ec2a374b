"""reset(): what it repairs, when it waits for whom, and the misuses of slots after which it is needed."""

import time

import pytest
import torch

import dist_moe

from .fault_cases import (
    CASE,
    FAULTS,
    PATIENT_S,
    Step,
    assert_error,
    bad_options,
    break_op,
    error_of,
    invalid_id,
    is_nan,
    join,
    too_many_tokens,
    wrong_dtype,
    wrong_layout,
)
from .path_cases import Case, assert_results_close, dense
from .rank_calls import on_ranks, run_rank


def _reset_alone(rank, group, case):
    """Without a fault: rank 0 resets many times, nobody else does."""
    with join(group, case.config()) as context:
        run_rank(case.inputs()[rank], context)
        start = time.monotonic()
        if rank == 0:
            for _ in range(20):
                context.reset()
        seconds = time.monotonic() - start
        return seconds, run_rank(case.inputs()[rank], context)


@pytest.mark.parametrize("W", [2, 3])
def test_reset_without_a_fault_waits_for_nobody(W):
    seconds, results = zip(*on_ranks(W, _reset_alone, CASE[W]), strict=True)
    assert max(seconds) < PATIENT_S / 4
    assert_results_close(results, dense(CASE[W], CASE[W].inputs()))


def _late_to_reset(rank, group, case, deadline_s):
    with join(group, case.config(), deadline_s) as context:
        invalid_id(rank, context, Step(rank, context, case))
        if rank == 1:
            time.sleep(1.5 * deadline_s)
        errors = [error_of(context.reset)]
        if rank != 1:
            errors.append(error_of(context.reset))
        results = [run_rank(case.inputs()[rank], context)]
        # And once more: all count the same epochs.
        invalid_id(rank, context, Step(rank, context, case))
        errors += [error_of(context.check), error_of(context.reset)]
        return errors, [*results, run_rank(case.inputs()[rank], context)]


def test_a_rank_that_is_late_to_reset_is_met_by_the_next_one():
    errors, results = zip(*on_ranks(3, _late_to_reset, CASE[3], 1.0), strict=True)
    for rank, (first, *others) in enumerate(errors):
        if rank == 1:
            assert first is None
        else:
            assert_error(first, dist_moe.PeerTimeoutError, "rank 1 did not signal 'reset'")
            assert others.pop(0) is None
        assert_error(others[0], dist_moe.InvalidExpertIdError, "rank 1")
        assert others[1] is None
    for step in range(2):
        assert_results_close([rank[step] for rank in results], dense(CASE[3], CASE[3].inputs()))


def _many_resets(rank, group, case):
    """Another fault each time; flags and texts of an epoch must not reach into the next."""
    texts = []
    config = case.config(device_scratch_capacity_factor=1.0, max_moe_layers_per_activation_slot=2)
    with join(group, config) as context:
        ops = vars(context.path.ops).copy()
        for fault in ("wrong dtype", "invalid id", "combine breaks", "overflow", "too many tokens", "reduce breaks"):
            error_of(FAULTS[fault], rank, context, Step(rank, context, case))
            vars(context.path.ops).update(ops)
            if (error := error_of(context.check)) is None:  # in the next call, then
                Step(rank, context, case).forward()
                error = error_of(context.check)
            texts.append(repr(error))
            context.reset()
            context.check()
        return texts, run_rank(case.inputs()[rank], context)


def test_fault_after_fault():
    texts, results = zip(*on_ranks(3, _many_resets, CASE[3]), strict=True)
    assert_results_close(results, dense(CASE[3], CASE[3].inputs()))
    words = ("must be bfloat16", "token 2, k 1", "no room in combine", "rank 0 needs", "5 tokens", "no room in reduce")
    for rank in texts:
        assert all(word in text for word, text in zip(words, rank, strict=True)), rank


def _slot_errors(rank, group, case, depth):
    config = case.config(max_moe_layers_per_activation_slot=depth)
    with join(group, config) as context:

        def before_reset(step):
            out = step.forward()
            context.reset()
            step.backward(out)

        def twice(step):
            out = step.forward()
            step.backward(out, retain_graph=True)
            step.backward(out)

        def wrong_order(step):
            first, _ = step.forward(), step.forward()
            step.backward(first)

        def too_many(step):
            for _ in range(depth + 1):
                step.forward()

        errors, results = [], []
        for misuse in (before_reset, twice, wrong_order, too_many):
            errors.append(error_of(misuse, Step(rank, context, case)))
            context.reset()
            results.append(run_rank(case.inputs()[rank], context))
        return errors, results


@pytest.mark.parametrize("W", [1, 2, 3])
def test_misused_slots(W):
    case = CASE.get(W, Case("one rank", W=1, T=4, D=32, F=32, routing="balanced"))
    for errors, _ in (outcomes := on_ranks(W, _slot_errors, case, 2)):
        for error, words in zip(
            errors,
            (
                r"slot 0 is gone: .*the context was reset",
                r"slot 0 is gone: it had its backward.*second backward",
                r"slot 0 must run in the reverse order",
                r"slot 0 already holds 2 layers: .*context\.reset\(\)",
            ),
            strict=True,
        ):
            assert_error(error, dist_moe.SlotError, words)
    for step in range(4):
        assert_results_close([results[step] for _, results in outcomes], dense(case, case.inputs()))


# ---- one rank


def test_one_rank_needs_no_reset_after_a_refused_call():
    case = Case("one rank", W=1, T=4, D=32, F=32)
    with join(None, case.config()) as context:
        for fault in (wrong_dtype, too_many_tokens, wrong_layout, bad_options):
            assert error_of(fault, 1, context, Step(0, context, case)) is not None
            context.check()
            assert_results_close([run_rank(case.inputs()[0], context)], dense(case, case.inputs()))
        break_op(1, context, "combine")
        with torch.no_grad():
            assert_error(error_of(Step(0, context, case).forward), MemoryError, "combine")
        context.path.ops.combine = dist_moe.reference.combine
        assert_results_close([run_rank(case.inputs()[0], context)], dense(case, case.inputs()))


def test_one_rank_overflows_and_recovers():
    case = Case("one rank", W=1, T=4, D=32, F=32)
    with join(None, case.config()) as context:
        step = Step(0, context, case)
        ids = step.inputs.ids_TK.clone()
        ids[0, 0] = 4
        assert is_nan(step.forward(ids_TK=ids))
        with pytest.raises(dist_moe.InvalidExpertIdError, match=r"rank 0 .* token 0, k 0"):
            context.check()
        context.reset()
        assert_results_close([run_rank(case.inputs()[0], context)], dense(case, case.inputs()))


def _before_meeting(rank, group, case):
    """Rank 1 refuses a call that the others have not come to; then the job tells all of them to reset."""
    with join(group, case.config(), 20.0) as context:
        run_rank(case.inputs()[rank], context)
        error = error_of(Step(rank, context, case).forward, x_TD=torch.zeros(1)) if rank == 1 else None
        torch.distributed.barrier(group)
        start = time.monotonic()
        context.reset(collective=True)
        return error, time.monotonic() - start, run_rank(case.inputs()[rank], context)


def test_a_refusal_that_the_others_have_not_met_is_reset_by_all():
    errors, seconds, after = zip(*on_ranks(3, _before_meeting, CASE[3]), strict=True)
    assert [type(error) for error in errors] == [type(None), ValueError, type(None)] and max(seconds) < 10.0
    assert_results_close(list(after), dense(CASE[3], CASE[3].inputs()))


def _odd_hooks(rank, group, case):
    """What fails in autograd around the op, after the forward ran, reaches the peers too."""

    def breaks(tensor):
        raise MemoryError("no room to offload")

    with join(group, case.config(), 20.0) as context:
        step = Step(rank, context, case)
        start = time.monotonic()
        if rank == 1:
            with torch.autograd.graph.saved_tensors_hooks(breaks, lambda tensor: tensor):
                error = error_of(step.forward)
        else:
            out = step.forward()
            error = error_of(step.backward, out) or error_of(context.check)
        seconds = time.monotonic() - start
        context.reset()
        return error, seconds, run_rank(case.inputs()[rank], context)


def test_a_failure_in_autograd_after_the_forward_is_told():
    (of_0, of_1), seconds, after = zip(*on_ranks(2, _odd_hooks, CASE[2]), strict=True)
    assert type(of_1) is MemoryError and type(of_0) is dist_moe.PeerAbortedError and "no room" in str(of_0)
    assert max(seconds) < 10.0
    assert_results_close(list(after), dense(CASE[2], CASE[2].inputs()))

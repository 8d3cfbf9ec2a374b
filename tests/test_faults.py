"""Faults of running calls on ranks as processes: who gets which exception, how soon, and that reset() repairs it.

A fault is a function `fault(rank, context, step)` that every rank runs in place of a training step; it returns what
the step gave, or raises. `_run_fault` runs it between good steps and reports; the tables say what must be in a report.
"""

import gc
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import dist_moe
from dist_moe import context as context_module
from dist_moe import create_context, routed_experts
from dist_moe.virtual import RankResults

from .path_cases import Case, assert_results_close, dense
from .process_group import Died
from .rank_calls import NAMES, forward, leaves_of, on_ranks, run_rank

PATIENT_S = 60.0  # deadline of a context whose peers all come
DEADLINE_S = {"reference": 1.0, "triton": 3.0}
CASE = {W: Case(f"{W} ranks", W=W, T=4, D=32, F=32, K=2, E=2 * W, routing="balanced") for W in (2, 3)}


class Step:
    """A training step of one rank, to be taken apart and bent."""

    def __init__(self, rank, context, case):
        self.context, self.inputs = context, case.inputs()[rank]
        self.leaves = leaves_of(self.inputs, context.config)

    def forward(self, **changes):
        leaves = {name: changes.pop(name, leaf) for name, leaf in self.leaves.items()}
        return forward(leaves, changes.pop("ids_TK", self.inputs.ids_TK), self.context)

    def backward(self, out_TD, **options):
        out_TD.backward(self.inputs.grad_out_TD, **options)

    def grads(self):
        return [self.leaves[name].grad for name in NAMES]


@dataclass
class Report:
    raised: Exception | None  # by the faulty step itself
    returned: list  # what it returned where it did not raise: is each tensor NaN throughout?
    check: Exception | None  # by context.check() after it, twice
    check_again: Exception | None
    next_call: Exception | None
    seconds: float  # of the faulty step and the check
    after: RankResults | None  # of a good step after reset()


def join(group, config, timeout_s=PATIENT_S, backend="reference"):
    return create_context(group=group, config=config, device="cpu", backend=backend, peer_timeout_s=timeout_s)


def error_of(fn, *args, **options):
    try:
        fn(*args, **options)
    except Exception as error:
        return error
    return None


def _is_nan(value) -> bool:
    return bool(value.isnan().all())


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
        return Report(raised, [_is_nan(value) for value in returned], check, again, next_call, seconds, after)


def run_fault(W, backend, fault, timeout_s=PATIENT_S) -> list[Report]:
    reports = on_ranks(W, _run_fault, CASE[W], backend, fault, timeout_s)
    assert_results_close([report.after for report in reports], dense(CASE[W], CASE[W].inputs()))
    return reports


def assert_error(error, kind, words) -> None:
    assert type(error) is kind and re.search(words, str(error)), f"{error!r} is no {kind.__name__} with {words!r}"


# ---- faults that all ranks find together


def _overflow(rank, context, step):
    L = context.experts_per_rank
    return [step.forward(ids_TK=step.inputs.ids_TK % L)]


def _invalid_id(rank, context, step):
    ids = step.inputs.ids_TK.clone()
    if rank == 1:
        ids[2, 1] = ids[3, 0] = context.config.num_experts
    return [step.forward(ids_TK=ids)]


def _huge_id(rank, context, step):
    ids = step.inputs.ids_TK.clone()
    if rank == 1:
        ids[1, 0] = 2**40  # 0 in its low 32 bits
    return [step.forward(ids_TK=ids)]


def _backward_meets_forward(rank, context, step):
    out = step.forward()
    if rank == 1:
        step.backward(out)
        return step.grads()
    return [step.forward()]


def _training_meets_no_grad(rank, context, step):
    with torch.set_grad_enabled(rank != 1):
        return [step.forward()]


SHARED = {
    "overflow": (_overflow, dist_moe.RoutingOverflowError, r"rank 0 needs {all} rows, {room} are available"),
    "invalid id": (_invalid_id, dist_moe.InvalidExpertIdError, r"rank 1 .* token 2, k 1"),
    "huge id": (_huge_id, dist_moe.InvalidExpertIdError, r"rank 1 .* token 1, k 0"),
    "backward meets forward": (
        _backward_meets_forward,
        dist_moe.RankMismatchError,
        r"call kind of rank 0 is training forward, of rank 1 backward",
    ),
    "training meets no_grad": (
        _training_meets_no_grad,
        dist_moe.RankMismatchError,
        r"call kind of rank 0 is training forward, of rank 1 forward without gradients",
    ),
}
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
        out = _overflow(rank, context, step)[0]
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


# ---- faults of one rank


def _wrong_dtype(rank, context, step):
    if rank == 1:
        return [step.forward(x_TD=step.leaves["x_TD"].float())]
    return [step.forward()]


def _too_many_tokens(rank, context, step):
    if rank == 1:
        return [step.forward(x_TD=torch.zeros(context.config.num_local_input_tokens + 1, 32).bfloat16())]
    return [step.forward()]


def _wrong_layout(rank, context, step):
    if rank == 1:
        return [step.forward(w13_L2FD=step.leaves["w13_L2FD"].transpose(1, 2))]
    return [step.forward()]


def _not_in_this_release(rank, context, step):
    if rank != 1:
        return [step.forward()]
    leaves = [step.leaves[name] for name in NAMES]
    leaves.insert(1, step.inputs.ids_TK)
    options = dist_moe.ExecutionOptions(wgrad_postprocess_fn=lambda name, grad: grad)
    return [routed_experts(*leaves, context, options=options)]


def _break_op(rank, context, op):
    def out_of_memory(*args, **options):
        raise MemoryError(f"no room in {op}")

    if rank == 1:
        setattr(context.path.ops, op, out_of_memory)


def _forward_breaks_in(op):
    def fault(rank, context, step):
        _break_op(rank, context, op)
        return [step.forward()]

    return fault


def _backward_breaks_in(op):
    def fault(rank, context, step):
        out = step.forward()
        _break_op(rank, context, op)
        step.backward(out)
        return step.grads()

    return fault


def _weight_changed_in_place(rank, context, step):
    out = step.forward()
    if rank == 1:
        with torch.no_grad():
            step.leaves["w2_LDF"].mul_(2)
    step.backward(out)
    return step.grads()


def _too_many_layers(rank, context, step):
    """Rank 1 alone believes that its slot holds a layer."""
    out = step.forward()
    if rank == 1:
        context.select_activation_slot(0, 1)
        return [step.forward()]
    return [step.forward(x_TD=out)]


# fault, what rank 1 raises, the stage before which the others miss it
REFUSALS = {
    "wrong dtype": (_wrong_dtype, TypeError, "x_TD must be bfloat16", "published"),
    "too many tokens": (_too_many_tokens, ValueError, "5 tokens", "published"),
    "wrong layout": (_wrong_layout, ValueError, "w13_weight must be", "published"),
    "not in this release": (_not_in_this_release, NotImplementedError, "wgrad_postprocess_fn", "published"),
    "publish breaks": (_forward_breaks_in("publish"), MemoryError, "no room in publish", "published"),
    "route breaks": (_forward_breaks_in("route"), MemoryError, "no room in route", "combined"),
    "combine breaks": (_forward_breaks_in("combine"), MemoryError, "no room in combine", "combined"),
    "plan_backward breaks": (_backward_breaks_in("plan_backward"), MemoryError, "plan_backward", "published"),
    "swiglu_backward breaks": (_backward_breaks_in("swiglu_backward"), MemoryError, "swiglu_backward", "combined"),
    "a weight changed in place": (
        _weight_changed_in_place,
        RuntimeError,
        "modified by an inplace operation",
        "published",
    ),
    "too many layers": (_too_many_layers, dist_moe.SlotError, r"already holds 1 layers.*reset\(\)", "published"),
}
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


def _late_by(factor, op="publish"):
    """Rank 1 sleeps before the first `op`, for this part of the deadline."""

    def fault(rank, context, step):
        work = getattr(context.path.ops, op)

        def sleep_and_work(*args, **options):
            setattr(context.path.ops, op, work)
            time.sleep(factor * context.path.timeout_ns / 1e9)
            work(*args, **options)

        if rank == 1:
            setattr(context.path.ops, op, sleep_and_work)
        out = step.forward()
        context.check()
        step.backward(out)
        return step.grads()

    return fault


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
        assert report.seconds < 2 * deadline_s
        error = report.raised or report.check or report.next_call
        if rank == 1:
            assert_error(error, dist_moe.PeerAbortedError, "rank [02] gave up this call before .*: PeerTimeoutError")
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


# ---- reset


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
        _invalid_id(rank, context, Step(rank, context, case))
        if rank == 1:
            time.sleep(1.5 * deadline_s)
        errors = [error_of(context.reset)]
        if rank != 1:
            errors.append(error_of(context.reset))
        results = [run_rank(case.inputs()[rank], context)]
        # And once more: all count the same epochs.
        _invalid_id(rank, context, Step(rank, context, case))
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
        for fault in (_wrong_dtype, _too_many_tokens, _wrong_layout, _not_in_this_release):
            assert error_of(fault, 1, context, Step(0, context, case)) is not None
            context.check()
            assert_results_close([run_rank(case.inputs()[0], context)], dense(case, case.inputs()))
        _break_op(1, context, "combine")
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
        assert _is_nan(step.forward(ids_TK=ids))
        with pytest.raises(dist_moe.InvalidExpertIdError, match=r"rank 0 .* token 0, k 0"):
            context.check()
        context.reset()
        assert_results_close([run_rank(case.inputs()[0], context)], dense(case, case.inputs()))


# ---- create_context


def _leftovers() -> list[str]:
    gc.collect()
    return [path.name for path in Path("/dev/shm").glob(f"dist_moe-{os.getpid()}-*")]


def _create(rank, group, case, how):
    """Rank 1 (in groups of three, rank 2) makes something wrong; then all make it right."""
    arguments = {
        "config": case.config(),
        "group": group,
        "peer_timeout_s": PATIENT_S,
        "device": None,
        "backend": "reference",
    }
    wrong = rank == group.size() - 1
    original = context_module._local_rank, dist_moe.symm._create_file, dist_moe.symm._map_file
    taken = None
    if wrong and how in FIELDS:
        field, value = FIELDS[how]
        arguments = arguments | ({field: value} if field in arguments else {"config": case.config(**{field: value})})
    elif how == "experts":
        arguments["config"] = case.config(num_experts=case.E + 1)
    elif wrong and how == "name":
        taken = create_context(group=dist_moe.World.virtual(1), config=case.config(), name="it")
        arguments["name"] = "it"
    elif wrong and how == "buffer":
        context_module._local_rank = _no_memory
    elif wrong and how == "file":
        dist_moe.symm._create_file = _no_memory
    elif wrong and how == "mapping":
        dist_moe.symm._map_file = _no_memory
    start = time.monotonic()
    error = error_of(create_context, **arguments)
    seconds = time.monotonic() - start
    context_module._local_rank, dist_moe.symm._create_file, dist_moe.symm._map_file = original
    if taken is not None:
        taken.close()
    left = _leftovers()
    with join(group, case.config()) as context:
        return error, seconds, left, run_rank(case.inputs()[rank], context)


def _no_memory(*args, **options):
    raise MemoryError("no memory here")


FIELDS = {
    "hidden_dim": ("hidden_dim", 64),
    "top_k": ("top_k", 1),
    "wgrad_dtype": ("wgrad_dtype", torch.bfloat16),
    "peer_timeout_s": ("peer_timeout_s", 7.0),
    "a bad timeout": ("peer_timeout_s", -1.0),
    "no config": ("config", {"hidden_dim": 32}),
    "a bad device": ("device", "meta"),
    "backend": ("backend", "cuda"),
}


def create(W, how):
    results = on_ranks(W, _create, CASE[W], how)
    assert all(seconds < PATIENT_S / 2 and not left for _, seconds, left, _ in results)
    assert_results_close([result for *_, result in results], dense(CASE[W], CASE[W].inputs()))
    return [error for error, *_ in results]


@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize(
    "field, of_0, of_last",
    [
        ("hidden_dim", "32", "64"),
        ("top_k", "2", "1"),
        ("wgrad_dtype", "torch.float32", "torch.bfloat16"),
        ("peer_timeout_s", "60.0", "7.0"),
    ],
)
def test_configurations_that_differ_are_refused_on_all_ranks(W, field, of_0, of_last):
    for error in create(W, field):
        words = rf"differ in {field}: rank 0 has {of_0}, rank {W - 1} has {of_last}"
        assert_error(error, dist_moe.RankMismatchError, words)


@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize(
    "how, kind, words",
    [
        ("no config", TypeError, "config must be a Config"),
        ("a bad timeout", ValueError, "peer_timeout_s must be finite and positive"),
        ("a bad device", ValueError, "device must be a CUDA device or the CPU"),
        ("backend", ValueError, "unknown backend 'cuda'"),
        ("name", ValueError, "the name 'it' is that of a live context"),
        ("buffer", MemoryError, "no memory here"),
        ("file", MemoryError, "no memory here"),
        ("mapping", MemoryError, "no memory here"),
    ],
)
def test_a_context_that_one_rank_cannot_make_is_made_on_none(W, how, kind, words):
    *others, own = create(W, how)
    assert_error(own, kind, words)
    for error in others:
        assert_error(error, dist_moe.PeerAbortedError, f"rank {W - 1} failed: {kind.__name__}: .*{words}")


@pytest.mark.parametrize("W", [2, 3])
def test_experts_that_ranks_cannot_share_evenly_are_refused_on_all(W):
    for error in create(W, "experts"):
        assert_error(error, ValueError, f"num_experts must be divisible.*{2 * W + 1} experts on {W} ranks")


FAULTS = {
    **{name: row[0] for name, row in (SHARED | REFUSALS).items()},
    "reduce breaks": _forward_breaks_in("reduce"),
    "slow": _late_by(0.5),
    "slow in the call": _late_by(0.5, "combine"),
    "late": _late_by(1.5),
    "late in the call": _late_by(1.5, "combine"),
}

"""Two GPUs, one process each: bit for bit what virtual ranks on one GPU give, and the faults between them."""

import os
import time

import pytest
import torch

import dist_moe
from dist_moe import create_context
from dist_moe.virtual import RankInputs, RankResults, run_virtual

from .path_cases import CASES, Case, assert_results_close, assert_results_equal, dense
from .process_group import Died, ranks
from .rank_calls import forward, leaves_of, run_rank

pytestmark = pytest.mark.ranks(2)

TWO = tuple(case for case in CASES if case.W == 2)
WIDE = (
    Case("wide per route", T=300, D=2048, F=768, K=2, E=64, routing="zipf(1.0)"),
    Case("wide de-duplicated", T=300, D=2048, F=768, K=8, E=64, routing="zipf(1.0)"),
    Case("wide de-duplicated recomputed", T=300, D=2048, F=768, K=8, E=64, slot_factor=None),
)
SMALL = Case("small", T=8, D=64, F=96, routing="balanced")


def on_gpus(fn, *args, **options) -> list:
    return ranks(2, device="cuda").run(fn, *args, **{"timeout_s": 100} | options)


def to(device, record):
    return type(record)(*(tensor.to(device) for tensor in vars(record).values()))


def join(group, case: Case, timeout_s: float = 60, **changes):
    return create_context(group=group, config=case.config(**changes), peer_timeout_s=timeout_s)


def _run_cases(rank, group, cases):
    results = []
    for case in cases:
        inputs = [to("cuda", one) for one in case.inputs()]
        with join(group, case) as context:
            own = [run_rank(inputs[rank], context) for _ in range(2)]
            assert_results_equal(own[:1], own[1:])
        virtual = run_virtual(2, case.config(), inputs, device="cuda") if rank == 0 else None
        results.append((to("cpu", own[0]), virtual and [to("cpu", result) for result in virtual]))
    return results


def test_two_gpus_equal_virtual_ranks_bit_for_bit():
    cases = TWO + WIDE
    for case, (first, second) in zip(cases, zip(*on_gpus(_run_cases, cases), strict=True), strict=True):
        results: list[RankResults] = [first[0], second[0]]
        assert_results_equal(results, first[1])
        if case in TWO:  # the dense layer of a wide case takes the CPU half a minute
            assert_results_close(results, dense(case, case.inputs()))


def error_of(fn, *args):
    try:
        fn(*args)
    except Exception as error:
        return error
    return None


def _call(context, inputs: RankInputs, **changed):
    leaves = leaves_of(inputs, context.config) | {name: value for name, value in changed.items() if name != "ids_TK"}
    return forward(leaves, changed.get("ids_TK", inputs.ids_TK), context)


def _faults(rank, group):
    """One context through every fault that leaves both peers alive; the step after each reset must be right."""
    found, after = {}, {}
    config = {"device_scratch_capacity_factor": 1.0, "max_moe_layers_per_activation_slot": 2}
    inputs = to("cuda", SMALL.inputs()[rank])
    with join(group, SMALL, **config) as context:

        def record(name, *steps):
            found[name] = [error_of(step) for step in (*steps, context.check)]
            context.reset()
            after[name] = to("cpu", run_rank(inputs, context))

        here = inputs.ids_TK % context.experts_per_rank
        record("overflow", lambda: _call(context, inputs, ids_TK=here))
        huge = inputs.ids_TK + (rank == 1) * 2**40
        record("invalid id", lambda: _call(context, inputs, ids_TK=huge))
        x = inputs.x_TD.float() if rank == 1 else inputs.x_TD
        record("bad argument", lambda: _call(context, inputs, x_TD=x))

        def other_kind():
            with torch.set_grad_enabled(rank != 1):
                _call(context, inputs)

        record("another kind of call", other_kind)

        def broken(*args, **options):
            raise MemoryError("no room")

        def out_of_memory():
            combine = context.path.ops.combine
            context.path.ops.combine = broken if rank == 1 else combine
            try:
                _call(context, inputs)
            finally:
                context.path.ops.combine = combine

        record("out of memory", out_of_memory)
    return found, after


def test_faults_between_two_gpus():
    (of_0, after_0), (of_1, after_1) = on_gpus(_faults)
    expected = dense(SMALL, SMALL.inputs())
    for name in after_0:
        assert_results_close([after_0[name], after_1[name]], expected)
    kinds = {name: tuple(type(errors[-1]) for errors in (of_0[name], of_1[name])) for name in of_0}
    assert kinds["overflow"] == (dist_moe.RoutingOverflowError,) * 2
    assert kinds["invalid id"] == (dist_moe.InvalidExpertIdError,) * 2
    assert kinds["another kind of call"] == (dist_moe.RankMismatchError,) * 2
    for name, raised in (("bad argument", TypeError), ("out of memory", MemoryError)):
        assert type(of_1[name][0]) is raised
        assert type(of_0[name][-1]) is dist_moe.PeerAbortedError and "rank 1" in str(of_0[name][-1])


def _dies(rank, group):
    inputs = to("cuda", SMALL.inputs()[rank])
    context = join(group, SMALL, timeout_s=2.0)
    run_rank(inputs, context)
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(3)
    time.sleep(1)
    start = time.monotonic()
    _call(context, inputs)
    error = error_of(context.check)
    return error, time.monotonic() - start, torch.ones(3, device="cuda").sum().item()


def test_a_dead_peer_is_a_timeout_and_the_cuda_context_lives():
    (error, seconds, alive), died = on_gpus(_dies, may_die=[1])
    assert died == Died(3)
    assert type(error) is dist_moe.PeerTimeoutError and "rank 1" in str(error) and "published" in str(error)
    assert seconds < 5.0 and alive == 3.0


def _slow(rank, group, delay_s, timeout_s):
    inputs = to("cuda", SMALL.inputs()[rank])
    with join(group, SMALL, timeout_s=timeout_s) as context:
        run_rank(inputs, context)
        if rank == 1:
            time.sleep(delay_s)
        start = time.monotonic()
        error = error_of(lambda: run_rank(inputs, context))
        return error, time.monotonic() - start


def test_a_peer_that_is_slow_by_twenty_seconds_is_no_fault():
    assert [error for error, _ in on_gpus(_slow, 20.0, 60.0)] == [None, None]


def test_a_peer_slower_than_the_deadline_ends_both_within_twice_of_it():
    for error, seconds in on_gpus(_slow, 3.0, 1.0):
        assert isinstance(error, dist_moe.PeerTimeoutError | dist_moe.PeerAbortedError) and seconds < 2 * 1.0 + 1.0


def _many_calls(rank, group, num_calls):
    """Changing sizes and routings; every 100th call is compared with its first."""
    case = Case("many", T=64, D=128, F=64, K=4, E=16)
    with join(group, case, max_moe_layers_per_activation_slot=1) as context:
        sets = []
        for seed, name in enumerate(["uniform", "one_rank", "dropped(0.5)", "zipf(1.0)", "duplicates"]):
            full = to("cuda", Case("many", T=64, D=128, F=64, K=4, E=16, routing=name, seed=seed).inputs()[rank])
            size = (64, 1 + rank, 0 if rank else 64, 33, 7)[seed]
            per_token = ("x_TD", "ids_TK", "scores_TK", "grad_out_TD")
            sets.append(RankInputs(*(t[:size] if n in per_token else t for n, t in vars(full).items())))
        wanted = [run_rank(one, context) for one in sets]
        before = torch.cuda.memory_allocated()
        for call in range(num_calls):
            result = run_rank(sets[call % 5], context)
            if call % 101 == 0:
                assert_results_equal([result], [wanted[call % 5]])
        del result
        return torch.cuda.memory_allocated() - before


def test_two_thousand_calls_without_drift():
    assert on_gpus(_many_calls, 2000, timeout_s=200) == [0, 0]


def test_a_context_on_another_device_than_the_current_one():
    """The kernels run where the tensors are, on the current stream of that device."""
    config = SMALL.config(device_scratch_capacity_factor=1.0)
    inputs = Case("one rank", W=1).inputs()[0]
    results = []
    for device in ("cuda:0", "cuda:1"):
        with torch.cuda.device(0), create_context(group=None, config=config, device=device) as context:
            there = to(device, inputs)
            results.append(to("cpu", run_rank(there, context)))
            with torch.cuda.device(1), torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                again = run_rank(there, context)
            assert torch.cuda.current_device() == 0
            assert_results_equal([to("cpu", again)], results[-1:])
    assert_results_equal(results[:1], results[1:])

"""Two, four and eight GPUs, a process each: bit for bit what virtual ranks on one GPU give; faults between them."""

import gc
import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import dist_moe
from dist_moe import BlockScaledConfig, create_context, prepare_block_scaled_weight, routed_experts
from dist_moe.virtual import RankInputs, RankResults, run_virtual

from .path_cases import CASES, Case, assert_results_close, assert_results_equal, dense
from .process_group import Died, ranks, run_ranks
from .rank_calls import forward, leaves_of, run_rank, step

GPUS = [pytest.param(W, marks=pytest.mark.ranks(W), id=f"{W}_gpus") for W in (2, 4, 8)]
on_2_4_8 = pytest.mark.parametrize("W", GPUS)


def wide(W: int) -> list[Case]:
    """Real widths, more experts than a tile is wide, several tiles of rows."""
    shape = {"W": W, "T": 300, "D": 2048, "F": 768, "E": 64}
    return [
        Case("wide per route", K=2, routing="zipf(1.0)", **shape),
        Case("wide de-duplicated", K=8, routing="zipf(1.0)", **shape),
        Case("wide de-duplicated recomputed", K=8, slot_factor=None, **shape),
        Case("wide all to one rank", K=4, routing="one_rank", **shape),
    ]


def small(W: int) -> Case:
    return Case("small", W=W, T=8, D=64, F=96, E=2 * W, routing="balanced")


def on_gpus(W: int, fn, *args, **options) -> list:
    return ranks(W, device="cuda").run(fn, *args, **{"timeout_s": 100} | options)


def to(device, record):
    return type(record)(*(tensor.to(device) for tensor in vars(record).values()))


def join(group, case: Case, timeout_s: float = 60, **changes):
    return create_context(group=group, config=case.config(**changes), peer_timeout_s=timeout_s)


def _run_cases(rank, group, cases, changes=None):
    results = []
    for case in cases:
        inputs, config = [to("cuda", one) for one in case.inputs()], case.config(**changes or {})
        with create_context(group=group, config=config, peer_timeout_s=60) as context:
            own = [run_rank(inputs[rank], context) for _ in range(2)]
            assert_results_equal(own[:1], own[1:])
        virtual = run_virtual(case.W, config, inputs, device="cuda") if rank == 0 else None
        results.append((to("cpu", own[0]), virtual and [to("cpu", result) for result in virtual]))
    return results


@on_2_4_8
def test_gpus_equal_virtual_ranks_bit_for_bit(W):
    small_cases = [case for case in CASES if case.W == W]
    cases = small_cases + wide(W)
    found = zip(*on_gpus(W, _run_cases, cases, timeout_s=250), strict=True)  # most of it compiling
    for case, by_rank in zip(cases, found, strict=True):
        results: list[RankResults] = [own for own, _ in by_rank]
        assert_results_equal(results, by_rank[0][1])
        if case in small_cases:  # the dense layer of a wide case takes the CPU half a minute
            assert_results_close(results, dense(case, case.inputs()))


@on_2_4_8
def test_gpus_equal_virtual_ranks_in_mxfp8(W):
    cases = wide(W)[:3]
    found = zip(*on_gpus(W, _run_cases, cases, {"block_scaled": BlockScaledConfig()}, timeout_s=250), strict=True)
    for by_rank in found:
        assert_results_equal([own for own, _ in by_rank], by_rank[0][1])


def _serve(rank, group, case, block_scaled):
    """Outputs of inference on this rank, and of all virtual ranks."""
    config = case.config(block_scaled=block_scaled, inference=True, activation_slot_capacity_factor=None)
    inputs = []
    for one in case.inputs():
        one = to("cuda", one)
        ready = {
            name: prepare_block_scaled_weight(getattr(one, name), block_scaled, inference=True)
            for name in ("w13_L2FD", "w2_LDF")
        }
        inputs.append(replace(one, grad_out_TD=None, **ready))
    own = inputs[rank]
    with create_context(group=group, config=config, peer_timeout_s=60) as context, torch.no_grad():
        out_TD = routed_experts(own.x_TD, own.ids_TK, own.scores_TK, own.w13_L2FD, own.w2_LDF, context)
        context.check()
    virtual = run_virtual(case.W, config, inputs, device="cuda") if rank == 0 else None
    return out_TD.cpu(), virtual and [result.out_TD.cpu() for result in virtual]


@on_2_4_8
@pytest.mark.parametrize("block_scaled", [BlockScaledConfig(), BlockScaledConfig("nvfp4")], ids=lambda b: b.format)
def test_gpus_serve_what_virtual_ranks_do(W, block_scaled):
    for case in wide(W)[:2]:
        outs, virtual = zip(*on_gpus(W, _serve, case, block_scaled, timeout_s=250), strict=True)
        assert all(torch.equal(a, b) for a, b in zip(outs, virtual[0], strict=True)) and outs[0].any()


REPLAYS = ("uniform", "one_expert", "dropped(1.0)", "one_rank", "zipf(1.0)", "duplicates")


def _graphs(rank, group):
    """Replays against eager calls: all ranks replay, then those of odd rank alone; None, or what differs."""
    shape = {"W": dist.get_world_size(group), "T": 64, "D": 128, "F": 96, "K": 4, "E": 16}
    cases = [Case("graphs", routing=name, seed=seed, **shape) for seed, name in enumerate(REPLAYS)]
    sets = [to("cuda", case.inputs()[rank]) for case in cases]
    with join(group, cases[0]) as context:
        wanted = [run_rank(one, context) for one in sets]
        static, graph = RankInputs(*(t.clone() for t in vars(sets[0]).values())), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog goes on with its queries
            captured = step(static, context)
        for replaying in (True, rank % 2 == 1):
            for one, expected in zip(sets, wanted, strict=True):
                for old, new in zip(vars(static).values(), vars(one).values(), strict=True):
                    old.copy_(new)
                if replaying:
                    graph.replay()
                found = captured if replaying else step(static, context)
                context.check()
                assert_results_equal([found], [expected])


@on_2_4_8
def test_captured_steps_follow_new_data_beside_eager_peers(W):
    on_gpus(W, _graphs)


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
    case = small(dist.get_world_size(group))
    inputs = to("cuda", case.inputs()[rank])
    with join(group, case, **config) as context:

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


@on_2_4_8
def test_faults_between_gpus(W):
    found, after = zip(*on_gpus(W, _faults), strict=True)
    expected = dense(small(W), small(W).inputs())
    for name in after[0]:
        assert_results_close([by_name[name] for by_name in after], expected)
    last = {name: [by_name[name][-1] for by_name in found] for name in found[0]}
    for name, kind in (
        ("overflow", dist_moe.RoutingOverflowError),
        ("invalid id", dist_moe.InvalidExpertIdError),
        ("another kind of call", dist_moe.RankMismatchError),
    ):
        assert [type(error) for error in last[name]] == [kind] * W, last[name]
    for name, raised in (("bad argument", TypeError), ("out of memory", MemoryError)):
        assert type(found[1][name][0]) is raised
        for error in last[name][:1] + last[name][2:]:
            assert type(error) is dist_moe.PeerAbortedError and "rank 1" in str(error), (name, error)


def _dies(rank, group):
    case = small(dist.get_world_size(group))
    inputs = to("cuda", case.inputs()[rank])
    context = join(group, case, timeout_s=2.0)
    run_rank(inputs, context)
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(3)
    time.sleep(1)
    start = time.monotonic()
    _call(context, inputs)
    error = error_of(context.check)
    return error, time.monotonic() - start, torch.ones(3, device="cuda").sum().item()


@on_2_4_8
def test_a_dead_peer_is_a_timeout_and_the_cuda_context_lives(W):
    # Processes of their own: who has lost a peer joins no further group.
    first, died, *others = run_ranks(W, _dies, device="cuda", timeout_s=60, may_die=[1])
    assert died == Died(3)
    for error, seconds, alive in (first, *others):
        assert type(error) is dist_moe.PeerTimeoutError and "rank 1" in str(error) and "published" in str(error)
        assert seconds < 5.0 and alive == 3.0


def _slow(rank, group, delay_s, timeout_s):
    case = small(dist.get_world_size(group))
    inputs = to("cuda", case.inputs()[rank])
    with join(group, case, timeout_s=timeout_s) as context:
        run_rank(inputs, context)
        if rank == 1:
            time.sleep(delay_s)
        start = time.monotonic()
        error = error_of(lambda: run_rank(inputs, context))
        return error, time.monotonic() - start


@on_2_4_8
def test_a_peer_that_is_slow_by_twenty_seconds_is_no_fault(W):
    assert [error for error, _ in on_gpus(W, _slow, 20.0, 60.0)] == [None] * W


@on_2_4_8
def test_a_peer_slower_than_the_deadline_ends_all_within_twice_of_it(W):
    for error, seconds in on_gpus(W, _slow, 3.0, 1.0):
        assert isinstance(error, dist_moe.PeerTimeoutError | dist_moe.PeerAbortedError) and seconds < 2 * 1.0 + 1.0


def _many_calls(rank, group, num_calls):
    """Changing sizes and routings; every 100th call is compared with its first."""
    W = dist.get_world_size(group)
    case = Case("many", W=W, T=64, D=128, F=64, K=4, E=16)
    with join(group, case, max_moe_layers_per_activation_slot=1) as context:
        sets = []
        for seed, name in enumerate(["uniform", "one_rank", "dropped(0.5)", "zipf(1.0)", "duplicates"]):
            full = to("cuda", Case("many", W=W, T=64, D=128, F=64, K=4, E=16, routing=name, seed=seed).inputs()[rank])
            size = (64, 1 + rank, 0 if rank else 64, 33, 7)[seed]
            per_token = ("x_TD", "ids_TK", "scores_TK", "grad_out_TD")
            sets.append(RankInputs(*(t[:size] if n in per_token else t for n, t in vars(full).items())))
        wanted = [run_rank(one, context) for one in sets]
        gc.collect()  # what earlier cases left in this process
        before = torch.cuda.memory_allocated()
        for call in range(num_calls):
            result = run_rank(sets[call % 5], context)
            if call % 101 == 0:
                assert_results_equal([result], [wanted[call % 5]])
        del result
        return torch.cuda.memory_allocated() - before


@on_2_4_8
def test_two_thousand_calls_without_drift(W):
    assert on_gpus(W, _many_calls, 2000, timeout_s=200) == [0] * W


@pytest.mark.ranks(2)
def test_a_context_on_another_device_than_the_current_one():
    """The kernels run where the tensors are, on the current stream of that device."""
    config = small(2).config(device_scratch_capacity_factor=1.0)
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

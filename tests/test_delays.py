"""Builds with DIST_MOE_DEBUG_DELAY_NS: programs that come late by random times give the same bits.

Calls with other data and routings follow each other on one context, so that a row that was read too early, or
overwritten too early, is one of another call. The option is read at import: every run has processes of its own.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from dist_moe import Config, Context, create_context, routed_experts
from dist_moe.kernels_triton import _device
from dist_moe.kernels_triton._device import clock_ns, delay
from dist_moe.path_oracle import FORWARD_ONLY, forward_only, on_device
from dist_moe.planner import dedup, mega
from dist_moe.symm import World
from dist_moe.virtual import RankInputs, RankResults, run_virtual

from .path_cases import Case, assert_results_equal
from .process_group import run_ranks
from .rank_calls import run_rank

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROUTINGS = {"cpu": ("uniform", "one_rank"), "cuda": ("uniform", "one_rank", "zipf(1.0)")}
REPETITIONS = {"cpu": 2, "cuda": 20}


def run(W: int, fn, *args, delay_ns: int, device: str) -> list:
    """Results by rank of fn in W processes that read this delay."""
    environment = {_device.DELAY_VARIABLE: str(delay_ns)}
    options = {"interpret": device == "cpu", "device": device, "environment": environment}
    return run_ranks(W, fn, *args, timeout_s=250, **options)


# ---- the path


DECODE = "decode"
KERNELS = {"cpu": "triton", "cuda": None}  # on a GPU those that are chosen there


def cases(W: int, device: str) -> list[Case]:
    """Both schemes; rows that are saved, and rows that are recomputed from x; experts in one launch."""
    shape = {"T": 4, "D": 32, "F": 32} if device == "cpu" else {"T": 500, "D": 512, "F": 128}
    return [
        Case("per route", W=W, K=2, E=4 * W, **shape),
        Case("de-duplicated recomputed", W=W, K=2 * W, E=4 * W, slot_factor=None, **shape),
        Case(DECODE, W=W, K=2 * W, E=16 * W, **shape | {"T": 4}),
    ]


def config_of(case: Case) -> Config:
    return case.config(**FORWARD_ONLY if case.note == DECODE else {})


def inputs_of(case: Case, device: str) -> list[list[RankInputs]]:
    """Several sets of every rank's inputs."""
    sets = [replace(case, routing=name, seed=seed).inputs() for seed, name in enumerate(ROUTINGS[device])]
    if case.note == DECODE:
        sets = [forward_only(one) for one in sets]
    return [[on_device(inputs, device) for inputs in by_rank] for by_rank in sets]


def alternate(call, sets: list, repetitions: int) -> list[list[RankResults]]:
    """Results of call on each set, the same whenever it comes again."""
    first = [[on_device(result, "cpu") for result in call(one)] for one in sets]
    for _ in range(repetitions - 1):
        for one, expected in zip(sets, first, strict=True):
            assert_results_equal([on_device(result, "cpu") for result in call(one)], expected)
    return first


def _as_virtual_ranks(rank, group, W, device, repetitions):
    found = []
    for case in cases(W, device):
        config = config_of(case)
        with create_context(group=World.virtual(W, device), config=config, backend=KERNELS[device]) as context:
            call = partial(run_virtual, W, context.config, context=context)
            found += alternate(call, inputs_of(case, device), repetitions)
    return found


def _step(own: RankInputs, context: Context) -> RankResults:
    if not context.config.inference:
        return run_rank(own, context)
    return RankResults(routed_experts(*(tensor for tensor in vars(own).values() if tensor is not None), context))


def _as_processes(rank, group, W, device, repetitions):
    found, how = [], {"device": device, "backend": KERNELS[device], "peer_timeout_s": 60}
    for case in cases(W, device):
        with create_context(group=group, config=config_of(case), **how) as context:
            own = [by_rank[rank] for by_rank in inputs_of(case, device)]
            found += alternate(lambda one: [_step(one, context)], own, repetitions)
    return found


def assert_delays_change_nothing(num_processes: int, fn, W: int, device: str) -> None:
    assert [dedup(case.config(), W) for case in cases(W, device)] == [False, True, True]
    assert [mega(config_of(case), W) for case in cases(W, device)] == [False, False, True]
    expected = run(num_processes, fn, W, device, 1, delay_ns=0, device=device)
    delayed = run(num_processes, fn, W, device, REPETITIONS[device], delay_ns=20_000, device=device)
    for found, wanted in zip(delayed, expected, strict=True):
        assert len(wanted) == 3 * len(ROUTINGS[device])
        for results, same in zip(found, wanted, strict=True):
            assert_results_equal(results, same)


@pytest.mark.gpu  # interpreted, all programs of virtual ranks run in one order whatever they sleep
@pytest.mark.timeout(900)
def test_virtual_ranks():
    assert_delays_change_nothing(1, _as_virtual_ranks, 2, "cuda")


ON_GPUS = [pytest.param(W, "cuda", marks=pytest.mark.ranks(W), id=f"{W}_gpus") for W in (2, 4, 8)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("W, device", [(2, "cpu"), *ON_GPUS])
def test_ranks_as_processes(W, device):
    assert_delays_change_nothing(W, _as_processes, W, device)


# ---- the sleeps


@triton.jit
def _time_delays(out_ptr, N: tl.constexpr):
    for i in range(N):
        start = clock_ns()
        delay(i)
        tl.store(out_ptr + tl.program_id(0) * N + i, clock_ns() - start)


def _times(rank, group, device):
    out = torch.empty(4, 64, dtype=torch.int64, device=device)
    _time_delays[(4,)](out, 64, num_warps=1)
    return out.cpu()


@pytest.mark.parametrize("device", DEVICES)
def test_programs_sleep_for_times_that_differ(device):
    """Half of the most on average. A GPU's clock moves in steps, so that few of 256 times differ: 24 on an H200."""
    (times,) = run(1, _times, device, delay_ns=_device.MAX_DELAY_NS, device=device)
    assert times.float().mean() > 0.1 * _device.MAX_DELAY_NS and len(times.unique()) > 8


def _drawn(rank, group):
    from dist_moe._interpreter import register_asm

    drawn = []
    register_asm(_device._SLEEP_NS.value, lambda ns: drawn.append(ns.item()) or ns)
    _times(rank, group, "cpu")
    return drawn


def test_sleeps_are_drawn_from_the_whole_range():
    (drawn,) = run(1, _drawn, delay_ns=1000, device="cpu")
    assert len(drawn) == 256 and 400 < sum(drawn) / 256 < 600
    assert 0 <= min(drawn) < 100 and 900 < max(drawn) <= 1000


def test_no_delay_by_default():
    assert run(1, _drawn, delay_ns=0, device="cpu") == [[]]


@pytest.mark.parametrize("text", ["", "-1", "1.5", "20us", "1000001"])
def test_other_values_are_refused(text):
    with pytest.raises(ValueError, match=f"DIST_MOE_DEBUG_DELAY_NS must be an integer from 0 to 1000000, got '{text}'"):
        _device._delay_ns(text)
    assert [_device._delay_ns(good) for good in ("0", "1000000")] == [0, 1_000_000]

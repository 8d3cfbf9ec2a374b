"""create_context on ranks as processes: what one rank gets wrong is an error on all, and nothing is left behind."""

import gc
import os
import time
from pathlib import Path

import pytest
import torch

import dist_moe
from dist_moe import create as create_module
from dist_moe import create_context, registry

from .fault_cases import CASE, PATIENT_S, assert_error, error_of, join
from .path_cases import assert_results_close, dense
from .rank_calls import on_ranks, run_rank


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
    original = create_module._local_rank, dist_moe.symm._create_file, dist_moe.symm._map_file
    expands_operands, taken = registry.expands_operands, None
    if wrong and how in FIELDS:
        field, value = FIELDS[how]
        arguments = arguments | ({field: value} if field in arguments else {"config": case.config(**{field: value})})
    elif how == "experts":
        arguments["config"] = case.config(num_experts=case.E + 1)
    elif how == "expanded":
        arguments["config"] = case.config(block_scaled=dist_moe.BlockScaledConfig())
        registry.expands_operands = lambda *_: wrong
    elif wrong and how == "name":
        taken = create_context(group=dist_moe.World.virtual(1), config=case.config(), name="it")
        arguments["name"] = "it"
    elif wrong and how == "buffer":
        create_module._local_rank = _no_memory
    elif wrong and how == "file":
        dist_moe.symm._create_file = _no_memory
    elif wrong and how == "mapping":
        dist_moe.symm._map_file = _no_memory
    start = time.monotonic()
    error = error_of(create_context, **arguments)
    seconds = time.monotonic() - start
    create_module._local_rank, dist_moe.symm._create_file, dist_moe.symm._map_file = original
    registry.expands_operands = expands_operands
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


def test_gpus_that_multiply_in_different_ways_do_not_train_together():
    """What a layer keeps in a slot has another size on each, and all have to decide alike."""
    for error in create(2, "expanded"):
        words = "differ in expanded operands: rank 0 has False, rank 1 has True"
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


@pytest.mark.parametrize("factor", [1.0, 1.5, 4.0])
def test_tiles_are_chosen_by_balanced_rows(factor):
    """Room for skew says nothing of the rows that an expert gets: here a twelfth of those of four ranks."""
    config = dist_moe.Config(48, 64, 64, 2, 12, 1, device_scratch_capacity_factor=factor)
    with create_context(group=dist_moe.World.virtual(4), config=config) as context:
        assert context.path.rows_per_expert == 4 * 48 * 2 // 12

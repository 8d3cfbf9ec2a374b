"""The harness of the multi-process tests: what it says when a rank fails, dies or hangs."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.process_group import Died, RankPool, RanksFailed, ranks, run_ranks


def _sum(rank, group, factor):
    t = torch.tensor([rank * factor])
    dist.all_reduce(t, group=group)
    return rank, t.item()


def _group_sizes(rank, groups):
    return [None if group is None else (dist.get_rank(group), dist.get_world_size(group)) for group in groups]


def _misbehave(rank, group, what):
    if rank == 1 and what == "raise":
        raise KeyError("no such thing")
    if rank == 1 and what == "die":
        os._exit(7)
    if rank == 1 and what == "hang":
        print("about to hang")
        time.sleep(600)
    return "fine"


@pytest.fixture
def pool():
    pool = RankPool(2, interpret=True)
    yield pool
    pool.close()


def test_runs_a_pool_again_and_again(pool):
    for factor in (1, 10):
        assert pool.run(_sum, factor) == [(0, factor), (1, factor)]
    assert ranks(4, interpret=True).run(_group_sizes, groups=[[2, 3], [0, 2]]) == [
        [None, (0, 2)],
        [None, None],
        [(0, 2), (1, 2)],
        [(1, 2), None],
    ]


def test_failures_are_reported_by_rank_and_the_pool_recovers(pool):
    with pytest.raises(RanksFailed, match=r"rank 1 raised[^$]*KeyError: 'no such thing'") as error:
        pool.run(_misbehave, "raise")
    assert "rank 0" not in str(error.value)
    with pytest.raises(RanksFailed, match=r"rank 1 did not return in time[^$]*about to hang[^$]*in _misbehave"):
        pool.run(_misbehave, "hang", timeout_s=3)
    with pytest.raises(RanksFailed, match="rank 1 died with exit code 7"):
        pool.run(_misbehave, "die")
    assert pool.run(_misbehave, "die", may_die=[1]) == ["fine", Died(7)]
    assert pool.run(_sum, 1) == [(0, 1), (1, 1)]


def test_fresh_processes():
    assert run_ranks(1, _sum, 5, interpret=True) == [(0, 0)]

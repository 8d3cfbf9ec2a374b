"""signal, wait and verify: the kernels and their oracle by the same cases, over virtual ranks and over processes."""

import os
import random
import time
from types import SimpleNamespace

import pytest
import torch
from tests.process_group import Died, ranks

from dist_moe import reference, shapes, symm
from dist_moe.kernels_triton import barrier
from dist_moe.shapes import COMBINED, PUBLISHED, RESET, STAGE_NAMES
from dist_moe.symm import World

BACKENDS = {"reference": reference, "triton": barrier}
DEADLINE_S = 0.3
NEVER_S = 100


class Rank:
    """What a Context keeps of one rank, as far as the barrier needs it."""

    def __init__(self, ops, rank, regions):
        self.ops, self.rank = ops, rank
        self.signals, self.header = regions["signals"], regions["header"]
        self.sent_S = torch.zeros(3, dtype=torch.int64, device=self.header.own.device)
        self.fault_F = torch.zeros(shapes.FAULT_WORDS, dtype=torch.int64, device=self.header.own.device)

    def signal(self, stage=PUBLISHED):
        self.ops.signal(
            stage=stage,
            rank=self.rank,
            signals=self.signals,
            sent_S=self.sent_S,
            header=self.header,
            fault_F=self.fault_F,
        )

    def wait(self, stage=PUBLISHED, timeout_s=NEVER_S):
        self.ops.wait(
            stage=stage,
            rank=self.rank,
            timeout_ns=int(timeout_s * 1e9),
            signals=self.signals,
            sent_S=self.sent_S,
            fault_F=self.fault_F,
        )

    def verify(self, num_tokens_max=64):
        self.ops.verify(header=self.header, num_tokens_max=num_tokens_max, rank=self.rank, fault_F=self.fault_F)

    @property
    def fault(self):
        """(code, rank, a, b, c), or None."""
        word, a, b, c = self.fault_F[:4].tolist()
        return (word & 0xFF, word >> shapes.FAULT_RANK_SHIFT, a, b, c) if word else None

    def set_fault(self, code, rank):
        self.fault_F[0] = code | rank << shapes.FAULT_RANK_SHIFT


def regions(W):
    return {
        "header": ((shapes.HEADER_WORDS,), torch.int64),
        "signals": ((shapes.NUM_STAGES, W), torch.int64),
        "progress": ((W,), torch.int64),
    }


@pytest.fixture(params=list(BACKENDS))
def virtual(request, device):
    """virtual(W) -> the ranks of a virtual World."""
    on = torch.device("cpu") if request.param == "reference" else device

    def make(W):
        local = World.virtual(W, on).allocate(regions(W))
        return [Rank(BACKENDS[request.param], rank, local[rank]) for rank in range(W)]

    return make


def headers(virtual_ranks, *words):
    for rank, values in zip(virtual_ranks, words, strict=True):
        rank.header.own[: len(values)] = torch.tensor(values)


# ---- the examples of the docstrings


def test_signal_example(virtual):
    ranks_ = virtual(2)
    ranks_[1].sent_S.copy_(torch.tensor([5, 4, 0]))
    ranks_[1].signal(COMBINED)
    assert ranks_[1].sent_S.tolist() == [5, 5, 0]
    assert all(rank.signals.own.flatten().tolist() == [0, 0, 0, 10, 0, 0] for rank in ranks_)
    assert all(rank.header.own.count_nonzero() == 0 for rank in ranks_)

    ranks_[1].sent_S[COMBINED] = 4
    ranks_[1].set_fault(shapes.FAULT_OVERFLOW, 0)
    ranks_[1].signal(COMBINED)
    assert all(rank.signals.own.flatten().tolist() == [0, 0, 0, 11, 0, 0] for rank in ranks_)
    assert ranks_[1].header.own.tolist() == [0, 0, 0, 0, 0, shapes.FAULT_OVERFLOW] + [0] * 10
    assert ranks_[0].header.own.count_nonzero() == 0
    ranks_[1].signal(COMBINED)
    assert all(rank.signals.own.flatten().tolist() == [0, 0, 0, 11, 0, 0] for rank in ranks_)
    assert ranks_[1].sent_S.tolist() == [5, 5, 0]
    ranks_[1].sent_S[COMBINED] = 1 << shapes.EPOCH_SHIFT  # after a reset it counts again
    ranks_[1].signal(COMBINED)
    assert all(rank.signals.own[COMBINED, 1] == 2 * ((1 << shapes.EPOCH_SHIFT) + 1) + 1 for rank in ranks_)


def test_a_late_rank_finds_the_abort_of_the_call_it_is_in(virtual):
    """Rank 0 gives up in a call and goes on signalling; rank 1 comes to that call only then."""
    ranks_ = virtual(2)
    ranks_[0].signal(PUBLISHED)
    ranks_[0].set_fault(shapes.FAULT_TIMEOUT, 1)
    for stage in (COMBINED, PUBLISHED, COMBINED, PUBLISHED, COMBINED):
        ranks_[0].signal(stage)
    ranks_[1].signal(PUBLISHED)
    ranks_[1].wait(PUBLISHED)
    assert ranks_[1].fault is None
    ranks_[1].signal(COMBINED)
    ranks_[1].wait(COMBINED)
    assert ranks_[1].fault == (shapes.FAULT_ABORTED, 0, COMBINED, 0, 0)


def test_wait_example(virtual):
    for flags, fault in (
        ([10, 10], None),
        ([12, 10], None),  # rank 0 is one ahead
        ([13, 10], None),  # and has given up there: a matter of the next wait
        ([10, 8], (shapes.FAULT_TIMEOUT, 1, COMBINED, 5, 0)),
        ([10, 9], (shapes.FAULT_TIMEOUT, 1, COMBINED, 5, 0)),  # an aborted bit of an older generation
        ([10, 11], (shapes.FAULT_ABORTED, 1, COMBINED, 0, 0)),
    ):
        rank = virtual(2)[0]
        rank.sent_S.copy_(torch.tensor([5, 5, 0]))
        rank.signals.own[COMBINED] = torch.tensor(flags)
        rank.wait(COMBINED, timeout_s=0.02)
        assert rank.fault == fault
        assert rank.sent_S.tolist() == [5, 5, 0]


def test_verify_example(virtual):
    ranks_ = virtual(3)
    headers(ranks_, (1, 7, 2, 1, 64), (1, 7, 2, 1, 0), (1, 7, 3, 3, 5))
    for rank in ranks_:
        rank.verify()
        assert rank.fault == (shapes.FAULT_MISMATCH, 2, shapes.HEADER_CALL, 2, 3)


# ---- one process


@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 8])
def test_every_rank_meets_every_rank(virtual, W):
    ranks_ = virtual(W)
    for generation in range(1, 4):
        for stage in (PUBLISHED, COMBINED):
            for rank in ranks_:
                rank.signal(stage)
            for rank in ranks_:
                rank.wait(stage)
                assert rank.signals.own[stage].tolist() == [2 * generation] * W
    assert all(rank.fault is None for rank in ranks_)


def test_flags_of_an_older_epoch_are_too_small(virtual):
    ranks_ = virtual(2)
    for flag in (2 * 900, 2 * 900 + 1):
        for rank in ranks_:
            rank.fault_F.zero_()
            rank.signals.own[PUBLISHED] = flag
            rank.sent_S[PUBLISHED] = 1 << shapes.EPOCH_SHIFT
        ranks_[0].signal()
        ranks_[0].wait(timeout_s=0.02)
        assert ranks_[0].fault == (shapes.FAULT_TIMEOUT, 1, PUBLISHED, (1 << shapes.EPOCH_SHIFT) + 1, 0)
        ranks_[1].signal()
        ranks_[1].wait()
        assert ranks_[1].fault is None


def test_under_a_fault_signals_go_out_and_nobody_waits(virtual):
    ranks_ = virtual(3)
    ranks_[2].set_fault(shapes.FAULT_SLOT, 2)
    before = ranks_[2].fault_F.clone()
    for rank in ranks_:
        rank.signal()
    for rank in ranks_:
        rank.wait()
    assert ranks_[0].fault == ranks_[1].fault == (shapes.FAULT_ABORTED, 2, PUBLISHED, 0, 0)
    assert ranks_[0].header.peers[2][shapes.HEADER_ABORT] == shapes.FAULT_SLOT
    ranks_[2].sent_S[COMBINED] += 1  # nobody has signalled: it would wait for ever
    start = time.monotonic()
    ranks_[2].wait(COMBINED)
    assert time.monotonic() - start < NEVER_S / 2
    assert torch.equal(ranks_[2].fault_F, before)  # the first fault stays


def test_a_reset_signal_never_carries_the_aborted_bit(virtual):
    ranks_ = virtual(2)
    for rank in ranks_:
        rank.set_fault(shapes.FAULT_TIMEOUT, 0)
        rank.signal(RESET)
    for rank in ranks_:
        assert rank.signals.own[RESET].tolist() == [2, 2]
        assert rank.header.own[shapes.HEADER_ABORT] == 0
        rank.fault_F.zero_()
        rank.wait(RESET)
        assert rank.fault is None


def test_several_missing_ranks_cost_one_deadline(virtual):
    rank = virtual(8)[3]
    rank.signal()
    rank.fault_F.fill_(1)
    rank.wait(timeout_s=DEADLINE_S)  # compiles; leaves at once
    rank.fault_F.zero_()
    seconds = _seconds(lambda: rank.wait(timeout_s=DEADLINE_S))
    code, missing, stage, generation, _ = rank.fault
    assert (code, stage, generation) == (shapes.FAULT_TIMEOUT, PUBLISHED, 1) and missing != 3
    assert DEADLINE_S <= seconds < 2 * DEADLINE_S


def _seconds(wait):
    start = time.monotonic()
    wait()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - start


GOOD = (1, 7, 2, 1, 5)
KIND = shapes.KIND_BACKWARD
BACK = (1, 7, 2, KIND, 5, 0, 1, 0, 2, 40)  # x and h1 kept, slot 0, layer 2, of call 40


@pytest.mark.parametrize(
    "words, fault",
    [
        ([GOOD, GOOD, (1, 7, 2, 1, 64)], None),
        ([GOOD, GOOD, (1, 7, 2, 1, 0)], None),
        ([GOOD, GOOD, (2, 7, 2, 1, 5)], (2, shapes.HEADER_VERSION, 1, 2)),
        ([GOOD, (1, -(2**62), 2, 1, 5), GOOD], (1, shapes.HEADER_CONFIG_HASH, 7, -(2**62))),
        ([GOOD, GOOD, (1, 7, 2 + (1 << 32), 1, 5)], (2, shapes.HEADER_CALL, 2, 2 + (1 << 32))),
        ([GOOD, (1, 7, 2, 3, 5), (2, 8, 3, 2, 5)], (1, shapes.HEADER_KIND, 1, 3)),  # the lowest rank is named
        ([GOOD, (1, 7, 9, 9, 99), GOOD], (1, shapes.HEADER_CALL, 2, 9)),  # and its first wrong word
        ([(1, 7, 2, 1, 65), GOOD, GOOD], (0, shapes.HEADER_T, 64, 65)),
        ([GOOD, GOOD, (1, 7, 2, 1, -1)], (2, shapes.HEADER_T, 64, -1)),
        ([GOOD, GOOD, (1, 7, 2, 1, 1 << 32)], (2, shapes.HEADER_T, 64, 1 << 32)),  # 0 in the low half
        ([BACK, BACK, BACK], None),
        ([BACK, BACK, (*BACK[:5], 9, *BACK[6:])], None),  # a stale abort code is nobody's concern
        ([BACK, (*BACK[:6], 0, 0, 2, 40), BACK], (1, shapes.HEADER_KEPT, 1, 0)),
        ([BACK, BACK, (*BACK[:7], 1, 2, 40)], (2, shapes.HEADER_SLOT, 0, 1)),
        ([BACK, BACK, (*BACK[:8], 1, 40)], (2, shapes.HEADER_LAYER, 2, 1)),
        ([BACK, (*BACK[:9], 41), BACK], (1, shapes.HEADER_FORWARD, 40, 41)),
        ([(*GOOD, *BACK[5:]), (*GOOD, 0, 0, 1, 1, 7), GOOD], None),  # in a forward these words are left over
    ],
)
def test_verify_gives_all_ranks_one_verdict(virtual, words, fault):
    ranks_ = virtual(3)
    headers(ranks_, *words)
    for rank in ranks_:
        rank.verify()
        assert rank.fault == (None if fault is None else (shapes.FAULT_MISMATCH, *fault))
    ranks_[0].fault_F.zero_()
    ranks_[0].set_fault(shapes.FAULT_ABORTED, 1)
    ranks_[0].verify()
    assert ranks_[0].fault == (shapes.FAULT_ABORTED, 1, 0, 0, 0)  # an earlier fault stays


@pytest.mark.parametrize("T_max, T, good", [(1, 1, True), (1, 2, False), (16, 16, True), (16, 17, False)])
def test_verify_takes_any_maximum(virtual, T_max, T, good):
    (rank,) = virtual(1)
    headers([rank], (1, 7, 2, 1, T))
    rank.verify(T_max)
    assert (rank.fault is None) == good


# ---- processes


def on_ranks(fn, *args, **options):
    return ranks(4, interpret=True).run(fn, *args, timeout_s=60, **options)


def _join(rank, group, backend):
    world = World.from_group(group, timeout_s=20)
    local = world.allocate(regions(world.size))[rank]
    return world, Rank(BACKENDS[backend], rank, local), SimpleNamespace(**local)


def _meet_often(rank, group, backend, generations):
    world, me, local = _join(rank, group, backend)
    pick = random.Random(5)  # the same on all ranks
    for generation in range(1, generations + 1):
        for stage in (PUBLISHED, COMBINED):
            slow, pause_s = pick.randrange(2 * world.size), pick.choice((0.0005, 0.002, 0.005))
            if slow == rank:
                time.sleep(pause_s)
            reached = 2 * generation + stage
            for peer in local.progress.peers:
                peer[rank] = reached
            me.signal(stage)
            me.wait(stage)
            seen = local.progress.own.tolist()
            # Not early; and nobody is further than one stage.
            assert all(reached <= other <= reached + 1 for other in seen), (generation, STAGE_NAMES[stage], seen)
    return me.fault, me.sent_S.tolist()


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_generations_with_a_slow_rank_never_pass_early(backend):
    assert on_ranks(_meet_often, backend, 30) == [(None, [30, 30, 0])] * 4


def _miss_one(rank, group, backend, how):
    """Rank 2 does not come to the second COMBINED. Returns the fault and how long the wait took."""
    world, me, _ = _join(rank, group, backend)
    me.signal(COMBINED)
    me.wait(COMBINED)
    world.exchange(None)
    if rank == 2:
        if how == "dies":
            os._exit(9)
        if how == "aborts":
            me.set_fault(shapes.FAULT_SLOT, 2)
        if how == "silent":
            time.sleep(3 * DEADLINE_S)
            return me.fault, None
    me.signal(COMBINED)
    seconds = _seconds(lambda: me.wait(COMBINED, timeout_s=DEADLINE_S if how != "aborts" else NEVER_S))
    return me.fault, seconds


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("how", ["silent", "dies"])
def test_a_missing_rank_is_named_at_the_deadline(backend, how):
    for _ in range(3):  # on a busy machine a process may lose the processor for as long as the deadline
        results = on_ranks(_miss_one, backend, how, may_die=[2])
        assert how == "silent" or results[2] == Died(9)
        waited_s = [results[rank][1] for rank in (0, 1, 3)]
        assert all(results[rank][0] == (shapes.FAULT_TIMEOUT, 2, COMBINED, 2, 0) for rank in (0, 1, 3))
        assert min(waited_s) >= DEADLINE_S
        if max(waited_s) <= 2 * DEADLINE_S:
            return
    raise AssertionError(f"waited {waited_s} with a deadline of {DEADLINE_S} s")


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_rank_that_gives_up_is_named_at_once(backend):
    results = on_ranks(_miss_one, backend, "aborts")
    assert [fault for fault, _ in results] == [
        (shapes.FAULT_SLOT, 2, 0, 0, 0) if rank == 2 else (shapes.FAULT_ABORTED, 2, COMBINED, 0, 0) for rank in range(4)
    ]
    assert max(seconds for _, seconds in results) < NEVER_S / 2


def _publish_payload(rank, group, backend, rounds):
    """A message handed over by the barrier: what was written before the signal is read whole after the wait."""
    world = World.from_group(group, timeout_s=20)
    local = world.allocate({**regions(world.size), "mail": ((world.size, 4096), torch.int64)})[rank]
    me = Rank(BACKENDS[backend], rank, local)
    for number in range(1, rounds + 1):
        for receiver, peer in enumerate(local["mail"].peers):
            peer[rank] = 1000 * number + 10 * rank + receiver
        me.signal(PUBLISHED)
        me.wait(PUBLISHED)
        for sender in range(world.size):
            mail = local["mail"].own[sender]
            wanted = 1000 * number + 10 * sender + rank
            assert bool((mail == wanted).all()), (number, sender, mail.unique().tolist(), wanted)
        me.signal(COMBINED)
        me.wait(COMBINED)
    symm.fence()
    return me.fault


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_what_was_written_before_the_signal_is_there_after_the_wait(backend):
    assert on_ranks(_publish_payload, backend, 20) == [None] * 4

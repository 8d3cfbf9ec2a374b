"""Ops that end with a signal or begin with a wait: bit for bit what they do without it, and the op signal or wait."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels_triton.row_cases import Ranks, random_ranks, ranks_of
from tests.strategies import routings

from dist_moe import reference, shapes
from dist_moe.kernels_triton import barrier
from dist_moe.kernels_triton.combine import combine
from dist_moe.kernels_triton.publish import pick_config, publish
from dist_moe.kernels_triton.reduce import wait_reduce
from dist_moe.meeting import Signal, Wait
from dist_moe.shapes import COMBINED, PUBLISHED
from dist_moe.symm import World

OVERFLOW = shapes.FAULT_OVERFLOW | 1 << shapes.FAULT_RANK_SHIFT
both_schemes = pytest.mark.parametrize("dedup", [False, True], ids=["routes", "pairs"])


class Signals:
    """What W virtual ranks signal with; rank r has sent as many as `sent` says."""

    def __init__(self, device, W, sent=(4, 4, 0), fault=0):
        regions = {
            "signals": ((shapes.NUM_STAGES, W), torch.int64),
            "header": ((shapes.HEADER_WORDS,), torch.int64),
        }
        words = {"dtype": torch.int64, "device": device}
        self.ranks = [
            SimpleNamespace(
                **local,
                sent_S=torch.tensor(sent, **words),
                fault_F=torch.zeros(shapes.FAULT_WORDS, **words),
                finished_1=torch.zeros(1, **words),
            )
            for local in World.virtual(W, device).allocate(regions).values()
        ]
        for rank in self.ranks:
            rank.fault_F[0] = fault

    def signal_of(self, r, stage) -> Signal:
        return Signal(stage=stage, rank=r, **vars(self.ranks[r]))

    def wait_of(self, r, stage, timeout_s=100) -> Wait:
        rank = self.ranks[r]
        return Wait(stage, r, int(timeout_s * 1e9), rank.signals, rank.sent_S, rank.fault_F)

    def words(self) -> list[list[int]]:
        """All that a signal may write, and the counter of programs."""
        return [
            [*r.signals.own.flatten().tolist(), *r.header.own.tolist(), *r.sent_S.tolist(), *r.finished_1.tolist()]
            for r in self.ranks
        ]


@pytest.mark.parametrize("W", [1, 2, 3])
@pytest.mark.parametrize("fault", [0, OVERFLOW])
@pytest.mark.parametrize("stage", [PUBLISHED, COMBINED])
def test_a_signal_at_the_end_is_the_signal(device, W, fault, stage):
    """Twice, so that the counter has to be back at 0 and of aborted flags the first stays."""
    fused, alone = Signals(device, W, fault=fault), Signals(device, W, fault=fault)
    ranks = random_ranks(device, "uniform", W=W, T=70, K=2, L=2, D=64)
    for _ in range(2):
        for r in range(W):
            alone_then, then = alone.signal_of(r, stage), fused.signal_of(r, stage)
            rows_XD = ranks.buffer()
            ranks.combine(combine, r, rows_XD, dedup=False, stop_1=then.fault_F[:1], then=then)
            barrier.signal(**alone_then.arguments)
        assert fused.words() == alone.words()
    flag = 2 * 5 + 1 if fault else 2 * 6
    assert all(rank.signals.own[stage].tolist() == [flag] * W for rank in fused.ranks)


def _published(op, ranks: Ranks, signals: Signals, r: int, x, ids, scores, stop=0):
    """Everything that the op writes."""
    rank, then = ranks.ranks[r], signals.signal_of(r, PUBLISHED)
    for name in ("tokens", "scores"):
        getattr(rank, name).own.fill_(7.0)
    rank.ids.own.fill_(99)
    stop_1 = torch.full((1,), stop, dtype=torch.int64, device=ranks.device)
    call_1 = torch.full((1,), 41, dtype=torch.int64, device=ranks.device)
    op(
        x,
        ids,
        scores,
        half=0,
        check_TD=x,
        check_skip_1=ranks.stop_1,
        kind=shapes.KIND_TRAIN,
        config_hash=1,
        num_experts=ranks.E,
        call_1=call_1,
        tokens=rank.tokens,
        header=then.header,
        ids=rank.ids,
        scores=rank.scores,
        stop_1=stop_1,
        then=then,
    )
    tensors = (rank.tokens.own, rank.scores.own, rank.ids.own, call_1)
    return [t.contiguous().view(torch.uint8).tolist() for t in tensors], signals.words()


@pytest.mark.parametrize("stop", [0, OVERFLOW], ids=["runs", "stopped"])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_publish_with_the_signal_equals_its_oracle(device, blocks, stop):
    """Of one program and of several; a call that is stopped signals all the same."""
    D, K, W = 64, 2, 2
    T = blocks * pick_config(D, K).block_t - (blocks > 1)
    ranks = random_ranks(device, "uniform", W=W, T=T, K=K, L=2, D=D, T_max=T + 1)
    x, ids = torch.randn(T, D).bfloat16().to(device), torch.randint(-1, 6, (T, K), device=device)
    scores = torch.randn(T, K, device=device)
    found = [
        _published(op, ranks, Signals(device, W, fault=stop), 1, x, ids, scores, stop)
        for op in (publish, reference.publish)
    ]
    assert found[0] == found[1]
    assert found[0][1][0][1] == (11 if stop else 10)  # word 0 * W + 1 of rank 0's signals


@both_schemes
@settings(max_examples=10)
@given(routing=routings(max_tokens=4), backward=st.booleans(), fault=st.sampled_from([0, OVERFLOW]))
def test_combine_with_the_signal_equals_its_oracle(device, dedup, routing, backward, fault):
    ranks = ranks_of(device, routing)
    found = []
    for op in (combine, reference.combine):
        signals = Signals(device, ranks.W, fault=fault)
        ranks.poison_pushed()
        for r in range(ranks.W):
            rows_XD, floats = ranks.buffer(), ranks.row_floats()
            rows_XD.fill_(r + 1.0)
            floats.fill_(2.0)
            ranks.combine(
                op,
                r,
                rows_XD,
                dedup=dedup,
                row_scores_R=floats if dedup and not backward else None,
                row_score_grads_R=floats if backward else None,
                stop_1=signals.ranks[r].fault_F[:1],
                then=signals.signal_of(r, COMBINED),
            )
        found.append((ranks.pushed(dedup).tolist(), signals.words()))
    assert found[0] == found[1]


def _summed(op, ranks: Ranks, r: int, dedup: bool, flags=None, fault=0) -> list:
    """Out, the two fault records and the counter after a wait_reduce of rank r, whose peers' flags are these."""
    signals = Signals(ranks.device, ranks.W, sent=(4, 4, 0))
    own = signals.ranks[r]
    own.signals.own[COMBINED] = 8 if flags is None else torch.tensor(flags)
    own.fault_F[0] = fault
    host_fault_F = torch.zeros(shapes.FAULT_WORDS, dtype=torch.int64, pin_memory=ranks.device.type == "cuda")
    wide_TD = torch.full((ranks.T[r], ranks.D + 32), 7.0, dtype=torch.bfloat16, device=ranks.device)
    rank = ranks.ranks[r]
    op(
        wide_TD[:, : ranks.D],
        after=signals.wait_of(r, COMBINED, timeout_s=0.02),
        outputs=ranks.outputs(r, dedup),
        ids=rank.ids,
        scores=None if dedup else rank.scores,
        dedup=dedup,
        num_experts=ranks.E,
        fault_F=own.fault_F,
        host_fault_F=host_fault_F,
        finished_1=own.finished_1,
    )
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host_fault_F, own.fault_F.cpu())
    wide_TD[wide_TD.isnan()] = float("nan")  # of any bits
    return [wide_TD.view(torch.int16).tolist(), own.fault_F.tolist(), own.finished_1.tolist(), own.sent_S.tolist()]


def _push_all(ranks: Ranks, dedup: bool) -> None:
    ranks.poison_pushed()
    for r in range(ranks.W):
        rows_XD, floats = ranks.buffer(), ranks.row_floats()
        rows_XD.copy_(torch.randn(rows_XD.shape, generator=torch.Generator().manual_seed(r)))
        floats.fill_(0.5)
        ranks.combine(reference.combine, r, rows_XD, dedup=dedup, row_scores_R=floats if dedup else None)


@both_schemes
@settings(max_examples=15)
@given(routing=routings(max_tokens=4))
def test_wait_reduce_equals_its_oracle(device, dedup, routing):
    ranks = ranks_of(device, routing)
    _push_all(ranks, dedup)
    for r in range(ranks.W):
        found = [_summed(op, ranks, r, dedup) for op in (wait_reduce, reference.wait_reduce)]
        assert found[0] == found[1] and not any(found[0][1])


@both_schemes
@pytest.mark.parametrize("T, D", [(0, 32), (1, 2080), (70, 64), (33, 1056)])
def test_wait_reduce_of_any_tokens(device, dedup, T, D):
    ranks = random_ranks(device, "zipf(1.0)", W=3, T=T, K=3, L=2, D=D, T_max=T + 1)
    _push_all(ranks, dedup)
    found = [_summed(op, ranks, 1, dedup, [10, 8, 11]) for op in (wait_reduce, reference.wait_reduce)]
    assert found[0] == found[1] and not any(found[0][1])


@both_schemes
@pytest.mark.parametrize(
    ("flags", "fault", "word"),
    [
        ([8, 6, 8], 0, shapes.FAULT_TIMEOUT | 1 << shapes.FAULT_RANK_SHIFT),
        ([8, 8, 9], 0, shapes.FAULT_ABORTED | 2 << shapes.FAULT_RANK_SHIFT),
        ([6, 6, 9], 0, shapes.FAULT_ABORTED | 2 << shapes.FAULT_RANK_SHIFT),
        ([0, 0, 0], OVERFLOW, OVERFLOW),  # nobody waits
        ([8, 8, 8], OVERFLOW, OVERFLOW),
    ],
)
def test_wait_reduce_ends_a_call_of_a_fault(device, dedup, flags, fault, word):
    """NaN in all of out and the record on the host; columns beside out stay."""
    ranks = random_ranks(device, "uniform", W=3, T=9, K=2, L=2, D=64)
    _push_all(ranks, dedup)
    found = [_summed(op, ranks, 1, dedup, flags, fault) for op in (wait_reduce, reference.wait_reduce)]
    assert found[0] == found[1] and found[0][1][0] == word
    out = torch.tensor(found[0][0], dtype=torch.int16).view(torch.bfloat16)
    assert out[:, :64].isnan().all() and (out[:, 64:] == 7).all()

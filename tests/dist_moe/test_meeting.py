"""Ops that end with a signal: what they do without it, then the signal, bit for bit as two ops do."""

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
from dist_moe.meeting import Signal
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

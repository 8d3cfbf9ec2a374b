"""mega_forward: the bits of the ops that it stands for, near the oracle; a queue that waits for lower tickets alone."""

import threading
import time
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from tests.kernels_triton.row_cases import Ranks, random_ranks

from dist_moe import reference, shapes
from dist_moe.kernels_triton import combine, dispatch, grouped_gemm, grouped_gemm_swiglu
from dist_moe.kernels_triton import mega_forward as kernels
from dist_moe.kernels_triton._device import is_interpreting
from dist_moe.meeting import Signal
from dist_moe.shapes import Activation, mega_queue_words
from dist_moe.symm import World
from dist_moe.testing import assert_close

PLAIN, CLAMPED = Activation(), Activation("swiglu_clamped", alpha=1.5, limit=0.5)
SCHEMES = {"routes": (False, False), "pairs pulled": (True, False), "pairs summed": (True, True)}
each_scheme = pytest.mark.parametrize("dedup, sums_pairs", SCHEMES.values(), ids=SCHEMES)
# The tile of decode; interpreted in steps of the same size, for there a step's partial sum is added as one.
TILE = grouped_gemm.CONFIGS[64, 128]
if is_interpreting():
    TILE = replace(TILE, block_k=kernels.CONFIG.block_k)


@dataclass(frozen=True)
class Case:
    edge: str
    routing: str
    W: int
    T: int
    K: int
    L: int
    D: int = 160
    F: int = 96
    activation: Activation = PLAIN


CASES = [
    Case("one token of the narrowest", "uniform", 1, 1, 1, 1, 32, 32),
    Case("no token anywhere", "uniform", 2, 0, 2, 2),
    Case("decode", "uniform", 1, 16, 4, 8),
    Case("experts without rows", "one_expert", 2, 9, 2, 3, 64, 32),
    Case("two tiles of rows", "hot_expert(0.9)", 1, 90, 1, 2, 96, 160, CLAMPED),
    Case("three ranks, odd K", "zipf(1.0)", 3, 9, 3, 3, 352, 64),
    Case("slots without expert, more ranks than K", "dropped(0.5)", 3, 4, 2, 2, 1056, 32),
    Case("repeated experts", "duplicates", 2, 9, 4, 4, 64, 224, CLAMPED),
]
DECODE = CASES[2]


class Experts:
    """Weights of every rank behind ranks that have published; runs the op, or what it stands for, on one of them."""

    def __init__(self, device, case: Case):
        self.ranks: Ranks = random_ranks(device, case.routing, W=case.W, T=case.T, K=case.K, L=case.L, D=case.D)
        g = torch.Generator().manual_seed(1)
        L, D, F = case.L, case.D, case.F
        self.F, self.device = F, device
        self.w13, self.w2 = (
            [(torch.randn(shape, generator=g) * shape[2] ** -0.5).bfloat16().to(device) for _ in range(case.W)]
            for shape in ((L, 2 * F, D), (L, D, F))
        )
        self.queue_Q = torch.zeros(mega_queue_words(L), dtype=torch.int32, device=device)
        self.finished_1 = torch.zeros(1, dtype=torch.int64, device=device)

    def buffers(self) -> dict:
        start = self.ranks.start_1
        x, h2, h3 = self.ranks.buffer(), self.ranks.buffer(self.F), self.ranks.buffer()
        return {"x_XD": x, "x_start_1": start(), "h2_XF": h2, "h2_start_1": start(), "h3_XD": h3, "h3_start_1": start()}

    def run(self, op, r, dedup, sums_pairs, activation=PLAIN, buffers=None, stop_1=None, **how) -> dict:
        buffers = self.buffers() if buffers is None else buffers
        row_scores_R = self.ranks.row_floats()
        op.mega_forward(
            self.ranks.plans[r],
            self.w13[r],
            self.w2[r],
            tokens=self.ranks.ranks[r].tokens,
            scores=self.ranks.ranks[r].scores,
            outputs=self.ranks.outputs(r, sums_pairs),
            dedup=dedup,
            sums_pairs=sums_pairs,
            **buffers,
            row_scores_R=row_scores_R,
            activation=activation,
            queue_Q=self.queue_Q,
            finished_1=self.finished_1,
            stop_1=self.ranks.stop_1 if stop_1 is None else stop_1,
            **how,
        )
        assert not self.queue_Q.any() and not self.finished_1.any()
        return buffers | {"row_scores_R": row_scores_R}

    def one_by_one(self, r, dedup, sums_pairs, activation) -> dict:
        plan, buffers, row_scores_R = self.ranks.plans[r], self.buffers(), self.ranks.row_floats()
        x, h2, h3 = (tuple(buffers.values())[i : i + 2] for i in (0, 2, 4))
        h1 = (self.ranks.buffer(2 * self.F), self.ranks.start_1())
        rank, stop_1 = self.ranks.ranks[r], self.ranks.stop_1
        pull = {"tokens": rank.tokens, "half": 0, "scores": rank.scores, "dedup": dedup, "row_scores_R": row_scores_R}
        dispatch.dispatch(plan, **pull, rows_XD=x[0], start_1=x[1], stop_1=stop_1)
        how = {"keep_h1": False, "activation": activation, "stop_1": stop_1}
        grouped_gemm_swiglu.grouped_gemm_swiglu(*x, self.w13[r], *h1, *h2, plan.row_start_P, **how, config=TILE)
        grouped_gemm.grouped_gemm(*h2, self.w2[r], *h3, plan.row_start_P, stop_1=stop_1, config=TILE)
        scores = row_scores_R if sums_pairs else None
        self.ranks.combine(combine.combine, r, h3[0], dedup=sums_pairs, row_scores_R=scores)
        return buffers | {"row_scores_R": row_scores_R}

    def pushed(self, sums_pairs, run) -> tuple[list, list]:
        """The outputs of all ranks, and what lies in the buffers of each, by one way to run them."""
        self.ranks.poison_pushed()
        found = [run(r) for r in range(self.ranks.W)]
        return [self.ranks.outputs(r, sums_pairs).own.clone() for r in range(self.ranks.W)], found


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.edge)
@each_scheme
def test_bits_are_those_of_four_ops_and_near_the_oracle(case, dedup, sums_pairs, device):
    experts, scheme = Experts(device, case), (dedup, sums_pairs, case.activation)
    wanted, parts = experts.pushed(sums_pairs, lambda r: experts.one_by_one(r, *scheme))
    outs, left = experts.pushed(sums_pairs, lambda r: experts.run(kernels, r, *scheme))
    for r in range(case.W):
        assert equal(outs[r], wanted[r])
        names = ("x_XD", "h2_XF", "row_scores_R") + ("h3_XD",) * sums_pairs
        assert all(equal(left[r][name], parts[r][name]) for name in names)
        assert sums_pairs or left[r]["h3_XD"].isnan().all()
    assert case.T == 0 or any(out.nan_to_num().abs().max() > 0.1 for out in outs)
    near, _ = experts.pushed(sums_pairs, lambda r: experts.run(reference, r, *scheme))
    for out, want in zip(outs, near, strict=True):
        assert torch.equal(out.isnan(), want.isnan())
        if not want.isnan().all():
            assert_close(out.nan_to_num().flatten(0, 1), want.nan_to_num().flatten(0, 1), "gemm")


@each_scheme
def test_programs_do_not_change_bits_and_calls_follow_one_another(dedup, sums_pairs, device):
    experts = Experts(device, DECODE)
    wanted, _ = experts.pushed(sums_pairs, lambda r: experts.run(kernels, r, dedup, sums_pairs))
    for programs_per_sm in (1, 2):  # interpreted two and two
        config = replace(kernels.CONFIG, programs_per_sm=programs_per_sm)
        run = partial(experts.run, kernels, dedup=dedup, sums_pairs=sums_pairs, config=config)
        found, _ = experts.pushed(sums_pairs, run)
        assert found[0].nan_to_num().any()
        assert equal(found[0], wanted[0])


@pytest.mark.parametrize("op", [kernels, reference], ids=["triton", "reference"])
@pytest.mark.parametrize("fault", [0, 3])
def test_the_signal_goes_out_and_a_stopped_call_touches_nothing_else(op, fault, device):
    experts = Experts(device, CASES[4])
    words = {"dtype": torch.int64, "device": device}
    fault_F, sent_S = torch.zeros(shapes.FAULT_WORDS, **words), torch.zeros(shapes.NUM_STAGES, **words)
    fault_F[0] = fault
    regions = World.virtual(1, device).allocate(
        {"signals": ((shapes.NUM_STAGES, 1), torch.int64), "header": ((shapes.HEADER_WORDS,), torch.int64)}
    )[0]
    then = Signal(shapes.COMBINED, 0, regions["signals"], sent_S, regions["header"], fault_F, experts.finished_1)
    (out,), (left,) = experts.pushed(True, lambda r: experts.run(op, r, True, True, stop_1=fault_F[:1], then=then))
    assert sent_S.tolist() == [0, 1, 0] and regions["signals"].own[shapes.COMBINED].tolist() == [2 + (fault != 0)]
    assert (out.isnan().all() and all(left[name].isnan().all() for name in ("x_XD", "h2_XF", "h3_XD"))) == (fault != 0)


@pytest.mark.interpreter
@pytest.mark.parametrize("held", ["pulls", "W13", "W2"])
def test_an_item_waits_for_those_it_needs(held, device):
    """Somebody else has the tickets of a stage and is late: until they count, nothing of the next stage is there."""
    experts, case = Experts(device, replace(CASES[4], L=1)), replace(CASES[4], L=1)
    wanted, (whole,) = experts.pushed(True, lambda r: experts.run(kernels, r, True, True))
    rows, tiles = case.T, -(-case.T // 64)
    num = {"pulls": rows, "W13": tiles * -(-case.F // 64), "W2": tiles * -(-case.D // 128)}
    stages = ["pulls", "W13", "W2"]
    before = stages[: stages.index(held) + 1]
    # What the late ones have to leave behind, and the word in which they count it.
    names, word = {"pulls": "x_XD", "W13": "h2_XF", "W2": "h3_XD"}, {"pulls": 1, "W13": 3, "W2": 2}
    buffers = experts.buffers()
    row_scores_R = whole["row_scores_R"]
    experts.ranks.row_floats = lambda: row_scores_R.clone()
    for stage in before[:-1]:
        buffers[names[stage]].copy_(whole[names[stage]])
        experts.queue_Q[word[stage]] = num[stage]
    experts.queue_Q[0] = sum(num[stage] for stage in before)
    experts.ranks.poison_pushed()
    running = threading.Thread(target=lambda: experts.run(kernels, 0, True, True, buffers=buffers), daemon=True)
    running.start()
    time.sleep(0.3)
    after = {"pulls": "h2_XF", "W13": "h3_XD"}.get(held)
    untouched = experts.ranks.outputs(0, True).own if after is None else buffers[after]
    assert running.is_alive() and untouched.isnan().all()
    buffers[names[held]].copy_(whole[names[held]])
    experts.queue_Q[word[held]] = num[held]
    running.join(60)
    assert not running.is_alive()
    assert equal(experts.ranks.outputs(0, True).own, wanted[0])


def test_example(device):
    case = Case("example", "uniform", 1, 1, 1, 1, 32, 32)
    experts = Experts(device, case)
    experts.ranks.ranks[0].tokens.own[0].fill_(1.0)
    experts.ranks.ranks[0].scores.own.fill_(2.0)
    experts.w13[0].fill_(1.0)
    experts.w2[0].fill_(1.0)
    for op in (kernels, reference):
        (out,), (left,) = experts.pushed(False, lambda r, op=op: experts.run(op, r, False, False))
        assert (out == 32768).all() and (left["h2_XF"][3] == 1024).all()
        assert left["h2_XF"][:3].isnan().all()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda e: {"x_XD": e.ranks.buffer(64)}, "x_XD"),
        (lambda e: {"h2_XF": e.ranks.buffer(32)}, "h2_XF"),
        (lambda e: {"h3_XD": e.ranks.buffer(64)}, "h3_XD"),
        (lambda e: setattr(e, "w2", [e.w2[0][:, :-32].contiguous()]) or {}, "w2_LDF"),
        (lambda e: setattr(e, "w13", [e.w13[0].float()]) or {}, "w13_L2FD"),
    ],
    ids=["x", "h2", "h3", "w2", "w13"],
)
def test_refuses_operands_that_do_not_fit(change, message, device):
    experts = Experts(device, DECODE)
    with pytest.raises(ValueError, match=f"mega_forward: {message}"):
        experts.run(kernels, 0, True, True, buffers=experts.buffers() | change(experts))

"""rmsnorm_reduce and its backward against the oracle and the formula by autograd; bits, neighbours, bytes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks.roofs import norm_work
from tests.kernels_triton.row_cases import NAN, same_bits

from dist_moe import reference_norm
from dist_moe.kernels_triton import reduce as sums
from dist_moe.kernels_triton import rmsnorm as kernels
from dist_moe.norm import Norm
from dist_moe.testing import assert_close

OPS = pytest.mark.parametrize("ops", [kernels, reference_norm], ids=["triton", "reference"])

# (note, T, K, D, norm)
CASES = (
    ("one token, one slot", 1, 1, 32, Norm(1e-6)),
    ("odd K, a tail of the block", 5, 3, 96, Norm(1e-5)),
    ("bf16 norm, more slots than a power of two", 4, 6, 160, Norm(1e-6, torch.bfloat16)),
    ("compensated", 4, 2, 288, Norm(1e-6, use_kahan=True)),
    ("weight", 7, 2, 64, Norm(1e-3, weight_D=torch.empty(64))),
    ("weight round a centre, bf16 norm", 7, 4, 96, Norm(1e-3, torch.bfloat16, False, 1.0, torch.empty(96))),
    ("rows in many warps, by chunks of which the last is short", 2, 2, 2880, Norm(1e-6)),
    ("weight, compensated", 3, 2, 64, Norm(1e-3, use_kahan=True, weight_D=torch.empty(64))),
)
EACH = pytest.mark.parametrize("T, K, D, norm", [case[1:] for case in CASES], ids=[case[0] for case in CASES])


class Problem:
    """Rows, ids and scores of T tokens among those of two more, which nobody may read, and dead slots full of NaN."""

    def __init__(self, T, K, D, norm, device, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.T, self.K, self.D, self.device = T, K, D, device
        ids = torch.randint(-1, 4, (T + 2, K), generator=g)
        ids[:T, 0] = 0  # one slot of every token lives
        self.ids = ids.to(torch.int16).to(device)
        self.used = (ids[:T] >= 0).to(device)
        scores = torch.where(ids >= 0, torch.rand(T + 2, K, generator=g) + 0.1, 0.0)
        self.rows = self._of(torch.randn(T + 2, K, D, generator=g).bfloat16().to(device), ids)
        self.scores = scores.to(device)
        self.gy = torch.randn(T, D + 32, generator=g).bfloat16().to(device)[:, :D]  # rows further apart
        if norm.weight_D is not None:
            norm = replace(norm, weight_D=(torch.randn(D, generator=g) + 0.5).bfloat16().to(device))
        self.norm = norm
        self.stop_1 = torch.zeros(1, dtype=torch.int64, device=device)

    def _of(self, rows, ids):
        rows[(ids < 0).to(rows.device)] = NAN
        rows[self.T :] = NAN
        return rows

    def nan(self, *shape, dtype=torch.float32):
        return torch.full(shape, NAN, dtype=dtype, device=self.device)

    def forward(self, ops, keep=True, **options):
        out = self.nan(self.T, self.D, dtype=torch.bfloat16)
        kept = (
            (self.nan(self.T, self.K, self.D, dtype=torch.bfloat16), self.nan(self.T, self.K)) if keep else (None,) * 2
        )
        tensors = {"rows_TKD": self.rows, "ids_TK": self.ids, "scores_TK": self.scores, "norm": self.norm}
        ops.rmsnorm_reduce(out, **tensors, kept_rows_TKD=kept[0], rstd_TK=kept[1], **{"stop_1": self.stop_1} | options)
        return SimpleNamespace(out=out, kept=kept[0], rstd=kept[1])

    def backward(self, ops, rstd, **options):
        """(grad of rows, of scores, of the weight); dead slots and other tokens as they were, NaN."""
        grads = self.nan(self.T + 2, self.K, self.D, dtype=torch.bfloat16), self.nan(self.T + 2, self.K)
        weight = None if self.norm.weight_D is None else self.nan(self.D)
        tensors = {"rows_TKD": self.rows[: self.T], "ids_TK": self.ids, "scores_TK": self.scores, "norm": self.norm}
        ops.rmsnorm_reduce_backward(
            self.gy,
            **tensors,
            rstd_TK=rstd,
            grad_rows_TKD=grads[0],
            grad_scores_TK=grads[1],
            grad_weight_D=weight,
            **{"stop_1": self.stop_1} | options,
        )
        for grad in grads:
            assert grad[self.T :].isnan().all() and grad[: self.T][~self.used].isnan().all(), "a neighbour was written"
        return SimpleNamespace(rows=grads[0][: self.T][self.used], scores=grads[1][: self.T][self.used], weight=weight)


@EACH
def test_equals_the_oracle(T, K, D, norm, device):
    problem = Problem(T, K, D, norm, device)
    found, wanted = (problem.forward(ops) for ops in (kernels, reference_norm))
    assert_close(found.out, wanted.out, "swiglu")
    assert same_bits(found.kept[problem.used], problem.rows[:T][problem.used])
    assert found.kept[~problem.used].isnan().all()
    assert_close(found.rstd[problem.used][None], wanted.rstd[problem.used][None], "gemm")
    assert same_bits(problem.forward(kernels, keep=False).out, found.out)
    got, want = (problem.backward(ops, wanted.rstd) for ops in (kernels, reference_norm))
    assert_close(got.rows, want.rows, "gemm")
    assert_close(got.scores[None], want.scores[None], "gemm")
    if norm.weight_D is not None:
        assert_close(got.weight[None], want.weight[None], "gemm")


@EACH
def test_rstd_made_again_gives_the_bits_of_the_saved_one(T, K, D, norm, device):
    problem = Problem(T, K, D, norm, device)
    saved, again = (problem.backward(kernels, rstd) for rstd in (problem.forward(kernels).rstd, None))
    assert same_bits(saved.rows, again.rows) and same_bits(saved.scores, again.scores)
    assert norm.weight_D is None or same_bits(saved.weight, again.weight)


@OPS
@EACH
def test_backward_is_the_gradient(T, K, D, norm, ops, device):
    """Autograd of the formula in FP64."""
    problem = Problem(T, K, D, norm, device)
    norm = problem.norm
    rows, scores = problem.rows[:T].double(), problem.scores[:T].double().requires_grad_()
    rows = torch.where(problem.used[..., None], rows, 0.0).requires_grad_()
    h, gain = rows, None
    if norm.weight_D is not None:
        gain = (norm.weight_D.float() + norm.gain_center).bfloat16().double().requires_grad_()
        h = rows * gain
    hat = h * torch.rsqrt(h.square().mean(dim=2, keepdim=True) + norm.eps)
    (scores[..., None] * hat).sum(dim=1).backward(problem.gy.double())
    found = problem.backward(ops, None)
    bar = "gemm" if norm.dtype is torch.float32 and gain is None else "path_grads"  # bf16 n, u and h
    assert_close(found.rows.double(), rows.grad[problem.used], bar)
    assert_close(found.scores[None].double(), scores.grad[problem.used][None], bar)
    if gain is not None:
        assert_close(found.weight[None].double(), gain.grad[None], bar)


def test_a_compensated_sum_is_exact(device):
    """Rounded once: the oracle adds in FP64. Without, the rounding of the partial sums shows in some rows."""
    problem = Problem(12, 2, 288, Norm(1e-6, use_kahan=True), device)
    problem.rows *= torch.logspace(-3, 3, 288, device=device).bfloat16()
    rstd = problem.forward(kernels).rstd[problem.used]
    assert same_bits(rstd, problem.forward(reference_norm).rstd[problem.used])
    problem.norm = Norm(1e-6)
    assert not same_bits(rstd, problem.forward(kernels).rstd[problem.used])


def test_require_bitwise_keeps_the_order_of_the_unfused_norm(device):
    """On whole numbers, whose squares every order adds alike: n rounded, then the product, then the sum over k."""
    problem = Problem(6, 3, 64, Norm(2.0), device)
    problem.rows = torch.randint(-4, 5, problem.rows.shape, device=device).bfloat16()
    rows = torch.where(problem.used[..., None], problem.rows[:6], 0.0).float()
    mean = rows.square().sum(dim=2, keepdim=True) / 64
    n = rows * (1 / (mean + 2.0).double().sqrt().float())
    acc = torch.zeros(6, 64, device=device)
    for k in range(3):
        acc += problem.scores[:6, k, None] * n[:, k]
    assert same_bits(problem.forward(kernels).out, acc.bfloat16())


class Moved:
    """What interpreted kernels load and store, in bytes: `issued` by their instructions, where masks are set, and
    `touched`, each address once in each direction, as a cache would have it."""

    def __init__(self, monkeypatch):
        from triton.runtime.interpreter import InterpreterBuilder

        for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
            stock = getattr(InterpreterBuilder, name)
            monkeypatch.setattr(InterpreterBuilder, name, self._listening(name, stock, place))

    def _listening(self, name, stock, place):
        def op(builder, *args, **options):
            pointers, mask = args[0], args[place].data.astype(bool)
            size = pointers.get_element_ty().primitive_bitwidth // 8
            addresses = np.broadcast_to(pointers.data, mask.shape)[mask]
            self.issued += size * addresses.size
            self._addresses.setdefault((name, size), []).append(addresses.ravel())
            return stock(builder, *args, **options)

        return op

    def by(self, launch) -> SimpleNamespace:
        """Of one launch of one program, without the word that says stop."""
        self.issued, self._addresses = 0, {}
        launch()
        touched = sum(size * len(np.unique(np.concatenate(found))) for (_, size), found in self._addresses.items())
        return SimpleNamespace(issued=self.issued - 8, touched=touched - 8)


@pytest.mark.interpreter
@pytest.mark.parametrize("norm", [case[4] for case in CASES[1:]], ids=[case[0] for case in CASES[1:]])
def test_moves_what_the_plain_sum_per_route_moves(norm, monkeypatch, device):
    """At most 1.1 times the bytes of `reduce` per route, in a call without a backward; the formulas of the benchmark.

    A backward to come costs the rows that it reads, once more. The gain comes out of the cache for every route, so with
    one it is the touched bytes that are held to the bar.
    """
    T, K, D = 9, 8, 96
    problem = Problem(T, K, D, norm, device)
    problem.ids.clamp_(min=0)  # all slots live
    problem.used.fill_(True)
    problem.rows = torch.randn(problem.rows.shape, device=device).bfloat16()
    moved, one, works = Moved(monkeypatch), {"num_sms": 1}, norm_work(T, T * K, K, D)
    own = {"outputs": problem.rows, "ids": problem.ids, "scores": problem.scores}
    own = {name: SimpleNamespace(own=value, peers=[value]) for name, value in own.items()}
    out = problem.nan(T, D, dtype=torch.bfloat16)
    plain = moved.by(lambda: sums.reduce(out, **own, dedup=False, num_experts=4, rank=0, stop_1=problem.stop_1, **one))
    fused, keeping = (moved.by(lambda keep=keep: problem.forward(kernels, keep, **one)) for keep in (False, True))
    gain = 0 if norm.weight_D is None else 2 * D
    assert plain.touched == works["plain"].hbm_bytes and out.isfinite().all()
    assert fused.touched == works["rmsnorm_reduce"].hbm_bytes + gain <= 1.1 * plain.touched
    assert keeping.touched == works["keep"].hbm_bytes + gain
    assert fused.issued == fused.touched - gain + T * K * gain
    rstd = problem.forward(kernels).rstd
    if norm.weight_D is None:
        backward = moved.by(lambda: problem.backward(kernels, rstd, **one))
        assert backward.touched == works["rmsnorm_reduce_backward"].hbm_bytes


@OPS
def test_tokens_without_experts_are_zeros(ops, device):
    problem = Problem(3, 2, 32, Norm(1e-6), device)
    problem.ids[1], problem.scores[1] = -1, 0.0
    problem.rows[1] = NAN
    out = problem.forward(ops).out
    assert same_bits(out[1], torch.zeros_like(out[1])) and out[[0, 2]].any(dim=1).all()


@OPS
def test_stop_leaves_without_touching_anything(ops, device):
    problem = Problem(3, 2, 32, Norm(1e-6, weight_D=torch.empty(32)), device)
    stop_1 = torch.ones(1, dtype=torch.int64, device=device)
    assert problem.forward(ops, stop_1=stop_1).out.isnan().all()
    assert problem.backward(ops, None, stop_1=stop_1).rows.isnan().all()


def test_equal_bits_with_any_number_of_programs(device):
    problem = Problem(7, 3, 96, Norm(1e-6), device)
    found, one = (problem.forward(kernels, **how) for how in ({}, {"num_sms": 1}))
    assert same_bits(found.out, one.out)
    found, one = (problem.backward(kernels, None, **how) for how in ({}, {"num_sms": 1}))
    assert same_bits(found.rows, one.rows) and same_bits(found.scores, one.scores)


def test_docstring_examples(device):
    rows = torch.tensor([[[3.0, 3.0], [0.0, -8.0]]]).bfloat16().to(device)
    ids = torch.zeros(1, 2, dtype=torch.int16, device=device)
    scores, stop_1 = torch.tensor([[2.0, 0.0]], device=device), torch.zeros(1, dtype=torch.int64, device=device)
    tensors = {"rows_TKD": rows, "ids_TK": ids, "scores_TK": scores, "norm": Norm(0.0), "stop_1": stop_1}
    for ops in (kernels, reference_norm):
        out, rstd = torch.empty(1, 2, device=device).bfloat16(), torch.empty(1, 2, device=device)
        ops.rmsnorm_reduce(out, **tensors, kept_rows_TKD=None, rstd_TK=rstd)
        assert out.tolist() == [[2.0, 2.0]]
        assert torch.equal(rstd, 1 / torch.tensor([[3.0, 32**0.5]], device=device))
        gy = torch.tensor([[6.0, 0.0]]).bfloat16().to(device)
        grads = torch.empty(1, 2, 2, device=device).bfloat16(), torch.empty(1, 2, device=device)
        ops.rmsnorm_reduce_backward(
            gy, **tensors, rstd_TK=rstd, grad_rows_TKD=grads[0], grad_scores_TK=grads[1], grad_weight_D=None
        )
        assert grads[0][0, 0].tolist() == [2.0, -2.0] and grads[1][0, 0] == 6.0


def test_the_bar_sees_faults(device):
    problem = Problem(6, 2, 64, Norm(1e-6), device)
    wanted = problem.forward(reference_norm).out
    dropped, swapped = wanted.clone(), wanted.clone()
    dropped[3] = 0
    swapped[[1, 2]] = wanted[[2, 1]]
    problem.scores *= 1.01
    for wrong in (torch.zeros_like(wanted), dropped, swapped, problem.forward(kernels).out):
        with pytest.raises(AssertionError, match="miss the bar"):
            assert_close(wrong, wanted, "swiglu")

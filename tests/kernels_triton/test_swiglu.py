"""swiglu and swiglu_backward against the oracle: widths, limits, neighbours full of NaN, bits."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_moe import reference
from dist_moe.kernels_triton import swiglu as kernels
from dist_moe.shapes import Activation
from dist_moe.testing import assert_close

NAN = float("nan")
PLAIN, CLAMPED = Activation(), Activation("swiglu_clamped", alpha=1.702, limit=1.5)
ACTIVATIONS = pytest.mark.parametrize("activation", [PLAIN, CLAMPED], ids=["plain", "clamped"])

CASES = [  # rows by expert, F, edge
    ((0,), 32, "no rows"),
    ((1,), 32, "one row, less than a chunk"),
    ((0, 33, 65), 96, "rows not a multiple of a block, an empty expert"),
    ((40, 2), 288, "a whole chunk and a tail of 32"),
    ((7,), 512, "two whole chunks"),
]


@dataclass
class Problem:
    """h1 and g2 inside larger buffers whose other rows are NaN; `forward` and `backward` work on copies."""

    rows: tuple[int, ...]
    F: int
    device: torch.device
    start_h1: int = 3
    start_f: int = 2
    h1: torch.Tensor = field(init=False)
    g2: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.R = sum(self.rows)
        self.h1 = (2 * torch.randn(self.R, 2 * self.F)).bfloat16().to(self.device)
        self.g2 = torch.randn(self.R, self.F).bfloat16().to(self.device)
        self.scores = torch.rand(self.R + 4).to(self.device)
        self.start_P = torch.tensor([0, *self.rows], device=self.device).cumsum(0).int()
        self.stop = torch.zeros(1, dtype=torch.int64, device=self.device)

    def put(self, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        view = torch.full((start + len(rows) + 4, rows.shape[1]), NAN, dtype=rows.dtype, device=self.device)
        view[start : start + len(rows)] = rows
        return view, torch.tensor([start], device=self.device)

    def take(self, view: torch.Tensor, start: int) -> torch.Tensor:
        """The rows; those around them must still be NaN."""
        assert view[:start].isnan().all() and view[start + self.R :].isnan().all(), "rows of a neighbour were written"
        return view[start : start + self.R]

    def forward(self, op, activation, **options) -> torch.Tensor:
        h2 = self.put(torch.full_like(self.g2, NAN), self.start_f)
        h1 = self.put(self.h1, self.start_h1)
        op(*h1, *h2, self.start_P, activation=activation, stop_1=self.stop, **options)
        return self.take(h2[0], self.start_f)

    def backward(self, op, activation, **options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(d_h1, score * h2, score gradients)"""
        h1, g2 = self.put(self.h1, self.start_h1), self.put(self.g2, self.start_f)
        score_grads = torch.full_like(self.scores, NAN)
        op(*h1, *g2, self.scores, score_grads, self.start_P, activation=activation, stop_1=self.stop, **options)
        assert score_grads[self.R :].isnan().all()
        return self.take(h1[0], self.start_h1), self.take(g2[0], self.start_f), score_grads[: self.R]

    def assert_score_grads_close(self, out: torch.Tensor, ref: torch.Tensor, h2: torch.Tensor) -> None:
        """FP32 sums in two orders, and one value of h2 that falls to the other side behind exp."""
        terms = (self.g2.float() * h2.float()).abs()
        allowed = terms.sum(dim=1) * 1e-5 + terms.amax(dim=1) * 2**-7
        assert ((out - ref).abs() <= allowed).all()


@ACTIVATIONS
@pytest.mark.parametrize("rows, F, edge", CASES, ids=[case[2] for case in CASES])
def test_forward_equals_the_oracle(rows, F, edge, activation, device):
    problem = Problem(rows, F, device)
    assert_close(problem.forward(kernels.swiglu, activation), problem.forward(reference.swiglu, activation), "swiglu")


@ACTIVATIONS
@pytest.mark.parametrize("rows, F, edge", CASES, ids=[case[2] for case in CASES])
def test_backward_equals_the_oracle(rows, F, edge, activation, device):
    problem = Problem(rows, F, device)
    d_h1, scored_h2, score_grads = problem.backward(kernels.swiglu_backward, activation)
    d_h1_ref, _, score_grads_ref = problem.backward(reference.swiglu_backward, activation)
    h2 = problem.forward(kernels.swiglu, activation)
    assert_close(d_h1, d_h1_ref, "swiglu")
    assert torch.equal(scored_h2, (problem.scores[: problem.R, None] * h2.float()).bfloat16())
    problem.assert_score_grads_close(score_grads, score_grads_ref, h2)


def test_backward_is_the_gradient(device):
    """Autograd of the formula itself, on a clamped case with values at, inside and beyond both limits."""
    problem = Problem((50,), 96, device)
    problem.h1[:, ::7] = CLAMPED.limit
    problem.h1[:, 1::7] = -CLAMPED.limit
    h1 = problem.h1.float().requires_grad_()
    gate, up = h1.chunk(2, dim=1)
    gate = torch.where(gate > CLAMPED.limit, CLAMPED.limit, gate)
    up = torch.where(up.abs() > CLAMPED.limit, up.sign().detach() * CLAMPED.limit, up)
    h2 = gate * torch.sigmoid(CLAMPED.alpha * gate) * (up + 1)
    h2.backward(problem.scores[: problem.R, None] * problem.g2.float())
    assert_close(problem.backward(kernels.swiglu_backward, CLAMPED)[0].float(), h1.grad, "path")


@ACTIVATIONS
def test_nan_stays_in_its_row_and_is_not_clamped_away(activation, device):
    problem = Problem((6,), 96, device)
    clean, clean_grads = (
        problem.forward(kernels.swiglu, activation),
        problem.backward(kernels.swiglu_backward, activation),
    )
    problem.h1[2, 5] = NAN  # gate
    problem.h1[4, 96 + 7] = NAN  # up
    h2 = problem.forward(kernels.swiglu, activation)
    assert h2.isnan().nonzero().tolist() == [[2, 5], [4, 7]]
    assert torch.equal(h2[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])
    for out, want in zip(problem.backward(kernels.swiglu_backward, activation), clean_grads, strict=True):
        assert torch.equal(out[[0, 1, 3, 5]], want[[0, 1, 3, 5]])
        assert out[2].isnan().any() and out[4].isnan().any()


@ACTIVATIONS
def test_equal_bits_at_any_place_and_number_of_programs(activation, device):
    problem = Problem((40, 30), 288, device)
    first = [problem.forward(kernels.swiglu, activation), *problem.backward(kernels.swiglu_backward, activation)]
    one = [
        problem.forward(kernels.swiglu, activation, num_sms=1),
        *problem.backward(kernels.swiglu_backward, activation, num_sms=1),
    ]
    order = torch.randperm(70).to(device)
    moved = Problem((70,), 288, device, start_h1=1, start_f=9)
    moved.h1, moved.g2 = problem.h1[order], problem.g2[order]
    moved.scores = torch.cat([problem.scores[order], problem.scores[:4]])
    elsewhere = [moved.forward(kernels.swiglu, activation), *moved.backward(kernels.swiglu_backward, activation)]
    for a, b, c in zip(first, one, elsewhere, strict=True):
        assert torch.equal(a, b) and torch.equal(a[order], c)


@settings(max_examples=25)
@given(rows=st.tuples(st.integers(0, 50), st.integers(0, 20)), chunks=st.integers(1, 10), clamped=st.booleans())
def test_any_size(device, rows, chunks, clamped):
    activation, problem = CLAMPED if clamped else PLAIN, Problem(rows, 32 * chunks, device)
    assert_close(problem.forward(kernels.swiglu, activation), problem.forward(reference.swiglu, activation), "swiglu")
    out, ref = (problem.backward(op, activation)[0] for op in (kernels.swiglu_backward, reference.swiglu_backward))
    assert_close(out, ref, "swiglu")


@ACTIVATIONS
def test_stop_leaves_without_touching_anything(activation, device):
    problem = Problem((9,), 64, device)
    problem.stop.fill_(1)
    problem.start_P.fill_(2**30)
    assert problem.forward(kernels.swiglu, activation).isnan().all()
    d_h1, g2, score_grads = problem.backward(kernels.swiglu_backward, activation)
    assert torch.equal(d_h1, problem.h1) and torch.equal(g2, problem.g2) and score_grads.isnan().all()


def test_rows_past_two_to_the_31_elements(device):
    """Offsets of rows that are behind 2^31 elements; on a CPU the memory before them is never touched."""
    problem, start = Problem((5,), 32, device), 2**26 + 3
    h1 = torch.empty(2**25 + 16, 64, dtype=torch.bfloat16, device=device)
    h2 = torch.empty(2**26 + 16, 32, dtype=torch.bfloat16, device=device)
    h1[2**25 + 3 : 2**25 + 8] = problem.h1
    h2[start:] = NAN
    starts = torch.tensor([2**25 + 3, start], device=device)
    kernels.swiglu(h1, starts[:1], h2, starts[1:], problem.start_P, activation=PLAIN, stop_1=problem.stop)
    assert torch.equal(h2[start : start + 5], problem.forward(kernels.swiglu, PLAIN))
    assert h2[start + 5 :].isnan().all()


def test_docstring_examples(device):
    def row(*values):
        return torch.tensor(values, dtype=torch.bfloat16, device=device)[:, None].expand(-1, 32)

    start = torch.zeros(1, dtype=torch.int64, device=device)
    start_P = torch.tensor([0, 2], dtype=torch.int32, device=device)
    h1 = torch.cat([row(20, 20), row(3, -9)], dim=1)
    h2 = torch.empty(2, 32, dtype=torch.bfloat16, device=device)
    clamped = Activation("swiglu_clamped", alpha=2.0, limit=7.0)
    for activation, want in ((PLAIN, [60, -180]), (clamped, [28, -42])):
        kernels.swiglu(h1, start, h2, start, start_P, activation=activation, stop_1=start)
        assert torch.equal(h2, row(*want))
    g2 = row(2, 2).contiguous()
    scores, score_grads = torch.full((2,), 0.5, device=device), torch.empty(2, device=device)
    kernels.swiglu_backward(h1, start, g2, start, scores, score_grads, start_P, activation=PLAIN, stop_1=start)
    assert torch.equal(h1[0], torch.cat([row(3), row(20)], dim=1)[0])
    assert torch.equal(g2[0], row(30)[0]) and score_grads[0] == 32 * 120


def test_the_bar_sees_faults(device):
    problem = Problem((20, 20), 96, device)
    ref = problem.forward(reference.swiglu, PLAIN)
    dropped, unscored = ref.clone(), problem.backward(reference.swiglu_backward, PLAIN)[1]
    dropped[7] = 0
    problem.h1 = problem.h1.roll(problem.F, dims=1)  # up and gate swapped
    for wrong in (torch.zeros_like(ref), dropped, unscored, problem.forward(reference.swiglu, PLAIN)):
        with pytest.raises(AssertionError, match="miss the bar"):
            assert_close(wrong, ref, "swiglu")


def test_refusals(device):
    problem, start = Problem((4,), 32, device), torch.zeros(1, dtype=torch.int64, device=device)
    options = {"activation": PLAIN, "stop_1": problem.stop}
    with pytest.raises(ValueError, match=r"swiglu: h1_X2F must be contiguous bf16 \[X, 64\]"):
        kernels.swiglu(problem.g2, start, problem.g2, start, problem.start_P, **options)
    with pytest.raises(ValueError, match="swiglu_backward: g2_XF must be contiguous bf16"):
        kernels.swiglu_backward(
            problem.h1, start, problem.g2.float(), start, problem.scores, problem.scores, problem.start_P, **options
        )


@pytest.mark.gpu
@ACTIVATIONS
def test_real_sizes(activation, device):
    problem = Problem((512, 431, 0, 600, 3000), 2880, device)
    assert_close(problem.forward(kernels.swiglu, activation), problem.forward(reference.swiglu, activation), "swiglu")
    out, ref = (problem.backward(op, activation) for op in (kernels.swiglu_backward, reference.swiglu_backward))
    assert_close(out[0], ref[0], "swiglu")
    problem.assert_score_grads_close(out[2], ref[2], problem.forward(kernels.swiglu, activation))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    """Row times stride overflows 32 bits: the last rows must equal the same rows alone."""
    R, zero = 2**20 + 3, torch.zeros(1, dtype=torch.int64, device=device)
    h1 = torch.randn(R, 2048, dtype=torch.bfloat16, device=device)
    last = h1[-5:].clone()
    h2, h2_last = (torch.empty(rows, 1024, dtype=torch.bfloat16, device=device) for rows in (R, 5))
    for a, out in ((h1, h2), (last, h2_last)):
        start_P = torch.tensor([0, len(a)], dtype=torch.int32, device=device)
        kernels.swiglu(a, zero, out, zero, start_P, activation=PLAIN, stop_1=zero)
    assert torch.equal(h2[-5:], h2_last)

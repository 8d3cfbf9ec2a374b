"""W13 with SwiGLU behind it: the bits of the two ops one after the other, near the oracle, h1 only where it is kept."""

import importlib
from dataclasses import dataclass

import pytest
import torch

from dist_moe import reference
from dist_moe.kernels_triton import grouped_gemm, swiglu
from dist_moe.kernels_triton.grouped_gemm_swiglu import grouped_gemm_swiglu
from dist_moe.shapes import Activation
from dist_moe.testing import assert_close

from .test_grouped_gemm import BACKENDS, BORDERS, implementation, put, randn, row_start


@dataclass(frozen=True)
class Case:
    edge: str
    rows: tuple[int, ...]  # by expert
    D: int = 160
    F: int = 96


CASES = [
    Case("no rows at all", (0,)),
    Case("one row", (1,)),
    Case("borders inside a tile", (128, 130, 65)),
    Case("first and last expert empty, L not a power of two", (0, 70, 7, 8, 0)),
    Case("narrowest", (3, 66), 32, 32),
    Case("columns of the next half in a box", (40, 5), 64, 160),
    Case("contraction of one step and a tail of 32", (64, 63), 96, 128),
]
DECODE = 8  # rows of an expert, on average
RAGGED = Case("ragged", (5, 70, 0, 130))
ACTIVATIONS = [Activation(), Activation("swiglu_clamped", alpha=1.5, limit=0.5)]


class Problem:
    """Unit-scale operands between rows of NaN; `run` gives h1 and h2 of a chain of ops, and what lies around them."""

    def __init__(self, case: Case, device: torch.device):
        self.R, self.F, self.device = sum(case.rows), case.F, device
        self.x = put(randn(self.R, case.D, device=device), 2)
        self.w13 = randn(len(case.rows), 2 * case.F, case.D, scale=case.D**-0.5, device=device)
        self.start_P = row_start(case.rows, device)
        self.stop = torch.zeros(1, dtype=torch.int64, device=device)

    def run(self, chain) -> tuple[torch.Tensor, torch.Tensor]:
        stale = (torch.full((self.R, width), 7.0, dtype=torch.bfloat16) for width in (2 * self.F, self.F))
        h1, h2 = (put(rows.to(self.device), start, fill=7.0) for rows, start in zip(stale, (4, 1), strict=True))
        chain(*self.x, self.w13, *h1, *h2, self.start_P)
        for view, start in (h1, h2):
            first = int(start)
            assert (view[:first] == 7.0).all() and (view[first + self.R :] == 7.0).all(), "rows of a neighbour"
        return tuple(view[int(start) :][: self.R] for view, start in (h1, h2))

    def fused(self, activation=ACTIVATIONS[0], op=grouped_gemm_swiglu, keep_h1=True, **how):
        how = {"keep_h1": keep_h1, "activation": activation, "rows_per_expert": DECODE, "stop_1": self.stop, **how}
        return self.run(lambda *operands: op(*operands, **how))

    def one_by_one(self, activation=ACTIVATIONS[0], rows_per_expert=DECODE):
        def chain(x, x_start, w13, h1, h1_start, h2, h2_start, start_P):
            how = {"rows_per_expert": rows_per_expert, "stop_1": self.stop}
            grouped_gemm.grouped_gemm(x, x_start, w13, h1, h1_start, start_P, **how)
            swiglu.swiglu(h1, h1_start, h2, h2_start, start_P, activation=activation, stop_1=self.stop)

        return self.run(chain)


@pytest.fixture(params=BACKENDS)
def op(request):
    """Every implementation of grouped_gemm_swiglu that runs here."""
    return implementation(request, "grouped_gemm_swiglu", "grouped_gemm_hopper").grouped_gemm_swiglu


def assert_equal(found, wanted) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.edge)
def test_bits_are_those_of_two_ops_and_near_the_oracle(case, activation, op, device):
    problem = Problem(case, device)
    found = problem.fused(activation, op)
    assert_equal(found, problem.one_by_one(activation))
    for a, b in zip(found, problem.fused(activation, reference.grouped_gemm_swiglu), strict=True):
        assert_close(a, b, "gemm")


@pytest.mark.sm90
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
def test_tiles_that_fit_have_the_bits_of_others_at_every_border(activation, device):
    hopper = importlib.import_module("dist_moe.kernels_triton.grouped_gemm_hopper")
    problem = Problem(Case("borders", BORDERS, 352, 224), device)
    for keep_h1 in (True, False):
        found = problem.fused(activation, hopper.grouped_gemm_swiglu, keep_h1)
        assert_equal(found, problem.fused(activation, keep_h1=keep_h1))


def test_h1_that_is_not_kept_is_not_touched(op, device):
    problem = Problem(RAGGED, device)
    for function in (op, reference.grouped_gemm_swiglu):
        kept, left = (problem.fused(op=function, keep_h1=keep) for keep in (True, False))
        assert torch.equal(left[1], kept[1]) and (left[0] == 7.0).all() and not (kept[0] == 7.0).all()


def test_a_stopped_call_touches_nothing(op, device):
    problem = Problem(RAGGED, device)
    problem.stop += 1
    for function in (op, reference.grouped_gemm_swiglu):
        assert all((rows == 7.0).all() for rows in problem.fused(op=function))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
@pytest.mark.parametrize("F, columns", [(32, 64), (96, 256), (160, 128)])
def test_bits_are_those_of_two_ops_with_the_tiles_of_many_rows_too(F, columns, activation, device):
    assert grouped_gemm.pick_config("forward", 2 * F, 64, 512).block_n == columns
    problem = Problem(Case("many rows", RAGGED.rows, 64, F), device)
    assert_equal(problem.fused(activation, rows_per_expert=512), problem.one_by_one(activation, rows_per_expert=512))


def test_programs_do_not_change_bits(op, device):
    problem = Problem(RAGGED, device)
    assert_equal(problem.fused(op=op, num_sms=1), problem.fused(op=op))


def test_the_example_of_the_kernel(op, device):
    x, w13 = torch.ones(3, 32), torch.ones(1, 64, 32)
    h1, h2 = (torch.zeros(3, width) for width in (64, 32))
    x, w13, h1, h2 = (t.bfloat16().to(device) for t in (x, w13, h1, h2))
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    how = {"keep_h1": True, "activation": Activation(), "stop_1": zero}
    op(x, zero, w13, h1, zero, h2, zero, row_start((3,), device), **how)
    assert (h1 == 32).all() and (h2 == 1024).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("w13_L2FD", lambda p: setattr(p, "w13", p.w13.float())),
        ("x_XD", lambda p: setattr(p, "x", (p.x[0][:, :-32], p.x[1]))),
        ("h1_X2F", lambda p: setattr(p, "F", p.F + 32)),
        ("F must be a multiple of 32", lambda p: (setattr(p, "w13", p.w13[:, :160].contiguous()), setattr(p, "F", 80))),
    ],
)
def test_operands_that_do_not_fit_are_named(name, change, op, device):
    problem = Problem(RAGGED, device)
    change(problem)
    with pytest.raises(ValueError, match=f"grouped_gemm_swiglu: .*{name}"):
        problem.fused(op=op)

"""The PTX of every sm_100 product, executed in the emulator, against the oracle: equal bits on exact operands."""

import dataclasses

import pytest
import torch

from dist_moe.formats import MXFP8_E4M3, NVFP4
from dist_moe.kernels_cute.tiles import Tile

from .kinds import KINDS, Kind

pytestmark = pytest.mark.emulated

EACH = pytest.mark.parametrize("kind", KINDS, ids=[kind.id for kind in KINDS])
SCHEDULES = 3


def assert_equal_bits(kind: Kind, problem, *, schedules=SCHEDULES, **options) -> None:
    """Under several schedules, and nothing else touched than what the oracle touches."""
    from .emulated import run

    want = problem.expected()
    before = {name: out.clone() for name, out in problem.outs.items()}
    assert problem.stopped or any(not equal(want[name], before[name]) for name in want)
    for seed in range(schedules):
        for name, out in problem.outs.items():
            out.view(torch.uint8).copy_(before[name].view(torch.uint8))
        run(problem, options.get("tile", kind.tile), seed=seed, programs=options.get("programs", 2), **kind.flags)
        for name, out in problem.outs.items():
            assert equal(out, want[name]), f"{name}, schedule {seed}: {first_difference(out, want[name])}"


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, but for the sign of a zero, which depends on what the first product is added to."""
    same = a.view(torch.uint8) == b.view(torch.uint8)
    if a.dtype in (torch.bfloat16, torch.float32):
        same = same.view(*a.shape, a.element_size()).all(dim=-1) | (a == 0) & (b == 0)
    return bool(same.all())


def first_difference(out: torch.Tensor, want: torch.Tensor) -> str:
    at = tuple((out.view(torch.uint8) != want.view(torch.uint8)).nonzero()[0].tolist())
    return f"{int((out != want).sum())} values, first at byte {at}"


def sizes(kind: Kind, N: int, K: int) -> tuple[int, int]:
    """N such that SwiGLU's halves are whole atoms."""
    return (512 if N > 256 else 256, K) if kind.op == "swiglu" else (N, K)


@EACH
def test_one_tile_of_one_stage(kind):
    assert_equal_bits(kind, kind.problem((5,), *sizes(kind, 128, 128)), programs=1)


@EACH
def test_ragged_experts_and_a_ragged_last_step(kind):
    """No row, 1, 127 and 129 rows; columns and contraction end inside a tile, of e2m1 inside an instruction."""
    assert_equal_bits(kind, kind.problem((1, 0, 127, 129), *sizes(kind, 288, 352)), programs=3)


@EACH
def test_a_ring_that_is_used_again(kind):
    """Two stages for five steps, so that every wait matters; several tiles a program, so that accumulators do."""
    tile = dataclasses.replace(kind.tile, stages=2)
    rows = (129, 400, 3) if kind.op == "wgrad" else (129, 3)
    N, K = sizes(kind, 160, 5 * tile.block_k - 32)
    if kind.op == "dgrad":
        N, K = K, N
    assert_equal_bits(kind, kind.problem(rows, N, K), tile=tile, programs=1)


@EACH
def test_a_dimension_of_2880(kind):
    """22.5 tiles: of gpt-oss. SwiGLU has its contraction alone, as the scales of up would begin inside an atom."""
    rows = (40,) if kind.op == "wgrad" else (3,)
    N, K = (256, 2880) if kind.op == "swiglu" else (64, 2880)
    assert_equal_bits(kind, kind.problem(rows, N, K), schedules=1)
    if kind.op not in ("swiglu", "wgrad"):
        assert_equal_bits(kind, kind.problem(rows, K, N), schedules=1)


FEW = pytest.mark.parametrize(
    "kind",
    [k for k in KINDS if (k.op, k.tile.block_n) in (("forward", 64), ("forward", 128), ("dgrad", 128), ("wgrad", 128))],
    ids=lambda k: k.id,
)


@FEW
def test_more_experts_than_a_warp_has_lanes(kind):
    rows = [0] * 70
    rows[3], rows[31], rows[32], rows[69] = 2, 129, 1, 5
    assert_equal_bits(kind, kind.problem(tuple(rows), 64, 64), programs=3)


@FEW
def test_no_rows_at_all(kind):
    """wgrad writes zeros, the others nothing."""
    from .emulated import run

    problem = kind.problem((0, 0), 64, 64)
    want = problem.expected()
    run(problem, kind.tile, programs=3)
    assert all(equal(problem.outs[name], want[name]) for name in want)


@FEW
def test_a_stop_word(kind):
    from .emulated import run

    problem = kind.problem((3, 129), 64, 64, stopped=True)
    before = {name: out.clone() for name, out in problem.outs.items()}
    run(problem, kind.tile, programs=2)
    assert all(equal(problem.outs[name], before[name]) for name in before)


@pytest.mark.parametrize("format", [MXFP8_E4M3, NVFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("columns", [(0, 128), (128, 160), (256, 32)])
@pytest.mark.parametrize(("block_n", "swap_ab"), [(128, False), (256, False), (64, True)])
def test_windows_of_columns(format, columns, block_n, swap_ab):
    kind = Kind("forward", format, Tile(format, block_n, swap_ab))
    assert_equal_bits(kind, kind.problem((3, 130), 288, 96, columns=columns), schedules=1)

"""The PTX of every sm_100 product, executed in the emulator, against the oracle: equal bits on exact operands."""

import dataclasses

import pytest
import torch

from dist_moe.formats import MXFP8_E4M3, NVFP4
from dist_moe.kernels_cute.tiles import Tile

from .kinds import KINDS, Kind
from .problems import word

pytestmark = pytest.mark.emulated

EACH = pytest.mark.parametrize("kind", KINDS, ids=[kind.id for kind in KINDS])
SCHEDULES = 3


def assert_equal_bits(kind: Kind, problem, *, schedules=SCHEDULES, writes=True, **options) -> None:
    """Under several schedules, and nothing else touched than what the oracle touches; writes: it touches something."""
    from .emulated import run

    want = problem.expected()
    before = {name: out.clone() for name, out in problem.outs.items()}
    assert writes == any(not equal(want[name], before[name]) for name in want)
    options = {"tile": kind.tile} | options | kind.flags
    for seed in range(schedules):
        for name, out in problem.outs.items():
            out.view(torch.uint8).copy_(before[name].view(torch.uint8))
        run(problem, seed=seed, **options)
        for name, out in problem.outs.items():
            assert equal(out, want[name]), f"{name}, schedule {seed}: {first_difference(out, want[name])}"


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, but for the sign of a zero, which depends on what the first product is added to, and of a NaN."""
    same = a.view(torch.uint8) == b.view(torch.uint8)
    if a.dtype in (torch.bfloat16, torch.float32):
        same = same.view(*a.shape, a.element_size()).all(dim=-1)
        same |= (a == 0) & (b == 0) | a.isnan() & b.isnan()
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
    assert_equal_bits(kind, kind.problem(rows, N, K))
    if kind.op not in ("swiglu", "wgrad"):
        assert_equal_bits(kind, kind.problem(rows, K, N))


@pytest.mark.parametrize("unroll", [2, 4])
@pytest.mark.parametrize("kind", KINDS[1:5], ids=[kind.id for kind in KINDS[1:5]])
def test_a_loop_that_is_written_out(kind, unroll):
    """As a kernel configuration may ask for; five steps are no multiple of it."""
    tile = dataclasses.replace(kind.tile, stages=2, unroll=unroll)
    assert_equal_bits(kind, kind.problem((70,), 160, 5 * tile.block_k - 32), tile=tile, programs=1)


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
    assert_equal_bits(kind, kind.problem((0, 0), 64, 64), programs=3, writes=kind.op == "wgrad")


@FEW
def test_a_stop_word(kind):
    assert_equal_bits(kind, kind.problem((3, 129), 64, 64, stopped=True), writes=False)


@pytest.mark.parametrize("format", [MXFP8_E4M3, NVFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("columns", [(0, 128), (128, 160), (256, 32)])
@pytest.mark.parametrize(("block_n", "swap_ab"), [(128, False), (256, False), (64, True)])
def test_windows_of_columns(format, columns, block_n, swap_ab):
    kind = Kind("forward", format, Tile(format, block_n, swap_ab))
    assert_equal_bits(kind, kind.problem((3, 130), 288, 96, columns=columns))


@pytest.mark.parametrize("kind", [k for k in KINDS if k.op == "swiglu"], ids=lambda k: k.id)
def test_swiglu_of_zeros_nan_and_far_values(kind):
    """Blocks of zeros, NaN in a value and in a scale, blocks below the least scale, and infinite ones."""
    problem = kind.problem((9, 3), 512, 128, edges=True)
    want = problem.expected()
    scales = want["h2_scales"].view(torch.uint8)
    assert (scales == 0).any() and (scales == 0xFF).any() and ((scales > 0) & (scales < 0xFF)).any()
    assert_equal_bits(kind, problem)


@pytest.mark.parametrize("kind", [k for k in KINDS if k.op in ("forward", "swiglu")], ids=lambda k: k.id)
def test_places_beyond_32_bits(kind):
    """First rows up to 2^30 and first bytes of 2^33, by buffers that begin so much earlier."""
    assert_equal_bits(kind, kind.problem((3, 130), *sizes(kind, 160, 96)), far=True)


def test_what_a_product_refuses():
    """With the reason, before anything is launched."""
    from dist_moe.kernels_cute import grouped_gemm

    with pytest.raises(ValueError, match="F must be a multiple of 128, got 96; use the two ops"):
        Kind("swiglu", MXFP8_E4M3, Tile(MXFP8_E4M3, 256)).problem((3,), 192, 64)
    forward = Kind("forward", MXFP8_E4M3, Tile(MXFP8_E4M3, 128))
    with pytest.raises(ValueError, match="columns must begin at a multiple of 128 here"):
        forward.problem((3,), 160, 64, columns=(64, 64))
    problem = forward.problem((3,), 160, 64)
    given, (a, w) = problem.given, problem.parts
    tables = (word(0), problem.row_start_P, problem.num_rows_L)
    for name, wrong in (
        ("start_1", a._replace(start_1=None)),
        ("scales_start_1", a._replace(scales_start_1=word(0).int())),
    ):
        with pytest.raises(ValueError, match=f"grouped_gemm_scaled: {name} must be int64 .1. on cpu, got"):
            grouped_gemm.rows_arguments(
                "grouped_gemm_scaled",
                wrong,
                w.values,
                w.scales,
                given["out"],
                *tables,
                format=MXFP8_E4M3,
                stop_1=word(0),
            )
    with pytest.raises(ValueError, match="w_values must begin at a multiple of 64 bytes"):
        grouped_gemm.addresses(given | {"w_values": given["w_values"].flatten()[1:]})

"""W13 with SwiGLU in its epilogue: h2 from registers, and h1 only for who will read it again. BF16, summed in FP32.

    h1[r] = bf16(x[r] @ w13[e].T) = [gate | up]        h2[r] = bf16(swiglu(h1[r]))

Bits are those of grouped_gemm and swiglu one after the other: h1 is rounded before it is activated. What is saved is a
pass over h1, 6 F bytes a row, and without h1's own 4 F.

A tile has as many columns of gate as of up, the same ones: a descriptor of rank 4 over w13 seen as [L, 2, F, D] brings
both in one box, which is one operand of the tensor cores, and a thread then holds both halves of what it activates.

Grid, reads, writes and barriers: as grouped_gemm. h2 must not lie over x or h1, which other programs still read.
"""

from dataclasses import replace

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_moe.shapes import next_power_of_2

from . import grouped_gemm
from ._device import begin, delay, num_programs
from ._launch import launched
from .grouped_gemm import (
    GROUP_M,
    Config,
    _row_tile,
    _row_tile_ends,
    _store_tile,
    _tile_place,
    check_rows,
    check_weight,
)
from .swiglu import gate_up

# Products are rounded before they are added, as in swiglu. An SM holds one program, which may use all registers that an
# instruction can name: left alone, Triton 3.9 takes fewer and spills.
OPTIONS = {"enable_fp_fusion": False, "maxnreg": 255}
STAGES = 4  # at least: with three, the best of the product alone, two of three shapes were slower (benchmarks.tune)


def pick_config(kind: str, N: int, K: int, rows_per_expert: int | None = None) -> Config:
    """The tile of the product alone, with stages enough."""
    config = grouped_gemm.pick_config(kind, N, K, rows_per_expert)
    return replace(config, num_stages=max(config.num_stages, STAGES))


@triton.jit
def _activate(
    h1_ptr, h2_ptr, gate, up, row, col, row_end, F, alpha, limit, KEEP_H1: tl.constexpr, CLAMPED: tl.constexpr
):
    """Write h2 of a tile, and h1 where it is kept; by halves, as the FP32 of wide ones beside both operands spills."""
    BLOCK_M: tl.constexpr = gate.shape[0]
    BLOCK_F: tl.constexpr = gate.shape[1]
    if BLOCK_F > 64:
        gates = gate.reshape(BLOCK_M, 2, BLOCK_F // 2).permute(0, 2, 1).split()
        ups = up.reshape(BLOCK_M, 2, BLOCK_F // 2).permute(0, 2, 1).split()
        for half in tl.static_range(2):
            at = col + half * (BLOCK_F // 2)
            _activate(h1_ptr, h2_ptr, gates[half], ups[half], row, at, row_end, F, alpha, limit, KEEP_H1, CLAMPED)
    else:
        if KEEP_H1:
            _store_tile(h1_ptr, gate, row, col, row_end, F, 2 * F, False)
            _store_tile(h1_ptr + F, up, row, col, row_end, F, 2 * F, False)
        g, u, sig = gate_up(gate.to(tl.float32), up.to(tl.float32), alpha, limit, CLAMPED)
        _store_tile(h2_ptr, g * sig * u, row, col, row_end, F, F, False)


@launched
@triton.jit(do_not_specialize_on_alignment=["x_start_ptr", "h1_start_ptr", "h2_start_ptr", "stop_ptr"])
def _grouped_gemm_swiglu(
    x_desc,  # [X, D] bf16
    x_start_ptr,  # [1] i64
    w13_desc,  # [L, 2, F, D] bf16
    h1_ptr,  # [X, 2F] bf16
    h1_start_ptr,  # [1] i64
    h2_ptr,  # [X, F] bf16
    h2_start_ptr,  # [1] i64
    row_start_ptr,  # [L + 1] i32
    stop_ptr,  # [1] i64
    L,
    D,
    F,
    alpha,
    limit,
    KEEP_H1: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_L: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Program p takes tiles p, p + programs, ... of BLOCK_M rows by BLOCK_F columns of h2.

    Example: D = F = 32, x = 1 and w13 = 1 everywhere: h1 is 32, and h2 = bf16(32 * sig(32) * 32) = 1024.
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    x_start = tl.load(x_start_ptr).to(tl.int32)
    h2_ptr += tl.load(h2_start_ptr) * F
    if KEEP_H1:
        h1_ptr += tl.load(h1_start_ptr) * 2 * F
    ends_L = _row_tile_ends(row_start_ptr, L, BLOCK_M, BLOCK_L)
    num_tiles_m = tl.max(ends_L)
    num_tiles_f = tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_f, tl.num_programs(0), flatten=True):
        delay(tile)
        tile_m, tile_f = _tile_place(tile, num_tiles_m, num_tiles_f, GROUP_M)
        expert, row, row_end = _row_tile(ends_L, tile_m, row_start_ptr, BLOCK_M)
        col = tile_f * BLOCK_F
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_F), tl.float32)
        for k in range(0, D, BLOCK_K):
            x = x_desc.load([x_start + row, k])
            w = w13_desc.load([expert, 0, col, k]).reshape(2 * BLOCK_F, BLOCK_K)
            acc = tl.dot(x, w.T, acc)
        gate, up = acc.to(tl.bfloat16).reshape(BLOCK_M, 2, BLOCK_F).permute(0, 2, 1).split()
        _activate(h1_ptr, h2_ptr, gate, up, row, col, row_end, F, alpha, limit, KEEP_H1, CLAMPED)


def check_swiglu(op: str, x_XD, w13_L2FD, h2_XF, h1_X2F=None) -> tuple[int, int, int]:
    """The shape of w13, of operands that every implementation takes, h1 if it may be kept."""
    check_weight(op, "w13_L2FD", w13_L2FD)
    _, N, D = w13_L2FD.shape
    if h1_X2F is not None:
        check_rows(op, "h1_X2F", h1_X2F, N)
    for name, rows, width in (("x_XD", x_XD, D), ("h2_XF", h2_XF, N // 2)):
        check_rows(op, name, rows, width)
    if N % 64:
        raise ValueError(f"{op}: F must be a multiple of 32, got {N // 2}")
    return tuple(w13_L2FD.shape)


def grouped_gemm_swiglu(
    x_XD,
    x_start_1,
    w13_L2FD,
    h1_X2F,
    h1_start_1,
    h2_XF,
    h2_start_1,
    row_start_P,
    *,
    keep_h1,
    activation,
    rows_per_expert=None,
    stop_1,
    num_sms=None,
    config=None,
) -> None:
    """h1 and h2 of the rows of every local expert from x; without keep_h1 of h1 nothing is written.

    Args:    x_XD, h1_X2F, h2_XF: bf16, contiguous, any number of rows; those of the call begin at x_start_1,
             h1_start_1, h2_start_1 (int64, device).  w13_L2FD: bf16 [L, 2F, D], contiguous, gate rows, then up rows; D
             and F multiples of 32.  row_start_P: int32 [L + 1], device.  stop_1: nothing is touched when it is not 0.
             num_sms: at most that many programs.  rows_per_expert: see pick_config, which config overrides.
    Raises:  ValueError for other dtypes, layouts or widths.
    Source:  reference.grouped_gemm_swiglu.
    """
    L, N, D = check_swiglu("grouped_gemm_swiglu", x_XD, w13_L2FD, h2_XF, h1_X2F)
    F = N // 2
    config = config or pick_config("forward", N, D, rows_per_expert)
    block_f = config.block_n // 2
    _grouped_gemm_swiglu[(num_programs(x_XD.device, num_sms),)](
        TensorDescriptor(x_XD, list(x_XD.shape), [D, 1], [config.block_m, config.block_k]),
        x_start_1,
        TensorDescriptor(w13_L2FD, [L, 2, F, D], [N * D, F * D, D, 1], [1, 2, block_f, config.block_k]),
        h1_X2F,
        h1_start_1,
        h2_XF,
        h2_start_1,
        row_start_P,
        stop_1,
        L,
        D,
        F,
        activation.alpha,
        activation.limit,
        KEEP_H1=keep_h1,
        CLAMPED=activation.clamped,
        BLOCK_M=config.block_m,
        BLOCK_F=block_f,
        BLOCK_K=config.block_k,
        BLOCK_L=max(32, next_power_of_2(L)),
        GROUP_M=GROUP_M,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **OPTIONS,
    )

"""Grouped GEMM over the rows r of each local expert e, row_start_P[e] <= r < row_start_P[e + 1]: BF16, summed in FP32.

    forward  out[r] = bf16(a[r] @ w[e].T)         dgrad  out[r] = bf16(dy[r] @ w[e])
    wgrad    out[e] = round(dy_e.T @ x_e)         or     round(fp32(out[e]) + dy_e.T @ x_e)

Grid: persistent, one program an SM; the counts are read on the device. Reads and writes local memory only (activation
buffer, weights, weight gradients); no barrier before or after it.

Operands come by TMA through descriptors over the whole activation buffer, moved to the first row of the stage by a
device offset. A tile may therefore read rows of a neighbour, and those may hold NaN. In forward and dgrad they only
reach output rows that are not stored; in wgrad rows are contracted, so the last step selects zeros for them in both
operands (0 * NaN is NaN). Weights have a descriptor of rank 3, so that a tail of the contraction over N or K reads
zeros and not the next expert; the tensor cores take such a tile from shared memory like one of rank 2. TMA needs rows
at multiples of 16 bytes: N and K are multiples of 32.
"""

import re
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_moe.shapes import cdiv, next_power_of_2

from ._device import begin, delay, num_programs
from ._launch import launched

MAX_ROW = 2**31 - 1  # TMA coordinates are int32

GROUP_M = 8  # row tiles that go together before the next column tile: a tile of weights is read from L2 that often


@dataclass(frozen=True)
class Config:
    """Tile of one program: block_m x block_n outputs, block_k of the contraction a step (rows in wgrad)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# One row for each output tile. Bytes in flight (stages * (block_m + block_n) * block_k * 2), at most 192 KiB, leave
# room in 227 KiB for what the compiler stages of the output tile. docs/performance.md compares with torch._grouped_mm.
# `python -m benchmarks.tune` holds what pick_config chooses against the other rows and neighbours; nothing is tuned at
# run time.
CONFIGS = {
    (128, 256): Config(128, 256, 64, num_warps=8, num_stages=3),
    (128, 128): Config(128, 128, 64, num_warps=4, num_stages=4),
    (128, 64): Config(128, 64, 64, num_warps=4, num_stages=6),
    (64, 256): Config(64, 256, 64, num_warps=4, num_stages=4),
    (64, 128): Config(64, 128, 128, num_warps=4, num_stages=4),
}


def _block_n(width: int) -> int:
    """128x128 tiles were 5 to 10% slower than 128x256 in the prototype: taken where 256 pads by more than that."""
    if width <= 64:
        return 64
    return 128 if cdiv(width, 256) * 256 > 1.1 * cdiv(width, 128) * 128 else 256


def pick_config(kind: str, N: int, K: int, rows_per_expert: int | None = None, preset: str | None = None) -> Config:
    """Tile of a product with weights [L, N, K].

    Args:  kind: "forward", "dgrad" or "wgrad".  rows_per_expert: what an expert gets on average, at most.
           preset: a Bf16GroupedGemmPreset, a hint for forward and dgrad; tiles of 256 and 512 rows become 128.
    """
    if kind == "wgrad":
        return CONFIGS[128, _block_n(K)]
    if preset is not None:
        block_m, block_n = map(int, re.search(r"bm(\d+)_bn(\d+)", preset).groups())
        return CONFIGS[min(block_m, 128), block_n]
    if rows_per_expert is not None and rows_per_expert <= 64:
        return CONFIGS[64, 128]  # decode: the weights are streamed once, many small tiles share the SMs
    return CONFIGS[128, _block_n(N if kind == "forward" else K)]


@triton.jit
def _row_tile_ends(row_start_ptr, L, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr):
    """Cumulative number of row tiles by expert, int32 [BLOCK_L]; row_start [0, 3, 3, 8], BLOCK_M 2 -> [2, 2, 5, 5]."""
    offs_l = tl.arange(0, BLOCK_L)
    start = tl.load(row_start_ptr + offs_l, mask=offs_l < L, other=0)
    end = tl.load(row_start_ptr + offs_l + 1, mask=offs_l < L, other=0)
    return tl.cumsum(tl.cdiv(end - start, BLOCK_M))


@triton.jit
def _row_tile(ends_L, tile_m, row_start_ptr, BLOCK_M: tl.constexpr):
    """Expert, first row and end of the expert's rows of a row tile; tile 3 of the example above -> (2, 5, 8)."""
    expert = tl.sum((ends_L <= tile_m).to(tl.int32))
    first_tile = tl.max(tl.where(ends_L <= tile_m, ends_L, 0))
    row = tl.load(row_start_ptr + expert) + (tile_m - first_tile) * BLOCK_M
    return expert, row, tl.load(row_start_ptr + expert + 1)


@triton.jit
def _tile_place(tile, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile, by groups of GROUP_M row tiles; 3 x 2 tiles, GROUP_M 2 -> 00 10 01 11 20 21."""
    group = tile // (GROUP_M * num_tiles_n)
    group_size = tl.minimum(num_tiles_m - group * GROUP_M, GROUP_M)
    place = tile % (GROUP_M * num_tiles_n)
    return group * GROUP_M + place % group_size, place // group_size


@triton.jit
def _store_tile(out_ptr, acc, row, col, row_end, width, pitch, ACCUMULATE: tl.constexpr):
    """Write an FP32 tile at (row, col) of a row-major [.., pitch] tensor, no row from row_end, no column from width.

    Pointer stores: a TMA store cannot stop at an expert's last row, and its staging does not fit beside 3 stages.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    if ACCUMULATE and BLOCK_N > 64:  # by halves: the old values of a whole tile beside the accumulator spill
        left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        _store_tile(out_ptr, left, row, col, row_end, width, pitch, ACCUMULATE)
        _store_tile(out_ptr, right, row, col + BLOCK_N // 2, row_end, width, pitch, ACCUMULATE)
    else:
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        out_ptrs = out_ptr + rows[:, None].to(tl.int64) * pitch + cols[None, :]
        mask = (rows[:, None] < row_end) & (cols[None, :] < width)
        if ACCUMULATE:
            acc += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


# Words of the place record are at odd and even words: no variant for each.
@launched
@triton.jit(do_not_specialize_on_alignment=["a_start_ptr", "out_start_ptr", "stop_ptr"])
def _rows_times_weight_kernel(
    a_desc,  # [X, contraction] bf16
    a_start_ptr,  # [1] i64
    w_desc,  # [L, N, K] bf16
    out_ptr,  # [X, width] bf16
    out_start_ptr,  # [1] i64
    row_start_ptr,  # [L + 1] i32
    stop_ptr,  # [1] i64
    L,
    width,
    contraction,
    DGRAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_L: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Forward (w transposed) and dgrad; program p takes output tiles p, p + programs, ...

    flatten makes one loop of tiles and steps, so that the loads of a tile start under the end of the one before.
    Example: row_start [0, 1, 3], a[r] = r + 1 in each of K = 32 columns, w[0] = 1 and w[1] = 2 everywhere: every column
    of out is [32, 128, 192].
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    a_start = tl.load(a_start_ptr).to(tl.int32)
    out_ptr += tl.load(out_start_ptr) * width
    ends_L = _row_tile_ends(row_start_ptr, L, BLOCK_M, BLOCK_L)
    num_tiles_m = tl.max(ends_L)
    num_tiles_n = tl.cdiv(width, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0), flatten=True):
        delay(tile)
        tile_m, tile_n = _tile_place(tile, num_tiles_m, num_tiles_n, GROUP_M)
        expert, row, row_end = _row_tile(ends_L, tile_m, row_start_ptr, BLOCK_M)
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, contraction, BLOCK_K):
            a = a_desc.load([a_start + row, k])
            if DGRAD:
                acc = tl.dot(a, w_desc.load([expert, k, col]).reshape(BLOCK_K, BLOCK_N), acc)
            else:
                acc = tl.dot(a, w_desc.load([expert, col, k]).reshape(BLOCK_N, BLOCK_K).T, acc)
        _store_tile(out_ptr, acc, row, col, row_end, width, width, False)


@launched
@triton.jit(do_not_specialize_on_alignment=["dy_start_ptr", "x_start_ptr", "stop_ptr"])
def _wgrad_kernel(
    dy_desc,  # [X, N] bf16
    dy_start_ptr,  # [1] i64
    x_desc,  # [X, K] bf16
    x_start_ptr,  # [1] i64
    out_ptr,  # [L, N, K] bf16 or fp32
    row_start_ptr,  # [L + 1] i32
    stop_ptr,  # [1] i64
    L,
    N,
    K,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Weight gradients; program p takes tiles p, p + programs, ... of the [L, N, K] outputs.

    The steps of an expert are BLOCK_K whole rows each and at most one tail: the whole ones feed the tensor cores
    straight from what TMA wrote, the tail goes through registers to lose the rows behind the end.
    Example: row_start [0, 1, 1, 3], dy[r] = r + 1, x[r] = 1: out is 1, 0 (untouched when accumulating) and 2 + 3 = 5.
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    dy_start = tl.load(dy_start_ptr).to(tl.int32)
    x_start = tl.load(x_start_ptr).to(tl.int32)
    num_tiles_m = tl.cdiv(N, BLOCK_M)
    num_tiles_n = tl.cdiv(K, BLOCK_N)
    tiles_per_expert = num_tiles_m * num_tiles_n
    for tile in tl.range(tl.program_id(0), L * tiles_per_expert, tl.num_programs(0)):
        delay(tile)
        expert = tile // tiles_per_expert
        tile_m, tile_n = _tile_place(tile % tiles_per_expert, num_tiles_m, num_tiles_n, GROUP_M)
        row_start = tl.load(row_start_ptr + expert)
        row_end = tl.load(row_start_ptr + expert + 1)
        tail = row_start + (row_end - row_start) // BLOCK_K * BLOCK_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for row in range(row_start, tail, BLOCK_K):
            dy = dy_desc.load([dy_start + row, tile_m * BLOCK_M])
            x = x_desc.load([x_start + row, tile_n * BLOCK_N])
            acc = tl.dot(dy.T, x, acc)
        if tail < row_end:
            is_row = (tail + tl.arange(0, BLOCK_K) < row_end)[:, None]
            dy = tl.where(is_row, dy_desc.load([dy_start + tail, tile_m * BLOCK_M]), 0.0)
            x = tl.where(is_row, x_desc.load([x_start + tail, tile_n * BLOCK_N]), 0.0)
            acc = tl.dot(dy.T, x, acc)
        if row_start < row_end or not ACCUMULATE:
            out_expert_ptr = out_ptr + expert.to(tl.int64) * N * K
            _store_tile(out_expert_ptr, acc, tile_m * BLOCK_M, tile_n * BLOCK_N, N, K, K, ACCUMULATE)


def check_rows(op: str, name: str, view_XC: Tensor, width: int) -> None:
    if view_XC.dtype != torch.bfloat16 or view_XC.shape[1:] != (width,) or not view_XC.is_contiguous():
        found = f"{view_XC.dtype} {list(view_XC.shape)}, strides {view_XC.stride()}"
        raise ValueError(f"{op}: {name} must be contiguous bf16 [X, {width}], got {found}")
    assert len(view_XC) <= MAX_ROW, f"{op}: {name} has more rows than a TMA coordinate can name"


def check_weight(op: str, name: str, w_LNK: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> None:
    fits = w_LNK.ndim == 3 and w_LNK.shape[1] % 32 == 0 and w_LNK.shape[2] % 32 == 0
    if w_LNK.dtype not in dtypes or not fits or not w_LNK.is_contiguous():
        wanted = f"contiguous {' or '.join(map(str, dtypes))} [L, N, K] with N and K multiples of 32"
        found = f"{w_LNK.dtype} {list(w_LNK.shape)}, strides {w_LNK.stride()}"
        raise ValueError(f"{op}: {name} must be {wanted}, got {found}")


def check_product(op: str, a: Tensor, w_LNK: Tensor, out: Tensor) -> tuple[int, int, int]:
    """L, width and contraction of forward or dgrad, of operands that every implementation takes."""
    check_weight(op, "w_LNK", w_LNK)
    L, N, K = w_LNK.shape
    dgrad = op == "grouped_gemm_dgrad"
    contraction, width = (N, K) if dgrad else (K, N)
    check_rows(op, "dy_XN" if dgrad else "a_XK", a, contraction)
    check_rows(op, "out_XK" if dgrad else "out_XN", out, width)
    return L, width, contraction


def check_wgrad(dy_XN: Tensor, x_XK: Tensor, out_LNK: Tensor) -> None:
    """What every implementation of grouped_gemm_wgrad asks of its tensors."""
    check_weight("grouped_gemm_wgrad", "out_LNK", out_LNK, (torch.bfloat16, torch.float32))
    check_rows("grouped_gemm_wgrad", "dy_XN", dy_XN, out_LNK.shape[1])
    check_rows("grouped_gemm_wgrad", "x_XK", x_XK, out_LNK.shape[2])


def _rows_times_weight(op, a, a_start_1, w_LNK, out, out_start_1, row_start_P, stop_1, num_sms, config) -> None:
    L, width, contraction = check_product(op, a, w_LNK, out)
    dgrad = op == "grouped_gemm_dgrad"
    w_block = [1, config.block_k, config.block_n] if dgrad else [1, config.block_n, config.block_k]
    _rows_times_weight_kernel[(num_programs(a.device, num_sms),)](
        TensorDescriptor(a, list(a.shape), [contraction, 1], [config.block_m, config.block_k]),
        a_start_1,
        TensorDescriptor(w_LNK, list(w_LNK.shape), list(w_LNK.stride()), w_block),
        out,
        out_start_1,
        row_start_P,
        stop_1,
        L,
        width,
        contraction,
        DGRAD=dgrad,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BLOCK_L=max(32, next_power_of_2(L)),  # few variants to compile
        GROUP_M=GROUP_M,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def grouped_gemm(
    a_XK,
    a_start_1,
    w_LNK,
    out_XN,
    out_start_1,
    row_start_P,
    *,
    stop_1,
    preset=None,
    num_sms=None,
    rows_per_expert=None,
    config=None,
) -> None:
    """out[out_start + r] = bf16(a[a_start + r] @ w[e].T) for the rows r of each local expert e.

    Args:    a_XK, out_XN: bf16, contiguous, any number of rows; the rows of the stage begin at a_start_1, out_start_1
             (int64, device).  w_LNK: bf16, contiguous, N and K multiples of 32.  row_start_P: int32 [L + 1], device.
             stop_1: nothing is touched when it is not 0.  preset, rows_per_expert: see pick_config, which config
             overrides.  num_sms: at most that many programs.
    Raises:  ValueError for other dtypes, layouts or widths.
    Source:  reference.grouped_gemm.
    """
    config = config or pick_config("forward", *w_LNK.shape[1:], rows_per_expert, preset)
    _rows_times_weight(
        "grouped_gemm", a_XK, a_start_1, w_LNK, out_XN, out_start_1, row_start_P, stop_1, num_sms, config
    )


def grouped_gemm_dgrad(
    dy_XN,
    dy_start_1,
    w_LNK,
    out_XK,
    out_start_1,
    row_start_P,
    *,
    stop_1,
    preset=None,
    num_sms=None,
    rows_per_expert=None,
    config=None,
) -> None:
    """out[out_start + r] = bf16(dy[dy_start + r] @ w[e]); arguments as in grouped_gemm.

    Programs run at different speeds, so the rows written must not overlap the rows read.
    """
    config = config or pick_config("dgrad", *w_LNK.shape[1:], rows_per_expert, preset)
    _rows_times_weight(
        "grouped_gemm_dgrad", dy_XN, dy_start_1, w_LNK, out_XK, out_start_1, row_start_P, stop_1, num_sms, config
    )


def grouped_gemm_wgrad(
    dy_XN,
    dy_start_1,
    x_XK,
    x_start_1,
    row_start_P,
    out_LNK,
    *,
    accumulate,
    stop_1,
    num_sms=None,
    config=None,
) -> None:
    """out[e] = round(dy_e.T @ x_e), or round(fp32(out[e]) + dy_e.T @ x_e) when accumulating.

    Args:    dy_XN, x_XK: bf16, contiguous, rows as in grouped_gemm.  out_LNK: bf16 or fp32, contiguous; an expert
             without rows gets zeros, or is left untouched when accumulating.
    Raises:  ValueError for other dtypes, layouts or widths.
    Source:  reference.grouped_gemm_wgrad.
    """
    check_wgrad(dy_XN, x_XK, out_LNK)
    L, N, K = out_LNK.shape
    config = config or pick_config("wgrad", N, K)
    _wgrad_kernel[(num_programs(dy_XN.device, num_sms),)](
        TensorDescriptor(dy_XN, list(dy_XN.shape), [N, 1], [config.block_k, config.block_m]),
        dy_start_1,
        TensorDescriptor(x_XK, list(x_XK.shape), [K, 1], [config.block_k, config.block_n]),
        x_start_1,
        out_LNK,
        row_start_P,
        stop_1,
        L,
        N,
        K,
        ACCUMULATE=accumulate,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=GROUP_M,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )

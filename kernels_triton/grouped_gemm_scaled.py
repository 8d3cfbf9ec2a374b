"""Grouped GEMM on block-scaled operands over the real rows r of each local expert e, summed in FP32.

    forward  out[r] = bf16(a[r] @ w[e].T)         dgrad  out[r] = bf16(dy[r] @ w[e])
    wgrad    out[e] = round(dy_e.T @ x_e)         or     round(fp32(out[e]) + dy_e.T @ x_e)

An operand is values times scales, a scale for each block of the contraction; NVFP4 multiplies the sum by the inverse
outer scale of the row, then by that of the expert. Expert e has num_rows_L[e] rows from row_start_P[e], a multiple of
128; rows of padding are neither read for a result nor written.

Grid: persistent, one program an SM; the counts are read on the device. Reads and writes local memory only; no barrier
before or after it. Values come by TMA as in grouped_gemm, scales by plain loads from blocked order.

Two ways to multiply. With SCALED_DOT the tensor cores take the scales (sm_100). Without, operands become BF16 in
registers: exact for two-level formats, and with E8M0 scales for the codes LOW to HIGH, which keep every value of the
format a normal BF16 number. Outputs of rows or columns with another code (0, of a block of zeros, is one) are made once
more, each block of 32 by itself without its scales, and the FP32 product then by both at once, so that no step
overflows. The bits of an output depend on its own row and column alone, not on what else lies in the tile.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_moe import formats
from dist_moe.formats import Format
from dist_moe.quantized import check_scaled_rows, check_scaled_wgrad
from dist_moe.shapes import next_power_of_2

from . import grouped_gemm
from ._device import delay, is_interpreting, num_programs
from ._launch import launched
from ._scaled import ATOM_C, ATOM_R, E8M0_NAN, ELEMENTS
from .grouped_gemm import GROUP_M, MAX_ROW, _store_tile, _tile_place

BF16_NAN = tl.constexpr(0x7FC0)

# In how many parts a tile is made once more: two FP32 tiles beside each other would spill.
ROWS_PARTS, WGRAD_PARTS = tl.constexpr(2), tl.constexpr(4)


@dataclass(frozen=True)
class Config(grouped_gemm.Config):
    """As of grouped_gemm, block_k in values."""

    scaled_dot: bool = False  # the tensor cores multiply by the scales


# (rows of a tile, scaled_dot). Not tuned: chosen to compile without spills.
CONFIGS = {
    (128, False): Config(128, 128, 64, num_warps=8, num_stages=4),
    (64, False): Config(64, 128, 64, num_warps=8, num_stages=4),
    (128, True): Config(128, 128, 128, num_warps=4, num_stages=3, scaled_dot=True),
}
# With 4 warps Triton 3.9 spills.
WGRAD_SCALED_DOT = Config(128, 128, 128, num_warps=8, num_stages=3, scaled_dot=True)


def pick_config(kind: str, *, scaled_dot: bool, rows_per_expert: int | None = None) -> Config:
    """Tile of a product; kind is "forward", "dgrad" or "wgrad", rows_per_expert what an expert gets on average."""
    if kind == "wgrad" and scaled_dot:
        return WGRAD_SCALED_DOT
    decode = kind != "wgrad" and rows_per_expert is not None and rows_per_expert <= 64
    return CONFIGS[64 if decode and not scaled_dot else 128, scaled_dot]


@functools.cache
def has_scaled_dot(device: torch.device) -> bool:
    """Whether tensor cores take block scales: compute capability 10.x."""
    return not is_interpreting() and torch.cuda.get_device_capability(device)[0] == 10


def exact_codes(format: Format) -> tuple[int, int]:
    """First and last E8M0 code with which every value of a format is a normal BF16 number.

    Example: e4m3, from 2^-9 to 448: 2^-117 to 2^119, codes 10 to 246.
    """
    least = format.min_exponent - format.mantissa_bits
    greatest = format.min_exponent + (format.largest_code >> format.mantissa_bits) - 1
    return formats.E8M0_BIAS - 126 - least, formats.E8M0_BIAS + 127 - greatest


# ---- operands ------------------------------------------------------------------------------------------------------


@triton.jit
def _row_tile_ends(num_rows_ptr, L, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr):
    """Cumulative number of row tiles by expert, int32 [BLOCK_L]; num_rows [3, 0, 5], BLOCK_M 2 -> [2, 2, 5, 5]."""
    offs_l = tl.arange(0, BLOCK_L)
    return tl.cumsum(tl.cdiv(tl.load(num_rows_ptr + offs_l, mask=offs_l < L, other=0), BLOCK_M))


@triton.jit
def _row_tile(ends_L, tile_m, row_start_ptr, num_rows_ptr, BLOCK_M: tl.constexpr):
    """Expert, first row and end of the expert's real rows of a row tile.

    Tile 3 of the example above with row_start [0, 128, 128, 256] -> (2, 130, 133).
    """
    expert = tl.sum((ends_L <= tile_m).to(tl.int32))
    first_tile = tl.max(tl.where(ends_L <= tile_m, ends_L, 0))
    row_start = tl.load(row_start_ptr + expert)
    return expert, row_start + (tile_m - first_tile) * BLOCK_M, row_start + tl.load(num_rows_ptr + expert)


@triton.jit
def _scale_codes(scales_ptr, row, row_end, col, col_end, num_cols, R: tl.constexpr, S: tl.constexpr, ONE: tl.constexpr):
    """Codes (uint8) [R, S] from (row, col) of a scale matrix in blocked order; from row_end or col_end on they are 1.0.

    row is a multiple of R, which divides 128, and col of S or of 4: the tile lies in one row of whole atoms. num_cols
    counts padding.
    """
    tl.static_assert(ATOM_R % R == 0)
    scales_ptr += (row // ATOM_R).to(tl.int64) * num_cols * ATOM_R
    rows = (row % ATOM_R + tl.arange(0, R))[:, None]
    cols = tl.max_contiguous(tl.multiple_of(col + tl.arange(0, S), S), S)[None, :]
    ptrs = scales_ptr + (cols // ATOM_C * (ATOM_R * ATOM_C) + rows % 32 * 16 + rows // 32 * 4 + cols % ATOM_C)
    if S <= ATOM_C:  # there is no atom of which nothing is asked
        codes = tl.load(ptrs)
    else:
        codes = tl.load(ptrs, mask=cols < num_cols, other=ONE)
    return tl.where((rows + row // ATOM_R * ATOM_R < row_end) & (cols < col_end), codes.to(tl.int32), ONE).to(tl.uint8)


@triton.jit
def _bf16_bits(bits):
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _unscaled(values, R: tl.constexpr, C: tl.constexpr, E2M1: tl.constexpr):
    """BF16 [R, C] of values without their scales; e2m1 from pairs [R, C / 2]: 0 0.5 1 1.5 2 3 4 6 and negatives."""
    if E2M1:
        byte = values.to(tl.int32)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (R, C))
        magnitude = code & 7
        bits = tl.where(magnitude < 2, magnitude * 0x3F00, (magnitude << 6) + 0x3F00)
        v = _bf16_bits(bits | (code & 8) << 12)
    else:
        v = values.to(tl.bfloat16)
    return v


@triton.jit
def _scale_values(codes, TWO_LEVEL: tl.constexpr):
    """BF16 of scale codes; E8M0 code 0 as 0, which is not the scale: see _far."""
    if TWO_LEVEL:
        scales = codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:
        codes = codes.to(tl.int32)
        scales = _bf16_bits(tl.where(codes == E8M0_NAN, BF16_NAN, codes << 7))
    return scales


@triton.jit
def _scaled(v, codes, TWO_LEVEL: tl.constexpr):
    """v [R, C] BF16 times the scales of the blocks of its rows, codes [R, S]."""
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1]
    S: tl.constexpr = codes.shape[1]
    return tl.reshape(tl.reshape(v, (R, S, C // S)) * _scale_values(codes, TWO_LEVEL)[:, :, None], (R, C))


@triton.jit
def _scaled_columns(v, codes):
    """v [R, C] BF16 times the scales of the blocks of its columns, E8M0 codes [C, S]."""
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1]
    S: tl.constexpr = codes.shape[1]
    return tl.reshape(tl.reshape(v, (S, R // S, C)) * _scale_values(tl.trans(codes), False)[:, None, :], (R, C))


@triton.jit
def _far(codes, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Whether E8M0 codes are neither from LOW to HIGH nor NaN."""
    codes = codes.to(tl.int32)
    return ((codes < LOW) | (codes > HIGH) & (codes != E8M0_NAN)).to(tl.int32)


@triton.jit
def _nan_or_one(codes):
    return _bf16_bits(tl.where(codes.to(tl.int32) == E8M0_NAN, BF16_NAN, 0x3F80))


@triton.jit
def _times_powers(product, a_codes, b_codes):
    """FP32 product [M, N] times 2^(a - 127) * 2^(b - 127), codes [M, 1] and [N, 1], by two factors of one direction.

    Example: codes 254 and 0: once by 2^0 and once by 2^0, where 2^127 alone might overflow.
    """
    exponent = a_codes.to(tl.int32) + tl.trans(b_codes.to(tl.int32)) - 254
    half = exponent >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)  # at 2^-127, which this makes 0, the result is 0
    return product * first * ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_some(out_ptr, acc, row, col, row_end, width, far_M, far_N, WHICH: tl.constexpr, ACCUMULATE: tl.constexpr):
    """_store_tile of the outputs whose row or column is far (WHICH 1), or of the others (WHICH 0)."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    if BLOCK_N > 32:  # as in _store_tile; the masks take registers too
        left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        far_left, far_right = far_N.reshape(2, BLOCK_N // 2).permute(1, 0).split()
        _store_some(out_ptr, left, row, col, row_end, width, far_M, far_left, WHICH, ACCUMULATE)
        _store_some(out_ptr, right, row, col + BLOCK_N // 2, row_end, width, far_M, far_right, WHICH, ACCUMULATE)
    else:
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        out_ptrs = out_ptr + rows[:, None].to(tl.int64) * width + cols[None, :]
        mask = (rows[:, None] < row_end) & (cols[None, :] < width)
        mask &= (far_M[:, None] | far_N[None, :]) == WHICH
        if ACCUMULATE:
            acc += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


# ---- rows times weight ---------------------------------------------------------------------------------------------


# Words of the place record are at odd and even words: no variant for each.
@launched
@triton.jit(
    do_not_specialize_on_alignment=[
        "a_start_ptr",
        "a_scales_start_ptr",
        "out_start_ptr",
        "stop_ptr",
        "a_outer_start_ptr",
    ]
)
def _rows_times_weight_kernel(
    a_desc,  # [X, contraction] values
    a_block_desc,  # the same, 32 values a row
    a_start_ptr,  # [1] i64
    a_scales_ptr,  # bytes
    a_scales_start_ptr,  # [1] i64
    w_desc,  # [L, N, K] values
    w_block_desc,  # the same, 32 values of the contraction
    w_scales_ptr,  # bytes, [L, whole atoms]
    out_ptr,  # [X, width] bf16
    out_start_ptr,  # [1] i64
    row_start_ptr,  # [L + 1] i32
    num_rows_ptr,  # [L] i32
    a_outer_inv_ptr,  # fp32, or None
    a_outer_start_ptr,  # [1] i64, or None
    w_outer_inv_ptr,  # [L] fp32, or None
    stop_ptr,  # [1] i64
    L,
    width,
    contraction,
    DGRAD: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ONE: tl.constexpr,
    SCALED_DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_L: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Forward (w transposed) and dgrad; program p takes output tiles p, p + programs, ...

    Example: row_start [0, 128, 256], num_rows [1, 2], a[r] = 1, 2, 3 for rows 0, 128, 129 in each of K = 32 columns,
    w[0] = 1 and w[1] = 2 everywhere: these rows of out are 32, 128 and 192, the others as they were.
    """
    E2M1: tl.constexpr = FORMAT == "e2m1"
    PER_BYTE: tl.constexpr = 2 if E2M1 else 1
    PART_N: tl.constexpr = BLOCK_N // ROWS_PARTS
    NUM_SCALES: tl.constexpr = BLOCK_K // BLOCK
    if tl.load(stop_ptr) != 0:
        return
    a_start = tl.load(a_start_ptr).to(tl.int32)
    a_scales_ptr += tl.multiple_of(tl.load(a_scales_start_ptr), 16)
    out_ptr += tl.load(out_start_ptr) * width
    if TWO_LEVEL:
        a_outer_inv_ptr += tl.load(a_outer_start_ptr)
    S = contraction // BLOCK
    padded_S = tl.cdiv(S, ATOM_C) * ATOM_C
    scales_per_expert = (tl.cdiv(width, ATOM_R) * ATOM_R).to(tl.int64) * padded_S
    ends_L = _row_tile_ends(num_rows_ptr, L, BLOCK_M, BLOCK_L)
    num_tiles_m = tl.max(ends_L)
    num_tiles_n = tl.cdiv(width, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0)):
        delay(tile)
        tile_m, tile_n = _tile_place(tile, num_tiles_m, num_tiles_n, GROUP_M)
        expert, row, row_end = _row_tile(ends_L, tile_m, row_start_ptr, num_rows_ptr, BLOCK_M)
        row = tl.multiple_of(row, BLOCK_M)
        col = tile_n * BLOCK_N
        expert_scales_ptr = w_scales_ptr + expert * scales_per_expert
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        far_a = tl.zeros((BLOCK_M, NUM_SCALES), tl.int32)
        far_w = tl.zeros((BLOCK_N, NUM_SCALES), tl.int32)
        for k in range(0, contraction, BLOCK_K):
            s = k // BLOCK
            a_codes = _scale_codes(a_scales_ptr, row, row_end, s, S, padded_S, BLOCK_M, NUM_SCALES, ONE)
            w_codes = _scale_codes(expert_scales_ptr, col, width, s, S, padded_S, BLOCK_N, NUM_SCALES, ONE)
            a = a_desc.load([a_start + row, k // PER_BYTE])
            if DGRAD:
                w = w_desc.load([expert, k, col]).reshape(BLOCK_K, BLOCK_N).T
            else:
                w = w_desc.load([expert, col, k // PER_BYTE]).reshape(BLOCK_N, BLOCK_K // PER_BYTE)
            if SCALED_DOT:
                if TWO_LEVEL:
                    a_codes = a_codes.to(tl.float8e4nv, bitcast=True)
                    w_codes = w_codes.to(tl.float8e4nv, bitcast=True)
                acc = tl.dot_scaled(a, a_codes, FORMAT, w.T, w_codes, FORMAT, acc)
            else:
                a = _scaled(_unscaled(a, BLOCK_M, BLOCK_K, E2M1), a_codes, TWO_LEVEL)
                w = _scaled(_unscaled(w, BLOCK_N, BLOCK_K, E2M1), w_codes, TWO_LEVEL)
                acc = tl.dot(a, w.T, acc)
                if not TWO_LEVEL:
                    far_a |= _far(a_codes, LOW, HIGH)
                    far_w |= _far(w_codes, LOW, HIGH)
        if TWO_LEVEL:
            rows = row + tl.arange(0, BLOCK_M)
            acc *= tl.load(a_outer_inv_ptr + rows, mask=rows < row_end, other=0.0)[:, None]
            acc *= tl.load(w_outer_inv_ptr + expert)
        far_M = tl.max(far_a, axis=1)
        far_N = tl.max(far_w, axis=1)
        if SCALED_DOT or TWO_LEVEL:
            _store_tile(out_ptr, acc, row, col, row_end, width, False)
        elif tl.max(far_M, axis=0) + tl.max(far_N, axis=0) == 0:
            _store_tile(out_ptr, acc, row, col, row_end, width, False)
        else:
            _store_some(out_ptr, acc, row, col, row_end, width, far_M, far_N, 0, False)
            for i in tl.range(BLOCK_N // PART_N):
                part_col = col + i * PART_N
                part = tl.zeros((BLOCK_M, PART_N), tl.float32)
                far_part = tl.zeros((PART_N, 1), tl.int32)
                for k in tl.range(0, contraction, BLOCK, num_stages=1):
                    s = k // BLOCK
                    a_codes = _scale_codes(a_scales_ptr, row, row_end, s, S, padded_S, BLOCK_M, 1, ONE)
                    w_codes = _scale_codes(expert_scales_ptr, part_col, width, s, S, padded_S, PART_N, 1, ONE)
                    a = _unscaled(a_block_desc.load([a_start + row, k // PER_BYTE]), BLOCK_M, BLOCK, E2M1)
                    if DGRAD:
                        w = w_block_desc.load([expert, k, part_col]).reshape(BLOCK, PART_N).T
                    else:
                        w = w_block_desc.load([expert, part_col, k // PER_BYTE]).reshape(PART_N, BLOCK // PER_BYTE)
                    w = _unscaled(w, PART_N, BLOCK, E2M1) * _nan_or_one(w_codes)
                    part += _times_powers(tl.dot(a * _nan_or_one(a_codes), w.T), a_codes, w_codes)
                    far_part |= _far(w_codes, LOW, HIGH)
                far_columns = tl.max(far_part, axis=1)
                _store_some(out_ptr, part, row, part_col, row_end, width, far_M, far_columns, 1, False)


# ---- weight gradients ----------------------------------------------------------------------------------------------


@triton.jit
def _columns(desc, start, row, row_end, col, R: tl.constexpr, C: tl.constexpr):
    """Values [R, C] from (row, col), those of rows from row_end on as zeros."""
    is_row = (row + tl.arange(0, R) < row_end)[:, None]
    values = desc.load([start + row, col])
    zeros = tl.zeros((R, C), tl.uint8).to(values.dtype, bitcast=True)
    return tl.where(is_row, values, zeros)


@launched
@triton.jit(
    do_not_specialize_on_alignment=[
        "dy_start_ptr",
        "dy_scales_start_ptr",
        "x_start_ptr",
        "x_scales_start_ptr",
        "stop_ptr",
    ]
)
def _wgrad_kernel(
    dy_desc,  # [X, N] values
    dy_block_desc,  # the same, 32 rows
    dy_start_ptr,  # [1] i64
    dy_scales_ptr,  # bytes
    dy_scales_start_ptr,  # [1] i64
    x_desc,  # [X, K] values
    x_block_desc,  # the same, 32 rows
    x_start_ptr,  # [1] i64
    x_scales_ptr,  # bytes
    x_scales_start_ptr,  # [1] i64
    out_ptr,  # [L, N, K] bf16 or fp32
    row_start_ptr,  # [L + 1] i32
    num_rows_ptr,  # [L] i32
    stop_ptr,  # [1] i64
    L,
    N,
    K,
    dy_scale_cols,
    x_scale_cols,
    ACCUMULATE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ONE: tl.constexpr,
    SCALED_DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Weight gradients; program p takes tiles p, p + programs, ... of the [L, N, K] outputs.

    Example: row_start [0, 128, 128, 256], num_rows [1, 0, 2], dy = 1, 2, 3 in rows 0, 128, 129 and x = 1: out is 1,
    0 (untouched when accumulating) and 2 + 3 = 5.
    """
    NUM_SCALES: tl.constexpr = BLOCK_K // BLOCK
    PART_N: tl.constexpr = BLOCK_N // WGRAD_PARTS
    if tl.load(stop_ptr) != 0:
        return
    dy_start = tl.load(dy_start_ptr).to(tl.int32)
    x_start = tl.load(x_start_ptr).to(tl.int32)
    dy_scales_ptr += tl.multiple_of(tl.load(dy_scales_start_ptr), 16)
    x_scales_ptr += tl.multiple_of(tl.load(x_scales_start_ptr), 16)
    num_tiles_m = tl.cdiv(N, BLOCK_M)
    num_tiles_n = tl.cdiv(K, BLOCK_N)
    tiles_per_expert = num_tiles_m * num_tiles_n
    for tile in tl.range(tl.program_id(0), L * tiles_per_expert, tl.num_programs(0)):
        delay(tile)
        expert = tile // tiles_per_expert
        tile_m, tile_n = _tile_place(tile % tiles_per_expert, num_tiles_m, num_tiles_n, GROUP_M)
        n = tile_m * BLOCK_M
        k = tile_n * BLOCK_N
        row_start = tl.multiple_of(tl.load(row_start_ptr + expert), 128)
        row_end = row_start + tl.load(num_rows_ptr + expert)
        s_end = tl.cdiv(row_end, BLOCK)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        far_dy = tl.zeros((BLOCK_M, NUM_SCALES), tl.int32)
        far_x = tl.zeros((BLOCK_N, NUM_SCALES), tl.int32)
        for row in range(row_start, row_end, BLOCK_K):
            s = row // BLOCK
            dy_codes = _scale_codes(dy_scales_ptr, n, N, s, s_end, dy_scale_cols, BLOCK_M, NUM_SCALES, ONE)
            x_codes = _scale_codes(x_scales_ptr, k, K, s, s_end, x_scale_cols, BLOCK_N, NUM_SCALES, ONE)
            dy = _columns(dy_desc, dy_start, row, row_end, n, BLOCK_K, BLOCK_M)
            x = _columns(x_desc, x_start, row, row_end, k, BLOCK_K, BLOCK_N)
            if SCALED_DOT:
                acc = tl.dot_scaled(dy.T, dy_codes, FORMAT, x, x_codes, FORMAT, acc)
            else:
                dy = _scaled_columns(dy.to(tl.bfloat16), dy_codes)
                acc = tl.dot(dy.T, _scaled_columns(x.to(tl.bfloat16), x_codes), acc)
                far_dy |= _far(dy_codes, LOW, HIGH)
                far_x |= _far(x_codes, LOW, HIGH)
        n_end = N
        if ACCUMULATE:
            n_end = tl.where(row_start < row_end, N, 0)  # nothing is touched without rows
        out_expert_ptr = out_ptr + expert.to(tl.int64) * N * K
        far_M = tl.max(far_dy, axis=1)
        far_N = tl.max(far_x, axis=1)
        if SCALED_DOT:
            _store_tile(out_expert_ptr, acc, n, k, n_end, K, ACCUMULATE)
        elif tl.max(far_M, axis=0) + tl.max(far_N, axis=0) == 0:
            _store_tile(out_expert_ptr, acc, n, k, n_end, K, ACCUMULATE)
        else:
            _store_some(out_expert_ptr, acc, n, k, n_end, K, far_M, far_N, 0, ACCUMULATE)
            for i in tl.range(BLOCK_N // PART_N):
                part_k = k + i * PART_N
                part = tl.zeros((BLOCK_M, PART_N), tl.float32)
                far_part = tl.zeros((PART_N, 1), tl.int32)
                for row in tl.range(row_start, row_end, BLOCK, num_stages=1):
                    s = row // BLOCK
                    dy_codes = _scale_codes(dy_scales_ptr, n, N, s, s_end, dy_scale_cols, BLOCK_M, 1, ONE)
                    x_codes = _scale_codes(x_scales_ptr, part_k, K, s, s_end, x_scale_cols, PART_N, 1, ONE)
                    dy = _columns(dy_block_desc, dy_start, row, row_end, n, BLOCK, BLOCK_M).to(tl.bfloat16)
                    x = _columns(x_block_desc, x_start, row, row_end, part_k, BLOCK, PART_N).to(tl.bfloat16)
                    dy *= tl.trans(_nan_or_one(dy_codes))
                    x *= tl.trans(_nan_or_one(x_codes))
                    part += _times_powers(tl.dot(dy.T, x), dy_codes, x_codes)
                    far_part |= _far(x_codes, LOW, HIGH)
                far_columns = tl.max(far_part, axis=1)
                _store_some(out_expert_ptr, part, n, part_k, n_end, K, far_M, far_columns, 1, ACCUMULATE)


# ---- launchers -----------------------------------------------------------------------------------------------------

_E4M3 = formats.MXFP8_E4M3
_ONE = {_E4M3.scale_dtype: formats.E8M0_BIAS, _E4M3.value_dtype: (1 - _E4M3.min_exponent) << _E4M3.mantissa_bits}


def _format_options(format: Format) -> dict:
    low, high = exact_codes(format)
    element = ELEMENTS[format.value_dtype]
    return {"FORMAT": element, "BLOCK": format.block, "LOW": low, "HIGH": high, "ONE": _ONE[format.scale_dtype]}


def _tile_options(config: Config) -> dict:
    return {
        "SCALED_DOT": config.scaled_dot,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": GROUP_M,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _bytes(tensor: Tensor) -> Tensor:
    """For dtypes that Triton does not know."""
    return tensor.view(torch.uint8)


def _descriptors(op: str, values: Tensor, format: Format, block: list[int], short_block: list[int]) -> list:
    """Two over the same values: tiles of a step, and of one block of the contraction."""
    assert values.shape[-2] <= MAX_ROW, f"{op}: more rows than a TMA coordinate can name"
    values = _bytes(values) if format.values_per_byte == 2 else values
    return [TensorDescriptor(values, list(values.shape), list(values.stride()), b) for b in (block, short_block)]


def _rows_times_weight(
    op,
    a,
    a_start_1,
    a_scales,
    a_scales_start_1,
    w,
    w_scales,
    out,
    out_start_1,
    row_start_P,
    num_rows_L,
    *,
    format,
    stop_1,
    num_sms,
    rows_per_expert,
    config,
    a_outer_inv=None,
    a_outer_inv_start_1=None,
    w_outer_inv=None,
) -> None:
    dgrad = op == "grouped_gemm_scaled_dgrad"
    outer = {"a_outer_inv": a_outer_inv, "w_outer_inv": w_outer_inv}
    tensors = (a, a_scales, w, w_scales, out, row_start_P, num_rows_L)
    L, N, K = check_scaled_rows(op, *tensors, format=format, dgrad=dgrad, **outer)
    contraction, width = (N, K) if dgrad else (K, N)
    if config is None:
        kind = "dgrad" if dgrad else "forward"
        config = pick_config(kind, scaled_dot=has_scaled_dot(a.device), rows_per_expert=rows_per_expert)
    M, C, step, short = config.block_m, config.block_n, config.block_k, max(format.block, 32)  # at least 16 bytes
    per_byte = format.values_per_byte

    def weight_block(k: int, columns: int) -> list[int]:
        return [1, k, columns] if dgrad else [1, columns, k // per_byte]

    a_descs = _descriptors(op, a, format, [M, step // per_byte], [M, short // per_byte])
    w_descs = _descriptors(op, w, format, weight_block(step, C), weight_block(short, C // ROWS_PARTS.value))
    _rows_times_weight_kernel[(num_programs(a.device, num_sms),)](
        *a_descs,
        a_start_1,
        _bytes(a_scales),
        a_scales_start_1,
        *w_descs,
        _bytes(w_scales),
        out,
        out_start_1,
        row_start_P,
        num_rows_L,
        a_outer_inv,
        a_outer_inv_start_1,
        w_outer_inv,
        stop_1,
        L,
        width,
        contraction,
        DGRAD=dgrad,
        TWO_LEVEL=format.two_level,
        **_format_options(format),
        BLOCK_L=max(32, next_power_of_2(L)),  # few variants to compile
        **_tile_options(config),
    )


def grouped_gemm_scaled(
    a_values_XK,
    a_start_1,
    a_scales,
    a_scales_start_1,
    w_values_LNK,
    w_scales,
    out_XN,
    out_start_1,
    row_start_P,
    num_rows_L,
    *,
    format,
    a_outer_inv=None,
    a_outer_inv_start_1=None,
    w_outer_inv_L=None,
    stop_1,
    num_sms=None,
    rows_per_expert=None,
    config=None,
) -> None:
    """out[r] = bf16(a[r] @ w[e].T), NVFP4 times the outer scales; see reference_products.grouped_gemm_scaled.

    Args:    rows_per_expert: see pick_config, which config overrides.  num_sms: at most that many programs.
    Raises:  ValueError for other dtypes, layouts or widths.
    """
    a, w, out = (a_values_XK, a_start_1, a_scales, a_scales_start_1), (w_values_LNK, w_scales), (out_XN, out_start_1)
    _rows_times_weight(
        "grouped_gemm_scaled",
        *a,
        *w,
        *out,
        row_start_P,
        num_rows_L,
        format=format,
        stop_1=stop_1,
        num_sms=num_sms,
        rows_per_expert=rows_per_expert,
        config=config,
        a_outer_inv=a_outer_inv,
        a_outer_inv_start_1=a_outer_inv_start_1,
        w_outer_inv=w_outer_inv_L,
    )


def grouped_gemm_scaled_dgrad(
    dy_values_XN,
    dy_start_1,
    dy_scales,
    dy_scales_start_1,
    w_values_LNK,
    w_transposed_scales,
    out_XK,
    out_start_1,
    row_start_P,
    num_rows_L,
    *,
    format,
    stop_1,
    num_sms=None,
    rows_per_expert=None,
    config=None,
) -> None:
    """out[r] = bf16(dy[r] @ w[e]); see reference_products.grouped_gemm_scaled_dgrad, and grouped_gemm_scaled."""
    dy, w, out = (
        (dy_values_XN, dy_start_1, dy_scales, dy_scales_start_1),
        (w_values_LNK, w_transposed_scales),
        (out_XK, out_start_1),
    )
    _rows_times_weight(
        "grouped_gemm_scaled_dgrad",
        *dy,
        *w,
        *out,
        row_start_P,
        num_rows_L,
        format=format,
        stop_1=stop_1,
        num_sms=num_sms,
        rows_per_expert=rows_per_expert,
        config=config,
    )


def grouped_gemm_scaled_wgrad(
    dy_values_XN,
    dy_start_1,
    dy_scales,
    dy_scales_start_1,
    x_values_XK,
    x_start_1,
    x_scales,
    x_scales_start_1,
    row_start_P,
    num_rows_L,
    out_LNK,
    *,
    format,
    accumulate,
    stop_1,
    num_sms=None,
    config=None,
) -> None:
    """out[e] = dy_e.T @ x_e, rounded once; see reference_products.grouped_gemm_scaled_wgrad.

    Args:    num_sms, config: as in grouped_gemm_scaled.
    Raises:  ValueError for other dtypes, layouts or widths, and for formats with two values in a byte.
    """
    op = "grouped_gemm_scaled_wgrad"
    tensors = (dy_values_XN, dy_scales, x_values_XK, x_scales, row_start_P, num_rows_L, out_LNK)
    check_scaled_wgrad(op, *tensors, format=format)
    L, N, K = out_LNK.shape
    config = config or pick_config("wgrad", scaled_dot=has_scaled_dot(out_LNK.device))
    step, C = config.block_k, config.block_n
    _wgrad_kernel[(num_programs(out_LNK.device, num_sms),)](
        *_descriptors(op, dy_values_XN, format, [step, config.block_m], [format.block, config.block_m]),
        dy_start_1,
        _bytes(dy_scales),
        dy_scales_start_1,
        *_descriptors(op, x_values_XK, format, [step, C], [format.block, C // WGRAD_PARTS.value]),
        x_start_1,
        _bytes(x_scales),
        x_scales_start_1,
        out_LNK,
        row_start_P,
        num_rows_L,
        stop_1,
        L,
        N,
        K,
        dy_scales.shape[1],
        x_scales.shape[1],
        ACCUMULATE=accumulate,
        **_format_options(format),
        **_tile_options(config),
    )

"""Operands of block-scaled products on the device: tiles of experts' real rows, values and scales of a tile."""

import triton
import triton.language as tl

from ._scaled import ATOM_C, ATOM_R


@triton.jit
def row_tile_ends(num_rows_ptr, L, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr):
    """Cumulative number of row tiles by expert, int32 [BLOCK_L]; num_rows [3, 0, 5], BLOCK_M 2 -> [2, 2, 5, 5]."""
    offs_l = tl.arange(0, BLOCK_L)
    return tl.cumsum(tl.cdiv(tl.load(num_rows_ptr + offs_l, mask=offs_l < L, other=0), BLOCK_M))


@triton.jit
def row_tile(ends_L, tile_m, row_start_ptr, num_rows_ptr, BLOCK_M: tl.constexpr):
    """Expert, first row and end of the expert's real rows of a row tile.

    Tile 3 of the example above with row_start [0, 128, 128, 256] -> (2, 130, 133).
    """
    expert = tl.sum((ends_L <= tile_m).to(tl.int32))
    first_tile = tl.max(tl.where(ends_L <= tile_m, ends_L, 0))
    row_start = tl.load(row_start_ptr + expert)
    return expert, row_start + (tile_m - first_tile) * BLOCK_M, row_start + tl.load(num_rows_ptr + expert)


@triton.jit
def scale_codes(scales_ptr, row, col, num_cols, R: tl.constexpr, S: tl.constexpr):
    """Codes (uint8) [R, S] from (row, col) of a scale matrix in blocked order; behind its last column they are 0.

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
        codes = tl.load(ptrs, mask=cols < num_cols, other=0)
    return codes


@triton.jit
def e2m1_values(values, R: tl.constexpr, C: tl.constexpr):
    """BF16 [R, C] from pairs [R, C / 2]: 0 0.5 1 1.5 2 3 4 6 and negatives, each times 2^-126.

    Exponent and mantissa are put where BF16 has the low ones of its own, so that 0.5, too, is what it is: subnormal.
    """
    codes = tl.join(values, values >> 4).to(tl.int16)
    bits = ((codes & 7) << 6) | ((codes & 8) << 12)
    return tl.reshape(bits, (R, C)).to(tl.bfloat16, bitcast=True)


@triton.jit
def scaled_e2m1(values, codes, R: tl.constexpr, C: tl.constexpr):
    """BF16 [R, C] of pairs [R, C / 2] times their e4m3 scales [R, S] times 2^-8: exact, in at most six bits."""
    S: tl.constexpr = codes.shape[1]
    scales = (codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * 2.0**118).to(tl.bfloat16)
    v = tl.reshape(e2m1_values(values, R, C), (R, S, C // S))
    return tl.reshape(v * scales[:, :, None], (R, C))

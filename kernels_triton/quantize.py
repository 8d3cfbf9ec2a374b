"""Quantisers of the block-scaled formats: rows, columns and weights, equal to the oracle bit for bit.

    one level:        m = amax * fl(1 / largest),  E8M0 scale = m rounded up to a power of two,  q = v / scale
    two levels:       outer = 2688 / amax of the row or expert,  e4m3 scale = amax of the block * outer / 6,
                      q = v * (outer / scale)

reference_formats has the exact formulas, _scaled.py their arithmetic.

Grid: persistent over tiles of rows and columns, a tile being a whole row where it has an outer scale; weights have a
program a tile. Reads and writes local memory only; no barrier before or after it.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_moe import formats
from dist_moe.quantized import Quantized, QuantizedWeights, columns_out, rows_out, weights_out
from dist_moe.shapes import align, cdiv, next_power_of_2

from ._device import begin, delay, num_programs
from ._launch import launched
from ._scaled import (
    ATOM_C,
    ATOM_R,
    MAGNITUDE,
    bits_of,
    block_scales,
    blocked_offset,
    format_options,
    one_nan,
    outer_scale,
    pack_pairs,
    quantise,
    value_codes,
)

PADDING_SCALE = tl.constexpr(formats.PADDING_SCALE)

PROGRAMS_PER_SM = 4


@dataclass(frozen=True)
class Config:
    block_r: int  # rows of a tile; divides 128, so that a tile lies in one expert and in one row of atoms
    block_c: int  # columns; for blocked scales of rows a multiple of the columns of an atom
    num_warps: int
    parts: int = 1  # of a tile of rows, side by side, of block_c columns each
    registers: int = 128  # of a thread: what two programs of 8 warps, or one of 16, have on an SM

    @property
    def options(self) -> dict:
        """Of the compiler. Every product is rounded. Left alone, ptxas may spill around the calls of exact division
        rather than take a register more, so it is told how many there are."""
        return {"num_warps": self.num_warps, "enable_fp_fusion": False, "maxnreg": self.registers}


@functools.cache
def pick_config(op: str, width: int = 0, two_level: bool = False) -> Config:
    """Tiles by op; width is that of a row, and 0 where nothing depends on it.

    Rows: 4096 elements, 16 a thread, of whole rows as far as they reach. With outer scales a tile is one row, so that
    few rows are many programs: 8 elements of each part a thread, up to 16 warps and four parts, which are 16384
    elements; a longer row takes several tiles. Columns: the rows of an atom's four scale columns by 64 columns.
    Weights: half an atom of row scales, 64 elements a thread and no wait for more warps.
    """
    if op == "quantize_rows" and two_level:
        warps = min(next_power_of_2(cdiv(width, 768)), 16)
        block_c = 256 * warps
        return Config(block_r=1, block_c=block_c, num_warps=warps, parts=min(cdiv(width, block_c), 4))
    if op == "quantize_rows":
        block_c = min(max(next_power_of_2(width), 128), 1024)
        return Config(block_r=4096 // block_c, block_c=block_c, num_warps=8)
    if op == "quantize_columns":
        return Config(block_r=128, block_c=64, num_warps=8)
    assert op == "quantize_weights", op
    return Config(block_r=64, block_c=128, num_warps=4, registers=168 if two_level else 128)


@triton.jit
def _end_of_rows(first, R, row_start_ptr, num_rows_ptr, L, BLOCK_L: tl.constexpr):
    """End of the real rows of the expert that row `first` belongs to; R without experts.

    Example: starts 0 0 128 384, counts 0 5 130: from row 0 it is 5, from row 256 it is 258.
    """
    if BLOCK_L == 0:
        end = R
    else:
        expert = -1
        for l0 in range(0, L, BLOCK_L):
            index = l0 + tl.arange(0, BLOCK_L)
            starts = tl.load(row_start_ptr + index, mask=index < L, other=2147483647)
            expert += tl.sum((starts <= first).to(tl.int32))  # of experts without rows the last is counted too
        end = tl.load(row_start_ptr + expert) + tl.load(num_rows_ptr + expert)
    return end


# ---- rows ----------------------------------------------------------------------------------------------------------


@triton.jit
def _load_rows(row_ptrs, real, col, C, stride_c, BLOCK_C: tl.constexpr):
    """Columns from col on; zeros where a row is not real, or no column."""
    cols = col + tl.arange(0, BLOCK_C)
    ptrs = row_ptrs[:, None] + cols.to(tl.int64)[None, :] * stride_c
    return tl.load(ptrs, mask=real[:, None] & (cols < C)[None, :], other=0.0)


@launched
@triton.jit(do_not_specialize=["R"])  # no number of rows compiles anything
def _quantize_rows(
    x_ptr,  # [R, C] bf16 or fp32
    values_ptr,  # [R, C / values per byte] bytes
    scales_ptr,  # bytes, natural or blocked order
    outer_inv_ptr,  # [R] fp32, or None
    row_start_ptr,  # [L + 1] i32 or None
    num_rows_ptr,  # [L] i32 or None
    R,
    C,
    L,
    x_stride_r,
    x_stride_c,
    values_stride,
    scales_stride,
    ELEMENT: tl.constexpr,
    VALUES_PER_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    EPS: tl.constexpr,
    BLOCKED: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Item i is a tile of BLOCK_R rows by PARTS times BLOCK_C columns. An outer scale is of a whole row: what lies in
    other tiles of the row is read for its magnitude too.

    Example (e4m3, two rows of 32): amax 448 and 960 give scales 127 and 129; of the second row 957 becomes 240, code
    0x77. In blocked order they are bytes 0 and 16 of an atom whose other 510 bytes are 0.
    """
    begin()
    NUM_SCALES: tl.constexpr = BLOCK_C // BLOCK
    BYTES: tl.constexpr = BLOCK_C // VALUES_PER_BYTE
    num_tiles = tl.cdiv(C, PARTS * BLOCK_C)  # of a row
    S = C // BLOCK
    padded_S = tl.cdiv(S, ATOM_C) * ATOM_C
    rows_end = R
    if BLOCK_L != 0:
        rows_end = tl.load(row_start_ptr + L)
    padded_end = rows_end
    if BLOCKED:
        padded_end = tl.cdiv(rows_end, ATOM_R) * ATOM_R
    for item in tl.range(tl.program_id(0), tl.cdiv(padded_end, BLOCK_R) * num_tiles, tl.num_programs(0)):
        delay(item)
        first_row = item // num_tiles * BLOCK_R
        first_col = item % num_tiles * (PARTS * BLOCK_C)
        rows = first_row + tl.arange(0, BLOCK_R)
        rows_64 = rows.to(tl.int64)
        mask_r = rows < rows_end
        real = rows < _end_of_rows(first_row, R, row_start_ptr, num_rows_ptr, L, BLOCK_L)
        row_ptrs = x_ptr + rows_64 * x_stride_r
        amax = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)  # of columns BLOCK_C apart
        if TWO_LEVEL:
            for part in range(PARTS, num_tiles * PARTS):
                col = tl.multiple_of((first_col + part * BLOCK_C) % (num_tiles * PARTS * BLOCK_C), BLOCK_C)
                x = _load_rows(row_ptrs, real, col, C, x_stride_c, BLOCK_C)
                amax = tl.maximum(amax, bits_of(x.to(tl.float32)) & MAGNITUDE)
        tile = ()
        for part in tl.static_range(PARTS):
            x = _load_rows(row_ptrs, real, first_col + part * BLOCK_C, C, x_stride_c, BLOCK_C)
            tile += (x,)
        outer = tl.full((BLOCK_R, 1), 1.0, tl.float32)
        if TWO_LEVEL:
            for part in tl.static_range(PARTS):
                amax = tl.maximum(amax, bits_of(tile[part].to(tl.float32)) & MAGNITUDE)
            outer_R = outer_scale(tl.max(amax, axis=1), EPS)
            if first_col == 0:
                tl.store(outer_inv_ptr + rows_64, one_nan(tl.div_rn(1.0, outer_R)), mask=mask_r)
            outer = outer_R[:, None]
        for part in tl.static_range(PARTS):
            col = first_col + part * BLOCK_C
            blocks = tl.reshape(tile[part].to(tl.float32), (BLOCK_R, NUM_SCALES, BLOCK))
            codes, scales = quantise(blocks, outer, 2, ELEMENT, RECIPROCAL, TWO_LEVEL)
            codes = tl.reshape(codes, (BLOCK_R, BLOCK_C))
            if VALUES_PER_BYTE == 2:
                codes = pack_pairs(codes, BLOCK_R, BLOCK_C)
            byte = col // VALUES_PER_BYTE + tl.arange(0, BYTES)
            value_ptrs = values_ptr + rows_64[:, None] * values_stride + byte[None, :]
            tl.store(value_ptrs, codes, mask=mask_r[:, None] & (byte < C // VALUES_PER_BYTE)[None, :])
            s = col // BLOCK + tl.arange(0, NUM_SCALES)
            inside = mask_r[:, None] & (s < S)[None, :]
            if BLOCKED:
                offsets = blocked_offset(rows[:, None], s[None, :], padded_S)
                scales = tl.where(inside, scales.to(tl.int32), PADDING_SCALE).to(tl.uint8)
                tl.store(scales_ptr + offsets, scales, mask=(rows < padded_end)[:, None] & (s < padded_S)[None, :])
            else:
                tl.store(scales_ptr + rows_64[:, None] * scales_stride + s[None, :], scales, mask=inside)


# ---- columns -------------------------------------------------------------------------------------------------------


@launched
@triton.jit(do_not_specialize=["R"])  # no number of rows compiles anything
def _quantize_columns(
    x_ptr,  # [R, C] bf16 or fp32
    values_ptr,  # [R, C] bytes
    scales_ptr,  # bytes, [R / 32, C] or blocked order of [C, end of the last expert / 32]
    row_start_ptr,  # [L + 1] i32
    num_rows_ptr,  # [L] i32
    R,
    C,
    L,
    x_stride_r,
    x_stride_c,
    values_stride,
    scales_stride,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    BLOCKED: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Item i is a tile of BLOCK_R rows by BLOCK_C columns.

    Example: an expert of 2 rows, columns [448, 1] and [-960, 0]: of rows 0 to 31 they have the scales 127 and 129; the
    30 rows of padding are zeros whatever x holds there, and rows 32 to 127 are zeros with scale 0.
    """
    begin()
    NUM_SCALES: tl.constexpr = BLOCK_R // BLOCK
    rows_end = tl.load(row_start_ptr + L)
    padded_C = C
    if BLOCKED:
        padded_C = tl.cdiv(C, ATOM_R) * ATOM_R
    num_chunks = tl.cdiv(padded_C, BLOCK_C)
    for item in tl.range(tl.program_id(0), tl.cdiv(rows_end, BLOCK_R) * num_chunks, tl.num_programs(0)):
        delay(item)
        first_row = item // num_chunks * BLOCK_R
        real_end = _end_of_rows(first_row, R, row_start_ptr, num_rows_ptr, L, BLOCK_L)
        rows = first_row + tl.arange(0, BLOCK_R)
        rows_64 = rows.to(tl.int64)[:, None]
        cols = item % num_chunks * BLOCK_C + tl.arange(0, BLOCK_C)
        mask_c = (cols < C)[None, :]
        x = tl.load(
            x_ptr + rows_64 * x_stride_r + cols.to(tl.int64)[None, :] * x_stride_c,
            mask=(rows < real_end)[:, None] & mask_c,
            other=0.0,
        )
        blocks = tl.reshape(x.to(tl.float32), (NUM_SCALES, BLOCK, BLOCK_C))
        codes, scales = quantise(blocks, 1.0, 1, ELEMENT, RECIPROCAL, False)
        codes = tl.reshape(codes, (BLOCK_R, BLOCK_C))
        tl.store(values_ptr + rows_64 * values_stride + cols[None, :], codes, mask=(rows < rows_end)[:, None] & mask_c)
        s = first_row // BLOCK + tl.arange(0, NUM_SCALES)
        if BLOCKED:
            offsets = blocked_offset(cols[None, :], s[:, None], rows_end // BLOCK)
            scales = tl.where(mask_c, scales.to(tl.int32), PADDING_SCALE).to(tl.uint8)
            tl.store(scales_ptr + offsets, scales, mask=(cols < padded_C)[None, :])
        else:
            tl.store(scales_ptr + s.to(tl.int64)[:, None] * scales_stride + cols[None, :], scales, mask=mask_c)


# ---- weights -------------------------------------------------------------------------------------------------------


@launched
@triton.jit
def _weight_amax(
    w_ptr,  # [G, N, K] bf16 or fp32
    amax_ptr,  # [G] i32, bits of FP32, zeros before
    N,
    K,
    stride_g,
    stride_n,
    stride_k,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (tiles of an expert, experts). Largest magnitude of each expert; a maximum is the same in every order.

    Example: an expert of 3, -7, 0: the bits of 7.0. With a NaN: a NaN.
    """
    begin()
    delay(tl.program_id(0))
    g = tl.program_id(1)
    num_chunks = tl.cdiv(K, BLOCK_C)
    n = tl.program_id(0) // num_chunks * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    k = tl.program_id(0) % num_chunks * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    offsets = g.to(tl.int64) * stride_g + n.to(tl.int64) * stride_n + k.to(tl.int64) * stride_k
    w = tl.load(w_ptr + offsets, mask=(n < N) & (k < K), other=0.0).to(tl.float32)
    tl.atomic_max(amax_ptr + g, tl.max(tl.max(bits_of(w) & MAGNITUDE, axis=1), axis=0), sem="relaxed")


@launched
@triton.jit
def _quantize_weights(
    w_ptr,  # [G, N, K] bf16 or fp32
    amax_ptr,  # [G] i32, bits of the expert's amax, with outer scales
    values_ptr,  # [G, N, K / values per byte] bytes, contiguous
    scales_ptr,  # bytes, blocked order
    transposed_scales_ptr,  # bytes, blocked order, with square blocks
    outer_ptr,  # [G] fp32
    outer_inv_ptr,  # [G] fp32
    N,
    K,
    stride_g,
    stride_n,
    stride_k,
    ELEMENT: tl.constexpr,
    VALUES_PER_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    EPS: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (tiles of BLOCK_R x BLOCK_C of an expert, experts): the tiles of an expert fill whole atoms.

    Example (square, one block of 32 x 32 with amax 960): scale 129 is byte 16 * (i % 32) of either atom for the 32 rows
    of fprop and the 32 of dgrad; all other bytes are 0.
    """
    begin()
    NUM_K: tl.constexpr = BLOCK_C // BLOCK
    g = tl.program_id(1)
    delay(tl.program_id(0))
    num_chunks = tl.cdiv(K, BLOCK_C)
    first_n = tl.program_id(0) // num_chunks * BLOCK_R
    first_k = tl.program_id(0) % num_chunks * BLOCK_C
    n = first_n + tl.arange(0, BLOCK_R)
    k = first_k + tl.arange(0, BLOCK_C)
    g_64 = g.to(tl.int64)
    offsets = g_64 * stride_g + n.to(tl.int64)[:, None] * stride_n + k.to(tl.int64)[None, :] * stride_k
    w = tl.load(w_ptr + offsets, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)

    outer = 1.0
    if TWO_LEVEL:
        outer = outer_scale(tl.load(amax_ptr + g), EPS)
        if tl.program_id(0) == 0:
            tl.store(outer_ptr + g, outer)
            tl.store(outer_inv_ptr + g, one_nan(tl.div_rn(1.0, outer)))

    s = first_k // BLOCK + tl.arange(0, NUM_K)
    S = K // BLOCK
    padded_N = tl.cdiv(N, ATOM_R) * ATOM_R
    padded_S = tl.cdiv(S, ATOM_C) * ATOM_C
    if SQUARE:
        NUM_N: tl.constexpr = BLOCK_R // BLOCK
        blocks = tl.reshape(w, (NUM_N, BLOCK, NUM_K, BLOCK))
        amax = tl.max(tl.max(bits_of(blocks) & MAGNITUDE, axis=3), axis=1)
        scales, _, factor = block_scales(amax, outer, RECIPROCAL, TWO_LEVEL)
        codes = value_codes(blocks * factor[:, None, :, None], ELEMENT)
        # A block is zeros where N or K ends, so its scale is 0, as padding is.
        t = first_n // BLOCK + tl.arange(0, NUM_N)
        padded_K = tl.cdiv(K, ATOM_R) * ATOM_R
        padded_T = tl.cdiv(N // BLOCK, ATOM_C) * ATOM_C
        transposed = tl.broadcast_to(tl.reshape(tl.trans(scales), (NUM_K, 1, NUM_N)), (NUM_K, BLOCK, NUM_N))
        offsets = blocked_offset(k[:, None], t[None, :], padded_T)
        tl.store(
            transposed_scales_ptr + g_64 * padded_K * padded_T + offsets,
            tl.reshape(transposed, (BLOCK_C, NUM_N)),
            mask=(k < padded_K)[:, None] & (t < padded_T)[None, :],
        )
        scales = tl.reshape(tl.broadcast_to(tl.expand_dims(scales, 1), (NUM_N, BLOCK, NUM_K)), (BLOCK_R, NUM_K))
    else:
        blocks = tl.reshape(w, (BLOCK_R, NUM_K, BLOCK))
        codes, scales = quantise(blocks, outer, 2, ELEMENT, RECIPROCAL, TWO_LEVEL)
        inside = (n < N)[:, None] & (s < S)[None, :]
        scales = tl.where(inside, scales.to(tl.int32), PADDING_SCALE).to(tl.uint8)
    tl.store(
        scales_ptr + g_64 * padded_N * padded_S + blocked_offset(n[:, None], s[None, :], padded_S),
        scales,
        mask=(n < padded_N)[:, None] & (s < padded_S)[None, :],
    )
    codes = tl.reshape(codes, (BLOCK_R, BLOCK_C))
    if VALUES_PER_BYTE == 2:
        codes = pack_pairs(codes, BLOCK_R, BLOCK_C)
    BYTES: tl.constexpr = BLOCK_C // VALUES_PER_BYTE
    byte = first_k // VALUES_PER_BYTE + tl.arange(0, BYTES)
    width = K // VALUES_PER_BYTE
    value_ptrs = values_ptr + (g_64 * N + n.to(tl.int64)[:, None]) * width + byte[None, :]
    tl.store(value_ptrs, codes, mask=(n < N)[:, None] & (byte < width)[None, :])


# ---- launchers -----------------------------------------------------------------------------------------------------


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _grid(num_items: int, device: torch.device, num_sms: int | None) -> tuple[int]:
    """Persistent; no program without a first item, counted by capacity."""
    per_sm = 1 if num_sms is not None else PROGRAMS_PER_SM
    return (max(1, min(num_items, num_programs(device, num_sms) * per_sm)),)


def _expert_block(num_rows_L: Tensor | None) -> int:
    """Experts that are looked at together; 0 without experts."""
    return 0 if num_rows_L is None else min(next_power_of_2(len(num_rows_L)), 1024)


def quantize_rows(
    x_RC, *, format, blocked=False, row_start_P=None, num_rows_L=None, out=None, num_sms=None, config=None
) -> Quantized:
    """Blocks of consecutive columns of a row; see reference_formats.quantize_rows.

    Args:    num_sms: at most that many programs.  config: other than pick_config's.
    Raises:  TypeError for other dtypes than bf16 and fp32; ValueError for shapes and layouts.
    """
    out = rows_out("quantize_rows", x_RC, format, blocked, row_start_P, num_rows_L, out)
    R, C = x_RC.shape
    if R == 0:
        return out
    config = config or pick_config("quantize_rows", C, format.two_level)
    padded_R = align(R, config.block_r if not blocked else formats.SCALE_ATOM[0])
    num_items = cdiv(padded_R, config.block_r) * cdiv(C, config.parts * config.block_c)
    values, scales = _bytes(out.values), _bytes(out.scales)
    _quantize_rows[_grid(num_items, x_RC.device, num_sms)](
        x_RC,
        values,
        scales,
        out.outer_inv_R,
        row_start_P,
        num_rows_L,
        R,
        C,
        0 if num_rows_L is None else len(num_rows_L),
        *x_RC.stride(),
        values.stride(0),
        scales.stride(0),
        **format_options(format),
        VALUES_PER_BYTE=format.values_per_byte,
        TWO_LEVEL=format.two_level,
        EPS=formats.ROW_EPS,
        BLOCKED=blocked,
        BLOCK_L=_expert_block(num_rows_L),
        BLOCK_R=config.block_r,
        BLOCK_C=config.block_c,
        PARTS=config.parts,
        **config.options,
    )
    return out


def quantize_columns(
    x_RC, *, format, blocked=False, row_start_P, num_rows_L, out=None, num_sms=None, config=None
) -> Quantized:
    """Blocks of 32 consecutive rows of a column; see reference_formats.quantize_columns.

    Args:    num_sms, config: as in quantize_rows.
    Raises:  TypeError, ValueError; ValueError for formats with two values in a byte.
    """
    out = columns_out("quantize_columns", x_RC, format, blocked, row_start_P, num_rows_L, out)
    R, C = x_RC.shape
    if R == 0:
        return out
    config = config or pick_config("quantize_columns")
    num_items = cdiv(R, config.block_r) * cdiv(align(C, formats.SCALE_ATOM[0]), config.block_c)
    values, scales = _bytes(out.values), _bytes(out.scales)
    _quantize_columns[_grid(num_items, x_RC.device, num_sms)](
        x_RC,
        values,
        scales,
        row_start_P,
        num_rows_L,
        R,
        C,
        len(num_rows_L),
        *x_RC.stride(),
        values.stride(0),
        scales.stride(0),
        **format_options(format),
        BLOCKED=blocked,
        BLOCK_L=_expert_block(num_rows_L),
        BLOCK_R=config.block_r,
        BLOCK_C=config.block_c,
        **config.options,
    )
    return out


def quantize_weights(w_GNK, *, format, square=False, out=None, config=None) -> QuantizedWeights:
    """Weights of G experts, blocks along K or square; see reference_formats.quantize_weights.

    Args:    config: other than pick_config's.
    Raises:  TypeError, ValueError; ValueError for square blocks of formats with two values in a byte.
    """
    out = weights_out("quantize_weights", w_GNK, format, square, out)
    G, N, K = w_GNK.shape
    if w_GNK.numel() == 0:
        return out
    config = config or pick_config("quantize_weights", two_level=format.two_level)
    atoms = align(N, formats.SCALE_ATOM[0]), align(K, formats.SCALE_ATOM[0])
    grid = (cdiv(atoms[0], config.block_r) * cdiv(atoms[1], config.block_c), G)
    sizes = (N, K, *w_GNK.stride())
    amax_G = None
    if format.two_level:
        amax_G = torch.zeros(G, dtype=torch.int32, device=w_GNK.device)
        _weight_amax[grid](w_GNK, amax_G, *sizes, BLOCK_R=config.block_r, BLOCK_C=config.block_c, **config.options)
    _quantize_weights[grid](
        w_GNK,
        amax_G,
        _bytes(out.values),
        _bytes(out.scales),
        None if out.transposed_scales is None else _bytes(out.transposed_scales),
        out.outer_G,
        out.outer_inv_G,
        *sizes,
        **format_options(format),
        VALUES_PER_BYTE=format.values_per_byte,
        TWO_LEVEL=format.two_level,
        EPS=formats.WEIGHT_EPS,
        SQUARE=square,
        BLOCK_R=config.block_r,
        BLOCK_C=config.block_c,
        **config.options,
    )
    return out

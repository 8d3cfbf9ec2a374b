"""SwiGLU whose results leave as block-scaled values: no BF16 rounding between the formula and the quantiser.

    forward   h2 = act(gate, up), quantised by rows, for the product with W2
    backward  g2 = dy @ W2, not multiplied by the score;  score_grad = <g2, h2>;  d_h2 = score * g2
              g1 = [d_gate | d_up], quantised by rows, for the product with W13, and by columns, for W13's gradient
              h2, not multiplied by the score, quantised by columns, for W2's gradient, whose dy has the score
              columns may be expanded: BF16 of value times scale

Formulas in swiglu.py, formats in _scaled.py. Rows of padding come last in an expert and experts begin at multiples of
128 rows. What h1 and g2 hold there is never read.

Grid: persistent; forward over tiles of real rows, so that padding costs nothing. Reads and writes local memory only; no
barrier before or after it.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_moe import formats
from dist_moe.formats import Format
from dist_moe.quantized import Bundle, check_swiglu_backward_quantize, check_swiglu_quantize
from dist_moe.shapes import cdiv, next_power_of_2

from ._device import begin, delay, is_interpreting, num_programs
from ._launch import launched
from ._scaled import (
    ATOM_C,
    ATOM_R,
    MAGNITUDE,
    bits_of,
    block_scales,
    blocked_offset,
    format_options,
    in_expanded_order,
    one_nan,
    outer_scale,
    pack_pairs,
    quantise,
    quantise_and_expand,
    value_codes,
)
from ._scaled_operands import row_tile, row_tile_ends
from .swiglu import gate_up, gate_up_grads

PADDING_SCALE = tl.constexpr(formats.PADDING_SCALE)
GROUP = tl.constexpr(8)  # consecutive columns of a thread in a block that is quantised both ways


@dataclass(frozen=True)
class Config:
    block_r: int  # rows of a tile; divides 32
    block_f: int  # columns of a part of a tile, per half of h1; in forward a multiple of the 128 of an atom
    parts: int = 1  # of a tile, side by side: their registers are live one after the other
    num_warps: int = 8
    programs_per_sm: int = 2

    @property
    def options(self) -> dict:
        """Of the compiler. Products are rounded before they are added, and ptxas may use all the registers that a
        program's share of an SM has, rather than spill."""
        registers = min(65536 // (32 * self.num_warps * self.programs_per_sm) // 8 * 8, 255)
        return {"num_warps": self.num_warps, "enable_fp_fusion": False, "maxnreg": registers}


# Forward: a thread has 16 elements of a tile, whose rows are an atom of scales wide. Backward: three quantised matrices
# leave registers for 8 elements a thread.
FORWARD = Config(block_r=8, block_f=128, num_warps=2, programs_per_sm=10)
BACKWARD = Config(block_r=32, block_f=32, num_warps=4, programs_per_sm=4)
MAX_PARTS = 4


@functools.cache
def pick_forward(F: int, two_level: bool, expanded: bool) -> Config:
    """Two-level formats scale by the whole row, so that a tile is one row, 8 elements of each part a thread, with up to
    16 warps. A longer row takes several tiles."""
    if not two_level:
        return FORWARD
    warps = min(next_power_of_2(cdiv(F, 768)), 16)
    most = MAX_PARTS if warps < 16 or expanded else 2  # whose registers do not suffice for more codes
    return Config(1, 256 * warps, min(cdiv(F, 256 * warps), most), warps, programs_per_sm=20 // warps)


# ---- tiles ---------------------------------------------------------------------------------------------------------


@triton.jit
def _put_rows(
    x,  # fp32, rows first_row, ..., columns col, ...
    first_row,  # i64, a multiple of the rows of x
    real,
    col,
    end,  # of the columns that x may fill, multiples of BLOCK as col is
    outer,
    values_ptr,  # of row 0
    values_stride,
    scales_ptr,
    padded_S,
    ELEMENT: tl.constexpr,
    VALUES_PER_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    EXPANDED: tl.constexpr,
):
    """Quantise and store a tile of the real rows, blocks along a row; expanded it has values alone, in 16 bits.

    Offsets inside the tile are of 32 bits, which a thread adds to a base that all share.
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, (R, C // BLOCK, BLOCK))
    row = tl.arange(0, R)[:, None]
    values_ptr += first_row * values_stride
    if EXPANDED:
        place = col + tl.arange(0, C)
        inside = real[:, None] & (place < values_stride)[None, :]
        values = quantise_and_expand(blocks, outer, 2, ELEMENT, RECIPROCAL, TWO_LEVEL)
        values = in_expanded_order(values, ELEMENT)
        tl.store(values_ptr + (row * values_stride + place[None, :]), values, mask=inside)
    else:
        codes, scales = quantise(blocks, outer, 2, ELEMENT, RECIPROCAL, TWO_LEVEL)
        codes = tl.reshape(codes, (R, C))
        if VALUES_PER_BYTE == 2:
            codes = pack_pairs(codes, R, C)
        byte = col // VALUES_PER_BYTE + tl.arange(0, C // VALUES_PER_BYTE)
        inside = real[:, None] & (byte < end // VALUES_PER_BYTE)[None, :]
        tl.store(values_ptr + (row * values_stride + byte[None, :]), codes, mask=inside)
        s = col // BLOCK + tl.arange(0, C // BLOCK)
        inside = real[:, None] & (s < end // BLOCK)[None, :]
        tl.store(_row_scale_ptrs(scales_ptr, first_row, R, s, padded_S), scales, mask=inside)


@triton.jit
def _row_scale_ptrs(scales_ptr, first_row, R: tl.constexpr, s, padded_S):
    """Where the scales of R rows lie; they are among the 32 rows of an atom that are 16 bytes apart."""
    tl.static_assert(R <= 32)
    return scales_ptr + blocked_offset(first_row, s, padded_S)[None, :] + 16 * tl.arange(0, R)[:, None]


@triton.jit
def _fill_row_atoms(first_row, real, S, padded_S, scales_ptr):
    """Scales of the real rows that only fill their atoms."""
    s = S + tl.arange(0, ATOM_C)
    inside = real[:, None] & (s < padded_S)[None, :]
    padding = tl.full(inside.shape, PADDING_SCALE, tl.uint8)
    tl.store(_row_scale_ptrs(scales_ptr, first_row, real.shape[0], s, padded_S), padding, mask=inside)


@triton.jit
def _put_block_by_rows(
    x,  # fp32 [groups of columns, rows, columns of a group], a block of either orientation
    first_row,  # i64
    real,
    col,
    values_ptr,  # of row 0
    values_stride,
    scales_ptr,
    padded_S,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
):
    """Quantise and store the real rows of a block, a scale a row; one-byte formats."""
    amax = tl.max(tl.max(bits_of(x) & MAGNITUDE, axis=2), axis=0)
    scales, factor = block_scales(amax, 1.0, RECIPROCAL, False)
    codes = value_codes(x * factor[None, :, None], ELEMENT)
    values_ptr += first_row * values_stride + col
    tl.store(values_ptr + _block_offsets(x, values_stride), codes, mask=real[None, :, None])
    scales_ptr += blocked_offset(first_row, col // BLOCK, padded_S)
    tl.store(scales_ptr + 16 * tl.arange(0, BLOCK), scales, mask=real)


@triton.jit
def _put_block_by_columns(
    x,  # fp32 [groups of columns, rows, columns of a group], a block of either orientation
    block,  # of rows, i64
    col,
    values_ptr,  # of row 0
    values_stride,
    scales_ptr,
    num_blocks,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
):
    """Quantise and store a block, a scale a column; one-byte formats. Expanded where there is no place for scales."""
    if scales_ptr is None:
        values = quantise_and_expand(x, 1.0, 1, ELEMENT, RECIPROCAL, False)
    else:
        values, scales = quantise(x, 1.0, 1, ELEMENT, RECIPROCAL, False)
        scales_ptr += blocked_offset(col, block, num_blocks)
        tl.store(scales_ptr + 16 * tl.arange(0, BLOCK), tl.reshape(scales, (BLOCK,)))
    values_ptr += block * BLOCK * values_stride + col
    tl.store(values_ptr + _block_offsets(x, values_stride), values)


@triton.jit
def _block_offsets(x, stride):
    """Offsets of the elements of a block in a matrix whose rows are stride apart."""
    groups = tl.arange(0, x.shape[0])[:, None, None] * x.shape[2]
    return tl.arange(0, x.shape[1])[None, :, None] * stride + groups + tl.arange(0, x.shape[2])[None, None, :]


@triton.jit
def _fill_column_atoms(block, C, scales_ptr, num_blocks):
    """Scales of a block of rows, of the columns past C that only fill the atoms; none of expanded columns."""
    if scales_ptr is not None:
        cols = C + tl.arange(0, ATOM_R)
        padding = tl.full((ATOM_R,), PADDING_SCALE, tl.uint8)
        inside = cols < tl.cdiv(C, ATOM_R) * ATOM_R
        tl.store(scales_ptr + blocked_offset(cols, block, num_blocks), padding, mask=inside)


# ---- forward -------------------------------------------------------------------------------------------------------


@triton.jit
def _load_h1(rows_ptr, real, col, F, BLOCK_F: tl.constexpr):
    """Gate and up of columns from col on of rows that begin at rows_ptr; zeros where no row is real, or no column."""
    cols = col + tl.arange(0, BLOCK_F)
    mask = real[:, None] & (cols < F)[None, :]
    gate_ptrs = rows_ptr + (tl.arange(0, real.shape[0])[:, None] * 2 * F + cols[None, :])
    return tl.load(gate_ptrs, mask=mask, other=0.0), tl.load(gate_ptrs + F, mask=mask, other=0.0)


@triton.jit
def _act(h1, alpha, limit, CLAMPED: tl.constexpr, FAST_MATH: tl.constexpr):
    """FP32 h2 of (gate, up)."""
    gate, up, sig = gate_up(h1[0].to(tl.float32), h1[1].to(tl.float32), alpha, limit, CLAMPED, FAST_MATH)
    return gate * sig * up


# Words of the place record are at odd and even words: no variant for each.
@launched
@triton.jit(
    do_not_specialize_on_alignment=[
        "h1_start_ptr",
        "values_start_ptr",
        "scales_start_ptr",
        "outer_inv_start_ptr",
        "stop_ptr",
    ]
)
def _swiglu_quantize(
    h1_ptr,  # [X, 2F] bf16
    h1_start_ptr,  # [1] i64
    values_ptr,  # [X, F / values per byte] bytes, or expanded
    values_start_ptr,  # [1] i64
    scales_ptr,  # bytes, blocked order; None if expanded, as the next
    scales_start_ptr,  # [1] i64
    outer_inv_ptr,  # fp32 or None
    outer_inv_start_ptr,  # [1] i64 or None
    row_start_ptr,  # [L + 1] i32
    num_rows_ptr,  # [L] i32
    stop_ptr,  # [1] i64
    L,
    F,
    values_stride,
    alpha,
    limit,
    ELEMENT: tl.constexpr,
    VALUES_PER_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    EPS: tl.constexpr,
    CLAMPED: tl.constexpr,
    FAST_MATH: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Item i is a tile of BLOCK_R rows of an expert by PARTS times BLOCK_F columns. An outer scale is of a whole row:
    what lies in other tiles of the row is activated for its magnitude too.

    Example (e4m3): a row of gate 20, up 3 has h2 60, so m = 0.134 is rounded up to 0.25: scale 125 and values 240, code
    0x77. In NVFP4 the outer scale is 2688 / 60 = 44.8, its inverse 0.0223, the block scales are 448 and the values 6.
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    EXPANDED: tl.constexpr = scales_ptr is None
    h1_ptr += tl.load(h1_start_ptr) * 2 * F
    values_ptr += tl.load(values_start_ptr) * values_stride
    if not EXPANDED:
        scales_ptr += tl.load(scales_start_ptr)
    if TWO_LEVEL:
        outer_inv_ptr += tl.load(outer_inv_start_ptr)
    S = F // BLOCK
    padded_S = tl.cdiv(S, ATOM_C) * ATOM_C
    num_tiles = tl.cdiv(F, PARTS * BLOCK_F)  # of a row
    ends_L = row_tile_ends(num_rows_ptr, L, BLOCK_R, BLOCK_L)
    for item in tl.range(tl.program_id(0), tl.max(ends_L) * num_tiles, tl.num_programs(0)):
        delay(item)
        _, first_row, end = row_tile(ends_L, item // num_tiles, row_start_ptr, num_rows_ptr, BLOCK_R)
        first_row = tl.multiple_of(first_row, BLOCK_R).to(tl.int64)
        first_col = item % num_tiles * (PARTS * BLOCK_F)
        rows = first_row + tl.arange(0, BLOCK_R)
        real = rows < end
        rows_ptr = h1_ptr + first_row * 2 * F
        amax = tl.zeros((BLOCK_R, BLOCK_F), tl.int32)  # of columns BLOCK_F apart
        if TWO_LEVEL:
            for part in range(PARTS, num_tiles * PARTS):
                col = tl.multiple_of((first_col + part * BLOCK_F) % (num_tiles * PARTS * BLOCK_F), BLOCK_F)
                h2 = _act(_load_h1(rows_ptr, real, col, F, BLOCK_F), alpha, limit, CLAMPED, FAST_MATH)
                amax = tl.maximum(amax, bits_of(h2) & MAGNITUDE)
        h1_parts = ()
        for part in tl.static_range(PARTS):
            h1_parts += (_load_h1(rows_ptr, real, first_col + part * BLOCK_F, F, BLOCK_F),)
        h2_parts = ()
        for part in tl.static_range(PARTS):
            h2 = _act(h1_parts[part], alpha, limit, CLAMPED, FAST_MATH)
            if TWO_LEVEL:
                amax = tl.maximum(amax, bits_of(h2) & MAGNITUDE)
            h2_parts += (h2,)
        outer = tl.full((BLOCK_R, 1), 1.0, tl.float32)
        if TWO_LEVEL:
            outer_R = outer_scale(tl.max(amax, axis=1), EPS)
            if first_col == 0:
                tl.store(outer_inv_ptr + rows, one_nan(tl.div_rn(1.0, outer_R)), mask=real)
            outer = outer_R[:, None]
        for part in tl.static_range(PARTS):
            _put_rows(
                h2_parts[part], first_row, real, first_col + part * BLOCK_F, F, outer,
                values_ptr, values_stride, scales_ptr, padded_S,
                ELEMENT, VALUES_PER_BYTE, BLOCK, RECIPROCAL, TWO_LEVEL, EXPANDED,
            )  # fmt: skip
        if first_col == 0 and not EXPANDED:
            _fill_row_atoms(first_row, real, S, padded_S, scales_ptr)


# ---- backward ------------------------------------------------------------------------------------------------------


@launched
@triton.jit(
    do_not_specialize_on_alignment=[
        "h1_start_ptr",
        "g2_start_ptr",
        "g1_rows_start_ptr",
        "g1_row_scales_start_ptr",
        "g1_columns_start_ptr",
        "g1_column_scales_start_ptr",
        "h2_columns_start_ptr",
        "h2_column_scales_start_ptr",
        "row_to_slot_ptr",
        "num_rows_ptr",
        "stop_ptr",
    ]
)
def _swiglu_backward_quantize(
    h1_ptr,  # [X, 2F] bf16
    h1_start_ptr,  # [1] i64
    g2_ptr,  # [X, F] bf16
    g2_start_ptr,  # [1] i64
    score_ptr,  # [R] fp32
    score_grad_ptr,  # [R] fp32
    g1_rows_ptr,  # [X, 2F] bytes
    g1_rows_start_ptr,  # [1] i64
    g1_row_scales_ptr,  # bytes, blocked order
    g1_row_scales_start_ptr,  # [1] i64
    g1_columns_ptr,  # [X, 2F] bytes, or bf16, or None, as the three after it
    g1_columns_start_ptr,
    g1_column_scales_ptr,  # this and the next are None of expanded columns
    g1_column_scales_start_ptr,
    h2_columns_ptr,  # [X, F] bytes, or bf16, or None, as the three after it
    h2_columns_start_ptr,
    h2_column_scales_ptr,  # as of g1
    h2_column_scales_start_ptr,
    row_to_slot_ptr,  # [R] i32, -1 for padding
    num_rows_ptr,  # [1] i32
    stop_ptr,  # [1] i64
    F,
    alpha,
    limit,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    CLAMPED: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """Program p takes row blocks p, p + programs, ..., of BLOCK whole rows, in tiles of BLOCK columns: each is a block
    of either orientation, held as [groups, rows, GROUP columns] so that the lanes of a warp spread over both. A score
    gradient is a sum in a fixed order, over the columns of a group, then tiles, then groups.

    Rows of padding count as zeros: their loads are masked. With F = BLOCK the columns of g1 may lie over g2, and
    expanded ones of h2 always: a block of it is read whole before that of columns, in the same bytes, is written.
    Example (e4m3, one real row): gate 20, up 3, g2 2, score 0.5 give d_gate 3, d_up 20, h2 60, whose blocks have the
    scales 120, 123 and 125 in rows and in columns, and <g2, h2> = 120 a column.
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    H2_OVER_G2: tl.constexpr = h2_columns_ptr is not None and h2_column_scales_ptr is None
    num_blocks = tl.load(num_rows_ptr) // BLOCK
    padded_S = tl.cdiv(2 * F // BLOCK, ATOM_C) * ATOM_C
    h1_ptr += tl.load(h1_start_ptr) * 2 * F
    g2_ptr += tl.load(g2_start_ptr) * F
    g1_rows_ptr += tl.load(g1_rows_start_ptr) * 2 * F
    g1_row_scales_ptr += tl.load(g1_row_scales_start_ptr)
    if g1_columns_ptr is not None:
        g1_columns_ptr += tl.load(g1_columns_start_ptr) * 2 * F
        if g1_column_scales_ptr is not None:
            g1_column_scales_ptr += tl.load(g1_column_scales_start_ptr)
    if h2_columns_ptr is not None:
        h2_columns_ptr += tl.load(h2_columns_start_ptr) * F
        if h2_column_scales_ptr is not None:
            h2_column_scales_ptr += tl.load(h2_column_scales_start_ptr)
    for block in tl.range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        delay(block)
        block = tl.cast(block, tl.int64)
        first_row = block * BLOCK
        rows = first_row + tl.arange(0, BLOCK)
        real = tl.load(row_to_slot_ptr + rows) >= 0
        score = tl.load(score_ptr + rows, mask=real, other=0.0)
        sums = tl.zeros((BLOCK // GROUP, BLOCK), tl.float32)
        tile = tl.zeros((BLOCK // GROUP, BLOCK, GROUP), tl.int8)
        for col in range(0, F, BLOCK):
            gate_ptrs = h1_ptr + (first_row * 2 * F + col) + _block_offsets(tile, 2 * F)
            g2_ptrs = g2_ptr + (first_row * F + col) + _block_offsets(tile, F)
            raw_gate = tl.load(gate_ptrs, mask=real[None, :, None], other=0.0).to(tl.float32)
            raw_up = tl.load(gate_ptrs + F, mask=real[None, :, None], other=0.0).to(tl.float32)
            g2 = tl.load(g2_ptrs, mask=real[None, :, None], other=0.0).to(tl.float32)
            if H2_OVER_G2:
                tl.debug_barrier()  # other threads write there
            elif F == BLOCK:
                tl.debug_barrier()
            gate, up, sig = gate_up(raw_gate, raw_up, alpha, limit, CLAMPED, FAST_MATH)
            h2 = gate * sig * up
            sums += tl.sum(g2 * h2, axis=2)
            d_h2 = score[None, :, None] * g2
            d_gate, d_up = gate_up_grads(d_h2, raw_gate, raw_up, gate, up, sig, alpha, limit, CLAMPED)
            if h2_columns_ptr is not None:
                _put_block_by_columns(
                    h2, block, col, h2_columns_ptr, F, h2_column_scales_ptr, num_blocks, ELEMENT, BLOCK, RECIPROCAL
                )
            for half in tl.static_range(2):
                d_half = d_up if half else d_gate
                at = half * F + col
                _put_block_by_rows(
                    d_half, first_row, real, at, g1_rows_ptr, 2 * F, g1_row_scales_ptr, padded_S,
                    ELEMENT, BLOCK, RECIPROCAL,
                )  # fmt: skip
                if g1_columns_ptr is not None:
                    _put_block_by_columns(
                        d_half, block, at, g1_columns_ptr, 2 * F, g1_column_scales_ptr, num_blocks,
                        ELEMENT, BLOCK, RECIPROCAL,
                    )  # fmt: skip
        score_grad_R = tl.sum(sums, axis=0)
        tl.store(score_grad_ptr + rows, score_grad_R, mask=real)
        _fill_row_atoms(first_row, real, 2 * F // BLOCK, padded_S, g1_row_scales_ptr)
        if g1_columns_ptr is not None:
            _fill_column_atoms(block, 2 * F, g1_column_scales_ptr, num_blocks)
        if h2_columns_ptr is not None:
            _fill_column_atoms(block, F, h2_column_scales_ptr, num_blocks)


# ---- launchers -----------------------------------------------------------------------------------------------------


def _grid(device: torch.device, config: Config, num_sms: int | None) -> tuple[int]:
    """Persistent, as many programs as all the SMs hold, or as num_sms of them do."""
    return (num_programs(device, num_sms) * (1 if is_interpreting() else config.programs_per_sm),)


def _places(bundle: Bundle | None) -> tuple[Tensor | None, ...]:
    """Values and scales of a bundle as bytes, each with its start; expanded it has values alone, as they are."""
    if bundle is None:
        return (None,) * 4
    if bundle.expanded:
        return bundle.values, bundle.start_1, None, None
    return bundle.values.view(torch.uint8), bundle.start_1, bundle.scales.view(torch.uint8), bundle.scales_start_1


def swiglu_quantize(
    h1_X2F,
    h1_start_1,
    rows: Bundle,
    row_start_P,
    num_rows_L,
    *,
    format: Format,
    activation,
    fast_math=False,
    stop_1,
    num_sms=None,
    config=None,
) -> None:
    """h2 = act(gate, up) in FP32, its rows quantised.

    Args:    h1_X2F: bf16, contiguous; the call's rows begin at h1_start_1 (int64, device).  rows: of F values.
             row_start_P, num_rows_L: int32, device; expert e has num_rows_L[e] rows from row_start_P[e], a multiple of
             128. Of rows of padding nothing is read or written.  format: any.  fast_math: the sigmoid divides
             approximately.  stop_1: nothing is touched when it is not 0.  num_sms: no more programs than so many SMs
             hold.  config: other than pick_forward's.
    Raises:  ValueError for other dtypes, layouts or widths.
    Source:  reference_swiglu.swiglu_quantize; equal to it but for the last bit of exp.
    """
    F = check_swiglu_quantize("swiglu_quantize", h1_X2F, format, rows, row_start_P, num_rows_L)
    L = len(num_rows_L)
    config = config or pick_forward(F, format.two_level, rows.expanded)
    _swiglu_quantize[_grid(h1_X2F.device, config, num_sms)](
        h1_X2F,
        h1_start_1,
        *_places(rows),
        rows.outer_inv,
        rows.outer_inv_start_1,
        row_start_P,
        num_rows_L,
        stop_1,
        L,
        F,
        rows.values.shape[1],
        activation.alpha,
        activation.limit,
        **format_options(format),
        VALUES_PER_BYTE=format.values_per_byte,
        TWO_LEVEL=format.two_level,
        EPS=formats.ROW_EPS,
        CLAMPED=activation.clamped,
        FAST_MATH=fast_math,
        BLOCK_L=next_power_of_2(L),
        BLOCK_R=config.block_r,
        BLOCK_F=config.block_f,
        PARTS=config.parts,
        **config.options,
    )


def swiglu_backward_quantize(
    h1_X2F,
    h1_start_1,
    g2_XF,
    g2_start_1,
    row_scores_R,
    score_grads_R,
    row_start_P,
    row_to_slot_R,
    *,
    format: Format,
    g1_rows: Bundle,
    g1_columns: Bundle | None,
    h2_columns: Bundle | None,
    activation,
    fast_math=False,
    stop_1,
    num_sms=None,
    config=None,
) -> None:
    """<g2, h2> into score_grads_R, g1 = [d_gate | d_up] by rows and by columns, and h2 by columns; nothing in place.

    Args:    as in swiglu_quantize; format: MXFP8.  row_start_P: the last word counts the rows with padding.
             row_to_slot_R: int32, device, -1 for rows of padding.  g2_XF: bf16, dy @ W2, not multiplied by the score.
             row_scores_R, score_grads_R: fp32.  g1_rows, g1_columns: of 2F values.  h2_columns: of F values.  Columns
             may be None, or expanded; their rows of padding are zeros, and nothing else of padding is written. Expanded
             columns of h2 may lie over g2.
             config: other than BACKWARD.
    Raises:  ValueError for other dtypes, layouts or widths, and for formats with two values in a byte.
    Source:  reference_swiglu.swiglu_backward_quantize; the score gradient without W2's output is SonicMoE's idea.
    """
    bundles = (g1_rows, g1_columns, h2_columns)
    F = check_swiglu_backward_quantize("swiglu_backward_quantize", h1_X2F, g2_XF, format, *bundles)
    config = config or BACKWARD
    assert config.block_r == config.block_f == format.block, "a tile is a block of rows and of columns"
    _swiglu_backward_quantize[_grid(h1_X2F.device, config, num_sms)](
        h1_X2F,
        h1_start_1,
        g2_XF,
        g2_start_1,
        row_scores_R,
        score_grads_R,
        *(tensor for bundle in bundles for tensor in _places(bundle)),
        row_to_slot_R,
        row_start_P[-1:],
        stop_1,
        F,
        activation.alpha,
        activation.limit,
        **format_options(format),
        CLAMPED=activation.clamped,
        FAST_MATH=fast_math,
        **config.options,
    )

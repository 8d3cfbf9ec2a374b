"""SwiGLU whose results leave as block-scaled values: no BF16 rounding between the formula and the quantiser.

    h2 = act(gate, up), quantised by rows, for the product with W2

Formulas in swiglu.py, formats in _scaled.py. Rows of padding come last in an expert and experts begin at multiples of
128 rows. What h1 holds there is never read.

Grid: persistent, over tiles of real rows, so that padding costs nothing. Reads and writes local memory only; no barrier
before or after it.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_moe import formats
from dist_moe.formats import Format
from dist_moe.quantized import Bundle, check_swiglu_quantize
from dist_moe.shapes import cdiv, next_power_of_2

from ._device import begin, delay, is_interpreting, num_programs
from ._launch import launched
from ._scaled import (
    ATOM_C,
    MAGNITUDE,
    bits_of,
    blocked_offset,
    format_options,
    in_expanded_order,
    one_nan,
    outer_scale,
    pack_pairs,
    quantise,
    quantise_and_expand,
)
from ._scaled_operands import row_tile, row_tile_ends
from .swiglu import gate_up

PADDING_SCALE = tl.constexpr(formats.PADDING_SCALE)


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


# A thread has 16 elements of a tile, whose rows are an atom of scales wide.
FORWARD = Config(block_r=8, block_f=128, num_warps=2, programs_per_sm=10)
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
        tl.store(row_scale_ptrs(scales_ptr, first_row, R, s, padded_S), scales, mask=inside)


@triton.jit
def row_scale_ptrs(scales_ptr, first_row, R: tl.constexpr, s, padded_S):
    """Where the scales of R rows lie; they are among the 32 rows of an atom that are 16 bytes apart."""
    tl.static_assert(R <= 32)
    return scales_ptr + blocked_offset(first_row, s, padded_S)[None, :] + 16 * tl.arange(0, R)[:, None]


@triton.jit
def fill_row_atoms(first_row, real, S, padded_S, scales_ptr):
    """Scales of the real rows that only fill their atoms."""
    s = S + tl.arange(0, ATOM_C)
    inside = real[:, None] & (s < padded_S)[None, :]
    padding = tl.full(inside.shape, PADDING_SCALE, tl.uint8)
    tl.store(row_scale_ptrs(scales_ptr, first_row, real.shape[0], s, padded_S), padding, mask=inside)


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
            fill_row_atoms(first_row, real, S, padded_S, scales_ptr)


def grid_of(device: torch.device, config: Config, num_sms: int | None) -> tuple[int]:
    """Persistent, as many programs as all the SMs hold, or as num_sms of them do."""
    return (num_programs(device, num_sms) * (1 if is_interpreting() else config.programs_per_sm),)


def places_of(bundle: Bundle | None) -> tuple[Tensor | None, ...]:
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
    _swiglu_quantize[grid_of(h1_X2F.device, config, num_sms)](
        h1_X2F,
        h1_start_1,
        *places_of(rows),
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

"""Backward of SwiGLU between block-scaled products: no BF16 rounding between the formulas and the quantiser.

    g2 = dy @ W2, not multiplied by the score;  score_grad = <g2, h2>;  d_h2 = score * g2
    g1 = [d_gate | d_up], quantised by rows, for the product with W13, and by columns, for W13's gradient
    h2, not multiplied by the score, quantised by columns, for W2's gradient, whose dy has the score
    columns may be expanded: BF16 of value times scale

Formulas in swiglu.py, formats in _scaled.py. Rows of padding come last in an expert and experts begin at multiples of
128 rows. What h1 and g2 hold there is never read.

Grid: persistent. Reads and writes local memory only; no barrier before or after it.
"""

import triton
import triton.language as tl

from dist_moe import formats
from dist_moe.formats import Format
from dist_moe.quantized import Bundle, check_swiglu_backward_quantize

from ._device import begin, delay
from ._launch import launched
from ._scaled import (
    ATOM_C,
    ATOM_R,
    MAGNITUDE,
    bits_of,
    block_scales,
    blocked_offset,
    format_options,
    quantise,
    quantise_and_expand,
    value_codes,
)
from .swiglu import gate_up, gate_up_grads
from .swiglu_quantize import Config, fill_row_atoms, grid_of, places_of

PADDING_SCALE = tl.constexpr(formats.PADDING_SCALE)
GROUP = tl.constexpr(8)  # consecutive columns of a thread in a block that is quantised both ways

# Three quantised matrices leave registers for 8 elements a thread.
BACKWARD = Config(block_r=32, block_f=32, num_warps=4, programs_per_sm=4)


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
    scales, _, factor = block_scales(amax, 1.0, RECIPROCAL, False)
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
        fill_row_atoms(first_row, real, 2 * F // BLOCK, padded_S, g1_row_scales_ptr)
        if g1_columns_ptr is not None:
            _fill_column_atoms(block, 2 * F, g1_column_scales_ptr, num_blocks)
        if h2_columns_ptr is not None:
            _fill_column_atoms(block, F, h2_column_scales_ptr, num_blocks)


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
    _swiglu_backward_quantize[grid_of(h1_X2F.device, config, num_sms)](
        h1_X2F,
        h1_start_1,
        g2_XF,
        g2_start_1,
        row_scores_R,
        score_grads_R,
        *(tensor for bundle in bundles for tensor in places_of(bundle)),
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

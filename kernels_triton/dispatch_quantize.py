"""dispatch_quantize, quantize_received: the rows of dispatch as quantised rows and, or, quantised columns.

    rows     blocks of 32 columns of a row,   of v = fp32(x), into a bundle of rows
    columns  blocks of 32 rows of a column,   of v, or of score * v in FP32, into a bundle of columns, which may be
             expanded: BF16 of value times scale

with x the row that dispatch would place there, zeros where it would place zeros, and scales and values as in quantize.
dispatch_quantize pulls x from the peers' `tokens` and `scores`, after the wait on PUBLISHED and under dispatch's order;
quantize_received reads a window of columns that dispatch has put at local rows. Both write local memory only.

Grid: persistent, programs of one warp over items, an item being a block of 32 rows, which lies in one expert, by a few
chunks of as many columns as an atom of scales is wide, and high.
"""

import functools

import torch
import triton
import triton.language as tl

from dist_moe import formats
from dist_moe.quantized import Bundle, check_producer, check_staged

from ._device import begin, delay, is_interpreting, num_programs
from ._launch import launched
from ._rows import RowTile, num_parts, peer_pointers, spread
from ._scaled import (
    ATOM_C,
    blocked_offset,
    format_options,
    pack_pairs,
    quantise,
    quantise_and_expand,
)
from .dispatch import NEGATIVE_ZERO

CHUNKS = 4  # of a turn: its slots, sources and scores are read once for so many


@functools.cache
def pick_tile(format: formats.Format, width: int) -> RowTile:
    """A warp by itself: its thread has 16 columns of 8 rows, so that a block of either orientation is in few lanes, and
    nothing waits for other warps. 8 KB are in flight for each. e2m1, made by comparisons, has no columns and takes more
    registers: eight warps."""
    warps, programs = (1, 8) if format.values_per_byte == 1 else (8, 2)
    return RowTile(format.block, formats.SCALE_ATOM[0], num_warps=warps, programs_per_sm=programs)


@triton.jit
def _put_rows(
    v,  # [BLOCK, BLOCK_D] fp32, zeros in columns from `width` on, so that their scales are 0
    block,  # i64, as in the others
    col,  # of the bundle, a multiple of BLOCK_D
    real,
    end,
    D,
    values_ptr,  # of the call
    scales_ptr,
    ELEMENT: tl.constexpr,
    VALUES_PER_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Real rows of a chunk into a bundle of rows; a chunk is as wide as an atom."""
    BYTES: tl.constexpr = BLOCK_D // VALUES_PER_BYTE
    blocks = tl.reshape(v, (BLOCK, ATOM_C, BLOCK))
    codes, scales = quantise(blocks, 1.0, 2, ELEMENT, RECIPROCAL, False)
    codes = tl.reshape(codes, (BLOCK, BLOCK_D))
    if VALUES_PER_BYTE == 2:
        codes = pack_pairs(codes, BLOCK, BLOCK_D)
    row = tl.arange(0, BLOCK)[:, None]
    byte = tl.arange(0, BYTES)[None, :]
    width = D // VALUES_PER_BYTE
    values_ptr += block * BLOCK * width + col // VALUES_PER_BYTE
    mask = real[:, None] & (col // VALUES_PER_BYTE + byte < end // VALUES_PER_BYTE)
    tl.store(values_ptr + (row * width + byte), codes, mask=mask)
    scales_ptr += blocked_offset(block * BLOCK, col // BLOCK, tl.cdiv(D, BLOCK_D) * ATOM_C)
    scale_ptrs = tl.multiple_of(scales_ptr, ATOM_C) + (row * 16 + tl.arange(0, ATOM_C)[None, :])
    tl.store(scale_ptrs, scales, mask=real[:, None])


@triton.jit
def _put_columns(
    v,  # [BLOCK, BLOCK_D] fp32, zeros in rows of padding and in columns from `width` on
    block,
    col,
    num_blocks,
    end,
    D,
    values_ptr,
    scales_ptr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A chunk of a block of rows into a bundle of columns; a chunk is as wide as an atom is high."""
    row = tl.arange(0, BLOCK)[:, None]
    offs_d = tl.arange(0, BLOCK_D)
    if scales_ptr is None:
        values = quantise_and_expand(v, 1.0, 0, ELEMENT, RECIPROCAL, False)
    else:
        values, scales = quantise(v, 1.0, 0, ELEMENT, RECIPROCAL, False)
        scales_ptr += blocked_offset(col, block, num_blocks)
        tl.store(scales_ptr + (offs_d % 32 * 16 + offs_d // 32 * 4), scales)
    values_ptr += block * BLOCK * D + col
    tl.store(values_ptr + (row * D + offs_d[None, :]), values, mask=(col + offs_d < end)[None, :])


@launched
@triton.jit(do_not_specialize=["sources"])
def _dispatch_quantize(
    tokens_table_ptr,  # [W] int64 addresses of bf16 [2, T_max, D]; None of staged rows
    scores_table_ptr,  # [W] int64 addresses of fp32 [T_max, K]; None likewise
    staged_ptr,  # [X, pitch] bf16; None of pulled rows
    staged_start_ptr,  # int64; None likewise
    row_to_slot_ptr,  # [R] int32
    num_rows_ptr,  # int32, rows of padding included
    row_scores_ptr,  # [R] fp32, written of pulled rows, else read
    rows_values_ptr,  # [X, D / values per byte] bytes; these five are None without a bundle of rows
    rows_start_ptr,  # int64
    rows_scales_ptr,  # bytes
    rows_scales_start_ptr,  # int64
    rows_stop_ptr,  # int64
    columns_values_ptr,  # [X, D] bytes, or bf16; these five are None without a bundle of columns
    columns_start_ptr,  # int64
    columns_scales_ptr,  # bytes; this and the next are None of expanded columns
    columns_scales_start_ptr,  # int64
    columns_stop_ptr,  # int64
    T_max,
    sources,  # stretches of rows that are of one source rank each
    pitch,  # of a source row
    first,  # column of the bundles that column 0 of the source is
    width,  # columns that are quantised
    D,
    HALF: tl.constexpr,  # 0: x, 1: dy
    K: tl.constexpr,
    SCALED: tl.constexpr,  # columns are of score * x
    ELEMENT: tl.constexpr,
    VALUES_PER_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Turn t is up to CHUNKS chunks of a block of rows; program p takes the turns p, p + programs, ...

    Example (e4m3, W = 1, D = 32, tokens 448 and -960 in all columns, routes of token 1, then 0, to one expert):
    row_to_slot = [1, 0, -1, ...] gives rows of values -240 with scale 129 and 448 with 127, and columns
    [-240, 112, 0, ...] with scale 129 for the first 32 rows and zeros with scale 0 for rows 32 to 127; expanded
    [-960, 448, 0, ...].
    """
    begin()
    ROWS: tl.constexpr = rows_values_ptr is not None
    COLUMNS: tl.constexpr = columns_values_ptr is not None
    rows_on = False
    columns_on = False
    if ROWS:
        rows_on = tl.load(rows_stop_ptr) == 0
    if COLUMNS:
        columns_on = tl.load(columns_stop_ptr) == 0
    if not (rows_on or columns_on):
        return
    if ROWS:
        rows_values_ptr += tl.load(rows_start_ptr) * (D // VALUES_PER_BYTE)
        rows_scales_ptr += tl.load(rows_scales_start_ptr)
    if COLUMNS:
        columns_values_ptr += tl.load(columns_start_ptr) * D
        if columns_scales_ptr is not None:
            columns_scales_ptr += tl.load(columns_scales_start_ptr)
    num_blocks = tl.load(num_rows_ptr) // BLOCK  # experts begin at multiples of whole atoms
    num_chunks = tl.cdiv(width, BLOCK_D)
    num_groups = tl.cdiv(num_chunks, CHUNKS)
    parts = num_parts(num_blocks, sources)
    num_turns = parts * tl.cdiv(num_blocks, parts) * num_groups
    for turn in range(tl.program_id(0), num_turns, tl.num_programs(0)):
        block = spread(turn // num_groups, num_blocks, parts).to(tl.int64)
        delay(turn)
        first_chunk = turn % num_groups * CHUNKS
        if block < num_blocks:
            row = block * BLOCK + tl.arange(0, BLOCK)
            slot = tl.load(row_to_slot_ptr + row)
            real = slot >= 0  # of a block of padding nothing else is loaded
            if staged_ptr is None:
                src = slot // (T_max * K)
                own_slot = slot - src * (T_max * K)
                score_ptrs = peer_pointers(scores_table_ptr, src, own_slot, real, tl.float32, 4)
                score = tl.load(score_ptrs, mask=real, other=0.0)
                token = HALF * T_max + own_slot // K
                x_ptrs = peer_pointers(tokens_table_ptr, src, token.to(tl.int64) * pitch, real, tl.bfloat16, 16)
                if first_chunk == 0:
                    tl.store(row_scores_ptr + row, score, mask=real)
                used = real
                if HALF == 0:
                    used = real & (score.to(tl.int32, bitcast=True) != NEGATIVE_ZERO)
            else:
                x_ptrs = staged_ptr + (tl.load(staged_start_ptr) + row) * pitch
                used = real
                if SCALED:
                    score = tl.load(row_scores_ptr + row, mask=real, other=0.0)
            for chunk in range(first_chunk, min(first_chunk + CHUNKS, num_chunks)):
                offs_d = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
                mask = used[:, None] & (offs_d < width)[None, :]
                v = tl.load(x_ptrs[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
                col = first + chunk * BLOCK_D
                end = first + width
                if ROWS and rows_on:
                    _put_rows(
                        v, block, col, real, end, D, rows_values_ptr, rows_scales_ptr,
                        ELEMENT, VALUES_PER_BYTE, BLOCK, RECIPROCAL, BLOCK_D,
                    )  # fmt: skip
                if COLUMNS and columns_on:
                    if SCALED:
                        v = v * score[:, None]
                    _put_columns(
                        v, block, col, num_blocks, end, D, columns_values_ptr, columns_scales_ptr,
                        ELEMENT, BLOCK, RECIPROCAL, BLOCK_D,
                    )  # fmt: skip


def _parts(bundle: Bundle | None, stop_1) -> tuple:
    """Of a bundle of a format with one level, as the kernel takes them."""
    if bundle is None:
        return (None,) * 5
    if bundle.expanded:
        return bundle.values, bundle.start_1, None, None, stop_1
    values, scales = bundle.values.view(torch.uint8), bundle.scales.view(torch.uint8)
    return values, bundle.start_1, scales, bundle.scales_start_1, stop_1


def _grid(device: torch.device, tile: RowTile, num_sms: int | None) -> tuple[int]:
    """Persistent, as many programs as all the SMs hold, or as num_sms of them do."""
    return (num_programs(device, num_sms) * (1 if is_interpreting() else tile.programs_per_sm),)


def _launch(source, plan, row_scores_R, outputs, sizes, *, half, K, format, scaled_columns, num_sms):
    tile = pick_tile(format, sizes[-2])
    _dispatch_quantize[_grid(plan.row_to_slot_R.device, tile, num_sms)](
        *source, plan.row_to_slot_R, plan.row_start_P[-1:], row_scores_R, *outputs, *sizes,
        HALF=half, K=K, SCALED=scaled_columns, VALUES_PER_BYTE=format.values_per_byte, **format_options(format),
        BLOCK_D=tile.block_d, CHUNKS=CHUNKS, enable_fp_fusion=False, **tile.options,
    )  # fmt: skip


def dispatch_quantize(
    plan,
    *,
    tokens,
    half,
    scores,
    format,
    rows,
    columns,
    scaled_columns,
    row_scores_R,
    rows_stop_1,
    columns_stop_1,
    num_sms=None,
):
    """Pull the rows routed to this rank straight into quantised rows and, or, columns, with their scores.

    Args:    plan: from route() with experts aligned to atoms.  half: 0 pulls x, 1 pulls dy.  format: of one level, for
             columns with one value in a byte.  rows, columns: bundles, at least one; columns may be expanded.
             scaled_columns: columns are of score * x.  row_scores_R: fp32 [R], written unless all outputs are stopped.
             rows_stop_1, columns_stop_1: nothing of that output is written where it is not 0; None for an output that
             is None.
    Raises:  ValueError for formats and bundles that do not fit.
    Order:   after the wait on PUBLISHED; reads peers' `tokens` and `scores`, writes local memory only.
    Source:  reference_producers.dispatch_quantize.
    """
    (T_max, K), D, W = scores.own.shape, tokens.own.shape[2], len(tokens.peers)
    check_producer("dispatch_quantize", format, rows, columns, D)
    source = (tokens.table_W, scores.table_W, None, None)
    outputs = (*_parts(rows, rows_stop_1), *_parts(columns, columns_stop_1))
    options = {"half": half, "K": K, "format": format, "scaled_columns": scaled_columns, "num_sms": num_sms}
    _launch(source, plan, row_scores_R, outputs, (T_max, W * plan.num_local_experts, D, 0, D, D), **options)


def quantize_received(
    plan,
    *,
    staged_XS,
    staged_start_1,
    window,
    format,
    rows,
    columns,
    scaled_columns,
    row_scores_R,
    rows_stop_1,
    columns_stop_1,
    num_sms=None,
):
    """The same bits for columns first .. first + size of the bundles, from local rows; one call a window makes all.

    Args:    as in dispatch_quantize.  staged_XS: bf16, rows from staged_start_1 on as dispatch has put them, columns of
             the window first.  window: (first, size), ends at multiples of 128 or at D.  row_scores_R: read for
             scaled_columns.
    Raises:  ValueError for formats, bundles and windows that do not fit.
    Order:   after dispatch on the same stream; local memory only.
    Source:  reference_producers.quantize_received.
    """
    given, (first, size) = columns if rows is None else rows, window
    D = 0 if given is None else given.values.shape[1] * format.values_per_byte
    check_producer("quantize_received", format, rows, columns, D)
    check_staged("quantize_received", staged_XS, window, D)
    source = (None, None, staged_XS, staged_start_1)
    outputs = (*_parts(rows, rows_stop_1), *_parts(columns, columns_stop_1))
    options = {"half": None, "K": None, "format": format, "scaled_columns": scaled_columns, "num_sms": num_sms}
    _launch(source, plan, row_scores_R, outputs, (0, 1, staged_XS.shape[1], first, size, D), **options)

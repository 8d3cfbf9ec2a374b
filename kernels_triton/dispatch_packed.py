"""dispatch_packed: the wire rows of quantised tokens, pulled from the peers into a bundle of rows.

    values     copied byte for byte
    scales     from natural order into blocked order, zeros up to whole atoms of columns
    outer_inv  FP32, of formats with two levels

formats.packed_row_parts says where they lie in a wire row. Order and rule are dispatch's: it runs after the wait on
PUBLISHED, a row whose published score is -0.0 becomes zeros in all three, and rows of padding are neither read nor
written. Per route and de-duplicated give the same bits. Grid: persistent programs over blocks of rows (of pairs), or
shares of their values. Wire rows and values are moved as words of 32 bits, four scales one.
"""

import torch
import triton
import triton.language as tl

from dist_moe import formats
from dist_moe.quantized import check_wire_rows
from dist_moe.shapes import cdiv, next_power_of_2

from ._device import begin, delay
from ._launch import launched
from ._rows import (
    RowTile,
    few_rows,
    num_row_items,
    pair_item,
    pair_rows_and_scores,
    peer_pointers,
    pick_row_tile,
    pull_pair_scores,
    row_grid,
    row_item,
    row_items,
)
from ._scaled import ELEMENTS, blocked_offset, expanded, words_of
from .dispatch import NEGATIVE_ZERO

GROUP_WORDS = tl.constexpr(formats.EXPANDED_GROUP_BYTES // 4)


@triton.jit
def _load_scales(wire_ptrs, mask, VALUE_WORDS: tl.constexpr, NUM_SCALES: tl.constexpr, BLOCK_S: tl.constexpr):
    """Words of four scales of wire rows; what comes behind the last scale is cleared. Also which words there are.

    Example: 6 scales 1 2 3 4 5 6 and then an outer scale: words 0x04030201 and 0x00000605.
    """
    word = tl.arange(0, BLOCK_S)
    mask = mask[:, None] & (4 * word < NUM_SCALES)[None, :]
    scales = tl.load(wire_ptrs[:, None] + VALUE_WORDS + word[None, :], mask=mask, other=0)
    left = tl.minimum(NUM_SCALES - 4 * word, 4)
    return tl.where((left == 4)[None, :], scales, scales & ((1 << 8 * (left & 3)) - 1)[None, :])


@triton.jit
def _store_scales(scales, row, alive, mask, scales_ptr, start, NUM_SCALES: tl.constexpr, BLOCK_S: tl.constexpr):
    """Their places in blocked order; zeros for rows that are not alive."""
    word = tl.arange(0, BLOCK_S)
    COLS: tl.constexpr = (NUM_SCALES + 3) // 4 * 4
    offsets = blocked_offset(row[:, None], 4 * word[None, :], COLS)
    mask = mask[:, None] & (4 * word < NUM_SCALES)[None, :]
    tl.store(scales_ptr + (start + offsets) // 4, tl.where(alive[:, None], scales, 0), mask=mask)


@triton.jit
def _load_outer(half_ptrs, mask):
    """Bits of an FP32 that lies at an even byte."""
    low = tl.load(half_ptrs, mask=mask, other=0).to(tl.int32) & 0xFFFF
    return low | (tl.load(half_ptrs + 1, mask=mask, other=0).to(tl.int32) << 16)


@triton.jit
def _load_values(wire_ptrs, mask, first, end, BLOCK_V: tl.constexpr):
    """Words of values from the first on."""
    word = first + tl.arange(0, BLOCK_V)
    return tl.load(wire_ptrs[:, None] + word[None, :], mask=mask[:, None] & (word < end)[None, :], other=0)


@triton.jit
def _load_expanded(
    wire_ptrs,
    mask,
    first,
    end,
    VALUE_WORDS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Words of values from the first on times their scales, as words of two values in 16 bits."""
    ROWS: tl.constexpr = wire_ptrs.shape[0]
    CODES: tl.constexpr = 8 if ELEMENT == "e2m1" else 4  # of a word
    words = _load_values(wire_ptrs, mask, first, end, BLOCK_V)
    scale = first * CODES // BLOCK + tl.arange(0, BLOCK_V * CODES // BLOCK)
    inside = mask[:, None] & (scale < end * CODES // BLOCK)[None, :]
    scale_ptrs = wire_ptrs.to(tl.pointer_type(tl.uint8), bitcast=True) + 4 * VALUE_WORDS
    scales = tl.load(scale_ptrs[:, None] + scale[None, :], mask=inside, other=0)
    halves = tl.join(words, words >> 16)
    codes = tl.join(halves, halves >> 8)  # [ROWS, BLOCK_V, 2 halves, 2 bytes]
    if ELEMENT == "e2m1":
        codes = tl.join(codes, codes >> 4) & 15
    codes = tl.reshape(codes.to(tl.uint8), (ROWS, BLOCK_V * CODES))
    values = expanded(codes, scales, ELEMENT, BLOCK).to(tl.int16, bitcast=True)
    low, high = tl.split(tl.reshape(values, (ROWS, BLOCK_V * CODES // 2, 2)))
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@launched
@triton.jit(do_not_specialize=["sources"])
def _dispatch_packed_routes(
    tokens_table_ptr,  # [W] int64 addresses of bytes [T_max, WIRE_BYTES]
    scores_table_ptr,  # [W] int64 addresses of fp32 [T_max, K]
    row_to_slot_ptr,  # [R] int32
    num_rows_ptr,  # int32, rows of padding included
    values_ptr,  # [X, OUT_WORDS] i32
    start_ptr,  # int64
    scales_ptr,  # i32; None if rows are expanded, as the next
    scales_start_ptr,  # int64, bytes
    outer_inv_ptr,  # i32, bits of fp32; None without outer scales
    outer_inv_start_ptr,  # int64; None likewise
    row_scores_ptr,  # [R] fp32
    stop_ptr,  # int64
    T_max,
    sources,  # stretches of rows that are of one source rank each
    K: tl.constexpr,
    WIRE_BYTES: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    OUT_WORDS: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Rows one by one: program p takes the items p, p + programs, ..., shares of blocks of ROWS rows.

    Example (e4m3, D = 96, so wire rows of 96 + 3 bytes, padded to 112; row 33 is of a token with the scales 7 8 9):
    bytes 20 to 23 of the first atom are 7 8 9 0.
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    num_rows = tl.load(num_rows_ptr)
    start = tl.load(start_ptr)
    EXPANDED: tl.constexpr = scales_ptr is None
    GROWTH: tl.constexpr = (8 if ELEMENT == "e2m1" else 4) // 2 if EXPANDED else 1  # words that one becomes
    END_UNIT: tl.constexpr = GROUP_WORDS if EXPANDED else 1  # groups of words are written whole
    if not EXPANDED:
        scales_start = tl.load(scales_start_ptr)
    offs_v = tl.arange(0, BLOCK_V * GROWTH)
    num_blocks, parts, shares, words = row_items(num_rows, sources, VALUE_WORDS, ROWS, BLOCK_V)
    for item in range(tl.program_id(0), num_row_items(num_blocks, parts, shares), tl.num_programs(0)):
        block, first_v = row_item(item, num_blocks, parts, shares, words)
        end_v = tl.minimum(first_v + words, VALUE_WORDS)
        delay(item)
        row = block * ROWS + tl.arange(0, ROWS)
        slot = tl.load(row_to_slot_ptr + row, mask=row < num_rows, other=-1)
        real = slot >= 0
        src = slot // (T_max * K)
        own_slot = slot - src * (T_max * K)
        token = (own_slot // K).to(tl.int64)
        wire_ptrs = peer_pointers(tokens_table_ptr, src, token * (WIRE_BYTES // 4), real, tl.int32, 16)
        once = real & (first_v == 0)  # what is not values
        score = tl.load(peer_pointers(scores_table_ptr, src, own_slot, real, tl.float32, 4), mask=real, other=0.0)
        if EXPANDED:
            values = _load_expanded(wire_ptrs, real, first_v, end_v, VALUE_WORDS, BLOCK_V, ELEMENT, BLOCK)
        else:
            values = _load_values(wire_ptrs, real, first_v, end_v, BLOCK_V)
            scales = _load_scales(wire_ptrs, once, VALUE_WORDS, NUM_SCALES, BLOCK_S)
        if outer_inv_ptr is not None:
            outer = token * (WIRE_BYTES // 2) + VALUE_WORDS * 2 + NUM_SCALES // 2
            outer_inv = _load_outer(peer_pointers(tokens_table_ptr, src, outer, once, tl.int16, 2), once)
        alive = score.to(tl.int32, bitcast=True) != NEGATIVE_ZERO
        tl.store(row_scores_ptr + row, score, mask=once)
        if not EXPANDED:
            _store_scales(scales, row, alive, once, scales_ptr, scales_start, NUM_SCALES, BLOCK_S)
        if outer_inv_ptr is not None:
            outer_ptrs = outer_inv_ptr + tl.load(outer_inv_start_ptr) + row
            tl.store(outer_ptrs, tl.where(alive, outer_inv, 0), mask=once)
        value_ptrs = values_ptr + (start + row) * OUT_WORDS
        end_out = tl.cdiv(end_v, END_UNIT) * END_UNIT * GROWTH
        for v in range(first_v, end_v, BLOCK_V):
            if EXPANDED:
                next_values = _load_expanded(wire_ptrs, real, v + BLOCK_V, end_v, VALUE_WORDS, BLOCK_V, ELEMENT, BLOCK)
            else:
                next_values = _load_values(wire_ptrs, real, v + BLOCK_V, end_v, BLOCK_V)
            place = v * GROWTH + offs_v
            mask = real[:, None] & (place < end_out)[None, :]
            tl.store(value_ptrs[:, None] + place[None, :], tl.where(alive[:, None], values, 0), mask=mask)
            values = next_values


@launched
@triton.jit
def _dispatch_packed_pairs(
    tokens_table_ptr,  # [W] int64 addresses of bytes [T_max, WIRE_BYTES]
    scores_table_ptr,  # [W] int64 addresses of fp32 [T_max, K]
    row_to_slot_ptr,  # [R] int32
    pair_rows_ptr,  # [R] int32
    pair_start_ptr,  # [R] int32
    pair_output_ptr,  # [R] int32
    num_pairs_ptr,  # int32
    num_routes_ptr,  # int32, the end of pair_rows
    values_ptr,  # [X, OUT_WORDS] i32
    start_ptr,  # int64
    scales_ptr,  # i32; None if rows are expanded, as the next
    scales_start_ptr,  # int64, bytes
    outer_inv_ptr,  # i32, bits of fp32; None without outer scales
    outer_inv_start_ptr,  # int64; None likewise
    row_scores_ptr,  # [R] fp32
    stop_ptr,  # int64
    T_max,
    K: tl.constexpr,
    K2: tl.constexpr,  # K rounded up to a power of two
    J: tl.constexpr,
    W: tl.constexpr,
    WIRE_BYTES: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    OUT_WORDS: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    UNROLL: tl.constexpr,  # rows of a pair that are stored together
):
    """Pairs one by one: program p takes the items p, p + programs, ..., shares of blocks of PAIRS pairs.

    Example: the tables of RoutePlan's docstring. Pair 2 is token 2: its wire row is pulled once, and stored to its rows
    of experts 1 and 0, with the scores of slots (2, 0) and (2, 1).
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    num_pairs = tl.load(num_pairs_ptr)
    num_routes = tl.load(num_routes_ptr)
    start = tl.load(start_ptr)
    EXPANDED: tl.constexpr = scales_ptr is None
    GROWTH: tl.constexpr = (8 if ELEMENT == "e2m1" else 4) // 2 if EXPANDED else 1  # words that one becomes
    END_UNIT: tl.constexpr = GROUP_WORDS if EXPANDED else 1  # groups of words are written whole
    if not EXPANDED:
        scales_start = tl.load(scales_start_ptr)
    offs_v = tl.arange(0, BLOCK_V * GROWTH)
    num_blocks, parts, shares, words = row_items(num_pairs, W, VALUE_WORDS, PAIRS, BLOCK_V)
    for item in range(tl.program_id(0), num_row_items(num_blocks, parts, shares), tl.num_programs(0)):
        block, first_v = row_item(item, num_blocks, parts, shares, words)
        end_v = tl.minimum(first_v + words, VALUE_WORDS)
        delay(item)
        in_use, first, count, most, output = pair_item(
            block, num_pairs, num_routes, pair_start_ptr, pair_output_ptr, PAIRS
        )
        src = output // (T_max * J)
        token = ((output - src * (T_max * J)) // J).to(tl.int64)
        wire_ptrs = peer_pointers(tokens_table_ptr, src, token * (WIRE_BYTES // 4), in_use, tl.int32, 16)
        once = in_use & (first_v == 0)  # what is not values
        if EXPANDED:
            values = _load_expanded(wire_ptrs, in_use, first_v, end_v, VALUE_WORDS, BLOCK_V, ELEMENT, BLOCK)
        else:
            values = _load_values(wire_ptrs, in_use, first_v, end_v, BLOCK_V)
            scale_words = _load_scales(wire_ptrs, once, VALUE_WORDS, NUM_SCALES, BLOCK_S)
        if outer_inv_ptr is not None:
            outer = token * (WIRE_BYTES // 2) + VALUE_WORDS * 2 + NUM_SCALES // 2
            outer_inv = _load_outer(peer_pointers(tokens_table_ptr, src, outer, once, tl.int16, 2), once)
            outer_inv_start = tl.load(outer_inv_start_ptr)
        pull_pair_scores(
            first, count, src, T_max * K, pair_rows_ptr, row_to_slot_ptr, scores_table_ptr, row_scores_ptr, K2
        )
        if first_v == 0:
            for i in range(0, most, UNROLL):
                rows, scores = pair_rows_and_scores(first, count, i, pair_rows_ptr, row_scores_ptr, UNROLL)
                for j in tl.static_range(UNROLL):
                    here, alive = i + j < count, scores[j].to(tl.int32, bitcast=True) != NEGATIVE_ZERO
                    if not EXPANDED:
                        _store_scales(scale_words, rows[j], alive, here, scales_ptr, scales_start, NUM_SCALES, BLOCK_S)
                    if outer_inv_ptr is not None:
                        tl.store(outer_inv_ptr + outer_inv_start + rows[j], tl.where(alive, outer_inv, 0), mask=here)
        end_out = tl.cdiv(end_v, END_UNIT) * END_UNIT * GROWTH
        for v in range(first_v, end_v, BLOCK_V):
            place = v * GROWTH + offs_v
            mask_v = (place < end_out)[None, :]
            if EXPANDED:
                next_values = _load_expanded(
                    wire_ptrs, in_use, v + BLOCK_V, end_v, VALUE_WORDS, BLOCK_V, ELEMENT, BLOCK
                )
            else:
                next_values = _load_values(wire_ptrs, in_use, v + BLOCK_V, end_v, BLOCK_V)
            for i in range(0, most, UNROLL):
                rows, scores = pair_rows_and_scores(first, count, i, pair_rows_ptr, row_scores_ptr, UNROLL)
                for j in tl.static_range(UNROLL):
                    here, alive = i + j < count, scores[j].to(tl.int32, bitcast=True) != NEGATIVE_ZERO
                    value_ptrs = values_ptr + (start + rows[j]) * OUT_WORDS
                    value = tl.where(alive[:, None], values, 0)
                    tl.store(value_ptrs[:, None] + place[None, :], value, mask=here[:, None] & mask_v)
            values = next_values


def pick_tile(format: formats.Format, width: int, **few: int) -> RowTile:
    """As much of the values in flight as dispatch has of its rows."""
    return pick_row_tile(width // format.values_per_byte // 2, **few)  # in elements of two bytes


def wire_options(format: formats.Format, width: int, tile: RowTile, expanded: bool = False) -> dict[str, int]:
    """Constexprs that both kernels take. Expanded, values grow in registers, and whole groups of them are written."""
    block_v = tile.block_d // 2
    if expanded:
        block_v = max(block_v // (2 * format.values_per_byte), GROUP_WORDS.value)
    values_end, scales_end, _ = formats.packed_row_parts(format, width)
    return {
        "WIRE_BYTES": formats.packed_row_bytes(format, width),
        "VALUE_WORDS": values_end // 4,
        "NUM_SCALES": scales_end - values_end,
        "ELEMENT": ELEMENTS[format.value_dtype],
        "BLOCK": format.block,
        "OUT_WORDS": formats.row_pitch(format, width, expanded) // 4,
        "BLOCK_V": block_v,
        "BLOCK_S": next_power_of_2(cdiv(scales_end - values_end, 4)),
    }


def dispatch_packed(plan, *, tokens, scores, dedup, format, rows, row_scores_R, stop_1, num_sms=None):
    """Pull the wire rows routed to this rank into a bundle of quantised rows in expert-major order, with their scores.

    Args:    plan: from route() with experts aligned to atoms.  tokens: uint8 [1, T_max, B], rows as publish packs
             them.  rows: bundle, whose rows of padding are left alone.  row_scores_R: fp32 [R], written.
    Raises:  ValueError where tokens, format and bundle do not fit.
    Order:   after the wait on PUBLISHED; reads peers' `tokens` and `scores`, writes local memory only.
    Source:  reference_producers.dispatch_packed.
    """
    (T_max, K), W = scores.own.shape, len(tokens.peers)
    width = check_wire_rows("dispatch_packed", tokens.own, rows, format)
    tile = pick_tile(format, width, **few_rows(rows.values.device, T_max * (W if dedup else K), num_sms))
    grid = row_grid(rows.values.device, tile, num_sms)
    outer = (rows.outer_inv.view(torch.int32), rows.outer_inv_start_1) if format.two_level else (None, None)
    values_XV, scales = words_of(rows.values), None if rows.expanded else words_of(rows.scales)
    into = (values_XV, rows.start_1, scales, rows.scales_start_1, *outer, row_scores_R, stop_1)
    options = wire_options(format, width, tile, rows.expanded) | tile.options
    if dedup:
        pairs = (plan.pair_rows_R, plan.pair_start_R, plan.pair_output_R, plan.num_pairs_1, plan.num_routes_1)
        _dispatch_packed_pairs[grid](
            tokens.table_W, scores.table_W, plan.row_to_slot_R, *pairs, *into, T_max,
            K=K, K2=next_power_of_2(K), J=min(K, W), W=W, PAIRS=tile.rows, UNROLL=tile.unroll, **options,
        )  # fmt: skip
    else:
        num_rows_1, sources = plan.row_start_P[-1:], W * plan.num_local_experts
        _dispatch_packed_routes[grid](
            tokens.table_W, scores.table_W, plan.row_to_slot_R, num_rows_1, *into, T_max, sources,
            K=K, ROWS=tile.rows, **options,
        )  # fmt: skip

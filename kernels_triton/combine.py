"""combine: the push of the experts' rows to their owners.

It writes the owners' `outputs`, after the last GEMM and before the signal of COMBINED, a release at system scope that
its own last program may do; an owner reads after its wait on COMBINED (reduce). The next push comes after the wait on
PUBLISHED of a later call, which the owner signals after it has read.
    per route       outputs[t, k] = row                                  (the owner applies the scores)
    de-duplicated   outputs[t, j] = bf16(sum over the pair's rows, in slot order, of score * row)
Of a window of columns those of `outputs` alone are written, from the first columns of the rows. Rows of padding (slot
-1) are not read.

All sums are FP32 in a fixed order, a product rounded before it is added: the kernels are compiled without contraction
to fused multiply-add (enable_fp_fusion=False), so that GPU, interpreter and oracle give the same bits.
"""

import triton
import triton.language as tl

from ._device import begin, delay
from ._launch import launched
from ._rows import (
    column_window,
    few_rows,
    num_row_items,
    pair_item,
    peer_pointers,
    pick_row_tile,
    row_grid,
    row_item,
    row_items,
)
from .barrier import ending, send_when_last


@launched
@triton.jit(do_not_specialize=["sources", "rank", "W"])
def _combine_routes(
    outputs_table_ptr,  # [W] int64 addresses of bf16 [T_max, K, D]
    score_grads_table_ptr,  # [W] int64 addresses of fp32 [T_max, K], or None
    row_score_grads_ptr,  # [R] fp32, or None
    row_to_slot_ptr,  # [R] int32
    num_rows_ptr,  # int32
    rows_ptr,  # [X, PITCH] bf16
    start_ptr,  # int64
    stop_ptr,  # int64
    num_slots,  # T_max * K, slots of one rank
    first_column,
    sources,  # stretches of rows that are of one source rank each
    signals_table_ptr,  # None, as the pointers below, unless the signal comes with it
    sent_ptr,
    header_ptr,
    fault_ptr,
    finished_ptr,
    rank,
    W,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # columns that move
    PITCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Every row to its slot: program p takes the items p, p + programs, ..., shares of blocks of ROWS rows.

    Example (W = 1, T_max = 3, K = 2): rows [1, 2, 3, 4, 5] (D = 1) and row_to_slot = [0, 5, 1, 2, 4] give
    outputs [[1, 3], [4, untouched], [5, 2]].
    """
    begin()
    runs = tl.load(stop_ptr) == 0
    num_rows = tl.where(runs, tl.load(num_rows_ptr), 0)
    start = tl.load(start_ptr)
    offs_d = tl.arange(0, BLOCK_D)
    num_blocks, parts, shares, columns = row_items(num_rows, sources, WIDTH, ROWS, BLOCK_D)
    for item in range(tl.program_id(0), num_row_items(num_blocks, parts, shares), tl.num_programs(0)):
        block, first_d = row_item(item, num_blocks, parts, shares, columns)
        delay(item)
        row = block * ROWS + tl.arange(0, ROWS)
        slot = tl.load(row_to_slot_ptr + row, mask=row < num_rows, other=-1)
        in_use = slot >= 0
        src = slot // num_slots
        own_slot = slot - src * num_slots
        if score_grads_table_ptr is not None:
            once = in_use & (first_d == 0)
            grad = tl.load(row_score_grads_ptr + row, mask=once, other=0.0)
            tl.store(peer_pointers(score_grads_table_ptr, src, own_slot, once, tl.float32, 4), grad, mask=once)
        offset = own_slot.to(tl.int64) * D + first_column
        out_ptrs = peer_pointers(outputs_table_ptr, src, offset, in_use, tl.bfloat16, 16)
        row_ptrs = rows_ptr + (start + row) * PITCH
        for d in range(first_d, tl.minimum(first_d + columns, WIDTH), BLOCK_D):
            mask = in_use[:, None] & (d + offs_d < WIDTH)[None, :]
            value = tl.load(row_ptrs[:, None] + (d + offs_d)[None, :], mask=mask)
            tl.store(out_ptrs[:, None] + (d + offs_d)[None, :], value, mask=mask)
    if signals_table_ptr is not None:
        send_when_last(signals_table_ptr, sent_ptr, header_ptr, fault_ptr, finished_ptr, rank, W, STAGE, BLOCK_W)


@triton.jit
def push_pairs(
    item,
    num_pairs,
    num_routes,
    num_blocks,  # this and the next three: of row_items
    parts,
    shares,
    columns,
    outputs_table_ptr,
    score_grads_table_ptr,
    row_score_grads_ptr,
    row_scores_ptr,
    row_to_slot_ptr,
    pair_rows_ptr,
    pair_start_ptr,
    pair_output_ptr,
    rows_ptr,
    start,
    num_slots,
    num_outputs,
    first_column,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One item of _combine_pairs, which says what the arguments are."""
    offs_d = tl.arange(0, BLOCK_D)
    block, first_d = row_item(item, num_blocks, parts, shares, columns)
    in_use, first, count, most, output = pair_item(block, num_pairs, num_routes, pair_start_ptr, pair_output_ptr, PAIRS)
    src = output // num_outputs
    own_output = (output - src * num_outputs).to(tl.int64)
    if score_grads_table_ptr is not None:
        for i in range(most):
            here = (i < count) & (first_d == 0)
            row = tl.load(pair_rows_ptr + first + i, mask=here, other=0)
            own_slot = tl.load(row_to_slot_ptr + row, mask=here, other=0) - src * num_slots
            grad = tl.load(row_score_grads_ptr + row, mask=here, other=0.0)
            tl.store(peer_pointers(score_grads_table_ptr, src, own_slot, here, tl.float32, 4), grad, mask=here)
    out_ptrs = peer_pointers(outputs_table_ptr, src, own_output * D + first_column, in_use, tl.bfloat16, 16)
    for d in range(first_d, tl.minimum(first_d + columns, WIDTH), BLOCK_D):
        mask_d = (d + offs_d < WIDTH)[None, :]
        acc = tl.zeros([PAIRS, BLOCK_D], dtype=tl.float32)
        for i in range(0, most, UNROLL):
            rows = ()
            for j in tl.static_range(UNROLL):
                rows += (tl.load(pair_rows_ptr + first + i + j, mask=i + j < count, other=0),)
            terms = ()
            scores = ()
            for j in tl.static_range(UNROLL):
                here = i + j < count
                row_ptrs = rows_ptr + (start + rows[j]) * PITCH
                mask = here[:, None] & mask_d
                terms += (tl.load(row_ptrs[:, None] + (d + offs_d)[None, :], mask=mask, other=0.0),)
                if row_scores_ptr is not None:
                    scores += (tl.load(row_scores_ptr + rows[j], mask=here, other=0.0),)
            for j in tl.static_range(UNROLL):
                term = terms[j].to(tl.float32)
                if row_scores_ptr is not None:
                    term = scores[j][:, None] * term
                acc += term  # a pair with fewer rows adds +0.0, which changes no bit: acc is never -0.0
        tl.store(out_ptrs[:, None] + (d + offs_d)[None, :], acc.to(tl.bfloat16), mask=in_use[:, None] & mask_d)


@launched
@triton.jit(do_not_specialize=["rank", "W"])
def _combine_pairs(
    outputs_table_ptr,  # [W] int64 addresses of bf16 [T_max, J, D]
    score_grads_table_ptr,  # [W] int64 addresses of fp32 [T_max, K], or None
    row_score_grads_ptr,  # [R] fp32, or None
    row_scores_ptr,  # [R] fp32, or None
    row_to_slot_ptr,  # [R] int32
    pair_rows_ptr,  # [R] int32
    pair_start_ptr,  # [R] int32
    pair_output_ptr,  # [R] int32
    num_pairs_ptr,  # int32
    num_routes_ptr,  # int32
    rows_ptr,  # [X, PITCH] bf16
    start_ptr,  # int64
    stop_ptr,  # int64
    num_slots,  # T_max * K, slots of one rank
    num_outputs,  # T_max * J, output rows of one rank
    first_column,
    signals_table_ptr,  # None, as the pointers below, unless the signal comes with it
    sent_ptr,
    header_ptr,
    fault_ptr,
    finished_ptr,
    rank,
    W,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # columns that move
    PITCH: tl.constexpr,
    PAIRS: tl.constexpr,
    SOURCES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,  # rows of a pair that are loaded together
    STAGE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One row a pair: program p takes the items p, p + programs, ..., shares of blocks of PAIRS pairs.

    Example (the tables of RoutePlan's docstring): rows [1, 2, 3, 4, 5] (D = 1), row_scores [1, 5, 2, 3, 4] give
    outputs [[7], [12], [30]]: token 0 has rows 0 and 2, 1 * 1 + 2 * 3; token 2 rows 4 and 1, 4 * 5 + 5 * 2.
    """
    begin()
    runs = tl.load(stop_ptr) == 0
    num_pairs = tl.where(runs, tl.load(num_pairs_ptr), 0)
    num_routes = tl.load(num_routes_ptr)
    start = tl.load(start_ptr)
    num_blocks, parts, shares, columns = row_items(num_pairs, SOURCES, WIDTH, PAIRS, BLOCK_D)
    for item in range(tl.program_id(0), num_row_items(num_blocks, parts, shares), tl.num_programs(0)):
        delay(item)
        push_pairs(
            item, num_pairs, num_routes, num_blocks, parts, shares, columns, outputs_table_ptr, score_grads_table_ptr,
            row_score_grads_ptr, row_scores_ptr, row_to_slot_ptr, pair_rows_ptr, pair_start_ptr, pair_output_ptr,
            rows_ptr, start, num_slots, num_outputs, first_column, D, WIDTH, PITCH, PAIRS, BLOCK_D, UNROLL,
        )  # fmt: skip
    if signals_table_ptr is not None:
        send_when_last(signals_table_ptr, sent_ptr, header_ptr, fault_ptr, finished_ptr, rank, W, STAGE, BLOCK_W)


def combine(
    plan,
    rows_XD,
    start_1,
    *,
    outputs,
    dedup,
    row_scores_R,
    row_score_grads_R,
    score_grads,
    stop_1,
    columns=None,
    num_sms=None,
    then=None,
):
    """Push this rank's rows to their owners, per route or summed a (token, rank).

    Args:    rows_XD: bf16 [X, D] over the activation buffer, rows from start_1 on.  row_scores_R: fp32 [R] or None;
             de-duplicated alone, multiplies each row.  row_score_grads_R, score_grads: both in backward, both None in
             forward.  columns: (first, width) of the outputs, from the first columns of rows_XD, which may then be
             narrower than D; multiples of 32. None: all.  then: the signal COMBINED, sent by the last program; it goes
             out under a fault too.
    Order:   after the wait on PUBLISHED of this call, before the signal of COMBINED, or with it at the end; writes
             peers' `outputs` and `score_grads`.
    Source:  reference.combine.
    """
    (T_max, J, D), W = outputs.own.shape, len(outputs.peers)
    assert (score_grads is None) == (row_score_grads_R is None)
    first, width = column_window(columns, D, rows_XD)
    tile = pick_row_tile(width, **few_rows(rows_XD.device, T_max * (W if dedup else J), num_sms))
    grid = row_grid(rows_XD.device, tile, num_sms)
    widths = {"D": D, "WIDTH": width, "PITCH": rows_XD.shape[1], "BLOCK_D": tile.block_d}
    grads = (None if score_grads is None else score_grads.table_W, row_score_grads_R)
    signal, stage = ending(then)
    if dedup:
        pairs = (plan.pair_rows_R, plan.pair_start_R, plan.pair_output_R, plan.num_pairs_1)
        num_slots = 1 if score_grads is None else score_grads.own.numel()
        _combine_pairs[grid](
            outputs.table_W, *grads, row_scores_R, plan.row_to_slot_R, *pairs, plan.num_routes_1, rows_XD, start_1,
            stop_1, num_slots, T_max * J, first, *signal,
            PAIRS=tile.rows, SOURCES=W, UNROLL=tile.unroll, **widths, **stage, **tile.options, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        _combine_routes[grid](
            outputs.table_W, *grads, plan.row_to_slot_R, plan.row_start_P[-1:], rows_XD, start_1, stop_1, T_max * J,
            first, W * plan.num_local_experts, *signal,
            ROWS=tile.rows, **widths, **stage, **tile.options,
        )  # fmt: skip

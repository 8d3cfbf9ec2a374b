"""dispatch: rows_XD[start + r] = tokens of rank src [half, t] for every row r that route placed on this rank.

Pulls from the peers' `tokens` and `scores` and writes local memory only. It runs after the wait on PUBLISHED, which
acquires at system scope what every peer wrote before its signal. A peer writes there again only after its wait on
COMBINED, which this rank signals after it has read. A row of x whose published score is -0.0 (score 0 and x not finite)
is written as zeros, by select; dy is moved as it is. Of a window of columns those alone are moved, to the first columns
of the rows. Rows of padding (slot -1) are neither read nor written.

Per route, each row is pulled; de-duplicated, each (source rank, token) is pulled once and written to all its rows. Both
give the same bits. Grid: persistent programs over blocks of rows (of pairs), or shares of their columns, in tiles of
RowTile. What has to come from a peer is asked for before anything waits for it.
"""

import triton
import triton.language as tl

from dist_moe.shapes import next_power_of_2

from ._device import begin, delay
from ._launch import launched
from ._rows import (
    column_window,
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

NEGATIVE_ZERO = tl.constexpr(-(2**31))  # bits of -0.0 as int32


@triton.jit
def _load_x(x_ptrs, in_use, first_d, end_d, BLOCK_D: tl.constexpr):
    d = first_d + tl.arange(0, BLOCK_D)
    return tl.load(x_ptrs[:, None] + d[None, :], mask=in_use[:, None] & (d < end_d)[None, :], other=0.0)


@triton.jit
def pull_rows(
    item,
    num_rows,
    num_blocks,  # this and the next three: of row_items
    parts,
    shares,
    columns,
    tokens_table_ptr,
    scores_table_ptr,
    row_to_slot_ptr,
    rows_ptr,
    start,
    row_scores_ptr,
    T_max,
    first_column,
    HALF: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One item of _dispatch_routes, which says what the arguments are."""
    offs_d = tl.arange(0, BLOCK_D)
    block, first_d = row_item(item, num_blocks, parts, shares, columns)
    end_d = tl.minimum(first_d + columns, WIDTH)
    row = block * ROWS + tl.arange(0, ROWS)
    slot = tl.load(row_to_slot_ptr + row, mask=row < num_rows, other=-1)
    in_use = slot >= 0
    src = slot // (T_max * K)
    own_slot = slot - src * (T_max * K)
    score_ptrs = peer_pointers(scores_table_ptr, src, own_slot, in_use, tl.float32, 4)
    score = tl.load(score_ptrs, mask=in_use, other=0.0)
    token = HALF * T_max + own_slot // K
    x_ptrs = peer_pointers(tokens_table_ptr, src, token.to(tl.int64) * D + first_column, in_use, tl.bfloat16, 16)
    x = _load_x(x_ptrs, in_use, first_d, end_d, BLOCK_D)
    tl.store(row_scores_ptr + row, score, mask=in_use & (first_d == 0))
    dead = in_use & (score.to(tl.int32, bitcast=True) == NEGATIVE_ZERO)
    row_ptrs = rows_ptr + (start + row) * PITCH
    for d in range(first_d, end_d, BLOCK_D):
        next_x = _load_x(x_ptrs, in_use, d + BLOCK_D, end_d, BLOCK_D)
        if HALF == 0:
            x = tl.where(dead[:, None], 0.0, x)
        tl.store(row_ptrs[:, None] + (d + offs_d)[None, :], x, mask=in_use[:, None] & (d + offs_d < end_d)[None, :])
        x = next_x


@triton.jit
def pull_pairs(
    item,
    num_pairs,
    num_routes,
    num_blocks,  # this and the next three: of row_items
    parts,
    shares,
    columns,
    tokens_table_ptr,
    scores_table_ptr,
    row_to_slot_ptr,
    pair_rows_ptr,
    pair_start_ptr,
    pair_output_ptr,
    rows_ptr,
    start,
    row_scores_ptr,
    T_max,
    first_column,
    HALF: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One item of _dispatch_pairs, which says what the arguments are."""
    offs_d = tl.arange(0, BLOCK_D)
    block, first_d = row_item(item, num_blocks, parts, shares, columns)
    end_d = tl.minimum(first_d + columns, WIDTH)
    in_use, first, count, most, output = pair_item(block, num_pairs, num_routes, pair_start_ptr, pair_output_ptr, PAIRS)
    src = output // (T_max * J)
    token = HALF * T_max + (output - src * (T_max * J)) // J
    x_ptrs = peer_pointers(tokens_table_ptr, src, token.to(tl.int64) * D + first_column, in_use, tl.bfloat16, 16)
    x = _load_x(x_ptrs, in_use, first_d, end_d, BLOCK_D)
    pull_pair_scores(first, count, src, T_max * K, pair_rows_ptr, row_to_slot_ptr, scores_table_ptr, row_scores_ptr, K2)
    for d in range(first_d, end_d, BLOCK_D):
        mask_d = (d + offs_d < end_d)[None, :]
        next_x = _load_x(x_ptrs, in_use, d + BLOCK_D, end_d, BLOCK_D)
        for i in range(0, most, UNROLL):
            rows, scores = pair_rows_and_scores(
                first, count, i, pair_rows_ptr, row_scores_ptr if HALF == 0 else None, UNROLL
            )
            for j in tl.static_range(UNROLL):
                value = x
                if HALF == 0:
                    value = tl.where((scores[j].to(tl.int32, bitcast=True) != NEGATIVE_ZERO)[:, None], x, 0.0)
                row_ptrs = rows_ptr + (start + rows[j]) * PITCH
                mask = (i + j < count)[:, None] & mask_d
                tl.store(row_ptrs[:, None] + (d + offs_d)[None, :], value, mask=mask)
        x = next_x


@launched
@triton.jit(do_not_specialize=["sources"])
def _dispatch_routes(
    tokens_table_ptr,  # [W] int64 addresses of bf16 [2, T_max, D]
    scores_table_ptr,  # [W] int64 addresses of fp32 [T_max, K]
    row_to_slot_ptr,  # [R] int32
    num_rows_ptr,  # int32
    rows_ptr,  # [X, PITCH] bf16
    start_ptr,  # int64
    row_scores_ptr,  # [R] fp32
    stop_ptr,  # int64
    T_max,
    first_column,
    sources,  # stretches of rows that are of one source rank each
    HALF: tl.constexpr,  # 0: x, 1: dy
    K: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # columns that move
    PITCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows one by one: program p takes the items p, p + programs, ..., shares of blocks of ROWS rows.

    Example (W = 1, T_max = 3, K = 2): tokens [10, 20, 30] (D = 1), scores [[1, 2], [3, 0], [4, 5]] and
    row_to_slot = [0, 5, 1, 2, 4] give rows [10, 30, 10, 20, 30] and row_scores [1, 5, 2, 3, 4].
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    num_rows = tl.load(num_rows_ptr)
    start = tl.load(start_ptr)
    num_blocks, parts, shares, columns = row_items(num_rows, sources, WIDTH, ROWS, BLOCK_D)
    for item in range(tl.program_id(0), num_row_items(num_blocks, parts, shares), tl.num_programs(0)):
        delay(item)
        pull_rows(
            item, num_rows, num_blocks, parts, shares, columns, tokens_table_ptr, scores_table_ptr, row_to_slot_ptr,
            rows_ptr, start, row_scores_ptr, T_max, first_column, HALF, K, D, WIDTH, PITCH, ROWS, BLOCK_D,
        )  # fmt: skip


@launched
@triton.jit
def _dispatch_pairs(
    tokens_table_ptr,  # [W] int64 addresses of bf16 [2, T_max, D]
    scores_table_ptr,  # [W] int64 addresses of fp32 [T_max, K]
    row_to_slot_ptr,  # [R] int32
    pair_rows_ptr,  # [R] int32
    pair_start_ptr,  # [R] int32
    pair_output_ptr,  # [R] int32
    num_pairs_ptr,  # int32
    num_routes_ptr,  # int32
    rows_ptr,  # [X, PITCH] bf16
    start_ptr,  # int64
    row_scores_ptr,  # [R] fp32
    stop_ptr,  # int64
    T_max,
    first_column,
    HALF: tl.constexpr,  # 0: x, 1: dy
    K: tl.constexpr,
    K2: tl.constexpr,  # K rounded up to a power of two
    J: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # columns that move
    PITCH: tl.constexpr,
    PAIRS: tl.constexpr,
    W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,  # rows of a pair that are stored together
):
    """Pairs one by one: program p takes the items p, p + programs, ..., shares of blocks of PAIRS pairs.

    Example: the tables of RoutePlan's docstring with the data of _dispatch_routes. Pair 2 is token 2 (30): pulled once,
    stored to its rows 4 and 1, whose scores 4 and 5 come from slots (2, 0) and (2, 1).
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    num_pairs = tl.load(num_pairs_ptr)
    num_routes = tl.load(num_routes_ptr)
    start = tl.load(start_ptr)
    num_blocks, parts, shares, columns = row_items(num_pairs, W, WIDTH, PAIRS, BLOCK_D)
    for item in range(tl.program_id(0), num_row_items(num_blocks, parts, shares), tl.num_programs(0)):
        delay(item)
        pull_pairs(
            item, num_pairs, num_routes, num_blocks, parts, shares, columns, tokens_table_ptr, scores_table_ptr,
            row_to_slot_ptr, pair_rows_ptr, pair_start_ptr, pair_output_ptr, rows_ptr, start, row_scores_ptr, T_max,
            first_column, HALF, K, K2, J, D, WIDTH, PITCH, PAIRS, BLOCK_D, UNROLL,
        )  # fmt: skip


def dispatch(plan, *, tokens, half, scores, dedup, rows_XD, start_1, row_scores_R, stop_1, columns=None, num_sms=None):
    """Pull the rows routed to this rank into expert-major order, with their scores.

    Args:    plan: from route().  half: 0 pulls x, 1 pulls dy.  rows_XD: bf16 [X, D] over the activation buffer, of
             which only rows start_1 .. start_1 + number of rows are written.  row_scores_R: fp32 [R], written.
             columns: (first, width) of the tokens, into the first columns of rows_XD, which may then be narrower than
             D; multiples of 32. None: all.
    Order:   after the wait on PUBLISHED; reads peers' `tokens` and `scores`, writes local memory only.
    Source:  reference.dispatch.
    """
    (T_max, K), D, W = scores.own.shape, tokens.own.shape[-1], len(tokens.peers)
    first, width = column_window(columns, D, rows_XD)
    tile = pick_row_tile(width, **few_rows(rows_XD.device, T_max * (W if dedup else K), num_sms))
    grid = row_grid(rows_XD.device, tile, num_sms)
    into = (rows_XD, start_1, row_scores_R, stop_1, T_max, first)
    widths = {"D": D, "WIDTH": width, "PITCH": rows_XD.shape[1], "BLOCK_D": tile.block_d}
    if dedup:
        pairs = (plan.pair_rows_R, plan.pair_start_R, plan.pair_output_R, plan.num_pairs_1)
        J = min(K, W)
        _dispatch_pairs[grid](
            tokens.table_W, scores.table_W, plan.row_to_slot_R, *pairs, plan.num_routes_1, *into,
            HALF=half, K=K, K2=next_power_of_2(K), J=J, PAIRS=tile.rows, UNROLL=tile.unroll, W=W, **widths,
            **tile.options,
        )  # fmt: skip
    else:
        _dispatch_routes[grid](
            tokens.table_W, scores.table_W, plan.row_to_slot_R, plan.row_start_P[-1:], *into,
            W * plan.num_local_experts,
            HALF=half, K=K, ROWS=tile.rows, **widths, **tile.options,
        )  # fmt: skip

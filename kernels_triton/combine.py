"""combine, reduce and collect_score_grads: the way back of the rows.

combine pushes into the owners' `outputs`, after the last GEMM and before the signal of COMBINED, a release at system
scope that its own last program may do; an owner reads after its wait on COMBINED. The next push comes after the wait on
PUBLISHED of a later call, which the owner signals after it has read.
    per route       outputs[t, k] = row                                  (the owner applies the scores)
    de-duplicated   outputs[t, j] = bf16(sum over the pair's rows, in slot order, of score * row)
Of a window of columns those of `outputs` alone are written, from the first columns of the rows. Rows of padding (slot
-1) are not read.
reduce and collect_score_grads run after that wait and touch this rank's memory only; a reduce that ends a call also
tells the host of a fault. wait_reduce is both, the wait and the reduce that ends a call.
    reduce          out[t] = bf16(sum over valid k of score * outputs[t, k])   or   bf16(sum over j of outputs[t, j])

All sums are FP32 in a fixed order, a product rounded before it is added: the kernels are compiled without contraction
to fused multiply-add (enable_fp_fusion=False), so that GPU, interpreter and oracle give the same bits.
"""

import triton
import triton.language as tl

from dist_moe.shapes import MOST_WAITING_PROGRAMS, cdiv, next_power_of_2

from ._device import begin, delay, is_last
from ._fault import tell_host
from ._launch import launched
from ._rows import (
    PROGRAMS_PER_SM,
    RowTile,
    column_shares,
    column_window,
    few_rows,
    num_row_items,
    pair_block,
    peer_pointers,
    pick_row_tile,
    row_grid,
    row_items,
    row_programs,
    spread,
)
from .barrier import ending, send_when_last, wait_for_all


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
        block = spread(item // shares, num_blocks, parts)
        first_d = item % shares * columns
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
    block = spread(item // shares, num_blocks, parts)
    first_d = item % shares * columns
    pair = block * PAIRS + tl.arange(0, PAIRS)
    in_use = pair < num_pairs
    first, count = pair_block(pair, num_pairs, num_routes, pair_start_ptr)
    most = tl.max(count, axis=0)
    output = tl.load(pair_output_ptr + pair, mask=in_use, other=0)
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


@triton.jit
def sum_tokens(
    out_ptr,  # [T, D] bf16
    outputs_ptr,  # [T_max, J, D] bf16
    ids_ptr,  # [T_max, K] int16
    scores_ptr,  # [T_max, K] fp32, or None
    T,
    out_stride_t,
    runs,  # otherwise out is NaN
    W: tl.constexpr,  # ranks in the de-duplicated scheme; 0: per route
    L: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,  # K rounded up to a power of two
    J: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOGETHER: tl.constexpr,  # rows of a token that are loaded together
):
    """Tokens one by one: program p takes the items p, p + programs, ..., shares of blocks of TOKENS tokens.

    Example, per route: outputs [[1, 3], [4, stale], [5, 2]] (D = 1), ids [[0, 1], [1, -1], [1, 0]], scores
    [[1, 2], [3, 0], [4, 5]] give out [1 * 1 + 2 * 3, 3 * 4, 4 * 5 + 5 * 2] = [7, 12, 30]. De-duplicated, W = 2, L = 1,
    outputs [[7, 1], [12, stale], [30, 2]]: tokens 0 and 2 visit two ranks, token 1 one: out [8, 12, 32].
    """
    offs_d = tl.arange(0, BLOCK_D)
    offs_k = tl.arange(0, K2)[None, :]
    num_blocks = tl.cdiv(T, TOKENS)
    shares, columns = column_shares(num_blocks, D, BLOCK_D)
    for item in range(tl.program_id(0), num_blocks * shares, tl.num_programs(0)):
        delay(item)
        t = tl.cast(item // shares, tl.int64) * TOKENS + tl.arange(0, TOKENS)
        first_d = item % shares * columns
        in_use = t < T
        num_used = tl.zeros([TOKENS], dtype=tl.int32) + tl.where(runs, J, 0)
        if W > 0:
            mask_TK = in_use[:, None] & (offs_k < K) & runs
            id_TK = tl.load(ids_ptr + t[:, None] * K + offs_k, mask=mask_TK, other=-1).to(tl.int32)
            owner_TK = tl.where(id_TK >= 0, id_TK // L, -1)
            num_used = tl.zeros([TOKENS], dtype=tl.int32)
            for w in range(W):
                num_used += tl.max((owner_TK == w).to(tl.int32), axis=1)
        for d in range(first_d, tl.minimum(first_d + columns, D), BLOCK_D):
            mask_d = (d + offs_d < D)[None, :]
            acc = tl.zeros([TOKENS, BLOCK_D], dtype=tl.float32) + tl.where(runs, 0.0, float("nan"))
            for first_j in range(0, J, TOGETHER):
                terms = ()
                scores = ()
                for i in tl.static_range(TOGETHER):
                    j = first_j + i
                    used = in_use & (j < num_used)
                    if W == 0:
                        used = used & (tl.load(ids_ptr + t * K + j, mask=used, other=-1) >= 0)
                    term_ptrs = outputs_ptr + (t * J + j)[:, None] * D + (d + offs_d)[None, :]
                    terms += (tl.load(term_ptrs, mask=used[:, None] & mask_d, other=0.0),)
                    if scores_ptr is not None:
                        scores += (tl.load(scores_ptr + t * K + j, mask=used, other=0.0),)
                for i in tl.static_range(TOGETHER):
                    term = terms[i].to(tl.float32)
                    if scores_ptr is not None:
                        term = scores[i][:, None] * term
                    acc += term  # unused terms are +0.0: acc is never -0.0, so no bit changes
            out_ptrs = out_ptr + (t * out_stride_t)[:, None] + (d + offs_d)[None, :]
            tl.store(out_ptrs, acc.to(tl.bfloat16), mask=in_use[:, None] & mask_d)


@launched
@triton.jit(do_not_specialize=["T"])
def _reduce(
    out_ptr,
    outputs_ptr,
    ids_ptr,
    scores_ptr,
    stop_ptr,  # int64; if this ends a call the first word of its fault record
    host_fault_ptr,  # int64 [FAULT_WORDS], pinned host memory, if this ends a call, or None
    T,
    out_stride_t,
    W: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """A persistent grid; program 0 also tells the host of a fault."""
    begin()
    runs = tl.load(stop_ptr) == 0
    if host_fault_ptr is None:
        if not runs:
            return
    elif (not runs) & (tl.program_id(0) == 0):
        tell_host(stop_ptr, host_fault_ptr)
    sum_tokens(
        out_ptr, outputs_ptr, ids_ptr, scores_ptr, T, out_stride_t, runs, W, L, K, K2, J, D, TOKENS, BLOCK_D,
        TOGETHER,
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["T", "timeout_ns", "num_ranks"])
def _wait_reduce(
    out_ptr,
    outputs_ptr,
    ids_ptr,
    scores_ptr,
    fault_ptr,  # int64 [FAULT_WORDS]
    host_fault_ptr,  # int64 [FAULT_WORDS], pinned host memory
    signals_ptr,  # [3, num_ranks] int64, this rank's
    sent_ptr,  # [3] int64
    finished_ptr,
    T,
    out_stride_t,
    timeout_ns,
    num_ranks,
    W: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGE: tl.constexpr,
    LANES: tl.constexpr,
):
    """At most 32 programs, each of which waits for all ranks.

    At the deadline one program may miss a peer which another one has met. So the last to finish looks at the fault
    again: it tells the host, and NaN goes over what others summed.
    """
    begin()
    runs = wait_for_all(signals_ptr, sent_ptr, fault_ptr, timeout_ns, num_ranks, STAGE, LANES)
    if runs:
        sum_tokens(
            out_ptr, outputs_ptr, ids_ptr, scores_ptr, T, out_stride_t, runs, W, L, K, K2, J, D, TOKENS, BLOCK_D,
            TOGETHER,
        )  # fmt: skip
    if is_last(finished_ptr):
        has_fault = tl.load(fault_ptr) != 0
        if has_fault:
            nan = (tl.zeros([BLOCK_D], dtype=tl.float32) + tl.where(has_fault, float("nan"), 0.0)).to(tl.bfloat16)
            for t in range(T):
                for d in range(0, D, BLOCK_D):
                    offs_d = d + tl.arange(0, BLOCK_D)
                    tl.store(out_ptr + tl.cast(t, tl.int64) * out_stride_t + offs_d, nan, mask=offs_d < D)
            tell_host(fault_ptr, host_fault_ptr)


@launched
@triton.jit(do_not_specialize=["T"])
def _collect_score_grads(
    out_ptr,  # [T, K]
    ids_ptr,  # [T, K] int32 or int64, as the caller gave them
    score_grads_ptr,  # [T_max, K] fp32
    stop_ptr,  # int64
    T,
    num_experts,
    out_stride_t,
    out_stride_k,
    ids_stride_t,
    ids_stride_k,
    K: tl.constexpr,
    K2: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """TOKENS tokens a program, all their slots at once.

    Example: ids [[5, -1, 5]] and score_grads [[7, stale, stale]] give out [[7, 0, 7]]: slot 2 repeats slot 0.
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    delay(T)
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, K2)[None, :]
    mask = (t < T)[:, None] & (k < K)
    id_TK = tl.load(ids_ptr + t[:, None] * ids_stride_t + k * ids_stride_k, mask=mask, other=-1)
    first_TK = tl.zeros([TOKENS, K2], dtype=tl.int32)
    for back in range(K):
        earlier = K - 1 - back  # the lowest equal slot is written last and stays
        id_T = tl.load(ids_ptr + t * ids_stride_t + earlier * ids_stride_k, mask=t < T, other=-1)
        first_TK = tl.where(id_TK == id_T[:, None], earlier, first_TK)
    valid = mask & (id_TK >= 0) & (id_TK < num_experts)
    grad = tl.load(score_grads_ptr + t[:, None] * K + first_TK, mask=valid, other=0.0)
    out_ptrs = out_ptr + t[:, None] * out_stride_t + k * out_stride_k
    tl.store(out_ptrs, grad.to(out_ptr.dtype.element_ty), mask=mask)


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


def reduce(
    out_TD, *, outputs, ids, scores, dedup, num_experts, rank, stop_1, fault_F=None, host_fault_F=None, num_sms=None
):
    """Add what the expert ranks pushed for each own token; tokens without experts become exactly 0.

    Args:    out_TD: bf16 [T, D], unit inner stride, written.  ids: the own resolved ids decide which slots are read.
             scores: given in the forward of the per-route scheme alone.  fault_F, host_fault_F: both where this ends
             a call. On a fault, whose word takes the place of stop_1, it does what finish does, for out_TD.
    Order:   after the wait on COMBINED; local memory only, but for the host's record.
    Source:  reference.reduce.
    """
    if out_TD.shape[0] == 0 and host_fault_F is None:
        return
    few = few_rows(out_TD.device, len(outputs.own), num_sms)
    tensors, sizes, options, tile = _sum_arguments(out_TD, outputs, ids, scores, dedup, num_experts, few)
    stop = stop_1 if host_fault_F is None else fault_F
    grid = row_grid(out_TD.device, tile, num_sms)
    _reduce[grid](*tensors, stop, host_fault_F, *sizes, **options, **tile.options, enable_fp_fusion=False)


def wait_reduce(
    out_TD, *, after, outputs, ids, scores, dedup, num_experts, fault_F, host_fault_F, finished_1, num_sms=None
):
    """Wait for the peers, then reduce and end the call, in one launch of few programs: of a small sum alone.

    Args:    after: the Wait COMBINED.  finished_1: int64, 0.  The others: of reduce.
    Order:   after this rank's signal COMBINED.
    Source:  reference.wait_reduce.
    """
    num_programs = min(row_programs(out_TD.device, PROGRAMS_PER_SM, num_sms), MOST_WAITING_PROGRAMS)
    few = {"most_rows": len(outputs.own), "programs": num_programs}
    tensors, sizes, options, tile = _sum_arguments(out_TD, outputs, ids, scores, dedup, num_experts, few)
    waiting = {"STAGE": after.stage, "LANES": 32 * tile.num_warps}
    _wait_reduce[(num_programs,)](
        *tensors, fault_F, host_fault_F, after.signals.own, after.sent_S, finished_1, *sizes, after.timeout_ns,
        len(outputs.peers), **options, **waiting, num_warps=tile.num_warps, maxnreg=255, enable_fp_fusion=False,
    )  # fmt: skip


def rows_together(tile: RowTile) -> int:
    """Of a token, that are loaded together: eight of a small tile have registers."""
    return 3 if tile.rows * tile.block_d > 32 * 8 * tile.num_warps else 8


def _sum_arguments(out_TD, outputs, ids, scores, dedup, num_experts, few) -> tuple[tuple, tuple, dict, RowTile]:
    """What sum_tokens takes: tensors, numbers and constexprs, and its tile. few: of pick_row_tile, for few tokens."""
    T, D = out_TD.shape
    assert D % 32 == 0 and out_TD.stride(1) == 1
    W, K, J = len(outputs.peers), ids.own.shape[1], outputs.own.shape[1]
    tile = pick_row_tile(D, **few)
    options = {"W": W if dedup else 0, "L": num_experts // W, "K": K, "K2": next_power_of_2(K), "J": J, "D": D}
    options |= {"TOKENS": tile.rows, "BLOCK_D": tile.block_d, "TOGETHER": rows_together(tile)}
    tensors = (out_TD, outputs.own, ids.own, None if scores is None or dedup else scores.own)
    return tensors, (T, out_TD.stride(0)), options, tile


def collect_score_grads(out_TK, ids_TK, *, score_grads, num_experts, stop_1):
    """Score gradient of every slot: that of the first slot of the token with the same id; 0 without an expert.

    Args:    out_TK: any float dtype and strides, written.  ids_TK: int32 or int64, any strides, as the
             caller gave them.
    Order:   after the wait on COMBINED of a backward; local memory only.
    Source:  reference.collect_score_grads.
    """
    T, K = ids_TK.shape
    if T == 0:
        return
    K2 = next_power_of_2(K)
    TOKENS = max(1, 1024 // K2)
    _collect_score_grads[(cdiv(T, TOKENS),)](
        out_TK, ids_TK, score_grads.own, stop_1, T, num_experts, *out_TK.stride(), *ids_TK.stride(),
        K=K, K2=K2, TOKENS=TOKENS,
    )  # fmt: skip

"""route: from all ranks' resolved ids to this rank's row maps, by a counting sort in three launches; it verifies the
call on the way.

    row(t, e)    = row_start[e] + routes to e of all (source rank, token) before t
    row_start[e] = sum over local experts before e of align(routes to them, row_alignment)

A block is BLOCK_T consecutive tokens of one source rank; blocks are ordered by source rank, then token. A token names
an expert at most once (publish resolves repetitions), so in a block a route comes after as many routes of its expert
as earlier tokens name it: a prefix sum down one column of a 0/1 matrix tokens x experts. Nothing is sorted, no atomic
touches data, and each launch needs only what earlier launches wrote.

    _count  grid (blocks + 1,)           pulls the ids of a block from its rank, counts them by expert and by owner; the
                                         last program compares headers: what is wrong there wins over all that follows
    _scan   grid (expert tiles + 1,)     prefix sums over the blocks; the last program adds up ranks and finds faults
    _place  grid (blocks, expert tiles)  writes the maps
With a row_alignment what a rank holds depends on the routes to each of its experts. So _count counts by expert of any
rank, further programs of _scan add them up, and each program of _place finds the aligned starts and an overflow for
itself, which is quicker than a launch of one program.
Reads peers' `ids` and `header` after the wait PUBLISHED; writes local memory only. Every rank finds the same faults.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dist_moe import shapes
from dist_moe.route_plan import RoutePlan
from dist_moe.shapes import align, cdiv, next_power_of_2

from ._device import begin, delay
from ._fault import set_fault
from ._launch import launched
from .barrier import verify_headers

HEADER_T = tl.constexpr(shapes.HEADER_T)
NO_EXPERT = tl.constexpr(shapes.NO_EXPERT)
INVALID_EXPERT = tl.constexpr(shapes.INVALID_EXPERT)
FAULT_INVALID_ID = tl.constexpr(shapes.FAULT_INVALID_ID)
FAULT_OVERFLOW = tl.constexpr(shapes.FAULT_OVERFLOW)
NO_SLOT = tl.constexpr(shapes.MAX_ROUTES)  # larger than any slot number


@dataclass(frozen=True)
class Config:
    block_t: int  # tokens of a block
    block_k: int  # K as a power of two
    count_e: int  # local experts of one histogram in _count
    count_g: int  # groups of one histogram in _count
    count_warps: int
    place_e: int  # experts of one program of _place
    align_l: int  # experts of each rank in one step of aligned_rows
    scan_b: int  # blocks and columns of one step of _scan
    scan_e: int = 8
    scan_warps: int = 8
    place_warps: int = 2


@functools.cache
def pick_config(W: int, T_max: int, K: int, L: int, num_groups: int) -> Config:
    """Blocks of up to 64 tokens and 4096 slots; _place in tiles of 64 tokens x 16 experts.

    Fewer tokens a block make the table blocks x L, which _scan reads, larger than the ids; more leave too few programs
    at T = 8192. _scan takes narrow tiles of many blocks because its steps follow one another. Virtual
    ranks on one H200, T = 8192, K = 8, E = 256, microseconds of _count + _scan + _place: W = 1: 3 + 3 + 10 (blocks of
    32 tokens: 3 + 4 + 12); W = 8: 5 + 7 + 16 (6 + 12 + 17). 2026-11-29, kernel times of torch.profiler.
    """
    block_k = next_power_of_2(K)
    block_t = max(1, min(64, 4096 // block_k, next_power_of_2(T_max)))
    num_blocks, experts = W * cdiv(T_max, block_t), next_power_of_2(L)
    return Config(
        block_t=block_t,
        block_k=block_k,
        count_e=min(max(experts, 32), 256),
        count_g=min(max(next_power_of_2(num_groups), 32), 256),
        count_warps=4 if block_k <= 4096 else 16,
        place_e=min(experts, 16),
        place_warps=4 if block_k == 16 else 2,  # the other way round some Triton spills a few bytes
        align_l=min(experts, max(2048 // next_power_of_2(W), 1)),
        scan_b=min(max(next_power_of_2(num_blocks), 32), 512),
    )


@launched
@triton.jit(do_not_specialize=["rank"])
def _count(
    ids_table_ptr,  # [W] addresses of int16 [T_max, K]
    header_table_ptr,  # [W] addresses of int64 words
    ids_ptr,  # [W, T_max, K] int16, local copy
    below_ptr,  # [blocks, L + 1] int32: routes of the block to local experts below e
    group_rows_ptr,  # [blocks, groups] int32: routes of the block by group of experts
    pairs_ptr,  # [blocks] int32: tokens of the block with a route here
    invalid_ptr,  # [blocks] int32: first slot of the block with an invalid id, or NO_SLOT
    fault_ptr,
    rank,
    W,
    L,
    T_max,
    blocks_of_rank,
    group_size,  # experts of a group: L, so that it is an owner, or 1
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Grid (blocks + 1,); the last program verifies. Its verdict is for later launches: nothing here relies on it.

    Example (W = 2, rank 1, L = 2, K = 2), a block with tokens [3, 2] and [0, 3]: below = [0, 1, 3], group_rows =
    [1, 3] by owner and [1, 0, 1, 2] by expert, pairs = 2, invalid = NO_SLOT.
    """
    begin()
    if tl.load(fault_ptr) != 0:
        return
    block = tl.program_id(0)
    delay(block)
    src = block // blocks_of_rank
    if src == W:
        verify_headers(header_table_ptr, fault_ptr, T_max, W, BLOCK_W)
        return
    t = (block % blocks_of_rank) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    slot = t[:, None] * K + k[None, :]
    mask = (t < T_max)[:, None] & (k < K)[None, :]
    peer_ids = tl.multiple_of(tl.load(ids_table_ptr + src).to(tl.pointer_type(tl.int16)), 16)
    peer_header = tl.load(header_table_ptr + src).to(tl.pointer_type(tl.int64))
    # Both loads cross the link and neither waits for the other: ids past T are stale, but they are there.
    ids = tl.load(peer_ids + slot, mask=mask, other=NO_EXPERT).to(tl.int32)
    num_tokens = tl.load(peer_header + HEADER_T)
    ids = tl.where((t < num_tokens)[:, None] & (ids < W * L), ids, NO_EXPERT)
    first_slot = src * T_max * K
    tl.store(ids_ptr + first_slot.to(tl.int64) + slot, ids.to(tl.int16), mask=mask)

    tl.store(invalid_ptr + block, tl.min(tl.where(ids == INVALID_EXPERT, first_slot + slot, NO_SLOT)))
    own = (ids >= rank * L) & (ids < (rank + 1) * L)
    tl.store(pairs_ptr + block, tl.sum(tl.max(own.to(tl.int32), axis=1)))

    ids = tl.reshape(ids, [BLOCK_T * BLOCK_K])
    group = ids // group_size
    num_groups = W * L // group_size
    group_rows_row = group_rows_ptr + block.to(tl.int64) * num_groups
    for g0 in range(0, num_groups, BLOCK_G):
        g = g0 + tl.arange(0, BLOCK_G)
        here = (ids >= g0 * group_size) & (ids < (g0 + BLOCK_G) * group_size)
        routes = tl.histogram(tl.where(here, group - g0, 0), BLOCK_G, mask=here)
        tl.store(group_rows_row + g, routes, mask=g < num_groups)

    local = ids - rank * L
    below_row = below_ptr + block.to(tl.int64) * (L + 1)
    below = 0
    for e0 in range(0, L, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        here = (local >= e0) & (local < tl.minimum(e0 + BLOCK_E, L))
        routes = tl.histogram(tl.where(here, local - e0, 0), BLOCK_E, mask=here)
        tl.store(below_row + e, below + tl.cumsum(routes) - routes, mask=e < L)
        below += tl.sum(routes)
    tl.store(below_row + L, below)


@triton.jit
def column_sums(table_ptr, column, num_columns, num_blocks, STEP: tl.constexpr):
    """Sums over the blocks of the given columns of a table [blocks, num_columns] of int32; 0 past its last column."""
    sums = tl.zeros(column.shape, dtype=tl.int32)
    for b0 in range(0, num_blocks, STEP):
        b = (b0 + tl.arange(0, STEP))[:, None]
        mask = (b < num_blocks) & (column < num_columns)[None, :]
        sums += tl.sum(tl.load(table_ptr + b.to(tl.int64) * num_columns + column[None, :], mask=mask, other=0), axis=0)
    return sums


@triton.jit
def check_capacity(rank_rows, w, capacity, fault_ptr):
    """An overflow is the fault of the lowest rank with the most rows."""
    most = tl.max(rank_rows)
    if most > capacity:
        set_fault(fault_ptr, FAULT_OVERFLOW, tl.min(tl.where(rank_rows == most, w, NO_SLOT)), most, capacity, 0)


@launched
@triton.jit
def _scan(
    below_ptr,
    group_rows_ptr,
    pairs_ptr,
    invalid_ptr,
    earlier_ptr,  # [blocks, L] int32: rows of e from earlier blocks
    first_pair_ptr,  # [blocks] int32
    first_route_ptr,  # [blocks] int32
    row_start_ptr,  # [L + 1] int32
    num_rows_ptr,  # [L] int32
    group_sums_ptr,  # [W] int64, rows of the ranks; with an alignment [E] int32, rows of the experts
    num_routes_ptr,
    num_pairs_ptr,
    fault_ptr,
    num_groups,
    L,
    num_blocks,
    slots_of_rank,
    capacity,
    K: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Grid (tiles of the L + 1 columns of `below`, one program for what has one number a block, and if ALIGNED tiles of
    the columns of `group_rows`).

    Example (W = 1, L = 2), blocks with below [0, 1, 3] and [0, 2, 2]: row_start = [0, 3, 5] is the sum of the columns;
    expert 0 has 1 and 2 rows, expert 1 2 and 0, so earlier = [0, 0] and [1, 2], num_rows = [3, 2]; first_route =
    [0, 3], num_routes = 5. With pairs 2 and 2: first_pair = [0, 2], num_pairs = 4.
    """
    begin()
    if tl.load(fault_ptr) != 0:
        return
    tile = tl.program_id(0) - tl.cdiv(L + 1, BLOCK_E)  # of `group_rows`, after the program for single numbers
    if ALIGNED:
        if tile > 0:
            g = (tile - 1) * BLOCK_E + tl.arange(0, BLOCK_E)
            sums = column_sums(group_rows_ptr, g, num_groups, num_blocks, BLOCK_B)
            tl.store(group_sums_ptr + g, sums, mask=g < num_groups)
            return
    if tile < 0:
        e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
        start = tl.zeros([BLOCK_E], dtype=tl.int32)
        earlier = tl.zeros([BLOCK_E], dtype=tl.int32)
        b = tl.arange(0, BLOCK_B)[:, None]
        for b0 in range(0, num_blocks, BLOCK_B):
            below_row = below_ptr + tl.full([], b0, tl.int64) * (L + 1)
            mask = (b0 + b < num_blocks) & (e < L)
            below = tl.load(below_row + (b * (L + 1) + e), mask=(b0 + b < num_blocks) & (e <= L), other=0)
            through = tl.load(below_row + (b * (L + 1) + e + 1), mask=mask, other=0)
            rows = tl.where(mask, through - below, 0)
            before = earlier[None, :] + tl.cumsum(rows, axis=0) - rows
            tl.store(earlier_ptr + tl.full([], b0, tl.int64) * L + (b * L + e), before, mask=mask)
            start += tl.sum(below, axis=0)
            earlier += tl.sum(rows, axis=0)
        tl.store(row_start_ptr + e, start[None, :], mask=e <= L)
        tl.store(num_rows_ptr + e, earlier[None, :], mask=e < L)
        return

    invalid, num_pairs, num_routes = NO_SLOT, 0, 0
    for b0 in range(0, num_blocks, BLOCK_B):
        b = b0 + tl.arange(0, BLOCK_B)
        mask = b < num_blocks
        pairs = tl.load(pairs_ptr + b, mask=mask, other=0)
        routes = tl.load(below_ptr + b.to(tl.int64) * (L + 1) + L, mask=mask, other=0)
        tl.store(first_pair_ptr + b, num_pairs + tl.cumsum(pairs) - pairs, mask=mask)
        tl.store(first_route_ptr + b, num_routes + tl.cumsum(routes) - routes, mask=mask)
        num_pairs += tl.sum(pairs)
        num_routes += tl.sum(routes)
        invalid = tl.minimum(invalid, tl.min(tl.load(invalid_ptr + b, mask=mask, other=NO_SLOT)))
    tl.store(num_pairs_ptr, num_pairs)
    tl.store(num_routes_ptr, num_routes)
    if invalid != NO_SLOT:
        slot = invalid % slots_of_rank
        set_fault(fault_ptr, FAULT_INVALID_ID, invalid // slots_of_rank, slot // K, slot % K, 0)
    if not ALIGNED:
        w = tl.arange(0, BLOCK_W)
        rank_rows = column_sums(group_rows_ptr, w, num_groups, num_blocks, BLOCK_B * BLOCK_E // BLOCK_W).to(tl.int64)
        tl.store(group_sums_ptr + w, rank_rows, mask=w < num_groups)
        check_capacity(rank_rows, w, capacity, fault_ptr)


@triton.jit
def aligned_rows(
    expert_rows_ptr,  # [E] int32
    before,
    rank,
    W,
    L,
    ALIGNMENT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Rows that every rank holds, int64 [BLOCK_W], and own ones of local experts below `before`, with their padding.

    Example (W = 2, rank 1, L = 2, alignment 4, before 1): experts with 3, 0 | 2 and 5 rows give [4, 12] and 4.
    """
    w = tl.arange(0, BLOCK_W)
    rank_rows = tl.zeros([BLOCK_W], dtype=tl.int64)
    start = 0
    for e0 in range(0, L, BLOCK_L):
        e = e0 + tl.arange(0, BLOCK_L)
        mask = (w < W)[:, None] & (e < L)[None, :]
        rows = tl.load(expert_rows_ptr + w[:, None] * L + e[None, :], mask=mask, other=0)
        rows = tl.cdiv(rows, ALIGNMENT) * ALIGNMENT
        rank_rows += tl.sum(rows.to(tl.int64), axis=1)
        start += tl.sum(tl.where((w == rank)[:, None] & (e < before)[None, :], rows, 0))
    return rank_rows, start


@launched
@triton.jit(do_not_specialize=["rank"])
def _place(
    ids_ptr,
    below_ptr,
    earlier_ptr,
    first_pair_ptr,
    first_route_ptr,
    row_start_ptr,
    num_rows_ptr,
    expert_rows_ptr,  # [E] int32, like rank_rows only with an alignment
    rank_rows_ptr,
    row_to_slot_ptr,  # [R] int32, like the three below
    pair_rows_ptr,
    pair_start_ptr,
    pair_output_ptr,
    fault_ptr,
    rank,
    W,
    L,
    T_max,
    blocks_of_rank,
    J,
    capacity,
    K: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,  # ranks of a step
    ALL_W: tl.constexpr,
    BLOCK_L: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Grid (blocks, tiles of local experts); tile 0 also writes the tables by pair, block 0 what alignment adds: starts
    and rows of padding, and in tile 0 the rows of all ranks.

    Example (L = 2, K = 2, rank 0), the first block, tokens [0, 1], [1, -1] and [1, 0], with row_start [0, 2, 5]:
    the columns of experts 0 and 1 are [1, 0, 1] and [1, 1, 1], so the routes have rows 0, 2 | 3 | 4, 1; row_to_slot =
    [0, 5, 1, 2, 4], pair_start = [0, 2, 3], pair_rows = [0, 2, 3, 4, 1].
    """
    begin()
    if tl.load(fault_ptr) != 0:
        return
    block = tl.program_id(0)
    e0 = tl.program_id(1) * BLOCK_E
    e = e0 + tl.arange(0, BLOCK_E)
    below_row = below_ptr + block.to(tl.int64) * (L + 1)
    last_e = tl.where(e0 == 0, L, tl.minimum(e0 + BLOCK_E, L))  # tile 0 is there for the pairs of the whole block
    has_routes = tl.load(below_row + last_e) != tl.load(below_row + e0)
    if (block > 0) & ~has_routes:
        return
    if ALIGNMENT == 1:
        first_row = tl.load(row_start_ptr + e, mask=e < L, other=0)
    else:
        rank_rows, first = aligned_rows(expert_rows_ptr, e0, rank, W, L, ALIGNMENT, ALL_W, BLOCK_L)
        if block + e0 == 0:
            w = tl.arange(0, ALL_W)
            tl.store(rank_rows_ptr + w, rank_rows, mask=w < W)
            check_capacity(rank_rows, w, capacity, fault_ptr)
        if tl.max(rank_rows) > capacity:
            return
        num_rows = tl.load(num_rows_ptr + e, mask=e < L, other=0)
        padded = tl.cdiv(num_rows, ALIGNMENT) * ALIGNMENT
        end = first + tl.cumsum(padded)
        first_row = end - padded
        if block == 0:
            tl.store(row_start_ptr + e, first_row, mask=e < L)
            tl.store(row_start_ptr + e + 1, end, mask=e == L - 1)
            padding = (first_row + num_rows)[:, None] + tl.arange(0, ALIGNMENT)[None, :]
            tl.store(row_to_slot_ptr + padding, -1, mask=padding < end[:, None])
    if not has_routes:
        return
    src = block // blocks_of_rank
    t = (block % blocks_of_rank) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = src * T_max + t
    mask_t = t < T_max
    ids_row = ids_ptr + token.to(tl.int64) * K

    # What the slot of t that names e says: 1 + k, and in the upper half how many slots before it lead here; else 0.
    named = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.int32)
    num_own = tl.zeros([BLOCK_T], dtype=tl.int32)
    for k0 in range(0, K, UNROLL):
        for j in tl.static_range(UNROLL):  # so that its loads are in flight together
            k = k0 + j
            local = tl.load(ids_row + k, mask=t < tl.where(k < K, T_max, 0), other=NO_EXPERT).to(tl.int32) - rank * L
            named = tl.where(local[:, None] == e[None, :], (num_own << 16)[:, None] + (k + 1), named)
            num_own += ((local >= 0) & (local < L)).to(tl.int32)
    start = tl.load(first_route_ptr + block) + tl.cumsum(num_own) - num_own

    first_row += tl.load(earlier_ptr + block.to(tl.int64) * L + e, mask=e < L, other=0)
    one = (named != 0).to(tl.int32)
    row = first_row[None, :] + tl.cumsum(one, axis=0) - one
    mask_te = (named != 0) & (e < L)[None, :]
    tl.store(row_to_slot_ptr + row, (token * K - 1)[:, None] + (named & 0xFFFF), mask=mask_te)
    tl.store(pair_rows_ptr + start[:, None] + (named >> 16), row, mask=mask_te)

    if e0 == 0:
        lower_ranks = tl.zeros([BLOCK_T], dtype=tl.int32)
        for w0 in range(0, rank, BLOCK_W):
            w = w0 + tl.arange(0, BLOCK_W)
            visited = tl.zeros([BLOCK_T, BLOCK_W], dtype=tl.int32)
            for k in range(K):
                ids = tl.load(ids_row + k, mask=mask_t, other=NO_EXPERT).to(tl.int32)
                owner = tl.where(ids >= 0, ids // L, NO_EXPERT)
                visited |= (owner[:, None] == w[None, :]).to(tl.int32)
            lower_ranks += tl.sum(tl.where(w[None, :] < rank, visited, 0), axis=1)
        arrives = (num_own > 0).to(tl.int32)
        pair = tl.load(first_pair_ptr + block) + tl.cumsum(arrives) - arrives
        tl.store(pair_start_ptr + pair, start, mask=num_own > 0)
        tl.store(pair_output_ptr + pair, token * J + lower_ranks, mask=num_own > 0)


def route(*, ids, header, rank, num_experts, capacity_rows, row_alignment=1, fault_F) -> RoutePlan:
    """The row maps of this rank; see RoutePlan. Leaves them unwritten when a fault is set or found, by verify or here.

    Args:    ids, header: regions; sizes are taken from them.  capacity_rows: R, rows of the tables.
             row_alignment: a power of two of which every local expert begins at a multiple.
    Returns: a new RoutePlan; three launches, none of which waits for the host.
    Order:   reads peers after the wait PUBLISHED and before this rank's signal COMBINED.
    """
    W, (T_max, K), device = len(ids.peers), ids.own.shape, ids.own.device
    L = num_experts // W
    aligned = row_alignment > 1
    num_groups = num_experts if aligned else W
    config = pick_config(W, T_max, K, L, num_groups)
    blocks_of_rank = cdiv(T_max, config.block_t)
    num_blocks = W * blocks_of_rank

    plan = RoutePlan.empty(W, L, capacity_rows, device)
    # What the launches tell each other, in one allocation; every part starts at a multiple of 16 bytes.
    B, ids_words = align(num_blocks, 4), align(cdiv(W * T_max * K, 2), 4)
    sizes = [ids_words, B * (L + 1), B * L, B * num_groups, B, B, B, B, num_experts if aligned else 0]
    words = torch.empty((sum(sizes),), dtype=torch.int32, device=device)
    own_ids, below_BP, earlier_BL, group_rows_BG, *by_block, expert_rows_E = words.split_with_sizes(sizes)
    ids_WTK, (pairs_B, invalid_B, first_pair_B, first_route_B) = own_ids.view(torch.int16), by_block

    _count[(num_blocks + 1,)](
        ids.table_W,
        header.table_W,
        ids_WTK,
        below_BP,
        group_rows_BG,
        pairs_B,
        invalid_B,
        fault_F,
        rank,
        W,
        L,
        T_max,
        blocks_of_rank,
        1 if aligned else L,
        K=K,
        BLOCK_T=config.block_t,
        BLOCK_K=config.block_k,
        BLOCK_E=config.count_e,
        BLOCK_G=config.count_g,
        BLOCK_W=next_power_of_2(W),
        num_warps=config.count_warps,
    )
    _scan[(cdiv(L + 1, config.scan_e) + 1 + (cdiv(num_experts, config.scan_e) if aligned else 0),)](
        below_BP,
        group_rows_BG,
        pairs_B,
        invalid_B,
        earlier_BL,
        first_pair_B,
        first_route_B,
        plan.row_start_P,
        plan.num_rows_L,
        expert_rows_E if aligned else plan.rank_rows_W,
        plan.num_routes_1,
        plan.num_pairs_1,
        fault_F,
        num_groups,
        L,
        num_blocks,
        T_max * K,
        capacity_rows,
        K=K,
        ALIGNED=aligned,
        BLOCK_B=config.scan_b,
        BLOCK_E=config.scan_e,
        BLOCK_W=next_power_of_2(W),
        num_warps=config.scan_warps,
    )
    _place[(num_blocks, cdiv(L, config.place_e))](
        ids_WTK,
        below_BP,
        earlier_BL,
        first_pair_B,
        first_route_B,
        plan.row_start_P,
        plan.num_rows_L,
        expert_rows_E,
        plan.rank_rows_W,
        plan.row_to_slot_R,
        plan.pair_rows_R,
        plan.pair_start_R,
        plan.pair_output_R,
        fault_F,
        rank,
        W,
        L,
        T_max,
        blocks_of_rank,
        min(K, W),
        capacity_rows,
        K=K,
        ALIGNMENT=row_alignment,
        BLOCK_T=config.block_t,
        BLOCK_E=config.place_e,
        BLOCK_W=min(next_power_of_2(W), 8),
        ALL_W=next_power_of_2(W),
        BLOCK_L=config.align_l,
        UNROLL=min(config.block_k, 8),
        num_warps=config.place_warps,
    )
    return plan

"""wait_route_plan: the wait PUBLISHED, route and plan_forward in one launch, for contexts of few slots (decode).

Each is short then, and five launches cost more than what they do. Same tables, faults and place record as theirs.

    row(t, e) = row_start[e] + routes to e of all (source rank, token) before t

Grid: one program for 4 * WORDS local experts, one more for what belongs to no expert; at most 32, for all of them wait
for the peers. Every program pulls the ids of all ranks, at most 4096 slots, keeps them in registers, and finds the
verdict and the first row of its experts for itself: none needs another one's results. The last to finish plans; it
reads what the others stored (is_last), and a fault that any of them set.
A token names an expert at most once, so the rows of an expert are its slots in the order (source rank, token, k), which
is that of the tile. Four experts are counted at once: an int64 has a field of 16 bits for each, which no count and no
row of four experts leaves, and one prefix sum over the slots is one for all of them.
Reads peers' `ids` and `header` behind its own wait; writes local memory only. Every rank finds the same faults.
"""

import math
from dataclasses import dataclass

import triton
import triton.language as tl

from dist_moe import shapes
from dist_moe.route_plan import RoutePlan
from dist_moe.shapes import cdiv, next_power_of_2

from ._device import begin, is_last
from ._fault import set_fault
from ._launch import launched
from .barrier import verify_headers, wait_for_all
from .plan_slots import forward_arguments, plan_one_forward
from .route import FAULT_INVALID_ID, HEADER_T, INVALID_EXPERT, NO_EXPERT, NO_SLOT, check_capacity

EXPERTS_OF_WORD = tl.constexpr(4)  # fields of 16 bits
FIELD = tl.constexpr(0xFFFF)


@dataclass(frozen=True)
class Config:
    words: int  # experts of a program, in fours
    tokens: int  # of all ranks, as a power of two
    block_k: int
    num_warps: int  # at most 16 slots a thread

    @property
    def lanes(self) -> int:
        return 32 * self.num_warps


def pick_config(W: int, T_max: int, K: int, L: int) -> Config:
    """As few experts a program as there may be programs: those of one program follow one another. All is bounded by
    shapes.is_small_routing."""
    words = cdiv(L, EXPERTS_OF_WORD.value * (shapes.MOST_WAITING_PROGRAMS - 1))
    tokens, block_k = next_power_of_2(W * T_max), next_power_of_2(K)
    return Config(words, tokens, block_k, num_warps=4 if tokens * block_k <= 1024 else 8)


@triton.jit
def fields_before(word):
    """In each field the sum of the lower ones. Example: fields 3, 0, 2, 5 (lowest first) give 0, 3, 3, 5."""
    return (word << 16) + (word << 32) + (word << 48)


@triton.jit
def field_of(word, i):
    return ((word >> (i * 16)) & FIELD).to(tl.int32)


@triton.jit
def aligned_fields(word, ALIGNMENT: tl.constexpr):
    """Each field rounded up to a multiple of a power of two. Example: 3, 0, 2, 5 by 4 give 4, 0, 4, 8."""
    LOW: tl.constexpr = (ALIGNMENT - 1) * 0x0001000100010001
    return (word + LOW) & ~tl.full([], LOW, tl.int64)


@triton.jit
def place_four(
    local,
    q,
    slot,
    word_start,
    e0,
    L,
    row_start_ptr,
    num_rows_ptr,
    row_to_slot_ptr,
    pair_rows_ptr,
    ALIGNMENT: tl.constexpr,
):
    """Write the tables of local experts e0 .. e0 + 3, whose rows begin at word_start; the start of those behind them.

    Example: slots with local experts 1, 0, 1, none, 1 give fields 1 and 3, firsts 0 and 1, and rows 1, 0, 2, -, 3.
    """
    here = (local >= e0) & (local < tl.minimum(e0 + EXPERTS_OF_WORD, L))
    shift = tl.where(here, local - e0, 0) * 16
    one = tl.where(here, tl.full([], 1, tl.int64) << shift.to(tl.int64), 0)
    through = tl.cumsum(one)
    total = tl.sum(one)
    padded = aligned_fields(total, ALIGNMENT)
    firsts = fields_before(padded)
    row = word_start + ((((through - one) + firsts) >> shift.to(tl.int64)) & FIELD).to(tl.int32)
    tl.store(row_to_slot_ptr + row, slot, mask=here)
    tl.store(pair_rows_ptr + q, row, mask=here)

    i = tl.arange(0, EXPERTS_OF_WORD)
    e = e0 + i
    num_rows, first = field_of(total, i), word_start + field_of(firsts, i)
    end = first + field_of(padded, i)
    tl.store(num_rows_ptr + e, num_rows, mask=e < L)
    tl.store(row_start_ptr + e, first, mask=e < L)
    tl.store(row_start_ptr + e + 1, end, mask=e == L - 1)
    if ALIGNMENT > 1:
        padding = (first + num_rows)[:, None] + tl.arange(0, ALIGNMENT)[None, :]
        tl.store(row_to_slot_ptr + padding, -1, mask=padding < end[:, None])
    return tl.max(end)


@launched
@triton.jit(do_not_specialize=["timeout_ns", "rank", "slot", "depth"])
def _wait_route_plan(
    signals_ptr,  # [3, W] int64, this rank's; None: nobody waits
    sent_ptr,  # [3] int64, or None
    fault_ptr,
    finished_ptr,
    ids_table_ptr,  # [W] addresses of int16 [T_max, K]
    header_table_ptr,  # [W] addresses of int64 words
    row_start_ptr,  # the tables of RoutePlan, by their names
    num_rows_ptr,
    rank_rows_ptr,
    num_routes_ptr,
    num_pairs_ptr,
    row_to_slot_ptr,
    pair_rows_ptr,
    pair_start_ptr,
    pair_output_ptr,
    call_ptr,  # from here the arguments of plan_one_forward
    slot_used_ptr,
    slot_layers_ptr,
    slot_calls_ptr,
    stats_ptr,
    place_ptr,
    timeout_ns,
    T_max,
    J,
    capacity,
    rank,
    slot,
    depth,
    num_slots,
    deepest,
    W,
    L,
    D,
    F,
    slot_bytes,
    x_bytes,
    x_h1_bytes,
    total_bytes,
    stage,
    output_columns,
    STAGE: tl.constexpr,
    LANES: tl.constexpr,
    K: tl.constexpr,
    ID_ALIGNMENT: tl.constexpr,  # bytes, of the ids of a token
    ALIGNMENT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SAVE: tl.constexpr,
    TRAINING: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_BYTE: tl.constexpr,
    OUTER_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Grid (tiles of 4 * WORDS local experts + 1,); the last program writes the tables by pair and the counts.

    Example (W = 1, L = 2, K = 2), the ids of RoutePlan's docstring, [[0, 1], [1, -1], [1, 0]]: local experts of the six
    slots 0, 1, 1, -, 1, 0; the word has fields 2 and 3, firsts 0 and 2, rows 0, 2, 3, -, 4, 1; routes before each slot
    0, 1, 2, 3, 3, 4, so pair_rows = [0, 2, 3, 4, 1], pair_start = [0, 2, 3].
    """
    begin()
    tile = tl.program_id(0)
    runs = tl.load(fault_ptr) == 0
    if signals_ptr is not None:
        runs = wait_for_all(signals_ptr, sent_ptr, fault_ptr, timeout_ns, W, STAGE, LANES)
    if runs:
        token = tl.arange(0, TOKENS)
        src = token // T_max
        t = token - src * T_max
        k = tl.arange(0, BLOCK_K)
        # Both loads cross the link and neither waits for the other: ids past T are stale, but they are there.
        in_use = token < W * T_max
        peer_ids = tl.load(ids_table_ptr + src, mask=in_use, other=0).to(tl.pointer_type(tl.int16))
        peer_ids = tl.multiple_of(peer_ids + t * K, [ID_ALIGNMENT])
        peer_header = tl.load(header_table_ptr + src, mask=in_use, other=0).to(tl.pointer_type(tl.int64))
        mask = in_use[:, None] & (k < K)[None, :]
        ids = tl.load(peer_ids[:, None] + k[None, :], mask=mask, other=NO_EXPERT).to(tl.int32)
        num_tokens = tl.load(peer_header + HEADER_T, mask=in_use, other=0)
        ids = tl.where((t < num_tokens)[:, None] & (ids < W * L), ids, NO_EXPERT)
        slots = token[:, None] * K + k[None, :]
        local = ids - rank * L
        own = ((local >= 0) & (local < L)).to(tl.int32)

        N: tl.constexpr = TOKENS * BLOCK_K
        # A histogram has a bin a lane at least.
        RANKS: tl.constexpr = BLOCK_W if ALIGNMENT > 1 or BLOCK_W > 32 else 32
        w = tl.arange(0, RANKS)
        e0 = tile * (EXPERTS_OF_WORD * WORDS)
        flat = tl.reshape(ids, [N])
        if ALIGNMENT == 1:
            owner = tl.where(flat >= 0, flat // L, 0)
            rows_of_ranks = tl.histogram(owner, RANKS, mask=flat >= 0).to(tl.int64)
            start = tl.sum(tl.where((local < e0), own, 0))
        else:
            e = tl.arange(0, BLOCK_E)
            rows = tl.histogram(tl.where(flat >= 0, flat, 0), BLOCK_E, mask=flat >= 0)
            rows = tl.cdiv(rows, ALIGNMENT) * ALIGNMENT
            of_rank = (e // L)[None, :] == w[:, None]
            rows_of_ranks = tl.sum(tl.where(of_rank, rows[None, :], 0), axis=1).to(tl.int64)
            start = tl.sum(tl.where((e >= rank * L) & (e < rank * L + e0), rows, 0))

        # Headers that differ win over an invalid id, that over an overflow: the first fault stays.
        is_wrong = verify_headers(header_table_ptr, fault_ptr, T_max, W, BLOCK_W)
        invalid = tl.min(tl.where(ids == INVALID_EXPERT, slots, NO_SLOT))
        if invalid != NO_SLOT:
            slot_of_rank = invalid % (T_max * K)
            rank_of_slot = invalid // (T_max * K)
            set_fault(fault_ptr, FAULT_INVALID_ID, rank_of_slot, slot_of_rank // K, slot_of_rank % K, 0)
        check_capacity(rows_of_ranks, w, capacity, fault_ptr)
        if ~is_wrong & (invalid == NO_SLOT) & (tl.max(rows_of_ranks) <= capacity):
            flat_own = tl.reshape(own, [N])
            q = tl.cumsum(flat_own) - flat_own  # routes of this rank before a slot
            if e0 < L:
                for i in range(WORDS):
                    start = place_four(
                        tl.reshape(local, [N]), q, tl.reshape(slots, [N]), start, e0 + i * EXPERTS_OF_WORD, L,
                        row_start_ptr, num_rows_ptr, row_to_slot_ptr, pair_rows_ptr, ALIGNMENT,
                    )  # fmt: skip
            else:
                tl.store(rank_rows_ptr + w, rows_of_ranks, mask=w < W)
                tl.store(num_routes_ptr, tl.sum(flat_own))
                through = tl.cumsum(own, axis=1)
                arrives = tl.max(own, axis=1)
                tl.store(num_pairs_ptr, tl.sum(arrives))
                pair = tl.cumsum(arrives) - arrives
                lower_ranks = tl.zeros([TOKENS], dtype=tl.int32)
                for lower in range(rank):
                    lower_ranks += tl.max(((ids >= lower * L) & (ids < lower * L + L)).to(tl.int32), axis=1)
                is_first = (own != 0) & (through == 1)
                pairs = pair[:, None] + k[None, :] * 0
                tl.store(pair_start_ptr + pairs, tl.reshape(q, [TOKENS, BLOCK_K]), mask=is_first)
                tl.store(pair_output_ptr + pair, token * J + lower_ranks, mask=arrives != 0)
    if is_last(finished_ptr):
        plan_one_forward(
            rank_rows_ptr, num_rows_ptr, call_ptr, slot_used_ptr, slot_layers_ptr, slot_calls_ptr, stats_ptr, place_ptr,
            fault_ptr, rank, slot, depth, num_slots, deepest, W, L, D, F, slot_bytes, x_bytes, x_h1_bytes, total_bytes,
            stage, output_columns, SAVE, TRAINING, BLOCK, PER_BYTE, OUTER_SCALES, GROUP, BLOCK_W, BLOCK_L,
        )  # fmt: skip


def wait_route_plan(
    *,
    after,
    ids,
    header,
    rank,
    num_experts,
    capacity_rows,
    row_alignment,
    fault_F,
    finished_1,
    slot,
    depth,
    save,
    geometry,
    call_1,
    slot_used_NW,
    slot_layers_N,
    slot_calls_NM,
    stats_S,
    place,
) -> RoutePlan:
    """Wait for the peers, make the row maps of this rank, and decide what the forward keeps and where its rows lie.

    Args:    after: the Wait PUBLISHED; None: peers are emulated.  finished_1: int64, 0.  The others are those of route
             and plan_forward, of a problem that shapes.is_small_routing takes.
    Returns: a new RoutePlan; under a fault its tables are not written.
    Order:   after this rank's signal PUBLISHED, before its signal COMBINED.
    Source:  reference.wait_route_plan.
    """
    W, (T_max, K) = len(ids.peers), ids.own.shape
    L = num_experts // W
    assert shapes.is_small_routing(W, T_max, K, num_experts), (W, T_max, K, num_experts)
    config = pick_config(W, T_max, K, L)

    plan = RoutePlan.empty(W, L, capacity_rows, ids.own.device)
    words = (call_1, slot_used_NW, slot_layers_N, slot_calls_NM, stats_S, place)
    sizes, options = forward_arguments(geometry, rank, slot, depth, save, W, L, slot_calls_NM)
    _wait_route_plan[(cdiv(L, 4 * config.words) + 1,)](
        *(None, None) if after is None else (after.signals.own, after.sent_S),
        fault_F,
        finished_1,
        ids.table_W,
        header.table_W,
        *plan.tensors(),
        *words,
        0 if after is None else after.timeout_ns,
        T_max,
        min(K, W),
        capacity_rows,
        *sizes,
        STAGE=shapes.PUBLISHED,
        LANES=config.lanes,
        K=K,
        ID_ALIGNMENT=math.gcd(2 * K, 16),
        ALIGNMENT=row_alignment,
        TOKENS=config.tokens,
        BLOCK_K=config.block_k,
        WORDS=config.words,
        BLOCK_E=max(next_power_of_2(num_experts), 32),
        **options,
        num_warps=config.num_warps,
    )
    return plan

"""mega_forward: one rank's experts in one launch, from the pull of x to the push of every route's row. BF16.

    x_RD = tokens of the peers      h2 = bf16(swiglu(bf16(x @ w13.T)))      h3 = bf16(h2 @ w2.T)
    per route       outputs[t, k] = h3, from the registers that it was summed in
    pairs summed    outputs[t, j] = bf16(sum over the pair's rows, in slot order, of score * h3)

For decode, where weights are what there is to read: they are streamed from the first tile of W13 to the last of W2
without a pause. The bits are those of dispatch, grouped_gemm_swiglu, grouped_gemm and combine, one after another.

Grid: persistent. Programs take items by a ticket, in the order pulls, tiles of W13, tiles of W2, sums of pairs; tiles
by expert, of an expert by columns, so that its weights are read once. A tile of W13 waits for all pulls, one of W2 for
the W13 of its rows, a sum for all of W2: for lower tickets alone, which running programs have, so that no grid is too
large or too small. Interpreted the first program takes all items. The last program to finish sets the queue back.

Pulls from peers' `tokens` and `scores` behind the wait on PUBLISHED, pushes to peers' `outputs` before the signal of
COMBINED, which the last program sends; waits for no peer.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_moe.shapes import MEGA_QUEUE_WORDS, mega_queue_words, next_power_of_2

from ._device import await_count, begin, count_done, delay, is_last
from ._launch import launched
from ._rows import num_row_items, peer_pointers, row_items, row_programs
from .barrier import ending, send
from .combine import push_pairs
from .dispatch import pull_pairs, pull_rows
from .grouped_gemm import _row_tile_ends, _store_tile, check_rows, check_weight
from .grouped_gemm_swiglu import _activate, check_swiglu

# Words of the queue: the next ticket; how many pulls and tiles of W2 are done; of each expert, how many tiles of W13.
TICKET, PULLED, MULTIPLIED, ACTIVATED = (tl.constexpr(word) for word in (0, 1, 2, MEGA_QUEUE_WORDS))


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    block_d: int  # columns of a row that move at once

    @property
    def options(self) -> dict:
        """Products are rounded before they are added, as in swiglu; registers: what programs of an SM share."""
        registers = min(65536 // (32 * self.num_warps * self.programs_per_sm) // 8 * 8, 255)
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": registers,
            "enable_fp_fusion": False,
        }


CONFIG = Config(64, 128, 64, num_warps=4, num_stages=4, programs_per_sm=2, block_d=1024)
UNROLL = 4  # rows of a pair that move together


@triton.jit
def _tile(tile, num_tiles_n, ends_L, row_start_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Expert of a tile, tiles that its rows are, the tile's first row, the end of the expert's rows, first column. By
    experts, of an expert by columns: experts of 1 and 2 row tiles, two columns -> row tiles 0 0 1 2 1 2, columns
    0 1 0 0 1 1."""
    before_L = ends_L * num_tiles_n <= tile
    expert = tl.sum(before_L.to(tl.int32))
    first = tl.max(tl.where(before_L, ends_L, 0))
    start = tl.load(row_start_ptr + expert)
    end = tl.load(row_start_ptr + expert + 1)
    height = tl.cdiv(end - start, BLOCK_M)
    place = tile - first * num_tiles_n
    return expert, height, start + place % height * BLOCK_M, end, place // height * BLOCK_N


@triton.jit
def _push(outputs_table_ptr, row_to_slot_ptr, acc, row, row_end, col, num_slots, D):
    """A tile of W2's sums to the slots of its rows."""
    rows = row + tl.arange(0, acc.shape[0])
    cols = col + tl.arange(0, acc.shape[1])
    slot = tl.load(row_to_slot_ptr + rows, mask=rows < row_end, other=-1)
    in_use = slot >= 0
    src = slot // num_slots
    own_slot = (slot - src * num_slots).to(tl.int64)
    out_ptrs = peer_pointers(outputs_table_ptr, src, own_slot * D, in_use, tl.bfloat16, 16)
    mask = in_use[:, None] & (cols < D)[None, :]
    tl.store(out_ptrs[:, None] + cols[None, :], acc.to(tl.bfloat16), mask=mask)


@launched
@triton.jit(
    do_not_specialize=["rank", "W", "L", "T_max", "num_outputs"],
    do_not_specialize_on_alignment=["x_start_ptr", "h2_start_ptr", "h3_start_ptr", "stop_ptr"],
)
def _mega_forward(
    queue_ptr,  # [3 + L] i32, zeros
    tokens_table_ptr,  # [W] int64 addresses of bf16 [.., T_max, D]
    scores_table_ptr,  # [W] int64 addresses of fp32 [T_max, K]
    outputs_table_ptr,  # [W] int64 addresses of bf16 [T_max, K, D]
    row_to_slot_ptr,  # the tables of RoutePlan, by their names
    pair_rows_ptr,
    pair_start_ptr,
    pair_output_ptr,
    num_pairs_ptr,
    num_routes_ptr,
    row_start_ptr,
    row_scores_ptr,  # [R] fp32
    x_desc,  # [X, D] bf16
    x_ptr,
    x_start_ptr,  # [1] i64
    w13_desc,  # [L, 2, F, D] bf16
    h2_desc,  # [X, F] bf16
    h2_ptr,
    h2_start_ptr,  # [1] i64
    w2_desc,  # [L, D, F] bf16
    h3_ptr,  # [X, D] bf16, and the next: None unless pairs are summed
    h3_start_ptr,  # [1] i64
    stop_ptr,  # [1] i64
    finished_ptr,
    signals_table_ptr,  # None, as the three below, unless the signal comes with it
    sent_ptr,
    header_ptr,
    fault_ptr,
    T_max,
    num_outputs,  # of one rank: rows of outputs
    L,
    F,
    alpha,
    limit,
    rank,
    W,
    DEDUP: tl.constexpr,
    CLAMPED: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_L: tl.constexpr,
    STAGE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Example: D = F = 32, one token of ones with one route of score 2, w13 = 1 and w2 = 1 everywhere: h1 is 32, h2
    bf16(32 * sig(32) * 32) = 1024, outputs[0, 0] = 32768 in every column, without the score."""
    begin()
    if tl.load(stop_ptr) == 0:
        BLOCK_F: tl.constexpr = BLOCK_N // 2
        num_moving = tl.load(num_pairs_ptr if DEDUP else row_start_ptr + L)
        num_blocks, parts, shares, columns = row_items(num_moving, W if DEDUP else W * L, D, 1, BLOCK_D)
        num_pulls = num_row_items(num_blocks, parts, shares)
        ends_L = _row_tile_ends(row_start_ptr, L, BLOCK_M, BLOCK_L)
        num_tiles_m = tl.max(ends_L)
        num_tiles_f = tl.cdiv(F, BLOCK_F)
        first_w2 = num_pulls + num_tiles_m * num_tiles_f
        num_tiles_d = tl.cdiv(D, BLOCK_N)
        num_items = first_w2 + num_tiles_m * num_tiles_d
        if h3_ptr is not None:
            first_sum = num_items
            num_items += num_pulls
        ticket = tl.atomic_add(queue_ptr + TICKET, 1, sem="relaxed", scope="gpu")
        while ticket < num_items:
            delay(ticket)
            if ticket < num_pulls:
                x_start = tl.load(x_start_ptr)
                if DEDUP:
                    num_routes = tl.load(num_routes_ptr)
                    pull_pairs(
                        ticket, num_moving, num_routes, num_blocks, parts, shares, columns, tokens_table_ptr,
                        scores_table_ptr, row_to_slot_ptr, pair_rows_ptr, pair_start_ptr, pair_output_ptr, x_ptr,
                        x_start, row_scores_ptr, T_max, 0, 0, K, K2, J, D, D, D, 1, BLOCK_D, UNROLL,
                    )  # fmt: skip
                else:
                    pull_rows(
                        ticket, num_moving, num_blocks, parts, shares, columns, tokens_table_ptr, scores_table_ptr,
                        row_to_slot_ptr, x_ptr, x_start, row_scores_ptr, T_max, 0, 0, K, D, D, D, 1, BLOCK_D,
                    )  # fmt: skip
                count_done(queue_ptr + PULLED)
            elif ticket < first_w2:
                tile = ticket - num_pulls
                expert, _, row, row_end, col = _tile(tile, num_tiles_f, ends_L, row_start_ptr, BLOCK_M, BLOCK_F)
                await_count(queue_ptr + PULLED, num_pulls)
                x_row = tl.load(x_start_ptr).to(tl.int32) + row
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for k in range(0, D, BLOCK_K):
                    x = x_desc.load([x_row, k])
                    w = w13_desc.load([expert, 0, col, k]).reshape(BLOCK_N, BLOCK_K)
                    acc = tl.dot(x, w.T, acc)
                gate, up = acc.to(tl.bfloat16).reshape(BLOCK_M, 2, BLOCK_F).permute(0, 2, 1).split()
                h2_rows_ptr = h2_ptr + tl.load(h2_start_ptr) * F
                _activate(None, h2_rows_ptr, gate, up, row, col, row_end, F, alpha, limit, False, CLAMPED)
                count_done(queue_ptr + ACTIVATED + expert)
            elif h3_ptr is None or ticket < first_sum:
                tile = ticket - first_w2
                expert, height, row, row_end, col = _tile(tile, num_tiles_d, ends_L, row_start_ptr, BLOCK_M, BLOCK_N)
                await_count(queue_ptr + ACTIVATED + expert, height * num_tiles_f)
                h2_row = tl.load(h2_start_ptr).to(tl.int32) + row
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for k in range(0, F, BLOCK_K):
                    h2 = h2_desc.load([h2_row, k])
                    w = w2_desc.load([expert, col, k]).reshape(BLOCK_N, BLOCK_K)
                    acc = tl.dot(h2, w.T, acc)
                if h3_ptr is None:
                    _push(outputs_table_ptr, row_to_slot_ptr, acc, row, row_end, col, num_outputs, D)
                else:
                    _store_tile(h3_ptr + tl.load(h3_start_ptr) * D, acc, row, col, row_end, D, D, False)
                    count_done(queue_ptr + MULTIPLIED)
            else:
                await_count(queue_ptr + MULTIPLIED, num_tiles_m * num_tiles_d)
                push_pairs(
                    ticket - first_sum, num_moving, tl.load(num_routes_ptr), num_blocks, parts, shares, columns,
                    outputs_table_ptr, None, None, row_scores_ptr, row_to_slot_ptr, pair_rows_ptr, pair_start_ptr,
                    pair_output_ptr, h3_ptr, tl.load(h3_start_ptr), T_max * K, num_outputs, 0, D, D, D, 1, BLOCK_D,
                    UNROLL,
                )  # fmt: skip
            ticket = tl.atomic_add(queue_ptr + TICKET, 1, sem="relaxed", scope="gpu")
    if is_last(finished_ptr):
        if tl.load(stop_ptr) == 0:
            words = tl.arange(0, 2 * BLOCK_L)
            tl.store(queue_ptr + words, 0, mask=words < ACTIVATED + L)
        if signals_table_ptr is not None:
            send(signals_table_ptr, sent_ptr, header_ptr, fault_ptr, rank, W, STAGE, BLOCK_W)


def mega_forward(
    plan,
    w13_L2FD,
    w2_LDF,
    *,
    tokens,
    scores,
    outputs,
    dedup,
    x_XD,
    x_start_1,
    h2_XF,
    h2_start_1,
    h3_XD,
    h3_start_1,
    sums_pairs,
    row_scores_R,
    activation,
    queue_Q,
    finished_1,
    stop_1,
    then=None,
    config=None,
) -> None:
    """Pull the rows routed to this rank, run its experts on them, and push what they return to the owners.

    Args:    plan: from route, of experts that begin at any row.  w13_L2FD, w2_LDF: bf16, contiguous; D and F multiples
             of 32.  tokens: bf16 [.., T_max, D], x first.  scores: fp32 [T_max, K].  dedup: whether a token that has
             several rows here is pulled once; sums_pairs, of dedup alone: whether they come back as one sum, in
             outputs, bf16 [T_max, min(K, W), D], not [T_max, K, D].  x_XD, h2_XF, h3_XD: bf16 over the activation
             buffer, where the rows of the call begin at x_start_1, h2_start_1, h3_start_1 (int64, device); h3 is
             written where pairs are summed, and may lie over x: of an expert's rows when all its W13 is done.
             row_scores_R: fp32 [R], written.  queue_Q: int32, shapes.mega_queue_words, zeros before and after.
             finished_1: int64, 0.  then: the signal COMBINED, sent by the last program, under a fault too.
    Raises:  ValueError for other dtypes, layouts or widths.
    Order:   after the wait on PUBLISHED, before the signal of COMBINED, or with it at the end.
    Source:  reference.mega_forward.
    """
    L, N, D = check_swiglu("mega_forward", x_XD, w13_L2FD, h2_XF)
    F, (T_max, K), W = N // 2, scores.own.shape, len(tokens.peers)
    check_weight("mega_forward", "w2_LDF", w2_LDF)
    check_rows("mega_forward", "h3_XD", h3_XD, D)
    if w2_LDF.shape != (L, D, F):
        raise ValueError(f"mega_forward: w2_LDF must be {[L, D, F]} as w13_L2FD asks, got {list(w2_LDF.shape)}")
    J = min(K, W) if sums_pairs else K
    assert outputs.own.shape == (T_max, J, D) and plan.num_local_experts == L and sums_pairs <= dedup
    assert len(queue_Q) == mega_queue_words(L)
    config = config or CONFIG
    m, n, k = config.block_m, config.block_n, config.block_k
    signal, stage = ending(then)
    grid = (row_programs(x_XD.device, config.programs_per_sm, None),)
    _mega_forward[grid](
        queue_Q,
        tokens.table_W,
        scores.table_W,
        outputs.table_W,
        plan.row_to_slot_R,
        plan.pair_rows_R,
        plan.pair_start_R,
        plan.pair_output_R,
        plan.num_pairs_1,
        plan.num_routes_1,
        plan.row_start_P,
        row_scores_R,
        TensorDescriptor(x_XD, list(x_XD.shape), [D, 1], [m, k]),
        x_XD,
        x_start_1,
        TensorDescriptor(w13_L2FD, [L, 2, F, D], [N * D, F * D, D, 1], [1, 2, n // 2, k]),
        TensorDescriptor(h2_XF, list(h2_XF.shape), [F, 1], [m, k]),
        h2_XF,
        h2_start_1,
        TensorDescriptor(w2_LDF, list(w2_LDF.shape), list(w2_LDF.stride()), [1, n, k]),
        *(h3_XD, h3_start_1) if sums_pairs else (None, None),
        stop_1,
        finished_1,
        *signal[:4],
        T_max,
        T_max * J,
        L,
        F,
        activation.alpha,
        activation.limit,
        signal[5],
        W,
        DEDUP=dedup,
        CLAMPED=activation.clamped,
        K=K,
        K2=next_power_of_2(K),
        J=min(K, W),
        D=D,
        BLOCK_D=min(config.block_d, next_power_of_2(D)),
        UNROLL=UNROLL,
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_K=k,
        BLOCK_L=max(32, next_power_of_2(L)),
        **stage,
        **config.options,
    )

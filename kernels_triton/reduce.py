"""reduce and collect_score_grads: what owners make of what the experts pushed (combine).

They run after the wait on COMBINED and touch this rank's memory only; a reduce that ends a call also tells the host of
a fault. wait_reduce is both, the wait and the reduce that ends a call.
    reduce          out[t] = bf16(sum over valid k of score * outputs[t, k])   or   bf16(sum over j of outputs[t, j])

Sums are FP32 in a fixed order, without contraction to fused multiply-add, as in combine.
"""

import triton
import triton.language as tl

from dist_moe.shapes import MOST_WAITING_PROGRAMS, cdiv, next_power_of_2

from ._device import begin, delay, is_last
from ._fault import tell_host
from ._launch import launched
from ._rows import PROGRAMS_PER_SM, RowTile, column_shares, few_rows, pick_row_tile, row_grid, row_programs
from .barrier import wait_for_all


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

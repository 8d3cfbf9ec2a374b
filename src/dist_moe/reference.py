"""The oracle: one plain-PyTorch function an op, in path order. It is the specification of the kernels, op for op with
the same arguments, and the backend that runs on a CPU by default.

Roundings: a GEMM accumulates in FP32 and rounds once to BF16; SwiGLU, scores and sums are FP32 inside. An op with
`stop_1` leaves without touching anything when that device word is not 0; one with `fault_F` leaves when a fault is set.
The slot planner is in reference_slots.py, SwiGLU in reference_swiglu.py; quantisers of the block-scaled formats are in
reference_formats.py, their products in reference_products.py, and what quantises on arrival in reference_producers.py.
The whole layer written densely, independent of the ops, is dense.py.
"""

import time
from itertools import pairwise

import torch
from torch import Tensor

from . import shapes
from .reference_formats import pack_rows
from .reference_formats import quantize_columns as quantize_columns
from .reference_formats import quantize_rows as quantize_rows
from .reference_formats import quantize_weights as quantize_weights
from .reference_memory import rows_of, set_fault, stopped
from .reference_norm import rmsnorm_reduce as rmsnorm_reduce
from .reference_norm import rmsnorm_reduce_backward as rmsnorm_reduce_backward
from .reference_producers import dispatch_packed as dispatch_packed
from .reference_producers import dispatch_quantize as dispatch_quantize
from .reference_producers import quantize_received as quantize_received
from .reference_products import grouped_gemm_scaled as grouped_gemm_scaled
from .reference_products import grouped_gemm_scaled_dgrad as grouped_gemm_scaled_dgrad
from .reference_products import grouped_gemm_scaled_swiglu as grouped_gemm_scaled_swiglu
from .reference_products import grouped_gemm_scaled_wgrad as grouped_gemm_scaled_wgrad
from .reference_slots import plan_backward as plan_backward
from .reference_slots import plan_forward as plan_forward
from .reference_swiglu import count_clips as count_clips
from .reference_swiglu import swiglu as swiglu
from .reference_swiglu import swiglu_backward as swiglu_backward
from .reference_swiglu import swiglu_backward_quantize as swiglu_backward_quantize
from .reference_swiglu import swiglu_quantize as swiglu_quantize
from .route_plan import RoutePlan
from .symm import fence

_POLL_INTERVAL_S = 20e-6


# ---- publish, signal, wait, verify ---------------------------------------------------------------------------------


def resolve_routes(ids_TK: Tensor, scores_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Ids and scores as they go on the wire: int16 ids, FP32 scores.

    A negative id becomes NO_EXPERT, one >= num_experts INVALID_EXPERT, and a repetition of an expert inside a token
    NO_EXPERT too: its first occurrence carries the sum of the scores, added in slot order. No expert scores +0.0.
    """
    ids = ids_TK.to(torch.int64)
    ids = torch.where(ids < 0, shapes.NO_EXPERT, torch.where(ids >= num_experts, shapes.INVALID_EXPERT, ids))
    scores_in, scores = scores_TK.float(), torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    for k in range(ids.shape[1]):
        same = (ids == ids[:, k : k + 1]) & (ids >= 0)
        scores += torch.where(same, scores_in[:, k : k + 1], 0.0)
        repeated[:, k + 1 :] |= same[:, k + 1 :]
    dead = repeated | (ids < 0)
    ids = torch.where(repeated, shapes.NO_EXPERT, ids)
    return ids.to(torch.int16), torch.where(dead, 0.0, scores) + 0.0  # + 0.0 turns -0.0 into +0.0


def publish(
    x_TD,
    ids_TK,
    scores_TK,
    *,
    half,
    check_TD,
    check_skip_1,
    kind,
    config_hash,
    num_experts,
    call_1,
    tokens,
    header,
    ids,
    scores,
    stop_1,
    format=None,
    then=None,
):
    """Write this rank's rows, resolved routes and header into its own regions; `call_1` counts up.

    With `then`, the Signal PUBLISHED, the signal comes at the end, also of one that leaves.

    Rows go into this half of `tokens`, with a format as pack_rows quantises them; with a half of None nowhere.

    A slot with an expert and a score of 0 gets -0.0 where the token's row of `check_TD` is not finite: its x is
    dispatched as zeros, so that 0 * NaN reaches no sum. `check_TD` is the x that will be dispatched (in backward the
    restored one); nothing is checked where the device word `check_skip_1` is not 0.
    """
    T = x_TD.shape[0]
    if not stopped(stop_1):
        call_1 += 1
        if format is not None:
            pack_rows(x_TD, format=format, out_TB=tokens.own[half, :T])
        elif half is not None:
            tokens.own[half, :T] = x_TD
        own_ids, own_scores = resolve_routes(ids_TK, scores_TK, num_experts)
        if not stopped(check_skip_1):
            broken_T1 = ~torch.isfinite(check_TD).all(dim=1, keepdim=True)
            own_scores = torch.where(broken_T1 & (own_ids >= 0) & (own_scores == 0), -0.0, own_scores)
        ids.own[:T], scores.own[:T] = own_ids, own_scores
        words = (shapes.WIRE_VERSION, config_hash, int(call_1[0]), kind, T, 0)
        header.own[: len(words)] = torch.tensor(words, dtype=torch.int64)
    if then is not None:
        signal(**then.arguments)


def signal(*, stage, rank, signals, sent_S, header, fault_F):
    """Tell every peer that this rank reached `stage`, after all its earlier writes.

    Under a fault the flag carries the aborted bit and the header the fault, so that nobody waits for this rank.
    Of an epoch's aborted flags the first stays: a later one would tell a slow peer that the call it waits in was done.
    """
    code = int(fault_F[0]) & 0xFF if stage != shapes.RESET else 0
    if code:
        last = int(signals.own[stage, rank])
        if last & 1 and last >> 1 + shapes.EPOCH_SHIFT == int(sent_S[stage]) >> shapes.EPOCH_SHIFT:
            return
        header.own[shapes.HEADER_ABORT] = code
    sent_S[stage] += 1
    flag = int(sent_S[stage]) << 1 | (code != 0)
    fence()
    for peer in signals.peers:
        peer[stage, rank] = flag


def wait(*, stage, rank, timeout_ns, signals, sent_S, fault_F):
    """Wait until every rank has signalled this generation of `stage`; a missing or aborted peer becomes a fault.

    Only the abort of this very generation counts: a peer that is ahead has passed it, whatever it did later. A flag is
    read after the clock, so that one which came in time is seen, however long this process was held up in between.
    """
    target = int(sent_S[stage]) << 1
    deadline = time.perf_counter_ns() + timeout_ns
    while int(fault_F[0]) == 0:
        now = time.perf_counter_ns()
        flags = signals.own[stage].tolist()
        missing = [peer for peer, flag in enumerate(flags) if flag < target]
        if (target | 1) in flags:
            set_fault(fault_F, shapes.FAULT_ABORTED, flags.index(target | 1), stage)
        elif not missing:
            break
        elif now > deadline:
            set_fault(fault_F, shapes.FAULT_TIMEOUT, missing[0], stage, target >> 1)
        else:
            time.sleep(_POLL_INTERVAL_S)
    fence()


def verify(*, header, num_tokens_max, rank, fault_F):
    """Compare all ranks' headers with rank 0's; the lowest rank that differs becomes the fault, the same everywhere.

    In a backward this covers what its forward left behind: ranks that kept another choice of rows, or run the backward
    of another forward, would pull what was not published.
    """
    if int(fault_F[0]):
        return
    first = header.peers[0].tolist()
    compared = [shapes.HEADER_VERSION, shapes.HEADER_CONFIG_HASH, shapes.HEADER_CALL, shapes.HEADER_KIND]
    if first[shapes.HEADER_KIND] & ~shapes.KIND_BY_ROUTE == shapes.KIND_BACKWARD:
        compared += [shapes.HEADER_KEPT, shapes.HEADER_SLOT, shapes.HEADER_LAYER, shapes.HEADER_FORWARD]
    for peer, words in enumerate(h.tolist() for h in header.peers):
        for word, found in enumerate(words):
            if word == shapes.HEADER_T and not 0 <= found <= num_tokens_max:
                set_fault(fault_F, shapes.FAULT_MISMATCH, peer, word, num_tokens_max, found)
            elif word in compared and found != first[word]:
                set_fault(fault_F, shapes.FAULT_MISMATCH, peer, word, first[word], found)


# ---- route -----------------------------------------------------------------------------------------------------------


def route(*, ids, header, rank, num_experts, capacity_rows, row_alignment=1, fault_F) -> RoutePlan:
    """From all ranks' ids to this rank's row maps; an invalid id or an overflow anywhere is the fault of all ranks.

    Headers that differ come before either: see verify. Every local expert begins at a multiple of row_alignment; one
    without rows takes none.
    """
    verify(header=header, num_tokens_max=ids.own.shape[0], rank=rank, fault_F=fault_F)
    W, (T_max, K), device = len(ids.peers), ids.own.shape, ids.own.device
    L = num_experts // W
    i32 = {"dtype": torch.int32, "device": device}
    plan = RoutePlan(
        row_start_P=torch.zeros(L + 1, **i32),
        num_rows_L=torch.zeros(L, **i32),
        rank_rows_W=torch.zeros(W, dtype=torch.int64, device=device),
        num_routes_1=torch.zeros(1, **i32),
        num_pairs_1=torch.zeros(1, **i32),
        row_to_slot_R=torch.empty(capacity_rows, **i32),
        pair_rows_R=torch.empty(capacity_rows, **i32),
        pair_start_R=torch.empty(capacity_rows, **i32),
        pair_output_R=torch.empty(capacity_rows, **i32),
    )
    if int(fault_F[0]):
        return plan
    ids_WTK = torch.full((W, T_max, K), shapes.NO_EXPERT, dtype=torch.int64, device=device)
    for src in range(W):
        T = int(header.peers[src][shapes.HEADER_T])
        ids_WTK[src, :T] = ids.peers[src][:T].to(device, torch.int64)
    invalid = (ids_WTK == shapes.INVALID_EXPERT).nonzero()
    owner_WTK = torch.where(ids_WTK >= 0, ids_WTK // L, -1)
    rows_WL = torch.bincount(ids_WTK[ids_WTK >= 0], minlength=num_experts).view(W, L)
    padded_WL = (rows_WL + row_alignment - 1) // row_alignment * row_alignment
    plan.rank_rows_W.copy_(padded_WL.sum(dim=1))
    most = int(plan.rank_rows_W.max())
    if len(invalid):
        set_fault(fault_F, shapes.FAULT_INVALID_ID, *invalid[0].tolist())
    elif most > capacity_rows:
        full_rank = int((plan.rank_rows_W == most).nonzero()[0])
        set_fault(fault_F, shapes.FAULT_OVERFLOW, full_rank, most, capacity_rows)
    if int(fault_F[0]):
        return plan

    # Routes of this rank in (source rank, token, k) order; a stable sort by expert gives the rows.
    slot_Q = (owner_WTK.flatten() == rank).nonzero().flatten()
    expert_Q = ids_WTK.flatten()[slot_Q] - rank * L
    num_routes = len(slot_Q)
    plan.num_routes_1.fill_(num_routes)
    plan.num_rows_L.copy_(rows_WL[rank])
    plan.row_start_P[1:] = padded_WL[rank].cumsum(0)
    order_R = torch.argsort(expert_Q, stable=True)
    row_Q = torch.empty_like(slot_Q)
    row_Q[order_R] = torch.arange(num_routes, device=device)
    first_row_L = rows_WL[rank].cumsum(0) - rows_WL[rank]
    row_Q += (plan.row_start_P[:-1] - first_row_L)[expert_Q]
    plan.row_to_slot_R[: int(plan.row_start_P[-1])] = -1
    plan.row_to_slot_R[row_Q] = slot_Q.int()
    plan.pair_rows_R[:num_routes] = row_Q.int()

    token_Q = slot_Q // K
    first_Q = torch.ones(num_routes, dtype=torch.bool, device=device)
    first_Q[1:] = token_Q[1:] != token_Q[:-1]
    start_pairs = first_Q.nonzero().flatten()
    below_WT = torch.zeros(W, T_max, dtype=torch.int64, device=device)
    for lower in range(rank):
        below_WT += (owner_WTK == lower).any(dim=2)
    below = below_WT.flatten()[token_Q[start_pairs]]
    plan.num_pairs_1.fill_(len(start_pairs))
    plan.pair_start_R[: len(start_pairs)] = start_pairs.int()
    plan.pair_output_R[: len(start_pairs)] = (token_Q[start_pairs] * min(K, W) + below).int()
    return plan


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
    """The wait `after`, unless that is None, route and plan_forward, one after another."""
    if after is not None:
        wait(**after.arguments)
    routing = {"num_experts": num_experts, "capacity_rows": capacity_rows, "row_alignment": row_alignment}
    plan = route(ids=ids, header=header, rank=rank, **routing, fault_F=fault_F)
    plan_forward(
        plan.rank_rows_W,
        plan.num_rows_L,
        rank=rank,
        slot=slot,
        depth=depth,
        save=save,
        geometry=geometry,
        call_1=call_1,
        slot_used_NW=slot_used_NW,
        slot_layers_N=slot_layers_N,
        slot_calls_NM=slot_calls_NM,
        stats_S=stats_S,
        place=place,
        fault_F=fault_F,
    )
    return plan


def copy_x(src, src_offset_1, dst, dst_offset_1, num_rows, width, *, stop_1, num_sms=None):
    """Copy num_rows * width BF16 elements between two places given by device offsets (elements)."""
    if stopped(stop_1):
        return
    n, s, d = num_rows * width, int(src_offset_1[0]), int(dst_offset_1[0])
    dst.view(-1)[d : d + n] = src.view(-1)[s : s + n]


# ---- the experts -----------------------------------------------------------------------------------------------------


def experts_of(row_start_P: Tensor):
    """(expert, rows of it) for every local expert, rows relative to the stage's first."""
    starts = row_start_P.tolist()
    return ((e, slice(a, b)) for e, (a, b) in enumerate(pairwise(starts)))


def dispatch(plan, *, tokens, half, scores, dedup, rows_XD, start_1, row_scores_R, stop_1, columns=None, num_sms=None):
    """Pull the rows routed to this rank into expert-major order, with their scores; the same bits in both schemes.

    Half 0 is x: a row whose score is -0.0 comes as zeros. Half 1 is dy, which comes as it is. Of a window of columns
    (first, width) those alone come, as the first columns of the rows. Rows of padding stay as they are.
    """
    if stopped(stop_1):
        return
    rows = rows_of(rows_XD, start_1, plan.row_start_P)
    T_max, K = scores.own.shape
    first, width = (0, tokens.own.shape[-1]) if columns is None else columns
    slot = plan.row_to_slot_R[: len(rows)].long()
    token, k = slot // K, slot % K
    src, t = token // T_max, token % T_max  # of padding, src is -1
    for peer in range(len(tokens.peers)):
        here = (src == peer).nonzero().flatten()
        row_scores = scores.peers[peer][t[here], k[here]].to(rows.device)
        row_scores_R[here] = row_scores
        dead = (row_scores == 0) & torch.signbit(row_scores) & (half == 0)
        values = tokens.peers[peer][half, t[here], first : first + width].to(rows.device)
        rows[here, :width] = torch.where(dead[:, None], 0.0, values).to(rows.dtype)


def grouped_gemm(
    a_XK, a_start_1, w_LNK, out_XN, out_start_1, row_start_P, *, stop_1, preset=None, num_sms=None, rows_per_expert=None
):
    """out[r] = bf16(a[r] @ w[e].T) for the rows r of each local expert e."""
    if stopped(stop_1):
        return
    a, out = rows_of(a_XK, a_start_1, row_start_P), rows_of(out_XN, out_start_1, row_start_P)
    for e, rows in experts_of(row_start_P):
        out[rows] = (a[rows].float() @ w_LNK[e].float().T).to(out.dtype)


def grouped_gemm_swiglu(
    x_XD,
    x_start_1,
    w13_L2FD,
    h1_X2F,
    h1_start_1,
    h2_XF,
    h2_start_1,
    row_start_P,
    *,
    keep_h1,
    activation,
    rows_per_expert=None,
    stop_1,
    num_sms=None,
):
    """grouped_gemm of x and W13, then swiglu; h1 is written where it is kept."""
    if stopped(stop_1):
        return
    h1 = (h1_X2F, h1_start_1) if keep_h1 else (torch.empty_like(h1_X2F), h1_start_1)
    grouped_gemm(x_XD, x_start_1, w13_L2FD, *h1, row_start_P, stop_1=stop_1)
    swiglu(*h1, h2_XF, h2_start_1, row_start_P, activation=activation, stop_1=stop_1)


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
):
    """dispatch, grouped_gemm_swiglu, grouped_gemm and combine, one after another; of h3 summed pairs alone are left."""
    start_P, zero_1 = plan.row_start_P, torch.zeros_like(stop_1)
    x, h2 = (x_XD, x_start_1), (h2_XF, h2_start_1)
    h1 = (h2_XF.new_empty(len(plan.row_to_slot_R), w13_L2FD.shape[1]), zero_1)
    h3 = (h3_XD, h3_start_1) if sums_pairs else (h3_XD.new_empty(len(plan.row_to_slot_R), h3_XD.shape[1]), zero_1)
    pull = {"tokens": tokens, "half": 0, "scores": scores, "dedup": dedup, "row_scores_R": row_scores_R}
    dispatch(plan, **pull, rows_XD=x_XD, start_1=x_start_1, stop_1=stop_1)
    how = {"keep_h1": False, "activation": activation, "stop_1": stop_1}
    grouped_gemm_swiglu(*x, w13_L2FD, *h1, *h2, start_P, **how)
    grouped_gemm(*h2, w2_LDF, *h3, start_P, stop_1=stop_1)
    push = {"outputs": outputs, "dedup": sums_pairs, "row_scores_R": row_scores_R if sums_pairs else None}
    combine(plan, *h3, **push, row_score_grads_R=None, score_grads=None, stop_1=stop_1, then=then)


def grouped_gemm_dgrad(
    dy_XN,
    dy_start_1,
    w_LNK,
    out_XK,
    out_start_1,
    row_start_P,
    *,
    stop_1,
    preset=None,
    num_sms=None,
    rows_per_expert=None,
):
    """out[r] = bf16(dy[r] @ w[e])."""
    if stopped(stop_1):
        return
    dy, out = rows_of(dy_XN, dy_start_1, row_start_P), rows_of(out_XK, out_start_1, row_start_P)
    for e, rows in experts_of(row_start_P):
        out[rows] = (dy[rows].float() @ w_LNK[e].float()).to(out.dtype)


def grouped_gemm_wgrad(dy_XN, dy_start_1, x_XK, x_start_1, row_start_P, out_LNK, *, accumulate, stop_1, num_sms=None):
    """out[e] = dy_e.T @ x_e, rounded once; added in FP32 to what is there when accumulating."""
    if stopped(stop_1):
        return
    dy, x = rows_of(dy_XN, dy_start_1, row_start_P), rows_of(x_XK, x_start_1, row_start_P)
    for e, rows in experts_of(row_start_P):
        grad_NK = dy[rows].float().T @ x[rows].float()
        if accumulate:
            if rows.start < rows.stop:
                out_LNK[e] = (out_LNK[e].float() + grad_NK).to(out_LNK.dtype)
        else:
            out_LNK[e] = grad_NK.to(out_LNK.dtype)


# ---- combine, reduce -------------------------------------------------------------------------------------------------


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
    """Push the rows back to their owners: each route into outputs[t, k], or, de-duplicated, one sum a (token, rank).

    The sum of a pair runs in slot order in FP32, each row times its score when `row_scores_R` is given. Backward also
    pushes the score gradients. With columns (first, width) the first columns of the rows go into those of the outputs.
    With `then`, the Signal COMBINED, the signal comes at the end, also of one that leaves.
    """
    if not stopped(stop_1):
        _push(plan, rows_XD, start_1, outputs, dedup, row_scores_R, row_score_grads_R, score_grads, columns)
    if then is not None:
        signal(**then.arguments)


def _push(plan, rows_XD, start_1, outputs, dedup, row_scores_R, row_score_grads_R, score_grads, columns) -> None:
    T_max, J, D = outputs.own.shape
    first, width = (0, D) if columns is None else columns
    rows = rows_of(rows_XD, start_1, plan.row_start_P)[:, :width]
    R = len(rows)
    slot = plan.row_to_slot_R[:R].long()
    if dedup:
        num_pairs = int(plan.num_pairs_1[0])
        start = plan.pair_start_R[:num_pairs].long()
        count = torch.diff(start, append=plan.num_routes_1.long())
        pushed = torch.zeros(num_pairs, width, dtype=torch.float32, device=rows.device)
        for i in range(int(count.max()) if num_pairs else 0):
            more = (count > i).nonzero().flatten()
            row = plan.pair_rows_R[start[more] + i].long()
            term = rows[row].float()
            pushed[more] += term if row_scores_R is None else row_scores_R[row, None] * term
        pushed, target = pushed.to(rows.dtype), plan.pair_output_R[:num_pairs].long()
    else:
        pushed, target = rows, slot
    windows = [peer.view(-1, D)[:, first : first + width] for peer in outputs.peers]
    _scatter(pushed, target, windows, T_max * J)
    if score_grads is not None:
        flat = [peer.view(-1) for peer in score_grads.peers]
        _scatter(row_score_grads_R[:R], slot, flat, flat[0].shape[0])


def _scatter(rows: Tensor, target: Tensor, peers: list[Tensor], stride: int) -> None:
    """peers[target // stride][target % stride] = rows; one of padding, with target -1, goes nowhere."""
    for w, peer in enumerate(peers):
        here = (target // stride == w).nonzero().flatten()
        peer[target[here] % stride] = rows[here].to(peer.device)


def reduce(
    out_TD, *, outputs, ids, scores, dedup, num_experts, rank, stop_1, fault_F=None, host_fault_F=None, num_sms=None
):
    """Add what the expert ranks pushed for each own token, in slot order (de-duplicated: in rank order), in FP32.

    `scores` is given in the forward of the per-route scheme alone. A slot without expert is never read. Where the sum
    is all that a call returns, both fault records are given, and a fault ends it as in finish.
    """
    if host_fault_F is not None:
        finish(fault_F, host_fault_F, [out_TD])
    if stopped(stop_1 if host_fault_F is None else fault_F):
        return
    T = out_TD.shape[0]
    L = num_experts // len(outputs.peers)
    ids_TK = ids.own[:T].to(torch.int64)
    acc = torch.zeros(out_TD.shape, dtype=torch.float32, device=out_TD.device)
    if dedup:
        owner = torch.where(ids_TK >= 0, ids_TK // L, -1)
        visits = torch.stack([(owner == w).any(dim=1) for w in range(len(outputs.peers))]).sum(dim=0)
    for j in range(outputs.own.shape[1]):
        used = j < visits if dedup else ids_TK[:, j] >= 0
        term = outputs.own[:T, j].float()
        if scores is not None and not dedup:
            term = scores.own[:T, j, None] * term
        acc += torch.where(used[:, None], term, 0.0)
    out_TD.copy_(acc.to(out_TD.dtype))


def wait_reduce(
    out_TD, *, after, outputs, ids, scores, dedup, num_experts, fault_F, host_fault_F, finished_1, num_sms=None
):
    """The wait `after`, then the reduce that ends a call."""
    wait(**after.arguments)
    how = {"dedup": dedup, "num_experts": num_experts, "rank": after.rank, "stop_1": fault_F[:1]}
    faults = {"fault_F": fault_F, "host_fault_F": host_fault_F}
    reduce(out_TD, outputs=outputs, ids=ids, scores=scores, **how, **faults)


def collect_score_grads(out_TK, ids_TK, *, score_grads, num_experts, stop_1):
    """Score gradient of every slot: that of its expert's first slot in the token; 0 without expert."""
    if stopped(stop_1):
        return
    T, ids = len(ids_TK), ids_TK.to(torch.int64)
    first = (ids[:, :, None] == ids[:, None, :]).int().argmax(dim=2)
    grads = torch.gather(score_grads.own[:T], 1, first)
    out_TK.copy_(torch.where((ids >= 0) & (ids < num_experts), grads, 0.0).to(out_TK.dtype))


def finish(fault_F, host_fault_F, outs):
    """Last launch of a direction: on a fault, NaN into every returned tensor and the record into the host's copy."""
    if int(fault_F[0]):
        for out in outs:
            out.fill_(float("nan"))
        host_fault_F.copy_(fault_F)

"""The oracle: one plain-PyTorch function an op, in path order. It is the specification of the kernels, op for op with
the same arguments, and the backend that runs on a CPU by default.

Roundings: a GEMM accumulates in FP32 and rounds once to BF16; SwiGLU, scores and sums are FP32 inside. An op with
`stop_1` leaves without touching anything when that device word is not 0; one with `fault_F` leaves when a fault is set.
Quantisers of the block-scaled formats are in reference_formats.py, their products in reference_products.py. The whole
layer written densely, independent of the ops, is dense.py.
"""

import time
from itertools import pairwise

import torch
from torch import Tensor

from . import shapes
from .formats import SCALE_ATOM
from .reference_formats import pack_rows as pack_rows
from .reference_formats import quantize_columns as quantize_columns
from .reference_formats import quantize_rows as quantize_rows
from .reference_formats import quantize_weights as quantize_weights
from .reference_products import grouped_gemm_scaled as grouped_gemm_scaled
from .reference_products import grouped_gemm_scaled_dgrad as grouped_gemm_scaled_dgrad
from .reference_products import grouped_gemm_scaled_wgrad as grouped_gemm_scaled_wgrad
from .route_plan import RoutePlan
from .shapes import Activation, Geometry, align, cdiv
from .symm import fence

_POLL_INTERVAL_S = 20e-6


def _stopped(stop_1: Tensor) -> bool:
    return int(stop_1[0]) != 0


def _set_fault(fault_F: Tensor, code: int, rank: int, *details: int) -> None:
    """Record a fault unless an earlier one is there."""
    if int(fault_F[0]) == 0:
        fault_F[1 : 1 + len(details)] = torch.tensor(details, dtype=torch.int64)
        fault_F[0] = code | rank << shapes.FAULT_RANK_SHIFT


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
    packed=False,
):
    """Write this rank's rows, unless packed ones are there, resolved routes and header into its own regions; `call_1`
    counts up.

    A slot with an expert and a score of 0 gets -0.0 where the token's row of `check_TD` is not finite: its x is
    dispatched as zeros, so that 0 * NaN reaches no sum. `check_TD` is the x that will be dispatched (in backward the
    restored one); nothing is checked where the device word `check_skip_1` is not 0.
    """
    if _stopped(stop_1):
        return
    T = x_TD.shape[0]
    call_1 += 1
    if not packed:
        tokens.own[half, :T] = x_TD
    own_ids, own_scores = resolve_routes(ids_TK, scores_TK, num_experts)
    if not _stopped(check_skip_1):
        broken_T1 = ~torch.isfinite(check_TD).all(dim=1, keepdim=True)
        own_scores = torch.where(broken_T1 & (own_ids >= 0) & (own_scores == 0), -0.0, own_scores)
    ids.own[:T], scores.own[:T] = own_ids, own_scores
    words = (shapes.WIRE_VERSION, config_hash, int(call_1[0]), kind, T, 0)
    header.own[: len(words)] = torch.tensor(words, dtype=torch.int64)


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
            _set_fault(fault_F, shapes.FAULT_ABORTED, flags.index(target | 1), stage)
        elif not missing:
            break
        elif now > deadline:
            _set_fault(fault_F, shapes.FAULT_TIMEOUT, missing[0], stage, target >> 1)
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
    if first[shapes.HEADER_KIND] == shapes.KIND_BACKWARD:
        compared += [shapes.HEADER_KEPT, shapes.HEADER_SLOT, shapes.HEADER_LAYER, shapes.HEADER_FORWARD]
    for peer, words in enumerate(h.tolist() for h in header.peers):
        for word, found in enumerate(words):
            if word == shapes.HEADER_T and not 0 <= found <= num_tokens_max:
                _set_fault(fault_F, shapes.FAULT_MISMATCH, peer, word, num_tokens_max, found)
            elif word in compared and found != first[word]:
                _set_fault(fault_F, shapes.FAULT_MISMATCH, peer, word, first[word], found)


# ---- route -----------------------------------------------------------------------------------------------------------


def route(*, ids, header, rank, num_experts, capacity_rows, row_alignment=1, fault_F) -> RoutePlan:
    """From all ranks' ids to this rank's row maps; an invalid id or an overflow anywhere is the fault of all ranks.

    Every local expert begins at a multiple of row_alignment; one without rows takes none.
    """
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
        _set_fault(fault_F, shapes.FAULT_INVALID_ID, *invalid[0].tolist())
    elif most > capacity_rows:
        full_rank = int((plan.rank_rows_W == most).nonzero()[0])
        _set_fault(fault_F, shapes.FAULT_OVERFLOW, full_rank, most, capacity_rows)
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


# ---- the device-side slot planner -----------------------------------------------------------------------------------


def _kept_bytes(rows: Tensor, g: Geometry, kept: int) -> Tensor:
    """Bytes that a layer with this many rows takes in a slot; a row more of x_RD and h1, as their starts round up.

    Block-scaled, KEEPS_ROWS has the columns of x instead of x_RD, and its scales; h1's row more has 128 bytes to spare.
    """
    D, h1 = g.hidden_dim, (rows + 1) * 4 * g.intermediate_dim
    if kept == shapes.KEEPS_ROWS and g.format is not None:
        return (h1 + (rows + 1) * D + _column_scale_bytes(g, rows, D)) // 128 * 128
    raw = {
        shapes.KEEPS_X: torch.full_like(rows, g.x_bytes),
        shapes.KEEPS_H1: g.x_bytes + h1,
        shapes.KEEPS_ROWS: (rows + 1) * 2 * D + h1,
    }[kept]
    return (raw + 127) // 128 * 128


def _column_scale_bytes(g: Geometry, rows, width: int):
    return rows // g.format.block * align(width, SCALE_ATOM[0])


def _choose_kept(used_W: Tensor, rank_rows_W: Tensor, g: Geometry, still_to_come: int) -> int:
    """The most that a layer may keep: rows while the layers to come can keep x and h1 at balanced rows, or where rows
    take no more than x and h1 do; h1 while those can keep x."""
    x_h1, rows = (_kept_bytes(rank_rows_W, g, kept) for kept in (shapes.KEEPS_H1, shapes.KEEPS_ROWS))

    def fits(size_W: Tensor, later_bytes: int) -> bool:
        return int((used_W + size_W).max()) + still_to_come * later_bytes <= g.slot_bytes

    if fits(rows, g.x_h1_bytes) or (fits(rows, g.x_bytes) and bool((rows <= x_h1).all())):
        return shapes.KEEPS_ROWS
    return shapes.KEEPS_H1 if fits(x_h1, g.x_bytes) else shapes.KEEPS_X


def _place_scratch(place: Tensor, g: Geometry, rows: int, kept: int) -> int:
    """What is not in the slot, down from the end of the buffer, each at a multiple of its pitch; the bytes it takes."""
    if g.format is not None:
        return _place_scaled_scratch(place, g, rows, kept)
    pitches = {}
    if kept != shapes.KEEPS_ROWS:
        pitches[shapes.PLACE_XR] = 2 * g.hidden_dim
    if kept == shapes.KEEPS_X:
        pitches[shapes.PLACE_H1] = 4 * g.intermediate_dim
    pitches[shapes.PLACE_H2] = 2 * g.intermediate_dim
    if g.training:
        pitches[shapes.PLACE_H3] = 2 * g.hidden_dim
    end = g.total_bytes
    for word, pitch in pitches.items():
        place[word] = (end - rows * pitch) // pitch
        end = int(place[word]) * pitch
    if not g.training:
        place[shapes.PLACE_H3] = place[shapes.PLACE_XR]
    return g.total_bytes - end


def _place_scaled_scratch(place: Tensor, g: Geometry, rows: int, kept: int) -> int:
    """The regions of planner.py's second table, scales first; the bytes they take."""
    D, F, end = g.hidden_dim, g.intermediate_dim, g.total_bytes

    def take(num_bytes: int) -> int:
        nonlocal end
        end -= num_bytes
        return end

    def take_rows(word: int, pitch: int) -> None:
        nonlocal end
        place[word] = (end - rows * pitch) // pitch
        end = int(place[word]) * pitch

    place[shapes.PLACE_ROW_SCALES] = take(rows * align(g.widest_rows // g.format.block, SCALE_ATOM[1]))
    if g.format.two_level:
        place[shapes.PLACE_OUTER] = take(rows * 4) // 4
    if g.training:
        if kept != shapes.KEEPS_ROWS:
            place[shapes.PLACE_X_COLUMNS + 1] = take(_column_scale_bytes(g, rows, D))
        for word, width in (
            (shapes.PLACE_DY_COLUMNS, D),
            (shapes.PLACE_H2_COLUMNS, F),
            (shapes.PLACE_G1_COLUMNS, 2 * F),
        ):
            place[word + 1] = take(_column_scale_bytes(g, rows, width))
    if kept == shapes.KEEPS_X:
        take_rows(shapes.PLACE_H1, 4 * F)

    for word, width in ((shapes.PLACE_XR, D), (shapes.PLACE_H2, F), (shapes.PLACE_G1_ROWS, 2 * F)):
        if word != shapes.PLACE_G1_ROWS or g.training:
            pitch = width // g.format.values_per_byte
            place[word] = (end - rows * pitch) // pitch
    take((rows + 1) * g.widest_rows // g.format.values_per_byte)

    if g.training:
        take_rows(shapes.PLACE_H3, 2 * D)
        first_row = 2 * int(place[shapes.PLACE_H3])
        if kept != shapes.KEEPS_ROWS:
            place[shapes.PLACE_X_COLUMNS] = first_row
        place[shapes.PLACE_DY_COLUMNS] = first_row + rows
        stage_end = end
        take_rows(shapes.PLACE_G1_COLUMNS, 2 * F)
        take_rows(shapes.PLACE_G2, 2 * F)
        take_rows(shapes.PLACE_H2_COLUMNS, F)
        if g.stage_columns:
            pitch = 2 * g.stage_columns
            place[shapes.PLACE_STAGE] = (stage_end - rows * pitch) // pitch
            end = min(end, int(place[shapes.PLACE_STAGE]) * pitch)
    else:
        place[shapes.PLACE_H3] = place[shapes.PLACE_H1]
    return g.total_bytes - end


def plan_forward(
    rank_rows_W,
    num_rows_L,
    *,
    rank,
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
    fault_F,
):
    """Decide what a forward keeps in its activation slot and where its rows lie; the same decision on every rank.

    Counts the forward in stats_S; of one in a negative slot, which a checkpoint will run again, the scratch alone.

    A layer keeps what on no rank pushes the slot's remaining layers out of it: see _choose_kept.
    """
    g, rows, kept = geometry, int(rank_rows_W[rank]), shapes.KEEPS_X
    place[shapes.PLACE_KEPT], place[shapes.PLACE_SKIP_X], place[shapes.PLACE_SKIP_H1] = shapes.KEEPS_X, 1, 1
    if g.format is not None:
        place[shapes.PLACE_SKIP_COLUMNS] = 1
    if int(fault_F[0]):
        return
    if save:
        layer = int(slot_layers_N[slot])
        if layer >= depth:
            _set_fault(fault_F, shapes.FAULT_SLOT, rank, slot, layer, depth)
            return
        if int(slot_used_NW[slot].max()) + (depth - layer) * g.x_bytes > g.slot_bytes:
            _set_fault(fault_F, shapes.FAULT_SLOT_ROOM, rank, slot, layer, depth)
            return
        start = slot * g.slot_bytes + int(slot_used_NW[slot, rank])
        kept = _choose_kept(slot_used_NW[slot], rank_rows_W, g, depth - 1 - layer)
        slot_used_NW[slot] += _kept_bytes(rank_rows_W, g, kept)
        if kept == shapes.KEEPS_ROWS and g.format is not None:
            place[shapes.PLACE_X_COLUMNS + 1] = start
            start += _column_scale_bytes(g, rows, g.hidden_dim)
            h1_end = (cdiv(start, 4 * g.intermediate_dim) + rows) * 4 * g.intermediate_dim
            place[shapes.PLACE_X_COLUMNS] = cdiv(h1_end, g.hidden_dim)
        elif kept == shapes.KEEPS_ROWS:
            place[shapes.PLACE_XR] = cdiv(start, 2 * g.hidden_dim)
            start = (int(place[shapes.PLACE_XR]) + rows) * 2 * g.hidden_dim
        else:
            place[shapes.PLACE_X] = start // 2
            start += g.x_bytes
        if kept != shapes.KEEPS_X:
            place[shapes.PLACE_H1] = cdiv(start, 4 * g.intermediate_dim)
        slot_layers_N[slot] += 1
        place[shapes.PLACE_KEPT] = kept
        place[shapes.PLACE_SKIP_X], place[shapes.PLACE_SKIP_H1] = kept == shapes.KEEPS_ROWS, kept != shapes.KEEPS_X
        if g.format is not None:
            place[shapes.PLACE_SKIP_COLUMNS] = kept != shapes.KEEPS_ROWS
        place[shapes.PLACE_SLOT], place[shapes.PLACE_LAYER] = slot, layer
        place[shapes.PLACE_EPOCH] = int(call_1[0]) >> shapes.EPOCH_SHIFT
        slot_calls_NM[slot, layer] = call_1[0]
        peak = stats_S[shapes.STATS_SLOTS + slot]
        peak.copy_(torch.maximum(peak, slot_used_NW[slot, rank]))
        stats_S[shapes.STATS_KEPT + kept] += 1
    if slot >= 0:
        stats_S[shapes.STATS_CALLS] += 1
        stats_S[shapes.STATS_ROWS] += rows
        stats_S[shapes.STATS_MOST_ROWS] = max(rows, int(stats_S[shapes.STATS_MOST_ROWS]))
        stats_S[shapes.STATS_SLOTS + len(slot_layers_N) :] += num_rows_L
    scratch = _place_scratch(place, g, rows, kept)
    stats_S[shapes.STATS_SCRATCH] = max(scratch, int(stats_S[shapes.STATS_SCRATCH]))


def plan_backward(
    saved_place,
    rank_rows_W,
    *,
    rank,
    geometry,
    call_1,
    header,
    slot_used_NW,
    slot_layers_N,
    slot_calls_NM,
    place,
    fault_F,
):
    """Give a layer's room in its slot back, say where backward finds and makes its rows, and put into the header which
    forward it belongs to."""
    place[shapes.PLACE_KEPT], place[shapes.PLACE_SKIP_X], place[shapes.PLACE_SKIP_H1] = shapes.KEEPS_X, 1, 1
    if int(fault_F[0]):
        return
    g, rows = geometry, int(rank_rows_W[rank])
    kept, slot, layer, epoch = saved_place[: shapes.PLACE_EPOCH + 1].tolist()
    newest = int(slot_layers_N[slot]) - 1
    if layer != newest or epoch != int(call_1[0]) >> shapes.EPOCH_SHIFT:
        _set_fault(fault_F, shapes.FAULT_SLOT, rank, slot, layer, newest)
        return
    told = torch.tensor([kept, slot, layer, int(slot_calls_NM[slot, layer])])
    header.own[shapes.HEADER_KEPT : shapes.HEADER_FORWARD + 1] = told
    slot_layers_N[slot] -= 1
    slot_used_NW[slot] -= _kept_bytes(rank_rows_W, g, kept)
    place[: shapes.PLACE_H1 + 1] = saved_place[: shapes.PLACE_H1 + 1]
    if g.format is not None:
        x_columns = slice(shapes.PLACE_X_COLUMNS, shapes.PLACE_X_COLUMNS + 2)
        place[x_columns] = saved_place[x_columns]
    place[shapes.PLACE_SKIP_X], place[shapes.PLACE_SKIP_H1] = kept == shapes.KEEPS_ROWS, kept != shapes.KEEPS_X
    _place_scratch(place, g, rows, kept)


def copy_x(src, src_offset_1, dst, dst_offset_1, num_rows, width, *, stop_1, num_sms=None):
    """Copy num_rows * width BF16 elements between two places given by device offsets (elements)."""
    if _stopped(stop_1):
        return
    n, s, d = num_rows * width, int(src_offset_1[0]), int(dst_offset_1[0])
    dst.view(-1)[d : d + n] = src.view(-1)[s : s + n]


# ---- the experts -----------------------------------------------------------------------------------------------------


def _rows(view_XC: Tensor, start_1: Tensor, row_start_P: Tensor) -> Tensor:
    start = int(start_1[0])
    return view_XC[start : start + int(row_start_P[-1])]


def _experts(row_start_P: Tensor):
    """(expert, rows of it) for every local expert, rows relative to the stage's first."""
    starts = row_start_P.tolist()
    return ((e, slice(a, b)) for e, (a, b) in enumerate(pairwise(starts)))


def dispatch(plan, *, tokens, half, scores, dedup, rows_XD, start_1, row_scores_R, stop_1, columns=None, num_sms=None):
    """Pull the rows routed to this rank into expert-major order, with their scores; the same bits in both schemes.

    Half 0 is x: a row whose score is -0.0 comes as zeros. Half 1 is dy, which comes as it is. Of a window of columns
    (first, width) those alone come, as the first columns of the rows. Rows of padding stay as they are.
    """
    if _stopped(stop_1):
        return
    rows = _rows(rows_XD, start_1, plan.row_start_P)
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
    if _stopped(stop_1):
        return
    a, out = _rows(a_XK, a_start_1, row_start_P), _rows(out_XN, out_start_1, row_start_P)
    for e, rows in _experts(row_start_P):
        out[rows] = (a[rows].float() @ w_LNK[e].float().T).to(out.dtype)


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
    if _stopped(stop_1):
        return
    dy, out = _rows(dy_XN, dy_start_1, row_start_P), _rows(out_XK, out_start_1, row_start_P)
    for e, rows in _experts(row_start_P):
        out[rows] = (dy[rows].float() @ w_LNK[e].float()).to(out.dtype)


def grouped_gemm_wgrad(dy_XN, dy_start_1, x_XK, x_start_1, row_start_P, out_LNK, *, accumulate, stop_1, num_sms=None):
    """out[e] = dy_e.T @ x_e, rounded once; added in FP32 to what is there when accumulating."""
    if _stopped(stop_1):
        return
    dy, x = _rows(dy_XN, dy_start_1, row_start_P), _rows(x_XK, x_start_1, row_start_P)
    for e, rows in _experts(row_start_P):
        grad_NK = dy[rows].float().T @ x[rows].float()
        if accumulate:
            if rows.start < rows.stop:
                out_LNK[e] = (out_LNK[e].float() + grad_NK).to(out_LNK.dtype)
        else:
            out_LNK[e] = grad_NK.to(out_LNK.dtype)


def _gate_up(h1: Tensor, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """Clamped gate, the factor that multiplies it (up or up + 1), and sigmoid, all FP32."""
    gate, up = h1.float().chunk(2, dim=1)
    if not activation.clamped:
        return gate, up, 1.0 / (1.0 + torch.exp(-gate))
    gate = torch.where(gate > activation.limit, activation.limit, gate)
    up = torch.where(
        up > activation.limit, activation.limit, torch.where(up < -activation.limit, -activation.limit, up)
    )
    return gate, up + 1.0, 1.0 / (1.0 + torch.exp(-(activation.alpha * gate)))


def activate(h1: Tensor, activation: Activation) -> Tensor:
    """FP32 h2 = act(gate, up) of rows [.., 2F]: gate * sigmoid * up, in this order."""
    gate, up, sig = _gate_up(h1, activation)
    return gate * sig * up


def activate_backward(h1: Tensor, d_h2: Tensor, activation: Activation) -> Tensor:
    """FP32 [dgate | dup] for an FP32 gradient of h2. At exactly a limit the gradient passes."""
    gate, up, sig = _gate_up(h1, activation)
    if activation.clamped:
        d_gate = d_h2 * up * (sig + activation.alpha * gate * sig * (1.0 - sig))
        raw_gate, raw_up = h1.float().chunk(2, dim=1)
        d_gate = torch.where(raw_gate > activation.limit, 0.0, d_gate)
        d_up = torch.where(raw_up.abs() > activation.limit, 0.0, d_h2 * gate * sig)
    else:
        d_gate = d_h2 * up * sig * (1.0 + gate - gate * sig)
        d_up = d_h2 * gate * sig
    return torch.cat([d_gate, d_up], dim=1)


def swiglu(h1_X2F, h1_start_1, h2_XF, h2_start_1, row_start_P, *, activation, stop_1, num_sms=None):
    """h2 = bf16(act(h1)); gate is the first half of a row of h1."""
    if not _stopped(stop_1):
        _rows(h2_XF, h2_start_1, row_start_P).copy_(activate(_rows(h1_X2F, h1_start_1, row_start_P), activation))


def swiglu_backward(
    h1_X2F, h1_start_1, g2_XF, g2_start_1, row_scores_R, score_grads_R, row_start_P, *, activation, stop_1, num_sms=None
):
    """From g2 = dy @ W2 (unscaled): the score gradient <g2, h2>, grad_h1 over h1, score * h2 over g2, all in place.

    The score gradient needs no output of W2, so that neither it nor h2 is saved (the idea is SonicMoE's).
    """
    if _stopped(stop_1):
        return
    h1, g2 = _rows(h1_X2F, h1_start_1, row_start_P), _rows(g2_XF, g2_start_1, row_start_P)
    score = row_scores_R[: len(h1), None]
    h2 = activate(h1, activation).to(torch.bfloat16).float()
    grad_h2 = g2.float()
    score_grads_R[: len(h1)] = (grad_h2 * h2).sum(dim=1)
    h1.copy_(activate_backward(h1, score * grad_h2, activation))
    g2.copy_((score * h2).to(torch.bfloat16))


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
):
    """Push the rows back to their owners: each route into outputs[t, k], or, de-duplicated, one sum a (token, rank).

    The sum of a pair runs in slot order in FP32, each row times its score when `row_scores_R` is given. Backward also
    pushes the score gradients. With columns (first, width) the first columns of the rows go into those of the outputs.
    """
    if _stopped(stop_1):
        return
    T_max, J, D = outputs.own.shape
    first, width = (0, D) if columns is None else columns
    rows = _rows(rows_XD, start_1, plan.row_start_P)[:, :width]
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


def reduce(out_TD, *, outputs, ids, scores, dedup, num_experts, rank, stop_1, num_sms=None):
    """Add what the expert ranks pushed for each own token, in slot order (de-duplicated: in rank order), in FP32.

    `scores` is given in the forward of the per-route scheme alone. A slot without expert is never read.
    """
    if _stopped(stop_1):
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


def collect_score_grads(out_TK, ids_TK, *, score_grads, num_experts, stop_1):
    """Score gradient of every slot: that of its expert's first slot in the token; 0 without expert."""
    if _stopped(stop_1):
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


from .reference_producers import dispatch_packed, dispatch_quantize, quantize_received  # noqa
from .reference_swiglu import swiglu_backward_quantize, swiglu_quantize  # noqa

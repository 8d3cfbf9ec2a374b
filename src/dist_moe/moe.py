"""The path: every stage of forward, then of backward, top to bottom.

A stage runs for all local ranks before the next stage begins: a process group has one local rank, a virtual World all
of them. What crosses ranks, and why it is safe:

    forward   publish -> PUBLISHED -> route, verifying -> experts (pull x, W13, SwiGLU, W2, push) -> COMBINED -> reduce
    backward  publish -> PUBLISHED -> verify -> experts (pull dy, dgrads and wgrads, push dx and dscore)
                      -> COMBINED -> reduce

The last program of publish and combine sends the signal, and in contexts of few tokens the launch behind a wait of a
forward does the waiting (Path.small). In decode the experts are one launch (Path.mega).
PUBLISHED orders every rank's publish before its peers' pulls, and its reads of `outputs` of the call before (they
come earlier in its stream) before its peers' pushes. COMBINED orders the pushes before the owner's sum, and a rank's
pulls before its peers publish again. So two waits a direction are enough and nothing is double-buffered.
A call by route, which has a postprocess, never sums at the experts: combine pushes a row to its slot of `outputs`, and
in backward the owner publishes there the gradient of every route, which the rank of its expert alone pulls and then
overwrites with the gradient of x.
The experts are here in bf16, and in moe_scaled.py in block-scaled formats.
"""

import torch
from torch import Tensor

from . import moe_scaled, shapes
from .calls import BackwardCall, ForwardCall, LocalRank, Path
from .formats import ROW_ALIGNMENT
from .meeting import Wait, meet, signal, signal_of, wait, wait_of
from .route_plan import RoutePlan

_ONE_BY_ONE = {words: [1] * words for words in (shapes.PLACE_WORDS, shapes.SCALED_PLACE_WORDS)}


def _words(place: Tensor) -> tuple[Tensor, ...]:
    """Every word of a place record as a tensor of one."""
    return place.split_with_sizes(_ONE_BY_ONE[len(place)])


def _new_place(path: Path, r: LocalRank) -> Tensor:
    return torch.empty(path.geometry.place_words, dtype=torch.int64, device=r.buffer.device)


def row_floats(path: Path, r: LocalRank) -> Tensor:
    return torch.empty(path.capacity_rows, dtype=torch.float32, device=r.buffer.device)


def _publish(path: Path, r: LocalRank, c: ForwardCall | BackwardCall, x_TD: Tensor, *, signals=True, **how) -> None:
    path.ops.publish(
        x_TD,
        c.ids_TK,
        c.scores_TK,
        config_hash=path.config_hash,
        num_experts=path.num_experts,
        call_1=r.call_1,
        tokens=r.tokens,
        header=r.header,
        ids=r.ids,
        scores=r.scores,
        stop_1=r.stop_1,
        then=signal_of(path, r, shapes.PUBLISHED) if signals else None,
        **how,
    )


def _dispatch(path: Path, r: LocalRank, plan: RoutePlan, half: int, start_1: Tensor, row_scores_R: Tensor, stop_1):
    path.ops.dispatch(
        plan,
        tokens=r.tokens,
        half=half,
        scores=r.scores,
        dedup=path.dedup,
        rows_XD=r.rows[path.hidden_dim],
        start_1=start_1,
        row_scores_R=row_scores_R,
        stop_1=stop_1,
        num_sms=path.num_sms,
    )


def _dispatch_route_grads(path: Path, r: LocalRank, plan: RoutePlan, start_1: Tensor, row_scores_R: Tensor) -> None:
    """Pull the gradient of every route from `outputs`. The scores are in it: those of the rows become 1."""
    path.ops.dispatch(
        plan,
        tokens=r.route_grads,
        half=0,
        scores=r.route_scores,
        dedup=False,
        rows_XD=r.rows[path.hidden_dim],
        start_1=start_1,
        row_scores_R=row_scores_R,
        stop_1=r.stop_1,
        num_sms=path.num_sms,
    )
    row_scores_R.fill_(1.0)


def _w13(path: Path, r: LocalRank, w13_L2FD: Tensor, plan: RoutePlan, words, stop_1: Tensor) -> None:
    path.ops.grouped_gemm(
        r.rows[path.hidden_dim],
        words[shapes.PLACE_XR],
        w13_L2FD,
        r.rows[2 * path.intermediate_dim],
        words[shapes.PLACE_H1],
        plan.row_start_P,
        stop_1=stop_1,
        **path.tiles,
    )


def forward(path: Path, ranks: list[LocalRank], calls: list[ForwardCall]) -> None:
    """Run one forward of all local ranks; fills out_TD, plan and place of every call."""
    ops, D = path.ops, path.hidden_dim
    both = list(zip(ranks, calls, strict=True))
    experts = _experts if path.format is None else moe_scaled.experts
    wire_format = None if path.geometry.training else path.format

    for r, c in both:
        kind = (shapes.KIND_TRAIN if c.save else shapes.KIND_NO_GRAD) | (c.by_route and shapes.KIND_BY_ROUTE)
        _publish(path, r, c, c.x_TD, half=0, check_TD=c.x_TD, check_skip_1=r.stop_1, kind=kind, format=wire_format)
    if not path.small.routing:
        meet(path, ranks, shapes.PUBLISHED)
    for r, c in both:
        _route_and_plan(path, r, c)
        if c.save:
            x_places = (r.tokens.own, r.zero_1, r.elements, c.words[shapes.PLACE_X])
            skip_x = c.words[shapes.PLACE_SKIP_X]
            ops.copy_x(*x_places, c.x_TD.shape[0], D, stop_1=skip_x, num_sms=path.num_sms)

    scores = [row_floats(path, r) for r in ranks]
    for (r, c), row_scores_R in zip(both, scores, strict=True):
        experts(path, r, c, row_scores_R)
    for r, c in both:
        waits_itself = path.small.sum and not c.by_route
        if path.exchanges and not waits_itself:
            wait(path, r, shapes.COMBINED)
        if c.norm is not None:
            _normalise(path, r, c)
        elif c.returns_routes:
            _take_routes(r, c.out_TD)
        else:
            _reduce_and_finish(path, r, c.out_TD, wait_of(path, r, shapes.COMBINED) if waits_itself else None)
        others = [c.out_TD if c.by_route else None, c.clip_stats_3]
        if outs := [out for out in others if out is not None]:
            ops.finish(r.fault_F, r.host_fault_F, outs)


def _route_and_plan(path: Path, r: LocalRank, c: ForwardCall) -> None:
    """Make the row maps, decide what the forward keeps and where its rows lie; a small routing waits before it."""
    c.place = _new_place(path, r)
    c.words = _words(c.place)
    routing = {
        "ids": r.ids,
        "header": r.header,
        "num_experts": path.num_experts,
        "capacity_rows": path.capacity_rows,
        "row_alignment": 1 if path.format is None else ROW_ALIGNMENT,
    }
    planning = {
        "slot": c.slot,
        "depth": c.depth,
        "save": c.save,
        "geometry": path.geometry,
        "call_1": r.call_1,
        "slot_used_NW": r.slot_used_NW,
        "slot_layers_N": r.slot_layers_N,
        "slot_calls_NM": r.slot_calls_NM,
        "stats_S": r.stats_S,
        "place": c.place,
    }
    faults = {"rank": r.rank, "fault_F": r.fault_F}
    if path.small.routing:
        after = wait_of(path, r, shapes.PUBLISHED)
        c.plan = path.ops.wait_route_plan(after=after, finished_1=r.finished_1, **routing, **planning, **faults)
    else:
        c.plan = path.ops.route(**routing, **faults)
        path.ops.plan_forward(c.plan.rank_rows_W, c.plan.num_rows_L, **planning, **faults)


def _experts(path: Path, r: LocalRank, c: ForwardCall, row_scores_R: Tensor) -> None:
    """One rank's experts, from the pull of x to the push of what they return."""
    if path.mega and c.clip_stats_3 is None:
        return _experts_in_one(path, r, c, row_scores_R)
    ops, D, F = path.ops, path.hidden_dim, path.intermediate_dim
    run = {"stop_1": r.stop_1, "num_sms": path.num_sms}
    h1 = (r.rows[2 * F], c.words[shapes.PLACE_H1])
    h2 = (r.rows[F], c.words[shapes.PLACE_H2])
    h3 = (r.rows[D], c.words[shapes.PLACE_H3])
    _dispatch(path, r, c.plan, 0, c.words[shapes.PLACE_XR], row_scores_R, r.stop_1)
    if path.fuses_swiglu(c.save) and c.clip_stats_3 is None:
        x = (r.rows[D], c.words[shapes.PLACE_XR])
        how = {"keep_h1": c.save, "activation": path.activation, "rows_per_expert": path.rows_per_expert}
        ops.grouped_gemm_swiglu(*x, c.w13_L2FD, *h1, *h2, c.plan.row_start_P, **how, **run)
    else:
        _w13(path, r, c.w13_L2FD, c.plan, c.words, r.stop_1)
        if c.clip_stats_3 is not None:
            count_clips(path, r, c)
        ops.swiglu(*h1, *h2, c.plan.row_start_P, activation=path.activation, **run)
    ops.grouped_gemm(*h2, c.w2_LDF, *h3, c.plan.row_start_P, stop_1=r.stop_1, **path.tiles)
    combine_outputs(path, r, c, *h3, row_scores_R)


def _experts_in_one(path: Path, r: LocalRank, c: ForwardCall, row_scores_R: Tensor) -> None:
    sums_pairs = path.sums_pairs and not c.by_route
    path.ops.mega_forward(
        c.plan,
        c.w13_L2FD,
        c.w2_LDF,
        tokens=r.tokens,
        scores=r.scores,
        outputs=r.pair_outputs if sums_pairs else r.outputs,
        dedup=path.dedup,
        sums_pairs=sums_pairs,
        x_XD=r.rows[path.hidden_dim],
        x_start_1=c.words[shapes.PLACE_XR],
        h2_XF=r.rows[path.intermediate_dim],
        h2_start_1=c.words[shapes.PLACE_H2],
        h3_XD=r.rows[path.hidden_dim],
        h3_start_1=c.words[shapes.PLACE_H3],
        row_scores_R=row_scores_R,
        activation=path.activation,
        queue_Q=r.queue_Q,
        finished_1=r.finished_1,
        stop_1=r.stop_1,
        then=signal_of(path, r, shapes.COMBINED),
    )


def count_clips(path: Path, r: LocalRank, c: ForwardCall) -> None:
    """Of the h1 that W13 has just made; integers until the one rounding to FP32. No backward comes here."""
    counts_3 = torch.zeros(3, dtype=torch.int64, device=r.buffer.device)
    path.ops.count_clips(
        r.rows[2 * path.intermediate_dim],
        c.words[shapes.PLACE_H1],
        c.plan.row_start_P,
        c.plan.row_to_slot_R,
        counts_3,
        limit=c.clip_limit,
        stop_1=r.stop_1,
        num_sms=path.num_sms,
    )
    c.clip_stats_3.copy_(counts_3)


def combine_outputs(
    path: Path, r: LocalRank, c: ForwardCall, rows, start_1, row_scores_R: Tensor, *, is_last=True, **how
) -> None:
    """is_last: of the windows of columns; with it this rank has reached COMBINED."""
    sums_pairs = path.sums_pairs and not c.by_route
    path.ops.combine(
        c.plan,
        rows,
        start_1,
        outputs=r.pair_outputs if sums_pairs else r.outputs,
        dedup=sums_pairs,
        row_scores_R=row_scores_R if sums_pairs else None,
        row_score_grads_R=None,
        score_grads=None,
        stop_1=r.stop_1,
        num_sms=path.num_sms,
        then=signal_of(path, r, shapes.COMBINED) if is_last else None,
        **how,
    )


def combine_grads(path: Path, r: LocalRank, c: BackwardCall, rows, start_1, row_score_grads_R: Tensor) -> None:
    """A row of a backward by route goes to the place that its gradient came from, which this rank alone reads: peers
    may be at their pulls still. With it this rank has reached COMBINED."""
    dedup = path.dedup and not c.by_route
    path.ops.combine(
        c.plan,
        rows,
        start_1,
        outputs=r.pair_outputs if dedup else r.outputs,
        dedup=dedup,
        row_scores_R=None,
        row_score_grads_R=None if c.by_route else row_score_grads_R,
        score_grads=None if c.by_route else r.score_grads,
        stop_1=r.stop_1,
        num_sms=path.num_sms,
        then=signal_of(path, r, shapes.COMBINED),
    )


def _normalise(path: Path, r: LocalRank, c: ForwardCall) -> None:
    path.ops.rmsnorm_reduce(
        c.out_TD,
        rows_TKD=r.outputs.own,
        ids_TK=r.ids.own,
        scores_TK=r.scores.own,
        norm=c.norm,
        kept_rows_TKD=c.kept_rows_TKD,
        rstd_TK=c.rstd_TK,
        stop_1=r.stop_1,
        num_sms=path.num_sms,
    )


def _normalise_backward(path: Path, r: LocalRank, c: BackwardCall) -> None:
    """The gradients of the routes into `outputs`, those of the scores into `score_grads`, where no peer writes now."""
    path.ops.rmsnorm_reduce_backward(
        c.grad_out_TD,
        rows_TKD=c.rows_TKD,
        ids_TK=r.ids.own,
        scores_TK=r.scores.own,
        norm=c.norm,
        rstd_TK=c.rstd_TK,
        grad_rows_TKD=r.outputs.own,
        grad_scores_TK=r.score_grads.own,
        grad_weight_D=c.grad_norm_weight_D,
        stop_1=r.stop_1,
        num_sms=path.num_sms,
    )


def _take_routes(r: LocalRank, out_TKD: Tensor) -> None:
    """The rows that the experts pushed, zeros where a slot has no expert: an earlier call's row lies there."""
    T = len(out_TKD)
    out_TKD.copy_(r.outputs.own[:T]).masked_fill_((r.ids.own[:T] < 0)[..., None], 0.0)


def _reduce(path: Path, r: LocalRank, out_TD: Tensor, *, dedup: bool) -> None:
    """Of a backward: the scores are in the rows."""
    path.ops.reduce(
        out_TD,
        outputs=r.pair_outputs if dedup else r.outputs,
        ids=r.ids,
        scores=None,
        dedup=dedup,
        num_experts=path.num_experts,
        rank=r.rank,
        stop_1=r.stop_1,
        num_sms=path.num_sms,
    )


def _reduce_and_finish(path: Path, r: LocalRank, out_TD: Tensor, after: Wait | None) -> None:
    """The end of a forward that returns one sum: on a fault it does what finish does. A small sum waits before it."""
    how = {
        "outputs": r.pair_outputs if path.sums_pairs else r.outputs,
        "ids": r.ids,
        "scores": None if path.sums_pairs else r.scores,
        "dedup": path.sums_pairs,
        "num_experts": path.num_experts,
        "fault_F": r.fault_F,
        "host_fault_F": r.host_fault_F,
        "num_sms": path.num_sms,
    }
    if after is None:
        path.ops.reduce(out_TD, rank=r.rank, stop_1=r.stop_1, **how)
    else:
        path.ops.wait_reduce(out_TD, after=after, finished_1=r.finished_1, **how)


def backward(path: Path, ranks: list[LocalRank], calls: list[BackwardCall]) -> None:
    """Run one backward of all local ranks; fills the gradients of every call."""
    ops, D = path.ops, path.hidden_dim
    both = list(zip(ranks, calls, strict=True))
    experts = _experts_backward if path.format is None else moe_scaled.experts_backward

    for r, c in both:
        c.place = _new_place(path, r)
        c.words = _words(c.place)
        ops.plan_backward(
            c.saved_place,
            c.plan.rank_rows_W,
            rank=r.rank,
            geometry=path.geometry,
            call_1=r.call_1,
            header=r.header,
            slot_used_NW=r.slot_used_NW,
            slot_layers_N=r.slot_layers_N,
            slot_calls_NM=r.slot_calls_NM,
            place=c.place,
            fault_F=r.fault_F,
        )
        skip_x, T = c.words[shapes.PLACE_SKIP_X], c.grad_out_TD.shape[0]
        x_places = (r.elements, c.words[shapes.PLACE_X], r.tokens.own, r.zero_1)
        ops.copy_x(*x_places, T, D, stop_1=skip_x, num_sms=path.num_sms)
        restored_TD = r.tokens.own[0, :T]
        check = {"check_TD": restored_TD, "check_skip_1": skip_x}
        if c.by_route:
            kind = shapes.KIND_BACKWARD | shapes.KIND_BY_ROUTE
            _publish(path, r, c, restored_TD, half=None, **check, kind=kind, signals=False)
            if c.norm is None:
                r.outputs.own[:T] = c.grad_out_TD
            else:
                _normalise_backward(path, r, c)
            if path.exchanges:
                signal(path, r, shapes.PUBLISHED)
        else:
            _publish(path, r, c, c.grad_out_TD, half=1, **check, kind=shapes.KIND_BACKWARD)
    meet(path, ranks, shapes.PUBLISHED)

    for r, c in both:
        ops.verify(header=r.header, num_tokens_max=path.num_tokens_max, rank=r.rank, fault_F=r.fault_F)
        # What the slot did not keep is made again; not after a fault of the exchange above.
        skips = c.place[shapes.PLACE_SKIP_X : shapes.PLACE_SKIP_H1 + 1]
        torch.maximum(skips, r.stop_1, out=skips)
        experts(path, r, c)
    for r, c in both:
        if path.exchanges:
            wait(path, r, shapes.COMBINED)
        _reduce(path, r, c.grad_x_TD, dedup=path.dedup and not c.by_route)
        if c.grad_scores_TK is not None:
            ops.collect_score_grads(
                c.grad_scores_TK,
                c.ids_TK,
                score_grads=r.score_grads,
                num_experts=path.num_experts,
                stop_1=r.stop_1,
            )
        ops.finish(r.fault_F, r.host_fault_F, c.outputs())
        if c.grad_norm_weight_D is not None:
            ops.finish(r.fault_F, r.host_fault_F, [c.grad_norm_weight_D])


def _experts_backward(path: Path, r: LocalRank, c: BackwardCall) -> None:
    """One rank's experts, from the pull of dy to the push of the gradients of x and of the scores.

    grad_h1 overwrites h1, score * h2 overwrites g2, and the x-gradient rows overwrite dy: each once its last reader is
    done, which stream order gives.
    """
    ops, D, F, start_P = path.ops, path.hidden_dim, path.intermediate_dim, c.plan.row_start_P
    row_scores_R, row_score_grads_R = row_floats(path, r), row_floats(path, r)
    skip_x, skip_h1 = c.words[shapes.PLACE_SKIP_X], c.words[shapes.PLACE_SKIP_H1]
    x = (r.rows[D], c.words[shapes.PLACE_XR])
    h1 = (r.rows[2 * F], c.words[shapes.PLACE_H1])
    g2 = (r.rows[F], c.words[shapes.PLACE_H2])
    dy = (r.rows[D], c.words[shapes.PLACE_H3])
    run = {"stop_1": r.stop_1, "num_sms": path.num_sms}

    _dispatch(path, r, c.plan, 0, x[1], row_scores_R, skip_x)
    _w13(path, r, c.w13_L2FD, c.plan, c.words, skip_h1)

    if c.by_route:
        _dispatch_route_grads(path, r, c.plan, dy[1], row_scores_R)
    else:
        _dispatch(path, r, c.plan, 1, dy[1], row_scores_R, r.stop_1)
    ops.grouped_gemm_dgrad(*dy, c.w2_LDF, *g2, start_P, stop_1=r.stop_1, **path.tiles)
    ops.swiglu_backward(*h1, *g2, row_scores_R, row_score_grads_R, start_P, activation=path.activation, **run)
    if c.grad_w2_LDF is not None:
        ops.grouped_gemm_wgrad(*dy, *g2, start_P, c.grad_w2_LDF, accumulate=c.adds_w2, **run)
    ops.grouped_gemm_dgrad(*h1, c.w13_L2FD, *dy, start_P, stop_1=r.stop_1, **path.tiles)
    combine_grads(path, r, c, *dy, row_score_grads_R)
    # The weight gradient of W13 covers the peers' pushes: it stands between signal and wait.
    if c.grad_w13_L2FD is not None:
        ops.grouped_gemm_wgrad(*h1, *x, start_P, c.grad_w13_L2FD, accumulate=c.adds_w13, **run)

"""The experts of the path in block-scaled formats: what lies between the exchanges of moe.py.

Training quantises what arrives, x and dy in BF16, along rows for the products that sum over features and along columns
for the weight gradients, both from the same BF16 rows; inference pulls rows that their owners have quantised. h1, g2,
h3 and the gradients of x are BF16; h2 and grad_h1 are quantised from FP32 registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import moe, shapes
from .quantized import Bundle

if TYPE_CHECKING:
    from .calls import BackwardCall, ForwardCall, LocalRank, Path


def _rows(path: Path, r: LocalRank, words: tuple[Tensor, ...], word: int, width: int) -> Bundle:
    outer = (r.outer_inv, words[shapes.PLACE_OUTER]) if path.format.two_level else ()
    scales = (None, None) if path.geometry.expands_rows else (r.scales, words[shapes.PLACE_ROW_SCALES])
    return Bundle(r.values[width], words[word], *scales, *outer)


def _columns(path: Path, r: LocalRank, words: tuple[Tensor, ...], word: int, width: int) -> Bundle:
    if path.geometry.expanded:
        return Bundle(r.rows[width], words[word])
    return Bundle(r.values[width], words[word], r.scales, words[word + 1])


def _receive(path: Path, r: LocalRank, c, half: int, stop_1: Tensor, **into) -> None:
    """Pull x (half 0) or dy (half 1) and quantise it.

    De-duplicated, rows cross once a token, in passes over columns, into BF16 rows that are quantised from there; with
    one rank nothing crosses, and rows are quantised as they are read.
    """
    ops, D, width = path.ops, path.hidden_dim, path.geometry.stage_columns
    into |= {"format": path.format, "scaled_columns": half == 1, "num_sms": path.num_sms}
    tokens = {"tokens": r.tokens, "half": half, "scores": r.scores}
    if half == 1 and c.by_route:  # the scores are in the gradients
        tokens = {"tokens": r.route_grads, "half": 0, "scores": r.route_scores}
        ops.dispatch_quantize(c.plan, **tokens, **into | {"scaled_columns": False})
        into["row_scores_R"].fill_(1.0)
        return
    if not (path.dedup and width and len(r.tokens.peers) > 1):
        ops.dispatch_quantize(c.plan, **tokens, **into)
        return
    stage = (r.rows[width], c.words[shapes.PLACE_STAGE])
    for first in range(0, D, width):
        window = (first, min(width, D - first))
        ops.dispatch(
            c.plan,
            **tokens,
            dedup=True,
            rows_XD=stage[0],
            start_1=stage[1],
            row_scores_R=into["row_scores_R"],
            stop_1=stop_1,
            columns=window,
            num_sms=path.num_sms,
        )
        ops.quantize_received(c.plan, staged_XS=stage[0], staged_start_1=stage[1], window=window, **into)


def _product(path: Path, op: str, rows: Bundle, values: Tensor, scales: Tensor, out, c, stop_1: Tensor, **how) -> None:
    getattr(path.ops, op)(
        rows,
        values,
        scales,
        *out,
        c.plan.row_start_P,
        c.plan.num_rows_L,
        format=path.format,
        stop_1=stop_1,
        num_sms=path.num_sms,
        rows_per_expert=path.rows_per_expert,
        **how,
    )


def _w13(path: Path, r: LocalRank, c, x_rows: Bundle, stop_1: Tensor) -> None:
    w13, h1 = c.w13_L2FD, (r.rows[2 * path.intermediate_dim], c.words[shapes.PLACE_H1])
    how = {"w_outer_inv_L": w13.outer_inv_G, "square": w13.transposed_scales is not None}
    _product(path, "grouped_gemm_scaled", x_rows, w13.values, w13.scales, h1, c, stop_1, **how)


def experts(path: Path, r: LocalRank, c: ForwardCall, row_scores_R: Tensor) -> None:
    """One rank's experts, from the pull of x to the push of what they return."""
    ops, D, F, plan, words = path.ops, path.hidden_dim, path.intermediate_dim, c.plan, c.words
    x_rows, h2_rows = (_rows(path, r, words, *at) for at in ((shapes.PLACE_XR, D), (shapes.PLACE_H2, F)))
    h1, training = (r.rows[2 * F], words[shapes.PLACE_H1]), path.geometry.training

    if training:
        _receive(
            path,
            r,
            c,
            0,
            r.stop_1,
            rows=x_rows,
            columns=_columns(path, r, words, shapes.PLACE_X_COLUMNS, D),
            row_scores_R=row_scores_R,
            rows_stop_1=r.stop_1,
            columns_stop_1=words[shapes.PLACE_SKIP_COLUMNS],
        )
    else:
        ops.dispatch_packed(
            plan,
            tokens=r.tokens,
            scores=r.scores,
            dedup=path.dedup,
            format=path.format,
            rows=x_rows,
            row_scores_R=row_scores_R,
            stop_1=r.stop_1,
            num_sms=path.num_sms,
        )
    _w13(path, r, c, x_rows, r.stop_1)
    if c.clip_stats_3 is not None:
        moe.count_clips(path, r, c)
    ops.swiglu_quantize(
        *h1,
        h2_rows,
        plan.row_start_P,
        plan.num_rows_L,
        format=path.format,
        activation=path.activation,
        fast_math=path.fast_math,
        stop_1=r.stop_1,
        num_sms=path.num_sms,
    )
    width = path.geometry.output_columns
    h3 = (r.rows[width], words[shapes.PLACE_H3])
    for first in range(0, D, width):
        window = None if width == D else (first, min(width, D - first))
        w2 = c.w2_LDF
        how = {"w_outer_inv_L": w2.outer_inv_G, "square": w2.transposed_scales is not None, "columns": window}
        _product(path, "grouped_gemm_scaled", h2_rows, w2.values, w2.scales, h3, c, r.stop_1, **how)
        moe.combine_outputs(path, r, c, *h3, row_scores_R, columns=window, is_last=first + width >= D)


def experts_backward(path: Path, r: LocalRank, c: BackwardCall) -> None:
    """One rank's experts, from the pull of dy to the push of the gradients of x and of the scores.

    The gradients of x lie over the columns of x and dy: both weight gradients come before them.
    """
    ops, D, F, plan, words = path.ops, path.hidden_dim, path.intermediate_dim, c.plan, c.words
    row_scores_R, row_score_grads_R = moe.row_floats(path, r), moe.row_floats(path, r)
    skip_x, skip_h1 = words[shapes.PLACE_SKIP_X], words[shapes.PLACE_SKIP_H1]
    h1, g2, grad_x = (
        (r.rows[width], words[word])
        for word, width in ((shapes.PLACE_H1, 2 * F), (shapes.PLACE_G2, F), (shapes.PLACE_H3, D))
    )
    x_rows = dy_rows = _rows(path, r, words, shapes.PLACE_XR, D)
    g1_rows = _rows(path, r, words, shapes.PLACE_G1_ROWS, 2 * F)
    x_columns = g1_columns = dy_columns = h2_columns = None
    if c.grad_w13_L2FD is not None:
        x_columns = _columns(path, r, words, shapes.PLACE_X_COLUMNS, D)
        g1_columns = _columns(path, r, words, shapes.PLACE_G1_COLUMNS, 2 * F)
    if c.grad_w2_LDF is not None:
        dy_columns = _columns(path, r, words, shapes.PLACE_DY_COLUMNS, D)
        h2_columns = _columns(path, r, words, shapes.PLACE_H2_COLUMNS, F)

    scores = {"row_scores_R": row_scores_R}
    stops = {"rows_stop_1": skip_h1, "columns_stop_1": skip_x}
    _receive(path, r, c, 0, skip_x, rows=x_rows, columns=x_columns, **scores, **stops)
    _w13(path, r, c, x_rows, skip_h1)

    stops = {"rows_stop_1": r.stop_1, "columns_stop_1": r.stop_1}
    _receive(path, r, c, 1, r.stop_1, rows=dy_rows, columns=dy_columns, **scores, **stops)
    w2, w13 = c.w2_LDF, c.w13_L2FD
    _product(path, "grouped_gemm_scaled_dgrad", dy_rows, w2.values, w2.transposed_scales, g2, c, r.stop_1)
    ops.swiglu_backward_quantize(
        *h1,
        *g2,
        row_scores_R,
        row_score_grads_R,
        plan.row_start_P,
        plan.row_to_slot_R,
        format=path.format,
        g1_rows=g1_rows,
        g1_columns=g1_columns,
        h2_columns=h2_columns,
        activation=path.activation,
        fast_math=path.fast_math,
        stop_1=r.stop_1,
        num_sms=path.num_sms,
    )
    for dy, x, grad, adds in (
        (dy_columns, h2_columns, c.grad_w2_LDF, c.adds_w2),
        (g1_columns, x_columns, c.grad_w13_L2FD, c.adds_w13),
    ):
        if grad is not None:
            ops.grouped_gemm_scaled_wgrad(
                dy,
                x,
                plan.row_start_P,
                plan.num_rows_L,
                grad,
                format=path.format,
                accumulate=adds,
                stop_1=r.stop_1,
                num_sms=path.num_sms,
            )
    _product(path, "grouped_gemm_scaled_dgrad", g1_rows, w13.values, w13.transposed_scales, grad_x, c, r.stop_1)
    moe.combine_grads(path, r, c, *grad_x, row_score_grads_R)

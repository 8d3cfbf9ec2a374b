"""The oracle of the producers: ops whose last step quantises rows, or places quantised ones, in bundles.

Each is the composition of a plain op and a quantiser of reference_formats. Of a bundle of rows, rows of padding are not
written; of a bundle of columns they are zeros with scale 0, and so are the scales behind the last column.
"""

import torch
from torch import Tensor

from .quantized import Bundle, check_producer, check_staged, check_wire_rows
from .reference_formats import unpack_rows
from .reference_memory import put_columns, put_quantized, put_rows


def _runs(bundle: Bundle | None, stop_1: Tensor | None) -> bool:
    return bundle is not None and int(stop_1[0]) == 0


def _pull(plan, *, tokens, half, scores, row_scores_R) -> tuple[Tensor, Tensor]:
    """What peers published for the rows of this rank, and the scores, which go into row_scores_R too.

    Zeros for rows of padding and, of half 0, for rows whose score is -0.0.
    """
    T_max, K = scores.own.shape
    slot = plan.row_to_slot_R[: int(plan.row_start_P[-1])].long()
    rows = torch.zeros(len(slot), tokens.own.shape[2], dtype=tokens.own.dtype, device=slot.device)
    row_scores = torch.zeros(len(slot), device=slot.device)
    for peer in range(len(tokens.peers)):
        here = (slot // (T_max * K) == peer).nonzero().flatten()
        own_slot = slot[here] - peer * T_max * K
        rows[here] = tokens.peers[peer][half, own_slot // K].to(rows.device)
        row_scores[here] = scores.peers[peer].reshape(-1)[own_slot].to(rows.device)
        row_scores_R[here] = row_scores[here]
    if half == 0:
        rows[(row_scores == 0) & torch.signbit(row_scores)] = 0
    return rows, row_scores


def _quantize(plan, x_RC, row_scores, first, format, rows, columns) -> None:
    """Into the bundles that are given; columns times their row's score unless row_scores is None."""
    real_R = plan.row_to_slot_R[: len(x_RC)] >= 0
    if rows is not None:
        put_rows(rows, x_RC, real_R, format, first)
    v_RC = x_RC if row_scores is None else row_scores[:, None] * x_RC.float()
    put_columns(columns, v_RC, real_R, format, first)


def dispatch_quantize(
    plan,
    *,
    tokens,
    half,
    scores,
    format,
    rows,
    columns,
    scaled_columns,
    row_scores_R,
    rows_stop_1,
    columns_stop_1,
    num_sms=None,
):
    """Pull the rows routed to this rank as dispatch does, straight into quantised rows and, or, columns.

    Columns are blocks of 32 rows of fp32(x), with scaled_columns of score * x in FP32. Each output has its own stop
    word; scores are written unless all outputs are stopped.
    """
    check_producer("dispatch_quantize", format, rows, columns, tokens.own.shape[2])
    rows, columns = (b if _runs(b, stop) else None for b, stop in ((rows, rows_stop_1), (columns, columns_stop_1)))
    if rows is None and columns is None:
        return
    x_RD, row_scores = _pull(plan, tokens=tokens, half=half, scores=scores, row_scores_R=row_scores_R)
    _quantize(plan, x_RD, row_scores if scaled_columns else None, 0, format, rows, columns)


def quantize_received(
    plan,
    *,
    staged_XS,
    staged_start_1,
    window,
    format,
    rows,
    columns,
    scaled_columns,
    row_scores_R,
    rows_stop_1,
    columns_stop_1,
    num_sms=None,
):
    """What dispatch_quantize makes of columns first .. first + size, from rows that dispatch has put at staged_start_1.

    window: (first, size); the first `size` columns of staged_XS are those of the window. row_scores_R is read.
    """
    given = columns if rows is None else rows
    width = 0 if given is None else given.values.shape[1] * format.values_per_byte
    check_producer("quantize_received", format, rows, columns, width)
    check_staged("quantize_received", staged_XS, window, width)
    rows, columns = (b if _runs(b, stop) else None for b, stop in ((rows, rows_stop_1), (columns, columns_stop_1)))
    first, size = window
    start, real = int(staged_start_1[0]), plan.row_to_slot_R[: int(plan.row_start_P[-1])] >= 0
    x_RC = torch.where(real[:, None], staged_XS[start : start + len(real), :size], 0.0)
    row_scores = torch.where(real, row_scores_R[: len(real)], 0.0) if scaled_columns else None
    _quantize(plan, x_RC, row_scores, first, format, rows, columns)


def dispatch_packed(plan, *, tokens, scores, dedup, format, rows, row_scores_R, stop_1, num_sms=None):
    """Pull wire rows, which pack_rows made, into a bundle of rows; the same bits in both schemes.

    A row whose score is -0.0 comes as zeros, its scales and outer scale too.
    """
    width = check_wire_rows("dispatch_packed", tokens.own, rows, format)
    if not _runs(rows, stop_1):
        return
    packed, _ = _pull(plan, tokens=tokens, half=0, scores=scores, row_scores_R=row_scores_R)
    if len(packed):
        real_R = plan.row_to_slot_R[: len(packed)] >= 0
        put_quantized(rows, unpack_rows(packed, format, width), real_R, format)

"""The oracle of SwiGLU and its backward: rounded to BF16, or quantised from FP32 as it is."""

import torch
from torch import Tensor

from .quantized import Bundle, check_swiglu_backward_quantize, check_swiglu_quantize
from .reference_memory import put_columns, put_rows, real_rows, rows_of, stopped
from .shapes import Activation


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
    if not stopped(stop_1):
        rows_of(h2_XF, h2_start_1, row_start_P).copy_(activate(rows_of(h1_X2F, h1_start_1, row_start_P), activation))


def count_clips(h1_X2F, h1_start_1, row_start_P, row_to_slot_R, counts_3, *, limit, stop_1, num_sms=None) -> None:
    """Add [gates above the limit, ups beyond it on either side, all gates] of the real rows to counts_3 (int64).

    Strictly: what is at the limit, or NaN, is not counted. Compared in FP32, as the raw halves of h1 are.
    """
    if stopped(stop_1):
        return
    real_R = row_to_slot_R[: int(row_start_P[-1])] >= 0
    gate, up = rows_of(h1_X2F, h1_start_1, row_start_P)[real_R].float().chunk(2, dim=1)
    counts_3 += torch.stack(
        [(gate > limit).sum(), (up.abs() > limit).sum(), torch.full((), gate.numel(), device=gate.device)]
    )


def swiglu_backward(
    h1_X2F, h1_start_1, g2_XF, g2_start_1, row_scores_R, score_grads_R, row_start_P, *, activation, stop_1, num_sms=None
):
    """From g2 = dy @ W2 (unscaled): the score gradient <g2, h2>, grad_h1 over h1, score * h2 over g2, all in place.

    The score gradient needs no output of W2, so that neither it nor h2 is saved (the idea is SonicMoE's).
    """
    if stopped(stop_1):
        return
    h1, g2 = rows_of(h1_X2F, h1_start_1, row_start_P), rows_of(g2_XF, g2_start_1, row_start_P)
    score = row_scores_R[: len(h1), None]
    h2 = activate(h1, activation).to(torch.bfloat16).float()
    grad_h2 = g2.float()
    score_grads_R[: len(h1)] = (grad_h2 * h2).sum(dim=1)
    h1.copy_(activate_backward(h1, score * grad_h2, activation))
    g2.copy_((score * h2).to(torch.bfloat16))


def swiglu_quantize(
    h1_X2F,
    h1_start_1,
    rows: Bundle,
    row_start_P,
    num_rows_L,
    *,
    format,
    activation,
    fast_math=False,
    stop_1,
    num_sms=None,
) -> None:
    """h2 = act(gate, up) in FP32, its rows quantised.

    Args:    h1_X2F: bf16 [gate | up]; the call's rows begin at h1_start_1.  rows: of F values, MXFP8, MXFP4 or NVFP4.
             row_start_P: int32 [L + 1], num_rows_L: int32 [L]; expert e has num_rows_L[e] rows from row_start_P[e], a
             multiple of 128, then padding: whatever h1 holds there is not read, and nothing of it is written.
             fast_math: allows the approximate division in the sigmoid; the oracle divides exactly.
             stop_1: nothing is touched when it is not 0.
    """
    check_swiglu_quantize("swiglu_quantize", h1_X2F, format, rows, row_start_P, num_rows_L)
    if stopped(stop_1):
        return
    h1 = rows_of(h1_X2F, h1_start_1, row_start_P)
    put_rows(rows, activate(h1, activation), real_rows(row_start_P, num_rows_L), format)


def swiglu_backward_quantize(
    h1_X2F,
    h1_start_1,
    g2_XF,
    g2_start_1,
    row_scores_R,
    score_grads_R,
    row_start_P,
    row_to_slot_R,
    *,
    format,
    g1_rows: Bundle,
    g1_columns: Bundle | None,
    h2_columns: Bundle | None,
    activation,
    fast_math=False,
    stop_1,
    num_sms=None,
) -> None:
    """From g2 = dy @ W2 (unscaled), all in FP32: the score gradient <g2, h2>, and quantised g1 = [d_gate | d_up] of
    d_h2 = score * g2 by rows and by columns, and h2 (unscaled) by columns.

    Args:    as in swiglu_quantize; format: MXFP8.  row_start_P: the last word counts the rows with padding.
             row_to_slot_R: int32, -1 marks rows of padding.  row_scores_R, score_grads_R: fp32; nothing is written for
             rows of padding, which in columns are zeros.  g1_columns, h2_columns: None where they are not wanted.
    Raises:  ValueError for dtypes and layouts, and for formats with two values in a byte.
    """
    bundles = (g1_rows, g1_columns, h2_columns)
    check_swiglu_backward_quantize("swiglu_backward_quantize", h1_X2F, g2_XF, format, *bundles)
    if stopped(stop_1):
        return
    R = int(row_start_P[-1])
    h1, g2 = rows_of(h1_X2F, h1_start_1, row_start_P), rows_of(g2_XF, g2_start_1, row_start_P).float()
    real_R = row_to_slot_R[:R] >= 0
    h2 = activate(h1, activation)
    score_grads_R[:R] = torch.where(real_R, (g2 * h2).sum(dim=1), score_grads_R[:R])
    g1 = activate_backward(h1, row_scores_R[:R, None] * g2, activation)
    put_rows(g1_rows, g1, real_R, format)
    put_columns(g1_columns, g1, real_R, format)
    put_columns(h2_columns, h2, real_R, format)

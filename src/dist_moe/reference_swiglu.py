"""The oracle of SwiGLU fused with quantisation, in plain PyTorch: the FP32 formulas of reference, not rounded to BF16
before the quantisers of reference_formats."""

import torch
from torch import Tensor

from .formats import SCALE_ATOM, Format
from .quantized import Bundle, Quantized, check_swiglu_backward_quantize, check_swiglu_quantize
from .reference import activate, activate_backward
from .reference_formats import from_blocked, quantize_columns, quantize_rows, to_blocked
from .shapes import align


def _call_rows(tensor: Tensor, start_1: Tensor, num_rows: int) -> Tensor:
    start = int(start_1[0])
    return tensor[start : start + num_rows]


def _scale_matrix(bundle: Bundle, rows: int, cols: int) -> Tensor:
    """The bytes of a call's blocked scales, whose padded shape is [rows, cols]."""
    return _call_rows(bundle.scales.view(torch.uint8), bundle.scales_start_1, rows * cols).view(rows, cols)


def put_rows(bundle: Bundle, v_RC: Tensor, real_R: Tensor, format: Format) -> None:
    """Quantise the real rows into the bundle; those of padding stay as they are, in values and in scales."""
    (R, C), real = v_RC.shape, real_R.nonzero().flatten()
    if len(real) == 0:
        return
    found: Quantized = quantize_rows(v_RC[real], format=format)
    _call_rows(bundle.values.view(torch.uint8), bundle.start_1, R)[real] = found.values.view(torch.uint8)
    S = C // format.block
    matrix = _scale_matrix(bundle, R, align(S, SCALE_ATOM[1]))
    natural = from_blocked(matrix, *matrix.shape)[0].clone()
    natural[real] = 0
    natural[real, :S] = found.scales.view(torch.uint8)
    matrix.copy_(to_blocked(natural[None]))
    if format.two_level:
        _call_rows(bundle.outer_inv, bundle.outer_inv_start_1, R)[real] = found.outer_inv_R


def put_columns(bundle: Bundle | None, v_RC: Tensor, real_R: Tensor, format: Format) -> None:
    """Quantise columns into the bundle; rows of padding are zeros, and so the rows may count as those of one expert."""
    R = len(v_RC)
    if bundle is None or R == 0:
        return
    ends = torch.tensor([0, R], dtype=torch.int32, device=v_RC.device)
    v = torch.where(real_R[:, None], v_RC, 0.0)
    found = quantize_columns(v, format=format, blocked=True, row_start_P=ends, num_rows_L=ends[1:])
    _call_rows(bundle.values.view(torch.uint8), bundle.start_1, R).copy_(found.values.view(torch.uint8))
    _scale_matrix(bundle, *found.scales.shape).copy_(found.scales.view(torch.uint8))


def swiglu_quantize(
    h1_X2F,
    h1_start_1,
    rows: Bundle,
    row_start_P,
    row_to_slot_R,
    *,
    format,
    activation,
    fast_math=False,
    stop_1,
    num_sms=None,
) -> None:
    """h2 = act(gate, up) in FP32, its rows quantised.

    Args:    h1_X2F: bf16 [gate | up]; the call's rows begin at h1_start_1.  rows: of F values, MXFP8, MXFP4 or NVFP4.
             row_start_P: int32 [L + 1], the last word counts the rows with padding.  row_to_slot_R: int32, -1 marks
             rows of padding: whatever h1 holds there is not read, and nothing of them is written.
             fast_math: allows the approximate division in the sigmoid; the oracle divides exactly.
             stop_1: nothing is touched when it is not 0.
    """
    check_swiglu_quantize("swiglu_quantize", h1_X2F, format, rows)
    if int(stop_1[0]) != 0:
        return
    R = int(row_start_P[-1])
    h1 = _call_rows(h1_X2F, h1_start_1, R)
    put_rows(rows, activate(h1, activation), row_to_slot_R[:R] >= 0, format)


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

    Args:    as in swiglu_quantize; format: MXFP8.  row_scores_R, score_grads_R: fp32; nothing is written for rows of
             padding, which in columns are zeros.  g1_columns, h2_columns: None where they are not wanted.
    Raises:  ValueError for dtypes and layouts, and for formats with two values in a byte.
    """
    bundles = (g1_rows, g1_columns, h2_columns)
    check_swiglu_backward_quantize("swiglu_backward_quantize", h1_X2F, g2_XF, format, *bundles)
    if int(stop_1[0]) != 0:
        return
    R = int(row_start_P[-1])
    h1, g2 = _call_rows(h1_X2F, h1_start_1, R), _call_rows(g2_XF, g2_start_1, R).float()
    real_R = row_to_slot_R[:R] >= 0
    h2 = activate(h1, activation)
    score_grads_R[:R] = torch.where(real_R, (g2 * h2).sum(dim=1), score_grads_R[:R])
    g1 = activate_backward(h1, row_scores_R[:R, None] * g2, activation)
    put_rows(g1_rows, g1, real_R, format)
    put_columns(g1_columns, g1, real_R, format)
    put_columns(h2_columns, h2, real_R, format)

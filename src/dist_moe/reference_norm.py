"""The oracle of RMSNorm behind the experts, with the weighted sum of its rows, and of its backward."""

import torch
from torch import Tensor

from .norm import Norm
from .reference_memory import stopped


def _gain(norm: Norm) -> Tensor:
    return (norm.weight_D.float() + norm.gain_center).to(torch.bfloat16).float()


def _mean(total: Tensor, count: int) -> Tensor:
    """Divided, which torch on a GPU does by a tensor alone: by a number it multiplies with the inverse."""
    return total / torch.full((), count, dtype=torch.float32, device=total.device)


def _normalised(rows_TKD: Tensor, norm: Norm, rstd_TK: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """FP32: the rows with their gain, rounded to BF16; 1 / rms, unless given; their product."""
    h = rows_TKD.float()
    if norm.weight_D is not None:
        h = (h * _gain(norm)).to(torch.bfloat16).float()
    if rstd_TK is None:
        squares = h.double() if norm.use_kahan else h
        total = squares.square().sum(dim=2).float()
        mean = _mean(total, rows_TKD.shape[2]) + norm.eps
        rstd_TK = 1.0 / mean.double().sqrt().float()  # rounded once, which torch.sqrt of FP32 on a CPU is not
    return h, rstd_TK, h * rstd_TK[..., None]


def rmsnorm_reduce(out_TD, *, rows_TKD, ids_TK, scores_TK, norm, kept_rows_TKD, rstd_TK, stop_1, num_sms=None) -> None:
    """out[t] = bf16(sum over k of score * n), n = norm_dtype(h / rms(h)) of a row, h = bf16(row * gain) with a weight.

    Sums run in slot order in FP32; that of the squares is compensated with use_kahan. Slots without an expert are not
    read. kept_rows_TKD (a copy of the rows) and rstd_TK (1 / rms, FP32) are written unless they are None.
    """
    if stopped(stop_1):
        return
    T, K = len(out_TD), rows_TKD.shape[1]
    used_TK1 = (ids_TK[:T] >= 0)[..., None]
    rows = torch.where(used_TK1, rows_TKD[:T], 0.0)
    _, rstd, hat = _normalised(rows, norm)
    n = hat.to(norm.dtype).float()
    acc = torch.zeros(out_TD.shape, dtype=torch.float32, device=out_TD.device)
    for k in range(K):
        acc += scores_TK[:T, k, None] * n[:, k]
    out_TD.copy_(acc.to(out_TD.dtype))
    if kept_rows_TKD is not None:
        kept_rows_TKD.copy_(torch.where(used_TK1, rows, kept_rows_TKD))
    if rstd_TK is not None:
        rstd_TK.copy_(rstd)


def rmsnorm_reduce_backward(
    grad_out_TD,
    *,
    rows_TKD,
    ids_TK,
    scores_TK,
    norm,
    rstd_TK,
    grad_rows_TKD,
    grad_scores_TK,
    grad_weight_D,
    stop_1,
    num_sms=None,
) -> None:
    """Gradients of the rows (BF16), of the scores (FP32) and, unless None, of the weight, summed over all routes.

    With xh = h / rms(h) and u = norm_dtype(score * gy): grad_score = <gy, n>, grad_h = (u - xh * <xh, u> / D) / rms(h),
    grad_row = bf16(grad_h * gain), grad_weight = sum of grad_h * row. rstd_TK: None makes it again. Of slots without
    an expert nothing is read or written.
    """
    if stopped(stop_1):
        return
    (T, D), K = grad_out_TD.shape, rows_TKD.shape[1]
    used_TK = ids_TK[:T] >= 0
    rows = torch.where(used_TK[..., None], rows_TKD[:T], 0.0)
    _, rstd, hat = _normalised(rows, norm, None if rstd_TK is None else rstd_TK[:T])
    gy_T1D = grad_out_TD.float()[:, None]
    grad_scores = (gy_T1D * hat.to(norm.dtype).float()).sum(dim=2)
    u = (scores_TK[:T, :, None] * gy_T1D).to(norm.dtype).float()
    grad_h = (u - hat * _mean((hat * u).sum(dim=2, keepdim=True), D)) * rstd[..., None]
    grad_rows = grad_h if norm.weight_D is None else grad_h * _gain(norm)
    grad_rows_TKD[:T] = torch.where(used_TK[..., None], grad_rows.to(grad_rows_TKD.dtype), grad_rows_TKD[:T])
    grad_scores_TK[:T] = torch.where(used_TK, grad_scores, grad_scores_TK[:T])
    if grad_weight_D is not None:
        terms = torch.where(used_TK[..., None], grad_h * rows.float(), 0.0)
        grad_weight_D.copy_(terms.view(T * K, D).sum(dim=0).to(grad_weight_D.dtype))

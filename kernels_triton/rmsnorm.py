"""rmsnorm_reduce: RMSNorm of every route's row, fused with the weighted sum at the token's owner, and its backward.

    forward   h = row, or bf16(row * g) with g = bf16(weight + gain_center);  rstd = 1 / sqrt(<h, h> / D + eps)
              xh = h * rstd,  n = norm_dtype(xh),  out[t] = bf16(sum over k of score * n)
    backward  grad_score = <gy, n>,  u = norm_dtype(score * gy),  grad_h = (u - xh * <xh, u> / D) * rstd
              grad_row = bf16(grad_h * g),  grad_weight = sum over all routes of grad_h * row

Grid: persistent, a token at a time, whole rows in registers: forward reads each row once. Forward stands where reduce
does, after the wait on COMBINED, on what combine pushed route by route; backward writes the gradients of the rows into
this rank's `outputs`, before the signal of PUBLISHED. Both touch this rank's memory only. Products are rounded before
they are added (enable_fp_fusion=False), sums over k run in slot order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dist_moe.norm import MAX_NORM_DIM
from dist_moe.shapes import next_power_of_2

from ._device import begin, delay, is_interpreting, num_programs, reciprocal
from ._launch import launched


@dataclass(frozen=True)
class Config:
    num_warps: int
    programs_per_sm: int

    @property
    def options(self) -> dict:
        registers = min(65536 // (32 * self.num_warps * self.programs_per_sm) // 8 * 8, 255)
        return {"num_warps": self.num_warps, "enable_fp_fusion": False, "maxnreg": registers}


def pick_config(D: int, backward: bool) -> Config:
    """Forward has 8 elements a thread, 16 bytes of them, and all registers of an SM in 32 warps; backward, which holds
    three times as much, has 16, in 16 warps. The widest rows have twice that."""
    most, elements = (16, 512) if backward else (32, 256)
    num_warps = min(max(next_power_of_2(D) // elements, 1), most)
    return Config(num_warps, min(most // num_warps, 16))


def grid_of(device: torch.device, config: Config, num_sms: int | None) -> tuple[int]:
    return (num_programs(device, num_sms) * (1 if is_interpreting() else config.programs_per_sm),)


@triton.jit
def _add_compensated(a, a_low, b, b_low):
    """Two sums with what they are short of: a + b exactly, as its rounded value and the rest."""
    total = a + b
    of_b = total - a
    rest = (a - (total - of_b)) + (b - of_b)
    return total, a_low + b_low + rest


@triton.jit
def _gain(weight_ptr, offs_d, mask_d, gain_center):
    weight = tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    return (weight + gain_center).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _with_gain(row, weight_ptr, offs_d, mask_d, gain_center):
    """What is normalised, FP32. The gain is loaded each time: held, it would take the registers of a row."""
    if weight_ptr is not None:
        return (row * _gain(weight_ptr, offs_d, mask_d, gain_center)).to(tl.bfloat16).to(tl.float32)
    return row


@triton.jit
def _rstd(h, eps, D: tl.constexpr, KAHAN: tl.constexpr):
    squares = h * h
    if KAHAN:
        total, rest = tl.reduce((squares, tl.zeros_like(squares)), 0, _add_compensated)
        total += rest
    else:
        total = tl.sum(squares, axis=0)
    return reciprocal(tl.sqrt_rn(tl.div_rn(total, tl.full((), D, tl.float32)) + eps))


@triton.jit
def _round(v, BF16: tl.constexpr):
    return v.to(tl.bfloat16).to(tl.float32) if BF16 else v


@launched
@triton.jit(do_not_specialize=["T"])
def _rmsnorm_reduce(
    out_ptr,  # [T, D] bf16
    rows_ptr,  # [T_max, K, D] bf16
    ids_ptr,  # [T_max, K] int16
    scores_ptr,  # [T_max, K] fp32
    weight_ptr,  # [D] bf16, or None
    kept_ptr,  # [T, K, D] bf16, or None
    rstd_ptr,  # [T, K] fp32, or None
    stop_ptr,  # int64
    T,
    eps,
    gain_center,
    K: tl.constexpr,
    D: tl.constexpr,
    NORM_BF16: tl.constexpr,
    KAHAN: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Tokens one by one: program p takes the tokens p, p + programs, ...

    Example (D = 2, eps 0, K = 2): rows [3, 3] and [0, -8] have rstd 1/3 and 1/sqrt(32); scores 2 and 0 give [2, 2].
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    for token in range(tl.program_id(0), T, tl.num_programs(0)):
        delay(token)
        t = tl.cast(token, tl.int64)
        acc = tl.zeros([BLOCK_D], dtype=tl.float32)
        for k in range(K):
            used = tl.load(ids_ptr + t * K + k) >= 0
            score = tl.load(scores_ptr + t * K + k)
            row_mask = offs_d < tl.where(used, D, 0)
            value = tl.load(rows_ptr + (t * K + k) * D + offs_d, mask=row_mask, other=0.0)
            h = _with_gain(value.to(tl.float32), weight_ptr, offs_d, mask_d, gain_center)
            rstd = _rstd(h, eps, D, KAHAN)
            acc += score * _round(h * rstd, NORM_BF16)  # without an expert 0 * 0
            if kept_ptr is not None:
                tl.store(kept_ptr + (t * K + k) * D + offs_d, value, mask=row_mask)
            if rstd_ptr is not None:
                tl.store(rstd_ptr + t * K + k, rstd)
        tl.store(out_ptr + t * D + offs_d, acc.to(tl.bfloat16), mask=mask_d)


@launched
@triton.jit(do_not_specialize=["T"])
def _rmsnorm_reduce_backward(
    grad_out_ptr,  # [T, D] bf16, rows grad_out_stride apart
    rows_ptr,  # [T, K, D] bf16
    ids_ptr,  # [T_max, K] int16
    scores_ptr,  # [T_max, K] fp32
    weight_ptr,  # [D] bf16, or None
    rstd_ptr,  # [T, K] fp32, or None
    grad_rows_ptr,  # [T_max, K, D] bf16
    grad_scores_ptr,  # [T_max, K] fp32
    partials_ptr,  # [programs, D] fp32, or None
    stop_ptr,  # int64
    T,
    grad_out_stride,
    eps,
    gain_center,
    K: tl.constexpr,
    D: tl.constexpr,
    NORM_BF16: tl.constexpr,
    KAHAN: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Tokens one by one: program p takes the tokens p, p + programs, ... and leaves its part of grad_weight in row p.

    Example (D = 2, eps 0, K = 1): row [3, 3] with score 2 and gy [6, 0] has grad_score 6, u [12, 0], <xh, u> / D = 6
    and grad_row [2, -2].
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    grad_gain = tl.zeros([BLOCK_D], dtype=tl.float32)
    for token in range(tl.program_id(0), T, tl.num_programs(0)):
        delay(token)
        t = tl.cast(token, tl.int64)
        gy_ptrs = grad_out_ptr + t * grad_out_stride + offs_d
        for k in range(K):
            used = tl.load(ids_ptr + t * K + k) >= 0
            score = tl.load(scores_ptr + t * K + k)
            row_mask = offs_d < tl.where(used, D, 0)
            row_ptrs = rows_ptr + (t * K + k) * D + offs_d
            row = tl.load(row_ptrs, mask=row_mask, other=0.0).to(tl.float32)
            h = _with_gain(row, weight_ptr, offs_d, mask_d, gain_center)
            if rstd_ptr is None:
                rstd = _rstd(h, eps, D, KAHAN)
            else:
                rstd = tl.load(rstd_ptr + t * K + k, mask=used, other=0.0)
            gy = tl.load(gy_ptrs, mask=mask_d, other=0.0).to(tl.float32)
            hat = h * rstd
            tl.store(grad_scores_ptr + t * K + k, tl.sum(gy * _round(hat, NORM_BF16), axis=0), mask=used)
            mean = tl.sum(hat * _round(score * gy, NORM_BF16), axis=0)
            mean = tl.div_rn(mean, tl.full((), D, tl.float32))
            # Once more, out of the cache: in registers all this would not last through the sums.
            tl.debug_barrier()
            row = tl.load(row_ptrs, mask=row_mask, other=0.0).to(tl.float32)
            gy = tl.load(gy_ptrs, mask=mask_d, other=0.0).to(tl.float32)
            hat = _with_gain(row, weight_ptr, offs_d, mask_d, gain_center) * rstd
            grad_h = (_round(score * gy, NORM_BF16) - hat * mean) * rstd
            if partials_ptr is not None:
                grad_gain += grad_h * row  # of a slot without an expert the row is zeros
            if weight_ptr is not None:
                grad_h *= _gain(weight_ptr, offs_d, mask_d, gain_center)
            tl.store(grad_rows_ptr + (t * K + k) * D + offs_d, grad_h.to(tl.bfloat16), mask=row_mask)
    if partials_ptr is not None:
        tl.store(partials_ptr + tl.program_id(0) * D + offs_d, grad_gain, mask=mask_d)


def _constants(rows_TKD: torch.Tensor, norm) -> dict:
    _, K, D = rows_TKD.shape
    assert D <= MAX_NORM_DIM and rows_TKD.is_contiguous(), (rows_TKD.shape, rows_TKD.stride())
    bf16 = norm.dtype is torch.bfloat16
    return {"K": K, "D": D, "NORM_BF16": bf16, "KAHAN": norm.use_kahan, "BLOCK_D": next_power_of_2(D)}


def rmsnorm_reduce(out_TD, *, rows_TKD, ids_TK, scores_TK, norm, kept_rows_TKD, rstd_TK, stop_1, num_sms=None) -> None:
    """Normalise, weight and add the rows of each own token; tokens without experts become exactly 0.

    Args:    out_TD: bf16, contiguous, written.  rows_TKD: bf16 [T_max, K, D], contiguous.  ids_TK, scores_TK: resolved,
             int16 and fp32; a slot without an expert has a score of 0.  norm: a Norm.  kept_rows_TKD, rstd_TK: what
             backward will want, written; or None.  stop_1: nothing is touched when it is not 0.
    Order:   after the wait on COMBINED; local memory only.
    Source:  reference_norm.rmsnorm_reduce, within a unit in the last place: the squares are added in another order.
    """
    T = len(out_TD)
    if T == 0:
        return
    config = pick_config(out_TD.shape[1], False)
    _rmsnorm_reduce[grid_of(out_TD.device, config, num_sms)](
        out_TD, rows_TKD, ids_TK, scores_TK, norm.weight_D, kept_rows_TKD, rstd_TK, stop_1, T, norm.eps,
        norm.gain_center, **_constants(rows_TKD, norm), **config.options,
    )  # fmt: skip


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
    """The gradients of rows and scores, and of the weight unless None; of slots without an expert nothing is written.

    Args:    grad_out_TD: bf16, unit inner stride.  rows_TKD, rstd_TK: as rmsnorm_reduce kept them; rstd_TK None makes
             it again, with the same bits.  grad_rows_TKD: bf16.  grad_scores_TK: fp32.  grad_weight_D: any float dtype;
             a sum over programs, then over their parts, so the number of programs is in its last bits.
    Order:   before the signal of PUBLISHED; local memory only.
    Source:  reference_norm.rmsnorm_reduce_backward.
    """
    T, D = grad_out_TD.shape
    if T == 0:
        if grad_weight_D is not None:
            grad_weight_D.zero_()
        return
    config = pick_config(D, True)
    grid = grid_of(grad_out_TD.device, config, num_sms)
    partials_PD = None
    if grad_weight_D is not None:
        partials_PD = torch.empty(*grid, D, dtype=torch.float32, device=grad_out_TD.device)
    _rmsnorm_reduce_backward[grid](
        grad_out_TD, rows_TKD, ids_TK, scores_TK, norm.weight_D, rstd_TK, grad_rows_TKD, grad_scores_TK, partials_PD,
        stop_1, T, grad_out_TD.stride(0), norm.eps, norm.gain_center, **_constants(rows_TKD, norm), **config.options,
    )  # fmt: skip
    if grad_weight_D is not None:
        grad_weight_D.copy_(partials_PD.sum(dim=0))

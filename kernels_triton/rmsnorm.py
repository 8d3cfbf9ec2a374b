"""rmsnorm_reduce: RMSNorm of every route's row, fused with the weighted sum at the token's owner, and its backward.

    forward   h = row, or bf16(row * g) with g = bf16(weight + gain_center);  rstd = 1 / sqrt(<h, h> / D + eps)
              xh = h * rstd,  n = norm_dtype(xh),  out[t] = bf16(sum over k of score * n)
    backward  grad_score = <gy, n>,  u = norm_dtype(score * gy),  grad_h = (u - xh * <xh, u> / D) * rstd
              grad_row = bf16(grad_h * g),  grad_weight = sum over all routes of grad_h * row

Grid: persistent, a row at a time, in registers by chunks of 16 bytes a thread. Forward reads each row once, the next
ones on their way into shared memory while one is normalised: its loop over slots is pipelined. Forward stands where
reduce does, after the wait on COMBINED, on what combine pushed route by route; backward writes the gradients of the
rows into this rank's `outputs`, before the signal of PUBLISHED. Both touch this rank's memory only. Products are
rounded before they are added (enable_fp_fusion=False), sums over k run in slot order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dist_moe.norm import MAX_NORM_DIM
from dist_moe.shapes import cdiv, next_power_of_2

from ._device import begin, delay, is_interpreting, num_programs, reciprocal, through_bf16
from ._launch import launched


@dataclass(frozen=True)
class Config:
    num_warps: int
    programs_per_sm: int
    chunk: int  # columns that the threads take at once
    num_stages: int | None = None  # forward: one row more than are loaded ahead

    @property
    def options(self) -> dict:
        registers = min(65536 // (32 * self.num_warps * self.programs_per_sm) // 8 * 8, 255)
        return {"num_warps": self.num_warps, "enable_fp_fusion": False, "maxnreg": registers}

    @property
    def constants(self) -> dict:
        return {"CHUNK": self.chunk} | ({} if self.num_stages is None else {"STAGES": self.num_stages})


# What a benchmark chooses: elements of a row in a thread, warps of an SM that registers for so many leave, stages.
ELEMENTS = 32
FORWARD_WARPS, BACKWARD_WARPS = 20, 16
NUM_STAGES = 4
SHARED_BYTES = 227 * 1024  # of an SM


def pick_config(D: int, backward: bool, weight: bool = False) -> Config:
    """Chunks and warps are of D alone: sums along a row run in the same order in forward and backward."""
    num_warps = max(next_power_of_2(D) // (32 * ELEMENTS), 1)
    chunk = min(256 * num_warps, next_power_of_2(D))
    if backward:
        return Config(num_warps, min(max(BACKWARD_WARPS // num_warps, 1), 16), chunk)
    ring_bytes = (NUM_STAGES - 1) * cdiv(D, chunk) * 2 * chunk * (2 if weight else 1)  # the gain comes with each row
    programs = min(FORWARD_WARPS // num_warps, SHARED_BYTES // (ring_bytes + 2048), 16)
    return Config(num_warps, max(programs, 1), chunk, NUM_STAGES)


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
def _own_tokens(T):
    """First and end of this program's tokens: neighbours, so that their ids and scores come in few lines."""
    tokens = tl.cdiv(T, tl.num_programs(0))
    first = tl.minimum(tl.program_id(0) * tokens, T)
    return first, tl.minimum(first + tokens, T)


@triton.jit
def _zeros(D: tl.constexpr, CHUNK: tl.constexpr):
    chunks = ()
    for _ in tl.static_range(0, D, CHUNK):
        chunks += (tl.zeros([CHUNK], dtype=tl.float32),)
    return chunks


@triton.jit
def _load(row_ptr, used, D: tl.constexpr, CHUNK: tl.constexpr):
    """The chunks of a row; zeros of one that is not used."""
    chunks = ()
    for d in tl.static_range(0, D, CHUNK):
        offs_d = d + tl.arange(0, CHUNK)
        chunks += (tl.load(row_ptr + offs_d, mask=offs_d < tl.where(used, D, 0), other=0.0),)
    return chunks


@triton.jit
def _store(row_ptr, chunks, used, D: tl.constexpr, CHUNK: tl.constexpr):
    for c in tl.static_range(len(chunks)):
        offs_d = c * CHUNK + tl.arange(0, CHUNK)
        tl.store(row_ptr + offs_d, chunks[c].to(tl.bfloat16), mask=offs_d < tl.where(used, D, 0))


@triton.jit
def _gain(weight_ptr, c: tl.constexpr, gain_center, D: tl.constexpr, CHUNK: tl.constexpr):
    offs_d = c * CHUNK + tl.arange(0, CHUNK)
    weight = tl.load(weight_ptr + offs_d, mask=offs_d < D, other=0.0)
    return through_bf16(weight.to(tl.float32) + gain_center)


@triton.jit
def _with_gain(row, weight_ptr, gain_center, D: tl.constexpr, CHUNK: tl.constexpr):
    """The chunks of what is normalised, FP32. The gain is loaded each time: held, it would take a row's registers."""
    h = ()
    for c in tl.static_range(len(row)):
        if weight_ptr is None:
            h += (row[c].to(tl.float32),)
        else:
            h += (through_bf16(row[c].to(tl.float32) * _gain(weight_ptr, c, gain_center, D, CHUNK)),)
    return h


@triton.jit
def _rstd(h, eps, D: tl.constexpr, KAHAN: tl.constexpr):
    """1 / rms. Squares are added chunk to chunk, then along a chunk: the same bits in forward and backward, whose
    chunks lie in the same threads."""
    total = h[0] * h[0]
    rest = tl.zeros_like(total)
    for c in tl.static_range(1, len(h)):
        if KAHAN:
            total, rest = _add_compensated(total, rest, h[c] * h[c], 0.0)
        else:
            total += h[c] * h[c]
    if KAHAN:
        total, rest = tl.reduce((total, rest), 0, _add_compensated)
        total += rest
    else:
        total = tl.sum(total, axis=0)
    return reciprocal(tl.sqrt_rn(tl.div_rn(total, tl.full((), D, tl.float32)) + eps))


@triton.jit
def _round(v, BF16: tl.constexpr):
    return through_bf16(v) if BF16 else v


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
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,  # of the loop over slots
):
    """Slots of a program's tokens one by one, across tokens, so that the pipeline stays filled.

    Example (D = 2, eps 0, K = 2): rows [3, 3] and [0, -8] have rstd 1/3 and 1/sqrt(32); scores 2 and 0 give [2, 2].
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    first, end = _own_tokens(T)
    first = tl.cast(first, tl.int64)
    acc = _zeros(D, CHUNK)
    for i in tl.range(0, (end - first).to(tl.int32) * K, num_stages=STAGES):
        slot = first * K + i
        used = tl.load(ids_ptr + slot) >= 0
        score = tl.load(scores_ptr + slot)
        row = _load(rows_ptr + slot * D, used, D, CHUNK)
        if kept_ptr is not None:
            _store(kept_ptr + slot * D, row, used, D, CHUNK)
        h = _with_gain(row, weight_ptr, gain_center, D, CHUNK)
        rstd = _rstd(h, eps, D, KAHAN)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + slot, rstd)
        sums = ()
        for c in tl.static_range(len(h)):
            sums += (acc[c] + score * _round(h[c] * rstd, NORM_BF16),)  # without an expert 0 * 0
        acc = sums
        if i % K == K - 1:
            delay(i)
            _store(out_ptr + (first + i // K) * D, acc, True, D, CHUNK)
            acc = _zeros(D, CHUNK)


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
    CHUNK: tl.constexpr,
):
    """Tokens one by one, neighbours in a program; program p leaves its part of grad_weight in row p.

    Example (D = 2, eps 0, K = 1): row [3, 3] with score 2 and gy [6, 0] has grad_score 6, u [12, 0], <xh, u> / D = 6
    and grad_row [2, -2].
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    grad_gain = _zeros(D, CHUNK)
    first, end = _own_tokens(T)
    for token in range(first, end):
        delay(token)
        t = tl.cast(token, tl.int64)
        gy_ptr = grad_out_ptr + t * grad_out_stride
        for k in range(K):
            slot = t * K + k
            used = tl.load(ids_ptr + slot) >= 0
            score = tl.load(scores_ptr + slot)
            row = _load(rows_ptr + slot * D, used, D, CHUNK)
            gy = _load(gy_ptr, True, D, CHUNK)
            h = _with_gain(row, weight_ptr, gain_center, D, CHUNK)
            if rstd_ptr is None:
                rstd = _rstd(h, eps, D, KAHAN)
            else:
                rstd = tl.load(rstd_ptr + slot, mask=used, other=0.0)
            score_terms = tl.zeros([CHUNK], dtype=tl.float32)
            mean_terms = tl.zeros([CHUNK], dtype=tl.float32)
            for c in tl.static_range(len(h)):
                gy_c = gy[c].to(tl.float32)
                score_terms += gy_c * _round(h[c] * rstd, NORM_BF16)
                mean_terms += h[c] * rstd * _round(score * gy_c, NORM_BF16)
            grad_score, mean = tl.split(tl.sum(tl.join(score_terms, mean_terms), axis=0))  # in one exchange of warps
            tl.store(grad_scores_ptr + slot, grad_score, mask=used)
            mean = tl.div_rn(mean, tl.full((), D, tl.float32))
            # Once more, out of the cache: in registers all this would not last through the sums.
            tl.debug_barrier()
            row = _load(rows_ptr + slot * D, used, D, CHUNK)
            gy = _load(gy_ptr, True, D, CHUNK)
            h = _with_gain(row, weight_ptr, gain_center, D, CHUNK)
            grad_row = ()
            sums = ()
            for c in tl.static_range(len(h)):
                u = _round(score * gy[c].to(tl.float32), NORM_BF16)
                grad_h = (u - h[c] * rstd * mean) * rstd
                if partials_ptr is not None:
                    sums += (grad_gain[c] + grad_h * row[c].to(tl.float32),)  # without an expert the row is zeros
                if weight_ptr is not None:
                    grad_h *= _gain(weight_ptr, c, gain_center, D, CHUNK)
                grad_row += (grad_h,)
            if partials_ptr is not None:
                grad_gain = sums
            _store(grad_rows_ptr + slot * D, grad_row, used, D, CHUNK)
    if partials_ptr is not None:
        for c in tl.static_range(len(grad_gain)):
            offs_d = c * CHUNK + tl.arange(0, CHUNK)
            tl.store(partials_ptr + tl.program_id(0) * D + offs_d, grad_gain[c], mask=offs_d < D)


def _constants(rows_TKD: torch.Tensor, norm, config: Config) -> dict:
    _, K, D = rows_TKD.shape
    assert D <= MAX_NORM_DIM and rows_TKD.is_contiguous(), (rows_TKD.shape, rows_TKD.stride())
    bf16 = norm.dtype is torch.bfloat16
    return {"K": K, "D": D, "NORM_BF16": bf16, "KAHAN": norm.use_kahan} | config.constants


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
    config = pick_config(out_TD.shape[1], False, norm.weight_D is not None)
    _rmsnorm_reduce[grid_of(out_TD.device, config, num_sms)](
        out_TD, rows_TKD, ids_TK, scores_TK, norm.weight_D, kept_rows_TKD, rstd_TK, stop_1, T, norm.eps,
        norm.gain_center, **_constants(rows_TKD, norm, config), **config.options,
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
    config = pick_config(D, True, norm.weight_D is not None)
    grid = grid_of(grad_out_TD.device, config, num_sms)
    partials_PD = None
    if grad_weight_D is not None:
        partials_PD = torch.empty(*grid, D, dtype=torch.float32, device=grad_out_TD.device)
    _rmsnorm_reduce_backward[grid](
        grad_out_TD, rows_TKD, ids_TK, scores_TK, norm.weight_D, rstd_TK, grad_rows_TKD, grad_scores_TK, partials_PD,
        stop_1, T, grad_out_TD.stride(0), norm.eps, norm.gain_center,
        **_constants(rows_TKD, norm, config), **config.options,
    )  # fmt: skip
    if grad_weight_D is not None:
        grad_weight_D.copy_(partials_PD.sum(dim=0))

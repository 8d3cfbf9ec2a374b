"""SwiGLU over the received rows, plain and clamped, and its backward in place. FP32 inside, each result rounded once.

    h1 = [gate | up],  sig(v) = 1 / (1 + exp(-v))
    plain    h2 = gate * sig(gate) * up
    clamped  h2 = g * sig(alpha * g) * (u + 1),  g = min(gate, limit),  u = clamp(up, -limit, limit)

Backward gets g2 = dy @ W2, not yet multiplied by the route's score, and leaves d_h1 over h1, score * h2 over g2, and
the score's gradient <g2, h2>. So neither h2 nor the output of W2 has to be kept.

Grid: persistent, one program an SM. Reads and writes local memory only; no barrier before or after it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import begin, delay, num_programs, reciprocal
from ._launch import launched


@dataclass(frozen=True)
class Config:
    block_r: int  # rows of a block
    block_f: int  # columns of a block, per half of h1
    num_warps: int

    @property
    def options(self) -> dict:
        """Of the compiler. Products are rounded before they are added, as in the oracle. The one program of an SM may
        use all registers: left alone, Triton 3.9 takes half of them and spills."""
        return {"num_warps": self.num_warps, "enable_fp_fusion": False, "maxnreg": 65536 // (32 * self.num_warps)}


# One for all shapes: both directions only move memory. A row of a block is 256 columns, 16 bytes a lane of one warp, so
# that its sum stays inside the warp. Forward has 32 KiB of reads in flight on an SM and backward 24 KiB; an H200's
# 4.3 TB/s of copying would be 16 KiB of reads on an SM in a microsecond. With 32 rows backward would spill.
CONFIGS = {
    "forward": Config(block_r=32, block_f=256, num_warps=16),
    "backward": Config(block_r=16, block_f=256, num_warps=16),
}


def pick_config(kind: str) -> Config:
    return CONFIGS[kind]


@triton.jit
def _sigmoid(v, FAST_MATH: tl.constexpr):
    below = 1.0 + tl.exp(-v)
    return tl.fdiv(1.0, below) if FAST_MATH else reciprocal(below)


@triton.jit
def gate_up(gate, up, alpha, limit, CLAMPED: tl.constexpr, FAST_MATH: tl.constexpr = False):
    """Clamped gate, the factor that multiplies it (up or up + 1), and sigmoid. Selects, as a minimum may drop a NaN.

    FAST_MATH: sigmoid by the approximate division.
    """
    if not CLAMPED:
        return gate, up, _sigmoid(gate, FAST_MATH)
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up + 1.0, _sigmoid(alpha * gate, FAST_MATH)


@triton.jit
def gate_up_grads(d_h2, raw_gate, raw_up, gate, up, sig, alpha, limit, CLAMPED: tl.constexpr):
    """FP32 gradients of gate and up, of which gate_up made gate, up and sig. At exactly a limit the gradient passes."""
    if CLAMPED:
        d_gate = d_h2 * up * (sig + alpha * gate * sig * (1.0 - sig))
        d_gate = tl.where(raw_gate > limit, 0.0, d_gate)
        d_up = tl.where(tl.abs(raw_up) > limit, 0.0, d_h2 * gate * sig)
    else:
        d_gate = d_h2 * up * sig * (1.0 + gate - gate * sig)
        d_up = d_h2 * gate * sig
    return d_gate, d_up


# Words of the place record are at odd and even words: no variant for each.
@launched
@triton.jit(do_not_specialize_on_alignment=["h1_start_ptr", "h2_start_ptr", "num_rows_ptr", "stop_ptr"])
def _swiglu_kernel(
    h1_ptr,  # [X, 2F] bf16
    h1_start_ptr,  # [1] i64
    h2_ptr,  # [X, F] bf16
    h2_start_ptr,  # [1] i64
    num_rows_ptr,  # [1] i32
    stop_ptr,  # [1] i64
    F,
    alpha,
    limit,
    CLAMPED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Program p takes blocks p, p + programs, ...; a block is BLOCK_R rows by BLOCK_F columns of h2.

    Example: gate 20, up 3 give 60, as sig(20) is 1 - 2e-9. Clamped with alpha 2 and limit 7 they give 7 * (3 + 1) = 28,
    and gate 20, up -9 give 7 * (-7 + 1) = -42.
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    h1_ptr += tl.load(h1_start_ptr) * 2 * F
    h2_ptr += tl.load(h2_start_ptr) * F
    num_rows = tl.load(num_rows_ptr)
    num_chunks = tl.cdiv(F, BLOCK_F)
    for block in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_R) * num_chunks, tl.num_programs(0)):
        delay(block)
        rows = block // num_chunks * BLOCK_R + tl.arange(0, BLOCK_R)
        cols = block % num_chunks * BLOCK_F + tl.arange(0, BLOCK_F)
        mask = (rows[:, None] < num_rows) & (cols[None, :] < F)
        rows = rows[:, None].to(tl.int64)
        gate_ptrs = h1_ptr + rows * 2 * F + cols[None, :]
        gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_ptrs + F, mask=mask, other=0.0).to(tl.float32)
        gate, up, sig = gate_up(gate, up, alpha, limit, CLAMPED)
        tl.store(h2_ptr + rows * F + cols[None, :], (gate * sig * up).to(tl.bfloat16), mask=mask)


@launched
@triton.jit(do_not_specialize_on_alignment=["h1_start_ptr", "g2_start_ptr", "num_rows_ptr", "stop_ptr"])
def _swiglu_backward_kernel(
    h1_ptr,  # [X, 2F] bf16, becomes d_h1
    h1_start_ptr,  # [1] i64
    g2_ptr,  # [X, F] bf16, becomes score * h2
    g2_start_ptr,  # [1] i64
    score_ptr,  # [R] fp32
    score_grad_ptr,  # [R] fp32
    num_rows_ptr,  # [1] i32
    stop_ptr,  # [1] i64
    F,
    alpha,
    limit,
    CLAMPED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Program p takes row blocks p, p + programs, ..., whole rows, so that a score gradient is a sum in a fixed order.

    It runs over the chunks column by column, then over the BLOCK_F columns. Every element is read and overwritten by
    the same thread, its block's reads before its writes.
    Example: gate 20, up 3, g2 2, score 0.5 give d_gate 3, d_up 20, 30 over g2, and <g2, h2> = 120 a column.
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    h1_ptr += tl.load(h1_start_ptr) * 2 * F
    g2_ptr += tl.load(g2_start_ptr) * F
    num_rows = tl.load(num_rows_ptr)
    for block in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_R), tl.num_programs(0)):
        delay(block)
        rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
        score = tl.load(score_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        score_grad_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
        for col in range(0, F, BLOCK_F):
            cols = col + tl.arange(0, BLOCK_F)
            mask = (rows[:, None] < num_rows) & (cols[None, :] < F)
            gate_ptrs = h1_ptr + rows[:, None].to(tl.int64) * 2 * F + cols[None, :]
            g2_ptrs = g2_ptr + rows[:, None].to(tl.int64) * F + cols[None, :]
            raw_gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
            raw_up = tl.load(gate_ptrs + F, mask=mask, other=0.0).to(tl.float32)
            g2 = tl.load(g2_ptrs, mask=mask, other=0.0).to(tl.float32)
            gate, up, sig = gate_up(raw_gate, raw_up, alpha, limit, CLAMPED)
            h2 = (gate * sig * up).to(tl.bfloat16).to(tl.float32)
            score_grad_RF += g2 * h2
            d_gate, d_up = gate_up_grads(score * g2, raw_gate, raw_up, gate, up, sig, alpha, limit, CLAMPED)
            tl.store(gate_ptrs, d_gate.to(tl.bfloat16), mask=mask)
            tl.store(gate_ptrs + F, d_up.to(tl.bfloat16), mask=mask)
            tl.store(g2_ptrs, (score * h2).to(tl.bfloat16), mask=mask)
        tl.store(score_grad_ptr + rows, tl.sum(score_grad_RF, axis=1), mask=rows < num_rows)


def _check_rows(op: str, name: str, view_XC: Tensor, width: int) -> None:
    if view_XC.dtype != torch.bfloat16 or view_XC.shape[1:] != (width,) or not view_XC.is_contiguous():
        found = f"{view_XC.dtype} {list(view_XC.shape)}, strides {view_XC.stride()}"
        raise ValueError(f"{op}: {name} must be contiguous bf16 [X, {width}], got {found}")


def swiglu(
    h1_X2F, h1_start_1, h2_XF, h2_start_1, row_start_P, *, activation, stop_1, num_sms=None, config=None
) -> None:
    """h2 = bf16(act(h1)) for the rows that this rank received.

    Args:    h1_X2F, h2_XF: bf16, contiguous; the rows begin at h1_start_1, h2_start_1 (int64, device).
             row_start_P: int32 [L + 1], device; the last word counts the rows.  stop_1: nothing is touched when it is
             not 0.  num_sms: at most that many programs.  config: other than pick_config's.
    Raises:  ValueError for other dtypes, layouts or widths.
    Source:  reference.swiglu; equal to it but for the last bit of exp.
    """
    F = h2_XF.shape[1]
    _check_rows("swiglu", "h1_X2F", h1_X2F, 2 * F)
    _check_rows("swiglu", "h2_XF", h2_XF, F)
    config = config or pick_config("forward")
    _swiglu_kernel[(num_programs(h1_X2F.device, num_sms),)](
        h1_X2F,
        h1_start_1,
        h2_XF,
        h2_start_1,
        row_start_P[-1:],
        stop_1,
        F,
        activation.alpha,
        activation.limit,
        CLAMPED=activation.clamped,
        BLOCK_R=config.block_r,
        BLOCK_F=config.block_f,
        **config.options,
    )


def swiglu_backward(
    h1_X2F,
    h1_start_1,
    g2_XF,
    g2_start_1,
    row_scores_R,
    score_grads_R,
    row_start_P,
    *,
    activation,
    stop_1,
    num_sms=None,
    config=None,
) -> None:
    """d_h1 over h1, bf16(score * h2) over g2, and <g2, h2> into score_grads_R, all in place.

    Args:    as in swiglu; g2_XF: dy @ W2, not multiplied by the score.  row_scores_R, score_grads_R: fp32.
    Raises:  ValueError for other dtypes, layouts or widths.
    Source:  reference.swiglu_backward; the score gradient without W2's output is SonicMoE's idea.
    """
    F = g2_XF.shape[1]
    _check_rows("swiglu_backward", "h1_X2F", h1_X2F, 2 * F)
    _check_rows("swiglu_backward", "g2_XF", g2_XF, F)
    config = config or pick_config("backward")
    _swiglu_backward_kernel[(num_programs(h1_X2F.device, num_sms),)](
        h1_X2F,
        h1_start_1,
        g2_XF,
        g2_start_1,
        row_scores_R,
        score_grads_R,
        row_start_P[-1:],
        stop_1,
        F,
        activation.alpha,
        activation.limit,
        CLAMPED=activation.clamped,
        BLOCK_R=config.block_r,
        BLOCK_F=config.block_f,
        **config.options,
    )

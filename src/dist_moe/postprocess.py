"""Callables behind the experts: the caller's function of the route rows, then the sum weighted by the scores; and a
norm whose rows are observed. Eager.

The rows are what the experts returned, as their owner has them: [T * K, D] bf16, slot by slot, zeros for a slot without
an expert and for the repetition of one, neither of which reaches the sum.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .context import Context
from .norm import norm_of
from .options import RMSNormPostprocess
from .reference import resolve_routes

_WHERE = "routed_experts: experts_output_postprocess"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def postprocessed(
    fn: Callable[[Tensor], Tensor] | RMSNormPostprocess,
    rows_TKD: Tensor,
    ids_TK: Tensor,
    scores_TK: Tensor,
    context: Context,
) -> Tensor:
    """out_TD, differentiable in rows, scores and the weight of a norm; parameters that fn has captured get gradients,
    once a backward.

    Raises: TypeError, ValueError for what fn returns, and whatever it raises; in backward too, where the other ranks
            are told of it.
    """
    slots_TK, scores_TK = resolve_routes(ids_TK, scores_TK, context.config.num_experts)
    if isinstance(fn, RMSNormPostprocess):
        return _ObservedNorm.apply(fn, context, rows_TKD, slots_TK.contiguous(), scores_TK.contiguous(), fn.weight)
    return _Postprocess.apply(fn, context, rows_TKD, slots_TK >= 0, scores_TK)


class _Postprocess(torch.autograd.Function):
    """Nothing is kept but the rows: backward runs fn again, with the random numbers of its first run."""

    @staticmethod
    def forward(ctx, fn, context, rows_TKD, used_TK, scores_TK):
        T, K, D = rows_TKD.shape
        ctx.fn, ctx.context = fn, context
        ctx.random = _random_state(rows_TKD.device) if any(ctx.needs_input_grad) else None
        rows_ND = rows_TKD.view(T * K, D)
        version = None if rows_TKD.is_inference() else rows_TKD._version
        post_ND = _checked(fn(rows_ND), rows_ND)
        if version is not None and rows_TKD._version != version:
            raise ValueError(f"{_WHERE} must not change its argument in place: backward runs it again on the same rows")
        ctx.dtype = post_ND.dtype
        ctx.save_for_backward(rows_TKD, used_TK, scores_TK)
        post_TKD = post_ND.view(T, K, D)
        acc = torch.zeros(T, D, dtype=torch.float32, device=rows_TKD.device)
        for k in range(K):  # in the order of reduce, so that a callable that changes nothing changes no bit
            acc += torch.where(used_TK[:, k, None], scores_TK[:, k, None] * post_TKD[:, k].float(), 0.0)
        return acc.to(rows_TKD.dtype)

    @staticmethod
    def backward(ctx, grad_out_TD):
        try:
            return None, None, *_backward(ctx, grad_out_TD)
        except BaseException as error:  # for one, the callable's own
            ctx.context.refuse(error)
            raise


class _ObservedNorm(torch.autograd.Function):
    """The ops of the norm that runs inside of the call, here on the rows that came out of it."""

    @staticmethod
    def forward(ctx, post, context, rows_TKD, slots_TK, scores_TK, weight_D):
        T, K, D = rows_TKD.shape
        if post.observe_expert_output_fn is not None:
            post.observe_expert_output_fn(rows_TKD.view(T * K, D))
        norm, out_TD = norm_of(weight_D, post.numbers), rows_TKD.new_empty(T, D)
        rstd_TK = rows_TKD.new_empty(T, K, dtype=torch.float32)
        tensors = {"rows_TKD": rows_TKD, "ids_TK": slots_TK, "scores_TK": scores_TK, "norm": norm, "rstd_TK": rstd_TK}
        context.path.ops.rmsnorm_reduce(out_TD, **tensors, kept_rows_TKD=None, stop_1=context.ranks[0].zero_1)
        ctx.post, ctx.context = post, context
        ctx.save_for_backward(rows_TKD, slots_TK, scores_TK, weight_D, None if post.recompute_rstd else rstd_TK)
        return out_TD

    @staticmethod
    def backward(ctx, grad_out_TD):
        rows_TKD, slots_TK, scores_TK, weight_D, rstd_TK = ctx.saved_tensors
        T, K, D = rows_TKD.shape
        grad_weight_D = torch.empty_like(weight_D) if ctx.needs_input_grad[5] else None
        grads = torch.zeros_like(rows_TKD), torch.zeros_like(scores_TK)
        ctx.context.path.ops.rmsnorm_reduce_backward(
            grad_out_TD.contiguous(),
            rows_TKD=rows_TKD,
            ids_TK=slots_TK,
            scores_TK=scores_TK,
            norm=norm_of(weight_D, ctx.post.numbers),
            rstd_TK=rstd_TK,
            grad_rows_TKD=grads[0],
            grad_scores_TK=grads[1],
            grad_weight_D=grad_weight_D,
            stop_1=ctx.context.ranks[0].zero_1,
        )
        if ctx.post.observe_expert_output_grad_fn is not None:
            try:
                ctx.post.observe_expert_output_grad_fn(rows_TKD.view(T * K, D), grads[0].view(T * K, D))
            except BaseException as error:
                ctx.context.refuse(error)
                raise
        return None, None, grads[0], None, grads[1], grad_weight_D


def _backward(ctx, grad_out_TD: Tensor) -> tuple[Tensor, None, Tensor]:
    rows_TKD, used_TK, scores_TK = ctx.saved_tensors
    T, K, D = rows_TKD.shape
    rows_ND = rows_TKD.detach().view(T * K, D).requires_grad_()
    with torch.random.fork_rng([rows_TKD.device] if rows_TKD.is_cuda else []), torch.enable_grad():
        _set_random_state(ctx.random, rows_TKD.device)
        post_ND = _checked(ctx.fn(rows_ND), rows_ND)
    if post_ND.dtype is not ctx.dtype:
        raise ValueError(f"{_WHERE} changed dtype: it returned {ctx.dtype} in forward and {post_ND.dtype} in backward")
    gy_T1D = grad_out_TD.float()[:, None]
    post_TKD = torch.where(used_TK[..., None], post_ND.detach().view(T, K, D).float(), 0.0)
    grad_scores_TK = (gy_T1D * post_TKD).sum(dim=2)
    grad_post_TKD = torch.where(used_TK[..., None], scores_TK[..., None] * gy_T1D, 0.0)
    if post_ND.requires_grad:
        torch.autograd.backward(post_ND, grad_post_TKD.view(T * K, D).to(post_ND.dtype))
    grad_rows_ND = torch.zeros_like(rows_ND) if rows_ND.grad is None else rows_ND.grad
    return grad_rows_ND.view(T, K, D), None, grad_scores_TK


def _checked(post_ND: Tensor, rows_ND: Tensor) -> Tensor:
    if not isinstance(post_ND, Tensor):
        raise TypeError(f"{_WHERE} must return a tensor, got {type(post_ND).__name__}")
    if post_ND.shape != rows_ND.shape:
        raise ValueError(f"{_WHERE} must preserve route shape {list(rows_ND.shape)}, got {list(post_ND.shape)}")
    if post_ND.device != rows_ND.device:
        raise ValueError(f"{_WHERE} must stay on the device {rows_ND.device}, got {post_ND.device}")
    if not post_ND.is_contiguous():
        raise ValueError(f"{_WHERE} must return contiguous rows, got strides {post_ND.stride()}; call .contiguous()")
    if post_ND.dtype not in _DTYPES:
        raise TypeError(f"{_WHERE} must return float16, bfloat16, or float32, got {post_ND.dtype}")
    return post_ND


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)

"""All ranks of a virtual World in one process: the same path, called for every rank at once.

For development, tests and bug reports without several processes or GPUs, and for one GPU that stands for several.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import moe
from .checks import check_call, wants_backward
from .config import Config
from .context import Context
from .create import create_context
from .ops import expert_major
from .symm import World


@dataclass
class RankInputs:
    """What one rank passes to routed_experts, and the gradient of its output (None: no backward)."""

    x_TD: Tensor
    ids_TK: Tensor
    scores_TK: Tensor
    w13_L2FD: Tensor
    w2_LDF: Tensor
    grad_out_TD: Tensor | None = None


@dataclass
class RankResults:
    out_TD: Tensor
    grad_x_TD: Tensor | None = None
    grad_scores_TK: Tensor | None = None
    grad_w13_L2FD: Tensor | None = None
    grad_w2_LDF: Tensor | None = None


class _VirtualExperts(torch.autograd.Function):
    """One autograd node for all ranks: a forward that saves belongs to one backward that runs for all."""

    @staticmethod
    def forward(autograd_ctx, context: Context, save: bool, *flat: Tensor):
        ranks_in = [flat[i : i + 5] for i in range(0, len(flat), 5)]
        slot, depth = context.saved.selected
        with context.call():
            calls = []
            for x_TD, ids_TK, scores_TK, *weights in ranks_in:
                out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
                inputs = (x_TD.detach(), ids_TK, scores_TK.detach(), *expert_major(context, *weights))
                calls.append(moe.ForwardCall(*inputs, out_TD, save, slot, depth))
            if save:
                context.saved.push(slot, depth)
            moe.forward(context.path, context.ranks, calls)
        autograd_ctx.save_for_backward(*(t for tensors in ranks_in for t in tensors[1:]))
        outs = tuple(call.out_TD for call in calls)
        for call in calls:
            call.out_TD = None  # the outputs name this node: kept here, all of it would live until a garbage collection
        autograd_ctx.context, autograd_ctx.calls, autograd_ctx.slot = context, calls, slot
        autograd_ctx.saved_forward = context.saved.newest
        return outs

    @staticmethod
    def backward(autograd_ctx, *grad_outs: Tensor):
        context: Context = autograd_ctx.context
        saved = autograd_ctx.saved_tensors  # complains when one was changed in place
        context.require_newest(autograd_ctx.saved_forward)
        dtype = context.config.wgrad_dtype or torch.bfloat16
        calls = [
            moe.BackwardCall(
                grad_out.contiguous(),
                call.ids_TK,
                call.scores_TK,
                call.w13_L2FD,
                call.w2_LDF,
                call.plan,
                call.place,
                torch.empty_like(call.x_TD),
                torch.empty(call.scores_TK.shape, dtype=call.scores_TK.dtype, device=call.scores_TK.device),
                torch.empty_like(call.w13_L2FD, dtype=dtype),
                torch.empty_like(call.w2_LDF, dtype=dtype),
            )
            for call, grad_out in zip(autograd_ctx.calls, grad_outs, strict=True)
        ]
        with context.call():
            context.saved.pop(autograd_ctx.slot)
            moe.backward(context.path, context.ranks, calls)
        grads = []
        for c, w13, w2 in zip(calls, saved[2::4], saved[3::4], strict=True):
            weights = (c.grad_w13_L2FD.view(w13.shape), c.grad_w2_LDF.view(w2.shape))
            grads += [c.grad_x_TD, None, c.grad_scores_TK, *weights]
        return None, None, *grads


def routed_experts(inputs: Sequence[RankInputs], context: Context) -> list[Tensor]:
    """dist_moe.routed_experts for every rank of a virtual World: rank r passes inputs[r]. The same checks, layouts and
    errors, differentiable in the same way; returns the outputs by rank."""
    context.require_open()
    if len(inputs) != len(context.ranks):
        raise ValueError(f"routed_experts: {len(context.ranks)} virtual ranks need as many inputs, got {len(inputs)}")
    flat = []
    for rank in inputs:
        tensors = (rank.x_TD, rank.ids_TK, rank.scores_TK, rank.w13_L2FD, rank.w2_LDF)
        check_call(*tensors, context)
        flat += tensors
    return list(_VirtualExperts.apply(context, wants_backward(context, *flat), *flat))


def run_virtual(
    num_ranks: int,
    config: Config,
    inputs: Sequence[RankInputs],
    *,
    device="cpu",
    backend: str | None = None,
    context: Context | None = None,
) -> list[RankResults]:
    """Forward, and backward where grad_out_TD is given, of all ranks in this process.

    Args:    context: run on this one (made for a virtual World) instead of a fresh one.
    Raises:  as create_context and routed_experts; ValueError when only some ranks have a grad_out_TD; the fault of the
             calls, if any, before it returns.
    """
    if context is None:
        world = World.virtual(num_ranks, device)
        with create_context(group=world, config=config, backend=backend) as context:
            return run_virtual(num_ranks, config, inputs, context=context)
    with_grad = [rank.grad_out_TD is not None for rank in inputs]
    if any(with_grad) and not all(with_grad):
        raise ValueError(f"run_virtual: grad_out_TD is given for some ranks only, {with_grad}; the backward needs all")
    backward = any(with_grad)
    names = ("x_TD", "scores_TK", "w13_L2FD", "w2_LDF")
    leaves = [{name: getattr(rank, name).detach().requires_grad_(backward) for name in names} for rank in inputs]
    for leaf in leaves:
        for name in ("w13_L2FD", "w2_LDF"):
            leaf[name].grad_dtype = config.wgrad_dtype or leaf[name].dtype
    with torch.set_grad_enabled(backward):
        outs = routed_experts(
            [RankInputs(ids_TK=rank.ids_TK, **leaf) for rank, leaf in zip(inputs, leaves, strict=True)], context
        )
    results = [RankResults(out.detach()) for out in outs]
    if backward:
        torch.autograd.backward(outs, [rank.grad_out_TD for rank in inputs])
        for result, leaf in zip(results, leaves, strict=True):
            for name in names:
                setattr(result, f"grad_{name}", leaf[name].grad)
    context.check()
    return results

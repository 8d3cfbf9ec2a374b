"""All ranks of a virtual World in one process: the same path, called for every rank at once.

For development, tests and bug reports without several processes or GPUs, and for one GPU that stands for several.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import moe
from .checks import check_call, wants_backward
from .config import Config
from .context import Context
from .create import create_context
from .norm import norm_of
from .ops import (
    callable_of,
    clip_limit_of,
    empty_norm_state,
    empty_out,
    expert_major,
    norm_arguments_of,
    norm_weights_of,
    unprepared,
)
from .options import ExecutionOptions
from .postprocess import postprocessed
from .symm import World
from .weights import PreparedWeight


@dataclass
class RankInputs:
    """What one rank passes to routed_experts, and the gradient of its output (None: no backward)."""

    x_TD: Tensor
    ids_TK: Tensor
    scores_TK: Tensor
    w13_L2FD: Tensor | PreparedWeight
    w2_LDF: Tensor | PreparedWeight
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
    def forward(
        autograd_ctx,
        context: Context,
        save: bool,
        prepared: list[list[Tensor | None]],
        options: list[ExecutionOptions | None],
        *flat: Tensor,
    ):
        """prepared: of every rank ops.prepared_operands, or nothing.  flat: five inputs of every rank, then their
        weights of norms, or None."""
        flat, norm_weights = flat[: 5 * len(options)], flat[5 * len(options) :]
        ranks_in = [flat[i : i + 5] for i in range(0, len(flat), 5)]
        slot, depth = context.saved.selected
        with context.call():
            calls = []
            for (x_TD, ids_TK, scores_TK, *weights), operands, asked in zip(ranks_in, prepared, options, strict=True):
                returns_routes = callable_of(asked) is not None
                out_TD = empty_out(x_TD, ids_TK, returns_routes)
                if context.path.format is None:
                    weights = expert_major(context, *weights)
                else:
                    from . import ops_scaled  # registers ops that a bf16 program has no use for

                    weights = ops_scaled.weights_of_call(context, *weights, operands)
                inputs = (x_TD.detach(), ids_TK, scores_TK.detach(), *weights)
                calls.append(moe.ForwardCall(*inputs, out_TD, save, slot, depth, returns_routes))
                norm_weight_D, norm = norm_arguments_of(asked)
                calls[-1].norm = norm_of(norm_weight_D, norm)
                norm_state = empty_norm_state(x_TD, ids_TK, save, norm)
                calls[-1].kept_rows_TKD, calls[-1].rstd_TK = (t if t.dim() > 1 else None for t in norm_state)
                if (clip_limit := clip_limit_of(asked)) is not None:
                    calls[-1].clip_limit, calls[-1].clip_stats_3 = clip_limit, asked.swiglu_clip_stats_out_3
            if save:
                context.saved.push(slot, depth)
            moe.forward(context.path, context.ranks, calls)
        read = [t for tensors in ranks_in for t in tensors[1:]] + [t for operands in prepared for t in operands]
        autograd_ctx.save_for_backward(*read, *norm_weights)
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
        L, D, F = context.experts_per_rank, context.config.hidden_dim, context.config.intermediate_dim
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
                None
                if grad_out.dim() == 3
                else torch.empty_like(call.scores_TK, memory_format=torch.contiguous_format),
                torch.empty((L, 2 * F, D), dtype=dtype, device=context.device),
                torch.empty((L, D, F), dtype=dtype, device=context.device),
                call.norm,
                call.kept_rows_TKD,
                call.rstd_TK,
                None if call.norm is None or call.norm.weight_D is None else torch.empty_like(call.norm.weight_D),
            )
            for call, grad_out in zip(autograd_ctx.calls, grad_outs, strict=True)
        ]
        with context.call():
            context.saved.pop(autograd_ctx.slot)
            moe.backward(context.path, context.ranks, calls)
        grads = []
        saved = saved[: 4 * len(calls)]
        for c, w13, w2 in zip(calls, saved[2::4], saved[3::4], strict=True):
            weights = (c.grad_w13_L2FD.view(w13.shape), c.grad_w2_LDF.view(w2.shape))
            grads += [c.grad_x_TD, None, c.grad_scores_TK, *weights]
        return None, None, None, None, *grads, *(c.grad_norm_weight_D for c in calls)


def routed_experts(
    inputs: Sequence[RankInputs], context: Context, *, options: Sequence[ExecutionOptions | None] | None = None
) -> list[Tensor]:
    """dist_moe.routed_experts for every rank of a virtual World: rank r passes inputs[r] and options[r]. The same
    checks, layouts and errors, differentiable in the same way; returns the outputs by rank."""
    context.require_open()
    options = [None] * len(inputs) if options is None else list(options)
    if len(inputs) != len(context.ranks):
        raise ValueError(f"routed_experts: {len(context.ranks)} virtual ranks need as many inputs, got {len(inputs)}")
    flat, prepared, save = [], [], False
    for rank, asked in zip(inputs, options, strict=True):
        tensors = (rank.x_TD, rank.ids_TK, rank.scores_TK, rank.w13_L2FD, rank.w2_LDF)
        check_call(*tensors, context, asked)
        save |= wants_backward(context, *tensors, *norm_weights_of(asked))
        tensors, operands = unprepared(tensors)
        flat += tensors
        prepared.append(operands)
    norm_weights = [norm_arguments_of(asked)[0] for asked in options]
    outs = _VirtualExperts.apply(context, save, prepared, options, *flat, *norm_weights)
    return [
        out if (post := callable_of(asked)) is None else postprocessed(post, out, rank.ids_TK, rank.scores_TK, context)
        for out, rank, asked in zip(outs, inputs, options, strict=True)
    ]


def _source(x: Tensor | PreparedWeight) -> Tensor:
    return x.source if isinstance(x, PreparedWeight) else x


def _leaf(x: Tensor | PreparedWeight, requires_grad: bool) -> Tensor | PreparedWeight:
    """A new leaf over the data of x, for gradients of this run alone."""
    if not isinstance(x, PreparedWeight):
        return x.detach().requires_grad_(requires_grad)
    leaf = copy.copy(x)
    object.__setattr__(leaf, "source", x.source.detach().requires_grad_(requires_grad))
    return leaf


def run_virtual(
    num_ranks: int,
    config: Config,
    inputs: Sequence[RankInputs],
    *,
    device="cpu",
    backend: str | None = None,
    context: Context | None = None,
    options: Sequence[ExecutionOptions | None] | None = None,
) -> list[RankResults]:
    """Forward, and backward where grad_out_TD is given, of all ranks in this process.

    Args:    context: run on this one (made for a virtual World) instead of a fresh one.  options: of every rank.
    Raises:  as create_context and routed_experts; ValueError when only some ranks have a grad_out_TD; the fault of the
             calls, if any, before it returns.
    """
    if context is None:
        world = World.virtual(num_ranks, device)
        with create_context(group=world, config=config, backend=backend) as context:
            return run_virtual(num_ranks, config, inputs, context=context, options=options)
    with_grad = [rank.grad_out_TD is not None for rank in inputs]
    if any(with_grad) and not all(with_grad):
        raise ValueError(f"run_virtual: grad_out_TD is given for some ranks only, {with_grad}; the backward needs all")
    backward = any(with_grad)
    names = ("x_TD", "scores_TK", "w13_L2FD", "w2_LDF")
    leaves = [{name: _leaf(getattr(rank, name), backward) for name in names} for rank in inputs]
    for leaf in leaves:
        for name in ("w13_L2FD", "w2_LDF"):
            weight = _source(leaf[name])
            weight.grad_dtype = config.wgrad_dtype or weight.dtype
    with torch.set_grad_enabled(backward):
        outs = routed_experts(
            [RankInputs(ids_TK=rank.ids_TK, **leaf) for rank, leaf in zip(inputs, leaves, strict=True)],
            context,
            options=options,
        )
    results = [RankResults(out.detach()) for out in outs]
    if backward:
        torch.autograd.backward(outs, [rank.grad_out_TD for rank in inputs])
        for result, leaf in zip(results, leaves, strict=True):
            for name in names:
                setattr(result, f"grad_{name}", _source(leaf[name]).grad)
    context.check()
    return results

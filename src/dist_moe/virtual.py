"""All ranks of a virtual World in one process: the same path, called for every rank at once.

For development, tests and bug reports without several processes or GPUs, and for one GPU that stands for several.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import moe
from .calls import BackwardCall, ForwardCall
from .checks import check_call, check_saved, wants_backward
from .config import Config
from .context import Context
from .create import create_context
from .engine import takes
from .norm import norm_of
from .ops import accumulators, empty_norm_state, empty_out, expert_major
from .options import ExecutionOptions, callable_of, clip_limit_of, norm_arguments_of, norm_weights_of
from .postprocess import postprocessed
from .symm import World
from .weights import PreparedWeight, unprepared
from .wgrad import W2, W13, WeightGrads, weight_grads_of


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


def _operands(context: Context, weights: Sequence[Tensor], prepared: list[Tensor | None]) -> tuple:
    """The weights as the path takes them."""
    if context.path.format is None:
        return expert_major(context, *weights)
    from . import ops_scaled  # registers ops that a bf16 program has no use for

    return ops_scaled.weights_of_call(context, *weights, prepared)


class _VirtualExperts(torch.autograd.Function):
    """One autograd node for all ranks: a forward that saves belongs to one backward that runs for all."""

    @staticmethod
    def forward(
        autograd_ctx,
        context: Context,
        save: bool,
        wgrads: list[WeightGrads],
        prepared: list[list[Tensor | None]],
        options: list[ExecutionOptions | None],
        *flat: Tensor,
    ):
        """prepared: of every rank weights.prepared_operands, or nothing.  flat: five inputs of every rank, then their
        weights of norms, or None."""
        flat, norm_weights = flat[: 5 * len(options)], flat[5 * len(options) :]
        ranks_in = [flat[i : i + 5] for i in range(0, len(flat), 5)]
        used = [asked.preprocessed(context, *rank[3:]) for asked, rank in zip(wgrads, ranks_in, strict=True)]
        slot, depth = context.saved.selected
        with context.call():
            calls = []
            for rank_in, weights, operands, asked in zip(ranks_in, used, prepared, options, strict=True):
                calls.append(_forward_call(context, rank_in[:3], _operands(context, weights, operands), save, asked))
            if save:
                context.saved.push(slot, depth)
            moe.forward(context.path, context.ranks, calls)
        read = [t for tensors in ranks_in for t in tensors[1:]] + [t for operands in prepared for t in operands]
        autograd_ctx.save_for_backward(*read, *norm_weights)
        outs = tuple(call.out_TD for call in calls)
        for call, asked in zip(calls, wgrads, strict=True):
            if asked.preprocess_fn is not None:
                call.w13_L2FD = call.w2_LDF = None  # made again in backward
            call.out_TD = None  # the outputs name this node: kept here, all of it would live until a garbage collection
        autograd_ctx.context, autograd_ctx.calls, autograd_ctx.slot = context, calls, slot
        autograd_ctx.saved_forward, autograd_ctx.wgrads = context.saved.newest, wgrads
        return outs

    @staticmethod
    def backward(autograd_ctx, *grad_outs: Tensor):
        context: Context = autograd_ctx.context
        saved = autograd_ctx.saved_tensors  # complains when one was changed in place
        context.require_newest(autograd_ctx.saved_forward)
        visits = [_Visit(autograd_ctx, rank, asked) for rank, asked in enumerate(autograd_ctx.wgrads)]
        calls = [
            visit.call(call, grad_out, *saved[4 * rank + 2 : 4 * rank + 4])
            for rank, (visit, call, grad_out) in enumerate(zip(visits, autograd_ctx.calls, grad_outs, strict=True))
        ]
        with context.call():
            context.saved.pop(autograd_ctx.slot)
            moe.backward(context.path, context.ranks, calls)
        grads = []
        for rank, (visit, call) in enumerate(zip(visits, calls, strict=True)):
            grads += visit.grads(call, *saved[4 * rank + 2 : 4 * rank + 4], context.ranks[rank].stop_1)
        return None, None, None, None, None, *grads, *(call.grad_norm_weight_D for call in calls)


def _forward_call(context: Context, tensors, weights: tuple, save: bool, asked: ExecutionOptions | None):
    """One rank's, of x, ids and scores and the weights as the path takes them."""
    x_TD, ids_TK, scores_TK = tensors
    returns_routes = callable_of(asked) is not None
    out_TD = empty_out(x_TD, ids_TK, returns_routes)
    inputs = (x_TD.detach(), ids_TK, scores_TK.detach(), *weights)
    call = ForwardCall(*inputs, out_TD, save, *context.saved.selected, returns_routes)
    norm_weight_D, norm = norm_arguments_of(asked)
    call.norm = norm_of(norm_weight_D, norm)
    call.keep(*empty_norm_state(x_TD, ids_TK, save, norm))
    if (clip_limit := clip_limit_of(asked)) is not None:
        call.clip_limit, call.clip_stats_3 = clip_limit, asked.swiglu_clip_stats_out_3
    return call


class _Visit:
    """Where one rank's gradients of a backward go. There is one visit: what it does not take is lost."""

    def __init__(self, autograd_ctx, rank: int, wgrads: WeightGrads):
        self.wgrads, self.context = wgrads, autograd_ctx.context
        functions = autograd_ctx.next_functions[5 * rank : 5 * rank + 5]
        nodes = {place: node for place, (node, _) in enumerate(functions) if node is not None}
        self.needed, self.taken = nodes.keys() & {W13, W2}, {place for place, node in nodes.items() if takes(node)}
        self.targets = wgrads.resolve(self.context.config.wgrad_dtype, nodes)
        self.written = self.targets.written_by_backward(self.needed)

    def call(self, call: ForwardCall, grad_out_TD: Tensor, w13: Tensor, w2: Tensor) -> BackwardCall:
        context, config = self.context, self.context.config
        L, D, F = context.experts_per_rank, config.hidden_dim, config.intermediate_dim
        weights = (call.w13_L2FD, call.w2_LDF)
        if self.wgrads.preprocess_fn is not None:
            weights = _operands(context, self.wgrads.preprocessed(context, w13, w2), [])
        dtype = self.targets.dtype_of_new(self.needed, self.taken, self.wgrads)
        into = self.targets.into if self.written else {}
        accumulators(*(into[place].tensor if place in into else None for place in (W13, W2)))
        return BackwardCall(
            grad_out_TD.contiguous(),
            call.ids_TK,
            call.scores_TK,
            *weights,
            call.plan,
            call.place,
            torch.empty_like(call.x_TD),
            None
            if call.returns_routes
            else torch.empty(call.scores_TK.shape, dtype=call.scores_TK.dtype, device=call.scores_TK.device),
            *(
                into[place].tensor.view(shape)
                if place in into
                else torch.empty(shape, dtype=dtype, device=context.device)
                for place, shape in ((W13, (L, 2 * F, D)), (W2, (L, D, F)))
            ),
            *(place in into and into[place].accumulate for place in (W13, W2)),
            call.norm,
            call.kept_rows_TKD,
            call.rstd_TK,
            None if call.norm is None or call.norm.weight_D is None else torch.empty_like(call.norm.weight_D),
        )

    def grads(self, call: BackwardCall, w13: Tensor, w2: Tensor, stop_1: Tensor) -> list[Tensor | None]:
        """Of the rank's five inputs."""
        grads = {0: call.grad_x_TD, 2: call.grad_scores_TK}
        if not self.written:
            grads |= {W13: call.grad_w13_L2FD.view(w13.shape), W2: call.grad_w2_LDF.view(w2.shape)}
        self.wgrads.deliver(self.targets, grads, self.taken, stop_1)
        return [grads.get(place) for place in range(5)]


def routed_experts(
    inputs: Sequence[RankInputs],
    context: Context,
    *,
    options: ExecutionOptions | Sequence[ExecutionOptions | None] | None = None,
) -> list[Tensor]:
    """dist_moe.routed_experts for every rank of a virtual World: rank r passes inputs[r], and options[r] or options.
    The same checks, layouts and errors, differentiable in the same way but in one visit; returns the outputs by rank.
    """
    context.require_open()
    if len(inputs) != len(context.ranks):
        raise ValueError(f"routed_experts: {len(context.ranks)} virtual ranks need as many inputs, got {len(inputs)}")
    if not isinstance(options, list | tuple):
        options = [options] * len(inputs)
    by_rank, save = [], False
    for rank, asked in zip(inputs, options, strict=True):
        by_rank.append((rank.x_TD, rank.ids_TK, rank.scores_TK, rank.w13_L2FD, rank.w2_LDF))
        check_call(*by_rank[-1], context, asked)
        save |= wants_backward(context, *by_rank[-1], *norm_weights_of(asked))
    if save:
        for tensors, asked in zip(by_rank, options, strict=True):
            check_saved(*tensors[1:], asked)
    given = [unprepared(tensors) for tensors in by_rank]
    wgrads = [weight_grads_of(asked, tensors, save) for asked, (tensors, _) in zip(options, given, strict=True)]
    prepared = [operands for _, operands in given]
    flat = [tensor for tensors, _ in given for tensor in tensors]
    norm_weights = [norm_arguments_of(asked)[0] for asked in options]
    outs = _VirtualExperts.apply(context, save, wgrads, prepared, list(options), *flat, *norm_weights)
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
    options: ExecutionOptions | Sequence[ExecutionOptions | None] | None = None,
) -> list[RankResults]:
    """Forward, and backward where grad_out_TD is given, of all ranks in this process.

    Args:    context: run on this one (made for a virtual World) instead of a fresh one.  options: as of routed_experts.
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

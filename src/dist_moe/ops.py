"""routed_experts and the custom ops it calls: one opaque forward, one opaque backward, and one that writes the weight
gradients into tensors of the caller's, which its schema says.

The ops name their Context by its handle and find its buffers inside: a symmetric region that were an op argument could
reach the op as a clone, and peers would write elsewhere. What forward hands to backward travels as returned tensors.
"""

import torch
import torch.utils.checkpoint
from torch import Tensor

from . import moe
from .checks import check_call, require_route_outputs, wants_backward
from .context import Context, live_context
from .node import NO_SLOT, NUM_PLAN_TENSORS, NUM_STATE_TENSORS, Differentiable, forward_below_autograd
from .norm import keeps_rstd, norm_of
from .options import ExecutionOptions, callable_of, clip_limit_of, norm_arguments_of, norm_weights_of
from .postprocess import postprocessed
from .route_plan import RoutePlan
from .weights import PreparedWeight, unprepared
from .wgrad import PLAIN, weight_grads_of

# How a checkpoint ends its recomputation once it has what it needs: out of a hook, and no failure.
_EARLY_STOP = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())


def _bf16_forward(
    x_TD: Tensor,
    ids_TK: Tensor,
    scores_TK: Tensor,
    w13: Tensor,
    w2: Tensor,
    save: bool,
    slot: int,
    depth: int,
    context: str,
    returns_routes: bool = False,
    clip_limit: float | None = None,
    norm_weight_D: Tensor | None = None,
    norm: list[float] | None = None,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """out_TD, then the state that bf16_backward takes: the tensors of the route plan, the place record, and of a norm
    the rows and their 1 / rms; last, with a clip_limit, the clip statistics, FP32 [3], else nothing. Collective.

    returns_routes: out is [T, K, D], the rows of the experts without their scores, of which then come no gradients.
    norm_weight_D, norm: RMSNorm behind the experts, see norm_of.

    Only a forward that saves has a backward; the state of others is empty. With NO_SLOT it is for show: a checkpoint
    will drop it and run the forward again before the backward.
    """
    ctx = live_context(context)
    with ctx.call():
        weights = expert_major(ctx, w13, w2)
        how = (save, slot, depth, returns_routes, clip_limit, norm_weight_D, norm)
        return run_forward(ctx, x_TD, ids_TK, scores_TK, *weights, *how)


def run_forward(
    ctx: Context, x_TD, ids_TK, scores_TK, w13, w2, save: bool, slot: int, depth: int, returns_routes, clip_limit, *norm
) -> tuple:
    """What _bf16_forward returns, of weights as the path takes them; inside ctx.call()."""
    if returns_routes or norm[1] is not None:
        require_route_outputs(ctx)  # of callers of the op
    out_TD = empty_out(x_TD, ids_TK, returns_routes)
    norm_state = empty_norm_state(x_TD, ids_TK, save, norm[1])
    saves_in_slot = save and slot != NO_SLOT
    if saves_in_slot:
        ctx.saved.push(slot, depth)
    call = moe.ForwardCall(x_TD, ids_TK, scores_TK, w13, w2, out_TD, saves_in_slot, slot, depth, returns_routes)
    clip_stats_3 = empty_clip_stats(x_TD, clip_limit)
    if clip_limit is not None:
        call.clip_limit, call.clip_stats_3 = clip_limit, clip_stats_3
    call.norm = norm_of(*norm)
    call.kept_rows_TKD, call.rstd_TK = (part if part.dim() > 1 else None for part in norm_state)
    moe.forward(ctx.path, ctx.ranks, [call])
    state = [*call.plan.tensors(), call.place]
    return out_TD, *(state if save else [tensor.new_empty(0) for tensor in state]), *norm_state, clip_stats_3


def empty_out(x_TD: Tensor, ids_TK: Tensor, returns_routes: bool) -> Tensor:
    (T, D), K = x_TD.shape, ids_TK.shape[1]
    return torch.empty((T, K, D) if returns_routes else (T, D), dtype=x_TD.dtype, device=x_TD.device)


def empty_norm_state(x_TD: Tensor, ids_TK: Tensor, save: bool, norm: list[float] | None) -> tuple[Tensor, Tensor]:
    """For the rows and their 1 / rms, empty where nothing is kept."""
    keeps = save and norm is not None
    (T, D), K = x_TD.shape, ids_TK.shape[1]
    rows = x_TD.new_empty((T, K, D) if keeps else (0,))
    return rows, x_TD.new_empty((T, K) if keeps and keeps_rstd(norm) else (0,), dtype=torch.float32)


def empty_clip_stats(x_TD: Tensor, clip_limit: float | None) -> Tensor:
    return x_TD.new_empty(0 if clip_limit is None else 3, dtype=torch.float32)


def _fake_bf16_forward(
    x_TD,
    ids_TK,
    scores_TK,
    w13,
    w2,
    save,
    slot,
    depth,
    context,
    returns_routes=False,
    clip_limit=None,
    norm_weight_D=None,
    norm=None,
):
    out_TD, norm_state = empty_out(x_TD, ids_TK, returns_routes), empty_norm_state(x_TD, ids_TK, save, norm)
    return out_TD, *fake_state(x_TD, save, context), *norm_state, empty_clip_stats(x_TD, clip_limit)


def fake_state(x_TD, save, context):
    ctx = live_context(context)
    R, L, W = ctx.path.capacity_rows, ctx.experts_per_rank, ctx.world.size
    i32, i64 = torch.int32, torch.int64
    counts = [(L + 1, i32), (L, i32), (W, i64), (1, i32), (1, i32)]
    sizes = [*counts, *[(R, i32)] * 4, (ctx.path.geometry.place_words, i64)]
    return [x_TD.new_empty(size if save else 0, dtype=dtype) for size, dtype in sizes]


@torch.library.custom_op("dist_moe::bf16_backward", mutates_args=())
def bf16_backward(
    grad_out_TD: Tensor,
    ids_TK: Tensor,
    scores_TK: Tensor,
    w13: Tensor,
    w2: Tensor,
    state: list[Tensor],
    needs_w13: bool,
    needs_w2: bool,
    wgrad_dtype: torch.dtype,
    slot: int,
    context: str,
    norm_weight_D: Tensor | None = None,
    norm: list[float] | None = None,
    needs_norm_weight: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, scores, w13, w2 in their layouts and of the norm's weight; an unwanted weight gradient is empty,
    and that of the scores where the gradient of the output is [T, K, D], of a forward by route. Collective."""
    ctx = live_context(context)
    with ctx.call():
        grads = empty_grads(grad_out_TD, scores_TK, w13, w2, needs_w13, needs_w2, wgrad_dtype)
        grads += (empty_norm_weight_grad(grad_out_TD, norm_weight_D, needs_norm_weight),)
        given = (grad_out_TD, ids_TK, scores_TK, *expert_major(ctx, w13, w2), state, slot, grads)
        run_backward(ctx, *given, norm_of(norm_weight_D, norm))
    return grads


@torch.library.custom_op(
    "dist_moe::bf16_backward_accumulate_", mutates_args=("accumulator_grad_w13", "accumulator_grad_w2")
)
def bf16_backward_accumulate_(
    grad_out_TD: Tensor,
    ids_TK: Tensor,
    scores_TK: Tensor,
    w13: Tensor,
    w2: Tensor,
    state: list[Tensor],
    accumulator_grad_w13: Tensor | None,
    accumulator_grad_w2: Tensor | None,
    adds_w13: bool,
    adds_w2: bool,
    slot: int,
    context: str,
    norm_weight_D: Tensor | None = None,
    norm: list[float] | None = None,
    needs_norm_weight: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, scores and the norm's weight, as of bf16_backward; those of the weights go into the accumulators,
    contiguous bf16 or FP32 tensors of as many elements, None for a weight without one: added to what they hold, or
    written over it. Collective."""
    ctx = live_context(context)
    with ctx.call():
        of_tokens = empty_grads_of_tokens(grad_out_TD, scores_TK)
        of_norm = empty_norm_weight_grad(grad_out_TD, norm_weight_D, needs_norm_weight)
        grads = (*of_tokens, *accumulators(accumulator_grad_w13, accumulator_grad_w2), of_norm)
        given = (grad_out_TD, ids_TK, scores_TK, *expert_major(ctx, w13, w2), state, slot, grads)
        run_backward(ctx, *given, norm_of(norm_weight_D, norm), adds_w13, adds_w2)
    return *of_tokens, of_norm


@bf16_backward_accumulate_.register_fake
def fake_backward_accumulate(
    grad_out_TD,
    ids_TK,
    scores_TK,
    w13,
    w2,
    state,
    acc_w13,
    acc_w2,
    adds_w13,
    adds_w2,
    slot,
    context,
    norm_weight_D=None,
    norm=None,
    needs_norm_weight=False,
):
    of_norm = empty_norm_weight_grad(grad_out_TD, norm_weight_D, needs_norm_weight)
    return *empty_grads_of_tokens(grad_out_TD, scores_TK), of_norm


def accumulators(*grads: Tensor | None) -> list[Tensor]:
    """Those of both weights as the gradients that run_backward fills. Raises ValueError as require_aligned."""
    for name, grad in zip(("w13", "w2"), grads, strict=True):
        if grad is not None:
            require_aligned(f"what takes the gradient of {name}", grad)
    return [torch.empty(0) if grad is None else grad for grad in grads]


def run_backward(
    ctx: Context, grad_out_TD, ids_TK, scores_TK, w13, w2, state, slot, grads, norm, adds_w13=False, adds_w2=False
) -> None:
    """Fill the gradients of x, scores, w13, w2 and the norm's weight, empty ones but for those of weights that are not
    wanted; inside ctx.call(), of weights as the path takes them."""
    L, D, F = ctx.experts_per_rank, ctx.config.hidden_dim, ctx.config.intermediate_dim
    of_weights = (
        grad.view(shape) if grad.numel() else None
        for grad, shape in zip(grads[2:4], ((L, 2 * F, D), (L, D, F)), strict=True)
    )
    call = moe.BackwardCall(
        # An expanded gradient, sum()'s for one, has strides of 0.
        grad_out_TD if grad_out_TD.stride(-1) == 1 else grad_out_TD.clone(memory_format=torch.contiguous_format),
        ids_TK,
        scores_TK,
        w13,
        w2,
        RoutePlan(*state[:NUM_PLAN_TENSORS]),
        state[NUM_PLAN_TENSORS],
        grads[0],
        grads[1] if grad_out_TD.dim() == 2 else None,
        *of_weights,
        adds_w13,
        adds_w2,
    )
    if norm is not None:
        rows_TKD, rstd_TK = state[NUM_PLAN_TENSORS + 1 : NUM_STATE_TENSORS]
        call.norm, call.rows_TKD, call.rstd_TK = norm, rows_TKD, rstd_TK if rstd_TK.dim() > 1 else None
        call.grad_norm_weight_D = grads[4] if grads[4].numel() else None
    ctx.saved.pop(slot)
    moe.backward(ctx.path, ctx.ranks, [call])


@bf16_backward.register_fake
def fake_backward(
    grad_out_TD,
    ids_TK,
    scores_TK,
    w13,
    w2,
    state,
    needs_w13,
    needs_w2,
    wgrad_dtype,
    slot,
    context,
    norm_weight_D=None,
    norm=None,
    needs_norm_weight=False,
):
    grads = empty_grads(grad_out_TD, scores_TK, w13, w2, needs_w13, needs_w2, wgrad_dtype)
    return *grads, empty_norm_weight_grad(grad_out_TD, norm_weight_D, needs_norm_weight)


def empty_grads(
    grad_out_TD, scores_TK, w13, w2, needs_w13, needs_w2, wgrad_dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        *empty_grads_of_tokens(grad_out_TD, scores_TK),
        w13.new_empty(w13.shape if needs_w13 else (0,), dtype=wgrad_dtype),
        w2.new_empty(w2.shape if needs_w2 else (0,), dtype=wgrad_dtype),
    )


def empty_grads_of_tokens(grad_out_TD, scores_TK) -> tuple[Tensor, Tensor]:
    T, D, device = grad_out_TD.shape[0], grad_out_TD.shape[-1], grad_out_TD.device
    scores_shape = scores_TK.shape if grad_out_TD.dim() == 2 else (0,)
    return (
        torch.empty((T, D), dtype=grad_out_TD.dtype, device=device),
        torch.empty(scores_shape, dtype=scores_TK.dtype, device=scores_TK.device),
    )


def empty_norm_weight_grad(grad_out_TD: Tensor, norm_weight_D: Tensor | None, needs_norm_weight: bool) -> Tensor:
    return torch.empty_like(norm_weight_D) if needs_norm_weight else grad_out_TD.new_empty(0)


def expert_major(ctx: Context, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """The weights as [L, 2F, D] and [L, D, F], whatever layout the caller has them in. Raises as require_aligned."""
    require_aligned("w13_weight", w13)
    require_aligned("w2_weight", w2)
    L, D, F = ctx.experts_per_rank, ctx.config.hidden_dim, ctx.config.intermediate_dim
    return w13.detach().view(L, 2 * F, D), w2.detach().view(L, D, F)


def require_aligned(name: str, tensor: Tensor) -> None:
    """ValueError for an address that is not a multiple of 16, which TMA cannot read; only real tensors have one."""
    if tensor.data_ptr() % 16:
        raise ValueError(
            f"routed_experts: {name} must start at a multiple of 16 bytes, it is a view at an odd place; clone it"
        )


def _refuse_vmap(*inputs):
    raise NotImplementedError("routed_experts cannot run under torch.vmap: it is a call of all ranks, once")


_LIBRARY = torch.library.Library("dist_moe", "FRAGMENT")  # its ops go with it


def define_forward(name: str, forward, fake):
    """The op of a forward, with Differentiable as its autograd.

    By hand what torch.library.custom_op makes, whose layers of Python around a call cost an eager forward of a small
    model a sixth of its time; docs/performance.md has the figures.
    """
    _LIBRARY.define(f"{name}{torch.library.infer_schema(forward, mutates_args=())}", tags=torch.Tag.pt2_compliant_tag)
    op = getattr(torch.ops.dist_moe, name).default

    def with_autograd(*inputs):
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return Differentiable.apply(op, PLAIN, *inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    for function, key in (
        (forward, "CompositeExplicitAutograd"),
        (with_autograd, "Autograd"),
        (_refuse_vmap, "FuncTorchBatched"),
    ):
        # Dynamo may meet the op outside of a graph, and must not compile what is inside.
        _LIBRARY.impl(name, torch._disable_dynamo(function), key)
    torch.library.register_fake(f"dist_moe::{name}", fake, lib=_LIBRARY)
    return op


bf16_forward = define_forward("bf16_forward", _bf16_forward, _fake_bf16_forward)


def routed_experts(
    x_TD: Tensor,
    topk_expert_ids_TK: Tensor,
    topk_scores_TK: Tensor,
    w13_weight: Tensor | PreparedWeight,
    w2_weight: Tensor | PreparedWeight,
    context: Context,
    *,
    options: ExecutionOptions | None = None,
) -> Tensor:
    """Send every token through its experts, which live on all ranks, and add what they return, weighted by the scores.

    Args:    x_TD: bf16 [T, D], 0 <= T <= Config.num_local_input_tokens, another T each call and each rank if it likes;
             rows may be strided. topk_expert_ids_TK: int32 or int64 [T, K], any strides; global expert ids, a negative
             one means no expert. An expert named twice by a token counts once, with the sum of the scores.
             topk_scores_TK: bf16 or fp32 [T, K], any strides, used as fp32.
             w13_weight, w2_weight: this rank's experts, bf16, contiguous: [L, 2F, D] (gate rows, then up rows) and
             [L, D, F]; or [L, 2, F, D] and [L, D, F]; or flattened [L*2F, D] and [L*D, F]. In a block-scaled Context
             also both as PreparedWeight, in NVFP4 only so; their sources get the gradients.
    Returns: bf16 [T, D], new memory; rows of tokens without experts are 0. Differentiable in x, scores, weights and the
             weight of an RMSNormPostprocess, once a forward, in one visit or, with retain_graph, one for the inputs and
             one for the weights with the same gradient tensor of the output, as zero-bubble schedules have it; weight
             gradients leave backward in Config.wgrad_dtype, or the weight's dtype (autograd rounds them to the
             parameter's grad_dtype). A selective checkpoint must save the outputs of torch.ops.dist_moe.bf16_forward
             (block_scaled_forward); a plain one saves, when it recomputes, into the slot then selected.
    Raises:  TypeError, ValueError for arguments; NotImplementedError for inplace_wgrad_accum in torch.compile;
             a DistMoEError for a fault of an earlier call on any rank (context.check() raises it at once).
    Order:   collective: all ranks issue the same calls in the same order. A rank that raises here tells the others.
    """
    if not isinstance(context, Context):
        raise TypeError(f"routed_experts: context must be a Context, got {type(context).__name__}")
    context.require_open()
    inputs = (x_TD, topk_expert_ids_TK, topk_scores_TK, w13_weight, w2_weight)
    try:
        check_call(*inputs, context, options)
        if len(context.world.local_ranks) != 1:
            raise ValueError(
                f"routed_experts: the context runs {context.world.size} virtual ranks, which are called together: use "
                "dist_moe.virtual.routed_experts"
            )
        norm_weight_D, norm = norm_arguments_of(options)
        save = wants_backward(context, x_TD, topk_scores_TK, w13_weight, w2_weight, *norm_weights_of(options))
        slot, depth = context.saved.selected
        if save and _runs_again_before_backward():
            slot = NO_SLOT
        inputs, prepared = unprepared(inputs)
        wgrads = weight_grads_of(options, inputs, save)
        clip_limit, post = clip_limit_of(options), callable_of(options)
        inputs, op = (*inputs, save, slot, depth, context.name), bf16_forward
        if context.path.format is not None:
            op, inputs = torch.ops.dist_moe.block_scaled_forward.default, (*inputs, prepared)
        inputs = (*inputs, post is not None, clip_limit, norm_weight_D, norm)
        if wgrads is PLAIN:
            out_TD, *_, clip_stats_3 = op(*inputs)
        elif save:
            out_TD, *_, clip_stats_3 = Differentiable.apply(op, wgrads, *inputs)
        else:
            out_TD, *_, clip_stats_3 = forward_below_autograd(op, wgrads, inputs)
        if clip_limit is not None:
            options.swiglu_clip_stats_out_3.copy_(clip_stats_3)
        if post is not None:
            out_TD = postprocessed(post, out_TD, topk_expert_ids_TK, topk_scores_TK, context)
    except _EARLY_STOP:
        raise
    except BaseException as error:
        context.refuse(error)
        raise
    return out_TD


def _runs_again_before_backward() -> bool:
    """Whether this forward is the first one of a non-reentrant checkpoint, which drops what it saves.

    Nothing public tells. Were torch to rename what is looked at here, the first forward would keep its room in the slot
    and the second would raise SlotError: loudly wrong. A selective checkpoint must keep the outputs of bf16_forward.
    """
    if torch.compiler.is_compiling():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or not getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
        return False
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return not any(type(mode).__name__ == "_CachingTorchDispatchMode" for mode in modes)

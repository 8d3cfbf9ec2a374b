"""routed_experts and the custom ops it calls: one opaque forward, one opaque backward, and one that writes the weight
gradients into tensors of the caller's, which its schema says.

The ops name their Context by its handle and find its buffers inside: a symmetric region that were an op argument could
reach the op as a clone, and peers would write elsewhere. What forward hands to backward travels as returned tensors.
"""

import torch
from torch import Tensor

from . import moe
from .calls import BackwardCall, ForwardCall
from .checkpoints import EARLY_STOP, is_first_run
from .checks import check_call, check_saved, require_route_outputs, require_savable, wants_backward
from .context import Context, live_context
from .node import NO_SLOT, NUM_PLAN_TENSORS, SELECTED, Differentiable, forward_below_autograd, num_state_tensors
from .norm import keeps_rstd, norm_of
from .op_definition import define_backward, define_forward
from .options import ExecutionOptions, callable_of, clip_limit_of, norm_arguments_of, norm_weights_of
from .postprocess import postprocessed
from .route_plan import RoutePlan
from .weights import PreparedWeight, unprepared
from .wgrad import PLAIN, weight_grads_of


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
) -> tuple[Tensor, list[Tensor]]:
    """out_TD and, of a forward that saves, the state that bf16_backward takes: the tensors of the route plan, the place
    record, and of a norm the rows and their 1 / rms; last, with a clip_limit, the clip statistics, FP32 [3], which
    backward does not take. Collective.

    returns_routes: out is [T, K, D], the rows of the experts without their scores, of which then come no gradients.
    norm_weight_D, norm: RMSNorm behind the experts, see norm_of.

    With NO_SLOT the state is for show: a checkpoint will drop it and run the forward again before the backward.
    With SELECTED it is a compiled program's: slot and depth, and whether there is a checkpoint around the program, are
    what they are when it runs.
    """
    ctx = live_context(context)
    with ctx.call():
        if save and slot == SELECTED:
            require_savable(ids_TK, scores_TK, w13, w2, norm_weight_D)
        weights = expert_major(ctx, w13, w2)
        how = (save, slot, depth, returns_routes, clip_limit, norm_weight_D, norm)
        out_TD, state, clip_stats = run_forward(ctx, x_TD, ids_TK, scores_TK, *weights, *how)
    return out_TD, state + clip_stats


def run_forward(
    ctx: Context, x_TD, ids_TK, scores_TK, w13, w2, save: bool, slot: int, depth: int, returns_routes, clip_limit, *norm
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """What _bf16_forward returns, of weights as the path takes them, clip statistics apart; inside ctx.call()."""
    if returns_routes or norm[1] is not None:
        require_route_outputs(ctx)  # of callers of the op
    if slot == SELECTED:
        slot, depth = (NO_SLOT, depth) if is_first_run() else ctx.saved.selected
    out_TD = empty_out(x_TD, ids_TK, returns_routes)
    norm_state = empty_norm_state(x_TD, ids_TK, save, norm[1])
    saves_in_slot = save and slot != NO_SLOT
    if saves_in_slot:
        ctx.saved.push(slot, depth)
    call = ForwardCall(x_TD, ids_TK, scores_TK, w13, w2, out_TD, saves_in_slot, slot, depth, returns_routes)
    clip_stats = empty_clip_stats(x_TD, clip_limit)
    if clip_stats:
        call.clip_limit, (call.clip_stats_3,) = clip_limit, clip_stats
    call.norm = norm_of(*norm)
    call.keep(*norm_state)
    moe.forward(ctx.path, ctx.ranks, [call])
    if saves_in_slot:
        ctx.saved.newest.address = call.place.data_ptr()
    return out_TD, [*call.plan.tensors(), call.place, *norm_state] if save else [], clip_stats


def empty_out(x_TD: Tensor, ids_TK: Tensor, returns_routes: bool) -> Tensor:
    (T, D), K = x_TD.shape, ids_TK.shape[1]
    return torch.empty((T, K, D) if returns_routes else (T, D), dtype=x_TD.dtype, device=x_TD.device)


def empty_norm_state(x_TD: Tensor, ids_TK: Tensor, save: bool, norm: list[float] | None) -> list[Tensor]:
    """For the rows and their 1 / rms, if that is kept; nothing without a norm or a backward."""
    if not save or norm is None:
        return []
    (T, D), K = x_TD.shape, ids_TK.shape[1]
    rstd_shape = (T, K) if keeps_rstd(norm) else (0,)
    return [x_TD.new_empty(T, K, D), x_TD.new_empty(rstd_shape, dtype=torch.float32)]


def empty_clip_stats(x_TD: Tensor, clip_limit: float | None) -> list[Tensor]:
    return [] if clip_limit is None else [x_TD.new_empty(3, dtype=torch.float32)]


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
    state = fake_state(x_TD, ids_TK, save, norm, context) + empty_clip_stats(x_TD, clip_limit)
    return empty_out(x_TD, ids_TK, returns_routes), state


def fake_state(x_TD, ids_TK, save, norm, context) -> list[Tensor]:
    ctx = live_context(context)
    if not save:
        return []
    R, L, W = ctx.path.capacity_rows, ctx.experts_per_rank, ctx.world.size
    i32, i64 = torch.int32, torch.int64
    counts = [(L + 1, i32), (L, i32), (W, i64), (1, i32), (1, i32)]
    sizes = [*counts, *[(R, i32)] * 4, (ctx.path.geometry.place_words, i64)]
    route_state = [x_TD.new_empty(size, dtype=dtype) for size, dtype in sizes]
    return route_state + empty_norm_state(x_TD, ids_TK, save, norm)


def _bf16_backward(
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
    call = BackwardCall(
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
        rows_TKD, rstd_TK = state[NUM_PLAN_TENSORS + 1 : num_state_tensors(norm)]
        call.norm, call.rows_TKD, call.rstd_TK = norm, rows_TKD, rstd_TK if rstd_TK.dim() > 1 else None
        call.grad_norm_weight_D = grads[4] if grads[4].numel() else None
    ctx.saved.pop(slot, state[NUM_PLAN_TENSORS].data_ptr())
    moe.backward(ctx.path, ctx.ranks, [call])


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


bf16_forward = define_forward("bf16_forward", _bf16_forward, _fake_bf16_forward)
bf16_backward = define_backward("bf16_backward", _bf16_backward, fake_backward)


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
             parameter's grad_dtype). A checkpoint makes the call again, into the slot then selected, unless it is a
             selective one that saves the outputs of FORWARD_OPS.
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
        if save:
            check_saved(*inputs[1:], options)
        slot, depth = (SELECTED, 1) if torch.compiler.is_compiling() else context.saved.selected
        inputs, prepared = unprepared(inputs)
        wgrads = weight_grads_of(options, inputs, save)
        clip_limit, post = clip_limit_of(options), callable_of(options)
        inputs, op = (*inputs, save, slot, depth, context.name), bf16_forward
        if context.path.format is not None:
            op, inputs = torch.ops.dist_moe.block_scaled_forward.default, (*inputs, prepared)
        inputs = (*inputs, post is not None, clip_limit, norm_weight_D, norm)
        if wgrads is PLAIN:
            out_TD, state = op(*inputs)
        elif save:
            out_TD, *state = Differentiable.apply(op, wgrads, *inputs)
        else:
            out_TD, state = forward_below_autograd(op, wgrads, inputs)
        if clip_limit is not None:
            options.swiglu_clip_stats_out_3.copy_(state[-1])
        if post is not None:
            out_TD = postprocessed(post, out_TD, topk_expert_ids_TK, topk_scores_TK, context)
    except EARLY_STOP:
        raise
    except BaseException as error:
        context.refuse(error)
        raise
    return out_TD

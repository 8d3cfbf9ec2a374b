"""routed_experts and the custom ops it calls: one opaque forward, one opaque backward.

The ops name their Context by its handle and find its buffers inside: a symmetric region that were an op argument could
reach the op as a clone, and peers would write elsewhere. What forward hands to backward travels as returned tensors.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.utils.checkpoint
from torch import Tensor

from . import moe
from .checks import check_call, wants_backward
from .context import Context, live_context
from .norm import keeps_rstd, norm_of
from .options import ExecutionOptions, RMSNormPostprocess
from .postprocess import postprocessed
from .route_plan import RoutePlan
from .weights import PreparedWeight

NO_SLOT = -1
# How a checkpoint ends its recomputation once it has what it needs: out of a hook, and no failure.
_EARLY_STOP = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())
# What torch's engine says of the visit it makes. Not public: without the first there is no split backward, and without
# the second a gradient may be kept for a visit that cannot come.
_executes = getattr(torch._C, "_will_engine_execute_node", lambda node: True)
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
NUM_PLAN_TENSORS = len(RoutePlan.__dataclass_fields__)
NUM_STATE_TENSORS = NUM_PLAN_TENSORS + 1  # and the place record


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
        norm_state = state[NUM_STATE_TENSORS : NUM_STATE_TENSORS + 2]
        weights = expert_major(ctx, w13, w2)
        how = (state, slot, grads, norm_of(norm_weight_D, norm), norm_state)
        run_backward(ctx, grad_out_TD, ids_TK, scores_TK, *weights, *how)
    return grads


def empty_norm_weight_grad(grad_out_TD: Tensor, norm_weight_D: Tensor | None, needs_norm_weight: bool) -> Tensor:
    return torch.empty_like(norm_weight_D) if needs_norm_weight else grad_out_TD.new_empty(0)


def run_backward(
    ctx: Context, grad_out_TD, ids_TK, scores_TK, w13, w2, state, slot: int, grads: tuple, norm, norm_state
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
    )
    if norm is not None:
        call.norm, call.rows_TKD = norm, norm_state[0]
        call.rstd_TK = norm_state[1] if norm_state[1].dim() > 1 else None
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
        grad_out_TD.new_empty((grad_out_TD.shape[0], grad_out_TD.shape[-1])),
        scores_TK.new_empty(scores_TK.shape if grad_out_TD.dim() == 2 else (0,)),
        w13.new_empty(w13.shape if needs_w13 else (0,), dtype=wgrad_dtype),
        w2.new_empty(w2.shape if needs_w2 else (0,), dtype=wgrad_dtype),
    )


def prepared_operands(*weights: PreparedWeight) -> list[Tensor | None]:
    """What block_scaled_forward takes of prepared weights: values, scales, transposed scales, inverse outer scales."""
    names = ("fprop_data", "fprop_scale", "dgrad_scale", "global_scale_inv")
    return [getattr(weight, name) for weight in weights for name in names]


def unprepared(inputs: tuple) -> tuple[tuple, list[Tensor | None]]:
    """The inputs of a call with the sources of prepared weights, to which gradients go, and prepared_operands."""
    weights = inputs[3:]
    if not isinstance(weights[0], PreparedWeight):
        return inputs, []
    return (*inputs[:3], *(weight.source for weight in weights)), prepared_operands(*weights)


def operands_of_backward(prepared: list[Tensor | None]) -> list[Tensor | None]:
    return [*prepared[:3], *prepared[4:7]]


def expert_major(ctx: Context, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """The weights as [L, 2F, D] and [L, D, F], whatever layout the caller has them in.

    Raises: ValueError for an address that is not a multiple of 16, which TMA cannot read; only real tensors have one.
    """
    for name, weight in (("w13_weight", w13), ("w2_weight", w2)):
        if weight.data_ptr() % 16:
            raise ValueError(
                f"routed_experts: {name} must start at a multiple of 16 bytes, it is a view at an odd place; clone it"
            )
    L, D, F = ctx.experts_per_rank, ctx.config.hidden_dim, ctx.config.intermediate_dim
    return w13.detach().view(L, 2 * F, D), w2.detach().view(L, D, F)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            out_TD, *state, clip_stats_3 = op(*inputs)
        _, ids_TK, scores_TK, w13, w2, save, slot, _, context, *more = inputs
        ctx.set_materialize_grads(False)  # zeros for the state would cost a launch each
        ctx.mark_non_differentiable(clip_stats_3)
        saved = state
        if more and isinstance(more[0], list) and more[0]:  # prepared ones: no weights that the call has quantised
            saved = [*state[:NUM_STATE_TENSORS], *operands_of_backward(more[0]), *state[-2:]]
        first_option = 9 + (len(more) > 0 and isinstance(more[0], list))
        options = (*inputs[first_option:], None, None, None, None)
        ctx.norm_place, ctx.norm = first_option + 2, options[3]
        ctx.save_for_backward(ids_TK, scores_TK, w13, w2, options[2], *(saved if save else ()))
        ctx.handle, ctx.slot, ctx.kept, ctx.num_inputs = context, slot, None, len(inputs)
        ctx.returns_routes = out_TD.dim() == 3
        # Tensors of a trace have no forward behind them: there the device alone finds a misused state.
        tracing = torch.compiler.is_compiling() or type(out_TD) is not Tensor
        ctx.saved_forward = None if tracing or not save or slot == NO_SLOT else live_context(context).saved.newest
        return out_TD, *state, clip_stats_3

    @staticmethod
    def backward(ctx, grad_out_TD, *_grads_of_others):
        if grad_out_TD is None:  # cut off by a later node of this rank: the other ranks still come
            ids_TK = ctx.saved_tensors[0]
            D = live_context(ctx.handle).config.hidden_dim
            shape = (*ids_TK.shape, D) if ctx.returns_routes else (ids_TK.shape[0], D)
            grad_out_TD = torch.zeros(shape, dtype=torch.bfloat16, device=ids_TK.device)
        return _backward(ctx, grad_out_TD)


@dataclass(frozen=True)
class _Kept:
    """The gradients that a visit of a split backward made and the engine did not take, by place among the inputs."""

    grads: dict[int, Tensor]
    grad_out_TD: "weakref.ref[Tensor]"  # weak, lest a graph behind it hold this node
    version: int
    num_resets: int

    def serves(self, taken: set[int], grad_out_TD: Tensor, num_resets: int) -> bool:
        """Whether it holds all that this visit takes, for this very gradient, as it was then."""
        same = self.grad_out_TD() is grad_out_TD and self.version == grad_out_TD._version
        return same and self.num_resets == num_resets and taken <= self.grads.keys()


def _backward(ctx, grad_out_TD):
    """Zero-bubble schedules visit a node twice: for the gradients of its inputs, then for those of its weights.

    The first visit runs all of the backward, which is collective and empties the slot; the second gets what the first
    one kept. A visit that wants more, or is given another gradient of the output, is a second backward.
    """
    context = live_context(ctx.handle)
    try:
        nodes = {place: node for place, (node, _) in enumerate(ctx.next_functions) if node is not None}
        taken = {place for place, node in nodes.items() if _takes(node)}
        num_resets = context.saved.num_resets
        kept, ctx.kept = ctx.kept, None
        if kept is not None and kept.serves(taken, grad_out_TD, num_resets):
            context.raise_fault()
            grads = kept.grads
        else:
            grads = dict(enumerate(_checked_backward(ctx, grad_out_TD, context)))
        left = {place: grads[place] for place in nodes.keys() - taken if place in grads}
        # A gradient with a graph could hold this node; one of inference mode does not tell when it is changed.
        if left and _keeps_graph() and not torch.is_grad_enabled() and not grad_out_TD.is_inference():
            ctx.kept = _Kept(left, weakref.ref(grad_out_TD), grad_out_TD._version, num_resets)
    except BaseException as error:  # for one, a weight that was changed in place since forward
        context.refuse(error)
        raise
    by_input = [*map(grads.get, range(5)), *[None] * (ctx.num_inputs - 5)]
    if ctx.norm_place < ctx.num_inputs:
        by_input[ctx.norm_place] = grads.get(5)
    return None, *by_input


def _takes(node) -> bool:
    """Whether the engine passes on a gradient to this next node in the visit it makes."""
    try:
        return _executes(node)
    except RuntimeError:  # how torch answers for a leaf whose gradient autograd.grad() returns
        return True


def _checked_backward(ctx, grad_out_TD, context: Context):
    ids_TK, scores_TK, w13, w2, norm_weight_D, *state = ctx.saved_tensors
    if not state:
        raise RuntimeError("this forward was called with save=False, so it has no backward")
    if ctx.saved_forward is not None:
        context.require_newest(ctx.saved_forward)
    needs_w13, needs_w2 = ctx.needs_input_grad[4:6]
    needs_norm_weight = norm_weight_D is not None and ctx.needs_input_grad[1 + ctx.norm_place]
    run = bf16_backward if context.path.format is None else torch.ops.dist_moe.block_scaled_backward
    grads = run(
        grad_out_TD,
        ids_TK,
        scores_TK,
        w13,
        w2,
        state,
        needs_w13,
        needs_w2,
        context.config.wgrad_dtype or w13.dtype,
        ctx.slot,
        ctx.handle,
        norm_weight_D,
        ctx.norm,
        needs_norm_weight,
    )
    grad_x_TD, grad_scores_TK, grad_w13, grad_w2, grad_norm_weight_D = grads
    return (
        grad_x_TD,
        None,
        None if ctx.returns_routes else grad_scores_TK,
        grad_w13 if needs_w13 else None,
        grad_w2 if needs_w2 else None,
        grad_norm_weight_D if needs_norm_weight else None,
    )


def _refuse_vmap(*inputs):
    raise NotImplementedError("routed_experts cannot run under torch.vmap: it is a call of all ranks, once")


_LIBRARY = torch.library.Library("dist_moe", "FRAGMENT")  # its ops go with it


def define_forward(name: str, forward, fake):
    """The op of a forward, with _Differentiable as its autograd.

    By hand what torch.library.custom_op makes, whose layers of Python around a call cost an eager forward of a small
    model a sixth of its time; docs/performance.md has the figures.
    """
    _LIBRARY.define(f"{name}{torch.library.infer_schema(forward, mutates_args=())}", tags=torch.Tag.pt2_compliant_tag)
    op = getattr(torch.ops.dist_moe, name).default

    def with_autograd(*inputs):
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return _Differentiable.apply(op, *inputs)
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
    Raises:  TypeError, ValueError for arguments; NotImplementedError naming a feature that this release only checks;
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
        clip_limit, post = clip_limit_of(options), callable_of(options)
        how = (post is not None, clip_limit, norm_weight_D, norm)
        if context.path.format is None:
            out_TD, *_, clip_stats_3 = bf16_forward(*inputs, save, slot, depth, context.name, *how)
        else:
            scaled_forward = torch.ops.dist_moe.block_scaled_forward.default
            out_TD, *_, clip_stats_3 = scaled_forward(*inputs, save, slot, depth, context.name, prepared, *how)
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


def clip_limit_of(options: ExecutionOptions | None) -> float | None:
    """The limit to count at, as FP32 can hold it; None: nothing is to be counted."""
    if options is None or options.swiglu_clip_stats_out_3 is None:
        return None
    largest = torch.finfo(torch.float32).max  # no finite BF16 value is beyond it
    return min(max(options.swiglu_clip_limit, -largest), largest)


def callable_of(options: ExecutionOptions | None) -> Callable[[Tensor], Tensor] | RMSNormPostprocess | None:
    """What takes the route rows out of the op: the caller's own function, or a norm with an observer."""
    post = None if options is None else options.experts_output_postprocess
    return None if isinstance(post, RMSNormPostprocess) and not post.has_observer else post


def norm_weights_of(options: ExecutionOptions | None) -> tuple[Tensor, ...]:
    """The weight of a norm behind the experts, if there is one."""
    post = None if options is None else options.experts_output_postprocess
    return (post.weight,) if isinstance(post, RMSNormPostprocess) and post.weight is not None else ()


def norm_arguments_of(options: ExecutionOptions | None) -> tuple[Tensor | None, list[float] | None]:
    """norm_weight_D and norm of the ops: of a norm without an observer."""
    post = None if options is None else options.experts_output_postprocess
    if not isinstance(post, RMSNormPostprocess) or post.has_observer:
        return None, None
    return post.weight, post.numbers


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

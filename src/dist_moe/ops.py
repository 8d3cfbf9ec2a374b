"""routed_experts and the custom ops it calls: one opaque forward, one opaque backward, and one that writes the weight
gradients into tensors of the caller's, which its schema says.

The ops name their Context by its handle and find its buffers inside: a symmetric region that were an op argument could
reach the op as a clone, and peers would write elsewhere. What forward hands to backward travels as returned tensors.
"""

import weakref
from dataclasses import dataclass

import torch
import torch.utils.checkpoint
from torch import Tensor

from . import moe
from .checks import check_call, wants_backward
from .context import Context, live_context
from .engine import keeps_graph, takes
from .options import ExecutionOptions
from .route_plan import RoutePlan
from .weights import PreparedWeight
from .wgrad import PLAIN, W2, W13, Targets, WeightGrads, weight_grads_of

NO_SLOT = -1
# How a checkpoint ends its recomputation once it has what it needs: out of a hook, and no failure.
_EARLY_STOP = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out_TD, then the state that bf16_backward takes: the tensors of the route plan, and the place record. Collective.

    Only a forward that saves has a backward; the state of others is empty. With NO_SLOT it is for show: a checkpoint
    will drop it and run the forward again before the backward.
    """
    ctx = live_context(context)
    with ctx.call():
        return run_forward(ctx, x_TD, ids_TK, scores_TK, *expert_major(ctx, w13, w2), save, slot, depth)


def run_forward(ctx: Context, x_TD, ids_TK, scores_TK, w13, w2, save: bool, slot: int, depth: int) -> tuple:
    """out_TD and the state of every forward, of weights as the path takes them; inside ctx.call()."""
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    saves_in_slot = save and slot != NO_SLOT
    if saves_in_slot:
        ctx.saved.push(slot, depth)
    call = moe.ForwardCall(x_TD, ids_TK, scores_TK, w13, w2, out_TD, saves_in_slot, slot, depth)
    moe.forward(ctx.path, ctx.ranks, [call])
    state = [*call.plan.tensors(), call.place]
    return out_TD, *(state if save else [tensor.new_empty(0) for tensor in state])


def _fake_bf16_forward(x_TD, ids_TK, scores_TK, w13, w2, save, slot, depth, context):
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format), *fake_state(x_TD, save, context)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, scores, w13, w2 in their layouts; an unwanted weight gradient is empty. Collective."""
    ctx = live_context(context)
    with ctx.call():
        grads = empty_grads(grad_out_TD, scores_TK, w13, w2, needs_w13, needs_w2, wgrad_dtype)
        run_backward(ctx, grad_out_TD, ids_TK, scores_TK, *expert_major(ctx, w13, w2), state, slot, grads)
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
) -> tuple[Tensor, Tensor]:
    """Gradients of x and scores; those of the weights go into the accumulators, contiguous bf16 or FP32 tensors of as
    many elements, None for a weight without one: added to what they hold, or written over it. Collective."""
    ctx = live_context(context)
    with ctx.call():
        grads = (
            *empty_grads_of_tokens(grad_out_TD, scores_TK),
            *accumulators(accumulator_grad_w13, accumulator_grad_w2),
        )
        given = (grad_out_TD, ids_TK, scores_TK, *expert_major(ctx, w13, w2), state, slot, grads)
        run_backward(ctx, *given, adds_w13, adds_w2)
    return grads[:2]


@bf16_backward_accumulate_.register_fake
def _(grad_out_TD, ids_TK, scores_TK, w13, w2, state, acc_w13, acc_w2, adds_w13, adds_w2, slot, context):
    return empty_grads_of_tokens(grad_out_TD, scores_TK)


def accumulators(*grads: Tensor | None) -> list[Tensor]:
    """Those of both weights as the gradients that run_backward fills. Raises ValueError as require_aligned."""
    for name, grad in zip(("w13", "w2"), grads, strict=True):
        if grad is not None:
            require_aligned(f"what takes the gradient of {name}", grad)
    return [torch.empty(0) if grad is None else grad for grad in grads]


def run_backward(
    ctx: Context, grad_out_TD, ids_TK, scores_TK, w13, w2, state, slot: int, grads: tuple, adds_w13=False, adds_w2=False
) -> None:
    """Fill the gradients of x, scores, w13 and w2, empty ones but for those of weights that are not wanted; inside
    ctx.call(), of weights as the path takes them."""
    L, D, F = ctx.experts_per_rank, ctx.config.hidden_dim, ctx.config.intermediate_dim
    of_weights = (
        grad.view(shape) if grad.numel() else None
        for grad, shape in zip(grads[2:], ((L, 2 * F, D), (L, D, F)), strict=True)
    )
    call = moe.BackwardCall(
        # An expanded gradient, sum()'s for one, has strides of 0.
        grad_out_TD if grad_out_TD.stride(1) == 1 else grad_out_TD.clone(memory_format=torch.contiguous_format),
        ids_TK,
        scores_TK,
        w13,
        w2,
        RoutePlan(*state[:NUM_PLAN_TENSORS]),
        state[NUM_PLAN_TENSORS],
        *grads[:2],
        *of_weights,
        adds_w13,
        adds_w2,
    )
    ctx.saved.pop(slot)
    moe.backward(ctx.path, ctx.ranks, [call])


@bf16_backward.register_fake
def _(grad_out_TD, ids_TK, scores_TK, w13, w2, state, needs_w13, needs_w2, wgrad_dtype, slot, context):
    return empty_grads(grad_out_TD, scores_TK, w13, w2, needs_w13, needs_w2, wgrad_dtype)


def empty_grads(
    grad_out_TD, scores_TK, w13, w2, needs_w13, needs_w2, wgrad_dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        *empty_grads_of_tokens(grad_out_TD, scores_TK),
        w13.new_empty(w13.shape if needs_w13 else (0,), dtype=wgrad_dtype),
        w2.new_empty(w2.shape if needs_w2 else (0,), dtype=wgrad_dtype),
    )


def empty_grads_of_tokens(grad_out_TD, scores_TK) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(grad_out_TD.shape, dtype=grad_out_TD.dtype, device=grad_out_TD.device),
        torch.empty(scores_TK.shape, dtype=scores_TK.dtype, device=scores_TK.device),
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


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, wgrads: WeightGrads, *inputs):
        out_TD, *state = _run_forward(op, wgrads, inputs)
        _, ids_TK, scores_TK, w13, w2, save, slot, _, context, *prepared = inputs
        ctx.set_materialize_grads(False)  # zeros for the state would cost a launch each
        saved = state
        if wgrads.preprocess_fn is not None:  # only the weights as they came, from which backward makes the operands
            saved = state[:NUM_STATE_TENSORS]
        if prepared and prepared[0]:  # in place of weights that the call would have quantised
            saved = [*state[:NUM_STATE_TENSORS], *operands_of_backward(*prepared)]
        ctx.save_for_backward(ids_TK, scores_TK, w13, w2, *(saved if save else ()))
        ctx.handle, ctx.slot, ctx.kept, ctx.num_inputs, ctx.wgrads = context, slot, None, len(inputs), wgrads
        # Tensors of a trace have no forward behind them: there the device alone finds a misused state.
        tracing = torch.compiler.is_compiling() or type(out_TD) is not Tensor
        ctx.saved_forward = None if tracing or not save or slot == NO_SLOT else live_context(context).saved.newest
        return out_TD, *state

    @staticmethod
    def backward(ctx, grad_out_TD, *_grads_of_state):
        if grad_out_TD is None:  # cut off by a later node of this rank: the other ranks still come
            ids_TK = ctx.saved_tensors[0]
            D = live_context(ctx.handle).config.hidden_dim
            grad_out_TD = torch.zeros(ids_TK.shape[0], D, dtype=torch.bfloat16, device=ids_TK.device)
        return _backward(ctx, grad_out_TD)


def _run_forward(op, wgrads: WeightGrads, inputs: tuple):
    """The op, below autograd, of the weights that wgrads makes."""
    if wgrads.preprocess_fn is not None:
        weights = wgrads.preprocessed(live_context(inputs[8]), *inputs[W13 : W2 + 1])
        inputs = (*inputs[:W13], *weights, *inputs[W2 + 1 :])
    with torch._C._AutoDispatchBelowAutograd():
        return op(*inputs)


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
        taken = {place for place, node in nodes.items() if takes(node)}
        num_resets = context.saved.num_resets
        kept = ctx.kept
        serves = kept is not None and kept.serves(taken, grad_out_TD, num_resets)
        if serves:
            context.raise_fault()
        else:
            saved = _saved_tensors(ctx, context)
        targets = ctx.wgrads.resolve(context.config.wgrad_dtype, nodes)
        ctx.kept = None
        grads = dict(kept.grads) if serves else _run_backward(ctx, saved, grad_out_TD, context, targets, taken)
        left = {place: grads[place] for place in nodes.keys() - taken if place in grads}
        # A gradient with a graph could hold this node; one of inference mode does not tell when it is changed.
        if left and keeps_graph() and not torch.is_grad_enabled() and not grad_out_TD.is_inference():
            ctx.kept = _Kept(left, weakref.ref(grad_out_TD), grad_out_TD._version, num_resets)
        ctx.wgrads.deliver(targets, grads, taken, context.ranks[0].stop_1)
    except BaseException as error:  # for one, a weight that was changed in place since forward
        context.refuse(error)
        raise
    return None, None, *map(grads.get, range(5)), *[None] * (ctx.num_inputs - 5)


def _saved_tensors(ctx, context: Context) -> tuple[Tensor, ...]:
    """Of a node whose backward may run now; a checkpoint runs the forward for them, and once only."""
    saved = ctx.saved_tensors
    if not saved[4:]:
        raise RuntimeError("this forward was called with save=False, so it has no backward")
    if ctx.saved_forward is not None:
        context.require_newest(ctx.saved_forward)
    return saved


def _run_backward(ctx, saved, grad_out_TD, context: Context, targets: Targets, taken: set[int]) -> dict[int, Tensor]:
    """The gradients by place, without those that it wrote into destinations."""
    ids_TK, scores_TK, w13, w2, *state = saved
    targets.check_apart(w13, w2)
    w13, w2 = ctx.wgrads.preprocessed(context, w13, w2)
    op = "bf16_backward"
    if context.path.format is not None:
        op = "block_scaled_backward"
        if ctx.wgrads.preprocess_fn is not None:
            from .ops_scaled import operands_of_call

            state = [*state, *operands_of_call(context, w13, w2)]
    needed = {place for place, needs in ((W13, ctx.needs_input_grad[5]), (W2, ctx.needs_input_grad[6])) if needs}
    given = (grad_out_TD, ids_TK, scores_TK, w13, w2, state)
    if targets.written_by_backward(needed):
        into = [targets.into.get(place) for place in (W13, W2)]
        tensors = [None if destination is None else destination.tensor for destination in into]
        adds = [destination is not None and destination.accumulate for destination in into]
        grads = getattr(torch.ops.dist_moe, f"{op}_accumulate_").default(*given, *tensors, *adds, ctx.slot, ctx.handle)
        return dict(zip((0, 2), grads, strict=True))
    dtype = targets.dtype_of_new(needed, taken, ctx.wgrads)
    how = (W13 in needed, W2 in needed, dtype, ctx.slot, ctx.handle)
    grads = dict(zip((0, 2, W13, W2), getattr(torch.ops.dist_moe, op).default(*given, *how), strict=True))
    return {place: grad for place, grad in grads.items() if place in (0, 2) or place in needed}


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
            return _Differentiable.apply(op, PLAIN, *inputs)
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
    Returns: bf16 [T, D], new memory; rows of tokens without experts are 0. Differentiable in x, scores and weights,
             once a forward, in one visit or, with retain_graph, one for the inputs and one for the weights with the
             same gradient tensor of the output, as zero-bubble schedules have it; weight gradients leave backward in
             Config.wgrad_dtype, or the weight's dtype (autograd rounds them to the parameter's grad_dtype). A
             selective checkpoint must save the outputs of torch.ops.dist_moe.bf16_forward (block_scaled_forward); a
             plain one saves, when it recomputes, into the slot then selected.
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
        save = wants_backward(context, x_TD, topk_scores_TK, w13_weight, w2_weight)
        slot, depth = context.saved.selected
        if save and _runs_again_before_backward():
            slot = NO_SLOT
        inputs, prepared = unprepared(inputs)
        wgrads = weight_grads_of(options, inputs, save)
        inputs = (*inputs, save, slot, depth, context.name)
        op = bf16_forward
        if context.path.format is not None:
            op, inputs = torch.ops.dist_moe.block_scaled_forward.default, (*inputs, prepared)
        if wgrads is PLAIN:
            out_TD, *_ = op(*inputs)
        elif save:
            out_TD, *_ = _Differentiable.apply(op, wgrads, *inputs)
        else:
            out_TD, *_ = _run_forward(op, wgrads, inputs)
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

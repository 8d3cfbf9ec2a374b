"""The autograd node of routed_experts: what a forward keeps, and the one backward that its visits share."""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .checkpoints import is_recomputed_when_compiled, runs_again
from .context import Context, live_context
from .engine import keeps_graph, takes
from .route_plan import RoutePlan
from .weights import operands_of_backward
from .wgrad import W2, W13, Targets, WeightGrads

NO_SLOT, SELECTED = -1, -2  # in place of a slot: none, and the one that is selected when a compiled program runs
NUM_PLAN_TENSORS = len(RoutePlan.__dataclass_fields__)
X, SCORES, NORM_WEIGHT = 0, 2, 5  # places among the tensors of a call, as W13 and W2 are
SLOT = 6  # among the arguments of a forward op


def num_state_tensors(norm) -> int:
    """What a forward hands to backward beside operands: the plan, the place record, of a norm the rows and 1 / rms."""
    return NUM_PLAN_TENSORS + (1 if norm is None else 3)


class Differentiable(torch.autograd.Function):
    """Of the arguments of an op of ops.define_forward."""

    @staticmethod
    def forward(ctx, op, wgrads: WeightGrads, *inputs):
        compiling = isinstance(inputs[X], FunctionalTensor)
        if compiling and is_recomputed_when_compiled(op, inputs):
            raise NotImplementedError(
                f"routed_experts: a checkpoint inside of torch.compile has to save the outputs of {op}: give it a "
                "context_fn whose policy saves those of dist_moe.FORWARD_OPS, or put it around the compiled function"
            )
        if not compiling and runs_again(op, inputs):
            inputs = (*inputs[:SLOT], NO_SLOT, *inputs[SLOT + 1 :])
        out_TD, state = forward_below_autograd(op, wgrads, inputs)
        _, ids_TK, scores_TK, w13, w2, save, slot, _, context, *more = inputs
        ctx.set_materialize_grads(False)  # zeros for the state would cost a launch each
        ctx.mark_non_differentiable(*state)
        is_scaled = live_context(context).path.format is not None
        prepared = more.pop(0) if is_scaled else []
        _, clip_limit, norm_weight_D, ctx.norm = (*more, *[None] * (4 - len(more)))  # trailing defaults are not passed
        saved = state if clip_limit is None else state[:-1]
        if wgrads.preprocess_fn is not None:  # only the weights as they came, from which backward makes the operands
            saved = state[: num_state_tensors(ctx.norm)]
        if prepared:  # in place of weights that the call would have quantised
            saved = [*saved, *operands_of_backward(prepared)]
        ctx.save_for_backward(ids_TK, scores_TK, w13, w2, norm_weight_D, *(saved if save else ()))
        ctx.handle, ctx.slot, ctx.kept, ctx.num_inputs, ctx.wgrads = context, slot, None, len(inputs), wgrads
        ctx.norm_input, ctx.returns_routes = 11 + is_scaled, out_TD.dim() == 3
        # Tensors of a trace have no forward behind them: there the device alone finds a misused state.
        tracing = torch.compiler.is_compiling() or type(out_TD) is not Tensor
        ctx.saved_forward = None if tracing or not save or slot == NO_SLOT else live_context(context).saved.newest
        return out_TD, *state

    @staticmethod
    def backward(ctx, grad_out_TD, *_grads_of_others):
        if grad_out_TD is None:  # cut off by a later node of this rank: the other ranks still come
            ids_TK = ctx.saved_tensors[0]
            D = live_context(ctx.handle).config.hidden_dim
            shape = (*ids_TK.shape, D) if ctx.returns_routes else (ids_TK.shape[0], D)
            grad_out_TD = torch.zeros(shape, dtype=torch.bfloat16, device=ids_TK.device)
        grads = _backward(ctx, grad_out_TD)
        by_input = [*map(grads.get, range(NORM_WEIGHT)), *[None] * (ctx.num_inputs - NORM_WEIGHT)]
        if NORM_WEIGHT in grads:
            by_input[ctx.norm_input] = grads[NORM_WEIGHT]
        return None, None, *by_input


def forward_below_autograd(op, wgrads: WeightGrads, inputs: tuple):
    """The op, below autograd, of the weights that wgrads makes."""
    if wgrads.preprocess_fn is not None:
        weights = wgrads.preprocessed(live_context(inputs[8]), *inputs[W13 : W2 + 1])
        inputs = (*inputs[:W13], *weights, *inputs[W2 + 1 :])
    with torch._C._AutoDispatchBelowAutograd():
        return op(*inputs)


@dataclass(frozen=True)
class _Kept:
    """The gradients that a visit of a split backward made and the engine did not take, by place."""

    grads: dict[int, Tensor]
    grad_out_TD: "weakref.ref[Tensor]"  # weak, lest a graph behind it hold this node
    version: int
    num_resets: int

    def serves(self, taken: set[int], grad_out_TD: Tensor, num_resets: int) -> bool:
        """Whether it holds all that this visit takes, for this very gradient, as it was then."""
        same = self.grad_out_TD() is grad_out_TD and self.version == grad_out_TD._version
        return same and self.num_resets == num_resets and taken <= self.grads.keys()


def _backward(ctx, grad_out_TD) -> dict[int, Tensor]:
    """The gradients for autograd, by place.

    Zero-bubble schedules visit a node twice: for the gradients of its inputs, then for those of its weights. The first
    visit runs all of the backward, which is collective and empties the slot; the second gets what the first one kept. A
    visit that wants more, or is given another gradient of the output, is a second backward.
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
        if serves:
            grads = dict(kept.grads)
        else:
            grads = _run_backward(ctx, saved, grad_out_TD, context, targets, nodes.keys(), taken)
        left = {place: grads[place] for place in nodes.keys() - taken if place in grads}
        # A gradient with a graph could hold this node; one of inference mode does not tell when it is changed.
        if left and keeps_graph() and not torch.is_grad_enabled() and not grad_out_TD.is_inference():
            ctx.kept = _Kept(left, weakref.ref(grad_out_TD), grad_out_TD._version, num_resets)
        ctx.wgrads.deliver(targets, grads, taken, context.ranks[0].stop_1)
    except BaseException as error:  # for one, a weight that was changed in place since forward
        context.refuse(error)
        raise
    return grads


def _saved_tensors(ctx, context: Context) -> tuple[Tensor, ...]:
    """Of a node whose backward may run now; a checkpoint runs the forward for them, and once only."""
    saved = ctx.saved_tensors
    if not saved[5:]:
        raise RuntimeError("this forward was called with save=False, so it has no backward")
    if ctx.saved_forward is not None:
        context.require_newest(ctx.saved_forward)
    return saved


def _run_backward(
    ctx, saved, grad_out_TD, context: Context, targets: Targets, wanted: set[int], taken: set[int]
) -> dict[int, Tensor]:
    """The gradients by place, without those that it wrote into destinations.

    Args:    wanted: the places that have a gradient.  taken: those of them that this visit takes.
    """
    ids_TK, scores_TK, w13, w2, norm_weight_D, *state = saved
    targets.check_apart(w13, w2)
    w13, w2 = ctx.wgrads.preprocessed(context, w13, w2)
    op = "bf16_backward"
    if context.path.format is not None:
        op = "block_scaled_backward"
        if ctx.wgrads.preprocess_fn is not None:
            from .ops_scaled import operands_of_call

            state = [*state, *operands_of_call(context, w13, w2)]
    needed = wanted & {W13, W2}
    made = wanted | {X, SCORES} if not ctx.returns_routes else wanted - {SCORES} | {X}
    given = (grad_out_TD, ids_TK, scores_TK, w13, w2, state)
    how = (ctx.slot, ctx.handle, norm_weight_D, ctx.norm, NORM_WEIGHT in wanted)
    if targets.written_by_backward(needed):
        into = [targets.into.get(place) for place in (W13, W2)]
        tensors = [None if destination is None else destination.tensor for destination in into]
        adds = [destination is not None and destination.accumulate for destination in into]
        grads = getattr(torch.ops.dist_moe, f"{op}_accumulate_").default(*given, *tensors, *adds, *how)
        by_place = zip((X, SCORES, NORM_WEIGHT), grads, strict=True)
    else:
        dtype = targets.dtype_of_new(needed, taken, ctx.wgrads)
        grads = getattr(torch.ops.dist_moe, op).default(*given, W13 in needed, W2 in needed, dtype, *how)
        by_place = zip((X, SCORES, W13, W2, NORM_WEIGHT), grads, strict=True)
    return {place: grad for place, grad in by_place if place in made}

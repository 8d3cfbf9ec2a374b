"""The custom ops of block-scaled calls, registered when the first block-scaled Context is made; see ops.py."""

import torch
from torch import Tensor

from .checks import require_savable
from .context import Context, live_context
from .node import SELECTED
from .norm import norm_of
from .op_definition import define_backward, define_forward
from .ops import (
    accumulators,
    empty_clip_stats,
    empty_grads,
    empty_grads_of_tokens,
    empty_norm_weight_grad,
    empty_out,
    expert_major,
    fake_backward,
    fake_backward_accumulate,
    fake_state,
    run_backward,
    run_forward,
)
from .quantized import QuantizedWeights, weights_layout


def weights_of_call(
    context: Context, w13: Tensor, w2: Tensor, prepared: list[Tensor | None]
) -> tuple[QuantizedWeights, QuantizedWeights]:
    """Both weights quantised: prepared ones as they are, others now, square blocks in training."""
    if prepared:
        parts = (prepared[:4], prepared[4:])
        return tuple(QuantizedWeights(*part[:3], None, part[3]) for part in parts)
    how = {"format": context.path.format, "square": context.path.geometry.training}
    return tuple(context.path.ops.quantize_weights(weight, **how) for weight in expert_major(context, w13, w2))


def _block_scaled_forward(
    x_TD: Tensor,
    ids_TK: Tensor,
    scores_TK: Tensor,
    w13: Tensor,
    w2: Tensor,
    save: bool,
    slot: int,
    depth: int,
    context: str,
    prepared: list[Tensor | None],
    returns_routes: bool = False,
    clip_limit: float | None = None,
    norm_weight_D: Tensor | None = None,
    norm: list[float] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """As dist_moe::bf16_forward; the state ends with values, scales and transposed scales of both weights, unless they
    were prepared (weights.prepared_operands). w13 and w2 are bf16, of prepared weights the sources."""
    ctx = live_context(context)
    with ctx.call():
        if save and slot == SELECTED:
            require_savable(ids_TK, scores_TK, w13, w2, norm_weight_D, prepared)
        weights = weights_of_call(ctx, w13, w2, prepared)
        how = (save, slot, depth, returns_routes, clip_limit, norm_weight_D, norm)
        out_TD, state, clip_stats = run_forward(ctx, x_TD, ids_TK, scores_TK, *weights, *how)
    return out_TD, state + (_operands(weights) if save and not prepared else []) + clip_stats


def _operands(weights) -> list[Tensor]:
    return [part for weight in weights for part in weight[:3]]


def operands_of_call(ctx: Context, w13: Tensor, w2: Tensor) -> list[Tensor]:
    """The end of the state of a forward whose weights were not prepared, made again."""
    with ctx.call():
        return _operands(weights_of_call(ctx, w13, w2, []))


def _fake_block_scaled_forward(
    x_TD,
    ids_TK,
    scores_TK,
    w13,
    w2,
    save,
    slot,
    depth,
    context,
    prepared,
    returns_routes=False,
    clip_limit=None,
    norm_weight_D=None,
    norm=None,
):
    ctx, state = live_context(context), fake_state(x_TD, ids_TK, save, norm, context)
    if save and not prepared:
        L, D, F = ctx.experts_per_rank, ctx.config.hidden_dim, ctx.config.intermediate_dim
        layouts = (weights_layout(L, *shape, ctx.path.format, True) for shape in ((2 * F, D), (D, F)))
        state += [x_TD.new_empty(size, dtype=dtype) for layout in layouts for size, dtype in layout[:3]]
    return empty_out(x_TD, ids_TK, returns_routes), state + empty_clip_stats(x_TD, clip_limit)


block_scaled_forward = define_forward("block_scaled_forward", _block_scaled_forward, _fake_block_scaled_forward)


def _block_scaled_backward(
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
    """As dist_moe::bf16_backward; the state ends with the operands of both weights."""
    ctx = live_context(context)
    with ctx.call():
        grads = empty_grads(grad_out_TD, scores_TK, w13, w2, needs_w13, needs_w2, wgrad_dtype)
        grads += (empty_norm_weight_grad(grad_out_TD, norm_weight_D, needs_norm_weight),)
        given = (grad_out_TD, ids_TK, scores_TK, *_weights_of_state(state), state, slot, grads)
        run_backward(ctx, *given, norm_of(norm_weight_D, norm))
    return grads


def _weights_of_state(state: list[Tensor]) -> tuple[QuantizedWeights, QuantizedWeights]:
    return tuple(QuantizedWeights(*part, None, None) for part in (state[-6:-3], state[-3:]))


block_scaled_backward = define_backward("block_scaled_backward", _block_scaled_backward, fake_backward)


@torch.library.custom_op(
    "dist_moe::block_scaled_backward_accumulate_", mutates_args=("accumulator_grad_w13", "accumulator_grad_w2")
)
def block_scaled_backward_accumulate_(
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
    """As dist_moe::bf16_backward_accumulate_; the state ends with the operands of both weights."""
    ctx = live_context(context)
    with ctx.call():
        of_tokens = empty_grads_of_tokens(grad_out_TD, scores_TK)
        of_norm = empty_norm_weight_grad(grad_out_TD, norm_weight_D, needs_norm_weight)
        grads = (*of_tokens, *accumulators(accumulator_grad_w13, accumulator_grad_w2), of_norm)
        given = (grad_out_TD, ids_TK, scores_TK, *_weights_of_state(state), state, slot, grads)
        run_backward(ctx, *given, norm_of(norm_weight_D, norm), adds_w13, adds_w2)
    return *of_tokens, of_norm


block_scaled_backward_accumulate_.register_fake(fake_backward_accumulate)

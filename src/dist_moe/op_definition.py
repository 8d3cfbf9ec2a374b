"""Registering ops that mutate nothing: by hand what torch.library.custom_op makes, whose layers of Python around a call
cost an eager call of a small model a sixth of its time; docs/performance.md has the figures."""

import torch
from torch import Tensor
from torch._library.effects import EffectType

from .node import Differentiable
from .wgrad import PLAIN

_LIBRARY = torch.library.Library("dist_moe", "FRAGMENT")  # its ops go with it

FORWARD_OPS: list[torch._ops.OpOverload] = []
"""The forward ops of this process, whose outputs a selective checkpoint saves or recomputes. That of block-scaled calls
joins them when the first block-scaled Context is made."""


def define_forward(name: str, forward, fake):
    """dist_moe::name with Differentiable as its autograd."""
    op = _define(name, forward, fake, _differentiable)
    FORWARD_OPS.append(op)
    return op


def define_backward(name: str, backward, fake):
    """dist_moe::name, which has no gradient of its own."""
    return _define(name, backward, fake, _DifferentiatedOnce.apply)


def _define(name: str, function, fake, differentiable):
    """differentiable: what runs in the op's place, with it before the inputs, where an input wants a gradient."""
    _LIBRARY.define(f"{name}{torch.library.infer_schema(function, mutates_args=())}", tags=torch.Tag.pt2_compliant_tag)
    op = getattr(torch.ops.dist_moe, name).default

    def with_autograd(*inputs):
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return differentiable(op, *inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    for kernel, key in (
        (function, "CompositeExplicitAutograd"),
        (with_autograd, "Autograd"),
        (_refuse_vmap, "FuncTorchBatched"),
    ):
        # Dynamo may meet the op outside of a graph, and must not compile what is inside.
        _LIBRARY.impl(name, torch._disable_dynamo(kernel), key)
    torch.library.register_fake(f"dist_moe::{name}", fake, lib=_LIBRARY)
    # A call of all ranks: a compiled program keeps it, and keeps calls in their order.
    _LIBRARY._register_effectful_op(f"dist_moe::{name}", EffectType.ORDERED)
    return op


def _differentiable(op, *inputs) -> tuple[Tensor, list[Tensor]]:
    out_TD, *state = Differentiable.apply(op, PLAIN, *inputs)
    return out_TD, state


class _DifferentiatedOnce(torch.autograd.Function):
    """A backward that autograd records, as with create_graph=True."""

    @staticmethod
    def forward(ctx, op, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("routed_experts: the backward of a backward is not there")


def _refuse_vmap(*inputs):
    raise NotImplementedError("routed_experts cannot run under torch.vmap: it is a call of all ranks, once")

"""The baseline: NCCL all_to_all_single, permutations and torch._grouped_mm, differentiated by autograd.

    ids -> slots by expert -> counts and rows to their experts' ranks -> rows by expert -> W13, SwiGLU, W2
        -> rows by source rank -> back -> slots by token, weighted and added

The numbers of rows are read by the host, once a call, as all_to_all_single wants them. Permutations have backwards of
their own: autograd's would add with atomics.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from dist_moe.virtual import RankResults

from .launch import Job
from .ours import BOTH, FORWARD, INFERENCE
from .shapes import Inputs, Shape


def _to_slots(rows: Tensor, slot_R: Tensor, num_slots: int) -> Tensor:
    """[num_slots, D] with rows[r] at slot_R[r], and zeros in slots without a row."""
    make = rows.new_empty if len(rows) == num_slots else rows.new_zeros
    return make(num_slots, rows.shape[1]).index_copy_(0, slot_R, rows)


class _TakeRows(Function):
    """x[slot // K]; a token's gradient is the sum over its slots."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, slot_R: Tensor, K: int) -> Tensor:
        ctx.save_for_backward(slot_R)
        ctx.T, ctx.K = len(x_TD), K
        return x_TD[slot_R // K]

    @staticmethod
    def backward(ctx, grad_RD: Tensor):
        (slot_R,) = ctx.saved_tensors
        grad_TKD = _to_slots(grad_RD, slot_R, ctx.T * ctx.K).view(ctx.T, ctx.K, -1)
        return grad_TKD.sum(dim=1), None, None


class _ToSlots(Function):
    """Rows to their slots: the inverse of taking slot_R."""

    @staticmethod
    def forward(ctx, rows: Tensor, slot_R: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slot_R)
        return _to_slots(rows, slot_R, num_slots)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (slot_R,) = ctx.saved_tensors
        return grad[slot_R], None, None


class _Permute(Function):
    """rows[order]."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (order,) = ctx.saved_tensors
        return _to_slots(grad, order, len(grad)), None


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group) -> Tensor:
    if group is None:
        return rows
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows, received, sent, group=group)
    return out


class _Exchange(Function):
    """Rows to other ranks; gradients take the way back."""

    @staticmethod
    def forward(ctx, rows: Tensor, received: list[int], sent: list[int], group) -> Tensor:
        ctx.way_back = (sent, received, group)
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_to_all(grad.contiguous(), *ctx.way_back), None, None, None


def grouped(rows: Tensor, weights: Tensor, ends_L: Tensor) -> Tensor:
    """rows @ weights[e].T, expert by expert.

    A rank without rows takes an ordinary product, which gives weight gradients of zero: torch._grouped_mm on CUDA may
    refuse the strides of a contraction over no rows (pytorch/pytorch#192497 saw it in compiled code).
    """
    if not len(rows):
        return rows @ weights[0].t()
    return torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends_L)


def routed_experts(x_TD, ids_TK, scores_TK, w13_L2FD, w2_LDF, group) -> Tensor:
    """The layer. Without a group all experts are here; a negative id means no expert."""
    W, L, (T, K) = 1 if group is None else dist.get_world_size(group), len(w13_L2FD), ids_TK.shape
    expert_N = torch.where(ids_TK < 0, W * L, ids_TK).flatten()
    order_N = torch.argsort(expert_N, stable=True)
    counts_WL = torch.bincount(expert_N, minlength=W * L + 1)[:-1].view(W, L)
    arriving_WL = _all_to_all(counts_WL, [1] * W, [1] * W, group)
    sent, received = torch.stack([counts_WL.sum(dim=1), arriving_WL.sum(dim=1)]).tolist()
    slot_R = order_N[: sum(sent)]

    rows = _Exchange.apply(_TakeRows.apply(x_TD, slot_R, K), received, sent, group)
    if W > 1:
        experts = torch.arange(L, device=x_TD.device).repeat(W)
        expert_R = experts.repeat_interleave(arriving_WL.flatten(), output_size=sum(received))
        by_expert = torch.argsort(expert_R, stable=True)
        rows = _Permute.apply(rows, by_expert)
    ends_L = arriving_WL.sum(dim=0).cumsum(0).int()
    gate, up = grouped(rows, w13_L2FD, ends_L).chunk(2, dim=1)
    rows = grouped(F.silu(gate) * up, w2_LDF, ends_L)
    if W > 1:
        rows = _ToSlots.apply(rows, by_expert, len(rows))
    rows = _Exchange.apply(rows, sent, received, group)
    slots_TKD = _ToSlots.apply(rows, slot_R, T * K).view(T, K, -1)
    return torch.bmm(scores_TK.to(slots_TKD.dtype)[:, None], slots_TKD)[:, 0]


Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # of x, ids, scores, W13 and W2


class LayerCalls:
    """A layer that autograd differentiates, on this process's inputs; of virtual ranks one that holds all experts."""

    def __init__(self, job: Job, shape: Shape, inputs: Inputs, layer: Layer):
        self._layer, self._sizes, self._L = layer, [len(r.x_TD) for r in inputs.ranks], shape.E // job.W
        together = [torch.cat([getattr(r, name).detach() for r in inputs.ranks]) for name in ("x_TD", "scores_TK")]
        self._x, self._scores = (t.requires_grad_() for t in together)
        self._ids = torch.cat([r.ids_TK for r in inputs.ranks])
        self._grad_out = torch.cat([r.grad_out_TD for r in inputs.ranks])
        self._weights = (inputs.w13_L2FD, inputs.w2_LDF)

    def forward(self) -> Tensor:
        return self._layer(self._x, self._ids, self._scores, *self._weights)

    def infer(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def forward_backward(self) -> list[Tensor]:
        out = self.forward()
        return [out.detach(), *torch.autograd.grad(out, [self._x, self._scores, *self._weights], self._grad_out)]

    def run_of(self, direction: str) -> Callable[[], object]:
        """What a direction times."""
        return {FORWARD: self.forward, BOTH: self.forward_backward, INFERENCE: self.infer}[direction]

    def results(self, *, backward: bool) -> list[RankResults]:
        if not backward:
            return [RankResults(out) for out in self.infer().split(self._sizes)]
        out, grad_x, grad_scores, grad_w13, grad_w2 = self.forward_backward()
        parts = [t.split(self._sizes) for t in (out, grad_x, grad_scores)]
        parts += [t.split(self._L) for t in (grad_w13, grad_w2)]
        return [RankResults(*part) for part in zip(*parts, strict=True)]


class Baseline(LayerCalls):
    """The layer of this file."""

    def __init__(self, job: Job, shape: Shape, inputs: Inputs):
        super().__init__(job, shape, inputs, functools.partial(routed_experts, group=job.group))

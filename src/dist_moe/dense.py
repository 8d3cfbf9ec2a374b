"""The whole layer on one device, in plain PyTorch that autograd follows: what the path is held against."""

import torch
from torch import Tensor

from .shapes import Activation


class _RoundToBf16(torch.autograd.Function):
    """The value rounded to BF16, in FP32; the gradient passes as it is."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def dense_moe(x_TD, ids_TK, scores_TK, w13_E2FD, w2_EDF, activation: Activation | None = None) -> Tensor:
    """The layer on one device over all experts, by autograd-able PyTorch, independent of the ops of the path.

    h1, h2 and h3 are rounded to BF16 as in the path; scores and the sum over k are FP32. Gradients are FP32 throughout:
    the exact ones at the rounded values. A negative id contributes nothing, a repeated one adds up.
    """
    activation = activation or Activation()
    round_bf16 = _RoundToBf16.apply
    out = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for e in range(w13_E2FD.shape[0]):
        t, k = (ids_TK == e).nonzero(as_tuple=True)
        gate, up = round_bf16(x_TD[t].float() @ w13_E2FD[e].float().T).chunk(2, dim=1)
        if activation.clamped:
            gate = gate.clamp(max=activation.limit)
            up = up.clamp(-activation.limit, activation.limit) + 1.0
            h2 = gate * torch.sigmoid(activation.alpha * gate) * up
        else:
            h2 = gate * torch.sigmoid(gate) * up
        h3 = round_bf16(round_bf16(h2) @ w2_EDF[e].float().T)
        out = out.index_add(0, t, scores_TK[t, k].float()[:, None] * h3)
    return out.to(x_TD.dtype)

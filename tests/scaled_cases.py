"""The layer in block-scaled formats on one device, every quantisation made by the quantisers' oracles: what the path is
held against. Independent of the ops of the path."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dist_moe import formats, reference_formats
from dist_moe.formats import Format
from dist_moe.reference import resolve_routes
from dist_moe.virtual import RankInputs, RankResults

from .path_cases import Case


def through_rows(v_RC: Tensor, format: Format) -> Tensor:
    """FP32 of v with blocks along its rows."""
    return reference_formats.dequantize_rows(reference_formats.quantize_rows(v_RC, format=format), format=format)


def through_columns(v_RC: Tensor, format: Format) -> Tensor:
    """FP32 of the rows of one expert with blocks along their columns."""
    R = len(v_RC)
    padded = pad(v_RC.float(), (0, 0, 0, -R % formats.ROW_ALIGNMENT))
    experts = {"row_start_P": torch.tensor([0, len(padded)]).int(), "num_rows_L": torch.tensor([R]).int()}
    found = reference_formats.quantize_columns(padded, format=format, **experts)
    return reference_formats.dequantize_columns(found, format=format)[:R]


def through_weights(w_LNK: Tensor, format: Format, square: bool) -> Tensor:
    found = reference_formats.quantize_weights(w_LNK, format=format, square=square)
    return reference_formats.dequantize_weights(found, format=format)


def _activation(h1: Tensor, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """h2 and its derivatives by gate and up, FP32."""
    gate, up = (half.clone().requires_grad_() for half in h1.float().chunk(2, dim=1))
    a = case.config().activation_fn
    if a.clamped:
        g, u = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
        h2 = g * torch.sigmoid(a.alpha * g) * (u + 1)
    else:
        h2 = gate * torch.sigmoid(gate) * up
    return h2.detach(), *(torch.autograd.grad(h2, (gate, up), torch.ones_like(h2)))


def dense_scaled(
    case: Case, inputs: list[RankInputs], format: Format = formats.MXFP8_E4M3, *, training: bool = True
) -> list[RankResults]:
    """The layer over all experts, cut into the ranks' parts; gradients in training alone."""
    x, ids, scores, w13, w2 = (
        torch.cat([getattr(rank, name) for rank in inputs])
        for name in ("x_TD", "ids_TK", "scores_TK", "w13_L2FD", "w2_LDF")
    )
    own_ids, own_scores = resolve_routes(ids, scores, case.E)
    w13_q, w2_q = (through_weights(w, format, training) for w in (w13, w2))
    out, grad_x = torch.zeros(x.shape), torch.zeros(x.shape)
    grad_scores, grad_w13, grad_w2 = torch.zeros(scores.shape), torch.zeros(w13.shape), torch.zeros(w2.shape)
    dy = torch.cat([rank.grad_out_TD for rank in inputs]) if training else None
    for e in range(case.E):
        t, k = (own_ids == e).nonzero(as_tuple=True)
        score = own_scores[t, k, None]
        h1 = (through_rows(x[t], format) @ w13_q[e].T).bfloat16()
        h2, d_gate, d_up = _activation(h1, case)
        h3 = (through_rows(h2, format) @ w2_q[e].T).bfloat16()
        out.index_add_(0, t, score * h3.float())
        if not training:
            continue
        g2 = (through_rows(dy[t], format) @ w2_q[e]).bfloat16().float()
        same = (ids[t] == e).float()
        grad_scores.index_put_((t,), same * (g2 * h2).sum(dim=1, keepdim=True), accumulate=True)
        g1 = torch.cat([score * g2 * d_gate, score * g2 * d_up], dim=1)
        grad_w2[e] = through_columns(score * dy[t].float(), format).T @ through_columns(h2, format)
        grad_w13[e] = through_columns(g1, format).T @ through_columns(x[t], format)
        grad_x.index_add_(0, t, (through_rows(g1, format) @ w13_q[e]).bfloat16().float())
    sizes = [len(rank.x_TD) for rank in inputs]
    outs = out.bfloat16().split(sizes)
    if not training:
        return [RankResults(part) for part in outs]
    dtype = case.wgrad or torch.bfloat16
    grads = (grad_x.bfloat16().split(sizes), grad_scores.to(scores.dtype).split(sizes))
    weights = (grad.to(dtype).chunk(case.W) for grad in (grad_w13, grad_w2))
    return [RankResults(*parts) for parts in zip(outs, *grads, *weights, strict=True)]

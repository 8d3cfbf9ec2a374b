"""Cases of the whole path, the dense answer to each in BF16 and in block-scaled formats, and how near a result must be.

Shared by the tests and by `python -m dist_moe check`. dense_moe and the oracles of the quantisers are all that the
answers are made of: they are independent of the ops of the path.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import formats, reference_formats, testing
from .config import Config
from .dense import dense_moe
from .formats import Format
from .reference import resolve_routes
from .virtual import RankInputs, RankResults
from .weights import prepare_block_scaled_weight

FORWARD_ONLY = {"inference": True, "activation_slot_capacity_factor": None}  # changes of a Config


@dataclass(frozen=True)
class Case:
    """One shape and routing; the note says which edge it is there for."""

    note: str
    W: int = 2
    T: int = 8
    D: int = 64
    F: int = 96
    K: int = 2
    E: int = 4
    routing: str = "uniform"
    slot_factor: float | None = 1.0  # None: the minimum, every layer is recomputed from x
    activation: str = "swiglu"
    limit: float = 1.0  # of the clamped one: low enough to act on unit-scale data
    scores: torch.dtype = torch.float32
    ids: torch.dtype = torch.int64
    wgrad: torch.dtype | None = torch.float32
    seed: int = 0

    def __str__(self) -> str:
        return self.note.replace(" ", "-")

    def config(self, **changes) -> Config:
        fields = {
            "num_local_input_tokens": self.T,
            "hidden_dim": self.D,
            "intermediate_dim": self.F,
            "top_k": self.K,
            "num_experts": self.E,
            "max_moe_layers_per_activation_slot": 1,
            "device_scratch_capacity_factor": float(self.W),  # room for everything on one rank
            "activation_slot_capacity_factor": self.slot_factor,
            "activation": self.activation,
            "swiglu_alpha": 1.5,
            "swiglu_limit": self.limit,
            "wgrad_dtype": self.wgrad,
        }
        return Config(**fields | changes)

    def inputs(self) -> list[RankInputs]:
        """Unit-scale data, other values on every rank; weights are normal with the inverse root of the fan-in."""
        g = torch.Generator().manual_seed(self.seed)
        L = self.E // self.W
        w13 = (torch.randn(self.E, 2 * self.F, self.D, generator=g) * self.D**-0.5).bfloat16()
        w2 = (torch.randn(self.E, self.D, self.F, generator=g) * self.F**-0.5).bfloat16()
        ids = testing.routing(self.routing, num_ranks=self.W, T=self.T, K=self.K, E=self.E, seed=self.seed)
        inputs = []
        for rank in range(self.W):
            T, here = len(ids[rank]), slice(rank * L, (rank + 1) * L)
            scores = torch.rand(T, self.K, generator=g) + 0.1
            inputs.append(
                RankInputs(
                    torch.randn(T, self.D, generator=g).bfloat16(),
                    ids[rank].to(self.ids),
                    (scores / scores.sum(1, keepdim=True)).to(self.scores),
                    w13[here],
                    w2[here],
                    torch.randn(T, self.D, generator=g).bfloat16(),
                )
            )
        return inputs


def on_device(record: RankInputs | RankResults, device: torch.device | str):
    """The same with all tensors on the device; prepared weights stay where they were made."""
    tensors = {name: value for name, value in vars(record).items() if isinstance(value, Tensor)}
    return replace(record, **{name: value.detach().to(device) for name, value in tensors.items()})


def forward_only(inputs: Sequence[RankInputs]) -> list[RankInputs]:
    return [replace(rank, grad_out_TD=None) for rank in inputs]


def prepared(
    inputs: Sequence[RankInputs], config: Config, *, inference: bool = False, device: torch.device | str = "cpu"
) -> list[RankInputs]:
    """The same with prepared weights, without a backward for inference."""
    found = []
    for rank in forward_only(inputs) if inference else inputs:
        weights = {
            name: prepare_block_scaled_weight(getattr(rank, name).to(device), config, inference=inference)
            for name in ("w13_L2FD", "w2_LDF")
        }
        found.append(replace(rank, **weights))
    return found


# The answers


def dense(case: Case, inputs: list[RankInputs]) -> list[RankResults]:
    """The layer over all experts on one device, by autograd, cut into the ranks' parts."""
    leaves = {
        name: torch.cat([getattr(rank, name) for rank in inputs]).requires_grad_()
        for name in ("x_TD", "scores_TK", "w13_L2FD", "w2_LDF")
    }
    ids = torch.cat([rank.ids_TK for rank in inputs])
    w13, w2 = (leaves[name].float() for name in ("w13_L2FD", "w2_LDF"))
    w13.retain_grad()
    w2.retain_grad()
    out = dense_moe(leaves["x_TD"], ids, leaves["scores_TK"], w13, w2, case.config().activation_fn)
    out.backward(torch.cat([rank.grad_out_TD for rank in inputs]))
    sizes = [len(rank.x_TD) for rank in inputs]
    dtype = case.wgrad or torch.bfloat16
    parts = zip(
        out.detach().split(sizes),
        leaves["x_TD"].grad.split(sizes),
        leaves["scores_TK"].grad.split(sizes),
        w13.grad.to(dtype).chunk(case.W),
        w2.grad.to(dtype).chunk(case.W),
        strict=True,
    )
    return [RankResults(*part) for part in parts]


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


def assert_results_close(
    results: list[RankResults], expected: list[RankResults], bar: str = "path"
) -> dict[str, float]:
    """All ranks together, each field per row; scores, a row of which is K numbers, as one row.

    Args:    bar: of testing.TOLERANCES, for the output; f"{bar}_grads" is that for the gradients.
    Returns: the worst row of every field in dB. Raises AssertionError as testing.assert_close.
    """
    found = {}
    for name in RankResults.__dataclass_fields__:
        if getattr(expected[0], name) is None:
            assert all(getattr(rank, name) is None for rank in results), f"{name} was not asked for"
            continue
        out, ref = (torch.cat([getattr(rank, name) for rank in side]) for side in (results, expected))
        if name == "grad_scores_TK":
            out, ref = out.reshape(1, -1), ref.reshape(1, -1)
        found[name] = testing.assert_close(out, ref, bar if name == "out_TD" else f"{bar}_grads")
    return found

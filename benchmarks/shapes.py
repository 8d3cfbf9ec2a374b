"""What is measured: the experts of five models, what a routing makes of them, and inputs drawn for both."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dist_moe import Config, plan_memory, planner, reference
from dist_moe.models import MODELS, Shape
from dist_moe.virtual import RankInputs

SMOKE = Shape("smoke", 64, 96, 8, 4)
SHAPES = {shape.name: shape for shape in (*MODELS, SMOKE)}

# By name, from dist_moe.testing.
ROUTINGS = ("balanced", "uniform", "zipf(1.0)", "hot_expert(0.5)", "hot_rank(1.5)", "one_rank")

MIN_CAPACITY_FACTOR = 1.1  # what a user of near-uniform routing would plan


@dataclass(frozen=True)
class Load:
    """What one rank has to do in a call. Rows are (token, expert) that arrive here, pairs (token, rank)."""

    D: int
    F: int
    K: int
    L: int
    dedup: bool
    tokens: int  # that this rank passes
    tokens_all: int  # that all ranks pass
    rows: int
    remote_rows: int  # of them, from tokens of other ranks
    pairs: int
    remote_pairs: int
    experts_used: int  # local experts with a row
    returned: int  # rows of `outputs` that come back for the own tokens

    @property
    def moved(self) -> tuple[int, int]:
        """Rows of D that dispatch reads and combine writes: in own memory, in that of others."""
        both, remote = (self.pairs, self.remote_pairs) if self.dedup else (self.rows, self.remote_rows)
        return both - remote, remote


class Traffic:
    """Rows and pairs by source and destination, counted from the ids of all ranks."""

    def __init__(self, shape: Shape, ids: list[Tensor]):
        self.shape, self.ids, self.W = shape, ids, len(ids)
        self.L = shape.E // self.W
        self.tokens_W = [len(ids_TK) for ids_TK in ids]
        self.rows_WE, self.pairs_WW = torch.zeros(self.W, shape.E, dtype=torch.int64), []
        for source, ids_TK in enumerate(ids):
            wire, _ = reference.resolve_routes(ids_TK, torch.zeros(ids_TK.shape), shape.E)
            kept = wire[wire >= 0].long()
            self.rows_WE[source] = torch.bincount(kept, minlength=shape.E)
            owner = torch.where(wire >= 0, wire.long() // self.L, -1)
            self.pairs_WW.append([int((owner == w).any(dim=1).sum()) for w in range(self.W)])
        self.rows_WW = self.rows_WE.view(self.W, self.W, self.L).sum(dim=2).tolist()

    @property
    def rows_W(self) -> list[int]:
        """Rows that arrive at every rank."""
        return [sum(column) for column in zip(*self.rows_WW, strict=True)]

    def expert_rows(self, rank: int) -> list[int]:
        """Rows of every expert of a rank."""
        return self.rows_WE.sum(dim=0)[rank * self.L : (rank + 1) * self.L].tolist()

    def load(self, rank: int, *, dedup: bool) -> Load:
        rows, pairs = self.rows_W[rank], sum(row[rank] for row in self.pairs_WW)
        return Load(
            D=self.shape.D,
            F=self.shape.F,
            K=self.shape.K,
            L=self.L,
            dedup=dedup,
            tokens=self.tokens_W[rank],
            tokens_all=sum(self.tokens_W),
            rows=rows,
            remote_rows=rows - self.rows_WW[rank][rank],
            pairs=pairs,
            remote_pairs=pairs - self.pairs_WW[rank][rank],
            experts_used=sum(count > 0 for count in self.expert_rows(rank)),
            returned=sum(self.pairs_WW[rank] if dedup else self.rows_WW[rank]),
        )

    def balance(self) -> dict[str, float]:
        """How even the routing came out, as fields of a row."""
        experts = self.rows_WE.sum(dim=0)
        return {
            "rank_rows_max": max(self.rows_W),
            "rank_rows_mean": sum(self.rows_W) / self.W,
            "expert_rows_max": int(experts.max()),
            "expert_rows_mean": float(experts.double().mean()),
        }


def config_of(traffic: Traffic, *, inference: bool = False) -> Config:
    """A Config with room for exactly this routing, or a little more: nothing overflows, nothing is recomputed."""
    shape, T = traffic.shape, max(1, *traffic.tokens_W)
    config = Config(
        num_local_input_tokens=T,
        hidden_dim=shape.D,
        intermediate_dim=shape.F,
        top_k=shape.K,
        num_experts=shape.E,
        max_moe_layers_per_activation_slot=1,
        device_scratch_capacity_factor=max(MIN_CAPACITY_FACTOR, max(traffic.rows_W) / (T * shape.K)),
        inference=inference,
    )
    if inference:
        return config
    slot_bytes = plan_memory(config, traffic.W).maximum_useful_activation_slot_bytes
    return replace(config, activation_slot_bytes=slot_bytes)


SCHEMES = {"per route": (10**9, 1), "de-duplicated": (0, 1)}  # name of an exchange: the border that always chooses it


def scheme_of(traffic: Traffic) -> str:
    """The exchange that the path chooses."""
    return "de-duplicated" if planner.dedup(config_of(traffic, inference=True), traffic.W) else "per route"


def always_choose(scheme: str) -> None:
    """Of all Contexts of this process from now on: to measure the exchange that the path would not choose."""
    planner.DEDUP_MIN_ROUTES = SCHEMES[scheme]


def load_of(traffic: Traffic, rank: int) -> Load:
    """The rank's load under the exchange that the path chooses."""
    return traffic.load(rank, dedup=scheme_of(traffic) == "de-duplicated")


def memory_bytes(
    traffic: Traffic,
    num_local_ranks: int,
    *,
    backward: bool,
    inference: bool = False,
    methods: Sequence[str] = ("graph", "baseline", "floor"),
) -> int:
    """Device memory that bench_path needs, from above: Contexts, weights, gradients, baseline and floors."""
    shape, config = traffic.shape, config_of(traffic, inference=inference)
    plan = plan_memory(config, traffic.W)
    contexts = plan.total_device_buffer_bytes + plan.routing_table_bytes + sum(size for _, size in plan.symmetric_bytes)
    contexts *= 1 + ("graph" in methods)
    weights = 2 * 3 * shape.D * shape.F * traffic.L
    # Weight gradients at a time: of the captured path and floor, the floor's buffers, and of the method that runs.
    weights *= 5 if backward else 1
    rows = max(traffic.rows_W)
    floors = 2 * rows * (3 * shape.D + 6 * shape.F) * ("floor" in methods)
    # Sent, received, permuted, W2's output twice, slots; h1, silu, h2, and in backward the gradient of each.
    baseline = 2 * rows * (7 * shape.D + 5 * shape.F) * (2 if backward else 1) * ("baseline" in methods)
    return num_local_ranks * (contexts + weights + floors + baseline) + 2**30  # a GiB for inputs and the flushed L2


@dataclass(frozen=True)
class Inputs:
    """The inputs of the ranks that live in this process; their weights are views of one tensor each."""

    ranks: list[RankInputs]
    w13_L2FD: Tensor
    w2_LDF: Tensor


def draw_inputs(shape: Shape, ids: list[Tensor], local_ranks: tuple[int, ...], device: torch.device) -> Inputs:
    """Unit-scale normal data, other values on every rank, drawn where it is used; every rank's are its own."""
    L, D, F = shape.E // len(ids), shape.D, shape.F
    bf16 = {"dtype": torch.bfloat16, "device": device}
    w13 = torch.empty(len(local_ranks) * L, 2 * F, D, **bf16)
    w2 = torch.empty(len(local_ranks) * L, D, F, **bf16)
    ranks = []
    for i, rank in enumerate(local_ranks):
        g = torch.Generator(device).manual_seed(rank)
        here = slice(i * L, (i + 1) * L)
        w13[here].normal_(0.0, D**-0.5, generator=g)
        w2[here].normal_(0.0, F**-0.5, generator=g)
        T = len(ids[rank])
        scores = torch.rand(T, shape.K, generator=g, device=device) + 0.1
        ranks.append(
            RankInputs(
                torch.randn(T, D, generator=g, **bf16).requires_grad_(),
                ids[rank].to(device),
                (scores / scores.sum(dim=1, keepdim=True)).requires_grad_(),
                w13[here].detach().requires_grad_(),
                w2[here].detach().requires_grad_(),
                torch.randn(T, D, generator=g, **bf16),
            )
        )
    return Inputs(ranks, w13.requires_grad_(), w2.requires_grad_())

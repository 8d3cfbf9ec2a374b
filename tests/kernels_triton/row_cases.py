"""W virtual ranks that have published and routed, for the tests of the kernels that move rows.

What nobody may read is poisoned: tokens past T, slots without expert in `outputs`, the activation buffer around the
rows.
"""

import functools
from types import SimpleNamespace

import torch
from tests.strategies import Routing

from dist_moe import reference, shapes, testing
from dist_moe.kernels_triton._device import is_interpreting
from dist_moe.symm import World

GUARD_ROWS = 3  # rows of the activation buffer before and after the rows of a stage
NAN = float("nan")


def bits(t: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that NaN equals itself and -0.0 is not 0.0."""
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


class Ranks:
    """Regions and plans of all ranks; x_TD, ids_TK and scores_TK are lists by rank, T may differ."""

    def __init__(self, device, x, ids, scores, *, E, T_max=None, dy=None, alignment=1):
        self.device, self.W, self.E, self.alignment = device, len(ids), E, alignment
        (_, self.K), self.D = ids[0].shape, x[0].shape[1]
        self.T = [len(i) for i in ids]
        self.T_max = T_max or max(1, *self.T)
        self.J = min(self.K, self.W)
        L = E // self.W
        self.capacity = self.W * self.T_max * min(self.K, L) + L * (alignment - 1)
        self.stop_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.world = World.virtual(self.W, device)
        by_token = (self.T_max, self.K)
        regions = self.world.allocate(
            {
                "tokens": ((2, self.T_max, self.D), torch.bfloat16),
                "header": ((shapes.HEADER_WORDS,), torch.int64),
                "ids": (by_token, torch.int16),
                "scores": (by_token, torch.float32),
                "outputs_routes": ((self.T_max, self.K, self.D), torch.bfloat16),
                "outputs_pairs": ((self.T_max, self.J, self.D), torch.bfloat16),
                "score_grads": (by_token, torch.float32),
            }
        )
        self.ranks = [SimpleNamespace(**regions[r]) for r in range(self.W)]
        for r, rank in enumerate(self.ranks):
            for name in ("tokens", "scores", "outputs_routes", "outputs_pairs", "score_grads"):
                getattr(rank, name).own.fill_(NAN)
            rank.ids.own.fill_(shapes.MAX_EXPERTS)
            for half, data in enumerate((x[r], x[r] if dy is None else dy[r])):
                self._publish(rank, half, data.to(device), x[r].to(device), ids[r].to(device), scores[r].to(device))
        self.plans = [self._route(r) for r in range(self.W)]

    def _publish(self, rank, half, data, x, ids, scores):
        reference.publish(
            data,
            ids,
            scores,
            half=half,
            check_TD=x,
            check_skip_1=self.stop_1,
            kind=shapes.KIND_TRAIN,
            config_hash=1,
            num_experts=self.E,
            call_1=torch.zeros(1, dtype=torch.int64, device=self.device),
            tokens=rank.tokens,
            header=rank.header,
            ids=rank.ids,
            scores=rank.scores,
            stop_1=self.stop_1,
        )

    def _route(self, r):
        fault_F = torch.zeros(shapes.FAULT_WORDS, dtype=torch.int64, device=self.device)
        rank = self.ranks[r]
        plan = reference.route(
            ids=rank.ids,
            header=rank.header,
            rank=r,
            num_experts=self.E,
            capacity_rows=self.capacity,
            row_alignment=self.alignment,
            fault_F=fault_F,
        )
        assert fault_F[0] == 0
        return plan

    def outputs(self, r, dedup):
        return self.ranks[r].outputs_pairs if dedup else self.ranks[r].outputs_routes

    def num_rows(self, r) -> int:
        return int(self.plans[r].row_start_P[-1])

    def is_padding(self, r) -> torch.Tensor:
        return self.plans[r].row_to_slot_R[: self.num_rows(r)] == -1

    def start_1(self) -> torch.Tensor:
        return torch.tensor([GUARD_ROWS], dtype=torch.int64, device=self.device)

    def buffer(self, pitch=None) -> torch.Tensor:
        """An activation buffer in which a stage's rows start at GUARD_ROWS, all NaN."""
        shape = (self.capacity + 2 * GUARD_ROWS, pitch or self.D)
        return torch.full(shape, NAN, dtype=torch.bfloat16, device=self.device)

    def row_floats(self) -> torch.Tensor:
        return torch.full((self.capacity,), NAN, device=self.device)

    def dispatch(self, op, r, *, dedup, half=0, stop_1=None, rows_XD=None, columns=None):
        """(rows_XD, row_scores_R) of rank r by one implementation of the op."""
        rows_XD, row_scores_R = self.buffer() if rows_XD is None else rows_XD, self.row_floats()
        rank = self.ranks[r]
        op(
            self.plans[r],
            tokens=rank.tokens,
            half=half,
            scores=rank.scores,
            dedup=dedup,
            rows_XD=rows_XD,
            start_1=self.start_1(),
            row_scores_R=row_scores_R,
            stop_1=self.stop_1 if stop_1 is None else stop_1,
            columns=columns,
        )
        return rows_XD, row_scores_R

    def combine(self, op, r, rows_XD, *, dedup, row_scores_R=None, row_score_grads_R=None, stop_1=None, **how):
        op(
            self.plans[r],
            rows_XD,
            self.start_1(),
            outputs=self.outputs(r, dedup),
            dedup=dedup,
            row_scores_R=row_scores_R,
            row_score_grads_R=row_score_grads_R,
            score_grads=None if row_score_grads_R is None else self.ranks[r].score_grads,
            stop_1=self.stop_1 if stop_1 is None else stop_1,
            **how,
        )

    def reduce(self, op, r, *, dedup, scaled, out_TD=None, stop_1=None, **faults):
        if out_TD is None:
            out_TD = torch.full((self.T[r], self.D), NAN, dtype=torch.bfloat16, device=self.device)
        rank = self.ranks[r]
        op(
            out_TD,
            outputs=self.outputs(r, dedup),
            ids=rank.ids,
            scores=rank.scores if scaled else None,
            dedup=dedup,
            num_experts=self.E,
            rank=r,
            stop_1=self.stop_1 if stop_1 is None else stop_1,
            **faults,
        )
        return out_TD

    def pushed(self, dedup) -> torch.Tensor:
        """Everything that combine may write, of all ranks, as bits."""
        regions = [self.outputs(r, dedup).own for r in range(self.W)] + [rank.score_grads.own for rank in self.ranks]
        return torch.cat([region.contiguous().view(torch.int16).flatten() for region in regions])

    def poison_pushed(self) -> None:
        for rank in self.ranks:
            for region in (rank.outputs_routes, rank.outputs_pairs, rank.score_grads):
                region.own.fill_(NAN)


def random_ranks(device, routing, *, W, T, K, L, D, seed=0, T_max=None, integers=False, alignment=1) -> Ranks:
    """Data by seed, routes by name: normal values, or small integers on which every sum is exact."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(-4, 5, shape, generator=g).float() if integers else torch.randn(shape, generator=g)

    ids = testing.routing(routing, num_ranks=W, T=T, K=K, E=W * L, seed=seed)
    x, dy = ([draw(len(i), D).bfloat16() for i in ids] for _ in range(2))
    scores = [draw(len(i), K) for i in ids]
    return Ranks(device, x, ids, scores, E=W * L, T_max=T_max, dy=dy, alignment=alignment)


def ranks_of(device, routing: Routing, D=32, broken: frozenset[int] = frozenset(), alignment=1) -> Ranks:
    """Tokens of small integers that differ by rank, token and column; tokens in `broken` hold a NaN on every rank."""
    x, dy = [], []
    for rank, ids in enumerate(routing.ids):
        t, d = torch.arange(len(ids))[:, None], torch.arange(D)
        x.append(((rank * 7 + t * 3 + d) % 9 - 4).bfloat16())
        dy.append(((rank * 5 + t * 2 + d) % 7 - 3).bfloat16())
        for row in broken & set(range(len(ids))):
            x[-1][row, row] = NAN
    sizes = {"E": routing.num_experts, "T_max": routing.num_tokens_max, "alignment": alignment}
    return Ranks(device, x, list(routing.ids), list(routing.scores), dy=dy, **sizes)


# The routes of RoutePlan's docstring, W = 1, T = 3, K = 2, L = 2; a value is repeated over D = 32 columns.
EXAMPLE_IDS = torch.tensor([[0, 1], [1, -1], [1, 0]])
EXAMPLE_SCORES = torch.tensor([[1.0, 2.0], [3.0, 0.0], [4.0, 5.0]])


def columns(values, device="cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16, device=device)[:, None].repeat(1, 32)


def example_ranks(device) -> Ranks:
    return Ranks(device, [columns([10.0, 20.0, 30.0])], [EXAMPLE_IDS], [EXAMPLE_SCORES], E=2)


# (note, routing, W, T, K, L, D)
SHAPES = [
    ("one token", "uniform", 1, 1, 1, 1, 32),
    ("no token anywhere", "uniform", 2, 0, 2, 2, 32),
    ("a tail of the column block", "uniform", 2, 5, 3, 2, 1056),
    ("three ranks, odd K", "zipf(1.0)", 3, 17, 3, 3, 160),
    ("many blocks of rows", "balanced", 2, 70, 4, 4, 64),
    ("all on one rank, K = L", "one_rank", 4, 9, 4, 4, 96),
    ("all on one expert", "one_expert", 4, 9, 2, 2, 96),
    ("dropped slots", "dropped(0.5)", 4, 9, 4, 2, 64),
    ("repeated experts", "duplicates", 2, 9, 4, 4, 64),
    ("ranks without tokens", "empty_ranks", 4, 6, 3, 2, 64),
    ("eight ranks, more ranks than K", "uniform", 8, 4, 2, 1, 32),
    ("eight ranks, K above W", "uniform", 8, 3, 11, 2, 32),
    ("several blocks of every source", "uniform", 3, 60, 4, 3, 1024),
    ("one block, whose columns are shared", "uniform", 2, 3, 3, 2, 2080),
    ("one block of eight routes a token", "uniform", 2, 4, 8, 8, 1056),
]
EACH_SHAPE = {"argnames": "routing, W, T, K, L, D", "argvalues": [s[1:] for s in SHAPES], "ids": [s[0] for s in SHAPES]}


def with_all_tiles(op):
    """The op, and on a GPU with one program too: it has the tiles of many rows, where many programs share few."""
    return (op,) if is_interpreting() else (op, functools.partial(op, num_sms=1))

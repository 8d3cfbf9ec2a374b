"""One op at a time with the inputs that the path would give it: those of one rank among W virtual ones."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from dist_moe import World, planner, reference, shapes, testing
from dist_moe.shapes import Activation
from dist_moe.testing import Tolerance

from . import gemms
from .roofs import Work, backward_work, forward_work
from .shapes import Traffic, config_of, draw_inputs, load_of

PRODUCTS = (*gemms.FORWARD, *gemms.BACKWARD)
ROW_OPS = ("publish", "route", "dispatch", "swiglu", "swiglu_backward", "combine", "reduce")

# What memory holds before an op writes it: a row that is not written shows.
_STALE = 7.0
_CONFIG_HASH = 7
Outputs = list[tuple[str, Tensor, Tolerance]]


@dataclass(frozen=True)
class OpCase:
    """An op and its inputs."""

    name: str
    op: str
    run: Callable[[Callable], object]  # calls the implementation that it is given
    outputs: Callable[[object], Outputs]  # of what run returned
    setup: Callable[[], object]  # sets the inputs, and the outputs to something stale
    work: Work
    in_place: bool = False  # needs setup before every run
    torch: Callable[[], Tensor] | None = None  # the same by torch


def product_cases(traffic: Traffic, rank: int, device: torch.device) -> list[OpCase]:
    """The six grouped products of a rank."""
    no_ids = [torch.zeros(0, traffic.shape.K, dtype=torch.int64)] * traffic.W  # weights alone are wanted
    weights = draw_inputs(traffic.shape, no_ids, (rank,), device)
    rank_gemms = gemms.ExpertGemms(traffic.expert_rows(rank), weights.w13_L2FD, weights.w2_LDF)
    load = load_of(traffic, rank)
    works = forward_work(load) | backward_work(load)
    bar = testing.TOLERANCES["gemm"]

    def case(product: str) -> OpCase:
        op = rank_gemms.op_name(product)
        return OpCase(
            name=product,
            op=op,
            run=lambda function: rank_gemms.run(SimpleNamespace(**{op: function}), product),
            outputs=lambda _: [(product, rank_gemms.result(product), bar)],
            setup=lambda: rank_gemms.result(product).fill_(_STALE),
            work=works[product],
            torch=lambda: rank_gemms.torch(product),
        )

    return [case(product) for product in PRODUCTS]


class RowOps:
    """The ops that move and mix rows, on regions of a virtual World, for one of its ranks."""

    def __init__(self, traffic: Traffic, ids: list[Tensor], rank: int, device: torch.device):
        shape, self._rank = traffic.shape, rank
        config = config_of(traffic)
        self._E, self._dedup = shape.E, planner.dedup(config, traffic.W)
        self._capacity = planner.plan_memory(config, traffic.W).total_scratch_capacity_rows
        self._zero_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._fault_F = torch.zeros(shapes.FAULT_WORDS, dtype=torch.int64, device=device)
        world = World.virtual(traffic.W, device)
        self._regions = world.allocate(planner.symmetric_regions(config, traffic.W))
        self._at = SimpleNamespace(**self._regions[rank])
        inputs = draw_inputs(shape, ids, (rank,), device).ranks[0]
        self._x, self._ids, self._scores = inputs.x_TD.detach(), inputs.ids_TK, inputs.scores_TK.detach()
        # What every rank would have published.
        for source, regions in self._regions.items():
            wire_ids, _ = reference.resolve_routes(ids[source], torch.zeros(ids[source].shape), shape.E)
            regions["ids"].own.copy_(wire_ids)
            regions["scores"].own.copy_(torch.where(wire_ids >= 0, torch.rand(wire_ids.shape), 0.0))
            regions["tokens"].own.normal_()
            header = (shapes.WIRE_VERSION, _CONFIG_HASH, 1, shapes.KIND_TRAIN, len(ids[source]))
            regions["header"].own[: len(header)] = torch.tensor(header)
        self._plan = self._route(reference.route)
        self._R, R = int(self._plan.row_start_P[-1]), self._capacity
        bf16 = {"dtype": torch.bfloat16, "device": device}
        self._rows_D, self._out_TD = torch.empty(R, shape.D, **bf16), torch.empty_like(self._x)
        self._h1, self._h2 = torch.empty(R, 2 * shape.F, **bf16), torch.empty(R, shape.F, **bf16)
        self._row_scores, self._score_grads = (torch.rand(R, device=device) for _ in range(2))
        load = load_of(traffic, rank)
        self._works = forward_work(load) | {"swiglu_backward": backward_work(load)["swiglu_backward"]}

    def case(self, name: str) -> OpCase:
        return {
            "publish": self._publish_case,
            "route": self._route_case,
            "dispatch": self._dispatch_case,
            "swiglu": self._swiglu_case,
            "swiglu_backward": self._swiglu_backward_case,
            "combine": self._combine_case,
            "reduce": self._reduce_case,
        }[name]()

    def _case(self, name: str, run, outputs: Callable[[object], dict], setup, bar: str = "moved", **how) -> OpCase:
        def named(result: object) -> Outputs:
            return [(key, value, testing.TOLERANCES[bar]) for key, value in outputs(result).items()]

        return OpCase(name, name, run, named, setup, self._works[name], **how)

    def _publish_case(self) -> OpCase:
        at = self._at

        def run(publish):
            publish(
                self._x, self._ids, self._scores, half=0, check_TD=self._x, check_skip_1=self._zero_1,
                kind=shapes.KIND_TRAIN, config_hash=_CONFIG_HASH, num_experts=self._E,
                call_1=torch.zeros_like(self._zero_1), tokens=at.tokens, header=at.header, ids=at.ids, scores=at.scores,
                stop_1=self._zero_1,
            )  # fmt: skip

        def outputs(_):
            return {"tokens": at.tokens.own[0], "ids": at.ids.own, "scores": at.scores.own}

        return self._case("publish", run, outputs, lambda: [value.fill_(_STALE) for value in outputs(None).values()])

    def _route(self, route):
        return route(
            ids=self._at.ids, header=self._at.header, rank=self._rank, num_experts=self._E,
            capacity_rows=self._capacity, fault_F=self._fault_F,
        )  # fmt: skip

    def _route_case(self) -> OpCase:
        def outputs(plan):
            rows, pairs = int(plan.row_start_P[-1]), int(plan.num_pairs_1)
            return {
                "row_start": plan.row_start_P,
                "rank_rows": plan.rank_rows_W,
                "row_to_slot": plan.row_to_slot_R[:rows],
                "pair_rows": plan.pair_rows_R[:rows],
                "pair_start": plan.pair_start_R[:pairs],
                "pair_output": plan.pair_output_R[:pairs],
            }

        return self._case("route", self._route, outputs, lambda: None)

    def _dispatch_case(self) -> OpCase:
        def run(dispatch):
            dispatch(
                self._plan, tokens=self._at.tokens, half=0, scores=self._at.scores, dedup=self._dedup,
                rows_XD=self._rows_D, start_1=self._zero_1, row_scores_R=self._row_scores, stop_1=self._zero_1,
            )  # fmt: skip

        def outputs(_):
            return {"rows": self._rows_D[: self._R], "scores": self._row_scores[: self._R]}

        return self._case("dispatch", run, outputs, lambda: [value.fill_(_STALE) for value in outputs(None).values()])

    def _swiglu_case(self) -> OpCase:
        def run(swiglu):
            how = {"activation": Activation(), "stop_1": self._zero_1}
            swiglu(self._h1, self._zero_1, self._h2, self._zero_1, self._plan.row_start_P, **how)

        def setup():
            self._fill(self._h1)
            self._h2.fill_(_STALE)

        return self._case("swiglu", run, lambda _: {"h2": self._h2[: self._R]}, setup, "swiglu")

    def _swiglu_backward_case(self) -> OpCase:
        def run(swiglu_backward):
            swiglu_backward(
                self._h1, self._zero_1, self._h2, self._zero_1, self._row_scores, self._score_grads,
                self._plan.row_start_P, activation=Activation(), stop_1=self._zero_1,
            )  # fmt: skip

        def setup():
            self._fill(self._h1)
            self._fill(self._h2)

        def outputs(_):
            return {"grad_h1": self._h1[: self._R], "scored_h2": self._h2[: self._R]}

        return self._case("swiglu_backward", run, outputs, setup, "gemm", in_place=True)

    def _combine_case(self) -> OpCase:
        def run(combine):
            combine(
                self._plan, self._rows_D, self._zero_1, outputs=self._at.outputs, dedup=self._dedup,
                row_scores_R=self._row_scores if self._dedup else None, row_score_grads_R=None, score_grads=None,
                stop_1=self._zero_1,
            )  # fmt: skip

        def outputs(_):
            return {f"outputs of rank {rank}": peer.flatten(0, 1) for rank, peer in enumerate(self._at.outputs.peers)}

        def setup():
            self._fill(self._rows_D)
            for peer in self._at.outputs.peers:
                peer.fill_(_STALE)

        return self._case("combine", run, outputs, setup, "combine")

    def _reduce_case(self) -> OpCase:
        def run(reduce):
            at = self._at
            reduce(
                self._out_TD, outputs=at.outputs, ids=at.ids, scores=None if self._dedup else at.scores,
                dedup=self._dedup, num_experts=self._E, rank=self._rank, stop_1=self._zero_1,
            )  # fmt: skip

        def setup():
            self._fill(self._at.outputs.own)
            self._out_TD.fill_(_STALE)

        return self._case("reduce", run, lambda _: {"out": self._out_TD}, setup, "combine")

    def _fill(self, value: Tensor) -> None:
        """The same normal numbers each time, so that every implementation gets the same input."""
        value.normal_(generator=torch.Generator(value.device).manual_seed(1))

"""One op at a time with the inputs that the path would give it: those of one rank among W virtual ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional

from dist_moe import World, planner, reference, registry, shapes, testing
from dist_moe.norm import Norm
from dist_moe.shapes import Activation
from dist_moe.testing import Tolerance

from . import gemms
from .roofs import FP32, Work, backward_work, forward_work, fp32_wgrad_work, norm_work
from .shapes import Traffic, config_of, draw_inputs, load_of

PRODUCTS = (*gemms.FORWARD, *gemms.BACKWARD)
FUSED = "w13_swiglu"
ACCUMULATIONS = ("wgrad_w13_accumulate", "wgrad_w2_accumulate")  # into FP32
GEMM_OPS = (*PRODUCTS, FUSED, *ACCUMULATIONS)
ROW_OPS = ("publish", "route", "dispatch", "swiglu", "swiglu_backward", "combine", "reduce")
NORM_OPS = ("rmsnorm_reduce", "rmsnorm_reduce_backward")
OPS = GEMM_OPS + ROW_OPS + NORM_OPS

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
    torch: Callable[[], Tensor] | None = None  # the same by torch: the first of the outputs
    beside: tuple["OpCase", ...] = ()  # timed in the same rounds, as methods "BACKEND NAME"
    more: dict = field(default_factory=dict)  # fields of its rows


Makers = dict[str, Callable[[], OpCase]]  # a case's buffers live as long as the case


def product_cases(traffic: Traffic, rank: int, device: torch.device) -> Makers:
    """The six grouped products of a rank, W13 with SwiGLU, and its weight gradients added up in FP32."""
    rank_gemms = gemms.ExpertGemms.of_rank(traffic, rank, device)
    load = load_of(traffic, rank)
    works = forward_work(load) | backward_work(load) | fp32_wgrad_work(load)
    bar = testing.TOLERANCES["gemm"]
    grads = {"wgrad_w13": rank_gemms.w13, "wgrad_w2": rank_gemms.w2}  # by their shapes

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

    def fused() -> OpCase:
        """What is not written is h1, and h2, which is, has half its bytes."""
        h2, h2_bytes = rank_gemms.out_F[: rank_gemms.R], works["swiglu"].hbm_bytes // 3
        return OpCase(
            name=FUSED,
            op="grouped_gemm_swiglu",
            run=rank_gemms.run_swiglu,
            outputs=lambda _: [(FUSED, h2, bar)],
            setup=lambda: h2.fill_(_STALE),
            work=Work(works["w13"].flops, works["w13"].hbm_bytes - h2_bytes),
        )

    def wgrad(name: str, product: str, out: Tensor, setup: Callable, **how) -> OpCase:
        """Into `out`; pass_bytes: what it would take to add the product to an FP32 gradient in a pass of its own."""
        accumulate = name in ACCUMULATIONS
        if not accumulate:
            how["more"] = {"pass_bytes": out.numel() * (out.element_size() + FP32 + FP32)}
        return OpCase(
            name=name if accumulate else str(out.dtype).removeprefix("torch."),
            op="grouped_gemm_wgrad",
            run=lambda function: rank_gemms.run_wgrad(function, product, out, accumulate=accumulate),
            outputs=lambda _: [(name, out, bar)],
            setup=setup,
            **how,
        )

    def accumulation(name: str) -> OpCase:
        """Beside the product that is written over what is there, in BF16 and in FP32; by torch in two passes.

        Runs that are timed add to the sums of those before, and to the FP32 product, which lies in the same memory.
        """
        product = name.removesuffix("_accumulate")
        sums = torch.empty(grads[product].shape, dtype=torch.float32, device=device)
        bf16 = torch.empty_like(grads[product])
        fp32_work, stale = works[f"{product}_fp32"], partial(sums.fill_, _STALE)
        beside = (
            wgrad(product, product, bf16, partial(bf16.fill_, _STALE), work=works[product],
                  torch=lambda: rank_gemms.torch(product)),
            wgrad(product, product, sums, stale, work=fp32_work),
        )  # fmt: skip
        by_torch = lambda: sums.add_(rank_gemms.torch(product))  # noqa: E731
        return wgrad(name, product, sums, partial(_fill, sums), work=works[name], torch=by_torch, beside=beside)

    accumulations = {name: partial(accumulation, name) for name in ACCUMULATIONS}
    return {name: partial(case, name) for name in PRODUCTS} | {FUSED: fused} | accumulations


class NormOps:
    """RMSNorm of the rows of a rank's own routes with their weighted sum, on tensors of its own.

    The norm is BF16 and without a weight: that is torch.nn.functional.rms_norm on the same rows. (With one, ours
    multiplies before it normalises.)
    """

    def __init__(self, traffic: Traffic, ids: list[Tensor], rank: int, device: torch.device):
        ids_TK, D = ids[rank], traffic.shape.D
        T, K = ids_TK.shape
        wire_ids, scores = reference.resolve_routes(ids_TK, torch.rand(T, K) + 0.1, traffic.shape.E)
        self._device, self._E = device, traffic.shape.E
        self._works = norm_work(T, int((wire_ids >= 0).sum()), K, D)
        self._norm, self._stop_1 = Norm(1e-6, torch.bfloat16), torch.zeros(1, dtype=torch.int64, device=device)
        # Rows of many sizes: one that is not normalised shows.
        rows = _fill(self._empty(T, K, D)).mul_(1 + 7 * torch.rand(T, K, 1, device=device))
        self._routes = {"rows_TKD": rows, "ids_TK": wire_ids.to(device), "scores_TK": scores.to(device)}

    def cases(self) -> Makers:
        return dict(zip(NORM_OPS, (self._forward, self._backward), strict=True))

    def _empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _case(self, name: str, op: str, run: Callable, values: dict[str, Tensor], **how) -> OpCase:
        """values: outputs by name, each compared by rows; moved data and the plain sum by their bits."""
        exact = {"kept": "moved", "out": "combine" if op == "reduce" else "gemm"}
        bars = {key: testing.TOLERANCES[exact.get(key, "gemm")] for key in values}
        return OpCase(
            name=name,
            op=op,
            run=run,
            outputs=lambda _: [(f"{name} {key}", value, bars[key]) for key, value in values.items()],
            setup=lambda: [value.fill_(_STALE) for value in values.values()],
            work=self._works[name],
            **how,
        )

    def _forward(self) -> OpCase:
        """Of a call without a backward; beside it the same that keeps what backward will read, and the plain sum."""
        rows, ids, scores = self._routes.values()
        out = self._empty(len(ids), rows.shape[2])
        kept, rstd = torch.empty_like(rows), self._empty(*ids.shape, dtype=torch.float32)

        def fused(kept_rows_TKD, rstd_TK, function) -> None:
            kept = {"kept_rows_TKD": kept_rows_TKD, "rstd_TK": rstd_TK}
            function(out, **self._routes, norm=self._norm, **kept, stop_1=self._stop_1)

        def plain(reduce, of: Tensor = rows) -> None:
            regions = {"outputs": of, "ids": ids, "scores": scores}
            regions = {key: SimpleNamespace(own=value, peers=[value]) for key, value in regions.items()}
            reduce(out, **regions, dedup=False, num_experts=self._E, rank=0, stop_1=self._stop_1)

        best_reduce = registry.function(registry.choose("reduce", registry.call_of(self._device, None))[0])

        def unfused(of: Tensor = rows) -> Tensor:
            plain(best_reduce, functional.rms_norm(of, rows.shape[2:], None, self._norm.eps))
            return out

        def unfused_keeping() -> Tensor:
            return unfused(kept.copy_(rows))

        keeping = {"out": out, "kept": kept, "rstd": rstd.view(1, -1)}
        beside = (
            self._case("keep", "rmsnorm_reduce", partial(fused, kept, rstd), keeping, torch=unfused_keeping),
            self._case("plain", "reduce", plain, {"out": out}),
        )
        run = partial(fused, None, None)
        return self._case("rmsnorm_reduce", "rmsnorm_reduce", run, {"out": out}, torch=unfused, beside=beside)

    def _backward(self) -> OpCase:
        rows = self._routes["rows_TKD"]
        T, K, D = rows.shape
        grad_out, rstd = _fill(self._empty(T, D)), self._empty(T, K, dtype=torch.float32)
        how = {"norm": self._norm, "rstd_TK": rstd, "stop_1": self._stop_1}
        reference.rmsnorm_reduce(self._empty(T, D), **self._routes, **how, kept_rows_TKD=None)
        grads = torch.empty_like(rows), torch.empty_like(rstd)

        def run(function) -> None:
            written = {"grad_rows_TKD": grads[0], "grad_scores_TK": grads[1], "grad_weight_D": None}
            function(grad_out, **self._routes, **how, **written)

        name = "rmsnorm_reduce_backward"
        return self._case(name, name, run, {"grad_rows": grads[0], "grad_scores": grads[1].view(1, -1)})


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

    def cases(self) -> Makers:
        return {
            "publish": self._publish_case,
            "route": self._route_case,
            "dispatch": self._dispatch_case,
            "swiglu": self._swiglu_case,
            "swiglu_backward": self._swiglu_backward_case,
            "combine": self._combine_case,
            "reduce": self._reduce_case,
        }

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
            _fill(self._h1)
            self._h2.fill_(_STALE)

        return self._case("swiglu", run, lambda _: {"h2": self._h2[: self._R]}, setup, "swiglu")

    def _swiglu_backward_case(self) -> OpCase:
        def run(swiglu_backward):
            swiglu_backward(
                self._h1, self._zero_1, self._h2, self._zero_1, self._row_scores, self._score_grads,
                self._plan.row_start_P, activation=Activation(), stop_1=self._zero_1,
            )  # fmt: skip

        def setup():
            _fill(self._h1)
            _fill(self._h2)

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
            _fill(self._rows_D)
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
            _fill(self._at.outputs.own)
            self._out_TD.fill_(_STALE)

        return self._case("reduce", run, lambda _: {"out": self._out_TD}, setup, "combine")


def _fill(value: Tensor) -> Tensor:
    """The same normal numbers each time, so that every implementation gets the same input."""
    return value.normal_(generator=torch.Generator(value.device).manual_seed(1))

"""The whole path in block-scaled formats beside the same path in BF16.

    torchrun --nproc-per-node 2 -m benchmarks.bench_formats --shapes deepseek-v3 --tokens 16 128 8192 --commit abc1234
    python -m benchmarks.bench_formats --virtual 2 --directions forward+backward --commit abc1234
    python -m benchmarks.bench_formats --smoke                                       tiny, on the CPU

All are replayed CUDA graphs on the same inputs and routing, with prepared weights; training in MXFP8 also with weights
that every call quantises ("dynamic"). Outputs and gradients are first held against those of BF16: relative error and
cosine over the whole tensor within the bounds that users of such formats expect. With --stages a table of every op.
"""

import argparse
import contextlib
import functools
import gc
import sys
from dataclasses import replace

import torch
from torch import Tensor

from dist_moe import BlockScaledConfig, prepare_block_scaled_weight, testing
from dist_moe.planner import packed_row_bytes, plan_memory
from dist_moe.virtual import RankResults

from . import launch
from .launch import Job, Miss
from .ours import BOTH, INFERENCE, Ours
from .record import Rows, parse, parser
from .roofs import Roofs, Work, backward_work, forward_work, measure_roofs, total
from .shapes import Inputs, Shape, Traffic, config_of, draw_inputs, load_of
from .stages import measure_stages
from .timing import measure

# Relative error and cosine over the whole tensor, against BF16: what tests of dist-moe 0.1.0 accept.
BOUNDS = {"mxfp8": (0.075, 0.9975), "nvfp4": (0.29, 0.955)}
METHODS = {BOTH: ("bf16", "mxfp8", "mxfp8-dynamic"), INFERENCE: ("bf16", "mxfp8", "nvfp4")}
FORMATS = {"mxfp8": BlockScaledConfig(), "nvfp4": BlockScaledConfig("nvfp4")}


def prepared(inputs: Inputs, how: BlockScaledConfig, inference: bool) -> Inputs:
    def ready(weight: Tensor):
        return prepare_block_scaled_weight(weight, how, inference=inference)

    return replace(inputs, ranks=[replace(r, w13_L2FD=ready(r.w13_L2FD), w2_LDF=ready(r.w2_LDF)) for r in inputs.ranks])


def bare(inputs: Inputs, direction: str) -> Inputs:
    """Inference takes nothing that wants a gradient."""
    if direction == BOTH:
        return inputs
    return replace(
        inputs,
        ranks=[
            replace(r, **{name: t.detach() for name, t in vars(r).items() if isinstance(t, Tensor)})
            for r in inputs.ranks
        ],
    )


def config_in(traffic: Traffic, direction: str, how: BlockScaledConfig | None, **planned_for):
    config = replace(config_of(traffic, inference=direction == INFERENCE), block_scaled=how)
    if how is None or direction == INFERENCE:
        return config
    config = replace(config, activation_slot_bytes=None)
    slot_bytes = plan_memory(config, traffic.W, **planned_for).maximum_useful_activation_slot_bytes
    return replace(config, activation_slot_bytes=slot_bytes)


def apart(results: list[RankResults], expected: list[RankResults], name: str) -> tuple[float, float]:
    """Relative error and cosine of a field over all ranks of this process; in parts, to need little memory."""
    error = signal = size = dot = 0.0
    for rank, want in zip(results, expected, strict=True):
        for a, b in zip(getattr(rank, name).split(8), getattr(want, name).split(8), strict=True):
            a, b = a.double(), b.double()
            error, signal, size, dot = (
                total + float((x * y).sum())
                for total, x, y in ((error, a - b, a - b), (signal, b, b), (size, a, a), (dot, a, b))
            )
    return (error / signal) ** 0.5, dot / max(size * signal, 1e-300) ** 0.5


def require_near(what: str, results: list[RankResults], expected: list[RankResults], name: str) -> float:
    """The largest relative error of a field. Raises Miss outside of the bounds."""
    worst, (error_bound, cosine_bound) = 0.0, BOUNDS[what]
    for field in RankResults.__dataclass_fields__:
        if getattr(expected[0], field) is not None:
            error, cosine = apart(results, expected, field)
            if not (error < error_bound and cosine > cosine_bound):
                raise Miss(f"{name} {field}: relative error {error:.4f}, cosine {cosine:.5f} against BF16")
            worst = max(worst, error)
    return worst


class Case:
    """One shape, routing and number of tokens."""

    def __init__(self, job: Job, args: argparse.Namespace, shape: Shape, routing: str, T: int):
        self.job, self.args, self.shape, self.routing = job, args, shape, routing
        self.ids = testing.routing(routing, num_ranks=job.W, T=T, K=shape.K, E=shape.E)
        self.traffic = Traffic(shape, self.ids)

    def run(self, rows: Rows, stage_rows: Rows, roofs: Roofs) -> None:
        for direction in self.args.directions:
            about = rows.about(self.shape, self.traffic, self.routing, direction)
            if all(rows.has(about, name) for name in self._names(direction)):
                rows.say(f"{self.shape.name} {self.routing} {direction}: has its rows")
                continue
            self._free()
            inputs = bare(draw_inputs(self.shape, self.ids, self.job.local_ranks, self.job.device), direction)
            self._direction(rows, stage_rows, roofs, direction, inputs)

    def _names(self, direction: str) -> list[str]:
        return [name for name in METHODS[direction] if name in self.args.methods]

    def _direction(self, rows, stage_rows, roofs, direction, inputs) -> None:
        names, times, errors = self._names(direction), {}, {}
        expected: list[RankResults] = []  # of the first method
        for together in [[name] for name in names] if self.args.apart else [names]:
            with contextlib.ExitStack() as contexts:
                methods = []
                for name in together:
                    ours = self._ours(name, direction, inputs)
                    contexts.callback(ours.context.close)
                    contexts.push(lambda *error, held=ours: None)  # its graph reads what it holds
                    error = self._checked(name, ours, expected)
                    errors |= {} if error is None else {name: error}
                    self._stages(name, ours, stage_rows, roofs)
                    method = ours.graph_method() if self.job.device.type == "cuda" else ours.method()
                    methods.append(replace(method, name=name))
                if not self.args.apart:
                    expected.clear()  # gradients of all weights
                times |= measure(self.job, methods, self.args.rounds)
                del methods, method, ours
            self._free()
        about = rows.about(self.shape, self.traffic, self.routing, direction)
        for name, time in times.items():
            more = {"bf16_us": times["bf16"].us if "bf16" in times else None, "relative_error": errors.get(name)}
            if direction == INFERENCE and name != "bf16":
                more["wire_row_bytes"] = packed_row_bytes(config_in(self.traffic, direction, FORMATS[name]))
            rows.say_row(rows.add(about, name, time, self._work(direction), roofs, self.job.num_gpus, **more))

    def _ours(self, name: str, direction: str, inputs: Inputs) -> Ours:
        how = FORMATS.get(name.split("-")[0])
        given = inputs if how is None or "dynamic" in name else prepared(inputs, how, direction == INFERENCE)
        config = config_in(self.traffic, direction, how, device=self.job.device, backend=self.args.backend)
        return Ours(self.job, self.traffic, given, direction, self.args.backend, config)

    def _checked(self, name: str, ours: Ours, expected: list[RankResults]) -> float | None:
        """The largest relative error against what is expected, which the first method's results become. Collective."""
        results = ours.results()
        if not expected:
            expected += results
            return None
        return self.job.agree(functools.partial(require_near, name.split("-")[0], results, expected, name))

    def _stages(self, name: str, ours: Ours, stage_rows: Rows, roofs: Roofs) -> None:
        if self.args.stages:
            for (half, stage), time in measure_stages(self.job, self.shape, ours, self.args.rounds).items():
                about = stage_rows.about(self.shape, self.traffic, self.routing, half)
                stage_rows.say_row(stage_rows.add(about, f"{name} {stage}", time, None, roofs, self.job.num_gpus))

    def _free(self) -> None:
        gc.collect()
        if self.job.device.type == "cuda":
            torch.cuda.empty_cache()

    def _work(self, direction: str) -> Work:
        """Useful FLOPs alone: bytes are the format's."""
        works = []
        for rank in range(self.traffic.W):
            load = load_of(self.traffic, rank)
            works += forward_work(load).values()
            works += backward_work(load).values() if direction == BOTH else ()
        return Work(total(works).flops)


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--virtual", type=int, help="this many ranks in one process")
    options.add_argument("--directions", nargs="+", choices=METHODS, default=[INFERENCE])
    names = [*dict.fromkeys(name for of_direction in METHODS.values() for name in of_direction)]
    options.add_argument("--methods", nargs="+", choices=names, default=names, help="those that a direction has")
    options.add_argument("--apart", action="store_true", help="hold one method at a time, where memory is short")
    options.add_argument("--stages", action="store_true", help="also a table of every op of the path")
    options.add_argument("--backend", help="of our ops; default: the best that runs")
    args = parse(options, argv)
    if args.smoke and args.virtual is None and not launch.under_torchrun():
        args.virtual = 2
    job = launch.start(virtual=args.virtual, cpu=args.smoke)
    rows, stage_rows = Rows(job, "formats", args), Rows(job, "formats_stages", args)
    try:
        roofs = measure_roofs(job, args.rounds)
        rows.say(f"roofs: {roofs}")
        rows.each(args, lambda *what: Case(job, args, *what).run(rows, stage_rows, roofs))
    finally:
        launch.stop(job)
    return 1 if rows.missed else 0


if __name__ == "__main__":
    sys.exit(main())

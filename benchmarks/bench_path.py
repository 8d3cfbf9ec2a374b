"""The whole path over W ranks, beside its baseline and its floor.

    torchrun --nproc-per-node 2 -m benchmarks.bench_path --shapes deepseek-v3 --commit abc1234      or 4, or 8
    python -m benchmarks.bench_path --virtual 2           W ranks on one GPU: no link, no processes
    python -m benchmarks.bench_path --smoke               tiny, on the CPU; also under torchrun

Methods: "ours" eager and "ours-graph" replayed; "baseline": NCCL all_to_all_single and torch._grouped_mm;
"floor-ours" and "floor-torch": the bare products on the same rows, replayed. Ours and the baseline are checked
against the dense oracle on the inputs that are then timed. Rates count all ranks' useful FLOPs, a device.
"""

import contextlib
import functools
import gc
import sys
from collections.abc import Callable

import torch

from dist_moe import testing

from . import gemms, launch
from .baseline import Baseline
from .checks import BASELINE_SLACK_DB, PathOracle, require_alike
from .launch import Job, Miss
from .ours import BOTH, DIRECTIONS, FORWARD, INFERENCE, Ours
from .record import Rows, parse, parser
from .roofs import Roofs, Work, measure_roofs, total
from .shapes import SCHEMES, Shape, Traffic, always_choose, draw_inputs, memory_bytes
from .stages import WHOLE, measure_stages, stage_works
from .timing import Method, capture, measure


def works(traffic: Traffic, direction: str) -> tuple[Work, Work]:
    """All ranks' work in a direction: of the path, and of its products alone."""
    names = ("forward", "backward") if direction == BOTH else ("forward",)
    products = gemms.FORWARD + gemms.BACKWARD
    stages = {stage: work for stage, work in stage_works(traffic).items() if stage[0] in names}
    bare = [work for (_, name), work in stages.items() if name in products]
    return total(stages[name, WHOLE] for name in names), total(bare)


def _free(job: Job) -> None:
    """Give back what earlier methods held."""
    gc.collect()
    if job.device.type == "cuda":
        torch.cuda.empty_cache()


def device_bytes(job: Job) -> int | None:
    """Memory of the GPU."""
    return torch.cuda.get_device_properties(job.device).total_memory if job.device.type == "cuda" else None


class Case:
    """One shape, routing and number of tokens."""

    def __init__(self, job: Job, args, shape: Shape, routing: str, T: int):
        self.job, self.args, self.shape, self.routing = job, args, shape, routing
        self.ids = testing.routing(routing, num_ranks=job.W, T=T, K=shape.K, E=shape.E)
        self.traffic = Traffic(shape, self.ids)

    def expected(self, direction: str) -> list[str]:
        """Methods that will have rows."""
        on_gpu = self.job.device.type == "cuda"
        names = {
            "ours": ["ours"],
            "graph": ["ours-graph"] * on_gpu,
            "baseline": ["baseline"],
            "floor": ["floor-ours", "floor-torch"],
            "stages": ["whole"] if direction == self.staged else [],
        }
        return [name for method in self.args.methods for name in names[method]]

    @property
    def staged(self) -> str | None:
        """The direction whose stages are timed."""
        wanted = [d for d in (BOTH, FORWARD, INFERENCE) if d in self.args.directions]
        return wanted[0] if "stages" in self.args.methods else None

    def run(self, rows: Rows, stage_rows: Rows, roofs: Roofs) -> None:
        """Measure what has no row yet and fits. Raises Miss, on all ranks, when a result is wrong."""
        _free(self.job)
        todo = [d for d in self.args.directions if not self._is_done(rows, stage_rows, d)]
        if not todo:
            rows.say(f"{self.shape.name} {self.routing}: has its rows")
        todo = [d for d in todo if self._fits(rows, d)]
        if not todo:
            return
        self.inputs = draw_inputs(self.shape, self.ids, self.job.local_ranks, self.job.device)
        self.oracle = PathOracle(self.job, self.shape, self.inputs, backward=BOTH in todo)
        for direction in todo:
            _free(self.job)
            self._run_direction(rows, stage_rows, roofs, direction)

    def _is_done(self, rows: Rows, stage_rows: Rows, direction: str) -> bool:
        about = rows.about(self.shape, self.traffic, self.routing, direction)
        whole = stage_rows.about(self.shape, self.traffic, self.routing, "forward")
        names = self.expected(direction)
        return all(stage_rows.has(whole, name) if name == "whole" else rows.has(about, name) for name in names)

    def _fits(self, rows: Rows, direction: str) -> bool:
        """What cannot fit is said and left out; it is no Miss, for it would be one for ever."""
        kind = {"backward": direction == BOTH, "inference": direction == INFERENCE}
        needed = memory_bytes(self.traffic, len(self.job.local_ranks), methods=self.args.methods, **kind)
        if (there := device_bytes(self.job)) is None:
            return True
        text = f"{self.shape.name} {self.routing} {direction}: at most {needed / 2**30:.1f} GiB of {there / 2**30:.1f}"
        fits = all(self.job.gather(needed <= there))  # ranks may have different GPUs
        rows.say(text if fits else f"NOT TIMED: {text}")
        return fits

    def _run_direction(self, rows: Rows, stage_rows: Rows, roofs: Roofs, direction: str) -> None:
        with contextlib.ExitStack() as contexts:
            ours = self._ours(direction, contexts)
            methods, db = self._checked_methods(ours)
            more = {name: make for name, make in self._more(ours, contexts).items() if name in self.expected(direction)}
            for name, make in more.items():
                try:
                    methods.append(make())
                except Miss as miss:
                    rows.miss(f"{self.shape.name} {self.routing} {direction} {name}: {miss}")
            self._time(rows, roofs, direction, methods, db)
            if direction == self.staged:
                self._time_stages(stage_rows, roofs, ours)

    def _ours(self, direction: str, contexts: contextlib.ExitStack) -> Ours:
        ours = Ours(self.job, self.traffic, self.inputs, direction, self.args.backend)
        contexts.callback(ours.context.close)
        return ours

    def _checked_methods(self, ours: Ours) -> tuple[list[Method], dict[str, float]]:
        """Ours and the baseline, once both are right, with their worst rows in dB."""
        agree, check, wanted = self.job.agree, self.oracle.check, self.args.methods
        results = ours.results()
        db = {"ours": agree(lambda: check("ours", results))}
        methods = [ours.method()] if "ours" in wanted else []
        if "baseline" in wanted:
            baseline, method = self._baseline(ours.direction)
            db["baseline"] = agree(lambda: check("baseline", baseline, BASELINE_SLACK_DB))
            agree(lambda: require_alike("baseline", results, baseline))
            methods.append(method)
        return methods, db

    def _baseline(self, direction: str):
        """Its results, and the method that repeats them."""
        baseline = Baseline(self.job, self.shape, self.inputs)
        return baseline.results(backward=direction == BOTH), Method("baseline", baseline.run_of(direction))

    def _more(self, ours: Ours, contexts: contextlib.ExitStack) -> dict[str, Callable[[], Method]]:
        """What is captured in CUDA graphs, by name; a failure leaves the others alone."""
        makers = {"ours-graph": lambda: self._ours(ours.direction, contexts).graph_method()}
        if "floor" in self.args.methods:
            ranks = [
                gemms.ExpertGemms(self.traffic.expert_rows(rank), r.w13_L2FD, r.w2_LDF)
                for rank, r in zip(self.job.local_ranks, self.inputs.ranks, strict=True)
            ]
            runs = gemms.floors(ranks, ours.context.path.ops, backward=ours.direction == BOTH)
            makers |= {name: functools.partial(self._floor, name, run) for name, run in runs.items()}
        return makers

    def _floor(self, name: str, run: Callable[[], None]) -> Method:
        """Without the cost of its launches, which at few tokens is most of it."""
        return Method(name, capture(self.job, run, run)[0].replay if self.job.device.type == "cuda" else run)

    def _time(self, rows: Rows, roofs: Roofs, direction: str, methods: list[Method], db: dict) -> None:
        times = measure(self.job, methods, self.args.rounds)
        path, bare = works(self.traffic, direction)
        floors = [time.us for name, time in times.items() if name.startswith("floor")]
        beside = {
            "floor_us": min(floors, default=None),
            "baseline_us": times["baseline"].us if "baseline" in times else None,
        }
        about = rows.about(self.shape, self.traffic, self.routing, direction)
        for name, time in times.items():
            kind = name.split("-")[0]
            work = {"ours": path, "floor": bare, "baseline": Work(path.flops)}[kind]
            more = beside | {"worst_row_db": db[kind]} if kind in db else beside
            rows.say_row(rows.add(about, name, time, work, roofs, self.job.num_gpus, **more))

    def _time_stages(self, rows: Rows, roofs: Roofs, ours: Ours) -> None:
        times, counted = measure_stages(self.job, self.shape, ours, self.args.rounds), stage_works(self.traffic)
        for (direction, name), time in times.items():
            about = rows.about(self.shape, self.traffic, self.routing, direction)
            rows.say_row(rows.add(about, name, time, counted.get((direction, name)), roofs, self.job.num_gpus))


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--virtual", type=int, help="this many ranks in one process")
    options.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=[FORWARD, BOTH])
    options.add_argument(
        "--methods",
        nargs="+",
        choices=("ours", "graph", "baseline", "floor", "stages"),
        default=["ours", "graph", "baseline", "floor"],
        help="stages: a table of every op of the path",
    )
    options.add_argument("--scheme", choices=SCHEMES, help="of the exchange; default: what the path chooses")
    options.add_argument("--backend", help="of our ops; default: the best that runs")
    args = parse(options, argv)
    if args.smoke and args.virtual is None and not launch.under_torchrun():
        args.virtual = 2
    if args.scheme:
        always_choose(args.scheme)
    job = launch.start(virtual=args.virtual, cpu=args.smoke)
    rows, stage_rows = Rows(job, "path", args), Rows(job, "stages", args)
    try:
        roofs = measure_roofs(job, args.rounds)
        rows.say(f"roofs: {roofs}")
        rows.each(args, lambda *what: Case(job, args, *what).run(rows, stage_rows, roofs))
    finally:
        launch.stop(job)
    return 1 if rows.missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""One call on a time axis: when each stage ran, and whether it moves rows between ranks or computes on them.

Intervals come from CUDA events round every op of the path (stages.py), each some microseconds longer than its kernel,
or from the clocks that kernels write themselves in a replayed graph, where nothing lies between them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .launch import Job
from .ours import BOTH, Ours
from .shapes import Shape
from .stages import BETWEEN, WHOLE, StageClock, run_call, stage_name, with_ops
from .timing import WARMUP_ROUNDS, StartLine, capture

if TYPE_CHECKING:
    from dist_moe.kernels_triton._clocks import Clocks

COMMUNICATION, COMPUTE = "communication", "compute"
EVENTS, CLOCKS = "events", "the kernels' clocks"  # where intervals come from
# Ops by how their names begin: what reads or writes memory of other ranks, waits for them, or lays rows out for them.
# mega_forward does both at once and counts as what it is there for, compute.
_COMMUNICATES = ("publish", "signal", "wait", "verify", "dispatch", "combine")


@dataclass(frozen=True)
class Interval:
    """A stage of one direction; microseconds, start_us from the start of the call."""

    direction: str
    stage: str
    kind: str
    start_us: float
    us: float


def kind_of(stage: str) -> str:
    return COMMUNICATION if stage.startswith(_COMMUNICATES) else COMPUTE


def record(job: Job, shape: Shape, ours: Ours) -> list[Interval]:
    """One call of the first process after some that warm up, by start; of virtual ranks all. Collective."""
    line = StartLine(job)
    with StageClock(job, shape, ours) as clock:
        for _ in range(WARMUP_ROUNDS + 1):
            run_call(job, ours, line, clock)
            spans = clock.take_starts()
    return [
        Interval(direction, stage, kind_of(stage), start_us, us)
        for (direction, stage), start_us, us in spans
        if stage != WHOLE
    ]


class _Launches:
    """What a call launches: (direction, stage, programs) in order, of the last call."""

    def __init__(self, shape: Shape, ours: Ours, clocks: "Clocks"):
        self._shape, self._ours, self._log = shape, ours, clocks.log
        self.found: list[tuple[str, str, int]] = []
        self._direction = ""

    def _take(self, stage: str) -> None:
        self.found += [(self._direction, stage, programs) for _, programs in self._log]
        self._log.clear()

    def _noted(self, op: str, function: Callable) -> Callable:
        def run(*args, **kwargs):
            self._take(BETWEEN)
            result = function(*args, **kwargs)
            self._take(stage_name(self._shape, op, args, kwargs))
            return result

        return run

    def call(self) -> None:
        """One call and a mark behind it."""
        from dist_moe.kernels_triton._clocks import mark

        context = self._ours.context
        path, context.path = context.path, with_ops(context.path, self._noted)
        self.found, self._direction = [], "forward"
        self._log.clear()
        outs = self._ours.forward()
        if self._ours.direction == BOTH:
            self._take(BETWEEN)
            self._direction = "backward"
            self._ours.backward(outs)
        mark()
        self._take(BETWEEN)
        context.path = path


def record_clocks(job: Job, shape: Shape, ours: Ours, clocks: "Clocks") -> list[Interval]:
    """As record, of a replayed graph. Collective."""
    launches, line, prepare = _Launches(shape, ours, clocks), StartLine(job), ours.prepare or (lambda: None)

    def warm_up() -> None:
        launches.call()
        prepare()

    graph, _ = capture(job, launches.call, warm_up)
    for _ in range(WARMUP_ROUNDS + 1):
        prepare()
        line.wait()
        clocks.clear()
        graph.replay()
        torch.cuda.synchronize(job.device)
    ours.context.check()
    prepare()
    begins = clocks.begins([programs for _, _, programs in launches.found])
    return [
        Interval(direction, stage, kind_of(stage), (begin - begins[0]) / 1e3, (end - begin) / 1e3)
        for (direction, stage, _), (begin, end) in zip(launches.found, itertools.pairwise(begins), strict=False)
    ]

"""One call on a time axis: when each stage ran, and whether it moves rows between ranks or computes on them.

Intervals come from CUDA events round every op of the path (stages.py), each some microseconds longer than its kernel.
What draws them reads Intervals alone: another source, such as clocks that kernels write themselves, is another function
that returns them.
"""

from dataclasses import dataclass

from .launch import Job
from .ours import Ours
from .shapes import Shape
from .stages import WHOLE, StageClock, run_call
from .timing import WARMUP_ROUNDS, StartLine

COMMUNICATION, COMPUTE = "communication", "compute"
# Ops by how their names begin: what reads or writes memory of other ranks, waits for them, or lays rows out for them.
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

"""Where the time of a path goes: every op between two events, beside what it has to move and to multiply.

The ops of a Context's path are wrapped, so fusions that the path comes to use appear by their own names. Not for the
timed rounds: events between launches cost some microseconds each. The device first sleeps, so that the host has
launched everything before the first op runs, and launches are in no op's time.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import torch

from dist_moe.calls import Path
from dist_moe.shapes import STAGE_NAMES

from .launch import Job
from .ours import BOTH, Ours
from .roofs import Work, backward_work, forward_work, total
from .shapes import Shape, Traffic, load_of
from .timing import WARMUP_ROUNDS, Span, StartLine, Times, summarize, worst

HEAD_START_CYCLES = 20_000_000  # 10 ms at 2 GHz, several times what the launches of a forward and backward take
WHOLE, BETWEEN = "whole", "between ops"
_GEMMS = {  # name of the stage, and where among the arguments the weight, or its gradient, is
    "grouped_gemm": ("{}", 2),
    "grouped_gemm_dgrad": ("dgrad_{}", 2),
    "grouped_gemm_wgrad": ("wgrad_{}", 5),
    "grouped_gemm_scaled": ("{}", 1),
    "grouped_gemm_scaled_dgrad": ("dgrad_{}", 1),
    "grouped_gemm_scaled_wgrad": ("wgrad_{}", 4),
}

Stage = tuple[str, str]  # direction, name


def stage_name(shape: Shape, op: str, args: tuple, kwargs: dict) -> str:
    """An op's stage: products by their weight, signals and waits by their event, others by themselves."""
    if op in _GEMMS:
        name, at = _GEMMS[op]
        weight = args[at]
        values_per_byte = 2 if weight.dtype == torch.float4_e2m1fn_x2 else 1
        is_w13 = weight.shape[1:] == (2 * shape.F, shape.D // values_per_byte)
        return name.format("w13" if is_w13 else "w2")
    if op in ("signal", "wait"):
        return f"{op} {STAGE_NAMES[kwargs['stage']]}"
    return op


def with_ops(path: Path, wrap: Callable[[str, Callable], Callable]) -> Path:
    """The path with wrap(name, op) in place of every op."""
    ops = {name: wrap(name, op) for name, op in vars(path.ops).items() if name != "backends"}
    return dataclasses.replace(path, ops=SimpleNamespace(**ops))


class StageClock:
    """Spans of every op while it is in use; a stage that runs for several local ranks has several."""

    def __init__(self, job: Job, shape: Shape, ours: Ours):
        self._job, self._shape, self._context = job, shape, ours.context
        self._path, self._direction = ours.context.path, ""
        self._spans: dict[Stage, list[Span]] = defaultdict(list)

    def _timed(self, op: str, function):
        def run(*args, **kwargs):
            stage = (self._direction, stage_name(self._shape, op, args, kwargs))
            with self.span(stage):
                return function(*args, **kwargs)

        return run

    def span(self, stage: Stage):
        return _Running(self._spans[stage], Span(self._job.device))

    def direction(self, name: str):
        """Everything until its end belongs to this direction."""
        self._direction = name
        return self.span((name, WHOLE))

    def __enter__(self) -> "StageClock":
        self._context.path = with_ops(self._path, self._timed)
        return self

    def __exit__(self, *error) -> None:
        self._context.path = self._path

    def take(self) -> dict[Stage, float]:
        """Microseconds by stage since the last take; between ops is what remains of the whole."""
        us: dict[Stage, float] = {}
        for direction in dict.fromkeys(direction for direction, _ in self._spans):
            spans = {stage: spans for stage, spans in self._spans.items() if stage[0] == direction}
            us |= {stage: sum(span.us() for span in parts) for stage, parts in spans.items()}
            ops = sum(us[stage] for stage in spans if stage[1] != WHOLE)
            us[direction, BETWEEN] = us[direction, WHOLE] - ops
        self._spans.clear()
        return us

    def take_starts(self) -> list[tuple[Stage, float, float]]:
        """(stage, us after the first began, us that it took) of every span since the last take, by their start."""
        spans = [(stage, span) for stage, parts in self._spans.items() for span in parts]
        first = next(span for (_, name), span in spans if name == WHOLE)
        taken = [(stage, span.us_after(first), span.us()) for stage, span in spans]
        self._spans.clear()
        return sorted(taken, key=lambda part: part[1])


class _Running:
    def __init__(self, spans: list[Span], span: Span):
        self._spans, self._span = spans, span

    def __enter__(self) -> None:
        self._span.start()

    def __exit__(self, *error) -> None:
        self._span.stop()
        self._spans.append(self._span)


def run_call(job: Job, ours: Ours, line: StartLine, clock: StageClock) -> None:
    """One call under the clock, after a start that all ranks share. Collective."""
    if ours.prepare:
        ours.prepare()
    line.wait()
    if job.device.type == "cuda":
        torch.cuda._sleep(HEAD_START_CYCLES)
    with clock.direction("forward"):
        outs = ours.forward()
    if ours.direction == BOTH:
        with clock.direction("backward"):
            ours.backward(outs)


def measure_stages(job: Job, shape: Shape, ours: Ours, rounds: int) -> dict[Stage, Times]:
    """Times by stage in the order of the path, of the rank where the stage takes longest; local ranks are added up."""
    line = StartLine(job)
    samples: dict[Stage, list[float]] = {}
    with StageClock(job, shape, ours) as clock:
        for i in range(-WARMUP_ROUNDS, rounds):
            run_call(job, ours, line, clock)
            us = clock.take()
            if i >= 0:
                for stage, value in us.items():
                    samples.setdefault(stage, []).append(value)
    return worst(job, {stage: summarize(values) for stage, values in samples.items()})


def stage_works(traffic: Traffic) -> dict[Stage, Work]:
    """Counted work by stage, all ranks together."""
    works: dict[Stage, list[Work]] = defaultdict(list)
    for rank in range(traffic.W):
        load = load_of(traffic, rank)
        for direction, stages in (("forward", forward_work(load)), ("backward", backward_work(load))):
            for name, work in stages.items():
                works[direction, name].append(work)
            works[direction, WHOLE].append(total(stages.values()))
    found = {stage: total(parts) for stage, parts in works.items()}
    h2_bytes = found["forward", "swiglu"].hbm_bytes // 3  # it reads h1, twice as wide
    found["forward", "grouped_gemm_swiglu"] = found["forward", "w13"] + Work(hbm_bytes=h2_bytes)  # in place of both
    together = ("dispatch", "grouped_gemm_swiglu", "w2", "combine")
    found["forward", "mega_forward"] = total(found["forward", name] for name in together)
    return found

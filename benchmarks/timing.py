"""How we measure.

A round times every method once, in an order that rotates from round to round, so that a drift of the clocks meets all
alike. Before each timed run the device is idle, the L2 cache holds other data, and one barrier, ordered by the stream,
has lined up the ranks. Then two CUDA events enclose the run: a method that launches from Python ("eager") is charged
for its launches, one that replays a CUDA graph is not. The first rounds only warm up clocks and caches.

A time is the median over rounds with its 10th and 90th percentile, each rank for itself; the rank with the largest
median is reported. On a CPU, where only the scripts are tried, perf_counter stands in for the events.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .launch import Job, Miss

WARMUP_ROUNDS = 3
FLUSH_BYTES = 256 * 2**20  # several times the L2 of an H200 (60 MB)


@dataclass(frozen=True)
class Method:
    """Something to time; `prepare` runs before each run and is not timed."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] | None = None


@dataclass(frozen=True)
class Times:
    us: float  # median
    p10: float
    p90: float
    rounds: int


class Span:
    """The time between start() and stop() on the current stream, or by the host's clock on a CPU."""

    def __init__(self, device: torch.device):
        on_gpu = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else None
        self._clock = [0, 0]

    def _mark(self, i: int) -> None:
        if self._events:
            self._events[i].record()
        else:
            self._clock[i] = time.perf_counter_ns()

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def us_after(self, other: "Span") -> float:
        """Microseconds from the start of another span to the start of this one; waits for both starts."""
        if not self._events:
            return (self._clock[0] - other._clock[0]) / 1e3
        self._events[0].synchronize()
        return other._events[0].elapsed_time(self._events[0]) * 1e3

    def us(self) -> float:
        """Microseconds; waits for the end of the span."""
        if not self._events:
            return (self._clock[1] - self._clock[0]) / 1e3
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) * 1e3


class StartLine:
    """Brings all ranks to the same point, with idle devices and a foreign L2."""

    def __init__(self, job: Job):
        self._job = job
        on_gpu = job.device.type == "cuda"
        self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=job.device) if on_gpu else None
        self._token = torch.zeros(1, device=job.device)

    def wait(self) -> None:
        if self._flushed is not None:
            torch.cuda.synchronize(self._job.device)
            self._flushed.zero_()
        if self._job.group is not None:
            dist.all_reduce(self._token, group=self._job.group)


def capture(job: Job, run: Callable[[], object], warm_up: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """run() as a CUDA graph, and what it returned while captured. Raises Miss where that is not possible; collective.

    warm_up runs before it on the same stream, as libraries want that keep an eye on streams.
    """
    stream, graph = torch.cuda.Stream(job.device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(job.device))
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.synchronize(job.device)

    def record() -> object:
        try:
            # Other threads, NCCL's watchdog for one, may go on querying events.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                return run()
        except RuntimeError as error:
            raise Miss(f"cannot be captured: {error}") from error

    return graph, job.agree(record)


def summarize(samples: Sequence[float]) -> Times:
    if len(samples) == 1:
        return Times(samples[0], samples[0], samples[0], 1)
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return Times(statistics.median(samples), tenths[0], tenths[8], len(samples))


def worst(job: Job, times: dict[str, Times]) -> dict[str, Times]:
    """By name, the times of the rank with the largest median. Collective."""
    ranks = job.gather(times)
    return {name: max((rank[name] for rank in ranks), key=lambda t: t.us) for name in times}


def measure(job: Job, methods: Sequence[Method], rounds: int) -> dict[str, Times]:
    """Times of every method, of the worst rank. Collective: all ranks pass the same names."""
    line, span = StartLine(job), Span(job.device)
    samples: dict[str, list[float]] = {method.name: [] for method in methods}
    for i in range(-WARMUP_ROUNDS, rounds):
        for j in range(len(methods)):
            method = methods[(i + j) % len(methods)]
            if method.prepare is not None:
                method.prepare()
            line.wait()
            span.start()
            method.run()
            span.stop()
            us = span.us()
            if i >= 0:
                samples[method.name].append(us)
    return worst(job, {name: summarize(values) for name, values in samples.items()})

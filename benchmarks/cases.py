"""One case of a sweep: a model, routing, number of tokens, precision and direction; ours beside floor and peers.

In BF16 ours and every peer are held against the dense oracle on the very inputs that are timed, block-scaled formats
against our BF16. What gives a wrong result, raises or does not fit is noted with the reason, and not timed.
"""

import argparse
import contextlib
import functools
import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dist_moe import BlockScaledConfig

from . import gemms, outputs, peers, timeline
from .baseline import LayerCalls
from .bench_formats import FORMATS, bare, config_in, prepared, require_near
from .bench_memory import used_bytes
from .bench_path import device_bytes, works
from .checks import BASELINE_SLACK_DB, PathOracle
from .launch import Job, Miss
from .ours import BOTH, INFERENCE, Ours
from .record import Rows
from .roofs import Roofs, Work
from .routings import Routing
from .shapes import Inputs, Shape, Traffic, draw_inputs, memory_bytes
from .timing import Method, capture, measure

BF16 = "bf16"
LABELS = {"ours": "dist_moe, eager", "ours-graph": "dist_moe", "floor-ours": "products alone, ours"}
LABELS |= {"floor-torch": "products alone, torch"} | {peer.name: peer.label for peer in peers.PEERS}


@dataclass
class Entry:
    """A method that is right, and what its row says beside its times."""

    method: Method
    facts: dict


def _or_miss(step: Callable[[], Any]) -> Any:
    """step(), with everything that it raises as a Miss: of another library anything may come."""
    try:
        return step()
    except Miss:
        raise
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise Miss(f"{type(error).__name__}: {lines[0]}") from error


class Case:
    """run() measures it once; tokens are those of one rank."""

    def __init__(
        self,
        job: Job,
        options: argparse.Namespace,
        shape: Shape,
        routing: Routing,
        tokens: int,
        precision: str,
        direction: str,
    ):
        self.job, self.options, self.shape, self.routing = job, options, shape, routing
        self.precision, self.direction = precision, direction
        self.traffic = Traffic(shape, routing.draw(shape, job.W, tokens))
        self.on_gpu = job.device.type == "cuda"

    def run(self, rows: Rows, roofs: Roofs) -> None:
        """Measure what has no row yet. Collective."""
        self.about = rows.about(self.shape, self.traffic, self.routing.name, self.direction)
        self.about["precision"] = self.precision
        if reason := self._refused():
            self._note(rows, "all", reason, failed=False)
            return
        if self.options.clocks is not None:
            self._record_clocks(rows)
            return
        todo = [name for name in self._methods(rows) if not rows.has(self.about, name)]
        if not todo:
            rows.say(f"{self._words()}: has its rows")
            return
        try:
            with contextlib.ExitStack() as contexts:
                entries = self._entries(rows, todo, contexts)
                self._time(rows, roofs, entries)
        except Miss as miss:
            self._note(rows, "all", str(miss), failed=True)

    def _words(self) -> str:
        return f"{self.shape.name} {self.routing.name} T={self.about['T']} {self.direction} {self.precision}"

    def _note(self, rows: Rows, method: str, reason: str, *, failed: bool) -> None:
        rows.say(f"NOT TIMED: {self._words()} {method}: {reason}")
        if self.job.is_first:
            note = self.about | {"method": method, "reason": reason, "failed": failed}
            outputs.append(self.options.out, outputs.NOT_TIMED, [note])

    def _refused(self) -> str | None:
        """Why none of it is measured; None when it is."""
        if self.precision == "nvfp4" and self.direction != INFERENCE:
            return "NVFP4 is for inference"
        there, backward = device_bytes(self.job), self.direction == BOTH
        needed = memory_bytes(
            self.traffic, len(self.job.local_ranks), backward=backward, inference=self.direction == INFERENCE
        )
        if there is not None and not all(self.job.gather(needed <= there)):
            return f"needs at most {needed / 2**30:.1f} GiB of the {there / 2**30:.1f} that are there"
        return None

    def _methods(self, rows: Rows) -> list[str]:
        """What this case measures; notes the peers that are here and cannot run it."""
        names = ["ours"] + ["ours-graph"] * self.on_gpu
        if self.precision != BF16:
            return names
        names += ["floor-ours", "floor-torch"]
        for name in self.options.peers:
            peer = peers.find(name)
            if any(self.job.gather(peer.absent() is not None)):
                continue
            if reason := peer.refuses(self.job, self.traffic, self.direction):
                self._note(rows, name, reason, failed=False)
            else:
                names.append(name)
        return names

    def _entries(self, rows: Rows, todo: list[str], contexts: contextlib.ExitStack) -> list[Entry]:
        """What is right, ready to be timed; notes the rest."""
        self._draw()
        if self.format is None:
            self.reference = PathOracle(self.job, self.shape, self.inputs, backward=self.direction == BOTH)
        else:
            with contextlib.ExitStack() as alone:
                self.reference = self._open(alone, self.inputs, None).results()
            self._prepare()
        makers = {"ours": self._eager, "ours-graph": self._graph, "floor-ours": self._floor, "floor-torch": self._floor}
        entries = []
        for name in dict.fromkeys(["ours", *todo]):  # ours is checked even where its row is there: floors need its ops
            make = makers.get(name) or self._peer
            try:
                entries.append(make(name, contexts))
            except Miss as miss:
                self._note(rows, name, str(miss), failed=True)
                if name == "ours":
                    break
        return [entry for entry in entries if entry.method.name in todo]

    def _draw(self) -> None:
        _free(self.job)
        inputs = draw_inputs(self.shape, self.traffic.ids, self.job.local_ranks, self.job.device)
        self.inputs = bare(inputs, self.direction) if self.direction == INFERENCE else inputs
        self.format = FORMATS.get(self.precision)

    def _prepare(self) -> None:
        self.inputs = prepared(self.inputs, self.format, self.direction == INFERENCE)

    def _open(self, contexts: contextlib.ExitStack, inputs: Inputs, how: BlockScaledConfig | None) -> Ours:
        """Closed, and held, with the contexts: a graph reads what it was captured with."""
        planned_for = {"device": self.job.device, "backend": self.options.backend}
        config = config_in(self.traffic, self.direction, how, **planned_for)
        ours = Ours(self.job, self.traffic, inputs, self.direction, self.options.backend, config)
        contexts.callback(lambda: ours.context.close())
        return ours

    def _eager(self, name: str, contexts: contextlib.ExitStack) -> Entry:
        before = used_bytes(self.job)
        self.ours = self._open(contexts, self.inputs, self.format)
        results = self.ours.results()
        if self.format is None:
            self.facts = {"worst_row_db": self.job.agree(lambda: self.reference.check(name, results))}
        else:
            about = (self.precision, results, self.reference, self.precision)
            self.facts = {"relative_error": self.job.agree(lambda: require_near(*about))}
            about = self.reference = None
        results = None  # no part of what a call takes
        method = self.ours.method()
        return Entry(method, self.facts | {"peak_bytes": self._peak_bytes(before, method)})

    def _graph(self, name: str, contexts: contextlib.ExitStack) -> Entry:
        return Entry(self._open(contexts, self.inputs, self.format).graph_method(), self.facts)

    @functools.cached_property
    def _floors(self) -> dict[str, Callable[[], None]]:
        ranks = [
            gemms.ExpertGemms(self.traffic.expert_rows(rank), r.w13_L2FD, r.w2_LDF)
            for rank, r in zip(self.job.local_ranks, self.inputs.ranks, strict=True)
        ]
        return gemms.floors(ranks, self.ours.context.path.ops, backward=self.direction == BOTH)

    def _floor(self, name: str, contexts: contextlib.ExitStack) -> Entry:
        run = self._floors[name]
        return Entry(Method(name, capture(self.job, run, run)[0].replay if self.on_gpu else run), {})

    def _peer(self, name: str, contexts: contextlib.ExitStack) -> Entry:
        peer, agree, backward = peers.find(name), self.job.agree, self.direction == BOTH
        calls = LayerCalls(self.job, self.shape, self.inputs, lambda *tensors: layer(*tensors))
        before = used_bytes(self.job)  # with the inputs that calls has copied
        layer = agree(lambda: _or_miss(lambda: peer.open(self.job, self.traffic)))
        results = agree(lambda: _or_miss(lambda: calls.results(backward=backward)))
        db = agree(lambda: self.reference.check(name, results, BASELINE_SLACK_DB))
        results = None
        method = Method(name, calls.run_of(self.direction))
        facts = {"worst_row_db": db, "peak_bytes": self._peak_bytes(before, method)}
        return Entry(method, facts | {"peer_version": peer.version()})

    def _peak_bytes(self, before: int, method: Method) -> int | None:
        """The most that a call of the method takes of a device over what was used before it was made; None on a CPU."""
        if not self.on_gpu:
            return None
        held, device = used_bytes(self.job) - before, self.job.device
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        method.run()
        torch.cuda.synchronize(device)
        if method.prepare is not None:
            method.prepare()
        return max(self.job.gather(held + torch.cuda.max_memory_allocated(device) - allocated))

    def _time(self, rows: Rows, roofs: Roofs, entries: list[Entry]) -> None:
        if not entries:
            return
        times = measure(self.job, [entry.method for entry in entries], self.options.rounds)
        path, products = works(self.traffic, self.direction)
        suffix = "" if self.precision == BF16 else f", {self.precision.upper()}"
        for entry in entries:
            name = entry.method.name
            work = products if name.startswith("floor") else path if self.precision == BF16 else Work(path.flops)
            more = {"label": LABELS[name] + suffix} | entry.facts
            row = rows.add(self.about, name, times[name], work, roofs, self.job.num_gpus, **more)
            rows.say_row(row)
            if name == "ours":
                self._record_call(row)

    def _record_call(self, row: dict) -> None:
        """One call of what the row is about."""
        self._put_intervals(row, timeline.EVENTS, timeline.record(self.job, self.shape, self.ours))

    def _record_clocks(self, rows: Rows) -> None:
        self._draw()
        if self.format is not None:
            self._prepare()
        try:
            with contextlib.ExitStack() as contexts:
                ours = self._open(contexts, self.inputs, self.format)
                intervals = timeline.record_clocks(self.job, self.shape, ours, self.options.clocks)
        except Miss as miss:
            self._note(rows, "clocks", str(miss), failed=True)
        else:
            self._put_intervals(rows.common | self.about, timeline.CLOCKS, intervals)

    def _put_intervals(self, row: dict, source: str, intervals: list[timeline.Interval]) -> None:
        if self.job.is_first:
            names = ("commit", "gpu", "shape", "T", "W", "where", "routing", "precision")
            about = {name: row[name] for name in names} | {"call": self.direction, "source": source}
            outputs.put_call(self.options.out, about, [about | asdict(interval) for interval in intervals])


def _free(job: Job) -> None:
    """Give back what earlier cases held."""
    gc.collect()
    if job.device.type == "cuda":
        torch.cuda.empty_cache()

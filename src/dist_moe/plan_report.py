"""What `dist-moe plan` answers: a rank's memory by component, its limits, the largest T that fits, and what skews do.

All of it is arithmetic over plan_memory; what a slot keeps is asked of the oracle's slot planner.
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from . import planner, reference, shapes
from .config import Config
from .memory_plan import MemoryPlan, format_bytes
from .planner import capacity_rows, plan_memory, scratch_bytes, scratch_regions, slot_geometry

GIB = 2**30

PURPOSES = {
    "tokens": "x, in backward dy, for peers to pull",
    "header": "what call this is, for peers to compare",
    "ids": "expert ids, read by all ranks",
    "scores": "scores of the routes",
    "outputs": "rows that peers push back",
    "score_grads": "gradients of scores that peers push back",
    "signals": "flags of the peers",
    "abort_text": "why this rank gave up a call",
    "x": "received rows",
    "h1": "output of W13, in backward its gradient; also output of W2 in block-scaled inference",
    "h2": "output of SwiGLU, in backward its gradient",
    "h3": "output of W2, in backward dy, then gradients of x",
    "g2": "in backward the gradient of SwiGLU's output",
    "columns": "quantised operands of the weight gradients; also output of W2, gradients of x",
    "operands": "quantised rows, operands of the other GEMMs",
}


class Component(NamedTuple):
    """Bytes of one thing that lies in the memory of a rank's device."""

    group: str  # one colour of the picture
    name: str
    num_bytes: int
    purpose: str


class Skew(NamedTuple):
    """A routing whose fullest rank receives `skew` times the mean, against the planned scratch and slot."""

    skew: float
    rows: int  # of the fullest rank
    device_factor: float  # that holds them on the device
    scratch_bytes: int  # of a call whose slot keeps nothing of it; what a slot keeps takes no scratch
    outcome: str  # with the factors as planned, for such a call: "device", "host" or "overflow"
    host_bytes: int  # of scratch_bytes, what lies in host memory then
    layers_kept: dict[str, int] | None  # as Report.layers_kept


@dataclass(frozen=True)
class Report:
    """The plan of one rank and what else lies in the memory of its device.

    Args:  with_weights: count the weights of the layers of a slot, quantised ones and gradients with them.
           device: as in plan_memory.
    """

    config: Config
    ep_size: int
    with_weights: bool = False
    device: str | None = None

    @cached_property
    def plan(self) -> MemoryPlan:
        """Raises as plan_memory, and ValueError for experts that the ranks cannot share."""
        found = plan_memory(self.config, self.ep_size, device=self.device)
        if self.config.num_experts % self.ep_size:
            raise ValueError(
                f"plan: num_experts must be divisible by the number of ranks, got {self.config.num_experts} experts "
                f"for {self.ep_size} ranks"
            )
        return found

    @property
    def num_routing_tables(self) -> int:
        """Those of one call in inference; in training those of every layer that can wait for its backward."""
        return max(1, self.plan.num_activation_slots * self.config.max_moe_layers_per_activation_slot)

    def weights_of_a_layer(self) -> dict[str, int]:
        config, plan = self.config, self.plan
        parameters = 2 * 3 * config.hidden_dim * config.intermediate_dim * (config.num_experts // self.ep_size)
        found = {
            "weights": parameters,
            "quantised weights": sum(size for _, size in plan.prepared_weight_bytes),
            "weight gradients": sum(size for _, size in plan.weight_grad_bytes),
        }
        return {name: size for name, size in found.items() if size}

    def components(self) -> list[Component]:
        config, plan = self.config, self.plan
        layers = config.max_moe_layers_per_activation_slot
        found = []
        if not plan.inference:
            purpose = f"kept for backward: {plan.num_activation_slots} x {layers} layers"
            found.append(Component("activation slots", "activation slots", plan.total_activation_bytes, purpose))
        regions = scratch_regions(config, plan.device_scratch_capacity_rows, expanded=plan.expanded)
        for name, size in regions.items():
            found.append(Component(f"scratch {name}", f"scratch {name}", size, PURPOSES[name]))
        for name, size in plan.symmetric_bytes:
            found.append(Component("symmetric regions", f"symmetric {name}", size, PURPOSES[name]))
        tables = self.num_routing_tables * plan.routing_table_bytes
        kept = "of one call" if plan.inference else f"of {self.num_routing_tables} layers, each until its backward"
        found.append(Component("routing tables", "routing tables", tables, f"row maps {kept}"))
        if self.with_weights:
            for name, size in self.weights_of_a_layer().items():
                found.append(Component(name, name, layers * size, f"of {layers} layers"))
        return found

    @property
    def device_bytes(self) -> int:
        return sum(component.num_bytes for component in self.components())

    def groups(self) -> dict[str, int]:
        """Bytes by colour of the picture, in the order of the components."""
        found: dict[str, int] = {}
        for component in self.components():
            found[component.group] = found.get(component.group, 0) + component.num_bytes
        return found

    @property
    def balanced_rows(self) -> int:
        """Block-scaled with the padding of every expert."""
        return capacity_rows(self.config, self.ep_size, 1.0)

    def layers_kept(self, rows: int) -> dict[str, int] | None:
        """How many layers of a slot keep what, by shapes.KEPT_NAMES, when all of them have a rank of this many rows.

        The fullest rank alone decides. None without slots and for rows that no scratch holds.
        """
        config, plan, layers = self.config, self.plan, self.config.max_moe_layers_per_activation_slot
        if config.inference or rows > plan.total_scratch_capacity_rows:
            return None
        geometry = slot_geometry(config, self.ep_size, plan)
        rank_rows_W, num_rows_L = torch.tensor([rows]), torch.tensor([rows])
        stats_S = torch.zeros(shapes.STATS_SLOTS + 2, dtype=torch.int64)  # one slot, one expert
        state = {
            "call_1": torch.zeros(1, dtype=torch.int64),
            "slot_used_NW": torch.zeros(1, 1, dtype=torch.int64),
            "slot_layers_N": torch.zeros(1, dtype=torch.int64),
            "slot_calls_NM": torch.zeros(1, layers, dtype=torch.int64),
            "stats_S": stats_S,
            "place": torch.zeros(geometry.place_words, dtype=torch.int64),
            "fault_F": torch.zeros(shapes.FAULT_WORDS, dtype=torch.int64),
        }
        for _ in range(layers):
            reference.plan_forward(
                rank_rows_W, num_rows_L, rank=0, slot=0, depth=layers, save=True, geometry=geometry, **state
            )
        counts = stats_S[shapes.STATS_KEPT : shapes.STATS_SCRATCH].tolist()
        return dict(zip(shapes.KEPT_NAMES, counts, strict=True))

    def skew(self, skew: float) -> Skew:
        """What this skew asks for. More than all tokens choosing one rank's experts cannot be: it is cut to that."""
        if not (math.isfinite(skew) and skew >= 1):
            raise ValueError(f"plan: a skew is the rows of the fullest rank over the mean, at least 1, got {skew:g}")
        config, plan = self.config, self.plan
        factor = min(skew, self.largest_skew)
        rows = capacity_rows(config, self.ep_size, factor)
        scratch = scratch_bytes(config, rows, expanded=plan.expanded)
        on_device, at_all = rows <= plan.device_scratch_capacity_rows, rows <= plan.total_scratch_capacity_rows
        return Skew(
            skew=skew,
            rows=rows,
            device_factor=factor,
            scratch_bytes=scratch,
            outcome="device" if on_device else "host" if at_all else "overflow",
            host_bytes=scratch - plan.device_scratch_bytes if at_all and not on_device else 0,
            layers_kept=self.layers_kept(rows),
        )

    @property
    def largest_skew(self) -> float:
        most = min(self.config.top_k, self.config.num_experts // self.ep_size)
        return self.ep_size * most / self.config.top_k

    def at_factor(self, device_factor: float) -> "Report":
        """The same with other device scratch and none on the host."""
        return replace(self, config=replace(self.config, device_scratch_capacity_factor=device_factor, vmm=None))

    def limits(self) -> list[str]:
        """What the plan allows and what happens past it, a sentence each."""
        plan = self.plan
        rows = (plan.balanced_recv_rows, plan.device_scratch_capacity_rows, plan.total_scratch_capacity_rows)
        balanced, device, total = (f"{n:,}" for n in rows)
        found = [f"rows of a rank: {balanced} balanced / {device} fit on the device / {total} fit in all"]
        if plan.uses_host_scratch:
            found.append(
                f"past {device} rows what no slot keeps of them reaches into host memory, up to "
                f"{format_bytes(plan.host_scratch_bytes)}"
            )
        found.append(f"past {total} rows on any rank the call raises RoutingOverflowError on all; no token is dropped")
        if not plan.inference:
            found += self._slot_limits()
        return found

    def _slot_limits(self) -> list[str]:
        plan = self.plan
        sizes = (
            plan.minimum_activation_slot_bytes,
            plan.activation_slot_bytes,
            plan.balanced_full_save_activation_slot_bytes,
            plan.maximum_useful_activation_slot_bytes,
        )
        least, chosen, balanced, most = map(format_bytes, sizes)
        found = [f"a slot: {chosen}; the least is {least}"]
        found.append(f"a slot in which nothing is recomputed: {balanced} at balanced routing, {most} at any that fits")
        kept = self.layers_kept(self.balanced_rows)
        held = "balanced routing does not fit in scratch" if kept is None else describe_kept(kept)
        found.append(f"layers of a slot at balanced routing: {held}")
        return [*found, "past a slot layers keep less and recompute in backward, to the same bits"]

    def to_dict(self, skews: Sequence[Skew] = ()) -> dict:
        """The fields of the plan, and beside them what the table shows, as plain values."""
        found = self.plan.to_dict() | {
            "num_local_input_tokens": self.config.num_local_input_tokens,
            "num_routing_tables": self.num_routing_tables,
            "components": {component.name: component.num_bytes for component in self.components()},
            "total_device_bytes": self.device_bytes,
            "layer_weight_bytes": self.weights_of_a_layer(),
            "layers_kept_balanced": self.layers_kept(self.balanced_rows),
        }
        return found | ({"skews": [skew._asdict() for skew in skews]} if skews else {})


def describe_kept(kept: dict[str, int]) -> str:
    return ", ".join(f"{count} keep {name}" for name, count in reversed(kept.items()))


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """For plans that nobody asked for by themselves."""
    level = planner.logger.level
    planner.logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        planner.logger.setLevel(level)


def largest_that_fits(report: Report, limit_bytes: int) -> tuple[Report, str]:
    """The largest T whose device memory is at most limit_bytes, and why T + 1 will not do; by bisection.

    Memory grows with T, but for a block-scaled slot of a factor above 1, whose rows grow in steps of 128: there T fits
    and T + 1 does not, and a few tokens more may fit again.
    Raises:  ValueError when one token does not fit, or as plan_memory for one token.
    """

    def at(tokens: int) -> Report:
        return replace(report, config=replace(report.config, num_local_input_tokens=tokens))

    def problem(tokens: int) -> str | None:
        try:
            needed = at(tokens).device_bytes
        except ValueError as error:  # too many routes, or a slot of --slot-bytes too small for the inputs of its layers
            return str(error)
        return None if needed <= limit_bytes else f"it takes {format_bytes(needed)}"

    with _no_warnings():
        needed = at(1).device_bytes
        if needed > limit_bytes:
            raise ValueError(
                f"plan: nothing fits in {format_bytes(limit_bytes)}, one token takes {format_bytes(needed)}"
            )
        fits, too_many = 1, shapes.MAX_ROUTES // (report.ep_size * report.config.top_k) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if problem(middle) is None else (fits, middle)
        return at(fits), problem(too_many)


def bars(report: Report, skews: Sequence[Skew] = ()) -> dict[str, dict[str, int]]:
    """The bars of the picture: as planned, then with the device factor that fits each skew; bytes by group."""
    found = {f"as planned\nfactor {report.plan.device_scratch_capacity_factor:g}": report.groups()}
    with _no_warnings():
        for skew in skews:
            fitting = report.at_factor(skew.device_factor)
            found[f"skew {skew.skew:g}\nfactor {skew.device_factor:g}"] = fitting.groups()
    return found


# On the terminal


def _size(num_bytes: int) -> tuple[str, str]:
    human, exact = format_bytes(num_bytes).removesuffix(" bytes)").split(" (")
    return exact, human


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        words = name in ("component", "for", "as planned")
        table.add_column(name, justify="left" if words else "right", no_wrap=name not in ("for", "as planned"))
    return table


def memory_table(report: Report) -> Table:
    """A line a component and their sum, then what is not in the sum."""
    plan, total = report.plan, report.device_bytes
    tokens, ranks = f"{report.config.num_local_input_tokens:,}", report.ep_size
    table = _table(f"Memory of one of {ranks} ranks, T = {tokens}", "component", "bytes", "size", "share", "for")
    for component in report.components():
        share = f"{component.num_bytes / total:.1%}"
        table.add_row(component.name, *_size(component.num_bytes), share, component.purpose)
    table.add_section()
    table.add_row("device memory", *_size(total), "100.0%", "all of the above", style="bold")
    table.add_row("activation buffer", *_size(plan.total_device_buffer_bytes), "", "of it, slots and scratch")
    table.add_section()
    table.add_row("host scratch", *_size(plan.host_scratch_bytes), "", "pinned host memory, beside the above")
    if not report.with_weights:
        for name, size in report.weights_of_a_layer().items():
            table.add_row(name, *_size(size), "", "a layer, not counted above")
    return table


OUTCOMES = {"device": "fits", "overflow": "overflows"}


def skew_table(report: Report, skews: Sequence[Skew]) -> Table:
    """A line a skew; beside it what the plan's own factors and slot make of it."""
    title = "Skews, all layers alike: rows of the fullest rank over the mean; layers of a slot by what they keep"
    keeps = [name.replace(" of ", "\nof ") for name in reversed(shapes.KEPT_NAMES)]
    table = _table(title, "skew", "rows", "device\nfactor", "scratch", "as planned", *keeps)
    for skew in skews:
        outcome = OUTCOMES.get(skew.outcome) or f"{_size(skew.host_bytes)[1]} on host"
        counts = ["-"] * 3 if skew.layers_kept is None else [str(n) for n in reversed(skew.layers_kept.values())]
        factor, scratch = f"{skew.device_factor:g}", _size(skew.scratch_bytes)[1]
        table.add_row(f"{skew.skew:g}", f"{skew.rows:,}", factor, scratch, outcome, *counts)
    if any(skew.skew > report.largest_skew for skew in skews):
        table.caption = f"no rank can receive more than {report.largest_skew:g} times the mean"
    return table


def print_report(console: Console, report: Report, skews: Sequence[Skew] = ()) -> None:
    console.print(memory_table(report))
    console.print("Limits", style="bold")
    for limit in report.limits():
        console.print(f"  {limit}", soft_wrap=True, markup=False)
    if skews:
        console.print()
        console.print(skew_table(report, skews))

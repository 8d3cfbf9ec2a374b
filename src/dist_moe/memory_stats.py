"""What the calls of a Context used: read off counters that the device keeps, so that calls stay without a host read."""

from dataclasses import dataclass

from torch import Tensor

from . import shapes
from .planner import MemoryPlan


@dataclass(frozen=True)
class MemoryStats:
    """Of one rank, since its Context was made or reset_memory_stats().

    A call counts as soon as its rows have their places: one that overflows does not, one whose peer dies later does. A
    forward under a non-reentrant checkpoint counts once, when it is run again; under a reentrant one, whose first run
    looks like an evaluation, twice.
    """

    calls: int  # forwards, with and without gradients
    rows_mean: float  # received rows of a forward
    rows_max: int
    expert_rows: tuple[int, ...]  # rows of each local expert, all forwards together
    layers_kept: dict[str, int]  # forwards that a backward follows, by what their slot kept: shapes.KEPT_NAMES
    slot_peak_bytes: tuple[int, ...]  # by activation slot
    scratch_peak_bytes: int  # of what was not in a slot
    host_overflow_peak_bytes: int  # of scratch_peak_bytes, what lay in host memory, or would on a GPU

    @property
    def layers_recomputed(self) -> int:
        """Forwards whose backward had to make rows or h1 again."""
        return sum(count for name, count in self.layers_kept.items() if name != shapes.KEPT_NAMES[shapes.KEEPS_ROWS])


def read(stats_S: Tensor, plan: MemoryPlan) -> MemoryStats:
    words = stats_S.tolist()
    slots = shapes.STATS_SLOTS + plan.num_activation_slots
    calls, scratch = words[shapes.STATS_CALLS], words[shapes.STATS_SCRATCH]
    return MemoryStats(
        calls=calls,
        rows_mean=words[shapes.STATS_ROWS] / calls if calls else 0.0,
        rows_max=words[shapes.STATS_MOST_ROWS],
        expert_rows=tuple(words[slots:]),
        layers_kept=dict(zip(shapes.KEPT_NAMES, words[shapes.STATS_KEPT : shapes.STATS_SCRATCH], strict=True)),
        slot_peak_bytes=tuple(words[shapes.STATS_SLOTS : slots]),
        scratch_peak_bytes=scratch,
        host_overflow_peak_bytes=_on_host(scratch, plan),
    )


def _on_host(scratch: int, plan: MemoryPlan) -> int:
    """Bytes beyond the hot device section, which may be larger than what was planned for it; at most the host's."""
    if plan.vmm_granularity_bytes is None:
        return max(0, scratch - plan.device_scratch_bytes)
    return min(max(0, scratch - plan.vmm_device_scratch_section_bytes), plan.vmm_host_section_bytes)

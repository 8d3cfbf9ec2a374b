"""The memory plan: what a Context allocates, in bytes, before anything is allocated.

One activation buffer a rank, uint8: [slot 0 | slot 1 | ... | slot N-1 | scratch]. Slots hold what a forward saves for
its backward and grow up; scratch holds what lives within one call and grows down from the end of the buffer.

Regions that TMA reads start at a multiple of their row pitch, so that the whole buffer seen as rows of that pitch has
the region at a whole row number. Rounding a start loses at most one pitch, which is why R rows are counted as R + 1.

    region      row pitch   scratch of training       of inference        saved by a layer that recomputes nothing
    x_RD        2 D         yes                       yes                 yes
    h1_R2F      4 F         yes (grad_h1 over it)     yes                 yes
    h2_RF, g2   2 F         one place for both        yes                 no
    h3_RD, dy   2 D         one place for both        over x_RD           no
A layer that recomputes everything saves x_TD alone.
"""

import logging
import math
from dataclasses import dataclass, fields

import torch

from . import shapes
from .config import Config, as_int
from .shapes import align

logger = logging.getLogger(__name__)

SLOT_ALIGNMENT = 128  # bytes; slots and what a layer saves in them
DEDUP_MIN_ROUTES = (3, 2)  # as a fraction: mean routes of an arriving (token, rank) pair from which de-duplication pays


def capacity_rows(config: Config, ep_size: int, factor: float) -> int:
    """Rows one rank holds at a capacity factor: rounded half up, never more than routing can send to one rank.

    An expert appears once in a token, so a rank receives at most min(K, L) rows of each of the W T_max tokens.
    """
    T, K, L = config.num_local_input_tokens, config.top_k, config.num_experts // ep_size
    return min(int(T * K * factor + 0.5), T * ep_size * min(K, L))


def _region_bytes(rows: int, pitch: int) -> int:
    return (rows + 1) * pitch


def row_pitches(config: Config) -> dict[str, int]:
    """Bytes of one row of every scratch region."""
    D, F = 2 * config.hidden_dim, 2 * config.intermediate_dim
    pitches = {"x": D, "h1": 2 * F, "h2": F, "h3": D}
    return pitches if config.inference else pitches | {"g2": F, "dy": D}


def scratch_bytes(config: Config, rows: int) -> int:
    """Scratch of one call with `rows` received rows."""
    regions = ("x", "h1", "h2") if config.inference else ("x", "h1", "h2", "h3")
    pitches = row_pitches(config)
    return sum(_region_bytes(rows, pitches[name]) for name in regions)


def scratch_layout(config: Config, total_bytes: int, rows: int) -> dict[str, int]:
    """Byte offset of every scratch region in an activation buffer of total_bytes.

    Down from the end of the buffer: x, h1, h2 and g2 in one place, h3 and dy in one place. In inference h3 lies over
    x, which W13 has consumed, and there is neither g2 nor dy.
    Example: D = F = 32 (pitches 64, 128, 64, 64), 1024 bytes, 2 rows: x 896, h1 640, h2 512, h3 384.
    """
    pitches = row_pitches(config)
    shared = {"h3": "x"} if config.inference else {"g2": "h2", "dy": "h3"}
    offsets, end = {}, total_bytes
    for name, pitch in pitches.items():
        if name not in shared:
            end = (end - rows * pitch) // pitch * pitch
            offsets[name] = end
    assert end >= 0, f"{rows} rows do not fit in {total_bytes} bytes"
    return offsets | {name: offsets[place] for name, place in shared.items()}


def saved_input_bytes(config: Config) -> int:
    """What a layer saves that recomputes everything: x_TD."""
    return align(2 * config.num_local_input_tokens * config.hidden_dim, SLOT_ALIGNMENT)


def saved_full_bytes(config: Config, rows: int) -> int:
    """What a layer saves that recomputes nothing but the activation: x_RD and h1_R2F."""
    pitches = row_pitches(config)
    return align(_region_bytes(rows, pitches["x"]) + _region_bytes(rows, pitches["h1"]), SLOT_ALIGNMENT)


def dedup(config: Config, ep_size: int) -> bool:
    """Whether a token's row crosses once for each rank it visits rather than once for each of its routes.

    Under uniform routing a token visits W (1 - (1 - 1/W)^K) ranks, so an arriving pair stands for K divided by that
    many routes; de-duplication pays from 1.5 of them on. The border is provisional until it is measured on the
    benchmark's shapes. Whole numbers decide, so that every rank answers alike: K=8 gives W=8 True, W=9 False.
    """
    K, W = config.top_k, ep_size
    numerator, denominator = DEDUP_MIN_ROUTES
    routes_per_pair = (K * W ** (K - 1), W**K - (W - 1) ** K)
    return routes_per_pair[0] * denominator >= routes_per_pair[1] * numerator


def symmetric_regions(config: Config, ep_size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every region that peers read or write, by name, in the order of allocation."""
    T, D, K = config.num_local_input_tokens, config.hidden_dim, config.top_k
    J = min(K, ep_size) if dedup(config, ep_size) else K
    regions = {
        "tokens": ((1 if config.inference else 2, T, D), torch.bfloat16),
        "header": ((shapes.HEADER_WORDS,), torch.int64),
        "ids": ((T, K), torch.int16),
        "scores": ((T, K), torch.float32),
        "outputs": ((T, J, D), torch.bfloat16),
        "score_grads": ((T, K), torch.float32),
        "signals": ((shapes.NUM_STAGES, ep_size), torch.int64),
        "abort_text": ((256,), torch.uint8),
    }
    if config.inference:
        del regions["score_grads"]
    return regions


def routing_table_bytes(config: Config, ep_size: int) -> int:
    """Bytes of the RoutePlan of one call; training keeps one for every layer whose backward is still to come."""
    R = capacity_rows(config, ep_size, _total_factor(config, ep_size))
    L = config.num_experts // ep_size
    int32, int64 = 4, 8
    return 4 * R * int32 + (L + 1) * int32 + ep_size * int64 + int32


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes and rows of one rank's Context. Equal plans are equal by value; all fields are plain numbers."""

    balanced_recv_rows: int
    device_scratch_capacity_rows: int
    total_scratch_capacity_rows: int
    device_scratch_capacity_factor: float
    total_scratch_capacity_factor: float
    saved_input_bytes_per_layer: int
    device_scratch_bytes: int
    host_scratch_bytes: int
    minimum_activation_slot_bytes: int
    balanced_full_save_activation_slot_bytes: int
    maximum_useful_activation_slot_bytes: int
    activation_slot_bytes: int
    activation_slot_capacity_factor: float | None
    total_activation_bytes: int
    total_device_buffer_bytes: int
    total_virtual_bytes: int
    num_activation_slots: int
    inference: bool
    vmm_granularity_bytes: int | None
    vmm_device_prefix_bytes: int | None
    vmm_host_section_bytes: int | None
    vmm_device_scratch_section_bytes: int | None
    vmm_padding_bytes: int
    symmetric_bytes: tuple[tuple[str, int], ...]
    routing_table_bytes: int

    @property
    def uses_host_scratch(self) -> bool:
        return self.host_scratch_bytes > 0

    def to_dict(self) -> dict:
        """The plan as plain values that json takes; symmetric_bytes by region name."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"symmetric_bytes": dict(self.symmetric_bytes)}

    def explain(self) -> str:
        """The plan in words, one line a figure."""
        lines = [
            "dist_moe memory plan of one rank",
            f"  receive rows: {self.balanced_recv_rows} balanced / {self.device_scratch_capacity_rows} device / "
            f"{self.total_scratch_capacity_rows} total",
            f"  capacity factors: {self.device_scratch_capacity_factor:g} device / "
            f"{self.total_scratch_capacity_factor:g} total",
            f"  activation slots: {self._explain_slots()}",
            f"  device scratch: {format_bytes(self.device_scratch_bytes)}",
            f"  host overflow scratch: {format_bytes(self.host_scratch_bytes)}",
            f"  total device buffer: {format_bytes(self.total_device_buffer_bytes)}",
            f"  activation slot minimum: {format_bytes(self.minimum_activation_slot_bytes)}",
            f"  activation slot balanced full-save: {format_bytes(self.balanced_full_save_activation_slot_bytes)}",
            f"  activation slot maximum useful: {format_bytes(self.maximum_useful_activation_slot_bytes)}",
            f"  virtual address range: {format_bytes(self.total_virtual_bytes)}; {self._slot_note()}",
            f"  limits: {self._explain_limits()}",
            f"  routing tables of a call: {format_bytes(self.routing_table_bytes)}",
            f"  symmetric regions: {format_bytes(sum(size for _, size in self.symmetric_bytes))}",
        ]
        lines += [f"    {name}: {format_bytes(size)}" for name, size in self.symmetric_bytes]
        return "\n".join(lines)

    def _explain_slots(self) -> str:
        if self.inference:
            return "0 slot(s)"
        if self.activation_slot_capacity_factor is not None:
            policy = f"balanced capacity factor {self.activation_slot_capacity_factor:g}"
        elif self.activation_slot_bytes == self.minimum_activation_slot_bytes:
            policy = "minimum all-recompute"
        else:
            policy = "exact per-slot bytes"
        slot, total = format_bytes(self.activation_slot_bytes), format_bytes(self.total_activation_bytes)
        return f"{self.num_activation_slots} slot(s) x {slot} = {total} ({policy})"

    def _explain_limits(self) -> str:
        if self.inference:
            return "no activation slots; scratch rows are a hard limit, a call that needs more raises"
        return "slots are a soft limit, past it layers recompute; scratch rows are a hard limit, past it a call raises"

    def _slot_note(self) -> str:
        if self.inference:
            return "scratch-only inference; no saved activations"
        if self.activation_slot_bytes >= self.maximum_useful_activation_slot_bytes:
            return "all executable routing fits without recompute"
        if self.activation_slot_bytes >= self.balanced_full_save_activation_slot_bytes:
            return "balanced routing fits, larger routing may recompute"
        if self.activation_slot_bytes == self.minimum_activation_slot_bytes:
            return "all layers recompute at the minimum"
        return "the budget may avoid recompute for some layers"


def format_bytes(num_bytes: int) -> str:
    """A size in the largest unit that keeps it at 1 or more, and exactly."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.3f} {unit} ({num_bytes:,} bytes)"
    return f"{num_bytes} B ({num_bytes:,} bytes)"


def _total_factor(config: Config, ep_size: int) -> float:
    factor = config.device_scratch_capacity_factor if config.vmm is None else config.vmm.total_scratch_capacity_factor
    return min(factor, float(ep_size))


def _check(config: Config, ep_size: int, device_factor: float, total_factor: float) -> None:
    if total_factor < device_factor:
        raise ValueError(
            f"plan_memory: VmmConfig.total_scratch_capacity_factor ({total_factor:g}) must cover at least "
            f"device_scratch_capacity_factor ({device_factor:g}); raise the first or lower the second"
        )
    num_routes = ep_size * config.num_local_input_tokens * config.top_k
    if num_routes > shapes.MAX_ROUTES:
        raise ValueError(
            f"plan_memory: ep_size * num_local_input_tokens * top_k must be at most {shapes.MAX_ROUTES}, "
            f"got {num_routes}; row maps are int32, so pass fewer tokens a call"
        )
    minimum = align(config.max_moe_layers_per_activation_slot * saved_input_bytes(config), SLOT_ALIGNMENT)
    if config.activation_slot_bytes is not None and config.activation_slot_bytes < minimum:
        raise ValueError(
            f"plan_memory: activation_slot_bytes is {config.activation_slot_bytes}, minimum required {minimum} bytes; "
            "every layer of a slot saves at least its input"
        )
    if config.block_scaled is not None:
        raise NotImplementedError(
            f"plan_memory: block-scaled execution ({config.block_scaled.format}) is not in this release; "
            "leave Config.block_scaled unset"
        )


def _slot_sizes(config: Config, balanced_rows: int, total_rows: int) -> tuple[int, int, int, int]:
    """Minimum, balanced full-save, maximum useful and chosen bytes of one slot."""
    if config.inference:
        return 0, 0, 0, 0
    num_layers = config.max_moe_layers_per_activation_slot
    minimum = align(num_layers * saved_input_bytes(config), SLOT_ALIGNMENT)
    balanced = align(num_layers * saved_full_bytes(config, balanced_rows), SLOT_ALIGNMENT)
    # With few rows (a factor below 1) saving everything takes less than the minimum, which is there in any case.
    useful = max(minimum, align(num_layers * saved_full_bytes(config, total_rows), SLOT_ALIGNMENT))
    if config.activation_slot_bytes is not None:
        chosen = align(config.activation_slot_bytes, SLOT_ALIGNMENT)
    elif config.activation_slot_capacity_factor is not None:
        step = math.ceil(config.activation_slot_capacity_factor * (balanced - minimum))
        chosen = align(minimum + step, SLOT_ALIGNMENT)
    else:
        chosen = minimum
    return minimum, balanced, useful, chosen


def _warn(config: Config, ep_size: int, useful_slot: int, chosen_slot: int) -> None:
    if config.device_scratch_capacity_factor > ep_size:
        logger.warning(
            "plan_memory: device_scratch_capacity_factor %g is capped to %d, the number of ranks",
            config.device_scratch_capacity_factor,
            ep_size,
        )
    if config.activation_slot_bytes is not None and chosen_slot > useful_slot:
        logger.warning(
            "plan_memory: activation_slot_bytes %d is more than the %d bytes that can be used", chosen_slot, useful_slot
        )


def plan_memory(config: Config, ep_size: int, *, device: torch.device | str | None = None) -> MemoryPlan:
    """Plan the memory of one rank of ep_size ranks. Plain arithmetic on any machine; not collective.

    Args:    device: with host scratch, the device whose driver sizes the mapping; without, it changes nothing.
    Returns: the plan that create_context would allocate. Sizes of the physical mapping (vmm_*) are None and 0.
             num_experts / ep_size is rounded down here; create_context refuses a remainder.
    Raises:  TypeError, ValueError; NotImplementedError for block-scaled configurations and for a physical mapping.
    """
    ep_size = as_int("plan_memory", "ep_size", ep_size)
    if ep_size <= 0:
        raise ValueError(f"plan_memory: ep_size must be positive, got {ep_size}")
    device_factor = min(config.device_scratch_capacity_factor, float(ep_size))
    total_factor = _total_factor(config, ep_size)
    _check(config, ep_size, device_factor, total_factor)

    balanced_rows = config.num_local_input_tokens * config.top_k
    device_rows = capacity_rows(config, ep_size, device_factor)
    total_rows = capacity_rows(config, ep_size, total_factor)
    full_rows = capacity_rows(config, ep_size, 1.0)
    minimum, balanced_slot, useful, slot = _slot_sizes(config, full_rows, total_rows)
    _warn(config, ep_size, useful, slot)

    num_slots = 0 if config.inference else config.num_activation_slots
    device_scratch = scratch_bytes(config, device_rows)
    host_scratch = max(0, scratch_bytes(config, total_rows) - device_scratch)
    if device is not None and host_scratch:
        raise NotImplementedError(
            "plan_memory: mapping host scratch (VmmConfig) is not in this release; plan without a device, or raise "
            f"device_scratch_capacity_factor to {total_factor:g}"
        )
    regions = symmetric_regions(config, ep_size).items()
    return MemoryPlan(
        balanced_recv_rows=balanced_rows,
        device_scratch_capacity_rows=device_rows,
        total_scratch_capacity_rows=total_rows,
        device_scratch_capacity_factor=device_factor,
        total_scratch_capacity_factor=total_factor,
        saved_input_bytes_per_layer=saved_input_bytes(config),
        device_scratch_bytes=device_scratch,
        host_scratch_bytes=host_scratch,
        minimum_activation_slot_bytes=minimum,
        balanced_full_save_activation_slot_bytes=balanced_slot,
        maximum_useful_activation_slot_bytes=useful,
        activation_slot_bytes=slot,
        activation_slot_capacity_factor=config.activation_slot_capacity_factor,
        total_activation_bytes=num_slots * slot,
        total_device_buffer_bytes=num_slots * slot + device_scratch,
        total_virtual_bytes=num_slots * slot + device_scratch + host_scratch,
        num_activation_slots=num_slots,
        inference=config.inference,
        vmm_granularity_bytes=None,
        vmm_device_prefix_bytes=None,
        vmm_host_section_bytes=None,
        vmm_device_scratch_section_bytes=None,
        vmm_padding_bytes=0,
        symmetric_bytes=tuple((name, math.prod(shape) * dtype.itemsize) for name, (shape, dtype) in regions),
        routing_table_bytes=routing_table_bytes(config, ep_size),
    )

"""MemoryPlan: rows and bytes of one rank's Context, in words for people and in plain values for json."""

from dataclasses import dataclass, fields


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
    expanded: bool
    vmm_granularity_bytes: int | None
    vmm_device_prefix_bytes: int | None
    vmm_host_section_bytes: int | None
    vmm_device_scratch_section_bytes: int | None
    vmm_padding_bytes: int
    symmetric_bytes: tuple[tuple[str, int], ...]
    routing_table_bytes: int
    prepared_weight_bytes: tuple[tuple[str, int], ...]
    weight_grad_bytes: tuple[tuple[str, int], ...]

    @property
    def uses_host_scratch(self) -> bool:
        return self.host_scratch_bytes > 0

    def to_dict(self) -> dict:
        """The plan as plain values that json takes; what is listed by name becomes a dict."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(value) if isinstance(value, tuple) else value for name, value in values.items()}

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
        ]
        if self.expanded:
            operands = "rows" if self.inference else "columns"
            lines += [f"  block-scaled operands: {operands} expanded to 16 bits, as this device multiplies them"]
        if self.vmm_granularity_bytes is not None:
            lines += self._explain_mapping()
        lines += [f"  routing tables of a call: {format_bytes(self.routing_table_bytes)}{self._tables_note()}"]
        lines += _explain_sizes("symmetric regions", self.symmetric_bytes)
        lines += _explain_sizes("prepared weights of a layer", self.prepared_weight_bytes)
        lines += _explain_sizes("weight gradients of a layer", self.weight_grad_bytes)
        return "\n".join(lines)

    def _explain_mapping(self) -> list[str]:
        prefix, host, scratch = (
            format_bytes(size)
            for size in (
                self.vmm_device_prefix_bytes,
                self.vmm_host_section_bytes,
                self.vmm_device_scratch_section_bytes,
            )
        )
        return [
            f"  mapping granularity: {format_bytes(self.vmm_granularity_bytes)}",
            f"  mapped: {prefix} device / {host} host / {scratch} device scratch",
            f"  mapping padding: {format_bytes(self.vmm_padding_bytes)}",
        ]

    def _tables_note(self) -> str:
        return "" if self.inference else ", kept for every layer until its backward"

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


def _explain_sizes(title: str, sizes: tuple[tuple[str, int], ...]) -> list[str]:
    """A sum and what it is made of; nothing for no sizes."""
    if not sizes:
        return []
    total = sum(size for _, size in sizes)
    return [f"  {title}: {format_bytes(total)}", *(f"    {name}: {format_bytes(size)}" for name, size in sizes)]


def format_bytes(num_bytes: int) -> str:
    """A size in the largest unit that keeps it at 1 or more, and exactly."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.3f} {unit} ({num_bytes:,} bytes)"
    return f"{num_bytes} B ({num_bytes:,} bytes)"

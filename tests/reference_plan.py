"""The memory plan of the release whose contract this package keeps, stated on its own.

Its regions are rounded to 128 bytes. Its scratch keeps grad_h1 apart from h1 in bf16, and four times the scales that a
block-scaled row has; its slots keep the route outputs h3. Written from the specification, not from planner.py.
"""

import math

from dist_moe.config import Config

EXACT = (
    "balanced_recv_rows",
    "device_scratch_capacity_rows",
    "total_scratch_capacity_rows",
    "device_scratch_capacity_factor",
    "total_scratch_capacity_factor",
    "saved_input_bytes_per_layer",
    "minimum_activation_slot_bytes",
    "num_activation_slots",
)


def up(n: int) -> int:
    return -(-n // 128) * 128


def _block(c: Config) -> tuple[int, int, int]:
    """Values a byte, values a scale, bytes of a row's own scale."""
    return (2, 16, 4) if c.block_scaled.format == "nvfp4" else (1, 32, 0)


def reference_rows(c: Config, W: int, factor: float) -> int:
    T, K, local_experts = c.num_local_input_tokens, c.top_k, c.num_experts // W
    rows = min(int(T * K * factor + 0.5), T * W * min(K, local_experts))
    return rows if c.block_scaled is None else (rows + local_experts * 127) // 128 * 128


def _row(c: Config, R: int, width: int) -> int:
    values, block, scale = _block(c)
    return up(R * math.ceil(width / values)) + up(4 * R * (width // block) + R * scale)


def _column(c: Config, R: int, width: int) -> int:
    values, block, _ = _block(c)
    return up(width * math.ceil(R / values)) + up(width * R // block)


def reference_scratch(c: Config, R: int) -> int:
    D, F = c.hidden_dim, c.intermediate_dim
    h1 = up(4 * R * F)
    if c.block_scaled is None:
        if c.inference:
            return up(2 * R * D) + h1 + up(2 * R * F)
        return up(2 * R * D) + 2 * h1 + up(2 * R * F) + (up(2 * R * D) if D > F else 0)
    x, h2 = _row(c, R, D), _row(c, R, F)
    forward = x + h2 if c.block_scaled.pipeline == "mega" else max(x, h2)
    if c.inference:
        return h1 + forward
    columns = 2 * _column(c, R, D) + _column(c, R, F) + _column(c, R, 2 * F)
    return max(forward, _row(c, R, 2 * F)) + columns + h1 + up(2 * R * F)


def reference_full(c: Config, R: int) -> int:
    T, D, F, K = c.num_local_input_tokens, c.hidden_dim, c.intermediate_dim, c.top_k
    h1, h3 = up(4 * R * F), up(2 * T * K * D)
    if c.block_scaled is None:
        return up(2 * R * D) + h1 + h3
    return _column(c, R, D) + h1 + _column(c, R, F) + h3


def reference_plan(c: Config, W: int) -> dict[str, int | float]:
    layers, x = c.max_moe_layers_per_activation_slot, up(2 * c.num_local_input_tokens * c.hidden_dim)
    device_factor = min(c.device_scratch_capacity_factor, W)
    total_factor = device_factor if c.vmm is None else min(c.vmm.total_scratch_capacity_factor, W)
    if total_factor < device_factor:
        raise ValueError("must cover at least")
    device_rows, total_rows = (reference_rows(c, W, factor) for factor in (device_factor, total_factor))
    minimum = up(layers * x)
    balanced, useful = (up(layers * reference_full(c, R)) for R in (reference_rows(c, W, 1.0), total_rows))
    slot, num_slots = minimum, c.num_activation_slots
    if c.activation_slot_bytes is not None:
        if c.activation_slot_bytes < minimum:
            raise ValueError(f"minimum required {minimum} bytes")
        slot = up(c.activation_slot_bytes)
    elif c.activation_slot_capacity_factor is not None:
        slot = up(minimum + math.ceil(c.activation_slot_capacity_factor * (balanced - minimum)))
    if c.inference:
        minimum = balanced = useful = slot = num_slots = 0
    device = reference_scratch(c, device_rows)
    host = max(0, reference_scratch(c, total_rows) - device)
    return {
        "balanced_recv_rows": c.num_local_input_tokens * c.top_k,
        "device_scratch_capacity_rows": device_rows,
        "total_scratch_capacity_rows": total_rows,
        "device_scratch_capacity_factor": device_factor,
        "total_scratch_capacity_factor": total_factor,
        "saved_input_bytes_per_layer": x,
        "minimum_activation_slot_bytes": minimum,
        "num_activation_slots": num_slots,
        "device_scratch_bytes": device,
        "host_scratch_bytes": host,
        "balanced_full_save_activation_slot_bytes": balanced,
        "maximum_useful_activation_slot_bytes": useful,
        "activation_slot_bytes": slot,
        "total_activation_bytes": num_slots * slot,
        "total_device_buffer_bytes": num_slots * slot + device,
        "total_virtual_bytes": num_slots * slot + device + host,
    }


def allowed_excess(c: Config, figures: dict[str, int | float]) -> dict[str, int]:
    """How far a byte figure may exceed the release's: one row pitch a region.

    Block-scaled inference without host scratch may take 128 MiB more for outputs that are wider than h1.
    """
    D, F = c.hidden_dim, c.intermediate_dim
    if c.block_scaled is None:
        scratch = 2 * D + 4 * F + 2 * F + (0 if c.inference else 2 * D)
        layer = 2 * D + 4 * F
    else:
        forward = D + F if c.block_scaled.pipeline == "mega" else max(D, F)
        columns = 2 * D + F + 2 * F
        scratch = 4 * F + (forward // _block(c)[0] if c.inference else max(forward, 2 * F) + columns + 2 * F)
        layer = 4 * F + D + F
        rows, wider = figures["total_scratch_capacity_rows"], max(2 * D - 4 * F, 0)
        if c.inference and c.vmm is None and rows * wider <= 2**27:
            scratch += up((rows + 1) * wider)
    slot = 0 if c.inference else c.max_moe_layers_per_activation_slot * layer
    chosen = 0
    if c.activation_slot_capacity_factor is not None:
        chosen = math.ceil(max(1.0, c.activation_slot_capacity_factor) * slot)
    activation = figures["num_activation_slots"] * chosen
    return {
        "device_scratch_bytes": scratch,
        "host_scratch_bytes": scratch,
        "balanced_full_save_activation_slot_bytes": slot,
        "maximum_useful_activation_slot_bytes": slot,
        "activation_slot_bytes": chosen,
        "total_activation_bytes": activation,
        "total_device_buffer_bytes": activation + scratch,
        "total_virtual_bytes": activation + scratch,
    }

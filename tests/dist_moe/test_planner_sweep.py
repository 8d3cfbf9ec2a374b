"""The plan over random configurations: against the release whose contract it keeps, and the layout of the scratch."""

import itertools
import logging
import math
import random
from dataclasses import replace

import pytest

from dist_moe.config import Config, VmmConfig
from dist_moe.planner import MemoryPlan, plan_memory, scratch_bytes, scratch_layout


@pytest.fixture(autouse=True)
def no_warnings_logged(caplog):
    caplog.set_level(logging.ERROR, logger="dist_moe.planner")


def reference_plan(c: Config, W: int) -> dict[str, int]:
    """The bf16 plan of the release whose contract this package keeps, stated on its own: every region rounded to 128.

    Its scratch keeps grad_h1 apart from h1, its slots keep the route outputs h3.
    """
    T, D, F, K = c.num_local_input_tokens, c.hidden_dim, c.intermediate_dim, c.top_k
    local_experts, layers = c.num_experts // W, c.max_moe_layers_per_activation_slot

    def up(n):
        return -(-n // 128) * 128

    def rows(f):
        return min(int(T * K * f + 0.5), T * W * min(K, local_experts))

    def scratch(R):
        if c.inference:
            return up(2 * R * D) + up(4 * R * F) + up(2 * R * F)
        return up(2 * R * D) + 2 * up(4 * R * F) + up(2 * R * F) + (up(2 * R * D) if D > F else 0)

    def full(R):
        return up(2 * R * D) + up(4 * R * F) + up(2 * T * K * D)

    device_factor = min(c.device_scratch_capacity_factor, W)
    total_factor = device_factor if c.vmm is None else min(c.vmm.total_scratch_capacity_factor, W)
    if total_factor < device_factor:
        raise ValueError("must cover at least")
    x = up(2 * T * D)
    minimum, balanced, useful = up(layers * x), up(layers * full(rows(1.0))), up(layers * full(rows(total_factor)))
    slot, num_slots = minimum, c.num_activation_slots
    if c.activation_slot_bytes is not None:
        if c.activation_slot_bytes < minimum:
            raise ValueError(f"minimum required {minimum} bytes")
        slot = up(c.activation_slot_bytes)
    elif c.activation_slot_capacity_factor is not None:
        slot = up(minimum + math.ceil(c.activation_slot_capacity_factor * (balanced - minimum)))
    if c.inference:
        minimum = balanced = useful = slot = num_slots = 0
    device_rows, total_rows = rows(device_factor), rows(total_factor)
    device = scratch(device_rows)
    host = max(0, scratch(total_rows) - device)
    return {
        "balanced_recv_rows": T * K,
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


def allowed_excess(c: Config, figures: dict[str, int]) -> dict[str, int]:
    """How far a byte figure may exceed the reference's: one row pitch a region."""
    x, h1, h2 = 2 * c.hidden_dim, 4 * c.intermediate_dim, 2 * c.intermediate_dim
    scratch = x + h1 + h2 + (0 if c.inference else x)
    slot = 0 if c.inference else c.max_moe_layers_per_activation_slot * (x + h1)
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


def random_case(rng: random.Random) -> tuple[Config, int]:
    W = rng.choice((1, 2, 3, 4, 5, 8, 16, 64))
    num_experts = W * rng.choice((1, 2, 3, 4, 15, 32))
    inference = rng.random() < 0.25
    config = Config(
        rng.choice((1, 2, 3, 7, 64, 100, 333, 4096, 8193)),
        32 * rng.choice((1, 2, 3, 4, 8, 45, 90, 224)),
        32 * rng.choice((1, 2, 3, 4, 8, 45, 90, 448)),
        rng.randint(1, min(num_experts, 12)),
        num_experts,
        rng.choice((1, 2, 3, 32)),
        rng.choice((0.01, 0.5, 1.0, 1.25, 1.3, 2.0, 5, rng.uniform(0.05, 2.0 * W))),
        inference=inference,
        num_activation_slots=rng.choice((0, 1) if inference else (1, 2, 5)),
        vmm=rng.choice((None, None, VmmConfig(1.0), VmmConfig(2.0), VmmConfig(), VmmConfig(rng.uniform(0.05, 9)))),
    )
    if not inference:
        minimum = 2 * config.num_local_input_tokens * config.hidden_dim * config.max_moe_layers_per_activation_slot
        policy = rng.choice(("minimum", "exact", "factor"))
        if policy == "exact":
            config = replace(config, activation_slot_bytes=int(minimum * rng.choice((0.9, 1.0, 1.1, 3.0, 40.0))))
        elif policy == "factor":
            factor = rng.choice((0.0, 0.3, 1.0, 1.5, rng.uniform(0, 4)))
            config = replace(config, activation_slot_capacity_factor=factor)
    return config, W


def random_cases(seed: int, number: int):
    rng = random.Random(seed)
    return [random_case(rng) for _ in range(number)]


def outcome(plan, config: Config, W: int):
    try:
        return plan(config, W)
    except ValueError as error:
        return error


def test_rows_minimum_and_errors_are_the_references_and_no_byte_figure_is_more():
    num_plans = {"training": 0, "inference": 0, "error": 0}
    for config, W in random_cases(seed=1, number=2000):
        ours, reference = outcome(plan_memory, config, W), outcome(reference_plan, config, W)
        if isinstance(reference, ValueError):
            assert isinstance(ours, ValueError) and str(reference) in str(ours), (config, W)
            num_plans["error"] += 1
            continue
        assert isinstance(ours, MemoryPlan), (config, W, ours)
        num_plans["inference" if config.inference else "training"] += 1
        allowed = allowed_excess(config, reference)
        for name, expected in reference.items():
            got = getattr(ours, name)
            if name in allowed:
                assert got <= expected + allowed[name], (name, config, W)
            else:
                assert got == expected, (name, config, W)
    assert min(num_plans.values()) > 300


def test_regions_are_aligned_disjoint_inside_the_scratch_and_above_the_slots():
    rng = random.Random(2)
    for config, W in random_cases(seed=3, number=500):
        plan = outcome(plan_memory, config, W)
        if isinstance(plan, ValueError):
            continue
        D, F = 2 * config.hidden_dim, 2 * config.intermediate_dim
        pitches = {"x": D, "h1": 2 * F, "h2": F, "h3": D, "g2": F, "dy": D}
        total_scratch = plan.device_scratch_bytes + plan.host_scratch_bytes
        for rows, capacity_bytes, total_bytes in (
            (plan.device_scratch_capacity_rows, plan.device_scratch_bytes, plan.total_device_buffer_bytes),
            (plan.total_scratch_capacity_rows, total_scratch, plan.total_virtual_bytes),
        ):
            for num_rows in {rows, rng.randint(0, rows)} - {0}:
                offsets = scratch_layout(config, total_bytes, num_rows)
                assert all(offset % pitches[name] == 0 for name, offset in offsets.items())
                if config.inference:
                    assert offsets.keys() == {"x", "h1", "h2", "h3"} and offsets["h3"] == offsets["x"]
                else:
                    assert offsets["g2"] == offsets["h2"] and offsets["dy"] == offsets["h3"]
                spans = sorted({(at, at + num_rows * pitches[name]) for name, at in offsets.items()})
                assert len(spans) == (3 if config.inference else 4)
                assert all(low[1] <= high[0] for low, high in itertools.pairwise(spans)), (config, W)
                assert spans[0][0] >= total_bytes - capacity_bytes >= plan.total_activation_bytes, (config, W)
                assert spans[-1][1] <= total_bytes
                assert total_bytes - spans[0][0] <= scratch_bytes(config, num_rows)  # a call of fewer rows takes less


README = Config(4, 128, 128, 2, 4, 2)
TO_2 = VmmConfig(2.0)
WIDE = Config(64, 512, 192, 4, 16, 3, 1.3, activation_slot_capacity_factor=0.5, num_activation_slots=2)
PUBLISHED = [  # config, W, the release's own scratch (device, host) and slot (balanced full-save, useful, chosen)
    (replace(README, activation_slot_capacity_factor=1.5, vmm=TO_2), 2, (12288, 12288), (16384, 28672, 23552)),
    (replace(README, activation_slot_bytes=2049, num_activation_slots=3), 2, (12288, 0), (16384, 16384, 2176)),
    (replace(README, inference=True, vmm=TO_2), 2, (8192, 8192), (0, 0, 0)),
    (replace(README, device_scratch_capacity_factor=5), 2, (24576, 0), (16384, 28672, 2048)),
    (Config(128, 512, 256, 8, 8, 1, 2.0, vmm=VmmConfig(8.0)), 8, (4718592, 0), (3145728, 3145728, 131072)),
    (WIDE, 4, (1321344, 0), (2162688, 2576640, 1179648)),
]


@pytest.mark.parametrize("config, W, scratch, slot", PUBLISHED, ids=["P4", "P3", "P5", "P6", "P17", "P18"])
def test_the_statement_of_the_reference_gives_its_published_figures(config, W, scratch, slot):
    figures = reference_plan(config, W)
    assert (figures["device_scratch_bytes"], figures["host_scratch_bytes"]) == scratch
    assert slot == (
        figures["balanced_full_save_activation_slot_bytes"],
        figures["maximum_useful_activation_slot_bytes"],
        figures["activation_slot_bytes"],
    )

"""The plan over random configurations: against the release whose contract it keeps, and the layout of the regions."""

import itertools
import logging
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.reference_plan import EXACT, allowed_excess, reference_plan

from dist_moe import reference_slots, registry, shapes
from dist_moe.config import BlockScaledConfig, Config, VmmConfig
from dist_moe.planner import (
    MemoryPlan,
    plan_memory,
    saved_full_bytes,
    saved_h1_bytes,
    scratch_bytes,
    scratch_layout,
    slot_geometry,
)
from dist_moe.shapes import align

MXFP8 = tuple(BlockScaledConfig(pipeline=pipeline) for pipeline in ("staged", "mega"))
NVFP4 = tuple(BlockScaledConfig("nvfp4", pipeline=pipeline) for pipeline in ("staged", "mega"))


@pytest.fixture(autouse=True)
def no_warnings_logged(caplog):
    caplog.set_level(logging.ERROR, logger="dist_moe.planner")


def random_case(rng: random.Random, precisions) -> tuple[Config, int]:
    """A Config and a number of ranks; NVFP4 for inference only."""
    W = rng.choice((1, 2, 3, 4, 5, 8, 16, 64))
    num_experts = W * rng.choice((1, 2, 3, 4, 15, 32))
    inference = rng.random() < 0.3
    config = Config(
        rng.choice((1, 2, 3, 7, 64, 100, 333, 4096, 8193)),
        32 * rng.choice((1, 2, 3, 4, 8, 45, 90, 224)),
        32 * rng.choice((1, 2, 3, 4, 8, 45, 90, 448)),
        rng.randint(1, min(num_experts, 12)),
        num_experts,
        rng.choice((1, 2, 3, 32)),
        rng.choice((0.01, 0.5, 1.0, 1.25, 1.3, 2.0, 5, rng.uniform(0.05, 2.0 * W))),
        inference=inference,
        block_scaled=rng.choice([p for p in precisions if inference or p not in NVFP4]),
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


def random_cases(seed: int, number: int, precisions=(None, *MXFP8, *NVFP4)):
    rng = random.Random(seed)
    return [random_case(rng, precisions) for _ in range(number)]


def outcome(plan, config: Config, W: int):
    try:
        return plan(config, W)
    except ValueError as error:
        return error


def kind_of(config: Config) -> str:
    precision = config.block_scaled
    name = "bf16" if precision is None else f"{precision.format} {precision.pipeline}"
    return name + (" inference" if config.inference else "")


def test_rows_minimum_and_errors_are_the_references_and_no_byte_figure_is_more():
    num_plans = Counter()
    for config, W in random_cases(seed=1, number=2000):
        ours, reference = outcome(plan_memory, config, W), outcome(reference_plan, config, W)
        if isinstance(reference, ValueError):
            assert isinstance(ours, ValueError) and str(reference) in str(ours), (config, W)
            num_plans["error"] += 1
            continue
        assert isinstance(ours, MemoryPlan), (config, W, ours)
        num_plans[kind_of(config)] += 1
        allowed = allowed_excess(config, reference)
        assert sorted([*EXACT, *allowed]) == sorted(reference)
        for name in EXACT:
            assert getattr(ours, name) == reference[name], (name, config, W)
        for name, most in allowed.items():
            assert getattr(ours, name) <= reference[name] + most, (name, config, W)
        assert ours.total_device_buffer_bytes == ours.total_activation_bytes + ours.device_scratch_bytes
        assert ours.total_virtual_bytes == ours.total_device_buffer_bytes + ours.host_scratch_bytes
    assert len(num_plans) == 9 and min(num_plans.values()) > 60, num_plans


def test_no_slot_has_room_for_route_outputs():
    """The reference keeps h3, 2 D bytes a route, in every layer that recomputes nothing."""
    for config, W in random_cases(seed=4, number=500):
        ours = outcome(plan_memory, config, W)
        if isinstance(ours, ValueError) or config.inference:
            continue
        reference, layers = reference_plan(config, W), config.max_moe_layers_per_activation_slot
        h3 = layers * 2 * config.num_local_input_tokens * config.top_k * config.hidden_dim
        for name in ("balanced_full_save_activation_slot_bytes", "maximum_useful_activation_slot_bytes"):
            most = reference[name] - h3 + allowed_excess(config, reference)[name] + 128 * layers
            assert getattr(ours, name) <= max(most, ours.minimum_activation_slot_bytes), (name, config, W)


def test_regions_are_aligned_disjoint_inside_the_scratch_and_above_the_slots():
    rng = random.Random(2)
    for config, W in random_cases(seed=3, number=500, precisions=[None]):
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


# Block-scaled regions as the device-side planner lays them out; test_plan_slots.py looks at their places


@pytest.fixture(params=[False, True], ids=["codes", "expanded"])
def on_the_cpu(request, monkeypatch) -> dict:
    """How plan_memory is asked; as on a GPU that expands operands, or not."""
    monkeypatch.setattr(registry, "expands_operands", lambda config, call, backend: request.param)
    return {"device": "cpu"}


def test_block_scaled_regions_fit_in_the_scratch(on_the_cpu):
    rng = random.Random(5)
    for config, W in random_cases(seed=6, number=500, precisions=(*MXFP8, *NVFP4)):
        plan = outcome(partial(plan_memory, **on_the_cpu), config, W)
        if isinstance(plan, ValueError):
            continue
        for capacity, total_bytes in (
            (plan.device_scratch_capacity_rows, plan.total_device_buffer_bytes),
            (plan.total_scratch_capacity_rows, plan.total_virtual_bytes),
        ):
            geometry = replace(slot_geometry(config, W, plan), total_bytes=total_bytes)
            for rows in {capacity, rng.randint(0, capacity // 128) * 128}:
                place = torch.zeros(geometry.place_words, dtype=torch.int64)
                used = reference_slots._place_scratch(place, geometry, rows, shapes.KEEPS_X)
                assert used <= scratch_bytes(config, rows, expanded=plan.expanded), (config, W)
                assert total_bytes - used >= plan.total_activation_bytes and place.min() >= 0, (config, W)


def test_block_scaled_layers_take_in_the_slot_what_is_planned(on_the_cpu):
    """A layer that recomputes nothing, up from a multiple of 128: the scales of x, h1, the columns of x; or expanded
    the columns of x, h1."""
    for config, W in random_cases(seed=7, number=500, precisions=MXFP8):
        plan = outcome(partial(plan_memory, **on_the_cpu), config, W)
        if isinstance(plan, ValueError) or config.inference:
            continue
        rows, D, F = plan.total_scratch_capacity_rows, config.hidden_dim, config.intermediate_dim
        geometry, rows_1 = slot_geometry(config, W, plan), torch.tensor([rows])
        full = partial(saved_full_bytes, expanded=plan.expanded)
        for kept, planned in ((shapes.KEEPS_ROWS, full), (shapes.KEEPS_H1, saved_h1_bytes)):
            assert int(reference_slots._kept_bytes(rows_1, geometry, kept)) == planned(config, rows), (config, W)
        start = end = 128 * random.Random(rows).randint(0, 1000)
        end += 0 if plan.expanded else rows // 32 * align(D, 128)
        for pitch in (2 * D, 4 * F) if plan.expanded else (4 * F, D):
            end = align(end, pitch) + rows * pitch
        assert end - start <= full(config, rows), (config, W)

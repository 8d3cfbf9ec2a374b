"""What `dist-moe plan` answers, against plan_memory, the slot planners, and what a Context really keeps."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.path_cases import Case

from dist_moe import create_context, models, reference, shapes
from dist_moe.config import BlockScaledConfig, Config, VmmConfig
from dist_moe.plan_report import GIB, Report, bars, largest_that_fits
from dist_moe.planner import (
    capacity_rows,
    plan_memory,
    row_pitches,
    saved_h1_bytes,
    saved_input_bytes,
    scratch_bytes,
    scratch_regions,
)
from dist_moe.shapes import align
from dist_moe.symm import World
from dist_moe.virtual import routed_experts

MXFP8 = {"block_scaled": BlockScaledConfig(pipeline="mega")}
NVFP4 = {"block_scaled": BlockScaledConfig("nvfp4"), "inference": True}
KINDS = {
    "bf16": {"activation_slot_capacity_factor": 0.7},
    "bf16 inference": {"inference": True},
    "bf16 on the host too": {"vmm": VmmConfig(2.0), "wgrad_dtype": torch.float32},
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
}

SCRATCH = {  # regions but for other operands, by whether block-scaled and whether for inference
    (False, False): {"x", "h1", "h2", "h3"},
    (False, True): {"x", "h1", "h2"},
    (True, False): {"h1", "g2", "columns"},
    (True, True): {"h1"},
}


@pytest.fixture(params=KINDS)
def kind(request) -> dict:
    return KINDS[request.param]


@pytest.fixture(params=models.MODELS, ids=lambda model: model.name)
def model(request) -> models.Shape:
    return request.param


def config_of(model: models.Shape, T: int = 8192, *, layers: int = 4, factor: float = 1.25, **fields) -> Config:
    return Config(T, model.D, model.F, model.K, model.E, layers, factor, **fields)


def device_bytes(config: Config, ep_size: int, with_weights: bool) -> int:
    """The sum of a rank's device memory, from the plan's own totals."""
    plan, layers = plan_memory(config, ep_size), config.max_moe_layers_per_activation_slot
    calls = 1 if config.inference else layers * config.num_activation_slots
    found = plan.total_device_buffer_bytes + calls * plan.routing_table_bytes + sum(n for _, n in plan.symmetric_bytes)
    if with_weights:
        bf16 = 6 * config.hidden_dim * config.intermediate_dim * config.num_experts // ep_size
        found += layers * (bf16 + sum(n for _, n in plan.prepared_weight_bytes + plan.weight_grad_bytes))
    return found


def test_unknown_models_list_the_known():
    with pytest.raises(ValueError, match=r"unknown model 'gpt-2'; known are deepseek-v3, qwen3-30b, .*gpt-oss-120b"):
        models.find("gpt-2")


# Components


@pytest.mark.parametrize("with_weights", [False, True])
def test_components_add_up_to_the_plan(model, kind, with_weights):
    report = Report(config_of(model, num_activation_slots=2, **kind), 4, with_weights)
    found = {component.name: component.num_bytes for component in report.components()}
    assert len(found) == len(report.components()) and min(found.values()) > 0
    assert sum(found.values()) == report.device_bytes == device_bytes(report.config, 4, with_weights)
    scratch = sum(size for name, size in found.items() if name.startswith("scratch "))
    assert scratch == report.plan.device_scratch_bytes
    assert found.get("activation slots", 0) == report.plan.total_activation_bytes
    assert list(report.groups()) == list(dict.fromkeys(component.group for component in report.components()))
    assert sum(report.groups().values()) == report.device_bytes


@pytest.mark.parametrize("rows", [1, 128, 1000 * 128])
def test_scratch_regions_hold_their_rows_and_little_more(model, kind, rows):
    config = config_of(model, **kind)
    D, F = config.hidden_dim, config.intermediate_dim
    regions = scratch_regions(config, rows)
    assert sum(regions.values()) == scratch_bytes(config, rows) and regions.pop("operands", 1) > 0
    pitches = {"x": 2 * D, "h1": 4 * F, "h2": 2 * F, "h3": 2 * D, "g2": 2 * F}
    pitches["columns"] = 2 * D + 3 * F
    if config.inference and config.block_scaled is not None and rows * (2 * D - 4 * F) <= 2**27:
        pitches["h1"] = max(4 * F, 2 * D)  # W2 takes one pass
    scales = {"columns": rows // 32 * sum(align(width, 128) for width in (D, D, F, 2 * F))}
    assert regions.keys() == SCRATCH[config.block_scaled is not None, config.inference]
    for name, size in regions.items():
        least = rows * pitches[name] + scales.get(name, 0)
        assert least <= size <= least + pitches[name]  # a row more of each part


def test_experts_that_ranks_cannot_share():
    with pytest.raises(ValueError, match="divisible by the number of ranks, got 8 experts for 16 ranks"):
        _ = Report(config_of(models.find("mixtral-8x7b")), 16).plan


# The largest T


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("ep_size, gib", [(1, 1000), (2, 200), (8, 80.5)])
def test_the_largest_fits_and_one_more_does_not(model, kind, ep_size, gib, with_weights):
    limit = int(gib * GIB)
    report, problem = largest_that_fits(Report(config_of(model, 1, **kind), ep_size, with_weights), limit)
    T = report.config.num_local_input_tokens
    assert device_bytes(report.config, ep_size, with_weights) <= limit
    one_more = device_bytes(replace(report.config, num_local_input_tokens=T + 1), ep_size, with_weights)
    assert one_more > limit and f"{one_more:,} bytes" in problem


@given(
    T=st.integers(1, 300),
    D=st.integers(1, 6),
    F=st.integers(1, 6),
    K=st.integers(1, 4),
    layers=st.integers(1, 3),
    factor=st.sampled_from([0.3, 1.0, 1.7]),
    slot_factor=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    precision=st.sampled_from([{}, MXFP8]),
)
def test_memory_grows_with_the_tokens(T, D, F, K, layers, factor, slot_factor, precision):
    slot_factor = min(slot_factor, 1.0) if precision else slot_factor
    config = Config(T, 32 * D, 32 * F, K, 8, layers, factor, activation_slot_capacity_factor=slot_factor, **precision)
    more = replace(config, num_local_input_tokens=T + 1)
    assert Report(config, 4).device_bytes <= Report(more, 4).device_bytes


def test_routes_and_slots_limit_the_tokens():
    qwen = models.find("qwen3-30b")
    report, problem = largest_that_fits(Report(config_of(qwen, 1), 64), 10**18)
    assert report.config.num_local_input_tokens == shapes.MAX_ROUTES // (64 * 8)
    assert f"must be at most {shapes.MAX_ROUTES}" in problem
    slot = {"activation_slot_bytes": 4 * 1000 * 2 * 2048}  # the inputs of 1000 tokens in each of four layers
    report, problem = largest_that_fits(Report(config_of(qwen, 1, **slot), 8), 80 * GIB)
    assert report.config.num_local_input_tokens == 1000 and "every layer of a slot saves at least its input" in problem


def test_nothing_fits(caplog):
    with pytest.raises(ValueError, match=r"nothing fits in 128\.000 KiB .* one token takes"):
        largest_that_fits(Report(config_of(models.find("mixtral-8x7b"), 1), 1), 2**17)
    largest_that_fits(Report(config_of(models.find("mixtral-8x7b"), 1, factor=9), 1), GIB)
    assert not caplog.records  # plans that are only tried warn of nothing


# Skews


@pytest.mark.parametrize("skew", [1, 1.1, 1.25, 1.5, 3, 8, 100])
def test_a_skew_against_plans_of_its_factor(model, kind, skew):
    report = Report(config_of(model, **kind), 8)
    found, most = report.skew(skew), 8 * min(1, model.E / 8 / model.K)
    assert found.device_factor == min(skew, most)
    fitting = plan_memory(report.at_factor(found.device_factor).config, 8)
    assert fitting.device_scratch_capacity_rows == found.rows and fitting.device_scratch_bytes == found.scratch_bytes
    assert fitting.host_scratch_bytes == 0
    if found.device_factor <= 1.25:
        assert (found.outcome, found.host_bytes) == ("device", 0)
    elif report.config.vmm is not None and found.device_factor <= 2:
        reaching = plan_memory(replace(report.config, vmm=VmmConfig(found.device_factor)), 8)
        assert (found.outcome, found.host_bytes) == ("host", reaching.host_scratch_bytes)
    else:
        assert (found.outcome, found.host_bytes, found.layers_kept) == ("overflow", 0, None)


@pytest.mark.parametrize("skew", [0.5, float("nan"), float("inf")])
def test_skews_are_finite_and_at_least_1(skew):
    with pytest.raises(ValueError, match="at least 1"):
        Report(config_of(models.find("qwen3-30b")), 8).skew(skew)


def kept_on_ranks(config: Config, rank_rows: list[int], slot_bytes: int) -> list[int]:
    """Layers by what they keep when every layer has these rows, by the oracle's planner on all ranks' rows."""
    depth, W, L = config.max_moe_layers_per_activation_slot, len(rank_rows), 1
    x_h1_bytes = saved_h1_bytes(config, capacity_rows(config, W, 1.0))
    sizes = (config.hidden_dim, config.intermediate_dim, slot_bytes, saved_input_bytes(config), x_h1_bytes)
    state = {
        "slot_used_NW": torch.zeros(1, W, dtype=torch.int64),
        "slot_layers_N": torch.zeros(1, dtype=torch.int64),
        "slot_calls_NM": torch.zeros(1, depth, dtype=torch.int64),
        "stats_S": torch.zeros(shapes.STATS_SLOTS + 1 + L, dtype=torch.int64),
        "fault_F": torch.zeros(shapes.FAULT_WORDS, dtype=torch.int64),
        "call_1": torch.zeros(1, dtype=torch.int64),
        "geometry": shapes.Geometry(*sizes, total_bytes=2**50, training=True),
    }
    places = [torch.zeros(shapes.PLACE_WORDS, dtype=torch.int64) for _ in range(depth)]
    for place in places:
        rows, own_rows = torch.tensor(rank_rows), torch.tensor(rank_rows[-1:])
        reference.plan_forward(rows, own_rows, rank=W - 1, slot=0, depth=depth, save=True, place=place, **state)
    assert not state["fault_F"].any()
    kept = [int(place[shapes.PLACE_KEPT]) for place in places]
    return [kept.count(level) for level in (shapes.KEEPS_X, shapes.KEEPS_H1, shapes.KEEPS_ROWS)]


@pytest.mark.parametrize("slot_factor", [None, 0.3, 0.6, 0.8, 1.0, 1.3])
@pytest.mark.parametrize("W", [1, 2, 8])
def test_what_a_skewed_slot_keeps_is_what_the_planner_decides(model, W, slot_factor):
    config = config_of(model, 512, layers=5, factor=float(W), activation_slot_capacity_factor=slot_factor)
    report = Report(config, W)
    for skew in (1, 1.3, 2, W):
        found = report.skew(skew)
        others = (W * 512 * model.K - found.rows) // max(1, W - 1)
        rank_rows = [others] * (W - 1) + [found.rows]
        kept = kept_on_ranks(config, rank_rows, report.plan.activation_slot_bytes)
        assert list(found.layers_kept.values()) == kept and sum(kept) == 5
    assert report.layers_kept(report.balanced_rows) == report.skew(1).layers_kept


@given(
    T=st.integers(1, 9),
    D=st.integers(1, 4),
    F=st.integers(1, 4),
    W=st.integers(1, 4),
    K=st.integers(1, 4),
    layers=st.integers(1, 4),
    slot_factor=st.floats(0, 2),
    skew=st.floats(1, 4),
)
def test_the_fullest_rank_alone_decides_what_is_kept(T, D, F, W, K, layers, slot_factor, skew):
    config = Config(T, 32 * D, 32 * F, K, 4 * W, layers, float(W), activation_slot_capacity_factor=slot_factor)
    report = Report(config, W)
    found = report.skew(skew)
    rank_rows = [(W * T * K - found.rows) // max(1, W - 1)] * (W - 1) + [found.rows]
    assert list(found.layers_kept.values()) == kept_on_ranks(config, rank_rows, report.plan.activation_slot_bytes)


@pytest.mark.parametrize("slot_factor", [0.5, 1.0, 1.5])
def test_what_a_context_keeps(slot_factor):
    """Three layers whose routes all go to rank 0: twice the mean."""
    case = Case("all to one rank", routing="one_rank", E=8, slot_factor=slot_factor)
    config = case.config(max_moe_layers_per_activation_slot=3)
    with create_context(group=World.virtual(2, "cpu"), config=config, device="cpu", backend="reference") as context:
        inputs = case.inputs()
        inputs[0].x_TD.requires_grad_()
        outs = [routed_experts(inputs, context) for _ in range(3)]
        for out in reversed(outs):
            torch.autograd.backward(out, [rank.grad_out_TD for rank in inputs])
        stats = context.memory_stats(0)
    found = Report(config, 2).skew(2)
    assert found.rows == stats.rows_max and found.layers_kept == stats.layers_kept
    in_scratch = {"rows of x and h1": ("h2", "h3"), "x and h1": ("x", "h2", "h3"), "x": ("x", "h1", "h2", "h3")}
    least = max(sum(row_pitches(config)[r] for r in in_scratch[kept]) for kept, n in stats.layers_kept.items() if n)
    assert found.rows * least <= stats.scratch_peak_bytes <= found.scratch_bytes


# The picture


def test_bars_and_what_is_drawn_of_them(model, kind, tmp_path):
    pytest.importorskip("matplotlib")
    from dist_moe import plan_picture

    report = Report(config_of(model, **kind), 8, with_weights=True)
    skews = [report.skew(skew) for skew in (1.5, 2)]
    found = bars(report, skews)
    assert list(found) == ["as planned\nfactor 1.25"] + [f"skew {s.skew:g}\nfactor {s.device_factor:g}" for s in skews]
    fitting = [replace(report.config, device_scratch_capacity_factor=factor, vmm=None) for factor in (1.5, 2.0)]
    sizes = [device_bytes(config, 8, True) for config in (report.config, *fitting)]
    assert [sum(parts.values()) for parts in found.values()] == sizes and sizes == sorted(set(sizes))

    figure = plan_picture.build(found, "title")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(report.groups())[::-1]
    tops = [0.0] * 3
    for container, name in zip(axes.containers, report.groups(), strict=True):
        for at, (bar, parts) in enumerate(zip(container, found.values(), strict=True)):
            assert bar.get_y() == pytest.approx(tops[at]) and bar.get_height() == parts[name] / GIB
            tops[at] += bar.get_height()
    assert tops == pytest.approx([size / GIB for size in sizes])
    plan_picture.draw(tmp_path / "plan.png", found, "title")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")

import itertools
import json
from dataclasses import asdict, fields, replace

import pytest
import torch

from dist_moe.config import BlockScaledConfig, Config, VmmConfig
from dist_moe.memory_plan import MemoryPlan, format_bytes
from dist_moe.models import MODELS
from dist_moe.planner import (
    capacity_rows,
    dedup,
    packed_row_bytes,
    plan_memory,
    routing_table_bytes,
    saved_h1_bytes,
    scratch_layout,
    symmetric_regions,
)

SMALL = Config(4, 128, 128, 2, 4, 2)  # T, D, F, K, E, layers a slot
VMM2 = VmmConfig(2.0)
MXFP8, NVFP4 = BlockScaledConfig(), BlockScaledConfig("nvfp4")


@pytest.mark.parametrize(
    "T, K, factor, rows",
    [
        (1, 1, 0.5, 1),  # half rounds up
        (3, 1, 0.5, 2),
        (5, 1, 0.5, 3),
        (1, 1, 0.4, 0),  # legal: this rank may receive nothing
        (8193, 8, 1.0, 65544),
        (4, 2, 1.9, 15),
    ],
)
def test_rows_are_rounded_half_up(T, K, factor, rows):
    assert capacity_rows(Config(T, 32, 32, K, 16, 1), 2, factor) == rows


@pytest.mark.parametrize(
    "T, L, factor, rows",
    [
        (1, 1, 0.4, 0),  # one expert without a row takes none
        (1, 1, 1.0, 128),
        (128, 1, 1.0, 128),  # one expert, full: nothing to pad
        (129, 1, 1.0, 256),
        (128, 2, 1.0, 256),  # any split of 128 rows over two experts
        (130, 2, 1.0, 384),  # 129 and 1, or 2 and 128
        (16, 32, 1.0, 31 * 128),  # never more than (16 + 32 * 127) rows, though 16 experts at most have one
    ],
)
def test_block_scaled_rows_are_padded_by_expert(T, L, factor, rows):
    config = Config(T, 32, 32, 1, 2 * L, 1, block_scaled=MXFP8)
    assert capacity_rows(config, 2, factor) == rows


@pytest.mark.parametrize(
    "K, E, W, bound",
    [
        (8, 8, 8, 80),  # L = 1: one row of a token at most, 10 tokens of 8 ranks
        (8, 16, 4, 160),  # L = 4 < K
        (2, 16, 4, 80),  # K < L
    ],
)
def test_rows_never_exceed_what_routing_can_send(K, E, W, bound):
    assert capacity_rows(Config(10, 32, 32, K, E, 1), W, float(W)) == bound


def test_slot_does_not_depend_on_scratch_factors():
    factor = replace(SMALL, activation_slot_capacity_factor=1.0)
    plans = [plan_memory(replace(factor, device_scratch_capacity_factor=f), 2) for f in (0.5, 1.0, 2.0)]
    assert len({plan.activation_slot_bytes for plan in plans}) == 1
    assert len({plan.device_scratch_bytes for plan in plans}) == 3


@pytest.mark.parametrize("factor, slot", [(0.0, 2048), (1.0, 13824), (1.5, 2048 + 11776 * 3 // 2)])
def test_slot_factor(factor, slot):
    assert plan_memory(replace(SMALL, activation_slot_capacity_factor=factor), 2).activation_slot_bytes == slot


def test_a_slot_is_never_below_its_minimum():
    """One route a token and a small F: one byte of x and five of h1 are less than a bf16 x."""
    config = Config(1024, 4096, 32, 1, 2, 3, activation_slot_capacity_factor=1.0, block_scaled=MXFP8)
    plan = plan_memory(config, 2)
    assert plan.activation_slot_bytes == plan.balanced_full_save_activation_slot_bytes == 3 * 2 * 1024 * 4096
    assert plan.minimum_activation_slot_bytes == 3 * 2 * 1024 * 4096


def test_few_rows_do_not_bring_the_useful_slot_below_the_minimum():
    plan = plan_memory(Config(1024, 512, 32, 1, 8, 2, device_scratch_capacity_factor=0.01), 8)
    assert plan.maximum_useful_activation_slot_bytes == plan.minimum_activation_slot_bytes == 2 * 2 * 1024 * 512


def test_plans_are_equal_by_value():
    with_vmm = [replace(SMALL, vmm=VmmConfig(2.0, prefetch=prefetch)) for prefetch in (True, False)]
    assert plan_memory(with_vmm[0], 2) == plan_memory(with_vmm[1], 2)
    assert hash(plan_memory(SMALL, 2)) == hash(plan_memory(SMALL, 2))
    assert plan_memory(SMALL, 2) != plan_memory(SMALL, 4)
    assert plan_memory(SMALL, 2, device="cpu") == plan_memory(SMALL, 2, device=torch.device("cuda", 0))


def test_field_order():
    names = [f.name for f in fields(MemoryPlan)]
    assert names[0] == "balanced_recv_rows"
    assert names[15:18] == ["total_virtual_bytes", "num_activation_slots", "inference"]
    assert names[-5:-2] == ["vmm_padding_bytes", "symmetric_bytes", "routing_table_bytes"]
    assert names[-2:] == ["prepared_weight_bytes", "weight_grad_bytes"]
    plan = plan_memory(replace(SMALL, vmm=VMM2), 2)
    sections = [getattr(plan, name) for name in names if name.startswith("vmm_")]
    assert sections == [None, None, None, None, 0]


@pytest.mark.parametrize(
    "config, ep_size, error, words",
    [
        (SMALL, True, TypeError, "ep_size must be an int"),
        (SMALL, 2.0, TypeError, "ep_size must be an int"),
        (SMALL, 0, ValueError, "ep_size must be positive"),
        (SMALL, -2, ValueError, "ep_size must be positive"),
        (replace(SMALL, device_scratch_capacity_factor=2.0, vmm=VmmConfig(1.0)), 2, ValueError, "must cover at least"),
        (replace(SMALL, activation_slot_bytes=1024), 2, ValueError, "minimum required 2048 bytes"),
        (replace(SMALL, activation_slot_bytes=2047), 2, ValueError, "minimum required 2048 bytes"),
        (Config(2**26, 32, 32, 8, 8, 1), 4, ValueError, "at most 2147483647, got 2147483648; .*int32"),
        (replace(SMALL, activation_slot_bytes=1024, block_scaled=MXFP8), 2, ValueError, "minimum required 2048 bytes"),
        # two rules broken: the first is named
        (replace(SMALL, activation_slot_bytes=0), 0, ValueError, "ep_size"),
        (
            replace(SMALL, device_scratch_capacity_factor=2.0, vmm=VmmConfig(1.0), activation_slot_bytes=0),
            2,
            ValueError,
            "must cover at least",
        ),
    ],
)
def test_refused(config, ep_size, error, words):
    with pytest.raises(error, match=words):
        plan_memory(config, ep_size)


def test_the_largest_row_maps():
    config = Config(2**28 - 1, 32, 32, 1, 8, 1)
    assert plan_memory(config, 8).balanced_recv_rows == 2**28 - 1  # 8 * (2^28 - 1) routes is below 2^31
    with pytest.raises(ValueError, match="int32"):
        plan_memory(replace(config, num_local_input_tokens=2**28), 8)


def test_factors_are_compared_after_the_clamp():
    assert plan_memory(replace(SMALL, device_scratch_capacity_factor=5.0, vmm=VMM2), 2).host_scratch_bytes == 0


# The physical mapping


def test_mapping_of_a_known_granularity():
    config = replace(SMALL, activation_slot_capacity_factor=1.0, vmm=VMM2)
    plan, bare = plan_memory(config, 2, vmm_granularity_bytes=2**21), plan_memory(config, 2)
    assert (plan.vmm_granularity_bytes, plan.vmm_device_prefix_bytes, plan.vmm_host_section_bytes) == (2**21,) * 3
    assert plan.vmm_device_scratch_section_bytes == 8 * 2**21  # a small total becomes 20 MiB
    assert plan.total_virtual_bytes == 10 * 2**21
    assert plan.vmm_padding_bytes == 10 * 2**21 - bare.total_virtual_bytes == 20971520 - (13824 + 11520 + 10240)
    assert plan.total_device_buffer_bytes == bare.total_device_buffer_bytes


def test_no_mapping_without_granularity_or_host_scratch():
    for plan in (
        plan_memory(replace(SMALL, vmm=VMM2), 2, device="cpu"),
        plan_memory(replace(SMALL, vmm=VmmConfig(1.0)), 2, vmm_granularity_bytes=2**21),
        plan_memory(SMALL, 2, vmm_granularity_bytes=2**21),
    ):
        assert plan.vmm_granularity_bytes is plan.vmm_device_prefix_bytes is plan.vmm_host_section_bytes is None
        assert plan.vmm_device_scratch_section_bytes is None and plan.vmm_padding_bytes == 0


@pytest.mark.parametrize(
    "granularity, error", [(0, ValueError), (-1, ValueError), (2.0**21, TypeError), (True, TypeError)]
)
def test_no_such_granularity(granularity, error):
    with pytest.raises(error, match="plan_memory: vmm_granularity_bytes must be"):
        plan_memory(SMALL, 2, vmm_granularity_bytes=granularity)


@pytest.mark.parametrize(
    "config, words",
    [
        (replace(SMALL, device_scratch_capacity_factor=5.0), "capped to 2"),
        (replace(SMALL, activation_slot_bytes=13825), "more than the 13824 bytes"),
        (replace(SMALL, device_scratch_capacity_factor=2.0), None),  # exactly the number of ranks
        (replace(SMALL, activation_slot_bytes=13824), None),
        (SMALL, None),
    ],
)
def test_warnings(config, words, caplog):
    plan_memory(config, 2)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (words is not None)
    assert words is None or words in messages[0]


# Scratch layout


def test_scratch_layout_example():
    expected = {"x": 896, "h1": 640, "h2": 512, "h3": 384, "g2": 512, "dy": 384}
    assert scratch_layout(Config(4, 32, 32, 1, 4, 1), 1024, 2) == expected
    assert scratch_layout(Config(4, 32, 32, 1, 4, 1, inference=True), 1024, 2) == {
        "x": 896,
        "h1": 640,
        "h2": 512,
        "h3": 896,
    }


def test_scratch_layout_refuses_what_does_not_fit():
    with pytest.raises(AssertionError, match="3 rows do not fit in 640 bytes"):
        scratch_layout(Config(4, 32, 32, 1, 4, 1), 640, 3)


# Symmetric regions and tables


@pytest.mark.parametrize(
    "K, W, expected",
    [
        (1, 1, False),  # exactly 1
        (2, 1, True),  # 2 routes, one rank
        (2, 2, False),  # 1.33
        (3, 2, True),  # 1.71
        (8, 2, True),  # 4.02
        (8, 8, True),  # 1.52, just above the border
        (8, 9, False),  # 1.46, just below
        (8, 64, False),  # 1.06
        (64, 64, True),  # 1.57
    ],
)
def test_dedup(K, W, expected):
    config = Config(4, 32, 32, K, 72 * W, 1)
    pairs = W * (1 - (1 - 1 / W) ** K)
    assert dedup(config, W) is (K / pairs >= 1.5)
    assert dedup(config, W) is expected


def test_symmetric_regions_of_training():
    regions = symmetric_regions(Config(100, 256, 128, 8, 64, 1), 2)
    assert regions == {
        "tokens": ((2, 100, 256), torch.bfloat16),
        "header": ((16,), torch.int64),
        "ids": ((100, 8), torch.int16),
        "scores": ((100, 8), torch.float32),
        "outputs": ((100, 2, 256), torch.bfloat16),  # de-duplicated: one row a rank
        "score_grads": ((100, 8), torch.float32),
        "signals": ((3, 2), torch.int64),
        "abort_text": ((256,), torch.uint8),
    }


def test_symmetric_regions_of_inference():
    regions = symmetric_regions(Config(100, 256, 128, 8, 64, 1, inference=True), 16)
    assert regions["tokens"] == ((1, 100, 256), torch.bfloat16)
    assert regions["outputs"] == ((100, 8, 256), torch.bfloat16)  # one row a route
    assert regions["signals"] == ((3, 16), torch.int64)
    assert "score_grads" not in regions


@pytest.mark.parametrize(
    "D, block_scaled, num_bytes",
    [
        (256, MXFP8, 256 + 8 + 8),  # values, scales, padding
        (512, MXFP8, 512 + 16),
        (256, NVFP4, 128 + 16 + 4 + 12),
        (96, NVFP4, 48 + 6 + 4 + 6),
    ],
)
def test_block_scaled_inference_sends_packed_rows(D, block_scaled, num_bytes):
    config = Config(100, D, 128, 8, 64, 1, inference=True, block_scaled=block_scaled)
    assert packed_row_bytes(config) == num_bytes
    assert symmetric_regions(config, 2)["tokens"] == ((1, 100, num_bytes), torch.uint8)


def test_block_scaled_training_sends_bf16():
    config = Config(100, 256, 128, 8, 64, 1)
    assert symmetric_regions(replace(config, block_scaled=MXFP8), 2) == symmetric_regions(config, 2)


def test_one_rank_sends_one_row_a_token():
    assert symmetric_regions(Config(5, 32, 32, 4, 8, 1), 1)["outputs"][0] == (5, 1, 32)


def test_plan_reports_symmetric_regions_and_tables():
    plan = plan_memory(Config(100, 256, 128, 8, 64, 1, device_scratch_capacity_factor=1.5), 2)
    assert dict(plan.symmetric_bytes) == {
        "tokens": 102400,
        "header": 128,
        "ids": 1600,
        "scores": 3200,
        "outputs": 102400,
        "score_grads": 3200,
        "signals": 48,
        "abort_text": 256,
    }
    # four int32 tables of 1200 rows, 33 int32 starts, 2 int64 row counts, one int32 count of pairs
    assert plan.routing_table_bytes == 4 * 4 * 1200 + 4 * 33 + 8 * 2 + 4


def test_tables_are_sized_by_all_rows_host_scratch_included():
    assert routing_table_bytes(replace(SMALL, vmm=VMM2), 2) == 4 * 4 * 16 + 4 * 3 + 8 * 2 + 4


# Weights

VALUES = {"w13_values": 3 * 256 * 256, "w2_values": 3 * 256 * 128}  # of three experts, D = 256, F = 128


@pytest.mark.parametrize(
    "block_scaled, inference, expected",
    [
        (None, False, {}),
        (MXFP8, True, VALUES | {"w13_scales": 3 * 256 * 8, "w2_scales": 3 * 256 * 4}),
        (MXFP8, False, VALUES | {"w13_scales": 3 * 2 * 256 * 8, "w2_scales": 3 * 2 * 256 * 4}),
        (
            NVFP4,  # beside the scales an FP32 scale and its inverse
            True,
            {
                "w13_values": 3 * 2**15,
                "w13_scales": 3 * (2**12 + 8),
                "w2_values": 3 * 2**14,
                "w2_scales": 3 * (2**11 + 8),
            },
        ),
    ],
)
def test_prepared_weights_of_a_layer(block_scaled, inference, expected):
    plan = plan_memory(Config(4, 256, 128, 2, 6, 1, inference=inference, block_scaled=block_scaled), 2)
    assert dict(plan.prepared_weight_bytes) == expected


def test_scales_of_weights_are_whole_atoms():
    plan = plan_memory(Config(4, 96, 32, 2, 6, 1, block_scaled=MXFP8), 2)
    assert dict(plan.prepared_weight_bytes) == {
        "w13_values": 3 * 64 * 96,
        "w13_scales": 3 * 2 * 512,  # of 64 x 3 scales and of 96 x 2
        "w2_values": 3 * 96 * 32,
        "w2_scales": 3 * 2 * 512,
    }


@pytest.mark.parametrize("wgrad_dtype, itemsize", [(None, 2), (torch.bfloat16, 2), (torch.float32, 4)])
def test_weight_gradients_of_a_layer(wgrad_dtype, itemsize):
    plan = plan_memory(replace(SMALL, wgrad_dtype=wgrad_dtype), 2)
    assert dict(plan.weight_grad_bytes) == {"w13": 2 * 256 * 128 * itemsize, "w2": 2 * 128 * 128 * itemsize}
    assert plan_memory(replace(SMALL, wgrad_dtype=wgrad_dtype, inference=True), 2).weight_grad_bytes == ()


# Words


def test_explain_of_training():
    text = plan_memory(replace(SMALL, num_activation_slots=2, vmm=VMM2), 2).explain()
    for words in (
        "8 balanced / 8 device / 16 total",
        "1 device / 2 total",
        "activation slots: 2 slot(s) x 2.000 KiB (2,048 bytes) = 4.000 KiB (4,096 bytes) (minimum all-recompute)",
        "device scratch: 11.250 KiB (11,520 bytes)",
        "host overflow scratch: 10.000 KiB (10,240 bytes)",
        "total device buffer: 15.250 KiB (15,616 bytes)",
        "activation slot minimum: 2.000 KiB",
        "activation slot balanced full-save: 13.500 KiB (13,824 bytes)",
        "activation slot maximum useful: 25.500 KiB (26,112 bytes)",
        "virtual address range: 25.250 KiB (25,856 bytes); all layers recompute at the minimum",
        "soft limit",
        "routing tables of a call: 288 B",
        "symmetric regions: 4.500 KiB (4,608 bytes)",
        "tokens: 2.000 KiB (2,048 bytes)",
        "weight gradients of a layer: 192.000 KiB (196,608 bytes)",
        "w13: 128.000 KiB (131,072 bytes)",
    ):
        assert words in text, words
    assert " 0.000" not in text and "mapp" not in text and "prepared" not in text


def test_explain_of_a_large_mapped_plan():
    config = Config(8192, 7168, 2048, 8, 256, 4, 1.25, vmm=VmmConfig(), block_scaled=MXFP8)
    text = plan_memory(config, 32, vmm_granularity_bytes=2**21).explain()
    for words in (
        "receive rows: 65536 balanced / 82816 device / 1049472 total",
        "device scratch: 3.147 GiB (3,378,932,736 bytes)",
        "virtual address range: 40.318 GiB (43,291,508,736 bytes); all layers recompute",
        "mapping granularity: 2.000 MiB (2,097,152 bytes)",
        "mapped: 448.000 MiB (469,762,048 bytes) device / 36.732 GiB (39,441,137,664 bytes) host / 3.148 GiB",
        "mapping padding: 3.099 MiB (3,249,152 bytes)",
        "prepared weights of a layer: 357.000 MiB (374,341,632 bytes)",
        "w2_scales: 7.000 MiB (7,340,032 bytes)",
    ):
        assert words in text, words


def test_explain_of_inference():
    plan = plan_memory(replace(SMALL, inference=True), 2)
    text = plan.explain()
    assert "activation slots: 0 slot(s)" in text
    assert "scratch-only inference; no saved activations" in text
    assert "hard limit" in text
    assert "across" not in text and "grad" not in text
    assert plan.total_device_buffer_bytes == plan.device_scratch_bytes


@pytest.mark.parametrize(
    "changes, policy, note",
    [
        ({}, "minimum all-recompute", "all layers recompute at the minimum"),
        ({"activation_slot_bytes": 4096}, "exact per-slot bytes", "may avoid recompute for some layers"),
        ({"activation_slot_bytes": 13824}, "exact per-slot bytes", "balanced routing fits, larger routing may"),
        ({"activation_slot_bytes": 26112}, "exact per-slot bytes", "all executable routing fits"),
        ({"activation_slot_capacity_factor": 0.25}, "balanced capacity factor 0.25", "may avoid recompute"),
        ({"activation_slot_capacity_factor": 1.0}, "balanced capacity factor 1)", "balanced routing fits"),
        ({"activation_slot_capacity_factor": 0.0}, "balanced capacity factor 0)", "all layers recompute"),
    ],
)
def test_explain_names_policy_and_consequence(changes, policy, note):
    text = plan_memory(replace(SMALL, vmm=VMM2, **changes), 2).explain()
    assert policy in text and note in text


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (0, "0 B (0 bytes)"),
        (1023, "1023 B (1,023 bytes)"),
        (1024, "1.000 KiB (1,024 bytes)"),
        (3 * 2**20 // 2, "1.500 MiB (1,572,864 bytes)"),
        (2**40, "1.000 TiB (1,099,511,627,776 bytes)"),
    ],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_to_dict_holds_every_field_as_json_takes_it():
    plan = plan_memory(replace(SMALL, vmm=VMM2, block_scaled=MXFP8), 2, vmm_granularity_bytes=2**21)
    values = plan.to_dict()
    assert json.loads(json.dumps(values)) == values
    listed = ("symmetric_bytes", "prepared_weight_bytes", "weight_grad_bytes")
    assert values == asdict(plan) | {name: dict(getattr(plan, name)) for name in listed}


def test_the_capacity_of_the_largest_factor_is_the_worst_that_routing_can_do():
    """Brute force: at a factor of W the scratch holds every routing of T tokens a rank, and not one row more."""
    for W, L, T in itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 5)):
        for K in range(1, min(W * L, 4) + 1):
            worst_token = max(sum(e < L for e in experts) for experts in itertools.combinations(range(W * L), K))
            config = Config(T, 32, 32, K, W * L, 1, device_scratch_capacity_factor=float(W))
            assert plan_memory(config, W).device_scratch_capacity_rows == W * T * worst_token


@pytest.mark.parametrize("model", [model for model in MODELS if model.name in ("deepseek-v3", "qwen3-30b")], ids=str)
def test_a_layer_that_keeps_x_and_h1_keeps_no_more_than_sonicmoe(model):
    """SonicMoE keeps x and h1 of every route, and row maps. Ours has a row of h1 more, and maps of 16 bytes a row."""
    T = 8192
    config = Config(T, model.D, model.F, model.K, model.E, 1)
    for W in (1, 2, 8):
        x, h1 = 2 * T * model.D, 4 * model.F * T * model.K
        assert saved_h1_bytes(config, T * model.K) <= x + h1 + 4 * model.F
        assert routing_table_bytes(config, W) <= 16 * T * model.K + 4 * (model.E // W + 2) + 8 * W

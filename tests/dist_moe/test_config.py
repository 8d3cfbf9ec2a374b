import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch

from dist_moe import shapes
from dist_moe.config import (
    BlockScaledConfig,
    BlockScaledFormat,
    BlockScaledKernelConfig,
    Config,
    VmmConfig,
    config_hash,
)

SMALL = {
    "num_local_input_tokens": 4,
    "hidden_dim": 128,
    "intermediate_dim": 128,
    "top_k": 2,
    "num_experts": 4,
    "max_moe_layers_per_activation_slot": 1,
}
INT_FIELDS = (*SMALL, "activation_slot_bytes", "num_activation_slots", "num_sms")
NVFP4 = BlockScaledConfig(BlockScaledFormat.NVFP4)
KERNEL = {
    "num_ctas": 1,
    "block_m": 128,
    "block_n": 128,
    "block_k": 128,
    "num_smem_buffers": 4,
    "num_c_stages": 2,
    "num_tmem_buffers": 2,
    "num_tile_buffers": 2,
    "epilogue_subtile": 4,
    "overlapping_accum": False,
    "swap_ab": True,
    "kloop_unroll": 1,
}


def make(**changes) -> Config:
    return Config(**(SMALL | changes))


def test_fields_are_in_positional_order_with_their_defaults():
    defaults = {f.name: f.default for f in fields(Config) if f.name not in SMALL}
    assert defaults == {
        "device_scratch_capacity_factor": 1.0,
        "activation_slot_bytes": None,
        "activation_slot_capacity_factor": None,
        "num_activation_slots": 1,
        "vmm": None,
        "num_sms": None,
        "bf16_grouped_gemm_preset": None,
        "block_scaled": None,
        "activation": "swiglu",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "wgrad_dtype": None,
        "inference": False,
        "route_outputs": False,
    }
    assert [f.name for f in fields(Config)] == [*SMALL, *defaults]
    assert Config(*SMALL.values()) == make()
    with pytest.raises(FrozenInstanceError):
        make().top_k = 3


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_input_tokens": 1, "top_k": 1, "num_experts": 1},  # the smallest of everything
        {"hidden_dim": 32, "intermediate_dim": 32},  # one scale block
        {"hidden_dim": 2880, "intermediate_dim": 2880},  # not a multiple of 128
        {"num_experts": 384, "top_k": 6},  # neither is a power of two
        {"top_k": 4},  # K = E
        {"num_experts": 32767, "top_k": 10},  # the largest id that int16 holds
        {"block_scaled": NVFP4, "inference": True, "hidden_dim": 128, "intermediate_dim": 96},  # no 256 for NVFP4
        {"block_scaled": BlockScaledConfig(), "hidden_dim": 160},  # MXFP8, D not a multiple of 64
        {"inference": True, "num_activation_slots": 0},
        {"inference": True},  # the default of one slot passes; the planner makes it none
        {"activation_slot_bytes": 0},  # too small only for the planner
        {"activation_slot_capacity_factor": 0},
        {"device_scratch_capacity_factor": 0.01},
        {"activation": "swiglu", "swiglu_alpha": float("nan"), "swiglu_limit": -1},  # not looked at
        {"activation": "swiglu_clamped", "swiglu_alpha": 1, "swiglu_limit": 5},
        {"wgrad_dtype": torch.float32},
        {"bf16_grouped_gemm_preset": "2cta2mma_bm512_bn256", "num_sms": 1},
    ],
)
def test_legal(changes):
    make(**changes)


NOT_POSITIVE = [(name, value) for name in SMALL for value in (0, -1)]


@pytest.mark.parametrize("name, value", [*NOT_POSITIVE, ("num_sms", 0), ("num_sms", -3)])
def test_counts_must_be_positive(name, value):
    with pytest.raises(ValueError, match=f"{name} must be positive, got {value}"):
        make(**{name: value})


@pytest.mark.parametrize("value", [True, 8.0, "8", torch.tensor(8), torch.tensor(True), np.float32(8), np.bool_(True)])
@pytest.mark.parametrize("name", INT_FIELDS)
def test_counts_must_be_real_ints(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an int"):
        make(**{name: value})


@pytest.mark.parametrize("name", SMALL)
def test_a_count_is_required(name):
    with pytest.raises(TypeError, match=f"{name} must be an int, got None"):
        make(**{name: None})


def test_numpy_numbers_become_plain_ones():
    config = make(
        hidden_dim=np.int64(128),
        num_sms=np.uint8(132),
        device_scratch_capacity_factor=np.float32(1.5),
        activation_slot_capacity_factor=1,
    )
    assert type(config.hidden_dim) is int and type(config.num_sms) is int
    assert type(config.device_scratch_capacity_factor) is float
    assert config == make(num_sms=132, device_scratch_capacity_factor=1.5, activation_slot_capacity_factor=1.0)


@pytest.mark.parametrize("name", ["hidden_dim", "intermediate_dim"])
@pytest.mark.parametrize("value, padded", [(1, 32), (33, 64), (48, 64), (2895, 2912)])
def test_dims_are_multiples_of_32(name, value, padded):
    with pytest.raises(ValueError, match=f"{name} must be a multiple of 32, got {value}; .*{padded}"):
        make(**{name: value})


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"num_experts": 32768}, ValueError, "at most 32767, got 32768; .*int16"),
        ({"top_k": 5}, ValueError, "top_k cannot exceed num_experts, got 5 of 4"),
        ({"activation_slot_bytes": -1}, ValueError, "activation_slot_bytes must not be negative"),
        ({"activation_slot_bytes": True}, TypeError, "activation_slot_bytes"),
        ({"activation_slot_bytes": 1.5}, TypeError, "activation_slot_bytes"),
        ({"activation_slot_capacity_factor": -1.0}, ValueError, "activation_slot_capacity_factor must be finite"),
        ({"activation_slot_capacity_factor": float("nan")}, ValueError, "activation_slot_capacity_factor"),
        ({"activation_slot_capacity_factor": float("inf")}, ValueError, "activation_slot_capacity_factor"),
        ({"activation_slot_capacity_factor": 10**400}, ValueError, "activation_slot_capacity_factor"),
        ({"activation_slot_capacity_factor": True}, TypeError, "activation_slot_capacity_factor"),
        ({"activation_slot_capacity_factor": "1"}, TypeError, "activation_slot_capacity_factor"),
        ({"activation_slot_bytes": 0, "activation_slot_capacity_factor": 0.0}, ValueError, "mutually exclusive"),
        ({"num_activation_slots": 0}, ValueError, "at least one activation slot"),
        ({"num_activation_slots": -1}, ValueError, "num_activation_slots must not be negative"),
        ({"num_activation_slots": -1, "inference": True}, ValueError, "num_activation_slots must not be negative"),
        ({"inference": True, "activation_slot_bytes": 4096}, ValueError, "does not retain saved activations"),
        ({"inference": True, "activation_slot_capacity_factor": 0.0}, ValueError, "does not retain saved activations"),
        ({"inference": 1}, TypeError, "inference must be a bool"),
        ({"route_outputs": 1}, TypeError, "route_outputs must be a bool"),
        ({"bf16_grouped_gemm_preset": "1cta"}, ValueError, "supported BF16 preset"),
        ({"wgrad_dtype": torch.float16}, TypeError, "wgrad_dtype"),
        ({"wgrad_dtype": "float32"}, TypeError, "wgrad_dtype"),
        ({"activation": "gelu"}, ValueError, "activation must be"),
        ({"block_scaled": BlockScaledFormat.NVFP4}, TypeError, "block_scaled must be a BlockScaledConfig"),
        ({"block_scaled": NVFP4}, ValueError, "inference-only"),
        ({"vmm": 16.0}, TypeError, "vmm must be a VmmConfig"),
    ],
)
def test_refused(changes, error, words):
    with pytest.raises(error, match=words):
        make(**changes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, pytest.param(10**400, id="huge")])
def test_factors_must_be_finite_and_positive(value):
    with pytest.raises(ValueError, match="device_scratch_capacity_factor must be finite and positive"):
        make(device_scratch_capacity_factor=value)
    with pytest.raises(ValueError, match="total_scratch_capacity_factor must be finite and positive"):
        VmmConfig(value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["swiglu_alpha", "swiglu_limit"])
def test_clamp_parameters_must_be_finite_and_positive(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a finite positive"):
        make(activation="swiglu_clamped", **{name: value})


# Every check in its order: a Config that breaks rule i and every later one names rule i. The last entry of a row
# repairs it, so that the next row is the first one broken.
ORDER = [
    ({"top_k": 0}, "top_k must be positive", {"top_k": 9}),
    ({"hidden_dim": 33}, "hidden_dim must be a multiple of 32", {"hidden_dim": 64}),
    ({"intermediate_dim": 33}, "intermediate_dim must be a multiple of 32", {"intermediate_dim": 64}),
    ({"num_experts": 0}, "num_experts must be positive", {"num_experts": 40000}),
    ({}, "at most 32767", {"num_experts": 4}),
    ({}, "top_k cannot exceed", {"top_k": 2}),
    ({"max_moe_layers_per_activation_slot": 0}, "max_moe_layers", {"max_moe_layers_per_activation_slot": 1}),
    ({"activation_slot_bytes": -1}, "activation_slot_bytes must not", {"activation_slot_bytes": 0}),
    (
        {"activation_slot_capacity_factor": -1.0},
        "activation_slot_capacity_factor must be",
        {"activation_slot_capacity_factor": 0.0},
    ),
    ({}, "mutually exclusive", {"activation_slot_bytes": None}),
    ({"num_activation_slots": 0}, "at least one activation slot", {"inference": True}),
    ({}, "does not retain", {"activation_slot_capacity_factor": None}),
    ({"device_scratch_capacity_factor": 0}, "device_scratch", {"device_scratch_capacity_factor": 1}),
    ({"num_sms": 0}, "num_sms", {"num_sms": None}),
    ({"bf16_grouped_gemm_preset": ""}, "supported BF16 preset", {"bf16_grouped_gemm_preset": None}),
    ({"wgrad_dtype": torch.float64}, "wgrad_dtype", {"wgrad_dtype": None}),
    ({"activation": "relu"}, "activation must be", {"activation": "swiglu_clamped"}),
    ({"swiglu_alpha": 0}, "swiglu_alpha", {"swiglu_alpha": 1.0}),
    ({"swiglu_limit": 0}, "swiglu_limit", {"swiglu_limit": 1.0}),
    ({"block_scaled": NVFP4}, "inference-only", {"block_scaled": None}),
]


@pytest.mark.parametrize("first", range(len(ORDER)), ids=[words for _, words, _ in ORDER])
def test_the_first_broken_rule_is_the_one_reported(first):
    values = {}
    for broken, _, _ in reversed(ORDER):
        values = values | broken
    for _, _, repaired in ORDER[:first]:
        values = values | repaired
    if first == len(ORDER) - 1:  # the slot rules were repaired by inference, which NVFP4 would accept
        values = values | {"inference": False, "num_activation_slots": 1}
    with pytest.raises((ValueError, TypeError), match=ORDER[first][1]):
        make(**values)


def test_vmm():
    assert VmmConfig() == VmmConfig(16.0, True)
    assert VmmConfig(2) == VmmConfig(2.0)
    with pytest.raises(TypeError, match="prefetch must be a bool"):
        VmmConfig(prefetch=1)
    with pytest.raises(TypeError, match="total_scratch_capacity_factor must be a real number"):
        VmmConfig(True)


def test_block_scaled_format():
    assert BlockScaledFormat.__name__ == "BlockScaledFormat"
    assert {f.name: f.value for f in BlockScaledFormat} == {"MXFP8_E4M3": "mxfp8_e4m3", "NVFP4": "nvfp4"}


def test_block_scaled_config():
    assert BlockScaledConfig() == BlockScaledConfig(BlockScaledFormat.MXFP8_E4M3, False, "staged", None)
    assert BlockScaledConfig("nvfp4").format is BlockScaledFormat.NVFP4
    assert BlockScaledConfig(fast_math=True, pipeline="mega").fast_math
    assert BlockScaledConfig(kernel_config=BlockScaledKernelConfig(**KERNEL)).kernel_config.num_warps == 8


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"format": "mxfp4"}, ValueError, "unsupported .* format"),
        ({"format": None}, ValueError, "unsupported .* format"),
        ({"format": "nvfp4", "fast_math": True}, ValueError, "fast_math"),
        ({"fast_math": 1}, TypeError, "fast_math must be a bool"),
        ({"pipeline": "standard"}, ValueError, "pipeline"),
        ({"kernel_config": BlockScaledKernelConfig(**(KERNEL | {"block_k": 256}))}, ValueError, "requires block_k=128"),
        ({"kernel_config": KERNEL}, TypeError, "kernel_config"),
        # two rules broken: the first is named
        ({"format": "x", "pipeline": "x"}, ValueError, "format"),
        ({"format": "nvfp4", "fast_math": True, "pipeline": "x"}, ValueError, "fast_math"),
    ],
)
def test_block_scaled_config_refused(changes, error, words):
    with pytest.raises(error, match=words):
        BlockScaledConfig(**changes)


KERNEL_INTS = [name for name, value in (KERNEL | {"num_warps": 8}).items() if not isinstance(value, bool)]


@pytest.mark.parametrize("name", KERNEL_INTS)
def test_kernel_config_sizes(name):
    with pytest.raises(ValueError, match=f"dimensions must be positive, got {name}=0"):
        BlockScaledKernelConfig(**(KERNEL | {name: 0}))
    with pytest.raises(TypeError, match=f"{name} must be an int"):
        BlockScaledKernelConfig(**(KERNEL | {name: True}))


def test_kernel_config_structure():
    assert BlockScaledKernelConfig(*KERNEL.values()) == BlockScaledKernelConfig(**KERNEL, num_warps=8)
    with pytest.raises(ValueError, match="num_ctas must be 1 or 2"):
        BlockScaledKernelConfig(**(KERNEL | {"num_ctas": 3}))
    with pytest.raises(ValueError, match="multiple of epilogue_subtile"):
        BlockScaledKernelConfig(**(KERNEL | {"epilogue_subtile": 3}))
    with pytest.raises(TypeError, match="swap_ab must be a bool"):
        BlockScaledKernelConfig(**(KERNEL | {"swap_ab": 1}))


def test_activation_record():
    assert make().activation_fn == shapes.Activation("swiglu", 1.702, 7.0)
    clamped = make(activation="swiglu_clamped", swiglu_alpha=1.5, swiglu_limit=5)
    assert clamped.activation_fn == shapes.Activation("swiglu_clamped", 1.5, 5.0)
    assert clamped.activation_fn.clamped


def test_config_hash_sees_every_field():
    config = make(inference=True)
    changed = {
        "num_local_input_tokens": 5,
        "hidden_dim": 160,
        "intermediate_dim": 160,
        "top_k": 1,
        "num_experts": 8,
        "max_moe_layers_per_activation_slot": 2,
        "device_scratch_capacity_factor": 1.0000001,
        "num_activation_slots": 2,
        "vmm": VmmConfig(),
        "num_sms": 2,
        "bf16_grouped_gemm_preset": "1cta1mma_bm64_bn128",
        "block_scaled": NVFP4,
        "activation": "swiglu_clamped",
        "swiglu_alpha": 1.5,
        "swiglu_limit": 5.0,
        "wgrad_dtype": torch.float32,
        "inference": False,
        "route_outputs": True,
    }
    variants = [config, *(replace(config, **{name: value}) for name, value in changed.items())]
    variants += [make(activation_slot_bytes=4096), make(activation_slot_capacity_factor=1.0)]
    variants += [replace(config, vmm=VmmConfig(2.0)), replace(config, block_scaled=BlockScaledConfig())]
    assert changed.keys() | {"activation_slot_bytes", "activation_slot_capacity_factor"} == {
        f.name for f in fields(Config)
    }
    hashes = [config_hash(c, 2) for c in variants] + [config_hash(config, 4), config_hash(config, 2, backend="triton")]
    assert len(set(hashes)) == len(hashes)
    assert all(0 <= h < 2**63 for h in hashes)
    assert config_hash(config, 2, a=1, b=2) == config_hash(make(inference=True), 2, b=2, a=1)


def test_config_hash_is_the_same_in_another_process():
    config = make(vmm=VmmConfig(2.0), wgrad_dtype=torch.float32, block_scaled=BlockScaledConfig())
    program = (
        "import torch\n"
        "from dist_moe.config import *\n"
        "c = Config(4, 128, 128, 2, 4, 1, vmm=VmmConfig(2.0), wgrad_dtype=torch.float32, "
        "block_scaled=BlockScaledConfig())\n"
        "print(config_hash(c, 2, scheme='dedup'))"
    )
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert int(out.stdout) == config_hash(config, 2, scheme="dedup")

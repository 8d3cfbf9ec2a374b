"""What a Context is made from: frozen dataclasses that check themselves once and need neither a GPU nor triton.

A field that counts something takes a real integer (numpy's too, but not True or 8.0) and is stored as an int; a
field that is a ratio takes any real number but a bool and is stored as a float.
"""

import hashlib
import json
import math
import numbers
import operator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal, get_args

import torch

from . import shapes

DIM_MULTIPLE = 32  # of hidden_dim and intermediate_dim: one MXFP8 scale block, and 64 bytes of a bf16 row

Bf16GroupedGemmPreset = Literal[
    "1cta1mma_bm64_bn128",
    "1cta1mma_bm64_bn256",
    "1cta1mma_bm128_bn128",
    "1cta1mma_bm128_bn256",
    "1cta2mma_bm256_bn256",
    "2cta1mma_bm256_bn256",
    "2cta2mma_bm512_bn256",
]


def as_int(where: str, name: str, value: Any) -> int:
    """value as an int; TypeError for a bool, a float or anything else that is not an integer."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{where}: {name} must be an int, got {value!r}; pass a whole number without a decimal point")
    return operator.index(value)


def as_float(where: str, name: str, value: Any) -> float:
    """value as a float; TypeError for a bool or anything that is not a real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where}: {name} must be a real number, got {value!r}; pass a float")
    try:
        return float(value)
    except OverflowError:  # an int beyond the range of a float
        return math.inf if value > 0 else -math.inf


def as_bool(where: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{where}: {name} must be a bool, got {value!r}; pass True or False")
    return value


def _set(record: Any, name: str, value: Any) -> None:
    object.__setattr__(record, name, value)


def _positive_factor(where: str, name: str, value: Any) -> float:
    factor = as_float(where, name, value)
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"{where}: {name} must be finite and positive, got {factor}; 1.0 is balanced routing")
    return factor


@dataclass(frozen=True)
class VmmConfig:
    """Scratch that reaches over into pinned host memory.

    Args:    total_scratch_capacity_factor: received rows / balanced rows that device and host scratch hold together;
             clamped to the number of ranks at planning.
             prefetch: build the mapping in a background thread; never changes the plan.
    Raises:  TypeError, ValueError.
    """

    total_scratch_capacity_factor: float = 16.0
    prefetch: bool = True

    def __post_init__(self):
        name = "total_scratch_capacity_factor"
        _set(self, name, _positive_factor("VmmConfig", name, self.total_scratch_capacity_factor))
        as_bool("VmmConfig", "prefetch", self.prefetch)


class BlockScaledFormat(StrEnum):
    """Number formats with one scale for a block of values."""

    MXFP8_E4M3 = "mxfp8_e4m3"
    NVFP4 = "nvfp4"


@dataclass(frozen=True)
class BlockScaledKernelConfig:
    """Tile and pipeline sizes of the block-scaled grouped GEMM: a hint for speed that changes no result.

    Only the structure is checked here; whether it fits a device shows when the kernel is compiled.
    """

    num_ctas: int
    block_m: int
    block_n: int
    block_k: int
    num_smem_buffers: int
    num_c_stages: int
    num_tmem_buffers: int
    num_tile_buffers: int
    epilogue_subtile: int
    overlapping_accum: bool
    swap_ab: bool
    kloop_unroll: int
    num_warps: int = 8
    static_scheduler: bool = False

    def __post_init__(self):
        where = "BlockScaledKernelConfig"
        for name in _KERNEL_SIZES:
            _set(self, name, as_int(where, name, getattr(self, name)))
        for name in ("overlapping_accum", "swap_ab", "static_scheduler"):
            as_bool(where, name, getattr(self, name))
        for name in _KERNEL_SIZES:
            if getattr(self, name) <= 0:
                raise ValueError(f"{where}: dimensions must be positive, got {name}={getattr(self, name)}")
        if self.num_ctas not in (1, 2):
            raise ValueError(f"{where}: num_ctas must be 1 or 2, got {self.num_ctas}")
        if self.block_n % self.epilogue_subtile:
            raise ValueError(
                f"{where}: block_n must be a multiple of epilogue_subtile, "
                f"got block_n={self.block_n}, epilogue_subtile={self.epilogue_subtile}"
            )


_KERNEL_SIZES = tuple(name for name, field in BlockScaledKernelConfig.__dataclass_fields__.items() if field.type is int)


@dataclass(frozen=True)
class BlockScaledConfig:
    """Block-scaled arithmetic of the experts.

    Args:    format: a BlockScaledFormat or its string value.
             fast_math: approximate sigmoid in the MXFP8 activation.
             pipeline: "staged" or "mega", equal in numbers.
             kernel_config: sizes of the grouped GEMM; its block_k must be 128.
    Raises:  TypeError, ValueError.
    """

    format: BlockScaledFormat = BlockScaledFormat.MXFP8_E4M3
    fast_math: bool = False
    pipeline: Literal["staged", "mega"] = "staged"
    kernel_config: BlockScaledKernelConfig | None = None

    def __post_init__(self):
        where = "BlockScaledConfig"
        if self.format not in tuple(BlockScaledFormat):
            known = ", ".join(BlockScaledFormat)
            raise ValueError(f"{where}: unsupported block-scaled format {self.format!r}; use one of {known}")
        _set(self, "format", BlockScaledFormat(self.format))
        if as_bool(where, "fast_math", self.fast_math) and self.format is BlockScaledFormat.NVFP4:
            raise ValueError(f"{where}: fast_math is for MXFP8 only, got format=nvfp4; leave it False")
        if self.pipeline not in ("staged", "mega"):
            raise ValueError(f"{where}: pipeline must be 'staged' or 'mega', got {self.pipeline!r}")
        if self.kernel_config is None:
            return
        if not isinstance(self.kernel_config, BlockScaledKernelConfig):
            raise TypeError(f"{where}: kernel_config must be a BlockScaledKernelConfig, got {self.kernel_config!r}")
        if self.kernel_config.block_k != 128:
            raise ValueError(f"{where}: {self.format} requires block_k=128, got {self.kernel_config.block_k}")


@dataclass(frozen=True)
class Config:
    """The static shape, memory policy and arithmetic of one Context. The same on every rank.

    Args:    num_local_input_tokens: the most tokens a rank passes in one call; a call may pass fewer, or none.
             hidden_dim, intermediate_dim: D and F, multiples of 32.  top_k: experts of a token.
             num_experts: over all ranks, at most 32767.
             max_moe_layers_per_activation_slot: layers whose saved state shares one activation slot.
             device_scratch_capacity_factor: received rows / balanced rows that device scratch holds.
             activation_slot_bytes or activation_slot_capacity_factor: the size of a slot, exact or as a step from
             the minimum (0.0) to saving everything under balanced routing (1.0); neither means the minimum.
             num_activation_slots: independent slots; inference plans none whatever is written here.
             vmm: scratch beyond the device.  num_sms: programs of a persistent kernel.
             bf16_grouped_gemm_preset: a hint for speed.  block_scaled: None is bf16.
             activation: "swiglu" or "swiglu_clamped" with swiglu_alpha and swiglu_limit.
             wgrad_dtype: of the weight gradients; None follows the weight. For fp32 gradients of a bf16 parameter
             set its grad_dtype too, torch rounds them to the parameter's dtype otherwise.
             inference: no backward, so nothing is saved.
             route_outputs: room for every route's output, which calls with experts_output_postprocess need where top_k
             is larger than the number of ranks.
    Raises:  TypeError, ValueError; the first rule broken, in the order of __post_init__.
    """

    num_local_input_tokens: int
    hidden_dim: int
    intermediate_dim: int
    top_k: int
    num_experts: int
    max_moe_layers_per_activation_slot: int
    device_scratch_capacity_factor: float = 1.0
    activation_slot_bytes: int | None = None
    activation_slot_capacity_factor: float | None = None
    num_activation_slots: int = 1
    vmm: VmmConfig | None = None
    num_sms: int | None = None
    bf16_grouped_gemm_preset: Bf16GroupedGemmPreset | None = None
    block_scaled: BlockScaledConfig | None = None
    activation: Literal["swiglu", "swiglu_clamped"] = "swiglu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    wgrad_dtype: torch.dtype | None = None
    inference: bool = False
    route_outputs: bool = False

    def __post_init__(self):
        self._check_shape()
        self._check_slots()
        name = "device_scratch_capacity_factor"
        _set(self, name, _positive_factor("Config", name, self.device_scratch_capacity_factor))
        self._check_execution()
        self._check_formats()

    @property
    def activation_fn(self) -> shapes.Activation:
        """The gate as the record that the ops take."""
        return shapes.Activation(self.activation, self.swiglu_alpha, self.swiglu_limit)

    def _as_int(self, name: str) -> int:
        value = as_int("Config", name, getattr(self, name))
        _set(self, name, value)
        return value

    def _as_positive_int(self, name: str) -> int:
        value = self._as_int(name)
        if value <= 0:
            raise ValueError(f"Config: {name} must be positive, got {value}")
        return value

    def _check_shape(self):
        sizes = ("num_local_input_tokens", "hidden_dim", "intermediate_dim", "top_k")
        for name in sizes:
            self._as_int(name)
        for name in sizes:
            self._as_positive_int(name)
        for name in ("hidden_dim", "intermediate_dim"):
            value = getattr(self, name)
            if value % DIM_MULTIPLE:
                padded = shapes.align(value, DIM_MULTIPLE)
                raise ValueError(
                    f"Config: {name} must be a multiple of {DIM_MULTIPLE}, got {value}; pad the weights to {padded}"
                )
        num_experts = self._as_positive_int("num_experts")
        if num_experts > shapes.MAX_EXPERTS:
            raise ValueError(
                f"Config: num_experts must be at most {shapes.MAX_EXPERTS}, got {num_experts}; "
                "expert ids travel between ranks as int16"
            )
        if self.top_k > num_experts:
            raise ValueError(f"Config: top_k cannot exceed num_experts, got {self.top_k} of {num_experts}")
        self._as_positive_int("max_moe_layers_per_activation_slot")

    def _check_slots(self):
        if self.activation_slot_bytes is not None and self._as_int("activation_slot_bytes") < 0:
            raise ValueError(f"Config: activation_slot_bytes must not be negative, got {self.activation_slot_bytes}")
        if self.activation_slot_capacity_factor is not None:
            name = "activation_slot_capacity_factor"
            factor = as_float("Config", name, self.activation_slot_capacity_factor)
            if not (math.isfinite(factor) and factor >= 0):
                raise ValueError(f"Config: {name} must be finite and not negative, got {factor}")
            _set(self, name, factor)
        sized_by = [
            name
            for name in ("activation_slot_bytes", "activation_slot_capacity_factor")
            if getattr(self, name) is not None
        ]
        if len(sized_by) == 2:
            raise ValueError(f"Config: {sized_by[0]} and {sized_by[1]} are mutually exclusive; set one of them")
        inference = as_bool("Config", "inference", self.inference)
        num_slots = self._as_int("num_activation_slots")
        if num_slots < 0:
            raise ValueError(f"Config: num_activation_slots must not be negative, got {num_slots}")
        if num_slots == 0 and not inference:
            raise ValueError("Config: training needs at least one activation slot, got num_activation_slots=0")
        if inference and sized_by:
            raise ValueError(f"Config: inference does not retain saved activations; leave {sized_by[0]} unset")

    def _check_execution(self):
        as_bool("Config", "route_outputs", self.route_outputs)
        if self.num_sms is not None:
            self._as_positive_int("num_sms")
        presets = get_args(Bf16GroupedGemmPreset)
        if self.bf16_grouped_gemm_preset is not None and self.bf16_grouped_gemm_preset not in presets:
            raise ValueError(
                f"Config: bf16_grouped_gemm_preset must be a supported BF16 preset, got "
                f"{self.bf16_grouped_gemm_preset!r}; use None or one of {', '.join(presets)}"
            )
        if self.wgrad_dtype not in (None, torch.bfloat16, torch.float32):
            raise TypeError(f"Config: wgrad_dtype must be None, bfloat16 or float32, got {self.wgrad_dtype!r}")
        if self.activation not in ("swiglu", "swiglu_clamped"):
            raise ValueError(f"Config: activation must be 'swiglu' or 'swiglu_clamped', got {self.activation!r}")
        if self.activation == "swiglu_clamped":
            for name in ("swiglu_alpha", "swiglu_limit"):
                value = as_float("Config", name, getattr(self, name))
                if not (math.isfinite(value) and value > 0):
                    raise ValueError(f"Config: {name} must be a finite positive number, got {value}")
                _set(self, name, value)

    def _check_formats(self):
        if self.vmm is not None and not isinstance(self.vmm, VmmConfig):
            raise TypeError(f"Config: vmm must be a VmmConfig or None, got {self.vmm!r}")
        if self.block_scaled is None:
            return
        if not isinstance(self.block_scaled, BlockScaledConfig):
            raise TypeError(f"Config: block_scaled must be a BlockScaledConfig or None, got {self.block_scaled!r}")
        if self.block_scaled.format is BlockScaledFormat.NVFP4 and not self.inference:
            raise ValueError("Config: NVFP4 is inference-only, got inference=False; train with MXFP8 or bf16")


def config_hash(config: Config, ep_size: int, **extra: int | str) -> int:
    """63 bits that differ where two ranks' configurations differ; equal in every process, on every machine.

    Args:    extra: whatever else has to agree, by name (scheme, backend, ...).
    """
    content = {"config": asdict(config), "ep_size": ep_size, "extra": extra}
    text = json.dumps(content, sort_keys=True, default=str)  # str for dtypes, the one kind json does not know
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

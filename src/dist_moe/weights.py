"""Expert weights quantised once, ahead of the calls that use them.

Block-scaled arithmetic is not in this release: the inputs are checked as they will be, then NotImplementedError.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import DIM_MULTIPLE, BlockScaledConfig, BlockScaledFormat, Config, as_bool


@dataclass(frozen=True, init=False, eq=False, repr=False)
class PreparedWeight:
    """A quantised weight with its scales; made by prepare_block_scaled_weight() only.

    source is the bf16 weight, where gradients land. fprop_* are the operand of the forward, dgrad_* that of the
    gradient of x (None if prepared for inference), global_scale and its inverse belong to NVFP4 (None for MXFP8).
    """

    source: Tensor
    format: BlockScaledFormat
    fprop_data: Tensor
    fprop_scale: Tensor
    dgrad_data: Tensor | None
    dgrad_scale: Tensor | None
    global_scale: Tensor | None
    global_scale_inv: Tensor | None

    def __init__(self, *args, **kwargs):
        raise TypeError("PreparedWeight: cannot be constructed directly; use prepare_block_scaled_weight()")

    def storage_tensors(self) -> tuple[Tensor, ...]:
        """The owned tensors, one for each storage, in field order; without source.

        Storages are told apart by identity, not by address, so that the answer stands when they are resized to 0.
        """
        owned = (
            self.fprop_data,
            self.fprop_scale,
            self.dgrad_data,
            self.dgrad_scale,
            self.global_scale,
            self.global_scale_inv,
        )
        by_storage = {}
        for tensor in owned:
            if tensor is not None:
                by_storage.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tuple(by_storage.values())


def _make_prepared(**values) -> PreparedWeight:
    prepared = object.__new__(PreparedWeight)
    for name in PreparedWeight.__dataclass_fields__:
        object.__setattr__(prepared, name, values[name])
    return prepared


def prepare_block_scaled_weight(
    weight: Tensor,
    config: BlockScaledConfig | Config,
    *,
    inference: bool = False,
    out: PreparedWeight | None = None,
) -> PreparedWeight:
    """Quantise expert weights into the operands of block-scaled execution. Not differentiable, not collective.

    Args:    weight: bf16 [G, N, K], contiguous: W13 as [L, 2F, D] or W2 as [L, D, F].
             config: the block-scaled configuration, or a Config that has one.
             inference: MXFP8 only: 1x32 blocks and no operand for backward; NVFP4 is always for inference.
             out: a weight prepared for MXFP8 training, whose storages are overwritten.
    Raises:  TypeError, ValueError; NotImplementedError for everything that passes the checks, in this release.
    """
    format = _check_format(config)
    _check_weight(weight)
    as_bool("prepare_block_scaled_weight", "inference", inference)
    if out is not None:
        _check_out(out, weight, format, inference)
    raise NotImplementedError(
        f"prepare_block_scaled_weight: block-scaled weights ({format}) are not in this release; "
        "pass the bf16 weights to routed_experts"
    )


def _check_format(config: BlockScaledConfig | Config) -> BlockScaledFormat:
    if not isinstance(config, BlockScaledConfig | Config):
        raise TypeError(
            f"prepare_block_scaled_weight: config must be a BlockScaledConfig or a Config, got {type(config).__name__}"
        )
    block_scaled = config.block_scaled if isinstance(config, Config) else config
    if block_scaled is None:
        raise ValueError("prepare_block_scaled_weight: config.block_scaled is None; set it to a BlockScaledConfig")
    return block_scaled.format


def _check_weight(weight: Tensor) -> None:
    where = "prepare_block_scaled_weight: weight"
    if not isinstance(weight, Tensor):
        raise TypeError(f"{where} must be a tensor, got {type(weight).__name__}")
    if weight.dim() != 3:
        raise ValueError(f"{where} must be 3-D [experts, rows, columns], got shape {list(weight.shape)}")
    if weight.dtype is not torch.bfloat16:
        raise TypeError(f"{where} must be bfloat16, got {weight.dtype}; call .bfloat16()")
    if not weight.is_contiguous():
        raise ValueError(f"{where} must be contiguous, got strides {weight.stride()}; call .contiguous()")
    if any(size % DIM_MULTIPLE for size in weight.shape[1:]):
        raise ValueError(f"{where} must have rows and columns a multiple of {DIM_MULTIPLE}, got {list(weight.shape)}")


def _check_out(out: PreparedWeight, weight: Tensor, format: BlockScaledFormat, inference: bool) -> None:
    where = "prepare_block_scaled_weight: out"
    if not isinstance(out, PreparedWeight):
        raise TypeError(f"{where} must be a PreparedWeight, got {type(out).__name__}")
    if format is not BlockScaledFormat.MXFP8_E4M3 or inference:
        purpose = "inference" if inference else "training"
        raise ValueError(f"{where} refills MXFP8 weights of training only, got {format} for {purpose}; leave it None")
    if out.format is not format:
        raise ValueError(f"{where} must hold {format}, got {out.format}")
    if out.dgrad_data is None or out.dgrad_scale is None:
        raise ValueError(f"{where} must hold a dgrad operand, got a weight prepared for inference")
    if out.source.shape != weight.shape or out.source.dtype is not weight.dtype:
        raise ValueError(
            f"{where} must come from a weight like this one, {list(weight.shape)} {weight.dtype}, "
            f"got {list(out.source.shape)} {out.source.dtype}"
        )

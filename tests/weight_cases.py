"""Weights to prepare, what the oracle makes of them, and every kind of prepared weight."""

import pytest
import torch

from dist_moe import reference_formats as oracle
from dist_moe.config import BlockScaledConfig
from dist_moe.formats import MXFP8_E4M3, by_name
from dist_moe.quantized import QuantizedWeights
from dist_moe.weights import PreparedWeight, _make_prepared

MXFP8, NVFP4 = BlockScaledConfig(), BlockScaledConfig("nvfp4")


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def prepared(source=None, **changes) -> PreparedWeight:
    """What an MXFP8 training weight of [2, 64, 32] looks like."""
    data = torch.zeros(2, 64, 32, dtype=torch.float8_e4m3fn)
    values = {
        "source": bf16(2, 64, 32) if source is None else source,
        "format": MXFP8.format,
        "fprop_data": data,
        "fprop_scale": torch.zeros(128, 1, dtype=torch.uint8),
        "dgrad_data": data,
        "dgrad_scale": torch.zeros(64, 2, dtype=torch.uint8),
        "global_scale": None,
        "global_scale_inv": None,
    }
    return _make_prepared(**(values | changes))


KINDS = [
    pytest.param(MXFP8, False, id="MXFP8 training"),
    pytest.param(MXFP8, True, id="MXFP8 inference"),
    pytest.param(NVFP4, False, id="NVFP4"),
]
EACH_KIND = pytest.mark.parametrize("config, inference", KINDS)


def random_weight(device, *shape) -> torch.Tensor:
    return torch.randn(shape or (2, 96, 160)).bfloat16().to(device)


def oracle_of(source, config, inference) -> QuantizedWeights:
    format = by_name(config.format)
    return oracle.quantize_weights(source.cpu(), format=format, square=format is MXFP8_E4M3 and not inference)


def quantized(weight: PreparedWeight) -> QuantizedWeights:
    return QuantizedWeights(
        weight.fprop_data, weight.fprop_scale, weight.dgrad_scale, weight.global_scale, weight.global_scale_inv
    )

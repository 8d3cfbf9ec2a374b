import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_moe.config import BlockScaledConfig, Config
from dist_moe.weights import PreparedWeight, _make_prepared, prepare_block_scaled_weight

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


def test_no_direct_construction():
    with pytest.raises(TypeError, match=r"use prepare_block_scaled_weight\(\)"):
        PreparedWeight()
    with pytest.raises(TypeError, match=r"use prepare_block_scaled_weight\(\)"):
        PreparedWeight(source=bf16(2, 64, 32), format=MXFP8.format)


def test_frozen():
    with pytest.raises(AttributeError):
        prepared().source = None
    assert copy.copy(weight := prepared()).source is weight.source


def test_storage_tensors_name_each_storage_once():
    weight = prepared()
    expected = (weight.fprop_data, weight.fprop_scale, weight.dgrad_scale)  # dgrad_data is fprop_data
    assert [t.data_ptr() for t in weight.storage_tensors()] == [t.data_ptr() for t in expected]
    view = prepared(fprop_data=weight.fprop_data, dgrad_data=weight.fprop_data.view(-1))  # another tensor, same storage
    assert len(view.storage_tensors()) == 3


def test_storage_tensors_stand_when_storages_are_resized_to_zero():
    weight = prepared(global_scale=torch.ones(2), global_scale_inv=torch.ones(2))
    before = weight.storage_tensors()
    for tensor in before:
        tensor.untyped_storage().resize_(0)
    after = weight.storage_tensors()
    assert len(after) == 5  # all addresses are 0 now
    assert all(a is b for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    "weight, config, kwargs, error, words",
    [
        (bf16(2, 64, 32), None, {}, TypeError, "config must be a BlockScaledConfig"),
        (bf16(2, 64, 32), Config(4, 32, 32, 1, 2, 1), {}, ValueError, "config.block_scaled is None"),
        (None, MXFP8, {}, TypeError, "weight must be a tensor"),
        (bf16(64, 32), MXFP8, {}, ValueError, "must be 3-D"),
        (bf16(2, 2, 32, 32), MXFP8, {}, ValueError, "must be 3-D"),  # the gate axis is not taken
        (torch.zeros(2, 64, 32), MXFP8, {}, TypeError, "must be bfloat16, got torch.float32"),
        (bf16(2, 32, 64).mT, MXFP8, {}, ValueError, "must be contiguous"),
        (bf16(2, 64, 48), MXFP8, {}, ValueError, "multiple of 32"),
        (bf16(2, 48, 64), NVFP4, {}, ValueError, "multiple of 32"),
        (bf16(2, 64, 32), MXFP8, {"inference": 1}, TypeError, "inference must be a bool"),
        # two rules broken: the first is named
        (torch.zeros(64, 33), MXFP8, {}, ValueError, "must be 3-D"),
        (torch.zeros(2, 64, 33), MXFP8, {}, TypeError, "must be bfloat16"),
        (bf16(2, 33, 64).mT, MXFP8, {}, ValueError, "must be contiguous"),
    ],
)
def test_refused(weight, config, kwargs, error, words):
    with pytest.raises(error, match=words):
        prepare_block_scaled_weight(weight, config, **kwargs)


@pytest.mark.parametrize(
    "out, config, inference, error, words",
    [
        (bf16(2, 64, 32), MXFP8, False, TypeError, "out must be a PreparedWeight"),
        (prepared(), MXFP8, True, ValueError, "training only"),
        (prepared(), NVFP4, False, ValueError, "training only"),
        (prepared(format=NVFP4.format), MXFP8, False, ValueError, "must hold mxfp8_e4m3, got nvfp4"),
        (prepared(dgrad_data=None, dgrad_scale=None), MXFP8, False, ValueError, "must hold a dgrad operand"),
        (prepared(source=bf16(2, 32, 64)), MXFP8, False, ValueError, r"got \[2, 32, 64\]"),
        (prepared(source=torch.zeros(2, 64, 32)), MXFP8, False, ValueError, "got .* torch.float32"),
    ],
)
def test_out_refused(out, config, inference, error, words):
    with pytest.raises(error, match=words):
        prepare_block_scaled_weight(bf16(2, 64, 32), config, inference=inference, out=out)


@pytest.mark.parametrize(
    "config, kwargs",
    [
        (MXFP8, {}),
        (MXFP8, {"inference": True}),
        (MXFP8, {"out": prepared()}),
        (NVFP4, {"inference": True}),
        (NVFP4, {}),  # the flag is ignored
        (Config(4, 32, 32, 1, 2, 1, block_scaled=MXFP8), {}),
    ],
)
def test_not_in_this_release(config, kwargs):
    with pytest.raises(NotImplementedError, match="block-scaled weights"):
        prepare_block_scaled_weight(bf16(2, 64, 32), config, **kwargs)


def test_checks_read_no_data():
    with FakeTensorMode(), pytest.raises(NotImplementedError, match="block-scaled weights"):
        prepare_block_scaled_weight(torch.empty(2, 128, 256, dtype=torch.bfloat16), MXFP8)

"""Prepared weights: equal to the oracle, refilled in place, saved and loaded."""

import copy

import pytest
import torch
from tests.format_cases import assert_same_bits
from tests.weight_cases import (
    EACH_KIND,
    MXFP8,
    NVFP4,
    bf16,
    oracle_of,
    prepared,
    quantized,
    random_weight,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_moe import reference_formats as oracle
from dist_moe.config import Config
from dist_moe.formats import by_name
from dist_moe.planner import prepared_weight_bytes
from dist_moe.weights import PreparedWeight, prepare_block_scaled_weight

# Where a weight is not finite, numpy warns of what is meant to happen.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


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
        (bf16(2, 0, 32), MXFP8, {}, ValueError, r"weight must have .* a positive multiple of 32, got \[2, 0, 32\]"),
        (bf16(2, 64, 0), NVFP4, {}, ValueError, r"weight must have .* a positive multiple of 32, got \[2, 64, 0\]"),
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
        (prepared(), MXFP8, True, ValueError, "prepared for inference, got one prepared for training"),
        (prepared(), NVFP4, False, ValueError, "must hold nvfp4, got mxfp8_e4m3"),
        (prepared(format=NVFP4.format), MXFP8, False, ValueError, "must hold mxfp8_e4m3, got nvfp4"),
        (prepared(dgrad_data=None, dgrad_scale=None), MXFP8, False, ValueError, "prepared for training, got one"),
        (prepared(source=bf16(2, 32, 64)), MXFP8, False, ValueError, r"got \[2, 32, 64\]"),
        (prepared(source=torch.zeros(2, 64, 32)), MXFP8, False, ValueError, "got .* torch.float32"),
    ],
)
def test_out_refused(out, config, inference, error, words):
    with pytest.raises(error, match=words):
        prepare_block_scaled_weight(bf16(2, 64, 32), config, inference=inference, out=out)


def test_out_without_its_storages_is_refused(device):
    out = prepare_block_scaled_weight(source := random_weight(device), MXFP8)
    out.fprop_scale.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="resize them back first"):
        prepare_block_scaled_weight(source, MXFP8, out=out)


@EACH_KIND
def test_prepared_is_what_the_oracle_says(config, inference, device):
    source = random_weight(device)
    weight = prepare_block_scaled_weight(source.requires_grad_(), config, inference=inference)
    want = oracle_of(source.detach(), config, inference)
    assert_same_bits(quantized(weight), want)
    assert weight.source is source and weight.format is config.format
    assert all(
        not t.requires_grad and t.grad_fn is None and t.device == source.device for t in weight.storage_tensors()
    )
    back = weight.dequantize()
    assert back.dtype == torch.float32 and back.shape == source.shape
    assert torch.equal(back.cpu(), oracle.dequantize_weights(want, format=by_name(config.format)))


def test_the_shapes_of_mxfp8_training(device):
    weight = prepare_block_scaled_weight(
        random_weight(device, 2, 128, 256), Config(4, 256, 64, 1, 2, 1, block_scaled=MXFP8)
    )
    assert weight.fprop_data.dtype == torch.float8_e4m3fn and weight.fprop_data.shape == (2, 128, 256)
    assert weight.fprop_scale.dtype == weight.dgrad_scale.dtype == torch.float8_e8m0fnu
    assert weight.fprop_scale.shape == (2 * 128, 256 // 32) and weight.dgrad_scale.shape == (2 * 256, 128 // 32)
    assert weight.dgrad_data is weight.fprop_data
    assert weight.global_scale is None and weight.global_scale_inv is None


def test_the_shapes_of_inference(device):
    mxfp8 = prepare_block_scaled_weight(random_weight(device, 2, 128, 256), MXFP8, inference=True)
    assert mxfp8.fprop_scale.shape == (256, 8) and mxfp8.dgrad_data is None and mxfp8.dgrad_scale is None
    nvfp4 = prepare_block_scaled_weight(random_weight(device, 2, 128, 256), NVFP4)
    assert nvfp4.fprop_data.dtype == torch.float4_e2m1fn_x2 and nvfp4.fprop_data.shape == (2, 128, 128)
    assert nvfp4.fprop_scale.dtype == torch.float8_e4m3fn and nvfp4.fprop_scale.shape == (256, 16)
    assert nvfp4.dgrad_data is None and nvfp4.dgrad_scale is None
    assert nvfp4.global_scale.dtype == torch.float32 and nvfp4.global_scale.shape == (2,)
    assert torch.equal(nvfp4.global_scale_inv, torch.reciprocal(nvfp4.global_scale))


@pytest.mark.parametrize("D, F", [(256, 128), (96, 160)], ids=["whole atoms", "padded atoms"])
@EACH_KIND
def test_bytes_are_those_of_the_plan(config, inference, D, F, device):
    plan = Config(4, D, F, 1, 3, 1, block_scaled=config, inference=inference or config is NVFP4)
    shapes = {"w13": (3, 2 * F, D), "w2": (3, D, F)}
    sizes = {}
    for name, shape in shapes.items():
        weight = prepare_block_scaled_weight(random_weight(device, *shape), plan, inference=inference)
        values, *scales = (t.numel() * t.element_size() for t in weight.storage_tensors())
        sizes |= {f"{name}_values": values, f"{name}_scales": sum(scales)}
    assert sizes == prepared_weight_bytes(plan, 1)


@EACH_KIND
def test_out_is_refilled_in_place_and_returned(config, inference, device):
    first, second = random_weight(device), 3 * random_weight(device)
    weight = prepare_block_scaled_weight(first, config, inference=inference)
    tensors = weight.storage_tensors()
    addresses = [t.data_ptr() for t in tensors]
    assert prepare_block_scaled_weight(second, config, inference=inference, out=weight) is weight
    assert weight.source is second
    assert all(a is b for a, b in zip(weight.storage_tensors(), tensors, strict=True))
    assert [t.data_ptr() for t in tensors] == addresses
    assert_same_bits(quantized(weight), oracle_of(second, config, inference))
    weight.require_filled()


@EACH_KIND
def test_an_expert_of_zeros(config, inference, device):
    source = random_weight(device)
    source[1] = 0
    back = prepare_block_scaled_weight(source, config, inference=inference).dequantize()
    assert not back[1].any() and back[0].any() and back.isfinite().all()


@EACH_KIND
def test_nan_in_a_weight_is_not_lost(config, inference, device):
    source = random_weight(device)
    source[1, 5, 7] = float("nan")
    broken = prepare_block_scaled_weight(source, config, inference=inference).dequantize().isnan()
    assert broken[1, 5, 7] and not broken[0].any()
    num_broken = {(MXFP8, False): 32 * 32, (MXFP8, True): 32, (NVFP4, False): source[1].numel()}[config, inference]
    assert broken.sum() == num_broken  # its block, or in NVFP4 its expert


# Saved and loaded


@EACH_KIND
def test_saved_and_loaded(config, inference, device, tmp_path):
    source = random_weight(device)
    weight = prepare_block_scaled_weight(source, config, inference=inference)
    torch.save(weight.state_dict(), tmp_path / "weight.pt")
    other = prepare_block_scaled_weight(torch.zeros_like(source), config, inference=inference)
    addresses = [t.data_ptr() for t in other.storage_tensors()]
    other.load_state_dict(torch.load(tmp_path / "weight.pt", weights_only=True))
    assert_same_bits(quantized(other), quantized(weight))
    assert [t.data_ptr() for t in other.storage_tensors()] == addresses
    assert torch.equal(other.dequantize(), weight.dequantize())


def test_load_refuses_other_kinds(device):
    training, inference, nvfp4 = (
        prepare_block_scaled_weight(random_weight(device), config, inference=flag)
        for config, flag in ((MXFP8, False), (MXFP8, True), (NVFP4, True))
    )
    with pytest.raises(ValueError, match="names must be fprop_data, fprop_scale, dgrad_scale, got fprop_data, fprop_s"):
        training.load_state_dict(inference.state_dict())
    with pytest.raises(ValueError, match="names must be"):
        inference.load_state_dict(nvfp4.state_dict())
    other = prepare_block_scaled_weight(random_weight(device, 2, 96, 192), MXFP8)
    with pytest.raises(
        ValueError, match=r"fprop_data must be torch.float8_e4m3fn \[2, 96, 160\], got .* \[2, 96, 192\]"
    ):
        training.load_state_dict(other.state_dict())
    state = training.state_dict()
    with pytest.raises(ValueError, match="fprop_scale must be"):
        training.load_state_dict(state | {"fprop_scale": state["fprop_scale"].view(torch.uint8)})
    training.fprop_scale.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storages were freed"):
        training.load_state_dict(state | {"fprop_scale": other.fprop_scale[:, :8].contiguous()[:256]})


@EACH_KIND
def test_copies_are_filled_if_the_original_is(config, inference, device, tmp_path):
    weight = prepare_block_scaled_weight(random_weight(device), config, inference=inference)
    torch.save(weight, tmp_path / "weight.pt")
    copies = [copy.copy(weight), copy.deepcopy(weight), torch.load(tmp_path / "weight.pt", weights_only=False)]
    for other in copies:
        assert torch.equal(other.dequantize(), weight.dequantize())
        assert (other.dgrad_data is other.fprop_data) == (weight.dgrad_data is weight.fprop_data)
    weight.source.add_(1)
    with pytest.raises(RuntimeError, match="never filled"):
        copy.deepcopy(weight).require_filled()


# Tracing


def test_it_traces_without_data():
    with FakeTensorMode():
        source = torch.empty(2, 128, 256, dtype=torch.bfloat16)
        weight = prepare_block_scaled_weight(source, MXFP8)
        assert weight.fprop_data.shape == source.shape and weight.dgrad_data is weight.fprop_data
        assert weight.fprop_scale.shape == (256, 8) and weight.dgrad_scale.shape == (512, 4)
        for config, inference in ((MXFP8, False), (MXFP8, True), (NVFP4, False)):
            weight = prepare_block_scaled_weight(source, config, inference=inference)
            assert prepare_block_scaled_weight(source, config, inference=inference, out=weight) is weight
            weight.require_filled()


def test_the_ops_pass_opcheck(device):
    source = random_weight(device, 1, 32, 64)
    tests = ("test_autograd_registration", "test_faketensor")
    op = torch.ops.dist_moe.prepare_mxfp8_weight.default
    torch.library.opcheck(op, (source,), test_utils=("test_schema", *tests))
    for config, inference in ((MXFP8, False), (MXFP8, True), (NVFP4, False)):
        weight = prepare_block_scaled_weight(source, config, inference=inference)
        outputs = [t for t in quantized(weight) if t is not None]
        square = weight.dgrad_scale is not None
        args = (source, outputs, str(config.format), square)
        op = torch.ops.dist_moe.fill_prepared_weight.default
        torch.library.opcheck(op, args, test_utils=tests)  # test_schema multiplies e4m3 arguments, which torch cannot


def test_no_triton_on_a_cpu_means_the_oracle(monkeypatch, device):
    """Equal bits whoever fills it."""
    source = random_weight(device)
    weight = prepare_block_scaled_weight(source, NVFP4)
    monkeypatch.setattr("dist_moe.registry._triton_problem", lambda: "triton is not installed")
    other = prepare_block_scaled_weight(source.cpu(), NVFP4)
    assert_same_bits(quantized(other), quantized(weight))


@pytest.mark.gpu
@EACH_KIND
def test_real_weights(config, inference, device):
    source = random_weight(device, 8, 4096, 2880)
    weight = prepare_block_scaled_weight(source, config, inference=inference)
    format = by_name(config.format)
    square = weight.dgrad_scale is not None
    assert_same_bits(quantized(weight), oracle.quantize_weights(source, format=format, square=square))

"""Prepared weights that do not hold what their source holds: never used, and filled again."""

import copy
import weakref

import pytest
import torch
from tests.format_cases import assert_same_bits
from tests.pipeline_stages import one_process
from tests.weight_cases import EACH_KIND, MXFP8, NVFP4, oracle_of, prepared, quantized, random_weight
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dist_moe.weights import PreparedWeight, prepare_block_scaled_weight


def test_used_before_it_was_ever_filled():
    for use in (PreparedWeight.require_filled, PreparedWeight.dequantize, PreparedWeight.state_dict):
        with pytest.raises(RuntimeError, match=r"never filled; call prepare_block_scaled_weight\(weight, config, out="):
            use(prepared())


def test_a_fill_that_failed_leaves_it_unfilled(device, monkeypatch):
    weight = prepare_block_scaled_weight(source := random_weight(device), MXFP8)
    monkeypatch.setattr("dist_moe.weights._quantize", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_block_scaled_weight(random_weight(device), MXFP8, out=weight)
    assert weight.source is source
    with pytest.raises(RuntimeError, match="never filled"):
        weight.require_filled()


@EACH_KIND
def test_used_with_freed_storages_then_refilled(config, inference, device):
    weight = prepare_block_scaled_weight(source := random_weight(device), config, inference=inference)
    want = weight.dequantize()
    sizes = [t.untyped_storage().nbytes() for t in weight.storage_tensors()]
    for tensor in weight.storage_tensors():
        tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storages were freed"):
        weight.require_filled()
    taken = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]  # not the same addresses again
    for tensor, size in zip(weight.storage_tensors(), sizes, strict=True):
        tensor.untyped_storage().resize_(size)
    assert len(taken) == len(sizes)
    prepare_block_scaled_weight(source, config, inference=inference, out=weight)
    assert torch.equal(weight.dequantize(), want)


def test_used_with_storages_that_moved(device):
    weight = prepare_block_scaled_weight(random_weight(device), MXFP8)
    weight.fprop_scale.set_(torch.zeros_like(weight.fprop_scale))
    with pytest.raises(RuntimeError, match="freed or replaced"):
        weight.require_filled()


def test_a_source_that_was_changed_is_stale(device):
    source = torch.nn.Parameter(random_weight(device))
    weight = prepare_block_scaled_weight(source, MXFP8)
    weight.require_filled()
    source.sum().backward()
    weight.require_filled()  # a gradient changes nothing
    torch.optim.SGD([source], lr=1.0).step()
    with pytest.raises(RuntimeError, match="source was changed since it was prepared"):
        weight.require_filled()
    prepare_block_scaled_weight(source, MXFP8, out=weight).require_filled()


FUSED = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]
STALE = pytest.raises(RuntimeError, match="source was changed since it was prepared")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("optimizer", FUSED)
def test_a_fused_step_makes_it_stale_until_it_is_refilled(optimizer, compiled):
    source, other = (torch.nn.Parameter(random_weight("cpu")) for _ in range(2))
    weight, others = prepare_block_scaled_weight(source, MXFP8), prepare_block_scaled_weight(other, MXFP8)
    step = optimizer([source, other], lr=0.1, fused=True).step
    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, backend="aot_eager")
    source.grad = torch.ones_like(source)
    for _ in range(2):
        step()
        with STALE:
            weight.require_filled()
        prepare_block_scaled_weight(source, MXFP8, out=weight).require_filled()
        assert_same_bits(quantized(weight), oracle_of(source.detach(), MXFP8, False))
    others.require_filled()  # of this one there was no gradient


SHARING = {
    "view": lambda parameter: parameter.view(2, 96, 160),
    "detached": lambda parameter: parameter.detach(),
    "data": lambda parameter: parameter.data,
    "parameter": lambda parameter: torch.nn.Parameter(parameter.data),
    "one expert": lambda parameter: parameter[1:],
}


@pytest.mark.parametrize("source_of", SHARING.values(), ids=SHARING.keys())
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_reaches_sources_that_share_a_parameter(source_of, fused):
    parameter = torch.nn.Parameter(random_weight("cpu"))
    weight = prepare_block_scaled_weight(source_of(parameter), NVFP4)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1, fused=fused).step()
    with STALE:
        weight.require_filled()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_a_dtensor_reaches_its_shard(fused):
    with one_process():
        mesh, source = init_device_mesh("cpu", (1,)), random_weight("cpu")
        parameter = torch.nn.Parameter(DTensor.from_local(source, mesh, [Shard(0)], run_check=False))
        weight = prepare_block_scaled_weight(source, MXFP8)
        parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW([parameter], fused=fused).step()
        with STALE:
            weight.require_filled()


def test_a_step_takes_parameters_of_any_kind():
    """Without a storage, and without elements."""
    weight = prepare_block_scaled_weight(random_weight("cpu"), MXFP8)
    sparse, empty = torch.zeros(2, 2).to_sparse().requires_grad_(), torch.zeros(0).requires_grad_()
    sparse.grad, empty.grad = torch.zeros(2, 2).to_sparse(), torch.zeros(0)

    class Nothing(torch.optim.Optimizer):
        def step(self):
            pass

    Nothing([sparse, empty], {}).step()
    weight.require_filled()


def test_watching_steps_keeps_nothing_alive():
    weight = prepare_block_scaled_weight(random_weight("cpu"), MXFP8)
    alive = weakref.ref(weight)
    del weight
    assert alive() is None


MOVES = {
    "data": lambda source: setattr(source, "data", source.data.clone()),
    "transposed": lambda source: setattr(source, "data", source.data.mT),
    "reshaped": lambda source: setattr(source, "data", source.data.view(3, 64, 96)),
    "other dtype": lambda source: setattr(source, "data", source.data.view(torch.float16)),
    "vector_to_parameters": lambda source: torch.nn.utils.vector_to_parameters(torch.ones(source.numel()), [source]),
    "half": lambda source: torch.nn.ParameterList([source]).half(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_a_source_that_was_moved_is_stale(move):
    source = torch.nn.Parameter(random_weight("cpu", 2, 96, 96))
    weight = prepare_block_scaled_weight(source, MXFP8)
    move(source)
    with STALE:
        weight.require_filled()


@EACH_KIND
def test_tensors_that_another_wrote(config, inference, device):
    weight = prepare_block_scaled_weight(source := random_weight(device), config, inference=inference)
    for tensor in weight.storage_tensors():
        tensor.view(torch.uint8).zero_()
        with pytest.raises(RuntimeError, match="storages were written, freed or replaced"):
            weight.require_filled()
        prepare_block_scaled_weight(source, config, inference=inference, out=weight).require_filled()


@EACH_KIND
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_shallow_copies_do_not_outlive_a_refill(mode, config, inference, device):
    first, second = random_weight(device), random_weight(device)
    with mode():
        weight = prepare_block_scaled_weight(first, config, inference=inference)
    other = copy.copy(weight)
    for filled, stale in ((weight, other), (other, weight)):
        with mode():
            prepare_block_scaled_weight(second, config, inference=inference, out=filled).require_filled()
        with pytest.raises(RuntimeError, match="storages were written, freed or replaced"):
            stale.require_filled()
    other.load_state_dict(other.state_dict())
    other.require_filled()


def test_a_source_of_inference_mode_counts_no_changes(device):
    with torch.inference_mode():
        weight = prepare_block_scaled_weight(source := random_weight(device), NVFP4)
        weight.require_filled()
        source.zero_()
    weight.require_filled()
    source.data = source.data.clone()
    with STALE:
        weight.require_filled()


@EACH_KIND
@pytest.mark.parametrize("by", ["default", "oracle"])
def test_made_under_inference_mode_and_refilled_outside(by, config, inference, device, monkeypatch):
    """A deep copy's tensors are of inference mode, where it was made in it."""
    if by == "oracle":
        device = torch.device("cpu")
        monkeypatch.setattr("dist_moe.registry._triton_problem", lambda: "triton is not installed")
    with torch.inference_mode():
        source = random_weight(device)
        weights = [prepare_block_scaled_weight(source, config, inference=inference)]
        weights.append(copy.deepcopy(weights[0]))
        state = copy.deepcopy(weights[0].state_dict())
    outside = random_weight(device)
    for weight in weights:
        prepare_block_scaled_weight(outside, config, inference=inference, out=weight).require_filled()
        assert_same_bits(quantized(weight), oracle_of(outside, config, inference))
        weight.load_state_dict(state)
        assert_same_bits(quantized(weight), oracle_of(source, config, inference))
        prepare_block_scaled_weight(source, config, inference=inference, out=weight).require_filled()

"""Weight gradients in place and into callbacks' tensors over virtual ranks, over processes, and with DTensor owners."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dist_moe import ExecutionOptions, PeerAbortedError, create_context, routed_experts
from dist_moe.path_oracle import on_device
from dist_moe.symm import World
from dist_moe.virtual import RankInputs, run_virtual
from dist_moe.virtual import routed_experts as virtual_experts

from .fault_cases import error_of
from .path_cases import Case, expand_columns
from .rank_calls import on_ranks, run_rank
from .test_path import device_of
from .wgrad_layer import PRECISIONS

IN_PLACE = ExecutionOptions(inplace_wgrad_accum=True)
NAMES = ("w13_L2FD", "w2_LDF")
CASE = Case("one rank without rows", W=3, T=6, D=64, F=32, K=2, E=6, routing="one_rank", wgrad=None)
PAIR = Case("pair", T=6, D=64, F=32, E=4, wgrad=None)
SCALED = {name: block_scaled for name, (block_scaled, _) in PRECISIONS.items()}

everywhere = pytest.mark.parametrize(
    "precision, backend",
    [
        ("bf16", "reference"),
        ("mxfp8", "reference"),
        ("mxfp8 expanded", "reference"),
        ("bf16", "triton"),
        pytest.param("mxfp8", "triton", marks=pytest.mark.gpu),
        pytest.param("mxfp8 expanded", "triton", marks=pytest.mark.gpu),
    ],
)


@pytest.fixture(autouse=True)
def _columns(request, monkeypatch):
    """As the precision of a test says."""
    if "precision" in request.fixturenames:
        expand_columns(monkeypatch, PRECISIONS[request.getfixturevalue("precision")][1])


def seeded(shape, seed: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(case: Case, precision: str, backend: str, inputs) -> list[list[torch.Tensor]]:
    """By rank the FP32 weight gradients, before any rounding."""
    config = case.config(block_scaled=SCALED[precision], wgrad_dtype=torch.float32)
    results = run_virtual(case.W, config, inputs, device=device_of(backend), backend=backend)
    return [[getattr(result, f"grad_{name}") for name in NAMES] for result in results]


def leaves(inputs: list[RankInputs]) -> list[RankInputs]:
    """The same with weights as parameters that take gradients of any dtype."""
    for rank in inputs:
        for name in NAMES:
            parameter = torch.nn.Parameter(getattr(rank, name))
            parameter.grad_dtype = None
            setattr(rank, name, parameter)
    return inputs


@everywhere
@pytest.mark.parametrize("case", [CASE, PAIR], ids=str)
def test_virtual_ranks_accumulate_in_place_with_one_rounding(case, precision, backend):
    inputs = [on_device(rank, device_of(backend)) for rank in case.inputs()]
    grads = exact(case, precision, backend, inputs)
    config = case.config(block_scaled=SCALED[precision])
    with create_context(group=World.virtual(case.W, device_of(backend)), config=config, backend=backend) as context:
        ranks, wanted = leaves(inputs), []
        for seed, (rank, own) in enumerate(zip(ranks, grads, strict=True)):
            for name, grad in zip(NAMES, own, strict=True):
                parameter = getattr(rank, name)
                parameter.grad = seeded(grad.shape, seed).to(grad.device)
                wanted.append((parameter.grad.data_ptr(), (parameter.grad.float() + grad).bfloat16()))
        outs = virtual_experts(ranks, context, options=IN_PLACE)
        torch.autograd.backward(outs, [rank.grad_out_TD for rank in ranks])
        found = [getattr(rank, name).grad for rank in ranks for name in NAMES]
        for grad, (pointer, value) in zip(found, wanted, strict=True):
            assert grad.data_ptr() == pointer and torch.equal(grad, value)
    assert any(grad.any() for own in grads for grad in own)
    if case is CASE:
        assert [own[0].any().item() for own in grads].count(False) == 2


@pytest.mark.parametrize("precision", SCALED)
def test_virtual_ranks_have_callbacks_of_their_own(precision):
    """Rank 0 adds into its buffers, rank 1 has made weights and its gradients go through a callback."""
    inputs = PAIR.inputs()
    grads = exact(PAIR, precision, "reference", inputs)
    buffers = {name: seeded(grads[0][i].shape, i, torch.float32) for i, name in enumerate(("w13", "w2"))}
    before = [buffer.clone() for buffer in buffers.values()]
    seen = []
    options = [
        ExecutionOptions(wgrad_destination_fn=lambda name, *asked: (buffers[name], True)),
        ExecutionOptions(
            weights_preprocess_fn=lambda weight: [seen.append(weight.dtype), weight.bfloat16()][1],
            wgrad_postprocess_fn=lambda name, grad: [seen.append(name), -grad][1],
        ),
    ]
    config = PAIR.config(block_scaled=SCALED[precision])
    with create_context(group=World.virtual(2, "cpu"), config=config, backend="reference") as context:
        ranks = leaves(inputs)
        compact = {name: torch.nn.Parameter(getattr(ranks[1], name).detach().float()) for name in NAMES}
        ranks[1] = RankInputs(**vars(ranks[1]) | compact)
        outs = virtual_experts(ranks, context, options=options)
        torch.autograd.backward(outs, [rank.grad_out_TD for rank in ranks])
    assert seen == [torch.float32] * 4 + ["w2", "w13"]
    for buffer, old, grad, name in zip(buffers.values(), before, grads[0], NAMES, strict=True):
        assert torch.equal(buffer, old + grad) and getattr(ranks[0], name).grad is None
    for grad, name in zip(grads[1], NAMES, strict=True):
        assert torch.equal(compact[name].grad, -grad.bfloat16().float()) and grad.any()


def test_a_virtual_rank_with_a_destination_at_an_odd_address_is_refused():
    odd = lambda name, shape, dtype, device: (torch.zeros(shape.numel() + 1)[1:].view(shape), True)  # noqa: E731
    with create_context(group=World.virtual(2, "cpu"), config=PAIR.config(), backend="reference") as context:
        ranks = leaves(PAIR.inputs())
        outs = virtual_experts(ranks, context, options=[None, ExecutionOptions(wgrad_destination_fn=odd)])
        with pytest.raises(ValueError, match="what takes the gradient of w13 must start at a multiple of 16 bytes"):
            torch.autograd.backward(outs, [rank.grad_out_TD for rank in ranks])


# Processes


def _step(rank: RankInputs, context, options, w13=None, w2=None):
    weights = (rank.w13_L2FD if w13 is None else w13, rank.w2_LDF if w2 is None else w2)
    out_TD = routed_experts(rank.x_TD, rank.ids_TK, rank.scores_TK, *weights, context, options=options)
    out_TD.backward(rank.grad_out_TD)
    context.check()


def _accumulate(rank, group, case, precision):
    config = case.config(block_scaled=SCALED[precision])
    fp32 = case.config(block_scaled=SCALED[precision], wgrad_dtype=torch.float32)
    with create_context(group=group, config=fp32, device="cpu", backend="reference") as context:
        exact = run_rank(case.inputs()[rank], context)
    with create_context(group=group, config=config, device="cpu", backend="reference") as context:
        (inputs,) = leaves([case.inputs()[rank]])
        hooks = []
        for name in NAMES:
            getattr(inputs, name).register_post_accumulate_grad_hook(lambda p: hooks.append(1))
        places = []
        for _ in range(3):
            _step(inputs, context, IN_PLACE)
            places.append([getattr(inputs, name).grad.data_ptr() for name in NAMES])
        assert places[0] == places[1] == places[2] and len(hooks) == 6
        return [[getattr(exact, f"grad_{name}"), getattr(inputs, name).grad] for name in NAMES]


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_processes_accumulate_at_stable_addresses_with_one_rounding_a_step(precision):
    for pairs in on_ranks(2, _accumulate, PAIR, precision):
        for grad, found in pairs:
            wanted = grad.bfloat16()
            for _ in range(2):
                wanted = (wanted.float() + grad).bfloat16()
            assert torch.equal(found, wanted) and found.any()


def _refuse_on_rank_1(rank, group, case):
    with create_context(group=group, config=case.config(), device="cpu", backend="reference") as context:
        (inputs,) = leaves([case.inputs()[rank]])
        buffers = {"w13": torch.ones(inputs.w13_L2FD.shape), "w2": torch.ones(inputs.w2_LDF.shape)}
        answers = [lambda name, *asked: (buffers[name], True), lambda name, *asked: None]
        error = error_of(_step, inputs, context, ExecutionOptions(wgrad_destination_fn=answers[rank]))
        return type(error), str(error), all((buffer == 1).all() for buffer in buffers.values())


def test_a_destination_that_one_rank_refuses_ends_the_step_of_all_and_nothing_is_written():
    (kind_0, words_0, clean_0), (kind_1, words_1, clean_1) = on_ranks(2, _refuse_on_rank_1, PAIR)
    assert kind_1 is TypeError and "must return (Tensor, bool)" in words_1
    assert kind_0 is PeerAbortedError and "must return (Tensor, bool)" in words_0
    assert clean_0 and clean_1


def _dtensors(rank, group, case, dtype):
    """A step that autograd attaches and one that adds, of views or casts of the owners' shards; by weight both."""
    with create_context(group=group, config=case.config(), device="cpu", backend="reference") as context:
        mesh = DeviceMesh.from_group(group, "cpu")
        shard = lambda tensor: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)  # noqa: E731
        inputs, hooks = case.inputs()[rank], []
        owners = [torch.nn.Parameter(shard(getattr(inputs, name).to(dtype))) for name in NAMES]
        for owner in owners:
            owner.grad_dtype = None
            owner.register_post_accumulate_grad_hook(lambda p: hooks.append(1))
        options = ExecutionOptions(inplace_wgrad_accum=True, wgrad_parameter_owners=tuple(owners))
        local = lambda owner: owner.to_local().flatten(0, 1) if dtype is torch.bfloat16 else owner.to_local().bfloat16()  # noqa: E731
        step = lambda: _step(inputs, context, options, *map(local, owners))  # noqa: E731
        step()
        first = [owner.grad.to_local().clone() for owner in owners]
        sums = [seeded(grad.shape, seed, torch.float32) for seed, grad in enumerate(first)]
        before = [grad.clone() for grad in sums]
        for owner, grad in zip(owners, sums, strict=True):
            owner.grad = shard(grad)
        step()
        assert [owner.grad.to_local().data_ptr() for owner in owners] == [grad.data_ptr() for grad in sums]
        assert len(hooks) == 4
        return first, [grad - old for grad, old in zip(sums, before, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp32_gradients_of_sharded_owners_take_the_local_sum(dtype):
    for first, added in on_ranks(2, _dtensors, PAIR, dtype):
        for attached, fp32 in zip(first, added, strict=True):
            assert attached.dtype is dtype and attached.any()
            torch.testing.assert_close(fp32, attached.float(), rtol=2**-8, atol=1e-6)

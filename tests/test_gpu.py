"""What only a GPU can show: graphs, streams, large offsets, no host synchronisation."""

import gc
import time

import pytest
import torch

from dist_moe import (
    BlockScaledConfig,
    Config,
    InvalidExpertIdError,
    create_context,
    prepare_block_scaled_weight,
    registry,
    routed_experts,
)
from dist_moe.path_oracle import FORWARD_ONLY, forward_only, on_device
from dist_moe.symm import World
from dist_moe.testing import routing, run_virtual
from dist_moe.virtual import RankResults
from dist_moe.virtual import routed_experts as virtual_routed_experts

from .path_cases import Case, assert_results_close, assert_results_equal, dense

pytestmark = pytest.mark.gpu

T, D, F, K, E = 96, 128, 96, 2, 8
MXFP8, NVFP4 = BlockScaledConfig(), BlockScaledConfig("nvfp4")


def config(**changes) -> Config:
    fields = {
        "max_moe_layers_per_activation_slot": 1,
        "activation_slot_capacity_factor": 1.0,
        "device_scratch_capacity_factor": 1.0,
    }
    return Config(T, D, F, K, E, **fields | changes)


def tensors(seed: int = 0, routing_name: str = "uniform") -> list[torch.Tensor]:
    """x, ids, scores, w13, w2 on the GPU."""
    g = torch.Generator().manual_seed(seed)
    (ids,) = routing(routing_name, num_ranks=1, T=T, K=K, E=E, seed=seed)
    made = [
        torch.randn(T, D, generator=g).bfloat16(),
        ids,
        torch.rand(T, K, generator=g),
        (torch.randn(E, 2 * F, D, generator=g) * D**-0.5).bfloat16(),
        (torch.randn(E, D, F, generator=g) * F**-0.5).bfloat16(),
    ]
    return [tensor.cuda() for tensor in made]


def step(static: list[torch.Tensor], grad: torch.Tensor, context) -> list[torch.Tensor]:
    """Forward and gradients of x, scores, w13, w2."""
    leaves = [tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor for tensor in static]
    out = routed_experts(*leaves, context)
    return [out.detach(), *torch.autograd.grad(out, [t for t in leaves if t.requires_grad], grad)]


REPLAYS = [(1, "uniform"), (2, "one_expert"), (3, "dropped(1.0)"), (4, "zipf(1.0)"), (5, "duplicates")]


@pytest.mark.parametrize("slot_factor", [1.0, None], ids=["saved", "recomputed"])
@pytest.mark.parametrize("warm", [True, False], ids=["after an eager call", "first call ever"])
@pytest.mark.parametrize("block_scaled", [None, MXFP8], ids=["bf16", "mxfp8"])
def test_a_captured_training_step_follows_new_data(slot_factor, warm, block_scaled):
    how = config(activation_slot_capacity_factor=slot_factor, block_scaled=block_scaled)
    with create_context(group=None, config=how) as context:
        static, grad = tensors(), torch.randn(T, D, device="cuda").bfloat16()
        step(static, grad, context) if warm else warm_kernels(static, grad, how)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(static, grad, context)
        for seed, name in REPLAYS:
            for old, new in zip(static, tensors(seed, name), strict=True):
                old.copy_(new)
            for tensor in captured:
                tensor.fill_(float("nan"))
            graph.replay()
            context.check()
            replayed = [tensor.clone() for tensor in captured]
            eager = step(static, grad, context)
            assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True)), (seed, name)


def warm_kernels(static, grad, how: Config):
    """Compile on another context: a capture of this one's first call may not compile."""
    with create_context(group=None, config=how) as other:
        step(static, grad, other)


@pytest.mark.parametrize("block_scaled", [None, MXFP8, NVFP4], ids=["bf16", "mxfp8", "nvfp4"])
def test_a_captured_inference_follows_new_data(block_scaled):
    """Of prepared weights too: a refill writes where the graph reads."""
    how = {"inference": True, "activation_slot_capacity_factor": None, "num_activation_slots": 0}
    serve = config(block_scaled=block_scaled, **how)
    with create_context(group=None, config=serve) as context, torch.no_grad():
        static = tensors()
        given, weights = static, static[3:]
        if block_scaled is not None:
            given = static[:3] + [prepare_block_scaled_weight(w, block_scaled, inference=True) for w in weights]
        routed_experts(*given, context)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = routed_experts(*given, context)
        for seed, name in REPLAYS:
            for old, new in zip(static, tensors(seed, name), strict=True):
                old.copy_(new)
            if block_scaled is not None:
                for ready, weight in zip(given[3:], weights, strict=True):
                    prepare_block_scaled_weight(weight, block_scaled, inference=True, out=ready)
            graph.replay()
            replayed = out.clone()
            assert torch.equal(replayed, routed_experts(*given, context)), (seed, name)
        context.check()


@pytest.mark.sm90
@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
def test_products_whose_tiles_fit_the_rows_of_an_expert(inference):
    """The path with them, near the dense layer; outputs and gradients of x have the bits of Triton's tiles."""
    case = Case("256 rows an expert", T=256, D=160, F=224, routing="zipf(0.5)")
    how = case.config(**FORWARD_ONLY if inference else {})
    assert registry.choose("grouped_gemm_swiglu", registry.call_of("cuda", None, how, case.W))[0].backend == "gluon"
    inputs = forward_only(case.inputs()) if inference else case.inputs()
    there = [on_device(rank, "cuda") for rank in inputs]
    found, wanted = (run_virtual(case.W, how, there, device="cuda", backend=name) for name in (None, "triton"))
    expected = dense(case, case.inputs())
    if inference:
        expected = [RankResults(rank.out_TD) for rank in expected]
    assert_results_close([on_device(result, "cpu") for result in found], expected)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.out_TD, b.out_TD) and (inference or torch.equal(a.grad_x_TD, b.grad_x_TD))


def test_graphs_and_eager_calls_of_several_sizes_mix():
    with create_context(group=None, config=config()) as context, torch.no_grad():
        static, graphs = tensors(), {}
        for size in (T, 17, 1):
            parts = [*(t[:size] for t in static[:3]), *static[3:]]
            routed_experts(*parts, context)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = routed_experts(*parts, context)
            graphs[size] = (graph, out, parts)
        for size in (17, T, 1, T, 17):
            graph, out, parts = graphs[size]
            graph.replay()
            assert torch.equal(out, routed_experts(*parts, context))
        context.check()


def test_a_fault_under_replay_is_found_by_check_and_reset_mends_it():
    with create_context(group=None, config=config()) as context, torch.no_grad():
        static = tensors()
        good = routed_experts(*static, context)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = routed_experts(*static, context)
        ids = static[1].clone()
        static[1][3, 1] = E
        graph.replay()
        with pytest.raises(InvalidExpertIdError, match="token 3, k 1"):
            context.check()
        assert out.isnan().all()
        static[1].copy_(ids)
        context.reset()
        graph.replay()
        context.check()
        assert torch.equal(out, good)


def test_calls_on_another_stream_wait_for_the_last_call():
    with create_context(group=None, config=config()) as context, torch.no_grad():
        static, other = tensors(), tensors(1)
        wanted, wanted_other = routed_experts(*static, context), routed_experts(*other, context)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(50):
            a = routed_experts(*static, context)
            with torch.cuda.stream(side):
                b = routed_experts(*other, context)
            torch.cuda.current_stream().wait_stream(side)
            assert torch.equal(a, wanted) and torch.equal(b, wanted_other)


def test_no_call_synchronises_the_host():
    with create_context(group=None, config=config()) as context:
        static, grad = tensors(), torch.randn(T, D, device="cuda").bfloat16()
        step(static, grad, context)
        torch.cuda.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(static, grad, context)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        context.check()


def test_evaluation_between_training_steps_in_both_orders():
    with create_context(group=None, config=config()) as context:
        static, grad = tensors(), torch.randn(T, D, device="cuda").bfloat16()
        wanted = step(static, grad, context)
        with torch.no_grad():
            routed_experts(*tensors(1), context)
        with torch.inference_mode():
            routed_experts(*tensors(2), context)
        assert all(torch.equal(a, b) for a, b in zip(wanted, step(static, grad, context), strict=True))


def test_under_the_profiler():
    """Nothing depends on two kernels of one rank running at the same time."""
    with create_context(group=None, config=config()) as context:
        static, grad = tensors(), torch.randn(T, D, device="cuda").bfloat16()
        wanted = step(static, grad, context)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
            assert all(torch.equal(a, b) for a, b in zip(wanted, step(static, grad, context), strict=True))


@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("K", [2, 8])
def test_virtual_ranks_at_a_real_width(W, K):
    shape = {"T": 200, "D": 1024, "F": 768, "K": K, "E": 24 // W * W}
    case = Case("wide", W=W, routing="zipf(1.0)", slot_factor=None if W in (3, 6) else 1.0, **shape)
    inputs = case.inputs()
    there = [type(rank)(*(tensor.cuda() for tensor in vars(rank).values())) for rank in inputs]
    results = run_virtual(W, case.config(), there, device="cuda")
    again = run_virtual(W, case.config(), there, device="cuda")
    assert_results_equal(results, again)
    cpu = [type(result)(*(tensor.cpu() for tensor in vars(result).values())) for result in results]
    assert_results_close(cpu, dense(case, inputs))


def test_more_than_2_to_the_31_elements_of_rows():
    """300,000 tokens of 8,192 columns with one route each: rows times width pass 2^31, tokens pass 65,535."""
    tokens, width = 300_000, 8192
    big = Config(tokens, width, 32, 1, 4, 1, inference=True, num_activation_slots=0)
    with create_context(group=World.virtual(1, "cuda"), config=big) as context, torch.no_grad():
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        ids = torch.arange(tokens, device="cuda")[:, None] % 4
        scores = torch.rand(tokens, 1, device="cuda") + 0.5
        w13 = (torch.randn(4, 64, width, device="cuda") * width**-0.5).bfloat16()
        w2 = (torch.randn(4, width, 32, device="cuda") * 32**-0.5).bfloat16()
        out = routed_experts(x, ids, scores, w13, w2, context)
        context.check()
        for rows in (slice(0, 64), slice(-64, None), slice(262_144 - 32, 262_144 + 32)):
            small = Config(64, width, 32, 1, 4, 1, inference=True, num_activation_slots=0)
            with create_context(group=World.virtual(1, "cuda"), config=small) as other:
                assert torch.equal(out[rows], routed_experts(x[rows], ids[rows], scores[rows], w13, w2, other))


@pytest.mark.parametrize("T_max, tokens", [(8191, 8191), (8192, 8191), (8192, 8192), (8193, 8193), (8192, 1)])
def test_sizes_around_a_power_of_two(T_max, tokens):
    """The rows of a large call have the bits they have in calls of 64 tokens."""
    x, ids, scores, w13, w2 = tensors()
    more = -(-tokens // T)
    x, ids, scores = (tensor.repeat(more, 1)[:tokens].contiguous() for tensor in (x, ids, scores))
    serve = {"max_moe_layers_per_activation_slot": 1, "inference": True, "num_activation_slots": 0}
    with create_context(group=None, config=Config(T_max, D, F, K, E, **serve)) as context, torch.no_grad():
        out = routed_experts(x, ids, scores, w13, w2, context)
        context.check()
    with create_context(group=None, config=Config(T, D, F, K, E, **serve)) as context, torch.no_grad():
        parts = [
            routed_experts(*(t[i : i + T] for t in (x, ids, scores)), w13, w2, context) for i in range(0, tokens, T)
        ]
        context.check()
    assert torch.equal(out, torch.cat(parts))


def settled_memory() -> int:
    """Allocated bytes, without what earlier tests left in cycles and what the engine's thread lets go of only when it
    gets the interpreter: the graph of the last step."""
    torch.cuda.synchronize()
    gc.collect()
    time.sleep(0.1)
    return torch.cuda.memory_allocated()


def test_thousand_calls_hold_the_same_memory():
    with create_context(group=None, config=config()) as context:
        sets = [tensors(seed, name) for seed, name in REPLAYS]
        grad = torch.randn(T, D, device="cuda").bfloat16()
        wanted = [step(one, grad, context) for one in sets]
        before = settled_memory()
        for call in range(1000):
            which = call % len(sets)
            found = step(sets[which], grad, context)
            if call % 97 == 0:
                assert all(torch.equal(a, b) for a, b in zip(found, wanted[which], strict=True))
        del found
        context.check()
        assert settled_memory() == before


def test_virtual_ranks_are_differentiable():
    case = Case("autograd", W=2)
    inputs = [type(rank)(*(tensor.cuda() for tensor in vars(rank).values())) for rank in case.inputs()]
    with create_context(group=World.virtual(2, "cuda"), config=case.config()) as context:
        for rank in inputs:
            rank.x_TD.requires_grad_()
        outs = virtual_routed_experts(inputs, context)
        torch.autograd.backward(outs, [rank.grad_out_TD for rank in inputs])
        context.check()
        assert all(rank.x_TD.grad.any() for rank in inputs)

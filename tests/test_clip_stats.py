"""Clip statistics of whole calls: exact in every precision, the same however the layer is saved or run again."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dist_moe import BlockScaledConfig, ExecutionOptions, create_context, routed_experts, virtual
from dist_moe.path_oracle import FORWARD_ONLY, Case, forward_only, on_device, prepared
from dist_moe.symm import World
from dist_moe.virtual import RankInputs

from .path_cases import assert_results_equal
from .test_path import BACKENDS, device_of

LIMIT = 1.5
FORMATS = (None, BlockScaledConfig(), BlockScaledConfig("nvfp4"))
CASES = (
    Case("two ranks per route", T=6, D=64, F=32, routing="zipf(1.0)"),
    Case("two ranks de-duplicated", T=5, D=64, F=32, K=4, E=8, routing="duplicates"),
    Case("three ranks one without tokens", W=3, T=4, D=64, F=64, E=6, routing="empty_ranks"),
)


def whole_numbers(case: Case) -> list[RankInputs]:
    """Inputs whose h1 are whole numbers in every precision: x of 0, 1, 2 and W13 of 0 and 1, with their negatives."""
    g = torch.Generator().manual_seed(case.seed)
    return [
        replace(
            rank,
            x_TD=torch.randint(-2, 3, rank.x_TD.shape, generator=g).bfloat16(),
            w13_L2FD=torch.randint(-1, 2, rank.w13_L2FD.shape, generator=g).bfloat16(),
        )
        for rank in case.inputs()
    ]


def counts_of(case: Case, inputs: list[RankInputs]) -> list[list[float]]:
    """By rank, of its experts and the tokens of all ranks, an expert named twice by a token once."""
    x, ids = (torch.cat([getattr(rank, name) for rank in inputs]) for name in ("x_TD", "ids_TK"))
    L, found = case.E // case.W, []
    for r, rank in enumerate(inputs):
        h1 = torch.cat([x[(ids == r * L + e).any(1)].float() @ rank.w13_L2FD[e].float().T for e in range(L)])
        gate, up = h1.chunk(2, dim=1)
        found.append([float((gate > LIMIT).sum()), float((up.abs() > LIMIT).sum()), float(gate.numel())])
    return found


def asking(inputs: list[RankInputs], device) -> list[ExecutionOptions]:
    stats = [torch.full((3,), 1e6, device=device) for _ in inputs]
    return [ExecutionOptions(swiglu_clip_stats_out_3=out, swiglu_clip_limit=LIMIT) for out in stats]


def stats_of(options: list[ExecutionOptions]) -> list[list[float]]:
    return [asked.swiglu_clip_stats_out_3.tolist() for asked in options]


def named(block_scaled) -> str:
    return "bf16" if block_scaled is None else str(block_scaled.format)


# Interpreted, block-scaled ranks take a second each: one case has padding and de-duplication.
EACH = [
    pytest.param(case, how, backend, id=f"{case}-{named(how)}-{backend}", marks=pytest.mark.gpu if slow else ())
    for case in CASES
    for how in FORMATS
    for backend in BACKENDS
    for slow in [backend == "triton" and how is not None and case is not CASES[1]]
]


@pytest.mark.parametrize("case, block_scaled, backend", EACH)
def test_counts_are_exact_and_change_nothing(case, block_scaled, backend):
    device, inputs = device_of(backend), whole_numbers(case)
    config, wanted = case.config(block_scaled=block_scaled, **FORWARD_ONLY), counts_of(case, inputs)
    assert all(0 < gates < n and 0 < ups < n and gates != ups for gates, ups, n in wanted if n)
    if block_scaled is not None:
        inputs = prepared(inputs, config, inference=True, device=device)
    inputs = [on_device(rank, device) for rank in forward_only(inputs)]
    options = asking(inputs, device)
    with create_context(group=World.virtual(case.W, device), config=config, backend=backend) as context:
        plain = virtual.run_virtual(case.W, config, inputs, context=context)
        for _ in range(2):  # overwritten, not added to
            assert_results_equal(virtual.run_virtual(case.W, config, inputs, context=context, options=options), plain)
            assert stats_of(options) == wanted


@pytest.mark.parametrize("block_scaled", FORMATS[:2], ids=named)
@pytest.mark.parametrize("slot_factor", [1.0, None], ids=["saved", "recomputed"])
def test_a_backward_counts_nothing(block_scaled, slot_factor, device):
    case = replace(CASES[0], slot_factor=slot_factor)
    inputs, config = whole_numbers(case), case.config(block_scaled=block_scaled)
    options = asking(inputs, "cpu")
    plain = virtual.run_virtual(case.W, config, inputs, backend="reference")
    assert_results_equal(virtual.run_virtual(case.W, config, inputs, backend="reference", options=options), plain)
    assert stats_of(options) == counts_of(case, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_through_the_op_under_checkpoint_and_without_gradients(backend):
    """One rank by the public call. What a checkpoint runs again writes the same, and a stale tensor is overwritten."""
    case, device = Case("one rank", W=1, D=64, F=32), device_of(backend)
    (rank,) = whole_numbers(case)
    (wanted,) = counts_of(case, [rank])
    rank = on_device(rank, device)
    (options,) = asking([rank], device)
    stats = options.swiglu_clip_stats_out_3

    def call(x_TD, asked=options):
        return routed_experts(x_TD, rank.ids_TK, rank.scores_TK, rank.w13_L2FD, rank.w2_LDF, context, options=asked)

    with create_context(group=None, config=case.config(), device=device, backend=backend) as context:
        plain_x = rank.x_TD.clone().requires_grad_()
        plain = call(plain_x, None)
        plain.backward(rank.grad_out_TD)
        for run in (call, lambda x_TD: checkpoint(call, x_TD, use_reentrant=False)):
            x_TD = rank.x_TD.clone().requires_grad_()
            out = run(x_TD)
            assert torch.equal(out, plain) and stats.tolist() == wanted and not stats.requires_grad
            stats.fill_(-1.0)
            out.backward(rank.grad_out_TD)
            assert torch.equal(x_TD.grad, plain_x.grad)
            assert stats.tolist() in ([-1.0] * 3, wanted)
        for mode in (torch.no_grad, torch.inference_mode):
            stats.fill_(-1.0)
            with mode():
                assert torch.equal(call(rank.x_TD), plain)
            assert stats.tolist() == wanted
        # A limit past FP32 is past every finite value, on both ends.
        for limit, gates in ((1e300, 0.0), (-1e300, wanted[2])):
            call(rank.x_TD, ExecutionOptions(swiglu_clip_stats_out_3=stats, swiglu_clip_limit=limit))
            assert stats.tolist() == [gates, gates, wanted[2]]


def test_a_compiled_function_counts_too():
    case = Case("one rank", W=1, D=64, F=32)
    (rank,) = whole_numbers(case)
    (options,) = asking([rank], "cpu")
    with create_context(group=None, config=case.config(), device="cpu", backend="reference") as context:

        def block(x_TD):
            tensors = (2 * x_TD, rank.ids_TK, rank.scores_TK, rank.w13_L2FD, rank.w2_LDF)
            return routed_experts(*tensors, context, options=options) + 1

        eager, wanted = block(rank.x_TD / 2), counts_of(case, [rank])
        options.swiglu_clip_stats_out_3.fill_(-1.0)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(rank.x_TD / 2), eager) and stats_of([options]) == wanted


def test_a_fault_leaves_nan():
    case = Case("fault", W=1, D=64, F=32)
    (rank,) = whole_numbers(case)
    (options,) = asking([rank], "cpu")
    rank.ids_TK[0, 0] = case.E
    with create_context(group=None, config=case.config(), device="cpu", backend="reference") as context:
        routed_experts(rank.x_TD, rank.ids_TK, rank.scores_TK, rank.w13_L2FD, rank.w2_LDF, context, options=options)
        assert options.swiglu_clip_stats_out_3.isnan().all()

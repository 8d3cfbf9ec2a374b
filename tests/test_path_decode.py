"""The path of decode: experts in one launch, with the bits, options and faults of the launches it stands for."""

from dataclasses import replace

import pytest
import torch

import dist_moe
from dist_moe import ExecutionOptions, InvalidExpertIdError, RMSNormPostprocess, RoutingOverflowError, create_context
from dist_moe.models import MODELS
from dist_moe.path_oracle import FORWARD_ONLY, Case, forward_only, on_device
from dist_moe.planner import mega, plan_memory, sums_pairs
from dist_moe.symm import World
from dist_moe.testing import assert_close
from dist_moe.virtual import RankInputs, routed_experts
from tests.test_path import BACKENDS, device_of, run

APART = ("dist_moe.planner.MEGA_ROWS", 0)
# D and F of one step of the contraction, whose sum is the same in every tile, interpreted too.
NARROW = {"T": 4, "D": 64, "F": 64}
CASES = [
    Case("one rank", W=1, K=2, E=8, **NARROW),
    Case("one rank, one route", W=1, K=1, E=4, **NARROW),
    Case("two ranks, pairs summed", W=2, K=4, E=16, routing="zipf(1.0)", **NARROW),
    Case("three ranks, per route, clamped", W=3, K=2, E=12, activation="swiglu_clamped", **NARROW),
    Case("slots without expert", W=2, K=4, E=16, routing="dropped(0.5)", **NARROW),
    Case("an expert named twice", W=2, K=4, E=16, routing="duplicates", **NARROW),
]
PAIRS = CASES[2]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


def serving(case: Case, backend: str, **changes):
    config = case.config(**FORWARD_ONLY, **changes)
    return create_context(group=World.virtual(case.W, device_of(backend)), config=config, backend=backend)


def outs_of(context, case: Case, options=None, sizes=None, **changes) -> list[torch.Tensor]:
    inputs = [on_device(rank, context.device) for rank in forward_only(replace(case, **changes).inputs())]
    if sizes is not None:
        inputs = [
            RankInputs(rank.x_TD[:size], rank.ids_TK[:size], rank.scores_TK[:size], rank.w13_L2FD, rank.w2_LDF)
            for rank, size in zip(inputs, sizes, strict=True)
        ]
    outs = routed_experts(inputs, context, options=options)
    context.check()
    return outs


def both_ways(monkeypatch, case: Case, backend: str, calls, **changes) -> tuple:
    """What calls(context) gives with the experts in one launch and in several."""
    found = []
    for is_mega in (True, False):
        if not is_mega:
            monkeypatch.setattr(*APART)
        with serving(case, backend, **changes) as context:
            assert context.path.mega == is_mega
            found.append(calls(context))
    return found


@each_case
def test_bits_are_those_of_several_launches_and_of_training(monkeypatch, case, backend):
    assert_bits(monkeypatch, case, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("W", [1, 2, 3])
def test_bits_at_widths_of_many_steps(monkeypatch, W):
    assert_bits(monkeypatch, Case("wide", W=W, T=6, K=2 * W, E=16 * W, D=1056, F=352), "triton")


def assert_bits(monkeypatch, case: Case, backend: str) -> None:
    """Calls of any number of tokens follow one another, and stale rows of the calls before are never seen."""

    def calls(context):
        sizes = [(case.T,) * case.W, tuple(range(case.W)), (0,) * case.W, (case.T,) * case.W]
        return [outs_of(context, case, sizes=size, seed=seed) for seed, size in enumerate(sizes)]

    together, apart = both_ways(monkeypatch, case, backend, calls)
    for outs, wanted in zip(together, apart, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    training = run(case.config(), forward_only(case.inputs()), backend)
    assert all(torch.equal(a.cpu(), b.out_TD.cpu()) for a, b in zip(together[0], training, strict=True))
    assert all(out.any() for out in together[0])


@pytest.mark.interpreter
@pytest.mark.parametrize("case", [CASES[0], PAIRS], ids=str)
def test_four_launches(launched, case):
    with serving(case, "triton") as context:
        outs_of(context, case)
    stages = ["_publish", "_wait_route_plan", "_mega_forward", "_wait_reduce"]
    assert launched == [stage for stage in stages for _ in range(case.W)]


@pytest.mark.parametrize("case", [CASES[0], PAIRS], ids=str)
def test_callables_and_norms_get_every_route(monkeypatch, case, backend):
    """With a row a route in `outputs`; one rank has that in any case."""
    norm = RMSNormPostprocess(1e-6, torch.float32, torch.bfloat16)

    def calls(context):
        asked = [ExecutionOptions(experts_output_postprocess=post) for post in (norm, torch.clone)]
        return [outs_of(context, case, options) for options in (*asked, None)]

    together, apart = both_ways(monkeypatch, case, backend, calls, route_outputs=True)
    for outs, wanted in zip(together, apart, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    for a, b in zip(together[1], together[2], strict=True):
        assert_close(a, b, "combine" if case.W == 1 else "path")


@pytest.mark.parametrize("case", [CASES[0], replace(CASES[3], note="clamped")], ids=str)
def test_clip_counts_come_from_several_launches(monkeypatch, case, backend):
    """Which leave h1 to count in; calls with counts and without give the same output."""

    def calls(context):
        ran, mega_forward = [], context.path.ops.mega_forward
        context.path.ops.mega_forward = lambda *args, **how: ran.append(1) or mega_forward(*args, **how)
        counts = [torch.zeros(3, dtype=torch.float32, device=context.device) for _ in range(case.W)]
        options = [ExecutionOptions(swiglu_clip_stats_out_3=count, swiglu_clip_limit=0.5) for count in counts]
        counted = outs_of(context, case, options)
        assert not ran
        plain = outs_of(context, case)
        assert len(ran) == case.W * context.path.mega
        assert all(torch.equal(a, b) and a.any() for a, b in zip(counted, plain, strict=True))
        return counts

    together, apart = both_ways(monkeypatch, case, backend, calls)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(together, apart, strict=True))


def test_after_an_overflow_the_queue_is_as_before(backend):
    """Two of three calls have no room: NaN, an error that says what would fit, and after a reset the right output."""
    case = replace(PAIRS, T=8, E=32)
    with serving(case, backend, device_scratch_capacity_factor=1.0) as context:
        assert context.path.mega
        wanted = outs_of(context, case, routing="balanced")
        for _ in range(2):
            inputs = [on_device(rank, context.device) for rank in replace(case, routing="one_rank").inputs()]
            outs = routed_experts(forward_only(inputs), context)
            with pytest.raises(RoutingOverflowError):
                context.check()
            assert all(out.isnan().all() for out in outs)
            context.reset()
        again = outs_of(context, case, routing="balanced")
    assert all(torch.equal(a, b) and a.any() for a, b in zip(again, wanted, strict=True))


@pytest.mark.gpu
def test_replays_follow_new_data_and_a_fault():
    """The queue is the same memory in every replay, and eager calls of other sizes come between them."""
    case = replace(PAIRS, note="one GPU", W=1, T=8, K=2, E=16, D=1056, F=352)
    with create_context(group=None, config=case.config(**FORWARD_ONLY)) as context, torch.no_grad():
        assert context.path.mega

        def tensors(seed: int) -> list[torch.Tensor]:
            (rank,) = replace(case, seed=seed).inputs()
            return [t.cuda() for t in (rank.x_TD, rank.ids_TK, rank.scores_TK, rank.w13_L2FD, rank.w2_LDF)]

        static = tensors(0)
        dist_moe.routed_experts(*static, context)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = dist_moe.routed_experts(*static, context)
        for seed in (1, 2, 3):
            for old, new in zip(static, tensors(seed), strict=True):
                old.copy_(new)
            dist_moe.routed_experts(*(t[:seed] for t in static[:3]), *static[3:], context)
            graph.replay()
            assert torch.equal(out.clone(), dist_moe.routed_experts(*static, context)) and out.any()
            good = static[1].clone()
            static[1][seed, 1] = case.E  # no such expert
            graph.replay()
            with pytest.raises(InvalidExpertIdError):
                context.check()
            assert out.isnan().all()
            context.reset()
            static[1].copy_(good)
        context.check()


def test_compiled_calls_have_the_same_bits():
    """Of any number of tokens; the experts' launch is inside of the op."""
    case = replace(CASES[0], note="compiled")
    with serving(case, "reference") as context, torch.no_grad():
        assert context.path.mega

        @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
        def call(x_TD, ids_TK, scores_TK, w13, w2):
            return dist_moe.routed_experts(x_TD, ids_TK, scores_TK, w13, w2, context) * 2

        (rank,) = case.inputs()
        for T in (4, 3, 2):
            given = [*(t[:T] for t in (rank.x_TD, rank.ids_TK, rank.scores_TK)), rank.w13_L2FD, rank.w2_LDF]
            out = call(*given)
            assert torch.equal(out, dist_moe.routed_experts(*given, context) * 2) and out.any()


def test_what_is_refused_does_not_depend_on_the_tokens():
    """One rank in decode has a row a route in any case, and yet a callable needs route_outputs, as with many tokens."""
    options = ExecutionOptions(experts_output_postprocess=torch.clone)
    for T in (4, 64):
        case = replace(CASES[0], T=T)
        with serving(case, "reference") as context:
            assert context.path.mega == (T == 4)
            with pytest.raises(ValueError, match="route_outputs"):
                outs_of(context, case, options)


DSV3, MIXTRAL = (next(model for model in MODELS if model.name == name) for name in ("deepseek-v3", "mixtral-8x7b"))


@pytest.mark.parametrize(
    "model, T, W, changes, expected",
    [
        (DSV3, 64, 1, {}, (True, False)),
        (DSV3, 65, 1, {}, (False, True)),  # three rows an expert
        (DSV3, 16, 2, {}, (True, True)),
        (DSV3, 33, 2, {}, (False, True)),
        (MIXTRAL, 8, 1, {}, (True, False)),
        (MIXTRAL, 8, 2, {}, (False, False)),  # 4 rows an expert; two routes of a token on two ranks are not summed
        (DSV3, 16, 1, {"inference": False, "activation_slot_capacity_factor": 1.0}, (False, True)),
        (DSV3, 16, 1, {"num_sms": 64}, (False, True)),
        (DSV3, 16, 1, {"bf16_grouped_gemm_preset": "1cta1mma_bm64_bn128"}, (False, True)),
    ],
)
def test_where_experts_run_in_one_launch(model, T, W, changes, expected):
    case = Case("real", W=W, T=T, D=model.D, F=model.F, K=model.K, E=model.E)
    config = case.config(**{**FORWARD_ONLY, "device_scratch_capacity_factor": 1.0, **changes})
    assert (mega(config, W), sums_pairs(config, W)) == expected
    rows = min(model.K, W) if expected[1] else model.K
    assert dict(plan_memory(config, W).symmetric_bytes)["outputs"] == 2 * T * rows * model.D

"""Config.route_outputs: room for every route's output is what a user asks for, and calls that need it say so."""

from dataclasses import replace

import pytest
import torch

from dist_moe import (
    ExecutionOptions,
    RMSNormPostprocess,
    create_context,
    explain,
    plan_memory,
    routed_experts,
    supports_fused_post_expert_rmsnorm,
)
from dist_moe.path_oracle import Case
from dist_moe.planner import dedup
from dist_moe.symm import World
from dist_moe.virtual import run_virtual

from .path_cases import assert_results_equal

NORM = RMSNormPostprocess(1e-6, torch.float32, torch.bfloat16)
SHARED = Case("two ranks de-duplicated", T=5, D=64, F=32, K=4, E=8)
WIDE = Case("as many ranks as routes", W=8, T=3, D=32, F=32, K=8, E=16)
BY_ROUTE = Case("per route", T=5, D=64, F=32)
MISSING = r"Config\(route_outputs=True\), which takes 1\.250 KiB \(1,280 bytes\) more on every rank"
POSTS = pytest.mark.parametrize("post", [NORM, torch.neg], ids=["norm", "callable"])


def outputs_bytes(case: Case, **changes) -> int:
    return dict(plan_memory(case.config(**changes), case.W).symmetric_bytes)["outputs"]


def context_of(case: Case, **changes):
    return create_context(group=World.virtual(case.W, "cpu"), config=case.config(**changes), backend="reference")


def supports(context) -> bool:
    dtypes = dict.fromkeys(("input_dtype", "score_dtype", "norm_output_dtype", "output_dtype"), torch.bfloat16)
    return supports_fused_post_expert_rmsnorm(**dtypes, topk=4, dim=64, context=context)


@pytest.mark.parametrize("case, rows", [(SHARED, 2), (WIDE, 8), (BY_ROUTE, 2)], ids=str)
def test_only_the_flag_makes_room(case, rows):
    assert dedup(case.config(), case.W) is (case is not BY_ROUTE)
    assert outputs_bytes(case) == case.T * rows * case.D * 2
    assert outputs_bytes(case, route_outputs=True) == case.T * case.K * case.D * 2
    without, with_room = (plan_memory(case.config(route_outputs=asked), case.W) for asked in (False, True))
    assert replace(without, symmetric_bytes=()) == replace(with_room, symmetric_bytes=())


def test_explain_says_it():
    assert "needs Config(route_outputs=True), 1.250 KiB (1,280 bytes) more" in explain(SHARED.config(), 2, device="cpu")
    for config, ranks in ((SHARED.config(route_outputs=True), 2), (WIDE.config(), 8), (BY_ROUTE.config(), 2)):
        assert "outputs: a row a route" in explain(config, ranks, device="cpu")


@POSTS
def test_a_call_without_the_room_is_refused(post):
    options, inputs = ExecutionOptions(experts_output_postprocess=post), SHARED.inputs()
    with context_of(SHARED) as context:
        assert not supports(context)
        with pytest.raises(ValueError, match=MISSING):
            run_virtual(SHARED.W, SHARED.config(), inputs, context=context, options=options)
    with context_of(SHARED, route_outputs=True) as context:
        assert supports(context)
        run_virtual(SHARED.W, SHARED.config(), inputs, context=context, options=options)


def test_a_context_of_one_rank_and_the_op_itself_refuse_it_too():
    case = Case("one rank", W=1, T=6, D=32, F=32)
    with create_context(group=None, config=case.config(), device="cpu", backend="reference") as context:
        x, ids, scores, w13, w2, _ = vars(case.inputs()[0]).values()
        with pytest.raises(ValueError, match="route_outputs=True"):
            options = ExecutionOptions(experts_output_postprocess=NORM)
            routed_experts(x, ids, scores, w13, w2, context, options=options)
        with pytest.raises(ValueError, match="route_outputs=True"):
            torch.ops.dist_moe.bf16_forward(x, ids, scores, w13, w2, False, 0, 1, context.name, True)


@POSTS
@pytest.mark.parametrize("case", [WIDE, BY_ROUTE], ids=str)
def test_where_every_route_has_a_row_anyway_the_flag_changes_nothing(case, post):
    options, inputs = ExecutionOptions(experts_output_postprocess=post), case.inputs()
    results = []
    for config in (case.config(), case.config(route_outputs=True)):
        results.append(run_virtual(case.W, config, inputs, backend="reference", options=options))
    assert_results_equal(*results)


def test_other_calls_have_the_same_bits_with_the_flag():
    results = []
    for config in (SHARED.config(), SHARED.config(route_outputs=True)):
        results.append(run_virtual(SHARED.W, config, SHARED.inputs(), backend="reference"))
    assert_results_equal(*results)

"""Tensors that torch could not keep or write are refused before anything runs, and the context works on."""

import copy

import pytest
import torch
from tests.transformer_block import D, E, config, inferred, operands

from dist_moe import (
    BlockScaledConfig,
    ExecutionOptions,
    RMSNormPostprocess,
    create_context,
    prepare_block_scaled_weight,
    routed_experts,
    virtual,
)
from dist_moe.symm import World
from dist_moe.virtual import RankInputs

MXFP8 = BlockScaledConfig()
T = 9
KEPT = ["topk_expert_ids_TK", "topk_scores_TK", "w13_weight", "w2_weight"]


@pytest.fixture
def context():
    with context_of() as context:
        yield context


def context_of(block_scaled=None, group=None):
    how = config(route_outputs=True, block_scaled=block_scaled)
    return create_context(group=group, config=how, device="cpu", backend="reference")


def tensors() -> dict:
    given = dict(zip(("x_TD", *KEPT), operands(T), strict=False))
    given["x_TD"].requires_grad_()
    return given


def with_norm(weight_D, **fields) -> ExecutionOptions:
    norm = RMSNormPostprocess(1e-6, torch.float32, torch.bfloat16, weight=weight_D, **fields)
    return ExecutionOptions(experts_output_postprocess=norm)


def counting_into(stats_3) -> ExecutionOptions:
    return ExecutionOptions(swiglu_clip_stats_out_3=stats_3)


def assert_works_on(context):
    assert not context.ranks[0].slot_layers_N.any()
    routed_experts(**tensors(), context=context).float().sum().backward()
    context.check()


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", [None, MXFP8], ids=["bf16", "mxfp8"])
@pytest.mark.parametrize("name", KEPT)
def test_what_backward_reads_is_not_made_under_inference_mode(name, precision, compiles):
    torch._dynamo.reset()
    with context_of(precision) as context:

        def function(*given):
            return routed_experts(*given, context)

        call = torch.compile(function, backend="aot_eager", fullgraph=True) if compiles else function
        given = tensors()
        given[name] = inferred(given[name])
        with pytest.raises(ValueError, match=f"{name} was made under inference_mode and cannot be kept for backward"):
            call(*given.values())
        context.reset()  # the compiled call is refused inside of the op
        assert_works_on(context)
        with torch.no_grad():
            call(*given.values())


@pytest.mark.parametrize("observers", [{}, {"observe_expert_output_fn": lambda rows: None}], ids=["fused", "observed"])
def test_nor_is_the_weight_of_a_norm(observers, context):
    options = with_norm(inferred(torch.ones(D).bfloat16()), **observers)
    with pytest.raises(ValueError, match=r"RMSNormPostprocess\.weight was made under inference_mode"):
        routed_experts(**tensors(), context=context, options=options)
    assert_works_on(context)
    with torch.no_grad():
        routed_experts(**tensors(), context=context, options=options)


def test_nor_are_prepared_weights():
    given = tensors()
    with context_of(MXFP8) as context:
        for name in KEPT[2:]:
            given[name] = prepare_block_scaled_weight(given[name], MXFP8, inference=False)
        with torch.inference_mode():
            given["w2_weight"] = copy.deepcopy(given["w2_weight"])
        with pytest.raises(ValueError, match="w2_weight was made under inference_mode"):
            routed_experts(**given, context=context)
        assert_works_on(context)


def test_nor_those_of_a_virtual_rank_without_gradients():
    ranks = [RankInputs(*tensors().values()) for _ in range(2)]
    for rank in ranks:
        rank.w13_L2FD, rank.w2_LDF = rank.w13_L2FD[: E // 2], rank.w2_LDF[: E // 2]
    ranks[1].x_TD, ranks[1].ids_TK = ranks[1].x_TD.detach(), inferred(ranks[1].ids_TK)
    with context_of(group=World.virtual(2, "cpu")) as context:
        with pytest.raises(ValueError, match="topk_expert_ids_TK was made under inference_mode"):
            virtual.routed_experts(ranks, context)
        assert not context.ranks[0].slot_layers_N.any()


def test_what_backward_does_not_read_may_be(context):
    """Tokens are copied into the slot, and made weights are made again."""
    given = tensors()
    given["x_TD"] = inferred(given["x_TD"])
    given["w13_weight"].requires_grad_()
    options = ExecutionOptions(weights_preprocess_fn=inferred)
    routed_experts(**given, context=context, options=options).float().sum().backward()
    assert given["w13_weight"].grad.any()


def test_counts_of_inference_mode_are_written_only_there(context):
    options = counting_into(inferred(torch.zeros(3)))
    for grad in (torch.enable_grad, torch.no_grad):
        with grad(), pytest.raises(ValueError, match="swiglu_clip_stats_out_3 was made under inference_mode"):
            routed_experts(**tensors(), context=context, options=options)
    assert_works_on(context)
    with torch.inference_mode():
        routed_experts(**tensors(), context=context, options=options)
        assert options.swiglu_clip_stats_out_3[2] > 0


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("form", [lambda leaf: leaf, lambda leaf: leaf.view(3), lambda leaf: leaf * 1])
def test_counts_have_no_gradient(form, compiles, context):
    torch._dynamo.reset()
    options = counting_into(form(torch.zeros(3, requires_grad=True)))

    def function(*given):
        return routed_experts(*given, context, options=options)

    call = torch.compile(function, backend="aot_eager") if compiles else function
    with pytest.raises(ValueError, match="swiglu_clip_stats_out_3 is written over and must not require a gradient"):
        call(*tensors().values())
    assert_works_on(context)
    with torch.no_grad():
        function(*tensors().values())
    assert options.swiglu_clip_stats_out_3[2] > 0


def test_nothing_is_kept_under_inference_mode_whatever_enable_grad_says(context):
    """torch records nothing there, so no backward would free the slot."""
    with torch.inference_mode(), torch.enable_grad():
        assert not routed_experts(**tensors(), context=context).requires_grad
    assert_works_on(context)

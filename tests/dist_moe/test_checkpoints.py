"""Activation checkpoints around the call: plain and selective, in eager and in compiled programs."""

import gc

import pytest
import torch
from tests.transformer_block import Block, assert_equal, assert_near, config, tokens
from torch._higher_order_ops.effects import has_effects
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dist_moe
from dist_moe import BlockScaledConfig, Config, SlotError, create_context

aten = torch.ops.aten
MATMULS = [aten.mm.default, aten.addmm.default, aten.bmm.default]
REST = [*MATMULS, aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor, aten._softmax.default, aten.gather.default]


def selective(saves) -> dict:
    """Arguments of a checkpoint that saves the outputs of the ops for which saves(op) holds."""

    def policy(_, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if saves(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}


def a_list(*ops) -> dict:
    return {"context_fn": lambda: create_selective_checkpoint_contexts([*ops])}


SAVES_OURS = {
    "by policy": lambda: selective(lambda op: op in dist_moe.FORWARD_OPS),
    "by list": lambda: a_list(*dist_moe.FORWARD_OPS),
    "with matmuls": lambda: a_list(*dist_moe.FORWARD_OPS, *MATMULS),
}
RECOMPUTES_OURS = {
    "plain": dict,
    "only matmuls saved": lambda: a_list(*MATMULS),
    "the rest saved": lambda: selective(lambda op: op in REST),
}
EVERY = SAVES_OURS | RECOMPUTES_OURS


def context_of(**changes):
    return create_context(group=None, config=config(**changes), device="cpu", backend="reference")


@pytest.fixture(params=[None, BlockScaledConfig()], ids=["bf16", "mxfp8"])
def context(request):
    with context_of(block_scaled=request.param) as context:
        yield context


@pytest.fixture
def forwards(monkeypatch):
    """How often the path has run forward."""
    calls, forward = [], dist_moe.moe.forward
    monkeypatch.setattr(dist_moe.moe, "forward", lambda *given: (calls.append(None), forward(*given)))
    return calls


def assert_slots_are_empty(context):
    assert not context.ranks[0].slot_layers_N.any() and not context.ranks[0].slot_used_NW.any()


def bytes_alive() -> int:
    """Of the storages of all tensors that this process knows of."""
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, Parameter)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def checkpointed(block, how):
    return lambda x_TD: checkpoint(block, x_TD, use_reentrant=False, **how)


def test_the_ops_are_named():
    with context_of(), context_of(block_scaled=BlockScaledConfig()):
        assert [str(op) for op in dist_moe.FORWARD_OPS] == [
            "dist_moe.bf16_forward.default",
            "dist_moe.block_scaled_forward.default",
        ]


@pytest.mark.parametrize("name", EVERY)
def test_bits_and_how_often_the_call_runs(name, context, forwards):
    """Fifty steps, after each of which the slot is empty; one layer of room is enough for either. The last takes no
    more memory than the second."""
    block, used = Block(context), {}
    wanted = block.step(tokens(9))
    forwards.clear()
    context.reset_memory_stats()
    for step in range(1, 51):
        assert_equal(block.step(tokens(9), checkpointed(block, EVERY[name]())), wanted)
        assert len(forwards) == step * (1 if name in SAVES_OURS else 2)
        assert_slots_are_empty(context)
        stats = context.memory_stats()
        if step in (2, 50):
            used[step] = (bytes_alive(), stats.slot_peak_bytes, stats.scratch_peak_bytes)
    assert stats.calls == 50 and used[50] == used[2]


@pytest.mark.parametrize("name", EVERY)
def test_layers_need_room_where_they_are_saved_not_where_they_are_recomputed(name):
    with context_of(max_moe_layers_per_activation_slot=3 if name in SAVES_OURS else 1) as context:
        block = Block(context)
        layer = checkpointed(block, EVERY[name]())
        with context_of(max_moe_layers_per_activation_slot=3) as roomy:
            twin = Block(roomy)
            wanted = twin.step(tokens(9), lambda x_TD: twin(twin(twin(x_TD))))
        assert_equal(block.step(tokens(9), lambda x_TD: layer(layer(layer(x_TD)))), wanted)
        assert_slots_are_empty(context)


def test_a_checkpoint_in_a_checkpoint_and_one_over_two_layers():
    with context_of(max_moe_layers_per_activation_slot=2) as context:
        block = Block(context)

        def twice(x_TD):
            return block(block(x_TD))

        wanted = block.step(tokens(9), twice)
        nested = checkpointed(lambda x_TD: checkpointed(twice, {})(x_TD), {})
        for function in (checkpointed(twice, {}), nested):
            assert_equal(block.step(tokens(9), function), wanted)
            assert_slots_are_empty(context)


def test_a_recomputed_forward_saves_into_the_slot_that_is_selected_then():
    with context_of(num_activation_slots=2) as context:
        block = Block(context)
        wanted = block.step(tokens(9))
        x_TD = tokens(9).requires_grad_()
        out_TD = checkpointed(block, a_list(*MATMULS))(x_TD)
        context.select_activation_slot(1, 1)
        out_TD.float().square().sum().backward()
        assert torch.equal(x_TD.grad, wanted[1])
        assert_slots_are_empty(context)


CLAMP = {"activation": "swiglu_clamped", "swiglu_alpha": 1.5, "swiglu_limit": 5.0}
SCALED = {
    "staged": (BlockScaledConfig(), {}),
    "staged clamped": (BlockScaledConfig(), CLAMP),
    "mega clamped": (BlockScaledConfig(pipeline="mega"), CLAMP),
}


@pytest.mark.parametrize("precision, activation", SCALED.values(), ids=SCALED)
def test_a_selective_checkpoint_in_another_slot_has_the_eager_bits(precision, activation):
    """While the eager forward lies in the first one."""
    T, D, F, K, E, g = 128, 256, 256, 2, 4, torch.Generator().manual_seed(0)
    ids_TK = torch.rand(T, E, generator=g).topk(K, 1).indices
    shapes = ((T, D), (T, K), (E, 2 * F, D), (E, D, F), (T, D))
    x, scores, w13, w2, grad_TD = (torch.randn(shape, generator=g).bfloat16() for shape in shapes)
    how = Config(T, D, F, K, E, 1, num_activation_slots=2, block_scaled=precision, **activation)
    with create_context(group=None, config=how, device="cpu", backend="reference") as context:
        assert all(map(has_effects, dist_moe.FORWARD_OPS))
        outs, leaves = [], []
        for slot, saves in enumerate(({}, SAVES_OURS["by policy"]())):
            context.select_activation_slot(slot, 1)
            leaves.append([t.clone().requires_grad_() for t in (x, scores, w13 * 0.1, w2 * 0.1)])

            def call(x_TD, scores_TK, *weights):
                return dist_moe.routed_experts(x_TD, ids_TK, scores_TK, *weights, context)

            given = leaves[slot]
            outs.append(checkpoint(call, *given, use_reentrant=False, **saves) if saves else call(*given))
        assert context.ranks[0].slot_layers_N.tolist() == [1, 1]
        for out_TD in outs:
            out_TD.backward(grad_TD)
        assert_equal([outs[1], *(t.grad for t in leaves[1])], [outs[0], *(t.grad for t in leaves[0])])
        assert all(t.grad.any() for t in leaves[0])
        assert_slots_are_empty(context)


# Compiled


@pytest.mark.parametrize("backend, assert_same", [("aot_eager", assert_equal), ("inductor", assert_near)])
def test_inside_of_a_compiled_program_ours_is_saved(backend, assert_same, context, forwards):
    torch._dynamo.reset()
    block = Block(context)
    wanted = block.step(tokens(9))
    compiled = torch.compile(checkpointed(block, SAVES_OURS["by list"]()), backend=backend, fullgraph=True)
    forwards.clear()
    for step in range(1, 4):
        assert_same(block.step(tokens(9), compiled), wanted)
        assert len(forwards) == step
        assert_slots_are_empty(context)


@pytest.mark.parametrize("name", ["plain", "only matmuls saved"])
def test_inside_of_a_compiled_program_recomputing_ours_is_refused_by_name(name, context):
    torch._dynamo.reset()
    block = Block(context)
    compiled = torch.compile(checkpointed(block, EVERY[name]()), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"checkpoint inside of torch.compile has to save .*dist_moe.FORWARD_OPS"):
        block.step(tokens(9), compiled)
    assert_slots_are_empty(context)
    block.step(tokens(9))  # the context works on


def test_around_a_compiled_program_a_selective_one_that_names_ours_is_a_slot_error():
    """Loud: it saved what a forward returned that kept nothing."""
    torch._dynamo.reset()
    with context_of() as context:
        block = Block(context)
        compiled = torch.compile(block, backend="inductor", fullgraph=True)
        block.step(tokens(9), checkpointed(compiled, SAVES_OURS["by list"]()))
        with pytest.raises(SlotError):
            context.check()
        context.reset()
        block.step(tokens(9))
        context.check()


@pytest.mark.parametrize("first", ["checkpoint", "plain call"])
def test_around_a_compiled_program(first, context, forwards):
    """Whether it is compiled under the checkpoint or before it."""
    torch._dynamo.reset()
    block = Block(context)
    wanted = block.step(tokens(9))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    if first == "plain call":
        assert_equal(block.step(tokens(9), compiled), wanted)
    for _ in range(3):
        forwards.clear()
        assert_equal(block.step(tokens(9), checkpointed(compiled, {})), wanted)
        assert len(forwards) == 2
        assert_slots_are_empty(context)
    assert_equal(block.step(tokens(9), compiled), wanted)

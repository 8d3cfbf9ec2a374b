"""torch.compile and torch.export of a transformer block that holds the call."""

import subprocess
import sys

import pytest
import torch
from tests.rank_calls import on_ranks
from tests.transformer_block import T_MAX, Block, assert_equal, assert_near, config, serving, tokens
from torch._dynamo.testing import CompileCounterWithBackend

from dist_moe import (
    BlockScaledConfig,
    Config,
    ExecutionOptions,
    RMSNormPostprocess,
    create_context,
    prepare_block_scaled_weight,
    routed_experts,
)

TWENTY = [7, 20, 5, 32, 2, 31, 3, 30, 11, 29, 4, 28, 17, 27, 6, 26, 8, 25, 9, 24]
MOST_COMPILATIONS = 3  # one of the first T, one of any T, and one to spare


def context_of(config, **how):
    return create_context(group=None, config=config, device="cpu", backend="reference", **how)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


@pytest.mark.parametrize("backend, assert_same", [("aot_eager", assert_equal), ("inductor", assert_near)])
def test_training_and_inference_of_twenty_sizes(backend, assert_same):
    assert len(set(TWENTY)) == 20 and max(TWENTY) == T_MAX
    for how in (config(), serving()):
        with context_of(how) as context:
            block, counter = Block(context), CompileCounterWithBackend(backend)
            block.requires_grad_(not how.inference)
            run = block.step if not how.inference else lambda x_TD, function=block: [function(x_TD)]
            compiled = torch.compile(block, backend=counter, fullgraph=True)
            for T in TWENTY:
                assert_same(run(tokens(T), compiled), run(tokens(T)))
            assert counter.frame_count <= MOST_COMPILATIONS
            for T in (1, 0):  # torch compiles these by themselves
                assert_same(run(tokens(T), compiled), run(tokens(T)))
            assert counter.frame_count <= MOST_COMPILATIONS + 2


NORM = RMSNormPostprocess(1e-6, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("options", [None, "counts", "norm"])
@pytest.mark.parametrize("precision", [None, BlockScaledConfig()], ids=["bf16", "mxfp8"])
def test_compiled_steps_with_options_have_the_eager_bits(options, precision):
    stats = torch.zeros(3)
    if options is not None:
        more = {"swiglu_clip_stats_out_3": stats, "swiglu_clip_limit": 1.0} if options == "counts" else {}
        options = ExecutionOptions(experts_output_postprocess=None if more else NORM, **more)
    with context_of(config(block_scaled=precision, route_outputs=True)) as context:
        block = Block(context, options=options)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        for T in (9, 20):
            wanted, counted = block.step(tokens(T)), stats.clone()
            stats.zero_()
            assert_equal(block.step(tokens(T), compiled), wanted)
            assert torch.equal(stats, counted)


@pytest.mark.parametrize("precision", [None, BlockScaledConfig()], ids=["bf16", "mxfp8"])
def test_one_function_meets_contexts_of_several_sizes(precision):
    """From the second value of a size on it stands for any number in what is compiled."""
    options = ExecutionOptions(experts_output_postprocess=NORM)

    def function(context, *given):
        return routed_experts(*given, context, options=options)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for K, E, D, F in ((2, 4, 64, 32), (1, 4, 64, 32), (3, 4, 64, 32), (3, 6, 64, 64), (2, 6, 96, 32), (8, 8, 32, 32)):
        sizes = Config(T_MAX, D, F, K, E, 1, route_outputs=True, block_scaled=precision)
        w13, w2 = torch.randn(E, 2 * F, D).bfloat16(), torch.randn(E, D, F).bfloat16()
        ids_TK = torch.rand(9, E).topk(K, 1).indices
        with context_of(sizes) as context, torch.no_grad():
            given = (context, torch.randn(9, D).bfloat16(), ids_TK, torch.rand(9, K), w13, w2)
            assert torch.equal(compiled(*given), function(*given))


@torch._dynamo.config.patch(recompile_limit=2)
def test_contexts_of_one_name_one_after_another_share_what_is_compiled():
    """Names of their own are compiled for one by one, as many as torch's limit allows."""
    counter = CompileCounterWithBackend("aot_eager")
    for _ in range(4):
        with context_of(config(), name="the layer's") as context:
            block = Block(context)
            compiled = torch.compile(block, backend=counter, fullgraph=True)
            assert_equal(block.step(tokens(9), compiled), block.step(tokens(9)))
            context.check()
    assert counter.frame_count == 1


@pytest.mark.parametrize("frozen", [("w13",), ("w2",), ("w13", "w2")], ids="+".join)
def test_weights_without_a_gradient(frozen):
    with context_of(config()) as context:
        block = Block(context)
        for name in frozen:
            getattr(block, name).requires_grad_(False)
        compiled, found = torch.compile(block, backend="aot_eager", fullgraph=True), []
        for function in (block, compiled):
            function(tokens(9)).float().square().sum().backward()
            grads = {name: parameter.grad for name, parameter in block.named_parameters()}
            assert {name for name, grad in grads.items() if grad is None} == set(frozen)
            found.append([grad for grad in grads.values() if grad is not None])
            block.zero_grad()
        assert_equal(*found)


def test_compiled_evaluation_between_forward_and_backward():
    with context_of(config()) as context:
        block = Block(context)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        wanted, expected = block.step(tokens(9)), block(tokens(20)).detach()
        context.reset()
        for mode in (torch.no_grad, torch.inference_mode):

            def evaluated(x_TD, mode=mode):
                out_TD = compiled(x_TD)
                with mode():
                    assert torch.equal(compiled(tokens(20)), expected)
                return out_TD

            assert_equal(block.step(tokens(9), evaluated), wanted)


def test_the_slot_of_a_compiled_call_is_the_one_selected_when_it_runs():
    with context_of(config(num_activation_slots=6)) as context:
        block, counter = Block(context), CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(block, backend=counter, fullgraph=True)
        wanted = block.step(tokens(9))
        outs = []
        for slot in range(6):  # six microbatches in flight
            context.select_activation_slot(slot, 1)
            outs.append(compiled(tokens(9).requires_grad_()))
        assert context.ranks[0].slot_layers_N.tolist() == [1] * 6
        for out_TD in outs:
            block.zero_grad()
            out_TD.float().square().sum().backward()
            assert_equal([p.grad for p in block.parameters()], wanted[2:])
        assert counter.frame_count <= MOST_COMPILATIONS
        assert not context.ranks[0].slot_layers_N.any()


def test_selecting_a_slot_is_left_out_of_what_is_compiled():
    with context_of(config(num_activation_slots=2)) as context:
        block = Block(context)

        def two(x_TD):
            outs = []
            for slot in range(2):
                context.select_activation_slot(slot, 1)
                outs.append(block(x_TD))
            return outs

        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(two, backend="aot_eager", fullgraph=True)(tokens(9))
        context.reset()
        outs = torch.compile(two, backend="aot_eager")(tokens(9))
        assert context.ranks[0].slot_layers_N.tolist() == [1, 1] and torch.equal(outs[0], outs[1])


def test_layers_that_share_a_context_share_what_is_compiled():
    with context_of(config(max_moe_layers_per_activation_slot=12)) as context:
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.nn.Sequential(
            *(torch.compile(Block(context), backend=counter, fullgraph=True) for _ in range(12))
        )
        eager = torch.nn.Sequential(*(layer._orig_mod for layer in compiled))
        grads = []
        for model in (compiled, eager):
            model(tokens(9)).float().square().sum().backward()
            grads.append([p.grad for p in eager.parameters()])
            eager.zero_grad()
        assert_equal(*grads)
        assert counter.frame_count <= MOST_COMPILATIONS


def test_calls_that_depend_on_nothing_of_each_other_keep_their_order():
    """The slot is a stack: inductor moved such ops of a graph before."""
    with context_of(config(max_moe_layers_per_activation_slot=4)) as context:
        blocks = [Block(context) for _ in range(4)]

        def function(x_TD):
            a, b, c, d = (block(x_TD * 2.0**i) for i, block in enumerate(blocks))
            return (d.sin() - c) + (b.cos() - a)

        found = []
        for run in (function, torch.compile(function, backend="inductor", fullgraph=True)):
            run(tokens(9)).float().square().sum().backward()
            found.append([p.grad for block in blocks for p in block.parameters()])
            for block in blocks:
                block.zero_grad()
        assert_near(*found)


def _on_two(rank, group):
    with create_context(group=group, config=config(), device="cpu", backend="reference") as context:
        block = Block(context, 2, rank)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        for step in range(4):  # ranks need not agree on T
            x_TD = tokens(9 + 5 * step - 3 * rank, seed=rank)
            assert_equal(block.step(x_TD, compiled), block.step(x_TD))
        context.check()
    return True


def test_compiled_training_on_two_ranks():
    assert on_ranks(2, _on_two, timeout_s=120) == [True, True]


# torch.export


class Served(Block):
    """With weights that are prepared ahead, in the format of the context."""

    def __init__(self, context, block_scaled):
        super().__init__(context)
        self.requires_grad_(False)
        self.prepared = [prepare_block_scaled_weight(w, block_scaled, inference=True) for w in (self.w13, self.w2)]

    def forward(self, x_TD):
        scores_TK, ids_TK = (x_TD @ self.router.T).float().softmax(1).topk(2, 1)
        return x_TD + routed_experts(x_TD, ids_TK, scores_TK, *self.prepared, self.context)


@pytest.mark.parametrize("how", [BlockScaledConfig(), BlockScaledConfig("nvfp4")], ids=lambda how: how.format)
def test_prepared_weights_are_compiled_with_the_block(how):
    with context_of(serving(block_scaled=how)) as context, torch.no_grad():
        block, counter = Served(context, how), CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(block, backend=counter, fullgraph=True)
        for T in TWENTY:
            assert torch.equal(compiled(tokens(T)), block(tokens(T)))
        assert counter.frame_count <= MOST_COMPILATIONS


def test_an_exported_block_holds_its_prepared_weights(tmp_path):
    with context_of(serving(block_scaled=BlockScaledConfig()), name="prepared") as context, torch.no_grad():
        block = Served(context, BlockScaledConfig())
        sizes = ({0: torch.export.Dim("T", min=2, max=T_MAX)},)
        exported = torch.export.export(block, (tokens(9),), dynamic_shapes=sizes, strict=True)
        torch.export.save(exported, tmp_path / "block.pt2")
        wanted = [block(tokens(T)) for T in (2, 20)]
        block.prepared[0].fprop_data.view(torch.uint8).zero_()  # the program has its own
        run = torch.export.load(tmp_path / "block.pt2").module()
        assert_equal([run(tokens(T)) for T in (2, 20)], wanted)


LOAD = """
import sys, torch
from dist_moe import create_context
from tests.transformer_block import serving
program = torch.export.load(sys.argv[1])
with create_context(group=None, config=serving(), device="cpu", backend="reference", name="served"):
    run = program.module()
    for x_TD, wanted in torch.load(sys.argv[2]):
        assert torch.equal(run(x_TD), wanted), len(x_TD)
try:
    run(x_TD)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("how", [serving(), config()], ids=["inference", "training"])
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_block_runs_in_another_process(strict, how, tmp_path):
    program, examples = tmp_path / "block.pt2", tmp_path / "examples.pt"
    with context_of(how, name="served") as context, torch.no_grad():
        block = Block(context).requires_grad_(False)
        sizes = ({0: torch.export.Dim("T", min=2, max=T_MAX)},)
        exported = torch.export.export(block, (tokens(9),), dynamic_shapes=sizes, strict=strict)
        names = [str(node.target) for node in exported.graph.nodes]
        assert names.count("dist_moe.bf16_forward.default") == 1
        wanted = [(tokens(T), block(tokens(T))) for T in (2, 9, 20, T_MAX)]
        for x_TD, out_TD in wanted:
            assert torch.equal(exported.module()(x_TD), out_TD)
        torch.export.save(exported, program)
        torch.save(wanted, examples)
    done = subprocess.run([sys.executable, "-c", LOAD, program, examples], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "context 'served' is not live" in done.stdout

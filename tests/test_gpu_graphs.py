"""CUDA graphs of training, accumulation and inference, and compiled blocks, on a GPU."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from dist_moe import BlockScaledConfig, ExecutionOptions, RMSNormPostprocess, create_context, routed_experts
from tests.transformer_block import (
    Block,
    D,
    E,
    assert_equal,
    assert_near,
    config,
    operands,
    serving,
    tokens,
)

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
MXFP8, MEGA = BlockScaledConfig(), BlockScaledConfig(pipeline="mega")
PRECISIONS = pytest.mark.parametrize("precision", [None, MXFP8], ids=["bf16", "mxfp8"])
GRAD_DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16 grads", "fp32 grads"])
LIMIT = 1.5


def tensors(seed: int = 0) -> list[torch.Tensor]:
    return [tensor.cuda() for tensor in operands(seed=seed)]


def whole_numbers(seed: int) -> list[torch.Tensor]:
    """As tensors, with h1 of whole numbers below 256 in every precision: x of 0, 1, 2 and W13 of 0 and 1, with their
    negatives."""
    g, made = torch.Generator().manual_seed(seed), tensors(seed)
    for place, largest in ((0, 2), (3, 1)):
        made[place].copy_(torch.randint(-largest, largest + 1, made[place].shape, generator=g))
    return made


def counts_of(x_TD, ids_TK, w13_L2FD) -> list[float]:
    h1 = torch.cat([x_TD[(ids_TK == e).any(1)].float() @ w13_L2FD[e].float().T for e in range(E)])
    gate, up = h1.chunk(2, dim=1)
    return [float((gate > LIMIT).sum()), float((up.abs() > LIMIT).sum()), float(gate.numel())]


class Step:
    """A function of static tensors: called it runs eagerly, captured it replays; either way it returns copies."""

    make = staticmethod(tensors)

    def __init__(self, context, dtype=BF16):
        self.context, self.static, self.graph = context, tensors(), None
        self.grads = [torch.zeros_like(w, dtype=dtype) for w in self.static[3:5]]

    def load(self, seed: int) -> "Step":
        for old, new in zip(self.static, self.make(seed), strict=True):
            old.copy_(new)
        for grad in self.grads:
            grad.fill_(0.5)
        return self

    def capture(self) -> "Step":
        self.run()  # compiles what it needs
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.captured = self.run()
        return self

    def __call__(self) -> list[torch.Tensor]:
        if self.graph is None:
            found = self.run()
        else:
            self.graph.replay()
            found = self.captured
        return [t.clone() for t in [*found, *self.grads]]


class Train(Step):
    def run(self):
        x, ids, scores, w13, w2, grad = self.static
        leaves = [t.detach().requires_grad_() for t in (x, scores, w13, w2)]
        out_TD = routed_experts(leaves[0], ids, *leaves[1:], self.context)
        return [out_TD.detach(), *torch.autograd.grad(out_TD, leaves, grad)]


class Accumulate(Step):
    """Adds in place into gradients that were there before the capture."""

    def run(self):
        x, ids, scores, w13, w2, grad = self.static
        x, scores, w13, w2 = (t.detach().requires_grad_() for t in (x, scores, w13, w2))
        for weight, into in zip((w13, w2), self.grads, strict=True):
            weight.grad_dtype = into.dtype
            weight.grad = into
        options = ExecutionOptions(inplace_wgrad_accum=True)
        out_TD = routed_experts(x, ids, scores, w13, w2, self.context, options=options)
        out_TD.backward(grad)
        assert w13.grad.data_ptr() == self.grads[0].data_ptr()
        return [out_TD.detach(), x.grad, scores.grad]


class Serve(Step):
    def run(self):
        with torch.no_grad():
            return [routed_experts(*self.static[:5], self.context)]


class Asking(Step):
    """Counts what is past the limit and, if asked, normalises what the experts returned."""

    make = staticmethod(whole_numbers)

    def __init__(self, context, trains: bool, norms: bool):
        super().__init__(context)
        self.trains, self.norms = trains, norms
        self.gain_D = torch.linspace(-0.5, 0.5, D).bfloat16().cuda()
        self.stats_3 = torch.zeros(3).cuda()

    def run(self):
        x, ids, scores, w13, w2, grad = self.static
        leaves = [t.detach().requires_grad_(self.trains) for t in (x, scores, w13, w2, self.gain_D)]
        norm = RMSNormPostprocess(1e-6, FP32, BF16, weight=leaves[4], gain_center=1.0)
        if not self.norms:
            norm, leaves = None, leaves[:4]
        options = ExecutionOptions(
            experts_output_postprocess=norm, swiglu_clip_stats_out_3=self.stats_3, swiglu_clip_limit=LIMIT
        )
        out_TD = routed_experts(leaves[0], ids, *leaves[1:4], self.context, options=options)
        return [out_TD.detach(), *(torch.autograd.grad(out_TD, leaves, grad) if self.trains else ())]


@PRECISIONS
@GRAD_DTYPES
def test_a_captured_accumulation_adds_what_the_eager_one_does(dtype, precision):
    with create_context(group=None, config=config(block_scaled=precision)) as context:
        captured, eager = Accumulate(context, dtype).load(0).capture(), Accumulate(context, dtype)
        for seed in range(3):
            captured.load(seed), eager.load(seed)
            for _ in range(3):  # on top of each other
                assert_equal(captured(), eager())
        context.check()


@PRECISIONS
def test_graphs_of_one_context_replay_in_any_order(precision):
    with create_context(group=None, config=config(block_scaled=precision)) as context:
        kinds = (Train, Accumulate, Serve)
        captured, eager = ([kind(context).load(0) for kind in kinds] for _ in range(2))
        for step in captured:
            step.capture()
        for seed, order in enumerate(itertools.permutations(range(3))):
            for which in order:
                assert_equal(captured[which].load(seed)(), eager[which].load(seed)())
        for which in (0, 2, 2, 1, 0, 0, 1):  # without eager calls between
            captured[which].load(which)()
        for which in range(3):
            assert_equal(captured[which].load(7)(), eager[which].load(7)())
        context.check()


@PRECISIONS
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("how, trains", [(config, True), (config, False), (serving, False)])
def test_replays_write_over_the_counts_and_normalise(how, trains, norms, precision):
    with create_context(group=None, config=how(block_scaled=precision, route_outputs=True)) as context:
        captured, eager = Asking(context, trains, norms).load(0).capture(), Asking(context, trains, norms)
        for seed in (1, 2, 1):
            found = []
            for step in (captured, eager):
                step.load(seed).stats_3.fill_(-1.0)
                found.append(step())
                x, ids, _, w13, *_ = step.static
                assert step.stats_3.tolist() == counts_of(x, ids, w13)
            assert_equal(*found)
        x, ids, _, w13, *_ = whole_numbers(2)
        assert counts_of(x, ids, w13) != eager.stats_3.tolist() and 0 < eager.stats_3[0] < eager.stats_3[2]
        context.check()


GRAPHED = {
    "bf16": (None, None),
    "mxfp8": (MXFP8, None),
    "mega": (MEGA, None),
    "bf16-bf16 grads": (None, BF16),
    "bf16-fp32 grads": (None, FP32),
    "mxfp8-bf16 grads": (MXFP8, BF16),
    "mxfp8-fp32 grads": (MXFP8, FP32),
}


@pytest.mark.parametrize("precision, dtype", GRAPHED.values(), ids=GRAPHED)
def test_make_graphed_callables(precision, dtype):
    """Forward and backward as graphs of their own, with the dtype of gradients that are asked for in place."""
    options = ExecutionOptions(inplace_wgrad_accum=dtype is not None)
    with create_context(group=None, config=config(block_scaled=precision)) as context:
        x, ids, scores, w13, w2, grad = tensors()
        w13, w2 = (torch.nn.Parameter(w) for w in (w13, w2))

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.w13, self.w2 = w13, w2

            def forward(self, x, ids, scores):
                return routed_experts(x, ids, scores, self.w13, self.w2, context, options=options)

        layer = Layer()
        if dtype is not None:
            for weight in (w13, w2):
                weight.grad_dtype, weight.grad = dtype, torch.zeros_like(weight, dtype=dtype)
        sample = (x.clone().requires_grad_(), ids.clone(), scores.clone().requires_grad_())
        graphed = torch.cuda.make_graphed_callables(layer, sample, allow_unused_input=True)
        plain = lambda *given: routed_experts(*given, w13, w2, context, options=options)  # noqa: E731
        for seed in range(2):
            found = []
            for function in (graphed, plain):
                x, ids, scores, *_, grad = tensors(seed)
                x.requires_grad_(), scores.requires_grad_()
                for weight in (w13, w2):
                    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.zero_()
                out_TD = function(x, ids, scores)
                out_TD.backward(grad)
                found.append([t.detach().clone() for t in (out_TD, x.grad, scores.grad, w13.grad, w2.grad)])
            assert_equal(*found)
            assert found[0][3].any() and found[0][3].dtype is (dtype or BF16)
        context.check()


# Compiled


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("how", [config(), serving()], ids=["training", "inference"])
def test_a_compiled_block_of_twenty_sizes(how, mode):
    sizes = [7, 20, 5, 32, 2, 31, 3, 30, 11, 29, 4, 28, 17, 27, 6, 26, 8, 25, 9, 24]
    torch._dynamo.reset()
    with create_context(group=None, config=how) as context:
        block = Block(context).requires_grad_(not how.inference)
        run = block.step if not how.inference else lambda x_TD, function=block: [function(x_TD)]
        if mode == "default":
            counter = CompileCounterWithBackend("inductor")
            compiled = torch.compile(block, backend=counter, fullgraph=True)
        else:  # one graph a size
            sizes, compiled = [32, 16] * 4, torch.compile(block, mode=mode, fullgraph=True)
        for T in sizes:
            torch.compiler.cudagraph_mark_step_begin()
            assert_near([t.clone() for t in run(tokens(T, device="cuda"), compiled)], run(tokens(T, device="cuda")))
        if mode == "default":
            assert counter.frame_count <= 3
        context.check()

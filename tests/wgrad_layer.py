"""One layer whose weight gradients go where its options say, shared by the tests of those options."""

import torch

from dist_moe import BlockScaledConfig, Config, create_context, routed_experts

T, D, F, K, E = 8, 64, 32, 2, 4
BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = {"w13": (E, 2 * F, D), "w2": (E, D, F)}
NAMES = ("w13", "w2")
# (of a Config, whether its columns are expanded)
PRECISIONS = {
    "bf16": (None, False),
    "mxfp8": (BlockScaledConfig(), False),
    "mxfp8 expanded": (BlockScaledConfig(), True),
}


def context_of(wgrad_dtype=None, block_scaled=None, device="cpu", backend="reference", **changes):
    fields = {"max_moe_layers_per_activation_slot": 1, "activation_slot_capacity_factor": 1.0}
    config = Config(T, D, F, K, E, wgrad_dtype=wgrad_dtype, block_scaled=block_scaled, **fields | changes)
    return create_context(group=None, config=config, device=device, backend=backend)


def randn(*shape, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """Leaves of one call; expert E - 1 gets no row."""

    def __init__(self, device="cpu", grad_dtype=None, shapes=SHAPES):
        self.x = randn(T, D, seed=0).bfloat16().to(device).requires_grad_()
        self.ids = randn(T, E - 1, seed=9).topk(K).indices.to(device)
        self.scores = (randn(T, K, seed=1).abs() + 0.1).to(device).requires_grad_()
        self.grad_TD = randn(T, D, seed=2).bfloat16().to(device)
        for seed, name in enumerate(NAMES):
            weight = (randn(*SHAPES[name], seed=3 + seed) * 0.2).bfloat16().view(shapes[name])
            setattr(self, name, torch.nn.Parameter(weight.to(device)))
            getattr(self, name).grad_dtype = grad_dtype

    def forward(self, context, options=None, **changes):
        given = {"w13_weight": self.w13, "w2_weight": self.w2} | changes
        return routed_experts(self.x, self.ids, self.scores, **given, context=context, options=options)

    def step(self, context, options=None, **changes):
        self.forward(context, options, **changes).backward(self.grad_TD)
        return self.grads()

    def grads(self):
        return self.w13.grad, self.w2.grad

    def seed_grads(self, dtype):
        """Give both owners a gradient; returns copies."""
        for seed, name in enumerate(NAMES):
            weight = getattr(self, name)
            weight.grad_dtype = dtype
            weight.grad = randn(*weight.shape, seed=7 + seed).to(weight.device, dtype)
        return [grad.clone() for grad in self.grads()]


def functional(context, dtype=FP32) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight gradients of the layer in dtype, by autograd alone, and not zero."""
    with context_of(dtype, context.config.block_scaled) as other:
        grads = Layer(grad_dtype=dtype).step(other)
    assert all(grad.float().abs().max() > 0.1 and not grad[E - 1].any() for grad in grads)
    return grads


def assert_equal(found, wanted) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def rounded_sum(previous, grads) -> list[torch.Tensor]:
    return [(p.float() + g).to(p.dtype) for p, g in zip(previous, grads, strict=True)]

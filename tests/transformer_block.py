"""A transformer block whose feed-forward is the call, small enough to be compiled in every test."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from dist_moe import Config, ExecutionOptions, routed_experts

T_MAX, D, F, K, E, NUM_HEADS = 32, 64, 96, 2, 8, 4


def config(**changes) -> Config:
    fields = {"max_moe_layers_per_activation_slot": 1, "activation_slot_capacity_factor": 1.0}
    return Config(T_MAX, D, F, K, E, **fields | changes)


def serving(**changes) -> Config:
    return config(**{"inference": True, "num_activation_slots": 0, "activation_slot_capacity_factor": None} | changes)


def operands(T: int = T_MAX, seed: int = 0) -> list[torch.Tensor]:
    """x, ids, scores, w13, w2 and the gradient of the output."""
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(T, D, generator=g).bfloat16(),
        torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)]),
        torch.rand(T, K, generator=g),
        (torch.randn(E, 2 * F, D, generator=g) * D**-0.5).bfloat16(),
        (torch.randn(E, D, F, generator=g) * F**-0.5).bfloat16(),
        torch.randn(T, D, generator=g).bfloat16(),
    ]


def inferred(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that was made under inference_mode."""
    with torch.inference_mode():
        return tensor.clone()


class Block(torch.nn.Module):
    """x [T, D] to [T, D]: attention, a router, this rank's experts."""

    def __init__(self, context, num_ranks: int = 1, rank: int = 0, options: ExecutionOptions | None = None):
        super().__init__()
        g = torch.Generator().manual_seed(0)

        def parameter(*shape):
            return torch.nn.Parameter((torch.randn(shape, generator=g) * shape[-1] ** -0.5).bfloat16())

        self.context, self.options = context, options
        self.qkv, self.out, self.router = parameter(3 * D, D), parameter(D, D), parameter(E, D)
        self.register_buffer("route", torch.randn(D, E, generator=g))
        self.norms = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(D).bfloat16()) for _ in range(2))
        own = slice(rank * E // num_ranks, (rank + 1) * E // num_ranks)
        self.w13, self.w2 = (torch.nn.Parameter(parameter(*s).data[own].clone()) for s in ((E, 2 * F, D), (E, D, F)))
        self.to(context.device)

    def forward(self, x_in_TD):
        x_TD, T = x_in_TD, x_in_TD.shape[0]
        qkv = torch.nn.functional.rms_norm(x_TD, (D,), self.norms[0]) @ self.qkv.T
        q, k, v = qkv.view(T, 3, NUM_HEADS, D // NUM_HEADS).permute(1, 2, 0, 3).unsqueeze(1).unbind()
        heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        x_TD = x_TD + heads[0].transpose(0, 1).reshape(T, D) @ self.out.T
        h_TD = torch.nn.functional.rms_norm(x_TD, (D,), self.norms[1])
        # By the input alone, so that no rounding of a compiler's sends a token elsewhere.
        ids_TK = (x_in_TD.float() @ self.route).topk(K, 1).indices
        scores_TK = (h_TD @ self.router.T).float().softmax(1).gather(1, ids_TK)
        scores_TK = scores_TK / scores_TK.sum(1, keepdim=True)
        return x_TD + routed_experts(h_TD, ids_TK, scores_TK, self.w13, self.w2, self.context, options=self.options)

    def step(self, x_TD, function=None) -> list[torch.Tensor]:
        """Output and gradients of x and of the parameters, of this block or of a function made of it."""
        x_TD = x_TD.detach().requires_grad_()
        out_TD = (self if function is None else function)(x_TD)
        return [out_TD.detach(), *torch.autograd.grad(out_TD.float().square().sum(), [x_TD, *self.parameters()])]


def tokens(T: int, seed: int = 0, device="cpu") -> torch.Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1000 * seed + T)).bfloat16().to(device)


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert [t.shape for t in found] == [t.shape for t in wanted]
    for place, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), place


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Of a compiler that keeps intermediate values in FP32: a few roundings of bf16, of sums over all tokens."""
    for place, (a, b) in enumerate(zip(found, wanted, strict=True)):
        error = (a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)
        assert error < 0.05 or not b.numel(), (place, float(error))

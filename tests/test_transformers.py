"""The MoE block of transformers' Qwen3 beside the call, with the same weights."""

import copy

import pytest
import torch

from dist_moe import Config, create_context, routed_experts
from dist_moe.testing import assert_close

pytestmark = pytest.mark.transformers

T, SEQUENCES, D, F, K, E = 12, 3, 64, 96, 2, 8


def qwen3_block(seed: int = 0) -> torch.nn.Module:
    """With random weights at which outputs have the size of inputs."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": D, "moe_intermediate_size": F, "num_experts": E, "num_experts_per_tok": K}
    block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes))
    g = torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g) * parameter.shape[-1] ** -0.5
    return block.bfloat16()


class Ours(torch.nn.Module):
    """In the place of Qwen3MoeExperts, of its weights."""

    def __init__(self, experts, context):
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.context = context

    def forward(self, x_TD, ids_TK, scores_TK):
        return routed_experts(x_TD, ids_TK, scores_TK, self.gate_up_proj, self.down_proj, self.context)


class InFloat32(torch.nn.Module):
    """Their own experts, computed exactly and rounded once."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts.float()

    def forward(self, x_TD, ids_TK, scores_TK):
        return self.experts(x_TD.float(), ids_TK, scores_TK.float()).to(x_TD.dtype)


def step(block, x_SLD, grad_SLD) -> dict[str, torch.Tensor]:
    x_SLD = x_SLD.clone().requires_grad_()
    out_SLD = block(x_SLD)
    out_SLD.backward(grad_SLD)
    grads = {name.split(".")[-1]: parameter.grad for name, parameter in block.named_parameters()}
    return {"out": out_SLD.detach().flatten(0, 1), "x": x_SLD.grad.flatten(0, 1)} | grads


@pytest.fixture(params=["reference", "triton"])
def context(request, device):
    device = device if request.param == "triton" else torch.device("cpu")
    config = Config(T * SEQUENCES, D, F, K, E, 1, activation_slot_capacity_factor=1.0)
    with create_context(group=None, config=config, device=device, backend=request.param) as context, device:
        yield context


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_forward_and_backward_of_the_block(compiled, context):
    torch._dynamo.reset()
    theirs = qwen3_block().to(context.device)
    ours = copy.deepcopy(theirs)
    ours.experts = Ours(ours.experts, context)
    theirs.experts = InFloat32(theirs.experts)
    if compiled:
        ours.compile(backend="aot_eager", fullgraph=True)
    x_SLD, grad_SLD = (torch.randn(SEQUENCES, T, D).bfloat16() for _ in range(2))
    found, wanted = step(ours, x_SLD, grad_SLD), step(theirs, x_SLD, grad_SLD)
    assert found.keys() == wanted.keys() == {"out", "x", "gate_up_proj", "down_proj", "weight"}
    assert_close(found["out"], wanted["out"], "path")
    for name in ("x", "gate_up_proj", "down_proj", "weight"):
        assert_close(found[name].float(), wanted[name].float(), "path_grads")

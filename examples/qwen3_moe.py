"""A Qwen3-MoE model of transformers with its experts spread over the ranks: same weights, same logits, then training.

Run: torchrun --nproc-per-node=2 examples/qwen3_moe.py        (or with --cpu)
Needs: pip install 'dist-moe-triton[transformers]'
"""

import copy

import torch
import torch.distributed as dist
from common import print_once, process_group
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import dist_moe

T, LAYERS = 64, 2
qwen = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=128,
    moe_intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    initializer_range=0.1,
)
config = dist_moe.Config(
    num_local_input_tokens=T,
    hidden_dim=qwen.hidden_size,
    intermediate_dim=qwen.moe_intermediate_size,
    top_k=qwen.num_experts_per_tok,
    num_experts=qwen.num_experts,
    max_moe_layers_per_activation_slot=LAYERS,
    device_scratch_capacity_factor=2.0,
)


class RoutedExperts(torch.nn.Module):
    """In the place of Qwen3MoeExperts: this rank's share of its weights, in the layout that they have there."""

    def __init__(self, experts, context):
        super().__init__()
        first = dist.get_rank() * context.experts_per_rank
        own = slice(first, first + context.experts_per_rank)
        self.context = context
        self.gate_up_proj, self.down_proj = (
            torch.nn.Parameter(weight.data[own].clone()) for weight in (experts.gate_up_proj, experts.down_proj)
        )

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return dist_moe.routed_experts(
            hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, self.context
        )


with process_group(__doc__) as device, dist_moe.create_context(group=dist.group.WORLD, config=config) as context:
    torch.manual_seed(0)  # the same model everywhere, before each rank keeps its share
    model = Qwen3MoeForCausalLM(qwen).to(device, torch.bfloat16)
    whole = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.mlp.experts = RoutedExperts(layer.mlp.experts, context)

    ids = torch.randint(qwen.vocab_size, (1, T), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    with torch.no_grad():
        logits, expected = model(ids).logits.float(), whole(ids).logits.float()
    error = ((logits - expected).norm() / expected.norm()).item()
    print_once(f"logits differ from those of the whole model by {error:.4f} of their norm")
    assert error < 0.05  # the rounding of bf16

    shared = [p for name, p in model.named_parameters() if ".experts." not in name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss / dist.get_world_size()
        loss.backward()
        for parameter in shared:  # the gradients of experts hold the tokens of all ranks already
            dist.all_reduce(parameter.grad)
        context.check()
        optimizer.step()
        dist.all_reduce(loss.detach())
        losses.append(loss.item())
        print_once(f"step {step}: loss {losses[-1]:.4f}")
    assert losses[-1] < losses[0]

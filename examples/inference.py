"""A context that only serves: no slots, no saved state, half the symmetric memory for tokens.

Run: torchrun --nproc-per-node=2 examples/inference.py        (or with --cpu)
"""

import torch
import torch.distributed as dist
from common import D, E, F, K, T, expert_weights, print_once, process_group, tokens

import dist_moe

config = dist_moe.Config(T, D, F, K, E, 1, device_scratch_capacity_factor=2.0, num_activation_slots=0, inference=True)

with process_group(__doc__) as device, dist_moe.create_context(group=dist.group.WORLD, config=config) as context:
    print_once(context.memory_plan.explain())
    w13, w2 = (weight.requires_grad_(False) for weight in expert_weights(device))
    with torch.no_grad():
        for step, num_tokens in enumerate((T, 16, 1, 0)):
            y = dist_moe.routed_experts(*tokens(device, num_tokens, seed=step), w13, w2, context)
            print_once(f"{num_tokens} tokens -> {list(y.shape)}")
    context.check()

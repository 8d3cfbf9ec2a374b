"""A few optimiser steps on one layer.

Run: torchrun --nproc-per-node=2 examples/train_step.py        (or with --cpu)
"""

import torch
import torch.distributed as dist
from common import D, E, F, K, T, expert_weights, print_once, process_group, tokens

import dist_moe

config = dist_moe.Config(
    num_local_input_tokens=T,
    hidden_dim=D,
    intermediate_dim=F,
    top_k=K,
    num_experts=E,
    max_moe_layers_per_activation_slot=1,
    device_scratch_capacity_factor=2.0,  # a rank may receive twice the balanced number of rows
    activation_slot_capacity_factor=1.0,  # keep what backward needs, when routing is balanced
)

with process_group(__doc__) as device, dist_moe.create_context(group=dist.group.WORLD, config=config) as context:
    print_once(context.memory_plan.explain())
    w13, w2 = expert_weights(device)
    x, ids, scores = tokens(device)
    target = torch.randn(T, D, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    optimizer = torch.optim.SGD([w13, w2], lr=2.0)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        y = dist_moe.routed_experts(x, ids, scores, w13, w2, context)
        loss = (y.float() - target).square().mean()
        loss.backward()
        context.check()  # a fault of any rank is an exception here, before the weights move
        optimizer.step()
        dist.all_reduce(loss.detach(), dist.ReduceOp.SUM)
        losses.append(loss.item() / dist.get_world_size())
        print_once(f"step {step}: loss {losses[-1]:.4f}")
    assert losses[-1] < losses[0]

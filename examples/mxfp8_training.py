"""A few optimiser steps in MXFP8, twice: the weights quantised by every call, then prepared once a step.

Run: torchrun --nproc-per-node=2 examples/mxfp8_training.py        (or with --cpu)
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
    device_scratch_capacity_factor=2.0,
    activation_slot_capacity_factor=1.0,
    block_scaled=dist_moe.BlockScaledConfig("mxfp8_e4m3"),
)


def train(context: dist_moe.Context, device: torch.device, *, prepare: bool) -> list[float]:
    """Losses over all ranks. The weights stay bf16 parameters; gradients land there in both ways."""
    parameters = expert_weights(device)
    weights = [dist_moe.prepare_block_scaled_weight(w, config) for w in parameters] if prepare else parameters
    x, ids, scores = tokens(device)
    target = torch.randn(T, D, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    optimizer = torch.optim.SGD(parameters, lr=2.0)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        y = dist_moe.routed_experts(x, ids, scores, *weights, context)
        loss = (y.float() - target).square().mean()
        loss.backward()
        context.check()
        optimizer.step()
        if prepare:  # the same memory, filled with what the step made of the parameters
            for parameter, weight in zip(parameters, weights, strict=True):
                dist_moe.prepare_block_scaled_weight(parameter, config, out=weight)
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


with process_group(__doc__) as device, dist_moe.create_context(group=dist.group.WORLD, config=config) as context:
    dynamic = train(context, device, prepare=False)
    prepared = train(context, device, prepare=True)
    for step, (one, other) in enumerate(zip(dynamic, prepared, strict=True)):
        print_once(f"step {step}: loss {one:.4f}, with prepared weights {other:.4f}")
    assert dynamic[-1] < dynamic[0]
    assert prepared == dynamic

"""Three layers on one context, and two microbatches in flight: layers share a slot, a microbatch has its own.

Run: torchrun --nproc-per-node=2 examples/several_layers.py        (or with --cpu)
"""

import torch.distributed as dist
from common import D, E, F, K, T, expert_weights, print_once, process_group, tokens

import dist_moe

NUM_LAYERS, NUM_MICROBATCHES = 3, 2

config = dist_moe.Config(
    T,
    D,
    F,
    K,
    E,
    NUM_LAYERS,
    device_scratch_capacity_factor=2.0,
    activation_slot_capacity_factor=0.5,  # room for some layers; the others recompute from x
    num_activation_slots=NUM_MICROBATCHES,
)

with process_group(__doc__) as device, dist_moe.create_context(group=dist.group.WORLD, config=config) as context:
    layers = [expert_weights(device) for _ in range(NUM_LAYERS)]
    losses = []
    for microbatch in range(NUM_MICROBATCHES):
        context.select_activation_slot(microbatch, NUM_LAYERS)
        x, ids, scores = tokens(device, seed=microbatch)
        for w13, w2 in layers:
            x = x + dist_moe.routed_experts(x, ids, scores, w13, w2, context)
        losses.append(x.float().square().mean())
    for loss in losses:  # the slot of each backward is that of its forward
        loss.backward()
    context.check()
    print_once("gradient norms:", [f"{w13.grad.float().norm().item():.3f}" for w13, _ in layers])

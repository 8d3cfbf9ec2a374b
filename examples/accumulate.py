"""Gradients of several microbatches added in place: no weight gradient but the first one is allocated.

Run: torchrun --nproc-per-node=2 examples/accumulate.py        (or with --cpu)
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
    wgrad_dtype=torch.float32,
)

with process_group(__doc__) as device, dist_moe.create_context(group=dist.group.WORLD, config=config) as context:
    weights = expert_weights(device)
    for weight in weights:
        weight.grad_dtype = torch.float32  # torch's default is the weight's own dtype
    x, ids, scores = tokens(device)
    sums = []
    for in_place in (False, True):
        options = dist_moe.ExecutionOptions(inplace_wgrad_accum=in_place)
        for weight in weights:
            weight.grad = None
        for microbatch in range(4):
            y = dist_moe.routed_experts(x * (microbatch + 1), ids, scores, *weights, context, options=options)
            y.float().square().mean().backward()
        context.check()
        sums.append([weight.grad for weight in weights])
    assert all(torch.equal(*pair) and pair[0].any() for pair in zip(*sums, strict=True))
    print_once("four microbatches: the FP32 sums have the same bits in place and by autograd")

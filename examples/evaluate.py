"""Evaluation under no_grad between a forward and its backward: same bits, and the training state is untouched.

Run: torchrun --nproc-per-node=2 examples/evaluate.py        (or with --cpu)
"""

import torch
import torch.distributed as dist
from common import D, E, F, K, T, expert_weights, print_once, process_group, tokens

import dist_moe

config = dist_moe.Config(T, D, F, K, E, 1, device_scratch_capacity_factor=2.0)

with process_group(__doc__) as device, dist_moe.create_context(group=dist.group.WORLD, config=config) as context:
    w13, w2 = expert_weights(device)
    x, ids, scores = tokens(device)
    y = dist_moe.routed_experts(x, ids, scores, w13, w2, context)
    with torch.no_grad():
        again = dist_moe.routed_experts(x, ids, scores, w13, w2, context)
        fewer = dist_moe.routed_experts(x[:17], ids[:17], scores[:17], w13, w2, context)  # any number up to T
    y.float().square().mean().backward()
    context.check()
    assert torch.equal(y, again)
    torch.testing.assert_close(fewer, y[:17], rtol=0.02, atol=0.01)
    print_once("evaluation gives the bits of training, and takes fewer tokens")

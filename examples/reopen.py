"""A context closed and made again, for another number of tokens.

Run: torchrun --nproc-per-node=2 examples/reopen.py        (or with --cpu)
"""

import dataclasses

import torch
import torch.distributed as dist
from common import D, E, F, K, T, expert_weights, print_once, process_group, tokens

import dist_moe

config = dist_moe.Config(T, D, F, K, E, 1, device_scratch_capacity_factor=2.0)

with process_group(__doc__) as device:
    w13, w2 = expert_weights(device)
    x, ids, scores = tokens(device)
    outs = []
    for num_tokens in (T, 2 * T):
        larger = dataclasses.replace(config, num_local_input_tokens=num_tokens)
        context = dist_moe.create_context(group=dist.group.WORLD, config=larger)
        with torch.no_grad():
            outs.append(dist_moe.routed_experts(x, ids, scores, w13, w2, context))
        context.check()
        context.close()
    assert torch.equal(*outs)
    print_once("the same bits from both contexts")

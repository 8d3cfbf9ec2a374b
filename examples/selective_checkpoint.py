"""Selective checkpoints: the rest of a block is made again in backward, and the call is saved or made again too.

Run: torchrun --nproc-per-node=2 examples/selective_checkpoint.py        (or with --cpu)
"""

from functools import partial

import torch
import torch.distributed as dist
from common import D, E, F, K, T, expert_weights, print_once, process_group, tokens
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dist_moe

LAYERS = 3
matmuls = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
policies = {
    # the call runs once a step; its state stays in the slot: room for all layers
    "call saved": ([*dist_moe.FORWARD_OPS], LAYERS),
    # the call runs again before its backward: room for one layer
    "call made again": (matmuls, 1),
}


def block(x, ids, scores, w13, w2, dense, context):
    return x + dist_moe.routed_experts(torch.tanh(x @ dense), ids, scores, w13, w2, context)


with process_group(__doc__) as device:
    w13, w2 = expert_weights(device)
    x, ids, scores = tokens(device)
    dense = torch.nn.Parameter(torch.eye(D, device=device, dtype=torch.bfloat16))
    found = {}
    for name, (saved, layers_with_room) in policies.items():
        config = dist_moe.Config(
            num_local_input_tokens=T,
            hidden_dim=D,
            intermediate_dim=F,
            top_k=K,
            num_experts=E,
            max_moe_layers_per_activation_slot=layers_with_room,
            device_scratch_capacity_factor=2.0,
            activation_slot_capacity_factor=1.0,
        )
        with dist_moe.create_context(group=dist.group.WORLD, config=config) as context:
            context_fn = partial(create_selective_checkpoint_contexts, saved)
            y = x
            for _ in range(LAYERS):
                layer = (y, ids, scores, w13, w2, dense, context)
                y = checkpoint(block, *layer, use_reentrant=False, context_fn=context_fn)
            y.float().square().mean().backward()
            context.check()
            slot_mib = context.memory_plan.activation_slot_bytes / 2**20
            print_once(f"{name}: a slot of {slot_mib:.1f} MiB, gradient of dense {dense.grad.float().norm():.5f}")
            found[name] = [parameter.grad.clone() for parameter in (dense, w13, w2)]
            dense.grad = w13.grad = w2.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))

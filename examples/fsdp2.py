"""FSDP2 around an MoE block: every rank owns its experts (EP), everything else is sharded over all ranks.

Run: torchrun --nproc-per-node=2 examples/fsdp2.py        (or with --cpu; of 4 ranks, two at a time share the experts)
"""

import torch
import torch.distributed as dist
from block import Block, fsdp_block, whole
from common import D, E, F, K, T, print_once, process_group
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import dist_moe
from dist_moe.testing import assert_close

EP_SIZE, NUM_MICROBATCHES = 2, 2
config = dist_moe.Config(T, D, F, K, E, 1, device_scratch_capacity_factor=2.0, activation_slot_capacity_factor=1.0)


def batches(rank: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """A rank's microbatches: x and what is to become of it, [T, D]."""
    generator = torch.Generator().manual_seed(rank)
    pairs = torch.randn(NUM_MICROBATCHES, 2, T, D, generator=generator).to(device)
    return [tuple(pair) for pair in pairs]


def clip(groups: tuple[list[nn.Parameter], ...], max_norm: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ of all groups together; the norm before."""
    norm = torch.stack([whole(get_total_norm([weight.grad for weight in group])) for group in groups]).norm()
    for group in groups:
        clip_grads_with_norm_(group, max_norm, norm)
    return norm


def train(block: Block, microbatches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, dict]:
    """Five steps: this process's part of each loss, the norms of the gradients, and the gradients of the first."""
    num_tokens = NUM_MICROBATCHES * dist.get_world_size() * T
    groups = block.parameter_groups()
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=3e-3)
    losses, norms, first = [], [], {}
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.zeros((), device=microbatches[0][0].device)
        for i, (x, wanted) in enumerate(microbatches):
            if isinstance(block, FSDPModule):
                block.set_requires_gradient_sync(i == len(microbatches) - 1)
            part = (block(x) - wanted).square().sum() / (num_tokens * D)
            part.backward()
            loss += part.detach()
        first = first or {name: whole(weight.grad).clone() for name, weight in block.named_parameters()}
        norms.append(clip(groups, max_norm=0.1))
        optimizer.step()
        losses.append(loss)
    return torch.stack(losses), torch.stack(norms), first


with process_group(__doc__) as device:
    W = dist.get_world_size()
    block, group = fsdp_block(0, device, EP_SIZE)
    with dist_moe.create_context(group=group, config=config) as block.experts.context:
        losses, norms, grads = train(block, batches(dist.get_rank(), device))
        block.experts.context.check()
    dist.all_reduce(losses)

    one_process = train(Block(0).to(device), [pair for rank in range(W) for pair in batches(rank, device)])
    for name, grad in grads.items():
        worst_db = assert_close(grad, one_process[2][name], "path_grads")
        print_once(f"gradient of {name} {list(grad.shape)}: worst row {worst_db:.0f} dB from that of one process")
    for step in range(len(losses)):
        print_once(
            f"step {step}: loss {losses[step]:.4f}, gradient norm {norms[step]:.4f}; "
            f"in one process {one_process[0][step]:.4f} and {one_process[1][step]:.4f}"
        )
    torch.testing.assert_close(losses, one_process[0], rtol=2e-3, atol=0)
    torch.testing.assert_close(norms, one_process[1], rtol=1e-2, atol=0)
    assert losses[-1] < 0.8 * losses[0] and (norms > 0.1).any()

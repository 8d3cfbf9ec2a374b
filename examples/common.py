"""What every example needs: a process group on GPUs or, with --cpu, on CPU processes, and a small layer's tensors."""

import argparse
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist

D, F, K, E, T = 256, 512, 2, 8, 128


@contextmanager
def process_group(description: str):
    """Yields the device of this rank; torchrun starts the ranks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cpu", action="store_true", help="CPU processes over gloo instead of GPUs over NCCL")
    on_cpu = parser.parse_args().cpu
    if on_cpu:
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if on_cpu else "nccl")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def expert_weights(device: torch.device) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """This rank's experts: W13 [L, 2F, D] and W2 [L, D, F]."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    local_experts = E // dist.get_world_size()
    w13 = torch.randn(local_experts, 2 * F, D, generator=generator) * D**-0.5
    w2 = torch.randn(local_experts, D, F, generator=generator) * F**-0.5
    return tuple(torch.nn.Parameter(w.to(device, torch.bfloat16)) for w in (w13, w2))


def tokens(device: torch.device, num_tokens: int = T, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's x [T, D], expert ids [T, K] and scores [T, K], as a router would give them."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    x = torch.randn(num_tokens, D, generator=generator).to(device, torch.bfloat16)
    scores, ids = torch.randn(num_tokens, E, generator=generator).softmax(dim=1).topk(K, dim=1)
    return x, ids.to(device), (scores / scores.sum(dim=1, keepdim=True)).to(device)


def print_once(*words) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)

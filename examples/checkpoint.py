"""A block saved with one EP size and loaded with another, its optimizer too: experts are known by their number in all.

Run: torchrun --nproc-per-node=2 examples/checkpoint.py        (or with --cpu)
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from block import Block, fsdp_block, whole
from common import D, E, F, K, T, print_once, process_group
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dist_moe


class Trainer:
    """A block of which ep_size ranks share the experts. Without ep_size all of it is in this process."""

    def __init__(self, seed: int, device: torch.device, ep_size: int | None):
        self.context = None
        if ep_size is None:
            self.block = Block(seed).to(device)
        else:
            self.block, group = fsdp_block(seed, device, ep_size)
            config = dist_moe.Config(T, D, F, K, E, 1, device_scratch_capacity_factor=float(ep_size))
            self.context = self.block.experts.context = dist_moe.create_context(group=group, config=config)
        self.optimizer = torch.optim.AdamW([{"params": group} for group in self.block.parameter_groups()], lr=3e-3)

    def steps(self, num_steps: int, *xs: Tensor) -> Tensor:
        """The losses of num_steps steps with these tokens of this process."""
        losses = []
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            loss = sum((self.block(x) - x.flip(0)).square().sum() for x in xs) / (dist.get_world_size() * T * D)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        if self.context is None:
            return torch.stack(losses)
        self.context.check()
        dist.all_reduce(losses := torch.stack(losses))
        return losses

    def state(self) -> dict:
        model, optimizer = get_state_dict(self.block, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder, no_dist=self.context is None)
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.block, self.optimizer, **loaded)

    def tensors(self) -> dict[str, Tensor]:
        """All weights and what the optimizer keeps of each."""
        state = self.state()
        found = dict(state["model"])
        for name, kept in state["optimizer"]["state"].items():
            found |= {f"{name}.{key}": value for key, value in kept.items()}
        return {name: whole(tensor).clone() for name, tensor in found.items()}

    def close(self) -> None:
        if self.context is not None:
            self.context.close()


def tokens(rank: int, device: torch.device) -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(rank)).to(device)


with process_group(__doc__) as device:
    W, rank = dist.get_world_size(), dist.get_rank()
    ep_sizes = [size for size in range(1, W + 1) if W % size == 0]
    for saved in ep_sizes:
        trainer = Trainer(0, device, saved)
        trainer.steps(2, tokens(rank, device))
        with tempfile.TemporaryDirectory() as own:
            folder = [own]
            dist.broadcast_object_list(folder)  # rank 0's: files that all ranks reach
            dcp.save(trainer.state(), checkpoint_id=folder[0])
            wanted, losses = trainer.tensors(), trainer.steps(2, tokens(rank, device))
            trainer.close()
            for loaded in (*ep_sizes, None):
                other = Trainer(1, device, loaded)
                other.load(folder[0])
                found = other.tensors()
                assert found.keys() == wanted.keys() and "experts.w13.exp_avg" in found
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)
                mine = range(W) if loaded is None else [rank]
                next_losses = other.steps(2, *(tokens(one, device) for one in mine))
                torch.testing.assert_close(next_losses, losses, rtol=2e-3, atol=0)
                other.close()
                how = "in one process" if loaded is None else f"with EP size {loaded}"
                after = ", ".join(f"{loss:.4f}" for loss in next_losses)
                print_once(f"saved with EP size {saved}, loaded {how}: equal bits; the next losses are {after}")
            dist.barrier()  # before the files go

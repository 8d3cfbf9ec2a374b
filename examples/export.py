"""The inference call in a program that is saved, then loaded in a new process beside a context of the same name.

Run: torchrun --nproc-per-node=2 examples/export.py        (or with --cpu)
"""

import os
import shutil
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from common import D, E, F, K, T, expert_weights, print_once, process_group, tokens

import dist_moe

NAME = "served"  # what the program knows its context by
config = dist_moe.Config(T, D, F, K, E, 1, device_scratch_capacity_factor=2.0, num_activation_slots=0, inference=True)


class Layer(torch.nn.Module):
    def __init__(self, context, device):
        super().__init__()
        self.context = context
        self.w13, self.w2 = (weight.requires_grad_(False) for weight in expert_weights(device))

    def forward(self, x, ids, scores):
        return dist_moe.routed_experts(x, ids, scores, self.w13, self.w2, self.context)


def steps(device):
    return [tokens(device, num_tokens, seed=step) for step, num_tokens in enumerate((T, 16, 2))]


def save(folder: str, context, device) -> None:
    layer, given = Layer(context, device), tokens(device)
    sizes = ({0: torch.export.Dim("num_tokens", min=2, max=T)},) * len(given)
    torch.export.save(torch.export.export(layer, given, dynamic_shapes=sizes, strict=True), f"{folder}/layer.pt2")
    torch.save([layer(*step) for step in steps(device)], f"{folder}/outputs.pt")


def load(folder: str, device) -> None:
    """Neither layer nor weights are made here: the program has them."""
    run = torch.export.load(f"{folder}/layer.pt2").module()
    outputs = torch.load(f"{folder}/outputs.pt", map_location=device)
    for step, wanted in zip(steps(device), outputs, strict=True):
        assert torch.equal(run(*step), wanted)
        print_once(f"{len(wanted)} tokens: the bits of the call that was exported")


with process_group(__doc__) as device:
    folder = os.environ.get("EXPORTED")
    with dist_moe.create_context(group=dist.group.WORLD, config=config, name=NAME) as context, torch.no_grad():
        if folder is not None:
            load(folder, device)
        else:
            folder = tempfile.mkdtemp()
            save(folder, context, device)
        context.check()
        dist.barrier()
if "EXPORTED" not in os.environ:
    # The same ranks again, in new processes, which meet at a port of their own and not through torchrun.
    port = str(int(os.environ["MASTER_PORT"]) + 1)
    meeting = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    subprocess.run([sys.executable, *sys.argv], env=os.environ | meeting | {"EXPORTED": folder}, check=True)
    shutil.rmtree(folder)

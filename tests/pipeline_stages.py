"""Stages of torch.distributed.pipelining in one process, whose forwards take the slots of a coloring."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from dist_moe import Context
from dist_moe.slot_coloring import SlotColoring


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def stages_of(modules: list[torch.nn.Module], T: int, D: int) -> list[PipelineStage]:
    """A stage a module, all local; between them go bf16 [T, D]."""
    like = torch.zeros(T, D, dtype=torch.bfloat16)
    stages = [
        PipelineStage(
            module,
            index,
            len(modules),
            torch.device("cpu"),
            input_args=(like.clone().requires_grad_(index > 0),),
            output_args=(like.clone().requires_grad_(),),
        )
        for index, module in enumerate(modules)
    ]
    for stage in stages:
        stage._get_init_p2p_neighbors_ops = list  # torch 2.11 greets the neighbours, and here each is itself
    return stages


def select_slots(stages: list[PipelineStage], context: Context, coloring: SlotColoring) -> None:
    """Before every forward of a microbatch its slot is selected."""

    def select_first(stage: PipelineStage) -> None:
        forward = stage.forward_one_chunk

        def forward_one_chunk(microbatch, *args, **kwargs):
            context.select_activation_slot(*coloring.selection(stage.stage_index, microbatch))
            return forward(microbatch, *args, **kwargs)

        stage.forward_one_chunk = forward_one_chunk

    for stage in stages:
        select_first(stage)

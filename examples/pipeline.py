"""Two pipeline stages under 1F1B: forwards that are alive at once take activation slots of their own.

Run: torchrun --nproc-per-node=2 examples/pipeline.py        (or with --cpu; of 4 ranks, two share a stage's experts)
"""

import torch
import torch.distributed as dist
from block import Block, whole
from common import D, E, F, K, T, print_once, process_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import dist_moe
from dist_moe.testing import assert_close

NUM_STAGES, LAYERS, NUM_MICROBATCHES = 2, 2, 4  # layers of a stage


def actions_of(stage: int) -> list[str]:
    """What 1F1B does on the rank of a stage: as many forwards as there are stages from it on, then a forward after each
    backward."""
    forwards = [f"{stage}F{microbatch}" for microbatch in range(NUM_MICROBATCHES)]
    ahead = min(NUM_STAGES - stage, NUM_MICROBATCHES)
    actions = forwards[:ahead]
    for microbatch in range(NUM_MICROBATCHES):
        actions += [f"{stage}B{microbatch}", *forwards[ahead + microbatch : ahead + microbatch + 1]]
    return actions


def blocks_of(stage: int, device: torch.device, ep=None) -> list[Block]:
    return [Block(stage * LAYERS + layer, ep).to(device) for layer in range(LAYERS)]


def select_slots(stage: PipelineStage, context: dist_moe.Context, slots) -> None:
    """Before the forward of a microbatch its slot is selected."""
    forward = stage.forward_one_chunk

    def forward_one_chunk(microbatch, *args, **kwargs):
        context.select_activation_slot(*slots.selection(stage.stage_index, microbatch))
        return forward(microbatch, *args, **kwargs)

    stage.forward_one_chunk = forward_one_chunk


def batch(ep_rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x of the first stage and what the last one is to make of it, for all microbatches."""
    generator = torch.Generator().manual_seed(ep_rank)
    return tuple(torch.randn(NUM_MICROBATCHES * T, D, generator=generator).to(device) for _ in range(2))


def loss_of(y_TD: Tensor, wanted_TD: Tensor) -> Tensor:
    """Of a microbatch: its part of the loss."""
    return (y_TD - wanted_TD).square().sum() / (num_tokens * D)


def one_process(ids: list[list[Tensor]], device: torch.device) -> tuple[float, list[Block]]:
    """The loss and the blocks of all stages with their gradients: plain PyTorch, a microbatch after another.

    ids: by EP rank those of all layers, microbatch by microbatch.
    """
    blocks = [block for stage in range(NUM_STAGES) for block in blocks_of(stage, device)]
    total = 0.0
    for ep_rank, chosen in enumerate(ids):
        chunks = (tensor.chunk(NUM_MICROBATCHES) for tensor in batch(ep_rank, device))
        for microbatch, (y, wanted) in enumerate(zip(*chunks, strict=True)):
            for block, ids_of_layer in zip(blocks, chosen, strict=True):
                y = block(y, ids_of_layer[microbatch].to(device))
            loss = loss_of(y, wanted)
            loss.backward()
            total += loss.item()
    return total, blocks


with process_group(__doc__) as device:
    ep_size = dist.get_world_size() // NUM_STAGES
    num_tokens = ep_size * NUM_MICROBATCHES * T
    mesh = init_device_mesh(device.type, (NUM_STAGES, ep_size), mesh_dim_names=("pp", "ep"))
    pp, ep = mesh["pp"], mesh["ep"]
    index = pp.get_local_rank()
    slots = dist_moe.color_activation_slots(actions_of(index), {index: LAYERS})
    config = dist_moe.Config(
        T,
        D,
        F,
        K,
        E,
        slots.max_moe_layers_per_activation_slot,
        device_scratch_capacity_factor=float(ep_size),
        activation_slot_capacity_factor=1.0,
        num_activation_slots=slots.num_activation_slots,
    )
    blocks = blocks_of(index, device, ep)
    like = torch.zeros(T, D, device=device)
    stage = PipelineStage(
        nn.Sequential(*blocks),
        index,
        NUM_STAGES,
        device,
        input_args=(like.clone().requires_grad_(index > 0),),
        output_args=(like.clone().requires_grad_(),),
        group=pp.get_group(),
    )
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    x, wanted = batch(ep.get_local_rank(), device)
    losses = []
    with dist_moe.create_context(group=ep.get_group(), config=config) as context:
        select_slots(stage, context, slots)
        for block in blocks:
            block.experts.context = context
        if index == 0:
            schedule.step(x)
        else:
            schedule.step(target=wanted, losses=losses)
        context.check()
    for block in blocks:
        for weight in block.parameter_groups()[0]:  # alike on the ranks of a stage
            dist.all_reduce(weight.grad, group=ep.get_group())

    # The same in one process, by the ids that the routers chose here.
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [[ids.cpu() for ids in block.chosen] for block in blocks])
    by_stage = [everybody[stage * ep_size : (stage + 1) * ep_size] for stage in range(NUM_STAGES)]
    by_ep_rank = [[ids for stage in stages for ids in stage] for stages in zip(*by_stage, strict=True)]
    total, blocks_1 = one_process(by_ep_rank, device)
    worst_db = min(
        assert_close(whole(weight.grad), weight_1.grad, "path_grads")
        for block, block_1 in zip(blocks, blocks_1[index * LAYERS :][:LAYERS], strict=True)
        for weight, weight_1 in zip(block.parameters(), block_1.parameters(), strict=True)
    )
    loss = sum(losses, start=torch.zeros((), device=device))
    dist.all_reduce(loss)
    torch.testing.assert_close(loss.item(), total, rtol=1e-3, atol=0)
    print_once(f"loss {loss.item():.5f}, in one process {total:.5f}")
    if ep.get_local_rank() == 0:
        print(
            f"stage {index}, {slots.num_activation_slots} slots: {' '.join(actions_of(index))}; gradients: worst row "
            f"{worst_db:.0f} dB from that of one process",
            flush=True,
        )

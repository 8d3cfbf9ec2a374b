"""A transformer's MoE block without the attention: norm, router, a shared expert for every token, routed experts."""

import torch
import torch.distributed as dist
from common import D, E, F, K
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

import dist_moe
from dist_moe.dense import dense_moe


class Experts(nn.Module):
    """W13 [E, 2F, D] and W2 [E, D, F] in FP32, computed in BF16.

    With an EP mesh they are DTensors, of which this rank holds its own experts, and `context` is to be set. Without one
    all of them are here, and plain PyTorch computes them: the reference.
    """

    def __init__(self, ep: DeviceMesh | None):
        super().__init__()
        for name, shape in (("w13", (E, 2 * F, D)), ("w2", (E, D, F))):
            weight = torch.randn(shape) * shape[-1] ** -0.5
            if ep is not None:
                mine = weight.chunk(ep.size())[ep.get_local_rank()].to(ep.device_type)
                weight = DTensor.from_local(mine, ep, [Shard(0)], run_check=False)
            setattr(self, name, nn.Parameter(weight))
        self.context: dist_moe.Context | None = None

    def forward(self, x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
        if self.context is None:
            return dense_moe(x_TD, ids_TK, scores_TK, self.w13.bfloat16(), self.w2.bfloat16())
        mine = (weight.to_local().bfloat16() for weight in (self.w13, self.w2))
        return dist_moe.routed_experts(x_TD, ids_TK, scores_TK, *mine, self.context)


class Block(nn.Module):
    def __init__(self, seed: int, ep: DeviceMesh | None = None):
        """The same weights for a seed, whatever the mesh."""
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.router = nn.RMSNorm(D), nn.Linear(D, E, bias=False)
        self.shared = nn.Sequential(nn.Linear(D, F, bias=False), nn.SiLU(), nn.Linear(F, D, bias=False))
        self.experts = Experts(ep)
        self.chosen: list[Tensor] = []  # the ids of every forward

    def forward(self, x_TD: Tensor, ids_TK: Tensor | None = None) -> Tensor:
        """x FP32. ids_TK: of an earlier forward, to send each token to the same experts, whatever rounding makes of the
        router's scores."""
        h_TD = self.norm(x_TD)
        gates_TE = self.router(h_TD).softmax(dim=1)
        if ids_TK is None:
            ids_TK = gates_TE.topk(K, dim=1).indices
        self.chosen.append(ids_TK)
        scores_TK = gates_TE.gather(1, ids_TK)
        return x_TD + self.shared(h_TD) + self.experts(h_TD.bfloat16(), ids_TK, scores_TK).float()

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """(all but the experts, the experts): the meshes of the two differ, and torch works on lists of one mesh."""
        experts = set(self.experts.parameters())
        return [parameter for parameter in self.parameters() if parameter not in experts], list(experts)


def fsdp_block(seed: int, device: torch.device, ep_size: int) -> tuple[Block, dist.ProcessGroup]:
    """A block in FSDP2 over all ranks, and the EP group of this rank, of which each owns E / ep_size experts.

    If there are several EP groups, the experts are sharded over the ranks that own the same ones, along the dimension
    behind that of the experts. Gradients are sums over ranks: a rank's loss is its part of the loss of all.
    """
    num_replicas = dist.get_world_size() // ep_size
    world = init_device_mesh(device.type, (dist.get_world_size(),))
    mesh = init_device_mesh(device.type, (num_replicas, ep_size), mesh_dim_names=("replicas", "ep"))
    block = Block(seed, mesh["ep"]).to(device)
    if num_replicas > 1:
        fully_shard(block.experts, mesh=mesh["replicas"], shard_placement_fn=lambda _: Shard(1))
    fully_shard(block, mesh=world, ignored_params=set(block.experts.parameters()) if num_replicas == 1 else None)
    for module in block.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return block, mesh["ep"].get_group()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, with what other ranks hold of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

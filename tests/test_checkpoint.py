"""Expert weights saved over the ranks of one EP size and loaded over those of another: each expert by its number."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dist_moe import BlockScaledConfig, create_context, prepare_block_scaled_weight, routed_experts
from dist_moe.path_oracle import FORWARD_ONLY, forward_only
from dist_moe.testing import assert_close, run_virtual

from .path_cases import Case, dense
from .process_group import ranks

NAMES = ("w13_L2FD", "w2_LDF")
MXFP8 = BlockScaledConfig()


def case_of(W: int) -> Case:
    """A layer of eight experts whose weights do not depend on W, as Case draws them first."""
    return Case("checkpoint", W=W, T=6, D=64, F=32, K=2, E=8)


def as_experts(tensors: dict[str, torch.Tensor], group) -> dict[str, DTensor]:
    """This rank's tensors as parts of all experts; no copies."""
    mesh = DeviceMesh.from_group(group, "cpu")
    return {name: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for name, t in tensors.items()}


def _save(rank, group, folder):
    own = case_of(dist.get_world_size(group)).inputs()[rank]
    dcp.save(as_experts({name: getattr(own, name) for name in NAMES}, group), checkpoint_id=folder)


def _load_and_serve(rank, group, folder):
    """Weights of the rank's experts, and its outputs in BF16 and in MXFP8 with weights prepared before they came."""
    case = case_of(dist.get_world_size(group))
    own = case.inputs()[rank]
    weights = {name: torch.zeros_like(getattr(own, name)) for name in NAMES}
    ready = [prepare_block_scaled_weight(weight, MXFP8, inference=True) for weight in weights.values()]
    dcp.load(as_experts(weights, group), checkpoint_id=folder)
    assert all(torch.equal(weights[name], getattr(own, name)) for name in NAMES)
    outs = []
    for block_scaled in (None, MXFP8):
        config = case.config(block_scaled=block_scaled, **FORWARD_ONLY)
        with create_context(group=group, config=config, device="cpu") as context, torch.no_grad():
            given = weights.values()
            if block_scaled is not None:
                with pytest.raises(RuntimeError, match="source was changed since it was prepared"):
                    ready[0].require_filled()
                given = [
                    prepare_block_scaled_weight(source, MXFP8, inference=True, out=out)
                    for source, out in zip(weights.values(), ready, strict=True)
                ]
            outs.append(routed_experts(own.x_TD, own.ids_TK, own.scores_TK, *given, context))
            context.check()
    return outs


@pytest.mark.parametrize("saved, loaded", [(2, 4), (4, 2), (2, 1), (1, 2)])
def test_saved_with_one_ep_size_and_loaded_with_another(saved, loaded, tmp_path):
    ranks(saved).run(_save, str(tmp_path))
    bf16, mxfp8 = zip(*ranks(loaded).run(_load_and_serve, str(tmp_path)), strict=True)
    case, inputs = case_of(loaded), case_of(loaded).inputs()
    assert_close(torch.cat(bf16), torch.cat([rank.out_TD for rank in dense(case, inputs)]), "path")
    config = case.config(block_scaled=MXFP8, **FORWARD_ONLY)
    expected = run_virtual(loaded, config, forward_only(inputs), backend="reference")
    assert_close(torch.cat(mxfp8), torch.cat([rank.out_TD for rank in expected]), "path")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_loads_all_experts(tmp_path):
    ranks(2).run(_save, str(tmp_path))
    inputs = case_of(2).inputs()
    wanted = {name: torch.cat([getattr(rank, name) for rank in inputs]) for name in NAMES}
    found = {name: torch.zeros_like(weight) for name, weight in wanted.items()}
    dcp.load(found, checkpoint_id=str(tmp_path), no_dist=True)
    assert all(torch.equal(found[name], wanted[name]) and found[name].any() for name in NAMES)

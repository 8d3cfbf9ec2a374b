"""A case on one rank through the public API, and the pools of processes that every number of ranks runs in."""

import os
import socket
import sys
from collections.abc import Callable

import torch
import torch._dynamo  # when a worker starts, not in create_context, which some tests give a second alone
import torch.distributed as dist

from dist_moe import routed_experts
from dist_moe.config import Config
from dist_moe.virtual import RankInputs, RankResults
from tests.process_group import ranks, run_ranks

NAMES = ("x_TD", "scores_TK", "w13_L2FD", "w2_LDF")


def on_ranks(W: int, fn, *args, timeout_s: float = 60, may_die=()) -> list:
    """Results by rank of fn(rank, group, *args) in W processes, which can interpret kernels and run the reference."""
    options = {"groups": [list(range(W))], "timeout_s": timeout_s, "may_die": may_die}
    return ranks(4 if W <= 4 else 8, interpret=True).run(_in_group, fn, args, **options)[:W]


def _in_group(rank, groups, fn, args):
    return fn(rank, groups[0], *args) if groups[0] is not None else None


def as_torchrun_does(W: int, script: Callable, name: str, *arguments: str) -> None:
    """script() in W processes that torchrun would start as `name`, without the ten seconds that its launch takes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    codes = run_ranks(W, _as_torchrun_does, W, port, script, name, arguments, timeout_s=200)
    assert not any(codes), codes


def _as_torchrun_does(rank, group, W, port, script, name, arguments):
    dist.destroy_process_group()  # the script makes its own
    if W > 1:
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": W, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({variable: str(value) for variable, value in where.items()})
    sys.argv = [name, *arguments]
    return script()


def leaves_of(inputs: RankInputs, config: Config) -> dict:
    """What is differentiable of a rank's inputs, as leaves that take the gradient's dtype."""
    leaves = {name: getattr(inputs, name).detach().clone().requires_grad_() for name in NAMES}
    for name in ("w13_L2FD", "w2_LDF"):
        leaves[name].grad_dtype = config.wgrad_dtype or leaves[name].dtype
    return leaves


def forward(leaves: dict, ids_TK, context):
    return routed_experts(leaves["x_TD"], ids_TK, leaves["scores_TK"], leaves["w13_L2FD"], leaves["w2_LDF"], context)


def results_of(out_TD, leaves: dict) -> RankResults:
    return RankResults(out_TD.detach(), *(leaves[name].grad for name in NAMES))


def step(inputs: RankInputs, context) -> RankResults:
    """Forward and backward of this rank; the other ranks of the context must do the same. Can be captured."""
    leaves = leaves_of(inputs, context.config)
    out_TD = forward(leaves, inputs.ids_TK, context)
    out_TD.backward(inputs.grad_out_TD)
    return results_of(out_TD, leaves)


def run_rank(inputs: RankInputs, context) -> RankResults:
    """The same, with faults raised."""
    results = step(inputs, context)
    context.check()
    return results


def memory_of(context) -> set[int]:
    """Addresses of the storages that calls of this context use again."""
    kept = [context.activation_buffer, *(region.own for region in context.buffers.values())]
    kept += [value for value in vars(context.ranks[0]).values() if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in kept}

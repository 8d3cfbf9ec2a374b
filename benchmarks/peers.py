"""Other implementations of the layer, each behind one function: their layer as (x, ids, scores, W13, W2) -> out.

A peer is measured where its package is installed, and listed as absent with the reason where it is not. What it returns
is held against the dense oracle before it is timed. Weights are ours: W13 [E, 2F, D], gate rows first, W2 [E, D, F].
A peer without expert parallelism runs in one process, which then holds the experts and the tokens of all virtual ranks.

Calls follow the sources and documents of each project; only "nccl" and "transformers" have been run by our tests.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch
import torch.distributed as dist
from torch import Tensor

from . import baseline
from .baseline import Layer
from .launch import Job
from .ours import DIRECTIONS, FORWARD, INFERENCE
from .shapes import Traffic

ANYWHERE, ONE_PROCESS, PROCESSES = "anywhere", "one process", "processes"


@dataclass(frozen=True)
class Peer:
    """open: the layer for a job and a traffic; imports the package. where: ANYWHERE, ONE_PROCESS or PROCESSES."""

    name: str
    label: str
    package: str
    module: str
    open: Callable[[Job, Traffic], Layer]
    where: str = ONE_PROCESS
    directions: tuple[str, ...] = DIRECTIONS
    on_cpu: bool = False
    drops_slots: bool = False  # takes negative ids

    @functools.cache  # noqa: B019  peers live as long as the module
    def absent(self) -> str | None:
        """None when it can be imported, else why not."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a package may fail in any way at import where its GPU is not
            lines = str(error).splitlines() or [type(error).__name__]
            return f"{type(error).__name__}: {lines[0]}"
        return None

    def version(self) -> str:
        """Of its package; torch's own, with that of NCCL, for what torch brings along."""
        if self.package == "torch":
            nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
            return f"torch {torch.__version__}, NCCL {nccl}"
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "unknown"

    def refuses(self, job: Job, traffic: Traffic, direction: str) -> str | None:
        """None when it can run this, else why not."""
        if job.device.type == "cpu" and not self.on_cpu:
            return "has no CPU kernels"
        if self.where == ONE_PROCESS and job.group is not None:
            return "has no expert parallelism of its own; it runs with --ep 1 and with --virtual"
        if self.where == PROCESSES and job.group is None:
            return "runs between processes, one a GPU"
        if direction not in self.directions:
            return f"is called for {', '.join(self.directions)} here"
        if not self.drops_slots and any((ids < 0).any() for ids in traffic.ids):
            return "takes no slot without an expert"
        return None


def _nccl(job: Job, traffic: Traffic) -> Layer:
    return functools.partial(baseline.routed_experts, group=job.group)


def _transformers(job: Job, traffic: Traffic) -> Layer:
    """The experts of Qwen3-MoE with their implementation "grouped_mm"; weights are passed in by functional_call."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    shape = traffic.shape
    config = Qwen3MoeConfig(
        hidden_size=shape.D, moe_intermediate_size=shape.F, num_experts=shape.E, num_experts_per_tok=shape.K
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)

    def layer(x_TD, ids_TK, scores_TK, w13_L2FD, w2_LDF) -> Tensor:
        weights = {"gate_up_proj": w13_L2FD, "down_proj": w2_LDF}
        return torch.func.functional_call(experts, weights, (x_TD, ids_TK, scores_TK))

    return layer


def _liger(job: Job, traffic: Traffic) -> Layer:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def layer(x_TD, ids_TK, scores_TK, w13_L2FD, w2_LDF) -> Tensor:
        return LigerFusedMoEFunction.apply(x_TD, w13_L2FD, w2_LDF, ids_TK.int(), scores_TK)

    return layer


def _sonicmoe(job: Job, traffic: Traffic) -> Layer:
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    def layer(x_TD, ids_TK, scores_TK, w13_L2FD, w2_LDF) -> Tensor:
        T, K = ids_TK.shape
        token_N = torch.arange(T, dtype=torch.int32, device=x_TD.device).repeat_interleave(K)
        out, _ = moe_general_routing_inputs(
            *(x_TD, scores_TK.flatten(), token_N, ids_TK.flatten().int()),
            *(w13_L2FD.permute(1, 2, 0), None, w2_LDF.permute(1, 2, 0), None),
            *(len(w2_LDF), torch.cuda.current_stream().cuda_stream, ActivationType.SWIGLU),
            is_inference_mode_enabled=not torch.is_grad_enabled(),
            concat_layout=True,
        )
        return out

    return layer


def _torchtitan(job: Job, traffic: Traffic) -> Layer:
    """Rows pass through two receive buffers that every exchange uses in turn, so that a backward without recomputation
    would read what a later exchange has overwritten: it is called forward alone."""
    from torchtitan.distributed.minimal_async_ep import api

    shape, W, L, T = traffic.shape, traffic.W, traffic.L, max(traffic.tokens_W)
    api._buffer_state = None  # one a process, which nothing else ends
    api.init_buffer(job.group, shape.D, T, L, shape.K, torch.bfloat16, job.device)
    capacity = W * T * min(shape.K, L)

    def layer(x_TD, ids_TK, scores_TK, w13_L2FD, w2_LDF) -> Tensor:
        counts_E = torch.bincount(ids_TK.flatten(), minlength=shape.E)
        sent = api.dispatch_op(x_TD, ids_TK, counts_E, capacity, W)
        rows, to_rank, to_row, back_rank, back_row, num_rows_1, expert_to_slot, slot_to_expert, received_L = sent
        ends_L = received_L.cumsum(0).int()
        gate, up = (baseline.grouped(rows, w, ends_L) for w in w13_L2FD.chunk(2, dim=1))
        rows = baseline.grouped(api.active_swiglu_op(gate, up, num_rows_1), w2_LDF, ends_L)
        maps = (to_rank, to_row, back_rank, back_row, num_rows_1, slot_to_expert, expert_to_slot)
        out_TD, _ = api.combine_op(rows, *maps, scores_TK.flatten(), len(x_TD), shape.K)
        return out_TD

    return layer


def _deep_ep(job: Job, traffic: Traffic) -> Layer:
    """Its dispatch and combine in the layout of one row a route, round torch._grouped_mm."""
    from deep_ep import ElasticBuffer

    shape, T = traffic.shape, max(traffic.tokens_W)
    buffer = ElasticBuffer(job.group, num_max_tokens_per_rank=T, hidden=shape.D, num_topk=shape.K)

    def layer(x_TD, ids_TK, scores_TK, w13_L2FD, w2_LDF) -> Tensor:
        about = {"num_experts": shape.E, "num_max_tokens_per_rank": T, "expert_alignment": 1, "do_expand": True}
        rows, _, scores_R, handle, _ = buffer.dispatch(x_TD, topk_idx=ids_TK, topk_weights=scores_TK, **about)
        ends_L = handle.psum_num_recv_tokens_per_expert.int()
        gate, up = baseline.grouped(rows, w13_L2FD, ends_L).chunk(2, dim=1)
        rows = baseline.grouped(torch.nn.functional.silu(gate) * up, w2_LDF, ends_L)
        out_TD, _, _ = buffer.combine((rows * scores_R[:, None]).to(x_TD.dtype), handle=handle)
        return out_TD

    return layer


def _liger_cute(job: Job, traffic: Traffic) -> Layer:
    """Its training wants gate and up rows as two tensors; inference takes the halves of W13 as they lie."""
    import liger_cute_kernels
    from liger_kernel.ops.cute.ops import moe_fused

    shape, W = traffic.shape, traffic.W
    moe = liger_cute_kernels.MoEConfig(max(traffic.tokens_W), shape.D, shape.E, shape.K, 1, W, job.group)
    liger_cute_kernels.configure(bootstrap_group=dist.group.WORLD, device=job.device, moe=moe)

    def layer(x_TD, ids_TK, scores_TK, w13_L2FD, w2_LDF) -> Tensor:
        halves = w13_L2FD.chunk(2, dim=1)
        return moe_fused(x_TD, ids_TK.int(), scores_TK.bfloat16(), *halves, w2_LDF, shape.E, shape.K, job.group)

    return layer


_MINIMAL_ASYNC_EP = "torchtitan.distributed.minimal_async_ep.api"
PEERS = (
    Peer("nccl", "NCCL + grouped_mm", "torch", "torch", _nccl, ANYWHERE, on_cpu=True, drops_slots=True),
    Peer("transformers", "transformers", "transformers", "transformers.integrations.moe", _transformers, on_cpu=True),
    Peer("liger", "Liger", "liger-kernel", "liger_kernel.ops.fused_moe", _liger),
    Peer("torchtitan", "torchtitan", "torchtitan", _MINIMAL_ASYNC_EP, _torchtitan, PROCESSES, (FORWARD, INFERENCE)),
    Peer("deepep", "DeepEP + grouped_mm", "deep_ep", "deep_ep", _deep_ep, PROCESSES, (INFERENCE,), drops_slots=True),
    Peer("ligercute", "LigerCute", "liger-cute-kernels", "liger_cute_kernels", _liger_cute, PROCESSES, (INFERENCE,)),
    Peer("sonicmoe", "SonicMoE", "sonic-moe", "sonicmoe.functional", _sonicmoe),
)


def find(name: str) -> Peer:
    return next(peer for peer in PEERS if peer.name == name)

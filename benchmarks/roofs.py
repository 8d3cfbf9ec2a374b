"""Useful FLOPs and counted bytes of every stage, and the measured roofs that they are held against.

Bytes are what a stage cannot avoid in memory: every operand read once, every result written once, weights of experts
that have rows read once. HBM is this rank's own memory, link that of other ranks, each as this rank's programs read or
write it. Scores, ids and row maps count in publish, route and collect_score_grads alone: beside rows of D they are
under a percent. A routed row costs 6 D F FLOPs forward and 12 D F backward.
"""

from dataclasses import dataclass
from functools import reduce

import torch

from .launch import Job
from .shapes import Load
from .timing import Method, measure

BF16, FP32, INT64, INT32, INT16 = 2, 4, 8, 4, 2
MATMUL_SIZE = 8192
COPY_BYTES = 2**31
PEER_COPY_BYTES = 2**29


@dataclass(frozen=True)
class Work:
    flops: int = 0
    hbm_bytes: int = 0
    link_bytes: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.hbm_bytes + other.hbm_bytes, self.link_bytes + other.link_bytes)


def total(works) -> Work:
    return reduce(Work.__add__, works, Work())


def _gemm(rows: int, N: int, K: int, num_weights: int, weight_bytes: int = BF16) -> Work:
    """rows [K] in, rows [N] out and num_weights matrices [N, K]: the same for forward, dgrad and wgrad."""
    return Work(2 * rows * N * K, BF16 * rows * (N + K) + weight_bytes * num_weights * N * K)


def _publish(load: Load) -> Work:
    routes = load.tokens * load.K
    return Work(hbm_bytes=2 * BF16 * load.tokens * load.D + routes * (INT64 + FP32 + INT16 + FP32))


def _dispatch(load: Load) -> Work:
    near, far = load.moved
    return Work(hbm_bytes=BF16 * load.D * (near + load.rows), link_bytes=BF16 * load.D * far)


def _reduce(load: Load) -> Work:
    return Work(hbm_bytes=BF16 * load.D * (load.returned + load.tokens))


def forward_work(load: Load) -> dict[str, Work]:
    """By stage of forward, in the order of the path."""
    D, F, R, used = load.D, load.F, load.rows, load.experts_used
    tables = 4 * INT32 * R
    return {
        "publish": _publish(load),
        "route": Work(0, INT16 * load.K * load.tokens + tables, INT16 * load.K * (load.tokens_all - load.tokens)),
        "dispatch": _dispatch(load),
        "w13": _gemm(R, 2 * F, D, used),
        "swiglu": Work(hbm_bytes=BF16 * 3 * F * R),
        "w2": _gemm(R, D, F, used),
        "combine": _dispatch(load),
        "reduce": _reduce(load),
    }


def backward_work(load: Load) -> dict[str, Work]:
    """By stage of backward, in the order of the path; all weight gradients are written, in bf16."""
    D, F, R, used, L = load.D, load.F, load.rows, load.experts_used, load.L
    return {
        "publish": _publish(load),
        "dispatch": _dispatch(load),
        "dgrad_w2": _gemm(R, D, F, used),
        "swiglu_backward": Work(hbm_bytes=BF16 * 6 * F * R),
        "wgrad_w2": _gemm(R, D, F, L),
        "dgrad_w13": _gemm(R, 2 * F, D, used),
        "combine": _dispatch(load),
        "wgrad_w13": _gemm(R, 2 * F, D, L),
        "reduce": _reduce(load),
        "collect_score_grads": Work(hbm_bytes=load.tokens * load.K * (FP32 + INT64 + FP32)),
    }


def fp32_wgrad_work(load: Load) -> dict[str, Work]:
    """Of weight gradients that are written in FP32, and of those that are added to what is there."""
    D, F, R, used, L = load.D, load.F, load.rows, load.experts_used, load.L
    return {
        "wgrad_w13_fp32": _gemm(R, 2 * F, D, L, FP32),
        "wgrad_w2_fp32": _gemm(R, D, F, L, FP32),
        "wgrad_w13_accumulate": _gemm(R, 2 * F, D, used, FP32 + FP32),
        "wgrad_w2_accumulate": _gemm(R, D, F, used, FP32 + FP32),
    }


def norm_work(tokens: int, routes: int, K: int, D: int) -> dict[str, Work]:
    """Of RMSNorm with the sum per route and of that sum alone, on `routes` rows of `tokens` tokens of K slots.

    Ids, scores and 1 / rms count too: these are bytes that are held against each other. The kernel's loads and stores
    are counted in tests/kernels_triton/test_rmsnorm.py.
    """
    row, slots, rstds = BF16 * D, (INT16 + FP32) * tokens * K, FP32 * tokens * K
    plain = row * (routes + tokens) + slots
    return {
        "rmsnorm_reduce": Work(hbm_bytes=plain),
        "plain": Work(hbm_bytes=plain),
        "keep": Work(hbm_bytes=plain + row * routes + rstds),
        "rmsnorm_reduce_backward": Work(hbm_bytes=row * (2 * routes + tokens) + slots + rstds + FP32 * routes),
    }


@dataclass(frozen=True)
class Roofs:
    """Rates measured on this machine in this run. link_gbs None: all ranks share one memory."""

    tflops: float
    hbm_gbs: float
    link_gbs: float | None

    def us(self, work: Work) -> float:
        """The least time for this work on one device, if all three overlap."""
        hbm, link = work.hbm_bytes, work.link_bytes
        if self.link_gbs is None:
            hbm, link = hbm + link, 0
        return max(work.flops / self.tflops / 1e6, hbm / self.hbm_gbs / 1e3, link / (self.link_gbs or 1.0) / 1e3)


def measure_roofs(job: Job, rounds: int) -> Roofs:
    """A large bf16 product on random data, a device copy, and a pull from the next rank, all ranks at once."""
    small = job.device.type == "cpu"
    size, copied, pulled = (64, 2**16, 2**16) if small else (MATMUL_SIZE, COPY_BYTES, PEER_COPY_BYTES)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=job.device) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.ones(copied, dtype=torch.uint8, device=job.device)
    target = torch.empty_like(source)
    methods = [
        Method("matmul", lambda: torch.matmul(a, b, out=out)),
        Method("copy", lambda: target.copy_(source)),
    ]
    if job.group is not None:
        world, rank = job.world(), job.local_ranks[0]
        region = world.allocate({"roof": ((2, pulled), torch.uint8)})[rank]["roof"]
        next_rank = region.peers[(rank + 1) % job.W]
        methods.append(Method("peer copy", lambda: region.own[0].copy_(next_rank[1])))
    times = measure(job, methods, rounds)
    return Roofs(
        tflops=2 * size**3 / times["matmul"].us / 1e6,
        hbm_gbs=2 * copied / times["copy"].us / 1e3,
        link_gbs=pulled / times["peer copy"].us / 1e3 if job.group is not None else None,
    )

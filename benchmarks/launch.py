"""Where a benchmark runs: one process, W virtual ranks in one process, or W processes started by torchrun."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dist_moe import World

PEER_TIMEOUT_S = 100.0  # also covers a peer that is still compiling


class Miss(Exception):
    """A result that misses its bar: what gave it is not timed."""


@dataclass(frozen=True)
class Job:
    """This process's part: W ranks in all, of which `local_ranks` live here."""

    device: torch.device
    W: int
    local_ranks: tuple[int, ...]
    group: Any = None  # None: one process

    @property
    def is_first(self) -> bool:
        return self.local_ranks[0] == 0

    @property
    def num_gpus(self) -> int:
        """Devices that share the work."""
        return self.W // len(self.local_ranks)

    @property
    def where(self) -> str:
        return f"{self.num_gpus} processes" if self.group is not None else f"{self.W} virtual ranks"

    def world(self) -> World:
        if self.group is not None:
            return World.from_group(self.group, self.device, timeout_s=PEER_TIMEOUT_S)
        return World.virtual(self.W, self.device)

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, on every process."""
        if self.group is None:
            return [value]
        values = [None] * self.num_gpus
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_rows(self, parts: list[Tensor]) -> Tensor:
        """The rows of all ranks, in their order; every rank passes as many."""
        own = torch.cat(parts)
        if self.group is None:
            return own
        parts = [torch.empty_like(own) for _ in range(self.num_gpus)]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts)

    def add_up(self, value: Tensor) -> Tensor:
        """The sum over processes, in place."""
        if self.group is not None:
            dist.all_reduce(value, group=self.group)
        return value

    def agree(self, step: Callable[[], Any]) -> Any:
        """step(), unless it misses on any process: then Miss on all, with every reason. Collective."""
        value, reason = None, None
        try:
            value = step()
        except Miss as miss:
            reason = f"rank {self.local_ranks[0]}: {miss}"
        if reasons := [other for other in self.gather(reason) if other]:
            raise Miss("; ".join(reasons))
        return value


def under_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ


def number_started() -> int:
    return int(os.environ["WORLD_SIZE"])


def is_first() -> bool:
    """Of the processes of the job, also when there is one."""
    return os.environ.get("RANK", "0") == "0"


def spawn(W: int, target: Callable[..., None], *args: Any) -> None:
    """target(*args) in W processes of this machine that find themselves as if torchrun had started them.

    Raises torch.multiprocessing.ProcessRaisedException with the traceback of the first that raises, and
    ProcessExitedException when one dies; the others are ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores
    torch.multiprocessing.spawn(_as_rank, (W, port, target, args), nprocs=W)


def _as_rank(rank: int, W: int, port: int, target: Callable[..., None], args: tuple) -> None:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": W, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    target(*args)


def start(*, virtual: int | None, cpu: bool) -> Job:
    """The Job of this process; joins the others when torchrun started it."""
    torch.set_float32_matmul_precision("highest")  # FP32 products of the oracle are FP32 products
    if virtual is None and under_torchrun():
        rank, W = int(os.environ["RANK"]), number_started()
        device = torch.device("cpu") if cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if not cpu:
            torch.cuda.set_device(device)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host, whose name need not resolve
        dist.init_process_group("gloo" if cpu else "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=PEER_TIMEOUT_S))
        return Job(device, W, (rank,), dist.group.WORLD)
    device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
    W = virtual or 1
    return Job(device, W, tuple(range(W)))


def stop(job: Job) -> None:
    if job.group is not None:
        dist.destroy_process_group()

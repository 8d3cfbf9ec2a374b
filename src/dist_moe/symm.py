"""Symmetric memory: named regions that every rank of a World owns and every other rank can address.

A World is one of
    from_group(group)       one rank a process: shared-memory files on the CPU, torch symmetric memory on CUDA
    virtual(W)              all W ranks in this process, on one device
    emulated(W, rank)       one rank, and every peer is this rank's own memory: shapes and traces, not numbers
and the code above it only loops over `world.local_ranks`. Ranks are group ranks everywhere. A World owns no signal and
no flag besides the regions it is asked for, so any number of Worlds may live on one group or on overlapping groups.
"""

import itertools
import math
import mmap
import os
import pickle
import secrets
import shutil
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import DistMoEError, PeerAbortedError, PeerTimeoutError, RankMismatchError
from .shapes import align

REGION_ALIGNMENT = 256  # bytes; more than any vector access or TMA box needs of a region's start
SHARED_MEMORY_DIR = Path("/dev/shm")

Regions = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Region:
    """One named symmetric region, seen from one local rank."""

    own: Tensor  # this rank's part
    peers: tuple[Tensor, ...]  # every rank's part, by rank
    table_W: Tensor  # int64 [W] on the device: addresses of `peers`, valid in this process

    def first(self, *shape: int) -> "Region":
        """The same memory from its start, in another shape of at most as many elements."""
        parts = (part.view(-1)[: math.prod(shape)].view(shape) for part in (self.own, *self.peers))
        own, *peers = parts
        return Region(own, tuple(peers), self.table_W)


def fence() -> None:
    """Order every earlier memory access of this thread before every later one, as other CPU processes see them.

    x86 keeps stores in order and loads in order and needs nothing here. ARM64 keeps neither, and Python has no fence;
    but giving a lock back is a store-release, taking it a load-acquire, and ARM64 keeps a release before a later
    acquire. So what is earlier stays before the release, what is later stays after the second acquire, and nothing
    crosses the two. One acquire and release would not do: accesses may move in from both sides and pass each other.
    The lock is a new one each time, so no thread waits for another.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class World:
    """W ranks and their symmetric memory. Made by `from_group`, `virtual` or `emulated`.

    Attributes: size (W); local_ranks, the ranks this process runs; device; emulated, True when the peers are not there
    and the caller must leave out signals and waits.
    """

    def __init__(self, size: int, local_ranks: tuple[int, ...], device: torch.device, *, emulated: bool = False):
        self.size, self.local_ranks, self.device, self.emulated = size, local_ranks, device, emulated
        self.closed = False

    @staticmethod
    def from_group(group=None, device=None, *, timeout_s: float) -> "World":
        """The ranks of a process group, one each process; collective.

        Args:    group: None for the default group.  device: default is the current CUDA device for a group with NCCL,
                 else the CPU.  timeout_s: how long `exchange` (and what is built on it) waits for the others.
        Raises:  ValueError for a group of several hosts, of mixed device types, of the "fake" backend, or one that this
                 process is not in.
        """
        group = group or dist.group.WORLD
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("World.from_group: this process is not a member of the group")
        device = _resolve_device(device or ("cuda" if "nccl" in dist.get_backend_config(group) else "cpu"))
        if size == 1:
            return World(1, (0,), device)
        if dist.get_backend(group) == "fake":
            raise ValueError("World.from_group: the 'fake' backend moves no data between ranks; use World.emulated")
        world = (_CudaWorld if device.type == "cuda" else _CpuWorld)(group, rank, size, device, timeout_s)
        _require_one_host(world.exchange((*_this_host(), device.type)))
        return world

    @staticmethod
    def virtual(size: int, device="cpu") -> "World":
        """All ranks in this process, in plain tensors of one device."""
        if size < 1:
            raise ValueError(f"World.virtual: size must be at least 1, got {size}")
        return World(size, tuple(range(size)), _resolve_device(device))

    @staticmethod
    def emulated(size: int, rank: int, device="cpu") -> "World":
        """One rank whose peers all alias its own memory; nothing is sent and nothing must be waited for."""
        if not 0 <= rank < size:
            raise ValueError(f"World.emulated: rank must be in 0..{size - 1}, got {rank}")
        return World(size, (rank,), _resolve_device(device), emulated=True)

    def allocate(self, regions: Regions) -> dict[int, dict[str, Region]]:
        """One allocation a rank, divided into named regions at multiples of 256 bytes, all zero.

        Args:    regions: name -> (shape, dtype), the same on all ranks.
        Returns: for each local rank, its regions by name. They keep the memory alive, also after close().
        Raises:  on every rank, when one fails: its own error there, PeerAbortedError naming rank and cause on the
                 others; RankMismatchError when ranks ask for different regions.
        Order:   collective. Memory is zero on all ranks before any rank returns, so a peer may write at once.
        """
        requests = self.together("allocate", lambda: _normalise(regions))
        for rank, request in enumerate(requests):
            if request != requests[0]:
                raise RankMismatchError(f"allocate: {_difference(requests[0], rank, request)}")
        offsets, num_bytes = _layout(requests[0])
        allocations = self._allocate_bytes(num_bytes)
        return {rank: _views(bases, rank, requests[0], offsets) for rank, bases in allocations.items()}

    def exchange(self, obj: Any) -> list[Any]:
        """Every rank's `obj`, by rank; collective, obj is pickled. In one process: the same object for every rank.

        Raises: PeerTimeoutError when a rank has died or does not come within the timeout of the World (or of the
                group, if that is shorter). The group must not be used after that.
        """
        self._require_open()
        return [obj] * self.size

    def together(self, what: str, step: Callable[[], Any]) -> list[Any]:
        """Run `step` here and give back what it returned on every rank, by rank; collective.

        Raises: on every rank when it failed on one: there its own error, elsewhere PeerAbortedError naming both.
        """
        self._require_open()
        try:
            value, error = step(), None
        except Exception as caught:
            value, error = None, caught
        outcomes = self.exchange((value, None if error is None else f"{type(error).__name__}: {error}"))
        try:
            if error is not None:
                raise error
        finally:
            del error  # or it and this frame would hold each other, and with them what `step` made
        for rank, (_, cause) in enumerate(outcomes):
            if cause is not None:
                raise PeerAbortedError(f"{what}: rank {rank} failed: {cause}")
        return [value for value, _ in outcomes]

    def close(self) -> None:
        """No allocate or exchange any more. Idempotent, local; memory goes when the regions handed out are dropped."""
        self.closed = True

    def _require_open(self) -> None:
        if self.closed:
            raise DistMoEError("this World is closed")

    def _allocate_bytes(self, num_bytes: int) -> dict[int, tuple[Tensor, ...]]:
        """local rank -> the bytes of every rank, zeroed."""
        bases = {rank: _aligned_zeros(num_bytes, self.device) for rank in self.local_ranks}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # any stream may write at once
        if self.emulated:
            return {rank: (base,) * self.size for rank, base in bases.items()}
        return dict.fromkeys(bases, tuple(bases.values()))


class _GroupWorld(World):
    """One rank a process: exchange over the group."""

    def __init__(self, group, rank: int, size: int, device: torch.device, timeout_s: float):
        super().__init__(size, (rank,), device)
        self._group, self._timeout_s = group, timeout_s
        # Host objects travel through a CPU backend of the group where it has one.
        self._wire_device = torch.device("cpu") if "cpu" in dist.get_backend_config(group) else device

    def close(self) -> None:
        super().close()
        self._group = None  # its threads end with the last reference to it, and must not outlive the interpreter

    def exchange(self, obj: Any) -> list[Any]:
        self._require_open()
        payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([payload.numel()]))]
        padded = payload.new_zeros(max(sizes))
        padded[: payload.numel()] = payload
        parts = self._all_gather(padded)
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _all_gather(self, sent: Tensor) -> list[Tensor]:
        sent = sent.to(self._wire_device)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        try:
            work = dist.all_gather(parts, sent, group=self._group, async_op=True)
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise PeerTimeoutError(
                f"rank {self.local_ranks[0]}: not all {self.size} ranks of the group answered within "
                f"{self._timeout_s:g} s; one is dead, or did not make the same call: {error}"
            ) from error
        return [part.cpu() for part in parts]


class _CpuWorld(_GroupWorld):
    """Shared memory: one file a rank, mapped by all. Its name lives only until all have mapped it."""

    def _allocate_bytes(self, num_bytes: int) -> dict[int, tuple[Tensor, ...]]:
        rank, num_bytes = self.local_ranks[0], align(num_bytes, mmap.PAGESIZE)
        names = self.exchange(f"dist_moe-{os.getpid()}-{secrets.token_hex(8)}")
        paths = [SHARED_MEMORY_DIR / name for name in names]
        bases: list[Tensor] = []
        try:
            self.together("allocate", lambda: _create_file(paths[rank], num_bytes))
            self.together("allocate", lambda: bases.extend(_map_file(path, num_bytes) for path in paths))
        finally:
            # Every rank removes every name, so that a rank which dies on the way leaves no file behind.
            for path in paths:
                path.unlink(missing_ok=True)
        return {rank: tuple(bases)}


class _CudaWorld(_GroupWorld):
    """torch's symmetric memory: the peers' memory is mapped into this process. Multicast is never used."""

    def _allocate_bytes(self, num_bytes: int) -> dict[int, tuple[Tensor, ...]]:
        import torch.distributed._symmetric_memory as symmetric_memory

        rank, bases = self.local_ranks[0], []

        def allocate() -> None:
            bases.append(symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self.device).zero_())
            torch.cuda.synchronize(self.device)

        def map_peers() -> None:
            own = bases.pop()
            # The memory of `own` holds the mappings as long as it lives, so nothing else must keep the handle.
            handle = symmetric_memory.rendezvous(own, self._group)
            views = [handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in range(self.size)]
            bases.extend(own if peer == rank else view for peer, view in enumerate(views))

        self.together("allocate", allocate)
        self.together("allocate", map_peers)
        return {rank: tuple(bases)}


def _resolve_device(device) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _normalise(regions: Regions) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(int(n) for n in shape), dtype) for name, (shape, dtype) in regions.items()]


def _layout(request) -> tuple[list[int], int]:
    """First byte of each region, and bytes in all (never 0); multiples of REGION_ALIGNMENT."""
    starts, end = [], 0
    for _, shape, dtype in request:
        starts.append(end)
        end = align(end + math.prod(shape) * dtype.itemsize, REGION_ALIGNMENT)
    return starts, max(end, REGION_ALIGNMENT)


def _views(bases: tuple[Tensor, ...], rank: int, request, starts: list[int]) -> dict[str, Region]:
    """The regions as local rank `rank` sees them; bases: the allocation of every rank, as bytes."""
    views = {}
    for (name, shape, dtype), start in zip(request, starts, strict=True):
        end = start + math.prod(shape) * dtype.itemsize
        peers = tuple(base[start:end].view(dtype).view(shape) for base in bases)
        addresses = [base.data_ptr() + start for base in bases]
        views[name] = Region(peers[rank], peers, torch.tensor(addresses, dtype=torch.int64, device=bases[rank].device))
    return views


def _difference(expected, rank: int, found) -> str:
    """Words for the first region that differs between rank 0 and `rank`."""
    for a, b in itertools.zip_longest(expected, found):
        if a != b:
            of_0, of_rank = (f"{r[0]} {list(r[1])} {r[2]}" if r else "no further region" for r in (a, b))
            return f"rank {rank} asks for other regions than rank 0: {of_rank}; rank 0: {of_0}"
    raise AssertionError("no difference")


def _aligned_zeros(num_bytes: int, device: torch.device) -> Tensor:
    raw = torch.zeros(num_bytes + REGION_ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % REGION_ALIGNMENT
    return raw[start : start + num_bytes]


def _create_file(path: Path, num_bytes: int) -> None:
    """A new file of zeros whose bytes are really there: a sparse one would end in SIGBUS when memory runs out."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise DistMoEError(
            f"{path.parent} has no room for {num_bytes} bytes of symmetric memory a rank ({free} bytes free): {error}; "
            f"enlarge it (docker run --shm-size=..., mount -o remount,size=... {path.parent})"
        ) from error
    finally:
        os.close(fd)


def _map_file(path: Path, num_bytes: int) -> Tensor:
    fd = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)  # unmapped with its last view
    finally:
        os.close(fd)


def _this_host() -> tuple[str, str]:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot_id.read_text().strip() if boot_id.exists() else ""


def _require_one_host(places: list[tuple[str, str, str]]) -> None:
    """places: host name, boot id and device type of every rank."""
    for rank, place in enumerate(places):
        if place[:2] != places[0][:2]:
            raise ValueError(
                f"World.from_group: all ranks must run on one host; rank 0 runs on {places[0][0]}, rank {rank} on "
                f"{place[0]} (boot ids {places[0][1]}, {place[1]}; containers need one host name and one /dev/shm)"
            )
        if place[2] != places[0][2]:
            raise ValueError(f"World.from_group: rank 0 is on {places[0][2]}, rank {rank} on {place[2]}")

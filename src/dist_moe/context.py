"""Context: the buffers, the resolved ops and the slots of one MoE shape on one group, made once and closed once."""

import contextlib
import importlib
import itertools
import logging
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import Tensor

from . import errors, memory_stats, moe, shapes, vmm
from .config import Config, as_bool, as_float, as_int, config_hash
from .memory_stats import MemoryStats
from .planner import MemoryPlan, dedup, plan_memory, slot_geometry, symmetric_regions
from .registry import default_device, not_in_this_release, resolve
from .slots import SavedForward, SavedForwards
from .symm import World

logger = logging.getLogger(__name__)

_live: "weakref.WeakValueDictionary[str, Context]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_VERSION = version("dist-moe-triton")
DEFAULT_PEER_TIMEOUT_S = 600.0
_BUILD = object()  # what create_context passes and nobody else has


def live_context(handle: str) -> "Context":
    """The open Context of this handle, for ops, which name their Context by a string."""
    context = _live.get(handle)
    if context is None:
        raise RuntimeError(f"context {handle!r} is not live: it was closed or dropped, or is not of this process")
    return context


class Context:
    """Made by create_context. Owns communication buffers, scratch and saved activations; collective in use.

    Attributes: group (None once closed); config; memory_plan; device; name; buffers (symmetric regions of the local
    rank by name); activation_buffer (uint8). Use as a context manager closes it.
    """

    def __init__(self, build=None, **parts):
        if build is not _BUILD:
            raise TypeError("Context cannot be constructed directly; use create_context()")
        self.group, self.world, self.config, self.device = (parts[k] for k in ("group", "world", "config", "device"))
        self.memory_plan: MemoryPlan = parts["plan"]
        self.path: moe.Path = parts["path"]
        self.ranks: list[moe.LocalRank] = parts["ranks"]
        self.name: str = parts["name"]
        self._lock = threading.RLock()
        self._closed = False
        self._refusal: str | None = None
        self._has_told = False  # the peers, in this epoch, that this rank gave up
        self.saved = SavedForwards(
            self.memory_plan.num_activation_slots, self.config.max_moe_layers_per_activation_slot
        )
        self._epoch = 0
        self._last_stream: torch.cuda.Stream | None = None
        self._captured_stream: torch.cuda.Stream | None = None
        self._last_event: torch.cuda.Event | None = None

    # ---- what it is ----------------------------------------------------------------------------------------------

    @property
    def buffers(self) -> dict:
        return self._rank().regions

    @property
    def activation_buffer(self) -> Tensor:
        return self._rank().buffer

    @property
    def num_local_input_tokens(self) -> int:
        self.require_open()
        return self.config.num_local_input_tokens

    @property
    def hidden_dim(self) -> int:
        self.require_open()
        return self.config.hidden_dim

    @property
    def top_k(self) -> int:
        self.require_open()
        return self.config.top_k

    @property
    def context_id(self) -> str:
        self.require_open()
        return self.name

    @property
    def experts_per_rank(self) -> int:
        return self.config.num_experts // self.world.size

    def _rank(self) -> moe.LocalRank:
        self.require_open()
        return self.ranks[0]

    def require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"context {self.name!r} is closed")

    # ---- faults --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Wait for the device and raise the fault of any call so far. Not collective; every rank sees the same fault.

        Raises: a DistMoEError of dist_moe.errors. Until reset() every further call raises it again.
        """
        self.require_open()
        self._synchronize()
        self.raise_fault()

    def memory_stats(self, rank: int | None = None) -> MemoryStats:
        """What this rank's calls received, kept and used; waits for the device, so not between the calls of a step.

        Args:    rank: of a virtual World, whose; default its first.
        Raises:  ValueError for a rank that does not live here; RuntimeError while a CUDA graph is captured.
        """
        self.require_open()
        ranks = {r.rank: r for r in self.ranks}
        rank = self.ranks[0].rank if rank is None else rank
        if rank not in ranks:
            raise ValueError(f"memory_stats: rank {rank} does not live in this process, {sorted(ranks)} do")
        if self._is_capturing():
            raise RuntimeError("memory_stats reads the device, which a capture cannot hold")
        self._synchronize()
        return memory_stats.read(ranks[rank].stats_S, self.memory_plan)

    def reset_memory_stats(self) -> None:
        """Count from zero again, on this rank; in stream order, so it may be captured. reset() leaves the counts."""
        with self.call():
            for r in self.ranks:
                r.stats_S.zero_()

    def raise_fault(self) -> None:
        """Raise the fault that has reached the host, without waiting for the device."""
        for r in self.ranks:
            record = r.host_fault_F.tolist()
            if record[0]:
                error = self._fault_of(r, record)
                # A peer that got through the faulty call must not wait for this rank in the next.
                self._tell_peers(error)
                raise error
        if self._refusal is not None:
            raise errors.PeerAbortedError(
                f"rank {self.ranks[0].rank} (this one) refused an earlier call: {self._refusal}; "
                "call context.reset() on every rank"
            )

    def _fault_of(self, r: moe.LocalRank, record: list[int]) -> errors.DistMoEError:
        peer = record[0] >> shapes.FAULT_RANK_SHIFT
        return errors.from_fault_record(
            record,
            balanced_rows=self.memory_plan.balanced_recv_rows,
            abort_text=bytes(r.abort_text.peers[peer].tolist()).split(b"\0")[0].decode(errors="replace"),
            abort_code=int(r.header.peers[peer][shapes.HEADER_ABORT]),
        )

    def refuse(self, error: BaseException) -> None:
        """Give up the call that this rank is in or about to enter, and tell the peers, so that none waits for it.

        A fault or refusal that is there already stays the first cause.
        """
        if self.world.size == 1 or self.world.emulated or self._has_told:
            return
        self._refusal = f"{type(error).__name__}: {error}"
        self._tell_peers(error)

    def _tell_peers(self, error: BaseException) -> None:
        """Signal every stage as aborted, once an epoch, with the cause in words. Never raises: `error` goes first."""
        if self.world.size == 1 or self.world.emulated or self._has_told or self._is_capturing():
            return
        self._has_told = True
        cause = f"{type(error).__name__}: {error}".encode()
        try:
            with self._device_guard():
                self._enter_stream()
                for r in self.ranks:
                    size = r.abort_text.own.numel()
                    r.abort_text.own.copy_(torch.tensor(list(cause[: size - 1].ljust(size, b"\0")), dtype=torch.uint8))
                    aborted = torch.full_like(r.stop_1, shapes.FAULT_ABORTED | r.rank << shapes.FAULT_RANK_SHIFT)
                    r.stop_1.copy_(torch.where(r.stop_1 == 0, aborted, r.stop_1))
                    for stage in (shapes.PUBLISHED, shapes.COMBINED):
                        moe.signal(self.path, r, stage)
                self._leave_stream()
        except Exception:
            logger.exception("rank %s could not tell its peers that it gives up", self.ranks[0].rank)

    @contextlib.contextmanager
    def call(self):
        """Around a forward or backward: order between streams, the faults so far, and a word to peers on failure."""
        with self._lock, self._device_guard():
            self.require_open()
            self.raise_fault()
            self._enter_stream()
            try:
                yield
            except BaseException as error:
                self.refuse(error)
                raise
            finally:
                self._leave_stream()

    def reset(self, *, collective: bool = False) -> None:
        """Forget every saved forward and, after a fault, make the Context work again.

        Once this rank knows of a fault (check() or a call raised it) reset is collective: all ranks call it, and it
        raises PeerTimeoutError when one does not come in time; a rank that was merely slow is met by calling it once
        more. Otherwise it is local, waits for nothing, and may be captured in a CUDA graph. A job that tells all its
        ranks to reset, whether or not each has met the fault, passes `collective=True`. Backwards of earlier forwards
        raise SlotError.
        """
        self.require_open()
        with self._lock, self._device_guard():
            if self._is_capturing():
                if collective:
                    raise RuntimeError("reset(collective=True) waits for all ranks, which a capture cannot hold")
            else:
                self._synchronize()
                if collective or self._refusal is not None or any(int(r.fault_F[0]) for r in self.ranks):
                    self._realign()
            for r in self.ranks:
                r.slot_used_NW.zero_()
                r.slot_layers_N.zero_()
            self.saved.clear()

    def _realign(self) -> None:
        """Meet all ranks, then start a new epoch: flags and calls of the one before are too old to count.

        A meeting that fails is not counted, so that all ranks number their epochs alike, and the one that came late
        finds the flags of those that waited for it.
        """
        with contextlib.suppress(errors.DistMoEError):
            self.raise_fault()  # so that no peer still waits in a call
        for r in self.ranks:
            r.fault_F.zero_()
        moe.exchange(self.path, self.ranks, shapes.RESET)
        self._synchronize()
        for r in self.ranks:
            record = r.fault_F.tolist()
            if record[0]:
                for other in self.ranks:
                    other.sent_S[shapes.RESET] -= 1
                    other.host_fault_F.copy_(r.fault_F)
                raise self._fault_of(r, record)
        self._epoch += 1
        self._refusal, self._has_told = None, False
        for r in self.ranks:
            r.host_fault_F.zero_()
            r.abort_text.own.zero_()
            r.sent_S[: shapes.RESET] = self._epoch << shapes.EPOCH_SHIFT
            r.call_1.fill_(self._epoch << shapes.EPOCH_SHIFT)

    # ---- slots ---------------------------------------------------------------------------------------------------

    def select_activation_slot(self, activation_slot: int, num_moe_layers_in_slot: int) -> None:
        """Choose the slot of later forwards and how many layers it will hold; a backward finds its own slot.

        Ignored without slots. Raises ValueError out of range. Not collective, but the same on all ranks.
        """
        self.require_open()
        if len(self.saved):
            self.saved.select(
                as_int("select_activation_slot", "activation_slot", activation_slot),
                as_int("select_activation_slot", "num_moe_layers_in_slot", num_moe_layers_in_slot),
            )

    def require_newest(self, saved: SavedForward) -> None:
        """Refuse the backward of a forward that is not the newest of its slot, and tell the peers."""
        self.raise_fault()
        problem = self.saved.problem_of(saved)
        if problem is not None:
            error = errors.SlotError(problem)
            self.refuse(error)
            raise error

    # ---- the device ----------------------------------------------------------------------------------------------

    def _device_guard(self):
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _enter_stream(self) -> None:
        """All calls share one set of buffers, so a call on another stream than the last one's waits for it.

        A capture waits for nothing outside of it: torch.cuda.graph begins it on an idle device.
        """
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._is_capturing():
            if self._captured_stream not in (None, stream):
                raise RuntimeError(
                    f"context {self.name!r} has a captured call on another stream, which this one would not wait for; "
                    "capture its calls on one stream"
                )
        elif self._last_stream is not None and stream != self._last_stream:
            stream.wait_event(self._last_event)

    def _leave_stream(self) -> None:
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._is_capturing():
            self._captured_stream = stream
        else:
            self._captured_stream = None
            self._last_stream, self._last_event = stream, stream.record_event()

    # ---- its end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the buffers. Idempotent, local, also after the group is gone; graphs that replay calls must be gone."""
        if self._closed:
            return
        self._synchronize()
        self._closed = True
        _live.pop(self.name, None)
        self.ranks = []
        self.world.close()
        self.group = None

    def __enter__(self) -> "Context":
        self.require_open()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None and not self._closed:
            self.refuse(error)
        self.close()

    def __deepcopy__(self, memo) -> "Context":
        """A copied module shares its Context: the buffers are the group's, not the module's."""
        return self

    def __reduce__(self):
        raise TypeError("a Context cannot be pickled: it belongs to its process; make another with create_context()")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.world.size} ranks on {self.device}"
        return f"<dist_moe.Context {self.name!r}: {state}>"


@torch.inference_mode(False)  # what is made under it could never be written outside of it
def create_context(
    *,
    group,
    config: Config,
    device: torch.device | str | None = None,
    emulate_peer_buffers: bool | None = None,
    peer_timeout_s: float = DEFAULT_PEER_TIMEOUT_S,
    name: str | None = None,
    backend: str | None = None,
) -> Context:
    """Allocate everything that calls of one Config on one group need.

    Args:    group: a process group; None for the default group, or for a single process without one; or a World.
             device: default the current CUDA device, for a gloo group or without CUDA the CPU.
             emulate_peer_buffers: let every peer be this rank's own memory (shapes, memory and traces; with one rank
             the numbers too); None: only for the "fake" process-group backend.
             peer_timeout_s: how long a rank waits for a peer before PeerTimeoutError.
             name: of the Context in saved exports; must be unused in this process.
             backend: "triton" or "reference" for every op; None: the best that runs on the device.
    Returns: the Context; `with create_context(...) as context` closes it.
    Raises:  TypeError, ValueError for arguments; RuntimeError when CUDA or the backend is missing; RankMismatchError
             naming rank and field when configurations differ; PeerAbortedError when another rank failed here;
             NotImplementedError for block-scaled formats, which can be planned only.
    Order:   collective over the group; all ranks in the same order.
    """
    # What one rank refuses, all learn of, instead of waiting for it: they meet first, whatever the arguments.
    refused, timeout_s = None, DEFAULT_PEER_TIMEOUT_S
    try:
        timeout_s = _check_timeout(peer_timeout_s)
        if not isinstance(config, Config):
            raise TypeError(f"create_context: config must be a Config, got {type(config).__name__}")
        if emulate_peer_buffers is not None:
            as_bool("create_context", "emulate_peer_buffers", emulate_peer_buffers)
        device = None if device is None else default_device(device)
    except (TypeError, ValueError, RuntimeError) as error:
        refused, device, emulate_peer_buffers = error, None, None
    world = _world_of(group, device, emulate_peer_buffers, timeout_s)
    prepared, ranks, buffers = [], [], {}

    def prepare() -> dict:
        if refused is not None:
            raise refused
        prepared.append(_prepare(world, config, backend, name))
        # Which kernel computes a rank's own weight gradients concerns no other rank.
        backends = {op: name.replace("gluon", "triton") for op, name in prepared[0][1].backends.items()}
        return asdict(config) | {"backend": backends, "peer_timeout_s": timeout_s, "dist_moe": _VERSION}

    try:
        terms = world.together("create_context", prepare)
        for rank, other in enumerate(terms):
            for field, value in terms[0].items():
                if other[field] != value:
                    raise errors.RankMismatchError(
                        f"create_context: ranks differ in {field}: rank 0 has {value!r}, "
                        f"rank {rank} has {other[field]!r}"
                    )
        plan, ops, name = prepared[0]
        logger.info("%s", plan.explain())
        with _activation_buffers(world, config, plan) as buffers:
            regions = world.allocate(symmetric_regions(config, world.size))
            world.together(
                "create_context",
                lambda: ranks.extend(
                    _local_rank(world, config, plan, rank, regions[rank], buffers[rank]()) for rank in world.local_ranks
                ),
            )
    except BaseException:
        # The traceback keeps this frame alive for as long as somebody handles the error.
        ranks.clear()
        buffers.clear()
        world.close()
        raise
    path = moe.Path(
        ops=ops,
        hidden_dim=config.hidden_dim,
        intermediate_dim=config.intermediate_dim,
        num_tokens_max=config.num_local_input_tokens,
        num_experts=config.num_experts,
        capacity_rows=plan.total_scratch_capacity_rows,
        dedup=dedup(config, world.size),
        activation=config.activation_fn,
        geometry=slot_geometry(config, world.size, plan),
        config_hash=config_hash(config, world.size),
        timeout_ns=int(timeout_s * 1e9),
        exchanges=not world.emulated,
        num_sms=config.num_sms,
        preset=config.bf16_grouped_gemm_preset,
        rows_per_expert=shapes.cdiv(plan.total_scratch_capacity_rows, config.num_experts // world.size),
    )
    context = Context(
        _BUILD,
        group=group,
        world=world,
        config=config,
        device=world.device,
        plan=plan,
        path=path,
        ranks=ranks,
        name=name,
    )
    _live[name] = context
    return context


def _check_timeout(peer_timeout_s) -> float:
    timeout_s = as_float("create_context", "peer_timeout_s", peer_timeout_s)
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"create_context: peer_timeout_s must be finite and positive seconds, got {peer_timeout_s}")
    return timeout_s


def _world_of(group, device, emulate: bool | None, timeout_s: float) -> World:
    """The World of a group, on the device that was asked for."""
    if isinstance(group, World):
        if device is not None and default_device(device) != group.device:
            raise ValueError(f"create_context: device is {device}, the World's is {group.device}; leave device out")
        return group
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return World.virtual(1, default_device(device))
    backend = dist.get_backend(group)
    device = default_device("cpu" if device is None and backend == "gloo" else device)
    if emulate is None:
        emulate = backend == "fake"
    if emulate:
        return World.emulated(dist.get_world_size(group), dist.get_rank(group), device)
    return World.from_group(group, device, timeout_s=timeout_s)


def _prepare(world: World, config: Config, backend: str | None, name: str | None):
    """The parts that need no other rank: plan, resolved ops and name."""
    # A custom op imports this in its first call, for seconds, which the peers' deadlines should not have to cover.
    importlib.import_module("torch._dynamo")
    if config.num_experts % world.size:
        raise ValueError(
            f"create_context: num_experts must be divisible by the number of ranks, got {config.num_experts} experts "
            f"on {world.size} ranks"
        )
    if reason := not_in_this_release(config):
        raise NotImplementedError(f"create_context: {reason}")
    plan = plan_memory(config, world.size, device=world.device)
    if config.vmm is not None and not plan.uses_host_scratch:
        logger.warning("create_context: VmmConfig has no effect: device scratch holds all rows, none lie on the host")
    name = f"dist_moe-{next(_numbers)}" if name is None else name
    if name in _live:
        raise ValueError(f"create_context: the name {name!r} is that of a live context; close it or choose another")
    return plan, resolve(world.device, backend), name


@contextlib.contextmanager
def _activation_buffers(world: World, config: Config, plan: MemoryPlan):
    """For each local rank, what returns its activation buffer.

    To pin host memory takes seconds, so that it may begin in a thread while the symmetric regions are set up. On the
    way out the thread is waited for; a buffer that nobody took is gone with it.
    """

    def make() -> Tensor:
        if plan.vmm_granularity_bytes is None:
            return torch.empty(plan.total_virtual_bytes, dtype=torch.uint8, device=world.device)
        sections = (plan.vmm_device_prefix_bytes, plan.vmm_host_section_bytes, plan.vmm_device_scratch_section_bytes)
        return vmm.map_buffer(vmm.Sections(*sections), world.device)

    if plan.vmm_granularity_bytes is None or not config.vmm.prefetch:
        yield dict.fromkeys(world.local_ranks, make)
        return
    pool = ThreadPoolExecutor(1, "dist_moe-map")
    try:
        yield {rank: pool.submit(make).result for rank in world.local_ranks}
    finally:
        pool.shutdown(cancel_futures=True)


def _local_rank(
    world: World, config: Config, plan: MemoryPlan, rank: int, regions: dict, buffer: Tensor
) -> moe.LocalRank:
    def words(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=world.device)

    def rows(width: int) -> Tensor:
        num_rows = len(elements) // width
        return elements[: num_rows * width].view(num_rows, width)

    on_gpu, D, F = world.device.type == "cuda", config.hidden_dim, config.intermediate_dim
    elements, fault_F = buffer[: len(buffer) // 2 * 2].view(torch.bfloat16), words(shapes.FAULT_WORDS)
    return moe.LocalRank(
        rank=rank,
        regions=regions,
        buffer=buffer,
        elements=elements,
        rows={width: rows(width) for width in (D, F, 2 * F)},
        slot_used_NW=words(plan.num_activation_slots, world.size),
        slot_layers_N=words(plan.num_activation_slots),
        slot_calls_NM=words(plan.num_activation_slots, config.max_moe_layers_per_activation_slot),
        stats_S=words(shapes.STATS_SLOTS + plan.num_activation_slots + config.num_experts // world.size),
        fault_F=fault_F,
        stop_1=fault_F[:1],
        host_fault_F=torch.zeros(shapes.FAULT_WORDS, dtype=torch.int64, pin_memory=on_gpu),
        sent_S=words(shapes.NUM_STAGES),
        call_1=words(1),
        zero_1=words(1),
    )

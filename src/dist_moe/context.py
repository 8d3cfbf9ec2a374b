"""Context: the buffers, the resolved ops and the slots of one MoE shape on one group, made once and closed once."""

import contextlib
import logging
import threading
import weakref

import torch
from torch import Tensor

from . import errors, meeting, memory_stats, shapes
from .calls import LocalRank, Path
from .config import as_int
from .memory_plan import MemoryPlan
from .memory_stats import MemoryStats
from .planner import missing_route_bytes, padding_rows
from .slots import SavedForward, SavedForwards

logger = logging.getLogger(__name__)

live: "weakref.WeakValueDictionary[str, Context]" = weakref.WeakValueDictionary()  # by name
BUILD = object()  # what create_context passes and nobody else has


def live_context(handle: str) -> "Context":
    """The open Context of this handle, for ops, which name their Context by a string."""
    context = live.get(handle)
    if context is None:
        raise RuntimeError(f"context {handle!r} is not live: it was closed or dropped, or is not of this process")
    return context


class Context:
    """Made by create_context. Owns communication buffers, scratch and saved activations; collective in use.

    Attributes: group (None once closed); config; memory_plan; device; name; buffers (symmetric regions of the local
    rank by name); activation_buffer (uint8). Use as a context manager closes it.
    """

    def __init__(self, build=None, **parts):
        if build is not BUILD:
            raise TypeError("Context cannot be constructed directly; use create_context()")
        self.group, self.world, self.config, self.device = (parts[k] for k in ("group", "world", "config", "device"))
        self.memory_plan: MemoryPlan = parts["plan"]
        self.path: Path = parts["path"]
        self.ranks: list[LocalRank] = parts["ranks"]
        self.name: str = parts["name"]
        self.missing_route_bytes = missing_route_bytes(self.config, self.world.size)
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

    def _rank(self) -> LocalRank:
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

    def _fault_of(self, r: LocalRank, record: list[int]) -> errors.DistMoEError:
        peer = record[0] >> shapes.FAULT_RANK_SHIFT
        return errors.from_fault_record(
            record,
            balanced_rows=self.memory_plan.balanced_recv_rows,
            padding_rows=padding_rows(self.config, self.world.size),
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
                        meeting.signal(self.path, r, stage)
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
        meeting.exchange(self.path, self.ranks, shapes.RESET)
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

    @torch._disable_dynamo  # a compiled program finds the slot that was selected before it
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
        live.pop(self.name, None)
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

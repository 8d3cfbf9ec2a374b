"""The exceptions of the library, and how a device's fault record becomes one of them.

ValueError and TypeError are for arguments; what only a running call can find out is a DistMoEError. Nothing here
kills the CUDA context: after `context.reset()` on all ranks the Context works again, except after a dead peer.
"""

import math
from collections.abc import Sequence
from functools import partial

from . import shapes


class DistMoEError(RuntimeError):
    """Anything that stops a call of a live Context."""


class RoutingOverflowError(DistMoEError):
    """A rank would receive more rows than the plan holds. Raised on every rank of the call.

    Attributes: rank, needed_rows, available_rows, needed_factor (the capacity factor that would have fitted).
    """

    def __init__(self, message: str, *, rank: int, needed_rows: int, available_rows: int, needed_factor: float):
        super().__init__(message)
        self.rank, self.needed_rows, self.available_rows = rank, needed_rows, available_rows
        self.needed_factor = needed_factor

    def __reduce__(self):  # exceptions travel between processes by pickle
        attributes = {name: getattr(self, name) for name in ("rank", "needed_rows", "available_rows", "needed_factor")}
        return partial(type(self), **attributes), self.args


class InvalidExpertIdError(DistMoEError):
    """An expert id was num_experts or more (a negative id is legal: no expert). Raised on every rank of the call."""


class RankMismatchError(DistMoEError):
    """Ranks disagree: other configurations at creation, or another kind or number of call at the same time."""


class PeerAbortedError(DistMoEError):
    """Another rank gave up this call; the message names it and its cause."""


class PeerTimeoutError(DistMoEError):
    """A peer did not signal within peer_timeout_s; the message names rank, stage and generation."""


class SlotError(DistMoEError):
    """An activation slot was used out of order: too many layers, a wrong order of backwards, or a second backward."""


def _describe_word(word: int, value: int) -> str:
    if word == shapes.HEADER_KIND:
        return shapes.KIND_NAMES.get(value, str(value))
    if word in (shapes.HEADER_CALL, shapes.HEADER_FORWARD):
        return f"call {value & 0xFFFFFFFF} of epoch {value >> shapes.EPOCH_SHIFT}"
    if word == shapes.HEADER_KEPT:
        return f"{shapes.KEPT_NAMES[value]} kept"
    return str(value)


_CAUSES = {
    shapes.FAULT_MISMATCH: RankMismatchError,
    shapes.FAULT_INVALID_ID: InvalidExpertIdError,
    shapes.FAULT_OVERFLOW: RoutingOverflowError,
    shapes.FAULT_ABORTED: PeerAbortedError,
    shapes.FAULT_TIMEOUT: PeerTimeoutError,
    shapes.FAULT_SLOT: SlotError,
    shapes.FAULT_SLOT_ROOM: SlotError,
}


def from_fault_record(
    record: Sequence[int], *, balanced_rows: int, padding_rows: int = 0, abort_text: str = "", abort_code: int = 0
) -> DistMoEError:
    """The exception for a fault record (shapes.FAULT_*) with word 0 not zero.

    Args:    balanced_rows, padding_rows: rows of a rank at factor 1, and those that a plan adds for padding.
             abort_text, abort_code: why the rank that the record names gave up: its words, if its host has written
             them, and its own fault.
    """
    code, rank = record[0] & 0xFF, record[0] >> shapes.FAULT_RANK_SHIFT
    a, b, c = record[1:4]
    if code == shapes.FAULT_MISMATCH:
        return RankMismatchError(
            f"ranks disagree in one call: {shapes.HEADER_NAMES[a]} of rank 0 is {_describe_word(a, b)}, "
            f"of rank {rank} {_describe_word(a, c)}; every rank must issue the same calls in the same order"
        )
    if code == shapes.FAULT_INVALID_ID:
        return InvalidExpertIdError(
            f"rank {rank} passed an expert id that is not below num_experts at token {a}, k {b}; "
            "use a negative id for 'no expert'"
        )
    if code == shapes.FAULT_OVERFLOW:
        factor = math.ceil((a - padding_rows) / max(balanced_rows, 1) * 1e4) / 1e4  # rounded up: it has to hold
        return RoutingOverflowError(
            f"DistMoE scratch capacity exceeded: rank {rank} needs {a} rows, {b} are available (needed and available "
            f"rows are those of one rank; required_receive_rows: {a}, total_scratch_capacity_rows: {b}); a capacity "
            f"factor of {factor:.10g} would have fitted (device_scratch_capacity_factor, or "
            "VmmConfig.total_scratch_capacity_factor with scratch on the host)",
            rank=rank,
            needed_rows=a,
            available_rows=b,
            needed_factor=factor,
        )
    if code == shapes.FAULT_ABORTED:
        cause = abort_text or (_CAUSES[abort_code].__name__ if abort_code in _CAUSES else "")
        cause = f": {cause}" if cause else ""
        return PeerAbortedError(f"rank {rank} gave up this call before '{shapes.STAGE_NAMES[a]}'{cause}")
    if code == shapes.FAULT_TIMEOUT:
        return PeerTimeoutError(
            f"rank {rank} did not signal '{shapes.STAGE_NAMES[a]}' in time (generation {b & 0xFFFFFFFF}, "
            f"epoch {b >> shapes.EPOCH_SHIFT}); it may be dead, slow, or in another call"
        )
    if code == shapes.FAULT_SLOT:
        return SlotError(
            f"activation slot {a} was used out of order on the device: layer {b} where {c} is the newest; "
            "backwards run in the reverse order of their forwards, once each, and not across a reset"
        )
    if code == shapes.FAULT_SLOT_ROOM:
        return SlotError(
            f"activation slot {a} has no room for layer {b} of {c}: the layers before it were saved for a slot of "
            "fewer; select_activation_slot wants the number of layers that the slot will hold in all"
        )
    raise AssertionError(f"unknown fault record {list(record)}")

"""Ops beside their oracle: each call runs once more in the reference, on a copy of all memory that it can reach, and
what both wrote is compared. The calls are those that the path makes, with its operands."""

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from . import reference
from .formats import Format
from .quantized import Bundle
from .reference_memory import real_rows
from .reference_products import columns_operand, rows_operand
from .route_plan import RoutePlan
from .symm import Region
from .testing import TOLERANCES, assert_close

# What an op rounds: its argument and the bar. All other memory must have equal bits.
ROUNDED = {
    "grouped_gemm": {"out_XN": "gemm"},
    "grouped_gemm_swiglu": {"h1_X2F": "gemm", "h2_XF": "gemm"},
    "mega_forward": {"h2_XF": "gemm", "h3_XD": "path", "outputs": "path"},
    "grouped_gemm_dgrad": {"out_XK": "gemm"},
    "grouped_gemm_wgrad": {"out_LNK": "gemm"},
    "grouped_gemm_scaled": {"out_XN": "gemm"},
    "grouped_gemm_scaled_dgrad": {"out_XK": "gemm"},
    "grouped_gemm_scaled_wgrad": {"out_LNK": "gemm"},
    "grouped_gemm_scaled_swiglu": {"h2_rows": "quantized", "h1_X2F": "gemm"},
    "swiglu": {"h2_XF": "swiglu"},
    "swiglu_backward": {"h1_X2F": "swiglu", "g2_XF": "gemm", "score_grads_R": "gemm"},
    "rmsnorm_reduce": {"out_TD": "gemm", "rstd_TK": "gemm"},
    "rmsnorm_reduce_backward": {"grad_rows_TKD": "gemm", "grad_scores_TK": "gemm", "grad_weight_D": "gemm"},
    "swiglu_quantize": {"rows": "quantized"},
    "swiglu_backward_quantize": {
        "g1_rows": "quantized",
        "g1_columns": "quantized",
        "h2_columns": "quantized",
        "score_grads_R": "gemm",
    },
}


class OpRaised(RuntimeError):
    """An op that is followed raised: its record has it."""


@dataclass
class OpRecord:
    """What came of the calls of one op on one backend."""

    op: str
    backend: str
    problems: list[str] = field(default_factory=list)  # by name, each once
    calls: int = 0
    writes: bool = False  # the oracle wrote in one of them
    worst: dict[str, float] = field(default_factory=dict)  # by bar: dB of the worst row, or ULP
    failures: list[str] = field(default_factory=list)

    @property
    def problem(self) -> str:
        return f"{', '.join(self.problems)}; {self.calls} call(s)"

    @property
    def error(self) -> str:
        """The worst error beside its bar, or the first failure, in words."""
        if self.failures:
            return f"{len(self.failures)} of {self.calls} call(s): {self.failures[0]}"
        if not self.writes:
            return "wrote nothing, as the oracle"
        return ", ".join(in_words(value, bar) for bar, value in self.worst.items()) or "equal bits"

    def add(self, bar: str, value: float) -> None:
        worse = max if TOLERANCES[bar].rows_db is None else min
        self.worst[bar] = worse(self.worst.get(bar, value), value)


def in_words(worst: float, bar: str) -> str:
    """The worst error beside the bar of this name: dB of a row, or ULP."""
    at = TOLERANCES[bar]
    if at.rows_db is None:
        return f"{worst:g} ULP (at most {at.ulps})"
    return f"{'equal' if worst == math.inf else f'{worst:.1f} dB'} (at least {at.rows_db:g})"


class OpChecks:
    """The records of all ops that were followed, by op and backend; `say` hears of each before it first runs."""

    def __init__(self, say: Callable[[str], None]):
        self.records: dict[tuple[str, str], OpRecord] = {}
        self._say = say

    def follow(self, ops: SimpleNamespace, backends: dict[str, str], problem: str) -> None:
        """From now on the calls of every op in `ops` that has another backend than the reference are checked.

        Args:    ops: functions by name, replaced in place.  backends: of each.  problem: what the calls are part of.
        """
        for op, backend in backends.items():
            if backend != "reference":
                record = self.records.setdefault((op, backend), OpRecord(op, backend))
                setattr(ops, op, self._followed(record, getattr(ops, op), problem))

    def _followed(self, record: OpRecord, function: Callable, problem: str) -> Callable:
        def call(*args, **options):
            if problem not in record.problems:
                record.problems.append(problem)
                self._say(f"{record.op} on {record.backend}, {problem}")
            record.calls += 1
            try:
                return _both(record, function, args, options)
            except Exception as error:  # of whatever kind: it is what this is here to find
                record.failures.append(f"{problem}: {type(error).__name__}: {error}")
                raise OpRaised(f"{record.op} raised {type(error).__name__}: {error}") from error

        return call


def _both(record: OpRecord, function: Callable, args: tuple, options: dict):
    """The result of the function; the record takes what the comparison finds."""
    oracle = getattr(reference, record.op)
    given = inspect.signature(oracle).bind(*args, **options).arguments
    wanted = _copied(given)
    expected = oracle(**wanted)
    record.writes = record.writes or expected is not None or _first_difference(_copied(given), wanted) is not None
    result = function(*args, **options)
    found = _copied(given)
    try:
        for name, bar in ROUNDED.get(record.op, {}).items():
            if given.get(name) is not None:
                _compare_rounded(record, name, bar, found, wanted)
        if (difference := _first_difference(found, wanted)) is not None:
            raise AssertionError(f"memory differs from the oracle's: {difference}")
        for i, pair in enumerate(zip(_defined(result), _defined(expected), strict=True)):
            if not torch.equal(*pair):
                raise AssertionError(f"tensor {i} of the result differs from the oracle's")
    except AssertionError as error:
        record.failures.append(f"{record.problems[-1]}: {error}")
    return result


def _copied(arguments: dict) -> dict:
    """The same on the CPU in memory of their own; what shared memory shares it again."""
    storages, memo = {}, {}
    for x in _tensors(arguments):
        storage = x.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.cpu() if x.is_cuda else storage.clone()
        view = (storages[storage.data_ptr()], x.storage_offset(), x.size(), x.stride())
        memo[id(x)] = torch.empty(0, dtype=x.dtype).set_(*view)
    return copy.deepcopy(arguments, memo)


def _compare_rounded(record: OpRecord, name: str, bar: str, found: dict, wanted: dict) -> None:
    """Within the bar; after it `wanted` has the bits that were found."""
    both = (found, wanted)
    if isinstance(found[name], Region):
        for peers in zip(*(arguments[name].peers for arguments in both), strict=True):
            _compare_tensors(record, bar, *peers)
        return
    if not found.keys() & {"row_start_P", "plan"}:  # of tokens, not of received rows
        _compare_tokens(record, name, bar, found, wanted)
        return
    num_rows = int((found["plan"].row_start_P if "plan" in found else found["row_start_P"])[-1])
    real_R = slice(None)
    if "row_to_slot_R" in found:
        real_R = found["row_to_slot_R"][:num_rows] >= 0
    elif isinstance(found[name], Bundle):
        real_R = real_rows(found["row_start_P"], found["num_rows_L"])
    if isinstance(found[name], Bundle):
        how = (num_rows, real_R, found["format"], name.endswith("_columns"))
        pair = [_multiplied_out(arguments[name], *how) for arguments in both]
        written = [arguments[name][::2] for arguments in both]  # values, scales and outer scales, not their starts
        written = [part for part in zip(*written, strict=True) if part[0] is not None]
    elif name == "score_grads_R":  # a sum may nearly cancel: all of them count as one row
        pair = [arguments[name][:num_rows][real_R][None] for arguments in both]
        written = [tuple(arguments[name][:num_rows] for arguments in both)]
    else:
        rows = slice(None)
        if name != "out_LNK":
            first = int(found[f"{name.split('_')[0]}_start_1"][0])
            rows = slice(first, first + num_rows)
        written = [tuple(arguments[name][rows] for arguments in both)]
        differ = (_bytes(written[0][0]) != _bytes(written[0][1])).any(dim=-1)
        pair = [part[differ] for part in written[0]]  # rows of padding hold anything, the same in both
    if not torch.equal(*pair):
        record.add(bar, assert_close(*pair, bar))
    for a, b in written:
        b.view(torch.uint8).copy_(a.view(torch.uint8))


def _compare_tokens(record: OpRecord, name: str, bar: str, found: dict, wanted: dict) -> None:
    """The same for an op of the owner's tokens; the gradients of scores, sums that may nearly cancel, count as one row,
    and so does one of a weight."""
    pair = [arguments[name] for arguments in (found, wanted)]
    _compare_tensors(record, bar, *(t if name in ("out_TD", "grad_rows_TKD") else t.reshape(1, -1) for t in pair))


def _compare_tensors(record: OpRecord, bar: str, found: Tensor, wanted: Tensor) -> None:
    """Row by row, where bits differ; after it `wanted` has those that were found."""
    differ = (_bytes(found) != _bytes(wanted)).any(dim=-1)
    if differ.any():
        record.add(bar, assert_close(found[differ], wanted[differ], bar))
    wanted.view(torch.uint8).copy_(found.view(torch.uint8))


def _multiplied_out(bundle: Bundle, num_rows: int, real_R: Tensor, format: Format, columns: bool) -> Tensor:
    """FP64 of quantised rows, or [width, rows] of quantised columns."""
    rows = slice(0, num_rows)
    return columns_operand(bundle, rows, num_rows, format) if columns else rows_operand(bundle, rows, format)[real_R]


def _bytes(x: Tensor) -> Tensor:
    return x.cpu().contiguous().view(torch.uint8)


def _defined(result) -> list[Tensor]:
    """The bytes of what is defined of an op's result."""
    return [_bytes(x) for x in _tensors(result.counted() if isinstance(result, RoutePlan) else result)]


def _tensors(value) -> Iterator[Tensor]:
    """All that lie in arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        yield from _tensors(vars(value))


def _first_difference(found: dict, wanted: dict) -> str | None:
    """In words, of all memory that the tensors of both lie in; None: equal bits."""
    seen = set()
    for a, b in zip(_tensors(found), _tensors(wanted), strict=True):
        storages = [tensor.untyped_storage() for tensor in (a, b)]
        if storages[0].data_ptr() not in seen:
            seen.add(storages[0].data_ptr())
            pair = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages]
            if len(differ := (pair[0] != pair[1]).nonzero()):
                where = f"around a {a.dtype} {list(a.shape)}"
                return f"{len(differ)} of {len(pair[0])} bytes {where}, the first at {int(differ[0])}"
    return None

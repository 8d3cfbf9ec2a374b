"""The numeric self-test of a machine: every op beside its oracle, and the path beside the dense layer.

Nothing is skipped in silence: what does not run here is a row with its reason. Bars and answers are those of the tests:
testing.TOLERANCES, reference.py and path_oracle.py.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from . import registry
from .config import BlockScaledConfig, BlockScaledFormat, Config
from .context import Context
from .create import create_context
from .formats import FORMATS, Format, by_name
from .op_check import OpChecks, OpRaised, in_words
from .ops import routed_experts
from .options import ExecutionOptions, RMSNormPostprocess
from .path_oracle import (
    FORWARD_ONLY,
    Case,
    assert_results_close,
    dense,
    dense_scaled,
    forward_only,
    on_device,
    prepared,
)
from .quantized import Bundle, Quantized
from .reference_formats import dequantize_columns, expand_rows
from .shapes import Activation, Small
from .symm import World
from .virtual import RankInputs, RankResults, run_virtual

OK, FAIL, NOT_RUN = "ok", "FAIL", "not run"
PEER_TIMEOUT_S = 120.0  # of processes: for the others to compile
ROWS_PER_EXPERT = (64, 256, None)  # what products are told to expect, as tiles depend on it
GROUPS = (5, 0, 129)  # rows by expert of operands by themselves: an empty one, and one row more than an atom has


@dataclass(frozen=True)
class Row:
    """One line of the answer."""

    what: str  # an op, several that share an answer, or the path
    backend: str
    problem: str
    error: str  # the worst one beside its bar, or why there is none
    verdict: str


@dataclass(frozen=True)
class Mode:
    """What the experts compute in."""

    name: str
    format: BlockScaledFormat | None = None
    inference: bool = False
    decode: bool = False  # few tokens for many experts

    def case(self, case: Case) -> Case:
        return replace(case, T=2, E=8 * case.W) if self.decode else case

    def config(self, case: Case) -> Config:
        block_scaled = None if self.format is None else BlockScaledConfig(self.format)
        return self.case(case).config(block_scaled=block_scaled, **(FORWARD_ONLY if self.inference else {}))

    def inputs(self, case: Case, device: torch.device) -> list[RankInputs]:
        inputs = self.case(case).inputs()
        if self.inference and self.format is not None:
            inputs = prepared(inputs, self.config(case), inference=True, device=device)
        elif self.inference:
            inputs = forward_only(inputs)
        return [on_device(rank, device) for rank in inputs]


@functools.cache
def _answer(case: Case, mode: Mode) -> list[RankResults]:
    if mode.format is None:
        answers = dense(mode.case(case), mode.case(case).inputs())
        return [RankResults(rank.out_TD) for rank in answers] if mode.inference else answers
    return dense_scaled(case, case.inputs(), by_name(mode.format), training=not mode.inference)


MODES = (
    Mode("bf16"),
    Mode("bf16 decode", inference=True, decode=True),
    Mode("mxfp8", BlockScaledFormat.MXFP8_E4M3),
    Mode("mxfp8 inference", BlockScaledFormat.MXFP8_E4M3, inference=True),
    Mode("nvfp4 inference", BlockScaledFormat.NVFP4, inference=True),
)


def cases_of(num_ranks: int, device: torch.device) -> list[Case]:
    """Small and odd: widths that no tile divides, both exchanges, what is kept and what is recomputed."""
    W, shape = num_ranks, {"W": num_ranks, "T": 9, "D": 160, "E": 2 * num_ranks, "routing": "zipf(1.0)"}
    cases = [
        Case("per route", K=min(W, 2), F=96, **shape),
        Case("de-duplicated, recomputed", K=2 * W, F=64, slot_factor=None, **shape),
    ]
    if device.type == "cuda":
        cases.append(Case("several tiles", K=min(W, 2), F=288, **shape | {"T": 300, "D": 416}))
    return cases


def check(
    device: torch.device, backend: str | None = None, num_ranks: int = 2, say: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """The self-test of a device.

    Args:    backend: of create_context; None checks the best that runs.  num_ranks: the path runs on 1 .. num_ranks
             virtual ranks, the last in every case; with several GPUs, or on a CPU, once more on processes.
             say: hears what is about to run.
    """
    try:
        registry.resolve(device, backend)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        return [*_not_run(OpChecks(say), device, backend), Row("path", backend or "any", "", reason, NOT_RUN)]
    ops, others = OpChecks(say), []
    for format in FORMATS:
        others += _operands(ops, format, device, backend)
    for W in range(1, num_ranks + 1):
        cases = cases_of(W, device)
        for case in cases if W == num_ranks else cases[:1]:
            others += [_path(ops, case, mode, device, backend) for mode in MODES]
    others += _paths_on_processes(device, backend)
    checked = [
        Row(record.op, record.backend, record.problem, record.error, FAIL if record.failures else OK)
        for record in ops.records.values()
    ]
    return [*checked, *others, *_not_run(ops, device, backend)]


def passed(rows: list[Row]) -> bool:
    """Something ran, and nothing failed."""
    verdicts = {row.verdict for row in rows}
    return OK in verdicts and FAIL not in verdicts


def table_of(rows: list[Row]) -> Table:
    table = Table("op", "backend", "problem", "worst error, or why there is none", "", box=SIMPLE, pad_edge=False)
    for row in rows:
        style = {OK: "", FAIL: "bold red", NOT_RUN: "dim"}[row.verdict]
        table.add_row(*map(escape, (row.what, row.backend, row.problem, row.error, row.verdict)), style=style)
    return table


# Ops


def _operands(ops: OpChecks, format: Format, device: torch.device, backend: str | None) -> Iterator[Row]:
    """The quantisers and products of a format by themselves, as a Config names two of four; a row for other trouble."""
    config = next((mode.config(Case("")) for mode in MODES if mode.format == format.name), None)
    call = registry.call_of(device, backend, config)
    names = [
        op for op in registry.FORMAT_OPS if op.startswith(("quantize_rows", "quantize_c", "quantize_w", "grouped"))
    ]
    chosen = {op: registry.choose(op, call, backend)[0] for op in names}
    if chosen["grouped_gemm_scaled"].backend == "cute" and format.values_per_byte == 1:
        chosen[registry.FUSED_OP] = registry.choose(registry.FUSED_OP, call)[0]
    followed = SimpleNamespace(**{op: registry.function(impl) for op, impl in chosen.items()})
    ops.follow(followed, {op: impl.backend for op, impl in chosen.items()}, format.name)
    try:
        expands_rows, expands_columns = (chosen[f"grouped_gemm_scaled{op}"].expanded for op in ("", "_wgrad"))
        _multiply(followed, format, device, expands_rows, expands_columns)
    except OpRaised:
        pass  # its record says so
    except Exception as error:  # of whatever kind, as where a kernel has broken the CUDA context
        yield Row("operands", "", format.name, f"{type(error).__name__}: {error}", FAIL)


def _multiply(ops: SimpleNamespace, format: Format, device: torch.device, expands_rows, expands_columns) -> None:
    g, N, K = torch.Generator().manual_seed(0), 96, 160
    counts = torch.tensor(GROUPS)
    ends = (-(-counts // 128) * 128).cumsum(0)
    experts = {
        "row_start_P": torch.cat([torch.zeros(1), ends]).int().to(device),
        "num_rows_L": counts.int().to(device),
    }
    tables, zero_1 = tuple(experts.values()), torch.zeros(1, dtype=torch.int64, device=device)
    x, dy, w = (
        torch.randn(*shape, generator=g).bfloat16().to(device)
        for shape in ((int(ends[-1]), K), (int(ends[-1]), N), (len(GROUPS), N, K))
    )

    def bundle(found: Quantized) -> Bundle:
        outer = () if found.outer_inv_R is None else (found.outer_inv_R, zero_1)
        return Bundle(found.values, zero_1, found.scales.flatten(), zero_1, *outer)

    def rows(v: Tensor) -> Bundle:
        return bundle(ops.quantize_rows(v, format=format, blocked=True, **experts))

    def expanded_rows(v: Tensor) -> Bundle:
        found = ops.quantize_rows(v, format=format)
        values = expand_rows(Quantized(*(None if part is None else part.cpu() for part in found)), format)
        return bundle(found)._replace(values=values.to(device), scales=None, scales_start_1=None)

    def columns(v: Tensor) -> Bundle:
        found = ops.quantize_columns(v, format=format, blocked=True, **experts)
        if expands_columns:
            return Bundle(dequantize_columns(found, format=format, blocked=True).to(format.expanded_dtype), zero_1)
        return bundle(found)

    square, how = format.values_per_byte == 1, {"format": format, "stop_1": zero_1}
    weight = ops.quantize_weights(w, format=format, square=square)
    scales = {"w_outer_inv_L": weight.outer_inv_G, "square": square}
    operands = ((expanded_rows if expands_rows else rows)(x), weight.values, weight.scales)
    for size in ROWS_PER_EXPERT:
        out = (torch.zeros_like(dy), zero_1)
        ops.grouped_gemm_scaled(*operands, *out, *tables, **how, **scales, rows_per_expert=size)
    if not square:
        return
    operands = (rows(dy), weight.values, weight.transposed_scales)
    for size in ROWS_PER_EXPERT:
        ops.grouped_gemm_scaled_dgrad(*operands, torch.zeros_like(x), zero_1, *tables, **how, rows_per_expert=size)
    operands = (columns(dy), columns(x))
    for accumulate in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            ops.grouped_gemm_scaled_wgrad(*operands, *tables, w.to(dtype), accumulate=accumulate, **how)
    if hasattr(ops, registry.FUSED_OP):
        weight = ops.quantize_weights(torch.cat([w, w, w, w], dim=1)[:, :256], format=format, square=True)
        h2 = rows(torch.zeros(len(x), 128, device=device))
        operands = (rows(x), weight.values, weight.scales)
        getattr(ops, registry.FUSED_OP)(*operands, h2, *tables, activation=Activation(), **how)


def _not_run(ops: OpChecks, device: torch.device, backend: str | None) -> Iterator[Row]:
    """Rows of the registry that nothing has run, by reason."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for impl in registry.IMPLS:
        if (impl.op, impl.backend) not in ops.records:
            reason = _why_not(impl, device, backend)
            names.setdefault((impl.backend, reason), {})[impl.op] = None
    for (name, reason), of in names.items():
        every = set(of) == {*registry.OPS, *registry.FORMAT_OPS}
        yield Row("every op" if every else ", ".join(of), name, "", reason, NOT_RUN)


def _why_not(impl: registry.Impl, device: torch.device, backend: str | None) -> str:
    if impl.backend == "reference":
        return "is the oracle itself"
    if backend not in (None, impl.backend):
        return f"{backend} was named"
    reasons = [impl.refuses(registry.call_of(device, backend, mode.config(Case("")))) for mode in MODES]
    return "another backend is preferred" if None in reasons else reasons[-1]


# The path


def _path(ops: OpChecks, case: Case, mode: Mode, device: torch.device, backend: str | None) -> Row:
    def run() -> tuple[list[RankResults], dict[str, str]]:
        world, config = World.virtual(case.W, device), replace(mode.config(case), route_outputs=True)
        with create_context(group=world, config=config, backend=backend) as context:
            backends = context.path.ops.backends
            ops.follow(context.path.ops, backends, mode.name)
            counting = ExecutionOptions(swiglu_clip_stats_out_3=torch.empty(3, device=device), swiglu_clip_limit=1.0)
            inputs = mode.inputs(case, device)
            options = None if mode.decode else [counting] * case.W  # counts need h1, which decode's one launch has not
            if mode.format is None:  # nothing but its ops: what comes out has no answer here
                path = context.path
                context.path = replace(path, small=Small(routing=False, sum=False))  # as of many tokens
                weight_D = torch.linspace(0.5, 1.5, case.D, device=device).bfloat16()
                norm = RMSNormPostprocess(1e-6, torch.float32, torch.bfloat16, weight=weight_D)
                norms = [ExecutionOptions(experts_output_postprocess=norm)] * case.W
                run_virtual(case.W, config, inputs, context=context, options=norms)
                context.path = path
                for rank in context.ranks:  # NaN: what the next call's ops write shows
                    rank.buffer.fill_(0xFF)
            return run_virtual(case.W, config, inputs, context=context, options=options), backends

    return _path_row(case, mode, "virtual rank(s)", run)


def _path_row(case: Case, mode: Mode, where: str, run: Callable[[], tuple[list[RankResults], dict[str, str]]]) -> Row:
    """What came of run, which returns results by rank, and the backend of each op."""
    problem, used = f"{mode.name}, {case.W} {where}, {case.note}", ""
    try:
        results, backends = run()
        used = ", ".join(dict.fromkeys(backends.values()))
        bar = "path" if mode.format is None or used == "reference" else "scaled_path"
        results = [on_device(rank, "cpu") for rank in results]
        worst = assert_results_close(results, _answer(case, mode), bar)
    except Exception as error:  # of whatever kind: it is what this is here to find
        return Row("path", used, problem, f"{type(error).__name__}: {error}", FAIL)
    words = in_words(worst.pop("out_TD"), bar)
    if worst:
        words += f", gradients {in_words(min(worst.values()), f'{bar}_grads')}"
    return Row("path", used, problem, words, OK)


def _paths_on_processes(device: torch.device, backend: str | None) -> Iterator[Row]:
    """On as many GPUs as there are, or on two processes of the CPU."""
    W = torch.cuda.device_count() if device.type == "cuda" else 2
    if W < 2:
        yield Row("path", backend or "any", "a process a GPU", f"needs two GPUs, found {W}", NOT_RUN)
        return
    case = cases_of(W, device)[0]
    with tempfile.TemporaryDirectory(prefix="dist_moe_check_") as folder:
        problem = None
        try:
            torch.multiprocessing.spawn(_process, (case, device.type, backend, Path(folder)), nprocs=W)
        except Exception as error:  # of whatever kind: it is what this is here to find
            problem = error
        for mode in MODES:
            yield _path_row(case, mode, "processes", functools.partial(_results_of, case, mode, Path(folder), problem))


def _results_of(case: Case, mode: Mode, folder: Path, problem: Exception | None):
    """What the ranks left in files; raises what ended them if that is not all."""
    files = [folder / f"{mode.name}.{rank}" for rank in range(case.W)]
    if problem is not None and not all(file.exists() for file in files):
        raise problem
    found = [torch.load(file, weights_only=False) for file in files]
    return [results for results, _ in found], found[0][1]


def _process(rank: int, case: Case, device_type: str, backend: str | None, folder: Path) -> None:
    """One rank, in every mode; leaves results and backends in a file each."""
    device = torch.device(device_type, rank if device_type == "cuda" else None)
    group = {"init_method": f"file://{folder}/group", "rank": rank, "world_size": case.W}
    group["timeout"] = timedelta(seconds=PEER_TIMEOUT_S)
    if device_type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **group)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        dist.init_process_group("gloo", **group)
    for mode in MODES:
        own, config = mode.inputs(case, device)[rank], mode.config(case)
        with create_context(group=None, config=config, peer_timeout_s=PEER_TIMEOUT_S, backend=backend) as context:
            found = on_device(_step(own, context), "cpu"), context.path.ops.backends
        file = folder / f"{mode.name}.{rank}"
        torch.save(found, file)
    dist.destroy_process_group()


def _step(own: RankInputs, context: Context) -> RankResults:
    """Forward, and backward in training."""
    leaves = []
    if not context.config.inference:
        leaves = [own.x_TD, own.scores_TK, own.w13_L2FD, own.w2_LDF]
        for leaf in leaves:
            leaf.requires_grad_()
        for weight in leaves[2:]:
            weight.grad_dtype = context.config.wgrad_dtype
    out_TD = routed_experts(own.x_TD, own.ids_TK, own.scores_TK, own.w13_L2FD, own.w2_LDF, context)
    if leaves:
        out_TD.backward(own.grad_out_TD)
    context.check()
    return RankResults(out_TD, *(leaf.grad for leaf in leaves))

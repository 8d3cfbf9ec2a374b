"""Which implementation runs an op: one table op x backend x predicate, resolved once when a Context is made."""

import functools
import importlib
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace

import torch

from .config import Config
from .formats import MXFP8_E4M3, NVFP4, SCALE_ATOM, Format
from .memory_plan import format_bytes
from .planner import dedup, mega, missing_route_bytes, output_columns, plan_memory, rows_per_expert, small
from .shapes import MAX_ROUTES

MIN_TORCH, MIN_TRITON = (2, 11), (3, 6)
MIN_COMPUTE_CAPABILITY = (9, 0)
FITTED_ROWS = (128, 1024)  # of an expert, on average, for tiles that fit them; docs/performance.md has what was timed
GLUON_TRITONS = ("3.6", "3.7", "3.8", "3.9")
CUTE_DSL = "4.8.1"  # the version that the kernels were compiled and emulated with
DRIVER_GRANULARITY_BYTES = 2**21  # of mappings, where no driver can be asked


@dataclass(frozen=True)
class Call:
    """What a predicate may look at: metadata that is the same for every call of a Context."""

    device: torch.device
    compute_capability: tuple[int, int] | None
    interpreting: bool  # TRITON_INTERPRET was set when triton was imported
    by_name: bool  # the backend was named, not chosen
    config: Config | None = None  # of the Context; None: no Context asks
    num_ranks: int = 1  # that share the experts


@dataclass(frozen=True)
class Impl:
    op: str
    backend: str
    where: str  # "module:function", imported when first chosen
    refuses: Callable[[Call], str | None]  # None: can run; otherwise the reason, in words
    note: str = ""  # what whoever gets it should know
    takes_kernel_config: bool = False  # of BlockScaledConfig, as an argument of its own
    expanded: bool = False  # multiplies expanded operands, which a Context then makes; see quantized.Bundle


def _too_old(package: str, found: str, needed: tuple[int, int]) -> str | None:
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < needed:
        return f"{package} {found} is too old, {'.'.join(map(str, needed))} or newer is needed"
    return None


@functools.lru_cache(maxsize=1)
def _triton_problem() -> str | None:
    """Why no Triton kernel can run in this process, whatever the device."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return _too_old("triton", metadata.version("triton"), MIN_TRITON)


def needs_triton(call: Call) -> str | None:
    if problem := _triton_problem():
        return problem
    if call.device.type == "cuda":
        if call.compute_capability < MIN_COMPUTE_CAPABILITY:
            return "GPUs before compute capability 9.0 (Hopper) are not supported, found {}.{}".format(
                *call.compute_capability
            )
        return "TRITON_INTERPRET is set, kernels would not run on the GPU" if call.interpreting else None
    return None if call.interpreting else "kernels run on a CPU only interpreted: set TRITON_INTERPRET=1"


def needs_hopper(call: Call) -> str | None:
    if problem := needs_triton(call):
        return problem
    found = metadata.version("triton")
    if ".".join(found.split(".")[:2]) not in GLUON_TRITONS:
        return f"Gluon changes between versions of Triton; tried on {', '.join(GLUON_TRITONS)}, found {found}"
    if call.device.type != "cuda" or call.compute_capability[0] != 9:
        return "written for the tensor cores of compute capability 9.x"
    return None


def needs_hopper_and_rows(call: Call) -> str | None:
    """Of a product whose tiles fit the rows of an expert, of which there must be enough, and not so many that there is
    little to fit. A preset asks for tiles that it does not have."""
    if problem := needs_hopper(call):
        return problem
    if call.config is None:
        return None
    if call.config.bf16_grouped_gemm_preset is not None:
        return "has no tiles of a bf16_grouped_gemm_preset"
    least, most = FITTED_ROWS
    rows = rows_per_expert(call.config, call.num_ranks)
    return None if least <= rows <= most else f"written for {least} to {most} rows an expert, here are {rows}"


def needs_hopper_and(format: Format) -> Callable[[Call], str | None]:
    """Of a product that is written for one format, in windows of columns that fill atoms of scales."""

    def refuses(call: Call) -> str | None:
        if problem := needs_hopper(call):
            return problem
        return _not_written_for(call.config, format)

    return refuses


def needs_hopper_to_serve(call: Call) -> str | None:
    """Of a product whose rows are expanded, as they are in inference alone."""
    if problem := needs_hopper(call) or _not_written_for(call.config, MXFP8_E4M3, NVFP4):
        return problem
    return None if call.config.inference else "rows of training are codes and scales"


def _not_written_for(config: Config | None, *formats: Format) -> str | None:
    names = [format.name for format in formats]
    if config is None or config.block_scaled is None or config.block_scaled.format not in names:
        return f"written for {' and '.join(names)}"
    columns = output_columns(config, MAX_ROUTES)  # of a large Context; a small one takes them in one pass
    if columns % SCALE_ATOM[0] and columns != config.hidden_dim:
        return f"written for outputs in windows of whole {SCALE_ATOM[0]} columns"
    return None


def _cute_problem() -> str | None:
    """Why no CuTe DSL kernel can be compiled in this process, whatever the device."""
    try:
        found = metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        return "nvidia-cutlass-dsl is not installed: pip install 'dist-moe-triton[cute]'"
    return None if found == CUTE_DSL else f"the CuTe DSL changes between versions; tried on {CUTE_DSL}, found {found}"


def needs_blackwell_and(product: str, *formats: Format) -> Callable[[Call], str | None]:
    """Of a product, by its name in kernels_cute.tiles, that is written for these formats."""

    def refuses(call: Call) -> str | None:
        tiles = importlib.import_module(f"{__package__}.kernels_cute.tiles")
        if call.device.type != "cuda" or call.compute_capability not in tiles.ARCHS:
            built = " and ".join(f"{major}.{minor}" for major, minor in tiles.ARCHS)
            return f"written for the tensor cores of compute capability {built}"
        return _cute_problem() or _not_written_for(call.config, *formats) or tiles.refuses(product, call.config)

    return refuses


def cpu_or_by_name(call: Call) -> str | None:
    return None if call.device.type == "cpu" or call.by_name else "slow on a GPU, it runs there only when named"


# op: the file in kernels_triton that holds it. Order of the rows is order of preference.
_TRITON_FILES = {
    "publish": "publish",
    "signal": "barrier",
    "wait": "barrier",
    "verify": "barrier",
    "route": "route",
    "plan_forward": "plan_slots",
    "wait_route_plan": "wait_route_plan",
    "plan_backward": "plan_slots",
    "copy_x": "copy_x",
    "dispatch": "dispatch",
    "grouped_gemm": "grouped_gemm",
    "grouped_gemm_swiglu": "grouped_gemm_swiglu",
    "mega_forward": "mega_forward",
    "grouped_gemm_dgrad": "grouped_gemm",
    "grouped_gemm_wgrad": "grouped_gemm",
    "count_clips": "clip_stats",
    "swiglu": "swiglu",
    "swiglu_backward": "swiglu",
    "combine": "combine",
    "reduce": "reduce",
    "wait_reduce": "reduce",
    "rmsnorm_reduce": "rmsnorm",
    "rmsnorm_reduce_backward": "rmsnorm",
    "collect_score_grads": "reduce",
    "finish": "finish",
}
# What block-scaled execution has in place of five of them, in the order of its path; quantize_rows and _columns are for
# whoever wants an operand outside of it.
_FORMAT_FILES = {
    "quantize_rows": "quantize",
    "quantize_columns": "quantize",
    "quantize_weights": "quantize",
    "dispatch_packed": "dispatch_packed",
    "dispatch_quantize": "dispatch_quantize",
    "quantize_received": "dispatch_quantize",
    "grouped_gemm_scaled": "grouped_gemm_scaled",
    "grouped_gemm_scaled_dgrad": "grouped_gemm_scaled",
    "grouped_gemm_scaled_wgrad": "grouped_gemm_scaled",
    "swiglu_quantize": "swiglu_quantize",
    "swiglu_backward_quantize": "swiglu_backward_quantize",
}
_BF16_ONLY = {"grouped_gemm", "grouped_gemm_swiglu", "grouped_gemm_dgrad", "grouped_gemm_wgrad"}
_BF16_ONLY |= {"swiglu", "swiglu_backward", "mega_forward"}
_INFERENCE_ONLY = {"dispatch_packed"}
_TRAINING_ONLY = {"dispatch_quantize", "quantize_received", "swiglu_backward_quantize"}
_TRAINING_ONLY |= {"grouped_gemm_scaled_dgrad", "grouped_gemm_scaled_wgrad"}
_FILES = _TRITON_FILES | _FORMAT_FILES
FUSED_OP = "grouped_gemm_scaled_swiglu"  # of the cute backend alone: W13 with SwiGLU and its quantiser
_NOT_EXECUTED = "compiled and emulated, not executed on hardware"
IMPLS = (
    *(
        Impl(op, "gluon", f"dist_moe.kernels_triton.grouped_gemm_hopper:{op}", needs_hopper_and_rows)
        for op in ("grouped_gemm", "grouped_gemm_swiglu", "grouped_gemm_dgrad")
    ),
    Impl("grouped_gemm_wgrad", "gluon", "dist_moe.kernels_triton.wgrad_hopper:grouped_gemm_wgrad", needs_hopper),
    Impl(
        "grouped_gemm_scaled",
        "gluon",
        "dist_moe.kernels_triton.expanded_hopper:grouped_gemm_scaled",
        needs_hopper_to_serve,
        expanded=True,
    ),
    *(
        Impl(op, "gluon", f"dist_moe.kernels_triton.{file}:{op}", needs_hopper_and(format))
        for op, file, format in (
            ("grouped_gemm_scaled", "scaled_hopper", MXFP8_E4M3),
            ("grouped_gemm_scaled_dgrad", "scaled_hopper", MXFP8_E4M3),
        )
    ),
    Impl(
        "grouped_gemm_scaled_wgrad",
        "gluon",
        "dist_moe.kernels_triton.wgrad_hopper:grouped_gemm_scaled_wgrad",
        needs_hopper_and(MXFP8_E4M3),
        expanded=True,
    ),
    *(
        Impl(op, "cute", f"dist_moe.kernels_cute.grouped_gemm:{op}", needs_blackwell_and(*of), _NOT_EXECUTED, True)
        for op, of in (
            ("grouped_gemm_scaled", ("forward", MXFP8_E4M3, NVFP4)),
            ("grouped_gemm_scaled_dgrad", ("dgrad", MXFP8_E4M3)),
            ("grouped_gemm_scaled_wgrad", ("wgrad", MXFP8_E4M3)),
        )
    ),
    Impl(
        FUSED_OP,
        "cute",
        f"dist_moe.kernels_cute.grouped_gemm:{FUSED_OP}",
        needs_blackwell_and("swiglu", MXFP8_E4M3),
        f"{_NOT_EXECUTED}; the path runs its two parts",
        True,
    ),
    *(Impl(op, "triton", f"dist_moe.kernels_triton.{file}:{op}", needs_triton) for op, file in _FILES.items()),
    *(Impl(op, "reference", f"dist_moe.reference:{op}", cpu_or_by_name) for op in _FILES),
)
OPS = tuple(_TRITON_FILES)  # those that a bf16 Context resolves
FORMAT_OPS = tuple(_FORMAT_FILES)
BACKENDS = ("triton", "reference")  # those that have every op can be named
LOCAL_BACKENDS = ("gluon", "cute")  # of a rank's own products: they concern no other rank


def call_of(device: torch.device | str, backend: str | None, config: Config | None = None, num_ranks: int = 1) -> Call:
    """The metadata that decides on a device; starts CUDA only for a CUDA device of this machine.

    Args:    device: one of this machine, or a GPU that need not be there by its compute capability, as "sm_100".
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"unknown backend {backend!r}; known are {', '.join(BACKENDS)}, or None for the best that runs"
        )
    if described := _capability(device):
        return Call(torch.device("cuda"), described, False, backend is not None, config, num_ranks)
    device = torch.device(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    interpreting = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    return Call(device, capability, interpreting, backend is not None, config, num_ranks)


def _capability(device: torch.device | str | None) -> tuple[int, int] | None:
    """Of a GPU that is described as "sm_100"; None for any other device."""
    match = re.fullmatch(r"sm_(\d+)(\d)[af]?", device) if isinstance(device, str) else None
    return match and (int(match[1]), int(match[2]))


def choose(op: str, call: Call, backend: str | None = None) -> tuple[Impl, list[str]]:
    """The first implementation that can run the op, with the reasons of those that were passed over.

    Raises:  ValueError for an unknown op; RuntimeError, with every reason, when nothing, or not what was named, runs.
    """
    rows = [impl for impl in IMPLS if impl.op == op]
    if not rows:
        raise ValueError(f"unknown op {op!r}; known are {', '.join(OPS + FORMAT_OPS)}")
    reasons = []
    for impl in rows:
        if backend is not None and impl.backend != backend:
            continue
        reason = impl.refuses(call)
        if reason is None:
            return impl, reasons
        reasons.append(f"{impl.backend}: {reason}")
    asked = f"backend {backend!r}" if backend else "any backend"
    raise RuntimeError(f"{op} cannot run on {call.device} with {asked}:\n  " + "\n  ".join(reasons))


def expands_operands(config: Config, call: Call, backend: str | None = None) -> bool:
    """Whether a Context keeps what many tiles read in 16 bits: rows in inference, columns in training."""
    if config.block_scaled is None:
        return False
    op = "grouped_gemm_scaled" if config.inference else "grouped_gemm_scaled_wgrad"
    rows = [impl for impl in IMPLS if impl.op == op and backend in (None, impl.backend) and impl.refuses(call) is None]
    return bool(rows) and rows[0].expanded


def function(impl: Impl, config: Config | None = None) -> Callable:
    """What the row names, with the kernel configuration of the Config if it takes one; its module is imported now."""
    module, name = impl.where.split(":")
    found = getattr(importlib.import_module(module), name)
    asked = config.block_scaled.kernel_config if config is not None and config.block_scaled is not None else None
    return functools.partial(found, kernel_config=asked) if impl.takes_kernel_config and asked is not None else found


def ops_of(config: Config) -> tuple[str, ...]:
    """The ops that a Context of this Config runs."""
    if config.block_scaled is None:
        return OPS
    left_out = _BF16_ONLY | {"quantize_rows", "quantize_columns"}
    left_out |= _TRAINING_ONLY if config.inference else _INFERENCE_ONLY
    return tuple(op for op in OPS + FORMAT_OPS if op not in left_out)


def unused_kernel_config(config: Config, call: Call, backend: str | None = None) -> str | None:
    """Products that do not take the kernel configuration of a Config, with the reasons; None when there is none."""
    if config.block_scaled is None or config.block_scaled.kernel_config is None:
        return None
    products = {impl.op for impl in IMPLS if impl.takes_kernel_config}
    ops_by_answer: dict[str, list[str]] = {}
    for op in ops_of(config):
        if op in products:
            impl, reasons = choose(op, call, backend)
            if not impl.takes_kernel_config:
                why = [reason for reason in reasons if reason.startswith("cute: ")] or [f"{backend} was named"]
                ops_by_answer.setdefault("; ".join([impl.backend, *why]), []).append(op)
    return "; ".join(f"{', '.join(ops)} in {answer}" for answer, ops in ops_by_answer.items()) or None


def resolve(
    device: torch.device, backend: str | None = None, config: Config | None = None, num_ranks: int = 1
) -> SimpleNamespace:
    """Every op of a Context as a function, by name, and `backends`: op -> the backend that was chosen.

    Args:   config: of the Context, with num_ranks; default a bf16 one.
    Raises: as choose; RuntimeError for a torch that is too old.
    """
    if problem := _too_old("torch", torch.__version__, MIN_TORCH):
        raise RuntimeError(problem)
    call = call_of(device, backend, config, num_ranks)
    ops, backends = {}, {}
    for op in OPS if config is None else ops_of(config):
        impl, _ = choose(op, call, backend)
        ops[op] = function(impl, config)
        backends[op] = impl.backend
    return SimpleNamespace(**ops, backends=backends)


def default_device(device: torch.device | str | None = None) -> torch.device:
    """The device of a Context: the one given, else the current GPU, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CUDA device or the CPU, got {device}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("CUDA is not available here; pass device='cpu' to run on the CPU")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    return device


def _outputs_in_words(config: Config, ep_size: int) -> str:
    missing = missing_route_bytes(config, ep_size)
    if not missing:
        return "a row a route, as experts_output_postprocess needs"
    return (
        "a row a rank that a token visits; experts_output_postprocess needs Config(route_outputs=True), "
        f"{format_bytes(missing)} more"
    )


def _launches_in_words(config: Config, ep_size: int) -> str:
    found = small(config, ep_size)
    first = "wait, route and plan in one" if found.routing else "wait, route and plan by themselves"
    last = "wait and reduce in one" if found.sum else "wait and reduce by themselves"
    experts = "the experts in one; " if mega(config, ep_size) else ""
    return f"each signal with the op before it; {first}; {experts}{last}"


def explain(
    config: Config, ep_size: int = 1, *, device: torch.device | str | None = None, backend: str | None = None
) -> str:
    """What would run for this Config on `ep_size` ranks and what it would allocate, in words. Not collective.

    Args:    device: default the current GPU, else the CPU; "sm_100" and its like: GPUs of that compute capability, on a
             machine that need not have one, with the packages of this machine.
             backend: as in create_context.
    Raises:  ValueError, TypeError as plan_memory; RuntimeError as create_context when no backend runs.
    """
    if _capability(device):
        where, plan_for = device, {"device": device, "vmm_granularity_bytes": DRIVER_GRANULARITY_BYTES}
    else:
        where = device = default_device(device)
        plan_for = {"device": device}
    call = call_of(device, backend, config, ep_size)
    scheme = "de-duplicated: a token's row crosses once a rank" if dedup(config, ep_size) else "per route"
    obstacle = None
    try:
        plan = plan_memory(config, ep_size, backend=backend, **plan_for)
    except RuntimeError as error:  # scratch on the host, and nothing that maps it
        plan, obstacle = plan_memory(config, ep_size), str(error)
    if config.num_experts % ep_size:
        raise ValueError(
            f"explain: num_experts must be divisible by the number of ranks, got {config.num_experts} experts for "
            f"{ep_size} ranks"
        )
    lines = [plan.explain(), f"exchange: {scheme}", f"outputs: {_outputs_in_words(config, ep_size)}"]
    lines.append(f"launches of a forward: {_launches_in_words(config, ep_size)}")
    if obstacle:
        return "\n".join([*lines, f"ops on {where}: none, {obstacle}"])
    if config.block_scaled is not None:
        hint = "" if config.block_scaled.pipeline == "staged" else ", asked for mega: same numbers"
        lines.append(f"block-scaled: {config.block_scaled.format}, pipeline staged{hint}")
        if unused := unused_kernel_config(config, call, backend):
            lines.append(f"kernel_config has no effect on {unused}")
    lines.append(f"ops on {where}:")
    ops_by_answer: dict[str, list[str]] = {}
    for op in ops_of(config):
        impl, reasons = choose(op, call, backend)
        note = "interpreted" if impl.backend == "triton" and call.interpreting else impl.note
        how = impl.backend + (f" ({note})" if note else "")
        ops_by_answer.setdefault("; not ".join([how, *dict.fromkeys(reasons)]), []).append(op)
    lines += [f"  {answer}\n    {', '.join(ops)}" for answer, ops in ops_by_answer.items()]
    return "\n".join(lines)

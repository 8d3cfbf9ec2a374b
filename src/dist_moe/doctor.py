"""What this machine offers: versions, GPUs, links, shared memory, and which backend would run here and why."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from . import vmm
from .memory_plan import format_bytes
from .registry import OPS, call_of, choose
from .symm import SHARED_MEMORY_DIR

PACKAGES = ("dist-moe-triton", "torch", "triton", "numpy", "nvidia-cutlass-dsl", "cuda-bindings")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _backends(device: torch.device) -> dict[str, str]:
    """For each backend: "runs", or why it does not."""
    answers = {}
    for backend in ("triton", "reference"):
        try:
            for op in OPS:
                choose(op, call_of(device, backend), backend)
            answers[backend] = "runs" if device.type == "cpu" or backend == "triton" else "runs when named"
        except RuntimeError as error:
            answers[backend] = str(error).splitlines()[-1].strip().removeprefix(f"{backend}: ")
    return answers


def _chosen(device: torch.device) -> dict[str, list[str]]:
    """The ops that each backend runs when none is named, as far as no Config decides; empty when one finds none."""
    ops: dict[str, list[str]] = {}
    for op in OPS:
        try:
            backend = choose(op, call_of(device, None))[0].backend
        except RuntimeError:
            return {}
        ops.setdefault(backend, []).append(op)
    return ops


def _gpu(index: int) -> dict:
    properties = torch.cuda.get_device_properties(index)
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "peer_access": {other: torch.cuda.can_device_access_peer(index, other) for other in others},
        "backends": _backends(torch.device("cuda", index)),
        "chosen": _chosen(torch.device("cuda", index)),
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def checkout_commit() -> str | None:
    """Of the checkout that this package is in, with what was changed since; None for an installed one."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=True)
        describe = [*git, "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _symmetric_memory() -> str:
    """Whether ranks on GPUs could share memory; the real proof is a context over two ranks."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        symmetric_memory.empty(128, dtype=torch.uint8, device="cuda")
    except (ImportError, RuntimeError) as error:
        return f"does not allocate: {error}"
    return "allocates"


def _host_scratch() -> str:
    """Whether scratch could lie in host memory (VmmConfig); nothing is mapped."""
    if not torch.cuda.is_available():
        return "no CUDA device; on a CPU all memory is the host's"
    try:
        return f"can be mapped, in granules of {format_bytes(vmm.granularity_bytes('cuda'))}"
    except RuntimeError as error:
        return f"cannot be mapped: {error}"


def examine() -> dict:
    """Everything as plain values. Starts CUDA where there is a device; needs no process group."""
    shared = shutil.disk_usage(SHARED_MEMORY_DIR) if SHARED_MEMORY_DIR.exists() else None
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {package: _version(package) for package in PACKAGES},
        "commit": checkout_commit(),
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "triton_interpret": os.environ.get("TRITON_INTERPRET"),
        "shared_memory": {"folder": str(SHARED_MEMORY_DIR), "free_bytes": shared.free if shared else 0},
        "cpu": {
            "cores": os.cpu_count(),
            "backends": _backends(torch.device("cpu")),
            "chosen": _chosen(torch.device("cpu")),
        },
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "symmetric_memory": _symmetric_memory(),
        "host_scratch": _host_scratch(),
        "formats": {
            "bf16": "trains and serves",
            "mxfp8_e4m3": "trains and serves",
            "nvfp4": "serves",
        },
    }


def _list_chosen(chosen: dict[str, list[str]]) -> str:
    """The backend of most ops, then the others with theirs."""
    most, *others = sorted(chosen, key=lambda backend: -len(chosen[backend])) or ["nothing runs"]
    return "; ".join([most, *(f"{backend} for {', '.join(chosen[backend])}" for backend in others)])


def describe(found: dict) -> str:
    """The findings in words, one line each."""
    lines = [f"Python {found['python']} on {found['machine']}, {found['cpu']['cores']} cores"]
    lines += [f"{package}: {version or 'not installed'}" for package, version in found["packages"].items()]
    lines.append(f"commit: {found['commit'] or 'not a checkout'}")
    lines.append(f"CUDA of torch: {found['cuda'] or 'none'}, driver: {found['driver'] or 'none'}")
    free = found["shared_memory"]["free_bytes"] / 1024**3
    lines.append(f"shared memory between CPU processes: {found['shared_memory']['folder']}, {free:.1f} GiB free")
    lines += [f"CPU, backend {name}: {answer}" for name, answer in found["cpu"]["backends"].items()]
    lines += [f"CPU, when none is named: {_list_chosen(found['cpu']['chosen'])}"]
    for index, gpu in enumerate(found["gpus"]):
        gib = gpu["memory_bytes"] / 1024**3
        lines.append(f"GPU {index}: {gpu['name']}, compute capability {gpu['compute_capability']}, {gib:.0f} GiB")
        lines += [f"GPU {index}, backend {name}: {answer}" for name, answer in gpu["backends"].items()]
        lines.append(f"GPU {index}, when none is named (explain says it of a Config): {_list_chosen(gpu['chosen'])}")
        for other, can in gpu["peer_access"].items():
            lines.append(f"GPU {index} reaches GPU {other}: {'yes' if can else 'no'}")
    lines.append(f"symmetric memory between GPUs: {found['symmetric_memory']}")
    lines.append(f"scratch in host memory: {found['host_scratch']}")
    lines += [f"format {name}: {state}" for name, state in found["formats"].items()]
    return "\n".join(lines)

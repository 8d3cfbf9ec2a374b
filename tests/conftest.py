"""Fixtures, and what of the suite this machine cannot run.

On a machine without a CUDA device kernels run in Triton's interpreter: the variable must be set before anything
imports triton, so it comes first here. With a device they run compiled, unless TRITON_INTERPRET is set by hand.
"""

import gc
import importlib
import importlib.util
import os
import shutil
import sys

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
NUM_GPUS = torch.cuda.device_count()
SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")

MAJORS = {"sm90": 9, "sm100": 10}  # of the compute capability

_CUTE = {"nvidia-cutlass-dsl": importlib.util.find_spec("cutlass") is not None}
_EMULATED = _CUTE | {"C compiler": shutil.which("cc") is not None}
_VERIFIED = _EMULATED | {"sentryward": importlib.util.find_spec("sentryward") is not None}
_ALONE = ("matplotlib", "transformers", "torchao")
PACKAGES = {"cute": _CUTE, "emulated": _EMULATED, "verified": _VERIFIED}
PACKAGES |= {name: {name: importlib.util.find_spec(name) is not None} for name in _ALONE}

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


# What cannot run here


def _missing(item: pytest.Item) -> tuple[str, str] | None:
    """(marker, reason) if this machine lacks what the test is marked with."""
    if (marker := item.get_closest_marker("ranks")) is not None:
        wanted = marker.kwargs.get("n", marker.args[0] if marker.args else 2)
        if NUM_GPUS < wanted:
            return "ranks", f"needs {wanted} GPUs, found {NUM_GPUS}"
    if (marker := item.get_closest_marker("torch")) is not None:
        found = tuple(map(int, torch.__version__.split(".")[:2]))
        if found < marker.args[0]:
            return "torch", f"needs torch {'.'.join(map(str, marker.args[0]))}, found {torch.__version__}"
    for name, packages in PACKAGES.items():
        if item.get_closest_marker(name) is None:
            continue
        for package, found in packages.items():
            if not found:
                return name, f"no {package}"
    for name in ("gpu", "sanitizer", "sm90", "sm100", "interpreter"):
        if item.get_closest_marker(name) is None:
            continue
        if name != "interpreter" and (NUM_GPUS == 0 or INTERPRETING):
            return name, "TRITON_INTERPRET is set" if NUM_GPUS else "no CUDA device"
        if name == "sanitizer" and SANITIZER is None:
            return name, "no compute-sanitizer"
        if name in MAJORS and torch.cuda.get_device_capability()[0] != MAJORS[name]:
            return name, f"the GPU is sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
        if name == "interpreter" and not INTERPRETING:
            return name, "kernels run compiled; set TRITON_INTERPRET=1"
    return None


@pytest.hookimpl(trylast=True)  # after -m and -k: count only what was asked for
def pytest_collection_modifyitems(config, items):
    kept, left_out, counts = [], [], {}
    for item in items:
        reason = _missing(item)
        if reason is None:
            kept.append(item)
        else:
            left_out.append(item)
            counts[reason] = counts.get(reason, 0) + 1
    items[:] = kept
    config.stash[_COUNTS] = counts
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish():
    """What torch and 5000 tests have left in memory stays: no collection of garbage looks through it again."""
    gc.freeze()


_COUNTS = pytest.StashKey[dict[tuple[str, str], int]]()


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # one of pytest-xdist's workers
        session.config.workeroutput["not run"] = session.config.stash.get(_COUNTS, {})


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist: each of its workers has collected everything
def pytest_testnodedown(node):
    node.config.stash[_COUNTS] = getattr(node, "workeroutput", {}).get("not run", {})


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: the line stands just above pytest's last one
def pytest_terminal_summary(terminalreporter, config):
    yield
    counts = config.stash.get(_COUNTS, {})
    if counts:
        parts = [f"{count} {marker} ({reason})" for (marker, reason), count in sorted(counts.items())]
        terminalreporter.write_line("not run here: " + ", ".join(parts))


# Fixtures


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU when they are interpreted."""
    return torch.device("cpu" if INTERPRETING else "cuda")


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Names of the kernels that this process launches in Triton's interpreter from here on."""
    importlib.import_module("dist_moe.kernels_triton")  # with it the interpreter is repaired
    GridExecutor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    names, launch = [], GridExecutor.__call__

    def counted(executor, *args, **how):
        names.append(executor.fn.__name__)
        return launch(executor, *args, **how)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    return names


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random state."""
    torch.manual_seed(0)
    return 0


def _fill_with_garbage(t: torch.Tensor) -> torch.Tensor:
    if t.dtype == torch.bool:
        return t.fill_(True)
    if not (t.is_floating_point() or t.is_complex()):
        return t.fill_(torch.iinfo(t.dtype).max // 3)
    if t.element_size() == 1:  # all ones is NaN in every fp8 format
        t.view(torch.uint8).fill_(0xFF)
        return t
    return t.fill_(float("nan"))


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh uninitialised tensors of dist_moe hold NaN, or large integers: what is never written fails loudly."""

    def poisoned(make):
        def wrapper(*args, **kwargs):
            t = make(*args, **kwargs)
            if torch.compiler.is_compiling():
                return t
            by_us = sys._getframe(1).f_globals.get("__name__", "").startswith("dist_moe")
            return _fill_with_garbage(t) if by_us else t

        return wrapper

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))

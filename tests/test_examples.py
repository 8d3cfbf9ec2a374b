"""Every example runs as its docstring says, on CPU processes here and on two GPUs where there are two."""

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rank_calls import as_torchrun_does

EXAMPLES = Path(__file__).parents[1] / "examples"
DISTRIBUTED = (
    "train_step",
    "accumulate",
    "mxfp8_training",
    "evaluate",
    "inference",
    "block_scaled_inference",
    "several_layers",
    "reopen",
    "compile",
    "export",
    "selective_checkpoint",
    "fsdp2",
    "checkpoint",
    "pipeline",
)
MESHES = DISTRIBUTED[-3:]  # on four ranks they have two EP groups
HELPERS = ("common", "block")


def run(*command: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=EXAMPLES.parent, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(name: str, *flags: str, W: int = 2) -> str:
    return run("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={W}", f"examples/{name}.py", *flags)


def test_every_example_says_how_to_run_it():
    programs = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in HELPERS)
    assert programs == sorted([*DISTRIBUTED, "qwen3_moe", "plan_memory", "quantize"])
    for name in programs:
        text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
        assert f"examples/{name}.py" in text.split("Run: ")[1]


def test_torchrun_on_two_cpu_processes():
    assert torchrun(DISTRIBUTED[0], "--cpu")


def _run_example():
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.parametrize("name", DISTRIBUTED[1:])
def test_on_two_cpu_processes(name):
    as_torchrun_does(2, _run_example, str(EXAMPLES / f"{name}.py"), "--cpu")


@pytest.mark.parametrize("name", MESHES)
def test_on_four_cpu_processes(name):
    as_torchrun_does(4, _run_example, str(EXAMPLES / f"{name}.py"), "--cpu")


@pytest.mark.transformers
def test_qwen3_on_two_cpu_processes():
    test_on_two_cpu_processes("qwen3_moe")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_on_two_gpus(name):
    assert torchrun(name)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", MESHES)
def test_on_four_gpus(name):
    assert torchrun(name, W=4)


def test_plan_memory():
    assert "device scratch" in run("examples/plan_memory.py")


def test_quantize():
    text = run("examples/quantize.py")
    assert "nvfp4" in text and "source was changed" in text and "refilled" in text

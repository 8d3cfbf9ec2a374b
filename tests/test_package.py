"""What is installed: the wheel's contents, its use without the repository, and what importing it does not touch."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

import dist_moe

ROOT = Path(__file__).parents[1]
API = """
Bf16GroupedGemmPreset BlockScaledConfig BlockScaledFormat BlockScaledKernelConfig Config Context ExecutionOptions
MemoryPlan PreparedWeight RMSNormPostprocess VmmConfig create_context plan_memory prepare_block_scaled_weight
routed_experts supports_fused_post_expert_rmsnorm
"""
ADDITIONS = """
DistMoEError RoutingOverflowError InvalidExpertIdError RankMismatchError PeerAbortedError PeerTimeoutError SlotError
World color_activation_slots explain testing
"""


def test_star_gives_the_api_and_nothing_else():
    names = {}
    exec("from dist_moe import *", names)
    names.pop("__builtins__")
    assert sorted(names) == sorted(dist_moe.__all__) == API.split()


def test_additions_are_reached_by_name():
    for name in ADDITIONS.split():
        assert hasattr(dist_moe, name) and name not in dist_moe.__all__


def test_version_is_written_once_for_users_and_once_for_pip():
    assert dist_moe.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


# The wheel


def run(command: list, **kwargs) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of what goes into it, so that no build/ folder is left, or found, in the repository."""
    source, out = tmp_path_factory.mktemp("source") / "repository", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", str(out), str(source)])
    return next(out.glob("dist_moe_triton-*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if not re.match(r"dist_moe_triton-[^/]*\.dist-info/", n)}
    folders = {"dist_moe": ROOT / "src/dist_moe"}
    folders |= {f"dist_moe/{name}": ROOT / name for name in ("kernels_triton", "kernels_cute", "benchmarks")}
    wanted = {
        f"{prefix}/{path.relative_to(folder).as_posix()}"
        for prefix, folder in folders.items()
        for path in folder.rglob("*.py")
    }
    assert names == wanted | {"dist_moe/py.typed"}


def test_the_wheel_asks_for_what_it_needs(wheel):
    metadata = zipfile.ZipFile(wheel).read(next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("METADATA")))
    lines = metadata.decode().split("\n")
    required = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist")]
    assert "torch>=2.11" in required and 'triton>=3.6; platform_system == "Linux"' in required
    # The sm_100 kernels are tested with one version of the DSL, and with the tools of that version.
    pinned = [line.split("==")[0] for line in required if "<" in line or "==" in line.split(";")[0]]
    extras = {"nvidia-cutlass-dsl[cu13]", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm", "sentryward", "torchao"}
    assert set(pinned) == extras, "no other upper pins"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel's files alone."""
    target = tmp_path_factory.mktemp("site")
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel])
    return target


def run_installed(code: str, installed: Path) -> str:
    """Run code on the wheel and the dependencies, out of reach of the repository and its editable install.

    -S leaves out site-packages and with it the .pth file of the editable install; they come back as plain folders.
    """
    paths = [str(installed), *(p for p in sys.path if p.endswith(("site-packages", "dist-packages")))]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON_INTERPRET"))}
    preamble = f"import sys; sys.path[1:1] = {paths!r}\n"
    return run([sys.executable, "-S", "-c", preamble + textwrap.dedent(code)], cwd=installed, env=env)


def test_the_wheel_plans_memory_away_from_the_repository(installed):
    code = """
    import dist_moe, dist_moe.kernels_triton, dist_moe.kernels_cute, dist_moe.benchmarks.sweep
    config = dist_moe.Config(64, 128, 128, 2, 8, 1)
    plan = dist_moe.plan_memory(config, 2)
    modules = (dist_moe, dist_moe.kernels_triton, dist_moe.kernels_cute, dist_moe.benchmarks)
    print(*(module.__file__ for module in modules), type(plan).__name__)
    """
    *files, kind = run_installed(code, installed).split()
    assert all(Path(file).is_relative_to(installed) for file in files) and kind == "MemoryPlan"


def test_the_console_script_starts(installed):
    code = "sys.argv = ['dist-moe', '--help']\nfrom dist_moe.cli import main\nmain()"
    assert "plan" in run_installed(code, installed)


# Import


def test_import_touches_no_gpu_no_group_no_triton():
    code = """
    import sys, torch
    before = set(sys.modules)
    from dist_moe import *
    from dist_moe import testing, World, explain
    assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
    print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
    """
    new = run([sys.executable, "-c", textwrap.dedent(code)]).split()
    assert "dist_moe" in new and not {"triton", "cutlass", "cuda", "typer", "matplotlib"} & set(new)


def test_the_reference_path_runs_without_triton_and_numpy():
    code = """
    import sys
    sys.modules["triton"] = sys.modules["numpy"] = sys.modules["cutlass"] = sys.modules["cuda"] = None
    import torch
    from dist_moe import *
    from dist_moe import World, explain, reference
    x, w = torch.ones(4, 64).bfloat16(), torch.ones(1, 32, 64).bfloat16()
    start, rows, out = torch.zeros(1, dtype=torch.int64), torch.tensor([0, 4]).int(), torch.zeros(4, 32).bfloat16()
    reference.grouped_gemm(x, start, w, out, start, rows, stop_1=start)
    print(out.unique().tolist())
    """
    assert run([sys.executable, "-c", textwrap.dedent(code)]).strip() == "[64.0]"

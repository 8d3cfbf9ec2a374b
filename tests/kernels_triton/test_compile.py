"""Every kernel compiles for sm_90 and sm_100: expected instructions, no spills, shared memory that exists."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels_triton.compile_cases import CASES

from dist_moe.kernels_triton._device import DELAY_VARIABLE

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels_triton"
JOBS = [pytest.param(case, arch, id=f"{case.id}-sm_{arch}") for case in CASES for arch in case.archs]
# Kernels without sleeps: what they read and write is local and ordered by the stream alone.
NOT_DELAYED = {"route:_scan", "route:_place", "plan_slots:_plan_forward", "finish:_finish", "_clocks:_mark"}


def compile_cases(path: Path, *arguments: str, delay_ns: int = 0) -> dict:
    """(case id, arch) -> result of the cases that the arguments choose, from a process that does not interpret."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile_check", *arguments, "--json", path]
    env[DELAY_VARIABLE] = str(delay_ns)
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert path.exists(), run.stdout + run.stderr
    return {(result["id"], result["arch"]): result for result in json.loads(path.read_text())}


@pytest.fixture(scope="session")
def results(tmp_path_factory) -> dict:
    return compile_cases(tmp_path_factory.mktemp("compile") / "results.json")


@pytest.mark.timeout(900)  # the first of them waits for all
@pytest.mark.parametrize(("case", "arch"), JOBS)
def test_compiles(case, arch, results):
    problems = case.problems(results[case.id, arch])
    assert not problems, "\n".join(problems)


@pytest.mark.timeout(900)
def test_no_barrier_lies_where_arguments_of_partitions_are_passed(results):
    """A barrier that no partition uses is dead when they start, and its place is given to their arguments."""
    for case in (case for case in CASES if case.kernel.startswith("wgrad_hopper:")):
        ptx = results[case.id, 90]["ptx"]
        offsets = dict(re.findall(r"add\.\w+ \s*(%r\d+), %r\d+, (\d+);", ptx))
        inits = [int(offsets[register]) for register in re.findall(r"mbarrier\.init\S+ \[(%r\d+)\]", ptx)]
        barriers = {byte for start in inits for byte in range(start, start + 8)}
        stores = re.findall(r"st\.shared(?:\.v(\d))?\.b(\d+) \s*\[global_smem\+(\d+)\]", ptx)
        passed = {
            byte
            for lanes, bits, start in stores
            for byte in range(int(start), int(start) + int(lanes or 1) * int(bits) // 8)
        }
        assert len(inits) >= 6 and passed and not barriers & passed, case.id


@pytest.mark.timeout(900)
def test_only_a_build_with_delays_sleeps(results, tmp_path):
    """Both builds share Triton's cache on disk, so this also shows that the option is part of its key."""
    kernels = launched_kernels(KERNELS)
    assert kernels >= NOT_DELAYED
    first = [next(case for case in CASES if case.kernel == kernel) for kernel in sorted(kernels - NOT_DELAYED)]
    ids = [case.id for case in first]
    delayed = compile_cases(tmp_path / "delayed.json", *ids, "--one-arch", delay_ns=20_000)
    assert {(case.id, case.archs[0]) for case in first} <= delayed.keys()
    assert not [key for key, result in results.items() if "nanosleep" in result["ptx"]]
    awake = {key: result["error"] for key, result in delayed.items() if "nanosleep.u32" not in result["ptx"]}
    assert not awake


def test_case_ids_differ():
    assert len({case.id for case in CASES}) == len(CASES)


def jit_functions(source: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file that carry @triton.jit or @gluon.jit, with or without arguments."""

    def is_jit(decorator: ast.expr) -> bool:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        return ast.unparse(target) in ("triton.jit", "gluon.jit")

    return {
        node.name: node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and any(map(is_jit, node.decorator_list))
    }


def launched_kernels(folder: Path) -> set[str]:
    """ "module:name" of every jit function whose name begins with _ and that no other jit function names."""
    files = {path: jit_functions(path.read_text()) for path in sorted(folder.rglob("*.py"))}
    named = {
        node.id if isinstance(node, ast.Name) else node.attr
        for functions in files.values()
        for function in functions.values()
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name | ast.Attribute)
    }
    return {
        f"{'.'.join(path.relative_to(folder).with_suffix('').parts)}:{name}"
        for path, functions in files.items()
        for name in functions
        if name.startswith("_") and name not in named
    }


def test_every_launched_kernel_has_a_case():
    missing = launched_kernels(KERNELS) - {case.kernel.removeprefix("dist_moe.kernels_triton.") for case in CASES}
    assert not missing, f"add rows to tests/kernels_triton/compile_cases/ for {sorted(missing)}"


def test_every_launched_kernel_has_the_cached_launcher():
    functions = {
        f"{path.stem}:{name}": node
        for path in KERNELS.glob("*.py")
        for name, node in jit_functions(path.read_text()).items()
    }
    outermost = {kernel: ast.unparse(functions[kernel].decorator_list[0]) for kernel in launched_kernels(KERNELS)}
    bare = sorted(kernel for kernel, decorator in outermost.items() if decorator != "launched")
    assert not bare, f"put @launched of _launch.py above @triton.jit of {bare}"


def test_every_launched_kernel_waits_first_for_the_launch_before_it():
    launched = launched_kernels(KERNELS)
    for path in KERNELS.glob("*.py"):
        for name, node in jit_functions(path.read_text()).items():
            if f"{path.stem}:{name}" in launched:
                first = ast.unparse(node.body[ast.get_docstring(node) is not None])
                assert first == "begin()", f"{path.stem}:{name}"


def test_launched_kernels_are_told_from_helpers(tmp_path):
    (tmp_path / "op.py").write_text(
        "@triton.jit\ndef _part(x):\n    return x\n\n"
        "@triton.jit(do_not_specialize=['x'])\ndef _op(x):\n    helper(_part(x))\n\n"
        "def op(x):\n    _op[(1,)](x)\n"
    )
    assert launched_kernels(tmp_path) == {"op:_op"}

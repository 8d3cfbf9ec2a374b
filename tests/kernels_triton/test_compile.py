"""Every kernel compiles for sm_90 and sm_100: expected instructions, no spills, shared memory that exists."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels_triton.compile_cases import CASES

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels_triton"
JOBS = [pytest.param(case, arch, id=f"{case.id}-sm_{arch}") for case in CASES for arch in case.archs]


@pytest.fixture(scope="session")
def results(tmp_path_factory) -> dict:
    """(case id, arch) -> result, from one process that does not interpret."""
    path = tmp_path_factory.mktemp("compile") / "results.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile_check", "--json", path]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert path.exists(), run.stdout + run.stderr
    return {(result["id"], result["arch"]): result for result in json.loads(path.read_text())}


@pytest.mark.timeout(900)  # the first of them waits for all
@pytest.mark.parametrize(("case", "arch"), JOBS)
def test_compiles(case, arch, results):
    problems = case.problems(results[case.id, arch])
    assert not problems, "\n".join(problems)


def test_case_ids_differ():
    assert len({case.id for case in CASES}) == len(CASES)


def jit_functions(source: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file that carry @triton.jit or @triton.jit(...)."""

    def is_jit(decorator: ast.expr) -> bool:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        return ast.unparse(target) == "triton.jit"

    return {
        node.name: node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and any(map(is_jit, node.decorator_list))
    }


def launched_kernels(folder: Path) -> set[str]:
    """ "module:name" of every jit function whose name begins with _ and that no other jit function calls."""
    files = {path: jit_functions(path.read_text()) for path in sorted(folder.rglob("*.py"))}
    called = {
        ast.unparse(node.func).rsplit(".", 1)[-1]
        for functions in files.values()
        for function in functions.values()
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
    }
    return {
        f"{'.'.join(path.relative_to(folder).with_suffix('').parts)}:{name}"
        for path, functions in files.items()
        for name in functions
        if name.startswith("_") and name not in called
    }


def test_every_launched_kernel_has_a_case():
    missing = launched_kernels(KERNELS) - {case.kernel.removeprefix("dist_moe.kernels_triton.") for case in CASES}
    assert not missing, f"add rows to tests/kernels_triton/compile_cases/ for {sorted(missing)}"


def test_launched_kernels_are_told_from_helpers(tmp_path):
    (tmp_path / "op.py").write_text(
        "@triton.jit\ndef _part(x):\n    return x\n\n"
        "@triton.jit(do_not_specialize=['x'])\ndef _op(x):\n    helper(_part(x))\n\n"
        "def op(x):\n    _op[(1,)](x)\n"
    )
    assert launched_kernels(tmp_path) == {"op:_op"}

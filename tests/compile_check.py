"""Compiles kernels for sm_90 and sm_100 without a GPU, and says what is wrong with the result.

    python -m tests.compile_check [WORD ...] [--one-arch] [--ptx DIR] [--json FILE]

compiles the cases of tests/kernels_triton/compile_cases/ whose id holds one of the words, and prints registers,
spilled and shared bytes. It must not run under TRITON_INTERPRET: an interpreting process cannot compile, which is why
tests/kernels_triton/test_compile.py starts it as a process of its own.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ARCHS = (90, 100)
AWAIT, EARLY_LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
MEMORY = re.compile(r"\b(?:(?:ld|st)\.[\w.:]*global|(?:atom|red)\.(?!\w*shared)|cp\.async)")  # not the shared one
MAX_SHARED_BYTES = 227 * 1024  # what a program can have on both


@dataclass(frozen=True)
class Case:
    """One compilation of one kernel; tests/kernels_triton/compile_cases explains the fields to kernel authors."""

    kernel: str
    types: Mapping[str, str]
    constexprs: Mapping[str, object] = field(default_factory=dict)
    name: str = ""
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, object] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    expect: tuple[str, ...] = ()
    expect_sm90: tuple[str, ...] = ()
    expect_sm100: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    archs: tuple[int, ...] | None = None

    @property
    def id(self) -> str:
        return f"{self.kernel}[{self.name}]" if self.name else self.kernel

    def problems(self, result: dict) -> list[str]:
        """What is wrong with the result of compiling this case; empty when nothing is."""
        if result["error"]:
            return [result["error"]]
        expected = self.expect + (self.expect_sm90 if result["arch"] == 90 else self.expect_sm100)
        found = [f"the PTX has no {text!r}" for text in expected if text not in result["ptx"]]
        found += [f"the PTX has {text!r}" for text in self.forbid if text in result["ptx"]]
        if self.kernel.startswith("tests."):  # Triton's own launcher launches it
            pass
        elif AWAIT not in result["ptx"]:
            found.append("does not wait for the launch before it")
        elif EARLY_LAUNCH in result["ptx"]:
            found.append("lets the next launch begin beside it")
        elif early := MEMORY.search(result["ptx"].split(AWAIT)[0]):
            found.append(f"{early[0]} before it waits for the launch before it")
        if result["serialized"]:
            found.append('the assembler waits for every product of the tensor cores ("serialized" in what it says)')
        if result["spill_bytes"]:
            found.append(f"{result['spill_bytes']} bytes are spilled at {result['registers']} registers")
        if result["shared_bytes"] > MAX_SHARED_BYTES:
            found.append(f"{result['shared_bytes']} bytes of shared memory, {MAX_SHARED_BYTES} exist")
        return found


def load_kernel(path: str):
    """The jit function "module:name"; a module without a dot is one of dist_moe.kernels_triton."""
    from dist_moe.kernels_triton._launch import Launched

    module, name = path.split(":")
    kernel = getattr(importlib.import_module(module if "." in module else f"dist_moe.kernels_triton.{module}"), name)
    return kernel.fn if isinstance(kernel, Launched) else kernel


def compile_case(case: Case, arch: int) -> dict:
    """Registers, spilled and shared bytes and PTX of a case on sm_<arch>, or the error."""
    result = {"id": case.id, "arch": arch, "error": "", "ptx": "", "serialized": False}
    result |= dict.fromkeys(("registers", "spill_bytes", "shared_bytes"), 0)
    start = time.perf_counter()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            compiled = _compile(case, arch)
        result["ptx"], result["shared_bytes"] = compiled.asm["ptx"], compiled.metadata.shared
        log = _log(compiled, said.getvalue(), arch)
        result["registers"] = max(map(int, re.findall(r"Used (\d+) registers", log)))
        result["serialized"] = "wgmma.mma_async instructions are serialized" in log
        result["spill_bytes"] = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log)))
    except Exception as e:  # reported with the case, so that the others still run
        result["error"] = f"{type(e).__name__}: {e}"
    return result | {"seconds": round(time.perf_counter() - start, 2)}


def _compile(case: Case, arch: int):
    """Compiled by Triton, which prints what its assembler says."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = load_kernel(case.kernel)
    names = kernel.arg_names
    given, wanted = {*case.types, *case.constexprs}, set(names)
    if given != wanted:
        raise ValueError(f"{case.id}: missing {sorted(wanted - given)}, unknown {sorted(given - wanted)}")
    signature = {name: case.types.get(name, "constexpr") for name in names}
    # As a launch would find them: tensors start at multiples of 16 bytes; integers must be said to be multiples of 16.
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in case.aligned or (signature[name].startswith("*") and name not in case.unaligned)
    }
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(case.constexprs), attrs=attrs)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    triton.knobs.nvidia.dump_ptxas_log = True
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _log(compiled, said: str, arch: int) -> str:
    """What the assembler said, kept beside the kernel: from its cache Triton assembles nothing."""
    from triton.runtime.cache import get_cache_manager

    cache = get_cache_manager(compiled.hash)
    kept = cache.get_file("ptxas.log")
    if kept and not said:
        return Path(kept).read_text()
    log = said or _assemble(compiled.asm["ptx"], arch)
    cache.put(log, "ptxas.log", binary=False)
    return log


def _assemble(ptx: str, arch: int) -> str:
    """What the assembler that Triton uses says of registers and spilled bytes."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}a", source, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def main() -> int:
    from tests.kernels_triton.compile_cases import CASES

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="compile the cases whose id holds one of these (default: all)")
    parser.add_argument("--one-arch", action="store_true", help="compile a case for the first of its targets alone")
    parser.add_argument("--ptx", type=Path, help="write the PTX into this folder")
    parser.add_argument("--json", type=Path, help="write the results into this file")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("compile_check: unset TRITON_INTERPRET, an interpreting process cannot compile")

    cases = [case for case in CASES if not args.words or any(word in case.id for word in args.words)]
    jobs = [(case, arch) for case in cases for arch in case.archs[: 1 if args.one_arch else None]]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compile_case, *zip(*jobs, strict=True))) if jobs else []
    num_wrong = 0
    for (case, arch), result in zip(jobs, results, strict=True):
        problems = case.problems(result)
        num_wrong += bool(problems)
        print(
            f"sm_{arch:<3} {result['registers']:>3} registers {result['spill_bytes']:>4} B spilled "
            f"{result['shared_bytes']:>6} B shared {result['seconds']:>5.1f} s  {case.id}"
        )
        for problem in problems:
            print(f"       {problem}")
        if args.ptx:
            args.ptx.mkdir(parents=True, exist_ok=True)
            Path(args.ptx, re.sub(r"\W+", "_", f"{case.id}_sm{arch}") + ".ptx").write_text(result["ptx"])
    if args.json:
        args.json.write_text(json.dumps(results))
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())

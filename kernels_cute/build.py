"""Compiles the products, without a GPU or a driver if need be, and reads what came out."""

import functools
import importlib.util
import inspect
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import torch

from .tiles import ARCHS, Product, Tile


def _arch_here() -> str:
    """Of this machine's GPU; that of compute capability 10.0 where there is no GPU that is built for."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return ARCHS.get(capability, ARCHS[10, 0])


# The DSL reads it when it is imported, and what it compiles for another architecture can be neither run nor exported.
ARCH = os.environ.setdefault("CUTE_DSL_ARCH", _arch_here())

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass  # noqa: E402
from cutlass import Float32, Int16, Int32, Int64, Uint8, cute  # noqa: E402
from cutlass.cute.runtime import make_ptr  # noqa: E402

from .grouped_gemm_kernel import GroupedGemm  # noqa: E402

WORD_BYTES = {Int32: 4, Int64: 8, Float32: 4}
ALIGNMENT = 64  # bytes; of buffers: 32 bf16 values, and more than TMA wants
ANYWHERE = 4096  # an address that is never read


@functools.cache
def parameters(kernel: GroupedGemm) -> dict[str, inspect.Parameter]:
    """What the kernel takes before the stream, in its order."""
    found = dict(inspect.signature(kernel.__call__).parameters)
    found.pop("stream")
    return found


@functools.cache
def pointer_types(kernel: GroupedGemm) -> dict[str, tuple[type, int]]:
    """Type and alignment in bytes of every pointer that the kernel takes."""
    types = {"x_values": kernel.values, "w_values": kernel.values, "out": kernel.out}
    types |= {"x_scales": Int16, "w_scales": Int16, "h2_values": kernel.values, "h2_scales": Uint8}
    types |= {"row_start": Int32, "num_rows": Int32, "x_outer": Float32, "w_outer": Float32}
    found = {}
    for name, parameter in parameters(kernel).items():
        if parameter.annotation is cute.Pointer:
            word = types.get(name, Int64)  # where something begins, and the stop word
            found[name] = word, WORD_BYTES[word] if word in WORD_BYTES and name != "out" else ALIGNMENT
    return found


def arguments(kernel: GroupedGemm, stream: int, **given) -> list:
    """Arguments of the kernel in its order; pointers as addresses, 0 or left out for what it does not read."""
    found, pointers = [], pointer_types(kernel)
    for name in parameters(kernel):
        if name in pointers:
            word, alignment = pointers[name]
            address = given.pop(name, 0) or ANYWHERE
            found.append(make_ptr(word, address, cute.AddressSpace.gmem, assumed_align=alignment))
        else:
            found.append(given.pop(name))
    assert not given, f"no arguments of the kernel: {', '.join(given)}"
    return [*found, cuda.CUstream(stream)]


@functools.cache
def kernel_of(product: Product, tile: Tile) -> GroupedGemm:
    return GroupedGemm(product, tile)


@functools.cache
def compiled(product: Product, tile: Tile, arch: str = ARCH):
    """The executable of a product with a tile; it keeps its PTX and cubin.

    Raises:  ValueError for another architecture than that of this process; whatever the DSL raises.
    """
    if arch not in ARCHS.values():
        raise ValueError(f"arch must be one of {', '.join(ARCHS.values())}, got {arch!r}")
    if arch != ARCH:
        raise ValueError(f"this process compiles for {ARCH}; set CUTE_DSL_ARCH={arch} before it starts for {arch}")
    kernel = kernel_of(product, tile)
    sizes = [name for name in parameters(kernel) if name not in pointer_types(kernel)]
    given = {name: 1.0 if name in ("alpha", "limit") else 1024 for name in sizes}
    with tempfile.TemporaryDirectory() as folder:
        options = f"--opt-level 3 --gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder}"
        found = cute.compile(kernel, *arguments(kernel, 0, **given), options=options)
        assert found.__ptx__.lstrip().startswith("//") and found.__cubin__
        return found


def full_name(product: Product, tile: Tile) -> str:
    """Of a kernel: a C identifier."""
    return f"{product.name}_{tile.name}"


def report(product: Product, tile: Tile, arch: str = ARCH) -> dict:
    """What the compiler made of a product: numbers that the tests hold to, and a user can compare."""
    found = compiled(product, tile, arch)
    usage, sass = _read_cubin(found.__cubin__)
    return {
        "name": full_name(product, tile),
        "arch": arch,
        "dsl": cutlass.__version__,
        "registers": int(usage["REG"]),
        "stack_bytes": int(usage["STACK"]),
        "local_bytes": int(usage["LOCAL"]),
        "spill_instructions": sum(count for name, count in sass.items() if name.split(".")[0] in ("STL", "LDL")),
        "shared_bytes": kernel_of(product, tile).shared_bytes,
        "tensor_columns": tile.tensor_columns,
        "stages": tile.stages,
        "stage_bytes": tile.stage_bytes,
        "mma_instructions": {name: count for name, count in sorted(sass.items()) if re.match(r"UTC\w*MMA", name)},
        "ptx_mma": dict(Counter(re.findall(r"tcgen05\.mma[\w.:]*", found.__ptx__))),
    }


def _read_cubin(cubin: bytes) -> tuple[dict[str, str], Counter]:
    """Resource usage as cuobjdump prints it, and how often each instruction of the SASS occurs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = _run("cuobjdump", "-res-usage", file.name), _run("nvdisasm", "-c", file.name)
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", sass)
    return dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)), Counter(instructions)


def _run(tool: str, *arguments: str) -> str:
    """Of the CUDA tools that the extra `cute` brings."""
    path = Path(importlib.util.find_spec("nvidia").submodule_search_locations[0], "cu13", "bin", tool)
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def export(product: Product, tile: Tile, folder: Path, arch: str = ARCH) -> dict[str, Path]:
    """Write PTX, cubin, and an object with its C header, that launches the kernel without the DSL.

    The object holds host code of this machine's processor and needs the DSL's runtime library or its static part.
    Raises:  ValueError as compiled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found, name = compiled(product, tile, arch), full_name(product, tile)
    found.export_to_c(str(folder), name, function_prefix=name)
    paths = {suffix: folder / f"{name}.{suffix}" for suffix in ("ptx", "cubin", "o", "h")}
    paths["ptx"].write_text(found.__ptx__)
    paths["cubin"].write_bytes(found.__cubin__)
    return paths

"""Runs public kernels, known to work on the hardware, in the emulator: what they compute speaks for it.

    python -m tests.sm100.public_examples CHECKOUT [--seeds N]

CHECKOUT is a checkout of NVIDIA's CUTLASS repository. Its dense block-scaled CuTe DSL example is compiled in MXFP8 and
NVFP4 with one CTA, K-major and MN-major, captured, emulated and compared with numpy. Run by hand, not in CI: nothing of
the checkout belongs to this project.
"""

import argparse
import ctypes
import importlib.util
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.sm100 import formats
from tests.sm100.capture import capture
from tests.sm100.machine import emulate
from tests.sm100.spaces import GlobalMemory

EXAMPLE = "examples/python/CuTeDSL/cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py"
NUM_CTAS = 2


@dataclass(frozen=True)
class Case:
    """C[l, m, n] = A[l, m, k] B[l, n, k], each with one scale a block of K."""

    format: str
    tile_n: int
    majors: str = "kk"  # of A and B: k, or m or n
    mnkl: tuple[int, int, int, int] = (256, 256, 512, 2)

    @property
    def is_f4(self) -> bool:
        return self.format != "mxfp8"

    @property
    def block(self) -> int:
        return 16 if self.format == "nvfp4" else 32


CASES = (
    Case("mxfp8", 128),
    Case("mxfp8", 256),
    Case("mxfp8", 64),
    Case("mxfp8", 128, majors="mn"),
    Case("mxfp8", 128, mnkl=(128, 384, 416, 1)),  # a partial last K tile
    Case("nvfp4", 128),
    Case("nvfp4", 256),
    Case("mxfp4", 128),
)


def load(checkout: Path):
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("dense_blockscaled_example", checkout / EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compile_case(example, case: Case):
    import cuda.bindings.driver as cuda
    import cutlass

    values = cutlass.Float4E2M1FN if case.is_f4 else cutlass.Float8E4M3FN
    scales = cutlass.Float8E4M3FN if case.format == "nvfp4" else cutlass.Float8E8M0FNU
    kernel = example.Sm100BlockScaledPersistentDenseGemmKernel(case.block, (128, case.tile_n), (1, 1))
    with tempfile.TemporaryDirectory() as folder:
        options = f"--opt-level 3 --gpu-arch sm_100a --keep-ptx --dump-dir {folder}"
        return example.scaled_mm(
            kernel,
            values,
            values,
            cutlass.BFloat16,
            scales,
            *case.majors,
            "n",
            NUM_CTAS,
            cuda.CUstream(0),
            options=options,
        )


def aligned(values: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 1024 bytes."""
    raw = np.zeros(values.nbytes + 1024, np.uint8)
    start = -raw.ctypes.data % 1024
    copy = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def in_atoms(scales: np.ndarray) -> np.ndarray:
    """Scales [L, rows, blocks] as the tensor cores read them: atoms of 128 rows by 4 blocks, padded to whole ones."""
    batches, rows, blocks = scales.shape
    padded = np.zeros((batches, -(-rows // 128) * 128, -(-blocks // 4) * 4), np.uint8)
    padded[:, :rows, :blocks] = scales
    atoms = padded.reshape(batches, -1, 4, 32, padded.shape[2] // 4, 4)  # l, row block, r / 32, r % 32, atom, block
    return np.ascontiguousarray(atoms.transpose(0, 1, 4, 3, 2, 5)).reshape(-1)


class Operand:
    """Random values [L, rows, K] with their scales: as numbers, and as bytes in memory."""

    def __init__(self, case: Case, rows: int, major: str, rng: np.random.Generator):
        _, _, k, batches = case.mnkl
        if case.is_f4:
            codes = rng.integers(0, 256, (batches, rows, k // 2), dtype=np.uint8)
            values = formats.E2M1[formats.unpack_nibbles(codes)]
        else:
            codes = rng.integers(0, 0x7F, (batches, rows, k), dtype=np.uint8)
            codes |= rng.integers(0, 2, codes.shape, dtype=np.uint8) << 7
            values = formats.E4M3[codes]
        low, high, table = (0x20, 0x50, formats.UE4M3) if case.format == "nvfp4" else (120, 134, formats.E8M0)
        scales = rng.integers(low, high, (batches, rows, k // case.block), dtype=np.uint8)
        self.numbers = values * np.repeat(table[scales], case.block, -1)
        self.bytes = aligned(codes if major == "k" else codes.transpose(0, 2, 1).copy())
        self.scale_bytes = aligned(in_atoms(scales))


def largest_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Relative to each value; half a step of bf16 is 2^-8."""
    return float(np.max(np.abs(got - expected) / np.maximum(np.abs(expected), 1e-6 * np.abs(expected).max())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")
    example = load(options.checkout)
    failed = False
    for case in CASES:
        rng = np.random.default_rng(0)
        m, n, _, batches = case.mnkl
        a, b = Operand(case, m, case.majors[0], rng), Operand(case, n, case.majors[1], rng)
        expected = a.numbers @ b.numbers.transpose(0, 2, 1)
        compiled = compile_case(example, case)
        for seed in range(options.seeds):
            out = aligned(np.zeros((batches, m, n), np.uint16))
            memory = GlobalMemory()
            buffers = {"A": a.bytes, "B": b.bytes, "SFA": a.scale_bytes, "SFB": b.scale_bytes, "C": out}
            pointers = [ctypes.c_void_p(memory.add(buffer, name)) for name, buffer in buffers.items()]
            launch = capture(compiled, *pointers, *map(ctypes.c_int32, case.mnkl), ctypes.c_void_p(0))
            start = time.monotonic()
            # The example leaves waiting for loads of tensor memory to the assembler.
            counts = emulate(compiled.__ptx__, launch, memory, seed, lenient=True)
            seconds = time.monotonic() - start
            error = largest_error(formats.decode_bf16(out), expected)
            right = error <= 2.0**-8
            failed |= not right
            print(
                f"{'right' if right else 'WRONG'}: {case}, seed {seed}: error {error:.2e} (bf16: 3.91e-03), "
                f"{sum(counts.values())} instructions in {seconds:.2f} s",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Faults put into the sm_100 kernels on purpose, one at a time: what the emulated tests must catch.

A mutant is a copy of the kernel's files with one piece of text changed, compiled in its place.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from dist_moe import kernels_cute
from dist_moe.formats import MXFP8_E4M3, NVFP4, Format

from .kinds import Kind

FILES = Path(kernels_cute.__file__).parent


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in the file and becomes `new`; kind of the product that shows it."""

    what: str
    file: str
    old: str
    new: str
    op: str = "forward"
    block_n: int = 128
    swap_ab: bool = False
    format: Format = MXFP8_E4M3
    far: bool = False  # places beyond 32 bits
    steps: int = 5  # of the contraction; one lets the multiplications run ahead of the epilogue

    def build(self, folder: Path):
        """The module `build` of the mutated package."""
        package = f"mutant_{abs(hash(self)):x}"
        home = folder / package
        home.mkdir()
        for path in FILES.glob("*.py"):
            text = path.read_text()
            if path.name == f"{self.file}.py":
                assert text.count(self.old) == 1, f"{self.old!r} occurs {text.count(self.old)} times in {path.name}"
                text = text.replace(self.old, self.new)
            (home / path.name).write_text(text)
        spec = importlib.util.spec_from_file_location(package, home / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[package] = module
        spec.loader.exec_module(module)
        return importlib.import_module(f"{package}.build")

    def fits(self, kind: Kind) -> bool:
        tile = (self.op, self.format, self.block_n, self.swap_ab)
        return (kind.op, kind.format, kind.tile.block_n, kind.tile.swap_ab) == tile


MUTANTS = [
    Mutant(
        "load does not wait for an empty stage",
        "load",
        "ring.producer_acquire(state)",
        "ring.producer_get_barrier(state)",
    ),
    Mutant("multiply does not wait for a full stage", "multiply", "ring.consumer_wait(state)", "pass"),
    Mutant("multiply does not wait for its turn", "multiply", "turns.producer_acquire(turn_state)", "pass", steps=1),
    Mutant("the epilogue does not wait for the sum", "epilogue", "turns.consumer_wait(state)", "pass"),
    Mutant(
        "registers are read before they are there",
        "tensor_memory",
        "cute.arch.fence_view_async_tmem_load(loc=loc, ip=ip)",
        "pass",
    ),
    Mutant(
        "the epilogue never gives an accumulator back",
        "epilogue",
        "if const_expr(overlap == 0):",
        "if const_expr(False):",
    ),
    Mutant("a stage is never given back", "multiply", "ring.consumer_release(state)", "pass"),
    Mutant("a sum is never announced", "multiply", "turns.producer_commit(turn_state)", "pass"),
    Mutant("what overlaps is read last", "epilogue", "piece = i if turn == 1", "piece = i if turn == 0", block_n=256),
    Mutant(
        "scales lie over the accumulator", "multiply", "shift + self.tile.block_n)", "shift + self.tile.block_n - 4)"
    ),
    Mutant(
        "given back before it is read",
        "epilogue",
        "i == overlap - 1:",
        "i == 0:",
        format=NVFP4,
        block_n=256,
        steps=1,
    ),
    Mutant(
        "fewer bytes are waited for",
        "grouped_gemm_kernel",
        "tx_count=tile.stage_bytes",
        "tx_count=tile.stage_bytes - 512",
    ),
    Mutant("values go to the first stage", "load", "m_to[None, state.index]", "m_to[None, 0]"),
    Mutant(
        "scales go to the first stage",
        "load",
        "cute.copy(copy, source, to[None, stage]",
        "cute.copy(copy, source, to[None, 0]",
    ),
    Mutant(
        "values come from the first stage",
        "multiply",
        "part, scale = (None, None, i, state.index)",
        "part, scale = (None, None, i, 0)",
    ),
    Mutant(
        "scales come from the first stage",
        "multiply",
        "stage = (None, None, None, None, state.index)",
        "stage = (None, None, None, None, 0)",
    ),
    Mutant("scales of the first step are used for all", "load", "units = k * self.atoms_shape()[1]", "units = 0"),
    Mutant("scales of the first rows are used for all", "load", "x_atom = (row_start + row)", "x_atom = row"),
    Mutant(
        "scales of another expert's weight",
        "load",
        "(expert * atom_rows + column",
        "((1 - expert) * atom_rows + column",
    ),
    Mutant("values of another expert's weight", "load", "(column, 0, expert)", "(column, 0, 1 - expert)"),
    Mutant("rows of another expert", "walk", "word(row_start + expert)", "word(row_start + 1 - expert)"),
    Mutant(
        "scales of N lie over those of M",
        "multiply",
        "ns_base = ms_base + self.tile.scale_columns[0]",
        "ns_base = ms_base",
    ),
    Mutant(
        "the sum begins with what was there",
        "multiply",
        "tcgen05.Field.ACCUMULATE, k + i != 0",
        "tcgen05.Field.ACCUMULATE, k + i >= 0",
    ),
    Mutant("a row of padding is stored", "epilogue", "if thread < rows_left and", "if thread <= rows_left and"),
    Mutant(
        "a narrow tile takes the first rows' scales",
        "multiply",
        "inside = row % SCALE_ATOM[0] // LANES if",
        "inside = row * 0 if",
        block_n=64,
        swap_ab=True,
    ),
    Mutant("gate for up", "load", "n_place[0] + all_columns // 2", "n_place[0]", op="swiglu", block_n=256),
    Mutant(
        "scales of gate for up", "load", "units_apart *= atom_rows // 2", "units_apart *= 0", op="swiglu", block_n=256
    ),
    Mutant(
        "SwiGLU of sums that were not rounded",
        "epilogue",
        "gates.load().to(self.out_type), ups.load().to(self.out_type)",
        "gates.load(), ups.load()",
        op="swiglu",
        block_n=256,
    ),
    Mutant(
        "scales rounded down",
        "epilogue",
        "(m + ((1 << MANTISSA_BITS) - 1)) >> MANTISSA_BITS",
        "m >> MANTISSA_BITS",
        op="swiglu",
        block_n=256,
    ),
    Mutant(
        "another expert's rows are summed over",
        "load",
        "(column, w_first + row_start, 0)",
        "(column, w_first, 0)",
        op="wgrad",
    ),
    Mutant(
        "scales of another expert's rows",
        "load",
        "column // ATOM_ROWS * atoms_deep + before",
        "column // ATOM_ROWS * atoms_deep",
        op="wgrad",
    ),
    Mutant("one step too many", "multiply", "instruction_k < depth:", "instruction_k < depth + 32:", "wgrad"),
    Mutant("no fence after the wait for a turn", "multiply", "                after_signal()\n", ""),
    Mutant("no fence after the wait for a sum", "epilogue", "                after_signal()\n", ""),
    Mutant(
        "no fence before giving back", "tensor_memory", "FenceKind.BEFORE_THREAD_SYNC", "FenceKind.AFTER_THREAD_SYNC"
    ),
    Mutant("the loads end without waiting", "load", "        ring.producer_tail(state)\n", ""),
    Mutant("infinity is no NaN", "epilogue", "if amax >= INFINITY:", "if amax > INFINITY:", "swiglu", 256),
    Mutant("tiny blocks get a scale too high", "epilogue", "if m <= SMALLEST:", "if m < 0:", "swiglu", 256),
    Mutant(
        "rows counted in 32 bits", "epilogue", "at = (first_row + thread)", "at = Int32(first_row + thread)", far=True
    ),
]

"""Expected time of the sm_100 products on one B200, from bytes and cycles: a model, not a measurement. No B200 has run
them, so every figure is what the tiles of kernels_cute would cost if the assumptions hold; none is a claim of speed.

    python -m benchmarks.sm100_model                        every shape, T and product
    python -m benchmarks.sm100_model --shapes qwen3-30b --tokens 8192 --l2-bytes 48
    python -m benchmarks.sm100_model --write docs/blackwell.md          the table of that page

Of the GPU, with where a number comes from:

    SMS              148        https://github.com/pytorch/ao/pull/4002 (device query of a B200)
    HBM_GBS          7672       the same: bus width times memory clock; data sheets round to 8 TB/s
    FP8, FP4 TFLOPS  4500, 9000 dense, HGX B200 of 1000 W: https://glennklockwood.com/garden/processors/B200
    CLOCK_GHZ        1.86       tensor clock: https://hmc-tech.com/gpus/nvidia-b200-vs-nvidia-b100; 16384 FP8 FLOPs a
                                clock and SM then make the 4500
    SHARED_BYTES     128        a clock and SM, which binds multiplications of fewer than 128 columns:
                                https://newsletter.semianalysis.com/p/dissecting-nvidia-blackwell-tensor
    TENSOR_BYTES     512        a clock and SM, 128 lanes of 4 bytes, that an epilogue reads:
                                https://silenceluo.github.io/blogs/Blackwell_Tensor_Core

Assumed, without a source, and worth measuring first:

    L2_BYTES         64         a clock and SM, from L2 to shared memory, with nothing multicast
    LATENCY          1000       cycles until a load from memory is there; once a kernel, as loads run ahead after that
    EPILOGUE         3          cycles a column beside the read: convert, scale and store

What is computed:

- Routing is balanced over `--ranks`; every expert has rows. Each operand comes from HBM once and each result goes there
  once, whatever number of tiles reads it from L2.
- A step of a tile takes the longest of its multiplications, their reads of shared memory, and its loads from L2.
- The epilogue of a tile runs beside the next tile, but for the columns in which two accumulators overlap. Tiles are
  dealt out in waves over the SMs; a last one that is not full costs a whole one.
- time = fill + the longer of all waves and of HBM + last epilogue. Launching a kernel is not in it.
- The roof is the longer of useful FLOPs at the peak of the format, and of bytes at the bandwidth of HBM.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dist_moe.formats import MXFP8_E4M3, NVFP4, Format
from dist_moe.kernels_cute.tiles import Tile, pick
from dist_moe.models import MODELS, Shape, find
from dist_moe.shapes import cdiv

SMS, CLOCK_GHZ, HBM_GBS = 148, 1.86, 7672
TFLOPS = {MXFP8_E4M3.name: 4500, NVFP4.name: 9000}
SHARED_BYTES, TENSOR_BYTES, L2_BYTES = 128, 512, 64
LATENCY, EPILOGUE = 1000, 3
TOKENS, NUM_RANKS = (16, 128, 8192), 8
DOCUMENTED = ("deepseek-v3", "qwen3-30b")
BEGIN, END = "<!-- begin: python -m benchmarks.sm100_model --write docs/blackwell.md -->", "<!-- end -->"


@dataclass(frozen=True)
class Product:
    """One grouped product of a rank: `experts` times [M, N] summed over K; rows are M, of wgrad K."""

    name: str
    op: str  # of tiles.pick
    format: Format
    experts: int
    M: int
    N: int
    K: int

    @property
    def rows_per_expert(self) -> int:
        return self.K if self.op == "wgrad" else self.M

    @property
    def flops(self) -> int:
        return 2 * self.experts * self.M * self.N * self.K

    @property
    def hbm_bytes(self) -> int:
        """Values and scales of both operands, and BF16 results."""
        bits = 8 / self.format.values_per_byte + 8 / self.format.block
        return int(self.experts * ((self.M + self.N) * self.K * bits / 8 + 2 * self.M * self.N))

    @property
    def roof_us(self) -> float:
        return max(self.flops / TFLOPS[self.format.name] / 1e6, self.hbm_bytes / HBM_GBS / 1e3)


def products_of(shape: Shape, tokens: int, num_ranks: int, format: Format) -> list[Product]:
    """Those of one layer; rows of an expert are rounded up. NVFP4 serves alone: it has no gradients."""
    L, rows = shape.E // num_ranks, cdiv(tokens * shape.K * num_ranks, shape.E)
    D, F = shape.D, shape.F
    sizes = [("W13", "forward", rows, 2 * F, D), ("W2", "forward", rows, D, F)]
    if format.values_per_byte == 1:
        sizes += [("dgrad W2", "dgrad", rows, F, D), ("dgrad W13", "dgrad", rows, D, 2 * F)]
        sizes += [("wgrad W2", "wgrad", D, F, rows), ("wgrad W13", "wgrad", 2 * F, D, rows)]
    return [Product(name, op, format, L, *mnk) for name, op, *mnk in sizes]


@dataclass(frozen=True)
class Estimate:
    """What a product would take on its tile, and the resource that takes longest."""

    product: Product
    tile: Tile
    waves: float  # of tiles over the SMs
    us: float
    limit: str

    @property
    def share(self) -> float:
        """Of the roof."""
        return self.product.roof_us / self.us


def step_cycles(tile: Tile, l2_bytes: float) -> dict[str, float]:
    """One stage of a tile, by resource."""
    num_instructions = tile.block_k // tile.instruction_k
    operand_bytes = num_instructions * (tile.block_m + tile.block_n) * tile.instruction_k / tile.format.values_per_byte
    flops_a_clock = TFLOPS[tile.format.name] * 1e3 / SMS / CLOCK_GHZ
    return {
        "MMA": 2 * tile.block_m * tile.block_n * tile.block_k / flops_a_clock,
        "shared memory": operand_bytes / SHARED_BYTES,
        "L2": tile.stage_bytes / l2_bytes,
    }


def estimate(product: Product, l2_bytes: float = L2_BYTES) -> Estimate:
    tile = pick(product.op, product.format, None if product.op == "wgrad" else product.rows_per_expert)
    waves = product.experts * cdiv(product.M, tile.out_rows) * cdiv(product.N, tile.out_columns) / SMS
    steps = cdiv(product.K, tile.block_k)
    tile_cycles = {resource: cycles * steps for resource, cycles in step_cycles(tile, l2_bytes).items()}
    column_cycles = tile.block_m * 4 / TENSOR_BYTES + EPILOGUE
    tile_cycles = {name: cycles + tile.overlap * column_cycles for name, cycles in tile_cycles.items()}
    tile_cycles["epilogue"] = epilogue = tile.block_n * column_cycles
    us = {name: math.ceil(waves) * cycles / CLOCK_GHZ / 1e3 for name, cycles in tile_cycles.items()}
    us["HBM"] = product.hbm_bytes / HBM_GBS / 1e3
    limit, ends_us = max(us, key=us.__getitem__), (LATENCY + epilogue) / CLOCK_GHZ / 1e3
    return Estimate(product, tile, waves, us[limit] + ends_us, limit if us[limit] > ends_us else "fill and drain")


def estimates(
    shapes: Iterable[Shape], tokens: Iterable[int], num_ranks: int, l2_bytes: float = L2_BYTES
) -> Iterator[tuple[Shape, int, Estimate]]:
    for shape in shapes:
        for T in tokens:
            for format in (MXFP8_E4M3, NVFP4):
                for product in products_of(shape, T, num_ranks, format):
                    yield shape, T, estimate(product, l2_bytes)


def table(rows: Iterable[tuple[Shape, int, Estimate]]) -> str:
    """In Markdown."""
    head = [
        "model",
        "T",
        "format",
        "product",
        "rows an expert",
        "tile",
        "waves",
        "us",
        "roof, us",
        "of the roof",
        "limit",
    ]
    lines = [head, ["---", "---:", "---", "---", "---:", "---", "---:", "---:", "---:", "---:", "---"]]
    for shape, T, e in rows:
        p = e.product
        tile = f"{e.tile.block_m}x{e.tile.block_n}{', swapped' if e.tile.swap_ab else ''}, {e.tile.stages} stages"
        times = [f"{e.waves:.1f}", f"{e.us:.1f}", f"{p.roof_us:.1f}", f"{e.share:.0%}"]
        lines.append([shape.name, str(T), p.format.name, p.name, str(p.rows_per_expert), tile, *times, e.limit])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def documented() -> str:
    """What docs/blackwell.md shows, between its two marks: gradients at the largest T alone."""
    every = estimates(map(find, DOCUMENTED), TOKENS, NUM_RANKS)
    shown = (row for row in every if row[1] == max(TOKENS) or row[2].product.op == "forward")
    return f"{BEGIN}\n\n{table(shown)}\n\n{END}"


def main(argv: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--shapes", nargs="+", default=[model.name for model in MODELS])
    options.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="of one rank")
    options.add_argument("--ranks", type=int, default=NUM_RANKS, help="that share the experts")
    options.add_argument("--l2-bytes", type=float, default=L2_BYTES, help="a clock and SM from L2")
    options.add_argument("--write", type=Path, help="put the documented rows between the marks of this file")
    args = options.parse_args(argv)
    if args.write is not None:
        text = args.write.read_text()
        before, rest = text.split(BEGIN)
        args.write.write_text(before + documented() + rest.split(END, 1)[1])
        return
    print(table(estimates(map(find, args.shapes), args.tokens, args.ranks, args.l2_bytes)))


if __name__ == "__main__":
    main()

"""Tiles of the sm_100 products: which ones there are, and which one a problem gets. Needs neither the DSL nor a GPU.

A tile is what the tensor cores multiply: block_m rows of one operand by block_n rows of the other, over 128 bytes of
each at a time. The side of M holds rows of activations and the side of N columns of the weights; with swap_ab the
sides change places, so that few rows of an expert fill a narrow tile.
"""

import itertools
from dataclasses import dataclass

from dist_moe.config import BlockScaledKernelConfig, Config
from dist_moe.formats import SCALE_ATOM, Format, by_name
from dist_moe.shapes import cdiv, next_power_of_2

OPS = ("forward", "dgrad", "wgrad", "swiglu")
ARCHS = {(10, 0): "sm_100a", (10, 3): "sm_103a"}  # by compute capability: what is compiled for
BLOCK_M = 128  # lanes of tensor memory
STAGE_ROW_BYTES = 128  # of a row in a stage: what one swizzle spans
ATOM_BYTES = SCALE_ATOM[0] * SCALE_ATOM[1]
SCALE_UNIT = 128  # bytes; scales of a call begin at multiples of it
SHARED_BYTES = 227 * 1024  # that a program may have on compute capability 10.x
RESERVED_BYTES = 2048  # barriers, and what aligning the buffers to 1024 bytes may take
TENSOR_COLUMNS = 512
SUBTILE = 32  # columns of an accumulator that an epilogue warp reads at a time
EPILOGUE_WARPS = 4
WARPS = EPILOGUE_WARPS + 2  # one issues the multiplications, one the loads
MAX_STAGES = 12
ACCUMULATORS = 2


@dataclass(frozen=True)
class Product:
    """What a kernel computes, beside its tile: one is compiled for each.

    op: forward, dgrad, wgrad, or swiglu: forward whose rows of gate and up leave as quantised h2 = act(gate, up).
    out_bits: of results, 16 for bf16 and 32 for fp32, which only wgrad has.  accumulate: wgrad adds to what is there.
    clamped, fast_math: of SwiGLU.  stores_h1: SwiGLU's gate and up are kept too, for a backward.
    """

    op: str
    format: Format
    out_bits: int = 16
    accumulate: bool = False
    clamped: bool = False
    fast_math: bool = False
    stores_h1: bool = False

    def __post_init__(self):
        assert self.op in OPS, self.op
        assert self.op == "forward" or self.format.values_per_byte == 1, "two values of a row in a byte: forward only"
        assert self.op == "wgrad" or self.out_bits == 16 and not self.accumulate
        assert self.op == "swiglu" or not (self.clamped or self.fast_math or self.stores_h1)

    @property
    def name(self) -> str:
        """Of its kernel: a C identifier."""
        flags = ("accumulate", "clamped", "fast_math", "stores_h1")
        words = [self.op, self.format.name, "fp32" if self.out_bits == 32 else "bf16"]
        return "_".join([*words, *(flag for flag in flags if getattr(self, flag))])


@dataclass(frozen=True)
class Tile:
    """One tile with its buffers, for operands of one format."""

    format: Format
    block_n: int
    swap_ab: bool = False
    stages: int = 0  # of shared memory; 0: all that fit
    unroll: int = 1  # steps of the loop over the contraction that are written out
    block_m: int = BLOCK_M

    def __post_init__(self):
        if self.stages == 0:
            object.__setattr__(self, "stages", self.max_stages)

    @property
    def max_stages(self) -> int:
        return min(MAX_STAGES, (SHARED_BYTES - RESERVED_BYTES) // self.stage_bytes)

    @property
    def block_k(self) -> int:
        """Values of the contraction in a stage."""
        return STAGE_ROW_BYTES * self.format.values_per_byte

    @property
    def instruction_k(self) -> int:
        """Values of the contraction that one instruction multiplies: 32 bytes."""
        return self.block_k // 4

    @property
    def atoms(self) -> int:
        """Of scales, 512 bytes each, in a stage for 128 rows."""
        return self.block_k // (self.format.block * SCALE_ATOM[1])

    @property
    def atom_rows_n(self) -> int:
        """Rows of atoms on the side of N; of a narrow tile, the one that holds it."""
        return cdiv(self.block_n, SCALE_ATOM[0])

    @property
    def stage_bytes(self) -> int:
        """Values and scales of both sides: what a stage's loads bring."""
        values = (self.block_m + self.block_n) * STAGE_ROW_BYTES
        return values + (1 + self.atom_rows_n) * self.atoms * ATOM_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + RESERVED_BYTES

    @property
    def scale_columns(self) -> tuple[int, int]:
        """Columns of tensor memory for the scales of M and of N: an atom fills four."""
        return 4 * self.atoms, 4 * self.atoms * self.atom_rows_n

    @property
    def accumulator_shift(self) -> int:
        """Columns from the first accumulator to the second. Where two do not fit beside the scales they overlap, and
        the epilogue reads the overlap first."""
        room = TENSOR_COLUMNS - sum(self.scale_columns) - self.block_n
        return min(self.block_n, room // SUBTILE * SUBTILE)

    @property
    def overlap(self) -> int:
        """Columns that both accumulators have."""
        return self.block_n - self.accumulator_shift

    @property
    def tensor_columns(self) -> int:
        """That are allocated: a power of 2."""
        return next_power_of_2(self.accumulator_shift + self.block_n + sum(self.scale_columns))

    @property
    def out_rows(self) -> int:
        return self.block_n if self.swap_ab else self.block_m

    @property
    def out_columns(self) -> int:
        return self.block_m if self.swap_ab else self.block_n

    def __str__(self) -> str:
        swapped, unrolled = " swapped" if self.swap_ab else "", f", unrolled {self.unroll}" if self.unroll > 1 else ""
        return f"{self.block_m}x{self.block_n}{swapped}, {self.stages} stages{unrolled}"

    @property
    def name(self) -> str:
        """Part of a C identifier."""
        return str(self).replace(",", "").replace(" ", "_")


def widths(op: str, swap_ab: bool) -> tuple[int, ...]:
    """block_n that an op is built for. SwiGLU takes 128 columns of gate and the same of up."""
    if op == "swiglu":
        return () if swap_ab else (256,)
    if swap_ab:
        return () if op == "wgrad" else (64, 128)
    return (128, 256)


def pick(op: str, format: Format, rows_per_expert: int | None = None) -> Tile:
    """The tile of an op when an expert has that many rows on average; None: many.

    Few rows are the narrow side, so that a stage holds mostly weights, which decide the time then. Many rows take the
    widest tile, which loads the fewest bytes for a product. Not measured: no sm_100 has run it.
    """
    assert op in OPS, op
    few = rows_per_expert is not None and op in ("forward", "dgrad")
    if few and rows_per_expert <= 64:
        return Tile(format, 64, swap_ab=True)
    if few and rows_per_expert <= 256:
        return Tile(format, 128)
    return Tile(format, 256)


def picked(product: Product) -> list[Tile]:
    """Every tile that pick can give a product."""
    regimes = (64, 256, None)
    return list(dict.fromkeys(pick(product.op, product.format, rows) for rows in regimes))


def products(op: str, format: Format) -> list[Product]:
    """Every product of an op in a format; empty where there is none."""
    if op != "forward" and format.values_per_byte != 1:
        return []
    if op == "wgrad":
        return [Product(op, format, bits, accumulate) for bits in (16, 32) for accumulate in (False, True)]
    if op == "swiglu":
        flags = ("clamped", "fast_math", "stores_h1")
        return [
            Product(op, format, **dict(zip(flags, values, strict=True)))
            for values in itertools.product((False, True), repeat=3)
        ]
    return [Product(op, format)]


def tile_of(op: str, format: Format, asked: BlockScaledKernelConfig) -> Tile:
    """The tile that a kernel configuration asks for. Raises ValueError, with the reason, when it is not built."""
    for name, only, why in (
        ("num_ctas", 1, "pairs of programs are not built"),
        ("block_m", BLOCK_M, "a program's tensor memory has 128 lanes"),
        ("block_k", STAGE_ROW_BYTES, "bytes of a row in a stage: 128 values of e4m3 or 256 of e2m1"),
        ("num_c_stages", 1, "results go from registers to memory, through no buffer"),
        ("num_tmem_buffers", ACCUMULATORS, "two accumulators take turns"),
        ("num_tile_buffers", 1, "every role finds its tiles by itself"),
        ("epilogue_subtile", SUBTILE, "an epilogue warp reads 32 columns at a time"),
        ("num_warps", WARPS, f"{EPILOGUE_WARPS} epilogue warps, one that multiplies and one that loads"),
        ("static_scheduler", True, "tiles are dealt out in turn"),
    ):
        if getattr(asked, name) != only:
            raise ValueError(f"kernel_config: {name} must be {only} ({why}), got {getattr(asked, name)}")
    built = widths(op, asked.swap_ab)
    if asked.block_n not in built:
        wanted = f"one of {', '.join(map(str, built))}" if built else "without swap_ab"
        raise ValueError(f"kernel_config: block_n={asked.block_n}, swap_ab={asked.swap_ab}: {op} is built {wanted}")
    if asked.kloop_unroll > 4:
        raise ValueError(f"kernel_config: kloop_unroll must be at most 4, got {asked.kloop_unroll}")
    tile = Tile(format, asked.block_n, asked.swap_ab, asked.num_smem_buffers, asked.kloop_unroll)
    if not 2 <= tile.stages <= tile.max_stages:
        raise ValueError(
            f"kernel_config: num_smem_buffers must be 2 to {tile.max_stages} with {tile.stage_bytes} bytes a stage, "
            f"got {tile.stages}"
        )
    if asked.overlapping_accum != (tile.overlap > 0):
        raise ValueError(
            f"kernel_config: overlapping_accum must be {tile.overlap > 0}: two accumulators of {tile.block_n} columns "
            f"and the scales{' do not' if tile.overlap else ''} fit {TENSOR_COLUMNS} columns side by side"
        )
    return tile


def refuses(op: str, config: Config) -> str | None:
    """Why a Config's kernel configuration cannot be had in an op, in words; None when it can or asks for nothing."""
    asked = config.block_scaled.kernel_config
    try:
        if asked is not None:
            tile_of(op, by_name(config.block_scaled.format), asked)
    except ValueError as error:
        return str(error)
    return None

"""Tiles that a grouped product could run in: what its kernel's table chooses, the table's other rows, and neighbours.

Neighbours are of the chosen tile, one step away. A better one enters the table by hand, and then has neighbours of its
own: a search by a few steps instead of a grid.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from dist_moe.formats import Format

Config = Any  # a frozen dataclass of a kernel: blocks, warps and stages, or rows and stages

SHARED_BYTES = 227 * 2**10  # what a program can have on sm_90 and sm_100
BF16 = 2
MIN_STAGES = 2

# Of a neighbour; TMA brings no box of more than 256 rows.
LIMITS = {"block_m": (16, 256), "block_n": (64, 256), "block_k": (32, 128), "num_warps": (4, 8)}
# By kernel, what a neighbour may differ in beside its stages. The layouts of wgrad_hopper are those of eight warps and
# 128 rows; what block-scaled kernels multiply together is given by the atoms of scales.
VARIED = {
    "grouped_gemm": ("block_m", "block_n", "block_k", "num_warps"),
    "grouped_gemm_swiglu": ("block_m", "block_n", "block_k", "num_warps"),
    "wgrad_hopper": ("block_n", "block_k"),
}


@dataclass(frozen=True)
class ShapeClass:
    """What the choice of a tile may look at: the product, weights [N, K] of an expert, and its rows on average."""

    kind: str  # "forward", "dgrad" or "wgrad"
    N: int
    K: int
    rows: int
    dtype: torch.dtype  # of the result
    format: Format | None = None
    square: bool = False  # blocks of the weights

    def __str__(self) -> str:
        return f"{self.kind} {self.N}x{self.K}, {self.rows} rows an expert"


Choice = tuple[Config, Iterable[Config]]  # the chosen tile, and the rows of the table


def _grouped_gemm(kernel: ModuleType, at: ShapeClass) -> Choice:
    return kernel.pick_config(at.kind, at.N, at.K, at.rows), kernel.CONFIGS.values()


def _swiglu(kernel: ModuleType, at: ShapeClass) -> Choice:
    table = importlib.import_module(".grouped_gemm", kernel.__package__).CONFIGS
    return kernel.pick_config(at.kind, at.N, at.K, at.rows), table.values()


def _wgrad_hopper(kernel: ModuleType, at: ShapeClass) -> Choice:
    return kernel.CONFIGS[at.dtype], kernel.CONFIGS.values()


def _grouped_gemm_scaled(kernel: ModuleType, at: ShapeClass) -> Choice:
    scaled_dot = kernel.has_scaled_dot(torch.device("cpu" if kernel.is_interpreting() else "cuda"))
    chosen = kernel.pick_config(at.kind, scaled_dot=scaled_dot, rows_per_expert=at.rows)
    return chosen, (config for config in kernel.CONFIGS.values() if config.scaled_dot == scaled_dot)


def _expanded_hopper(kernel: ModuleType, at: ShapeClass) -> Choice:
    return kernel.pick_config(at.format, at.rows), kernel.CONFIGS[at.format].values()


def _scaled_hopper(kernel: ModuleType, at: ShapeClass) -> Choice:
    if at.kind == "dgrad":
        return kernel.DGRAD, ()
    return kernel.pick_config(at.square, at.rows), (kernel.pick_config(at.square, rows) for rows in (16, 32, 64, None))


TABLES: dict[str, Callable[[ModuleType, ShapeClass], Choice]] = {
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_swiglu": _swiglu,
    "grouped_gemm_hopper": lambda kernel, at: (kernel.CONFIG, ()),
    "wgrad_hopper": _wgrad_hopper,
    "grouped_gemm_scaled": _grouped_gemm_scaled,
    "expanded_hopper": _expanded_hopper,
    "scaled_hopper": _scaled_hopper,
}


def short(kernel: ModuleType) -> str:
    """Its name in TABLES."""
    return kernel.__name__.rpartition(".")[2]


def name_of(config: Config) -> str:
    """128x256x64 w8 s4: blocks, warps, stages; or 64+16 s5: rows, tail, stages, of which a table may fix the rows."""
    if not hasattr(config, "block_m"):
        sizes = (getattr(config, name, 0) for name in ("rows", "tail"))
        return f"{'+'.join(str(size) for size in sizes if size)} s{config.num_stages}"
    return f"{config.block_m}x{config.block_n}x{config.block_k} w{config.num_warps} s{config.num_stages}"


def ring_bytes(config: Config) -> int:
    """BF16 operands of all stages."""
    return config.num_stages * (config.block_m + config.block_n) * config.block_k * BF16


def _moved(config: Config, name: str, value: int) -> Config:
    """With another value, and as many stages as fill the bytes that were in flight."""
    one_stage = replace(config, **{name: value}, num_stages=1)
    return replace(one_stage, num_stages=max(MIN_STAGES, ring_bytes(config) // ring_bytes(one_stage)))


def neighbours(config: Config, kernel: str) -> list[Config]:
    """The tile with one of its sizes halved or doubled, and with a stage less or more."""
    found = []
    for name in VARIED.get(kernel, ()):
        size, (least, most) = getattr(config, name), LIMITS[name]
        found += [_moved(config, name, value) for value in (size // 2, 2 * size) if least <= value <= most]
    stages = (config.num_stages - 1, config.num_stages + 1)
    return found + [replace(config, num_stages=num) for num in stages if num >= MIN_STAGES]


def candidates(kernel: ModuleType, at: ShapeClass) -> dict[str, Config]:
    """By name, every tile that is measured, the chosen one first."""
    chosen, rows = TABLES[short(kernel)](kernel, at)
    return {name_of(config): config for config in (chosen, *rows, *neighbours(chosen, short(kernel)))}


def unfit(kernel: ModuleType, config: Config) -> str | None:
    """Why a tile cannot fit shared memory, where that shows without compiling it."""
    if short(kernel) in VARIED and ring_bytes(config) > SHARED_BYTES:
        return f"does not fit: {ring_bytes(config) // 2**10} KiB in flight, {SHARED_BYTES // 2**10} KiB exist"
    return None

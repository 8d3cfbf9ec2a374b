"""What of the sm_100 products is emulated: every pair of product and tile, with the tiles of each."""

from dataclasses import dataclass

import torch

from dist_moe.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, Format
from dist_moe.kernels_cute.tiles import Tile
from dist_moe.shapes import Activation

from .problems import Problem


@dataclass(frozen=True)
class Kind:
    """A product with a tile; `options` of the problem, `flags` of the product alone."""

    op: str
    format: Format
    tile: Tile
    options: tuple = ()
    fast_math: bool = False

    @property
    def id(self) -> str:
        words = [self.op, self.format.name, self.tile.name, *(f"{name}={value}" for name, value in self.options)]
        return " ".join([*words, "fast_math"] if self.fast_math else words)

    def problem(self, rows, N, K, **more) -> Problem:
        return Problem(self.op, self.format, rows, N, K, **dict(self.options), **more)

    @property
    def flags(self) -> dict:
        return {"fast_math": True} if self.fast_math else {}


def _kinds() -> list[Kind]:
    found = []
    for format in (MXFP8_E4M3, NVFP4):
        tiles = [Tile(format, 128), Tile(format, 256), Tile(format, 64, swap_ab=True), Tile(format, 128, swap_ab=True)]
        found += [Kind("forward", format, tile) for tile in tiles]
    for tile in (Tile(MXFP8_E4M3, 128), Tile(MXFP8_E4M3, 256), Tile(MXFP8_E4M3, 64, swap_ab=True)):
        found.append(Kind("dgrad", MXFP8_E4M3, tile))
    for dtype in (torch.bfloat16, torch.float32):
        for accumulate in (False, True):
            options = (("out_dtype", dtype), ("accumulate", accumulate))
            found.append(Kind("wgrad", MXFP8_E4M3, Tile(MXFP8_E4M3, 256), options))
    found.append(Kind("wgrad", MXFP8_E4M3, Tile(MXFP8_E4M3, 128)))
    clamped = Activation("swiglu_clamped", alpha=1.702, limit=1.5)
    for options in ((), (("stores_h1", True),), (("activation", clamped), ("stores_h1", True))):
        found.append(Kind("swiglu", MXFP8_E4M3, Tile(MXFP8_E4M3, 256), options))
    found.append(Kind("swiglu", MXFP8_E4M3, Tile(MXFP8_E4M3, 256), (), fast_math=True))
    found += [Kind("forward", MXFP4, Tile(MXFP4, 256)), Kind("forward", MXFP8_E5M2, Tile(MXFP8_E5M2, 128))]
    return found


KINDS = _kinds()

"""Tiles: what fits, what is picked, and what of a kernel configuration is honoured or refused."""

import dataclasses

import pytest

from dist_moe.config import BlockScaledConfig, BlockScaledKernelConfig, Config
from dist_moe.formats import FORMATS, MXFP8_E4M3, NVFP4
from dist_moe.kernels_cute import tiles
from dist_moe.kernels_cute.tiles import Product, Tile

EVERY = [(product, tile) for f in FORMATS for op in tiles.OPS for product in tiles.products(op, f) for tile in
         [Tile(f, n, swap) for swap in (False, True) for n in tiles.widths(op, swap)]]  # fmt: skip
GOOD = BlockScaledKernelConfig(1, 128, 128, 128, 3, 1, 2, 1, 32, False, False, 2, num_warps=6, static_scheduler=True)


@pytest.mark.parametrize(("product", "tile"), EVERY, ids=[f"{p.name} {t.name}" for p, t in EVERY])
def test_every_tile_fits_shared_and_tensor_memory(product, tile):
    assert tile.stages >= 4 and tile.shared_bytes <= tiles.SHARED_BYTES
    assert tile.shared_bytes + tile.stage_bytes > tiles.SHARED_BYTES or tile.stages == tiles.MAX_STAGES
    used = tile.accumulator_shift + tile.block_n + sum(tile.scale_columns)
    assert used <= tile.tensor_columns <= tiles.TENSOR_COLUMNS
    assert tile.tensor_columns.bit_count() == 1 and tile.tensor_columns >= 32
    assert 0 < tile.accumulator_shift and tile.accumulator_shift % tiles.SUBTILE == 0
    # What the epilogue reads before it lets the next accumulator begin is at most a quarter of it.
    assert 0 <= tile.overlap <= tile.block_n // 4


def test_what_a_stage_holds():
    """128 bytes of 128 + 256 rows, and atoms of 512 bytes: of e4m3 one for 128 rows, of e2m1 in blocks of 16 four."""
    mxfp8, nvfp4 = Tile(MXFP8_E4M3, 256), Tile(NVFP4, 256)
    assert (mxfp8.block_k, mxfp8.instruction_k, mxfp8.atoms) == (128, 32, 1)
    assert (nvfp4.block_k, nvfp4.instruction_k, nvfp4.atoms) == (256, 64, 4)
    assert mxfp8.stage_bytes == 384 * 128 + 3 * 512 and nvfp4.stage_bytes == 384 * 128 + 3 * 2048
    assert mxfp8.scale_columns == (4, 8) and nvfp4.scale_columns == (16, 32)
    assert (mxfp8.overlap, nvfp4.overlap) == (32, 64)
    assert Tile(NVFP4, 64, swap_ab=True).stage_bytes == 192 * 128 + 2 * 2048


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("op", tiles.OPS)
def test_every_tile_that_is_picked_is_built(op, format):
    for product in tiles.products(op, format):
        for tile in tiles.picked(product):
            assert tile.block_n in tiles.widths(op, tile.swap_ab) and tile.format is format


def test_few_rows_take_the_narrow_side():
    tile = {n: tiles.pick("forward", MXFP8_E4M3, n) for n in (1, 64, 65, 256, 257, None)}
    assert [tile[n].swap_ab for n in tile] == [True, True, False, False, False, False]
    assert tile[1].out_rows == 64 and tile[1].out_columns == 128
    assert tile[256].block_n == 128 and tile[257].block_n == tile[None].block_n == 256
    assert not tiles.pick("wgrad", MXFP8_E4M3, 1).swap_ab


@pytest.mark.parametrize(
    ("op", "changes", "tile"),
    [
        ("forward", {}, Tile(MXFP8_E4M3, 128, False, 3, 2)),
        ("wgrad", {"num_smem_buffers": 6, "kloop_unroll": 1}, Tile(MXFP8_E4M3, 128, False, 6, 1)),
        ("dgrad", {"block_n": 256, "overlapping_accum": True}, Tile(MXFP8_E4M3, 256, False, 3, 2)),
        ("forward", {"block_n": 64, "swap_ab": True}, Tile(MXFP8_E4M3, 64, True, 3, 2)),
    ],
)
def test_a_configuration_is_honoured(op, changes, tile):
    assert tiles.tile_of(op, MXFP8_E4M3, dataclasses.replace(GOOD, **changes)) == tile


REFUSED = [
    ("forward", {"num_ctas": 2}, "num_ctas must be 1"),
    ("forward", {"block_m": 256}, "block_m must be 128"),
    ("forward", {"num_c_stages": 2}, "num_c_stages must be 1"),
    ("forward", {"num_tmem_buffers": 1}, "num_tmem_buffers must be 2"),
    ("forward", {"num_tile_buffers": 2}, "num_tile_buffers must be 1"),
    ("forward", {"epilogue_subtile": 64}, "epilogue_subtile must be 32"),
    ("forward", {"num_warps": 8}, "num_warps must be 6"),
    ("forward", {"static_scheduler": False}, "static_scheduler must be True"),
    ("forward", {"block_n": 96}, "block_n=96, swap_ab=False: forward is built one of 128, 256"),
    ("wgrad", {"block_n": 64, "swap_ab": True}, "wgrad is built without swap_ab"),
    ("swiglu", {}, "swiglu is built one of 256"),
    ("forward", {"kloop_unroll": 8}, "kloop_unroll must be at most 4"),
    ("forward", {"num_smem_buffers": 7}, "num_smem_buffers must be 2 to 6 with 33792 bytes a stage, got 7"),
    ("forward", {"num_smem_buffers": 1}, "num_smem_buffers must be 2 to 6"),
    ("forward", {"overlapping_accum": True}, "overlapping_accum must be False"),
    ("forward", {"block_n": 256}, "overlapping_accum must be True"),
]


@pytest.mark.parametrize(("op", "changes", "words"), REFUSED, ids=[str(changes) for _, changes, _ in REFUSED])
def test_a_configuration_that_is_not_built_is_refused_with_the_reason(op, changes, words):
    asked = dataclasses.replace(GOOD, **changes)
    with pytest.raises(ValueError, match=words):
        tiles.tile_of(op, MXFP8_E4M3, asked)
    config = Config(16, 256, 128, 2, 4, 1, inference=True, block_scaled=BlockScaledConfig(kernel_config=asked))
    assert words in tiles.refuses(op, config)


def test_a_config_that_asks_for_nothing_or_for_what_is_built_is_not_refused():
    for kernel_config in (None, GOOD):
        block_scaled = BlockScaledConfig(kernel_config=kernel_config)
        config = Config(16, 256, 128, 2, 4, 1, inference=True, block_scaled=block_scaled)
        assert tiles.refuses("forward", config) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": "dgrad", "format": NVFP4},
        {"op": "forward", "format": MXFP8_E4M3, "accumulate": True},
        {"op": "forward", "format": MXFP8_E4M3, "clamped": True},
    ],
)
def test_products_that_do_not_exist(wrong):
    with pytest.raises(AssertionError):
        Product(**wrong)

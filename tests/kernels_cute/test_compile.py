"""Every product with every tile it may get, compiled for sm_100a without a GPU: MMA, spills, memory, files."""

import json
import os
import subprocess
import sys

import pytest

from dist_moe.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from dist_moe.kernels_cute import tiles
from dist_moe.kernels_cute.tiles import Product, Tile

pytestmark = pytest.mark.cute

PICKED = [
    (product, tile)
    for format in (MXFP8_E4M3, NVFP4)
    for op in tiles.OPS
    for product in tiles.products(op, format)
    for tile in tiles.picked(product)
]
# Beside what is picked: tiles that only a configuration asks for, and formats that come for free.
MORE = [
    (Product("wgrad", MXFP8_E4M3), Tile(MXFP8_E4M3, 128, unroll=4)),
    (Product("forward", NVFP4), Tile(NVFP4, 128, swap_ab=True, stages=2)),
    (Product("forward", MXFP4), Tile(MXFP4, 256)),
    (Product("forward", MXFP8_E5M2), Tile(MXFP8_E5M2, 256)),
]
CASES = PICKED + MORE
KINDS = {"mxfp8_e4m3": "kind::mxf8f6f4.block_scale.block32", "nvfp4": "kind::mxf4nvf4.block_scale.block16"}
KINDS |= {"mxfp8_e5m2": KINDS["mxfp8_e4m3"], "mxfp4": "kind::mxf4nvf4.block_scale.block32"}


@pytest.mark.parametrize(("product", "tile"), CASES, ids=[f"{p.name} {t.name}" for p, t in CASES])
def test_it_compiles_to_block_scaled_mma_without_spills(product, tile):
    from dist_moe.kernels_cute import build

    row = build.report(product, tile)
    assert row["spill_instructions"] == row["stack_bytes"] == row["local_bytes"] == 0
    assert 0 < row["registers"] <= 255
    assert tile.shared_bytes - tiles.RESERVED_BYTES < row["shared_bytes"] <= tile.shared_bytes
    assert all(KINDS[product.format.name] in name for name in row["ptx_mma"])
    assert sum(row["ptx_mma"].values()) == sum(row["mma_instructions"].values()) >= 4
    ptx = build.compiled(product, tile).__ptx__
    assert "tcgen05.wait::ld" in ptx and "tensormap" not in ptx.replace("prefetch.tensormap", "")
    assert len({line.split(",")[0] for line in ptx.splitlines() if "prefetch.tensormap" in line}) == 4


def test_an_architecture_that_is_not_built_for_is_named():
    from dist_moe.kernels_cute import build

    with pytest.raises(ValueError, match="sm_100a, sm_103a, got 'sm_90a'"):
        build.compiled(Product("forward", MXFP8_E4M3), Tile(MXFP8_E4M3, 128), "sm_90a")


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_the_command_writes_everything_without_a_gpu(arch, tmp_path):
    command = [sys.executable, "-m", "dist_moe.kernels_cute.compile", "--format", "nvfp4", "--op", "forward"]
    command += ["--out", str(tmp_path), "--arch", arch]
    environment = {k: v for k, v in os.environ.items() if k != "CUTE_DSL_ARCH"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / f"forward_nvfp4_{arch}.json").read_text())
    assert len(rows) == len(tiles.picked(Product("forward", NVFP4))) == len(done.stdout.splitlines())
    for row in rows:
        assert row["arch"] == arch and row["registers"] > 0 and row["spill_instructions"] == 0
        for name in row["files"]:
            assert (tmp_path / name).stat().st_size > 100
        assert f".target {arch}" in (tmp_path / f"{row['name']}.ptx").read_text()


def test_the_command_says_what_does_not_exist(tmp_path):
    command = [sys.executable, "-m", "dist_moe.kernels_cute.compile", "--format", "nvfp4", "--op", "wgrad"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and "wgrad exists in formats with one value in a byte" in done.stderr


LAUNCH = """
from dist_moe.kernels_cute import build, grouped_gemm
from tests.kernels_cute.emulated import product_of
from tests.kernels_cute.kinds import KINDS

kind = KINDS[0]
problem = kind.problem((3,), 128, 128)
product = product_of(problem)
arguments = build.arguments(build.kernel_of(product, kind.tile), 0, programs=2, **grouped_gemm.addresses(problem.given))
build.compiled(product, kind.tile, {arch!r})(*arguments)
"""


@pytest.mark.interpreter
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_a_launch_gets_as_far_as_the_driver(arch):
    """What an op passes is what the compiled kernel takes; without a driver that is where it ends."""
    environment = os.environ | {"CUTE_DSL_ARCH": arch}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH.format(arch=arch)], capture_output=True, text=True, env=environment
    )
    assert "cudaErrorInsufficientDriver" in done.stderr, done.stderr


def test_a_process_compiles_for_one_architecture():
    """What the DSL compiles for another can be neither run nor exported."""
    from dist_moe.kernels_cute import build

    with pytest.raises(ValueError, match="this process compiles for sm_100a; set CUTE_DSL_ARCH=sm_103a"):
        build.compiled(Product("forward", MXFP8_E4M3), Tile(MXFP8_E4M3, 128), "sm_103a")


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_compiled(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "dist_moe.kernels_cute.compile", "--format", "mxfp8", "--op", "forward"]
    done = subprocess.run([*command, "--out", str(tmp_path / "file")], capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout and "cannot write to --out" in done.stderr
    assert len(done.stderr.splitlines()) == 1

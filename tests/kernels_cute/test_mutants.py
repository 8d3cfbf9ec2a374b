"""The emulated tests notice what they are there for: every fault put into a kernel is caught."""

import contextlib

import pytest
import torch

from .kinds import KINDS
from .mutants import MUTANTS
from .test_emulated import equal, sizes

pytestmark = pytest.mark.emulated

SCHEDULES = 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.what for mutant in MUTANTS])
def test_a_fault_is_caught(mutant, tmp_path):
    """By wrong numbers or by the emulator, within the schedules of the test of twenty."""
    from .emulated import far_places, launch_of, product_of

    kind = next(kind for kind in KINDS if mutant.fits(kind))
    build = mutant.build(tmp_path)
    tile = build.Tile(kind.format, kind.tile.block_n, kind.tile.swap_ab, stages=3)
    edges = {"edges": True} if kind.op == "swiglu" else {}
    problem = kind.problem((200, 100), *sizes(kind, 288, mutant.steps * tile.block_k - 32), **edges)
    want = problem.expected()
    before = {name: out.clone() for name, out in problem.outs.items()}
    product = build.Product(**vars(product_of(problem)))
    ptx = build.compiled(product, tile).__ptx__
    with far_places(problem) if mutant.far else contextlib.nullcontext():
        launch, memory = launch_of(problem, product, tile, 1, build)
        caught = any(_is_caught(problem, want, before, ptx, launch, memory, seed) for seed in range(SCHEDULES))
    assert caught, f"not caught: {mutant.what}"


def _is_caught(problem, want, before, ptx, launch, memory, seed) -> bool:
    from tests import sm100

    for name, out in problem.outs.items():
        out.view(torch.uint8).copy_(before[name].view(torch.uint8))
    try:
        sm100.emulate(ptx, launch, memory, seed)
    except sm100.UnsupportedInstruction:
        raise
    except sm100.EmulationError:
        return True
    return not all(equal(problem.outs[name], want[name]) for name in want)

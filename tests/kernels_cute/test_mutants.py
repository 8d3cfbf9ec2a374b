"""The emulated tests notice what they are there for: every fault put into a kernel is caught."""

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
    from tests import sm100

    from .emulated import launch_of, product_of

    kind = next(kind for kind in KINDS if mutant.fits(kind))
    build = mutant.build(tmp_path)
    tile = build.Tile(kind.format, kind.tile.block_n, kind.tile.swap_ab, stages=3)
    problem = kind.problem((200, 100), *sizes(kind, 288, mutant.steps * tile.block_k - 32))
    want = problem.expected()
    before = {name: out.clone() for name, out in problem.outs.items()}
    product = build.Product(**vars(product_of(problem)))
    ptx = build.compiled(product, tile).__ptx__
    launch, memory = launch_of(problem, product, tile, 1, build)
    for seed in range(SCHEDULES):
        for name, out in problem.outs.items():
            out.view(torch.uint8).copy_(before[name].view(torch.uint8))
        try:
            sm100.emulate(ptx, launch, memory, seed)
        except sm100.EmulationError:
            return
        if not all(equal(problem.outs[name], want[name]) for name in want):
            return
    pytest.fail(f"not caught: {mutant.what}")

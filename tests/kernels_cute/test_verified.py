"""The static verifier on the sm_100 products: no race, over all schedules, in builds whose ring of two stages turns.

Its time is that of what is executed: three or four steps in all, of which those at the end of a dimension are ragged.
"""

import dataclasses

import pytest
import torch

from dist_moe.formats import MXFP8_E4M3, NVFP4

from .kinds import KINDS
from .test_emulated import sizes

pytestmark = pytest.mark.verified

# One of each shape of the kernel; what only rounds or stores differently has the same barriers.
PLAIN = ((), (("out_dtype", torch.bfloat16), ("accumulate", False)))
CASES = [k for k in KINDS if k.options in PLAIN and not k.fast_math and k.format in (MXFP8_E4M3, NVFP4)]
# Words that decide which way the kernel goes.
STEERING = ("row_start", "num_rows", "stop", "x_start", "x_scales_start", "w_start", "w_scales_start", "out_start")
STEERING += ("x_outer_start", "h2_start", "h2_scales_start")


@pytest.mark.parametrize("kind", CASES, ids=[kind.id for kind in CASES])
def test_it_is_race_free(kind):
    from tests import sm100

    from dist_moe.kernels_cute import build

    from .emulated import launch_of, product_of

    tile = dataclasses.replace(kind.tile, stages=2)
    problem = kind.problem((3,), *sizes(kind, tile.out_columns + 32, tile.block_k + 32))
    product = product_of(problem)
    launch, memory = launch_of(problem, product, tile, 1)
    verdict = sm100.verify(build.compiled(product, tile).__ptx__, launch, memory, STEERING)
    assert verdict.race_free, str(verdict)

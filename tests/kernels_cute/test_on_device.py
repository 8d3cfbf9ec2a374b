"""The emulated cases on an sm_100, where there is one."""

import pytest
import torch

from .kinds import KINDS
from .test_emulated import equal, sizes
from .test_emulated_schedules import assert_near

pytestmark = [pytest.mark.cute, pytest.mark.sm100]


def run_on_device(kind, problem) -> None:
    """Leaves the results in problem.outs."""
    from dist_moe.kernels_cute import build, grouped_gemm

    from .emulated import product_of

    product = product_of(problem, **kind.flags)
    given = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in problem.given.items()}
    kernel, stream = build.kernel_of(product, kind.tile), torch.cuda.current_stream().cuda_stream
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    arguments = build.arguments(kernel, stream, programs=programs, **grouped_gemm.addresses(given))
    build.compiled(product, kind.tile)(*arguments)
    torch.cuda.synchronize()
    for name, out in problem.outs.items():
        out.copy_(given[name])


@pytest.mark.parametrize("kind", KINDS, ids=[kind.id for kind in KINDS])
@pytest.mark.parametrize("rows", [(5,), (1, 0, 127, 129), (600, 3)])
def test_exact_operands(kind, rows):
    """Equal bits, but for SwiGLU, whose power of 2 is approximate on a GPU."""
    problem = kind.problem(rows, *sizes(kind, 288, 352))
    want, sums = problem.expected(), problem.sums() if "out" in problem.outs else None
    run_on_device(kind, problem)
    if kind.op == "swiglu":
        assert_near(kind, problem, want, sums)
    else:
        assert all(equal(problem.outs[name], want[name]) for name in want)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.id for kind in KINDS])
def test_operands_of_the_quantisers(kind):
    problem = kind.problem((1, 0, 130), *sizes(kind, 288, 544), exact=False)
    want, sums = problem.expected(), problem.sums() if "out" in problem.outs else None
    run_on_device(kind, problem)
    assert_near(kind, problem, want, sums)

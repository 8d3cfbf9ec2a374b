"""Runs a problem's product in the emulator of PTX."""

import contextlib

import torch
from tests import sm100

from dist_moe.kernels_cute import build, grouped_gemm
from dist_moe.kernels_cute.tiles import RESERVED_BYTES, WARPS, Product, Tile

from .problems import Problem


def product_of(problem: Problem, **flags) -> Product:
    flags |= {"clamped": problem.activation.clamped, "stores_h1": problem.stores_h1} if problem.op == "swiglu" else {}
    bits = 8 * problem.out_dtype.itemsize
    return Product(problem.op, problem.format, bits, problem.accumulate, **flags)


def launch_of(
    problem: Problem, product: Product, tile: Tile, programs: int, build=build
) -> tuple[sm100.Launch, sm100.GlobalMemory]:
    """The launch that the host code makes, and the memory it may touch. build: the module, or a mutant's."""
    memory = sm100.GlobalMemory()
    for name, tensor in problem.tensors.items():
        memory.add(tensor.view(torch.uint8).numpy(), name)
    kernel = build.kernel_of(product, tile)
    given = grouped_gemm.addresses(problem.given) | {"programs": programs}
    arguments = (given.get(name, 0) for name in build.parameters(kernel))
    launch = sm100.capture(build.compiled(product, tile), *arguments)
    assert launch.grid == (programs, 1, 1) and launch.block == (32 * WARPS, 1, 1)
    assert tile.shared_bytes - RESERVED_BYTES < launch.shared_bytes <= tile.shared_bytes
    return launch, memory


def run(problem: Problem, tile: Tile, *, seed: int = 0, programs: int = 2, far: bool = False, **flags) -> None:
    """Leaves the results in problem.outs. flags: of the product.

    far: places of results, and of outer scales, count from addresses that lie far below their buffers.
    """
    product = product_of(problem, **flags)
    with far_places(problem) if far else contextlib.nullcontext():
        launch, memory = launch_of(problem, product, tile, programs)
        sm100.emulate(build.compiled(product, tile).__ptx__, launch, memory, seed)


FAR = {"out": ("out_start", 2**30), "x_outer": ("x_outer_start", 2**31), "h2_values": ("h2_start", 2**30)}
FAR |= {"h2_scales": ("h2_scales_start", 2**33)}


@contextlib.contextmanager
def far_places(problem: Problem):
    """Words that say where something begins are larger by so many rows, bytes of scales, or outer scales."""
    given, address_of = problem.given, grouped_gemm.addresses
    moved = {name: far for name, far in FAR.items() if isinstance(given.get(name), torch.Tensor)}
    moved = {name: far for name, far in moved.items() if given[name].numel()}

    def addresses(given):
        found = address_of(given)
        for name, (_, count) in moved.items():
            tensor = given[name]
            found[name] -= count * tensor[:1].numel() * tensor.element_size()
        return found

    for start, count in moved.values():
        given[start] += count
    grouped_gemm.addresses = addresses
    try:
        yield
    finally:
        grouped_gemm.addresses = address_of
        for start, count in moved.values():
            given[start] -= count

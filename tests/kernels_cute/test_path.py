"""The whole block-scaled path with the sm_100 products in their place, executed by the emulator."""

from types import SimpleNamespace

import pytest
import torch

from dist_moe import check as self_test
from dist_moe import create_context, registry
from dist_moe.config import BlockScaledConfig, BlockScaledFormat, BlockScaledKernelConfig
from dist_moe.formats import MXFP8_E4M3, NVFP4
from dist_moe.kernels_cute import grouped_gemm
from dist_moe.kernels_cute.tiles import Product, picked
from dist_moe.op_check import OpChecks
from dist_moe.path_oracle import FORWARD_ONLY, Case, assert_results_close, prepared
from dist_moe.symm import World
from dist_moe.virtual import run_virtual

pytestmark = pytest.mark.emulated

PRODUCTS = ("grouped_gemm_scaled", "grouped_gemm_scaled_dgrad", "grouped_gemm_scaled_wgrad")
SHAPE = {"W": 2, "T": 9, "K": 2, "D": 160, "F": 96, "E": 6, "routing": "zipf(1.0)"}
NARROW = BlockScaledKernelConfig(1, 128, 64, 128, 3, 1, 2, 1, 32, False, True, 2, num_warps=6, static_scheduler=True)


@pytest.fixture
def emulated(monkeypatch):
    """The products run as on an sm_100, but for the last step: what would be launched is emulated. Counts launches."""
    from tests import sm100

    from dist_moe.kernels_cute import build

    count = SimpleNamespace(launches={}, tiles=set())

    def compiled(product, tile, arch):
        assert arch == "sm_100a"
        real = real_compiled(product, tile)

        def launch(*arguments):
            given = [getattr(value, "_pointer", value) for value in arguments[:-1]]
            memory = sm100.GlobalMemory()
            for name, tensor in tensors.items():
                memory.add(tensor.view(torch.uint8).reshape(-1).numpy(), name)
            sm100.emulate(real.__ptx__, sm100.capture(real, *given), memory, seed=len(count.launches))
            count.launches[product.op] = count.launches.get(product.op, 0) + 1
            count.tiles.add((product.op, tile.block_n, tile.swap_ab))

        return launch

    tensors, real_compiled, real_addresses = {}, build.compiled, grouped_gemm.addresses

    def addresses(given):
        tensors.clear()
        tensors.update(distinct(given))
        return real_addresses(given)

    monkeypatch.setattr(grouped_gemm, "addresses", addresses)
    monkeypatch.setattr(build, "compiled", compiled)
    monkeypatch.setattr(grouped_gemm, "_device", lambda device: ("sm_100a", 2))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    return count


def distinct(given: dict) -> dict[str, torch.Tensor]:
    """The storages that the arguments lie in, each once."""
    found = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.numel():
            storage = value.untyped_storage()
            found.setdefault(storage.data_ptr(), (name, torch.empty(0, dtype=torch.uint8).set_(storage)))
    return dict(found.values())


@pytest.mark.parametrize(
    ("format", "inference", "kernel_config"),
    [
        (BlockScaledFormat.MXFP8_E4M3, False, None),
        (BlockScaledFormat.MXFP8_E4M3, True, NARROW),
        (BlockScaledFormat.NVFP4, True, None),
    ],
    ids=["MXFP8 training", "MXFP8 inference, a tile that is asked for", "NVFP4 inference"],
)
def test_the_path(emulated, format, inference, kernel_config):
    case = Case("sm_100", **SHAPE)
    block_scaled = BlockScaledConfig(format, kernel_config=kernel_config)
    config = case.config(block_scaled=block_scaled, **(FORWARD_ONLY if inference else {}))
    inputs = case.inputs()
    if inference:
        inputs = prepared(inputs, config, inference=True, device=torch.device("cpu"))

    def run(use_cute: bool):
        with create_context(group=World.virtual(case.W, "cpu"), config=config, backend="reference") as context:
            if use_cute:
                call = registry.call_of("sm_100", None, config)
                for op in PRODUCTS[: 1 if inference else 3]:
                    impl, _ = registry.choose(op, call)
                    assert impl.backend == "cute"
                    setattr(context.path.ops, op, registry.function(impl, config))
            return run_virtual(case.W, config, inputs, context=context)

    want, found = run(False), run(True)
    assert_results_close(found, want, "path")
    ops = {"forward": 4} if inference else {"forward": 6, "dgrad": 4, "wgrad": 4}
    assert emulated.launches == ops
    assert {swap for op, _, swap in emulated.tiles if op != "wgrad"} == {True}  # few rows


@pytest.mark.interpreter
@pytest.mark.parametrize("format", [MXFP8_E4M3, NVFP4], ids=lambda f: f.name)
def test_the_self_test_runs_every_tile_and_the_fused_product(emulated, format, monkeypatch):
    """As on an sm_100: quantisers in Triton, products here, each beside its oracle."""
    call_of = registry.call_of
    monkeypatch.setattr(registry, "call_of", lambda device, backend, config: call_of("sm_100", backend, config))
    ops = OpChecks(lambda text: None)
    assert not list(self_test._operands(ops, format, torch.device("cpu"), None))
    records = {op: record for (op, backend), record in ops.records.items() if backend == "cute"}
    assert all(not record.failures and record.writes for record in records.values())
    products = {"forward"} if format is NVFP4 else {"forward", "dgrad", "wgrad", "swiglu"}
    assert set(emulated.launches) == products and len(records) == len(products)
    wanted = {(op, tile.block_n, tile.swap_ab) for op in products for tile in picked(Product(op, format))}
    assert emulated.tiles == wanted

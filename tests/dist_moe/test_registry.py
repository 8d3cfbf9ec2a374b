"""The registry: every op has its rows, a refusal has a reason, nothing is chosen in silence."""

import importlib
import inspect
from dataclasses import replace
from importlib import metadata

import pytest
import torch

from dist_moe import (
    BlockScaledConfig,
    BlockScaledKernelConfig,
    Config,
    VmmConfig,
    create_context,
    explain,
    plan_memory,
    reference,
    registry,
)
from dist_moe.registry import (
    BACKENDS,
    CUTE_DSL,
    FORMAT_OPS,
    IMPLS,
    OPS,
    Call,
    call_of,
    choose,
    default_device,
    function,
    needs_triton,
    ops_of,
    resolve,
)
from dist_moe.symm import World

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
CONFIG = Config(8, 64, 96, 2, 4, 1)
SCALED = replace(CONFIG, block_scaled=BlockScaledConfig(pipeline="mega"))
SERVING = replace(CONFIG, block_scaled=BlockScaledConfig("nvfp4"), inference=True)


def call(device=CPU, capability=None, interpreting=False, by_name=False) -> Call:
    return Call(device, capability, interpreting, by_name)


def test_every_op_has_one_row_a_backend():
    found = sorted((impl.op, impl.backend) for impl in IMPLS if impl.backend in BACKENDS)
    assert found == sorted((op, b) for op in OPS + FORMAT_OPS for b in BACKENDS)


def test_a_bf16_context_resolves_and_explains_no_op_of_the_formats():
    assert not set(OPS) & set(FORMAT_OPS)
    ops, text = resolve(CPU, "reference"), explain(CONFIG, 2, device="cpu", backend="reference")
    assert not any(hasattr(ops, op) or op in text for op in FORMAT_OPS)
    impl, _ = choose("quantize_weights", call(), None)
    assert function(impl) is reference.quantize_weights


@pytest.mark.parametrize("config, others", [(SCALED, {"dispatch_packed", "swiglu"}), (SERVING, {"swiglu_backward"})])
def test_a_block_scaled_context_resolves_and_explains_its_own_ops(config, others):
    ops, text = resolve(CPU, "reference", config), explain(config, 2, device="cpu", backend="reference")
    assert set(ops.backends) == set(ops_of(config)) and not others & set(ops.backends)
    assert {"route", "swiglu_quantize", "grouped_gemm_scaled"} <= set(ops.backends)
    assert f"block-scaled: {config.block_scaled.format}, pipeline staged" in text
    assert ("asked for mega: same numbers" in text) == (config is SCALED)
    assert all(op in text for op in ops.backends)


def test_weight_gradients_on_hopper_run_in_gluon():
    on_hopper, on_blackwell = (choose("grouped_gemm_wgrad", call(CUDA, (major, 0))) for major in (9, 10))
    assert on_hopper[0].backend == "gluon" and on_hopper[1] == []
    assert on_blackwell[0].backend == "triton" and "9.x" in on_blackwell[1][0]
    assert choose("grouped_gemm_wgrad", call(CUDA, (9, 0), by_name=True), "triton")[0].backend == "triton"


FITTED = ("grouped_gemm", "grouped_gemm_swiglu", "grouped_gemm_dgrad")


def test_products_whose_tiles_fit_the_rows_of_an_expert_run_in_gluon_on_hopper():
    """Rows of an expert on average: tokens times top-k of all ranks over experts."""
    config = Config(1024, 64, 96, 2, 32, 1)  # 64 rows an expert from each rank
    for num_ranks, fits in ((1, False), (2, True), (16, True), (32, False)):
        for op in FITTED:
            impl, reasons = choose(op, Call(CUDA, (9, 0), False, False, config, num_ranks))
            assert impl.backend == ("gluon" if fits else "triton")
            assert fits or f"written for 128 to 1024 rows an expert, here are {64 * num_ranks}" in reasons[0]
    for other, capability, words in (
        (replace(config, bf16_grouped_gemm_preset="1cta1mma_bm128_bn128"), (9, 0), "preset"),
        (config, (10, 0), "compute capability 9.x"),
    ):
        impl, reasons = choose("grouped_gemm", Call(CUDA, capability, False, False, other, 2))
        assert impl.backend == "triton" and words in reasons[0]
    assert "  gluon\n    grouped_gemm, grouped_gemm_swiglu, grouped_gemm_dgrad" in explain(config, 2, device="sm_90")


def test_explain_refuses_ranks_that_cannot_share_the_experts():
    for ep_size in (3, 64):
        with pytest.raises(ValueError, match=f"divisible by the number of ranks, got 4 experts for {ep_size} ranks"):
            explain(CONFIG, ep_size, device="sm_90")


NARROW = replace(SERVING, hidden_dim=160, intermediate_dim=32)  # outputs in windows of 64 columns


@pytest.mark.parametrize(
    "config, op, file",
    [
        (SCALED, "grouped_gemm_scaled", "scaled_hopper"),
        (SCALED, "grouped_gemm_scaled_dgrad", "scaled_hopper"),
        (SCALED, "grouped_gemm_scaled_wgrad", "wgrad_hopper"),
        (SERVING, "grouped_gemm_scaled", "expanded_hopper"),
        (replace(SERVING, block_scaled=SCALED.block_scaled), "grouped_gemm_scaled", "expanded_hopper"),
        (NARROW, "grouped_gemm_scaled", "grouped_gemm_scaled"),
        (None, "grouped_gemm_scaled", "grouped_gemm_scaled"),
    ],
)
def test_products_of_formats_on_hopper_run_in_gluon_where_it_is_written_for_them(config, op, file):
    impl, reasons = choose(op, Call(CUDA, (9, 0), False, False, config))
    assert impl.where == f"dist_moe.kernels_triton.{file}:{op}"
    assert any("windows of whole 128" in reason for reason in reasons) == (config is NARROW)
    assert choose(op, Call(CUDA, (9, 0), False, True, config), "triton")[0].backend == "triton"


# On Blackwell

ON_BLACKWELL = [
    (SCALED, "grouped_gemm_scaled"),
    (SCALED, "grouped_gemm_scaled_dgrad"),
    (SCALED, "grouped_gemm_scaled_wgrad"),
    (SERVING, "grouped_gemm_scaled"),
]
TILE = BlockScaledKernelConfig(1, 128, 128, 128, 4, 1, 2, 1, 32, False, False, 1, num_warps=6, static_scheduler=True)


@pytest.fixture
def tried_dsl(monkeypatch):
    """The CuTe DSL of this machine, if any, counts as the one that was tried."""
    installed = metadata.version
    monkeypatch.setattr(
        registry.metadata, "version", lambda name: CUTE_DSL if name == "nvidia-cutlass-dsl" else installed(name)
    )


@pytest.mark.parametrize("config, op", ON_BLACKWELL)
def test_products_of_formats_on_blackwell_run_in_the_cute_dsl(config, op, tried_dsl):
    blackwell = Call(CUDA, (10, 0), False, False, config)
    impl, reasons = choose(op, blackwell)
    assert impl.where == f"dist_moe.kernels_cute.grouped_gemm:{op}" and all("9.x" in reason for reason in reasons)
    assert "not executed on hardware" in impl.note
    assert choose(op, replace(blackwell, by_name=True), "triton")[0].backend == "triton"


@pytest.mark.parametrize(
    "config, reason",
    [
        (NARROW, "windows of whole 128"),
        (None, "written for mxfp8_e4m3 and nvfp4"),
        (CONFIG, "written for mxfp8_e4m3 and nvfp4"),
        (replace(SCALED, block_scaled=BlockScaledConfig(kernel_config=TILE)), None),
        (replace(SCALED, block_scaled=BlockScaledConfig(kernel_config=replace(TILE, num_ctas=2))), "num_ctas"),
    ],
    ids=["narrow", "no Context", "bf16", "a tile that is built", "a tile that is not"],
)
def test_what_the_cute_dsl_does_not_take_runs_in_triton_and_says_why(config, reason, tried_dsl):
    impl, reasons = choose("grouped_gemm_scaled", Call(CUDA, (10, 0), False, False, config))
    assert impl.backend == ("triton" if reason else "cute")
    assert reason is None or any(text.startswith("cute: ") and reason in text for text in reasons)


@pytest.mark.cute
def test_a_kernel_configuration_that_has_no_effect_is_said(tried_dsl, caplog):
    asked = replace(SCALED, block_scaled=BlockScaledConfig(kernel_config=replace(TILE, num_ctas=2)))
    text = explain(asked, 2, device="sm_100")
    assert "kernel_config has no effect on grouped_gemm_scaled, grouped_gemm_scaled_dgrad, grouped_gemm" in text
    assert "in triton; cute: kernel_config: num_ctas must be 1" in text
    taken = replace(SCALED, block_scaled=BlockScaledConfig(kernel_config=TILE))
    assert "has no effect" not in explain(taken, 2, device="sm_100")
    with create_context(group=World.virtual(2, "cpu"), config=taken, backend="reference"):
        assert "kernel_config has no effect on" in caplog.text and "reference was named" in caplog.text
    caplog.clear()
    with create_context(group=World.virtual(2, "cpu"), config=SCALED, backend="reference"):
        assert not caplog.text


@pytest.mark.parametrize("device", ["sm_101", "sm_110a", "sm_120"])
def test_gpus_that_nothing_is_compiled_for_get_triton(tried_dsl, device):
    impl, reasons = choose("grouped_gemm_scaled", call_of(device, None, SCALED))
    assert impl.backend == "triton"
    assert "cute: written for the tensor cores of compute capability 10.0 and 10.3" in reasons


def test_a_kernel_configuration_reaches_the_product_that_takes_it(tried_dsl):
    asked = replace(SCALED, block_scaled=BlockScaledConfig(kernel_config=TILE))
    for config, capability, wanted in ((asked, (10, 0), TILE), (SCALED, (10, 0), None), (asked, (9, 0), None)):
        impl, _ = choose("grouped_gemm_scaled", Call(CUDA, capability, False, False, config))
        found = function(impl, config)
        assert getattr(found, "keywords", {}) == ({} if wanted is None else {"kernel_config": wanted})
    for op in (op for config, op in ON_BLACKWELL if config is SCALED):
        impl = next(impl for impl in IMPLS if (impl.op, impl.backend) == (op, "cute"))
        assert "kernel_config" in inspect.signature(function(impl)).parameters


@pytest.mark.parametrize("found", [None, "4.7.0"])
def test_another_cute_dsl_is_a_reason(monkeypatch, found):
    def version(name):
        if name == "nvidia-cutlass-dsl" and found is None:
            raise metadata.PackageNotFoundError
        return found if name == "nvidia-cutlass-dsl" else installed(name)

    installed = metadata.version
    monkeypatch.setattr(registry.metadata, "version", version)
    impl, reasons = choose("grouped_gemm_scaled", Call(CUDA, (10, 0), False, False, SCALED))
    wanted = f"tried on {CUTE_DSL}, found {found}" if found else "pip install 'dist-moe-triton[cute]'"
    assert impl.backend == "triton" and any(wanted in reason for reason in reasons)


def test_explain_takes_a_gpu_that_is_not_here(monkeypatch, tried_dsl):
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was started"))
    text = explain(SCALED, 2, device="sm_100")
    assert "ops on sm_100:\n  triton\n    publish" in text
    assert "cute (compiled and emulated, not executed on hardware); not gluon" in text
    assert "interpreted" not in text  # which is a matter of this process
    assert "  gluon\n" in explain(SCALED, 2, device="sm_90")
    assert "mapping granularity" in explain(replace(CONFIG, vmm=VmmConfig()), 2, device="sm_100")
    with pytest.raises(RuntimeError, match=r"Hopper\) are not supported, found 8.9"):
        explain(SCALED, 2, device="sm_89")


@pytest.mark.parametrize("inference", [False, True])
def test_what_a_device_does_with_operands(monkeypatch, inference):
    """As its chosen product takes them, on a GPU that need not be here; a Context plans what it allocates."""
    op = "grouped_gemm_scaled" if inference else "grouped_gemm_scaled_wgrad"
    config = replace(SCALED, inference=inference)
    assert plan_memory(config, 2, device="sm_90").expanded
    found = {}
    for expanded in (False, True):
        row = registry.Impl(op, "gluon", "nowhere:at_all", registry.needs_hopper, expanded=expanded)
        monkeypatch.setattr(registry, "IMPLS", (row, *IMPLS))
        found[expanded] = plan_memory(config, 2, device="sm_90")
        assert plan_memory(config, 2, device="sm_90", backend="triton") == plan_memory(config, 2)
        assert plan_memory(config, 2, device="sm_100") == plan_memory(config, 2, device="cpu") == plan_memory(config, 2)
        assert not plan_memory(replace(config, block_scaled=None), 2, device="sm_90").expanded
        assert ("expanded to 16 bits" in explain(config, 2, device="sm_90")) == expanded
    assert found[False] == plan_memory(config, 2) and found[True].expanded
    assert found[True].device_scratch_bytes > found[False].device_scratch_bytes


@pytest.mark.parametrize("impl", IMPLS, ids=lambda impl: f"{impl.op}-{impl.backend}")
def test_every_row_names_a_function_that_takes_the_arguments_of_the_oracle(impl):
    if impl.backend == "cute" and (problem := registry._cute_problem()):
        pytest.skip(problem)
    module, function = impl.where.split(":")
    found = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    wanted = inspect.signature(getattr(reference, impl.op)).parameters
    assert list(found)[: len(wanted)] == list(wanted)
    assert all(p.default is not p.empty for name, p in found.items() if name not in wanted)


def test_the_kernels_are_preferred_where_they_run():
    assert choose("route", call(interpreting=True))[0].backend == "triton"
    assert choose("route", call(CUDA, (9, 0)))[0].backend == "triton"
    impl, reasons = choose("route", call())
    assert impl.backend == "reference" and "TRITON_INTERPRET" in reasons[0]


def test_the_reference_runs_on_a_gpu_only_when_named():
    with pytest.raises(RuntimeError, match=r"(?s)triton: .*7.5.*reference: slow on a GPU"):
        choose("route", call(CUDA, (7, 5)))
    assert choose("route", call(CUDA, (7, 5), by_name=True), "reference")[0].backend == "reference"


def test_a_named_backend_that_refuses_raises_with_its_reason():
    with pytest.raises(RuntimeError, match=r"'triton'.*\n.*interpreted"):
        choose("route", call(by_name=True), "triton")


def test_no_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr("dist_moe.registry._triton_problem", lambda: "triton is not installed")
    assert needs_triton(call(interpreting=True)) == "triton is not installed"


def test_an_old_triton_is_a_reason_that_names_found_and_needed(monkeypatch):
    monkeypatch.setattr(registry.metadata, "version", lambda name: "3.5.1")
    registry._triton_problem.cache_clear()
    assert "3.5.1" in needs_triton(call(interpreting=True)) and "3.6" in needs_triton(call(interpreting=True))
    monkeypatch.undo()
    registry._triton_problem.cache_clear()


def test_an_old_torch_is_refused_by_found_and_needed(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(RuntimeError, match=r"torch 2\.9\.1\+cpu is too old, 2\.11 or newer"):
        resolve(CPU, "reference")


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"unknown op 'rout'.*route"):
        choose("rout", call())
    with pytest.raises(ValueError, match=r"unknown backend 'tritn'.*triton, reference"):
        resolve(CPU, "tritn")


def test_resolve_gives_every_op_and_says_which():
    ops = resolve(CPU, "reference")
    assert all(getattr(ops, op) is getattr(reference, op) for op in OPS)
    assert set(ops.backends.values()) == {"reference"} and set(ops.backends) == set(OPS)


def test_devices():
    assert default_device("cpu") == CPU
    with pytest.raises(ValueError, match="meta"):
        default_device("meta")
    if not torch.cuda.is_available():
        assert default_device() == CPU
        with pytest.raises(RuntimeError, match="device='cpu'"):
            default_device("cuda")


def test_explain_says_what_runs_and_what_is_allocated():
    text = explain(CONFIG, 2, device="cpu", backend="reference")
    for words in ("activation slots", "device scratch", "symmetric regions", "tokens", "per route", "reference"):
        assert words in text
    assert all(op in text for op in OPS)
    assert "de-duplicated" in explain(Config(8, 64, 96, 8, 8, 1), 2, device="cpu")


@pytest.mark.interpreter
def test_explain_says_that_kernels_are_interpreted():
    assert "triton (interpreted)" in explain(CONFIG, 2, device="cpu", backend="triton")


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({"num_local_input_tokens": 128}, 2, "wait, route and plan in one; wait and reduce in one"),
        ({"num_local_input_tokens": 128, "hidden_dim": 8192}, 2, "plan in one; wait and reduce in one"),
        ({"num_local_input_tokens": 129, "hidden_dim": 8192}, 2, "plan in one; wait and reduce by themselves"),
        ({"num_local_input_tokens": 2, "inference": True}, 2, "one; the experts in one; wait and reduce in one"),
        ({"num_local_input_tokens": 8192, "hidden_dim": 32}, 1, "plan by themselves; wait and reduce in one"),
        ({"num_local_input_tokens": 8192}, 2, "plan by themselves; wait and reduce by themselves"),
    ],
)
def test_the_launches_of_a_forward_are_told(changes, ranks, words):
    text = explain(replace(CONFIG, **changes), ranks, device="cpu", backend="reference")
    assert "launches of a forward: each signal with the op before it" in text and words in text

"""The path in block-scaled formats over virtual ranks: against the layer whose operands the oracles quantised, bit for
bit between its own variants, and against BF16."""

from dataclasses import replace

import pytest
import torch

from dist_moe import (
    BlockScaledConfig,
    RoutingOverflowError,
    create_context,
    registry,
    routed_experts,
    testing,
)
from dist_moe.formats import by_name
from dist_moe.path_oracle import FORWARD_ONLY, dense_scaled, forward_only, prepared
from dist_moe.planner import dedup, output_columns, plan_memory, stage_columns
from dist_moe.virtual import RankResults

from .path_cases import (
    CASES,
    Case,
    assert_results_close,
    assert_results_equal,
    dense,
    expand_columns,
    padded_rows_of,
    slots_of,
)
from .rank_calls import on_ranks, run_rank
from .test_path import BACKENDS, device_of, run

MXFP8, NVFP4 = BlockScaledConfig(), BlockScaledConfig("nvfp4")
NARROW = Case("two ranks with wide outputs", T=5, D=160, F=32, K=2, E=4)  # D > 2 F, of inference
STAGED = Case("two ranks de-duplicated in two passes", T=6, D=160, F=64, K=3, E=4)
NOTES = (
    "one rank",
    "one token",
    "two ranks per route",
    "two ranks recomputed",
    "two ranks de-duplicated",
    "three ranks six experts K three",
    "four ranks de-duplicated K eight",
    "five ranks recomputed two empty",
    "bf16 scores int32 ids",
    "clamped activation",
    "all to one expert",
    "some slots without expert",
    "an expert named twice",
    "rows past a tile border",
)
SCALED_CASES = (*(case for case in CASES if case.note in NOTES), NARROW, STAGED)
EXPANDED_NOTES = (NARROW.note, STAGED.note, "three ranks six experts K three", "some slots without expert")
INTERPRETED = ("one token", STAGED.note)  # of the kernels, on a machine without a GPU

on_both = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.gpu)])
each_case = pytest.mark.parametrize(
    "case, backend",
    [
        pytest.param(
            case,
            backend,
            id=f"{case}-{backend}",
            marks=pytest.mark.gpu if backend == "triton" and case.note not in INTERPRETED else (),
        )
        for case in SCALED_CASES
        for backend in BACKENDS
    ],
)


def config_of(case: Case, block_scaled=MXFP8, **changes):
    return case.config(block_scaled=block_scaled, **changes)


def assert_close_to_scaled(results: list[RankResults], expected: list[RankResults], backend: str) -> None:
    """By the bars of the kernels or of the reference; see testing.TOLERANCES."""
    assert_results_close(results, expected, "path" if backend == "reference" else "scaled_path")


def served(case: Case, inputs, block_scaled, backend: str) -> list[RankResults]:
    """Inference, of prepared weights."""
    config = config_of(case, block_scaled, **FORWARD_ONLY)
    return run(config, prepared(inputs, config, inference=True, device=device_of(backend)), backend)


@pytest.fixture(params=[False, True], ids=["codes", "expanded"])
def expanded(request, monkeypatch) -> bool:
    """Whether Contexts for training expand columns, whatever the device."""
    expand_columns(monkeypatch, request.param)
    return request.param


def test_the_staged_case_goes_in_two_passes():
    for expanded in (False, True):
        assert dedup(config_of(STAGED), STAGED.W) and stage_columns(config_of(STAGED), expanded=expanded) < STAGED.D


@each_case
def test_training_against_the_layer_with_quantised_operands(case, backend, expanded):
    inputs = case.inputs()
    assert_close_to_scaled(run(config_of(case), inputs, backend), dense_scaled(case, inputs), backend)


GROUPS = (0, 1, 7, 8, 9, 127, 128, 129)


@on_both
def test_groups_of_every_size(backend, expanded):
    """Rows of the experts around blocks, atoms and tiles."""
    case = Case("groups", W=1, T=sum(GROUPS), D=64, F=32, K=1, E=len(GROUPS))
    ids = torch.repeat_interleave(torch.arange(case.E), torch.tensor(GROUPS))
    order = torch.randperm(case.T, generator=torch.Generator().manual_seed(0))
    (one,) = case.inputs()
    inputs = [replace(one, ids_TK=ids[order, None])]
    assert_close_to_scaled(run(config_of(case), inputs, backend), dense_scaled(case, inputs), backend)


@pytest.mark.parametrize("block_scaled", [MXFP8, NVFP4], ids=lambda scaled: scaled.format)
@each_case
def test_inference_against_the_layer_with_quantised_operands(case, block_scaled, backend):
    inputs = case.inputs()
    results = served(case, inputs, block_scaled, backend)
    expected = dense_scaled(case, inputs, by_name(block_scaled.format), training=False)
    assert_close_to_scaled(results, expected, backend)


@pytest.mark.parametrize("block_scaled", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("case", [case for case in SCALED_CASES if case.note in EXPANDED_NOTES], ids=str)
def test_inference_with_expanded_rows_has_the_same_bits(case, block_scaled, monkeypatch):
    """Exact operands: the oracle's product, in FP64, does not see the difference."""
    config, inputs = config_of(case, block_scaled, **FORWARD_ONLY), case.inputs()
    ready = prepared(inputs, config, inference=True)
    expected = run(config, ready, "reference")
    impls = [replace(impl, expanded=impl.op == "grouped_gemm_scaled") for impl in registry.IMPLS]
    monkeypatch.setattr(registry, "IMPLS", impls)
    assert plan_memory(config, case.W, device="cpu", backend="reference").expanded
    assert_results_equal(run(config, ready, "reference"), expected)


@pytest.mark.parametrize("block_scaled", [MXFP8, NVFP4], ids=lambda scaled: scaled.format)
@on_both
def test_wide_outputs_in_passes_have_the_bits_of_one_pass(backend, block_scaled, monkeypatch):
    """A large Context has no scratch for all columns of h3: W2 and the push take three passes over 64 of the 160."""
    config = config_of(NARROW, block_scaled, **FORWARD_ONLY)
    inputs = prepared(NARROW.inputs(), config, inference=True, device=device_of(backend))
    in_one = run(config, inputs, backend)
    assert output_columns(config, plan_memory(config, NARROW.W).total_scratch_capacity_rows) == NARROW.D
    monkeypatch.setattr("dist_moe.planner.ONE_PASS_BYTES", 0)
    assert output_columns(config, 128) == 64
    assert_results_equal(run(config, inputs, backend), in_one)


@on_both
def test_a_broken_token_without_weight_reaches_nobody(backend, expanded):
    """x of NaN and Inf behind a score of 0: quantised as zeros, in training and on the wire."""
    case = Case("broken", routing="balanced", D=64, F=32)
    inputs = case.inputs()
    for i, value in enumerate((float("nan"), float("inf"))):
        inputs[i].x_TD[3, 5] = value
        inputs[i].scores_TK[3] = 0.0
    trained = run(config_of(case), inputs, backend)
    assert all(torch.isfinite(value).all() for rank in trained for value in vars(rank).values())
    for how in (MXFP8, NVFP4):
        results = served(case, inputs, how, backend)
        assert all(torch.isfinite(rank.out_TD).all() and not rank.out_TD[3].any() for rank in results)


def test_more_rows_than_fit_are_counted_with_their_padding():
    case = Case("overflow", W=2, T=256, D=32, F=32, K=1, E=4, routing="one_rank")
    config = config_of(case, device_scratch_capacity_factor=1.0)
    with pytest.raises(RoutingOverflowError, match="rank 0") as error:
        run(config, case.inputs(), "reference")
    needed = error.value.needed_rows
    assert needed == padded_rows_of(case)[0] > error.value.available_rows == 384
    fits, less = (replace(config, device_scratch_capacity_factor=error.value.needed_factor - x) for x in (0, 0.01))
    assert plan_memory(fits, case.W).device_scratch_capacity_rows >= needed
    assert plan_memory(less, case.W).device_scratch_capacity_rows < needed


# Equal bits


@pytest.mark.parametrize("case", [Case("per route", K=2, E=4), STAGED], ids=str)
@on_both
def test_saved_and_recomputed_and_prepared_and_no_grad_are_equal(case, backend, expanded):
    case = replace(case, routing="zipf(1.0)")
    inputs, device = case.inputs(), device_of(backend)
    first, *others = [
        run(config_of(case, **slot), inputs, backend) for slot in slots_of(case, MXFP8, expanded=expanded).values()
    ]
    again = run(config_of(case), inputs, backend)
    ready = run(config_of(case), prepared(inputs, config_of(case), device=device), backend)
    for other in (*others, again, ready):
        assert_results_equal(other, first)
    assert all(value.any() for rank in first for value in vars(rank).values())
    outs = run(config_of(case), forward_only(inputs), backend)
    for rank, (out, want) in enumerate(zip(outs, first, strict=True)):
        assert torch.equal(out.out_TD, want.out_TD), rank


@pytest.mark.parametrize("wgrad", [torch.float32, None], ids=str)
@pytest.mark.parametrize("case", [Case("per route", K=2, E=4), NARROW, STAGED], ids=str)
def test_expanded_columns_change_no_bits(case, wgrad, monkeypatch):
    """They hold exactly what codes and scales stand for; all else is computed as before."""
    case = replace(case, routing="zipf(1.0)", wgrad=wgrad)
    results = {}
    for expanded in (False, True):
        expand_columns(monkeypatch, expanded)
        assert plan_memory(config_of(case), case.W, device="cpu").expanded == expanded
        results[expanded] = [
            run(config_of(case, **slot), case.inputs(), "reference")
            for slot in slots_of(case, MXFP8, expanded=expanded).values()
        ]
    for found, want in zip(results[True], results[False], strict=True):
        assert_results_equal(found, want)


@on_both
def test_dynamic_and_prepared_inference_are_equal(backend):
    config, inputs = config_of(STAGED, **FORWARD_ONLY), STAGED.inputs()
    dynamic = run(config, forward_only(inputs), backend)
    ready = run(config, prepared(inputs, config, inference=True, device=device_of(backend)), backend)
    assert_results_equal(ready, dynamic)
    assert all(rank.out_TD.any() for rank in ready)


def test_mega_is_a_hint():
    """The bits of staged, in training and in inference."""
    inputs, backend = STAGED.inputs(), "reference"
    hinted = replace(MXFP8, pipeline="mega")
    assert_results_equal(run(config_of(STAGED, hinted), inputs, backend), run(config_of(STAGED), inputs, backend))
    hinted, config = (
        config_of(STAGED, replace(NVFP4, pipeline="mega"), **FORWARD_ONLY),
        config_of(STAGED, NVFP4, **FORWARD_ONLY),
    )
    ready = prepared(inputs, config, inference=True)
    assert_results_equal(run(hinted, ready, backend), run(config, ready, backend))


@on_both
def test_fast_math_is_near(backend):
    """The approximate sigmoid alone: within the bars of the kernels."""
    inputs = STAGED.inputs()
    results = run(config_of(STAGED, replace(MXFP8, fast_math=True)), inputs, backend)
    assert_close_to_scaled(results, dense_scaled(STAGED, inputs), backend)


# What must not be lost in a format


@pytest.mark.parametrize("block_scaled", [MXFP8, NVFP4], ids=lambda scaled: scaled.format)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_scores_are_not_rounded_to_bf16(backend, block_scaled):
    """1.0038 is 1 in BF16; under a score of 1 the output is the expert's row, which gives the other in FP32."""
    case = Case("scores", T=4, D=32, F=32, K=1, E=2)
    score_TK = torch.full((case.T, case.K), 1.0038)
    rows, weighted = (
        served(case, [replace(rank, scores_TK=scores_TK) for rank in case.inputs()], block_scaled, backend)
        for scores_TK in (torch.ones_like(score_TK), score_TK)
    )
    for row, found in zip(rows, weighted, strict=True):
        assert torch.equal(found.out_TD, (score_TK * row.out_TD.float()).bfloat16())
        assert (found.out_TD != row.out_TD).float().mean() > 0.5


@pytest.mark.parametrize("block_scaled", [MXFP8, NVFP4], ids=lambda scaled: scaled.format)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_and_up_are_not_interchangeable(backend, block_scaled):
    """Swapped in the call, they have to be swapped in the answer too."""
    case = Case("swapped halves", T=4, D=32, F=32)
    inputs, answer = case.inputs(), {"format": by_name(block_scaled.format), "training": False}
    swapped = [replace(rank, w13_L2FD=rank.w13_L2FD.roll(case.F, dims=1)) for rank in inputs]
    results = served(case, swapped, block_scaled, backend)
    assert_close_to_scaled(results, dense_scaled(case, swapped, **answer), backend)
    with pytest.raises(AssertionError, match="worst"):
        assert_close_to_scaled(results, dense_scaled(case, inputs, **answer), backend)


# Against bf16


def whole(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Relative error and cosine over the whole tensor."""
    a, b = a.double().flatten(), b.double().flatten()
    return float((a - b).norm() / b.norm()), float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("W, activation", [(1, "swiglu"), (2, "swiglu_clamped"), (4, "swiglu")])
def test_training_against_bf16(W, activation):
    """The bounds over the whole tensor are those of dist-moe 0.1.0, here on data of unit scale; rows of outputs and of
    their gradients were at least 21 dB, those of W13's nearly cancel here and there."""
    case = Case("against bf16", W=W, T=64, D=256, F=256, K=2, E=4, activation=activation, limit=7.0)
    inputs = case.inputs()
    results, expected = run(config_of(case), inputs, "reference"), dense(case, inputs)
    for name in RankResults.__dataclass_fields__:
        out, ref = (torch.cat([getattr(rank, name) for rank in side]) for side in (results, expected))
        error, cosine = whole(out, ref)
        assert error < 0.075 and cosine > 0.9975, (name, error, cosine)
        if name in ("out_TD", "grad_x_TD", "grad_w2_LDF"):
            assert testing.rows_sqnr_db(out, ref).min() > 19.5, name


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize(
    "block_scaled, error_bound, cosine_bound, rows_db",
    [(MXFP8, 0.075, 0.9975, 20.0), (NVFP4, 0.29, 0.955, 9.5)],
    ids=["mxfp8", "nvfp4"],
)
def test_inference_against_bf16(W, block_scaled, error_bound, cosine_bound, rows_db):
    case = Case("against bf16", W=W, T=32, D=256, F=256, K=2, E=4)
    inputs = case.inputs()
    results = served(case, inputs, block_scaled, "reference")
    out, ref = (torch.cat([rank.out_TD for rank in side]) for side in (results, dense(case, inputs)))
    error, cosine = whole(out, ref)
    assert error < error_bound and cosine > cosine_bound, (error, cosine)
    assert testing.rows_sqnr_db(out, ref).min() > rows_db


# Over processes


def _train(rank, group, case):
    with create_context(group=group, config=config_of(case), device="cpu", backend="reference") as context:
        results = run_rank(case.inputs()[rank], context)
    return results, run(config_of(case), case.inputs(), "reference") if rank == 0 else None


def _serve(rank, group, case, block_scaled):
    config = config_of(case, block_scaled, **FORWARD_ONLY)
    inputs = prepared(case.inputs(), config, inference=True)
    own = inputs[rank]
    with create_context(group=group, config=config, device="cpu", backend="reference") as context, torch.no_grad():
        out_TD = routed_experts(own.x_TD, own.ids_TK, own.scores_TK, own.w13_L2FD, own.w2_LDF, context)
        context.check()
    return RankResults(out_TD), run(config, inputs, "reference") if rank == 0 else None


@pytest.mark.parametrize("case", [Case("per route", W=3, T=4, D=32, F=32, E=6), STAGED], ids=str)
def test_processes_give_the_bits_of_virtual_ranks(case):
    for job in ((_train, case), (_serve, case, MXFP8), (_serve, case, NVFP4)):
        results, expected = zip(*on_ranks(case.W, *job), strict=True)
        assert_results_equal(results, expected[0])
        assert all(rank.out_TD.any() for rank in results)

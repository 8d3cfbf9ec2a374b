"""The path in block-scaled formats over virtual ranks: against the layer whose operands the oracles quantised, bit for
bit between its own variants, and against BF16."""

from dataclasses import replace

import pytest
import torch

from dist_moe import BlockScaledConfig, prepare_block_scaled_weight, testing
from dist_moe.formats import by_name
from dist_moe.virtual import RankInputs, RankResults

from .path_cases import CASES, Case, assert_results_equal, slots_of
from .scaled_cases import dense_scaled
from .test_path import BACKENDS, device_of, run

MXFP8, NVFP4 = BlockScaledConfig(), BlockScaledConfig("nvfp4")
STAGED = Case("two ranks de-duplicated in two passes", D=256, F=64, K=4, E=8)
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
SCALED_CASES = (*(case for case in CASES if case.note in NOTES), STAGED)
INFERENCE = {"inference": True, "activation_slot_capacity_factor": None}


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


def config_of(case: Case, block_scaled=MXFP8, **changes):
    return case.config(block_scaled=block_scaled, **changes)


def prepared(inputs: list[RankInputs], config, *, inference: bool = False, device="cpu") -> list[RankInputs]:
    """The same with prepared weights, without a backward for inference."""
    found = []
    for rank in inputs:
        weights = {
            name: prepare_block_scaled_weight(getattr(rank, name).to(device), config, inference=inference)
            for name in ("w13_L2FD", "w2_LDF")
        }
        found.append(replace(rank, **weights, **({"grad_out_TD": None} if inference else {})))
    return found


def forward_only(inputs: list[RankInputs]) -> list[RankInputs]:
    return [replace(rank, grad_out_TD=None) for rank in inputs]


def assert_close_to_scaled(results: list[RankResults], expected: list[RankResults]) -> None:
    """A value at a rounding border may go the other way in FP32 of another order, and moves its row by a step of it."""
    for name in RankResults.__dataclass_fields__:
        if getattr(expected[0], name) is None:
            assert all(getattr(rank, name) is None for rank in results)
            continue
        out, ref = (torch.cat([getattr(rank, name) for rank in side]) for side in (results, expected))
        if name == "grad_scores_TK":
            out, ref = out.reshape(1, -1), ref.reshape(1, -1)
        testing.assert_close(out, ref, "scaled_path" if name == "out_TD" else "scaled_path_grads")


@pytest.mark.parametrize("case", SCALED_CASES, ids=str)
def test_training_against_the_layer_with_quantised_operands(case, backend):
    inputs = case.inputs()
    assert_close_to_scaled(run(config_of(case), inputs, backend), dense_scaled(case, inputs))


@pytest.mark.parametrize("block_scaled", [MXFP8, NVFP4], ids=lambda scaled: scaled.format)
@pytest.mark.parametrize("case", SCALED_CASES, ids=str)
def test_inference_against_the_layer_with_quantised_operands(case, block_scaled, backend):
    config = config_of(case, block_scaled, **INFERENCE)
    inputs = case.inputs()
    results = run(config, prepared(inputs, config, inference=True, device=device_of(backend)), backend)
    assert_close_to_scaled(results, dense_scaled(case, inputs, by_name(block_scaled.format), training=False))


# Equal bits


@pytest.mark.parametrize("case", [Case("per route", K=2, E=4), STAGED], ids=str)
def test_saved_and_recomputed_and_prepared_and_no_grad_are_equal(case, backend):
    case = replace(case, routing="zipf(1.0)")
    inputs, device = case.inputs(), device_of(backend)
    first, *others = [run(config_of(case, **slot), inputs, backend) for slot in slots_of(case, MXFP8).values()]
    again = run(config_of(case), inputs, backend)
    ready = run(config_of(case), prepared(inputs, config_of(case), device=device), backend)
    for other in (*others, again, ready):
        assert_results_equal(other, first)
    outs = run(config_of(case), forward_only(inputs), backend)
    for rank, (out, want) in enumerate(zip(outs, first, strict=True)):
        assert torch.equal(out.out_TD, want.out_TD), rank


def test_dynamic_and_prepared_inference_are_equal(backend):
    config, inputs = config_of(STAGED, **INFERENCE), STAGED.inputs()
    dynamic = run(config, forward_only(inputs), backend)
    ready = run(config, prepared(inputs, config, inference=True, device=device_of(backend)), backend)
    assert_results_equal(ready, dynamic)


# Against bf16


def whole(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Relative error and cosine over the whole tensor."""
    a, b = a.double().flatten(), b.double().flatten()
    return float((a - b).norm() / b.norm()), float(a @ b / (a.norm() * b.norm()))

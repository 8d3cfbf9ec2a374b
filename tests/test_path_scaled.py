"""The path in block-scaled formats over virtual ranks: against the layer whose operands the oracles quantised, bit for
bit between its own variants, and against BF16."""

from dataclasses import replace

import pytest
import torch

from dist_moe import BlockScaledConfig, create_context, prepare_block_scaled_weight, testing
from dist_moe.formats import MXFP8_E4M3, by_name
from dist_moe.planner import dedup, stage_columns
from dist_moe.symm import World
from dist_moe.virtual import RankInputs, RankResults, routed_experts

from .path_cases import CASES, Case, assert_results_equal, dense, slots_of
from .scaled_cases import dense_scaled
from .test_path import BACKENDS, device_of, run, to

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

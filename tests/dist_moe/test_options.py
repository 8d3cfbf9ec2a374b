from dataclasses import fields

import pytest
import torch

from dist_moe.options import (
    ExecutionOptions,
    RMSNormPostprocess,
    supports_fused_post_expert_rmsnorm,
)

NORM = RMSNormPostprocess(1e-6, torch.float32, torch.bfloat16)
OBSERVED = RMSNormPostprocess(1e-6, torch.float32, torch.bfloat16, observe_expert_output_fn=print)
GRAD_OBSERVED = RMSNormPostprocess(1e-6, torch.float32, torch.bfloat16, observe_expert_output_grad_fn=print)
OWNERS = (torch.zeros(2), torch.zeros(2))


class FalsyCallable:
    """A callable whose truth value is False, like an empty nn.Sequential."""

    def __call__(self, *args):
        return args[0]

    def __len__(self):
        return 0


def test_defaults():
    assert {f.name: f.default for f in fields(ExecutionOptions)} == {
        "inplace_wgrad_accum": False,
        "wgrad_parameter_owners": None,
        "weights_preprocess_fn": None,
        "experts_output_postprocess": None,
        "wgrad_postprocess_fn": None,
        "swiglu_clip_stats_out_3": None,
        "swiglu_clip_limit": 7.0,
        "wgrad_destination_fn": None,
    }
    assert [f.name for f in fields(RMSNormPostprocess)] == [
        "eps",
        "norm_output_dtype",
        "output_dtype",
        "require_bitwise",
        "weight",
        "gain_center",
        "use_kahan",
        "observe_expert_output_fn",
        "observe_expert_output_grad_fn",
        "recompute_rstd",
    ]
    assert (NORM.require_bitwise, NORM.weight, NORM.gain_center, NORM.use_kahan, NORM.recompute_rstd) == (
        True,
        None,
        0.0,
        False,
        False,
    )


def test_owners_are_neither_shown_nor_compared():
    options = ExecutionOptions(inplace_wgrad_accum=True, wgrad_parameter_owners=OWNERS)
    assert options == ExecutionOptions(inplace_wgrad_accum=True)
    assert "owners" not in repr(options)


def test_rmsnorm_constructor_checks_nothing():
    RMSNormPostprocess(-1.0, None, None)


@pytest.mark.parametrize(
    "values, error, words",
    [
        ({"inplace_wgrad_accum": 1}, TypeError, "inplace_wgrad_accum must be a bool"),
        ({"wgrad_parameter_owners": OWNERS}, ValueError, "requires inplace_wgrad_accum=True"),
        ({"wgrad_parameter_owners": 3}, ValueError, "requires inplace_wgrad_accum=True"),  # before its type
        ({"inplace_wgrad_accum": True, "wgrad_parameter_owners": list(OWNERS)}, TypeError, "tuple of two tensors"),
        ({"inplace_wgrad_accum": True, "wgrad_parameter_owners": OWNERS[:1]}, TypeError, "tuple of two tensors"),
        ({"inplace_wgrad_accum": True, "wgrad_parameter_owners": (OWNERS[0], None)}, TypeError, "NoneType"),
        ({"weights_preprocess_fn": 3}, TypeError, "weights_preprocess_fn must be callable"),
        ({"experts_output_postprocess": "norm"}, ValueError, "experts_output_postprocess"),
        ({"wgrad_postprocess_fn": 3}, TypeError, "wgrad_postprocess_fn must be callable"),
        ({"inplace_wgrad_accum": True, "wgrad_postprocess_fn": print}, ValueError, "wgrad_postprocess_fn"),
        ({"inplace_wgrad_accum": True, "wgrad_postprocess_fn": FalsyCallable()}, ValueError, "wgrad_postprocess_fn"),
        ({"swiglu_clip_stats_out_3": [0, 0, 0]}, TypeError, "must be a tensor"),
        ({"swiglu_clip_stats_out_3": torch.zeros(3, dtype=torch.bfloat16)}, TypeError, "must be float32"),
        ({"swiglu_clip_stats_out_3": torch.zeros(4)}, ValueError, r"shape \[3\]"),
        ({"swiglu_clip_stats_out_3": torch.zeros(1, 3)}, ValueError, r"shape \[3\]"),
        ({"swiglu_clip_stats_out_3": torch.zeros(6)[::2]}, ValueError, "contiguous"),
        ({"swiglu_clip_limit": True}, TypeError, "swiglu_clip_limit must be a real number"),
        ({"swiglu_clip_limit": "7"}, TypeError, "swiglu_clip_limit must be a real number"),
        ({"swiglu_clip_limit": float("inf")}, ValueError, "finite"),
        ({"swiglu_clip_limit": float("nan")}, ValueError, "finite"),
        ({"wgrad_destination_fn": 3}, TypeError, "wgrad_destination_fn must be callable"),
        ({"wgrad_destination_fn": print, "inplace_wgrad_accum": True}, ValueError, "cannot be combined"),
        ({"wgrad_destination_fn": print, "wgrad_postprocess_fn": print}, ValueError, "cannot be combined"),
        ({"wgrad_destination_fn": print, "wgrad_postprocess_fn": FalsyCallable()}, ValueError, "cannot be combined"),
        # two rules broken: the first is named
        ({"inplace_wgrad_accum": 1, "swiglu_clip_limit": True}, TypeError, "inplace_wgrad_accum"),
        ({"swiglu_clip_stats_out_3": torch.zeros(4), "swiglu_clip_limit": True}, ValueError, "clip_stats"),
        ({"swiglu_clip_limit": True, "wgrad_destination_fn": 3}, TypeError, "clip_limit"),
    ],
)
def test_refused(values, error, words):
    with pytest.raises(error, match=words):
        ExecutionOptions(**values)


def test_clip_stats_may_lie_on_the_cpu():
    stats = torch.zeros(3)
    assert ExecutionOptions(swiglu_clip_stats_out_3=stats, swiglu_clip_limit=0).swiglu_clip_stats_out_3 is stats


@pytest.mark.parametrize(
    "values, expected",
    [
        ({}, False),
        ({"inplace_wgrad_accum": True}, False),
        ({"swiglu_clip_stats_out_3": torch.zeros(3)}, False),
        ({"experts_output_postprocess": NORM}, False),
        ({"experts_output_postprocess": OBSERVED}, True),
        ({"experts_output_postprocess": GRAD_OBSERVED}, True),
        ({"experts_output_postprocess": torch.neg}, True),
        ({"experts_output_postprocess": FalsyCallable()}, True),
        ({"weights_preprocess_fn": torch.clone}, True),
        ({"wgrad_postprocess_fn": print}, True),
        ({"wgrad_destination_fn": print}, True),
    ],
)
def test_requires_eager(values, expected):
    assert ExecutionOptions(**values).requires_eager is expected


CONTRACT = {
    "input_dtype": torch.bfloat16,
    "score_dtype": torch.float32,
    "norm_output_dtype": torch.float32,
    "output_dtype": torch.bfloat16,
    "topk": 8,
    "dim": 7168,
}


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, True),
        ({"topk": 2}, True),
        ({"dim": 256}, True),
        ({"dim": 16384}, True),
        ({"topk": 4}, True),
        ({"topk": 1}, True),
        ({"topk": 0}, False),
        ({"dim": 32}, True),
        ({"dim": 2880}, True),
        ({"dim": 16416}, False),
        ({"dim": 336}, False),
        ({"score_dtype": torch.bfloat16}, True),
        ({"score_dtype": torch.float16}, False),
        ({"norm_output_dtype": torch.bfloat16}, True),
        ({"norm_output_dtype": torch.float16}, False),
        ({"output_dtype": torch.float32}, False),  # not the dtype of x
        ({"input_dtype": torch.float32, "output_dtype": torch.float32}, False),
        ({"topk": True}, False),
        ({"dim": None}, False),  # never raises
        ({"topk": torch.zeros(2)}, False),
        ({"input_dtype": "bfloat16"}, False),
    ],
)
def test_supports_fused_post_expert_rmsnorm(changes, expected):
    assert supports_fused_post_expert_rmsnorm(**CONTRACT | changes) is expected

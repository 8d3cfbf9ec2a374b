"""Which tests hold the behaviours that dist-moe 0.1.0 checks of itself and a program can see, by its own numbering.

Left out are numbers of what no caller can see. "Instead" says what our design replaces on purpose, and the tests then
hold ours. Bars are those of 0.1.0 or tighter, and equal bits where it has equal bits.
"""

import subprocess
import sys
from pathlib import Path

CONFIG, OPTIONS = "dist_moe/test_config.py", "dist_moe/test_options.py"
OPS, SCALED_OPS, WEIGHTS = "dist_moe/test_ops.py", "dist_moe/test_ops_scaled.py", "dist_moe/test_weights.py"
TRACES, CHECKPOINTS = "dist_moe/test_traces.py", "dist_moe/test_checkpoints.py"
PLANNER, EXAMPLE_PLANS = "dist_moe/test_planner.py", "dist_moe/test_planner_examples.py"
WGRAD, CALLBACKS, PATH_WGRAD = "dist_moe/test_wgrad.py", "dist_moe/test_wgrad_callbacks.py", "test_path_wgrad.py"
BARS, PATH, SCALED_PATH, RANKS = "test_published_bars.py", "test_path.py", "test_path_scaled.py", "test_path_ranks.py"
LIFE, FAULTS, GPU, GRAPHS = "test_lifecycle.py", "test_faults.py", "test_gpu.py", "test_gpu_graphs.py"
POST, NORM, CLIP = "test_postprocess.py", "test_norm.py", "test_clip_stats.py"
HOST, VMM, STATS = "test_host_scratch.py", "dist_moe/test_vmm.py", "test_memory_stats.py"

HELD_BY = {
    # Configurations and options
    1: (
        "Context and PreparedWeight are not constructed directly",
        f"{LIFE}::test_it_is_made_by_create_context_alone",
        f"{WEIGHTS}::test_no_direct_construction",
    ),
    2: ("VmmConfig.prefetch is a bool", f"{CONFIG}::test_vmm"),
    3: ("bytes and factor of a slot exclude each other", f"{CONFIG}::test_refused"),
    4: ("bytes of a slot that are none", f"{CONFIG}::test_refused"),
    5: ("factors of a slot that are none", f"{CONFIG}::test_refused"),
    6: ("inference has no slots to size", f"{CONFIG}::test_refused"),
    7: (
        "clip limits are finite; instead of a refusal, counts may lie on the CPU",
        f"{OPTIONS}::test_refused",
        f"{OPTIONS}::test_clip_stats_may_lie_on_the_cpu",
        f"{OPS}::test_refused_arguments",
    ),
    8: ("scratch factors are finite and positive", f"{CONFIG}::test_factors_must_be_finite_and_positive"),
    9: (
        "wgrad_dtype is None, bf16 or FP32",
        f"{CONFIG}::test_fields_are_in_positional_order_with_their_defaults",
        f"{CONFIG}::test_refused",
    ),
    10: ("alpha and limit of the clamp", f"{CONFIG}::test_clamp_parameters_must_be_finite_and_positive"),
    11: ("inference with no slot", f"{CONFIG}::test_legal"),
    12: ("unknown presets are refused", f"{CONFIG}::test_refused"),
    13: (
        "the two formats, and fast_math in one of them",
        f"{CONFIG}::test_block_scaled_format",
        f"{CONFIG}::test_block_scaled_config",
        f"{CONFIG}::test_block_scaled_config_refused",
    ),
    14: (
        "NVFP4 is for inference; instead of multiples of 256, of 32",
        f"{CONFIG}::test_refused",
        f"{CONFIG}::test_legal",
        f"{CONFIG}::test_dims_are_multiples_of_32",
    ),
    15: ("what wants eager execution", f"{OPTIONS}::test_requires_eager"),
    16: ("in place excludes the callbacks of gradients", f"{OPTIONS}::test_refused"),
    17: ("owners are for in place", f"{OPTIONS}::test_refused"),
    19: (
        "what a callable behind the experts may return",
        f"{POST}::test_refused_returns",
        f"{POST}::test_a_dtype_that_changes_between_the_runs_is_refused",
    ),
    20: (
        "the dtype of gradients in place",
        f"{WGRAD}::test_the_first_dtype_given_is_that_of_the_gradient",
        f"{WGRAD}::test_dtypes_that_contradict_are_refused",
        f"{WGRAD}::test_two_weights_with_different_wgrad_dtypes_are_refused_and_their_grads_stay_none",
    ),
    21: (
        "destinations are the caller's tensors, of the shape asked for",
        f"{CALLBACKS}::test_a_destination_is_overwritten_or_added_to_and_autograd_gets_nothing",
        f"{CALLBACKS}::test_a_bad_destination_is_refused_before_anything_is_written",
    ),
    22: (
        "named owners take the sum where their gradient lies",
        f"{WGRAD}::test_owners_behind_views_and_casts",
        f"{WGRAD}::test_owners_that_cannot_take_the_gradient_are_refused_at_the_call",
    ),
    # Ops
    26: (
        "instead of storages as arguments, forwards that mutate nothing, counts among what they return",
        f"{OPS}::test_ops_mutate_nothing_and_return_nothing_of_their_arguments",
        f"{SCALED_OPS}::test_ops_mutate_nothing_and_return_nothing_of_their_arguments",
    ),
    27: (
        "backwards alias nothing; accumulating ones name the two tensors they write",
        f"{OPS}::test_backward_op_passes_opcheck",
        f"{SCALED_OPS}::test_backward_op_passes_opcheck",
        f"{WGRAD}::test_accumulating_ops_pass_opcheck_and_return_nothing_of_their_arguments",
    ),
    28: ("weights are prepared without data", f"{WEIGHTS}::test_it_traces_without_data"),
    29: (
        "each storage of a prepared weight once, also when it is empty",
        f"{WEIGHTS}::test_storage_tensors_name_each_storage_once",
        f"{WEIGHTS}::test_storage_tensors_stand_when_storages_are_resized_to_zero",
    ),
    30: (
        "instead of storages to mistake, a handle that must be a live context's",
        f"{OPS}::test_an_op_of_a_closed_context_says_so",
    ),
    # The memory plan
    31: ("the plan of a small layer", f"{EXAMPLE_PLANS}::test_the_plan"),
    32: ("prefetch changes no plan", f"{PLANNER}::test_plans_are_equal_by_value"),
    33: ("the table of a large model", f"{EXAMPLE_PLANS}::test_guide_table", f"{EXAMPLE_PLANS}::test_the_plan"),
    34: (
        "slots by bytes and by factor, whatever the scratch",
        f"{PLANNER}::test_slot_factor",
        f"{PLANNER}::test_slot_does_not_depend_on_scratch_factors",
        f"{EXAMPLE_PLANS}::test_the_plan",
    ),
    35: ("a slot below its minimum", f"{PLANNER}::test_refused"),
    36: ("a total below the device's part", f"{PLANNER}::test_refused"),
    37: ("what explain says of training", f"{PLANNER}::test_explain_of_training"),
    38: ("and of inference", f"{PLANNER}::test_explain_of_inference"),
    39: ("rows of MXFP8 with their padding", f"{EXAMPLE_PLANS}::test_the_plan"),
    43: (
        "slots are chosen in their range",
        f"{LIFE}::test_select_activation_slot_says_what_it_takes",
        f"{RANKS}::test_two_slots_alive_at_once",
    ),
    # Contexts and their groups
    49: (
        "peers are emulated under any backend",
        f"{LIFE}::test_peers_are_emulated_under_any_backend_that_is_told_so",
    ),
    50: ("a fake pair has the plan of a pair", f"{LIFE}::test_a_fake_pair_has_the_plan_of_a_pair"),
    # Tokens
    51: ("instead of equal T, fewer tokens", f"{OPS}::test_fewer_tokens_than_the_maximum"),
    52: (
        "rows of score zero",
        f"{BARS}::test_rows_of_score_zero_are_zeros_and_the_others_a_call_of_fewer_tokens",
    ),
    53: (
        "instead of equal T, fewer tokens with prepared weights too",
        f"{BARS}::test_fewer_tokens_with_prepared_weights_have_the_bits_they_have_among_more",
    ),
    54: (
        "instead of a trap, another T on every rank",
        f"{RANKS}::test_every_call_and_rank_passes_another_number_of_tokens",
    ),
    55: (
        "an overflow says its words; instead of ending the process",
        f"{FAULTS}::test_an_overflow_says_what_a_log_is_searched_for",
        f"{FAULTS}::test_a_fault_of_the_call_is_the_same_on_all_ranks",
    ),
    # BF16
    56: ("weights with a gate axis", f"{BARS}::test_weights_with_a_gate_axis"),
    57: ("six of eight experts", f"{BARS}::test_one_layer[reference-six]", f"{BARS}::test_one_layer[triton-six]"),
    58: ("the clamp", f"{BARS}::test_one_layer[reference-clamped]", f"{BARS}::test_one_layer[triton-clamped]"),
    59: ("two layers in one slot", f"{BARS}::test_two_layers_in_one_slot"),
    60: ("flattened weights made anew", f"{CALLBACKS}::test_flattened_weights_that_are_cloned_get_flattened_gradients"),
    61: ("the second slot", f"{BARS}::test_a_layer_in_the_second_slot"),
    62: ("two ranks twice", f"{BARS}::test_training_twice_on_two_ranks[bf16-cpu]"),
    63: ("the same with flattened weights", f"{BARS}::test_training_twice_on_two_ranks[bf16 flattened-cpu]"),
    # MXFP8
    65: (
        "inference, of dynamic and of prepared weights",
        f"{BARS}::test_mxfp8_inference_of_dynamic_and_of_prepared_weights",
    ),
    66: ("two ranks", f"{BARS}::test_training_twice_on_two_ranks[mxfp8-cpu]"),
    67: ("two ranks, mega", f"{BARS}::test_training_twice_on_two_ranks[mxfp8 mega-cpu]"),
    68: (
        "two ranks with the clamp",
        f"{BARS}::test_training_twice_on_two_ranks[mxfp8 clamped-cpu]",
        f"{BARS}::test_training_twice_on_two_ranks[mxfp8 clamped mega-cpu]",
    ),
    69: (
        "two ranks with prepared weights",
        f"{BARS}::test_training_twice_on_two_ranks[mxfp8 prepared-cpu]",
        f"{SCALED_OPS}::test_gradients_go_to_the_sources_of_prepared_weights",
    ),
    70: (
        "checkpoints change no bit, in another slot",
        f"{CHECKPOINTS}::test_a_selective_checkpoint_in_another_slot_has_the_eager_bits",
    ),
    71: (
        "without gradients in a training context",
        f"{SCALED_PATH}::test_saved_and_recomputed_and_prepared_and_no_grad_are_equal",
        f"{SCALED_OPS}::test_evaluation_before_between_and_after",
    ),
    72: (
        "weights are made twice a step",
        f"{CALLBACKS}::test_made_weights_are_made_again_in_backward_and_only_compact_ones_are_kept",
    ),
    # NVFP4 and prepared weights
    73: ("the reciprocal of the outer scale", f"{WEIGHTS}::test_the_shapes_of_inference"),
    75: ("replays of serving", f"{GPU}::test_a_captured_inference_follows_new_data[nvfp4]"),
    76: ("two ranks serve", f"{BARS}::test_serving_in_nvfp4_on_two_ranks"),
    77: ("refilled where it lies", f"{WEIGHTS}::test_out_is_refilled_in_place_and_returned"),
    # Weight gradients
    78: (
        "BF16 in place",
        f"{BARS}::test_accumulating_in_place_on_two_ranks",
        f"{WGRAD}::test_a_sum_in_place_is_rounded_once_at_a_stable_address_and_hooks_run_once",
    ),
    79: (
        "MXFP8 in place, of prepared weights",
        f"{BARS}::test_accumulating_in_place_on_two_ranks",
        f"{WGRAD}::test_prepared_weights_accumulate_into_their_sources",
    ),
    80: ("owners that are sharded", f"{PATH_WGRAD}::test_fp32_gradients_of_sharded_owners_take_the_local_sum"),
    81: ("all callbacks at once", f"{BARS}::test_callbacks_on_two_ranks"),
    # Behind the experts
    82: ("RMSNorm", f"{BARS}::test_rmsnorm_behind_the_experts"),
    83: ("a callable with a learned scale", f"{BARS}::test_a_callable_with_a_learned_scale"),
    84: ("RMSNorm on two ranks", f"{BARS}::test_rmsnorm_on_two_ranks"),
    85: ("RMSNorm in a trace", f"{NORM}::test_compiled_checkpointed_and_without_gradients"),
    # Counts
    86: ("exact counts that change nothing", f"{BARS}::test_clip_counts_at_limit_zero"),
    87: (
        "counts under a checkpoint, and the gradients of all",
        f"{CLIP}::test_through_the_op_under_checkpoint_and_without_gradients",
        "test_options_together.py::test_each_does_in_company_what_it_does_alone[checkpoint-in place-norm-bf16]",
    ),
    88: (
        "counts are written over, in replays too",
        f"{CLIP}::test_counts_are_exact_and_change_nothing",
        f"{GRAPHS}::test_replays_write_over_the_counts_and_normalise",
    ),
    89: ("every element is counted", f"{BARS}::test_every_element_is_counted_on_two_ranks"),
    # Traces, checkpoints, graphs
    90: ("BF16 traced", f"{TRACES}::test_a_traced_training_step_has_the_eager_bits"),
    91: (
        "formats traced and compiled",
        f"{TRACES}::test_a_traced_call_of_prepared_weights_has_the_eager_bits",
        f"{SCALED_OPS}::test_a_compiled_function_gives_the_eager_bits",
    ),
    92: (
        "training captured, and as graphed callables",
        f"{GPU}::test_a_captured_training_step_follows_new_data",
        f"{GRAPHS}::test_make_graphed_callables",
    ),
    93: ("inference captured", f"{GPU}::test_a_captured_inference_follows_new_data"),
    94: ("a selective checkpoint", f"{CHECKPOINTS}::test_bits_and_how_often_the_call_runs"),
    95: (
        "a trace of a step in place",
        f"{WGRAD}::test_a_trace_of_a_step_holds_one_accumulating_op_that_mutates_the_gradients",
    ),
    # Scratch on the host
    96: (
        "a step that needs it works, and so does the next context; instead of one a device, several",
        f"{HOST}::test_the_bits_are_those_of_a_step_that_fits",
        f"{HOST}::test_ranges_of_a_gpu_hold_what_their_plan_says",
    ),
    98: (
        "without gradients, and serving",
        f"{HOST}::test_inference_scratch_lies_there_too",
        f"{HOST}::test_block_scaled_calls_reach_into_it",
    ),
    # The end
    103: (
        "close, and close again",
        f"{LIFE}::test_after_close_every_use_says_so",
        f"{LIFE}::test_with_closes_also_after_an_exception",
    ),
    104: (
        "import needs nothing; the public names",
        "test_package.py::test_import_touches_no_gpu_no_group_no_triton",
        "test_package.py::test_the_reference_path_runs_without_triton_and_numpy",
        "test_package.py::test_star_gives_the_api_and_nothing_else",
    ),
    105: (
        "examples say how they run, and run",
        "test_examples.py::test_every_example_says_how_to_run_it",
        "test_examples.py::test_plan_memory",
        "test_examples.py::test_on_two_cpu_processes",
        "test_examples.py::test_on_two_gpus",
    ),
}
NOT_SEEN = {18, 23, 24, 25, 40, 41, 42, 44, 45, 46, 47, 48, 64, 74, 97, 99, 100, 101, 102}
COLLECT = """
import sys, pytest

class Names:
    def pytest_itemcollected(self, item):  # before what this machine cannot run is left out
        print("collected", item.nodeid)

pytest.main(["--collect-only", "--quiet", *sys.argv[1:]], plugins=[Names()])
"""


def test_every_number_is_held_by_tests_that_exist():
    assert HELD_BY.keys() | NOT_SEEN == set(range(1, 106)) and not HELD_BY.keys() & NOT_SEEN
    named = {test for _, *tests in HELD_BY.values() for test in tests}
    files = sorted({f"tests/{test.split('::')[0]}" for test in named})
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *files], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    collected = {line.removeprefix("collected tests/") for line in done.stdout.splitlines() if "collected" in line}
    known = collected | {test.split("[")[0] for test in collected}
    assert named <= known, sorted(named - known)

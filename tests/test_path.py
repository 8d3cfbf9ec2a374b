"""The whole path over virtual ranks on one device: forward and all gradients against the dense layer."""

import functools
import inspect
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_moe import BlockScaledConfig, create_context, testing
from dist_moe.calls import Path
from dist_moe.kernels_triton import _rows
from dist_moe.kernels_triton._rows import RowTile
from dist_moe.path_oracle import FORWARD_ONLY, forward_only, on_device, prepared
from dist_moe.planner import dedup, saved_full_bytes, saved_h1_bytes, saved_input_bytes, small
from dist_moe.shapes import Small
from dist_moe.symm import World
from dist_moe.virtual import RankInputs, RankResults, routed_experts, run_virtual

from .path_cases import CASES, Case, assert_results_close, assert_results_equal, dense, padded_rows_of

BACKENDS = ("reference", "triton")
MXFP8, NVFP4 = BlockScaledConfig(), BlockScaledConfig("nvfp4")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


def device_of(backend: str) -> torch.device:
    """The reference runs on the CPU, the kernels where conftest has them run."""
    return KERNEL_DEVICE if backend == "triton" else torch.device("cpu")


def run(config, inputs: list[RankInputs], backend: str, context=None) -> list[RankResults]:
    """run_virtual on the backend's device, results on the CPU."""
    device = device_of(backend)
    there = [on_device(rank, device) for rank in inputs]
    results = run_virtual(len(inputs), config, there, device=device, backend=backend, context=context)
    return [on_device(result, "cpu") for result in results]


# Interpreted, a rank of a step takes half a second. Of five ranks and more the kernels take a case each there; eight
# de-duplicated ones meet as processes.
MANY_RANKS = ("five ranks one expert each", "six ranks de-duplicated recomputed", "eight ranks one expert each")


ON_KERNELS = [case for case in CASES if not INTERPRETED or case.W < 5 or case.note in MANY_RANKS]


@pytest.mark.parametrize(
    "case, backend", [(case, "reference") for case in CASES] + [(case, "triton") for case in ON_KERNELS], ids=str
)
def test_path_against_dense_layer(case, backend):
    inputs = case.inputs()
    results = run(case.config(), inputs, backend)
    assert_results_close(results, dense(case, inputs))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_notes_of_cases_hold(case):
    for words, is_so in (
        ("de-duplicated", dedup(case.config(), case.W)),
        ("per route", not dedup(case.config(), case.W)),
        ("recomputed", case.slot_factor is None),
        ("one expert each", case.E == case.W),
    ):
        assert is_so or words not in case.note


@pytest.mark.parametrize("K, E", [(2, 4), (4, 8)], ids=["per-route", "de-duplicated"])
def test_recomputed_from_x_equals_saved_bit_for_bit(K, E, backend):
    saved = Case("saved", K=K, E=E, routing="zipf(1.0)")
    inputs = saved.inputs()
    first, again, recomputed = (
        run(case.config(), inputs, backend) for case in (saved, saved, replace(saved, slot_factor=None))
    )
    assert_results_equal(first, again)
    assert_results_equal(first, recomputed)


@pytest.mark.parametrize("K, E", [(2, 4), (4, 8)], ids=["per-route", "de-duplicated"])
def test_layers_share_a_slot_and_the_slot_decides_what_they_keep(K, E, backend):
    """Three layers that keep the rows of x and h1, x and h1, or x alone, as the slot allows: equal bits."""
    case = Case("three layers", K=K, E=E, routing="balanced")
    assert_layers_share_a_slot(case, None, case.T * case.K, backend)


@pytest.mark.parametrize("K, E", [(2, 4), (4, 8)], ids=["per-route", "de-duplicated"])
@pytest.mark.parametrize("scaled_backend", ["reference", pytest.param("triton", marks=pytest.mark.gpu)])
def test_block_scaled_layers_share_a_slot(K, E, scaled_backend):
    """The same in MXFP8, where the columns of x stand for its rows."""
    case = Case("three layers", K=K, E=E, routing="balanced")
    assert_layers_share_a_slot(case, BlockScaledConfig(), max(padded_rows_of(case)), scaled_backend)


def assert_layers_share_a_slot(case: Case, block_scaled, balanced: int, backend: str) -> None:
    config = case.config(block_scaled=block_scaled)
    x, x_h1, rows = saved_input_bytes(config), saved_h1_bytes(config, balanced), saved_full_bytes(config, balanced)
    kept_of = {3 * rows: [2, 2, 2], rows + 2 * x_h1: [2, 1, 1], 2 * x_h1 + x: [1, 1, 0], 3 * x: [0, 0, 0]}
    if INTERPRETED and backend == "triton":  # which takes its time: the two that mix
        kept_of = {num_bytes: kept for num_bytes, kept in kept_of.items() if len(set(kept)) > 1}
    outs = []
    for slot_bytes in kept_of:
        sizes = {"activation_slot_bytes": slot_bytes, "activation_slot_capacity_factor": None}
        config = case.config(max_moe_layers_per_activation_slot=3, block_scaled=block_scaled, **sizes)
        with create_context(group=World.virtual(2, device_of(backend)), config=config, backend=backend) as context:
            inputs = [on_device(rank, context.device) for rank in case.inputs()]
            x = [rank.x_TD.requires_grad_() for rank in inputs]
            kept = []
            for _ in range(3):
                outs_TD = routed_experts(inputs, context)
                kept.append(outs_TD[0].grad_fn.calls[0].place[0].item())
                inputs = [replace(rank, x_TD=out) for rank, out in zip(inputs, outs_TD, strict=True)]
            torch.autograd.backward(outs_TD, [rank.grad_out_TD for rank in inputs])
            context.check()
            assert kept == kept_of[slot_bytes]
            assert not context.ranks[0].slot_used_NW.any() and not context.ranks[1].slot_layers_N.any()
            outs.append([out.detach() for out in outs_TD] + [tensor.grad for tensor in x])
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


ALONE = Small(routing=False, sum=False)  # as of contexts of many tokens
NAMES = {"routes": (2, 4), "pairs": (4, 8)}  # K, E


@pytest.mark.parametrize("K, E", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize(("W", "slot_factor"), [(1, 1.0), (2, None), (3, 1.0)])
def test_waits_that_share_a_launch_change_no_bit(monkeypatch, W, K, E, slot_factor, backend):
    case = Case("small", W=W, K=K, E=W * E, routing="zipf(1.0)", slot_factor=slot_factor)
    assert small(case.config(), W) == Small(routing=True, sum=True)
    together = run(case.config(), case.inputs(), backend)
    monkeypatch.setattr("dist_moe.create.small", lambda *_: ALONE)
    assert_results_equal(together, run(case.config(), case.inputs(), backend))


COMBINES = {"routes": "_combine_routes", "pairs": "_combine_pairs"}
ROUTE_ALONE, REDUCE_ALONE = ["_wait", "_count", "_scan", "_place", "_plan_forward"], ["_wait", "_reduce"]


@pytest.mark.interpreter
@pytest.mark.parametrize("scheme", COMBINES)
@pytest.mark.parametrize(
    ("chosen", "route", "reduce"),
    [
        (None, ["_wait_route_plan"], ["_wait_reduce"]),
        (Small(routing=True, sum=False), ["_wait_route_plan"], REDUCE_ALONE),
        (Small(routing=False, sum=True), ROUTE_ALONE, ["_wait_reduce"]),
        (ALONE, ROUTE_ALONE, REDUCE_ALONE),
    ],
    ids=["small", "small routing", "small sum", "large"],
)
def test_launches_of_a_forward(monkeypatch, launched, scheme, chosen, route, reduce):
    """7 of a small context, 12 of a large one: no signal has a launch. Decode has four: test_path_decode."""
    if chosen is not None:
        monkeypatch.setattr("dist_moe.create.small", lambda *_: chosen)
    case = Case("one rank's", W=1, T=16, K=1 if scheme == "routes" else 2, E=4)
    config = case.config(**FORWARD_ONLY)
    run(config, forward_only(case.inputs()), "triton")
    before, experts = ["_publish", *route], launched[1 + len(route) : -len(reduce)]
    assert launched == [*before, *experts, *reduce]
    assert [name for name in experts if name.startswith("_dispatch")] == experts[:1]
    assert len(experts) == 4 and experts[-1] == COMBINES[scheme]  # the others are products
    assert len(launched) == {None: 7, ALONE: 12}.get(chosen, len(launched))


@pytest.mark.parametrize("score, expected", [(0.0, 0.0), (0.25, float("nan"))])
def test_padding_rows_that_are_not_finite_stay_alone(score, expected, backend):
    """Rows of NaN and Inf with score 0 change nothing and come out as 0; with a score they spoil their own row."""
    for slot_factor in (1.0, None):
        case = Case("padding", K=2, E=4, slot_factor=slot_factor)
        clean, dirty = case.inputs(), case.inputs()
        for inputs, fill in ((clean, 0.0), (dirty, float("nan"))):
            for rank in inputs:
                rank.scores_TK[1::3] = 0.0 if fill == 0.0 else score
                rank.x_TD[1::3] = fill
                rank.grad_out_TD[1::3] = 0.0
            inputs[0].x_TD[4] *= float("inf") if fill else 0.0
        expected_results, results = (run(case.config(), inputs, backend) for inputs in (clean, dirty))
        for result, wanted in zip(results, expected_results, strict=True):
            others = torch.tensor([t % 3 != 1 for t in range(case.T)])
            assert torch.equal(result.out_TD[others], wanted.out_TD[others])
            assert torch.equal(result.grad_x_TD[others], wanted.grad_x_TD[others])
            padding = result.out_TD[~others]
            assert torch.equal(padding, torch.full_like(padding, expected)) or padding.isnan().all() and expected != 0.0
            if score == 0.0:
                for name in ("grad_scores_TK", "grad_w13_L2FD", "grad_w2_LDF"):
                    assert torch.equal(getattr(result, name), getattr(wanted, name)), name


def test_a_score_of_zero_on_a_real_row_has_a_gradient(backend):
    case = Case("zero score")
    inputs = case.inputs()
    for rank in inputs:
        rank.scores_TK[:, 0] = 0.0
    results = run(case.config(), inputs, backend)
    expected = dense(case, inputs)
    assert_results_close(results, expected)
    assert all((result.grad_scores_TK[:, 0] != 0).all() for result in results)


def test_fp32_scores_are_not_rounded_to_bf16(backend):
    """1.0038 is 1 in BF16; in FP32 it moves nearly every output by one unit in the last place."""
    case = Case("scores", W=2, K=1, E=2, D=32, F=32)
    inputs = case.inputs()
    for rank in inputs:
        rank.scores_TK.fill_(1.0038)
    results = run(case.config(), inputs, backend)
    rounded = [replace(rank, scores_TK=rank.scores_TK.bfloat16()) for rank in inputs]
    others = run(case.config(), rounded, backend)
    assert all((a.out_TD != b.out_TD).float().mean() > 0.5 for a, b in zip(results, others, strict=True))


def test_gate_and_up_are_not_interchangeable():
    case = Case("swapped halves")
    inputs = case.inputs()
    swapped = [replace(rank, w13_L2FD=rank.w13_L2FD.roll(case.F, dims=1)) for rank in inputs]
    with pytest.raises(AssertionError, match="worst"):
        assert_results_close(run(case.config(), swapped, "reference"), dense(case, inputs))


def test_ranks_are_not_interchangeable():
    case = Case("swapped ranks")
    inputs = case.inputs()
    (a, b) = inputs
    swapped = [replace(a, w2_LDF=b.w2_LDF), replace(b, w2_LDF=a.w2_LDF)]
    with pytest.raises(AssertionError, match="worst"):
        assert_results_close(run(case.config(), swapped, "reference"), dense(case, inputs))


def test_no_grad_equals_grad_and_touches_no_saved_state(backend):
    case = Case("no grad")
    config = case.config(max_moe_layers_per_activation_slot=2)
    with create_context(group=World.virtual(2, device_of(backend)), config=config, backend=backend) as context:
        inputs = [on_device(rank, context.device) for rank in case.inputs()]
        for rank in inputs:
            rank.x_TD.requires_grad_()
        before = routed_experts(inputs, context)
        slots = [r.buffer[: context.memory_plan.total_activation_bytes].clone() for r in context.ranks]
        used = context.ranks[0].slot_used_NW.clone()
        with torch.no_grad():
            alone = routed_experts(inputs, context)
        with torch.inference_mode():
            inferred = routed_experts(inputs, context)
        for r, slot in zip(context.ranks, slots, strict=True):
            assert torch.equal(r.buffer[: len(slot)], slot) and torch.equal(r.slot_used_NW, used)
        torch.autograd.backward(before, [rank.grad_out_TD for rank in inputs])
        context.check()
        for out, other, third in zip(before, alone, inferred, strict=True):
            assert torch.equal(out, other) and torch.equal(out, third)
            assert not other.requires_grad


@pytest.mark.parametrize("K, E", [(1, 4), (2, 4), (4, 8)])
def test_inference_context_equals_training_context(K, E, backend):
    case = Case("inference", K=K, E=E)
    inputs = [replace(rank, grad_out_TD=None) for rank in case.inputs()]
    serve = case.config(inference=True, activation_slot_capacity_factor=None, num_activation_slots=0)
    results = [run(config, inputs, backend) for config in (case.config(), serve)]
    assert all(torch.equal(a.out_TD, b.out_TD) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "block_scaled, sms_backend",
    [(None, "reference"), (None, "triton"), (MXFP8, "reference"), pytest.param(MXFP8, "triton", marks=pytest.mark.gpu)],
    ids=["bf16-reference", "bf16-triton", "mxfp8-reference", "mxfp8-triton"],
)
def test_a_limit_on_sms_reaches_every_persistent_kernel_and_changes_no_bit(block_scaled, sms_backend):
    """Saved and recomputed, so that every op of the path runs."""
    backend, products = sms_backend, {"dispatch", "grouped_gemm_swiglu", "grouped_gemm_wgrad"}
    if block_scaled is not None:
        products = {"quantize_received", "swiglu_quantize", "grouped_gemm_scaled_wgrad"}
    for slot_factor in (1.0, None):
        case = Case("one program", K=4, E=8, slot_factor=slot_factor)
        config = case.config(num_sms=1, block_scaled=block_scaled)
        wanted = run(case.config(block_scaled=block_scaled), case.inputs(), backend)
        with create_context(group=World.virtual(2, device_of(backend)), config=config, backend=backend) as context:
            seen = {}
            for op, function in ops_taking("num_sms", context):
                setattr(context.path.ops, op, recording(seen, op, function))
            limited = run(config, case.inputs(), backend, context)
        assert_results_equal(limited, wanted)
        assert {"copy_x", "reduce", "combine"} | products <= seen.keys()
        assert set(seen.values()) == {(1,)}


@pytest.mark.parametrize("block_scaled", [None, NVFP4], ids=["bf16", "nvfp4"])
@pytest.mark.parametrize("K, E", [(1, 4), (4, 8)], ids=["per-route", "de-duplicated"])
def test_tiles_that_leave_none_of_many_programs_without_rows_change_no_bit(K, E, block_scaled, monkeypatch):
    """As on a GPU, where dispatch and combine have hundreds of programs: blocks of one row and part of its columns."""
    tiles = set()
    for programs in (1, 40):
        monkeypatch.setattr(_rows, "num_programs", lambda device, num_sms=None, programs=programs: programs)
        monkeypatch.setattr(_rows, "RowTile", lambda *args, **how: tiles.add(args) or RowTile(*args, **how))
        _rows.pick_row_tile.cache_clear()
        case = Case("few", T=2, D=544, F=32, K=K, E=E)
        config, inputs = case.config(), case.inputs()
        if block_scaled is not None:
            serve = {"inference": True, "activation_slot_capacity_factor": None, "num_activation_slots": 0}
            config = case.config(block_scaled=block_scaled, **serve)
            inputs = prepared(inputs, config, inference=True, device=KERNEL_DEVICE)
        results = run(config, inputs, "triton")
        if programs == 1:
            wanted = results
    _rows.pick_row_tile.cache_clear()
    assert_results_equal(results, wanted)
    assert all(result.out_TD.any(dim=1).all() for result in results)
    assert {(8, 1024), (1, 256)} <= tiles


@pytest.mark.parametrize("slot_factor", [1.0, None], ids=["saved", "recomputed"])
def test_bits_are_the_same_with_swiglu_in_a_launch_of_its_own(backend, slot_factor, monkeypatch):
    """As in training on many rows; with num_sms, which reaches it."""
    case = Case("apart", K=4, E=8, T=20, slot_factor=slot_factor)
    fused = run(case.config(), case.inputs(), backend)
    monkeypatch.setattr(Path, "fuses_swiglu", lambda path, keep_h1: False)
    config = case.config(num_sms=1)
    with create_context(group=World.virtual(2, device_of(backend)), config=config, backend=backend) as context:
        seen = {}
        for op, function in ops_taking("num_sms", context):
            setattr(context.path.ops, op, recording(seen, op, function))
        assert_results_equal(run(config, case.inputs(), backend, context), fused)
    assert "swiglu" in seen and "grouped_gemm_swiglu" not in seen


@pytest.mark.parametrize(
    "rows, keep_h1, D, preset, fuses",
    [
        (64, True, 7168, None, True),
        (64, False, 7168, None, True),
        (65, False, 4096, None, True),
        (65, True, 4096, None, False),
        (65, False, 4128, None, False),
        (64, False, 4096, "1cta1mma_bm64_bn128", False),
    ],
)
def test_where_w13_activates_what_it_made(rows, keep_h1, D, preset, fuses):
    with create_context(group=World.virtual(2, "cpu"), config=Case("any").config(), backend="reference") as context:
        changes = {"rows_per_expert": rows, "hidden_dim": D, "preset": preset}
        assert replace(context.path, **changes).fuses_swiglu(keep_h1) == fuses


def test_with_many_rows_inference_alone_fuses_and_bits_are_the_same(backend, monkeypatch):
    monkeypatch.setattr("dist_moe.calls.DECODE_ROWS", 0)
    case = Case("many rows", K=4, E=8, T=20)
    config, seen, outs = case.config(), [], []
    for inputs in (case.inputs(), forward_only(case.inputs())):
        seen.append({})
        with create_context(group=World.virtual(2, device_of(backend)), config=config, backend=backend) as context:
            for op, function in ops_taking("num_sms", context):
                setattr(context.path.ops, op, recording(seen[-1], op, function))
            outs.append([result.out_TD for result in run(config, inputs, backend, context)])
    training, inference = seen
    assert "swiglu" in training and "grouped_gemm_swiglu" not in training
    assert "grouped_gemm_swiglu" in inference and "swiglu" not in inference
    assert all(map(torch.equal, *outs)) and all(out_TD.any(dim=1).all() for out_TD in outs[0])


def test_a_preset_reaches_the_products_and_the_layer_stays_right(backend):
    preset = "1cta1mma_bm64_bn128"
    case = Case("preset", K=4, E=8, T=20)
    config = case.config(bf16_grouped_gemm_preset=preset)
    with create_context(group=World.virtual(2, device_of(backend)), config=config, backend=backend) as context:
        seen = set()
        for op, function in ops_taking("preset", context):
            setattr(context.path.ops, op, functools.partial(with_preset, seen, op, function))
        assert_results_close(run(config, case.inputs(), backend, context), dense(case, case.inputs()))
    assert seen == {("grouped_gemm", preset), ("grouped_gemm_dgrad", preset)}


def with_preset(seen: set, op: str, function, *args, preset=None, **options):
    seen.add((op, preset))
    return function(*args, preset=preset, **options)


def ops_taking(parameter: str, context) -> list[tuple]:
    """The ops of the path that have this parameter, and what runs them."""
    found = [(op, function) for op, function in vars(context.path.ops).items() if callable(function)]
    return [(op, function) for op, function in found if parameter in inspect.signature(function).parameters]


def recording(seen: dict, op: str, function):
    """The op, noting in `seen` every num_sms it is called with."""

    def recorded(*args, num_sms=None, **options):
        seen[op] = tuple(sorted({*seen.get(op, ()), num_sms}, key=str))
        return function(*args, num_sms=num_sms, **options)

    return recorded


def test_a_context_serves_calls_of_other_sizes_and_routings(backend):
    """T is a maximum: every call and rank passes another T, and stale rows of the calls before are never seen."""
    case = Case("sizes", W=3, K=2, E=6, D=32, F=32)
    with create_context(group=World.virtual(3, device_of(backend)), config=case.config(), backend=backend) as context:
        for seed, sizes in enumerate([(8, 8, 8), (1, 0, 5), (0, 0, 0), (8, 3, 1), (0, 7, 0)]):
            this = replace(case, seed=seed, routing=("uniform", "one_rank", "dropped(0.5)")[seed % 3])
            inputs = [
                RankInputs(*(t[:size] if name in PER_TOKEN else t for name, t in vars(rank).items()))
                for rank, size in zip(this.inputs(), sizes, strict=True)
            ]
            results = run(case.config(), inputs, backend, context)
            if sum(sizes):
                assert_results_close(results, dense(this, inputs))
            else:
                assert all(r.out_TD.shape == (0, 32) and not r.grad_w13_L2FD.any() for r in results)


PER_TOKEN = ("x_TD", "ids_TK", "scores_TK", "grad_out_TD")


@st.composite
def any_case(draw, max_tokens: int, max_ranks: int):
    W = draw(st.integers(1, max_ranks))
    L = draw(st.integers(1, 3))
    E = W * L
    K = draw(st.integers(1, min(E, 6)))
    T = draw(st.integers(1, max_tokens))
    sizes = draw(st.lists(st.integers(0, T), min_size=W, max_size=W))
    ids = [
        torch.tensor(draw(st.lists(st.integers(-1, E - 1), min_size=t * K, max_size=t * K)), dtype=torch.int64).view(
            t, K
        )
        for t in sizes
    ]
    return Case("drawn", W=W, T=T, D=32, F=32, K=K, E=E, slot_factor=draw(st.sampled_from([None, 1.0])), seed=T), ids


def check_any_case(drawn, backend):
    """Any ids at all, with repetitions and empty slots: the sum over the routes of a token, against the dense layer."""
    case, ids = drawn
    inputs = [
        RankInputs(*(t[: len(own)] if name in PER_TOKEN else t for name, t in vars(rank).items()))
        for rank, own in zip(replace(case, routing="uniform").inputs(), ids, strict=True)
    ]
    for rank, own in zip(inputs, ids, strict=True):
        rank.ids_TK = own
    results = run(case.config(), inputs, backend)
    expected = dense(case, inputs)
    for name in vars(expected[0]):
        out, ref = (torch.cat([getattr(rank, name) for rank in side]).double() for side in (results, expected))
        if ref.numel():
            # One score gradient, a sum of D products of unit scale, may nearly cancel: it is held against sqrt(D).
            floor = case.D**0.5 if name == "grad_scores_TK" else 0.0
            worst, largest = (out - ref).abs().max().item(), max(ref.abs().max().item(), floor)
            assert worst <= 0.02 * largest, f"{name}: {worst:.3g} off where the largest value is {largest:.3g}"
    for result, own in zip(results, ids, strict=True):
        assert not result.out_TD[(own < 0).all(dim=1)].any()


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(any_case(max_tokens=6, max_ranks=8))
def test_any_routing_on_the_reference(drawn):
    check_any_case(drawn, "reference")


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(any_case(max_tokens=4, max_ranks=4))
def test_any_routing_on_the_kernels(drawn):
    check_any_case(drawn, "triton")


def test_bars_are_tight_enough():
    """What must fail does: zeros, a dropped row, two swapped rows, a forgotten score."""
    case = Case("bars")
    inputs = case.inputs()
    good = dense(case, inputs)[0].out_TD
    testing.assert_close(good, good, "path")
    swapped = good.clone()
    swapped[[0, 1]] = good[[1, 0]]
    for bad in (torch.zeros_like(good), torch.cat([good[:-1], torch.zeros(1, case.D).bfloat16()]), swapped):
        with pytest.raises(AssertionError):
            testing.assert_close(bad, good, "path")
    forgotten = [replace(rank, scores_TK=torch.ones_like(rank.scores_TK)) for rank in inputs]
    with pytest.raises(AssertionError):
        testing.assert_close(dense(case, forgotten)[0].out_TD, good, "path")

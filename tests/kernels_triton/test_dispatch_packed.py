"""dispatch_packed against its oracle: moved bytes, so equal everywhere, also around what may be written."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels_triton.producer_cases import (
    GUARD_ROWS,
    OUTER_START,
    POISON,
    SCALES_START,
    AlignedRanks,
    aligned_ranks,
    assert_equal_bundles,
    is_untouched,
)
from tests.kernels_triton.row_cases import NAN, same_bits
from tests.strategies import routings

from dist_moe import reference_formats, reference_producers
from dist_moe.formats import FORMATS, MXFP4, MXFP8_E4M3, NVFP4, packed_row_bytes
from dist_moe.kernels_triton import dispatch_packed as kernels

both_schemes = pytest.mark.parametrize("dedup", [False, True], ids=["routes", "pairs"])
both_backends = pytest.mark.parametrize("ops", [kernels, reference_producers], ids=["kernel", "oracle"])


def wires(ranks: AlignedRanks, format) -> list:
    """By rank the region of wire rows, x of all ranks packed; POISON past T."""
    shape = (1, ranks.T_max, packed_row_bytes(format, ranks.D))
    regions = ranks.world.allocate({"tokens": (shape, torch.uint8)})
    for r in range(ranks.W):
        own = regions[r]["tokens"].own.fill_(POISON)
        x_TD = ranks.ranks[r].tokens.own[0, : ranks.T[r]]
        own[0, : ranks.T[r]] = reference_formats.pack_rows(x_TD, format=format)
    return [regions[r]["tokens"] for r in range(ranks.W)]


def run(op, ranks: AlignedRanks, tokens, r: int, format, dedup: bool, *, rows=None, stop: int = 0, num_sms=None):
    """(rows, row_scores_R) of rank r by one implementation of the op."""
    rows = ranks.bundle(format, ranks.D) if rows is None else rows
    row_scores_R = ranks.row_floats()
    op(
        ranks.plans[r],
        tokens=tokens[r],
        scores=ranks.ranks[r].scores,
        dedup=dedup,
        format=format,
        rows=rows,
        row_scores_R=row_scores_R,
        stop_1=torch.tensor([stop], device=ranks.device),
        num_sms=num_sms,
    )
    return rows, row_scores_R


def assert_equals_oracle(ranks: AlignedRanks, format, dedup: bool) -> None:
    tokens = wires(ranks, format)
    bundles = [ranks.bundle] + [ranks.expanded_rows] * (format in (MXFP8_E4M3, NVFP4))
    for r, bundle in itertools.product(range(ranks.W), bundles):
        how = (ranks, tokens, r, format, dedup)
        want, want_scores = run(reference_producers.dispatch_packed, *how, rows=bundle(format, ranks.D))
        found, found_scores = run(kernels.dispatch_packed, *how, rows=bundle(format, ranks.D))
        assert_equal_bundles(found, want)
        assert same_bits(found_scores, want_scores)


# (note, routing, W, T, K, L, D, formats)
CASES = [
    ("one token", "uniform", 1, 1, 1, 1, 32, FORMATS),
    ("no token anywhere", "uniform", 2, 0, 2, 2, 32, (NVFP4,)),
    ("an outer scale at no multiple of 4, a word with half its scales", "uniform", 2, 5, 3, 2, 96, (NVFP4,)),
    ("a word with three scales", "duplicates", 2, 9, 4, 2, 96, (MXFP8_E4M3,)),
    ("a tail of the block of values", "uniform", 1, 6, 1, 1, 2080, (MXFP8_E4M3,)),
    ("one block, whose values are shared", "uniform", 2, 3, 3, 2, 4128, (MXFP8_E4M3, NVFP4)),
    ("an expert of more than an atom", "one_expert", 2, 70, 2, 2, 160, (NVFP4,)),
    ("dropped slots", "dropped(0.5)", 3, 9, 3, 1, 64, FORMATS),
    ("more ranks than K", "zipf(1.0)", 5, 9, 2, 2, 64, (MXFP8_E4M3,)),
]


@pytest.mark.parametrize("routing, W, T, K, L, D, formats", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
@both_schemes
def test_equals_the_oracle(device, routing, W, T, K, L, D, formats, dedup):
    ranks = aligned_ranks(device, routing, W=W, T=T, K=K, L=L, D=D, T_max=T + 2)
    for format in formats:
        assert_equals_oracle(ranks, format, dedup)


@both_schemes
@settings(max_examples=6)
@given(routing=routings(num_ranks=(1, 2, 3), max_tokens=4, max_experts=2), format=st.sampled_from(FORMATS))
def test_any_routing(device, dedup, routing, format):
    W, K = routing.num_ranks, routing.top_k
    sizes = {"W": W, "T": 0, "K": K, "L": routing.experts_per_rank, "D": 32}
    ranks = aligned_ranks(device, "", **sizes, T_max=routing.num_tokens_max, ids=routing.ids)
    assert_equals_oracle(ranks, format, dedup)


@both_schemes
def test_both_schemes_and_any_number_of_programs_give_the_same_bits(device, dedup):
    ranks = aligned_ranks(device, "uniform", W=3, T=20, K=4, L=2, D=32)
    tokens = wires(ranks, NVFP4)
    want, want_scores = run(kernels.dispatch_packed, ranks, tokens, 1, NVFP4, False)
    found, found_scores = run(kernels.dispatch_packed, ranks, tokens, 1, NVFP4, dedup, num_sms=1)
    assert_equal_bundles(found, want)
    assert same_bits(found_scores, want_scores)


@both_schemes
@both_backends
def test_example(device, dedup, ops):
    """Row 33 of the expert is of a token with the scales 7 8 9: they follow row 1's in the atom, and then a 0."""
    ids = torch.zeros(34, 1, dtype=torch.int64)
    ranks = AlignedRanks(device, [torch.ones(34, 96).bfloat16()], [ids], [torch.ones(34, 1)], E=1)
    tokens = wires(ranks, MXFP8_E4M3)
    tokens[0].own[0, 33, 96:99] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    rows, _ = run(ops.dispatch_packed, ranks, tokens, 0, MXFP8_E4M3, dedup)
    assert rows.scales.view(torch.uint8)[SCALES_START + 20 : SCALES_START + 24].tolist() == [7, 8, 9, 0]


@both_schemes
@both_backends
def test_rows_of_score_0_and_broken_x_are_zeros(device, dedup, ops):
    """The routes of RoutePlan's docstring; token 2 of expert 0 and token 0 of expert 1 have a score of 0."""
    x = torch.tensor([10.0, 20.0, 30.0]).bfloat16()[:, None].repeat(1, 32)
    x[0, 5], x[2, 7] = NAN, float("inf")
    ids, scores = torch.tensor([[0, 1], [1, -1], [1, 0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 5.0]])
    ranks = AlignedRanks(device, [x], [ids], [scores], E=2)
    tokens = wires(ranks, NVFP4)
    rows, row_scores_R = run(ops.dispatch_packed, ranks, tokens, 0, NVFP4, dedup)
    want = reference_formats.unpack_rows(tokens[0].own[0], NVFP4, 32)
    scales = reference_formats.from_blocked(rows.scales.view(torch.uint8)[SCALES_START:][: 256 * 4], 256, 4)[0]
    values = rows.values.view(torch.uint8)[GUARD_ROWS:]
    for row, token in ((0, 0), (1, 2), (128, None), (129, 1), (130, None)):
        outer_inv = rows.outer_inv[OUTER_START + row]
        if token is None:
            assert not values[row].any() and not scales[row].any() and outer_inv == 0 and not outer_inv.signbit()
        else:
            assert torch.equal(values[row], want.values.view(torch.uint8)[token])
            assert scales[row].tolist() == [*want.scales.view(torch.uint8)[token].tolist(), 0, 0]
            assert same_bits(outer_inv, want.outer_inv_R[token])
    assert (values[2:128] == POISON).all()
    assert row_scores_R[[0, 1, 129]].tolist() == [1, 5, 0] and row_scores_R[[128, 130]].signbit().all()


@both_schemes
@both_backends
def test_a_stopped_call_touches_nothing(device, dedup, ops):
    ranks = aligned_ranks(device, "uniform", W=1, T=5, K=2, L=2, D=32)
    rows, row_scores_R = run(ops.dispatch_packed, ranks, wires(ranks, MXFP4), 0, MXFP4, dedup, stop=7)
    assert is_untouched(rows) and same_bits(row_scores_R, ranks.row_floats())


@both_schemes
def test_offsets_past_2_to_the_31(device, dedup):
    """Values and scales lie past 2^31 bytes of the activation buffer; untouched memory of it costs nothing on a CPU."""
    ranks = aligned_ranks(device, "uniform", W=1, T=4, K=2, L=2, D=32)
    tokens = wires(ranks, MXFP8_E4M3)
    near, _ = run(kernels.dispatch_packed, ranks, tokens, 0, MXFP8_E4M3, dedup)
    far_row, far_byte = 2**31 // 32 + 1, 2**31 + 2**20
    huge = torch.empty(far_byte + 2**16, dtype=torch.uint8, device=device)
    far = near._replace(values=huge.view(MXFP8_E4M3.value_dtype).view(-1, 32), start_1=near.start_1 + far_row)
    far = far._replace(scales=huge.view(MXFP8_E4M3.scale_dtype), scales_start_1=near.scales_start_1 + far_byte)
    run(kernels.dispatch_packed, ranks, tokens, 0, MXFP8_E4M3, dedup, rows=far)
    first, R = int(far.start_1), ranks.num_rows(0)
    real = ranks.plans[0].row_to_slot_R[:R] >= 0
    found, want = (t.values.view(torch.uint8)[s : s + R] for t, s in ((far, first), (near, GUARD_ROWS)))
    assert torch.equal(found[real], want[real])
    found, want = (
        reference_formats.from_blocked(t.scales.view(torch.uint8)[int(t.scales_start_1) :][: 4 * R], R, 4)[0][real]
        for t in (far, near)
    )
    assert torch.equal(found, want)


@both_backends
def test_refusals(device, ops):
    ranks = aligned_ranks(device, "uniform", W=1, T=2, K=1, L=1, D=96)
    tokens, rows = wires(ranks, NVFP4), ranks.bundle(NVFP4, 96)
    for format, changed, wire, match in (
        (NVFP4, {"outer_inv": None}, tokens, r"rows\.outer_inv must be contiguous torch.float32"),
        (MXFP8_E4M3, {}, tokens, "rows must have a multiple of 32 values, got 48"),
        (NVFP4, {}, [ranks.ranks[0].tokens], r"tokens must be uint8 \[1, T_max, 64\] for rows of 96 values in nvfp4"),
        (NVFP4, {}, wires(ranks, MXFP8_E4M3), r"tokens must be uint8 \[1, T_max, 64\].* got torch.uint8 \[1, 2, 112\]"),
    ):
        with pytest.raises(ValueError, match=match):
            run(ops.dispatch_packed, ranks, wire, 0, format, False, rows=rows._replace(**changed))


@pytest.mark.gpu
@both_schemes
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("D", [7168, 2880])
def test_many_rows(device, D, format, dedup):
    assert_equals_oracle(aligned_ranks(device, "zipf(1.0)", W=2, T=700, K=8, L=16, D=D), format, dedup)

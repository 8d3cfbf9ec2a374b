"""dispatch against its oracle: moved data, so equal bits everywhere, also around what may be written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels_triton.row_cases import (
    EACH_SHAPE,
    EXAMPLE_SCORES,
    GUARD_ROWS,
    NAN,
    Ranks,
    columns,
    example_ranks,
    random_ranks,
    ranks_of,
    same_bits,
    with_all_tiles,
)
from tests.strategies import routings

from dist_moe import reference
from dist_moe.kernels_triton.dispatch import dispatch

both_schemes = pytest.mark.parametrize("dedup", [False, True], ids=["routes", "pairs"])


def assert_equals_oracle(ranks: Ranks, dedup: bool, half: int) -> None:
    for r in range(ranks.W):
        wanted = ranks.dispatch(reference.dispatch, r, dedup=dedup, half=half)
        for op in with_all_tiles(dispatch):
            for got, want in zip(ranks.dispatch(op, r, dedup=dedup, half=half), wanted, strict=True):
                assert same_bits(got, want), (r, dedup, half)


@both_schemes
def test_example(device, dedup):
    rows_XD, row_scores_R = example_ranks(device).dispatch(dispatch, 0, dedup=dedup)
    assert torch.equal(rows_XD[GUARD_ROWS : GUARD_ROWS + 5].cpu(), columns([10.0, 30.0, 10.0, 20.0, 30.0]))
    assert row_scores_R[:5].tolist() == [1, 5, 2, 3, 4]


@pytest.mark.parametrize(**EACH_SHAPE)
@pytest.mark.parametrize("half", [0, 1], ids=["x", "dy"])
@both_schemes
def test_equals_the_oracle(device, routing, W, T, K, L, D, half, dedup):
    assert_equals_oracle(random_ranks(device, routing, W=W, T=T, K=K, L=L, D=D, T_max=T + 2), dedup, half)


@both_schemes
@settings(max_examples=30)
@given(
    routing=routings(max_tokens=4),
    broken=st.frozensets(st.integers(0, 3)),
    half=st.integers(0, 1),
    alignment=st.sampled_from([1, 4]),
)
def test_any_routing_and_broken_tokens(device, dedup, routing, broken, half, alignment):
    assert_equals_oracle(ranks_of(device, routing, D=96, broken=broken, alignment=alignment), dedup, half)


@both_schemes
@pytest.mark.parametrize("half", [0, 1], ids=["x", "dy"])
def test_aligned_experts_and_windows_of_columns(device, half, dedup):
    """A window is that part of all columns; rows of padding, and columns past the window, keep what is there."""
    ranks = random_ranks(device, "zipf(1.0)", W=3, T=50, K=3, L=3, D=160, alignment=128)
    for r in range(ranks.W):
        padding = ranks.is_padding(r)
        whole_XD, row_scores_R = ranks.dispatch(dispatch, r, dedup=dedup, half=half)
        assert padding.any() and torch.equal(row_scores_R[: len(padding)].isnan(), padding)
        assert torch.equal(whole_XD[GUARD_ROWS:][: len(padding)].isnan(), padding[:, None].expand(-1, 160))
        for first, width, pitch in ((0, 96, 96), (96, 64, 96), (32, 96, 128)):
            for op in (dispatch, reference.dispatch):
                how = {"columns": (first, width), "rows_XD": ranks.buffer(pitch)}
                rows_XD, scores_R = ranks.dispatch(op, r, dedup=dedup, half=half, **how)
                assert same_bits(rows_XD[:, :width], whole_XD[:, first : first + width])
                assert same_bits(scores_R, row_scores_R) and rows_XD[:, width:].isnan().all()


@both_schemes
def test_rows_of_score_0_and_broken_x_are_zeros(device, dedup):
    x = columns([10.0, 20.0, 30.0])
    x[0, 5], x[2, 7] = NAN, float("inf")
    scores = EXAMPLE_SCORES.clone()
    scores[0, 1] = scores[2, 0] = 0.0
    scores[1, 0] = 0.0  # finite x: dispatched as it is
    ids = torch.tensor([[0, 1], [1, -1], [1, 0]])
    ranks = Ranks(device, [x], [ids], [scores], E=2, dy=[x])
    rows_XD, row_scores_R = ranks.dispatch(dispatch, 0, dedup=dedup)
    rows = rows_XD[GUARD_ROWS : GUARD_ROWS + 5].cpu()
    assert torch.equal(rows[[2, 4]], columns([0.0, 0.0])) and torch.equal(rows[3:4], columns([20.0]))
    assert same_bits(rows[[0, 1]], x[[0, 2]])
    assert torch.signbit(row_scores_R[:5]).tolist() == [False, False, True, False, True]
    dy_XD, _ = ranks.dispatch(dispatch, 0, dedup=dedup, half=1)
    assert same_bits(dy_XD[GUARD_ROWS : GUARD_ROWS + 5].cpu(), x[[0, 2, 0, 1, 2]])


@both_schemes
def test_a_stopped_call_touches_nothing(device, dedup):
    ranks = random_ranks(device, "uniform", W=2, T=5, K=2, L=2, D=32)
    stop_1 = torch.tensor([7], dtype=torch.int64, device=device)
    rows_XD, row_scores_R = ranks.dispatch(dispatch, 0, dedup=dedup, stop_1=stop_1)
    assert same_bits(rows_XD, ranks.buffer()) and same_bits(row_scores_R, ranks.row_floats())


@both_schemes
def test_offsets_past_2_to_the_31(device, dedup):
    """The rows lie past 2^31 elements of the activation buffer; untouched memory of it costs nothing on a CPU."""
    ranks = random_ranks(device, "uniform", W=1, T=4, K=2, L=2, D=32)
    far = 2**31 // 32 + 1
    ranks.start_1 = lambda: torch.tensor([far], device=device)
    huge_XD = torch.empty(far + ranks.capacity, 32, dtype=torch.bfloat16, device=device)
    rows_XD, _ = ranks.dispatch(dispatch, 0, dedup=dedup, rows_XD=huge_XD)
    got = rows_XD[far : far + 8].clone()
    rows_XD[far : far + 8] = 0
    rows_XD, _ = ranks.dispatch(reference.dispatch, 0, dedup=dedup, rows_XD=huge_XD)
    assert same_bits(got, rows_XD[far : far + 8])

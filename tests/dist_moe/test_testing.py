"""The routings keep their promises, and the bars of assert_close fail where they must."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_moe.testing import ROUTINGS, TOLERANCES, assert_close, routing, rows_sqnr_db

SHAPE = {"num_ranks": 4, "T": 64, "K": 3, "E": 16}


def counts(ids: list[torch.Tensor], E: int) -> torch.Tensor:
    flat = torch.cat(ids).flatten()
    return torch.bincount(flat[flat >= 0], minlength=E)


@pytest.mark.parametrize("name", ROUTINGS)
@settings(max_examples=30)
@given(num_ranks=st.sampled_from([1, 2, 3, 4, 8]), T=st.integers(0, 9), K=st.integers(1, 5), L=st.integers(1, 4))
def test_every_routing_is_legal(name, num_ranks, T, K, L):
    E = num_ranks * L
    K = min(K, E)
    ids = routing(name, num_ranks=num_ranks, T=T, K=K, E=E, seed=7)
    assert len(ids) == num_ranks and all(i.dtype == torch.int64 for i in ids)
    for rank, ids_TK in enumerate(ids):
        assert ids_TK.shape == (0 if name == "empty_ranks" and rank % 2 else T, K)
        assert ((ids_TK >= -1) & (ids_TK < E)).all()
        for row in ids_TK.tolist():
            used = [e for e in row if e >= 0]
            distinct = len(set(used)) == len(used)
            assert distinct != (name == "duplicates" and K > 1)


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_routing_is_a_function_of_its_arguments(name):
    first, again = routing(name, **SHAPE, seed=3), routing(name, **SHAPE, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = routing(name, **SHAPE, seed=4)
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_balanced_gives_every_expert_the_same():
    assert counts(routing("balanced", **SHAPE), 16).tolist() == [48] * 16
    odd = counts(routing("balanced", num_ranks=3, T=7, K=2, E=9), 9)
    assert odd.max() - odd.min() <= 1


def test_zipf_is_skewed_and_zipf_0_is_not():
    size = SHAPE | {"T": 2000}
    steep, flat = (counts(routing(f"zipf({s})", **size), 16).sort(descending=True).values for s in (1.5, 0))
    assert steep[0] > 5 * steep[8] and flat[0] < 1.2 * flat[8]


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_hot_expert_is_in_a_share_p_of_the_tokens(p):
    got = counts(routing(f"hot_expert({p})", **SHAPE | {"T": 1000}, seed=5), 16)[5].item() / 4000
    assert abs(got - p) < 0.03


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.5, 4.0])
def test_hot_rank_receives_ratio_times_the_mean(ratio):
    per_rank = counts(routing(f"hot_rank({ratio})", **SHAPE | {"T": 1000}, seed=2), 16).view(4, 4).sum(1)
    assert abs(per_rank[2].item() / 3000 - ratio) < 0.05


def test_one_rank_and_one_expert_leave_the_others_empty():
    per_rank = counts(routing("one_rank", **SHAPE, seed=6), 16).view(4, 4).sum(1)
    assert per_rank.tolist() == [0, 0, 4 * 64 * 3, 0]
    assert counts(routing("one_expert", **SHAPE, seed=6), 16).tolist() == [0] * 6 + [256] + [0] * 9
    wide = routing("one_rank", num_ranks=2, T=3, K=3, E=4)  # K > L: the third slot has no expert
    assert (wide[0][:, 2] == -1).all() and sorted(wide[0][0, :2].tolist()) == [0, 1]


def test_dropped_drops_a_share_p():
    ids = torch.cat(routing("dropped(0.3)", **SHAPE | {"T": 1000}))
    assert abs((ids < 0).float().mean().item() - 0.3) < 0.03


@pytest.mark.parametrize(
    "name, words",
    [
        ("even", "unknown routing 'even'; known are balanced"),
        ("zipf", "zipf takes one number"),
        ("balanced(2)", "balanced takes no parameter"),
        ("dropped(1.5)", "probability"),
    ],
)
def test_a_wrong_name_says_what_is_right(name, words):
    with pytest.raises(ValueError) as error:
        routing(name, **SHAPE)
    assert words in str(error.value)


def test_impossible_sizes_are_refused():
    for size in ({"K": 17}, {"E": 15}):
        with pytest.raises(ValueError, match="not possible"):
            routing("uniform", **SHAPE | size)


# The bars


def a_layer_output(dtype=torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, ref) of 300 rows with values of about 1."""
    generator = torch.Generator().manual_seed(1)
    ref = torch.randn(300, 64, generator=generator)
    return ref.to(dtype), ref.to(dtype)


@pytest.mark.parametrize("what", TOLERANCES)
def test_every_bar_passes_equal_data(what):
    out, ref = a_layer_output()
    assert_close(out, ref, what)
    out[5] = ref[5] = 0  # a row of zeros on both sides
    assert_close(out, ref, what)
    assert_close(out[:0], ref[:0], what)


@pytest.mark.parametrize("what", TOLERANCES)
@pytest.mark.parametrize("fault", ["zeros", "dropped row", "swapped rows", "forgotten score", "NaN", "zero reference"])
def test_every_bar_fails_what_is_wrong(what, fault):
    out, ref = a_layer_output()
    if fault == "zeros":
        out.zero_()
    elif fault == "dropped row":
        out[17] = 0
    elif fault == "swapped rows":
        out[[3, 200]] = out[[200, 3]]
    elif fault == "forgotten score":  # one of the terms of a row comes without its score of 0.6
        term = torch.randn(64)
        ref[17] = (ref[17].float() + 0.6 * term).bfloat16()
        out[17] = (out[17].float() + term).bfloat16()
    elif fault == "NaN":
        out[100, 3] = float("nan")
    else:
        ref.zero_()
    with pytest.raises(AssertionError, match=what):
        assert_close(out, ref, what)


def test_the_message_names_row_coordinates_and_values():
    ref = torch.ones(2, 3, 4)
    out = ref.clone()
    out[1, 2, 3] = 3.0
    with pytest.raises(AssertionError) as error:
        assert_close(out, ref, "gemm")
    words = "the worst row, (1, 2), is off by -0 dB of the row, allowed is -50; at (1, 2, 3) got 3, want 1; 1 of 6 rows"
    assert words in str(error.value)


def test_shape_dtype_and_a_broken_reference_fail():
    out, ref = a_layer_output()
    for other in (ref[:299], ref.float(), torch.where(ref > 3, float("inf"), ref)):
        with pytest.raises(AssertionError):
            assert_close(out, other, "gemm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ulps_are_neighbours(dtype):
    ref = torch.tensor([[1.0, -1.0]], dtype=dtype)
    below = torch.nextafter(ref, torch.full_like(ref, -9.0))
    assert_close(below, ref, "swiglu")
    with pytest.raises(AssertionError, match="off by 1 ULP, allowed is 0"):
        assert_close(below, ref, "combine")
    with pytest.raises(AssertionError, match="off by 2 ULP"):
        assert_close(torch.nextafter(below, torch.full_like(ref, -9.0)), ref, "swiglu")


def test_equal_bits_tell_negative_zero():
    ref = torch.tensor([[1.0, 0.0]])
    with pytest.raises(AssertionError, match=r"at \(0, 1\) got -0, want 0"):
        assert_close(torch.tensor([[1.0, -0.0]]), ref, "moved")


def test_integers_are_compared_exactly():
    ref = torch.tensor([[1, 2**40]])
    assert_close(ref.clone(), ref, "moved")
    with pytest.raises(AssertionError, match="moved"):
        assert_close(torch.tensor([[1, 2**40 + 1]]), ref, "moved")


def test_sqnr_of_a_row():
    ref, out = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]]), torch.tensor([[3.0, 4.5], [1.0, 0.0], [1.0, 0.0]])
    assert rows_sqnr_db(out, ref).tolist() == pytest.approx([20.0, -float("inf"), float("inf")])

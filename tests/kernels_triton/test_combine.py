"""combine, reduce and collect_score_grads against their oracles: FP32 sums in the same order, so equal bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels_triton.row_cases import (
    EACH_SHAPE,
    EXAMPLE_IDS,
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
from dist_moe.kernels_triton.combine import combine
from dist_moe.kernels_triton.dispatch import dispatch
from dist_moe.kernels_triton.reduce import collect_score_grads, reduce

both_schemes = pytest.mark.parametrize("dedup", [False, True], ids=["routes", "pairs"])


def filled_rows(ranks: Ranks, r: int, seed: int = 0) -> torch.Tensor:
    """An activation buffer with normal values in the rows of the stage, NaN around them and in rows of padding."""
    rows_XD, num_rows = ranks.buffer(), ranks.num_rows(r)
    values = torch.randn(num_rows, ranks.D, generator=torch.Generator().manual_seed(seed)).bfloat16()
    rows_XD[GUARD_ROWS : GUARD_ROWS + num_rows] = values.to(ranks.device)
    rows_XD[GUARD_ROWS : GUARD_ROWS + num_rows][ranks.is_padding(r)] = NAN
    return rows_XD


def row_floats(ranks: Ranks, r: int, seed: int) -> torch.Tensor:
    """Normal values by row, NaN in rows of padding and past the last row."""
    values, num_rows = ranks.row_floats(), ranks.num_rows(r)
    values[:num_rows] = torch.randn(num_rows, generator=torch.Generator().manual_seed(seed)).to(ranks.device)
    values[:num_rows][ranks.is_padding(r)] = NAN
    return values


def pushed_by(op, ranks: Ranks, dedup: bool, backward: bool, windows=(None,)) -> torch.Tensor:
    """Everything that a push can reach on any rank, what must stay as it was included; one push a window of columns."""
    ranks.poison_pushed()
    for r in range(ranks.W):
        rows_XD = filled_rows(ranks, r, r)
        for window in windows:
            first, width = window or (0, ranks.D)
            ranks.combine(
                op,
                r,
                rows_XD[:, first : first + width].contiguous(),
                dedup=dedup,
                row_scores_R=row_floats(ranks, r, r + 50) if dedup and not backward else None,
                row_score_grads_R=row_floats(ranks, r, r + 99) if backward else None,
                columns=window,
            )
    return ranks.pushed(dedup)


def assert_combine_equals_oracle(ranks: Ranks, dedup: bool, backward: bool) -> None:
    wanted = pushed_by(reference.combine, ranks, dedup, backward).clone()
    for op in with_all_tiles(combine):
        assert torch.equal(pushed_by(op, ranks, dedup, backward), wanted)


def assert_reduce_equals_oracle(ranks: Ranks, dedup: bool, scaled: bool) -> None:
    """On what the last combine left: NaN in every slot that nobody pushed."""
    for r in range(ranks.W):
        got, want = (ranks.reduce(op, r, dedup=dedup, scaled=scaled) for op in (reduce, reference.reduce))
        assert same_bits(got, want) and not got.isnan().any()


# Examples of the docstrings


@both_schemes
def test_example(device, dedup):
    ranks = example_ranks(device)
    rows_XD = ranks.buffer()
    rows_XD[GUARD_ROWS : GUARD_ROWS + 5] = columns([1.0, 2.0, 3.0, 4.0, 5.0], device)
    row_scores_R = torch.tensor([1.0, 5.0, 2.0, 3.0, 4.0, NAN], device=device)
    grads = torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0, NAN], device=device)
    ranks.combine(combine, 0, rows_XD, dedup=dedup, row_scores_R=row_scores_R if dedup else None)
    out = ranks.outputs(0, dedup).own[:, :, 0].cpu()
    if dedup:
        assert out[:, 0].tolist() == [7, 12, 30]
    else:
        assert out.nan_to_num(-1).tolist() == [[1, 3], [4, -1], [5, 2]]
    assert ranks.reduce(reduce, 0, dedup=dedup, scaled=not dedup)[:, 9].tolist() == [7, 12, 30]
    ranks.combine(combine, 0, rows_XD, dedup=dedup, row_score_grads_R=grads)
    assert ranks.ranks[0].score_grads.own.nan_to_num(-1).tolist() == [[10, 30], [40, -1], [50, 20]]


def test_reduce_example_of_two_ranks(device):
    ranks = Ranks(device, [columns([0.0] * 3)] * 2, [EXAMPLE_IDS] * 2, [torch.ones(3, 2)] * 2, E=2)
    ranks.ranks[0].outputs_pairs.own[:, 0] = columns([7.0, 12.0, 30.0], device)
    ranks.ranks[0].outputs_pairs.own[:, 1] = columns([1.0, NAN, 2.0], device)
    assert ranks.reduce(reduce, 0, dedup=True, scaled=False)[:, 0].tolist() == [8, 12, 32]


# Against the oracles


@pytest.mark.parametrize(**EACH_SHAPE)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@both_schemes
def test_equals_the_oracle(device, routing, W, T, K, L, D, backward, dedup):
    ranks = random_ranks(device, routing, W=W, T=T, K=K, L=L, D=D, T_max=T + 2)
    assert_combine_equals_oracle(ranks, dedup, backward)
    assert_reduce_equals_oracle(ranks, dedup, scaled=not dedup and not backward)


@both_schemes
@settings(max_examples=25)
@given(routing=routings(max_tokens=4), backward=st.booleans(), alignment=st.sampled_from([1, 4]))
def test_any_routing(device, dedup, routing, backward, alignment):
    ranks = ranks_of(device, routing, alignment=alignment)
    assert_combine_equals_oracle(ranks, dedup, backward)
    assert_reduce_equals_oracle(ranks, dedup, scaled=not dedup and not backward)


@both_schemes
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_aligned_experts_and_windows_of_columns(device, backward, dedup):
    """A push a window leaves what one of all columns does; no NaN of a row of padding arrives anywhere."""
    ranks = random_ranks(device, "zipf(1.0)", W=3, T=50, K=3, L=3, D=160, alignment=128)
    assert all(ranks.is_padding(r).any() for r in range(ranks.W))
    whole = pushed_by(reference.combine, ranks, dedup, backward)
    assert_reduce_equals_oracle(ranks, dedup, scaled=not dedup and not backward)
    for op in (combine, reference.combine):
        assert torch.equal(pushed_by(op, ranks, dedup, backward, [(0, 96), (96, 64)]), whole)
    part = [pushed_by(op, ranks, dedup, backward, [(32, 96)]) for op in (combine, reference.combine)]
    assert torch.equal(*part) and not torch.equal(part[0], whole)


@settings(max_examples=10)
@given(routing=routings(max_tokens=4))
def test_identity_experts_give_the_sum_of_scores_times_x(device, routing):
    """On small integers every sum is exact: so the two schemes give the same, and it is known."""
    ranks = ranks_of(device, routing)
    for dedup in (False, True):
        ranks.poison_pushed()
        for r in range(ranks.W):
            rows_XD, row_scores_R = ranks.dispatch(dispatch, r, dedup=dedup)
            ranks.combine(combine, r, rows_XD, dedup=dedup, row_scores_R=row_scores_R if dedup else None)
        for r, rank in enumerate(ranks.ranks):
            x_TD = rank.tokens.own[0, : ranks.T[r]].float()
            want = rank.scores.own[: ranks.T[r]].sum(dim=1, keepdim=True) * x_TD
            assert torch.equal(ranks.reduce(reduce, r, dedup=dedup, scaled=not dedup).float(), want)


@both_schemes
def test_tokens_without_experts_are_exactly_zero(device, dedup):
    ids = torch.tensor([[-1, -1, -1], [1, 0, 2], [-1, 3, -1], [-1, -1, -1]])
    x = [torch.randn(4, 32).bfloat16()] * 2
    ranks = Ranks(device, x, [ids] * 2, [torch.randn(4, 3)] * 2, E=4)
    assert_combine_equals_oracle(ranks, dedup, backward=False)
    out_TD = ranks.reduce(reduce, 0, dedup=dedup, scaled=not dedup)
    assert (out_TD[[0, 3]].view(torch.int16) == 0).all() and (out_TD[1:3] != 0).any(dim=1).all()


@both_schemes
def test_reduce_writes_rows_of_a_wider_output(device, dedup):
    ranks = random_ranks(device, "uniform", W=2, T=5, K=3, L=2, D=64)
    assert_combine_equals_oracle(ranks, dedup, backward=False)
    wide = torch.full((5, 96), 9.0, dtype=torch.bfloat16, device=device)
    ranks.reduce(reduce, 1, dedup=dedup, scaled=not dedup, out_TD=wide[:, :64])
    want = ranks.reduce(reference.reduce, 1, dedup=dedup, scaled=not dedup)
    assert same_bits(wide[:, :64].contiguous(), want) and (wide[:, 64:] == 9).all()


@both_schemes
def test_products_are_rounded_before_they_are_added(device, dedup):
    """(1 + 2^-20)(1 + 2^-7) loses 2^-27 when rounded to FP32, then cancels; a fused multiply-add would leave 2^-27."""
    scores = torch.tensor([[-(1 + 2**-7 + 2**-20), 1 + 2**-20]])
    ranks = Ranks(device, [columns([1.0])], [torch.tensor([[0, 1]])], [scores], E=2)
    rows_XD = ranks.buffer()
    rows_XD[GUARD_ROWS : GUARD_ROWS + 2] = columns([1.0, 1 + 2**-7], device)
    ranks.combine(combine, 0, rows_XD, dedup=dedup, row_scores_R=scores[0].to(device) if dedup else None)
    assert (ranks.reduce(reduce, 0, dedup=dedup, scaled=not dedup) == 0).all()


@both_schemes
def test_sums_run_in_slot_order(device, dedup):
    """2^25 - 2^25 + 1 is 1 in this order; from the other end, 1 - 2^25 rounds to -2^25 and the sum is 0."""
    ranks = Ranks(device, [columns([1.0])], [torch.tensor([[2, 0, 1]])], [torch.ones(1, 3)], E=3)
    rows_XD = ranks.buffer()
    rows_XD[GUARD_ROWS : GUARD_ROWS + 3] = columns([-(2.0**25), 1.0, 2.0**25], device)  # rows by expert: slots 1, 2, 0
    row_scores_R = torch.ones(3, device=device)
    ranks.combine(combine, 0, rows_XD, dedup=dedup, row_scores_R=row_scores_R if dedup else None)
    assert (ranks.reduce(reduce, 0, dedup=dedup, scaled=not dedup) == 1).all()


def test_reduce_adds_in_rank_order(device):
    ranks = Ranks(device, [columns([0.0])] * 3, [torch.tensor([[2, 0, 1]])] * 3, [torch.ones(1, 3)] * 3, E=3)
    ranks.ranks[1].outputs_pairs.own[0] = columns([2.0**25, -(2.0**25), 1.0], device)
    assert (ranks.reduce(reduce, 1, dedup=True, scaled=False) == 1).all()


@both_schemes
def test_a_stopped_call_touches_nothing(device, dedup):
    ranks = random_ranks(device, "uniform", W=2, T=5, K=2, L=2, D=32)
    stop_1 = torch.tensor([7], dtype=torch.int64, device=device)
    before = ranks.pushed(dedup)
    ranks.combine(
        combine, 0, filled_rows(ranks, 0), dedup=dedup, row_score_grads_R=row_floats(ranks, 0, 1), stop_1=stop_1
    )
    assert torch.equal(ranks.pushed(dedup), before)
    assert ranks.reduce(reduce, 0, dedup=dedup, scaled=False, stop_1=stop_1).isnan().all()


@both_schemes
@pytest.mark.parametrize("op", [reduce, reference.reduce], ids=["kernel", "oracle"])
@pytest.mark.parametrize("T", [0, 5])
def test_a_reduce_that_ends_a_call_tells_of_its_fault(device, dedup, op, T):
    """NaN and the record on a fault; without one the sum, and the host hears nothing. Columns beside out stay."""
    ranks = random_ranks(device, "uniform", W=2, T=T, K=2, L=2, D=64, T_max=5)
    ranks.poison_pushed()
    for r in range(2):
        ranks.combine(reference.combine, r, filled_rows(ranks, r), dedup=dedup, row_scores_R=ranks.row_floats())
    want = ranks.reduce(reference.reduce, 1, dedup=dedup, scaled=not dedup)
    for words in ([0] * 8, [515, 12, 10, 0, 0, 0, 0, -1]):
        host_fault_F = torch.full((8,), 99, dtype=torch.int64, pin_memory=device.type == "cuda")
        faults = {"fault_F": torch.tensor(words, device=device), "host_fault_F": host_fault_F}
        wide = torch.full((T, 96), 9.0, dtype=torch.bfloat16, device=device)
        ranks.reduce(op, 1, dedup=dedup, scaled=not dedup, out_TD=wide[:, :64], **faults)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert host_fault_F.tolist() == (words if words[0] else [99] * 8) and (wide[:, 64:] == 9).all()
        assert wide[:, :64].isnan().all() if words[0] else same_bits(wide[:, :64].contiguous(), want)


def test_fewer_programs_give_the_same(device):
    ranks = random_ranks(device, "uniform", W=2, T=40, K=2, L=2, D=32)
    pushed = []
    for num_sms in (None, 1):
        ranks.poison_pushed()
        ranks.combine(combine, 0, filled_rows(ranks, 0), dedup=False, num_sms=num_sms)
        pushed.append(ranks.pushed(False))
    assert torch.equal(*pushed)


# Score gradients


def collected(op, ranks, ids_TK, num_experts, dtype, stop_1=None, out_TK=None):
    if out_TK is None:
        out_TK = torch.full(ids_TK.shape, NAN, dtype=dtype, device=ranks.device)
    op(
        out_TK,
        ids_TK,
        score_grads=ranks.ranks[0].score_grads,
        num_experts=num_experts,
        stop_1=ranks.stop_1 if stop_1 is None else stop_1,
    )
    return out_TK


def ranks_with_score_grads(device, ids_TK: torch.Tensor) -> Ranks:
    """Score gradients as combine leaves them: NaN in every slot but the first one of an expert."""
    T, K = ids_TK.shape
    ranks = Ranks(device, [torch.zeros(T, 32).bfloat16()], [ids_TK], [torch.zeros(T, K)], E=8, T_max=T + 1)
    own = ranks.ranks[0].score_grads.own
    pushed = ranks.ranks[0].ids.own[:T] >= 0
    own[:T] = torch.where(pushed, torch.randn(T, K, device=device), NAN)
    return ranks


def test_collect_score_grads_example(device):
    ids_TK = torch.tensor([[5, -1, 5]], device=device)
    ranks = ranks_with_score_grads(device, ids_TK)
    ranks.ranks[0].score_grads.own[0, 0] = 7.0
    assert collected(collect_score_grads, ranks, ids_TK, 8, torch.float32).tolist() == [[7, 0, 7]]


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T, K", [(0, 3), (1, 1), (5, 3), (300, 8)])
def test_collect_score_grads_equals_the_oracle(device, ids_dtype, dtype, T, K):
    ids_TK = torch.randint(-2, 8, (T, K)).to(device, ids_dtype)
    ranks = ranks_with_score_grads(device, ids_TK)
    got, want = (collected(op, ranks, ids_TK, 8, dtype) for op in (collect_score_grads, reference.collect_score_grads))
    assert same_bits(got, want) and not got.isnan().any()


def test_collect_score_grads_honours_strides(device):
    wide = torch.randint(-1, 8, (6, 16), device=device)
    ids_TK = wide.T[:5, 1:4]  # column-major, inside something wider
    ranks = ranks_with_score_grads(device, ids_TK)
    out = torch.full((3, 9), 77.0, device=device)
    collected(collect_score_grads, ranks, ids_TK, 8, torch.float32, out_TK=out.T[:5])
    assert torch.equal(out.T[:5], collected(reference.collect_score_grads, ranks, ids_TK, 8, torch.float32))
    assert (out.T[5:] == 77).all()


def test_collect_score_grads_of_ids_too_large_are_zero(device):
    """Such a call is a fault anyway; nothing is read out of range."""
    ids_TK = torch.tensor([[2**40, 8, 3]], device=device)
    ranks = ranks_with_score_grads(device, torch.tensor([[0, 1, 3]], device=device))
    assert collected(collect_score_grads, ranks, ids_TK, 8, torch.float32)[0, :2].tolist() == [0, 0]


def test_collect_score_grads_stopped(device):
    ids_TK = torch.tensor([[1, 2]], device=device)
    ranks = ranks_with_score_grads(device, ids_TK)
    stop_1 = torch.ones(1, dtype=torch.int64, device=device)
    assert collected(collect_score_grads, ranks, ids_TK, 8, torch.float32, stop_1).isnan().all()

"""route against its oracle and against the rules of a row map, written down independently of both."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import routings

from dist_moe import reference, shapes, testing
from dist_moe.kernels_triton import route as kernels
from dist_moe.route_plan import RoutePlan
from dist_moe.shapes import align
from dist_moe.symm import World


class Ranks:
    """Virtual ranks whose regions hold resolved ids; past T they hold a valid expert that nobody may count."""

    def __init__(self, device, ids, *, E, T_max=None, alignment=1):
        self.device, self.W, self.E, self.K, self.alignment = device, len(ids), E, ids[0].shape[1], alignment
        self.T_max = T_max or max(1, *(len(i) for i in ids))
        self.resolved = [reference.resolve_routes(i, torch.zeros(i.shape), E)[0] for i in ids]
        regions = {"ids": ((self.T_max, self.K), torch.int16), "header": ((shapes.HEADER_WORDS,), torch.int64)}
        self.regions = World.virtual(self.W, device).allocate(regions)
        for r, resolved in enumerate(self.resolved):
            self.regions[r]["ids"].own[: len(resolved)] = resolved.to(device)
            self.regions[r]["header"].own[shapes.HEADER_T] = len(resolved)

    @property
    def worst_case_rows(self) -> int:
        L = self.E // self.W
        return self.W * self.T_max * min(self.K, L) + L * (self.alignment - 1)

    def route(self, op, rank, capacity=None, fault=0) -> tuple[RoutePlan, list[int]]:
        """The plan of one rank and the fault record."""
        fault_F = torch.zeros(shapes.FAULT_WORDS, dtype=torch.int64, device=self.device)
        fault_F[0] = fault
        plan = op(
            **self.regions[rank],
            rank=rank,
            num_experts=self.E,
            capacity_rows=self.worst_case_rows if capacity is None else capacity,
            row_alignment=self.alignment,
            fault_F=fault_F,
        )
        return plan, fault_F.tolist()

    def kernel_plan(self, rank) -> RoutePlan:
        """The kernels' plan, after it was found equal to the oracle's."""
        (got, got_fault), (want, want_fault) = self.route(kernels.route, rank), self.route(reference.route, rank)
        assert got_fault == want_fault == [0] * shapes.FAULT_WORDS
        for name, value in counted(want).items():
            assert counted(got)[name] == value, (rank, name)
        return got


def counted(plan: RoutePlan) -> dict[str, list[int]]:
    """The tables up to the rows and pairs that they count, as lists."""
    return {name: table.tolist() for name, table in plan.counted().items()}


def check_rules(ranks: Ranks) -> None:
    """What a set of row maps must satisfy, rank by rank and all together, from the ids alone."""
    L, K, T_max, J = ranks.E // ranks.W, ranks.K, ranks.T_max, min(ranks.K, ranks.W)
    routes = {  # (source rank, token, k) -> expert
        (src, t, k): e
        for src, ids in enumerate(ranks.resolved)
        for t, row in enumerate(ids.tolist())
        for k, e in enumerate(row)
        if e >= 0
    }
    seen, outputs = [], []
    for rank in range(ranks.W):
        plan = counted(ranks.kernel_plan(rank))
        starts, num_rows, num_routes = plan["row_start_P"], plan["num_rows_L"], plan["num_routes_1"][0]
        assert starts[0] == 0 and starts[-1] == len(plan["row_to_slot_R"]) == plan["rank_rows_W"][rank]
        assert [b - a for a, b in itertools.pairwise(starts)] == [align(n, ranks.alignment) for n in num_rows]
        experts = {start + i: e for e, start in enumerate(starts[:-1]) for i in range(num_rows[e])}
        assert [row for row, slot in enumerate(plan["row_to_slot_R"]) if slot != -1] == list(experts)
        slots = {row: plan["row_to_slot_R"][row] for row in experts}
        slots = {row: (slot // K // T_max, slot // K % T_max, slot % K) for row, slot in slots.items()}
        assert all(routes[slots[row]] - rank * L == e for row, e in experts.items())  # each row is of its expert
        order = [(e, *slots[row][:2]) for row, e in experts.items()]
        assert order == sorted(set(order)) and len(order) == num_routes
        seen += slots.values()

        cuts = plan["pair_start_R"] + [num_routes]
        pairs = [plan["pair_rows_R"][a:b] for a, b in itertools.pairwise(cuts)] if num_routes else []
        assert sorted(row for pair in pairs for row in pair) == list(experts)
        tokens = [slots[pair[0]][:2] for pair in pairs]
        assert tokens == sorted(set(tokens))
        for pair, token, output in zip(pairs, tokens, plan["pair_output_R"], strict=True):
            in_pair = [slots[row] for row in pair]
            assert in_pair == sorted(in_pair) and {slot[:2] for slot in in_pair} == {token}
            visited = {e // L for (src, t, _), e in routes.items() if (src, t) == token}
            assert output == (token[0] * T_max + token[1]) * J + sum(w < rank for w in visited)
            outputs.append(output)
    assert sorted(seen) == sorted(routes)  # every route has one row, on one rank
    assert len(set(outputs)) == len(outputs)


def ids_of(*ranks: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(rows, dtype=torch.int64) for rows in ranks]


# The examples of the docstrings


def test_example_of_the_plan_and_of_place(device):
    ids = ids_of([[0, 1], [1, -1], [1, 0]])
    plan = counted(Ranks(device, ids, E=2).kernel_plan(0))
    assert plan == {
        "row_start_P": [0, 2, 5],
        "num_rows_L": [2, 3],
        "rank_rows_W": [5],
        "num_routes_1": [5],
        "num_pairs_1": [3],
        "row_to_slot_R": [0, 5, 1, 2, 4],
        "pair_rows_R": [0, 2, 3, 4, 1],
        "pair_start_R": [0, 2, 3],
        "pair_output_R": [0, 1, 2],
    }
    assert counted(Ranks(device, ids, E=2, alignment=4).kernel_plan(0)) == plan | {
        "row_start_P": [0, 4, 8],
        "rank_rows_W": [8],
        "row_to_slot_R": [0, 5, -1, -1, 1, 2, 4, -1],
        "pair_rows_R": [0, 4, 5, 6, 1],
    }


@pytest.mark.parametrize(("group_size", "group_rows"), [(2, [1, 3]), (1, [1, 0, 1, 2])], ids=["owner", "expert"])
def test_example_of_count(device, group_size, group_rows):
    ranks = Ranks(device, ids_of([[3, 2], [0, 3]], [[-1, -1]]), E=4)
    below_BP, group_rows_BG, numbers, ids_WTK = (
        torch.full(shape, -9, dtype=dtype, device=device)
        for shape, dtype in (
            ((2, 3), torch.int32),
            ((2, len(group_rows)), torch.int32),
            ((2, 2), torch.int32),
            ((8,), torch.int16),
        )
    )
    kernels._count[(2,)](
        ranks.regions[1]["ids"].table_W,
        ranks.regions[1]["header"].table_W,
        ids_WTK,
        below_BP,
        group_rows_BG,
        numbers[0],
        numbers[1],
        torch.zeros(1, dtype=torch.int64, device=device),
        1,
        2,
        2,
        2,
        1,
        group_size,
        K=2,
        BLOCK_T=2,
        BLOCK_K=2,
        BLOCK_E=32,
        BLOCK_G=32,
        BLOCK_W=2,
    )
    assert below_BP.tolist() == [[0, 1, 3], [0, 0, 0]]
    assert group_rows_BG.tolist() == [group_rows, [0] * len(group_rows)]
    assert numbers.tolist() == [[2, 0], [shapes.MAX_ROUTES] * 2] and ids_WTK.tolist() == [3, 2, 0, 3, -1, -1, -1, -1]


@pytest.mark.parametrize(
    ("group_rows", "sums"), [([[3], [2]], [5]), ([[1, 2], [2, 0]], [3, 2])], ids=["ranks", "experts"]
)
def test_example_of_scan(device, group_rows, sums):
    def table(*data, dtype=torch.int32):
        return torch.tensor(data, dtype=dtype, device=device)

    below_BP, pairs_B = table([0, 1, 3], [0, 2, 2]), table(2, 2)
    invalid_B = table(shapes.MAX_ROUTES, shapes.MAX_ROUTES)
    earlier_BL, firsts = torch.full_like(below_BP[:, :2].contiguous(), -9), table([-9, -9], [-9, -9])
    row_start_P, num_rows_L, num_routes_1, num_pairs_1 = table(-9, -9, -9), table(-9, -9), table(-9), table(-9)
    group_sums_G = table(*[-9] * len(sums), dtype=torch.int64)
    fault_F = torch.zeros(shapes.FAULT_WORDS, dtype=torch.int64, device=device)
    aligned = len(sums) == 2
    kernels._scan[(2 + aligned,)](
        below_BP,
        table(*group_rows),
        pairs_B,
        invalid_B,
        earlier_BL,
        firsts[0],
        firsts[1],
        row_start_P,
        num_rows_L,
        group_sums_G,
        num_routes_1,
        num_pairs_1,
        fault_F,
        len(sums),
        2,
        2,
        6,
        5,
        K=2,
        ALIGNED=aligned,
        BLOCK_B=4,
        BLOCK_E=4,
        BLOCK_W=1,
    )
    assert row_start_P.tolist() == [0, 3, 5] and earlier_BL.tolist() == [[0, 0], [1, 2]]
    assert firsts.tolist() == [[0, 2], [0, 3]] and num_pairs_1.tolist() == [4] and num_routes_1.tolist() == [5]
    assert num_rows_L.tolist() == [3, 2] and group_sums_G.tolist() == sums and not fault_F.any()


@triton.jit
def _aligned_rows(
    expert_rows_ptr, rank_rows_ptr, start_ptr, before, rank, W, L, ALIGNMENT: tl.constexpr, BLOCK_L: tl.constexpr
):
    rank_rows, start = kernels.aligned_rows(expert_rows_ptr, before, rank, W, L, ALIGNMENT, 2, BLOCK_L)
    tl.store(rank_rows_ptr + tl.arange(0, 2), rank_rows)
    tl.store(start_ptr, start)


@pytest.mark.parametrize("block_l", [1, 2])
def test_example_of_aligned_rows(device, block_l):
    for before, start in ((0, 0), (1, 4), (2, 12)):
        rank_rows_W, start_1 = (torch.full((n,), -9, dtype=torch.int64, device=device) for n in (2, 1))
        expert_rows_E = torch.tensor([3, 0, 2, 5], dtype=torch.int32, device=device)
        _aligned_rows[(1,)](expert_rows_E, rank_rows_W, start_1, before, 1, 2, 2, ALIGNMENT=4, BLOCK_L=block_l)
        assert rank_rows_W.tolist() == [4, 12] and start_1.tolist() == [start]


# Against the oracle and the rules

each_alignment = pytest.mark.parametrize("alignment", [1, 128])


@settings(max_examples=20)
@given(routing=routings(), alignment=st.sampled_from([1, 2, 128]))
def test_any_routing(device, routing, alignment):
    T_max = routing.num_tokens_max
    check_rules(Ranks(device, routing.ids, E=routing.num_experts, T_max=T_max, alignment=alignment))


@pytest.mark.parametrize(
    ("W", "T", "K", "E"),
    [
        pytest.param(1, 1, 1, 1, id="one-of-all"),
        pytest.param(3, 9, 6, 60, id="E-60"),
        pytest.param(2, 7, 3, 72, id="E-72"),
        pytest.param(5, 5, 10, 160, id="E-160-K-10"),
        pytest.param(4, 6, 8, 384, id="E-384"),
        pytest.param(2, 3, 12, 12, id="K-is-E"),
        pytest.param(8, 4, 3, 8, id="one-expert-a-rank"),
        pytest.param(1, 2, 40, 64, id="several-steps-of-K"),
        pytest.param(2, 6, 4, 512, id="E-512"),
        pytest.param(5, 4, 4, 1025, id="E-1025"),
        pytest.param(2, 8, 2, 2048, id="E-2048"),
    ],
)
def test_shapes(device, W, T, K, E):
    ids = [torch.stack([torch.randperm(E)[:K] for _ in range(T)]) for _ in range(W)]
    for above, winner in ((256, E - 1), (1024, E - 2)):
        if above < E:
            ids[0][0, 0], ids[-1][T - 1, K - 1] = winner, winner - 2
    check_rules(Ranks(device, ids, E=E, T_max=T + 1))


@pytest.mark.parametrize(
    ("W", "T", "K", "E"),
    [
        pytest.param(3, 9, 6, 60, id="E-60"),
        pytest.param(5, 4, 4, 520, id="several-steps-of-groups"),
        pytest.param(1, 2, 40, 64, id="several-steps-of-K"),
    ],
)
def test_shapes_of_aligned_experts(device, W, T, K, E):
    ids = [torch.stack([torch.randperm(E)[:K] for _ in range(T)]) for _ in range(W)]
    check_rules(Ranks(device, ids, E=E, T_max=T + 1, alignment=128))


@pytest.mark.parametrize("routing", testing.ROUTINGS)
def test_named_routings(device, routing):
    ids = testing.routing(routing, num_ranks=4, T=6, K=3, E=8, seed=1)
    check_rules(Ranks(device, ids, E=8))


@each_alignment
@pytest.mark.parametrize("tokens", [(63, 64), (65, 1), (128, 0), (127, 129)])
def test_tokens_around_a_block(device, tokens, alignment):
    assert kernels.pick_config(W=2, T_max=129, K=2, L=2, num_groups=2).block_t == 64
    check_rules(Ranks(device, [torch.randint(-1, 4, (T, 2)) for T in tokens], E=4, T_max=129, alignment=alignment))


@pytest.mark.parametrize("num_routes", [127, 128, 129])
def test_rows_around_the_alignment(device, num_routes):
    """Of expert 1 of 3; with as many as the alignment it has no padding."""
    check_rules(Ranks(device, [torch.tensor([[1, 2]] * num_routes)], E=3, alignment=128))


@each_alignment
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(ids_of([[3, 0]] * 5, [[0, 3]] * 4), id="all-to-two-experts"),
        pytest.param(ids_of([[2, -1]] * 5, [[-1, 2]] * 5), id="all-to-one-expert"),
        pytest.param(ids_of([[-1, -1]] * 3, [[-1, -7]] * 2), id="no-expert-at-all"),
        pytest.param(ids_of([[1, 1], [2, 2]], [[3, 3], [0, -1]]), id="repetitions"),
        pytest.param([torch.zeros(0, 2, dtype=torch.int64)] * 2, id="no-token-at-all"),
        pytest.param([torch.zeros(0, 2, dtype=torch.int64), *ids_of([[3, 2]])], id="no-token-on-rank-0"),
    ],
)
def test_extremes(device, ids, alignment):
    check_rules(Ranks(device, ids, E=4, alignment=alignment))


# Faults


def assert_same_fault(ranks: Ranks, want: list[int], capacity=None) -> None:
    """Every rank records it, in kernels and oracle, and no table is touched."""
    untouched = torch.iinfo(torch.int32).max // 3  # what the poison fixture fills
    for rank in range(ranks.W):
        assert ranks.route(reference.route, rank, capacity)[1][: len(want)] == want
        plan, fault = ranks.route(kernels.route, rank, capacity)
        assert fault == want + [0] * (shapes.FAULT_WORDS - len(want))
        for table in (plan.row_to_slot_R, plan.pair_rows_R, plan.pair_start_R, plan.pair_output_R):
            assert (table == untouched).all()


def test_overflow_at_one_row_more_than_the_capacity(device):
    ranks = Ranks(device, ids_of([[2, 0], [2, 3]], [[3, -1]]), E=4)  # rank 1 receives 4 rows, rank 0 one
    word = shapes.FAULT_OVERFLOW | 1 << shapes.FAULT_RANK_SHIFT
    assert_same_fault(ranks, [word, 4, 3], capacity=3)
    for rank in range(2):
        plan, fault = ranks.route(kernels.route, rank, capacity=4)
        assert fault[0] == 0 and int(plan.row_start_P[-1]) == (1, 4)[rank]


def test_overflow_names_the_lowest_of_equal_ranks(device):
    ranks = Ranks(device, ids_of([[0, 1, 2, 3, 4, 5]]) + [torch.full((1, 6), -1)] * 2, E=6)
    assert_same_fault(ranks, [shapes.FAULT_OVERFLOW, 2, 1], capacity=1)


def test_overflow_counts_the_rows_of_padding(device):
    """Ranks 0 and 2 have rows of 3 experts, rank 1 of 2."""
    ids = ids_of([[0, 1, 3], [6, 2, 7]], [[8, 6, 0], [8, 4, -1]], [[-1, -1, -1]])
    ranks = Ranks(device, ids, E=9, alignment=8)
    assert_same_fault(ranks, [shapes.FAULT_OVERFLOW, 24, 23], capacity=23)
    for rank in range(3):
        plan, fault = ranks.route(kernels.route, rank, capacity=24)
        assert fault[0] == 0 and plan.rank_rows_W.tolist() == [24, 16, 24]


@each_alignment
def test_an_invalid_id_wins_over_an_overflow(device, alignment):
    ids = ids_of([[0, 1]] * 70, [[0, 1]] * 66 + [[0, -1], [1, 4], [9, 1], [2, 7]])
    ranks = Ranks(device, ids, E=2 * 2, alignment=alignment)
    word = shapes.FAULT_INVALID_ID | 1 << shapes.FAULT_RANK_SHIFT
    assert_same_fault(ranks, [word, 67, 1, 0], capacity=1)


@each_alignment
def test_an_invalid_id_of_the_lowest_rank_wins(device, alignment):
    ranks = Ranks(device, ids_of([[0, 1], [0, 0]], [[0, 1], [0, 8]], [[8, 8], [1, 1]]), E=3, alignment=alignment)
    assert_same_fault(ranks, [shapes.FAULT_INVALID_ID | 1 << shapes.FAULT_RANK_SHIFT, 1, 1])


@each_alignment
def test_an_earlier_fault_stays_and_stops_the_call(device, alignment):
    ranks = Ranks(device, ids_of([[0, 9]], [[1, 1]]), E=2, alignment=alignment)
    plan, fault = ranks.route(kernels.route, 1, fault=shapes.FAULT_ABORTED)
    assert fault == [shapes.FAULT_ABORTED] + [0] * (shapes.FAULT_WORDS - 1)
    for table in plan.tensors():
        assert (table == torch.iinfo(table.dtype).max // 3).all()


@each_alignment
@pytest.mark.parametrize(
    ("word", "expected", "found"),
    [(shapes.HEADER_T, 3, -1), (shapes.HEADER_T, 3, 4), (shapes.HEADER_T, 3, 2**40), (shapes.HEADER_CALL, 0, 9)],
)
def test_headers_that_differ_win_over_all_that_is_wrong_with_the_ids(device, alignment, word, expected, found):
    """With T out of range, 0 or T_max tokens are read."""
    ranks = Ranks(device, ids_of([[0, 1], [9, 2], [2, -1]], [[0, 3]]), E=4, alignment=alignment)
    ranks.regions[1]["header"].own[word] = found
    assert_same_fault(ranks, [shapes.FAULT_MISMATCH | 1 << shapes.FAULT_RANK_SHIFT, word, expected, found], capacity=1)


@each_alignment
def test_nothing_is_written_outside_the_tables(device, monkeypatch, alignment):
    ranks = Ranks(device, [torch.randint(-1, 6, (67, 3)) for _ in range(2)], E=6, alignment=alignment)
    rows = [int(ranks.route(reference.route, rank)[0].row_start_P[-1]) for rank in range(2)]
    memory, empty = [], torch.empty

    def guarded(shape, **how):
        size = torch.Size(shape).numel()
        memory.append((size, empty(size + 64, **how).fill_(77)))
        return memory[-1][1][32 : 32 + size].view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    for rank in range(2):
        assert ranks.route(kernels.route, rank, capacity=max(rows))[1][0] == 0
    assert len(memory) == 20
    for size, guard in memory:
        assert (guard[:32] == 77).all() and (guard[32 + size :] == 77).all()


# Sizes that only a GPU gets through


@pytest.mark.gpu
@each_alignment
@pytest.mark.parametrize(
    ("W", "T", "K", "E"),
    [
        (1, 8193, 8, 256),
        (2, 8192, 8, 256),
        (8, 8191, 8, 256),
        (3, 1000, 6, 60),
        (8, 4096, 8, 2048),
        (1, 2048, 32, 2048),
        (1, 300, 8, shapes.MAX_EXPERTS),
        (8, 20_000, 1, 8),
        (1, 64, 512, 512),
    ],
)
def test_large(device, W, T, K, E, alignment):
    ids = testing.routing("zipf(0.5)", num_ranks=W, T=T, K=K, E=E, seed=3)
    ids[-1] = ids[-1][: T // 2]
    ranks = Ranks(device, ids, E=E, T_max=T, alignment=alignment)
    for rank in {0, W - 1}:
        ranks.kernel_plan(rank)

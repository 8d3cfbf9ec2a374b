"""wait_route_plan against its oracle, three ops one after another, and its row maps against the rules of test_route."""

import time
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels_triton import test_route
from tests.kernels_triton.test_plan_slots import geometry, scaled_geometry
from tests.kernels_triton.test_route import check_rules, counted, ids_of
from tests.strategies import routings

from dist_moe import reference, shapes, testing
from dist_moe.formats import MXFP8_E4M3, NVFP4
from dist_moe.kernels_triton import wait_route_plan as kernels
from dist_moe.meeting import Wait
from dist_moe.symm import World

CALL = (3 << shapes.EPOCH_SHIFT) + 5
GENERATION = 5
NEVER_S, SOON_S = 100, 0.02
ALIGNMENT = 128  # of blocks
each_alignment = pytest.mark.parametrize("alignment", [1, ALIGNMENT])


class Ranks(test_route.Ranks):
    """As there, with signals and what plan_forward keeps of each rank, once for the kernel and once for the oracle."""

    def __init__(self, device, ids, *, E, alignment=1, save=False, depth=2, format=None, slot_bytes=10**6, **how):
        super().__init__(device, ids, E=E, alignment=alignment, **how)
        W, L = self.W, E // self.W
        g = {"slot_bytes": slot_bytes, "T_max": self.T_max, "capacity": self.worst_case_rows}
        if format is None:
            self.geometry = geometry(32, 32, **g, training=save)
        else:
            self.geometry = scaled_geometry(32, 32, **g, format=format)
        assert save <= self.geometry.training
        self.how = {"slot": 0, "depth": depth, "save": save, "geometry": self.geometry}
        words = {"dtype": torch.int64, "device": device}
        signals = World.virtual(W, device).allocate({"signals": ((shapes.NUM_STAGES, W), torch.int64)})
        self.signals = [signals[r]["signals"] for r in range(W)]
        for region in self.signals:
            region.own[shapes.PUBLISHED] = 2 * GENERATION
        self.state = {
            (op, rank): SimpleNamespace(
                fault_F=torch.zeros(shapes.FAULT_WORDS, **words),
                finished_1=torch.zeros(1, **words),
                call_1=torch.tensor([CALL], **words),
                slot_used_NW=torch.zeros(2, W, **words),
                slot_layers_N=torch.zeros(2, **words),
                slot_calls_NM=torch.zeros(2, 4, **words),
                stats_S=torch.zeros(shapes.STATS_SLOTS + 2 + L, **words),
                place=torch.full((self.geometry.place_words,), -77, **words),
            )
            for op in (kernels, reference)
            for rank in range(W)
        }

    def run(self, op, rank, capacity=None, timeout_s=NEVER_S, waits=True, **how):
        """The plan of one rank, and all that is written besides."""
        state = self.state[op, rank]
        sent_S = torch.tensor([GENERATION, 0, 0], dtype=torch.int64, device=self.device)
        wait = Wait(shapes.PUBLISHED, rank, int(timeout_s * 1e9), self.signals[rank], sent_S, state.fault_F)
        plan = op.wait_route_plan(
            after=wait if waits else None,
            **self.regions[rank],
            rank=rank,
            num_experts=self.E,
            capacity_rows=self.worst_case_rows if capacity is None else capacity,
            row_alignment=self.alignment,
            **self.how | how,
            **vars(state),
        )
        return plan, {name: tensor.tolist() for name, tensor in vars(state).items()}

    def kernel_plan(self, rank, **how):
        (got, got_state), (want, want_state) = self.run(kernels, rank, **how), self.run(reference, rank, **how)
        assert got_state == want_state and not any(got_state["fault_F"])
        for name, value in counted(want).items():
            assert counted(got)[name] == value, (rank, name)
        return got

    def faults(self, capacity=None, **how) -> list[list[int]]:
        """Of all ranks, after nothing but the place record was seen to be written."""
        untouched = torch.iinfo(torch.int32).max // 3  # what the poison fixture fills
        found = []
        for rank in range(self.W):
            before = {name: t.tolist() for name, t in vars(self.state[kernels, rank]).items()}
            (plan, got), (_, want) = (self.run(op, rank, capacity, **how) for op in (kernels, reference))
            assert got == want
            for table in (plan.row_to_slot_R, plan.pair_rows_R, plan.pair_start_R, plan.pair_output_R):
                assert (table == untouched).all()
            written = {name for name in got if got[name] != before[name]}
            assert written <= {"fault_F", "place"}
            found.append(got["fault_F"])
        return found


# The examples of the docstrings


def test_example(device):
    plan = counted(Ranks(device, ids_of([[0, 1], [1, -1], [1, 0]]), E=2).kernel_plan(0))
    assert plan["row_start_P"] == [0, 2, 5] and plan["row_to_slot_R"] == [0, 5, 1, 2, 4]
    assert plan["pair_rows_R"] == [0, 2, 3, 4, 1] and plan["pair_start_R"] == [0, 2, 3]


@triton.jit
def _fields(word_ptr, before_ptr, aligned_ptr, fields_ptr):
    word = tl.load(word_ptr)
    tl.store(before_ptr, kernels.fields_before(word))
    tl.store(aligned_ptr, kernels.aligned_fields(word, 4))
    i = tl.arange(0, 4)
    tl.store(fields_ptr + i, kernels.field_of(word, i))


def test_example_of_fields(device):
    def packed(*fields):
        return sum(field << 16 * i for i, field in enumerate(fields))

    for fields, before, aligned in (
        ((3, 0, 2, 5), (0, 3, 3, 5), (4, 0, 4, 8)),
        ((4096, 0, 0, 1), (0, 4096, 4096, 4096), (4096, 0, 0, 4)),
        ((0, 1, 4095, 0), (0, 0, 1, 4096), (0, 4, 4096, 0)),
    ):
        word, before_1, aligned_1 = (
            torch.tensor([n], dtype=torch.int64, device=device) for n in (packed(*fields), 0, 0)
        )
        fields_4 = torch.zeros(4, dtype=torch.int32, device=device)
        _fields[(1,)](word, before_1, aligned_1, fields_4)
        assert fields_4.tolist() == list(fields)
        assert [before_1.item(), aligned_1.item()] == [packed(*before), packed(*aligned)]


@pytest.mark.parametrize(
    ("problem", "is_small"),
    [
        ((2, 128, 8, 256), True),
        ((2, 256, 8, 256), True),
        ((2, 257, 8, 256), False),
        ((1, 512, 5, 16), True),
        ((1, 513, 5, 16), False),
        ((32, 1, 1, 128), True),
        ((33, 1, 1, 33), False),
        ((8, 8, 1, 512), True),
        ((8, 8, 1, 520), False),
        ((1, 1, 1, 496), True),
        ((1, 1, 1, 497), False),
    ],
)
def test_small(problem, is_small):
    assert shapes.is_small_routing(*problem) == is_small
    W, T_max, K, E = problem
    if is_small:
        config = kernels.pick_config(W, T_max, K, E // W)
        assert shapes.cdiv(E // W, 4 * config.words) < shapes.MOST_WAITING_PROGRAMS
        assert config.tokens * config.block_k <= 16 * config.lanes and config.lanes >= W


# Row maps


@settings(max_examples=25)
@given(routing=routings(), alignment=st.sampled_from([1, 2, ALIGNMENT]))
def test_any_routing(device, routing, alignment):
    check_rules(Ranks(device, routing.ids, E=routing.num_experts, T_max=routing.num_tokens_max, alignment=alignment))


@each_alignment
@pytest.mark.parametrize(
    ("W", "T", "K", "E"),
    [
        pytest.param(1, 1, 1, 1, id="one-of-all"),
        pytest.param(3, 9, 6, 60, id="E-60"),
        pytest.param(2, 7, 3, 72, id="E-72"),
        pytest.param(5, 5, 10, 160, id="E-160-K-10"),
        pytest.param(4, 6, 8, 384, id="E-384"),
        pytest.param(8, 4, 3, 8, id="one-expert-a-rank"),
        pytest.param(1, 3, 40, 496, id="most-experts-of-a-rank"),
        pytest.param(2, 128, 8, 256, id="decode"),
        pytest.param(2, 256, 8, 16, id="all-slots"),
        pytest.param(1, 4096, 1, 2, id="all-slots-of-one-expert"),
    ],
)
def test_shapes(device, W, T, K, E, alignment):
    T_max = T + 1 if shapes.is_small_routing(W, T + 1, K, E) else T
    if E == 2:
        ids = [torch.ones(T, K, dtype=torch.int64)]
    else:
        ids = testing.routing("zipf(0.5)", num_ranks=W, T=T, K=K, E=E, seed=3)
        ids[-1] = ids[-1][: T // 2 + 1]
    ranks = Ranks(device, ids, E=E, T_max=T_max, alignment=alignment)
    if W * T * K > 500:
        ranks.kernel_plan(W - 1)
    else:
        check_rules(ranks)


@pytest.mark.parametrize("routing", testing.ROUTINGS)
def test_named_routings(device, routing):
    check_rules(Ranks(device, testing.routing(routing, num_ranks=4, T=6, K=3, E=8, seed=1), E=8))


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


# The plan of what a layer keeps


@pytest.mark.parametrize("format", [None, MXFP8_E4M3, NVFP4], ids=["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("slot_bytes", [4000, 60_000, 10**6])
def test_layers_of_a_slot(device, format, slot_bytes):
    """Until the slot is full, and one layer more."""
    save, alignment = format is not NVFP4, 1 if format is None else ALIGNMENT
    ids = testing.routing("zipf(1.0)", num_ranks=2, T=7, K=2, E=6, seed=1)
    ranks = Ranks(device, ids, E=6, alignment=alignment, save=save, format=format, slot_bytes=slot_bytes)
    for layer in range(3):
        for rank in range(2):
            got, want = (ranks.run(op, rank)[1] for op in (kernels, reference))
            assert got == want
            assert (got["fault_F"][0] != 0) == (save and layer == 2)


def test_a_forward_that_runs_again_is_not_counted(device):
    ranks = Ranks(device, ids_of([[0, 1]], [[1, 1]]), E=2)
    for rank in range(2):
        ranks.kernel_plan(rank, slot=-1)


# The wait


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ([10, 10], None),
        ([12, 10], None),  # rank 0 is one ahead
        ([13, 10], None),  # and has given up there
        ([10, 8], (shapes.FAULT_TIMEOUT, 1, shapes.PUBLISHED, GENERATION)),
        ([8, 8], (shapes.FAULT_TIMEOUT, 0, shapes.PUBLISHED, GENERATION)),
        ([10, 9], (shapes.FAULT_TIMEOUT, 1, shapes.PUBLISHED, GENERATION)),  # aborted in an older generation
        ([10, 11], (shapes.FAULT_ABORTED, 1, shapes.PUBLISHED, 0)),
        ([11, 8], (shapes.FAULT_ABORTED, 0, shapes.PUBLISHED, 0)),  # nobody waits for the other
    ],
)
def test_waits_as_wait_does(device, flags, fault):
    ranks = Ranks(device, ids_of([[0, 1], [1, -1]], [[0, 0]]), E=2, save=True)
    for region in ranks.signals:
        region.own[shapes.PUBLISHED] = torch.tensor(flags)
    if fault is None:
        check_rules(ranks)
    else:
        code, peer, a, b = fault
        word = code | peer << shapes.FAULT_RANK_SHIFT
        assert ranks.faults(timeout_s=SOON_S) == [[word, a, b, 0, 0, 0, 0, 0]] * 2


def test_a_missing_peer_costs_one_deadline(device):
    """Of all programs together, however they run; at once where a fault is set before."""
    ranks = Ranks(device, ids_of([[0] * 8], [[0] * 8]), E=128)
    for region in ranks.signals:
        region.own[shapes.PUBLISHED, 1] = 0
    for fault, least_s in ((shapes.FAULT_SLOT, 0), (0, 0.3)):  # the first compiles
        ranks.state[kernels, 0].fault_F[0] = fault
        start = time.monotonic()
        _, state = ranks.run(kernels, 0, timeout_s=0.3)
        seconds = time.monotonic() - start
        assert state["fault_F"][0] & 0xFF == (shapes.FAULT_TIMEOUT if least_s else fault)
        assert least_s <= seconds and (not least_s or seconds < 2 * least_s + 0.3)


def test_without_a_wait(device):
    """Of emulated peers: flags are not looked at."""
    ranks = Ranks(device, ids_of([[0, 1], [1, -1]], [[0, 0]]), E=2)
    for region in ranks.signals:
        region.own.zero_()
    for rank in range(2):
        ranks.kernel_plan(rank, waits=False)


# Faults


def test_overflow_at_one_row_more_than_the_capacity(device):
    ranks = Ranks(device, ids_of([[2, 0], [2, 3]], [[3, -1]]), E=4, save=True)  # rank 1 receives 4 rows, rank 0 one
    word = shapes.FAULT_OVERFLOW | 1 << shapes.FAULT_RANK_SHIFT
    assert ranks.faults(capacity=3) == [[word, 4, 3, 0, 0, 0, 0, 0]] * 2
    ranks = Ranks(device, ids_of([[2, 0], [2, 3]], [[3, -1]]), E=4)
    for rank in range(2):
        ranks.kernel_plan(rank, capacity=4)


def test_overflow_counts_the_rows_of_padding(device):
    """Ranks 0 and 2 have rows of 3 experts, rank 1 of 2; the lowest of equal ranks is named."""
    ids = ids_of([[0, 1, 3], [6, 2, 7]], [[8, 6, 0], [8, 4, -1]], [[-1, -1, -1]])
    assert Ranks(device, ids, E=9, alignment=8).faults(capacity=23) == [[shapes.FAULT_OVERFLOW, 24, 23] + [0] * 5] * 3


@each_alignment
def test_an_invalid_id_wins_over_an_overflow(device, alignment):
    ids = ids_of([[0, 1]] * 70, [[0, 1]] * 66 + [[0, -1], [1, 4], [9, 1], [2, 7]])
    word = shapes.FAULT_INVALID_ID | 1 << shapes.FAULT_RANK_SHIFT
    found = Ranks(device, ids, E=4, alignment=alignment, save=True).faults(capacity=1)
    assert found == [[word, 67, 1, 0, 0, 0, 0, 0]] * 2


@each_alignment
@pytest.mark.parametrize(
    ("word", "expected", "found"),
    [(shapes.HEADER_T, 3, -1), (shapes.HEADER_T, 3, 4), (shapes.HEADER_T, 3, 2**40), (shapes.HEADER_CALL, 0, 9)],
)
def test_headers_that_differ_win_over_all_that_is_wrong_with_the_ids(device, alignment, word, expected, found):
    ranks = Ranks(device, ids_of([[0, 1], [9, 2], [2, -1]], [[0, 3]]), E=4, alignment=alignment)
    ranks.regions[1]["header"].own[word] = found
    fault = [shapes.FAULT_MISMATCH | 1 << shapes.FAULT_RANK_SHIFT, word, expected, found, 0, 0, 0, 0]
    assert ranks.faults(capacity=1) == [fault] * 2


def test_an_earlier_fault_stays_and_stops_the_call(device):
    ranks = Ranks(device, ids_of([[0, 9]], [[1, 1]]), E=2, save=True)
    for state in ranks.state.values():
        state.fault_F[0] = shapes.FAULT_ABORTED
    assert ranks.faults() == [[shapes.FAULT_ABORTED] + [0] * 7] * 2


@each_alignment
def test_nothing_is_written_outside_the_tables(device, monkeypatch, alignment):
    ranks = Ranks(device, [torch.randint(-1, 6, (67, 3)) for _ in range(2)], E=6, alignment=alignment)
    rows = [int(ranks.run(reference, rank)[0].row_start_P[-1]) for rank in range(2)]
    memory, empty = [], torch.empty

    def guarded(shape, **how):
        size = torch.Size(shape).numel()
        memory.append((size, empty(size + 64, **how).fill_(77)))
        return memory[-1][1][32 : 32 + size].view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    for rank in range(2):
        assert ranks.run(kernels, rank, capacity=max(rows))[1]["fault_F"][0] == 0
    assert len(memory) == 18
    for size, guard in memory:
        assert (guard[:32] == 77).all() and (guard[32 + size :] == 77).all()

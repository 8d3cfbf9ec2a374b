"""The slot planner against its oracle and against the rules, stated once more below in whole bytes.

Slots, live layers and scratch are followed through forwards and backwards: what is in use never overlaps, lies inside
the buffer, and is given back.
"""

import itertools
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_moe import BlockScaledConfig, Config, reference, shapes
from dist_moe.formats import MXFP8_E4M3, NVFP4
from dist_moe.kernels_triton import plan_slots as kernels
from dist_moe.planner import output_columns, scratch_bytes, stage_columns
from dist_moe.shapes import Geometry, align

UNTOUCHED = -77
DEEPEST = 16  # layers of a slot, at most
L = 3  # local experts
CALL = (3 << shapes.EPOCH_SHIFT) + 5  # the fifth call of epoch 3


def geometry(D, F, *, slot_bytes, T_max=4, balanced=4, num_slots=1, capacity=64, training=True) -> Geometry:
    x_bytes = (2 * T_max * D + 127) // 128 * 128
    x_h1_bytes = (x_bytes + (balanced + 1) * 4 * F + 127) // 128 * 128
    pitches = (2 * D, 4 * F, 2 * F, 2 * D) if training else (2 * D, 4 * F, 2 * F)
    total = num_slots * slot_bytes + sum((capacity + 1) * pitch for pitch in pitches)
    return Geometry(D, F, slot_bytes, x_bytes, x_h1_bytes, total, training)


def scaled_geometry(
    D, F, *, slot_bytes, T_max=4, balanced=128, num_slots=1, capacity=512, format=MXFP8_E4M3, stage=0, expanded=False
):
    """As the planner makes it; training in MXFP8, inference in NVFP4."""
    g = geometry(D, F, slot_bytes=slot_bytes, T_max=T_max, balanced=balanced, training=not format.two_level)
    how = {"inference": True} if format.two_level else {}
    config = Config(T_max, D, F, 1, 1, 1, block_scaled=BlockScaledConfig(format.name), **how)
    total = num_slots * slot_bytes * g.training + scratch_bytes(config, capacity, expanded=expanded)
    how = {"stage_columns": stage, "output_columns": output_columns(config, capacity), "expanded": expanded}
    return replace(g, total_bytes=total, format=format, **how)


class Planner:
    """One rank's planner state, driven through the kernels or through the oracle."""

    def __init__(self, ops, device, g: Geometry, *, W, rank=0, num_slots=1):
        self.ops, self.device, self.g, self.rank = ops, device, g, rank
        self.slot_used_NW = torch.zeros(num_slots, W, dtype=torch.int64, device=device)
        self.slot_layers_N = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.slot_calls_NM = torch.zeros(num_slots, DEEPEST, dtype=torch.int64, device=device)
        self.fault_F = torch.zeros(shapes.FAULT_WORDS, dtype=torch.int64, device=device)
        self.stats_S = torch.zeros(shapes.STATS_SLOTS + num_slots + L, dtype=torch.int64, device=device)
        self.call_1 = torch.tensor([CALL], dtype=torch.int64, device=device)
        self.header = SimpleNamespace(own=torch.full((shapes.HEADER_WORDS,), UNTOUCHED, device=device))

    def _run(self, op, *args, **kwargs) -> torch.Tensor:
        place = torch.full((self.g.place_words,), UNTOUCHED, dtype=torch.int64, device=self.device)
        op(
            *args,
            rank=self.rank,
            geometry=self.g,
            call_1=self.call_1,
            slot_used_NW=self.slot_used_NW,
            slot_layers_N=self.slot_layers_N,
            slot_calls_NM=self.slot_calls_NM,
            place=place,
            fault_F=self.fault_F,
            **kwargs,
        )
        return place

    def _num_rows(self, rank_rows) -> torch.Tensor:
        """Rows of this rank over L experts: all but one in the last, where there are several."""
        rows = rank_rows[self.rank]
        one = min(rows, 1)
        return torch.tensor([one, 0, rows - one], dtype=torch.int32, device=self.device)

    def _rows(self, rank_rows) -> torch.Tensor:
        return torch.tensor(rank_rows, dtype=torch.int64, device=self.device)

    def forward(self, rank_rows, *, slot=0, depth=1, save=True) -> torch.Tensor:
        tables = (self._rows(rank_rows), self._num_rows(rank_rows))
        return self._run(self.ops.plan_forward, *tables, slot=slot, depth=depth, save=save, stats_S=self.stats_S)

    def backward(self, saved_place, rank_rows) -> torch.Tensor:
        return self._run(self.ops.plan_backward, saved_place, self._rows(rank_rows), header=self.header)

    @property
    def state(self) -> tuple:
        return self.slot_used_NW.tolist(), self.slot_layers_N.tolist(), self.fault_F.tolist()


class Both:
    """A kernel planner and an oracle planner side by side; every step must leave them equal."""

    def __init__(self, device, g, **how):
        self.kernel, self.oracle = Planner(kernels, device, g, **how), Planner(reference, device, g, **how)

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return self._same(self.kernel.forward(*args, **kwargs), self.oracle.forward(*args, **kwargs))

    def backward(self, saved_place, rank_rows) -> torch.Tensor:
        return self._same(self.kernel.backward(saved_place, rank_rows), self.oracle.backward(saved_place, rank_rows))

    def _same(self, got, want) -> torch.Tensor:
        assert got.tolist() == want.tolist() and self.kernel.state == self.oracle.state
        assert torch.equal(self.kernel.header.own, self.oracle.header.own)
        assert torch.equal(self.kernel.slot_calls_NM, self.oracle.slot_calls_NM)
        assert torch.equal(self.kernel.stats_S, self.oracle.stats_S)
        return got

    @property
    def state(self) -> tuple:
        return self.kernel.state


def word(place, name) -> int:
    return int(place[getattr(shapes, f"PLACE_{name}")])


def words(place, *names) -> list[int]:
    return [word(place, name) for name in names]


# The rules in bytes


def kept_bytes(g: Geometry, rows: int, kept: int) -> int:
    """One row more of x_RD and of h1 where they are kept, the sum rounded up to 128 bytes."""
    if g.format is not None and kept == shapes.KEEPS_ROWS and not g.expanded:
        raw = (rows + 1) * (g.hidden_dim + 4 * g.intermediate_dim) + rows // 32 * align(g.hidden_dim, 128)
        return raw - raw % 128
    raw = (rows + 1) * 2 * g.hidden_dim if kept == shapes.KEEPS_ROWS else g.x_bytes
    raw += (rows + 1) * 4 * g.intermediate_dim if kept != shapes.KEEPS_X else 0
    return raw + -raw % 128


@dataclass
class Rules:
    """The state of the slots as Python ints; forward says what must be decided, backward takes it back."""

    g: Geometry
    W: int
    used: dict = field(default_factory=dict)  # (slot, rank) -> bytes
    layers: dict = field(default_factory=dict)  # slot -> [bytes of each rank]

    def forward(self, rank_rows, slot, depth) -> int:
        stack = self.layers.setdefault(slot, [])
        size = {kept: [kept_bytes(self.g, rows, kept) for rows in rank_rows] for kept in range(3)}

        def fits(kept: int, later: int) -> bool:
            room = self.g.slot_bytes - (depth - 1 - len(stack)) * later
            return all(self.used.get((slot, w), 0) + size[kept][w] <= room for w in range(self.W))

        kept = shapes.KEEPS_X
        if fits(shapes.KEEPS_H1, self.g.x_bytes):
            kept = shapes.KEEPS_H1
        cheaper = all(rows <= x_h1 for rows, x_h1 in zip(size[shapes.KEEPS_ROWS], size[shapes.KEEPS_H1], strict=True))
        if fits(shapes.KEEPS_ROWS, self.g.x_bytes if cheaper else self.g.x_h1_bytes):
            kept = shapes.KEEPS_ROWS
        stack.append(size[kept])
        for w in range(self.W):
            self.used[slot, w] = self.used.get((slot, w), 0) + stack[-1][w]
        return kept

    def backward(self, slot) -> None:
        for w, size in enumerate(self.layers[slot].pop()):
            self.used[slot, w] -= size


def slot_bytes_in_use(g: Geometry, place, rows: int, num_tokens_max: int) -> list[tuple[int, int]]:
    """Byte ranges that a live layer holds in its slot."""
    if word(place, "KEPT") == shapes.KEEPS_ROWS and g.format is not None:
        held = _column_bundle(g, place, "X", rows, g.hidden_dim)
    elif word(place, "KEPT") == shapes.KEEPS_ROWS:
        held = [_region(word(place, "XR"), rows, 2 * g.hidden_dim)]
    else:
        held = [(2 * word(place, "X"), 2 * word(place, "X") + 2 * g.hidden_dim * num_tokens_max)]
    if word(place, "KEPT") != shapes.KEEPS_X:
        held.append(_region(word(place, "H1"), rows, 4 * g.intermediate_dim))
    return held


def _column_bundle(g: Geometry, place, name: str, rows: int, width: int) -> list[tuple[int, int]]:
    if g.expanded:
        return [_region(word(place, f"{name}_COLUMNS"), rows, 2 * width)]
    scales = int(place[getattr(shapes, f"PLACE_{name}_COLUMNS") + 1])
    assert scales % 128 == 0
    return [_region(word(place, f"{name}_COLUMNS"), rows, width), (scales, scales + rows // 32 * align(width, 128))]


def scaled_scratch_in_use(g: Geometry, place, rows: int) -> list[list[tuple[int, int]]]:
    """Byte ranges of what a block-scaled call uses at the same time, moment by moment."""
    D, F, kept = g.hidden_dim, g.intermediate_dim, word(place, "KEPT")
    h1 = [_region(word(place, "H1"), rows, 4 * F)] if kept == shapes.KEEPS_X else []

    def row_bundle(name: str, width: int) -> list[tuple[int, int]]:
        held, scales = [], word(place, "ROW_SCALES")
        if g.format.two_level:
            held.append(_region(word(place, "OUTER"), rows, 4))
        if g.expanded and not g.training:
            return [*held, _region(word(place, name), rows, 2 * align(width, 128 * g.format.values_per_byte))]
        held.append(_region(word(place, name), rows, width // g.format.values_per_byte))
        return [*held, (scales, scales + rows * align(width // g.format.block, 4))]

    if not g.training:
        h3 = [_region(word(place, "H3"), rows, 2 * g.output_columns)]
        return [row_bundle("XR", D) + h1, row_bundle("H2", F) + h1, row_bundle("H2", F) + h3]
    x_columns = _column_bundle(g, place, "X", rows, D) if kept != shapes.KEEPS_ROWS else []
    dy_columns, h2_columns, g1_columns = (
        _column_bundle(g, place, n, rows, w) for n, w in (("DY", D), ("H2", F), ("G1", 2 * F))
    )
    stage = [_region(word(place, "STAGE"), rows, 2 * g.stage_columns)] if g.stage_columns else []
    wide = [_region(word(place, "H3"), rows, 2 * D)]
    g2, dy = [_region(word(place, "G2"), rows, 2 * F)], row_bundle("XR", D)
    g2_kept = g2 if F > 32 and not g.expanded else []  # else columns are written over it
    if g.expanded:
        assert g2 == h2_columns  # element for element
    return [
        stage + dy + x_columns + h1,  # x arrives
        row_bundle("H2", F) + wide + h1,  # the last of a forward
        stage + dy + x_columns + dy_columns + h1,  # dy arrives
        dy + g2 + h1 + x_columns + dy_columns,
        row_bundle("G1_ROWS", 2 * F) + g1_columns + h2_columns + g2_kept + h1 + x_columns + dy_columns,
        row_bundle("G1_ROWS", 2 * F) + wide,
    ]


def scratch_in_use(g: Geometry, place, rows: int) -> list[tuple[int, int]]:
    """Byte ranges of a call's scratch; in inference h3 lies over x_RD on purpose."""
    pitches = {"H2": 2 * g.intermediate_dim}
    if word(place, "KEPT") != shapes.KEEPS_ROWS:
        pitches["XR"] = 2 * g.hidden_dim
    if word(place, "KEPT") == shapes.KEEPS_X:
        pitches["H1"] = 4 * g.intermediate_dim
    if g.training:
        pitches["H3"] = 2 * g.hidden_dim
    return [_region(word(place, name), rows, pitch) for name, pitch in pitches.items()]


def _region(first_row, rows, pitch) -> tuple[int, int]:
    return first_row * pitch, (first_row + rows) * pitch


def moments(g: Geometry, place, rows: int) -> list[list[tuple[int, int]]]:
    return [scratch_in_use(g, place, rows)] if g.format is None else scaled_scratch_in_use(g, place, rows)


def assert_disjoint(ranges, total_bytes) -> None:
    ranges = sorted(r for r in ranges if r[0] < r[1])
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)), ranges
    assert not ranges or (ranges[0][0] >= 0 and ranges[-1][1] <= total_bytes), ranges


# The examples of the docstrings


def test_example_of_scratch(device):
    g = geometry(32, 32, slot_bytes=0)
    g = replace(g, total_bytes=1024)
    place = Both(device, g, W=1).forward([2], save=False)
    assert [word(place, name) for name in ("XR", "H1", "H2", "H3")] == [14, 5, 8, 6]
    assert words(place, "KEPT", "SKIP_X", "SKIP_H1") == [shapes.KEEPS_X, 1, 1]
    planner = Both(device, replace(geometry(32, 32, slot_bytes=640, T_max=2), total_bytes=1024), W=1)
    peaks = []
    for save in (True, False):
        place = planner.forward([2], save=save)
        peaks.append(int(planner.kernel.stats_S[shapes.STATS_SCRATCH]))
        assert words(place, "H2", "H3") == ([14, 12] if save else [8, 6])
    assert peaks == [256, 640]


def test_example_of_forward_and_backward(device):
    g = geometry(32, 32, slot_bytes=3072)
    planner = Both(device, g, W=2)
    first = planner.forward([4, 3], depth=2)
    assert words(first, "KEPT", "SKIP_X", "SKIP_H1", "XR", "H1", "LAYER", "EPOCH") == [2, 1, 1, 0, 2, 0, 3]
    assert planner.state[:2] == ([[1024, 768]], [1])
    other = planner.forward([2, 11], depth=2)
    assert word(other, "KEPT") == shapes.KEEPS_ROWS
    planner.backward(other, [2, 11])

    second = planner.forward([2, 12], depth=2)
    assert words(second, "KEPT", "SKIP_X", "SKIP_H1", "X", "H1", "LAYER") == [1, 0, 1, 512, 10, 1]
    assert planner.state[:2] == ([[1664, 2688]], [2])
    back = planner.backward(second, [2, 12])
    assert words(back, "SKIP_X", "SKIP_H1", "H1") == [0, 1, 10] and planner.state[:2] == ([[1024, 768]], [1])
    told = planner.kernel.header.own[shapes.HEADER_KEPT : shapes.HEADER_FORWARD + 1]
    assert told.tolist() == [shapes.KEEPS_H1, 0, 1, CALL]  # slot 0, layer 1, the call of the forward
    again = planner.backward(second, [2, 12])
    assert planner.state == ([[1024, 768]], [1], [shapes.FAULT_SLOT, 0, 1, 0, 0, 0, 0, 0])
    assert words(again, "SKIP_X", "SKIP_H1") == [1, 1]


@pytest.mark.parametrize("rows, kept", [(9, shapes.KEEPS_ROWS), (11, shapes.KEEPS_H1), (20, shapes.KEEPS_X)])
def test_example_of_the_choice(rows, kept, device):
    assert word(Both(device, geometry(32, 32, slot_bytes=3072), W=1).forward([rows], depth=2), "KEPT") == kept


# Decisions by hand: D = F = 128, T_max = 4, 8 balanced rows. x takes 1024 bytes, x and h1 of R rows 1024 + 512 (R + 1),
# which is 5632 where they are balanced, and R rows 768 (R + 1): all multiples of 128.


@pytest.mark.parametrize(
    ("slot_bytes", "layers", "kept", "used"),
    [
        pytest.param(13824, [(8, 8), (8, 8)], [2, 2], [13824, 13824], id="balanced-exactly-full"),
        pytest.param(13824, [(12, 4), (4, 12)], [1, 2], [11520, 13568], id="rows-of-the-first-would-push-h1-out"),
        pytest.param(13824, [(4, 12), (8, 8)], [1, 1], [8704 + 512, 8704 + 4608], id="other-rank-is-full"),
        pytest.param(13824, [(16, 0), (8, 8)], [1, 0], [10752, 2560], id="h1-of-the-first-leaves-x"),
        pytest.param(10752, [(16, 0), (8, 8)], [1, 0], [10752, 2560], id="exactly"),
        pytest.param(10751, [(16, 0), (8, 8)], [0, 2], [7936, 7936], id="one-byte-less"),
        pytest.param(18688, [(16, 0), (8, 8)], [2, 1], [18688, 6400], id="rows-leave-exactly-x-and-h1"),
        pytest.param(18687, [(16, 0), (8, 8)], [1, 2], [16640, 8448], id="one-byte-less-than-x-and-h1"),
        pytest.param(2048, [(8, 8), (8, 8)], [0, 0], [2048, 2048], id="smallest-slot"),
        pytest.param(2048, [(0, 0), (0, 0)], [2, 2], [1536, 1536], id="rows-that-are-less-than-x"),
    ],
)
def test_traces(device, slot_bytes, layers, kept, used):
    planner = Both(device, geometry(128, 128, slot_bytes=slot_bytes, balanced=8), W=2)
    places = [planner.forward(rows, depth=2) for rows in layers]
    assert [word(place, "KEPT") for place in places] == kept and planner.state[0] == [used]
    for place, rows in zip(reversed(places), reversed(layers), strict=True):
        planner.backward(place, rows)
    assert planner.state == ([[0, 0]], [0], [0] * shapes.FAULT_WORDS)


# MXFP8, D = F = 128, T_max = 256, 640 balanced rows: x takes 65536 bytes, R rows 640 (R + 1) + 4 R.


@pytest.mark.parametrize(
    ("layers", "kept", "used"),
    [
        pytest.param([(512, 512), (640, 640)], [2, 2], [330368 + 412800] * 2, id="fewer-first"),
        pytest.param([(640, 640), (640, 640)], [2, 2], [825600, 825600], id="exactly-full"),
        pytest.param([(768, 512), (640, 640)], [1, 0], [459264 + 65536, 328192 + 65536], id="one-rank-is-full"),
        pytest.param([(0, 0), (640, 640)], [2, 2], [640 + 412800] * 2, id="no-rows"),
    ],
)
def test_scaled_traces(device, layers, kept, used):
    planner = Both(device, scaled_geometry(128, 128, slot_bytes=825600, T_max=256, balanced=640), W=2)
    places = [planner.forward(rows, depth=2) for rows in layers]
    assert [word(place, "KEPT") for place in places] == kept and planner.state[0] == [used]
    for place, rows in zip(reversed(places), reversed(layers), strict=True):
        planner.backward(place, rows)
    assert planner.state == ([[0, 0]], [0], [0] * shapes.FAULT_WORDS)


def test_a_slot_that_was_to_hold_fewer_layers_has_no_room(device):
    """The first layer left nothing for a second: a fault before anything is placed, not a write past the slot."""
    planner = Both(device, geometry(128, 128, slot_bytes=6400, balanced=8), W=2)
    assert word(planner.forward([7, 2], depth=1), "KEPT") == shapes.KEEPS_ROWS
    before = planner.state[:2]
    place = planner.forward([1, 1], depth=2)
    assert planner.state[2][:4] == [shapes.FAULT_SLOT_ROOM, 0, 1, 2] and planner.state[:2] == before
    assert words(place, "KEPT", "SKIP_X", "SKIP_H1", "X", "XR") == [shapes.KEEPS_X, 1, 1, 0, 0]


def test_the_first_run_of_a_checkpoint_is_not_counted(device):
    planner = Both(device, geometry(32, 32, slot_bytes=3072), W=1)
    planner.forward([5], slot=-1, save=False)
    assert planner.kernel.stats_S.tolist() == [0, 0, 0, 0, 0, 0, 1600, 0, 0, 0, 0]  # but for its scratch
    planner.forward([5], slot=0, save=False)
    assert planner.kernel.stats_S.tolist() == [1, 5, 5, 0, 0, 0, 1600, 0, 1, 0, 4]


# Any program of forwards and backwards

MAX_ROWS = 40


@dataclass(frozen=True)
class Program:
    """Sizes, and steps: (slot, rows of every rank, forward?); a step that the slot does not allow is left out."""

    W: int
    num_slots: int
    depth: int
    num_tokens_max: int
    geometry: Geometry
    steps: list


@st.composite
def programs(draw) -> Program:
    W, num_slots, depth = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    D, F, T_max = draw(st.integers(1, 5)) * 32, draw(st.integers(1, 5)) * 32, draw(st.integers(1, 9))
    smallest = depth * ((2 * T_max * D + 127) // 128 * 128)
    slot_bytes = smallest + 128 * draw(st.integers(0, 40) | st.integers(100, 2000))
    how = {"T_max": T_max, "num_slots": num_slots}
    rows = st.integers(0, MAX_ROWS)
    if draw(st.booleans()):
        rows = st.integers(0, 3).map(lambda atoms: 128 * atoms)
        how |= {"expanded": draw(st.booleans())}
        config = Config(T_max, D, F, 1, 1, 1, block_scaled=BlockScaledConfig())
        room = stage_columns(config, expanded=how["expanded"])
        how |= {
            "balanced": 128 * draw(st.integers(0, 2)),
            "capacity": 3 * 128,
            "stage": draw(st.sampled_from([0, room])),
        }
        g = scaled_geometry(D, F, slot_bytes=slot_bytes, **how)
    else:
        g = geometry(D, F, slot_bytes=slot_bytes, balanced=draw(st.integers(0, 20)), capacity=MAX_ROWS, **how)
    rows = st.lists(rows, min_size=W, max_size=W)
    steps = draw(st.lists(st.tuples(st.integers(0, num_slots - 1), rows, st.booleans()), max_size=10))
    return Program(W, num_slots, depth, T_max, g, steps)


@settings(max_examples=40)
@given(program=programs(), data=st.data())
def test_any_program(device, program, data):
    g, rank = program.geometry, data.draw(st.integers(0, program.W - 1))
    planner = Both(device, g, W=program.W, rank=rank, num_slots=program.num_slots)
    rules = Rules(g, program.W)
    live = {slot: [] for slot in range(program.num_slots)}  # slot -> [(place, rows of every rank)]

    def check(place, rows):
        """Everything live and the scratch of this call, together."""
        held = [
            r
            for stack in live.values()
            for saved, its_rows in stack
            for r in slot_bytes_in_use(g, saved, its_rows[rank], program.num_tokens_max)
        ]
        for scratch in moments(g, place, rows[rank]):
            assert_disjoint(held + scratch, g.total_bytes)
        for slot, stack in live.items():
            in_slot = [
                r for saved, its in stack for r in slot_bytes_in_use(g, saved, its[rank], program.num_tokens_max)
            ]
            assert all(slot * g.slot_bytes <= a and b <= (slot + 1) * g.slot_bytes for a, b in in_slot if a < b)
        used = planner.state[0]
        assert all(used[slot][w] == size for (slot, w), size in rules.used.items())
        assert all(size <= g.slot_bytes for sizes in used for size in sizes)

    def backward(slot):
        saved, rows = live[slot][-1]
        place = planner.backward(saved, rows)
        rules.backward(slot)
        kept = word(saved, "KEPT")
        skips = [kept == shapes.KEEPS_ROWS, kept != shapes.KEEPS_X]
        assert words(place, "KEPT", "SKIP_X", "SKIP_H1") == [kept, *skips] == words(saved, "KEPT", "SKIP_X", "SKIP_H1")
        in_slot = {shapes.KEEPS_X: ["X"], shapes.KEEPS_H1: ["X", "H1"], shapes.KEEPS_ROWS: ["XR", "H1"]}[kept]
        if g.format is not None:
            assert word(saved, "SKIP_COLUMNS") == (kept != shapes.KEEPS_ROWS)
            in_slot = ["X_COLUMNS" if name == "XR" else name for name in in_slot]
        assert words(place, *in_slot) == words(saved, *in_slot)
        check(place, rows)  # before the layer goes: its backward still reads what was saved
        live[slot].pop()

    for slot, rows, is_forward in program.steps:
        if is_forward and len(live[slot]) < program.depth:
            place = planner.forward(rows, slot=slot, depth=program.depth)
            assert word(place, "KEPT") == rules.forward(rows, slot, program.depth)
            live[slot].append((place, rows))
            check(place, rows)
        elif live[slot]:
            backward(slot)
    for slot, stack in live.items():
        while stack:
            backward(slot)
    zeros = [[0] * program.W] * program.num_slots
    assert planner.state == (zeros, [0] * program.num_slots, [0] * shapes.FAULT_WORDS)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize(("D", "F"), [(32, 32), (96, 160), (160, 32), (256, 32)])
@pytest.mark.parametrize("format", [MXFP8_E4M3, NVFP4], ids=lambda format: format.name)
@pytest.mark.parametrize("expanded", [False, True], ids=["codes", "expanded"])
def test_scaled_calls_without_saving(device, monkeypatch, D, F, format, one_pass, expanded):
    """Also the largest call that there is room for, in inference h3 with all columns of a pass."""
    if not one_pass:
        monkeypatch.setattr("dist_moe.planner.ONE_PASS_BYTES", 0)
    g = scaled_geometry(D, F, slot_bytes=1024, format=format, expanded=expanded)
    assert g.training or (g.output_columns == D) == (one_pass or D <= 2 * F)
    for rows in (0, 128, 512):
        planner = Both(device, g, W=1)
        place = planner.forward([rows], save=False)
        for scratch in moments(g, place, rows):
            assert_disjoint([(0, 1024 * g.training), *scratch], g.total_bytes)
        assert 0 <= planner.kernel.stats_S[shapes.STATS_SCRATCH] <= g.total_bytes - 1024 * g.training
        assert words(place, "SKIP_X", "SKIP_H1", "SKIP_COLUMNS", "SLOT") == [1, 1, 1, 0]


def test_example_of_scaled_scratch(device):
    g = replace(scaled_geometry(32, 32, slot_bytes=0), total_bytes=80000)
    planner = Both(device, g, W=1)
    place = planner.forward([128], save=False)
    assert words(place, "H1", "XR", "H2", "G1_ROWS", "H3", "G2") == [477, 1780, 1780, 826, 697, 569]
    columns = slice(shapes.PLACE_X_COLUMNS, shapes.PLACE_STAGE)
    assert place[columns].tolist() == [1394, 78976, 1522, 78464, 1010, 77952, 569, 77440]
    assert word(place, "ROW_SCALES") == 79488 and int(planner.kernel.stats_S[shapes.STATS_SCRATCH]) == 47680


def test_example_of_scratch_with_expanded_columns(device):
    g = replace(scaled_geometry(32, 32, slot_bytes=0, expanded=True), total_bytes=80000)
    planner = Both(device, g, W=1)
    place = planner.forward([128], save=False)
    assert words(place, "ROW_SCALES", "H1", "XR", "H2", "G1_ROWS") == [79488, 493, 1844, 1844, 858]
    assert words(place, "H3", "DY_COLUMNS", "X_COLUMNS", "G1_COLUMNS") == [729, 729, 601, 172]
    assert words(place, "H2_COLUMNS", "G2") == [216, 216]
    assert int(planner.kernel.stats_S[shapes.STATS_SCRATCH]) == 66176


@settings(max_examples=20)
@given(rows=st.integers(0, MAX_ROWS), D=st.integers(1, 5), F=st.integers(1, 5), training=st.booleans())
def test_calls_without_saving(device, rows, D, F, training):
    g = geometry(32 * D, 32 * F, slot_bytes=1024, capacity=MAX_ROWS, num_slots=training, training=training)
    planner = Both(device, g, W=1)
    place = planner.forward([rows], save=False)
    assert_disjoint([(0, 1024 * training), *scratch_in_use(g, place, rows)], g.total_bytes)
    if not training:
        assert word(place, "H3") == word(place, "XR")
    assert planner.state == ([[0]], [0], [0] * shapes.FAULT_WORDS)
    assert words(place, "SKIP_X", "SKIP_H1", "SLOT") == [1, 1, 0]


def test_large_buffers(device):
    """Byte offsets past 2^31 and 2^40."""
    g = geometry(7168, 2048, slot_bytes=2**39, T_max=8192, num_slots=4, capacity=2**21)
    planner = Both(device, g, W=2, rank=1, num_slots=4)
    place = planner.forward([2**20, 2**21], slot=3, depth=1)
    ranges = slot_bytes_in_use(g, place, 2**21, 8192) + scratch_in_use(g, place, 2**21)
    assert word(place, "KEPT") == shapes.KEEPS_ROWS and min(ranges)[0] >= 3 * 2**39
    assert_disjoint(ranges, g.total_bytes)


# Out of order


def fault(planner) -> list[int]:
    return planner.state[2][:4]


@pytest.fixture
def planner(device) -> Both:
    """Rank 1 of 2, two slots."""
    return Both(device, geometry(64, 32, slot_bytes=8192, num_slots=2), W=2, rank=1, num_slots=2)


CODE = shapes.FAULT_SLOT | 1 << shapes.FAULT_RANK_SHIFT


def test_more_layers_than_the_slot_has(planner):
    planner.forward([1, 2], slot=1, depth=1)
    before = planner.state[:2]
    place = planner.forward([1, 2], slot=1, depth=1)
    assert fault(planner) == [CODE, 1, 1, 1] and planner.state[:2] == before
    assert words(place, "KEPT", "SKIP_X", "SKIP_H1", "XR") == [shapes.KEEPS_X, 1, 1, 0]


def test_a_second_backward(planner):
    place = planner.forward([1, 2], slot=1)
    planner.backward(place, [1, 2])
    planner.backward(place, [1, 2])
    assert fault(planner) == [CODE, 1, 0, -1]
    assert planner.state[:2] == ([[0, 0], [0, 0]], [0, 0])


def test_the_wrong_order_of_backwards(planner):
    first, _ = (planner.forward([1, 2], slot=1, depth=2) for _ in range(2))
    before = planner.state[:2]
    planner.backward(first, [1, 2])
    assert fault(planner) == [CODE, 1, 0, 1] and planner.state[:2] == before


def test_state_from_before_a_reset(planner):
    saved = planner.forward([1, 2], slot=1)
    for one in (planner.kernel, planner.oracle):
        one.call_1.fill_(4 << shapes.EPOCH_SHIFT)
    planner.backward(saved, [1, 2])
    assert fault(planner) == [CODE, 1, 0, 0]


def test_a_record_that_no_forward_wrote(planner):
    """As the allocator gave it: its slot may be anything."""
    garbage = torch.full((shapes.PLACE_WORDS,), 2**61, dtype=torch.int64, device=planner.kernel.device)
    place = planner.kernel.backward(garbage, [1, 2])
    assert fault(planner)[0] == CODE and words(place, "SKIP_X", "SKIP_H1") == [1, 1]
    assert planner.state[:2] == ([[0, 0], [0, 0]], [0, 0])


def test_an_earlier_fault_stays_and_stops_the_call(planner):
    saved = planner.forward([1, 2], slot=1)
    before = planner.state[:2]
    for one in (planner.kernel, planner.oracle):
        one.fault_F[0] = shapes.FAULT_OVERFLOW
    for place in (planner.forward([1, 2], slot=0), planner.backward(saved, [1, 2])):
        assert words(place, "KEPT", "SKIP_X", "SKIP_H1") == [shapes.KEEPS_X, 1, 1]
        assert place.tolist().count(0) == shapes.PLACE_WORDS - 2
    assert planner.state == (*before, [shapes.FAULT_OVERFLOW] + [0] * (shapes.FAULT_WORDS - 1))

"""mbarriers and the bulk copies of TMA.

A copy becomes a task of its CTA and runs at any later moment, in any order among the copies: loads write shared memory
and complete their bytes on the mbarrier in one go; stores first read shared memory, later write global memory.
Clusters have one CTA: shared::cluster addresses are those of shared::cta.
"""

import re

import numpy as np

from tests.sm100 import tensor_map as maps
from tests.sm100.decode import BLOCK, active_lanes, instruction, put
from tests.sm100.errors import EmulationError
from tests.sm100.ptx import SINK, Address

_SHARED = ("shared", "shared::cta", "shared::cluster")


class MBarrier:
    """An mbarrier object: a phase completes when no arrivals and no bytes are pending."""

    MAX_BYTES = 2**20 - 1

    def __init__(self, count: int, initialized_by: int):
        if not 1 <= count < 2**20:
            raise EmulationError(f"mbarrier.init with the count {count}")
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0
        self.unfenced: int | None = initialized_by  # the warp, until it fences
        # What the arrivals of this phase, and of the last complete one, say about tensor memory: see TensorOrder.
        self.signals, self.last_signals = set(), set()

    def arrive(self, count: int = 1, signal: str | None = None) -> bool:
        """True if it completes the phase."""
        if signal is not None:
            self.signals.add(signal)
        if count > self.pending:
            raise EmulationError(f"mbarrier over-arrival: {count} arrivals, {self.pending} of {self.count} are pending")
        self.pending -= count
        return self._complete()

    def expect(self, num_bytes: int) -> None:
        self._count_bytes(num_bytes)

    def complete_bytes(self, num_bytes: int) -> bool:
        self._count_bytes(-num_bytes)
        return self._complete()

    def _count_bytes(self, change: int) -> None:
        self.bytes += change
        if abs(self.bytes) > self.MAX_BYTES:
            raise EmulationError(f"mbarrier: {self.bytes} bytes pending, the limit is {self.MAX_BYTES}")

    def _complete(self) -> bool:
        if self.pending or self.bytes:
            return False
        self.pending = self.count
        self.phase += 1
        self.last_signals, self.signals = self.signals, set()
        return True

    def check_fenced(self) -> None:
        if self.unfenced is not None:
            raise EmulationError(
                f"an asynchronous engine uses an mbarrier that warp {self.unfenced} initialised and did not fence"
            )

    def __str__(self) -> str:
        return f"phase {self.phase}, {self.pending} of {self.count} arrivals and {self.bytes} bytes pending"


FENCED, UNFENCED = "fenced", "unfenced"


class TensorOrder:
    """The fences that a warp owes before and after threads are synchronised by an mbarrier about tensor memory.

    An arrival after a tcgen05.ld of this warp comes after fence::before_thread_sync. Who has waited for such an
    arrival, or for that of a tcgen05.commit, comes to its own tcgen05 work by way of fence::after_thread_sync.
    """

    def __init__(self):
        self.has_read = self.owes_before = self.owes_after = self.heard_unfenced = False

    @property
    def signal(self) -> str | None:
        return UNFENCED if self.owes_before else FENCED if self.has_read else None

    def read(self) -> None:
        self.has_read = self.owes_before = True

    def waited(self, barrier: MBarrier) -> None:
        self.owes_after |= bool(barrier.last_signals)
        self.heard_unfenced |= UNFENCED in barrier.last_signals

    def check(self) -> None:
        if self.owes_after:
            raise EmulationError("tcgen05 work after a wait for tensor memory without fence::after_thread_sync")
        if self.heard_unfenced:
            raise EmulationError("tcgen05 work after loads that were signalled without fence::before_thread_sync")


@instruction("mbarrier")
def _mbarrier(builder, ins, mods):
    if mods.type("b64") != "u64":
        raise ins.unsupported("type")
    action = mods.need("init", "inval", "arrive", "expect_tx", "try_wait", "test_wait")
    if action in ("arrive", "expect_tx", "try_wait", "test_wait"):
        mods.take("release", "acquire", "relaxed")
        mods.take("cta", "cluster")
    mods.need(*_SHARED)
    build = {"init": _init, "inval": _invalidate, "arrive": _arrive, "expect_tx": _expect}.get(action, _wait)
    return build(builder, ins, mods, action)


def _each(addresses: np.ndarray, mask):
    """(address, one of its lanes, number of lanes) of the active lanes."""
    first = 0 if mask is True else int(mask.argmax())
    same = addresses == addresses[first]
    if (same if mask is True else same[mask]).all():
        return [(int(addresses[first]), first, 32 if mask is True else int(mask.sum()))]
    return [(int(addresses[lane]), lane, 1) for lane in active_lanes(mask)]


def _init(builder, ins, mods, action):
    mods.done()
    read, count = builder.address(ins.operands[0], ins), builder.read(ins.operands[1], "u32", ins)

    def run(warp, mask):
        for address, lane, num_lanes in _each(read(warp.rows), mask):
            if num_lanes > 1:
                raise EmulationError(f"{num_lanes} lanes initialise one mbarrier")
            warp.cta.add_barrier(address, MBarrier(int(warp.rows[count][lane]), warp.index))

    return run


def _invalidate(builder, ins, mods, action):
    mods.done()
    read = builder.address(ins.operands[0], ins)

    def run(warp, mask):
        for address, _, num_lanes in _each(read(warp.rows), mask):
            if num_lanes > 1:
                raise EmulationError(f"{num_lanes} lanes invalidate one mbarrier")
            warp.cta.remove_barrier(address)

    return run


def _arrive(builder, ins, mods, action):
    expects = mods.take("expect_tx") is not None
    mods.done()
    operands = list(ins.operands)
    token = SINK if isinstance(operands[0], Address) else operands.pop(0)
    token = None if token == SINK else builder.write(token, "u64", ins)
    read = builder.address(operands.pop(0), ins)
    if len(operands) > 1 or (expects and not operands):
        raise ins.unsupported("number of operands")
    amount = builder.read(operands[0], "u32", ins) if operands else None

    def run(warp, mask):
        rows, cta = warp.rows, warp.cta
        for address, lane, num_lanes in _each(read(rows), mask):
            barrier = cta.barrier(address)
            phase, amounts = barrier.phase, 1 if amount is None else int(rows[amount][lane])
            if expects:
                for _ in range(num_lanes):
                    barrier.expect(amounts)
            if barrier.arrive(num_lanes if expects else num_lanes * amounts, warp.order.signal):
                cta.wake()
            if token is not None:
                put(rows[token], np.uint64(phase), mask if num_lanes > 1 else np.arange(32) == lane)

    return run


def _expect(builder, ins, mods, action):
    mods.done()
    read, amount = builder.address(ins.operands[0], ins), builder.read(ins.operands[1], "u32", ins)

    def run(warp, mask):
        for address, lane, num_lanes in _each(read(warp.rows), mask):
            warp.cta.barrier(address).expect(num_lanes * int(warp.rows[amount][lane]))

    return run


def _wait(builder, ins, mods, action):
    """A test that fails once and then waits for something to change: try_wait may do either, and so both happen."""
    by_parity = mods.take("parity") is not None
    mods.done()
    p, address, phase, *time_limit = ins.operands
    if len(time_limit) > (1 if action == "try_wait" else 0):
        raise ins.unsupported("number of operands")
    for operand in time_limit:
        builder.read(operand, "u32", ins)
    read = builder.address(address, ins)
    phase = builder.read(phase, "u32" if by_parity else "u64", ins)
    p = builder.write(p, "pred", ins)

    def run(warp, mask):
        rows, cta = warp.rows, warp.cta
        done = np.zeros(32, bool)
        phases, found = rows[phase], _each(read(rows), mask)
        for address, lane, num_lanes in found:
            barrier = cta.barrier(address)
            these = mask if num_lanes > 1 else np.arange(32) == lane
            seen = barrier.phase & 1 != phases & 1 if by_parity else barrier.phase > phases
            np.copyto(done, seen, where=these)
            if seen[lane]:
                warp.order.waited(barrier)
        if action == "try_wait" and not (done if mask is True else done[mask]).all():
            state = (barrier, barrier.phase) if len(found) == 1 else cta.version
            if warp.refused.get(run) == state:
                warp.blocked_on = barrier if len(found) == 1 else None
                return BLOCK
            warp.refused[run] = state
        put(rows[p], done, mask)
        return None

    return run


# Bulk copies


class Task:
    """Work of an asynchronous engine: run once, when the engine gets to it or when somebody waits for it."""

    __slots__ = ("action", "done", "text")

    def __init__(self, action, text: str):
        self.action, self.text, self.done = action, text, False

    def run(self) -> None:
        if self.done:
            return
        self.done = True
        try:
            self.action()
        except EmulationError as error:
            raise type(error)(f"{error} (asynchronously: {self.text})") from None


class Commit(Task):
    """A tcgen05.commit in the queue: it uses no tensor memory itself."""


class Arrival(Task):
    """Of a tcgen05.commit whose work is complete."""


class BulkStore:
    """A copy from shared to global memory: two tasks, the second after the first."""

    def __init__(self, cta, read, write, text: str):
        self.cta = cta
        self.text = text
        self.source_awaited = False  # by a wait_group of its thread
        self.reading = Task(self._read, text)
        self.writing = Task(self._write, text)
        self.read, self.write = read, write
        cta.tasks.append(self.reading)

    def _read(self) -> None:
        self.values = self.read()
        self.cta.tasks.append(self.writing)

    def _write(self) -> None:
        self.write(self.values)


class BulkGroups:
    """The bulk groups of one thread, oldest first, and the stores that are in none yet."""

    def __init__(self):
        self.uncommitted: list[BulkStore] = []
        self.groups: list[list[BulkStore]] = []

    def commit(self) -> None:
        self.groups.append(self.uncommitted)
        self.uncommitted = []

    def wait(self, num_left: int, only_reads: bool, rng) -> None:
        first_left = max(len(self.groups) - num_left, 0)
        waited = [store for group in self.groups[:first_left] for store in group]
        rng.shuffle(waited)
        for store in waited:
            store.source_awaited = True
            store.reading.run()
            if not only_reads:
                store.writing.run()
        if not only_reads:
            self.groups = self.groups[first_left:]

    def not_awaited(self) -> list[BulkStore]:
        """Stores that may still read shared memory, for all that their thread knows."""
        return [store for group in (*self.groups, self.uncommitted) for store in group if not store.source_awaited]


@instruction("cp")
def _copy(builder, ins, mods):
    mods.need("async")
    mods.need("bulk")
    if mods.take("commit_group"):
        mods.done()
        return _commit_group()
    if mods.take("wait_group"):
        only_reads = mods.take("read") is not None
        mods.done()
        return _wait_group(ins.operands[0].value, only_reads)
    hint = mods.take("L2::cache_hint") is not None
    mods.take("cta_group::1")
    if hint:
        builder.read(ins.operands[-1], "u64", ins)
    operands = ins.operands[:-1] if hint else ins.operands
    if mods.take("prefetch"):
        return _prefetch_copy(builder, ins, mods, operands)
    rank = None
    if mods.take("tensor"):
        rank = int(mods.need("1d", "2d", "3d", "4d", "5d")[0])
        mods.take("tile")
    if mods.rest == ["global", "shared::cta", "bulk_group"]:
        return _store(builder, ins, operands, rank)
    if re.fullmatch(r"shared::(cta|cluster) global mbarrier::complete_tx::bytes", " ".join(mods.rest)):
        return _load(builder, ins, operands, rank)
    raise ins.unsupported()


def _commit_group():
    def run(warp, mask):
        for lane in active_lanes(mask):
            warp.bulk_groups(lane).commit()

    return run


def _wait_group(num_left: int, only_reads: bool):
    def run(warp, mask):
        for lane in active_lanes(mask):
            warp.bulk_groups(lane).wait(num_left, only_reads, warp.cta.machine.rng)

    return run


def _box(builder, ins, operand, rank: int):
    """Reader of a tensor's operand: (warp, lane) to its map and the coordinates."""
    if not isinstance(operand, Address) or len(operand.coordinates) != rank:
        raise ins.unsupported("tensor coordinates")
    read = builder.base_address(operand, ins)
    coordinates = [builder.read(c, "s32", ins) for c in operand.coordinates]

    def box(warp, lane):
        found = warp.cta.machine.tensor_map(int(read(warp.rows)[lane]))
        if found.rank != rank:
            raise EmulationError(f"a copy of {rank} dimensions with a tensor map of {found.rank}")
        return found, tuple(int(warp.rows[c][lane]) for c in coordinates)

    return box


def _prefetch_copy(builder, ins, mods, operands):
    """A hint; the tensor map is looked at all the same."""
    mods.need("L2")
    mods.need("global")
    if not mods.take("tensor"):
        raise ins.unsupported()
    rank = int(mods.need("1d", "2d", "3d", "4d", "5d")[0])
    mods.take("tile")
    mods.done()
    box = _box(builder, ins, operands[0], rank)

    def run(warp, mask):
        for lane in active_lanes(mask):
            box(warp, lane)

    return run


def _check_multiple(value: int, of: int, what: str) -> None:
    if value % of:
        raise EmulationError(f"bulk copy: {what} {value:#x} is not a multiple of {of} bytes")


def _load(builder, ins, operands, rank: int | None):
    if len(operands) != (4 if rank is None else 3):
        raise ins.unsupported("number of operands")
    to, barrier = builder.address(operands[0], ins), builder.address(operands[-1], ins)
    if rank is not None:
        box = _box(builder, ins, operands[1], rank)
    else:
        source, size = builder.address(operands[1], ins), builder.read(operands[2], "u32", ins)

    def run(warp, mask):
        cta, rows = warp.cta, warp.rows
        for lane in active_lanes(mask):
            start, at = int(to(rows)[lane]), int(barrier(rows)[lane])
            cta.barrier(at).check_fenced()
            if rank is not None:
                tensor_map, coordinates = box(warp, lane)
                _check_multiple(start, 128, "destination")
                num_bytes, swizzle = tensor_map.box_bytes, tensor_map.swizzle
                fetch = _tile_reader(cta, tensor_map, coordinates)
            else:
                num_bytes, swizzle = int(rows[size][lane]), 0
                address = int(source(rows)[lane])
                for value, what in ((start, "destination"), (address, "source"), (num_bytes, "size")):
                    _check_multiple(value, 16, what)
                fetch = _bytes_reader(cta, address, num_bytes)
            cta.shared.check(start, start + num_bytes)
            cta.tasks.append(Task(_load_action(cta, fetch, start, num_bytes, swizzle, at), ins.text))
            cta.loads_in_flight += 1

    return run


def _load_action(cta, fetch, start: int, num_bytes: int, swizzle: int, barrier_address: int):
    def action():
        cta.shared.write_chunks(maps.chunks(start, num_bytes, swizzle), fetch())
        cta.loads_in_flight -= 1
        if cta.barrier(barrier_address).complete_bytes(num_bytes):
            cta.wake()

    return action


def _tile_reader(cta, tensor_map, coordinates):
    def fetch():
        tile = np.zeros((*tensor_map.box[:0:-1], tensor_map.row_bytes), np.uint8)
        part = maps.view_in_bounds(tensor_map, coordinates, cta.machine.memory, writes=False)
        if part is not None:
            tile[part[1]] = part[0]
        return tile

    return fetch


def _bytes_reader(cta, address: int, num_bytes: int):
    def fetch():
        data, offset = cta.machine.memory.window(address, num_bytes)
        return data[offset : offset + num_bytes].copy()

    return fetch


def _store(builder, ins, operands, rank: int | None):
    if len(operands) != (3 if rank is None else 2):
        raise ins.unsupported("number of operands")
    source = builder.address(operands[1], ins)
    if rank is not None:
        box = _box(builder, ins, operands[0], rank)
    else:
        to, size = builder.address(operands[0], ins), builder.read(operands[2], "u32", ins)

    def run(warp, mask):
        cta, rows = warp.cta, warp.rows
        for lane in active_lanes(mask):
            start = int(source(rows)[lane])
            if rank is not None:
                tensor_map, coordinates = box(warp, lane)
                _check_multiple(start, 128, "source")
                num_bytes, swizzle = tensor_map.box_bytes, tensor_map.swizzle
                write = _tile_writer(cta, tensor_map, coordinates)
            else:
                num_bytes, swizzle = int(rows[size][lane]), 0
                address = int(to(rows)[lane])
                for value, what in ((start, "source"), (address, "destination"), (num_bytes, "size")):
                    _check_multiple(value, 16, what)
                write = _bytes_writer(cta, address)
            cta.shared.check(start, start + num_bytes)
            cta.shared.check_fenced(slice(start, start + num_bytes))
            read = _chunk_reader(cta, maps.chunks(start, num_bytes, swizzle))
            warp.bulk_groups(lane).uncommitted.append(BulkStore(cta, read, write, ins.text))

    return run


def _chunk_reader(cta, numbers: np.ndarray):
    return lambda: cta.shared.read_chunks(numbers)


def _tile_writer(cta, tensor_map, coordinates):
    def write(values):
        part = maps.view_in_bounds(tensor_map, coordinates, cta.machine.memory, writes=True)
        if part is not None:
            part[0][...] = values.reshape(*tensor_map.box[:0:-1], tensor_map.row_bytes)[part[1]]

    return write


def _bytes_writer(cta, address: int):
    def write(values):
        data, offset = cta.machine.memory.window(address, values.size, writes=True)
        data[offset : offset + values.size] = values.reshape(-1)

    return write

"""Execution of a decoded kernel: CTAs, warps, their scheduling, and the asynchronous engines.

Everything random comes from one seed: which warp runs next and for how long, which one is held back for a while, when
asynchronous work is done and in which order, which lane is elected, where tensor memory is allocated, what
uninitialised registers hold. A seed also decides how eager the engines are, from almost always last to almost always
first.

Lanes of a warp have program counters of their own: those with the same one form a group, the lowest group that can run
goes first, and groups that meet merge.
"""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from tests.sm100 import tensor_map as maps
from tests.sm100.asynchronous import Arrival, BulkGroups, Commit, MBarrier, Task, TensorOrder
from tests.sm100.control import NamedBarrier
from tests.sm100.decode import BLOCK, EXIT, NUM_LANES, Program, decode
from tests.sm100.errors import Deadlock, EmulationError
from tests.sm100.spaces import PARAMETER_WINDOW, GlobalMemory, SharedMemory, TensorMemory

MAX_SHARED_BYTES = 227 * 1024
_ALL, _NONE = np.ones(NUM_LANES, bool).tobytes(), np.zeros(NUM_LANES, bool).tobytes()
_FAR = 1 << 60
_HOLD_ANOTHER = 1 / 40  # of the slices: from then on another warp runs only where no other can


@dataclass(frozen=True)
class Launch:
    """A kernel launch: extents, dynamic shared memory, and the bytes of each parameter."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: tuple[bytes, ...] = ()
    shared_bytes: int = 0
    kernel: str = field(default="", compare=False)


def emulate(
    ptx: str,
    launch: Launch,
    memory: GlobalMemory,
    seed: int = 0,
    resident_ctas: int = 4,
    max_steps: int = 50_000_000,
    lenient: bool = False,
) -> Counter:
    """Runs a launch to its end and returns how often each opcode was executed, counted in warps.

    Args: memory holds every buffer that the parameters point to.  resident_ctas run interleaved; the next one starts
    when one of them has ended.  max_steps bounds the warp instructions of the launch.  lenient, for what
    public kernels leave to the assembler and to the GPU: a register of a tcgen05.ld that is used before wait::ld is
    waited for, and tcgen05 fences around synchronisations may be missing.
    Raises: EmulationError (Deadlock, UnsupportedInstruction) at the first thing the kernel does wrong.
    """
    with np.errstate(all="ignore"):
        machine = Machine(decode(ptx), launch, memory, seed)
        machine.max_steps, machine.lenient = max_steps, lenient
        return machine.run(resident_ctas)


class Machine:
    """One launch."""

    max_steps: int
    lenient: bool

    def __init__(self, program: Program, launch: Launch, memory: GlobalMemory, seed: int):
        self.program, self.launch, self.memory = program, launch, memory
        self.rng = random.Random(seed)
        self.garbage = np.random.default_rng(seed)
        self.eagerness = self.rng.choice((0.02, 0.3, 0.9))
        self.election = self.rng.randrange(NUM_LANES)
        self.num_steps = 0
        self.counts = [0] * len(program.steps)
        kernel = program.kernel
        sizes = [parameter.num_bytes for parameter in kernel.parameters]
        if [len(raw) for raw in launch.parameters] != sizes:
            raise ValueError(f"emulate: parameters of {sizes} bytes wanted, got {[len(p) for p in launch.parameters]}")
        self.parameters = np.zeros(kernel.parameters[-1].offset + sizes[-1] if sizes else 0, np.uint8)
        for parameter, raw in zip(kernel.parameters, launch.parameters, strict=True):
            self.parameters[parameter.offset : parameter.offset + len(raw)] = np.frombuffer(raw, np.uint8)
        self.num_threads = launch.block[0] * launch.block[1] * launch.block[2]
        if self.num_threads % NUM_LANES or not self.num_threads:
            raise ValueError(f"emulate: a block of whole warps is wanted, got {launch.block}")
        self.shared_end = kernel.shared_bytes + launch.shared_bytes
        if self.shared_end > MAX_SHARED_BYTES + 1024:
            raise EmulationError(f"{self.shared_end} bytes of shared memory, {MAX_SHARED_BYTES} are there")

    def run(self, resident_ctas: int) -> Counter:
        gx, gy, gz = self.launch.grid
        waiting = [(x, y, z) for z in range(gz) for y in range(gy) for x in range(gx)][::-1]
        live: list[Cta] = []
        while live or waiting:
            while waiting and len(live) < resident_ctas:
                live.append(Cta(self, waiting.pop()))
            cta = self.rng.choice(live) if len(live) > 1 else live[0]
            if cta.advance():
                live.remove(cta)
            if self.num_steps > self.max_steps:
                raise EmulationError(f"no end after {self.num_steps} warp instructions")
        counts = Counter()
        for step, count in zip(self.program.steps, self.counts, strict=True):
            if count:
                counts[step.ins.opcode] += count
        return counts

    def load_parameters(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        if int(addresses.min()) < 0 or int(addresses.max()) + num_bytes > len(self.parameters):
            raise EmulationError("a read outside of the kernel parameters")
        return self.parameters[addresses[:, None] + np.arange(num_bytes)]

    def tensor_map(self, address: int) -> maps.TensorMap:
        """The map at a generic address."""
        if address >> 56 == PARAMETER_WINDOW >> 56:
            raw = self.load_parameters(np.array([address - PARAMETER_WINDOW]), 128)[0]
        else:
            data, offset = self.memory.window(address, 128)
            raw = data[offset : offset + 128]
        return maps.decode(raw[:64].tobytes())


class Cta:
    """One CTA: its memories, barriers, warps, and the asynchronous work it has outstanding."""

    def __init__(self, machine: Machine, index: tuple[int, int, int]):
        self.machine, self.index = machine, index
        self.shared = SharedMemory(machine.shared_end)
        self.tensor = TensorMemory()
        self.barriers: dict[int, MBarrier] = {}
        self.named_barriers: dict[int, NamedBarrier] = defaultdict(NamedBarrier)
        self.tasks: list[Task] = []  # run in any order
        self.tensor_queue: list[Task] = []  # run in this order
        self.loads_in_flight = 0
        self.version = 0  # changes with everything that could let a blocked warp go on
        self.warps = [Warp(self, i) for i in range(machine.num_threads // NUM_LANES)]
        self.live, self.held = list(self.warps), None

    def wake(self) -> None:
        self.version += 1

    # Barriers

    def add_barrier(self, address: int, barrier: MBarrier) -> None:
        self.shared.check(address, address + 8)
        if address % 8:
            raise EmulationError(f"an mbarrier at {address:#x}, not a multiple of 8")
        if self.shared.barrier_bytes[address : address + 8].any():
            raise EmulationError(f"mbarrier.init at {address:#x}, where there is one already")
        self.shared.barrier_bytes[address : address + 8] = True
        self.barriers[address] = barrier

    def remove_barrier(self, address: int) -> None:
        self.barrier(address)
        del self.barriers[address]
        self.shared.barrier_bytes[address : address + 8] = False

    def barrier(self, address: int) -> MBarrier:
        if address not in self.barriers:
            raise EmulationError(f"no mbarrier was initialised at {address:#x}")
        return self.barriers[address]

    def fence_barriers(self, warp: int) -> None:
        for barrier in self.barriers.values():
            if barrier.unfenced == warp:
                barrier.unfenced = None

    # Asynchronous work

    def issue(self, task: Task) -> None:
        self.tensor_queue.append(task)

    def uses_tensor_memory(self) -> bool:
        queued = any(not isinstance(task, Commit) for task in self.tensor_queue)
        return queued or any(warp.pending_loads for warp in self.warps)

    def run_engine(self) -> bool:
        """One piece of asynchronous work; False if there is none."""
        rng = self.machine.rng
        while self.tasks or self.tensor_queue:
            choice = rng.randrange(len(self.tasks) + (1 if self.tensor_queue else 0))
            if choice == len(self.tasks):
                self.tensor_queue.pop(0).run()
                return True
            self.tasks[choice], self.tasks[-1] = self.tasks[-1], self.tasks[choice]
            task = self.tasks.pop()
            if not task.done:  # else somebody has waited for it
                task.run()
                return True
        return False

    def advance(self) -> bool:
        """One slice of a warp or of the engines; True at the CTA's end."""
        rng = self.machine.rng
        try:
            if (self.tasks or self.tensor_queue) and rng.random() < self.machine.eagerness:
                self.run_engine()
                return False
            ready = [warp for warp in self.live if warp.can_run()]
            if ready:
                if rng.random() < _HOLD_ANOTHER:
                    self.held = rng.choice(self.live)
                warp = rng.choice([warp for warp in ready if warp is not self.held] or ready)
                warp.run(rng.randint(1, rng.choice((4, 100))))
                if warp.is_done():
                    self.live.remove(warp)
            elif not self.run_engine():
                raise Deadlock(f"deadlock:{self.describe()}")
            if not self.live:
                self.finish()
                return True
        except EmulationError as error:
            raise type(error)(f"CTA {self.index}: {error}") from None
        return False

    def describe(self) -> str:
        lines = [warp.describe() for warp in self.live]
        lines += [f"mbarrier {address:#x}: {barrier}" for address, barrier in sorted(self.barriers.items())]
        lines += [
            f"barrier {number}: {barrier.arrived} of {barrier.expected} threads"
            for number, barrier in self.named_barriers.items()
            if barrier.arrived
        ]
        return "".join(f"\n  {line}" for line in lines)

    def finish(self) -> None:
        """All warps have exited: what must not be left over?"""
        if self.loads_in_flight:
            raise EmulationError("exit while bulk copies into shared memory are in flight")
        for warp in self.warps:
            if warp.pending_loads:
                raise EmulationError(f"warp {warp.index} exits without tcgen05.wait::ld")
            for groups in warp.bulk_groups_by_lane.values():
                if stores := groups.not_awaited():
                    raise EmulationError(f"exit while shared memory may still be read by {stores[0].text}")
        for task in () if self.machine.lenient else (*self.tensor_queue, *self.tasks):
            if isinstance(task, Commit | Arrival) and not task.done:
                raise EmulationError(f"exit while an arrival is outstanding: {task.text}")
        while self.run_engine():
            pass
        if self.tensor.allocated:
            raise EmulationError(f"exit without tcgen05.dealloc of {self.tensor.allocated}")
        for warp in self.warps:
            self.machine.program.give_back(warp.registers)


class Group:
    """Lanes of a warp with one program counter."""

    __slots__ = ("barrier", "mask", "pc", "phase", "version")

    def __init__(self, pc: int, mask):
        self.pc, self.mask = pc, mask
        self.release()

    def block(self, version: int, barrier) -> None:
        """Not to be run while the barrier is in its phase; without one, while the CTA has this version."""
        self.version, self.barrier = version, barrier
        self.phase = barrier.phase if barrier is not None else 0

    def release(self) -> None:
        self.version, self.barrier = -1, None

    def can_run(self, version: int) -> bool:
        return self.version != version if self.barrier is None else self.barrier.phase != self.phase


class Warp:
    """32 lanes: their registers and program counters."""

    def __init__(self, cta: Cta, index: int):
        self.cta, self.index = cta, index
        self.registers = cta.machine.program.borrow_registers()
        self.registers.start(self.special, cta.machine.garbage)
        self.rows = self.registers.rows
        self.live = True  # lanes that have not exited: True for all
        self.groups = [Group(0, True)]
        self.waits_for: int | None = None  # phase of the named barrier where the warp has arrived
        self.blocked_on = None  # the barrier that a closure returned BLOCK for, if it was one
        self.refused: dict = {}  # by a wait's closure: the state in which it has already failed
        self.pending_loads: list = []
        self.pending_registers: set[int] = set()  # of these loads, and of the moves that wait for them
        self.postponed: list = []
        self.bulk_groups_by_lane: dict[int, BulkGroups] = {}
        self.order = TensorOrder()

    def special(self, name: str) -> np.ndarray:
        """Values of a special register."""
        launch, cta = self.cta.machine.launch, self.cta.index
        threads = np.arange(NUM_LANES) + NUM_LANES * self.index
        lanes, bx, by = np.arange(NUM_LANES), launch.block[0], launch.block[1]
        values = {"%laneid": lanes, "%warpid": self.index, "%nwarpid": self.cta.machine.num_threads // NUM_LANES}
        values |= {"%cluster_ctarank": 0, "%cluster_nctarank": 1, "%smid": 0, "%nsmid": 148, "%gridid": 0}
        values |= {"%dynamic_smem_size": launch.shared_bytes, "%total_smem_size": self.cta.machine.shared_end}
        values |= {"%lanemask_eq": 1 << lanes, "%lanemask_lt": (1 << lanes) - 1, "%lanemask_le": (2 << lanes) - 1}
        values |= {"%lanemask_gt": 0xFFFFFFFF & ~((2 << lanes) - 1), "%lanemask_ge": 0xFFFFFFFF & ~((1 << lanes) - 1)}
        tid = (threads % bx, threads // bx % by, threads // (bx * by))
        for axis, letter in enumerate("xyz"):
            values |= {f"%tid.{letter}": tid[axis], f"%ntid.{letter}": launch.block[axis]}
            values |= {f"%ctaid.{letter}": cta[axis], f"%nctaid.{letter}": launch.grid[axis]}
            values |= {f"%clusterid.{letter}": cta[axis], f"%nclusterid.{letter}": launch.grid[axis]}
            values |= {f"%cluster_ctaid.{letter}": 0, f"%cluster_nctaid.{letter}": 1}
        if name not in values:
            raise EmulationError(f"unsupported special register {name}")
        return np.asarray(values[name])

    def bulk_groups(self, lane: int) -> BulkGroups:
        return self.bulk_groups_by_lane.setdefault(lane, BulkGroups())

    def is_done(self) -> bool:
        return not self.groups

    def is_converged(self, mask) -> bool:
        """Whether all lanes that have not exited are in the mask."""
        return mask is True or (self.live is not True and bool((mask == self.live).all()))

    def can_run(self) -> bool:
        version = self.cta.version
        for group in self.groups:  # mostly one
            if group.can_run(version):
                return True
        return False

    def describe(self) -> str:
        steps = self.cta.machine.program.steps
        at = ", ".join(f"{steps[group.pc].ins.text}" for group in self.groups)
        return f"warp {self.index} at {at}"

    def run(self, budget: int) -> None:
        """Up to `budget` instructions of the lowest group that can run."""
        version = self.cta.version
        group = next(group for group in self.groups if group.can_run(version))
        group.release()
        machine = self.cta.machine
        machine.num_steps += budget
        steps, counts, rows = machine.program.steps, machine.counts, self.rows
        others = [other.pc for other in self.groups if other is not group]
        nearest = min((pc for pc in others if pc > group.pc), default=_FAR)
        pc, mask = group.pc, group.mask
        step = steps[pc]
        try:
            while budget:
                budget -= 1
                step = steps[pc]
                active = mask
                if step.guard is not None:
                    active = self.guarded(rows[step.guard], step.negated, mask)
                    if active is None:
                        pc += 1
                        if pc >= nearest:
                            break
                        continue
                if self.pending_registers and not self.pending_registers.isdisjoint(step.touched):
                    result = self.use_before_wait(step, active)
                else:
                    result = step.run(self, active)
                if result is BLOCK:
                    group.block(self.cta.version, self.blocked_on)
                    self.blocked_on = None
                    break
                counts[pc] += 1
                if result is None:
                    pc += 1
                    if pc >= nearest:
                        break
                    continue
                if active is mask and result >= 0:
                    pc = result
                    if others:
                        break
                    continue
                pc = self.split(group, active, mask, pc + 1, result)
                mask = group.mask
                break
        except EmulationError as error:
            raise type(error)(f"warp {self.index}: {error}: {step.ins.text}") from None
        machine.num_steps -= budget
        group.pc = pc
        self.regroup()

    def use_before_wait(self, step, active) -> int | None:
        """A step with registers whose tcgen05.ld is not complete: moves are put off until it is, all else is an error.

        NVIDIA's compiler places such moves between a load and its wait::ld, and its assembler makes them no reads.
        """
        if step.is_move and active is True:
            self.postponed.append(step)
            self.pending_registers.update(step.touched)
            return None
        if not self.cta.machine.lenient:
            raise EmulationError("a register of a tcgen05.ld is used before tcgen05.wait::ld")
        self.complete_loads()
        return step.run(self, active)

    def check_order(self) -> None:
        """Before tcgen05 work; lenient, what public kernels leave out is allowed."""
        if not self.cta.machine.lenient:
            self.order.check()

    def complete_loads(self) -> None:
        """tcgen05.wait::ld."""
        for load in self.pending_loads:
            load.deliver(self.rows)
        for step in self.postponed:
            step.run(self, True)
        self.pending_loads.clear()
        self.pending_registers.clear()
        self.postponed.clear()

    @staticmethod
    def guarded(predicate: np.ndarray, negated: bool, mask):
        """Lanes of the mask where a guard holds; None if there are none, the mask itself if it holds in all."""
        if negated:
            predicate = ~predicate
        if mask is True:
            key = predicate.tobytes()
            return True if key == _ALL else None if key == _NONE else predicate.copy()
        lanes = predicate & mask
        key = lanes.tobytes()
        return None if key == _NONE else mask if key == mask.tobytes() else lanes

    def split(self, group: Group, active, mask, following: int, result: int) -> int:
        """Lets the active lanes branch or exit and the group's other lanes go on; the group's new program counter."""
        everyone = np.ones(NUM_LANES, bool)
        if result == EXIT:
            live = everyone if self.live is True else self.live
            self.live = live & ~(everyone if active is True else active)
        else:
            self.groups.append(Group(result, active))
        if active is mask:
            self.groups.remove(group)
        else:
            group.mask = (everyone if mask is True else mask) & ~active
        self.cta.wake()
        return following

    def regroup(self) -> None:
        """Merges the groups with one program counter and orders them."""
        if len(self.groups) < 2:
            return
        by_pc: dict[int, Group] = {}
        for group in self.groups:
            if group.pc in by_pc:
                mask = by_pc[group.pc].mask | group.mask
                by_pc[group.pc] = Group(group.pc, True if mask.all() else mask)
            else:
                by_pc[group.pc] = group
        self.groups = [by_pc[pc] for pc in sorted(by_pc)]

"""Control flow, and what the lanes of a warp or the warps of a CTA do together."""

import re

import numpy as np

from tests.sm100.decode import BLOCK, DTYPES, EXIT, NUM_LANES, instruction, put, split_pair
from tests.sm100.errors import EmulationError
from tests.sm100.ptx import SINK, Immediate, Symbol

_LANES = np.arange(NUM_LANES)
_ALL_LANES = 0xFFFFFFFF


@instruction("bra")
def _branch(builder, ins, mods):
    mods.take("uni")
    mods.done()
    (label,) = ins.operands
    if not isinstance(label, Symbol):
        raise ins.unsupported("operand")
    target = builder.kernel.target(ins, label.name)
    return lambda warp, mask: target


@instruction("ret", "exit")
def _exit(builder, ins, mods):
    mods.take("uni")
    mods.done()
    return lambda warp, mask: EXIT


@instruction("trap")
def _trap(builder, ins, mods):
    mods.done()

    def run(warp, mask):
        raise EmulationError("the kernel trapped")

    return run


@instruction("nanosleep", "setmaxnreg", "griddepcontrol", "pmevent")
def _nothing(builder, ins, mods):
    """No effect on what a kernel computes."""
    forms = (
        r"nanosleep\.u32",
        r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32",
        r"griddepcontrol\.wait",
        r"pmevent",
    )
    if not any(re.fullmatch(form, ins.opcode) for form in forms):
        raise ins.unsupported()
    return lambda warp, mask: None


_PROXY_FENCE = re.compile(r"fence\.proxy\.async(\.(global|shared::(cta|cluster)))?")
_INIT_FENCE = re.compile(r"fence\.mbarrier_init\.release\.cluster")
_PLAIN_FENCE = re.compile(r"fence(\.(sc|acq_rel|acquire|release))?\.(cta|cluster|gpu|sys)|membar\.(cta|gl|sys)")
_CLUSTER_FENCE = re.compile(r"fence\.(acquire|release)\.sync_restrict::shared::(cta|cluster)\.cluster")


@instruction("fence", "membar")
def _fence(builder, ins, mods):
    """Warps run one after another here, so plain fences have nothing to do; those between the proxies are checked."""
    if match := _PROXY_FENCE.fullmatch(ins.opcode):
        if match[2] == "global":
            return lambda warp, mask: None

        def proxy(warp, mask):
            warp.cta.shared.fence(warp.index)
            warp.cta.fence_barriers(warp.index)

        return proxy
    if _INIT_FENCE.fullmatch(ins.opcode):
        return lambda warp, mask: warp.cta.fence_barriers(warp.index)
    if _PLAIN_FENCE.fullmatch(ins.opcode) or _CLUSTER_FENCE.fullmatch(ins.opcode):
        return lambda warp, mask: None
    raise ins.unsupported()


# Lanes of a warp


def to_bits(lanes: np.ndarray) -> int:
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


def mask_bits(mask) -> int:
    return _ALL_LANES if mask is True else to_bits(mask)


def _members(builder, ins, operand):
    """Checker of a member mask: False while a member that has not exited is elsewhere."""
    slot = builder.read(operand, "u32", ins)
    if isinstance(operand, Immediate) and operand.value & _ALL_LANES == _ALL_LANES:
        return lambda warp, mask: mask is True or warp.is_converged(mask)

    def gathered(warp, mask):
        members = warp.rows[slot] if mask is True else warp.rows[slot][mask]
        active, wanted = mask_bits(mask), int(members[0])
        if (members != members[0]).any() or active & ~wanted:
            raise EmulationError("the executing lanes must name one member mask, and be in it")
        return wanted & mask_bits(warp.live) & ~active == 0

    return gathered


@instruction("shfl")
def _shuffle(builder, ins, mods):
    mods.need("sync")
    kind = mods.type("b32")
    mode = mods.need("idx", "up", "down", "bfly")
    mods.done()
    d, p = split_pair(ins.operands[0])
    a, b, c = (builder.read(operand, kind, ins) for operand in ins.operands[1:4])
    gathered = _members(builder, ins, ins.operands[4])
    d = builder.write(d, kind, ins)
    p = None if p is None or p == SINK else builder.write(p, "pred", ins)

    def run(warp, mask):
        if not gathered(warp, mask):
            return BLOCK
        rows = warp.rows
        delta, clamps = (rows[b] & 31).astype(np.int64), rows[c].astype(np.int64)
        segment, clamp = clamps >> 8 & 31, clamps & 31
        first, last = _LANES & segment, _LANES & segment | clamp & ~segment
        if mode == "up":  # clamp is the segment's first lane here
            source = _LANES - delta
            inside = source >= last
        elif mode == "down":
            source = _LANES + delta
            inside = source <= last
        elif mode == "bfly":
            source = _LANES ^ delta
            inside = source <= last
        else:
            source = first | delta & ~segment
            inside = source <= last
        source = np.where(inside, source, _LANES)
        if mask is not True and not mask[source[mask]].all():
            raise EmulationError("a shuffle reads a lane that does not take part")
        put(rows[d], rows[a][source], mask)
        if p is not None:
            put(rows[p], inside, mask)

    return run


@instruction("vote")
def _vote(builder, ins, mods):
    mods.need("sync")
    kind = mods.type("pred", "b32")
    mode = mods.need("ballot") if kind == "u32" else mods.need("all", "any", "uni")
    mods.done()
    read = builder.predicate(ins.operands[1], ins)
    gathered = _members(builder, ins, ins.operands[2])
    d = builder.write(ins.operands[0], kind, ins)

    def run(warp, mask):
        if not gathered(warp, mask):
            return BLOCK
        rows = warp.rows
        votes = read(rows) if mask is True else read(rows) & mask
        yes, voters = to_bits(votes), mask_bits(mask)
        result = {"ballot": yes, "all": yes == voters, "any": yes != 0, "uni": yes in (0, voters)}[mode]
        put(rows[d], DTYPES["u32"].type(result) if mode == "ballot" else result, mask)

    return run


@instruction("redux")
def _reduce(builder, ins, mods):
    mods.need("sync")
    kind = mods.type("u32", "s32", "b32")
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum}
    functions |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    function = functions[mods.need(*functions)]
    mods.done()
    a = builder.read(ins.operands[1], kind, ins)
    gathered = _members(builder, ins, ins.operands[2])
    d = builder.write(ins.operands[0], kind, ins)

    def run(warp, mask):
        if not gathered(warp, mask):
            return BLOCK
        values = warp.rows[a] if mask is True else warp.rows[a][mask]
        put(warp.rows[d], function.reduce(values, dtype=DTYPES[kind]), mask)

    return run


@instruction("activemask")
def _active(builder, ins, mods):
    mods.type("b32")
    mods.done()
    d = builder.write(ins.operands[0], "u32", ins)
    return lambda warp, mask: put(warp.rows[d], np.uint32(mask_bits(mask)), mask)


@instruction("elect")
def _elect(builder, ins, mods):
    """One member, the same each time but not always the first: PTX does not say which."""
    mods.need("sync")
    mods.done()
    d, p = split_pair(ins.operands[0])
    gathered = _members(builder, ins, ins.operands[1])
    d, p = builder.write(d, "u32", ins), builder.write(p, "pred", ins)

    def run(warp, mask):
        if not gathered(warp, mask):
            return BLOCK
        lanes = _LANES if mask is True else np.flatnonzero(mask)
        leader = lanes[warp.cta.machine.election % len(lanes)]
        put(warp.rows[d], np.uint32(leader), mask)
        put(warp.rows[p], _LANES == leader, mask)

    return run


# Warps of a CTA


class NamedBarrier:
    """A barrier of bar.sync and bar.arrive, counted in threads of whole warps."""

    def __init__(self):
        self.expected = None
        self.arrived = 0
        self.phase = 0

    def arrive(self, num_threads: int) -> bool:
        """One warp's arrival; True when it completes the barrier."""
        if self.expected not in (None, num_threads):
            raise EmulationError(f"a barrier for {self.expected} threads and for {num_threads} at once")
        self.expected = num_threads
        self.arrived += NUM_LANES
        if self.arrived > num_threads:
            raise EmulationError(f"{self.arrived} threads at a barrier for {num_threads}")
        if self.arrived < num_threads:
            return False
        self.expected, self.arrived = None, 0
        self.phase += 1
        return True


@instruction("bar", "barrier")
def _barrier(builder, ins, mods):
    """Of whole warps only: a warp that has diverged waits here until its lanes are together again."""
    mods.take("cta")
    waits = mods.need("sync", "arrive") == "sync"
    mods.take("aligned")
    mods.done()
    number, *count = (builder.read(operand, "u32", ins) for operand in ins.operands)
    if not waits and not count:
        raise ins.unsupported("form")

    def run(warp, mask):
        cta = warp.cta
        if not warp.is_converged(mask):
            return BLOCK
        barrier = cta.named_barriers[int(warp.rows[number][0])]
        if warp.waits_for is not None:
            if barrier.phase == warp.waits_for:
                warp.blocked_on = barrier
                return BLOCK
            warp.waits_for = None
            return None
        num_threads = int(warp.rows[count[0]][0]) if count else NUM_LANES * len(cta.warps)
        if num_threads % NUM_LANES or not num_threads:
            raise EmulationError(f"a barrier for {num_threads} threads, which are not whole warps")
        if not barrier.arrive(num_threads) and waits:
            warp.waits_for, warp.blocked_on = barrier.phase, barrier
            return BLOCK
        return None

    return run

"""tcgen05: tensor memory, scale copies, block-scaled matrix products, and the loads of their results.

Copies, products and commits of a CTA run late, in the order of their issue; the arrival of a commit comes at any moment
after that. A load reads tensor memory at any moment between its issue and the warp's wait::ld, and its registers get
their values there: using one before is an error, for all but moves (Warp.use_before_wait).

Numbers: a product multiplies exactly and adds K products and the accumulator in float64, rounded to float32 once an
instruction. The hardware's inner order and precision are not specified, so tests that ask for equal bits use data whose
sums are exact.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tests.sm100 import formats, tensor_map
from tests.sm100.asynchronous import FENCED, Arrival, Commit, Task
from tests.sm100.decode import BLOCK, active_lanes, instruction
from tests.sm100.errors import EmulationError
from tests.sm100.spaces import TENSOR_LANES

_SHARED = ("shared", "shared::cta", "shared::cluster")
OPERAND_BYTES = 32  # of K that one product contracts, whatever the type


@instruction("tcgen05")
def _tcgen05(builder, ins, mods):
    builders = {
        "alloc": _allocate,
        "dealloc": _release,
        "relinquish_alloc_permit": _relinquish,
        "cp": _copy,
        "mma": _product,
        "commit": _commit,
        "ld": _load,
        "wait::ld": _wait_load,
        "fence::before_thread_sync": _fence_before,
        "fence::after_thread_sync": _fence_after,
    }
    action = mods.need(*builders)
    return builders[action](builder, ins, mods)


def _fence_before(builder, ins, mods):
    mods.done()

    def run(warp, mask):
        warp.order.owes_before = False

    return run


def _fence_after(builder, ins, mods):
    mods.done()

    def run(warp, mask):
        warp.order.owes_after = False

    return run


def _aligned(mods) -> None:
    mods.need("sync")
    mods.need("aligned")


def _whole_warp(warp, mask) -> bool:
    """False while lanes of the warp are elsewhere; exited ones will not come."""
    if mask is True:
        return True
    if warp.live is not True:
        raise EmulationError("an aligned instruction of a warp with exited lanes")
    return False


# Allocation


def _allocate(builder, ins, mods):
    mods.need("cta_group::1")
    _aligned(mods)
    mods.need(*_SHARED)
    mods.type("b32")
    mods.done()
    to, count = builder.address(ins.operands[0], ins), builder.read(ins.operands[1], "u32", ins)

    def run(warp, mask):
        if not _whole_warp(warp, mask):
            return BLOCK
        cta = warp.cta
        first = cta.tensor.allocate(int(warp.rows[count][0]), cta.machine.rng)
        if first is None:
            return BLOCK
        cta.shared.write_word(int(to(warp.rows)[0]), first)
        return None

    return run


def _release(builder, ins, mods):
    mods.need("cta_group::1")
    _aligned(mods)
    mods.type("b32")
    mods.done()
    address, count = (builder.read(operand, "u32", ins) for operand in ins.operands)

    def run(warp, mask):
        if not _whole_warp(warp, mask):
            return BLOCK
        cta = warp.cta
        if cta.uses_tensor_memory():
            raise EmulationError("tcgen05.dealloc while tcgen05 work of the CTA is not complete")
        cta.tensor.release(int(warp.rows[address][0]), int(warp.rows[count][0]))
        cta.wake()
        return None

    return run


def _relinquish(builder, ins, mods):
    mods.need("cta_group::1")
    _aligned(mods)
    mods.done()

    def run(warp, mask):
        if not _whole_warp(warp, mask):
            return BLOCK
        warp.cta.tensor.relinquished = True
        return None

    return run


# Shared-memory descriptors

SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}  # bytes, by the field's value


@dataclass(frozen=True)
class SharedDescriptor:
    """Where an operand lies: its start, and the two strides of its 8-row groups, in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int


@lru_cache(maxsize=4096)
def decode_descriptor(bits: int) -> SharedDescriptor:
    if bits >> 46 & 7 != 1 or bits >> 52 & 0x1FF or bits & 0xC000C000 or bits >> 49 & 7 or bits >> 61 not in SWIZZLES:
        raise EmulationError(f"shared-memory descriptor {bits:#018x}: a base offset or bits that are not supported")
    leading, stride = bits >> 16 & 0x3FFF, bits >> 32 & 0x3FFF
    return SharedDescriptor((bits & 0x3FFF) << 4, leading << 4, stride << 4, SWIZZLES[bits >> 61])


@lru_cache(maxsize=1024)
def _operand_offsets(rows: int, mn_major: bool, leading: int, stride: int, swizzle: int, start: int) -> np.ndarray:
    """Shared addresses of an operand's bytes [rows, 32], for a start below 1024 (a multiple of which is added later).

    The canonical layouts of the PTX ISA. K-major: groups of 8 rows, `stride` apart; a row's bytes follow each other,
    without swizzle only 16 of them, the next 16 `leading` away. MN-major (one byte an element): a line is as many rows
    of one k as the swizzle has bytes (16 without one); 8 lines of successive k follow each other; the next 8 k are
    `stride` away and the next rows `leading`, without swizzle the other way round.
    """
    row, byte = np.arange(rows)[:, None], np.arange(OPERAND_BYTES)
    if not mn_major:
        if swizzle:
            offsets = row // 8 * stride + row % 8 * swizzle + byte
        else:
            offsets = row // 8 * stride + row % 8 * 16 + byte // 16 * leading + byte % 16
    else:
        line = swizzle or 16
        far, near = (leading, stride) if swizzle else (stride, leading)
        offsets = row // line * far + row % line + byte % 8 * line + byte // 8 * near
    return tensor_map.swizzled(start + offsets, swizzle)


def operand_addresses(descriptor: SharedDescriptor, rows: int, mn_major: bool) -> np.ndarray:
    high = descriptor.start & ~1023
    offsets = _operand_offsets(
        rows, mn_major, descriptor.leading, descriptor.stride, descriptor.swizzle, descriptor.start & 1023
    )
    return high + offsets


# Copies of scales


def _copy(builder, ins, mods):
    """Rows of 16 bytes to four columns of 32 lanes, the same in each quarter of the lanes."""
    mods.need("cta_group::1")
    mods.need("32x128b")
    mods.need("warpx4")
    mods.done()
    to, source = builder.address(ins.operands[0], ins), builder.read(ins.operands[1], "u64", ins)

    def run(warp, mask):
        cta = warp.cta
        warp.check_order()
        for lane in active_lanes(mask):
            descriptor = decode_descriptor(int(warp.rows[source][lane]))
            row, byte = np.arange(32)[:, None], np.arange(16)
            if descriptor.swizzle:
                raise EmulationError("tcgen05.cp of swizzled shared memory is not supported")
            addresses = descriptor.start + row // 8 * descriptor.stride + row % 8 * 16 + byte
            cta.shared.check(int(addresses.min()), int(addresses.max()) + 1)
            cta.shared.check_fenced(addresses)
            cta.issue(Task(_copy_action(cta, tensor_address(int(to(warp.rows)[lane])), addresses), ins.text))

    return run


def tensor_address(address: int) -> int:
    """The column of an address of lane 0; the two top bits are not part of it (those of scales hold their id)."""
    if address >> 16 & 0x3FFF:
        raise EmulationError(f"tensor memory address {address:#x}: lane 0 is wanted")
    return address & 0xFFFF


def _copy_action(cta, column: int, addresses: np.ndarray):
    def action():
        words = np.ascontiguousarray(cta.shared.data[addresses]).view(np.uint32)
        cta.tensor.columns(column, 4)[...] = np.tile(words, (4, 1))

    return action


# Products

# Element types by their code in the instruction descriptor.
_F8_TYPES = {0: formats.E4M3, 1: formats.E5M2}
_F4_TYPES = {1: formats.E2M1}
# Scales a row by spelling.
_SCALES = {
    "mxf8f6f4": {"scale_vec::1X": 1, "block32": 1},
    "mxf4": {"scale_vec::2X": 2, "block32": 2},
    "mxf4nvf4": {"scale_vec::2X": 2, "block32": 2, "scale_vec::4X": 4, "block16": 4},
}


@dataclass(frozen=True)
class ProductShape:
    """What an instruction descriptor says, checked against the kind."""

    a_table: np.ndarray
    b_table: np.ndarray
    a_mn_major: bool
    b_mn_major: bool
    num_rows: int  # M
    num_columns: int  # N
    scale_table: np.ndarray
    a_scale_bytes: slice
    b_scale_bytes: slice
    is_f4: bool


@lru_cache(maxsize=256)
def decode_instruction_descriptor(bits: int, kind: str, num_scales: int) -> ProductShape:
    def refuse(why: str):
        raise EmulationError(f"instruction descriptor {bits:#010x} of kind::{kind}: {why}")

    is_f4 = kind != "mxf8f6f4"
    types = _F4_TYPES if is_f4 else _F8_TYPES
    a_type, b_type = bits >> 7 & 7, bits >> 10 & (3 if is_f4 else 7)
    rows, columns = (bits >> 27 & 3) << 7, (bits >> 17 & 63) << 3
    a_id, b_id = bits >> 29 & 3, bits >> 4 & 3
    if bits & 0x8700004F:  # reserved bits, sparsity, and K 96
        refuse("reserved or unsupported bits")
    if is_f4 and bits & 1 << 12:
        refuse("reserved bits")
    if bits & 3 << 13:
        refuse("negation is not supported")
    if is_f4 and bits & 3 << 15:
        refuse("operands of 4 bits must be K-major")
    if a_type not in types or b_type not in types:
        refuse(f"element types {a_type} and {b_type} are not supported")
    if rows != 128:
        refuse(f"M {rows} is not supported")
    if not 8 <= columns <= 256:
        refuse(f"N {columns}")
    by_power_of_two = bits >> 23 & 1
    if not by_power_of_two and num_scales != 4:
        refuse("scales of type ue4m3 need blocks of 16")
    if a_id % num_scales or b_id % num_scales:
        refuse(f"scale ids {a_id} and {b_id} with {num_scales} scales a row")
    return ProductShape(
        types[a_type],
        types[b_type],
        bool(bits >> 15 & 1),
        bool(bits >> 16 & 1),
        rows,
        columns,
        formats.E8M0 if by_power_of_two else formats.UE4M3,
        slice(a_id, a_id + num_scales),
        slice(b_id, b_id + num_scales),
        is_f4,
    )


def _product(builder, ins, mods):
    mods.need("cta_group::1")
    kind = mods.need(*(f"kind::{kind}" for kind in _SCALES)).removeprefix("kind::")
    mods.need("block_scale")
    num_scales = _SCALES[kind][mods.need(*_SCALES[kind])]
    mods.take(*(f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard")))
    mods.done()
    if len(ins.operands) != 7:
        raise ins.unsupported("number of operands")
    d, a, b, descriptor, a_scales, b_scales, accumulates = ins.operands
    if hasattr(a, "base"):
        raise ins.unsupported("operand in tensor memory")
    addresses = [builder.address(operand, ins) for operand in (d, a_scales, b_scales)]
    a, b = (builder.read(operand, "u64", ins) for operand in (a, b))
    descriptor = builder.read(descriptor, "u32", ins)
    accumulates = builder.predicate(accumulates, ins)

    def run(warp, mask):
        rows, cta = warp.rows, warp.cta
        warp.check_order()
        for lane in active_lanes(mask):
            shape = decode_instruction_descriptor(int(rows[descriptor][lane]), kind, num_scales)
            columns = [tensor_address(int(read(rows)[lane])) for read in addresses]
            operands = [
                operand_addresses(decode_descriptor(int(rows[slot][lane])), count, mn_major)
                for slot, count, mn_major in (
                    (a, shape.num_rows, shape.a_mn_major),
                    (b, shape.num_columns, shape.b_mn_major),
                )
            ]
            for operand in operands:
                cta.shared.check(int(operand.min()), int(operand.max()) + 1)
                cta.shared.check_fenced(operand)
            adds = bool(accumulates(rows)[lane])
            cta.issue(Task(_product_action(cta, shape, columns, operands, adds), ins.text))

    return run


def _product_action(cta, shape: ProductShape, columns: list[int], operands: list[np.ndarray], adds: bool):
    def scaled(addresses, table, column, which):
        codes = cta.shared.data[addresses]
        values = table[formats.unpack_nibbles(codes) if shape.is_f4 else codes]
        scales = shape.scale_table[read_scales(cta.tensor, column, len(values), which)]
        blocks = values.reshape(len(values), scales.shape[1], -1)
        return (blocks * scales[:, :, None]).reshape(len(values), -1)

    def action():
        accumulator = cta.tensor.columns(columns[0], shape.num_columns)
        a = scaled(operands[0], shape.a_table, columns[1], shape.a_scale_bytes)
        b = scaled(operands[1], shape.b_table, columns[2], shape.b_scale_bytes)
        # 32 rows at a time: products so small that no BLAS splits them over threads, which would take longer.
        result = (a.reshape(-1, 32, a.shape[1]) @ np.ascontiguousarray(b.T)).reshape(len(a), len(b))
        if adds:
            result += accumulator.view(np.float32)
        accumulator[...] = result.astype(np.float32).view(np.uint32)

    return action


def read_scales(tensor, column: int, num_rows: int, which: slice) -> np.ndarray:
    """Scale codes [rows, scales]: row r has lane r % 32 of column r // 32, and some of its four bytes."""
    words = tensor.columns(column, -(-num_rows // 32))[:32]
    codes = np.ascontiguousarray(words.T).view(np.uint8).reshape(-1, 4)
    return codes[:num_rows, which]


def _commit(builder, ins, mods):
    """Arrives on an mbarrier once all tcgen05 work issued before is complete."""
    mods.need("cta_group::1")
    mods.need("mbarrier::arrive::one")
    mods.take(*_SHARED)
    mods.type("b64")
    mods.done()
    read = builder.address(ins.operands[0], ins)

    def run(warp, mask):
        cta = warp.cta
        for lane in active_lanes(mask):
            address = int(read(warp.rows)[lane])
            cta.barrier(address).check_fenced()
            arrival = Arrival(_arrival_action(cta, address), ins.text)
            cta.issue(Commit(lambda arrival=arrival: cta.tasks.append(arrival), ins.text))

    return run


def _arrival_action(cta, address: int):
    def action():
        if cta.barrier(address).arrive(signal=FENCED):
            cta.wake()

    return action


# Loads


class PendingLoad:
    """A tcgen05.ld between its issue and wait::ld."""

    def __init__(self, cta, lanes: slice, column: int, count: int, targets: list[int], text: str):
        self.targets = targets
        self.task = Task(lambda: self._read(cta, lanes, column, count), text)
        cta.tasks.append(self.task)

    def _read(self, cta, lanes, column, count) -> None:
        self.values = cta.tensor.columns(column, count)[lanes].T.copy()

    def deliver(self, rows) -> None:
        self.task.run()
        for target, value in zip(self.targets, self.values, strict=True):
            rows[target][...] = value


def _load(builder, ins, mods):
    _aligned(mods)
    mods.need("32x32b")
    count = int(mods.need(*(f"x{2**i}" for i in range(8)))[1:])
    mods.type("b32")
    mods.done()
    registers, address = ins.operands
    registers = registers if isinstance(registers, tuple) else (registers,)
    if len(registers) != count:
        raise ins.unsupported("number of registers")
    targets = [builder.write(register, "u32", ins) for register in registers]
    indices = [register.index for register in registers if hasattr(register, "index")]
    read = builder.address(address, ins)

    def run(warp, mask):
        if not _whole_warp(warp, mask):
            return BLOCK
        addresses = read(warp.rows)
        first = int(addresses[0])
        if (addresses != first).any():
            raise EmulationError("tcgen05.ld with different addresses in one warp")
        lane, column = first >> 16 & 0xFFFF, first & 0xFFFF
        if lane != warp.index * 32 % TENSOR_LANES:
            raise EmulationError(
                f"tcgen05.ld of lanes from {lane} on: warp {warp.index} reaches {warp.index * 32 % TENSOR_LANES}"
            )
        warp.check_order()
        warp.order.read()
        warp.cta.tensor.columns(column, count)
        load = PendingLoad(warp.cta, slice(lane, lane + 32), column, count, targets, ins.text)
        warp.pending_loads.append(load)
        warp.pending_registers.update(indices)
        return None

    return run


def _wait_load(builder, ins, mods):
    _aligned(mods)
    mods.done()

    def run(warp, mask):
        if not _whole_warp(warp, mask):
            return BLOCK
        warp.complete_loads()
        return None

    return run

"""Logic, shifts, and instructions on the bits and bytes of a register."""

import numpy as np

from tests.sm100.arithmetic import BIT_TYPES, INTEGERS, applied, slots
from tests.sm100.decode import BITS, DTYPES, instruction


@instruction("and", "or", "xor")
def _logic(builder, ins, mods):
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[ins.base]
    kind = mods.type("pred", *BIT_TYPES)
    mods.done()
    if kind != "pred":
        return applied(function, *slots(builder, ins, kind, 2))
    a, b = (builder.predicate(operand, ins) for operand in ins.operands[1:])
    d = builder.write(ins.operands[0], "pred", ins)

    def run(warp, mask):
        rows = warp.rows
        function(a(rows), b(rows), out=rows[d], where=mask)

    return run


@instruction("not", "cnot")
def _not(builder, ins, mods):
    kind = mods.type("pred", *BIT_TYPES)
    mods.done()
    return applied(np.invert if ins.base == "not" else lambda a: a == 0, *slots(builder, ins, kind, 1))


@instruction("shl", "shr")
def _shift(builder, ins, mods):
    """Amounts from the width on shift everything out, as numpy's shifts do."""
    kind = mods.type(*INTEGERS)
    mods.done()
    a, amount = builder.read(ins.operands[1], kind, ins), builder.read(ins.operands[2], "u32", ins)
    d, dtype = builder.write(ins.operands[0], kind, ins), DTYPES[kind]
    function = np.left_shift if ins.base == "shl" else np.right_shift
    limit = np.uint32(BITS[kind])

    def run(warp, mask):
        rows = warp.rows
        function(rows[a], np.minimum(rows[amount], limit), out=rows[d], where=mask, dtype=dtype, casting="unsafe")

    return run


@instruction("shf")
def _funnel(builder, ins, mods):
    """The upper (l) or lower (r) 32 bits of the 64 bits b:a, shifted."""
    kind = mods.type("b32")
    left, clamp = mods.need("l", "r") == "l", mods.need("clamp", "wrap") == "clamp"
    mods.done()

    def shift(a, b, amount):
        amount = (np.minimum(amount, np.uint32(32)) if clamp else amount & np.uint32(31)).astype(np.uint64)
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        return (both << amount) >> np.uint64(32) if left else both >> amount

    return applied(shift, *slots(builder, ins, kind, 3))


@instruction("lop3")
def _lop3(builder, ins, mods):
    """Bit i of the table is the result where (a, b, c) are the bits of i, a the highest."""
    kind = mods.type("b32")
    mods.done()
    d, *sources, table = ins.operands
    a, b, c = (builder.read(operand, kind, ins) for operand in sources)
    d, table = builder.write(d, kind, ins), table.value

    def combine(a, b, c):
        result = np.zeros_like(a)
        for index in range(8):
            if table >> index & 1:
                result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
        return result

    return applied(combine, d, [a, b, c])


def _highest(values: np.ndarray) -> np.ndarray:
    """Position of the highest set bit, -1 for zero; exact up to 64 bits."""
    positions = np.full(values.shape, -1, np.int64)
    rest = values.astype(np.uint64)
    for step in (32, 16, 8, 4, 2, 1):
        upper = rest >> np.uint64(step)
        positions += np.where(upper != 0, step, 0)
        rest = np.where(upper != 0, upper, rest)
    return positions + (values != 0)


@instruction("popc", "clz", "brev")
def _count(builder, ins, mods):
    kind = mods.type("b32", "b64")
    mods.done()
    bits, dtype = BITS[kind], DTYPES[kind]

    def reverse(values):
        as_bits = np.unpackbits(values[:, None].view(np.uint8), axis=-1, bitorder="little")
        return np.packbits(as_bits[:, ::-1], axis=-1, bitorder="little").view(dtype)[:, 0]

    def count(values):
        return np.unpackbits(values[:, None].view(np.uint8), axis=-1).sum(axis=-1)

    function = {"popc": count, "clz": lambda a: bits - 1 - _highest(a), "brev": reverse}[ins.base]
    a = builder.read(ins.operands[1], kind, ins)
    return applied(function, builder.write(ins.operands[0], kind if ins.base == "brev" else "u32", ins), [a])


@instruction("bfind")
def _bfind(builder, ins, mods):
    """Position of the highest bit that differs from the sign; 0xFFFFFFFF if there is none."""
    kind = mods.type("u32", "s32", "u64", "s64")
    as_shift = mods.take("shiftamt") is not None
    mods.done()
    bits = BITS[kind]

    def find(a):
        positions = _highest(np.where(a < 0, ~a, a).view(f"u{bits // 8}"))
        return np.where(positions >= 0, bits - 1 - positions, -1) if as_shift else positions

    a = builder.read(ins.operands[1], kind, ins)
    return applied(find, builder.write(ins.operands[0], "u32", ins), [a])


def _field_mask(length: np.ndarray) -> np.ndarray:
    """length low bits set, as uint64, for lengths up to 64."""
    full = np.uint64(2**64 - 1)
    return np.where(length >= 64, full, ~(full << np.minimum(length, 63).astype(np.uint64)))


@instruction("bfe")
def _extract(builder, ins, mods):
    """`length` bits from `position` on; signed: extended by the field's top bit, or the value's if that is lower."""
    kind = mods.type("u32", "s32", "u64", "s64")
    mods.done()
    bits, unsigned = BITS[kind], f"u{BITS[kind]}"
    a = builder.read(ins.operands[1], unsigned, ins)
    position, length = (builder.read(operand, "u32", ins) for operand in ins.operands[2:])
    d = builder.write(ins.operands[0], kind, ins)

    def extract(a, position, length):
        position, length = (position & 0xFF).astype(np.int64), (length & 0xFF).astype(np.int64)
        a = a.astype(np.uint64)
        field = np.where(position < bits, a >> np.minimum(position, 63).astype(np.uint64), np.uint64(0))
        mask = _field_mask(length)
        if kind[0] == "u":
            return field & mask
        top = np.minimum(position + length - 1, bits - 1).clip(0)
        negative = (length > 0) & ((a >> top.astype(np.uint64)) & np.uint64(1) == 1)
        present = np.minimum(length, np.maximum(bits - position, 0))  # bits of the field that exist
        return np.where(negative, field | ~_field_mask(present), field & mask)

    return applied(extract, d, [a, position, length])


@instruction("bfi")
def _insert(builder, ins, mods):
    """The low bits of a put into b."""
    kind = mods.type("b32", "b64")
    mods.done()
    bits = BITS[kind]
    a, b = (builder.read(operand, kind, ins) for operand in ins.operands[1:3])
    position, length = (builder.read(operand, "u32", ins) for operand in ins.operands[3:])

    def insert(a, b, position, length):
        position, length = (position & 0xFF).astype(np.int64), (length & 0xFF).astype(np.int64)
        shift = np.minimum(position, 63).astype(np.uint64)
        mask = np.where(position < bits, _field_mask(length) << shift, np.uint64(0))
        return (b.astype(np.uint64) & ~mask) | (a.astype(np.uint64) << shift & mask)

    return applied(insert, builder.write(ins.operands[0], kind, ins), [a, b, position, length])


@instruction("bmsk")
def _bit_mask(builder, ins, mods):
    mods.type("b32")
    mods.need("clamp")
    mods.done()

    def mask(position, length):
        field = _field_mask(np.minimum(length, 32).astype(np.int64))
        return np.where(position < 32, field << np.minimum(position, 63).astype(np.uint64), np.uint64(0))

    return applied(mask, *slots(builder, ins, "u32", 2))


@instruction("prmt")
def _permute(builder, ins, mods):
    """Each nibble of the selector names one of the eight bytes b:a; its top bit repeats that byte's sign instead."""
    mods.type("b32")
    mods.done()

    def permute(a, b, selector):
        eight = np.concatenate([_bytes(a), _bytes(b)], axis=1)
        nibbles = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
        picked = np.take_along_axis(eight, (nibbles & 7).astype(np.int64), axis=1)
        signs = np.where(picked & 0x80, 0xFF, 0).astype(np.uint8)
        return np.ascontiguousarray(np.where(nibbles & 8, signs, picked)).view(np.uint32)[:, 0]

    return applied(permute, *slots(builder, ins, "u32", 3))


def _bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words)[:, None].view(np.uint8)

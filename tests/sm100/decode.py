"""Decoding: each instruction once, into a closure over register slots; running it then costs a few numpy calls.

A closure is called as run(warp, mask). `warp.rows` is a list of arrays, one a slot, and the closure knows its slots'
numbers. A slot is one way to look at one register over a warp's 32 lanes (as u32, as f32, as its upper half), or a
constant, or a special register. `mask` is True when all 32 lanes execute, else a bool array that is neither empty nor
full, in the form that the `where` argument of numpy's functions takes.

A closure returns None to go on, BLOCK when the instruction cannot complete yet (it is then run again after something in
the CTA has changed), EXIT, or the index of the instruction to branch to.

The modules arithmetic, bits, convert, data, control, asynchronous and tensor_core register the instructions, by the
first word of the opcode, with @instruction. A builder takes every modifier it knows out of `Modifiers`; one left over
is an error, so that no modifier is ignored by accident.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from tests.sm100 import ptx
from tests.sm100.ptx import SINK, Address, Immediate, Instruction, Kernel, Pair, Register, Symbol

NUM_LANES = 32
BLOCK, EXIT = -1, -2

DTYPES = {f"u{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
DTYPES |= {f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)}
DTYPES |= {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
BITS = {kind: dtype.itemsize * 8 for kind, dtype in DTYPES.items()}

_TAKE_WIDER = ("cvt", "ld", "st")  # instructions whose registers may be wider than their type

Run = Callable[["object", "object"], "int | None"]
BUILDERS: dict[str, Callable[["Builder", Instruction, "Modifiers"], Run]] = {}


def instruction(*bases: str):
    """Registers a builder for the opcodes that begin with one of these words."""

    def register(build):
        for base in bases:
            BUILDERS[base] = build
        return build

    return register


class Modifiers:
    """The words of an opcode behind the first one, taken out one by one."""

    def __init__(self, ins: Instruction):
        self.ins, self.rest = ins, ins.modifiers

    def take(self, *choices: str) -> str | None:
        """The first modifier left that is one of the choices, or None."""
        for word in self.rest:
            if word in choices:
                self.rest.remove(word)
                return word
        return None

    def need(self, *choices: str) -> str:
        word = self.take(*choices)
        if word is None:
            raise self.ins.unsupported(f"form (none of .{', .'.join(choices)})")
        return word

    def type(self, *choices: str) -> str:
        """The last modifier, a type, as a kind: b32 is u32."""
        if not self.rest or (choices and self.rest[-1] not in choices):
            raise self.ins.unsupported("type")
        word = self.rest.pop()
        if word[0] == "b" and word[1:].isdigit():
            word = "u" + word[1:]
        return word

    def done(self) -> None:
        if self.rest:
            raise self.ins.unsupported(f"modifier .{self.rest[0]}")


class Builder:
    """Gives out slots while a kernel's instructions are decoded."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.parameters = {parameter.name: parameter for parameter in kernel.parameters}
        self.slots: dict[tuple, int] = {}  # by what the slot shows; RegisterFile makes the arrays in this order
        self.touched: set[int] = set()  # registers of the instruction being decoded

    def slot(self, *key) -> int:
        return self.slots.setdefault(key, len(self.slots))

    def read(self, operand, kind: str, ins: Instruction, part: int | None = None) -> int:
        """Slot of a source operand seen as a kind, or its part-th piece of that width, from the low end."""
        if isinstance(operand, Register):
            return self.register(operand, kind, ins, part)
        if kind == "pred":
            raise ins.unsupported("operand")
        if isinstance(operand, Immediate):
            return self.constant(operand.value >> (part or 0) * BITS[kind], kind)
        if isinstance(operand, Symbol):
            if operand.name in self.kernel.variables:
                return self.constant(self.kernel.variables[operand.name] + operand.offset, kind)
            if operand.name in self.parameters:
                return self.constant(self.parameters[operand.name].offset + operand.offset, kind)
            if operand.name.startswith("%") and not operand.offset:
                return self.slot("special", operand.name, kind)
        raise ins.unsupported("operand")

    def write(self, operand, kind: str, ins: Instruction) -> int:
        """Slot of a destination; one wider than the kind is written whole, zero- or sign-extended."""
        if operand == SINK:
            return self.slot("scratch", kind)
        if not isinstance(operand, Register):
            raise ins.unsupported("destination")
        if kind in BITS and operand.bits > BITS[kind] and kind[0] in "us":
            kind = f"{kind[0]}{operand.bits}"
        return self.register(operand, kind, ins)

    def register(self, register: Register, kind: str, ins: Instruction, part: int | None = None) -> int:
        self.touched.add(register.index)
        bits = 1 if kind == "pred" else 64 if kind == "f32x2" else BITS[kind]
        narrower = 1 < bits < register.bits and (part is not None or ins.base in _TAKE_WIDER)
        if bits != register.bits and not narrower:
            raise ins.unsupported(f"width of {register.name} (.b{register.bits} taken as .{kind})")
        return self.slot("register", register, kind, part or 0)

    def constant(self, value: int, kind: str) -> int:
        if kind == "f32x2":
            return self.slot("constant", value & (2**64 - 1), kind)
        return self.slot("constant", value & (2 ** BITS[kind] - 1), kind)

    def predicate(self, operand, ins: Instruction) -> Callable:
        """Reader of a predicate operand, which may be negated or the constants 0 and 1."""
        if isinstance(operand, ptx.Not):
            slot = self.register(operand.register, "pred", ins)
            return lambda rows: ~rows[slot]
        if isinstance(operand, Immediate):
            value = np.full(NUM_LANES, bool(operand.value))
            return lambda rows: value
        slot = self.register(operand, "pred", ins)
        return lambda rows: rows[slot]

    def address(self, operand, ins: Instruction) -> Callable:
        """Reader of an address operand: rows to int64 of 32 lanes, offset included."""
        if not isinstance(operand, Address) or operand.coordinates:
            raise ins.unsupported("address")
        return self.base_address(operand, ins)

    def base_address(self, operand: Address, ins: Instruction) -> Callable:
        bits = operand.base.bits if isinstance(operand.base, Register) else 64
        if bits not in (32, 64):
            raise ins.unsupported("address")
        slot, offset = self.read(operand.base, f"u{bits}", ins), operand.offset
        return lambda rows: rows[slot].astype(np.int64) + offset


def split_pair(operand) -> tuple[object, object | None]:
    return (operand.value, operand.predicate) if isinstance(operand, Pair) else (operand, None)


class Step:
    """One decoded instruction."""

    __slots__ = ("guard", "ins", "is_move", "negated", "run", "touched")

    def __init__(self, ins: Instruction, run: Run, guard: int | None, touched: frozenset[int]):
        self.ins, self.run, self.guard, self.negated, self.touched = ins, run, guard, ins.negated, touched
        self.is_move = ins.base == "mov"


class Program:
    """A decoded kernel: its steps, and register files to run warps with, used over and over."""

    def __init__(self, text: str):
        # Their import registers the instructions.
        from tests.sm100 import arithmetic, asynchronous, bits, control, convert, data, tensor_core  # noqa: F401

        self.kernel = ptx.parse(text)
        builder = Builder(self.kernel)
        self.steps: list[Step] = []
        for ins in self.kernel.instructions:
            builder.touched = set()
            guard = None if ins.guard is None else builder.register(ins.guard, "pred", ins)
            if ins.base not in BUILDERS:
                raise ins.unsupported()
            run = BUILDERS[ins.base](builder, ins, Modifiers(ins))
            self.steps.append(Step(ins, run, guard, frozenset(builder.touched)))
        self.slots = list(builder.slots)
        self._free: list[RegisterFile] = []

    def borrow_registers(self) -> "RegisterFile":
        return self._free.pop() if self._free else RegisterFile(self)

    def give_back(self, registers: "RegisterFile") -> None:
        self._free.append(registers)


@lru_cache(maxsize=64)
def decode(text: str) -> Program:
    return Program(text)


class RegisterFile:
    """The registers of one warp, and `rows`: an array for every slot of the program."""

    def __init__(self, program: Program):
        widths: dict[int, int] = {}
        places: dict[int, int] = {}
        for register in program.kernel.registers:
            places[register.index] = widths.get(register.bits, 0)
            widths[register.bits] = places[register.index] + 1
        self.storage = {
            bits: np.zeros((count, NUM_LANES), bool if bits == 1 else f"u{bits // 8}") for bits, count in widths.items()
        }
        self.rows: list[np.ndarray] = []
        self.specials: list[tuple[int, str, str]] = []
        for number, (what, value, kind, *rest) in enumerate(program.slots):
            if what == "register":
                row = self.storage[value.bits][places[value.index]]
                self.rows.append(_view(row, value.bits, kind, *rest))
            elif what == "constant":
                bits = 64 if kind == "f32x2" else BITS[kind]
                row = _view(np.full(NUM_LANES, value, f"u{bits // 8}"), bits, kind, 0)
                row.flags.writeable = False
                self.rows.append(row)
            elif what == "scratch":
                bits = 1 if kind == "pred" else 64 if kind == "f32x2" else BITS[kind]
                row = np.zeros(NUM_LANES, bool if bits == 1 else f"u{bits // 8}")
                self.rows.append(_view(row, bits, kind, 0))
            else:  # a special register: filled in by start
                self.specials.append((number, value, kind))
                self.rows.append(np.zeros(NUM_LANES, DTYPES[kind]))

    def start(self, specials: Callable[[str], np.ndarray], rng: np.random.Generator) -> None:
        """Garbage in every register, as on the device; special registers for the warp that takes the file over."""
        for bits, storage in self.storage.items():
            if bits == 1:
                storage[...] = rng.integers(0, 2, storage.shape) == 1
            else:
                storage[...] = np.frombuffer(rng.bytes(storage.nbytes), storage.dtype).reshape(storage.shape)
        for number, name, kind in self.specials:
            self.rows[number] = np.broadcast_to(specials(name), NUM_LANES).astype(DTYPES[kind])


def _view(row: np.ndarray, bits: int, kind: str, part: int) -> np.ndarray:
    if kind == "pred":
        return row
    if kind == "f32x2":
        return row.view(np.float32)
    return row.view(DTYPES[kind])[part :: bits // BITS[kind]]


def twice(mask):
    """The mask for the 64 floats of an f32x2 slot."""
    return True if mask is True else np.repeat(mask, 2)


def put(destination: np.ndarray, values: np.ndarray, mask) -> None:
    """Writes the active lanes, converting by truncation or extension."""
    np.copyto(destination, values, where=mask, casting="unsafe")


def active_lanes(mask) -> list[int]:
    return list(range(NUM_LANES)) if mask is True else np.flatnonzero(mask).tolist()

"""Parser: the text of a PTX module to the parameters, variables and instructions of its kernel.

Registers are resolved by scope (inline assembly opens scopes with names of their own) and get an index each; labels
become instruction indices. Nothing here knows what an instruction does: that is decode.py.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from tests.sm100.errors import UnsupportedInstruction

SHARED_BASE = 1024  # where a CTA's first shared variable lies; variables follow each other, the dynamic one comes last


@dataclass(frozen=True)
class Register:
    index: int
    name: str
    bits: int  # 1 for a predicate


@dataclass(frozen=True)
class Not:
    """A predicate operand with a `!` before it."""

    register: Register


@dataclass(frozen=True)
class Immediate:
    value: int
    float_bits: int = 0  # 32 or 64 when written as 0f... or 0d...: value is then the bit pattern


@dataclass(frozen=True)
class Symbol:
    """A label, a parameter, a variable, a special register, or `_`."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    base: object  # a Register, a Symbol or an Immediate
    offset: int = 0
    coordinates: tuple = ()  # of a tensor, innermost first


class Pair(NamedTuple):
    """`d|p`, a value and a predicate."""

    value: object
    predicate: object


SINK = Symbol("_")


@dataclass(frozen=True)
class Parameter:
    name: str
    num_bytes: int
    offset: int  # in the parameter space, by the alignments


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple
    guard: Register | None
    negated: bool
    scope: tuple[int, ...]
    text: str

    @property
    def base(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def modifiers(self) -> list[str]:
        return self.opcode.split(".")[1:]

    def unsupported(self, what: str = "instruction") -> UnsupportedInstruction:
        return UnsupportedInstruction(f"unsupported {what}: {self.text}")


@dataclass(frozen=True)
class Kernel:
    name: str
    parameters: tuple[Parameter, ...]
    variables: dict[str, int]  # shared variables by their address
    shared_bytes: int  # of the variables of fixed size, from address 0
    dynamic_align: int  # of the variable without a size
    instructions: tuple[Instruction, ...]
    labels: dict[tuple[tuple[int, ...], str], int]
    registers: tuple[Register, ...]

    def target(self, instruction: Instruction, label: str) -> int:
        """Index of a label's instruction, seen from the scope of another one."""
        scope = instruction.scope
        while (scope, label) not in self.labels:
            if not scope:
                raise instruction.unsupported("label")
            scope = scope[:-1]
        return self.labels[scope, label]


def parse(ptx: str) -> Kernel:
    """The one kernel of a module."""
    text = re.sub(r"/\*.*?\*/", " ", re.sub(r"//[^\n]*", "", ptx), flags=re.DOTALL)
    entries = re.findall(r"\.entry\s+([\w$]+)", text)
    if len(entries) != 1:
        raise UnsupportedInstruction(f"a module with one .entry is wanted, this one has {entries}")
    start = text.index(".entry")
    opening = text.index("(", start)
    closing = text.index(")", opening)
    body = _Body(text, text.index("{", closing) + 1)
    for statement in re.findall(r"\.shared[^;{}]*;", text[:start]):
        body.shared_variable(statement.rstrip(";"))
    body.parse()
    body.place_dynamic_variables()
    return Kernel(
        name=entries[0],
        parameters=_parameters(text[opening + 1 : closing]),
        variables=body.variables,
        shared_bytes=body.shared_end,
        dynamic_align=body.dynamic_align,
        instructions=tuple(body.instructions),
        labels=body.labels,
        registers=tuple(body.registers),
    )


def _parameters(text: str) -> tuple[Parameter, ...]:
    parameters, end = [], 0
    for item in filter(None, map(str.strip, text.split(","))):
        match = re.match(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)\b.*?([\w$]+)\s*(?:\[(\d+)\])?$", item, re.DOTALL
        )
        if match is None:
            raise UnsupportedInstruction(f"unsupported parameter: {item}")
        align, bits, name, count = match.groups()
        num_bytes = int(bits) // 8 * int(count or 1)
        offset = -(-end // int(align or int(bits) // 8)) * int(align or int(bits) // 8)
        parameters.append(Parameter(name, num_bytes, offset))
        end = offset + num_bytes
    return tuple(parameters)


_WIDTHS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32}
_WIDTHS |= {"u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64}

_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?)\s*([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?$")


class _Body:
    """The statements between a kernel's braces, read once from start to end."""

    def __init__(self, text: str, start: int):
        self.text, self.at = text, start
        self.instructions: list[Instruction] = []
        self.labels = {}
        self.registers: list[Register] = []
        self.names: list[dict] = [{}]  # registers by name, a dictionary a scope
        self.scope: tuple[int, ...] = ()
        self.num_scopes = 0
        self.variables: dict[str, int] = {}
        self.shared_end = SHARED_BASE
        self.dynamic: list[str] = []
        self.dynamic_align = 1

    def parse(self) -> None:
        while True:
            while self.text[self.at].isspace() or self.text[self.at] == ";":
                self.at += 1
            if self.text[self.at] == "{":
                self.num_scopes += 1
                self.scope += (self.num_scopes,)
                self.names.append({})
                self.at += 1
            elif self.text[self.at] == "}":
                if not self.scope:
                    return
                self.scope = self.scope[:-1]
                self.names.pop()
                self.at += 1
            elif match := _LABEL.match(self.text, self.at):
                self.labels[self.scope, match[1]] = len(self.instructions)
                self.at = match.end()
            elif self.text.startswith((".loc", ".file"), self.at):
                self.at = self.text.index("\n", self.at)
            else:
                end = self.text.index(";", self.at)
                self.statement(" ".join(self.text[self.at : end].split()))
                self.at = end + 1

    def statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self.declare(text)
        elif text.startswith(".shared"):
            self.shared_variable(text)
        elif text.startswith(".pragma"):
            pass  # advice to the assembler
        else:
            match = _INSTRUCTION.match(text)
            if match is None:
                raise UnsupportedInstruction(f"unsupported statement: {text}")
            negation, guard, opcode, operands = match.groups()
            self.instructions.append(
                Instruction(
                    opcode,
                    tuple(self.operand(item, text) for item in _split(operands)),
                    self.register(guard) if guard else None,
                    negation == "!",
                    self.scope,
                    text,
                )
            )

    def declare(self, text: str) -> None:
        match = re.match(r"\.reg\s*\.(\w+)\s+(.*)$", text)
        if match is None or match[1] not in _WIDTHS:
            raise UnsupportedInstruction(f"unsupported declaration: {text}")
        for name in map(str.strip, match[2].split(",")):
            family = re.match(r"([%\w$]+)<(\d+)>$", name)
            for each in [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]:
                register = Register(len(self.registers), each, _WIDTHS[match[1]])
                self.registers.append(register)
                self.names[-1][each] = register

    def shared_variable(self, text: str) -> None:
        match = re.match(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)\s+([\w$]+)\s*(?:\[(\d*)\])?$", text.strip())
        if match is None:
            raise UnsupportedInstruction(f"unsupported declaration: {text}")
        align, bits, name, count = match.groups()
        align = int(align or int(bits) // 8)
        if count == "":  # the dynamic shared memory: behind all others
            self.dynamic.append(name)
            self.dynamic_align = max(self.dynamic_align, align)
            return
        address = -(-self.shared_end // align) * align
        self.variables[name] = address
        self.shared_end = address + int(bits) // 8 * int(count or 1)

    def place_dynamic_variables(self) -> None:
        self.shared_end = -(-self.shared_end // self.dynamic_align) * self.dynamic_align
        for name in self.dynamic:
            self.variables[name] = self.shared_end

    def register(self, name: str) -> Register | None:
        for names in reversed(self.names):
            if name in names:
                return names[name]
        return None

    def operand(self, text: str, statement: str):
        """One operand: a vector, an address, a pair, an immediate, a register or a symbol."""
        text = text.strip()
        if text[0] == "{":
            return tuple(self.operand(item, statement) for item in _split(text[1:-1]))
        if text[0] == "[":
            return self.address(text[1:-1], statement)
        if "|" in text:
            return Pair(*(self.operand(item, statement) for item in text.split("|")))
        if text[0] == "!":
            return Not(self.operand(text[1:], statement))
        if _NUMBER.match(text):
            return Immediate(int(text.rstrip("U"), 0) if not re.match(r"-?0\d", text) else int(text.rstrip("U"), 8))
        if match := re.match(r"0([fFdD])([0-9a-fA-F]+)$", text):
            return Immediate(int(match[2], 16), 32 if match[1] in "fF" else 64)
        if (register := self.register(text)) is not None:
            return register
        if match := re.match(r"([%\w$.]+)(?:\s*\+\s*(\d+))?$", text):
            return Symbol(match[1], int(match[2] or 0))
        raise UnsupportedInstruction(f"unsupported operand {text}: {statement}")

    def address(self, text: str, statement: str) -> Address:
        parts = _split(text)
        coordinates = ()
        if len(parts) == 2:
            coordinates = self.operand(parts[1], statement)
            coordinates = coordinates if isinstance(coordinates, tuple) else (coordinates,)
        elif len(parts) != 1:
            raise UnsupportedInstruction(f"unsupported address [{text}]: {statement}")
        match = re.match(r"([%\w$]+?)\s*(?:\+\s*(-?\w+))?$", parts[0].strip())
        if match is None:
            raise UnsupportedInstruction(f"unsupported address [{text}]: {statement}")
        base = self.operand(match[1], statement)
        return Address(base, int(match[2] or "0", 0), coordinates)


def _split(text: str) -> list[str]:
    """Comma-separated operands; commas within brackets and braces do not count."""
    return re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,\[{])+", text) if text.strip() else []

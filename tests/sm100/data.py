"""Moving data: mov, loads and stores of every space, atomics, address conversions, prefetches."""

import numpy as np

from tests.sm100.decode import BITS, DTYPES, instruction, put
from tests.sm100.errors import EmulationError
from tests.sm100.ptx import SINK, Symbol
from tests.sm100.spaces import PARAMETER_WINDOW, SHARED_WINDOW, full_width

_TYPES = tuple(f"{letter}{bits}" for letter in "usb" for bits in (8, 16, 32, 64)) + ("f32", "f64")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_ORDERS = ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile")
_SHARED = ("shared", "shared::cta", "shared::cluster")
_HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
_HINTS += tuple(f"L{level}::evict_{how}" for level in (1, 2) for how in ("last", "normal", "first", "unchanged"))
_HINTS += ("L1::no_allocate", "L2::64B", "L2::128B", "L2::256B")


def _plain(kind: str) -> str:
    """Bits are moved as unsigned integers."""
    return kind if kind[0] in "us" else f"u{kind[1:]}"


@instruction("mov")
def _move(builder, ins, mods):
    kind = mods.type("pred", "f32", "f64", "b8", *(t for t in _TYPES if not t.endswith("8")))
    mods.done()
    d, a = ins.operands
    if kind == "pred":
        read, d = builder.predicate(a, ins), builder.write(d, "pred", ins)
        return lambda warp, mask: put(warp.rows[d], read(warp.rows), mask)
    kind = f"u{BITS[kind]}"
    if isinstance(d, tuple):
        return _unpack(builder, ins, kind, d, a)
    if isinstance(a, tuple):
        return _pack(builder, ins, kind, d, a)
    if isinstance(a, Symbol) and a.name in ("%clock", "%clock64", "%globaltimer"):
        d = builder.write(d, kind, ins)
        return lambda warp, mask: put(warp.rows[d], np.uint64(warp.cta.machine.num_steps), mask)
    a, d = builder.read(a, kind, ins), builder.write(d, kind, ins)
    return lambda warp, mask: np.copyto(warp.rows[d], warp.rows[a], where=mask)


def _unpack(builder, ins, kind: str, targets: tuple, source):
    part = f"u{BITS[kind] // len(targets)}"
    moves = [
        (builder.write(target, part, ins), builder.read(source, part, ins, i))
        for i, target in enumerate(targets)
        if target != SINK
    ]

    def run(warp, mask):
        rows = warp.rows
        for d, a in moves:
            np.copyto(rows[d], rows[a], where=mask)

    return run


def _pack(builder, ins, kind: str, target, sources: tuple):
    width = BITS[kind] // len(sources)
    if target == SINK:
        raise ins.unsupported("destination")
    moves = [
        (builder.register(target, f"u{width}", ins, i), builder.read(source, f"u{width}", ins))
        for i, source in enumerate(sources)
    ]

    def run(warp, mask):
        rows = warp.rows
        for d, a in moves:  # no register of this width is part of a wider one
            np.copyto(rows[d], rows[a], where=mask)

    return run


@instruction("cvta")
def _convert_address(builder, ins, mods):
    """Between generic addresses and those of a space."""
    kind = mods.type("u64", "u32")
    to_space = mods.take("to") is not None
    space = mods.need("global", "param", *_SHARED)
    mods.done()
    base = {"global": 0, "param": PARAMETER_WINDOW}.get(space, SHARED_WINDOW)
    a, d = builder.read(ins.operands[1], kind, ins), builder.write(ins.operands[0], kind, ins)
    base = np.uint64(base)

    def run(warp, mask):
        rows = warp.rows
        put(rows[d], rows[a] - base if to_space else rows[a] + base, mask)

    return run


@instruction("mapa")
def _map_address(builder, ins, mods):
    """The same variable in another CTA of the cluster; here only this one."""
    kind = mods.type("u32", "u64")
    mods.need("shared::cluster")
    mods.done()
    a, rank = builder.read(ins.operands[1], kind, ins), builder.read(ins.operands[2], "u32", ins)
    d = builder.write(ins.operands[0], kind, ins)

    def run(warp, mask):
        rows = warp.rows
        if (rows[rank] if mask is True else rows[rank][mask]).any():
            raise EmulationError("mapa of another CTA: clusters of one CTA only")
        put(rows[d], rows[a], mask)

    return run


# Loads and stores


def _access(builder, ins, mods, address):
    """(kind, values per lane, space, reader of addresses) of a load or store."""
    kind = _plain(mods.type(*_TYPES))
    count = {"v2": 2, "v4": 4, "v8": 8, None: 1}[mods.take("v2", "v4", "v8")]
    space = mods.take("param", "global", "const", "local", *_SHARED) or "generic"
    if space in ("const", "local"):
        raise ins.unsupported("space")
    if space in _SHARED:
        space = "shared"
    mods.take(*_ORDERS)
    mods.take(*_SCOPES)
    while mods.take(*_HINTS):
        pass
    if mods.take("L2::cache_hint"):
        builder.read(ins.operands[2], "u64", ins)
    elif len(ins.operands) != 2:
        raise ins.unsupported("number of operands")
    mods.done()
    return kind, count, space, builder.address(address, ins)


def _active_addresses(addresses: np.ndarray, mask, num_bytes: int) -> np.ndarray:
    addresses = addresses if mask is True else addresses[mask]
    if (addresses % num_bytes).any():
        raise EmulationError(f"address {int(addresses.max()):#x} is not a multiple of the {num_bytes} bytes accessed")
    return addresses


def _resolve(space: str, addresses: np.ndarray) -> tuple[str, np.ndarray]:
    """The space behind generic addresses."""
    if space != "generic":
        return space, addresses
    window = int(addresses[0]) >> 56
    if (addresses >> 56 != window).any() or window > 2:
        raise EmulationError("generic addresses of several spaces in one instruction")
    return ("global", "shared", "param")[window], addresses & (1 << 56) - 1


def _targets(operand, count: int, ins) -> tuple:
    operands = operand if isinstance(operand, tuple) else (operand,)
    if len(operands) != count:
        raise ins.unsupported("number of elements")
    return operands


@instruction("ld")
def _load(builder, ins, mods):
    kind, count, space, read_addresses = _access(builder, ins, mods, ins.operands[1])
    targets = [builder.write(target, kind, ins) for target in _targets(ins.operands[0], count, ins)]
    num_bytes, dtype = BITS[kind] // 8 * count, DTYPES[kind]

    def run(warp, mask):
        rows = warp.rows
        addresses = _active_addresses(read_addresses(rows), mask, num_bytes)
        where, addresses = _resolve(space, addresses)
        if where == "param":
            raw = warp.cta.machine.load_parameters(addresses, num_bytes)
        elif where == "shared":
            raw = warp.cta.shared.load(addresses, num_bytes)
        else:
            raw = warp.cta.machine.memory.load(addresses, num_bytes)
        values = full_width(np.ascontiguousarray(raw).view(dtype), mask)
        for i, target in enumerate(targets):
            put(rows[target], values[:, i], mask)

    return run


@instruction("st")
def _store(builder, ins, mods):
    kind, count, space, read_addresses = _access(builder, ins, mods, ins.operands[0])
    if space == "param":
        raise ins.unsupported("space")
    sources = [builder.read(source, kind, ins) for source in _targets(ins.operands[1], count, ins)]
    num_bytes = BITS[kind] // 8 * count

    def run(warp, mask):
        rows = warp.rows
        addresses = _active_addresses(read_addresses(rows), mask, num_bytes)
        values = np.stack([rows[source] for source in sources], axis=1).view(np.uint8)
        values = values if mask is True else values[mask]
        where, addresses = _resolve(space, addresses)
        if where == "shared":
            warp.cta.shared.store(addresses, values, warp.index)
        elif where == "global":
            warp.cta.machine.memory.store(addresses, values)
        else:
            raise EmulationError("a store to kernel parameters")

    return run


_ATOMIC = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
}


@instruction("atom", "red")
def _atomic(builder, ins, mods):
    """Lanes one after another; d is what was there before."""
    returns = ins.base == "atom"
    kind = mods.type("f32", *(t for t in _TYPES if t.endswith(("32", "64"))))
    name = mods.need("cas", *_ATOMIC)
    space = mods.take("global", *_SHARED) or "generic"
    space = "shared" if space in _SHARED else space
    mods.take("relaxed", "acquire", "release", "acq_rel")
    mods.take(*_SCOPES)
    mods.done()
    operands = list(ins.operands)
    d = builder.write(operands.pop(0), kind, ins) if returns else None
    read_addresses = builder.address(operands.pop(0), ins)
    sources = [builder.read(source, kind, ins) for source in operands]
    if len(sources) != (2 if name == "cas" else 1):
        raise ins.unsupported("number of operands")
    num_bytes, dtype = BITS[kind] // 8, DTYPES[kind]

    def run(warp, mask):
        rows = warp.rows
        lanes = np.arange(32) if mask is True else np.flatnonzero(mask)
        where, addresses = _resolve(space, _active_addresses(read_addresses(rows), mask, num_bytes))
        target = warp.cta.shared if where == "shared" else warp.cta.machine.memory
        before = rows[sources[0]].copy()
        for lane, address in zip(lanes, addresses, strict=True):
            at = np.array([address])
            old = np.ascontiguousarray(target.load(at, num_bytes)).view(dtype)[0, 0]
            values = [rows[source][lane] for source in sources]
            if name == "cas":
                new = values[1] if old == values[0] else old
            else:
                new = _ATOMIC[name](old, values[0])
            raw = np.array([[new]], dtype).view(np.uint8)
            target.store(at, raw, warp.index) if where == "shared" else target.store(at, raw)
            before[lane] = old
        if returns:
            put(rows[d], before, mask)

    return run


# What moves nothing here


@instruction("prefetch")
def _prefetch(builder, ins, mods):
    """A hint. That of a tensor map checks that there is one."""
    is_map = mods.take("tensormap") is not None
    if is_map:
        mods.take("param", "const")
    else:
        mods.take("global")
        mods.need("L1", "L2", "L2::evict_last", "L2::evict_normal")
    mods.done()
    if not is_map:
        builder.address(ins.operands[0], ins)
        return lambda warp, mask: None
    read = builder.address(ins.operands[0], ins)

    def run(warp, mask):
        addresses = read(warp.rows)
        warp.cta.machine.tensor_map(int(addresses[0 if mask is True else np.flatnonzero(mask)[0]]))

    return run


@instruction("createpolicy")
def _policy(builder, ins, mods):
    """Cache policies are hints: any value will do."""
    mods.type("b64")
    mods.need("fractional", "range")
    while mods.take(*_HINTS):
        pass
    mods.done()
    d = builder.write(ins.operands[0], "u64", ins)
    return lambda warp, mask: put(warp.rows[d], np.uint64(0), mask)

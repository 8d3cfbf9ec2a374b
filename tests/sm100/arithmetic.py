"""Arithmetic of integers and floating-point numbers, comparisons, selection.

Approximate instructions (ex2.approx, rcp.approx, ...) are computed correctly rounded: any bound that the PTX ISA gives
holds for that result, but the device's last bits may differ.
"""

import numpy as np

from tests.sm100.decode import BITS, DTYPES, instruction, put, split_pair, twice

INTEGERS = tuple(f"{letter}{bits}" for letter in "usb" for bits in (16, 32, 64))
BIT_TYPES = ("b16", "b32", "b64")
ROUNDED = ("f32", "f32x2")


def slots(builder, ins, kind: str, num_sources: int) -> tuple[int, list[int]]:
    """Destination and sources of an instruction whose operands all have one kind."""
    if len(ins.operands) != num_sources + 1:
        raise ins.unsupported("number of operands")
    sources = [builder.read(operand, kind, ins) for operand in ins.operands[1:]]
    return builder.write(ins.operands[0], kind, ins), sources


def applied(function, d: int, sources: list[int], spread=lambda mask: mask):
    """run of d = function(sources), for a numpy function or one that returns an array."""
    if isinstance(function, np.ufunc) and len(sources) == 2:
        a, b = sources

        def run(warp, mask):
            rows = warp.rows
            function(rows[a], rows[b], out=rows[d], where=spread(mask))

    else:

        def run(warp, mask):
            rows = warp.rows
            put(rows[d], function(*[rows[slot] for slot in sources]), spread(mask))

    return run


# Floating point


def flush(values: np.ndarray) -> np.ndarray:
    """Subnormals become zeros of their sign (.ftz)."""
    small = np.abs(values) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), values), values) if small.any() else values


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c with one rounding.

    The product is exact in float64. The sum is rounded there first, which matters only if it lands on a tie between two
    float32 (or where these are subnormal, whose ties lie elsewhere): then it is rounded to odd instead.
    """
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    bits = total.view(np.uint64)
    suspicious = ((bits & np.uint64(0x1FFFFFFF)) == 0x10000000) | (np.abs(total) < 2.0**-126)
    if suspicious.any():
        shifted = total - product  # the error of the sum, exactly (Knuth)
        error = (product - (total - shifted)) + (addend - shifted)
        inexact = suspicious & np.isfinite(total) & (error != 0) & ((bits & np.uint64(1)) == 0)
        total = np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return total.astype(np.float32)


CANONICAL_NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)


def _extreme(pick, of_zeros):
    """min or max of float32: -0 is below +0; two NaN give the canonical one."""

    def run(a, b):
        result = pick(a, b)
        zeros = (a == 0) & (b == 0)
        if zeros.any():
            result = np.where(zeros, of_zeros(a.view(np.uint32), b.view(np.uint32)).view(np.float32), result)
        return np.where(np.isnan(result), CANONICAL_NAN, result)

    return run


# By whether .NaN is there: without it, of two operands the one that is not NaN is taken.
EXTREMES = {
    ("min", False): _extreme(np.fmin, np.bitwise_or),
    ("max", False): _extreme(np.fmax, np.bitwise_and),
    ("min", True): _extreme(np.minimum, np.bitwise_or),
    ("max", True): _extreme(np.maximum, np.bitwise_and),
}


def _in_float64(function):
    """float32 by way of float64."""
    return lambda *values: function(*(value.astype(np.float64) for value in values)).astype(np.float32)


APPROXIMATE = {
    "ex2": _in_float64(np.exp2),
    "lg2": _in_float64(np.log2),
    "rsqrt": _in_float64(lambda a: 1 / np.sqrt(a)),
    "tanh": _in_float64(np.tanh),
}


def _float(builder, ins, mods, kind: str, num_sources: int, function):
    """d = function(sources) on f32 or f32x2, with .ftz and .sat."""
    ftz, sat = mods.take("ftz"), mods.take("sat")
    mods.done()
    d, sources = slots(builder, ins, kind, num_sources)

    def adjusted(*values):
        result = flush(function(*map(flush, values))) if ftz else function(*values)
        return np.where(np.isnan(result), np.float32(0), np.clip(result, 0, 1)) if sat else result

    spread = twice if kind == "f32x2" else lambda mask: mask
    return applied(adjusted if ftz or sat else function, d, sources, spread)


@instruction("add", "sub")
def _add(builder, ins, mods):
    function = {"add": np.add, "sub": np.subtract}[ins.base]
    kind = mods.type(*ROUNDED, *INTEGERS)
    if kind in ROUNDED:
        mods.take("rn")
        return _float(builder, ins, mods, kind, 2, function)
    mods.done()
    return applied(function, *slots(builder, ins, kind, 2))


def _high(bits: int, signed: bool):
    """Upper half of a product."""
    if bits < 64:
        wide = DTYPES[f"{'s' if signed else 'u'}{2 * bits}"]
        return lambda a, b: a.astype(wide) * b.astype(wide) >> wide.type(bits)
    return lambda a, b: np.array([int(x) * int(y) >> bits & 2**bits - 1 for x, y in zip(a, b, strict=True)], np.uint64)


@instruction("mul", "mad")
def _multiply(builder, ins, mods):
    adds = ins.base == "mad"
    kind = mods.type(*ROUNDED, *INTEGERS)
    if kind in ROUNDED:
        mods.take("rn")
        return _float(builder, ins, mods, kind, 3 if adds else 2, fma if adds else np.multiply)
    half = mods.need("lo", "hi", "wide")
    mods.done()
    if half != "wide":
        d, sources = slots(builder, ins, kind, 3 if adds else 2)
        product = np.multiply if half == "lo" else _high(BITS[kind], kind[0] == "s")
        if not adds:
            return applied(product, d, sources)
        dtype = DTYPES[kind]
        return applied(lambda a, b, c: product(a, b).astype(dtype) + c, d, sources)
    if BITS[kind] == 64:
        raise ins.unsupported("type")
    wide = f"{kind[0]}{2 * BITS[kind]}"
    a, b = (builder.read(operand, kind, ins) for operand in ins.operands[1:3])
    c = builder.read(ins.operands[3], wide, ins) if adds else None
    d, dtype = builder.write(ins.operands[0], wide, ins), DTYPES[wide]

    def run(warp, mask):
        rows = warp.rows
        product = np.multiply(rows[a], rows[b], dtype=dtype)
        put(rows[d], product + rows[c] if adds else product, mask)

    return run


@instruction("fma")
def _fma(builder, ins, mods):
    kind = mods.type(*ROUNDED)
    mods.need("rn")
    return _float(builder, ins, mods, kind, 3, fma)


def _quotient(a, b):
    """Integer division, truncated; by zero gives zero here, where PTX says nothing."""
    if a.dtype.kind == "u":
        return a // b
    wide = a.astype(np.int64), b.astype(np.int64)
    return np.sign(wide[0]) * np.sign(wide[1]) * (np.abs(wide[0]) // np.abs(wide[1]))


@instruction("div", "rem")
def _divide(builder, ins, mods):
    kind = mods.type("f32", "u16", "s16", "u32", "s32", "u64", "s64")
    if kind == "f32":
        if ins.base == "rem":
            raise ins.unsupported("type")
        mods.need("rn", "full", "approx")
        return _float(builder, ins, mods, kind, 2, np.divide)
    mods.done()
    function = _quotient if ins.base == "div" else lambda a, b: a - (_quotient(a, b) * b).astype(a.dtype)
    return applied(function, *slots(builder, ins, kind, 2))


@instruction("rcp", "sqrt")
def _exact_unary(builder, ins, mods):
    kind = mods.type("f32")
    mods.need("rn", "approx")
    function = _in_float64(np.reciprocal) if ins.base == "rcp" else np.sqrt
    return _float(builder, ins, mods, kind, 1, function)


@instruction(*APPROXIMATE)
def _approximate(builder, ins, mods):
    kind = mods.type("f32")
    mods.need("approx")
    return _float(builder, ins, mods, kind, 1, APPROXIMATE[ins.base])


@instruction("min", "max")
def _min_max(builder, ins, mods):
    kind = mods.type("f32", "u16", "s16", "u32", "s32", "u64", "s64")
    if kind == "f32":
        two = EXTREMES[ins.base, mods.take("NaN") is not None]
        num_sources = len(ins.operands) - 1  # two or three
        return _float(
            builder, ins, mods, kind, num_sources, two if num_sources == 2 else lambda a, b, c: two(two(a, b), c)
        )
    mods.done()
    return applied(np.minimum if ins.base == "min" else np.maximum, *slots(builder, ins, kind, 2))


@instruction("neg", "abs")
def _negate(builder, ins, mods):
    kind = mods.type("f32", "s16", "s32", "s64")
    function = np.negative if ins.base == "neg" else np.abs
    if kind == "f32":
        return _float(builder, ins, mods, kind, 1, function)
    mods.done()
    return applied(function, *slots(builder, ins, kind, 1))


@instruction("copysign")
def _copysign(builder, ins, mods):
    kind = mods.type("f32")
    mods.done()
    return applied(lambda sign, value: np.copysign(value, sign), *slots(builder, ins, kind, 2))


@instruction("testp")
def _testp(builder, ins, mods):
    kind = mods.type("f32")
    what = mods.need("finite", "infinite", "number", "notanumber")
    mods.done()
    tests = {"finite": np.isfinite, "infinite": np.isinf, "number": lambda a: ~np.isnan(a), "notanumber": np.isnan}
    a = builder.read(ins.operands[1], kind, ins)
    return applied(tests[what], builder.write(ins.operands[0], "pred", ins), [a])


# Comparison and selection

_ORDERED = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
_ORDERED |= {"gt": np.greater, "ge": np.greater_equal}
_UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}


def _unordered(compare):
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


_OF_FLOATS = _ORDERED | {f"{name}u": _unordered(compare) for name, compare in _ORDERED.items()}
_OF_FLOATS["ne"] = lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)  # false with NaN, unlike numpy's
_OF_FLOATS["num"] = lambda a, b: ~np.isnan(a) & ~np.isnan(b)
_OF_FLOATS["nan"] = lambda a, b: np.isnan(a) | np.isnan(b)


@instruction("setp")
def _compare(builder, ins, mods):
    """p = a <> b, or (a <> b) op c; q is the same with the comparison negated."""
    kind = mods.type("f32", *INTEGERS)
    comparisons = _OF_FLOATS if kind == "f32" else _ORDERED | (_UNSIGNED if kind[0] == "u" else {})
    name = mods.take(*comparisons)
    if name is None:
        raise ins.unsupported("comparison")
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: None}[
        mods.take("and", "or", "xor")
    ]
    ftz = mods.take("ftz")
    mods.done()
    compare = comparisons[name]
    a, b = (builder.read(operand, kind, ins) for operand in ins.operands[1:3])
    c = builder.predicate(ins.operands[3], ins) if combine else None
    p, q = split_pair(ins.operands[0])
    p = builder.write(p, "pred", ins)
    if q is None and combine is None and not ftz:
        return applied(compare, p, [a, b])
    q = None if q is None else builder.write(q, "pred", ins)

    def run(warp, mask):
        rows = warp.rows
        holds = compare(flush(rows[a]), flush(rows[b])) if ftz else compare(rows[a], rows[b])
        other = True if c is None else c(rows).copy()
        if q is not None:
            put(rows[q], combine(~holds, other) if combine else ~holds, mask)
        put(rows[p], combine(holds, other) if combine else holds, mask)

    return run


@instruction("selp")
def _select(builder, ins, mods):
    kind = mods.type("f32", *INTEGERS)
    mods.done()
    a, b = (builder.read(operand, kind, ins) for operand in ins.operands[1:3])
    p, d = builder.predicate(ins.operands[3], ins), builder.write(ins.operands[0], kind, ins)

    def run(warp, mask):
        rows = warp.rows
        put(rows[d], np.where(p(rows), rows[a], rows[b]), mask)

    return run

"""Repairs of Triton's interpreter, without which it is silently wrong for bf16 and fp8.

The stock interpreter keeps bf16 and fp8 as raw bits and computes on the bits: a bf16 dot, sum or comparison is
nonsense, casts to bf16 truncate, casts to fp8 lose mantissa carries and wrap around. It also refuses what our kernels
need: inline PTX, scaled dots, bf16 atomics, TMA reductions. install() replaces the methods concerned, so that kernels
need no branches for the interpreter. dist_moe.kernels_triton calls it when TRITON_INTERPRET is set; without the
variable nothing here touches Triton.

Each _repair function is one defect. They reach into private names of triton.runtime.interpreter, so versions that
they were not tried on are refused (TRIED). Still not like a GPU: programs run one after another in grid order;
num_warps and num_stages mean nothing; memory order is that of the host's CPU; tl.fma rounds twice before Triton 3.9.
"""

import dataclasses
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from . import _interpreter_speed

OLDEST, NEWEST = (3, 6), (3, 9)
TRIED = "3.6.0, 3.7.1, 3.8.0 and 3.9.0"

# Between two polls of one flag: long enough to leave the core to the rank that is waited for, short beside a launch.
POLL_PAUSE_S = 30e-6

# Formats that the interpreter holds as raw bits: torch's twin, numpy's type of the bits, largest finite value if the
# conversion saturates (PTX cvt.rn.satfinite).
_RAW = {
    tl.bfloat16: (torch.bfloat16, np.uint16, None),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8, 448.0),
    tl.float8e5: (torch.float8_e5m2, np.uint8, 57344.0),
}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

# Inline PTX: text (white space collapsed) -> function of the operands' arrays that returns the result's array.
_ASM_TWINS: dict[str, Callable[..., np.ndarray]] = {}

_installed = False


def install() -> None:
    """Repair the interpreter of this process, once; RuntimeError if Triton is not one that we tried."""
    global _installed
    if _installed:
        return
    check_version(triton.__version__)
    if not isinstance(tl.sum, interpreter.InterpretedFunction):
        raise RuntimeError(
            "dist_moe: TRITON_INTERPRET was set after triton was imported, so tl.sum and its like are not interpreted; "
            "set it before the first import of triton"
        )
    for repair in (
        _repair_casts,
        _repair_arithmetic,
        _repair_dot,
        _repair_dot_scaled,
        _repair_reductions,
        _repair_histogram,
        _repair_constants,
        _repair_masks,
        _repair_asserts,
        _repair_atomics,
        _repair_descriptor_reduce,
        _repair_inline_asm,
        _repair_loop_bounds,
        _repair_language_patches,
    ):
        repair()
    _interpreter_speed.install()
    _installed = True


def check_version(found: str) -> None:
    """RuntimeError unless the repairs were tried on this version of Triton."""
    if not OLDEST <= tuple(int(part) for part in found.split(".")[:2]) <= NEWEST:
        raise RuntimeError(
            f"dist_moe: the repairs of Triton's interpreter were tried on {TRIED}; found triton {found}. "
            "Without them bf16 and fp8 kernels give wrong numbers; install one of those versions or unset "
            "TRITON_INTERPRET"
        )


def register_asm(asm: str, twin: Callable[..., np.ndarray]) -> None:
    """Let `twin` stand for the inline PTX `asm`; it gets the operands as arrays and returns the result."""
    _ASM_TWINS[" ".join(asm.split())] = twin


# Raw bits and their values


def decode(bits: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """fp32 values of raw bf16 or fp8 bits."""
    torch_dtype, raw_dtype, _ = _RAW[dtype]
    raw = np.require(bits, requirements="CW").view(raw_dtype)
    return torch.from_numpy(raw).view(torch_dtype).float().numpy().reshape(np.shape(bits))


def encode(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Raw bits of the values in bf16 or fp8: round to nearest even, fp8 saturating, NaN kept, in fp8 without sign."""
    torch_dtype, raw_dtype, largest = _RAW[dtype]
    t = torch.from_numpy(np.require(values, np.float32, "CW"))
    if largest is not None:
        t = torch.where(t.isnan(), torch.nan, t.clamp(-largest, largest))
    bits = t.to(torch_dtype).view(torch.uint8 if raw_dtype is np.uint8 else torch.uint16)
    return bits.numpy().reshape(np.shape(values))


def _is_raw(handle: TensorHandle | None) -> bool:
    return handle is not None and handle.dtype.scalar in _RAW


def _values(handle: TensorHandle) -> np.ndarray:
    return decode(handle.data, handle.dtype.scalar) if _is_raw(handle) else handle.data


def _handle(values: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """A handle of `values` in `dtype`, which may be a raw format."""
    bits = encode(values, dtype) if dtype in _RAW else np.asarray(values).astype(interpreter._get_np_dtype(dtype))
    return TensorHandle(bits, dtype)


# One defect each


def _repair_casts() -> None:
    """Casts from and to bf16 and fp8 round to nearest even; the stock ones truncate, and wrap in fp8."""
    stock_convert, stock_cast = interpreter._convert_float, InterpreterBuilder.cast_impl
    floats = (tl.float16, tl.float32, tl.float64)

    def convert_float(bits, src, dst, rounding):
        src, dst = src.scalar, dst.scalar
        concerns_us = src in _RAW or dst in _RAW
        known = (src in _RAW or src in floats) and (dst in _RAW or dst in floats)
        if rounding == interpreter._ir.ROUNDING_MODE.RTZ or not (concerns_us and known):
            return stock_convert(bits, src, dst, rounding)
        values = decode(bits, src) if src in _RAW else np.asarray(bits).view(interpreter._get_np_dtype(src))
        if dst in _RAW:
            return encode(values, dst)
        return values.astype(interpreter._get_np_dtype(dst)).view(f"uint{dst.primitive_bitwidth}")

    def cast_impl(self, src, dst_type):
        dst = dst_type.scalar
        return _handle(_values(src), dst) if _is_raw(src) or dst in _RAW else stock_cast(self, src, dst_type)

    interpreter._convert_float = convert_float
    InterpreterBuilder.cast_impl = cast_impl


def _repair_arithmetic() -> None:
    """Arithmetic and comparisons of bf16 and fp8 are done in fp32 and rounded; the stock ones use the bits."""
    stock_fma = InterpreterBuilder.create_fma

    def repaired(name: str, num_operands: int):
        stock = getattr(InterpreterBuilder, name)

        def op(self, *args):
            operands, function = args[:num_operands], args[num_operands]
            raw = [h.dtype.scalar for h in operands if _is_raw(h)]
            if not raw or function is np.where:  # a select moves bits
                return stock(self, *args)
            result = function(*[_values(h) for h in operands])
            return _handle(result, tl.int1 if result.dtype == np.bool_ else raw[0])

        return op

    def create_fma(self, x, y, z):
        if not _is_raw(z):
            return stock_fma(self, x, y, z)
        return _handle(_values(x) * _values(y) + _values(z), z.dtype.scalar)

    for name, num_operands in (("unary_op", 1), ("binary_op", 2), ("ternary_op", 3)):
        setattr(InterpreterBuilder, name, repaired(name, num_operands))
    InterpreterBuilder.create_fma = create_fma


def _repair_dot() -> None:
    """tl.dot multiplies the values of bf16 and fp8 operands; the stock one multiplies the bits of bf16."""
    stock = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        if _is_raw(a) or _is_raw(b):
            a, b = (TensorHandle(_values(h).astype(np.float32), tl.float32) for h in (a, b))
        with np.errstate(invalid="ignore", over="ignore"):  # of a neighbour's rows, which are not stored
            return stock(self, a, b, *rest)

    InterpreterBuilder.create_dot = create_dot


def _repair_dot_scaled() -> None:
    """tl.dot_scaled: missing before 3.8, and wrong for e4m3 scales (NVFP4) since."""
    formats = interpreter._ir.ScaleDotElemTypeTY
    fp8 = {formats.E4M3: tl.float8e4nv, formats.E5M2: tl.float8e5}

    def unpack(packed: np.ndarray, axis: int) -> np.ndarray:
        """Two e2m1 values a byte along `axis`, the low half first."""
        packed = np.moveaxis(packed.view(np.uint8), axis, -1)
        values = np.stack([_E2M1[packed & 15], _E2M1[packed >> 4]], axis=-1)
        return np.moveaxis(values.reshape(*packed.shape[:-1], -1), -1, axis)

    def scale_values(scale: TensorHandle) -> np.ndarray:
        if scale.dtype.scalar == tl.float8e4nv:
            return decode(scale.data, tl.float8e4nv)
        exponent = scale.data.view(np.uint8).astype(np.int32)  # e8m0
        return np.where(exponent == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponent - 127))

    def operand(handle, scale, fmt, k_packed: bool, k_axis: int) -> np.ndarray:
        if fmt == formats.E2M1:
            values = unpack(handle.data, k_axis if k_packed else -3 - k_axis)  # the axes are -1 and -2
        else:
            values = decode(handle.data, fp8[fmt]) if fmt in fp8 else _values(handle).astype(np.float32)
        if scale is None:
            return values
        scales = scale_values(scale)  # [rows or columns, K / block]
        scales = np.repeat(scales, values.shape[k_axis] // scales.shape[-1], axis=-1)
        return values * (scales if k_axis == -1 else np.swapaxes(scales, -1, -2))

    def create_dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, fast_math, a_packed, b_packed, acc):
        a_values = operand(a, a_scale, a_format, a_packed, k_axis=-1)
        b_values = operand(b, b_scale, b_format, b_packed, k_axis=-2)
        return _handle(np.matmul(a_values, b_values, dtype=np.float32) + acc.data, tl.float32)

    InterpreterBuilder.create_dot_scaled = create_dot_scaled

    if triton.__version__.startswith(("3.6.", "3.7.")):  # these expect constexpr formats; interpreted they are str
        stock = interpreter.TritonSemantic.dot_scaled

        def dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, *rest):
            return stock(self, a, a_scale, tl.constexpr(a_format), b, b_scale, tl.constexpr(b_format), *rest)

        interpreter.TritonSemantic.dot_scaled = dot_scaled


def _repair_reductions() -> None:
    """Reductions and scans of bf16 and fp8 run in fp32 and are rounded once; the stock ones use the bits."""
    stock = interpreter.ReduceScanOpInterface.apply

    def apply(self, inputs):
        if not isinstance(inputs, tuple):
            return apply(self, (inputs,))[0]
        dtypes = [t.dtype.scalar for t in inputs]
        if not any(dtype in _RAW for dtype in dtypes):
            return stock(self, inputs)

        def widen(t, dtype):
            return self.to_tensor(decode(t.handle.data, dtype), tl.float32) if dtype in _RAW else t

        def narrow(t, dtype):
            if dtype not in _RAW or t.dtype != tl.float32:
                return t
            bits = encode(t.handle.data, dtype)
            return self.to_tensor(bits if t.type.is_block() else bits.item(), dtype)

        results = stock(self, tuple(map(widen, inputs, dtypes)))
        return tuple(map(narrow, results, dtypes))

    interpreter.ReduceScanOpInterface.apply = apply


def _repair_histogram() -> None:
    """tl.histogram drops values past the last bin, as a GPU does; before 3.9 some were counted."""
    stock = InterpreterBuilder.create_histogram

    def create_histogram(self, data, bins, mask):
        inside = data.data < bins
        return stock(self, data, bins, TensorHandle(inside if mask is None else inside & mask.data, tl.int1))

    InterpreterBuilder.create_histogram = create_histogram


def _repair_constants() -> None:
    """bf16 constants other than zero: missing before 3.9."""

    def get_bf16(self, value):
        return _handle(np.array([value], np.float32), tl.bfloat16)

    InterpreterBuilder.get_bf16 = get_bf16


def _repair_masks() -> None:
    """A mask that a block and a scalar make together has the data of an int32, which 3.9 refuses."""

    def taking(stock, place: int):
        def op(self, *args, **options):
            mask = args[place]
            if isinstance(mask, TensorHandle) and mask.data.dtype != bool:
                args = (*args[:place], TensorHandle(mask.data.astype(bool), mask.dtype), *args[place + 1 :])
            return stock(self, *args, **options)

        return op

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(InterpreterBuilder, name, taking(getattr(InterpreterBuilder, name), place))


def _repair_asserts() -> None:
    """tl.device_assert fires and names the program; the stock interpreter drops it unless debugging is on."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, debug=True, sanitize_overflow=False)

    def create_assert(self, condition, message):
        if not condition:
            raise AssertionError(f"device_assert failed in program {tuple(self.grid_idx)}: {message}")

    InterpreterBuilder.create_assert = create_assert


def _repair_atomics() -> None:
    """bf16 atomics (missing), and a pause while a flag is polled so that the waiting process leaves its core."""
    stock = InterpreterBuilder.create_atomic_rmw
    ops, sems = interpreter._ir.ATOMIC_OP, interpreter._ir.MEM_SEMANTIC
    bf16_ops = {ops.FADD: np.add, ops.MAX: np.maximum, ops.MIN: np.minimum}
    last_polled = None

    def create_atomic_rmw(self, op, ptr, val, mask, sem, scope):
        nonlocal last_polled
        if op == ops.ADD and sem == sems.ACQUIRE and not np.any(val.data):  # _device.poll
            if last_polled == (polled := ptr.data.tobytes()):
                time.sleep(POLL_PAUSE_S)
            last_polled = polled
        if val.dtype.scalar != tl.bfloat16:
            return stock(self, op, ptr, val, mask, sem, scope)
        addresses, values, kept = np.broadcast_arrays(ptr.data, _values(val), mask.data)
        old = np.zeros(addresses.shape, np.uint16)
        for i in np.ndindex(addresses.shape):
            if kept[i]:
                old[i] = _update_bf16(int(addresses[i]), bf16_ops[op], values[i], self.ir_sem_to_interpreter_sem[sem])
        return TensorHandle(old, tl.bfloat16)

    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def _update_bf16(address: int, function: np.ufunc, value: np.float32, sem) -> int:
    """Atomically *address = function(*address, value) in bf16, and the old bits.

    By compare-and-swap of the aligned 32-bit word around it, which is atomic across processes as well.
    """
    word_ptr, shift = np.array([address & ~3], np.uint64), 8 * (address & 2)
    native = interpreter._interpreter
    word = native.load(word_ptr, np.ones(1, bool), np.zeros(1, np.int32), np.dtype(np.int32))
    while True:
        bits = int(word.view(np.uint32)[0])
        old = np.array([bits >> shift & 0xFFFF], np.uint16)
        new = int(encode(function(decode(old, tl.bfloat16), value), tl.bfloat16)[0])
        swapped = np.array([bits & ~(0xFFFF << shift) | new << shift], np.uint32).view(np.int32)
        found = native.atomic_cas(word_ptr, word, swapped, sem)
        if int(found.view(np.uint32)[0]) == bits:
            return int(old[0])
        word = found


def _repair_descriptor_reduce() -> None:
    """Descriptor atomics (TMA reductions): missing."""
    ops, sems = interpreter._ir.ATOMIC_OP, interpreter._ir.MEM_SEMANTIC

    def create_descriptor_reduce(self, kind, desc, value, indices):
        ptrs, mask = desc.materialize_pointers(indices)
        mask = mask if isinstance(mask, TensorHandle) else TensorHandle(mask, tl.int1)  # a handle since 3.9
        name = str(kind).rsplit(".", 1)[-1].upper()
        if name == "ADD" and value.dtype.scalar.is_floating():
            name = "FADD"
        self.create_atomic_rmw(getattr(ops, name), ptrs, value, mask, sems.RELAXED, None)

    InterpreterBuilder.create_descriptor_reduce = create_descriptor_reduce


def _repair_inline_asm() -> None:
    """Inline PTX runs its registered twin: the interpreter refuses all of it."""

    class Results:
        def __init__(self, handles):
            self.handles = handles

        def get_result(self, i):
            return self.handles[i]

    def create_inline_asm(self, asm, constraints, values, types, is_pure, pack):
        twin = _ASM_TWINS.get(" ".join(asm.split()))
        if twin is None:
            raise NotImplementedError(f"inline PTX without an interpreted twin (register_asm): {asm!r}")
        results = twin(*[_values(v) for v in values])
        results = results if isinstance(results, tuple) else (results,)
        return Results([_handle(np.asarray(r), ty.scalar) for r, ty in zip(results, types, strict=True)])

    InterpreterBuilder.create_inline_asm = create_inline_asm


def _repair_loop_bounds() -> None:
    """range() over loaded bounds: Triton before 3.7 calls int() on an array of one element, which numpy 2.4 refuses."""
    stock = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _repair_language_patches() -> None:
    """Interpreted forms of triton.language are put in place once a launch, under a lock, and taken back after it.

    The stock interpreter does so at every call of a jit helper (tl.sum is one), which makes those ten times slower,
    never takes the helpers' patches back, and lets two threads patch at the same time.
    """
    stock_launch, lock = interpreter.GridExecutor.__call__, threading.RLock()

    class BothModules:  # stands for a kernel that sees tl and tl.core
        __globals__ = {"tl": tl, "core": tl.core}  # noqa: RUF012

    class Nothing:
        def restore(self):
            pass

    scope = interpreter._patch_lang(BothModules)
    patches = [(owner, name, vars(owner)[name]) for owner, name, _ in scope._changes]
    scope.restore()

    def launch(self, *args, **kwargs):
        with lock:
            scope = interpreter._LangPatchScope()
            for patch in patches:
                scope.set_attr(*patch)
            try:
                return stock_launch(self, *args, **kwargs)
            finally:
                scope.restore()

    interpreter._patch_lang = lambda fn: Nothing()
    interpreter.GridExecutor.__call__ = launch

"""Each repair of Triton's interpreter, on the defect it is there for."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

RAW_DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

interpreted = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def _repaired():
    import dist_moe.kernels_triton  # noqa: F401


# Casts and arithmetic


@triton.jit
def _cast(src_ptr, dst_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(dst_ptr + i, tl.load(src_ptr + i).to(dst_ptr.dtype.element_ty))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    _cast[(1,)](x, out, x.numel())
    return out


def hard_values() -> torch.Tensor:
    """Ties, mantissa carries, subnormals, signed zeros, and a spread over many magnitudes."""
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1.989, 1.9375, 0.4375, 2.0**-9, 3 * 2.0**-10, 0.0, -0.0, 1e-40])
    spread = torch.randn(2048 - len(ties)) * torch.logspace(-6, 2, 2048 - len(ties))
    return torch.cat([ties, spread])


@interpreted
@pytest.mark.parametrize("dtype", RAW_DTYPES)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_casts_round_to_nearest_even(dtype, source):
    x = hard_values().clamp(-448, 448).to(source)
    assert torch.equal(cast(x, dtype).float(), x.float().to(dtype).float())


@interpreted
@pytest.mark.parametrize("dtype", RAW_DTYPES)
def test_casts_to_float_are_exact(dtype):
    num_bits = 8 * dtype.itemsize
    bits = torch.arange(2**num_bits, dtype=torch.int32).to(torch.int16 if num_bits == 16 else torch.uint8)
    x = bits.view(dtype)
    x = x[: len(x)]
    assert torch.equal(cast(x, torch.float32).nan_to_num(1234.5), x.float().nan_to_num(1234.5))


@interpreted
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_casts_to_fp8_saturate_and_keep_nan(dtype, largest):
    x = torch.tensor([1e6, -1e6, torch.inf, -torch.inf, largest, 1.0, torch.nan, 0.0])
    got = cast(x, dtype).float()
    assert got[:6].tolist() == [largest, -largest, largest, -largest, largest, 1.0] and got[6].isnan() and got[7] == 0


@interpreted
def test_integers_cast_to_bf16():
    x = torch.arange(-512, 512, dtype=torch.int32)
    assert torch.equal(cast(x, torch.bfloat16), x.to(torch.bfloat16))


@triton.jit
def _arithmetic(a_ptr, b_ptr, out_ptr, less_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(out_ptr + i, a + b)
    tl.store(out_ptr + N + i, a - b)
    tl.store(out_ptr + 2 * N + i, a * b)
    tl.store(out_ptr + 3 * N + i, -a)
    tl.store(out_ptr + 4 * N + i, tl.where(a < b, a, b))
    tl.store(out_ptr + 5 * N + i, tl.maximum(a, b))
    tl.store(out_ptr + 6 * N + i, a * 0.5)
    tl.store(less_ptr + i, (a < b).to(tl.int32))


@interpreted
def test_bf16_arithmetic():
    a, b = torch.randn(2, 256).bfloat16().unbind()
    out, less = torch.empty(7, 256, dtype=torch.bfloat16), torch.empty(256, dtype=torch.int32)
    _arithmetic[(1,)](a, b, out, less, 256)
    want = [a + b, a - b, a * b, -a, torch.minimum(a, b), torch.maximum(a, b), a * 0.5]
    for got, expected in zip(out, want, strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(less.bool(), a < b)


@triton.jit
def _reductions(x_ptr, sum_ptr, max_ptr, arg_ptr, cumsum_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    tl.store(sum_ptr + m, tl.sum(x, axis=1))
    tl.store(max_ptr + m, tl.max(x, axis=1))
    tl.store(arg_ptr + m, tl.argmax(x, axis=1))
    tl.store(cumsum_ptr + m[:, None] * N + n[None, :], tl.cumsum(x, axis=1))


@interpreted
def test_bf16_reductions_and_scans():
    x = torch.randint(-8, 8, (4, 16)).bfloat16()
    total, largest = torch.empty(2, 4, dtype=torch.bfloat16).unbind()
    where, running = torch.empty(4, dtype=torch.int32), torch.empty_like(x)
    _reductions[(1,)](x, total, largest, where, running, 4, 16)
    assert torch.equal(total, x.float().sum(1).bfloat16()) and torch.equal(largest, x.amax(1))
    assert torch.equal(where.long(), x.float().argmax(1)) and torch.equal(running, x.float().cumsum(1).bfloat16())


# Products


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))


@interpreted
@pytest.mark.parametrize("dtype", RAW_DTYPES)
def test_dot(dtype):
    a, b = torch.randn(32, 64).to(dtype), torch.randn(64, 16).to(dtype)
    c = torch.empty(32, 16)
    _dot[(1,)](a, b, c, 32, 16, 64)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def _dot_scaled(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PACK: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    m, n, k, s = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // PACK), tl.arange(0, K // BLOCK)
    a = tl.load(a_ptr + m[:, None] * (K // PACK) + k[None, :])
    b = tl.load(b_ptr + n[None, :] * (K // PACK) + k[:, None])  # [N, K] in memory
    a_scale = tl.load(a_scale_ptr + m[:, None] * (K // BLOCK) + s[None, :])
    b_scale = tl.load(b_scale_ptr + n[:, None] * (K // BLOCK) + s[None, :])
    c = tl.dot_scaled(a, a_scale, FORMAT, b, b_scale, FORMAT)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c)


@interpreted
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_dot_scaled(name):
    M, N, K = 32, 16, 128
    block = 16 if name == "nvfp4" else 32

    def operand(rows):
        if name == "mxfp8":
            stored = torch.randn(rows, K).to(torch.float8_e4m3fn)
            values = stored.float()
        else:
            codes = torch.randint(0, 16, (rows, K), dtype=torch.uint8)
            stored, values = codes[:, 0::2] | codes[:, 1::2] << 4, E2M1[codes.long()]
        if name == "nvfp4":
            scale = (torch.rand(rows, K // block) + 0.5).to(torch.float8_e4m3fn)
            scale_values = scale.float()
        else:
            scale = torch.randint(120, 134, (rows, K // block), dtype=torch.uint8)
            scale_values = torch.exp2(scale.float() - 127)
        return stored, scale, values * scale_values.repeat_interleave(block, dim=1)

    (a, a_scale, a_values), (b, b_scale, b_values) = operand(M), operand(N)
    c = torch.empty(M, N)
    fmt, pack = ("e4m3", 1) if name == "mxfp8" else ("e2m1", 2)
    _dot_scaled[(1,)](a, a_scale, b, b_scale, c, M, N, K, pack, block, fmt)
    torch.testing.assert_close(c, a_values @ b_values.T, rtol=1e-5, atol=1e-4)


# Atomics, descriptors, asserts, constants


@triton.jit
def _bf16_atomics(out_ptr, x_ptr, old_ptr, N: tl.constexpr, BINS: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    old = tl.atomic_add(out_ptr + i % BINS, x, mask=i != 3, sem="relaxed")
    tl.store(old_ptr + i, old)


@interpreted
def test_bf16_atomic_add_with_repeated_addresses():
    x, out, old = torch.arange(16).bfloat16(), torch.zeros(6).bfloat16(), torch.empty(16, dtype=torch.bfloat16)
    _bf16_atomics[(1,)](out, x, old, 16, 5)
    want = torch.zeros(6)
    for i in range(16):
        want[i % 5] += i if i != 3 else 0
    assert torch.equal(out.float(), want) and old[5] == 0 and old[10] == 5


@triton.jit
def _reduce_tile(desc, x_ptr, M: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    desc.atomic_add([4, 0], x)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_descriptor_reduce_adds_inside_the_bounds(dtype):
    out, x = torch.ones(10, 16, dtype=dtype), torch.randint(0, 9, (8, 16)).to(dtype)
    _reduce_tile[(1,)](TensorDescriptor.from_tensor(out, [8, 16]), x, 8, 16)
    want = torch.ones(10, 16, dtype=dtype)
    want[4:] += x[:6]
    assert torch.equal(out, want)


@triton.jit
def _assert_positive(x_ptr):
    tl.device_assert(tl.load(x_ptr + tl.program_id(0)) > 0, "not positive")


@interpreted
def test_device_assert_fires_and_names_the_program():
    _assert_positive[(2,)](torch.tensor([1, 2]))
    with pytest.raises(Exception, match=r"program \(1, 0, 0\): not positive"):
        _assert_positive[(2,)](torch.tensor([1, -1]))


@triton.jit
def _constants(out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.full([N], 1.0 + 2.0**-8 + 2.0**-12, tl.bfloat16))
    tl.store(out_ptr + N + i, tl.full([N], 0.3, tl.float16).to(tl.bfloat16))


@interpreted
def test_floating_point_constants():
    out = torch.empty(2, 4, dtype=torch.bfloat16)
    _constants[(1,)](out, 4)
    assert out.tolist() == [[1 + 2.0**-7] * 4, [torch.tensor(0.3).half().bfloat16().item()] * 4]


@triton.jit
def _histogram(x_ptr, out_ptr, N: tl.constexpr, BINS: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr + tl.arange(0, BINS), tl.histogram(x, BINS))
    tl.store(out_ptr + BINS + tl.arange(0, BINS), tl.histogram(x, BINS, mask=x != 2))


@interpreted
def test_histogram_drops_what_is_outside():
    x = torch.tensor([0, 1, 1, 2, 7, 8, 9, 100], dtype=torch.int32)
    out = torch.empty(2, 8, dtype=torch.int32)
    _histogram[(1,)](x, out, 8, 8)
    assert out.tolist() == [[1, 2, 1, 0, 0, 0, 0, 1], [1, 2, 0, 0, 0, 0, 0, 1]]


@triton.jit
def _loops(bounds_ptr, out_ptr):
    total = 0
    for i in range(tl.load(bounds_ptr), tl.load(bounds_ptr + 1)):
        total += i
    for _ in tl.range(tl.program_id(0), tl.load(bounds_ptr + 1), num_stages=2):
        total += 100
    tl.store(out_ptr, total)


@interpreted
@pytest.mark.filterwarnings("error::DeprecationWarning")  # numpy 2.4 makes it an error
def test_loops_over_loaded_bounds():
    out = torch.empty(1, dtype=torch.int32)
    _loops[(1,)](torch.tensor([3, 6], dtype=torch.int32), out)
    assert out.item() == 3 + 4 + 5 + 600


# Inline PTX


@triton.jit
def _asm(x_ptr, out_ptr, ASM: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    y = tl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out_ptr + tl.arange(0, N), y)


@interpreted
def test_inline_asm_runs_its_twin_and_refuses_without():
    from dist_moe._interpreter import register_asm

    x, out = torch.arange(8, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    register_asm("add.s32 $0, $1,  7;", lambda x: x + 7)
    _asm[(1,)](x, out, "add.s32 $0,\n $1, 7;", 8)  # white space does not count
    assert torch.equal(out, x + 7)
    with pytest.raises(Exception, match="register_asm"):
        _asm[(1,)](x, out, "sub.s32 $0, $1, 7;", 8)


# The interpreter as a whole


@triton.jit
def _total(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N))))


@interpreted
def test_language_is_patched_during_a_launch_only():
    before = {name: getattr(tl, name) for name in ("load", "store", "reduce", "range", "arange")}
    x, out = torch.ones(16), torch.empty(1)
    _total[(1,)](x, out, 16)
    with pytest.raises(Exception, match="not positive"):
        _assert_positive[(1,)](torch.tensor([-1]))
    assert out.item() == 16
    for name, member in before.items():
        assert getattr(tl, name) is member and getattr(tl.core, name, member) is member


@interpreted
def test_threads_take_turns():
    results = [torch.empty(1) for _ in range(4)]

    def work(i):
        for _ in range(10):
            _total[(1,)](torch.full((64,), float(i)), results[i], 64)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.item() for r in results] == [0, 64, 128, 192]


@triton.jit
def _count_polls(flag_ptr, out_ptr, N):
    for _ in range(N):
        tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    tl.store(out_ptr, N)


@interpreted
def test_a_polling_loop_leaves_the_core(monkeypatch):
    from dist_moe import _interpreter

    pauses = []
    monkeypatch.setattr(_interpreter.time, "sleep", pauses.append)
    flag, out = torch.zeros(1, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    _count_polls[(1,)](flag, out, 20)
    assert pauses == [_interpreter.POLL_PAUSE_S] * 19  # none before the first poll


@interpreted
def test_install_is_done_once():
    from triton.runtime.interpreter import InterpreterBuilder

    from dist_moe import _interpreter

    before = InterpreterBuilder.create_dot
    _interpreter.install()
    assert InterpreterBuilder.create_dot is before


@interpreted
def test_types_that_are_shared_say_what_the_stock_ones_said():
    first, second = tl.block_type(tl.float32, [2, 4]), tl.block_type(tl.float32, [tl.constexpr(2), 4])
    assert first == second and first.numel == 8 and first.name == second.name
    assert first != tl.block_type(tl.float32, [4, 2]) and first.with_element_ty(tl.int32).scalar is tl.int32
    near, far = (tl.block_type(tl.pointer_type(tl.int8, space), [4]) for space in (1, 3))
    assert near.scalar.address_space == 1 and far.scalar.address_space == 3
    assert tl.tuple([1, tl.float32]).type == tl.tuple_type([tl.constexpr_type(1), tl.constexpr_type(tl.float32)])
    with pytest.raises((TypeError, ValueError)):
        tl.block_type(tl.float32, [3])


@interpreted
def test_a_launch_puts_the_language_back():
    """The functions of Triton's own, which a launch replaces by those that compute."""
    _count_polls[(1,)](torch.zeros(1, dtype=torch.int64), torch.empty(1, dtype=torch.int32), 1)
    assert all(tl.core.is_builtin(function) for function in (tl.load, tl.core.load, tl.tensor.__add__, tl.tensor.to))


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_other_versions_are_refused(version):
    from dist_moe._interpreter import check_version

    with pytest.raises(RuntimeError, match=rf"tried on 3\.6\.0, .*found triton {version}"):
        check_version(version)
    for tried in ("3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.9.0+git1"):
        check_version(tried)


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env)


def test_the_variable_set_after_triton_was_imported_is_an_error():
    late = run_python("""
        import os, triton
        os.environ["TRITON_INTERPRET"] = "1"
        import dist_moe.kernels_triton
    """)
    assert late.returncode and "set it before the first import of triton" in late.stderr


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_repairs_are_loaded_with_the_kernels_and_only_when_interpreting(interpret):
    run = run_python(
        """
        from triton.runtime.interpreter import InterpreterBuilder
        before = InterpreterBuilder.create_dot
        import dist_moe.kernels_triton
        print(int(InterpreterBuilder.create_dot is not before))
        """,
        TRITON_INTERPRET=interpret,
    )
    assert run.stdout.strip() == interpret, run.stderr

"""The cached launcher: a known key goes straight to the compiled kernel, and no key stands for two of Triton's."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.compiler import CompiledKernel
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_moe.kernels_triton._launch import Launched, _key, launched


class Kernel(CompiledKernel):
    """In the place of a compiled kernel: writes its launches down."""

    module = None

    def __init__(self, launches: list):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *args: self.launches.append((grid, args))


@pytest.fixture
def device_index(monkeypatch) -> list[int]:
    """What torch takes for the current device."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    return current


class Fake:
    """A launcher around a jit function that compiles nothing; `slow` and `direct` hold its launches."""

    def __init__(self, function):
        self.slow, self.direct = [], []
        self.answer = Kernel(self.direct)
        fn = triton.JITFunction(function)
        fn.run = self._run
        self.kernel = launched(fn)

    def _run(self, *args, grid, warmup, **kwargs):
        self.slow.append((grid, args, kwargs))
        return self.answer


def _example(x_ptr, y_ptr, n, alpha, A: tl.constexpr, B: tl.constexpr = 7):
    pass


@pytest.fixture
def fake(device_index) -> Fake:
    return Fake(_example)


def test_the_first_launch_is_triton_s_and_later_ones_are_direct(fake):
    x, y = torch.zeros(4), torch.zeros(4)
    for _ in range(3):
        assert fake.kernel[(5,)](x, None, 33, 0.5, A=2, num_warps=8) is fake.answer
    fake.kernel[(6, 2)](y, None, 34, 1.5, A=2, num_warps=8)
    assert fake.slow == [((5, 1, 1), (x, None, 33, 0.5), {"A": 2, "num_warps": 8, "launch_pdl": True})]
    expected = [((5, 1, 1), (x, None, 33, 0.5, 2, 7))] * 2 + [((6, 2, 1), (y, None, 34, 1.5, 2, 7))]
    assert [(grid, *args[1:]) for grid, args in fake.direct] == [(grid, *args[1:]) for grid, args in expected]
    assert [args[0] is want[0] for (_, args), (_, want) in zip(fake.direct, expected, strict=True)] == [True] * 3


def test_keywords_in_any_order_go_out_in_the_order_of_the_signature(fake):
    for _ in range(2):
        fake.kernel[(1,)](None, None, 3, 0.5, num_stages=2, B=5, A=2)
    assert fake.direct == [((1, 1, 1), (None, None, 3, 0.5, 2, 5))]


def launches(fake: Fake) -> int:
    """Launch with ordinary arguments; how many launches were slow so far."""
    fake.kernel[(1,)](torch.zeros(4), None, 33, 0.5, A=2, num_warps=8)
    return len(fake.slow)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        pytest.param((torch.zeros(5)[1:], None, 33, 0.5), {"A": 2, "num_warps": 8}, id="alignment"),
        pytest.param((torch.zeros(4).int(), None, 33, 0.5), {"A": 2, "num_warps": 8}, id="dtype"),
        pytest.param((None, None, 33, 0.5), {"A": 2, "num_warps": 8}, id="None for a tensor"),
        pytest.param((torch.zeros(4), torch.zeros(4), 33, 0.5), {"A": 2, "num_warps": 8}, id="a tensor for None"),
        pytest.param((torch.zeros(4), None, 1, 0.5), {"A": 2, "num_warps": 8}, id="1"),
        pytest.param((torch.zeros(4), None, 32, 0.5), {"A": 2, "num_warps": 8}, id="a multiple of 16"),
        pytest.param((torch.zeros(4), None, 2**31 + 1, 0.5), {"A": 2, "num_warps": 8}, id="int64"),
        pytest.param((torch.zeros(4), None, 2**63 + 1, 0.5), {"A": 2, "num_warps": 8}, id="uint64"),
        pytest.param((torch.zeros(4), None, 33, True), {"A": 2, "num_warps": 8}, id="bool for a float"),
        pytest.param((torch.zeros(4), None, 33, 5), {"A": 2, "num_warps": 8}, id="int for a float"),
        pytest.param((torch.zeros(4), None, 33, 0.5), {"A": 3, "num_warps": 8}, id="constexpr"),
        pytest.param((torch.zeros(4), None, 33, 0.5), {"A": 2, "B": 8, "num_warps": 8}, id="constexpr with a default"),
        pytest.param((torch.zeros(4), None, 33, 0.5), {"A": 2, "num_warps": 4}, id="option"),
        pytest.param((torch.zeros(4), None, 33, 0.5), {"A": 2, "num_warps": 8, "num_stages": 2}, id="one more option"),
        pytest.param((torch.zeros(4), None, 33, 0.5), {"A": 2, "num_stages": 8}, id="other option"),
    ],
)
def test_what_triton_specialises_on_is_another_key(fake, args, kwargs):
    assert launches(fake) == 1
    fake.kernel[(1,)](*args, **kwargs)
    assert len(fake.slow) == 2 and not fake.direct
    fake.kernel[(1,)](*args, **kwargs)
    assert launches(fake) == 2 and len(fake.direct) == 2


def test_another_device_is_another_key(fake, device_index):
    assert launches(fake) == 1
    device_index[0] = 1
    assert launches(fake) == 2 and launches(fake) == 2
    device_index[0] = 0
    assert launches(fake) == 2


@pytest.mark.parametrize("answer", [None, object()], ids=["skipped by a cache hook", "still compiling"])
def test_what_is_not_a_compiled_kernel_is_not_kept(fake, answer):
    kernel, fake.answer = fake.answer, answer
    assert launches(fake) == 1
    fake.answer = kernel
    assert launches(fake) == 2 and launches(fake) == 2


def test_an_unknown_type_of_argument_is_always_slow(fake):
    for count in (1, 2, 3):
        fake.kernel[(1,)]((1, 2), None, 33, 0.5, A=2)
        assert len(fake.slow) == count and not fake.direct


def test_a_run_time_argument_by_keyword_is_refused(fake):
    with pytest.raises(AssertionError, match="_example: run-time arguments are positional"):
        fake.kernel[(1,)](None, None, 33, alpha=0.5, A=2)


def test_constexprs_come_last(device_index):
    def _mixed(x_ptr, A: tl.constexpr, n):
        pass

    with pytest.raises(AssertionError, match="_mixed: constexprs must come last"):
        Fake(_mixed)


def values() -> list:
    """Arguments of every type and specialisation that a launch can have."""
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    wide = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    narrow = NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    ints = [0, 1, 2, 15, 16, -1, -16, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1, -(2**31) - 16]
    ints += [2**63 - 1, 2**63 - 16, 2**63, 2**63 + 1, -(2**63)]
    tensors = [x.to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.int32, torch.uint8)]
    tensors += [tensor[0, 1:] for tensor in tensors]
    descriptors = [
        TensorDescriptor(tensor, [64, 64], [64, 1], block)
        for tensor in (x, x.float())
        for block in ([16, 64], [64, 16], [64, 64])
    ]
    descriptors.append(TensorDescriptor(x[None], [1, 64, 64], [4096, 64, 1], [1, 16, 64]))
    descriptors += [GluonTensorDescriptor(x, [64, 64], [64, 1], [16, 64], layout) for layout in (wide, narrow)]
    return [None, True, False, 0.5, 1.0, *ints, *tensors, *descriptors]


def test_no_key_stands_for_two_specialisations_of_triton(device_index):
    """Against what JITFunction.run itself calls."""
    found = [(native_specialize_impl(BaseBackend, v, False, True, True), _key((v,), {})) for v in values()]
    assert None not in [key for _, key in found]
    for (triton_s, ours), (other_triton_s, other_ours) in itertools.combinations(found, 2):
        assert triton_s == other_triton_s or ours != other_ours, (triton_s, other_triton_s)


@pytest.mark.interpreter
def test_an_interpreted_kernel_stays_as_it_is():
    kernel = triton.jit(_example)
    assert launched(kernel) is kernel


# On a GPU


@launched
@triton.jit
def _scale(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) * factor, mask=i < n)


def scale(x, n, factor):
    out = torch.zeros_like(x)
    _scale[(triton.cdiv(n, 64),)](x, out, n, factor, BLOCK=64)
    return out


def expected(x, n, factor):
    return torch.where(torch.arange(len(x), device=x.device) < n, x * factor, 0)


@pytest.fixture
def only_direct(monkeypatch):
    """From the call of it on, Triton's own way is closed."""

    def close():
        def run(*args, **kwargs):
            raise AssertionError("this launch should have been direct")

        monkeypatch.setattr(_scale.fn, "run", run)

    return close


@pytest.mark.gpu
def test_direct_launches_compute_the_same(only_direct):
    assert isinstance(_scale, Launched)
    buffer = torch.randn(1025, device="cuda")
    cases = [(x, n, f) for x in (buffer[:1024], buffer[1:]) for n in (1, 16, 17, 1000) for f in (1, 2, 0.5, 2**40)]
    first = [scale(*case) for case in cases]
    only_direct()
    again = [scale(*case) for case in cases]
    for case, a, b in zip(cases, first, again, strict=True):
        assert torch.equal(a, expected(*case)) and torch.equal(a, b), case[1:]


@pytest.mark.gpu
def test_a_direct_launch_runs_on_the_current_stream(only_direct):
    x = torch.randn(1 << 20, device="cuda")
    scale(x, len(x), 2.0)
    only_direct()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        y = x + 1  # not there yet for a launch on another stream
        out = scale(y, len(y), 2.0)
    side.synchronize()
    assert torch.equal(out, expected(x + 1, len(x), 2.0))


@pytest.mark.gpu
def test_a_direct_launch_is_captured(only_direct):
    x = torch.randn(1024, device="cuda")
    scale(x, 1000, 2.0)
    only_direct()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scale(x, 1000, 2.0)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(out, expected(x, 1000, 2.0))


@pytest.mark.gpu
def test_the_hooks_of_a_launch_run_and_the_profiler_sees_it(only_direct):
    x = torch.randn(1024, device="cuda")
    scale(x, 1000, 2.0)
    only_direct()
    names = []

    def hook(metadata):
        names.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            scale(x, 1000, 2.0)
            torch.cuda.synchronize()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert names == ["_scale"] and "_scale" in {event.key for event in profile.key_averages()}

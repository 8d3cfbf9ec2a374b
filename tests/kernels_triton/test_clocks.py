"""The clocks that programs leave as they begin."""

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from dist_moe.kernels_triton import _device, _launch
from dist_moe.kernels_triton._clocks import Clocks, mark
from dist_moe.kernels_triton._device import begin

pytestmark = pytest.mark.skipif(not _device.is_interpreting(), reason="kernels of this process are compiled without")


@triton.jit
def _fill(x_ptr, value):
    begin()
    tl.store(x_ptr + tl.program_id(0), value)


@pytest.fixture
def clocks(monkeypatch) -> Clocks:
    monkeypatch.setattr(_device, "LEAVE_CLOCK", _device.LEAVE_CLOCK)
    monkeypatch.setattr(_launch, "log", None)
    monkeypatch.setattr(_launch.Launched, "has_compiled", False)  # by other tests of this process
    return Clocks("cpu", most=8)


def test_a_launch_begins_with_the_first_of_its_programs(clocks):
    x = torch.zeros(3)
    for _ in range(2):
        clocks.clear()
        _fill[(3,)](x, 1.0)
        _fill[(1,)](x, 2.0)
        mark()
        left = clocks._words[1:6].tolist()
        assert left == sorted(left) and len({*left}) == 5
        assert clocks.begins([3, 1, 1]) == [left[0], left[3], left[4]]
    assert x.tolist() == [2.0, 1.0, 1.0]


def test_launches_that_are_not_accounted_for_are_an_error(clocks):
    _fill[(3,)](torch.zeros(3), 1.0)
    with pytest.raises(RuntimeError, match="3 programs left clocks, the launches have 4"):
        clocks.begins([3, 1])
    clocks.clear()
    _fill[(9,)](torch.zeros(9), 1.0)
    with pytest.raises(RuntimeError, match="8 fit"):
        clocks.begins([9])


def test_clocks_come_once(clocks):
    with pytest.raises(RuntimeError, match="once"):
        Clocks("cpu")


def test_without_clocks_nothing_is_left(monkeypatch):
    assert _device.LEAVE_CLOCK.value == "" and _launch.log is None
    _fill[(3,)](torch.zeros(3), 1.0)


COMPILE = """
import triton.language as tl
from tests.compile_check import compile_case
from tests.kernels_triton.compile_cases import _clocks, expanded_hopper, swiglu
from dist_moe.kernels_triton import _device
_device.LEAVE_CLOCK = tl.constexpr(_device.leave_clock(0x7F0000000000, 16))
for case, arch in (
    (_clocks.CASES[0], 90), (_clocks.CASES[0], 100), (expanded_hopper.CASES[0], 90), (swiglu.CASES[0], 100),
):
    result = compile_case(case, arch)
    ptx = result["ptx"].split("griddepcontrol.wait")[-1]
    assert not result["error"] and not result["spill_bytes"] and not result["serialized"], result
    assert "%globaltimer" in ptx and "139637976727552" in ptx, ptx
"""


def test_kernels_of_both_languages_compile_with_clocks():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr

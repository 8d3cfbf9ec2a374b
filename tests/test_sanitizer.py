"""The path under compute-sanitizer: no access outside an allocation, no race in shared memory."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from .conftest import SANITIZER
from .sanitized import CASES, DECODE

OPTIONS = {"racecheck": ["--racecheck-report", "hazard", "--print-limit", "1000000", "--show-backtrace", "no"]}


def run(tool: str) -> str:
    """What the tool says of tests/sanitized.py, whose cases must come out right under it."""
    command = [SANITIZER, "--tool", tool, *OPTIONS.get(tool, []), sys.executable, "-m", "tests.sanitized"]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=env, capture_output=True, text=True, timeout=400)
    printed = done.stdout + done.stderr
    assert done.returncode == 0 and printed.count(": right") == len(CASES + DECODE), printed[-8000:]
    return printed


@pytest.mark.sanitizer
@pytest.mark.timeout(500)
def test_memcheck():
    printed = run("memcheck")
    assert "ERROR SUMMARY: 0 errors" in printed, printed[-8000:]


@pytest.mark.sanitizer
@pytest.mark.timeout(500)
def test_racecheck():
    printed = run("racecheck")
    found = hazards(printed)
    assert f"RACECHECK SUMMARY: {len(found)} hazards displayed" in printed, printed[-8000:]
    entry = entry_lines()
    races = {hazard for hazard in found if not is_hand_over(hazard, entry)}
    assert not races, sorted(races)[:20]


class Hazard(NamedTuple):
    first: str  # "Write" or "Read"
    first_thread: int
    first_kernel: str
    first_line: str  # "file:line"
    second: str
    second_thread: int
    second_line: str


_HAZARD = re.compile(
    r"Potential \w+ hazard detected at __shared__ .*\n"
    r"=+ +(\w+) Thread \((\d+),\d+,\d+\) at (\w+)\+0x\w+ in (\S+)\n"
    r"=+ +(\w+) Thread \((\d+),\d+,\d+\) at \w+\+0x\w+ in (\S+)"
)


def hazards(printed: str) -> list[Hazard]:
    return [
        Hazard(a, int(thread), kernel, line, b, int(other), other_line)
        for a, thread, kernel, line, b, other, other_line in _HAZARD.findall(printed)
    ]


def entry_lines() -> set[str]:
    """Lines of the Gluon kernel itself, "file:line"; its partitions are functions of their own, above it."""
    from dist_moe.kernels_triton import wgrad_hopper

    body, start = inspect.getsourcelines(wgrad_hopper._wgrad_kernel.fn.fn)
    return {f"wgrad_hopper.py:{line}" for line in range(start, start + len(body))}


def is_hand_over(hazard: Hazard, entry: set[str]) -> bool:
    """Whether these are the words in which Triton tells the warps of a partition what to run, and on what.

    The first eight warps write them, `barrier.sync 1` of all warps follows, then a partition's warps read them: so it
    stands in the PTX, and racecheck does not count that barrier. Ring and barriers of the kernel are used by the
    partitions' own functions, on lines that are not here.
    """
    return (
        (hazard.first, hazard.second, hazard.first_kernel) == ("Write", "Read", "_wgrad_kernel")
        and hazard.first_thread < 8 * 32 <= hazard.second_thread
        and {hazard.first_line, hazard.second_line} <= entry
    )


def test_only_the_hand_over_passes():
    entry = {"wgrad_hopper.py:147", "wgrad_hopper.py:187"}
    printed = """\
========= Error: Potential RAW hazard detected at __shared__ 0x344b8 in block (3,0,0) :
=========     Write Thread (159,0,0) at _wgrad_kernel+0x13e0 in wgrad_hopper.py:187
=========     Read Thread (256,0,0) at _wgrad_kernel+0xf0 in wgrad_hopper.py:147
=========     Current Value : 1
=========
"""
    (hazard,) = hazards(printed)
    assert is_hand_over(hazard, entry)
    for change in (
        {"first": "Read"},
        {"second": "Write"},
        {"first_kernel": "_dgrad_kernel"},
        {"first_thread": 256},
        {"second_thread": 255},
        {"first_line": "wgrad_hopper.py:130"},
        {"second_line": "wgrad_hopper.py:130"},
    ):
        assert not is_hand_over(hazard._replace(**change), entry)

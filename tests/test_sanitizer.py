"""The path under compute-sanitizer: no access outside an allocation, no race in shared memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import SANITIZER

CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed"}


@pytest.mark.sanitizer
@pytest.mark.timeout(500)
@pytest.mark.parametrize("tool", CLEAN)
def test_clean(tool):
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tests.sanitized"]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=env, capture_output=True, text=True, timeout=400)
    printed = done.stdout + done.stderr
    assert done.returncode == 0 and CLEAN[tool] in printed and printed.count(": right") == 2, printed[-8000:]

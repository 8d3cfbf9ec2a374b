"""doctor: findings that are true here, in words and as JSON."""

import json
import subprocess
import sys

import torch

from dist_moe.doctor import describe, examine


def test_findings():
    found = examine()
    assert found["packages"]["torch"] == torch.__version__ or found["packages"]["torch"] in torch.__version__
    assert found["cpu"]["backends"]["reference"] == "runs"
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["shared_memory"]["free_bytes"] > 0
    assert ("can be mapped" if found["gpus"] else "no CUDA device") in found["host_scratch"]
    assert json.loads(json.dumps(found)).keys() == found.keys()


def test_a_backend_that_does_not_run_says_why(monkeypatch):
    monkeypatch.setattr("dist_moe.registry._triton_problem", lambda: "triton is not installed")
    found = examine()
    assert found["cpu"]["backends"]["triton"] == "triton is not installed"
    assert "CPU, backend triton: triton is not installed" in describe(found)


def test_command_line():
    def doctor(*flags):
        return subprocess.run(
            [sys.executable, "-m", "dist_moe", "doctor", *flags], capture_output=True, text=True, check=True
        ).stdout

    assert "symmetric memory between GPUs" in doctor()
    assert json.loads(doctor("--json"))["python"].startswith("3.")

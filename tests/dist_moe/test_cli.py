"""The command line: what it prints, and its exit codes."""

import json
import subprocess
import sys

import pytest

import dist_moe
from dist_moe import cli

SHAPE = ["--tokens", "64", "--hidden", "32", "--intermediate", "64", "--top-k", "2", "--experts", "8", "--ep-size", "2"]
CONFIG = dist_moe.Config(64, 32, 64, 2, 8, 1)


@pytest.fixture
def run(monkeypatch, capsys):
    """run(*arguments) -> exit code, stdout, stderr"""

    def call(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["dist-moe", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0, *capsys.readouterr()

    return call


def test_without_arguments_it_prints_help(run):
    code, out, _ = run()
    assert code == 0
    assert all(command in out for command in ("demo", "plan", "explain"))


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "dist_moe", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "Usage: dist-moe" in done.stdout


def test_plan_prints_the_plan(run):
    assert run("plan", *SHAPE) == (0, dist_moe.plan_memory(CONFIG, 2).explain() + "\n", "")


def test_plan_as_json(run):
    code, out, _ = run("plan", *SHAPE, "--json")
    assert code == 0 and json.loads(out) == dist_moe.plan_memory(CONFIG, 2).to_dict()


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (["--layers", "3"], {"max_moe_layers_per_activation_slot": 3}),
        (["--device-factor", "1.5"], {"device_scratch_capacity_factor": 1.5}),
        (["--slot-factor", "0.5"], {"activation_slot_capacity_factor": 0.5}),
        (["--slot-bytes", "65536"], {"activation_slot_bytes": 65536}),
        (["--slots", "2"], {"num_activation_slots": 2}),
        (["--inference"], {"inference": True}),
    ],
)
def test_every_flag_of_plan_sets_its_field(run, flags, fields):
    config = dist_moe.Config(64, 32, 64, 2, 8, fields.pop("max_moe_layers_per_activation_slot", 1), **fields)
    _, out, _ = run("plan", *SHAPE, "--json", *flags)
    assert json.loads(out) == dist_moe.plan_memory(config, 2).to_dict()


def test_explain_prints_what_would_run(run):
    code, out, _ = run("explain", *SHAPE, "--device", "cpu", "--backend", "reference")
    assert code == 0 and out == dist_moe.explain(CONFIG, 2, device="cpu", backend="reference") + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", *SHAPE, "--hidden", "33"], "hidden_dim must be a multiple of 32, got 33"),
        (["plan", *SHAPE, "--ep-size", "0"], "ep_size must be positive"),
        (["plan", *SHAPE, "--slot-bytes", "1"], "activation_slot_bytes is 1"),
        (["explain", *SHAPE, "--top-k", "9"], "top_k cannot exceed num_experts"),
        (["demo", "--ranks", "5"], "--ranks must be 1 to 4, got 5"),
        (["demo", "--steps", "1"], "--steps must be at least 2"),
        (["demo", "--seconds", "nan"], "--seconds must be positive"),
        (["demo", "--out", "no/such/folder/picture.png"], "the folder of --out"),
    ],
)
def test_wrong_values_are_one_line_and_exit_code_2(run, arguments, words):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dist-moe: error: ") and words in err


@pytest.mark.parametrize(
    "arguments", [["plan"], ["plan", *SHAPE, "--tokens", "x"], ["demo", "--device", "tpu"], ["no"]]
)
def test_wrong_usage_is_exit_code_2(run, arguments):
    code, _, err = run(*arguments)
    assert code == 2 and "Usage: dist-moe" in err

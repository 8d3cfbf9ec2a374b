"""The command line: what it prints, and its exit codes."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

import dist_moe
from dist_moe import cli
from dist_moe.models import MODELS
from dist_moe.plan_report import Report

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
    assert all(command in out for command in ("demo", "plan", "explain", "check"))


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "dist_moe", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "Usage: dist-moe" in done.stdout


def test_plan_prints_the_numbers_of_the_plan(run):
    code, out, err = run("plan", *SHAPE, "--skews", "1,1.5")
    assert (code, err) == (0, "")
    report = Report(CONFIG, 2)
    lines = {name: int(size.replace(",", "")) for name, size in re.findall(r"^ (\w+(?: \w+)*)  +([\d,]+)  ", out, re.M)}
    components = {component.name: component.num_bytes for component in report.components()}
    assert components.items() <= lines.items()
    assert lines["device memory"] == report.device_bytes == sum(components.values())
    assert lines["activation buffer"] == report.plan.total_device_buffer_bytes
    assert (lines["host scratch"], lines["weights"]) == (0, 2 * 3 * 32 * 64 * 4)
    for limit in report.limits():
        assert f"  {limit}\n" in out
    assert "rows of a rank: 128 balanced / 128 fit on the device / 128 fit in all" in out
    assert re.search(r"^ +1.5 +192 +1.5 +\S+ \w+ +overflows +- +- +-", out, re.M)
    assert max(map(len, out.splitlines())) < 160


def test_plan_as_json(run):
    code, out, _ = run("plan", *SHAPE, "--json", "--skews", "1 2", "--layers", "3", "--slot-factor", "0.8")
    report = Report(replace(CONFIG, max_moe_layers_per_activation_slot=3, activation_slot_capacity_factor=0.8), 2)
    found = json.loads(out)
    assert code == 0 and found == report.to_dict([report.skew(1), report.skew(2)])
    assert dist_moe.plan_memory(report.config, 2).to_dict().items() <= found.items()
    assert sum(found["components"].values()) == found["total_device_bytes"] == report.device_bytes
    assert sum(found["layers_kept_balanced"].values()) == 3 and len(found["skews"]) == 2


MX = dist_moe.BlockScaledConfig


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (["--layers", "3"], {"max_moe_layers_per_activation_slot": 3}),
        (["--device-factor", "1.5"], {"device_scratch_capacity_factor": 1.5}),
        (["--vmm-total-factor", "1.75"], {"vmm": dist_moe.VmmConfig(1.75)}),
        (["--slot-factor", "0.5"], {"activation_slot_capacity_factor": 0.5}),
        (["--slot-bytes", "65536"], {"activation_slot_bytes": 65536}),
        (["--slots", "2"], {"num_activation_slots": 2}),
        (["--inference"], {"inference": True}),
        (["--precision", "bf16"], {}),
        (["--precision", "mxfp8"], {"block_scaled": MX()}),
        (["--precision", "mxfp8", "--pipeline", "mega"], {"block_scaled": MX(pipeline="mega")}),
        (["--precision", "nvfp4", "--inference"], {"block_scaled": MX("nvfp4"), "inference": True}),
    ],
)
def test_every_flag_of_plan_sets_its_field(run, flags, fields):
    _, out, _ = run("plan", *SHAPE, "--json", *flags)
    assert json.loads(out) == Report(replace(CONFIG, **fields), 2).to_dict()


def test_plan_for_a_gpu_that_is_not_here(run):
    flags = ("--precision", "mxfp8", "--device", "sm_90")
    _, out, _ = run("plan", *SHAPE, "--json", *flags)
    assert json.loads(out) == Report(replace(CONFIG, block_scaled=MX()), 2, device="sm_90").to_dict()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_model_gives_the_sizes_that_no_flag_gives(run, model):
    sizes = {"--hidden": model.D, "--intermediate": model.F, "--top-k": model.K, "--experts": model.E}
    given = {"--hidden": 64, "--intermediate": 96, "--top-k": 1, "--experts": 4 * model.E}
    for flag in (None, *sizes):
        flags = [] if flag is None else [flag, str(given[flag])]
        changed = sizes | ({} if flag is None else {flag: given[flag]})
        by_hand = [str(word) for pair in changed.items() for word in pair]
        by_model = run("plan", "--json", "--tokens", "64", "--model", model.name, *flags)
        assert by_model == run("plan", "--json", "--tokens", "64", *by_hand) and by_model[0] == 0


def test_the_largest_that_fits(run):
    flags = ["--model", "qwen3-30b", "--ep-size", "8", "--layers", "4", "--with-weights"]
    code, out, _ = run("plan", *flags, "--fits", "40.5", "--json")
    found = json.loads(out)
    most, needed = found["num_local_input_tokens"], found["fits"]["problem_of_one_token_more"]
    assert code == 0 and found["fits"]["gib"] == 40.5
    at_most, one_more = (run("plan", *flags, "--tokens", str(most + i), "--json")[1] for i in range(2))
    del found["fits"]
    assert found == json.loads(at_most) and found["total_device_bytes"] <= 40.5 * 2**30
    needed_bytes = json.loads(one_more)["total_device_bytes"]
    assert needed_bytes > 40.5 * 2**30 and f"it takes 40.500 GiB ({needed_bytes:,} bytes)" == needed
    _, out, _ = run("plan", *flags, "--fits", "40.5")
    assert out.startswith(f"largest T that fits in 40.5 GiB: {most:,}; {most + 1:,} does not: {needed}\n")
    assert f"T = {most:,}" in out


def test_a_picture_is_saved(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = run("plan", *SHAPE, "--skews", "1,2", "--png", str(tmp_path / "plan.png"))
    assert code == 0 and f"picture: {tmp_path / 'plan.png'}" in out
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("plan", *SHAPE, "--png", str(tmp_path / "plan.png"))
    assert (code, out) == (2, "")
    assert err == "dist-moe: error: --png needs matplotlib; pip install 'dist-moe-triton[demo]'\n"
    assert run("plan", *SHAPE)[0] == 0


def test_plan_and_explain_take_the_same_sizes(run):
    flags = [set(re.findall(r"--[\w-]+", run(command, "--help")[1])) for command in ("plan", "explain")]
    assert flags[0] - flags[1] == {"--fits", "--with-weights", "--skews", "--png", "--json"}
    assert flags[1] - flags[0] == {"--backend"}


def test_explain_prints_what_would_run(run):
    code, out, _ = run("explain", *SHAPE, "--device", "cpu", "--backend", "reference")
    assert code == 0 and out == dist_moe.explain(CONFIG, 2, device="cpu", backend="reference") + "\n"
    code, out, _ = run("explain", *SHAPE, "--device", "sm_100")
    assert code == 0 and out == dist_moe.explain(CONFIG, 2, device="sm_100") + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", *SHAPE, "--hidden", "33"], "hidden_dim must be a multiple of 32, got 33"),
        (["plan", *SHAPE, "--ep-size", "0"], "ep_size must be positive"),
        (["plan", *SHAPE, "--slot-bytes", "1"], "activation_slot_bytes is 1"),
        (["explain", *SHAPE, "--top-k", "9"], "top_k cannot exceed num_experts"),
        (["plan"], "missing --tokens, --hidden, --intermediate, --top-k, --experts; --model gives all but --tokens"),
        (["explain", "--model", "qwen3-30b"], "missing --tokens"),
        (["plan", "--model", "qwen3"], "unknown model 'qwen3'; known are deepseek-v3, qwen3-30b,"),
        (["plan", *SHAPE, "--experts", "7"], "divisible by the number of ranks, got 7 experts for 2 ranks"),
        (["plan", *SHAPE, "--precision", "nvfp4"], "NVFP4 is inference-only"),
        (["plan", *SHAPE, "--pipeline", "mega"], "--pipeline is for --precision mxfp8 and nvfp4"),
        (["plan", *SHAPE, "--fits", "80"], "--fits finds the tokens; leave --tokens out"),
        (["plan", *SHAPE[2:], "--fits", "0"], "--fits must be finite and positive"),
        (["plan", *SHAPE[2:], "--fits", "0.000001"], "nothing fits in 1.048 KiB"),
        (["plan", *SHAPE, "--skews", "1;2"], "--skews must be numbers with commas between them, got '1;2'"),
        (["plan", *SHAPE, "--skews", "0.5"], "at least 1, got 0.5"),
        (["plan", *SHAPE, "--png", "no/such/folder/plan.png"], "the folder of --png"),
        (["check", "--json", "no/such/folder/check.json"], "the folder of --json"),
        (["demo", "--ranks", "5"], "--ranks must be 1 to 4, got 5"),
        (["demo", "--seconds", "0", "--precision", "mxfp8"], "--seconds must be positive"),
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
    "arguments",
    [
        ["plan", *SHAPE, "--tokens", "x"],
        ["plan", *SHAPE, "--precision", "fp4"],
        ["demo", "--device", "tpu"],
        ["demo", "--precision", "nvfp4"],
        ["no"],
    ],
)
def test_wrong_usage_is_exit_code_2(run, arguments):
    code, _, err = run(*arguments)
    assert code == 2 and "Usage: dist-moe" in err

"""python -m dist_moe bench: its folder end to end, routings and recorded ids, peers, pictures, README's table."""

import csv
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dist_moe import cli
from dist_moe.benchmarks import outputs, peers, pictures, readme, routings, sweep, timeline
from dist_moe.benchmarks.baseline import LayerCalls
from dist_moe.benchmarks.checks import BASELINE_SLACK_DB, PathOracle
from dist_moe.benchmarks.launch import Job
from dist_moe.benchmarks.ours import BOTH, DIRECTIONS, FORWARD, INFERENCE
from dist_moe.benchmarks.shapes import SMOKE, Traffic, draw_inputs
from dist_moe.registry import OPS

from .peer_stand_ins import STAND_INS

ROOT = Path(__file__).parents[1]
PICTURES = ("tflops", "roof", "memory", "skew", "timeline")
CPU = Job(torch.device("cpu"), 2, (0, 1))
FLOORS = {"floor-ours", "floor-torch"}


def rows_of(folder: Path, name: str = outputs.ROWS) -> list[dict]:
    return outputs.read(folder, name)


def bench(out: Path, *more: str) -> int:
    """In this process, on two virtual ranks by the reference: the interpreter would take minutes."""
    return sweep.main(["--smoke", "--virtual", "2", "--backend", "reference", "--out", str(out), *more])


# The folder


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> Path:
    """Started as a user would; it starts its two processes itself."""
    out = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-m", "dist_moe", "bench", "--smoke", "--directions", BOTH, "--out", str(out)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "peer liger: absent" in done.stdout and "dist_moe, eager" in done.stdout
    return out


@pytest.fixture(scope="module")
def virtual(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("virtual")
    ids = torch.stack(routings.parse("zipf:0.5").draw(SMOKE, 2, 24))
    torch.save(ids, out / "ids.pt")
    kinds = ("--routings", "uniform", f"file:{out}/ids.pt", "--directions", INFERENCE, BOTH)
    assert bench(out, *kinds, "--precisions", "bf16", "mxfp8", "nvfp4") == 0
    return out


@pytest.mark.parametrize("how", ["processes", "virtual"])
def test_files_of_a_sweep(how, request):
    out = request.getfixturevalue(how)
    rows, environment = rows_of(out), json.loads((out / outputs.ENVIRONMENT).read_text())
    assert all(row["us"] > 0 and row["tflops"] > 0 and row["bench"] == "sweep" for row in rows)
    assert {row["where"] for row in rows} == {"2 processes" if how == "processes" else "2 virtual ranks"}
    assert environment["gpu"] == "none" and environment["torch"] == torch.__version__ and environment["roofs"]
    for name in PICTURES:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG") and (out / f"{name}.png").stat().st_size > 5000
    with (out / outputs.CSV).open(newline="") as file:
        table = list(csv.DictReader(file))
    fields = dict.fromkeys(name for row in rows for name in row)
    assert table == [{f: "" if row.get(f) is None else str(row[f]) for f in fields} for row in rows]


def test_methods_of_processes(processes):
    rows = rows_of(processes)
    assert {(row["routing"], row["method"]) for row in rows} == {
        (routing, method) for routing in ("uniform", "hot_rank(1.5)") for method in ("ours", "nccl", *FLOORS)
    }
    assert all(("worst_row_db" in row) == (row["method"] not in FLOORS) for row in rows)
    notes = rows_of(processes, outputs.NOT_TIMED)
    assert {(note["method"], note["failed"]) for note in notes} == {("transformers", False)}
    assert "has no expert parallelism" in notes[0]["reason"]


def test_methods_of_virtual_ranks(virtual):
    by = {(row["routing"], row["direction"], row["precision"], row["method"]): row for row in rows_of(virtual)}
    (recorded,) = {row["routing"] for row in by.values()} - {"uniform"}
    assert recorded.startswith("file:ids.pt@") and {row["T"] for row in by.values() if row["routing"] == recorded} == {
        24
    }
    for routing in ("uniform", recorded):
        for direction in (INFERENCE, BOTH):
            found = {method for r, d, precision, method in by if (r, d, precision) == (routing, direction, "bf16")}
            assert found >= {"ours", "nccl", *FLOORS}
            assert by[routing, direction, "mxfp8", "ours"]["relative_error"] < 0.075
            assert ((routing, direction, "nvfp4", "ours") in by) == (direction == INFERENCE)
    assert {note["reason"] for note in rows_of(virtual, outputs.NOT_TIMED)} == {"NVFP4 is for inference"}


@pytest.mark.transformers
def test_the_experts_of_transformers_are_a_peer(virtual):
    rows = [row for row in rows_of(virtual) if row["method"] == "transformers"]
    assert {row["direction"] for row in rows} == {INFERENCE, BOTH} and all(row["peer_version"] for row in rows)


def test_rows_that_are_there_are_not_measured_again(virtual, capsys):
    before, calls = rows_of(virtual), rows_of(virtual, outputs.TIMELINE)
    assert bench(virtual, "--directions", INFERENCE, "--routings", "uniform") == 0
    assert rows_of(virtual) == before and rows_of(virtual, outputs.TIMELINE) == calls
    assert "has its rows" in capsys.readouterr().out


def test_pictures_are_drawn_again_from_rows(virtual, tmp_path):
    for name in (outputs.ROWS, outputs.TIMELINE):
        (tmp_path / name).write_bytes((virtual / name).read_bytes())
    assert sweep.main(["--plot", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.glob("*.png")} == set(PICTURES)


@pytest.mark.parametrize("what", ["wrong", "raises"])
def test_a_peer_that_fails_is_reported_and_not_timed(what, monkeypatch, tmp_path):
    def open_broken(job, traffic):
        right = peers.find("nccl").open(job, traffic)
        return {"wrong": lambda *args: 1.1 * right(*args), "raises": lambda *args: right(*args[:2])}[what]

    broken = dataclasses.replace(peers.find("transformers"), open=open_broken, module="torch", package="torch")
    monkeypatch.setattr(peers, "PEERS", (broken, peers.find("nccl")))
    assert bench(tmp_path, "--directions", INFERENCE, "--routings", "uniform") == 1
    assert {row["method"] for row in rows_of(tmp_path)} == {"ours", "nccl", *FLOORS}
    (note,) = rows_of(tmp_path, outputs.NOT_TIMED)
    assert note["failed"] and note["method"] == "transformers"
    assert {"wrong": "the worst row has", "raises": "TypeError"}[what] in note["reason"]


@pytest.mark.gpu
def test_a_sweep_on_a_gpu(tmp_path):
    sizes = ("--virtual", "2", "--model", "256,128,8,2", "--tokens", "256", "--rounds", "2", "--out", str(tmp_path))
    assert sweep.main([*sizes, "--precisions", "bf16", "mxfp8", "--directions", *DIRECTIONS, "--peers", "nccl"]) == 0
    rows = rows_of(tmp_path)
    methods = {(row["direction"], row["method"]) for row in rows if row["precision"] == "bf16"}
    assert methods == {(d, m) for d in DIRECTIONS for m in ("ours", "ours-graph", "nccl", *FLOORS)}
    assert {(row["direction"], row["method"]) for row in rows if row["precision"] == "mxfp8"} == {
        (d, m) for d in DIRECTIONS for m in ("ours", "ours-graph")
    }
    assert all((row.get("peak_bytes", 0) > 0) == (row["method"] in ("ours", "nccl")) for row in rows)


@pytest.mark.gpu
def test_clocks_of_replayed_graphs(tmp_path):
    """In a process of its own, for kernels are compiled with them."""
    what = ("--model", "256,128,8,2", "--tokens", "256", "--virtual", "2", "--directions", INFERENCE, BOTH)
    command = [sys.executable, "-m", "dist_moe", "bench", "--clocks", *what, "--precisions", "bf16", "mxfp8"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not rows_of(tmp_path) and (tmp_path / "timeline.png").stat().st_size > 5000
    calls = rows_of(tmp_path, outputs.TIMELINE)
    assert {row["source"] for row in calls} == {timeline.CLOCKS}
    for call, precision in itertools.product((INFERENCE, BOTH), ("bf16", "mxfp8")):
        one = [row for row in calls if (row["call"], row["precision"]) == (call, precision)]
        stages = {(row["direction"], row["stage"]) for row in one}
        assert {("forward", "publish"), ("forward", "w2")} <= stages
        assert (("backward", "wgrad_w13") in stages) == (call == BOTH)
        ends = [row["start_us"] + row["us"] for row in one]
        assert one[0]["start_us"] == 0 and ends == pytest.approx([row["start_us"] for row in one[1:]] + ends[-1:])
        assert 0 < ends[-1] < 1e5


# One call


def test_intervals_of_a_call(virtual):
    calls = rows_of(virtual, outputs.TIMELINE)
    assert {(row["call"], row["precision"]) for row in calls} == {
        *((call, precision) for call in (INFERENCE, BOTH) for precision in ("bf16", "mxfp8")),
        (INFERENCE, "nvfp4"),
    }
    one = [row for row in calls if (row["call"], row["precision"], row["routing"]) == (BOTH, "bf16", "uniform")]
    starts = [row["start_us"] for row in one]
    assert starts == sorted(starts) and starts[0] >= 0 and all(row["us"] > 0 for row in one)
    stages = {(row["direction"], row["stage"]): row["kind"] for row in one}
    assert stages["forward", "dispatch"] == stages["backward", "combine"] == timeline.COMMUNICATION
    assert stages["forward", "w2"] == stages["backward", "wgrad_w2"] == timeline.COMPUTE
    assert sum((row["direction"], row["stage"]) == ("forward", "w2") for row in one) == 2  # of two virtual ranks


def test_kinds_of_ops():
    moves = {"publish", "signal", "wait", "wait_route_plan", "wait_reduce", "verify", "dispatch", "combine"}
    assert {op for op in OPS if timeline.kind_of(op) == timeline.COMMUNICATION} == moves


# Routings


@pytest.mark.parametrize(
    "text, name, balance",
    [
        ("balanced", "balanced", 1.0),
        ("uniform", "uniform", 1.0),
        ("zipf:0.3", "zipf(0.3)", None),
        ("hot-expert", "hot_expert(0.5)", None),
        ("hot-expert:1", "hot_expert(1.0)", None),
        ("hot-rank:2", "hot_rank(2.0)", 2.0),
        ("hot-rank:4", "hot_rank(4.0)", 4.0),
        ("one-rank", "one_rank", 4.0),
    ],
)
def test_routings_by_their_names(text, name, balance):
    routing, shape = routings.parse(text), dataclasses.replace(SMOKE, E=16)
    routing.check(shape, 4)
    found = Traffic(shape, routing.draw(shape, 4, 500)).balance()
    assert routing.name == name and routing.tokens([7, 8]) == [7, 8]
    if balance is not None:
        assert found["rank_rows_max"] / found["rank_rows_mean"] == pytest.approx(balance, rel=0.05)


def test_a_steeper_zipf_is_more_uneven():
    def fullest(s: float) -> float:
        found = Traffic(SMOKE, routings.parse(f"zipf:{s}").draw(SMOKE, 2, 1000)).balance()
        return found["expert_rows_max"] / found["expert_rows_mean"]

    ratios = [fullest(s) for s in (0.0, 0.3, 0.6, 0.9, 1.2)]
    assert ratios == sorted(ratios) and ratios[0] < 1.1 < 1.5 < ratios[-1]


@pytest.mark.parametrize("ending", ["pt", "npy"])
def test_recorded_ids_come_back(ending, tmp_path):
    ids = torch.stack(routings.parse("hot-rank:1.5").draw(SMOKE, 2, 9)).int()
    ids[0, 0, 0] = -1
    path = tmp_path / f"ids.{ending}"
    if ending == "pt":
        torch.save(ids, path)
    else:
        import numpy

        numpy.save(path, ids.numpy())
    routing = routings.parse(f"file:{path}")
    routing.check(SMOKE, 2)
    assert torch.equal(torch.stack(routing.draw(SMOKE, 2, 1)), ids.long()) and routing.tokens([1, 2]) == [9]
    torch.save(ids.flip(0), tmp_path / "ids.pt")
    other = routings.parse(f"file:{tmp_path}/ids.pt").name
    assert other != routing.name and other[: len("file:ids.pt@")] == "file:ids.pt@"


@pytest.mark.parametrize(
    "ids, words",
    [
        (torch.zeros(2, 3, 4), "one integer tensor [ranks, T, K], found is torch.float32"),
        ([1, 2], "found is list"),
        (torch.zeros(2, 3, dtype=torch.int64), "found is [2, 3]"),
        (torch.zeros(2, 0, 4, dtype=torch.int64), "with at least one of each"),
        (torch.zeros(4, 3, 4, dtype=torch.int64), "holds 4 ranks with 4 experts a token, wanted are 2 ranks"),
        (torch.zeros(2, 3, 2, dtype=torch.int64), "and the 4 of smoke"),
        (torch.full((2, 3, 4), 8), "id 8 is outside of -1 to 7"),
        (torch.full((2, 3, 4), -2), "id -2 is outside"),
    ],
)
def test_recorded_ids_that_cannot_be(ids, words, tmp_path):
    torch.save(ids, tmp_path / "ids.pt")
    with pytest.raises(ValueError) as error:
        routings.parse(f"file:{tmp_path}/ids.pt").check(SMOKE, 2)
    assert words in str(error.value)


# Options


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--smoke --routings even", "routing 'even': is unknown; known are balanced, uniform, zipf:S"),
        ("--smoke --routings zipf", "takes one number"),
        ("--smoke --routings zipf:steep", "could not convert"),
        ("--smoke --routings hot-expert:2", "probability"),
        ("--smoke --routings hot-rank:3", "of 2 ranks one can receive at most 2 times the mean"),
        ("--smoke --routings file:none.pt", "file:none.pt: there is no such file"),
        ("--smoke --routings file:README.md", "must end in .pt or .npy"),
        ("--smoke --models gpt-9", "unknown model 'gpt-9'; known are deepseek-v3"),
        ("--smoke --model 64,96,8", "--model wants D,F,E,K"),
        ("--smoke --model 60,96,8,2", "multiples of 32"),
        ("--smoke --ep 3", "the 8 experts of smoke cannot be shared by 3 ranks"),
        ("--smoke --ep 2 --virtual 2", "give one"),
        ("--smoke --rounds 0 --virtual 0", "at least 1"),
        ("--plot none", "there is no rows.jsonl"),
    ],
)
def test_options_that_cannot_be(arguments, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(cli.app, ["bench", *arguments.split()])
    assert done.exit_code == 2 and words in done.stderr and done.stderr.startswith("dist-moe: error: ")


def test_without_a_gpu_only_a_smoke_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device here; --smoke"):
        sweep.read_options([])


def test_clocks_are_those_of_a_gpu():
    with pytest.raises(ValueError, match="--smoke runs on the CPU"):
        sweep.read_options(["--smoke", "--clocks"])


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert sweep.read_options([]).W == 2 and sweep.read_options(["--virtual", "4"]).W == 4
    with pytest.raises(ValueError, match="here are 2; --virtual 4 shares one"):
        sweep.read_options(["--ep", "4"])


def test_a_model_of_ones_own():
    (shape,) = sweep.read_options(["--smoke", "--model", "64,96,8,2"]).shapes
    assert (shape.name, shape.D, shape.F, shape.E, shape.K) == ("D64-F96-E8-K2", 64, 96, 8, 2)


def test_help_says_what_there_is():
    done = CliRunner().invoke(cli.app, ["bench", "--help"])
    assert done.exit_code == 0 and "--routings" in done.stdout and "sonicmoe" in done.stdout


# Peers


def test_why_a_peer_does_not_run():
    traffic = Traffic(SMOKE, routings.parse("uniform").draw(SMOKE, 2, 8))
    gpus, virtual = Job(torch.device("cuda"), 2, (0,), group=object()), Job(torch.device("cuda"), 2, (0, 1))
    reasons = {
        name: peers.find(name).refuses(job, traffic, direction)
        for name, job, direction in (
            ("liger", CPU, BOTH),
            ("sonicmoe", gpus, INFERENCE),
            ("deepep", virtual, INFERENCE),
            ("torchtitan", gpus, BOTH),
            ("nccl", gpus, FORWARD),
        )
    }
    assert [reason and reason.split()[0] for reason in reasons.values()] == ["has", "has", "runs", "is", None]
    dropped = Traffic(SMOKE, [torch.where(ids == 0, -1, ids) for ids in traffic.ids])
    assert peers.find("transformers").refuses(virtual, dropped, BOTH) == "takes no slot without an expert"


@pytest.mark.parametrize("name", STAND_INS)
def test_an_adapter_makes_the_documented_call(name, monkeypatch):
    """One rank; in the directions that the adapter is for."""
    STAND_INS[name](monkeypatch)
    peer, job = peers.find(name), Job(CPU.device, 1, (0,))
    traffic = Traffic(SMOKE, routings.parse("zipf:1").draw(SMOKE, 1, 24))
    inputs = draw_inputs(SMOKE, traffic.ids, job.local_ranks, job.device)
    for direction in peer.directions:
        calls = LayerCalls(job, SMOKE, inputs, peer.open(job, traffic))
        results = calls.results(backward=direction == BOTH)
        oracle = PathOracle(job, SMOKE, inputs, backward=direction == BOTH)
        assert oracle.check(name, results, BASELINE_SLACK_DB) > 30


def test_a_package_that_fails_to_import_is_absent(monkeypatch):
    broken = dataclasses.replace(peers.find("liger"), name="broken", module="dist_moe.no_such_module")
    assert broken.absent() == "ModuleNotFoundError: No module named 'dist_moe.no_such_module'"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peers.find("nccl").version() == f"torch {torch.__version__}, NCCL none"


# Pictures


def a_row(**fields) -> dict:
    row = {"shape": "m", "T": 8, "W": 2, "where": "2 processes", "gpu": "GPU", "routing": "uniform", "method": "ours"}
    row |= {"direction": BOTH, "label": "dist_moe", "precision": "bf16", "us": 10.0, "tflops": 5.0, "roof_share": 0.5}
    return row | {"rank_rows_max": 4, "rank_rows_mean": 4.0, "peak_bytes": 2**30} | fields


def test_rows_of_another_run_do_not_stand_beside_the_newest():
    rows = [
        a_row(commit=commit, where=where, us=us) for commit, where, us in (("a", "x", 1), ("b", "y", 2), ("b", "x", 3))
    ]
    assert [row["us"] for row in outputs.alike([*rows, rows[0] | {"us": 4}])] == [1, 4] and outputs.alike([]) == []


def heights(figure) -> list[list[float]]:
    return [[bar.get_height() for bar in axes.patches] for axes in figure.axes]


def test_bars_have_the_heights_of_the_rows():
    rows = [a_row(), a_row(method="nccl", label="NCCL", tflops=2.0, roof_share=0.2, peak_bytes=3 * 2**30)]
    rows += [a_row(direction=INFERENCE, tflops=7.0), a_row(routing="one_rank", tflops=99.0), a_row(tflops=6.0)]
    assert heights(pictures.tflops(rows)) == [[6.0, 2.0], [7.0]]  # the newest of each, at the first routing
    assert heights(pictures.memory(rows))[0] == [1.0, 3.0] and heights(pictures.roof(rows))[0] == [50.0, 20.0]


def test_slowdown_is_over_the_most_even_routing():
    rows = [a_row(), a_row(routing="hot", rank_rows_max=8, us=15.0), a_row(method="floor-ours", label="floor", us=1.0)]
    (axes,) = pictures.skew(rows).axes
    _, ours = axes.lines
    assert ours.get_xdata().tolist() == [1.0, 2.0] and ours.get_ydata().tolist() == [1.0, 1.5]


def test_the_timeline_has_a_bar_a_stage():
    calls = a_call(timeline.EVENTS, dispatch=4.0, w13=6.0)
    (axes,) = pictures.timeline([a_row()], calls).axes
    assert len(axes.collections) == 2 and [text.get_text() for text in axes.texts] == ["dispatch", "w13"]
    assert not pictures.timeline([a_row()], []).axes


def test_the_timeline_prefers_the_clocks_of_kernels():
    calls = a_call(timeline.EVENTS, dispatch=4.0, w13=6.0) + a_call(timeline.CLOCKS, publish=1.0, w2=2.0)
    (axes,) = pictures.timeline([], calls).axes
    assert [text.get_text() for text in axes.texts] == ["publish", "w2"]
    assert "3 us by the kernels' clocks" in axes.get_title(loc="left")


def test_a_call_that_is_recorded_again_replaces_the_earlier_recording(tmp_path):
    first, other, again = (a_call(timeline.CLOCKS, routing=r, w2=us) for r, us in (("a", 1.0), ("b", 2.0), ("a", 3.0)))
    for lines in (first, other, again):
        about = {
            name: value for name, value in lines[0].items() if name not in vars(timeline.Interval("", "", "", 0, 0))
        }
        outputs.put_call(tmp_path, about, lines)
    assert rows_of(tmp_path, outputs.TIMELINE) == other + again


def a_call(source: str, routing: str = "uniform", **stages: float) -> list[dict]:
    about = {"shape": "m", "call": BOTH, "precision": "bf16", "T": 8, "routing": routing, "source": source}
    about |= {"where": "2 processes", "gpu": "none"}
    starts = itertools.accumulate(stages.values(), initial=0.0)
    parts = [
        timeline.Interval("forward", stage, timeline.kind_of(stage), start, us)
        for (stage, us), start in zip(stages.items(), starts, strict=False)
    ]
    return [about | vars(part) for part in parts]


# README


def test_readme_shows_the_recorded_rows():
    rows = readme.recorded()
    assert readme.speed_table(rows) in (ROOT / "README.md").read_text()
    assert set(heights(pictures.tflops(rows))[0]) == {row["tflops"] for row in rows if row["direction"] == FORWARD}
    assert set(readme.DIRECTIONS) <= set(DIRECTIONS)

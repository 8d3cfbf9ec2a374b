"""benchmarks.tune: which tiles are candidates, that wrong ones are refused and named, its rows and its verdicts."""

import functools
import importlib
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from benchmarks import report, tiles, tune
from benchmarks.tiles import ShapeClass
from benchmarks.timing import Times

from dist_moe.formats import MXFP8_E4M3, NVFP4

ROOT = Path(__file__).parents[1]
COMMIT = "0123abc"
BF16 = torch.bfloat16
pytestmark = pytest.mark.interpreter


def kernel(name: str):
    return importlib.import_module(f"dist_moe.kernels_triton.{name}")


# Candidates

grouped_gemm, wgrad_hopper, expanded = kernel("grouped_gemm"), kernel("wgrad_hopper"), kernel("expanded_hopper")
scaled_hopper, scaled = kernel("scaled_hopper"), kernel("grouped_gemm_scaled")
ROWS = grouped_gemm.CONFIGS.values()
CHOICES = [
    ("grouped_gemm", ShapeClass("forward", 4096, 7168, 512, BF16), grouped_gemm.CONFIGS[128, 256], ROWS),
    ("grouped_gemm", ShapeClass("forward", 4096, 7168, 8, BF16), grouped_gemm.CONFIGS[64, 128], ROWS),
    ("grouped_gemm", ShapeClass("dgrad", 4096, 384, 512, BF16), grouped_gemm.CONFIGS[128, 128], ROWS),
    ("grouped_gemm", ShapeClass("wgrad", 4096, 64, 8, BF16), grouped_gemm.CONFIGS[128, 64], ROWS),
    ("grouped_gemm_swiglu", ShapeClass("forward", 4096, 7168, 8, BF16), grouped_gemm.CONFIGS[64, 128], ROWS),
    ("grouped_gemm_hopper", ShapeClass("dgrad", 64, 64, 300, BF16), kernel("grouped_gemm_hopper").CONFIG, ()),
    ("wgrad_hopper", ShapeClass("wgrad", 64, 64, 8, torch.float32), wgrad_hopper.CONFIGS[torch.float32], ()),
    *(
        ("expanded_hopper", ShapeClass("forward", 64, 64, 16, BF16, format), table[size], table.values())
        for format, table, size in (
            (MXFP8_E4M3, expanded.CONFIGS[MXFP8_E4M3], 32),
            (NVFP4, expanded.CONFIGS[NVFP4], 32),
        )
    ),
    (
        "scaled_hopper",
        ShapeClass("forward", 64, 64, 8, BF16, MXFP8_E4M3, True),
        scaled_hopper.Config(16, 8),
        [scaled_hopper.pick_config(True, rows) for rows in (8, 20, 40, 100)],
    ),
    ("scaled_hopper", ShapeClass("dgrad", 64, 64, 8, BF16, MXFP8_E4M3, True), scaled_hopper.DGRAD, ()),
    ("grouped_gemm_scaled", ShapeClass("forward", 64, 64, 8, BF16, NVFP4), scaled.CONFIGS[64, False], ()),
]


@pytest.mark.parametrize("name, at, chosen, rows", CHOICES, ids=[f"{name} {at}" for name, at, *_ in CHOICES])
def test_candidates_are_the_choice_the_table_and_neighbours(name, at, chosen, rows):
    found = list(tiles.candidates(kernel(name), at).values())
    assert found[0] == chosen and set(rows) <= set(found) and len(found) <= 16
    beside = set(found) - {chosen, *rows}
    assert {config.num_stages for config in beside} >= {chosen.num_stages + 1}
    assert all(config.num_stages >= tiles.MIN_STAGES for config in beside)


@pytest.mark.parametrize("at", [case[1] for case in CHOICES if case[0] == "grouped_gemm"], ids=str)
def test_a_neighbour_is_one_step_away(at):
    """In one size, with stages for as many bytes in flight; or in the number of stages."""
    chosen = grouped_gemm.pick_config(at.kind, at.N, at.K, at.rows)
    for config in tiles.neighbours(chosen, "grouped_gemm"):
        sizes = [f.name for f in fields(config) if getattr(config, f.name) != getattr(chosen, f.name)]
        if sizes == ["num_stages"]:
            assert abs(config.num_stages - chosen.num_stages) == 1
            continue
        (name,) = set(sizes) - {"num_stages"}
        assert getattr(config, name) / getattr(chosen, name) in (0.5, 2)
        assert tiles.ring_bytes(config) <= tiles.ring_bytes(chosen) or config.num_stages == tiles.MIN_STAGES


def test_tables_fit_and_what_does_not_is_said():
    assert all(tiles.unfit(grouped_gemm, config) is None for config in grouped_gemm.CONFIGS.values())
    five = grouped_gemm.Config(128, 256, 64, num_warps=8, num_stages=5)
    assert tiles.unfit(grouped_gemm, five) == "does not fit: 240 KiB in flight, 227 KiB exist"


# Runs, with kernels interpreted and times that are made up


def lines(folder: Path) -> list[dict]:
    return list(map(json.loads, (folder / "tune.jsonl").read_text().splitlines()))


def run(folder: Path, *more: str) -> list[dict]:
    assert tune.main(["--smoke", "--commit", COMMIT, "--results", str(folder), *more]) == 0
    return lines(folder)


@pytest.fixture
def us(monkeypatch) -> dict[str, float]:
    """Microseconds by candidate, 100 of those that are not in it."""
    times: dict[str, float] = {}

    def measure(job, methods, rounds):
        return {m.name: Times(times.get(m.name, 100.0), 1.0, 200.0, rounds) for m in methods}

    monkeypatch.setattr(tune, "measure", measure)
    return times


CHOSEN, TOO_DEEP = "64x128x128 w4 s4", "64x128x128 w4 s5"  # for the smoke, in BF16; no GPU holds the second
W13 = ("--products", "w13")


def test_rows_say_what_was_measured_and_are_not_measured_again(us, tmp_path, monkeypatch, capsys):
    rows = run(tmp_path, *W13)
    names = list(tiles.candidates(grouped_gemm, ShapeClass("forward", 192, 64, 16, BF16)))
    assert [row["method"] for row in rows] == names and names[0] == CHOSEN
    first = rows[0]
    assert first["class"] == "forward 192x64, 16 rows an expert" and first["kernel"].endswith(".grouped_gemm")
    assert (first["bench"], first["precision"], first["direction"], first["commit"]) == ("tune", "bf16", "w13", COMMIT)
    tile = {"block_m": 64, "block_n": 128, "block_k": 128, "num_warps": 4, "num_stages": 4}
    assert (first["tile"], first["us"], first["rounds"], first["equal_bits"]) == (tile, 100.0, 1, True)
    (too_deep,) = (row for row in rows if row["refused"])
    assert (too_deep["method"], too_deep["us"]) == (TOO_DEEP, None) and "does not fit" in too_deep["refused"]
    for row in rows:
        if row is too_deep:
            continue
        assert row["gpu"] == "none" and row["command"] and row["triton"] and row["flops"] > 0
        assert (row["chosen"], row["refused"]) == (CHOSEN, None) and row["worst_row_db"] >= 50

    capsys.readouterr()
    monkeypatch.setattr(tune.Product, "launch", None)
    assert run(tmp_path, *W13) == rows
    out = capsys.readouterr().out
    assert "smoke T=16 bf16 w13: has its rows" in out and "of it: 1 of 1" in out
    assert report.main(["--results", str(tmp_path)]) == 0  # which has no table of them, and no trouble


def of_one_tile(monkeypatch, module, op: str, is_wrong, wrong) -> None:
    """The op, with `wrong` in place of a run in a tile that is_wrong."""
    right = getattr(module, op)

    @functools.wraps(right)
    def replaced(*args, config, **how):
        return wrong(right, *args, config=config, **how) if is_wrong(config) else right(*args, config=config, **how)

    monkeypatch.setattr(module, op, replaced)


def raises(right, *args, **how):
    raise RuntimeError("PassManager::run\n    [failed]")


def writes_nothing(right, *args, **how):
    pass


def doubles_a_row(right, a, start, w, out, *args, **how):
    right(a, start, w, out, *args, **how)
    out[5] *= 2


@pytest.mark.parametrize(
    "wrong, reason",
    [
        (raises, "RuntimeError: PassManager::run [failed]"),
        (writes_nothing, "32x128x128 w4 s4: the worst row has"),
        (doubles_a_row, "32x128x128 w4 s4: the worst row has"),
    ],
)
def test_a_wrong_candidate_is_not_timed_and_named(wrong, reason, us, tmp_path, monkeypatch, capsys):
    of_one_tile(monkeypatch, grouped_gemm, "grouped_gemm", lambda config: config.block_m == 32, wrong)
    us["32x128x128 w4 s4"] = 1.0
    rows = run(tmp_path, *W13)
    (refused,) = (row for row in rows if row["refused"] and row["method"] != TOO_DEEP)
    assert refused["method"] == "32x128x128 w4 s4" and refused["us"] is None and reason in refused["refused"]
    out = capsys.readouterr().out
    assert f"    32x128x128 w4 s4 is not timed: {refused['refused']}" in out
    table = out[out.index("of the chosen") :]
    assert "32x128x128 w4 s4" in table and reason.split(": ")[1] in table and "of it: 1 of 1" in table
    assert run(tmp_path, *W13) == rows  # refused ones are done too


def test_a_block_scaled_candidate_that_writes_nothing_is_refused(us, tmp_path, monkeypatch):
    of_one_tile(monkeypatch, scaled, "grouped_gemm_scaled_dgrad", lambda config: config.block_m == 128, writes_nothing)
    rows = run(tmp_path, "--products", "dgrad_w2", "--precisions", "mxfp8")
    assert {row["method"] for row in rows if row["refused"]} == {"128x128x64 w8 s4"} and len(rows) > 2


def test_nothing_is_timed_where_the_choice_itself_fails(us, tmp_path, monkeypatch, capsys):
    of_one_tile(monkeypatch, grouped_gemm, "grouped_gemm", lambda config: config.block_k == 128, raises)
    assert tune.main(["--smoke", "--commit", COMMIT, "--results", str(tmp_path), *W13]) == 1
    assert "NOT TIMED: smoke uniform T=16 bf16 w13: RuntimeError" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_summary_names_a_faster_candidate(us, tmp_path, capsys):
    us |= {"128x64x64 w4 s6": 97.0, "64x64x128 w4 s4": 98.5}
    run(tmp_path, "--products", "w13", "dgrad_w2")
    held, beaten = capsys.readouterr().out.split("pick_config's choice is ")[1:]
    assert held.startswith("the best, or within 2% of it: 0 of 2")
    assert beaten.startswith("slower than a candidate: 2 of 2")
    where = "bf16 w13: forward 192x64, 16 rows an expert (smoke uniform T=16)"
    assert f"    {where}: 128x64x64 w4 s6 takes 0.970 of {CHOSEN}" in beaten and "bf16 dgrad_w2: dgrad 64x96" in beaten


def test_within_the_margin_the_choice_holds(us, tmp_path, capsys):
    us["128x64x64 w4 s6"] = 98.0
    run(tmp_path, *W13)
    held, beaten = capsys.readouterr().out.split("pick_config's choice is ")[1:]
    assert held.startswith("the best, or within 2% of it: 1 of 1") and f": {CHOSEN}" in held
    assert beaten == "slower than a candidate: 0 of 1\n"


@pytest.mark.parametrize("product", [tune.FUSED, "wgrad_w2", "wgrad_w2_accumulate"])
def test_other_products(product, us, tmp_path, monkeypatch):
    """Of two candidates: the choice, and one with other results where sums are in another order."""
    all_of = tiles.candidates
    monkeypatch.setattr(tiles, "candidates", lambda *of: dict(list(all_of(*of).items())[:2]))
    rows = run(tmp_path, "--products", product)
    assert len(rows) == 2 and all(row["us"] == 100.0 and row["direction"] == product for row in rows)


def test_smoke_as_a_script(tmp_path):
    """It interprets the kernels by itself, and really takes times."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.tune", "--smoke", "--products", "w2", "wgrad_w2"]
    command += ["--precisions", "nvfp4", "--commit", COMMIT, "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = lines(tmp_path)
    assert {(row["precision"], row["direction"]) for row in rows} == {("nvfp4", "w2")}  # what exists of it
    assert len(rows) > 2 and all(row["us"] > 0 and row["us_p10"] > 0 for row in rows)
    assert "of 1\n" in done.stdout and "64x128x64 w8 s4" in done.stdout

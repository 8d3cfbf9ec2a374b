"""The benchmark scripts: their smokes, what they count, and that they refuse to time what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import (
    bench_formats,
    bench_memory,
    bench_op,
    bench_path,
    checks,
    op_cases,
    report,
    scaled_gemms,
    sm100_model,
    stages,
)
from benchmarks.gemms import ExpertGemms
from benchmarks.launch import Job, Miss
from benchmarks.roofs import Roofs, Work, backward_work, forward_work, fp32_wgrad_work, norm_work, total
from benchmarks.shapes import MODELS, ROUTINGS, SCHEMES, SHAPES, SMOKE, Shape, Traffic, config_of, load_of, memory_bytes
from benchmarks.timing import Method, measure, summarize

from dist_moe import plan_memory, planner, reference, testing
from dist_moe.formats import FORMATS, MXFP8_E4M3, NVFP4
from dist_moe.kernels_cute.tiles import Tile
from dist_moe.shapes import align
from dist_moe.virtual import RankResults

from .rank_calls import as_torchrun_does

ROOT = Path(__file__).parents[1]
H200_BYTES = 139 * 2**30
OPS = bench_op.OPS
COMMIT = "0123abc"

# Two ranks, two tokens each, two experts a rank: rank 0 receives rows of (rank, token) 00, 10 | 00, 11.
TINY = Shape("tiny", D=32, F=64, E=4, K=2)
TINY_IDS = [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 2], [1, -1]])]


# Counting


def test_rows_and_pairs_by_source_and_destination():
    traffic = Traffic(TINY, TINY_IDS)
    assert traffic.rows_WW == [[2, 2], [2, 1]] and traffic.rows_W == [4, 3]
    assert traffic.pairs_WW == [[1, 1], [2, 1]]
    assert traffic.expert_rows(0) == [2, 2] and traffic.expert_rows(1) == [2, 1]
    load = traffic.load(0, dedup=True)
    assert (load.rows, load.remote_rows, load.pairs, load.remote_pairs, load.returned) == (4, 2, 3, 2, 2)
    assert load.moved == (1, 2) and traffic.load(0, dedup=False).moved == (2, 2)
    assert traffic.load(0, dedup=False).returned == 4 and traffic.load(1, dedup=True).returned == 3
    assert traffic.balance() == {
        "rank_rows_max": 4,
        "rank_rows_mean": 3.5,
        "expert_rows_max": 2,
        "expert_rows_mean": 1.75,
    }


def test_an_expert_named_twice_is_one_row():
    assert Traffic(TINY, [torch.tensor([[1, 1]]), torch.tensor([[1, 2]])]).expert_rows(0) == [0, 2]


def test_work_of_the_stages_by_hand():
    load = Traffic(TINY, TINY_IDS).load(0, dedup=True)
    assert forward_work(load) == {
        "publish": Work(0, 256 + 4 * 18, 0),  # x twice; of a route 8 + 4 bytes in, 2 + 4 out
        "route": Work(0, 8 + 64, 8),
        "dispatch": Work(0, 64 * (1 + 4), 64 * 2),
        "w13": Work(2 * 4 * 128 * 32, 2 * (4 * 160 + 2 * 128 * 32), 0),
        "swiglu": Work(0, 1536, 0),
        "w2": Work(2 * 4 * 32 * 64, 2 * (4 * 96 + 2 * 32 * 64), 0),
        "combine": Work(0, 64 * (1 + 4), 64 * 2),
        "reduce": Work(0, 64 * (2 + 2), 0),
    }
    backward = backward_work(load)
    assert backward["swiglu_backward"] == Work(0, 3072, 0)
    assert backward["wgrad_w13"] == Work(2 * 4 * 128 * 32, 2 * (4 * 160 + 2 * 128 * 32), 0)
    assert backward["collect_score_grads"] == Work(0, 64, 0)
    assert total(forward_work(load).values()).flops == 6 * 32 * 64 * 4 == 49152
    assert total(backward.values()).flops == 12 * 32 * 64 * 4 == 98304


def test_per_route_every_row_crosses():
    load = Traffic(TINY, TINY_IDS).load(0, dedup=False)
    assert forward_work(load)["dispatch"] == Work(0, 64 * (2 + 4), 64 * 2)
    assert forward_work(load)["reduce"] == Work(0, 64 * (4 + 2), 0)


def test_work_of_what_does_two_things_by_hand():
    load = Traffic(TINY, TINY_IDS).load(1, dedup=False)  # 3 rows, both experts used
    assert fp32_wgrad_work(load) == {
        "wgrad_w13_fp32": Work(2 * 3 * 128 * 32, 2 * 3 * 160 + 4 * 2 * 128 * 32),
        "wgrad_w2_fp32": Work(2 * 3 * 32 * 64, 2 * 3 * 96 + 4 * 2 * 32 * 64),
        "wgrad_w13_accumulate": Work(2 * 3 * 128 * 32, 2 * 3 * 160 + 8 * 2 * 128 * 32),
        "wgrad_w2_accumulate": Work(2 * 3 * 32 * 64, 2 * 3 * 96 + 8 * 2 * 32 * 64),
    }
    assert norm_work(tokens=2, routes=3, K=2, D=32) == {
        "rmsnorm_reduce": Work(hbm_bytes=64 * 5 + 4 * 6),
        "plain": Work(hbm_bytes=64 * 5 + 4 * 6),
        "keep": Work(hbm_bytes=64 * 8 + 4 * 10),
        "rmsnorm_reduce_backward": Work(hbm_bytes=64 * 8 + 4 * 10 + 4 * 3),
    }


def test_flops_of_deepseek_v3():
    model = MODELS[0]
    assert (model.name, model.D, model.F, model.E, model.K) == ("deepseek-v3", 7168, 2048, 256, 8)
    traffic = Traffic(model, testing.routing("balanced", num_ranks=2, T=64, K=8, E=256))
    forward, both = (bench_path.works(traffic, direction)[0] for direction in ("forward", "forward+backward"))
    assert forward.flops == 6 * 7168 * 2048 * 1024 and both.flops == 3 * forward.flops


def test_a_roof_is_the_slowest_of_three():
    apart = Roofs(tflops=1.0, hbm_gbs=10.0, link_gbs=1.0)
    assert apart.us(Work(5_000_000, 0, 0)) == 5.0
    assert apart.us(Work(5_000_000, 70_000, 0)) == 7.0
    assert apart.us(Work(5_000_000, 70_000, 8_000)) == 8.0
    assert Roofs(1.0, 10.0, None).us(Work(0, 70_000, 30_000)) == 10.0  # virtual ranks: all of it is this memory


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_models_fit_on_two_h200(model):
    traffic = Traffic(model, testing.routing("uniform", num_ranks=2, T=8192, K=model.K, E=model.E))
    assert memory_bytes(traffic, 1, backward=True) < H200_BYTES


@pytest.mark.parametrize("W", [2, 4, 8])
def test_slot_and_scratch_hold_the_routing(W):
    for name in ROUTINGS:
        traffic = Traffic(SMOKE, testing.routing(name, num_ranks=W, T=16, K=SMOKE.K, E=SMOKE.E))
        config = config_of(traffic)
        plan = plan_memory(config, W)
        assert plan.total_scratch_capacity_rows >= max(traffic.rows_W)
        assert plan.activation_slot_bytes == plan.maximum_useful_activation_slot_bytes
        assert load_of(traffic, 0).rows == traffic.rows_W[0]


# Timing


def test_summary_of_samples():
    times = summarize([float(i) for i in range(11)])
    assert (times.us, times.p10, times.p90, times.rounds) == (5.0, 1.0, 9.0, 11)
    assert summarize([3.0]).p90 == 3.0


def test_methods_rotate_and_prepare_stays_outside():
    calls = []
    methods = [Method(name, lambda name=name: calls.append(name)) for name in "ab"]
    methods.append(Method("c", lambda: calls.append("c"), lambda: calls.append("prepare c")))
    times = measure(Job(torch.device("cpu"), 1, (0,)), methods, rounds=3)
    assert calls[:4] == ["a", "b", "prepare c", "c"] and calls[4:8] == ["b", "prepare c", "c", "a"]
    assert len(calls) == 6 * 4 and {name: t.rounds for name, t in times.items()} == {"a": 3, "b": 3, "c": 3}


# Refusal of wrong results


GEMM = testing.TOLERANCES["gemm"]


@pytest.mark.parametrize("wrong", ["zeros", "a row of another", "not written", "a NaN", "one row twice as large"])
def test_wrong_rows_miss_the_bar(wrong):
    ref = torch.randn(300, 64).bfloat16()
    out = ref.clone()
    checks.require("same", out, ref, GEMM)
    row = {"a row of another": ref[7], "not written": 7.0, "a NaN": float("nan"), "one row twice as large": 2 * ref[8]}
    out[8] = row.get(wrong, 0.0)
    if wrong == "zeros":
        out.zero_()
    with pytest.raises(Miss, match="worst row"):
        checks.require("wrong", out, ref, GEMM)


def test_moved_data_must_have_equal_bits():
    ref = torch.randn(4, 32).bfloat16()
    with pytest.raises(Miss, match="equal bits"):
        checks.require("moved", ref.nextafter(ref + 1), ref, testing.TOLERANCES["moved"])
    with pytest.raises(Miss, match="zero everywhere"):
        checks.require("nothing", torch.zeros(4, 32), torch.zeros(4, 32), GEMM)


def run_smoke(module, *more) -> int:
    return module.main(["--smoke", "--commit", COMMIT, *more])


def test_a_wrong_op_is_not_timed(monkeypatch, tmp_path, capsys):
    def wrong(*args, **kwargs):
        reference.grouped_gemm(*args, **kwargs)
        args[3][0] *= 2

    monkeypatch.setattr(bench_op, "implementations", lambda op, device: {"wrong": wrong})
    assert run_smoke(bench_op, "--ops", "w13", "--results", str(tmp_path)) == 1
    assert "NOT TIMED: smoke uniform T=16 w13: wrong w13" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def without_the_old(dy, dy_start, x, x_start, starts, out, *, accumulate, stop_1):
    reference.grouped_gemm_wgrad(dy, dy_start, x, x_start, starts, out, accumulate=False, stop_1=stop_1)


def without_an_expert(dy, dy_start, x, x_start, starts, out, *, accumulate, stop_1):
    reference.grouped_gemm_wgrad(dy, dy_start, x, x_start, starts[:-1], out, accumulate=accumulate, stop_1=stop_1)


def without_the_norm(out_TD, *, rows_TKD, scores_TK, **others):
    out_TD.copy_((scores_TK[..., None] * rows_TKD.float()).sum(dim=1))


def without_what_backward_reads(out_TD, **how):
    reference.rmsnorm_reduce(out_TD, **{**how, "kept_rows_TKD": None})


@pytest.mark.parametrize(
    "op, wrong, found",
    [
        ("wgrad_w2_accumulate", without_the_old, "wrong wgrad_w2_accumulate"),
        ("wgrad_w2_accumulate", without_an_expert, "wrong wgrad_w2_accumulate"),
        ("rmsnorm_reduce", without_the_norm, "wrong rmsnorm_reduce out"),
        ("rmsnorm_reduce", without_what_backward_reads, "wrong keep kept"),
    ],
)
def test_what_does_half_of_two_things_is_not_timed(op, wrong, found, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_op, "implementations", lambda name, device: {"wrong": wrong})
    assert run_smoke(bench_op, "--ops", op, "--results", str(tmp_path)) == 1
    assert f"NOT TIMED: smoke uniform T=16 {op}: {found}" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_wrong_path_is_not_timed(monkeypatch, tmp_path, capsys):
    right = reference.swiglu_backward

    def wrong(h1_X2F, *args, **kwargs):
        right(h1_X2F, *args, **kwargs)
        h1_X2F *= 1.1

    monkeypatch.setattr(reference, "swiglu_backward", wrong)
    where = ["--backend", "reference", "--results", str(tmp_path)]
    assert run_smoke(bench_path, *where, "--directions", "forward+backward") == 1
    assert "NOT TIMED: smoke uniform T=16: rank 0: ours grad x" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_left_out_and_no_failure(monkeypatch, tmp_path, capsys):
    traffic = Traffic(SMOKE, testing.routing("uniform", num_ranks=2, T=16, K=SMOKE.K, E=SMOKE.E))
    there = memory_bytes(traffic, 2, backward=False, methods=["ours"])
    monkeypatch.setattr(bench_path, "device_bytes", lambda job: there)
    assert run_smoke(bench_path, "--methods", "ours", "--results", str(tmp_path)) == 0
    assert [row["direction"] for row in lines(tmp_path, "path")] == ["forward"]
    assert "NOT TIMED: smoke uniform forward+backward: at most" in capsys.readouterr().out


def test_products_of_a_rank_without_rows():
    gemms = ExpertGemms([0, 0], torch.ones(2, 64, 32).bfloat16(), torch.ones(2, 32, 32).bfloat16())
    assert gemms.torch("w13") is None and gemms.result("w13").shape == (0, 64)


# The scripts


def lines(folder: Path, name: str) -> list[dict]:
    return list(map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines()))


SKEWS = {"balanced": 1.0, "hot_rank(2.0)": 2.0, "one_rank": 4.0}  # over four ranks


@pytest.fixture(scope="module")
def smokes(tmp_path_factory) -> dict[str, Path]:
    """Folders of rows: two scripts are started as a user would, the others in processes that have done the imports."""
    path = ("--smoke", "--methods", "ours", "graph", "baseline", "floor", "stages")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    commands = {
        "op": ("benchmarks.bench_op", "--smoke", "--ops", *OPS),
        "processes": (*torchrun, "benchmarks.bench_path", *path),
    }
    scripts = {
        "virtual": (1, bench_path.main, *path, "--directions", *bench_path.DIRECTIONS),
        "scaled": (1, scaled_gemms.main, "--smoke", "--products", "w13", "wgrad_w2"),
        "formats": (1, bench_formats.main, "--smoke", "--stages", "--directions", *bench_formats.METHODS),
        "apart": (
            1,
            bench_formats.main,
            "--smoke",
            "--apart",
            "--methods",
            "mxfp8",
            "bf16",
            "--directions",
            "inference",
        ),
        "memory": (1, bench_memory.main, "--smoke"),
        "four": (4, bench_path.main, *path, "--routings", *SKEWS),
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in (*commands, *scripts)}
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    for name, command in commands.items():
        command = [sys.executable, "-m", *command, "--commit", COMMIT, "--results", str(folders[name])]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{name}:\n{done.stdout}{done.stderr}"
    for name, (W, script, *arguments) in scripts.items():
        more = ("--commit", COMMIT, "--results", str(folders[name]))
        as_torchrun_does(W, script, f"{script.__module__}.py", *arguments, *more)
    return folders


FIELDS = {
    "gpu", "num_gpus", "driver", "torch", "triton", "python", "commit", "date", "command", "bench", "shape", "routing",
    "direction", "method", "where", "D", "F", "E", "K", "T", "W", "rank_rows_max", "rank_rows_mean", "expert_rows_max",
    "expert_rows_mean", "us", "us_p10", "us_p90", "rounds", "roof_tflops", "roof_hbm_gbs", "roof_link_gbs",
}  # fmt: skip
RATES = {"flops", "hbm_bytes", "link_bytes", "tflops", "hbm_gbs", "link_gbs", "roof_us", "roof_share"}


def test_rows_of_scaled_products(smokes):
    rows = lines(smokes["scaled"], "scaled")
    assert all(row.keys() >= FIELDS | RATES | {"worst_row_db", "speed"} for row in rows)
    methods = {name: {row["method"] for row in rows if row["direction"] == name} for name in ("w13", "wgrad_w2")}
    assert methods == {"w13": {"bf16", *scaled_gemms.FORMATS}, "wgrad_w2": {"bf16", "mxfp8_e4m3"}}


def test_rows_of_formats(smokes):
    rows = lines(smokes["formats"], "formats")
    wanted = {(direction, name) for direction, names in bench_formats.METHODS.items() for name in names}
    assert {(row["direction"], row["method"]) for row in rows} == wanted and len(rows) == len(wanted)
    assert all(row["us"] > 0 and row["bf16_us"] > 0 for row in rows)
    assert all((row["method"] == "bf16") == (row["relative_error"] is None) for row in rows)
    of_inference = {row["method"]: row["wire_row_bytes"] for row in rows if "wire_row_bytes" in row}
    D = rows[0]["D"]
    assert of_inference == {"mxfp8": align(D + D // 32, 16), "nvfp4": align(D // 2 + D // 16 + 4, 16)}
    stages = {row["method"] for row in lines(smokes["formats"], "formats_stages")}
    assert {"nvfp4 dispatch_packed", "mxfp8 swiglu_backward_quantize", "mxfp8-dynamic quantize_weights"} <= stages


def test_methods_that_are_held_apart_are_compared_too(smokes):
    found = {row["method"]: row for row in lines(smokes["apart"], "formats")}
    assert found.keys() == {"bf16", "mxfp8"} and found["mxfp8"]["bf16_us"] == found["bf16"]["us"]
    assert found["bf16"]["relative_error"] is None and 0 < found["mxfp8"]["relative_error"] < 0.075


def test_the_formats_are_held_against_bf16():
    close = [RankResults(torch.ones(4, 8))]
    assert bench_formats.require_near("mxfp8", [RankResults(torch.full((4, 8), 1.01))], close, "x") < 0.02
    for wrong in (torch.zeros(4, 8), torch.full((4, 8), 1.1), torch.full((4, 8), float("nan"))):
        with pytest.raises(Miss, match="against BF16"):
            bench_formats.require_near("mxfp8", [RankResults(wrong)], close, "x")


def test_rows_of_ops(smokes):
    rows = lines(smokes["op"], "op")
    assert all(row.keys() >= FIELDS | RATES | {"worst_row_db"} for row in rows)
    assert {row["direction"] for row in rows} == set(OPS)
    by = {(row["direction"], row["method"]): row for row in rows}
    assert all((product, "torch") in by for product in op_cases.PRODUCTS)
    assert by["w13", "reference"]["flops"] == 4 * SMOKE.D * SMOKE.F * by["w13", "reference"]["rank_rows_max"]
    assert by["w13", "torch"]["commit"] == COMMIT and by["w13", "torch"]["rounds"] == 1


def test_rows_of_what_does_two_things(smokes):
    by = {(row["direction"], row["method"]): row for row in lines(smokes["op"], "op")}
    parts = {op: {method for name, method in by if name == op} for op in op_cases.ACCUMULATIONS + op_cases.NORM_OPS}
    products = {"reference bfloat16", "torch bfloat16", "reference float32"}
    assert all(parts[op] == {"reference", "torch"} | products for op in op_cases.ACCUMULATIONS)
    assert parts["rmsnorm_reduce"] == {"reference", "torch", "reference keep", "torch keep", "reference plain"}
    assert parts["rmsnorm_reduce_backward"] == {"reference"}
    num = 4 * 2 * SMOKE.F * SMOKE.D  # elements of the gradient of W13: four experts a rank
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        assert by["wgrad_w13_accumulate", f"reference {dtype}"]["pass_bytes"] == num * (size + 8)


def test_bars_of_what_does_two_things():
    """Met up to the bar and missed above it; only Mixtral is also held against the product alone."""
    about = dict.fromkeys(FIELDS | {"scheme"}, 0) | {
        "roof_link_gbs": None,
        "T": 8192,
        "W": 2,
        "date": "",
        "bench": "op",
    }

    def rows(shape, direction, **us) -> list[dict]:
        told = about | {"shape": shape, "direction": direction, "pass_bytes": 4_300_000_000, "hbm_bytes": 100}
        return [told | {"method": method.replace("_", " "), "us": float(value)} for method, value in us.items()]

    def verdicts(make, found) -> list[str]:
        (text,) = make(found)
        return [cell for cell in text.splitlines()[-1].split(" | ") if cell in ("met", "missed")]

    def added(shape, us) -> list[str]:
        found = rows(shape, "wgrad_w13_accumulate", gluon=us, gluon_bfloat16=1000, gluon_float32=1100, torch=9000)
        return verdicts(report.accumulation_tables, found)

    assert added("deepseek-v3", 1600) == ["met", "met"] and added("deepseek-v3", 1650) == ["missed", "met"]
    assert added("mixtral-8x7b", 1150) == ["met", "met"] and added("mixtral-8x7b", 1200) == ["missed", "met"]

    def normed(us, more_bytes=0) -> list[str]:
        found = rows("deepseek-v3", "rmsnorm_reduce", triton=us, torch=200, triton_keep=150, triton_plain=90)
        found[0]["hbm_bytes"] += more_bytes
        return verdicts(report.norm_tables, found)

    assert normed(100) == ["met"] and normed(101) == ["missed"] and normed(100, 11) == ["missed"]


@pytest.mark.parametrize("how, where", [("virtual", "2 virtual ranks"), ("processes", "2 processes")])
def test_rows_of_the_path(smokes, how, where):
    rows = lines(smokes[how], "path")
    assert all(row.keys() >= FIELDS | RATES | {"floor_us", "baseline_us"} and row["where"] == where for row in rows)
    by = {(row["direction"], row["method"]): row for row in rows}
    directions = bench_path.DIRECTIONS if how == "virtual" else ("forward", "forward+backward")
    assert set(by) == {(d, m) for d in directions for m in ("ours", "baseline", "floor-ours", "floor-torch")}
    num_routes = 2 * 16 * SMOKE.K
    assert by["forward", "ours"]["flops"] == 6 * SMOKE.D * SMOKE.F * num_routes
    assert by["forward+backward", "floor-torch"]["flops"] == 18 * SMOKE.D * SMOKE.F * num_routes
    assert by["forward", "ours"]["worst_row_db"] >= 44.0
    assert (by["forward", "ours"]["roof_link_gbs"] is None) == (how == "virtual")


def test_rows_of_memory(smokes):
    rows = lines(smokes["memory"], "memory")
    assert [row["method"] for row in rows] == ["ours", "ours-67%-on-device", "ours-25%-on-device"]
    more = {"taken_bytes", "planned_bytes", "host_bytes", "host_peak_bytes", "worst_row_db", "scheme"}
    assert all(set(row) == FIELDS | RATES | more for row in rows)
    on_host, planned = ([row[f"{name}_bytes"] for row in rows] for name in ("host_peak", "planned"))
    assert on_host[0] == 0 < on_host[1] < on_host[2] and planned == sorted(planned, reverse=True)
    assert "ours-25%-on-device" in report.memory_tables(rows)[0]


def test_rows_of_four_processes_under_skew(smokes):
    """All to one rank: three of them have no row."""
    rows = lines(smokes["four"], "path")
    assert {(row["where"], row["W"], row["num_gpus"]) for row in rows} == {("4 processes", 4, 0)}
    assert len({(row["routing"], row["direction"], row["method"]) for row in rows}) == len(SKEWS) * 2 * 4
    for row in rows:
        assert row["rank_rows_max"] / row["rank_rows_mean"] == pytest.approx(SKEWS[row["routing"]], rel=0.15)


@pytest.mark.parametrize("how", ["virtual", "processes"])
def test_rows_of_stages(smokes, how):
    rows = lines(smokes[how], "stages")
    by = {(row["direction"], row["method"]): row for row in rows}
    counted = {
        "forward": ("grouped_gemm_swiglu", "w2", "dispatch"),
        "backward": ("wgrad_w2", "dgrad_w13", "swiglu_backward"),
    }
    for direction, names in counted.items():
        assert all(by[direction, name].keys() >= FIELDS | RATES for name in names)
        parts = [row["us"] for row in rows if row["direction"] == direction and row["method"] != "whole"]
        if how == "virtual":  # of processes the slowest is shown, stage by stage
            assert sum(parts) == pytest.approx(by[direction, "whole"]["us"])
    assert {"wait published", "wait combined"} <= {row["method"] for row in rows}


@pytest.mark.parametrize("D, F", [(256, 128), (128, 128), (128, 256)], ids=["2 F = D", "F = D", "F = 2 D"])
@pytest.mark.parametrize("format", [None, *FORMATS], ids=lambda format: format.name if format else "bf16")
def test_products_of_any_widths_have_the_names_of_their_weights(format, D, F):
    shape, per_byte = Shape("any", D, F, 8, 2), format.values_per_byte if format else 1
    dtype = format.value_dtype if format else torch.bfloat16
    for name, rows, columns in (("w13", 2 * F, D), ("w2", D, F)):
        weight = torch.empty(4, rows, columns // per_byte, dtype=dtype)
        op, args = ("grouped_gemm_scaled", (None, weight)) if format else ("grouped_gemm", (None, None, weight))
        assert stages.stage_name(shape, op, args, {}) == name


def test_rows_that_are_there_are_not_measured_again(smokes, monkeypatch, capsys):
    monkeypatch.setattr(bench_op, "implementations", lambda op, device: {"reference": getattr(reference, op)})
    for module, name, how in ((bench_path, "path", "virtual"), (bench_op, "op", "op")):
        before = lines(smokes[how], name)
        assert run_smoke(module, "--results", str(smokes[how])) == 0
        assert lines(smokes[how], name) == before
    assert "has its rows" in capsys.readouterr().out


def test_either_scheme_is_measured_when_named(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "DEDUP_MIN_ROUTES", planner.DEDUP_MIN_ROUTES)  # as before, afterwards
    options = ("--virtual", "2", "--directions", "forward", "--methods", "ours", "--results", str(tmp_path))
    for scheme in SCHEMES:
        assert run_smoke(bench_path, "--scheme", scheme, *options) == 0
    found = {row["scheme"]: row["link_bytes"] for row in lines(tmp_path, "path") if row["method"] == "ours"}
    assert found.keys() == SCHEMES.keys() and found["per route"] > found["de-duplicated"] > 0


def test_report_prints_a_table_of_each_kind(smokes, capsys):
    for folder in smokes.values():
        assert report.main(["--results", str(folder), "--commit", COMMIT]) == 0
    text = capsys.readouterr().out
    of_path = f"| smoke, {lines(smokes['virtual'], 'path')[0]['scheme']} | forward+backward |"
    of_bars = ("| smoke, reference |", "| smoke wgrad_w2_accumulate, reference |")
    for line in (
        of_path,
        "| smoke w13 |",
        "| forward: dispatch |",
        "| model | bf16, ms | mxfp8, ms | nvfp4, ms |",
        *of_bars,
    ):
        assert line in text
    assert text.count("Path under skew") == 1 and ", forward+backward, one_rank | 4.00 |" in text
    assert report.main(["--results", str(smokes["op"]), "--commit", "another"]) == 0
    assert "no rows" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["_budget.sh", "run_h200.sh", "run_many.sh"])
def test_is_a_shell_script(script):
    subprocess.run(["bash", "-n", f"benchmarks/{script}"], cwd=ROOT, check=True)


PYTHON_STUB = """#!/bin/bash
echo "$*" >>"$CALLS"
[[ $* != "-m pytest"* ]] || echo "tests/test_gpu_ranks.py::test_faults[4_gpus] PASSED [ 50%]"
[[ $* != *"$FAILS"* ]] || exit ${CODE:-1}
"""


def test_run_many_goes_on_where_it_ended(tmp_path):
    (tmp_path / "python3").write_text(PYTHON_STUB)
    (tmp_path / "python3").chmod(0o755)

    def call(commit: str = COMMIT, fails: str = "nothing", **variables) -> tuple[int, list[str]]:
        """Exit code, and the commands that it ran between the look for the package and the report."""
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), "FAILS": fails}
        command = ["benchmarks/run_many.sh", "4", commit, str(tmp_path)]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True).returncode
        return code, calls.read_text().splitlines()[1:-1]

    assert call(commit="all deselected", fails="-m pytest", CODE="5", BUDGET_S="21")[0] == 1  # nothing has passed yet
    code, commands = call(fails="-m pytest")
    assert code == 1 and len(commands) == 9 and "--deselect" not in commands[0]
    assert all("bench_path --shapes qwen3-30b deepseek-v3" in command for command in commands[1:])
    code, commands = call()
    assert code == 0 and len(commands) == 1 and "--deselect=tests/test_gpu_ranks.py::test_faults[4_gpus]" in commands[0]
    assert call() == (0, [])
    (tmp_path / "run_many.txt").write_text("")
    code, commands = call(fails="-m pytest", CODE="5")
    assert code == 0 and "--deselect" in commands[0]
    assert call(commit="another", BUDGET_S="10") == (1, [])


# The model of sm_100


def test_cycles_of_a_stage_by_hand():
    """128 x 256 MXFP8: four instructions of 128 cycles with 12 KiB of operands each, and three atoms of 512 bytes.

    A side of 32 rows is bound by what it reads.
    """
    wide, narrow = (sm100_model.step_cycles(Tile(MXFP8_E4M3, n, swap), 64) for n, swap in ((256, False), (32, True)))
    assert wide["MMA"] == pytest.approx(512, rel=0.01)
    assert (wide["shared memory"], wide["L2"]) == (4 * 12288 / 128, (49152 + 3 * 512) / 64)
    assert narrow["MMA"] < narrow["shared memory"] < narrow["L2"]


def test_the_model_is_never_faster_than_the_roof():
    for shape, T, found in sm100_model.estimates(MODELS, (1, 16, 128, 8192), 8):
        assert 0 < found.share <= 1, (shape, T, found)
        assert found.limit in ("MMA", "shared memory", "L2", "epilogue", "HBM", "fill and drain")


def test_the_model_counts_what_the_roofs_count():
    products = sm100_model.products_of(SHAPES["qwen3-30b"], 8192, 8, MXFP8_E4M3)
    load = Traffic(SHAPES["qwen3-30b"], testing.routing("balanced", num_ranks=8, T=8192, K=8, E=128)).load(
        0, dedup=True
    )
    works = forward_work(load) | backward_work(load)
    assert {p.name.lower().replace(" ", "_"): p.flops for p in products} == {
        name: work.flops for name, work in works.items() if work.flops
    }
    assert {p.op for p in sm100_model.products_of(SMOKE, 16, 2, NVFP4)} == {"forward"}


def test_the_page_shows_the_model():
    assert sm100_model.documented() in (ROOT / "docs" / "blackwell.md").read_text()

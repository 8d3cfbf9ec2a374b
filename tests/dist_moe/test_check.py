"""The self-test: it passes here, lists what it did not run, and fails for what is wrong."""

import importlib
import inspect
import json
import sys
from dataclasses import replace

import pytest
import torch

from dist_moe import check as self_test
from dist_moe import cli, registry
from dist_moe.check import FAIL, MODES, NOT_RUN, OK, cases_of, check, passed
from dist_moe.formats import FORMATS
from dist_moe.op_check import ROUNDED
from dist_moe.quantized import Bundle
from dist_moe.registry import FORMAT_OPS, FUSED_OP, IMPLS, OPS
from dist_moe.symm import Region
from dist_moe.testing import TOLERANCES

CPU = torch.device("cpu")


def assert_complete(rows) -> None:
    """Every row of the registry is in the answer, and what did not run says why."""
    for impl in IMPLS:
        own = [row.what for row in rows if row.backend == impl.backend]
        assert "every op" in own or any(impl.op in what.split(", ") for what in own), impl
    assert all(row.error for row in rows) and {row.verdict for row in rows} <= {OK, FAIL, NOT_RUN}


def test_the_reference_against_the_dense_layer():
    rows = check(CPU, "reference", 2)
    assert_complete(rows)
    paths = [row for row in rows if row.what == "path"]
    assert passed(rows) and all(row.verdict == OK for row in paths)
    for mode in MODES:
        for where in ("1 virtual rank(s)", "2 virtual rank(s)", "2 processes"):
            assert any(row.problem.startswith(f"{mode.name}, {where}") for row in paths), (mode.name, where)
    assert ("every op", "reference", "is the oracle itself") in {(row.what, row.backend, row.error) for row in rows}


def assert_kernels_pass(monkeypatch) -> dict[str, self_test.Row]:
    """On two virtual ranks; the kernels' rows by op."""
    monkeypatch.setattr(self_test, "_paths_on_processes", lambda *_: [])
    monkeypatch.setattr(self_test, "cases_of", lambda W, device: cases_of(W, device) if W == 2 else [])
    rows = check(CPU, None, 2)
    assert_complete(rows)
    assert passed(rows), [row for row in rows if row.verdict == FAIL]
    return {row.what: row for row in rows if row.backend == "triton" and row.what != "path" and row.verdict == OK}


@pytest.mark.interpreter
def test_every_kernel_against_its_oracle(monkeypatch):
    checked = assert_kernels_pass(monkeypatch)
    assert set(checked) == {*OPS, *FORMAT_OPS}
    silent = {op for op, row in checked.items() if row.error.startswith("wrote nothing")}
    assert silent == {"wait", "verify", "finish"}  # without a fault


@pytest.mark.interpreter
def test_a_kernel_of_expanded_columns_against_its_oracle(monkeypatch):
    """In training, where alone there are columns."""
    impls = [replace(impl, expanded=impl.op == "grouped_gemm_scaled_wgrad") for impl in IMPLS]
    monkeypatch.setattr(registry, "IMPLS", tuple(impls))
    monkeypatch.setattr(self_test, "MODES", [mode for mode in MODES if mode.name == "mxfp8"])
    monkeypatch.setattr(self_test, "FORMATS", [format for format in FORMATS if format.values_per_byte == 1])
    assert "grouped_gemm_scaled_wgrad" in assert_kernels_pass(monkeypatch)


def test_nothing_that_ran_is_not_a_pass(monkeypatch):
    monkeypatch.setattr("dist_moe.registry._triton_problem", lambda: "triton is not installed")
    rows = check(CPU, "triton")
    assert_complete(rows)
    assert not passed(rows) and {row.verdict for row in rows} == {NOT_RUN}
    assert any("triton is not installed" in row.error for row in rows if row.what == "path")


def test_every_rounded_argument_has_a_bar():
    assert set(ROUNDED) <= {*OPS, *FORMAT_OPS, FUSED_OP}
    assert all(bar in TOLERANCES for bars in ROUNDED.values() for bar in bars.values())


# What is wrong


@pytest.fixture
def run(monkeypatch, capsys, tmp_path, device):
    """run() -> exit code, rows; of one small case in one mode on the kernels."""
    monkeypatch.setattr(self_test, "_paths_on_processes", lambda *_: [])
    monkeypatch.setattr(self_test, "FORMATS", ())
    monkeypatch.setattr(self_test, "cases_of", lambda W, device: [self_test.Case("small", W=W, T=5, D=32, F=32, E=4)])

    def call(mode: str):
        monkeypatch.setattr(self_test, "MODES", [m for m in MODES if m.name == mode])
        file = tmp_path / "check.json"
        arguments = ["--ranks", "1", "--device", device.type, "--backend", "triton", "--json", str(file)]
        monkeypatch.setattr(sys, "argv", ["dist-moe", "check", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        answer, out = json.loads(file.read_text()), capsys.readouterr().out
        assert answer["passed"] == (end.value.code == 0) and answer["machine"]["packages"]["torch"]
        assert ("FAIL" in out) == (end.value.code == 1) and f"saved: {file}" in out
        return end.value.code, {row["what"]: row for row in answer["rows"] if row["verdict"] != NOT_RUN}

    return call


def zeros(out, before):
    out.zero_()


def nothing(out, before):
    out.copy_(before)


def a_row_of_zeros(out, before):
    out[len(out) // 2] = 0


def a_little(out, before):
    out.copy_((out.float() * 1.02).to(out.dtype))


BROKEN = [  # what of it is broken, and where that starts
    ("bf16", "dispatch.dispatch", "rows_XD", "start_1"),
    ("bf16", "grouped_gemm.grouped_gemm", "out_XN", "out_start_1"),
    ("bf16", "grouped_gemm.grouped_gemm_wgrad", "out_LNK", None),
    ("bf16", "swiglu.swiglu", "h2_XF", "h2_start_1"),
    ("bf16", "reduce.reduce", "out_TD", None),
    ("bf16 decode", "mega_forward.mega_forward", "h2_XF", "h2_start_1"),
    ("bf16 decode", "mega_forward.mega_forward", "outputs", None),
    ("mxfp8 inference", "grouped_gemm_scaled.grouped_gemm_scaled", "out_XN", "out_start_1"),
    ("mxfp8 inference", "swiglu_quantize.swiglu_quantize", "rows", None),
]


def written(given: dict, argument: str, start: str | None) -> torch.Tensor:
    """The rows of the call."""
    out, first_1 = given[argument], given.get(start)
    if isinstance(out, Region):
        return out.own
    if isinstance(out, Bundle):
        out, first_1 = out.values.view(torch.uint8), out.start_1
    if first_1 is None:
        return out
    row_start_P = given["plan"].row_start_P if "plan" in given else given["row_start_P"]
    return out[int(first_1) : int(first_1) + int(row_start_P[-1])]


@pytest.mark.parametrize("how", [zeros, nothing, a_row_of_zeros, a_little])
@pytest.mark.parametrize("mode, where, argument, start", BROKEN, ids=[" ".join(case[1:3]) for case in BROKEN])
def test_an_op_that_is_wrong_fails(run, monkeypatch, mode, where, argument, start, how):
    file, op = where.split(".")
    module = importlib.import_module(f"dist_moe.kernels_triton.{file}")
    good = getattr(module, op)

    def broken(*args, **options):
        out = written(inspect.signature(good).bind(*args, **options).arguments, argument, start)
        before = out.clone()
        good(*args, **options)
        how(out, before)

    monkeypatch.setattr(module, op, broken)
    code, rows = run(mode)
    assert code == 1 and rows[op]["verdict"] == FAIL, rows[op]


def test_an_op_that_raises_fails(run, monkeypatch):
    def raises(*args, **options):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("dist_moe.kernels_triton.swiglu.swiglu", raises)
    code, rows = run("bf16")
    assert code == 1 and rows["swiglu"]["verdict"] == rows["path"]["verdict"] == FAIL
    assert "no such instruction" in rows["swiglu"]["error"] and "swiglu raised" in rows["path"]["error"]


def test_what_is_right_passes(run):
    code, rows = run("bf16")
    assert code == 0 and {row["verdict"] for row in rows.values()} == {OK}

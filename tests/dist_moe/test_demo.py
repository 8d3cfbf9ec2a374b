"""The demo: its text, batches and model, its verdict, its processes, and all of it at a small size."""

import dataclasses
import importlib.util
import io
import json
import math
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from dist_moe import demo
from dist_moe.demo import model as demo_model
from dist_moe.demo import train as demo_train
from dist_moe.demo.model import ModelConfig, build_model, global_batch, on_one_rank, part_of_batch

SMALL = ModelConfig(num_layers=2, hidden_dim=32, intermediate_dim=32, num_heads=2, length=16)


@pytest.fixture
def job(tmp_path) -> demo_train.Job:
    """Two ranks of a small model, both in one process."""
    return demo_train.Job(
        name="test",
        model=SMALL,
        num_ranks=2,
        num_processes=1,
        num_sequences=12,
        length=16,
        steps=12,
        seconds=60.0,
        seed=0,
        device="cpu",
        backend="reference",
        precision="bf16",
        folder=str(tmp_path),
    )


# ---- text and batches


def test_the_text_is_english_and_long_enough():
    text = demo_model.load_text()
    assert text.dtype == torch.uint8 and text.numel() > 100_000
    assert b" the " in bytes(text.tolist())


def test_without_the_documentation_the_text_is_docstrings(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    text = demo_model.load_text()
    assert text.numel() > 100_000 and b" the " in bytes(text.tolist())


def test_docstrings_are_read_in_order(tmp_path):
    (tmp_path / "b.py").write_text('"""Third."""')
    (tmp_path / "a.py").write_text('"""First."""\ndef f():\n    """Second."""\n')
    assert demo_model.docstrings(tmp_path) == "First.\n\nSecond.\n\nThird."


def test_batches_depend_on_seed_and_step_alone():
    text = demo_model.load_text()

    def draw(seed, step):
        return global_batch(text, seed=seed, step=step, num_sequences=4, length=8)

    assert torch.equal(draw(0, 5), draw(0, 5))
    assert not torch.equal(draw(0, 5), draw(0, 6)) and not torch.equal(draw(0, 5), draw(1, 5))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_parts_of_all_ranks_are_the_global_batch(num_ranks):
    batch = global_batch(demo_model.load_text(), seed=0, step=0, num_sequences=demo.NUM_SEQUENCES, length=8)
    parts = [part_of_batch(batch, rank, num_ranks) for rank in range(num_ranks)]
    assert torch.equal(torch.cat(parts), batch) and len({part.shape for part in parts}) == 1


# ---- model


def test_a_later_byte_changes_no_earlier_logit():
    model, changed_at = build_model(SMALL, seed=0), 9
    inputs = torch.randint(256, (2, 16))
    other = inputs.clone()
    other[:, changed_at] = (other[:, changed_at] + 1) % 256
    logits, other_logits = (model(x, on_one_rank)[0] for x in (inputs, other))
    assert torch.equal(logits[:, :changed_at], other_logits[:, :changed_at])
    assert not torch.equal(logits[:, changed_at], other_logits[:, changed_at])


def test_the_ranks_hold_the_experts_of_the_whole_model_and_equal_dense_weights():
    whole, parts = build_model(SMALL, seed=3), [build_model(SMALL, seed=3, rank=r, num_ranks=2) for r in range(2)]
    for dense, *by_rank in zip(*(model.split_parameters()[0] for model in (whole, *parts)), strict=True):
        assert all(torch.equal(dense, weight) for weight in by_rank)
    for experts, *by_rank in zip(*(model.split_parameters()[1] for model in (whole, *parts)), strict=True):
        assert torch.equal(experts, torch.cat(by_rank))


def test_losses_of_the_parts_average_to_the_loss_of_the_batch():
    model, text = build_model(SMALL, seed=0), demo_model.load_text()
    batch = global_batch(text, seed=0, step=0, num_sequences=4, length=16)
    loss, balance, _ = model.loss(batch, on_one_rank)
    parts = [model.loss(part_of_batch(batch, rank, 2), on_one_rank) for rank in range(2)]
    torch.testing.assert_close(sum(part[0] for part in parts) / 2, loss)
    torch.testing.assert_close(sum(part[1] for part in parts) / 2, balance)


def test_given_expert_ids_replace_the_routers_choice():
    model, inputs = build_model(SMALL, seed=0), torch.randint(256, (2, 16))
    logits, _, ids = model(inputs, on_one_rank)
    assert torch.equal(model(inputs, on_one_rank, ids)[0], logits)
    assert not torch.equal(model(inputs, on_one_rank, [(layer + 1) % 8 for layer in ids])[0], logits)


# ---- training


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_virtual_ranks_train_as_the_oracle_does(job, num_ranks):
    model = dataclasses.replace(SMALL, num_experts=9 if num_ranks == 3 else 8)
    job = dataclasses.replace(job, model=model, num_ranks=num_ranks)
    sent = []
    trained = demo_train.train_on_ranks(0, job, sent.append)
    oracle = demo_train.train_by_oracle(0, dataclasses.replace(job, num_ranks=1), lambda message: None)
    assert trained["losses"] == pytest.approx(oracle["losses"], abs=2e-2)  # one other choice in a near tie: 5e-3
    assert trained["losses"][:3] == pytest.approx(oracle["losses"][:3], abs=1e-3)
    assert [message["loss"] for message in sent] == trained["losses"]
    assert trained["losses"][-1] < trained["losses"][0]
    num_rows = job.num_sequences * job.length * model.top_k
    assert [sum(layer) for layer in trained["rows"]] == pytest.approx([num_rows] * model.num_layers)
    assert set(trained["backends"].values()) == {"reference"}


def test_training_stops_when_its_time_is_over(job):
    result = demo_train.train_by_oracle(0, dataclasses.replace(job, seconds=1e-9, num_ranks=1), lambda message: None)
    assert len(result["losses"]) == 1


def test_the_held_out_text_is_not_trained_on():
    text, (training, held_out) = demo_model.load_text(), demo_model.split_text()
    assert torch.equal(torch.cat([training, held_out]), text) and len(held_out) == demo_model.HELD_OUT_BYTES


def _in_this_process(target, job, on_message, **_):
    return [target(0, job, on_message)]


def test_training_in_mxfp8_and_serving_what_came_out(job, monkeypatch):
    job = dataclasses.replace(job, steps=4)
    monkeypatch.setattr(demo, "run_processes", _in_this_process)
    monkeypatch.setattr(demo_train, "HELD_OUT_BATCHES", 1)
    printed, drawn = io.StringIO(), {}
    monkeypatch.setattr(demo, "_picture", lambda job, results, curves, *_: drawn.update(curves))
    results = demo._run(demo.Options(precision="mxfp8", triton=False), job, Console(file=printed))
    figures = results["mxfp8"]
    assert results["failures"] == [] and figures["steps"] == job.steps
    assert figures["last_loss"] != figures["bf16_last_loss"] < results["first_loss"]
    losses = figures["held_out_losses"]
    assert list(losses) == ["bf16", "mxfp8", "nvfp4"] and len(set(losses.values())) == 3
    text = printed.getvalue()
    assert "training on 2 ranks in mxfp8" in text and "nvfp4" in text
    assert list(drawn) == ["oracle", "ranks", "mxfp8"] and all(len(curve) == job.steps for curve in drawn.values())
    assert drawn["mxfp8"] != drawn["ranks"]
    for name, beside in (("ranks", "oracle"), ("mxfp8", "ranks")):
        for step, (loss, other) in enumerate(zip(drawn[name], drawn[beside], strict=True)):
            assert f"  {step:4d} {loss:10.4f} {other:10.4f} " in text


CURVES = {"oracle": [5.0, 4.0, 3.0], "ranks": [5.0, 4.0, 3.1], "mxfp8": [5.0, 4.2, 3.3]}


@pytest.mark.matplotlib
@pytest.mark.parametrize("names", [("oracle", "ranks"), ("oracle", "ranks", "mxfp8")], ids=len)
def test_the_picture_shows_every_curve_in_its_colour(names, tmp_path):
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    from dist_moe.demo import picture

    out = tmp_path / "demo.png"
    picture.draw(out, {name: CURVES[name] for name in names}, [[3.0, 5.0], [4.0, 4.0]], "2 ranks", 2)
    assert out.read_bytes().startswith(b"\x89PNG")
    pixels = torch.from_numpy(imread(out)[:, :, :3])
    height, width, _ = pixels.shape
    assert width > height > 300
    left = pixels[:, : width // 2]  # the losses; the load of the experts is on the right
    for name, color in (("oracle", picture.ORACLE), ("ranks", picture.RANKS), ("mxfp8", picture.MXFP8)):
        found = (left - torch.tensor(to_rgb(color))).abs().amax(dim=2) < 0.01
        assert (found.sum() > 50) == (name in names), name


# ---- verdict


def _verdict(job, losses, oracle) -> list[str]:
    figures = {"rows": [[1.0]], "seconds_per_step": 0.1, "backends": {}}
    return demo._compare(job, figures | {"losses": losses}, figures | {"losses": oracle})["failures"]


FALLING = [5.0 * 0.98**step + 1.0 for step in range(150)]


@pytest.mark.parametrize(
    ("losses", "oracle", "words"),
    [
        (FALLING, FALLING, []),
        (FALLING[:20], FALLING, []),  # a short run only has to fall
        ([5.0] * 20, [5.0] * 20, ["expected to fall"]),
        (FALLING[:110], FALLING[:110], []),
        ([loss + 2.0 for loss in FALLING], [loss + 2.0 for loss in FALLING], ["expected below 2.5"]),
        ([*FALLING[:5], FALLING[5] + 0.1, *FALLING[6:]], FALLING, ["in the first 10 steps"]),
        ([*FALLING[:-10], *[loss + 0.1 for loss in FALLING[-10:]]], FALLING, ["in the last 10 steps"]),
        ([*FALLING[:-1], math.nan], FALLING, ["expected below 2.5", "in the last 10 steps"]),
    ],
)
def test_what_the_demo_accepts(job, losses, oracle, words):
    failures = _verdict(job, losses, oracle)
    assert len(failures) == len(words) and all(word in failure for word, failure in zip(words, failures, strict=True))


MXFP8_HELD_OUT = {"bf16": 2.0, "mxfp8": 2.001, "nvfp4": 2.02}


@pytest.mark.parametrize(
    ("factor", "held_out", "words"),
    [
        (1.009, {}, []),
        (0.991, {"mxfp8": 1.9, "nvfp4": 1.9}, []),
        (1.011, {}, ["in the last 10 steps the loss in MXFP8 differs by +1.10%"]),
        (0.989, {}, ["in the last 10 steps the loss in MXFP8 differs by -1.10%"]),
        (math.nan, {}, ["in the last 10 steps"]),
        (1.0, {"mxfp8": 2.03, "nvfp4": 2.2}, ["served in mxfp8", "served in nvfp4"]),
        (1.0, {"nvfp4": math.nan}, ["served in nvfp4"]),
    ],
)
def test_what_the_demo_accepts_of_mxfp8(factor, held_out, words):
    failures, losses = [], FALLING[:110]  # it may have had time for fewer steps than bf16
    trained = {"losses": [factor * loss for loss in losses], "seconds_per_step": 0.1}
    figures = demo._compare_mxfp8(trained, {"losses": FALLING}, MXFP8_HELD_OUT | held_out, failures)
    assert figures["steps"] == 110 and figures["bf16_last_loss"] == pytest.approx(sum(losses[-10:]) / 10)
    assert len(failures) == len(words) and all(word in failure for word, failure in zip(words, failures, strict=True))


def _result_with(*failures):
    return lambda *_: {"failures": list(failures)}


def _process_that_dies(*_):
    raise demo.DemoFailed("rank 1: died with exit code 7")


@pytest.mark.parametrize(
    ("outcome", "code"), [(_result_with(), 0), (_result_with("the losses parted"), 1), (_process_that_dies, 1)]
)
def test_exit_codes(monkeypatch, capsys, outcome, code):
    monkeypatch.setattr(demo, "_run", outcome)
    assert demo.run_demo(demo.Options(json=True)) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] == (code == 0) and bool(printed["failures"]) == (code != 0)


def test_the_check_counts_equal_bits_as_a_number():
    record = {"rows_db": math.inf, "loss": 1.0, "reference_loss": 1.5, "gradients_db": 40.0, "parameter": "head"}
    figures = demo._check_figures([record, record | {"gradients_db": math.inf}])
    assert (figures["rows_db"], figures["gradients_db"], figures["loss_difference"]) == (demo.EQUAL_DB, 40.0, 0.5)


# ---- processes


@pytest.fixture
def targets(tmp_path, monkeypatch):
    """A module that the processes can import too."""
    (tmp_path / "demo_targets.py").write_text(
        "import os, time\n"
        "def works(rank, job, send):\n"
        "    send({'rank': rank})\n"
        "    return {'rank': rank, 'interpret': os.environ['TRITON_INTERPRET']}\n"
        "def raises(rank, job, send):\n"
        "    if rank == 1:\n"
        "        raise KeyError('a key of rank 1')\n"
        "    time.sleep(60)\n"
        "def dies(rank, job, send):\n"
        "    if rank == 1:\n"
        "        os._exit(7)\n"
        "    time.sleep(60)\n"
        "def hangs(rank, job, send):\n"
        "    time.sleep(60)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import demo_targets

    yield demo_targets
    sys.modules.pop("demo_targets")


def test_processes_give_back_results_by_rank_and_what_they_send(job, targets):
    sent = []
    job = dataclasses.replace(job, num_processes=2)
    results = demo.run_processes(targets.works, job, sent.append, interpret=True)
    assert [result["rank"] for result in results] == [0, 1]
    assert sorted(message["rank"] for message in sent) == [0, 1]
    assert {result["interpret"] for result in results} == {"1"}


@pytest.mark.parametrize(
    ("target", "words"), [("raises", "KeyError: 'a key of rank 1'"), ("dies", "rank 1: died with exit code 7")]
)
def test_a_process_that_fails_ends_the_run(job, targets, monkeypatch, target, words):
    monkeypatch.setattr(demo, "LAST_WORDS_S", 0.2)
    with pytest.raises(demo.DemoFailed, match=words) as failure:
        demo.run_processes(getattr(targets, target), dataclasses.replace(job, num_processes=2), print)
    assert "rank 0: did not finish" in str(failure.value)


def test_a_process_that_hangs_ends_the_run(job, targets, monkeypatch):
    monkeypatch.setattr(demo, "JOIN_TIMEOUT_S", 0.5)
    with pytest.raises(demo.DemoFailed, match="rank 0: did not finish"):
        demo.run_processes(targets.hangs, dataclasses.replace(job, seconds=0.1), print)


# ---- all of it


def _run_demo(*arguments: str) -> tuple[dict, str]:
    command = [sys.executable, "-m", "dist_moe", "demo", "--device", "cpu", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_two_processes_end_to_end(tmp_path):
    picture = tmp_path / "demo.png"
    results, text = _run_demo("--steps", "3", "--out", str(picture))
    assert results["ok"] and results["failures"] == []
    assert (results["ranks"], results["processes"], results["steps"]) == (2, 2, 3)
    assert set(results["backends"].values()) == {"reference"}
    assert results["triton"]["rows_db"] >= demo.CHECK_ROWS_DB
    assert "interpreted" in text and "4 experts a rank" in text
    if importlib.util.find_spec("matplotlib") is None:
        assert results["picture"] is None and "no picture: matplotlib is not installed" in text
    else:
        assert results["picture"] == str(picture) and picture.read_bytes().startswith(b"\x89PNG")

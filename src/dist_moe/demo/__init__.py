"""The demo: train a small MoE language model on several ranks, beside the same model on one rank by the oracle.

It starts its processes itself, prints what runs where and how the two losses fall, draws a picture, and on a CPU ends
with some steps on interpreted Triton kernels. With --precision mxfp8 the same model also trains in MXFP8, and what came
out is served in BF16, MXFP8 and NVFP4. It fails when the loss does not fall, when losses part, or when the kernels miss
the bars of the library's tests.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..testing import TOLERANCES
from .model import ModelConfig, build_model, load_text
from .train import CHECK_STEPS, Job, check_triton, serve_on_ranks, train_by_oracle, train_on_ranks

NUM_EXPERTS = 8  # at least; divisible by the number of ranks
NUM_SEQUENCES = 12  # divisible by 1, 2, 3 and 4 ranks
MAX_RANKS = 4
NUM_LINES = 15  # of the table of losses
SECONDS = {"bf16": 60.0, "mxfp8": 300.0}  # that a training run may take; the oracle's MXFP8 is slow

# What the demo asks for. Both losses are compared as means of EDGE_STEPS steps at the start and at the end.
EDGE_STEPS = 10
LOSS_MUST_REACH, FROM_STEPS = 2.5, 100  # nats a byte; a shorter run only has to fall
FIRST_DIFFERENCE, LAST_DIFFERENCE = 0.02, 0.05
MXFP8_LAST_DIFFERENCE = 0.01  # of the loss in BF16, as all that follow
HELD_OUT_DIFFERENCE = {"mxfp8": 0.01, "nvfp4": 0.02}
CHECK_ROWS_DB = TOLERANCES["path"].rows_db
CHECK_GRADIENTS_DB, CHECK_LOSS = 35.0, 0.002
CHECK_LENGTH = 32  # bytes of a sequence, one a rank: the interpreter is slow
EQUAL_DB = 999.0

JOIN_TIMEOUT_S = 300.0  # for processes to start, build kernels and finish, on top of the time they may train
LAST_WORDS_S = 3.0  # for the other ranks' tracebacks, after the first


@dataclass(frozen=True)
class Options:
    """What the command line sets. device None: the GPU if there is one; seconds None: SECONDS of the precision."""

    steps: int = 240
    seconds: float | None = None
    ranks: int = 2
    device: str | None = None
    backend: str | None = None
    precision: str = "bf16"
    out: Path = Path("dist_moe_demo.png")
    seed: int = 0
    triton: bool = True
    json: bool = False

    def __post_init__(self):
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"demo: --ranks must be 1 to {MAX_RANKS}, got {self.ranks}")
        if self.steps < 2:
            raise ValueError(f"demo: --steps must be at least 2, a loss cannot fall in fewer, got {self.steps}")
        if self.precision not in SECONDS:
            raise ValueError(f"demo: --precision must be bf16 or mxfp8, got {self.precision!r}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"demo: --seconds must be positive, got {self.seconds:g}")
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f"demo: --device must be cpu or cuda, got {self.device!r}")
        if self.backend not in (None, "triton", "reference"):
            raise ValueError(f"demo: --backend must be triton or reference, got {self.backend!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("demo: --device cuda, but CUDA is not available here; leave it out to run on the CPU")
        if not self.out.absolute().parent.is_dir():
            raise ValueError(f"demo: the folder of --out {self.out} does not exist")


class DemoFailed(Exception):
    """A process of the demo died or did not finish; the text says which, with its traceback."""


def run_demo(options: Options) -> int:
    """Run it all; the exit code is 0 when everything held."""
    started = time.perf_counter()
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    try:
        with tempfile.TemporaryDirectory(prefix="dist_moe_demo_") as folder:
            results = _run(options, _plan(options, folder), console)
    except DemoFailed as failure:
        console.print(f"FAILED: {failure}", style="bold red", markup=False)
        results = {"failures": [str(failure)]}
    results["total_seconds"] = round(time.perf_counter() - started, 1)
    results["ok"] = not results["failures"]
    console.print(f"\n{results['total_seconds']:.0f} s in all: " + ("everything held" if results["ok"] else "FAILED"))
    if options.json:
        print(json.dumps(results))
    return 0 if results["ok"] else 1


def _plan(options: Options, folder: str) -> Job:
    """The training run on ranks: one process a rank, or one GPU for all of them."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    enough = device == "cpu" or torch.cuda.device_count() >= options.ranks
    return Job(
        name="ranks",
        model=ModelConfig(num_experts=math.ceil(NUM_EXPERTS / options.ranks) * options.ranks),
        num_ranks=options.ranks,
        num_processes=options.ranks if enough else 1,
        num_sequences=NUM_SEQUENCES,
        length=ModelConfig.length,
        steps=options.steps,
        seconds=SECONDS[options.precision] if options.seconds is None else options.seconds,
        seed=options.seed,
        device=device,
        backend=options.backend,
        precision="bf16",
        folder=folder,
    )


def _run(options: Options, job: Job, console: Console) -> dict:
    _print_plan(job, console)
    alone = dataclasses.replace(job, name="oracle", num_ranks=1, num_processes=1, backend=None)
    console.print("\ntraining on one rank, by the oracle ...")
    with _progress(console, "one rank, by the oracle", job.steps) as advance:
        (oracle,) = run_processes(train_by_oracle, alone, lambda message: advance())

    # The oracle may have run out of time: then the ranks do as many steps.
    job = dataclasses.replace(job, steps=len(oracle["losses"]))
    trained = _train_beside(job, (_ranks(job), "oracle"), oracle["losses"], console)
    results = _compare(job, trained, oracle)
    _print_results(job, results, console)
    curves = {"oracle": oracle["losses"], "ranks": trained["losses"]}
    if options.precision == "mxfp8":
        again = dataclasses.replace(job, name="mxfp8", precision="mxfp8", steps=len(trained["losses"]))
        in_mxfp8 = _train_beside(again, ("mxfp8", "bf16"), trained["losses"], console)
        held_out = run_processes(serve_on_ranks, dataclasses.replace(job, name="service"), lambda message: None)[0]
        results["mxfp8"] = _compare_mxfp8(in_mxfp8, trained, held_out, results["failures"])
        _print_mxfp8(results["mxfp8"], console)
        curves["mxfp8"] = in_mxfp8["losses"]
    results["picture"] = _picture(job, results, curves, console, options.out)
    results["triton"] = _check(options, job, results["failures"], console)
    for failure in results["failures"]:
        console.print(f"FAILED: {failure}", style="bold red", markup=False)
    return results


def _train_beside(job: Job, names: tuple[str, str], expected: list[float], console: Console) -> dict:
    """Train on ranks, printing the losses beside those of an earlier run of as many steps."""
    console.print(f"\ntraining on {_ranks(job)} in {job.precision}; loss in nats a byte")
    console.print(f"  step {names[0]:>10} {names[1]:>10}   difference   ms a step")
    with _progress(console, names[0], job.steps) as advance:

        def show(message: dict) -> None:
            advance()
            step, loss, wanted = message["step"], message["loss"], expected[message["step"]]
            if step % max(1, math.ceil(job.steps / NUM_LINES)) == 0 or step == job.steps - 1:
                milliseconds = 1000 * message["seconds"]
                console.print(f"  {step:4d} {loss:10.4f} {wanted:10.4f} {loss - wanted:+12.4f} {milliseconds:11.0f}")

        return run_processes(train_on_ranks, job, show)[0]


def _compare(job: Job, trained: dict, oracle: dict) -> dict:
    """The figures of both runs, and what of them is not as it should be."""
    losses, expected = trained["losses"], oracle["losses"][: len(trained["losses"])]
    num_steps, edge = len(losses), min(EDGE_STEPS, len(losses) // 2)
    first, last = sum(losses[:edge]) / edge, sum(losses[-edge:]) / edge
    first_difference = max(abs(a - b) for a, b in zip(losses[:edge], expected[:edge], strict=True))
    last_difference = abs(last - sum(expected[-edge:]) / edge)

    failures = []
    if not last < (LOSS_MUST_REACH if num_steps >= FROM_STEPS else first):
        wanted = f"below {LOSS_MUST_REACH}" if num_steps >= FROM_STEPS else "to fall"
        failures.append(f"the loss went from {first:.3f} to {last:.3f} in {num_steps} steps, it was expected {wanted}")
    # A difference that is not a number fails too.
    if not first_difference <= FIRST_DIFFERENCE:
        failures.append(f"in the first {edge} steps the losses differ by {first_difference:.4f} (> {FIRST_DIFFERENCE})")
    if not last_difference <= LAST_DIFFERENCE:
        failures.append(f"in the last {edge} steps the losses differ by {last_difference:.4f} (> {LAST_DIFFERENCE})")
    return {
        "device": job.device,
        "ranks": job.num_ranks,
        "processes": job.num_processes,
        "backends": trained["backends"],
        "steps": num_steps,
        "first_loss": losses[0],
        "last_loss": last,
        "oracle_last_loss": sum(expected[-edge:]) / edge,
        "edge_steps": edge,
        "first_difference": first_difference,
        "last_difference": last_difference,
        "rows_per_expert": [[round(rows, 1) for rows in layer] for layer in trained["rows"]],
        "seconds_per_step": trained["seconds_per_step"],
        "oracle_seconds_per_step": oracle["seconds_per_step"],
        "failures": failures,
    }


def _compare_mxfp8(trained: dict, in_bf16: dict, held_out: dict[str, float], failures: list[str]) -> dict:
    """The figures of training in MXFP8 and of serving what came of it; differences are shares of the loss in BF16."""
    num_steps, edge = len(trained["losses"]), min(EDGE_STEPS, len(trained["losses"]) // 2)
    last, wanted = (sum(run["losses"][num_steps - edge : num_steps]) / edge for run in (trained, in_bf16))
    difference = last / wanted - 1
    served = {precision: held_out[precision] / held_out["bf16"] - 1 for precision in HELD_OUT_DIFFERENCE}
    if not abs(difference) <= MXFP8_LAST_DIFFERENCE:
        failures.append(
            f"in the last {edge} steps the loss in MXFP8 differs by {difference:+.2%} (> {MXFP8_LAST_DIFFERENCE:.0%})"
        )
    for precision, bar in HELD_OUT_DIFFERENCE.items():
        if not served[precision] <= bar:
            failures.append(f"served in {precision} the held-out loss is {served[precision]:+.2%} higher (> {bar:.0%})")
    return {
        "steps": num_steps,
        "last_loss": last,
        "bf16_last_loss": wanted,
        "last_difference": difference,
        "seconds_per_step": trained["seconds_per_step"],
        "held_out_losses": held_out,
        "held_out_differences": served,
    }


def _check(options: Options, job: Job, failures: list[str], console: Console) -> dict | None:
    """Steps on interpreted Triton kernels beside the reference backend; None where they do not apply."""
    if not options.triton or job.device != "cpu":
        return None
    missing = [name for name in ("triton", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        console.print(f"\nTriton kernels were not checked: {' and '.join(missing)} not installed")
        return None
    console.print(
        f"\nTriton kernels, interpreted: {CHECK_STEPS} steps beside the reference backend, from the trained weights\n"
        "  step   triton   reference   worst output row   worst gradient"
    )
    small = dataclasses.replace(job, name="check", steps=CHECK_STEPS, num_sequences=job.num_ranks, length=CHECK_LENGTH)
    by_rank = [result["records"] for result in run_processes(check_triton, small, lambda message: None, interpret=True)]
    for step, records in enumerate(zip(*by_rank, strict=True)):
        rows_db, gradients_db = (min(record[key] for record in records) for key in ("rows_db", "gradients_db"))
        console.print(
            f"  {step:4d} {records[0]['loss']:8.4f}  {records[0]['reference_loss']:10.4f}"
            f" {_decibels(rows_db):>18} {_decibels(gradients_db):>16}"
        )
    figures = _check_figures([record for records in by_rank for record in records])
    gradients = f"{_decibels(figures['gradients_db'])} (at least {CHECK_GRADIENTS_DB:g}): {figures['parameter']}"
    console.print(
        f"  worst row of the layers' outputs {_decibels(figures['rows_db'])} (at least {CHECK_ROWS_DB:g})\n"
        f"  worst gradient {gradients}\n"
        f"  largest difference of the loss {figures['loss_difference']:.1e} (at most {CHECK_LOSS:g})"
    )
    if not figures["rows_db"] >= CHECK_ROWS_DB:
        failures.append(f"Triton kernels: an output row is at {figures['rows_db']:.1f} dB (< {CHECK_ROWS_DB:g})")
    if not figures["gradients_db"] >= CHECK_GRADIENTS_DB:
        failures.append(f"Triton kernels: a gradient is at {figures['gradients_db']:.1f} dB (< {CHECK_GRADIENTS_DB:g})")
    if not figures["loss_difference"] <= CHECK_LOSS:
        failures.append(f"Triton kernels: the loss differs by {figures['loss_difference']:.1e} (> {CHECK_LOSS:g})")
    return figures


def _check_figures(records: list[dict]) -> dict:
    """The worst of all steps and ranks. Equal bits are infinitely many dB, which JSON has no word for: EQUAL_DB."""
    worst = min(records, key=lambda record: record["gradients_db"])
    return {
        "steps": CHECK_STEPS,
        "rows_db": min(EQUAL_DB, *(record["rows_db"] for record in records)),
        "gradients_db": min(EQUAL_DB, worst["gradients_db"]),
        "parameter": worst["parameter"],
        "loss_difference": max(abs(record["loss"] - record["reference_loss"]) for record in records),
    }


# ---- what people see -------------------------------------------------------------------------------------------------


def _ranks(job: Job) -> str:
    return "1 rank" if job.num_ranks == 1 else f"{job.num_ranks} ranks"


def _decibels(value: float) -> str:
    return "equal bits" if value >= EQUAL_DB else f"{value:.1f} dB"


def _print_plan(job: Job, console: Console) -> None:
    model = job.model
    num_parameters = sum(weight.numel() for weight in build_model(model, seed=job.seed).parameters())
    if job.is_virtual:
        where = f"{job.num_ranks} virtual ranks on one GPU"
    elif job.num_processes == 1:
        where = "1 process"
    else:
        kind = "GPU processes (nccl)" if job.device == "cuda" else "CPU processes (gloo)"
        where = f"{job.num_processes} {kind}, {_num_threads(job)} thread(s) each"
    console.print("dist_moe demo: a mixture-of-experts language model", style="bold")
    console.print(f"  hardware  {_hardware(job.device)}; torch {torch.__version__}, Python {platform.python_version()}")
    console.print(f"  ranks     {where}; {model.num_experts // job.num_ranks} experts a rank")
    console.print(
        f"  model     {num_parameters / 1e6:.2f} M parameters: {model.num_layers} layers of attention and top "
        f"{model.top_k} of {model.num_experts} experts in bf16, D {model.hidden_dim}, F {model.intermediate_dim}"
    )
    console.print(
        f"  text      {load_text().numel():,} bytes of Python's own documentation; "
        f"{job.num_sequences} sequences of {job.length} bytes a step"
    )


def _hardware(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    names = [platform.processor() or platform.machine()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")] or names
    return f"{names[0]}, {_num_cores()} cores"


def _print_results(job: Job, results: dict, console: Console) -> None:
    how = " (interpreted)" if job.device == "cpu" else ""
    for backend in sorted(set(results["backends"].values())):
        ops = [op for op, chosen in results["backends"].items() if chosen == backend]
        console.print(f"\nbackend {backend}{how if backend == 'triton' else ''}: {', '.join(ops)}", soft_wrap=False)
    console.print(
        f"loss {results['first_loss']:.3f} -> {results['last_loss']:.3f}, oracle {results['oracle_last_loss']:.3f} "
        f"(mean of the last {results['edge_steps']} steps)"
    )
    console.print(
        f"largest difference in the first {results['edge_steps']} steps {results['first_difference']:.5f}, "
        f"at the end {results['last_difference']:.5f}"
    )
    console.print(
        f"median step {1000 * results['seconds_per_step']:.0f} ms on {_ranks(job)}, "
        f"{1000 * results['oracle_seconds_per_step']:.0f} ms by the oracle"
    )
    experts_per_rank = job.model.num_experts // job.num_ranks
    console.print("rows per expert, mean of a step (| divides ranks)")
    for layer, rows in enumerate(results["rows_per_expert"]):
        by_rank = [rows[i : i + experts_per_rank] for i in range(0, len(rows), experts_per_rank)]
        console.print(f"  layer {layer}  " + "  |".join("".join(f"{value:6.0f}" for value in part) for part in by_rank))


def _print_mxfp8(figures: dict, console: Console) -> None:
    console.print(
        f"\nmxfp8: loss {figures['last_loss']:.3f}, bf16 {figures['bf16_last_loss']:.3f} at the end, "
        f"{figures['last_difference']:+.2%} (at most {MXFP8_LAST_DIFFERENCE:.0%}); "
        f"median step {1000 * figures['seconds_per_step']:.0f} ms"
    )
    console.print("the weights of mxfp8 in service, on text that no step has seen")
    for precision, loss in figures["held_out_losses"].items():
        bar = HELD_OUT_DIFFERENCE.get(precision)
        beside = "" if bar is None else f"  {figures['held_out_differences'][precision]:+.2%} (at most {bar:.0%})"
        console.print(f"  {precision:<5} {loss:8.4f}{beside}")


@contextlib.contextmanager
def _progress(console: Console, name: str, num_steps: int) -> Iterator[Callable[[], None]]:
    """A bar while it lasts, on a terminal; enters as a function that advances it by one step."""
    columns = (TextColumn(f"  {name}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=num_steps)
        yield lambda: progress.advance(task)


def _picture(job: Job, results: dict, curves: dict[str, list[float]], console: Console, out: Path) -> str | None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no picture: matplotlib is not installed (pip install 'dist-moe-triton[demo]')")
        return None
    from .picture import draw

    draw(out, curves, results["rows_per_expert"], _ranks(job), job.num_ranks)
    console.print(f"picture: {out}")
    return str(out)


# ---- processes -------------------------------------------------------------------------------------------------------


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_threads(job: Job) -> int:
    return max(1, _num_cores() // job.num_processes)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """What processes that are started inside inherit: some of it is read when they import torch and triton."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_processes(
    target: Callable, job: Job, on_message: Callable[[dict], None], *, interpret: bool | None = None
) -> list[dict]:
    """target(rank, job, send) in every process of the job; what they return, by rank.

    Args:    on_message: called with what they send.
             interpret: run Triton kernels interpreted; default: on a CPU, where that backend is named.
    Raises:  DemoFailed with the tracebacks when one raises, dies or is late; none is left running.
    """
    if interpret is None:
        interpret = job.device == "cpu" and job.backend == "triton"
    environment = {
        "OMP_NUM_THREADS": str(_num_threads(job)),
        "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads leave their core to the other ranks
        "TRITON_INTERPRET": str(int(interpret)),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"),
    }
    context = multiprocessing.get_context("spawn")
    pipes: dict[Connection, int] = {}
    processes = []
    try:
        with _environment(environment):
            for rank in range(job.num_processes):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(target, rank, job, theirs), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes[ours] = rank
        return _collect(pipes, processes, job, on_message)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: dict[Connection, int], processes: list, job: Job, on_message: Callable[[dict], None]) -> list[dict]:
    results, failures = {}, {}
    deadline = time.monotonic() + job.seconds + JOIN_TIMEOUT_S
    while pipes:
        ready = wait(pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes[pipe]
            try:
                kind, value = pipe.recv()
            except EOFError:
                processes[rank].join(LAST_WORDS_S)
                kind, value = "failed", f"died with exit code {processes[rank].exitcode}"
            if kind == "message":
                on_message(value)
                continue
            del pipes[pipe]
            if kind == "returned":
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
    if failures or pipes:
        late = dict.fromkeys(pipes.values(), "did not finish")
        words = [f"---- rank {rank}: {text}" for rank, text in sorted({**late, **failures}.items())]
        raise DemoFailed(f"run {job.name!r} of {job.num_processes} process(es)\n" + "\n".join(words))
    return [results[rank] for rank in range(job.num_processes)]


def _child(target: Callable, rank: int, job: Job, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    try:
        pipe.send(("returned", target(rank, job, lambda message: pipe.send(("message", message)))))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("failed", traceback.format_exc()))
        os._exit(1)

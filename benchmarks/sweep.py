"""A sweep over models, tokens, routings, precisions and directions, ours beside its peers: python -m dist_moe bench.

    python -m dist_moe bench --smoke                                             tiny, two processes on the CPU
    python -m dist_moe bench --models qwen3-30b mixtral-8x7b --routings uniform zipf:1 hot-rank:2 --out results
    python -m dist_moe bench --virtual 2 --precisions bf16 mxfp8 nvfp4           two ranks on one GPU
    python -m dist_moe bench --model 4096,1536,128,8 --routings file:ids.pt      a model and routing of your own
    python -m dist_moe bench --plot results                                      draw again

It starts one process a GPU; under torchrun it is one of those that torchrun started. Rows that are in --out are not
measured again.
"""

import argparse
import importlib.util
import itertools
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

import dist_moe
from dist_moe.doctor import checkout_commit

from . import launch, outputs, peers
from .bench_formats import FORMATS
from .cases import Case
from .launch import Job
from .ours import BOTH, DIRECTIONS, INFERENCE
from .record import Rows, machine
from .roofs import Roofs, measure_roofs
from .routings import NAMES, parse
from .shapes import SHAPES, SMOKE, Shape

SMOKE_RANKS, SMOKE_ROUTINGS = 2, ["uniform", "hot-rank:1.5"]
SMOKE_TOKENS = 64  # fewer values have relative errors that scatter past the bars of block-scaled formats
PIPE_WIDTH = 150  # of a table that no terminal shows, so that no line of it breaks


def _parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="dist-moe bench",
        usage="%(prog)s [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = options.add_argument
    names = [name for name in SHAPES if name != SMOKE.name]
    add("--models", nargs="+", metavar="NAME", default=[], help=f"default: qwen3-30b; known are {', '.join(names)}")
    add("--model", nargs="+", metavar="D,F,E,K", default=[], help="sizes of models that have no name here")
    add("--tokens", nargs="+", type=int, metavar="T", default=[8192], help="of one rank; default: 8192")
    add("--ep", type=int, metavar="N", help="ranks, one process and one GPU each; default: all GPUs")
    add("--virtual", type=int, metavar="N", help="instead: this many ranks in one process on one GPU")
    add("--precisions", nargs="+", choices=("bf16", *FORMATS), default=["bf16"], help="default: bf16")
    add("--directions", nargs="+", choices=DIRECTIONS, default=[INFERENCE, BOTH], help=f"default: {INFERENCE} {BOTH}")
    file = "a .pt or .npy of one integer tensor [ranks, T, K], -1 for no expert"
    add("--routings", nargs="+", metavar="R", help=f"{', '.join(NAMES)} ({file}); default: uniform")
    known = [peer.name for peer in peers.PEERS]
    add("--peers", nargs="*", choices=known, default=known, help="default: all that are installed")
    add("--rounds", type=int, default=20, help="each times every method once; default: 20")
    add("--backend", help="of our ops; default: the best that runs")
    clocks = "instead of rows: when each launch of a replayed graph ran, by clocks that kernels write, and its picture"
    add("--clocks", action="store_true", help=clocks)
    add("--smoke", action="store_true", help="tiny, on the CPU, whatever --tokens and --rounds say")
    add("--out", type=Path, default=Path("dist_moe_bench"), metavar="DIR", help="default: %(default)s")
    add("--plot", type=Path, metavar="DIR", help="measure nothing, draw the pictures of this folder")
    return options


def _custom(text: str) -> Shape:
    try:
        D, F, E, K = map(int, text.split(","))
    except ValueError:
        raise ValueError(f"--model wants D,F,E,K as whole numbers, got {text!r}") from None
    if min(D, F, E, K) < 1 or D % 32 or F % 32 or K > E:
        raise ValueError(f"--model {text}: D and F are multiples of 32, and K is at most E")
    return Shape(f"D{D}-F{F}-E{E}-K{K}", D, F, E, K)


def _known(name: str) -> Shape:
    if name not in SHAPES:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(SHAPES)}; --model D,F,E,K takes any")
    return SHAPES[name]


def read_options(argv: list[str]) -> argparse.Namespace:
    """The options with shapes and routings in place of their names. Raises ValueError for what cannot be run."""
    options = _parser().parse_args(argv)
    if options.plot is not None:
        return options
    if options.ep is not None and options.virtual is not None:
        raise ValueError("--ep and --virtual both say how many ranks there are; give one")
    if options.clocks and options.smoke:
        raise ValueError("--clocks are those of a GPU's kernels; --smoke runs on the CPU")
    if options.smoke:
        options.tokens, options.rounds = [SMOKE_TOKENS], 1
        options.models = options.models or ([] if options.model else [SMOKE.name])
    elif not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; --smoke tries everything on the CPU")
    shapes = [*map(_known, options.models), *map(_custom, options.model)]
    options.shapes = shapes or [SHAPES["qwen3-30b"]]
    options.routings = [*map(parse, options.routings or (SMOKE_ROUTINGS if options.smoke else ["uniform"]))]
    options.W = _number_of_ranks(options)
    if min(options.W, options.rounds, *options.tokens) < 1:
        raise ValueError("ranks, --tokens and --rounds must be at least 1")
    for shape in options.shapes:
        if shape.E % options.W:
            raise ValueError(f"the {shape.E} experts of {shape.name} cannot be shared by {options.W} ranks")
        for routing in options.routings:
            routing.check(shape, options.W)
    options.commit = checkout_commit() or f"v{dist_moe.__version__}"
    options.command = " ".join(["python -m dist_moe bench", *argv])
    options.results = options.out
    return options


def _number_of_ranks(options: argparse.Namespace) -> int:
    if options.virtual is not None:
        return options.virtual
    if launch.under_torchrun():
        started = launch.number_started()
        if options.ep not in (None, started):
            raise ValueError(f"--ep {options.ep}, but torchrun started {started} processes")
        return started
    if options.smoke:
        return options.ep or SMOKE_RANKS
    there = torch.cuda.device_count()
    if options.ep is not None and options.ep > there:
        raise ValueError(f"--ep {options.ep} needs as many GPUs, here are {there}; --virtual {options.ep} shares one")
    return options.ep or there


def _environment(job: Job, options: argparse.Namespace, roofs: Roofs) -> dict:
    found = {}
    for peer in peers.PEERS:
        reason = peer.absent() if peer.name in options.peers else None
        version = peer.version() if peer.name in options.peers else "not asked for"
        found[peer.name] = f"absent: {reason}" if reason else version
    date = datetime.now(UTC).isoformat(timespec="seconds")
    about = {"commit": options.commit, "command": options.command, "date": date, "ranks": options.W, "where": job.where}
    return machine(job) | about | {"roofs": vars(roofs), "peers": found}


def _clocks(job: Job):
    from dist_moe.kernels_triton._clocks import Clocks

    return Clocks(job.device)


def measure(options: argparse.Namespace) -> None:
    """All that has no row yet, on this process's part of the job. Collective."""
    processes = options.virtual is None and options.W > 1
    job = launch.start(virtual=None if processes else options.W, cpu=options.smoke)
    try:
        if job.is_first:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / outputs.NOT_TIMED).write_text("")
        rows = Rows(job, "sweep", options, outputs.ROWS.removesuffix(".jsonl"))
        options.clocks = _clocks(job) if options.clocks else None
        roofs = measure_roofs(job, options.rounds)
        if job.is_first:
            found = _environment(job, options, roofs)
            (options.out / outputs.ENVIRONMENT).write_text(json.dumps(found, indent=1) + "\n")
        rows.say(f"{job.where}; {roofs}")
        for shape, routing in itertools.product(options.shapes, options.routings):
            calls = itertools.product(routing.tokens(options.tokens), options.precisions, options.directions)
            for T, precision, direction in calls:
                Case(job, options, shape, routing, T, precision, direction).run(rows, roofs)
    finally:
        launch.stop(job)


def finish(out: Path, console: Console) -> int:
    """The CSV, the pictures and the table of a folder; 1 if something failed."""
    outputs.write_csv(out)
    outputs.show(out, console)
    if outputs.read(out, outputs.ROWS) or outputs.read(out, outputs.TIMELINE):
        draw(out, console)
    return 1 if outputs.failed(out) else 0


def draw(out: Path, console: Console) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no pictures: they need matplotlib; pip install 'dist-moe-triton[demo]'", markup=False)
        return
    from .pictures import draw_all

    for path in draw_all(out):
        console.print(f"picture: {path}", markup=False, soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    """0, or 1 when a result was wrong or something raised. Raises ValueError for options that cannot be run."""
    options = read_options(list(sys.argv[1:] if argv is None else argv))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if options.plot is not None:
        if not any((options.plot / name).is_file() for name in (outputs.ROWS, outputs.TIMELINE)):
            raise ValueError(f"--plot {options.plot}: there is no {outputs.ROWS} and no {outputs.TIMELINE}")
        draw(options.plot, console)
        return 0
    if options.virtual is not None or options.W == 1 or launch.under_torchrun():
        measure(options)
        if not launch.is_first():
            return 0
    else:
        launch.spawn(options.W, measure, options)
    return finish(options.out, console)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"error: {error}")

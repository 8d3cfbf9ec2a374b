"""Tiles of the grouped products: holds what pick_config chooses against every other candidate.

    python -m benchmarks.tune --shapes deepseek-v3 qwen3-30b --tokens 16 128 8192 --commit abc1234
    python -m benchmarks.tune --products w13 wgrad_w2 --precisions bf16 mxfp8 mxfp8-inference nvfp4
    python -m benchmarks.tune --smoke                              tiny, on the CPU, kernels interpreted

The tables stay in the kernel files, as CONFIGS beside pick_config: the same on all ranks, and nothing is tuned at run
time. Candidates are the rows of the kernel's table and neighbours of the chosen tile (tiles.py), timed as replayed CUDA
graphs on the rows of the fullest of --ranks virtual ranks. One that does not fit, does not compile, or whose result is
not the chosen one's is not timed, and listed with the reason; `bench_op` and `scaled_gemms` hold the chosen one's
against the oracle. At the end come tables and verdicts of all rows of this commit and GPU.
"""

import contextlib
import functools
import importlib
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from dist_moe import registry, testing
from dist_moe.shapes import cdiv

from . import gemms, launch, report, tiles
from .bench_op import replayed
from .checks import require
from .launch import Job, Miss
from .op_cases import ACCUMULATIONS, FUSED, GEMM_OPS, PRODUCTS, product_cases
from .record import KEY, Rows, parse, parser
from .roofs import Roofs, Work, backward_work, forward_work, measure_roofs
from .scaled_gemms import ScaledGemms, ops_of
from .shapes import Shape, Traffic, config_of, load_of
from .tiles import Config, ShapeClass
from .timing import Method, Times, measure

# Name of ScaledGemms' operands: weights of "mxfp8" have square blocks, as in training.
PRECISIONS = {"bf16": None, "mxfp8": "mxfp8_e4m3", "mxfp8-inference": "mxfp8_e4m3-along-k", "nvfp4": "nvfp4"}
MARGIN = 0.02  # that a candidate must be faster by to count
STALE = 7.0
NOT_TIMED = Times(None, None, None, 0)
PIPE_WIDTH = 160  # of a table that goes into a file


@dataclass(frozen=True)
class Product:
    """A product that runs in any tile."""

    at: ShapeClass
    function: Callable
    run: Callable[[Callable], object]  # by the function that it is given
    result: Callable[[], Tensor]
    setup: Callable[[], object]  # overwrites the result
    work: Work

    @property
    def kernel(self) -> ModuleType:
        kernel = importlib.import_module(self.function.__module__)
        if tiles.short(kernel) not in tiles.TABLES:
            raise Miss(f"{kernel.__name__} has no table of tiles")
        return kernel

    def start(self, config: Config) -> Callable[[], object]:
        return functools.partial(self.run, functools.partial(self.function, config=config))

    def launch(self, config: Config) -> Tensor:
        """Its result in this tile. Raises Miss where there is none."""
        if reason := tiles.unfit(self.kernel, config):
            raise Miss(reason)
        self.setup()
        try:
            self.start(config)()
        except Exception as error:  # Triton, LLVM and ptxas raise what they like; a fault of the GPU comes later
            text = getattr(error, "error_message", None) or str(error)  # CompilationError begins with the whole source
            raise Miss(textwrap.shorten(f"{type(error).__name__}: {text}", 300)) from error
        return self.result()


Products = Iterator[tuple[str, Product]]  # by name, each made when it is asked for


def class_of(traffic: Traffic, product: str, **how) -> ShapeClass:
    """As a Context sees it: rows are those of balanced ranks."""
    shape = traffic.shape
    kind = product.split("_")[0] if product.startswith(("dgrad", "wgrad")) else "forward"
    N, K = (2 * shape.F, shape.D) if "w13" in product else (shape.D, shape.F)
    dtype = torch.float32 if product in ACCUMULATIONS else torch.bfloat16
    return ShapeClass(kind, N, K, cdiv(sum(traffic.rows_W), shape.E), dtype, **how)


def bf16_products(job: Job, traffic: Traffic, rank: int, asked: list[str]) -> Products:
    makers = product_cases(traffic, rank, job.device)
    call = registry.call_of(job.device, None, config_of(traffic), traffic.W)
    for name in asked:
        case = makers[name]()
        function = registry.function(registry.choose(case.op, call)[0])
        result = functools.partial(lambda case: case.outputs(None)[0][1], case)
        yield name, Product(class_of(traffic, name), function, case.run, result, case.setup, case.work)


def scaled_products(job: Job, traffic: Traffic, rank: int, asked: list[str], form: str) -> Products:
    """Those of the asked that exist on operands of this form."""
    load, ops = load_of(traffic, rank), ops_of(job, traffic.shape, form)
    works = forward_work(load) | backward_work(load)
    scaled = ScaledGemms(gemms.ExpertGemms.of_rank(traffic, rank, job.device), form, ops)
    for name in asked:
        if name not in PRODUCTS or not scaled.supports(name):
            continue
        run, result, out = scaled.prepare(name)
        at = class_of(traffic, name, format=scaled.format, square=form == PRECISIONS["mxfp8"])
        setup = functools.partial(out.fill_, STALE)
        by = functools.partial(lambda run, function: function(*run.args, **run.keywords), run)
        yield name, Product(at, run.func, by, result, setup, works[name])


def run_product(job: Job, rows: Rows, roofs: Roofs, about: dict, product: Product, rounds: int) -> None:
    """Rows of all candidates, refused ones too."""
    candidates = tiles.candidates(product.kernel, product.at)
    if all(rows.has(about, name) for name in candidates):
        rows.say(f"{about['shape']} T={about['T']} {about['precision']} {about['direction']}: has its rows")
        return
    chosen, bar = next(iter(candidates)), testing.TOLERANCES["gemm"]
    wanted = product.launch(candidates[chosen]).clone()
    methods, facts = [], {}
    for name, config in candidates.items():
        try:
            found = product.launch(config)
            facts[name] = {"worst_row_db": require(name, found, wanted, bar), "equal_bits": torch.equal(found, wanted)}
        except Miss as miss:
            if name == chosen:
                raise
            facts[name] = {"refused": str(miss)}
            continue
        methods.append(Method(name, replayed(job, product.start(config))))
    times = measure(job, methods, rounds)
    of_all = {"kernel": product.function.__module__, "class": str(product.at), "chosen": chosen}
    for name, config in candidates.items():
        more = {"refused": None, "tile": asdict(config)} | of_all | facts[name]
        time, work = (times[name], product.work) if name in times else (NOT_TIMED, None)
        row = rows.add(about, name, time, work, roofs, 1, **more)
        if name in times:
            rows.say_row(row)
        else:
            rows.say(f"    {name} is not timed: {more['refused']}")


def run_shape(job: Job, rows: Rows, roofs: Roofs, args, shape: Shape, routing: str, T: int) -> None:
    traffic = Traffic(shape, testing.routing(routing, num_ranks=job.W, T=T, K=shape.K, E=shape.E))
    rank = max(range(job.W), key=traffic.rows_W.__getitem__)
    for precision in args.precisions:
        of_precision = (job, traffic, rank, args.products)
        form = PRECISIONS[precision]
        for name, product in scaled_products(*of_precision, form) if form else bf16_products(*of_precision):
            about = rows.about(shape, traffic, routing, name) | {"precision": precision}
            try:
                run_product(job, rows, roofs, about, product, args.rounds)
            except Miss as miss:
                rows.miss(f"{shape.name} {routing} T={T} {precision} {name}: {miss}")


def title(row: dict) -> str:
    return f"{row['precision']} {row['direction']}: {row['class']} ({row['shape']} {row['routing']} T={row['T']})"


def table_of(case: list[dict]) -> Table:
    """The candidates of one product, shape class and precision, the fastest first."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("candidate")
    table.add_column("us", justify="right")
    table.add_column("of the chosen", justify="right")
    table.add_column("", overflow="fold")
    us = {row["method"]: row["us"] for row in case}
    for row in sorted(case, key=lambda row: (row["us"] is None, row["us"])):
        if row["refused"]:
            table.add_row(row["method"], "", "", escape(row["refused"]))
            continue
        bits = "" if row["equal_bits"] else f"other bits, {row['worst_row_db']:.0f} dB"
        note = "chosen" if row["method"] == row["chosen"] else bits
        table.add_row(row["method"], f"{row['us']:.1f}", f"{row['us'] / us[row['chosen']]:.3f}", note)
    return table


def verdict(case: list[dict]) -> tuple[bool, str]:
    """Whether the choice is the best, or within the margin of it, and that in words."""
    us = {row["method"]: row["us"] for row in case if row["us"] is not None}
    chosen, best = case[0]["chosen"], min(us, key=us.get)
    if us[best] >= (1 - MARGIN) * us[chosen]:
        return True, f"{title(case[0])}: {chosen}"
    return False, f"{title(case[0])}: {best} takes {us[best] / us[chosen]:.3f} of {chosen}"


def show(rows: list[dict], console: Console) -> None:
    """A table of every case, then what they say of pick_config."""
    names = [name for name in KEY if name != "method"]
    cases = list(report.grouped(rows, *names).values())
    for case in cases:
        console.print(title(case[0]), markup=False, soft_wrap=True)
        console.print(table_of(case))
    verdicts = [verdict(case) for case in cases]
    for holds, words in ((True, f"the best, or within {MARGIN:.0%} of it"), (False, "slower than a candidate")):
        found = [text for held, text in verdicts if held == holds]
        console.print(f"pick_config's choice is {words}: {len(found)} of {len(verdicts)}")
        for text in found:
            console.print(f"    {text}", markup=False, soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=2, help="ranks that share the experts")
    options.add_argument("--products", nargs="+", choices=GEMM_OPS, default=[*PRODUCTS, FUSED])
    options.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16"])
    args = parse(options, argv)
    if args.smoke:  # before the first kernel is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
    job = launch.start(virtual=args.ranks, cpu=args.smoke)
    with contextlib.ExitStack() as stack:
        args.results = args.results or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows = Rows(job, "tune", args)
        roofs = measure_roofs(job, args.rounds)
        rows.each(args, functools.partial(run_shape, job, rows, roofs, args))
        mine = [row for row in report.read(args.results, args.commit) if row["bench"] == "tune"]
    mine = [row for row in mine if row["gpu"] == rows.common["gpu"]]
    show(mine, Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH))
    return 1 if rows.missed else 0


if __name__ == "__main__":
    sys.exit(main())

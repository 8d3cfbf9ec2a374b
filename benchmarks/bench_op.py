"""One op of one rank: shapes x routings x backends.

    python -m benchmarks.bench_op --shapes deepseek-v3 qwen3-30b --commit abc1234      the six grouped products
    python -m benchmarks.bench_op --ops publish route dispatch swiglu combine reduce
    python -m benchmarks.bench_op --smoke                                              tiny, on the CPU

The rank is the fullest of --ranks virtual ones, so peers' memory is this device's. Products stand beside
torch._grouped_mm on the same ragged rows ("torch"): the floor of the path. Every implementation is compared with the
reference op on the inputs that are then timed; on a GPU what is timed is a replayed CUDA graph.
"""

import functools
import importlib
import sys
from collections.abc import Callable

import torch

from dist_moe import reference, registry, testing

from . import launch
from .checks import require
from .launch import Job, Miss
from .op_cases import PRODUCTS, ROW_OPS, OpCase, RowOps, product_cases
from .record import Rows, parse, parser
from .roofs import Roofs, measure_roofs
from .shapes import Shape, Traffic
from .timing import Method, capture, measure


def implementations(op: str, device: torch.device) -> dict[str, Callable]:
    """By backend, every implementation that runs on the device without being named."""
    call = registry.call_of(device, None)
    found = {}
    for impl in registry.IMPLS:
        if impl.op == op and impl.refuses(call) is None:
            module, function = impl.where.split(":")
            found[impl.backend] = getattr(importlib.import_module(module), function)
    return found


def checked(case: OpCase, functions: dict[str, Callable]) -> dict[str, float]:
    """The worst row of every implementation and of torch, in dB. Raises Miss."""
    case.setup()
    wanted = [(name, value.clone(), bar) for name, value, bar in case.outputs(case.run(getattr(reference, case.op)))]
    worst = {}
    for backend, function in functions.items():
        case.setup()
        found = case.outputs(case.run(function))
        worst[backend] = min(
            require(f"{backend} {name}", value, ref, bar)
            for (name, value, _), (_, ref, bar) in zip(found, wanted, strict=True)
        )
    if case.torch is not None:
        ((name, ref, bar),) = wanted
        worst["torch"] = require(f"torch {name}", case.torch(), ref, bar)
    case.setup()
    return worst


def replayed(job: Job, run: Callable[[], object]) -> Callable[[], object]:
    """The run as a CUDA graph: an op of half a millisecond is not charged for its launch from Python."""
    return capture(job, run, run)[0].replay if job.device.type == "cuda" else run


def run_case(job: Job, rows: Rows, roofs: Roofs, about: dict, case: OpCase, rounds: int) -> None:
    functions = implementations(case.op, job.device)
    names = [*functions] + ["torch"] * (case.torch is not None)
    about = about | {"direction": case.name}
    if all(rows.has(about, name) for name in names):
        return
    worst = checked(case, functions)
    prepare = case.setup if case.in_place else None
    runs = {name: functools.partial(case.run, function) for name, function in functions.items()}
    if case.torch is not None:
        runs["torch"] = case.torch
    methods = [Method(name, replayed(job, run), prepare) for name, run in runs.items()]
    for name, times in measure(job, methods, rounds).items():
        rows.say_row(rows.add(about, name, times, case.work, roofs, 1, worst_row_db=worst[name]))


def run_shape(job: Job, rows: Rows, roofs: Roofs, args, shape: Shape, routing: str, T: int) -> None:
    ids = testing.routing(routing, num_ranks=job.W, T=T, K=shape.K, E=shape.E)
    traffic = Traffic(shape, ids)
    rank = max(range(job.W), key=traffic.rows_W.__getitem__)
    about = rows.about(shape, traffic, routing, "")
    cases = product_cases(traffic, rank, job.device) if set(args.ops) & set(PRODUCTS) else []
    if row_ops := [name for name in args.ops if name in ROW_OPS]:
        ops = RowOps(traffic, ids, rank, job.device)
        cases += [ops.case(name) for name in row_ops]
    for case in cases:
        if case.name in args.ops:
            try:
                run_case(job, rows, roofs, about, case, args.rounds)
            except Miss as miss:
                rows.miss(f"{shape.name} {routing} T={T} {case.name}: {miss}")


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=2, help="ranks that share the experts")
    options.add_argument("--ops", nargs="+", choices=PRODUCTS + ROW_OPS, default=[*PRODUCTS])
    args = parse(options, argv)
    job = launch.start(virtual=args.ranks, cpu=args.smoke)
    rows = Rows(job, "op", args)
    roofs = measure_roofs(job, args.rounds)
    rows.say(f"roofs: {roofs}")
    rows.each(args, functools.partial(run_shape, job, rows, roofs, args))
    return 1 if rows.missed else 0


if __name__ == "__main__":
    sys.exit(main())

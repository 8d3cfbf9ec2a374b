"""One op of one rank: shapes x routings x backends.

    python -m benchmarks.bench_op --shapes deepseek-v3 qwen3-30b --commit abc1234      the six grouped products
    python -m benchmarks.bench_op --ops publish route dispatch swiglu combine reduce
    python -m benchmarks.bench_op --ops rmsnorm_reduce wgrad_w13_accumulate wgrad_w2_accumulate   beside their parts
    python -m benchmarks.bench_op --smoke                                              tiny, on the CPU

The rank is the fullest of --ranks virtual ones, so peers' memory is this device's. Products stand beside
torch._grouped_mm on the same ragged rows ("torch"): the floor of the path. Every implementation is compared with the
reference op on the inputs that are then timed; on a GPU what is timed is a replayed CUDA graph.

What does two things at once stands beside them, in the same rounds. rmsnorm_reduce: torch.nn.functional.rms_norm on the
rows of all routes and then our per-route reduce ("torch"), that reduce alone ("... plain"), and the fused op where it
also keeps the rows for a backward ("... keep"; "torch keep" copies them first, as a callable would get them).
wgrad_..._accumulate, which adds to an FP32 gradient: the product alone ("... bfloat16", "... float32", by what it
writes), and torch._grouped_mm with an addition in a second pass ("torch").
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
from .op_cases import (
    GEMM_OPS,
    NORM_OPS,
    OPS,
    PRODUCTS,
    ROW_OPS,
    Makers,
    NormOps,
    OpCase,
    RowOps,
    product_cases,
)
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
        case.setup()
        name, ref, bar = wanted[0]
        worst["torch"] = require(f"torch {name}", case.torch(), ref, bar)
    case.setup()
    return worst


def replayed(job: Job, run: Callable[[], object]) -> Callable[[], object]:
    """The run as a CUDA graph: an op of half a millisecond is not charged for its launch from Python."""
    return capture(job, run, run)[0].replay if job.device.type == "cuda" else run


def run_case(job: Job, rows: Rows, roofs: Roofs, about: dict, case: OpCase, rounds: int) -> None:
    about = about | {"direction": case.name}
    parts = {"": case} | {f" {part.name}": part for part in case.beside}
    functions = {end: implementations(part.op, job.device) for end, part in parts.items()}
    ways: dict[str, tuple[OpCase, Callable]] = {}
    for end, part in parts.items():
        for backend, function in functions[end].items():
            ways[backend + end] = part, functools.partial(part.run, function)
        if part.torch is not None:
            ways["torch" + end] = part, part.torch
    if all(rows.has(about, name) for name in ways):
        return
    worst = {name + end: db for end, part in parts.items() for name, db in checked(part, functions[end]).items()}
    methods = [
        Method(name, replayed(job, run), part.setup if part.in_place else None) for name, (part, run) in ways.items()
    ]
    for name, times in measure(job, methods, rounds).items():
        part = ways[name][0]
        rows.say_row(rows.add(about, name, times, part.work, roofs, 1, worst_row_db=worst[name], **part.more))


def run_shape(job: Job, rows: Rows, roofs: Roofs, args, shape: Shape, routing: str, T: int) -> None:
    ids = testing.routing(routing, num_ranks=job.W, T=T, K=shape.K, E=shape.E)
    traffic = Traffic(shape, ids)
    rank = max(range(job.W), key=traffic.rows_W.__getitem__)
    about = rows.about(shape, traffic, routing, "")
    families = (
        (GEMM_OPS, lambda: product_cases(traffic, rank, job.device)),
        (ROW_OPS, lambda: RowOps(traffic, ids, rank, job.device).cases()),
        (NORM_OPS, lambda: NormOps(traffic, ids, rank, job.device).cases()),
    )

    def run_family(asked: list[str], make: Makers) -> None:
        for name in asked:
            try:
                run_case(job, rows, roofs, about, make[name](), args.rounds)
            except Miss as miss:
                rows.miss(f"{shape.name} {routing} T={T} {name}: {miss}")

    for names, makers in families:  # a family at a time, and of it a case: no others' buffers are held
        if asked := [name for name in names if name in args.ops]:
            run_family(asked, makers())


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=2, help="ranks that share the experts")
    options.add_argument("--ops", nargs="+", choices=OPS, default=[*PRODUCTS])
    args = parse(options, argv)
    job = launch.start(virtual=args.ranks, cpu=args.smoke)
    rows = Rows(job, "op", args)
    roofs = measure_roofs(job, args.rounds)
    rows.say(f"roofs: {roofs}")
    rows.each(args, functools.partial(run_shape, job, rows, roofs, args))
    return 1 if rows.missed else 0


if __name__ == "__main__":
    sys.exit(main())

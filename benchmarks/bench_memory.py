"""Scratch that reaches into host memory: what it costs, and what a Context takes.

    torchrun --nproc-per-node 2 -m benchmarks.bench_memory --shapes qwen3-30b --commit abc1234
    python -m benchmarks.bench_memory --smoke             tiny, on the CPU, where all of it is host memory

A step is forward and backward with the smallest slot, so that its layer is made again and all its rows lie in scratch:
with all of that on the device, then with 2/3 and with 1/4 of it there. The bits must be equal before anything is timed.
A row says how many bytes of the device its Context took, by what the driver says is free before and after, and how many
the plan says; the first Context of a process is not counted, which starts the libraries too.
"""

import contextlib
import functools
import gc
import sys
from dataclasses import replace

import torch

from dist_moe import Config, MemoryPlan, VmmConfig, testing
from dist_moe.virtual import RankResults

from . import launch
from .bench_path import works
from .checks import PathOracle
from .launch import Job, Miss
from .ours import BOTH, Ours
from .record import Rows, parse, parser
from .roofs import Roofs, measure_roofs
from .shapes import Shape, Traffic, config_of, draw_inputs
from .timing import Method, measure

SHARES = (1.0, 2 / 3, 1 / 4)  # of the scratch that the step needs, what lies on the device


def used_bytes(job: Job) -> int:
    """Of the device, by its driver, without what torch's allocator holds in reserve."""
    gc.collect()
    if job.device.type != "cuda":
        return 0
    torch.cuda.synchronize(job.device)
    free, total = torch.cuda.mem_get_info(job.device)
    return total - free - (torch.cuda.memory_reserved(job.device) - torch.cuda.memory_allocated(job.device))


def planned_bytes(plan: MemoryPlan) -> int:
    """Of the device, without the words of the planner."""
    buffer = plan.total_device_buffer_bytes
    if plan.vmm_granularity_bytes is not None:
        buffer = plan.vmm_device_prefix_bytes + plan.vmm_device_scratch_section_bytes
    return buffer + sum(size for _, size in plan.symmetric_bytes)


def config_with(traffic: Traffic, share: float) -> Config:
    """Of the smallest slot, with `share` of the scratch on the device."""
    config = replace(config_of(traffic), activation_slot_bytes=None)
    factor = config.device_scratch_capacity_factor
    on_host = None if share == 1 else VmmConfig(factor)
    return replace(config, device_scratch_capacity_factor=share * factor, vmm=on_host)


def name_of(share: float) -> str:
    return "ours" if share == 1 else f"ours-{share:.0%}-on-device"


def run_case(job: Job, args, rows: Rows, roofs: Roofs, shape: Shape, routing: str, T: int) -> None:
    ids = testing.routing(routing, num_ranks=job.W, T=T, K=shape.K, E=shape.E)
    traffic = Traffic(shape, ids)
    about = rows.about(shape, traffic, routing, BOTH)
    if all(rows.has(about, name_of(share)) for share in SHARES):
        rows.say(f"{shape.name} {routing}: has its rows")
        return
    inputs = draw_inputs(shape, ids, job.local_ranks, job.device)
    oracle = PathOracle(job, shape, inputs, backward=True)
    wanted: list[RankResults] = []

    def open_ours(share: float) -> Ours:
        return Ours(job, traffic, inputs, BOTH, args.backend, config_with(traffic, share))

    open_ours(1.0).context.close()
    for share in SHARES:
        before = used_bytes(job)
        ours = open_ours(share)
        taken, plan = used_bytes(job) - before, ours.context.memory_plan
        with contextlib.closing(ours.context):
            results = ours.results()
            if not wanted:
                wanted.extend(results)
                db = job.agree(lambda: oracle.check("ours", wanted))
            job.agree(functools.partial(require_equal, results, wanted))
            local = [ours.context.memory_stats(rank).host_overflow_peak_bytes for rank in job.local_ranks]
            peak, taken = max(job.gather(max(local))), max(job.gather(taken))
            (time,) = measure(job, [Method(name_of(share), ours.run)], args.rounds).values()
        memory = {
            "taken_bytes": taken,
            "planned_bytes": len(job.local_ranks) * planned_bytes(plan),
            "host_bytes": plan.host_scratch_bytes,
            "host_peak_bytes": peak,
        }
        path, _ = works(traffic, BOTH)
        rows.say_row(rows.add(about, name_of(share), time, path, roofs, job.num_gpus, worst_row_db=db, **memory))
        rows.say("  " + ", ".join(f"{what} {number:,}" for what, number in memory.items()))


def require_equal(results: list[RankResults], wanted: list[RankResults]) -> None:
    for result, other in zip(results, wanted, strict=True):
        for name, value in vars(result).items():
            if not torch.equal(value, getattr(other, name)):
                raise Miss(f"{name} has other bits than with all scratch on the device")


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--backend", help="of our ops; default: the best that runs")
    args = parse(options, argv)
    job = launch.start(virtual=None if launch.under_torchrun() else 2 if args.smoke else 1, cpu=args.smoke)
    rows = Rows(job, "memory", args)
    try:
        roofs = measure_roofs(job, args.rounds)
        rows.each(args, functools.partial(run_case, job, args, rows, roofs))
    finally:
        launch.stop(job)
    return 1 if rows.missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Rows: one JSON line each, with everything that is needed to read it later. And the options that all scripts share."""

import argparse
import itertools
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .launch import Job, Miss
from .roofs import Roofs, Work
from .shapes import SHAPES, SMOKE, Shape, Traffic, scheme_of
from .timing import Times

RESULTS = Path(__file__).parent / "results"
UNKNOWN = "unknown"

# What tells one measurement from another; a row that is there with this commit is not measured again.
KEY = ("commit", "gpu", "bench", "shape", "routing", "T", "W", "where", "scheme", "direction", "method", "precision")


def key(row: dict) -> tuple:
    """Rows of scripts that measure BF16 alone have no precision."""
    return tuple(row.get(name) for name in KEY)


def parser(description: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-30b"])
    options.add_argument("--routings", nargs="+", default=["uniform"], help="by name, from dist_moe.testing")
    options.add_argument("--tokens", nargs="+", type=int, default=[8192], help="of one rank")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--commit", default=UNKNOWN, help="of what runs; without it nothing counts as done")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    options.add_argument("--smoke", action="store_true", help="tiny, one round, on the CPU; rows to --results if given")
    return options


def parse(options: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = options.parse_args(argv)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--results" in arguments:  # where the rows went is nothing that they depend on
        at = arguments.index("--results")
        del arguments[at : at + 2]
    args.command = " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *arguments])
    if args.smoke:
        args.shapes, args.tokens, args.rounds = [SMOKE.name], [16], 1
        args.results = None if args.results == RESULTS else args.results
    return args


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def machine(job: Job) -> dict:
    on_gpu = job.device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(job.device) if on_gpu else "none",
        "num_gpus": job.num_gpus if on_gpu else 0,
        "driver": _driver() if on_gpu else "none",
        "torch": torch.__version__,
        "triton": _triton(),
        "python": platform.python_version(),
    }


class Rows:
    """The rows of one script: appends to <folder>/<file or name>.jsonl, on the first process alone.

    common: what is the same in all of them.
    """

    def __init__(self, job: Job, name: str, args: argparse.Namespace, file: str | None = None):
        self._job, self._path = job, None if args.results is None else args.results / f"{file or name}.jsonl"
        self.common = machine(job) | {"bench": name, "commit": args.commit, "command": args.command}
        self.missed = False
        done = set()
        if job.is_first and args.commit != UNKNOWN and self._path is not None and self._path.exists():
            rows = map(json.loads, self._path.read_text().splitlines())
            done = set(map(key, rows))
        self._done = job.gather(done)[0]

    def about(self, shape: Shape, traffic: Traffic, routing: str, direction: str) -> dict:
        """The fields that say what was measured."""
        sizes = {"D": shape.D, "F": shape.F, "E": shape.E, "K": shape.K, "T": max(traffic.tokens_W), "W": traffic.W}
        what = {"shape": shape.name, "routing": routing, "direction": direction, "where": self._job.where}
        what["scheme"] = scheme_of(traffic)
        return what | sizes | traffic.balance()

    def has(self, about: dict, method: str) -> bool:
        return key(self.common | about | {"method": method}) in self._done

    def add(self, about: dict, method: str, times: Times, work: Work | None, roofs: Roofs, num_devices: int, **more):
        """Append a row and return it. `work` is that of all ranks together; without it no rates are given."""
        us = times.us
        row = self.common | {"date": datetime.now(UTC).isoformat(timespec="seconds")} | about | {"method": method}
        row |= {"us": us, "us_p10": times.p10, "us_p90": times.p90, "rounds": times.rounds}
        if work is not None:
            share = Work(*(value // num_devices for value in (work.flops, work.hbm_bytes, work.link_bytes)))
            row |= {
                "flops": work.flops,
                "hbm_bytes": work.hbm_bytes,
                "link_bytes": work.link_bytes,
                "tflops": share.flops / us / 1e6,
                "hbm_gbs": share.hbm_bytes / us / 1e3,
                "link_gbs": share.link_bytes / us / 1e3,
                "roof_us": roofs.us(share),
                "roof_share": roofs.us(share) / us,
            }
        row |= {"roof_tflops": roofs.tflops, "roof_hbm_gbs": roofs.hbm_gbs, "roof_link_gbs": roofs.link_gbs, **more}
        if self._job.is_first and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return row

    def miss(self, text: str) -> None:
        """Say why something has no row."""
        self.missed = True
        self.say(f"NOT TIMED: {text}")

    def each(self, args: argparse.Namespace, run: Callable[[Shape, str, int], None]) -> None:
        """run(shape, routing, tokens) for all that was asked for; one that misses leaves the others alone."""
        for name, routing, T in itertools.product(args.shapes, args.routings, args.tokens):
            try:
                run(SHAPES[name], routing, T)
            except Miss as miss:
                self.miss(f"{name} {routing} T={T}: {miss}")

    def say(self, text: str) -> None:
        if self._job.is_first:
            print(text, flush=True)

    def say_row(self, row: dict) -> None:
        rates = ""
        if "flops" in row:
            rates = f"{row['tflops']:7.1f} TFLOP/s {row['hbm_gbs']:6.0f} GB/s HBM {row['link_gbs']:5.0f} link "
            rates += f"{row['roof_share']:6.1%} of the roof"
        what = f"{row['shape']:13s} {row['routing']:13s} T={row['T']} {row['direction']:16s} {row['method']:14s}"
        self.say(f"{what} {row['us']:9.1f} us ({row['us_p10']:.1f} to {row['us_p90']:.1f}) {rates}")

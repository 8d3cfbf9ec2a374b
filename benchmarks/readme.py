"""README's table and picture of speed, from recorded rows: python -m benchmarks.readme [--draw docs/speed.png]

Two GPUs, 8192 tokens a rank, uniform routing; ours as a replayed graph beside the NCCL baseline of the same run.
"""

import argparse
import sys
from pathlib import Path

from .record import RESULTS
from .report import Row, read, table

COMMIT = "3ed0fbe"  # whose rows README shows
TITLES = {
    "deepseek-v3": "DeepSeek-V3 (7168, 2048, 256, 8)",
    "qwen3-30b": "Qwen3-30B (2048, 768, 128, 8)",
    "qwen3-235b": "Qwen3-235B (4096, 1536, 128, 8)",
    "mixtral-8x7b": "Mixtral 8x7B (4096, 14336, 8, 2)",
    "gpt-oss-120b": "gpt-oss-120b shape (2880, 2880, 128, 4)",
}
DIRECTIONS = ("forward", "forward+backward")
LABELS = {
    "ours-graph": "dist_moe",
    "ours": "dist_moe, eager",
    "baseline": "NCCL + grouped_mm",
    "floor-ours": "products alone, ours",
    "floor-torch": "products alone, torch",
}
WHERE = {"bench": "path", "W": 2, "T": 8192, "routing": "uniform", "where": "2 processes"}


def recorded(commit: str = COMMIT) -> list[Row]:
    """The rows that README is about, models in its order, each with the label of its method."""
    rows = [row for row in read(RESULTS, commit) if all(row[name] == value for name, value in WHERE.items())]
    rows = [row | {"label": LABELS[row["method"]]} for row in rows]
    order = (list(TITLES), list(LABELS))
    return sorted(rows, key=lambda row: (order[0].index(row["shape"]), order[1].index(row["method"])))


def _ms(us: float) -> str:
    """Three digits."""
    ms = us / 1e3
    return f"{ms:.{2 if ms < 10 else 1}f}"


def speed_table(rows: list[Row]) -> str:
    by = {(row["shape"], row["direction"]): row for row in rows if row["method"] == "ours-graph"}
    lines = []
    for shape, title in TITLES.items():
        line = [title]
        for direction in DIRECTIONS:
            row = by[shape, direction]
            line += [f"{_ms(row['us'])} ({_ms(row['baseline_us'])})", f"{row['baseline_us'] / row['us']:.1f}x"]
        lines.append(line)
    return table(["model (D, F, experts, top-k)", "forward", "", "forward + backward", ""], lines)


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--commit", default=COMMIT)
    options.add_argument("--draw", type=Path, metavar="PNG", help="also the picture")
    args = options.parse_args(argv)
    rows = recorded(args.commit)
    if args.draw is not None:
        from .pictures import save, tflops

        save(args.draw, tflops, rows)
    print(speed_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

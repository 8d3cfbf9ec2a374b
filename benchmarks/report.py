"""The rows of benchmarks/results as Markdown tables: python -m benchmarks.report [--results FOLDER] [--commit HASH]

Of rows that measure the same thing the newest is shown. Ratios are of times from one and the same run.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

from .op_cases import ACCUMULATIONS
from .record import RESULTS, key

Row = dict

NORM_SPEED_BAR, NORM_BYTES_BAR = 2.0, 1.1
PASS_BAR, PASS_GBS = 0.8, 4300
PRODUCT_BARS = {"mixtral-8x7b": 1.15}


def read(folder: Path, commit: str | None) -> list[Row]:
    """The newest row of each measurement, in the order in which they were first taken."""
    newest: dict[tuple, Row] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            if commit is None or row["commit"] == commit:
                newest[key(row | {"commit": None})] = row
    return list(newest.values())


def table(header: list[str], lines: list[list[str]]) -> str:
    body = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in body)


def grouped(rows: list[Row], *names: str) -> dict[tuple, list[Row]]:
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return groups


def where(row: Row) -> str:
    """What ran it, once above a table."""
    machine = f"{row['num_gpus']} x {row['gpu']}, driver {row['driver']}, torch {row['torch']}, triton {row['triton']}"
    roofs = f"{row['roof_tflops']:.0f} TFLOP/s, {row['roof_hbm_gbs']:.0f} GB/s memory"
    if row["roof_link_gbs"]:
        roofs += f", {row['roof_link_gbs']:.0f} GB/s link"
    return f"{machine}; commit {row['commit']}, {row['date'][:10]}; measured roofs: {roofs}"


def _ms(us: float | None) -> str:
    return "" if us is None else f"{us / 1e3:.3f}"


def best_of_ours(methods: list[Row]) -> Row | None:
    """The faster of eager and graph."""
    ours = [row for row in methods if row["method"] in ("ours", "ours-graph")]
    return min(ours, key=lambda row: row["us"], default=None)


def path_tables(rows: list[Row]) -> list[str]:
    texts = []
    for (T, W, place, routing), group in grouped(rows, "T", "W", "where", "routing").items():
        lines = []
        for (shape, scheme, direction), methods in grouped(group, "shape", "scheme", "direction").items():
            by = {row["method"]: row for row in methods}
            if (best := best_of_ours(methods)) is None:
                continue
            floor, baseline = best["floor_us"], best["baseline_us"]
            times = [by[name]["us"] if name in by else None for name in ("ours", "ours-graph")]
            lines.append(
                [f"{shape}, {scheme}", direction, *map(_ms, [*times, baseline, floor])]
                + [f"{best['us'] / floor:.2f}" if floor else "", f"{baseline / best['us']:.2f}" if baseline else ""]
                + [f"{best['tflops']:.0f}", f"{best['roof_share']:.0%}"]
            )
        header = ["model, exchange", "direction", "ours, ms", "graph", "baseline", "floor"]
        header += ["ours / floor", "baseline / ours", "TFLOP/s a GPU", "of the roof"]
        title = f"Path, {W} ranks ({place}), T={T} a rank, {routing}\n{where(group[-1])}"
        texts.append(f"{title}\n\n{table(header, lines)}")
    return texts


def skew_tables(rows: list[Row]) -> list[str]:
    """Several routings side by side; skew is the rows of the fullest rank over the mean of all ranks."""
    texts = []
    for (T, W, place), group in grouped(rows, "T", "W", "where").items():
        lines, ratios = [], []
        for (shape, scheme, direction), cell in grouped(group, "shape", "scheme", "direction").items():
            best = [row for methods in grouped(cell, "routing").values() if (row := best_of_ours(methods))]
            for row in sorted(best, key=skew):
                ratio = row["baseline_us"] / row["us"] if row["baseline_us"] else None
                ratios += [ratio] if ratio else []
                line = [f"{shape}, {scheme}, {direction}, {row['routing']}", f"{skew(row):.2f}", _ms(row["us"])]
                lines.append([*line, _ms(row["baseline_us"]), f"{ratio:.2f}" if ratio else ""])
        if len(grouped(group, "routing")) > 1 and ratios:
            header = ["model, exchange, direction, routing", "skew", "ours, ms", "baseline, ms", "baseline / ours"]
            title = f"Path under skew, {W} ranks ({place}), T={T} a rank; least baseline / ours {min(ratios):.2f}"
            texts.append(f"{title}\n{where(group[-1])}\n\n{table(header, lines)}")
    return texts


def skew(row: Row) -> float:
    return row["rank_rows_max"] / row["rank_rows_mean"]


def memory_tables(rows: list[Row]) -> list[str]:
    """Steps by how much of their scratch lies on the device, and the memory of their Contexts."""
    texts = []
    for (T, W, place, routing), group in grouped(rows, "T", "W", "where", "routing").items():
        lines = []
        for (shape,), methods in grouped(group, "shape").items():
            whole = next((row["us"] for row in methods if row["method"] == "ours"), None)
            for row in methods:
                slower = f"{row['us'] / whole:.2f}" if whole else ""
                sizes = (row[f"{name}_bytes"] for name in ("planned", "taken", "host", "host_peak"))
                lines.append(
                    [f"{shape}, {row['method']}", _ms(row["us"]), slower, *(f"{size / 2**20:.1f}" for size in sizes)]
                )
        header = ["model", "forward + backward, ms", "times as long", "device MiB planned", "taken", "host MiB", "used"]
        title = f"Scratch on the host, {W} ranks ({place}), T={T} a rank, {routing}, smallest slot\n{where(group[-1])}"
        texts.append(f"{title}\n\n{table(header, lines)}")
    return texts


def format_tables(rows: list[Row]) -> list[str]:
    """Times, and how many times as fast as BF16 in the same run."""
    texts = []
    for (direction, T, W, place, routing), group in grouped(rows, "direction", "T", "W", "where", "routing").items():
        methods = list(dict.fromkeys(row["method"] for row in group))
        lines = []
        for (shape,), cell in grouped(group, "shape").items():
            by = {row["method"]: row for row in cell}
            cells = [""] * len(methods)
            for i, row in enumerate(map(by.get, methods)):
                if row:
                    speed = (
                        f" ({row['bf16_us'] / row['us']:.2f}x)" if row["bf16_us"] and row["method"] != "bf16" else ""
                    )
                    cells[i] = _ms(row["us"]) + speed
            lines.append([shape, *cells])
        header = ["model", *(f"{method}, ms" for method in methods)]
        title = f"Formats, {direction}, {W} ranks ({place}), T={T} a rank, {routing}, graphs\n{where(group[-1])}"
        texts.append(f"{title}\n\n{table(header, lines)}")
    return texts


def op_tables(rows: list[Row]) -> list[str]:
    """Without what stands beside an op: that is in the tables of the bars."""
    texts, alone = [], [row for row in rows if " " not in row["method"]]
    for (T, W, routing), group in grouped(alone, "T", "W", "routing").items():
        methods = list(dict.fromkeys(row["method"] for row in group))
        lines = []
        for (shape, op), cell in grouped(group, "shape", "direction").items():
            by = {row["method"]: row for row in cell}
            line = [f"{shape} {op}"]
            for method in methods:
                row = by.get(method)
                line += [_ms(row["us"]), _rate(row), f"{row['roof_share']:.0%}"] if row else ["", "", ""]
            lines.append(line)
        header = ["op"] + [text for method in methods for text in (f"{method}, ms", "rate", "of the roof")]
        texts.append(f"Ops of the fullest of {W} ranks, T={T}, {routing}\n{where(group[-1])}\n\n{table(header, lines)}")
    return texts


def _rate(row: Row) -> str:
    """Of what bounds an op; virtual ranks' peers are this device's memory."""
    return f"{row['tflops']:.0f} TFLOP/s" if row["flops"] else f"{row['hbm_gbs'] + row['link_gbs']:.0f} GB/s"


def norm_tables(rows: list[Row]) -> list[str]:
    """The fused RMSNorm and sum against F.rms_norm and then the plain sum; counted bytes against those of the sum."""
    texts = []
    here = [row for row in rows if row["direction"] == "rmsnorm_reduce"]
    for (T, W, routing), group in grouped(here, "T", "W", "routing").items():
        lines = []
        for (shape,), cell in grouped(group, "shape").items():
            by = {row["method"]: row for row in cell}
            for method in (name for name in by if name != "torch" and " " not in name):
                fused, keep, plain = (by[method + end] for end in ("", " keep", " plain"))
                faster, moved = by["torch"]["us"] / fused["us"], fused["hbm_bytes"] / plain["hbm_bytes"]
                kept = by.get("torch keep")  # older runs have none
                lines.append(
                    [f"{shape}, {method}", _ms(fused["us"]), _ms(by["torch"]["us"]), f"{faster:.2f}"]
                    + [f"{moved:.2f}", "met" if faster >= NORM_SPEED_BAR and moved <= NORM_BYTES_BAR else "missed"]
                    + [_ms(plain["us"]), f"{fused['us'] / plain['us']:.2f}"]
                    + [_ms(keep["us"]), f"{keep['hbm_bytes'] / plain['hbm_bytes']:.2f}"]
                    + [f"{kept['us'] / keep['us']:.2f}" if kept else ""]
                )
        header = ["model", "fused, ms", "F.rms_norm + reduce", "times as fast", "bytes / plain", "bars"]
        header += ["plain reduce, ms", "fused / plain", "keeping rows, ms", "bytes / plain", "times as fast"]
        title = f"RMSNorm and weighted sum, T={T} a rank of {W}, {routing}; bars: at least {NORM_SPEED_BAR:g} times "
        title += f"as fast, at most {NORM_BYTES_BAR:g} of the bytes"
        texts.append(f"{title}\n{where(group[-1])}\n\n{table(header, lines)}")
    return texts


def accumulation_tables(rows: list[Row]) -> list[str]:
    """A weight gradient added in place against its product, written in BF16 and in FP32, and a pass that adds that.

    A pass reads the product, reads the FP32 gradient and writes it, at PASS_GBS.
    """
    texts = []
    here = [row for row in rows if row["direction"] in ACCUMULATIONS]
    for (T, W, routing), group in grouped(here, "T", "W", "routing").items():
        lines = []
        for (shape, op), cell in grouped(group, "shape", "direction").items():
            by = {row["method"]: row for row in cell}
            for method in (name for name in by if name != "torch" and " " not in name):
                us, line = by[method]["us"], []
                for product in (by[f"{method} {dtype}"] for dtype in ("bfloat16", "float32")):
                    of_both = us / (product["us"] + product["pass_bytes"] / PASS_GBS / 1e3)
                    of_product = us / product["us"]
                    met = of_both <= PASS_BAR and of_product <= PRODUCT_BARS.get(shape, of_product)
                    line += [_ms(product["us"]), f"{of_both:.2f}", f"{of_product:.2f}", "met" if met else "missed"]
                lines.append([f"{shape} {op}, {method}", _ms(us), *line, _ms(by["torch"]["us"])])
        header = ["op", "accumulates FP32, ms"]
        for dtype in ("BF16", "FP32"):
            header += [f"{dtype} product, ms", "of product + pass", "of product", "bars"]
        bars = ", ".join(f"{bar:g} of the product at {shape}" for shape, bar in PRODUCT_BARS.items())
        title = f"Weight gradients added in place, the fullest of {W} ranks, T={T}, {routing}; bars: at most "
        title += f"{PASS_BAR:g} of product + pass, {bars}; a pass at {PASS_GBS / 1e3:g} TB/s"
        header += ["torch, BF16 in two passes, ms"]
        texts.append(f"{title}\n{where(group[-1])}\n\n{table(header, lines)}")
    return texts


def stage_tables(rows: list[Row]) -> list[str]:
    texts = []
    for (shape, T, W, place, routing), group in grouped(rows, "shape", "T", "W", "where", "routing").items():
        whole = {row["direction"]: row["us"] for row in group if row["method"] == "whole"}
        lines = []
        for row in group:
            rates = [""] * 4
            if "flops" in row:
                rates = [f"{row[name]:.0f}" for name in ("tflops", "hbm_gbs", "link_gbs")]
                rates.append(f"{row['roof_share']:.0%}")
            share = f"{row['us'] / whole[row['direction']]:.1%}"
            lines.append([f"{row['direction']}: {row['method']}", f"{row['us']:.1f}", share, *rates])
        header = ["stage", "us", "of the whole", "TFLOP/s", "GB/s HBM", "GB/s link", "of the roof"]
        title = f"Stages of {shape}, {W} ranks ({place}), T={T} a rank, {routing}\n{where(group[-1])}"
        texts.append(f"{title}\n\n{table(header, lines)}")
    return texts


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--commit", help="of this commit alone")
    args = options.parse_args(argv)
    rows = grouped(read(args.results, args.commit), "bench")
    texts = [text for bench, make in TABLES for text in make(rows.get((bench,), []))]
    print("\n\n".join(texts) or f"no rows in {args.results}")
    return 0


TABLES = (
    ("path", path_tables),
    ("path", skew_tables),
    ("memory", memory_tables),
    ("formats", format_tables),
    ("stages", stage_tables),
    ("op", op_tables),
    ("op", norm_tables),
    ("op", accumulation_tables),
)

if __name__ == "__main__":
    sys.exit(main())

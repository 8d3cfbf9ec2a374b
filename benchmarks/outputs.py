"""What a sweep leaves in its folder, and how it is read again.

rows.jsonl        one row a measurement; rows that are there are not measured again
rows.csv          the same, for a spreadsheet
timeline.jsonl    one call of each case: its stages with start and length, by events or by the kernels' own clocks
not_timed.jsonl   what the last run left out, and why
environment.json  GPU, driver, versions, commit, roofs; the peers, each with its version or why it is absent
*.png             pictures.py
"""

import csv
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

Row = dict

ROWS, TIMELINE, NOT_TIMED, ENVIRONMENT = "rows.jsonl", "timeline.jsonl", "not_timed.jsonl", "environment.json"
CSV = "rows.csv"


def read(folder: Path, name: str) -> list[Row]:
    path = folder / name
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def alike(rows: list[Row]) -> list[Row]:
    """Those of the commit, the GPUs and the ranks of the newest: what can stand side by side."""
    names = ("commit", "gpu", "where")
    return [row for row in rows if all(row[name] == rows[-1][name] for name in names)]


def append(folder: Path, name: str, rows: list[Row]) -> None:
    with (folder / name).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def put_call(folder: Path, about: Row, intervals: list[Row]) -> None:
    """Into the timeline, in place of an earlier recording of the same call."""
    others = [row for row in read(folder, TIMELINE) if not about.items() <= row.items()]
    (folder / TIMELINE).unlink(missing_ok=True)
    append(folder, TIMELINE, others + intervals)


def write_csv(folder: Path) -> None:
    """All rows, with the fields of all as columns; what a row lacks, or has as null, is empty."""
    rows = read(folder, ROWS)
    with (folder / CSV).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def gib(row: Row) -> str:
    return f"{row['peak_bytes'] / 2**30:.2f}" if row.get("peak_bytes") is not None else ""


def _table(rows: list[Row]) -> Table:
    table = Table(title="milliseconds of the slowest rank, median over rounds", title_justify="left")
    words = ("model", "routing", "direction", "method")
    numbers = ("T", "skew", "ms", "TFLOP/s", "of the roof", "peak GiB")
    for word in words:
        table.add_column(word, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right")
    last = None
    for row in rows:
        case = (row["shape"], row["routing"], row["direction"], row["T"])
        if last not in (None, case):
            table.add_section()
        last = case
        method = row["label"]
        skew = row["rank_rows_max"] / row["rank_rows_mean"]
        rates = (f"{row['tflops']:.1f}", f"{row['roof_share']:.0%}", gib(row))
        table.add_row(*case[:3], method, str(row["T"]), f"{skew:.2f}", f"{row['us'] / 1e3:.3f}", *rates)
    return table


def _notes(folder: Path) -> dict[tuple, list[str]]:
    """Cases by (failed, method, reason)."""
    notes: dict[tuple, list[str]] = {}
    for note in read(folder, NOT_TIMED):
        case = " ".join(str(note[name]) for name in ("shape", "routing", "direction", "precision"))
        notes.setdefault((note["failed"], note["method"], note["reason"]), []).append(case)
    return notes


def show(folder: Path, console: Console) -> None:
    """The newest rows that are alike as a table, what was left out, and which peers are absent."""
    if rows := alike(read(folder, ROWS)):
        console.print(_table(rows))
    for (failed, method, reason), cases in _notes(folder).items():
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        kind = "FAILED" if failed else "not timed"
        console.print(f"{kind}: {method} {reason} ({cases[0]}{more})", markup=False, soft_wrap=True)
    environment = folder / ENVIRONMENT
    if environment.exists():
        for name, peer in json.loads(environment.read_text())["peers"].items():
            console.print(f"peer {name}: {peer}", markup=False, soft_wrap=True)


def failed(folder: Path) -> bool:
    """Whether something that was asked for gave a wrong result or raised."""
    return any(note["failed"] for note in read(folder, NOT_TIMED))

"""The pictures of a sweep, from its rows: rates beside peers, slowdown under skew, one call, share of roof, memory."""

import itertools
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .outputs import ROWS, TIMELINE, Row, alike, read
from .timeline import CLOCKS, COMMUNICATION, COMPUTE

INK, GRID = "#333333", "#e6e6e6"
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
}
OURS = ("#2166ac", "#67a9cf", "#08306b", "#9ecae1", "#4292c6", "#c6dbef")
FLOORS = ("#777777", "#bbbbbb")
PEERS = ("#f2b134", "#b2182b", "#5aae61", "#9970ab", "#d6604d", "#1b7837", "#80cdc1")
KINDS = {COMMUNICATION: "#f2b134", COMPUTE: "#2166ac"}
MARKERS = "osD^vPX"
MOST_CALLS = 4  # of the timeline
SMALLEST_WORDS = 0.05  # of the call: a shorter stage has no room for its name

# What tells apart the calls of a timeline; the first three are drawn once.
CALL = ("shape", "call", "precision", "T", "routing", "source")

Case = tuple


def colors(rows: list[Row]) -> dict[str, str]:
    """By label, the same in all pictures of these rows: ours blue, bare products grey."""
    palettes = {"ours": itertools.cycle(OURS), "floor": itertools.cycle(FLOORS), "peer": itertools.cycle(PEERS)}
    by_label = {}
    for row in rows:
        if row["label"] not in by_label:
            kind = row["method"].split("-")[0]
            by_label[row["label"]] = next(palettes[kind if kind in palettes else "peer"])
    return by_label


def first_routing(rows: list[Row]) -> list[Row]:
    """The newest row of each measurement at the routing that was measured first."""
    newest = {
        (r["shape"], r["T"], r["W"], r["direction"], r["label"]): r for r in rows if r["routing"] == rows[0]["routing"]
    }
    return list(newest.values())


def about(rows: list[Row], *, routing: bool = True) -> str:
    row = rows[0]
    what = f"{row['where']}, {row['gpu'] if row['gpu'] != 'none' else 'CPU'}"
    return f"{what}, {row['routing']} routing" if routing else what


def bars(rows: list[Row], value: Callable[[Row], float | None], title: str, unit: str, form: str) -> Figure:
    """A panel a direction, a group of bars a model and number of tokens, a bar a method."""
    shown = [row for row in first_routing(rows) if value(row) is not None]
    directions = list(dict.fromkeys(row["direction"] for row in shown))
    if not shown:
        return _empty(title, about(rows))
    by_label = colors(rows)
    groups = list(dict.fromkeys((row["shape"], row["T"]) for row in shown))
    labels = [label for label in by_label if any(row["label"] == label for row in shown)]
    width = 0.84 / len(labels)
    size = (max(7.0, 2.5 + 0.42 * len(groups) * len(labels)), 1.2 + 2.9 * len(directions))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{title}\n{about(rows)}", fontsize=12)
    for i, direction in enumerate(directions):
        axes = figure.add_subplot(len(directions), 1, i + 1)
        by = {(row["shape"], row["T"], row["label"]): value(row) for row in shown if row["direction"] == direction}
        for j, label in enumerate(labels):
            at = [(k, by[(*group, label)]) for k, group in enumerate(groups) if (*group, label) in by]
            places = [k + (j - (len(labels) - 1) / 2) * width for k, _ in at]
            drawn = axes.bar(places, [v for _, v in at], 0.92 * width, color=by_label[label], label=label)
            axes.bar_label(drawn, [form.format(v) for _, v in at], fontsize=7, padding=1)
        axes.set_title(direction, loc="left", fontsize=11)
        axes.set_xticks(range(len(groups)), [f"{shape}\nT = {T}" for shape, T in groups])
        axes.set_ylabel(unit)
        axes.grid(axis="y", color=GRID)
        axes.set_axisbelow(True)
        axes.margins(y=0.15)
        if i == 0:
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    return figure


def _empty(title: str, words: str) -> Figure:
    figure = Figure(figsize=(7.0, 2.4), layout="constrained")
    figure.suptitle(f"{title}\n{words}", fontsize=12)
    figure.text(0.5, 0.35, "nothing of it was measured here", ha="center", fontsize=11)
    return figure


def tflops(rows: list[Row]) -> Figure:
    return bars(rows, lambda row: row["tflops"], "Useful TFLOP/s of a device", "TFLOP/s", "{:.3g}")


def roof(rows: list[Row]) -> Figure:
    """Bars reach 100 where nothing but the measured roof holds the call back."""

    def percent(row: Row) -> float:
        return 100 * row["roof_share"]

    return bars(rows, percent, "Share of the roof that was measured in the same run", "% of the roof", "{:.0f}")


def memory(rows: list[Row]) -> Figure:
    def peak(row: Row) -> float | None:
        return None if row.get("peak_bytes") is None else row["peak_bytes"] / 2**30

    return bars(rows, peak, "Peak memory of a device beside inputs and weights", "GiB", "{:.2f}")


def skew(rows: list[Row]) -> Figure:
    """Times over those at the most even routing of the same call, by rows of the fullest rank over the mean."""
    lines: dict[Case, dict[float, float]] = {}
    for row in rows:
        if not row["method"].startswith("floor"):
            case = (row["direction"], row["shape"], row["T"], row["label"])
            lines.setdefault(case, {})[row["rank_rows_max"] / row["rank_rows_mean"]] = row["us"]
    by_label, directions = colors(rows), list(dict.fromkeys(case[0] for case in lines))
    models = list(dict.fromkeys(case[1:3] for case in lines))
    worst = max(x for points in lines.values() for x in points)
    figure = Figure(figsize=(2.5 + 4.5 * len(directions), 4.8), layout="constrained")
    figure.suptitle(f"Slowdown against the imbalance of ranks\n{about(rows, routing=False)}", fontsize=12)
    for i, direction in enumerate(directions):
        axes = figure.add_subplot(1, len(directions), i + 1)
        axes.plot([1, worst], [1, worst], color="#999999", linestyle="--", linewidth=1, label="as the fullest rank")
        for (_, shape, T, label), points in ((case, p) for case, p in lines.items() if case[0] == direction):
            xs = sorted(points)
            marker = MARKERS[models.index((shape, T)) % len(MARKERS)]
            name = label if len(models) == 1 else f"{label}, {shape}, T = {T}"
            ys = [points[x] / points[xs[0]] for x in xs]
            axes.plot(xs, ys, color=by_label[label], marker=marker, markersize=5, linewidth=1.6, label=name)
        axes.set_title(direction, loc="left", fontsize=11)
        axes.set_xlabel("rows of the fullest rank / mean of the ranks")
        axes.set_ylabel("time / time at the most even routing")
        axes.grid(color=GRID)
        if i == len(directions) - 1:
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    return figure


def timeline(rows: list[Row], intervals: list[Row]) -> Figure:
    """The first call of each model, direction and precision, in two lanes: what communicates, and what computes. By the
    kernels' own clocks where they were recorded."""
    calls: dict[Case, list[Row]] = {}
    for row in intervals:
        calls.setdefault(tuple(row[name] for name in CALL), []).append(row)
    by_clocks_first = sorted(calls, key=lambda case: case[CALL.index("source")] != CLOCKS)
    first = {case[:3]: case for case in reversed(by_clocks_first)}
    chosen = [case for case in calls if case in first.values()][:MOST_CALLS]
    title = "Stages of one call"
    if not chosen:
        return _empty(title, about(rows))
    figure = Figure(figsize=(12, 0.9 + 1.75 * len(chosen)), layout="constrained")
    figure.suptitle(f"{title}\n{about(intervals, routing=False)}; the first process", fontsize=12)
    for i, case in enumerate(chosen):
        _draw_call(figure.add_subplot(len(chosen), 1, i + 1), case, calls[case])
    handles = [Patch(color=color, label=kind) for kind, color in KINDS.items()]
    figure.legend(handles=handles, frameon=False, loc="upper right", ncols=2)
    return figure


def _draw_call(axes: Axes, case: Case, parts: list[Row]) -> None:
    shape, call, precision, T, routing, source = case
    end = max(part["start_us"] + part["us"] for part in parts)
    for part in parts:
        lane = list(KINDS).index(part["kind"])
        place, length = part["start_us"], part["us"]
        axes.broken_barh(
            [(place, length)], (0.65 - lane, 0.7), color=KINDS[part["kind"]], edgecolor="white", linewidth=0.5
        )
        if length > SMALLEST_WORDS * end:
            color = "white" if part["kind"] == COMPUTE else INK
            axes.text(place + length / 2, 1.0 - lane, part["stage"], ha="center", va="center", fontsize=7, color=color)
    what = f"{shape}, T = {T}, {routing}, {call}, {precision}"
    axes.set_title(f"{what}: {end:.0f} us by {source}", loc="left", fontsize=10)
    axes.set_yticks([1.0, 0.0], list(KINDS))
    axes.set_xlim(0, end)
    axes.set_ylim(-0.5, 1.5)
    axes.set_xlabel("microseconds")


def save(path: Path, make: Callable[..., Figure], *given) -> Path:
    """make(*given) in our style, as a PNG."""
    with matplotlib.rc_context(STYLE):
        make(*given).savefig(path, dpi=130)
    return path


def draw_all(folder: Path) -> list[Path]:
    """All pictures of a folder with rows or calls, of those that are alike."""
    rows, calls = (alike(read(folder, name)) for name in (ROWS, TIMELINE))
    of_rows = (tflops, roof, memory, skew) if rows else ()
    paths = [save(folder / f"{make.__name__}.png", make, rows) for make in of_rows]
    return [*paths, save(folder / "timeline.png", timeline, rows, calls)]

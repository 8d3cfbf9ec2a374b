"""The picture of `dist-moe plan`: device memory of a rank as stacked bars, in GiB."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

INK = "#333333"
COLORS = (
    "#8da0cb",
    "#9ecae1",
    "#4292c6",
    "#6baed6",
    "#c6dbef",
    "#f2b134",
    "#999999",
    "#5aae61",
    "#a6dba0",
    "#d9f0d3",
)
SMALLEST_LABEL = 0.035  # of the highest bar; what is lower has no room for its number


def build(bars: dict[str, dict[str, int]], title: str) -> Figure:
    """One bar a label, stacked from the bytes of its components; the same component has the same colour in all."""
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    totals = [sum(parts.values()) / 2**30 for parts in bars.values()]
    highest = max(totals)
    style = {"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
    with matplotlib.rc_context(style | {"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(5.5 + 1.3 * len(bars), 5.6), layout="constrained")  # needs no display
        axes = figure.add_subplot()
        bottoms = [0.0] * len(bars)
        for name, color in zip(names, COLORS[: len(names)], strict=True):
            heights = [parts.get(name, 0) / 2**30 for parts in bars.values()]
            drawn = axes.bar(list(bars), heights, 0.62, bottoms, color=color, edgecolor="white", label=name)
            labels = [f"{height:.3g}" if height >= SMALLEST_LABEL * highest else "" for height in heights]
            axes.bar_label(drawn, labels, label_type="center", fontsize=9)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        for at, total in enumerate(totals):
            axes.text(at, total + 0.01 * highest, f"{total:.3g} GiB", ha="center", va="bottom", weight="bold")
        axes.set_ylim(0, 1.08 * highest)
        axes.set_xlim(-0.6, len(bars) - 0.4)
        axes.set_ylabel("device memory of a rank, GiB")
        axes.set_title(title, loc="left", fontsize=11)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw(out: Path, bars: dict[str, dict[str, int]], title: str) -> None:
    """Save the picture; its kind is that of the file's ending."""
    build(bars, title).savefig(out, dpi=130)

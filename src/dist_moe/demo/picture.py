"""The demo's picture: the losses, their differences, and the load of the experts."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, ORACLE, RANKS, MXFP8 = "#333333", "#f2b134", "#2166ac", "#b2182b"
LAYERS = ("#9ecae1", "#4292c6", "#08519c", "#08306b")
SMALLEST_DIFFERENCE = 1e-6  # what equal losses are drawn at on the logarithmic axis


def draw(
    out: Path, curves: dict[str, list[float]], rows_LE: list[list[float]], ranks_label: str, num_ranks: int
) -> None:
    """Save the picture; its kind is that of the file's ending. curves: of "oracle" and "ranks", perhaps of "mxfp8"."""
    style = {
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": "#999999",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(12, 5.2), layout="constrained")  # a Figure of its own needs no display
        times = "twice" if len(curves) == 2 else "three times"
        figure.suptitle(f"dist_moe demo: one mixture-of-experts model, trained {times}", fontsize=13, fontweight="bold")
        grid = figure.add_gridspec(2, 2, height_ratios=(3, 1), width_ratios=(1.15, 1))
        loss = figure.add_subplot(grid[0, 0])
        _draw_losses(loss, figure.add_subplot(grid[1, 0], sharex=loss), curves, ranks_label)
        _draw_load(figure.add_subplot(grid[:, 1]), rows_LE, num_ranks)
        figure.savefig(out, dpi=130)


def _draw_losses(loss, difference, curves: dict[str, list[float]], ranks_label: str) -> None:
    losses = curves["ranks"]
    loss.plot(curves["oracle"], color=ORACLE, linewidth=5, label="1 rank, by the oracle")
    loss.plot(losses, color=RANKS, linewidth=1.4, label=f"{ranks_label}, by dist_moe")
    differences = [("oracle", RANKS, "ranks - oracle")]
    if "mxfp8" in curves:
        loss.plot(curves["mxfp8"], color=MXFP8, linewidth=1, label=f"{ranks_label}, by dist_moe in MXFP8")
        differences.append(("mxfp8", MXFP8, "MXFP8 - BF16"))
    loss.set_ylabel("loss, nats a byte")
    loss.set_title(f"Loss: {losses[0]:.2f} to {losses[-1]:.2f}", loc="left", fontsize=11)
    loss.grid(axis="y", color="#e6e6e6")
    loss.tick_params(labelbottom=False)
    loss.legend(frameon=False)

    for name, color, label in differences:
        gaps = [max(abs(a - b), SMALLEST_DIFFERENCE) for a, b in zip(losses, curves[name], strict=False)]
        difference.semilogy(gaps, color=color, linewidth=1, label=label)
    if len(differences) > 1:
        difference.legend(frameon=False, fontsize=8, ncols=2)
    difference.set_ylabel("|difference|")
    difference.set_xlabel("step")
    difference.grid(axis="y", color="#e6e6e6")
    difference.xaxis.set_major_locator(MaxNLocator(integer=True))
    difference.margins(x=0.01)


def _draw_load(axes, rows_LE: list[list[float]], num_ranks: int) -> None:
    """One group of bars an expert, one bar a layer; bands show which rank owns the expert."""
    num_layers, num_experts = len(rows_LE), len(rows_LE[0])
    highest, width = max(map(max, rows_LE)), 0.8 / num_layers
    for layer, rows in enumerate(rows_LE):
        centres = [expert + (layer - (num_layers - 1) / 2) * width for expert in range(num_experts)]
        axes.bar(centres, rows, width * 0.92, color=LAYERS[layer % len(LAYERS)], label=f"layer {layer}", zorder=2)
    balanced = sum(rows_LE[0]) / num_experts
    axes.axhline(balanced, color=INK, linewidth=1, linestyle="--", zorder=3, label="balanced")
    experts_per_rank = num_experts // num_ranks
    for rank in range(num_ranks):
        start = rank * experts_per_rank - 0.5
        axes.axvspan(start, start + experts_per_rank, color="#f0f0f0" if rank % 2 == 0 else "white", zorder=0)
        axes.text(start + experts_per_rank / 2, 1.13 * highest, f"rank {rank}", ha="center", va="top", weight="bold")
    axes.set_xlim(-0.5, num_experts - 0.5)
    axes.set_ylim(0, 1.15 * highest)
    axes.set_xticks(range(num_experts))
    axes.set_xlabel("expert")
    axes.set_ylabel("rows a step")
    axes.set_title("Load: rows of every expert, mean of a step", loc="left", fontsize=11)
    axes.legend(frameon=False, ncols=num_layers + 1, loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=9)

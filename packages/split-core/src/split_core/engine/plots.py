"""Curves, histograms and bars.  One palette, told apart by colour-blind eyes; sizes that read at half width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from split_core.engine.methods import MATCHED, WARM

Array = NDArray[Any]
OWN = "#D55E00"
OTHERS = ("#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#B3A300", "#000000")
DENSE = "#555555"
"""Okabe and Ito's colours."""
MARKERS = "osD^vPX*<>ph"
DPI = 130


def palette(methods: Iterable[str], own: Iterable[str] = ()) -> dict[str, str]:
    """A colour per method: the learned ones orange, dense grey, the others in order."""
    chosen, left = dict.fromkeys(own, OWN), iter(OTHERS * 4)
    return {m: chosen.get(m) or (DENSE if m in ("dense", "timm") else next(left)) for m in dict.fromkeys(methods)}


def lengths(results: Mapping[str, Any], tokens: Mapping[str, Array], path: Path) -> None:
    """Histogram of tokens per image, one strip per method on a common axis, with means and the budget."""
    rows = {row["method"]: row for row in results["rows"] if row["method"] in tokens}
    own = results["rows"][-1]
    colours = palette(rows, [own["method"]])
    cells = round(max(t.max() for t in tokens.values()) if "dense" not in tokens else float(tokens["dense"].max()))
    # A split adds three tokens (at one stage): bins are whole threes wide, so that none is empty by construction.
    width = 3 * max(1, round(cells / 120))
    edges = cells + width * (np.arange(-(-cells // width) + 2) - -(-cells // width) - 0.5)
    figure, axes = panels(len(rows), 1, (7.5, 0.95 * len(rows) + 1.0), sharex=True)
    for axis, (name, row) in zip(axes, rows.items(), strict=True):
        counts, _ = np.histogram(tokens[name], edges)
        axis.stairs(counts / max(counts.sum(), 1), edges, fill=True, color=colours[name], alpha=0.85)
        axis.axvline(own["rho"] * cells, color="black", linestyle=":", linewidth=1.2)
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        side = 0.01 if tokens[name].mean() > 0.35 * cells else 0.99
        label = f"{name}\nmean {row['token_fraction']:.2f}"
        axis.text(side, 0.92, label, transform=axis.transAxes, ha="left" if side < 0.5 else "right", va="top")
    axes[-1].set_xlabel(f"patch tokens per image (of {cells}); dotted: budget {own['rho']:g}")
    save(figure, path)


def training(metrics: Sequence[Mapping[str, Any]], own: Mapping[str, Any], path: Path) -> None:
    """What the warm start and the estimator logged, step by step."""
    name = own["method"].removesuffix(MATCHED)
    warm = [line for line in metrics if line["phase"] == f"adapt_{name}{WARM}"]
    learnt = [line for line in metrics if line["phase"] == f"estimate_{name}"]
    adapted = sorted({line["phase"] for line in metrics if line["phase"].startswith("adapt_")})
    if not learnt and not warm:
        figure, axes = panels(1, 1, (6.0, 3.4))
        _errors(axes[0], metrics, adapted)
        save(figure, path)
        return
    figure, axes = panels(2, 4, (15.0, 6.2))
    _curve(axes[0], warm, ["tau"], "warm start: threshold τ")
    _curve(axes[1], warm, ["token_fraction"], "warm start: token fraction", rho=own["rho"])
    _curve(axes[2], warm, ["imitation"], "warm start: imitation loss")
    _errors(axes[3], metrics, adapted)
    _curve(axes[4], learnt, ["lambda"], "multiplier λ")
    _curve(
        axes[5],
        learnt,
        ["token_fraction", "deployed_fraction"],
        "token fraction",
        rho=own["rho"],
        names=("sampled", "deployed"),
    )
    _curve(axes[6], learnt, ["error"], "error of the rollouts")
    clips = sorted({key for line in learnt for key in line if key.startswith("clip_fraction")})
    _curve(
        axes[7],
        learnt,
        [*clips, "entropy"],
        "clip fraction, entropy",
        names=(*(f"clipped, epoch {c[-1]}" for c in clips), "entropy"),
    )
    for axis in axes[4:]:
        axis.set_xlabel(f"step of {name}'s training")
    save(figure, path)


def bench(results: Mapping[str, Any], path: Path) -> None:
    """Images per second of every row; a line for the dense model, a tick for what the FLOPs promise."""
    sizes = list(dict.fromkeys(row["batch_size"] for row in results["rows"]))
    groups = [[row for row in results["rows"] if row["batch_size"] == size] for size in sizes]
    colours = palette((row["method"] for row in results["rows"]), [results["rows"][-1]["method"]])
    figure, axes = panels(1, len(sizes), (1.5 + 5.2 * len(sizes), 1.4 + 0.36 * len(groups[0])))
    for axis, size, rows in zip(axes, sizes, groups, strict=True):
        dense = rows[0]["images_per_s"]
        y = np.arange(len(rows))
        values = np.array([dense * row["speedup"] for row in rows])
        spread = np.array([[dense * (row["speedup"] - row["speedup_spread"][0]) for row in rows],
                           [dense * (row["speedup_spread"][1] - row["speedup"]) for row in rows]])  # fmt: skip
        axis.barh(y, values, xerr=spread, color=[colours[row["method"]] for row in rows], height=0.72,
                  error_kw={"elinewidth": 1, "ecolor": "black", "capsize": 2})  # fmt: skip
        axis.axvline(dense, color="black", linestyle=":", linewidth=1.2, label="dense timm model")
        axis.scatter([dense * row["ideal_speedup"] for row in rows], y, marker="|", s=190, color="black", linewidth=2,
                     zorder=3, label="FLOPs-ideal")  # fmt: skip
        axis.set_yticks(y, [_bench_label(row) for row in rows])
        axis.invert_yaxis()
        axis.set_xlabel("images/s")
        axis.set_title(f"batch size {size}")
        axis.set_xlim(0, 1.12 * max(dense * row["ideal_speedup"] for row in rows))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    save(figure, path)


def _bench_label(row: Mapping[str, Any]) -> str:
    return row["method"] if row["rho"] is None else f"{row['method']}, {row['rho']:g} {row['lengths']}"


def _curve(
    axis: Axes, lines: Sequence[Mapping[str, Any]], keys: Sequence[str], title: str, *, rho: float | None = None,
    names: Sequence[str] = (),
) -> None:  # fmt: skip
    """Faint values and their running mean."""
    axis.set_title(title)
    for index, key in enumerate(keys):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if not points:
            continue
        x, y = (np.array(column, dtype=float) for column in zip(*points, strict=True))
        colour = [OWN, *OTHERS][index]
        axis.plot(x, y, color=colour, linewidth=0.7, alpha=0.35)
        axis.plot(x, smooth(y), color=colour, linewidth=1.7, label=names[index] if names else None)
    if rho is not None:
        axis.axhline(rho, color="black", linestyle=":", linewidth=1.2, label=f"budget {rho:g}")
    if not axis.lines or (rho is not None and len(axis.lines) == 1):
        axis.text(0.5, 0.5, "nothing logged", transform=axis.transAxes, ha="center", va="center")
    legend(axis)


def _errors(axis: Axes, metrics: Sequence[Mapping[str, Any]], phases: Sequence[str]) -> None:
    """The task's error while each method's backbone adapted."""
    axis.set_title("error while the backbones adapt")
    for index, phase in enumerate(phases):
        points = [(line["step"], line["error"]) for line in metrics if line["phase"] == phase and "error" in line]
        if points:
            x, y = (np.array(column, dtype=float) for column in zip(*points, strict=True))
            label = phase.removeprefix("adapt_")
            axis.plot(
                x, smooth(y), linewidth=1.4, label=label, color=DENSE if label == "dense" else [OWN, *OTHERS][index % 8]
            )
    axis.set_xlabel("step")
    legend(axis)


def smooth(values: Array) -> Array:
    """Centred running mean over a tenth of the curve; shorter at its ends."""
    half = max(1, len(values) // 20)
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def panels(
    rows: int, columns: int, size: tuple[float, float], *, whole: bool = True, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Axes row by row, without frames."""
    figure = Figure(figsize=size, layout="constrained")
    axes = list(np.ravel(figure.subplots(rows, columns, squeeze=False, **options)))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x" if columns == 1 and rows > 1 else "both", linewidth=0.5, alpha=0.4)
        axis.set_axisbelow(True)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=whole))
    return figure, axes


def legend(axis: Axes) -> None:
    """A legend where something is labelled."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8.5)


def save(figure: Figure, path: Path) -> None:
    """As a picture, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)

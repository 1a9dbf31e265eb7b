"""Curves, histograms and bars.  One palette, told apart by colour-blind eyes; sizes that read at half width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from split_core.engine.methods import MATCHED, WARM
from split_core.engine.tables import speed_of

Array = NDArray[Any]
OWN = "#D55E00"
OTHERS = ("#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#B3A300", "#000000")
DENSE = "#555555"
"""Okabe and Ito's colours."""
MARKERS = "osD^vPX*"
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
    figure, axes = _panels(len(rows), 1, (7.5, 0.95 * len(rows) + 1.0), sharex=True)
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
    _save(figure, path)


def training(metrics: Sequence[Mapping[str, Any]], own: Mapping[str, Any], path: Path) -> None:
    """What the warm start and the estimator logged, step by step."""
    name = own["method"].removesuffix(MATCHED)
    warm = [line for line in metrics if line["phase"] == f"adapt_{name}{WARM}"]
    learnt = [line for line in metrics if line["phase"] == f"estimate_{name}"]
    adapted = sorted({line["phase"] for line in metrics if line["phase"].startswith("adapt_")})
    if not learnt and not warm:
        figure, axes = _panels(1, 1, (6.0, 3.4))
        _errors(axes[0], metrics, adapted)
        _save(figure, path)
        return
    figure, axes = _panels(2, 4, (15.0, 6.2))
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
    _save(figure, path)


def merged(content: Mapping[str, Any], path: Path) -> None:
    """Metric over token fraction for every method and budget, and the curves of every run."""
    figure, axes = _panels(2, 2, (11.5, 8.0))
    _pareto(axes[0], content)
    rhos = sorted({curve["rho"] for curve in content["curves"]})
    colours = dict(zip(rhos, [OWN, *OTHERS] * len(rhos), strict=False))
    titles = {"lambda": "multiplier λ", "token_fraction": "token fraction", "error": "error of the rollouts"}
    for axis, (key, title) in zip(axes[1:], titles.items(), strict=True):
        axis.set_title(title)
        axis.set_xlabel("step of the policy's training")
        for curve in content["curves"]:
            label = f"budget {curve['rho']:g}" if curve["seed"] == min(c["seed"] for c in content["curves"]) else None
            if curve[key]:
                axis.plot(
                    curve["step"], curve[key], color=colours[curve["rho"]], linewidth=1.3, alpha=0.85, label=label
                )
        if key == "token_fraction":
            for curve in content["curves"]:
                if curve["deployed_fraction"]:
                    axis.plot(
                        curve["step"],
                        curve["deployed_fraction"],
                        color=colours[curve["rho"]],
                        linewidth=1,
                        linestyle="--",
                    )
            for rho in rhos:
                axis.axhline(rho, color="black", linestyle=":", linewidth=1)
            axis.set_title(f"{title} (sampled; dashed: deployed; dotted: budget)")
        _legend(axis)
    _save(figure, path)


def compared(content: Mapping[str, Any], path: Path) -> None:
    """Metric over FLOPs kept, and over the measured time at each batch size, both as shares of the dense model's."""
    bench = content["bench"]["rows"]
    sizes = list(dict.fromkeys(row["batch_size"] for row in bench))
    figure, axes = _panels(1, 1 + len(sizes), (1.6 + 4.6 * (1 + len(sizes)), 5.2), whole=False)
    costs: list[tuple[str, Callable[[Mapping[str, Any]], float | None]]] = [("FLOPs", _flops)]
    costs += [(f"time, batch {size}", partial(_time, bench, size)) for size in sizes]
    for axis, (name, cost) in zip(axes, costs, strict=True):
        _tradeoff(axis, content, cost)
        axis.set_xlabel(f"{name} (share of the dense model's)")
        axis.axvline(1, color="black", linestyle=":", linewidth=1)
    axes[0].set_ylabel(content["metric"])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(7, len(labels)), frameon=False)
    _save(figure, path)


def _flops(row: Mapping[str, Any]) -> float | None:
    return None if row["ideal_speedup"] is None else 1 / row["ideal_speedup"]["mean"]


def _time(bench: Sequence[Mapping[str, Any]], size: int, row: Mapping[str, Any]) -> float | None:
    found = speed_of(bench, row["method"], row["rho"], size)
    return None if found is None else 1 / found["speedup"]


def _tradeoff(axis: Axes, content: Mapping[str, Any], cost: Callable[[Mapping[str, Any]], float | None]) -> None:
    metric, rows = content["metric"], content["aggregate"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    colours = palette(methods, content["methods"])
    for index, name in enumerate(methods):
        points = [
            (cost(r), r[metric]["mean"], r[metric]["std"] or 0.0) for r in rows if r["method"] == name and r[metric]
        ]
        points = sorted(point for point in points if point[0] is not None)
        if not points:
            continue
        x, y, spread = zip(*points, strict=True)
        style: dict[str, Any] = {"color": colours[name], "marker": MARKERS[index % len(MARKERS)], "markersize": 6}
        if name == "dense":
            axis.axhline(float(np.mean(y)), color=colours[name], linestyle="--", linewidth=1.2, label=name)
        else:
            axis.errorbar(x, y, yerr=spread, label=name, capsize=3, linewidth=1.3, **style)


def bench(results: Mapping[str, Any], path: Path) -> None:
    """Images per second of every row; a line for the dense model, a tick for what the FLOPs promise."""
    sizes = list(dict.fromkeys(row["batch_size"] for row in results["rows"]))
    groups = [[row for row in results["rows"] if row["batch_size"] == size] for size in sizes]
    colours = palette((row["method"] for row in results["rows"]), [results["rows"][-1]["method"]])
    figure, axes = _panels(1, len(sizes), (1.5 + 5.2 * len(sizes), 1.4 + 0.36 * len(groups[0])))
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
    _save(figure, path)


def _bench_label(row: Mapping[str, Any]) -> str:
    return row["method"] if row["rho"] is None else f"{row['method']}, {row['rho']:g} {row['lengths']}"


def _pareto(axis: Axes, content: Mapping[str, Any]) -> None:
    metric, rows = content["metric"], content["aggregate"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    colours = palette(methods, content["methods"])
    for index, name in enumerate(methods):
        points = sorted(
            (r["token_fraction"]["mean"], r[metric]["mean"], r[metric]["std"] or 0.0)
            for r in rows
            if r["method"] == name and r[metric]
        )
        if not points:
            continue
        x, y, spread = zip(*points, strict=True)
        if min(x) > 0.999:  # a level to compare with, which as a point would squeeze the others together
            axis.axhline(float(np.mean(y)), color=colours[name], linestyle="--", linewidth=1.2, label=name)
            continue
        marker = MARKERS[index % len(MARKERS)]
        style: dict[str, Any] = {
            "color": colours[name],
            "marker": marker,
            "markersize": 6,
            "capsize": 3,
            "linewidth": 1.3,
        }
        axis.errorbar(x, y, yerr=spread, label=name, **style)
    axis.set_xlabel("token fraction")
    axis.set_ylabel(metric)
    axis.set_title(f"{metric} over token fraction (bars: std over seeds)")
    _legend(axis)


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
    _legend(axis)


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
    _legend(axis)


def smooth(values: Array) -> Array:
    """Centred running mean over a tenth of the curve; shorter at its ends."""
    half = max(1, len(values) // 20)
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def _panels(
    rows: int, columns: int, size: tuple[float, float], *, whole: bool = True, **options: Any
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained")
    axes = list(np.ravel(figure.subplots(rows, columns, squeeze=False, **options)))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x" if columns == 1 and rows > 1 else "both", linewidth=0.5, alpha=0.4)
        axis.set_axisbelow(True)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=whole))
    return figure, axes


def _legend(axis: Axes) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8.5)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)

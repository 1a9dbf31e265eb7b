"""What a method keeps of the metric over what it costs: several runs in one picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from split_core.engine.plots import MARKERS, OTHERS, OWN, legend, palette, panels, save
from split_core.engine.tables import speed_of

Row = Mapping[str, Any]
Cost = Callable[[Row], float | None]
CURVES = {
    "lambda": "multiplier λ",
    "token_fraction": "token fraction (sampled; dashed: deployed; dotted: budget)",
    "error": "error while the policy learned",
}


def merged(content: Mapping[str, Any], path: Path) -> None:
    """Metric over token fraction and over measured speed for every method and budget, and what the learners logged."""
    costs: dict[str, Cost] = {"token fraction": partial(_mean, "token_fraction")}
    if any(row.get("speedup") for row in content["aggregate"]):
        costs["speed-up of the whole pipeline over the dense model"] = partial(_mean, "speedup")
    curves = [key for key in CURVES if any(curve[key] for curve in content["curves"])]
    count = len(costs) + len(curves)
    figure, axes = panels(-(-count // 2), 2, (11.5, 4.0 * -(-count // 2)), whole=False)
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis, (name, cost) in zip(axes, costs.items(), strict=False):
        _tradeoff(axis, content, cost)
        axis.set_xlabel(name)
        axis.set_ylabel(content["metric"])
        axis.set_title(f"{content['metric']} (bars: std over seeds)")
    for axis, key in zip(axes[len(costs) :], curves, strict=False):
        _learned(axis, content["curves"], key)
    _name_methods(figure, axes[0])
    save(figure, path)


def compared(content: Mapping[str, Any], path: Path) -> None:
    """Metric over FLOPs kept, and over the measured time at each batch size, both as shares of the dense model's."""
    bench = content["bench"]["rows"]
    sizes = list(dict.fromkeys(row["batch_size"] for row in bench))
    figure, axes = panels(1, 1 + len(sizes), (1.6 + 4.6 * (1 + len(sizes)), 5.2), whole=False)
    costs: list[tuple[str, Cost]] = [("FLOPs", _flops)]
    costs += [(f"time, batch {size}", partial(_time, bench, size)) for size in sizes]
    for axis, (name, cost) in zip(axes, costs, strict=True):
        _tradeoff(axis, content, cost)
        axis.set_xlabel(f"{name} (share of the dense model's)")
        axis.axvline(1, color="black", linestyle=":", linewidth=1)
    axes[0].set_ylabel(content["metric"])
    _name_methods(figure, axes[0])
    save(figure, path)


def _name_methods(figure: Figure, axis: Axes) -> None:
    """One legend for all panels, below them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(7, len(labels)), frameon=False)


def _learned(axis: Axes, curves: Sequence[Row], key: str) -> None:
    """One logged number of every run, coloured by budget and, where there are several, by what learned."""
    several = len({curve["method"] for curve in curves}) > 1
    names = [f"{curve['method']}, " * several + f"budget {curve['rho']:g}" for curve in curves]
    colours = dict(zip(sorted(set(names)), [OWN, *OTHERS] * len(names), strict=False))
    for name, curve in zip(names, curves, strict=True):
        style: dict[str, Any] = {"color": colours[name], "linewidth": 1.3, "alpha": 0.85}
        if curve[key]:
            label = None if name in axis.get_legend_handles_labels()[1] else name
            axis.plot(curve["step"], curve[key], label=label, **style)
        if key == "token_fraction" and curve["deployed_fraction"]:
            axis.plot(curve["step"], curve["deployed_fraction"], linestyle="--", **style)
    if key == "token_fraction":
        for rho in {curve["rho"] for curve in curves}:
            axis.axhline(rho, color="black", linestyle=":", linewidth=1)
    axis.set_title(CURVES[key])
    axis.set_xlabel("step of the policy's training")
    legend(axis)


def _mean(key: str, row: Row) -> float | None:
    return None if row.get(key) is None else row[key]["mean"]


def _flops(row: Row) -> float | None:
    return None if row["ideal_speedup"] is None else 1 / row["ideal_speedup"]["mean"]


def _time(bench: Sequence[Mapping[str, Any]], size: int, row: Row) -> float | None:
    found = speed_of(bench, row["method"], row["rho"], size)
    return None if found is None else 1 / found["speedup"]


def _tradeoff(axis: Axes, content: Mapping[str, Any], cost: Cost) -> None:
    """A line for each method over its budgets, bars for the spread over seeds; the dense model is a level."""
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

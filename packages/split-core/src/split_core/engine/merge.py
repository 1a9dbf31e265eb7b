"""Several runs (seeds, budgets) in one results file: all rows, means over seeds, curves of the policy's training."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from split_core.engine.methods import MATCHED
from split_core.engine.pairing import pair_across
from split_core.engine.results import RESULTS, metric_of, read_metrics, read_results
from split_core.engine.session import provenance
from split_core.engine.tables import further_of
from split_core.errors import SplitError

Row = Mapping[str, Any]
NUMBERS = ("token_fraction", "error", "object_recall", "images_per_s", "speedup", "ideal_speedup")
CURVES = ("lambda", "token_fraction", "deployed_fraction", "error")
POINTS = 120
"""Curves are thinned to this many means of neighbouring steps."""


def merge(runs: Sequence[str], title: str) -> dict[str, Any]:
    """The rows of all runs, their aggregate, and their curves.

    Returns: {"command", "commit", "machine", "title", "metric", "methods" (learned ones), "runs", "rows", "aggregate",
        "curves"}. `commit` and `machine` are the runs'; `runs` holds each one's command.

    Raises:
        SplitError: a run has no results, two runs hold the same seed and budget, or their metrics differ.
    """
    contents = [
        read_results(Path(run) / RESULTS, hint=f"finish the run first (do=train run_dir={run})") for run in runs
    ]
    check_distinct(runs, contents)
    rows = pair_across(runs, contents)
    metrics = {metric_of(row) for row in rows}
    if len(metrics) != 1:
        raise SplitError(f"report.runs: the runs have different metrics: {', '.join(sorted(map(str, metrics)))}")
    metric = metrics.pop() or "score"
    facts = provenance()
    return {
        "command": facts["command"],
        "commit": _joined(content["commit"] for content in contents),
        "machine": _joined(content["machine"] for content in contents),
        "title": title,
        "metric": metric,
        "methods": list(dict.fromkeys(content["rows"][-1]["method"] for content in contents)),
        "runs": [{key: content[key] for key in ("command", "commit", "machine")} for content in contents],
        "rows": rows,
        "aggregate": aggregate(rows, metric),
        "curves": [curves(Path(run), content["rows"][-1]) for run, content in zip(runs, contents, strict=True)],
    }


def check_distinct(runs: Sequence[str], contents: Sequence[Mapping[str, Any]]) -> None:
    """Refuse runs of the same seed and budget that would count one method twice."""
    seen: dict[tuple[Any, ...], str] = {}
    for run, content in zip(runs, contents, strict=True):
        for row in content["rows"]:
            key = (row["method"], row["rho"], row["seed"])
            if key in seen:
                raise SplitError(
                    f"report.runs: {seen[key]} and {run} both hold {key[0]} at budget {key[1]:g}, seed {key[2]}"
                )
            seen[key] = run


def aggregate(rows: Sequence[Row], metric: str) -> list[dict[str, Any]]:
    """Per budget and method: mean and standard deviation over seeds of every number, and paired differences combined.

    A difference's `se` is that of the mean over seeds, sqrt(sum se_i^2) / n: the images' share of the doubt. Its `std`
    is the spread over seeds, which the training's randomness adds to; None for a single seed.
    """
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["rho"], row["method"]), []).append(row)
    order = sorted(groups, key=lambda key: -key[0])  # stable: within a budget the order of the runs
    return [
        {
            "method": method,
            "rho": rho,
            "seeds": len(group),
            **{key: mean_std([row.get(key) for row in group]) for key in (metric, *NUMBERS, *further_of(group))},
            "minus": {
                other: combined(group, other)
                for other in dict.fromkeys(other for row in group for other in row.get("minus", {}))
            },
        }
        for (rho, method) in order
        for group in [groups[rho, method]]
    ]


def mean_std(values: Sequence[float | int | None]) -> dict[str, float | None] | None:
    """Mean and sample standard deviation; None where some row lacks the number, no std for a single one."""
    present = [value for value in values if value is not None]
    if len(present) != len(values):
        return None
    return {"mean": statistics.fmean(present), "std": statistics.stdev(present) if len(present) > 1 else None}


def combined(rows: Sequence[Row], other: str) -> dict[str, float | int | None]:
    """Paired differences to `other` over the seeds that have it.

    The combined `se` takes the seeds' test images for independent, as generated data are. Where every seed sees the
    same images it is too small by up to sqrt(n); read the `std` over seeds there.
    """
    found = [row["minus"][other] for row in rows if other in row["minus"]]
    means, errors = [d["mean"] for d in found], [d["se"] for d in found]
    return {
        "mean": statistics.fmean(means),
        "se": None if None in errors else sum(se * se for se in errors) ** 0.5 / len(found),
        "std": statistics.stdev(means) if len(means) > 1 else None,
        "seeds": len(found),
    }


def curves(run: Path, own: Row) -> dict[str, Any]:
    """What happened while the run's policy learned, thinned; empty lists where nothing was learned."""
    phase = f"estimate_{own['method'].removesuffix(MATCHED)}"
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == phase]
    thinned = {key: thin([line.get(key) for line in lines]) for key in ("step", *CURVES)}
    return {"method": own["method"], "rho": own["rho"], "seed": own["seed"], **thinned}


def thin(values: Sequence[float | int | None], points: int = POINTS) -> list[float]:
    """At most `points` means of equal runs of neighbours; missing values are passed over."""
    present = [value for value in values if value is not None]
    width = max(1, -(-len(present) // points))
    return [statistics.fmean(present[i : i + width]) for i in range(0, len(present), width)]


def _joined(values: Any) -> str:
    return ", ".join(dict.fromkeys(values))

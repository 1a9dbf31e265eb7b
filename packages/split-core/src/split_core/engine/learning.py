"""How fast policies learn: what runs of different estimators and lengths reached, over images seen and over seconds.

``do=report report.kind=learning report.runs=[DIR,...] report.out=docs/results/NAME`` gathers the policy of every run
(at the matched budget if it was) into NAME.json, and its means over seeds into NAME.md and NAME.png. A run that kept
snapshots (`estimator.snapshots`) gives them too, and its warm start as the policy of no images (the paper's Table 9).
Images that warm starts saw are not counted: all runs begin from one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from split_core import resolve
from split_core.engine.merge import Row, mean_std
from split_core.engine.methods import MATCHED, stage_of
from split_core.engine.plots import MARKERS, OTHERS, OWN, legend, panels, save
from split_core.engine.results import RESULTS, metric_of, read_results
from split_core.engine.session import provenance
from split_core.engine.tables import Table, further_of, number
from split_core.engine.tables import mean_std as cell
from split_core.errors import SplitError

NUMBERS = ("token_fraction", "object_recall", "learned_seconds")


def gather(runs: Sequence[str], title: str) -> dict[str, Any]:
    """Points of all runs and their means over seeds.

    Raises:
        SplitError: a run has no results, or learned no policy.
    """
    rows, contents = [], []
    for run in runs:
        content = read_results(Path(run) / RESULTS, hint=f"finish the run first (do=train run_dir={run})")
        own = content["rows"][-1]
        if "learned_images" not in own:
            raise SplitError(f"report.runs: {run} has learned no policy, so there is nothing to show of its learning")
        contents.append(content)
        name = learner(Path(run), own)
        rows += [
            {**{k: v for k, v in row.items() if k != "minus"}, "learner": name} for row in path_of(content["rows"])
        ]
    metric = metric_of(rows[0]) or "score"
    return {
        **provenance(), "title": title, "kind": "learning", "metric": metric,
        "commit": ", ".join(dict.fromkeys(content["commit"] for content in contents)),
        "machine": ", ".join(dict.fromkeys(content["machine"] for content in contents)),
        "runs": [{key: content[key] for key in ("command", "commit", "machine")} for content in contents],
        "rows": rows, "aggregate": aggregate(rows, (*further_of(rows), metric)),
    }  # fmt: skip


def path_of(rows: Sequence[Row]) -> list[Row]:
    """What a run's policy was on its way: warm start and snapshots, if it kept any, and the last row."""
    policy = rows[-1]["method"].removesuffix(MATCHED)
    stages = [row for row in rows if row["method"] != policy and stage_of(row["method"]) == policy]
    kept = len(stages) > 1
    return [{"learned_images": 0, "learned_seconds": 0.0, **row} for row in stages if kept] + [rows[-1]]


def learner(run: Path, own: Row) -> str:
    """What learned: the estimator, and how it relaxes splits, how far its errors reach or how often it fits a batch."""
    settings = resolve.read_recipe(run / resolve.CONFIG_FILE)["estimator"]
    name = str(own["estimator"])
    if "relax" in settings:
        return f"{name} ({settings['relax']})"
    if settings.get("reach") is not None:
        return f"{name} (reach {settings['reach']})"
    return f"{name} ({settings['repeats']} fits)" if "repeats" in settings else name


def aggregate(rows: Sequence[Row], metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Means and standard deviations over seeds, by budget, learner and images."""
    groups: dict[tuple[float, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["rho"], row["learner"], row["learned_images"]), []).append(row)
    return [
        {"rho": rho, "learner": name, "learned_images": images, "seeds": len(group)}
        | {key: mean_std([row.get(key) for row in group]) for key in (*metrics, *NUMBERS)}
        for (rho, name, images), group in sorted(groups.items(), key=lambda item: (-item[0][0], *item[0][1:]))
    ]


def table(content: Mapping[str, Any]) -> Table:
    """One line for each budget, learner and number of images."""
    metrics = [*further_of(content["rows"]), content["metric"]]
    header = ["learner", "budget", "images", "seconds", "seeds", "token fraction", *metrics, "object recall"]
    cells = [
        [
            row["learner"], number(row["rho"], 2), str(row["learned_images"]), cell(row, "learned_seconds", 0),
            str(row["seeds"]), cell(row, "token_fraction"), *(cell(row, name) for name in metrics),
            cell(row, "object_recall"),
        ]
        for row in content["aggregate"]
    ]  # fmt: skip
    notes = [
        "Means over seeds ± their standard deviation. Images and seconds are the policy's, after the warm start; "
        "on a CPU seconds are of all cores together."
    ]
    return Table(content["title"], header, cells, notes)


def plot(content: Mapping[str, Any], path: Path) -> None:
    """Metric (the first of the data set's own, if any) and recall, over images and over seconds.

    A column for each, a pair of rows for each budget.
    """
    metric, rows = [*further_of(content["rows"]), content["metric"]][0], content["aggregate"]
    rhos = list(dict.fromkeys(row["rho"] for row in rows))
    names = list(dict.fromkeys(row["learner"] for row in rows))
    colours = dict(zip(names, [OWN, *OTHERS] * len(names), strict=False))
    figure, axes = panels(2 * len(rhos), 2, (10.5, 6.4 * len(rhos)))
    cells = iter(axes)
    for rho in rhos:
        for key, title in ((metric, metric), ("object_recall", "object recall")):
            for cost, label in (("learned_images", "images seen by the policy"), ("learned_seconds", "seconds")):
                axis = next(cells)
                for name, marker in zip(names, MARKERS * len(names), strict=False):
                    line = [
                        r for r in rows if r["rho"] == rho and r["learner"] == name and r[key] and r["learned_images"]
                    ]
                    at = [r[cost]["mean"] if isinstance(r[cost], Mapping) else r[cost] for r in line]
                    spread = [r[key]["std"] or 0.0 for r in line]
                    means = [r[key]["mean"] for r in line]
                    axis.errorbar(at, means, spread, color=colours[name], marker=marker, capsize=2, label=name)
                axis.set_xscale("log")
                axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axis.xaxis.set_minor_formatter(NullFormatter())
                axis.set_xlabel(label)
                axis.set_title(f"{title} at budget {rho:g}")
    legend(axes[0])
    save(figure, path)

"""Tables and pictures of a run in run_dir/report, and of several runs together.

    run_dir/report/   table.md  classes.md (for tasks with numbers by class)  patchmaps.png  lengths.png  training.png

``do=report`` makes them again from what the run has written (patchmaps.png needs its models: do=draw);
``do=report report.runs=[DIR,...] report.out=docs/results/NAME`` merges runs into NAME.json, NAME.md and NAME.png;
``do=report report.out=docs/results/NAME`` makes NAME.md and NAME.png again from NAME.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from split_core.config import RunConfig
from split_core.engine import draw, learning, merge, plots, tables, tradeoffs
from split_core.engine.pairing import PER_IMAGE
from split_core.engine.results import RESULTS, read_metrics, read_results, write_json
from split_core.engine.session import Learner, Session
from split_core.errors import SplitError

Array = NDArray[Any]


def write(
    session: Session, results: Mapping[str, Any], tallies: Mapping[str, Any], learners: Mapping[str, Learner]
) -> None:
    """Everything about one run, and its table on the terminal."""
    folder = session.run_dir / "report"
    _pictures(session.run_dir, results, {name: tally.tokens for name, tally in tallies.items()})
    draw.sheet(session, learners, folder / "patchmaps.png")
    _table(results, folder, session.log.console)


def main(config: RunConfig) -> None:
    """Rebuild the report of run_dir, or merge report.runs.

    Raises:
        SplitError: there are no results.
    """
    console = Console()
    if config.report.runs:
        out = Path(config.report.out or "")
        collect = learning.gather if config.report.kind == "learning" else merge.merge
        content = collect(config.report.runs, out.name)
        write_json(out.with_name(f"{out.name}.json"), content)
        merged(content, out, console)
    elif config.report.out is not None:
        out = Path(config.report.out)
        content = read_results(out.with_name(f"{out.name}.json"), hint="name the runs with report.runs")
        if "aggregate" not in content:
            raise SplitError(f"report.out={out}: {out.name}.json holds a single run, not several merged into one")
        merged(content, out, console)
    else:
        run_dir = Path(config.run_dir)
        results = read_results(run_dir / RESULTS, hint=f"finish the run first (do=train run_dir={run_dir})")
        _pictures(run_dir, results, _tokens(run_dir / PER_IMAGE))
        _table(results, run_dir / "report", console)


def _table(results: Mapping[str, Any], folder: Path, console: Console) -> None:
    table = tables.comparison(results)
    table.save(folder / "table.md", results)
    if results.get("per_class"):
        tables.per_class(results).save(folder / "classes.md", results)
    table.show(console)
    console.print(f"report: {folder}", soft_wrap=True, markup=False, highlight=False)


def _pictures(run_dir: Path, results: Mapping[str, Any], tokens: Mapping[str, Array]) -> None:
    """Pictures that need no model."""
    folder = run_dir / "report"
    if tokens:
        plots.lengths(results, tokens, folder / "lengths.png")
    metrics = read_metrics(run_dir / "metrics.jsonl")
    if metrics:
        plots.training(metrics, results["rows"][-1], folder / "training.png")


def merged(content: Mapping[str, Any], out: Path, console: Console) -> None:
    """OUT.md and OUT.png of several runs (merged, with speeds, or over learning), and the table on the terminal."""
    if content.get("kind") == "learning":
        tabulate, plot = learning.table, learning.plot
    else:
        name = "compared" if "bench" in content else "merged"
        tabulate, plot = getattr(tables, name), getattr(tradeoffs, name)
    table = tabulate(content)
    table.save(out.with_name(f"{out.name}.md"), content)
    plot(content, out.with_name(f"{out.name}.png"))
    table.show(console)
    console.print(f"{out}.json  {out}.md  {out}.png", soft_wrap=True, markup=False, highlight=False)


def _tokens(path: Path) -> dict[str, Array]:
    """Tokens per image by method, from per_image.npz; none if it is not there."""
    if not path.is_file():
        return {}
    with np.load(path) as arrays:
        return {key.removesuffix("/tokens"): arrays[key] for key in arrays.files if key.endswith("/tokens")}

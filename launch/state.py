"""What a folder says of the run in it, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from split_core.engine.lock import holder
from split_core.engine.results import RESULTS, metric_of, read_results
from split_core.errors import SplitError
from split_core.resolve import CONFIG_FILE


def state_of(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """finished, results damaged, running, stopped or not started; and the row of the run's own method, if any."""
    row = _row(run_dir)
    by = holder(run_dir)
    if by is not None:
        return f"running, by {by}", row or {}
    if (run_dir / RESULTS).is_file():
        return ("results damaged", {}) if row is None else ("finished", row)
    return ("stopped" if (run_dir / CONFIG_FILE).is_file() else "not started"), {}


def _row(run_dir: Path) -> dict[str, Any] | None:
    """The last row of results.json, which is the run's own method; None where there is no whole one."""
    try:
        row: dict[str, Any] = read_results(run_dir / RESULTS, hint="finish the run first")["rows"][-1]
    except SplitError:
        return None
    metric = metric_of(row) or "score"
    numbers = [row.get(key) for key in ("token_fraction", "error", metric, f"{metric}_se")]
    whole = isinstance(row.get("method"), str) and all(isinstance(value, int | float | None) for value in numbers)
    return row if whole else None

"""``do=status run_dir=...``: how far a run or a sweep is, from its files alone."""

from __future__ import annotations

from pathlib import Path

import sweep
from jobs import submitted
from split_core.engine.results import read_metrics
from split_core.errors import SplitError
from split_core.resolve import CONFIG_FILE
from state import state_of


def status(run_dir: Path) -> str:
    """State, phases and jobs of a run, or of each run of a sweep.

    Raises:
        SplitError: there is neither in this folder.
    """
    if (run_dir / sweep.SWEEP_FILE).is_file():
        return "\n".join([sweep.table(run_dir), *_jobs(run_dir)])
    if not (run_dir / CONFIG_FILE).is_file() and not submitted(run_dir):
        raise SplitError(f"run_dir={run_dir} holds neither a run nor a sweep")
    state, _ = state_of(run_dir)
    more = "; the command that started it goes on" if state == "stopped" else ""
    return "\n".join([f"{run_dir}: {state}{more}", *_phases(run_dir), *_jobs(run_dir)])


def _phases(run_dir: Path) -> list[str]:
    """What is saved, and the last step logged."""
    lines = [f"  models/{path.stem}: done" for path in sorted((run_dir / "models").glob("*.safetensors"))]
    for phase in sorted((run_dir / "checkpoints").glob("*")):
        steps = sorted(int(path.name) for path in phase.glob("[0-9]*"))
        lines += [f"  {phase.name}: checkpoint after step {steps[-1]}"] if steps else []
    for row in read_metrics(run_dir / "metrics.jsonl")[-1:]:
        shown = ", ".join(f"{key} {row[key]:.4g}" for key in ("loss", "error", "token_fraction") if key in row)
        lines.append(f"  last logged: {row['phase']} step {row['step']}" + (f", {shown}" if shown else ""))
    return lines


def _jobs(run_dir: Path) -> list[str]:
    return [f"  job {row['id']}: {row['state']}, log {row['log']}" for row in submitted(run_dir)]

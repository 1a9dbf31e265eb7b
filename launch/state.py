"""What a folder says of the run in it, without torch."""

from __future__ import annotations

from pathlib import Path

from split_core.resolve import CONFIG_FILE


def state_of(run_dir: Path) -> str:
    """finished, running, stopped or not started."""
    from split_core.engine.lock import holder

    if holder(run_dir) is not None:
        return "running"
    if (run_dir / "results.json").is_file():
        return "finished"
    return "stopped" if (run_dir / CONFIG_FILE).is_file() else "not started"

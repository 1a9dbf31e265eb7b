"""Runs as forked children of one process that has imported everything, so that a start costs milliseconds.

The fork comes before any tensor work, so a child inherits no thread pool. Signals and deaths are real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def in_fresh_process(script: str, *arguments: object, seconds: float) -> Any:
    """Call a script of this folder in a new interpreter; what it prints last is JSON.

    Raises:
        subprocess.TimeoutExpired: it took more than `seconds`.
    """
    command = [sys.executable, script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def warm() -> None:
    """Import what a run imports on its way."""
    import split_tasks.classify
    import split_tasks.data.digits
    import split_tasks.models.digits_vit  # noqa: F401
    from split_core.engine import train  # noqa: F401


def fork_run(
    run_dir: Path, *, changes: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None,
    log: Path | None = None, before: Callable[[], None] | None = None,
) -> int:  # fmt: skip
    """Fork a child that does a tiny run; returns its process id.

    Args:
        run_dir: of the run.
        changes: to its settings.
        environment: variables of the child, such as RANK.
        log: file for what it says.
        before: called in the child first, to plant a fault.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(environment or {})
        handle = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(handle, 1)
        if log is not None:
            os.dup2(handle, 2)
        from faults.tiny_run import configure
        from split_core.engine import report, train

        report.write = lambda *_: None  # pictures cost more than the run
        if before is not None:
            before()
        train.main(configure(run_dir, **(changes or {})))
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)

"""One run at a time in a run_dir: a lock that the system takes back when its holder dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO

from split_core.errors import SplitError
from split_core.files import unwritable

logger = logging.getLogger(__name__)
LOCK_FILE = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
PATIENCE_S, PAUSE_S = 1.0, 0.02
"""How long a lock that is taken is asked for again, and how often: `holder` has it for a moment, and so have the
workers of a run that was killed until they end too."""


class RunLock:
    """The right to write into run_dir, held until `release` or the end of the process.

    Args:
        run_dir: made if it is not there.

    Raises:
        SplitError: another process holds it (which one is said), or run_dir cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / LOCK_FILE
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise SplitError(f"run_dir={run_dir} cannot be written: {error.strerror or error}") from error
        try:
            _take(self._file)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                self._file.close()
                raise SplitError(
                    f"run_dir={run_dir} is in use by {holder(run_dir) or 'another process'}; wait for it, or choose"
                    " another run_dir"
                ) from error
            logger.warning("%s: this file system has no locks; see to it that one run alone uses it", run_dir)
        try:
            self._file.truncate(0)
            self._file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": _job()}))
            self._file.flush()
        except OSError as error:
            self._file.close()
            raise unwritable(path, error) from error

    def release(self) -> None:
        """Let others in."""
        self._file.close()


def holder(run_dir: Path) -> str | None:
    """Who holds the lock of run_dir, in words; None when nobody does."""
    try:
        with (run_dir / LOCK_FILE).open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in UNSUPPORTED:
                    return None
            else:
                return None
            facts = json.load(file)
    except OSError:
        return None
    except ValueError:  # taken a moment ago, its holder not yet written down
        return "another process"
    if not isinstance(facts, dict):
        return "another process"
    job = f", Slurm job {facts['job']}" if facts.get("job") else ""
    return f"process {facts.get('pid')} on {facts.get('host')}{job}"


def _take(file: IO[str]) -> None:
    """Lock it for this process alone; raises what flock does when `PATIENCE_S` is over."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        time.sleep(PAUSE_S)


def _job() -> str | None:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID")

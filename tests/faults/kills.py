"""SIGKILL at random moments of a run, and the run started again until it ends.

One process imports everything and forks a child for each start, so that a start costs milliseconds. The fork comes
before any tensor work, so the child inherits no thread pool; the kill is the real signal to a real process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def kill_and_resume(folder: Path, kills: int, seed: int, seconds: float) -> dict[str, Any]:
    """Kill a tiny run `kills` times at random moments, in as many runs as that takes; compare each with a straight one.

    Returns: {"kills", "runs", "phases" (where the kills fell), "differences" (per run, empty when equal)}.

    Raises:
        subprocess.TimeoutExpired: it took more than `seconds`.
    """
    command = [sys.executable, __file__, str(folder), str(kills), str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def start(run_dir: Path) -> int:
    """Fork a child that does the run; returns its process id."""
    from faults.tiny_run import configure
    from split_core.engine import train

    child = os.fork()
    if child:
        return child
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, sys.stdout.fileno())
        train.main(configure(run_dir))
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def where(run_dir: Path) -> str:
    """The phase that the run was in, as far as its files tell."""
    path = run_dir / "metrics.jsonl"
    last = path.read_text().splitlines()[-1:] if path.is_file() else []
    try:
        return str(json.loads(last[0])["phase"]) if last else "before the first step"
    except ValueError:
        return "within a line of metrics.jsonl"


def main(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    from faults.tiny_run import differences

    chance = random.Random(seed)
    straight = folder / "straight"
    began = time.monotonic()
    _, status = os.waitpid(start(straight), 0)
    assert status == 0, "the straight run failed"
    takes = time.monotonic() - began  # to the end of the evaluation
    done, runs, phases, found = 0, 0, [], []
    while done < kills:
        run_dir, runs = folder / f"killed{runs}", runs + 1
        while True:
            child = start(run_dir)
            if done < kills:
                time.sleep(chance.uniform(0.02, 0.5) * takes)
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if os.WIFSIGNALED(status):
                done += 1
                phases.append(where(run_dir))
                continue
            assert status == 0, f"a resumed run ended with status {status}"
            break
        found.append(differences(run_dir, straight))
    return {"kills": done, "runs": runs, "phases": phases, "differences": found}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))

"""SIGKILL at random moments of a run, and the run started again until it ends."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from faults.forked import fork_run, in_fresh_process, warm


def kill_and_resume(folder: Path, kills: int, seed: int, seconds: float) -> dict[str, Any]:
    """Kill a tiny run `kills` times at random moments, in as many runs as that takes; compare each with a straight one.

    Returns: {"kills", "runs", "phases" (where the kills fell), "differences" (per run, empty when equal)}.
    """
    result: dict[str, Any] = in_fresh_process(__file__, folder, kills, seed, seconds=seconds)
    return result


def where(run_dir: Path) -> str:
    """The phase that the run was in, as far as its files tell."""
    path = run_dir / "metrics.jsonl"
    last = path.read_text().splitlines()[-1:] if path.is_file() else []
    try:
        return str(json.loads(last[0])["phase"]) if last else "before the first step"
    except ValueError:
        return "within a line of metrics.jsonl"


def lines(run_dir: Path) -> int:
    """Steps that the run has logged."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def main(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    from faults.tiny_run import differences

    warm()
    chance = random.Random(seed)
    straight = folder / "straight"
    began = time.monotonic()
    _, status = os.waitpid(fork_run(straight), 0)
    assert status == 0, "the straight run failed"
    takes = time.monotonic() - began
    done, runs, phases, found = 0, 0, [], []
    while done < kills:
        run_dir, runs = folder / f"killed{runs}", runs + 1
        for _ in range(8):  # then the run is left to end
            child = fork_run(run_dir)
            ended = 0
            if done < kills:
                # By progress, not by the clock alone: on a busy machine every run would die before its first step.
                wanted = lines(run_dir) + chance.randrange(8)
                while not ended and lines(run_dir) < wanted:
                    time.sleep(0.005)
                    ended, status = os.waitpid(child, os.WNOHANG)
                if not ended:
                    time.sleep(chance.uniform(0, 0.1) * takes)
                    os.kill(child, signal.SIGKILL)
            if not ended:
                _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                break
            done += 1
            phases.append(where(run_dir))
        else:
            _, status = os.waitpid(fork_run(run_dir), 0)
        assert status == 0, f"a resumed run ended with status {status}"
        found.append(differences(run_dir, straight))
    return {"kills": done, "runs": runs, "phases": phases, "differences": found}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))

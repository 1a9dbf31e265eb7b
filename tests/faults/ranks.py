"""Several processes on one run: what they compute together, and what becomes of them when one is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.forked import fork_run, in_fresh_process, warm

LIMIT = 30
"""Seconds after which a survivor counts as hanging."""


def together(folder: Path, seconds: float) -> dict[str, dict[str, Any]]:
    """All `CASES`, one after another, in one fresh process.

    Returns: for each {"codes": exit status of each rank (negative: the signal), "said": their output, "waited":
        seconds from the first end to the last}.
    """
    result: dict[str, dict[str, Any]] = in_fresh_process(__file__, folder, seconds=seconds)
    return result


def raises() -> None:
    """Rank 1 meets an error in its third step."""
    _at_step(3, lambda: (_ for _ in ()).throw(RuntimeError("a fault of rank 1")))


def dies() -> None:
    """Rank 1 is killed in its third step."""
    _at_step(3, lambda: os.kill(os.getpid(), signal.SIGKILL))


def asked() -> None:
    """Rank 1, which has the fewer batches, is asked to stop while both evaluate."""
    if os.environ["RANK"] != "1":
        return
    from split_core.engine import evaluate

    batch = evaluate._batch

    def ask(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR2)
        return batch(*arguments)

    evaluate._batch = ask


def _at_step(step: int, act: Callable[[], Any]) -> None:
    if os.environ["RANK"] != "1":
        return
    from split_core.engine.saver import Saver

    offer = Saver.offer

    def act_first(self: Saver, now: int, *rest: Any) -> None:
        if now == step:
            act()
        offer(self, now, *rest)

    Saver.offer = act_first  # type: ignore[method-assign]


CASES: dict[str, tuple[int, dict[str, Any], Callable[[], None] | None]] = {
    "one": (1, {}, None),
    "two": (2, {}, None),
    "uneven": (2, {"adapt": {"images": 96, "batch_size": 15}, "eval": {"images": 19, "batch_size": 8}}, None),
    "raises": (2, {}, raises),
    "divided": (2, {"adapt": {"shard": True}}, raises),
    "resumed": (2, {"adapt": {"shard": True}}, None),
    "dies": (2, {}, dies),
    "asked": (2, {"eval": {"images": 24, "batch_size": 8}}, asked),
    "auto": (2, {"device": "auto"}, None),
    "odd": (2, {"estimator": {"batch_size": 15}}, None),
}


FOLDERS = {"resumed": "divided"}
"""Cases that go on in the folder of another."""


def one_case(case: str, folder: Path) -> dict[str, Any]:
    world, changes, fault = CASES[case]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children: dict[int, int] = {}
    for rank in range(world):
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        log = folder / f"{case}.{rank}.log"
        child = fork_run(
            folder / FOLDERS.get(case, case), changes=changes, environment=environment, log=log, before=fault
        )
        children[child] = rank
    codes = [0] * world
    first: float | None = None
    while children:
        child, status = os.waitpid(-1, os.WNOHANG if first else 0)
        if child:
            codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
            first = first or time.monotonic()
        elif first and fault and time.monotonic() - first > LIMIT:
            for other in children:
                os.kill(other, signal.SIGKILL)
        else:
            time.sleep(0.05)
    assert first is not None
    said = [(folder / f"{case}.{rank}.log").read_text() for rank in range(world)]
    return {"codes": codes, "said": said, "waited": time.monotonic() - first}


if __name__ == "__main__":
    warm()
    print(json.dumps({case: one_case(case, Path(sys.argv[1])) for case in CASES}))

"""Requests to stop: a signal sets a flag, and the run looks at it between two steps.

    SIGUSR2   what Slurm sends before a time-out or a preemption, by way of submitit
    SIGTERM   what kill and scancel send

A handler that saved by itself would run in the middle of a step, on one rank alone; this one only notes the
request, so a second signal during the save does nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


class Interrupt:
    """Notes SIGUSR2 and SIGTERM between `watch` and `restore`. Outside the main thread it hears nothing.

    Attributes:
        asked: to stop.
        again: the run should be started again, since its time on the machine is up.
    """

    def __init__(self) -> None:
        self.asked = False
        self.again = False
        self._before: dict[signal.Signals, Any] = {}

    def watch(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def restore(self) -> None:
        """Put the handlers back that were there."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self.again = self.again or number == signal.SIGUSR2


@contextmanager
def held_back() -> Iterator[None]:
    """Keep the signals waiting, for this process and for those started meanwhile.

    Slurm sends them to every process of a job. One that loads data would die of them, and take with it the run that
    was only asked to save.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def deaf(worker: int) -> None:
    """What a process that loads data does about the signals: nothing; it ends with the run."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

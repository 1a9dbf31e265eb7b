"""Requests to stop: a signal sets a flag, and the run looks at it between two steps.

    SIGUSR2   what Slurm sends before a time-out or a preemption, by way of submitit
    SIGTERM   what kill and scancel send

A handler that saved by itself would run in the middle of a step, on one rank alone; this one only notes the
request, so a second signal during the save does nothing.
"""

from __future__ import annotations

import signal
import threading
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

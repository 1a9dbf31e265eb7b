"""Errors that are the user's to mend, and the one way they name the nearest right spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SplitError(ValueError):
    """A wrong name, key, value or file. Its message is one complete line; the launcher prints it and exits with 2.

    Args:
        message: what is wrong. It may quote what somebody typed: line breaks and control characters are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message))


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most like `name`, or None when none comes close. Case does not count."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[found[0]] if found else None


def unknown(what: str, name: str, choices: Iterable[str]) -> str:
    """The line for an unknown name: what it is, the nearest right one, and all that there are."""
    names = sorted(choices)
    close = nearest(name, names)
    hint = f" Did you mean {close}?" if close else ""
    known = f" Known: {', '.join(names)}." if names else " None are installed."
    return f"no {what} is called {name!r}.{hint}{known}"


def first_line(error: BaseException) -> str:
    """What another library's error says, cut to one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Stopped(Exception):
    """A run that was asked to stop did so between two steps; started again it goes on from there.

    Args:
        message: where it stopped.
        again: it should be started again (its time on the machine is up); otherwise it was asked to end.
    """

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again

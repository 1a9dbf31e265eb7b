"""Files that are whole or not there: the one way in which a run writes what must survive a kill or a full disk."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from split_core.errors import SplitError


def write_whole(path: Path, content: bytes | str) -> None:
    """Write beside `path`, push it to the disk, rename. Folders are made.

    A kill or a fault at any moment leaves the old file or the new one, and no half of either.

    Raises:
        SplitError: it cannot be written (disk full, read-only, no permission ...); the old file stands.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def append_line(path: Path, line: str) -> None:
    """Add one line. A kill or a full disk may cut it short: the next one starts afresh, `read_records` passes over it.

    Raises:
        SplitError: as `write_whole`.
    """
    try:
        with path.open("a+b") as file:
            if end := file.seek(0, os.SEEK_END):
                file.seek(end - 1)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode() + b"\n")
    except OSError as error:
        raise unwritable(path, error) from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """The JSON objects that `append_line` wrote, in order. Lines that are none are passed over: cut short, damaged in
    a byte, or JSON of another kind. A missing file has none.

    Raises:
        SplitError: it cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, error) from error
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line.decode()))
    return [record for record in found if isinstance(record, dict)]


def sync_folder(folder: Path) -> None:
    """Push a folder's own entries to the disk, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unwritable(path: Path, error: OSError) -> SplitError:
    """The line for a file that cannot be written."""
    return SplitError(f"{path} cannot be written: {error.strerror or error}; what was there before still stands")


def unreadable(path: Path, error: Exception) -> SplitError:
    """The line for a file that cannot be read."""
    return SplitError(f"{path} cannot be read: {(isinstance(error, OSError) and error.strerror) or error}")

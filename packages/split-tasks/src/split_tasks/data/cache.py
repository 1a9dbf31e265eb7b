"""Where built and downloaded things are kept, and how they get there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def cache_dir() -> Path:
    """$SPLIT_CACHE, or ~/.cache/split-vit. Not created by asking."""
    return Path(os.environ.get("SPLIT_CACHE") or Path.home() / ".cache" / "split-vit").expanduser()


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends well, and goes when it does not.

    If another process finished first, its folder stays and this one is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield work
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """The same for one file; an older `target` is replaced."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}-", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    try:
        yield Path(name)
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Hash of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def progress(items: Iterable[T], total: int, title: str) -> Iterator[T]:
    """Pass `items` on, with a progress bar on a terminal (where rich is installed) and one line elsewhere."""
    bar: Callable[..., Iterable[T]] | None = None
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track
        except ImportError:
            pass
        else:
            console = Console(stderr=True)
            bar = lambda it: track(it, description=title, total=total, console=console)  # noqa: E731
    if bar is None:
        print(f"{title} ({total})", file=sys.stderr, flush=True)
        yield from items
    else:
        yield from bar(items)

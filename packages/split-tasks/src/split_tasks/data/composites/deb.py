"""Unpack a Debian package without root: dpkg-deb where there is one, else its two containers in plain Python."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from split_core.errors import SplitError

MAGIC = b"!<arch>\n"
HEADER = 60


def ar_members(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of each member of an ar archive.

    Raises:
        ValueError: it is not one, or it is cut short.
    """
    end = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise SplitError(f"{path} is not a Debian package (no ar archive)")
        at = len(MAGIC)
        while at < end:
            file.seek(at)
            header = file.read(HEADER)
            if len(header) < HEADER or header[58:] != b"`\n" or not header[48:58].strip().isdigit():
                raise SplitError(f"{path} is damaged at byte {at}")
            size = int(header[48:58])
            if at + HEADER + size > end:
                raise SplitError(f"{path} is cut short")
            yield header[:16].decode("ascii").rstrip().rstrip("/"), at + HEADER, size
            at += HEADER + size + size % 2  # members start at even bytes


def unpack_python(path: Path, target: Path) -> None:
    """Write the package's files below `target`, reading ar and tar (gz, xz, bz2, plain) with the standard library.

    Raises:
        ValueError: damaged, or compressed in a way this Python cannot read.
    """
    for name, offset, size in ar_members(path):
        if not name.startswith("data.tar"):
            continue
        with path.open("rb") as file:
            file.seek(offset)
            data = io.BytesIO(file.read(size))
        try:
            with tarfile.open(fileobj=data) as archive:
                _extract(archive, target)
        except tarfile.TarError as error:
            raise SplitError(f"{path}: cannot unpack {name}: {error}") from None
        return
    raise SplitError(f"{path} holds no data.tar")


def _extract(archive: tarfile.TarFile, target: Path) -> None:
    """Write an archive's files below `target` and nowhere else.

    Raises:
        tarfile.TarError: a member would lie elsewhere.
    """
    if hasattr(tarfile, "data_filter"):
        archive.extractall(target, filter="data")
        return
    for member in archive:  # Python before 3.11.4 has no filters
        inside = (target / member.name).resolve().is_relative_to(target.resolve())
        if not inside or member.isdev() or (member.issym() and Path(member.linkname).is_absolute()):
            raise tarfile.TarError(f"{member.name} would lie outside the folder it is unpacked to")
        archive.extract(member, target)


def unpack(path: Path, target: Path) -> None:
    """Write the package's files below `target`.

    Raises:
        ValueError: the package is damaged.
    """
    program = shutil.which("dpkg-deb")
    if program is None:
        unpack_python(path, target)
        return
    done = subprocess.run([program, "-x", str(path), str(target)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SplitError(f"{path}: {done.stderr.strip() or 'dpkg-deb failed'}")

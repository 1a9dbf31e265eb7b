"""Get the cut-outs and photographs from Debian packages and build their library.

    python -m split_tasks.data.composites.fetch [--cache DIR] [--debs DIR]

Needs no root: packages are downloaded (apt-get download, or over HTTP from Debian's pool), checked by SHA-256,
unpacked into a temporary folder and deleted; what stays is the library.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from split_core.errors import SplitError
from split_tasks.data.cache import cache_dir, progress, sha256
from split_tasks.data.composites.catalogue import CUTOUTS, PACKAGES, PHOTOGRAPHS, STAMPS, Package
from split_tasks.data.composites.deb import unpack
from split_tasks.data.composites.library import Library, Original, build_library

POOL = "http://deb.debian.org/debian/pool/main/"
NAME = "composites-1"
COMMAND = "python -m split_tasks.data.composites.fetch"


def default_library(cache: Path | None = None) -> Path:
    """Folder of the fetched library, whether or not it is there."""
    return (cache or cache_dir()) / NAME


def obtain(package: Package, folder: Path, debs: Path | None) -> Path:
    """The checked .deb of `package`: from the folder `debs`, else apt-get, else Debian's pool.

    Raises:
        ValueError: none of them has it with the pinned hash; what each said is in the message.
    """
    tried = []
    for candidate in sorted(debs.glob(f"{package.name}_*.deb")) if debs else ():
        if sha256(candidate) == package.sha256:
            return candidate
        tried.append(f"{candidate} has another hash")
    if shutil.which("apt-get"):
        command = ["apt-get", "download", f"{package.name}={package.version}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        for candidate in folder.glob(f"{package.name}_*.deb"):
            if sha256(candidate) == package.sha256:
                return candidate
            tried.append("apt-get brought another hash")
        if done.returncode:
            tried.append(f"apt-get: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    target = folder / package.filename
    try:
        with urllib.request.urlopen(POOL + package.path, timeout=60) as answer, target.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except (urllib.error.URLError, OSError) as error:
        tried.append(f"{POOL}{package.path}: {error}")
    else:
        if sha256(target) == package.sha256:
            return target
        tried.append(f"{POOL}{package.path} has another hash")
    raise SplitError(f"cannot get {package.name} {package.version}: {'; '.join(tried)}")


def originals(unpacked: Path) -> Iterator[Original]:
    """The pictures of the catalogue, below the folder that holds the unpacked packages."""
    stamps = unpacked / STAMPS.name / STAMPS.folder
    for group, folders in CUTOUTS.items():
        for folder, names in folders.items():
            for name in names.split():
                path = stamps / folder / f"{name}.png"
                yield Original("cutout", title(path), group, STAMPS.name, path)
    for package in PACKAGES:
        pattern, names = PHOTOGRAPHS.get(package.name, ("", ""))
        for name in names.split():
            path = unpacked / package.name / package.folder / pattern.format(name)
            yield Original("photograph", name, "", package.name, path)


def title(path: Path) -> str:
    """What a stamp shows, by the first line of the text beside it ("An owl." is "owl")."""
    text = path.with_suffix(".txt")
    line = text.read_text(encoding="utf-8").splitlines()[0] if text.is_file() else path.stem.replace("_", " ")
    words = re.split(r"[.!] | ?\u2014", line.strip())[0].rstrip(".!").split()
    if len(words) > 1 and words[0].lower() in {"a", "an", "the"}:
        words = words[1:]
    return " ".join(words)


def fetch(cache: Path | None = None, debs: Path | None = None) -> Path:
    """Build the library unless it is there, and return its folder.

    Args:
        cache: instead of the usual cache folder.
        debs: folder that may hold the .deb files already.
    """
    folder = default_library(cache)
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(prefix="split-composites-") as name:
        work = Path(name)
        for package in progress(PACKAGES, len(PACKAGES), "Getting packages from Debian (about 320 MB)"):
            path = obtain(package, work, debs)
            unpack(path, work / package.name)
            if path.parent == work:
                path.unlink()
        found = list(originals(work))
        build_library(folder, progress(found, len(found), "Building the library of cut-outs and photographs"))
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Fetch the pictures for data=composites.")
    parser.add_argument("--cache", type=Path, help="cache folder (default: $SPLIT_CACHE or ~/.cache/split-vit)")
    parser.add_argument("--debs", type=Path, help="folder that already holds the .deb files")
    options = parser.parse_args(arguments)
    try:
        folder = fetch(options.cache, options.debs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    library = Library(folder, folder)
    counts = (
        f"{len(library.cutouts)} cut-outs of {len(library.classes)} classes, {len(library.photographs)} photographs"
    )
    print(f"{folder}: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

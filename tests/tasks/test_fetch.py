"""Getting and unpacking packages, on hand-made ones."""

import hashlib
import io
import tarfile
from dataclasses import replace

import pytest

from split_tasks.data.cache import whole_file, whole_folder
from split_tasks.data.composites import deb, fetch
from split_tasks.data.composites.catalogue import CUTOUTS, PACKAGES, PHOTOGRAPHS, STAMPS


def make_deb(path, files, compression="xz"):
    """A Debian package: an ar archive of a version, control.tar and data.tar."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{compression}") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    out = b"!<arch>\n"
    for name, body in (("debian-binary", b"2.0\n"), ("odd", b"x"), (f"data.tar.{compression}", data.getvalue())):
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n".encode() + body + b"\n" * (len(body) % 2)
    path.write_bytes(out)
    return path


@pytest.mark.parametrize("compression", ["xz", "gz"])
def test_unpacking_in_plain_python(tmp_path, compression):
    package = make_deb(tmp_path / "a.deb", {"usr/share/x/a.txt": b"hello"}, compression)
    deb.unpack_python(package, tmp_path / "out")
    assert (tmp_path / "out/usr/share/x/a.txt").read_bytes() == b"hello"


def test_unpacking_without_dpkg(tmp_path, monkeypatch):
    package = make_deb(tmp_path / "a.deb", {"x": b"1"})
    monkeypatch.setattr(deb.shutil, "which", lambda name: None)
    deb.unpack(package, tmp_path / "out")
    assert (tmp_path / "out/x").read_bytes() == b"1"


def test_members_outside_the_target_are_refused(tmp_path):
    package = make_deb(tmp_path / "a.deb", {"../../evil": b"1"})
    with pytest.raises(ValueError, match=r"cannot unpack data.tar.xz"):
        deb.unpack_python(package, tmp_path / "in" / "out")
    assert not (tmp_path / "evil").exists()


DAMAGE = [(lambda data: b"PK" + data[2:], "no ar archive"), (lambda data: data[:-30], "cut short")]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damage_is_named(tmp_path, damage, message):
    package = make_deb(tmp_path / "a.deb", {"x": b"1" * 500})
    package.write_bytes(damage(package.read_bytes()))
    with pytest.raises(ValueError, match=message):
        deb.unpack_python(package, tmp_path / "out")


def test_a_package_is_used_only_with_the_pinned_hash(tmp_path, monkeypatch):
    good = make_deb(tmp_path / f"{STAMPS.name}_1_all.deb", {"x": b"1"})
    package = replace(STAMPS, sha256=hashlib.sha256(good.read_bytes()).hexdigest())
    assert fetch.obtain(package, tmp_path, tmp_path) == good
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    monkeypatch.setattr(fetch, "POOL", (tmp_path / "pool").as_uri() + "/")
    with pytest.raises(ValueError, match=r"cannot get tuxpaint-stamps-default .*has another hash; file:"):
        fetch.obtain(STAMPS, tmp_path, tmp_path)


def test_the_pool_is_the_fallback(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    monkeypatch.setattr(fetch, "POOL", (tmp_path / "pool").as_uri() + "/")
    source = tmp_path / "pool" / STAMPS.path
    source.parent.mkdir(parents=True)
    make_deb(source, {"x": b"1"})
    package = replace(STAMPS, sha256=hashlib.sha256(source.read_bytes()).hexdigest())
    work = tmp_path / "work"
    work.mkdir()
    assert fetch.obtain(package, work, None).read_bytes() == source.read_bytes()


def test_the_catalogue_is_sound():
    names = [
        f"{folder}/{name}" for folders in CUTOUTS.values() for folder, text in folders.items() for name in text.split()
    ]
    assert len(names) == len(set(names)) == 236
    assert len(CUTOUTS) == 13
    assert all(sum(len(text.split()) for text in folders.values()) >= 10 for folders in CUTOUTS.values())
    assert set(PHOTOGRAPHS) < {package.name for package in PACKAGES}
    assert sum(len(text.split()) for _, text in PHOTOGRAPHS.values()) == 33


@pytest.mark.parametrize(
    ("text", "expected"),
    [("An owl.\nx=y", "owl"), ("Earth. Our planet!", "Earth"), ("Uranus\u2014one of the giants.", "Uranus")],
)
def test_titles_lose_their_article(tmp_path, text, expected):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert fetch.title(tmp_path / "a.png") == expected


def half_a_folder(target):
    with whole_folder(target) as work:
        (work / "half").write_text("x")
        raise KeyboardInterrupt


def half_a_file(target):
    with whole_file(target) as work:
        work.write_text("half")
        raise KeyboardInterrupt


def test_an_interrupted_build_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        half_a_folder(tmp_path / "lib")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_file_leaves_the_old_one(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        half_a_file(tmp_path / "file")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}

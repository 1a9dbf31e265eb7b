"""Folders list one class after another; the numbers of images must not."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from split_core.errors import SplitError
from split_core.task import DataContext
from split_tasks.configs import ImageFolderConfig
from split_tasks.data.imagefolder import ImageFolder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for name in "abc":
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for index in range(12):
                Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / f"{index}.png")
    return tmp_path


def labels(root: Path, seed: int) -> list[int]:
    data = ImageFolder(ImageFolderConfig(root=root), DataContext("val", seed, (8, 8)))
    return [data[index]["target"]["label"] for index in range(len(data))]


def test_the_first_images_are_of_all_classes_in_one_order_for_every_run(root: Path) -> None:
    order = labels(root, seed=0)
    assert set(order[:12]) == {0, 1, 2}
    assert sorted(order) == [0] * 12 + [1] * 12 + [2] * 12
    assert labels(root, seed=5) == order


def test_a_damaged_image_is_named_in_one_line(root: Path) -> None:
    for path in (root / "val").rglob("*.png"):
        path.write_bytes(path.read_bytes()[:30])
    data = ImageFolder(ImageFolderConfig(root=root), DataContext("val", 0, (8, 8)))
    with pytest.raises(SplitError, match=r"val/./\d+\.png"):
        data[0]

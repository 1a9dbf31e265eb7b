"""Label maps in folders: what is read from which file, what is refused, windows, augmentation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

from split_core.errors import SplitError
from split_core.task import DataContext
from split_core.types import Grid
from split_tasks.configs import ADE20KConfig, SegFolderConfig
from split_tasks.data.labelmaps import read_indices, to_classes
from split_tasks.data.segaugment import TrainAugmentation, keep_ratio
from split_tasks.data.segfolder import SegFolder
from split_tasks.objects import IGNORE
from split_tasks.windows import Windows, corners, merged, sums
from tinyseg import prediction, task


def save(root: Path, name: str, size: tuple[int, int], labels: np.ndarray | None = None, split: str = "train") -> None:
    """A picture of (height, width) and its label map."""
    generator = np.random.default_rng(len(name))
    for kind in ("images", "masks"):
        (root / kind / split / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)).save(
        root / "images" / split / f"{name}.png"
    )
    if labels is None:
        labels = generator.integers(0, 3, size, dtype=np.uint8)
    Image.fromarray(labels.astype(np.uint8)).save(root / "masks" / split / f"{name}.png")


def build(root: Path, split: str = "train", size: tuple[int, int] = (16, 16), **settings) -> SegFolder:
    config = SegFolderConfig(**{"root": root, "classes": 3, **settings})
    return SegFolder(config, DataContext(split, image_size=size))


@pytest.mark.parametrize("mode", ["L", "P", "I;16", "I", "1", "RGB grey", "LA"])
def test_indices_are_read_as_they_are_stored(tmp_path: Path, mode: str) -> None:
    bits = mode == "1"
    values = np.array([[0, 1, 1], [1, 0, 0]] if bits else [[0, 7, 1], [2, 2, 201]], dtype=np.uint8)
    path = tmp_path / ("mask.tif" if mode == "I" else "mask.png")
    if mode == "P":
        image = Image.new("P", (3, 2))
        image.putdata(values.flatten().tolist())
        image.putpalette([255 - i // 3 for i in range(768)])
    elif bits:
        image = Image.fromarray(values.astype(bool))
    elif mode == "RGB grey":
        image = Image.fromarray(values).convert("RGB")
    elif mode == "LA":
        image = Image.merge("LA", (Image.fromarray(values), Image.new("L", (3, 2), 9)))
    else:
        image = Image.fromarray(values.astype({"L": np.uint8, "I;16": np.uint16, "I": np.int32}[mode]))
    image.save(path)
    assert read_indices(path).tolist() == values.tolist()


def test_what_is_no_label_map_is_named(tmp_path: Path) -> None:
    Image.new("RGB", (2, 2), (1, 2, 3)).save(tmp_path / "colours.png")
    with pytest.raises(SplitError, match=r"colours.png holds colours \(RGB\); one index for each pixel is needed"):
        read_indices(tmp_path / "colours.png")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(SplitError, match=r"text.png is not a picture"):
        read_indices(tmp_path / "text.png")
    whole = tmp_path / "whole.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 9, (64, 64), dtype=np.uint8)).save(whole)
    (tmp_path / "cut.png").write_bytes(whole.read_bytes()[:900])
    with pytest.raises(SplitError, match=r"cut.png cannot be read"):
        read_indices(tmp_path / "cut.png")
    Image.fromarray(np.zeros((2, 2), dtype=np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(SplitError, match="of mode F; one whole number"):
        read_indices(tmp_path / "float.tif")


def test_labels_become_classes_once_and_a_wrong_one_is_named() -> None:
    values, path = np.array([[0, 1, 150, 255]]), Path("m.png")
    ade = to_classes(np.array([[0, 1, 150]]), path, classes=150, zero_is_ignored=True, ignore=None)
    assert ade.tolist() == [[IGNORE, 0, 149]]
    with pytest.raises(SplitError, match=r"m.png holds the label 151, which is no class: .* the labels 1 to 150"):
        to_classes(np.array([[151]]), path, classes=150, zero_is_ignored=True, ignore=None)
    plain = to_classes(values, path, classes=151, zero_is_ignored=False, ignore=255)
    assert plain.tolist() == [[0, 1, 150, IGNORE]]
    with pytest.raises(SplitError, match=r"the label 150, which is no class: 150 classes have the labels 0 to 149"):
        to_classes(values, path, classes=150, zero_is_ignored=False, ignore=255)
    with pytest.raises(SplitError, match="the label 255"):
        to_classes(values, path, classes=151, zero_is_ignored=False, ignore=None)


def test_ade20k_is_read_as_it_is_unpacked(tmp_path: Path) -> None:
    for split in ("training", "validation"):
        for kind in ("images", "annotations"):
            (tmp_path / kind / split).mkdir(parents=True)
        name = f"ADE_{split[:3]}_00000001"
        Image.new("RGB", (20, 24)).save(tmp_path / "images" / split / f"{name}.jpg")
        Image.fromarray(np.full((24, 20), 2, dtype=np.uint8)).save(tmp_path / "annotations" / split / f"{name}.png")
    (tmp_path / "objectInfo150.txt").write_text(
        "Idx\tRatio\tName\n" + "".join(f"{i}\t0.1\tname {i}\n" for i in range(1, 151))
    )
    config = ADE20KConfig(root=tmp_path)
    train, test = (SegFolder(config, DataContext(split, image_size=(16, 16))) for split in ("train", "test"))
    assert (len(train.classes), train.classes[0], train.segment_classes[149]) == (150, "name 1", "name 150")
    assert set(test[0]["target"]["segments"].unique().tolist()) == {1}
    assert test[0]["target"]["segments"].shape == (24, 20)
    assert set(train[0]["target"]["segments"].unique().tolist()) - {255} == {1}  # a crop may reach past the picture


def test_what_does_not_fit_together_is_named(tmp_path: Path) -> None:
    with pytest.raises(SplitError, match=r"data.images: no folder .*images/train"):
        build(tmp_path)
    save(tmp_path, "a/one", (20, 20))
    Image.new("RGB", (9, 9)).save(tmp_path / "images" / "train" / "two.png")
    with pytest.raises(SplitError, match=r"data.masks: .*two.png has no label map in .*masks/train"):
        build(tmp_path)
    (tmp_path / "images" / "train" / "two.png").unlink()
    assert len(build(tmp_path)) == 1
    assert build(tmp_path, classes=["x", "y", "z"]).classes == ("x", "y", "z")
    with pytest.raises(SplitError, match=r"data.classes: .*names.txt cannot be read"):
        build(tmp_path, classes="names.txt")
    (tmp_path / "names.txt").write_text("x\n\ny\nz\n")
    assert build(tmp_path, classes="names.txt").classes == ("x", "y", "z")
    with pytest.raises(SplitError, match=r"one.png holds the label 2, which is no class"):
        build(tmp_path, classes=2)[0]
    Image.fromarray(np.zeros((20, 21), dtype=np.uint8)).save(tmp_path / "masks" / "train" / "a" / "one.png")
    with pytest.raises(SplitError, match=r"images/train/a/one.png is 20x20 px and its label map .*one.png is 21x20"):
        build(tmp_path)[0]


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 20), st.integers(1, 20))
def test_windows_cover_every_pixel_and_stay_inside(height: int, width: int, side: int, step: int) -> None:
    step = min(step, side)
    covered = np.zeros((height, width), dtype=int)
    for top, left in corners((height, width), (side, side), (step, step)):
        assert 0 <= top <= max(0, height - side)
        assert 0 <= left <= max(0, width - side)
        covered[top : top + side, left : left + side] += 1
    assert covered.min() >= 1
    rows = {top for top, _ in corners((height, width), (side, side), (step, step))}
    assert len(rows) == (1 if height <= side else -(-(height - side) // step) + 1)


def test_overlapping_windows_are_averaged() -> None:
    windows = Windows((0, 0, 1), ((0, 0), (0, 2), (0, 0)), ((4, 6), (3, 2)))
    logits = torch.stack([torch.full((2, 4, 4), value) for value in (1.0, 3.0, 7.0)])
    first, second = merged(logits, windows)
    assert first[0, 0].tolist() == [[1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 4
    assert second.shape == (1, 2, 3, 2), "padding is cut off"
    assert (second == 7).all()
    assert sums(torch.tensor([1.0, 2.0, 5.0]), windows).tolist() == [3.0, 5.0]


def test_evaluation_reads_windows_and_scores_each_image_once(tmp_path: Path) -> None:
    sizes = {"wide": (20, 41), "tall": (37, 16), "flat": (4, 40)}  # the last: its short side stays below the window
    for name, size in sizes.items():
        save(tmp_path, name, size, split="test")
    data = build(tmp_path, "test", longest=2.0)
    batch = data.collate([data[i] for i in range(3)])
    windows, target = batch["target"]["windows"], batch["target"]
    assert len(windows.image) == len(batch["image"]) == len(target["crops"])
    assert {tuple(s.shape) for s in target["segments"]} == set(sizes.values()), "labels stay at the file's size"
    flat = next(i for i, s in enumerate(target["segments"]) if s.shape == (4, 40))
    assert windows.size[flat] == (3, 32)
    rows = [row for row, image in enumerate(windows.image) if image == flat]
    assert (target["crops"][rows][:, 3:] == IGNORE).all()
    assert (batch["image"][rows][:, :, 3:] == 0).all(), "padded with zeros after normalisation"
    own, n = task(), len(windows.image)
    output = prediction(n, Grid((4, 4), 1), (4, 4), 5)
    assert own.error(output, target).shape == own.score(output, target).shape == (3,)
    assert own.per_image(torch.ones(n), target).tolist() == [windows.image.count(i) for i in range(3)]
    assert own.objects(target, Grid((4, 4), 1), (4, 4)).shape == (n, 4, 4)
    metric = own.metric()
    metric.update(output, target)
    counted = sum(int((s != IGNORE).sum()) for s in target["segments"])
    assert int(metric.matrix.compute().sum()) == counted


def test_a_single_window_of_the_image_s_size_is_the_plain_evaluation(tmp_path: Path) -> None:
    save(tmp_path, "one", (16, 16), split="test")
    data = build(tmp_path, "test")
    target = data.collate([data[0]])["target"]
    output, own = prediction(1, Grid((4, 4), 1), (4, 4), 5), task()
    plain = {"segments": torch.stack(target["segments"])}
    torch.testing.assert_close(own.error(output, target), own.error(output, plain))
    torch.testing.assert_close(own.score(output, target), own.score(output, plain))


def test_predictions_are_brought_to_the_size_on_disk(tmp_path: Path) -> None:
    save(tmp_path, "big", (64, 64), split="test")
    data = build(tmp_path, "test")
    target = data.collate([data[0]])["target"]
    assert target["windows"].size == ((16, 16),)
    output, own = prediction(1, Grid((4, 4), 1), (4, 4), 5), task()
    large = F.interpolate(output.logits, (64, 64), mode="bilinear")
    expected = F.cross_entropy(large, target["segments"][0][None].long(), ignore_index=IGNORE)
    torch.testing.assert_close(own.error(output, target)[0], expected)


def test_sizes_keep_their_proportions() -> None:
    assert keep_ratio((683, 512), short=512.0, longest=2048.0) == (683, 512)
    assert keep_ratio((1024, 2048), short=512.0, longest=2048.0) == (512, 1024)
    assert keep_ratio((100, 1000), short=512.0, longest=2048.0) == (205, 2048), "the longer side binds"


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("size", [(40, 24), (10, 40), (16, 16)])
def test_training_items_have_the_model_s_size(tmp_path: Path, augment: bool, size: tuple[int, int]) -> None:
    save(tmp_path, "one", size)
    data = build(tmp_path, augment=augment)
    torch.manual_seed(0)
    batch = data.collate([data[0] for _ in range(4)])
    assert batch["image"].shape == (4, 3, 16, 16)
    assert batch["target"]["segments"].shape == (4, 16, 16)
    assert batch["image"].dtype == torch.float32
    assert set(batch["target"]["segments"].unique().tolist()) <= {0, 1, 2, IGNORE}
    if augment:
        assert not torch.equal(batch["image"][0], batch["image"][1])


def test_augmentation_moves_image_and_labels_together() -> None:
    torch.manual_seed(0)
    labels = torch.zeros(32, 48, dtype=torch.uint8)
    labels[:, 20:] = 1
    image = torch.stack([labels * 200] * 3)
    transform = TrainAugmentation((16, 16), short=32.0, longest=128.0, scale=(0.5, 2.0), category_share=0.9)
    transform.after = torch.nn.Identity()  # colours would hide what is compared
    transform.after.forward = lambda *both: both
    mixed = 0
    for _ in range(20):
        pixels, truth = transform(image, labels)
        inner = truth == 1
        assert pixels.shape[1:] == truth.shape
        agrees = ((pixels[0] > 100) == inner).float().mean()
        assert agrees > 0.9, "only the blurred edge may differ"
        mixed += bool(inner.any() and not inner.all())
    assert mixed >= 15, "crops of one class are drawn again, ten times at most"


def test_everything_wrong_with_the_files_is_told_in_one_go(tmp_path: Path) -> None:
    for name in ("good", "alone", "broken", "labels", "sizes"):
        save(tmp_path, name, (6, 8))
    (tmp_path / "masks/train/alone.png").unlink()
    (tmp_path / "images/train/broken.png").write_bytes(b"not a picture")
    Image.fromarray(np.full((6, 8), 7, dtype=np.uint8)).save(tmp_path / "masks/train/labels.png")
    Image.fromarray(np.zeros((5, 8), dtype=np.uint8)).save(tmp_path / "masks/train/sizes.png")
    with pytest.raises(SplitError, match=r"alone.png has no label map"):
        build(tmp_path)
    config = SegFolderConfig(root=tmp_path, classes=3)
    found = {p.kind: p.what for p in SegFolder(config, DataContext("train", strict=False)).problems() if p.fault}
    assert found.pop("pictures without a label map").endswith("alone.png")
    assert "broken.png" in found.pop("unreadable")
    assert "labels.png holds the label 7" in found.pop("label maps that hold something else than classes")
    assert found.pop("pairs of two sizes").endswith("sizes.png is 8x5")
    assert not found

"""COCO's layout: identities, crowds, empty images, wrong files; boxes follow their pixels; padding makes no token."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.tv_tensors import Image as Pixels

from split_core.engine.loader import valid_of
from split_core.errors import SplitError
from split_core.pictures import PictureError
from split_core.task import DataContext
from split_tasks.data.coco import Coco
from split_tasks.data.detaugment import Objects, ScaleJitter, fill, marked
from split_tasks.detection.configs import CocoConfig
from tinycoco import BOX, annotation, entry, picture, write
from tinydet import model


def data(root: Path, split: str = "val", size: tuple[int, int] = (64, 64), **settings: Any) -> Coco:
    context = DataContext(split, image_size=size, mean=(0.5,) * 3, std=(0.5,) * 3)
    return Coco(CocoConfig(root=root, **settings), context)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    annotations = [
        annotation(1, 12, BOX), annotation(2, 12, (0, 0, 80, 60), 1, iscrowd=1), annotation(3, 12, (5, 5, 0, 9), 1),
        annotation(4, 30, (90, 50, 40, 40), 1),
    ]  # fmt: skip
    return write(tmp_path, images=[entry(12), entry(30), entry(7, 64, 64)], annotations=annotations)


def by_identity(coco: Coco) -> dict[int, dict[str, Any]]:
    return {int(sample["target"]["annotations"].image_id): sample for sample in (coco[i] for i in range(len(coco)))}


def test_identities_crowds_and_images_without_objects(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        coco = data(root)
    assert "1 boxes have no area" in caplog.text
    assert coco.dropped == 1
    assert coco.classes == ("person", "toothbrush")
    assert coco.category_ids == (1, 90)
    samples = by_identity(coco)
    assert len(samples) == 3
    first = samples[12]["target"]
    assert first["labels"].tolist() == [1], "neither the crowd nor the box without area"
    scale = torch.tensor([64 / 100, 38 / 60, 64 / 100, 38 / 60])
    torch.testing.assert_close(first["boxes"], torch.tensor([[20, 10, 50, 50]]) * scale)
    assert first["annotations"].categories.tolist() == [90, 1, 1]
    assert first["annotations"].crowd.tolist() == [False, True, False]
    assert first["annotations"].areas.tolist() == [7, 7, 7], "the file's, not the boxes'"
    assert first["annotations"].scale == pytest.approx((38 / 60, 0.64))
    assert samples[30]["target"]["boxes"].tolist() == [[pytest.approx(57.6), pytest.approx(50 * 38 / 60), 64, 38]]
    assert samples[7]["target"]["boxes"].shape == (0, 4)
    assert data(root).order == coco.order


def test_pictures_share_a_canvas_and_padding_makes_no_token(root: Path) -> None:
    coco = data(root)
    samples = [by_identity(coco)[i] for i in (12, 7)]
    batch = coco.collate(samples)
    assert batch["image"].shape == (2, 3, 64, 64)
    assert batch["size"].tolist() == [[38, 64], [64, 64]]
    assert not batch["image"][0, :, 38:].any(), "zero once normalised, not black"
    assert float(batch["image"][0, :, :38].min()) == -1.0
    backbone = model()
    valid = valid_of(backbone, batch)
    assert valid is not None
    assert valid.flatten(1).sum(1).tolist() == [5 * 8, 64]
    layout = backbone.forward_features(batch["image"], valid=valid).layout
    assert layout.valid_cells.tolist() == [40, 64]
    assert layout.counts[0] <= 40
    assert not (layout.owner[0, 5:] >= 0).any()
    assert "size" not in coco.collate(samples[1:])
    assert valid_of(backbone, coco.collate(samples[1:])) is None


@pytest.mark.parametrize("size", [(96, 96), (40, 160)])
def test_boxes_follow_their_pixels(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    seen = 0
    for _ in range(40):
        image = Pixels(torch.from_numpy(np.asarray(picture(100, 60)).copy()).permute(2, 0, 1))
        jitter = ScaleJitter(size, scale=(0.3, 2.0), flip=0.5)
        start = Objects(marked(torch.tensor([[20.0, 10, 50, 50]]), (60, 100)), torch.tensor([1]))
        found, objects = jitter(image, start)
        boxes, labels = objects.boxes, objects.labels
        assert all(have <= most for have, most in zip(found.shape[1:], size, strict=True))
        white = (found[0] > 127).nonzero()
        assert len(boxes) == len(labels) <= 1
        if len(boxes) and len(white):
            seen += 1
            tight = torch.cat([white.amin(0).flip(0), white.amax(0).flip(0) + 1]).float()
            torch.testing.assert_close(boxes[0].as_subclass(torch.Tensor), tight, atol=1.5, rtol=0)
    assert seen > 20


def test_long_pictures_keep_a_pixel() -> None:
    objects = Objects(marked(torch.zeros(1, 4), (4, 400)), torch.tensor([1]))
    image, objects = fill(Pixels(torch.zeros(3, 4, 400, dtype=torch.uint8)), objects, (64, 64))
    assert image.shape == (3, 1, 64)
    assert objects.boxes.canvas_size == (1, 64)


def test_training_is_jittered_and_evaluation_is_not(root: Path) -> None:
    train = data(root, "train")
    index = next(i for i in range(3) if train.index.image_ids[train.order[i]] == 12)
    torch.manual_seed(0)
    sizes = {tuple(train[index]["image"].shape) for _ in range(6)}
    assert len(sizes) > 1
    assert "annotations" not in train[index]["target"]
    still = data(root, "train", augment=False)
    assert {tuple(still[index]["image"].shape) for _ in range(3)} == {(3, 38, 64)}


def test_orientation_turns_pixels_and_is_checked_against_the_size(tmp_path: Path) -> None:
    root = write(tmp_path, images=[entry(5, 60, 100)], annotations=[annotation(1, 5, BOX)])
    turned = picture(60, 100).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to the right to see it upright
    for split in ("train", "val"):
        turned.save(root / f"{split}2017" / "5.png", exif=exif)
    sample = data(root)[0]
    assert sample["image"].shape == (3, 64, 38)
    left, top, right, bottom = (round(float(v)) for v in sample["target"]["boxes"][0])
    assert float(sample["image"][:, top + 2 : bottom - 2, left + 2 : right - 2].min()) > 0.9
    turned.save(root / "val2017" / "5.png")
    with pytest.raises(PictureError, match=r"5\.png is 100x60 px, .* its annotations are for 60x100"):
        data(root)[0]
    assert [problem.kind for problem in data(root).problems()] == ["unreadable"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"annotations": [annotation(8, 99, BOX)]}, r"1 belong to no image \(ids 8\)"),
        ({"annotations": [annotation(8, 12, BOX, 44)]}, r"1 are of no category \(ids 8\)"),
        ({"annotations": [annotation(8, 12, (1, 2, float("nan"), 4))]}, r"1 have a box that is no numbers \(ids 8\)"),
        ({"annotations": [annotation(8, 12, (1, 2, 4))]}, "an entry lacks or mistypes a field"),
        ({"annotations": [{"id": 8, "image_id": 12}]}, "an entry lacks or mistypes a field"),
        ({"images": [entry(12), entry(12)]}, "two images have the same id"),
        ({"images": []}, "no images or no categories"),
    ],
)
def test_wrong_annotations_are_one_line(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    root = write(tmp_path, **{"images": [entry(12)], "annotations": [], **change})
    with pytest.raises(SplitError, match=line) as caught:
        data(root)
    assert "instances_val2017.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_differing_files_are_named(root: Path) -> None:
    file = root / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text())
    content["categories"].append({"id": 2, "name": "bicycle"})
    file.write_text(json.dumps(content))
    with pytest.raises(SplitError, match=r"the categories of .*val2017\.json are not those of"):
        data(root)
    file.write_text("[1, 2")
    with pytest.raises(SplitError, match="is no json with images, annotations and categories"):
        data(root, "train")
    file.unlink()
    with pytest.raises(SplitError, match=r"data\.annotations: no file"):
        data(root, "train")
    with pytest.raises(SplitError, match=r"data\.images: no folder"):
        data(root, "train", images="nowhere")
    with pytest.raises(ValueError, match="the smallest, 3, is above the largest, 2"):
        CocoConfig(root=root, scale=(3, 2))

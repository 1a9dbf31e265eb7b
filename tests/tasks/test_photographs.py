"""Crops of photographs for timing and pictures."""

from __future__ import annotations

import pytest
import torch

from split_core import registry
from split_core.task import DataContext, Dataset


def data(split: str = "test", **context: object) -> Dataset:
    return registry.build("data", {"name": "photographs", "images": 40}, DataContext(split, **context))  # type: ignore[arg-type]


def test_items_follow_from_seed_split_and_index() -> None:
    first = data()
    assert len(first) == 40
    assert torch.equal(first[7]["image"], data()[7]["image"])
    others = [first[8], data("train")[7], data(seed=1)[7]]
    assert not any(torch.equal(first[7]["image"], other["image"]) for other in others)


@pytest.mark.parametrize(("size", "channels"), [(None, 3), ((112, 112), 3), ((64, 160), 1)])
def test_size_channels_and_range_are_the_model_s(size: tuple[int, int] | None, channels: int) -> None:
    source = data(image_size=size, in_chans=channels, mean=(0.5,), std=(0.5,))
    batch = source.collate([source[i] for i in range(6)])
    assert batch["image"].shape == (6, channels, *(size or (224, 224)))
    assert batch["image"].abs().max() <= 1
    assert (batch["image"].flatten(1).std(1) > 0.1).all(), "real pictures have detail"
    assert batch["target"]["label"].tolist() == [0] * 6

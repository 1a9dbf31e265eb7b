"""A data set: item i is the same whenever it is asked for, and splits share nothing."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from split_core.task import DataContext
from split_example.configs import SquaresConfig


class Squares:
    """A bright square in one quarter of a noisy image; the label is the quarter."""

    classes = ("upper left", "upper right", "lower left", "lower right")

    def __init__(self, config: SquaresConfig, context: DataContext) -> None:
        self.config = config
        self.context = context
        self.size = context.image_size or (config.size, config.size)

    def __len__(self) -> int:
        return self.config.images

    def __getitem__(self, index: int) -> dict[str, Any]:
        key = f"{self.context.split} {self.context.seed} {index}".encode()
        generator = torch.Generator().manual_seed(zlib.crc32(key))
        height, width = self.size
        image = 0.2 * torch.randn(self.context.in_chans, height, width, generator=generator)
        label = int(torch.randint(4, (), generator=generator))
        top, left = label // 2 * (height // 2), label % 2 * (width // 2)
        image[:, top + 2 : top + height // 4, left + 2 : left + width // 4] += 1
        return {"image": image, "target": {"label": label}}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        labels = torch.tensor([sample["target"]["label"] for sample in samples])
        return {"image": torch.stack([sample["image"] for sample in samples]), "target": {"label": labels}}

"""Batches kept to be learned from again: what a policy reads, and the value of each parent's split."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from split_core.types import Grid, Look, Pyramid


@dataclass(frozen=True)
class Example:
    """A batch with targets.

    Args:
        pyramid, images: what the policy reads.
        target: index s - 1, (b, n_s) value of each parent.
        asked: parents that have one.
    """

    pyramid: Pyramid
    images: Float[Tensor, "b ch H W"]
    target: tuple[Float[Tensor, "b _"], ...]
    asked: tuple[Bool[Tensor, "b _"], ...]


class Replay:
    """The last examples, in half the precision and as plain tensors, so that a checkpoint can hold them.

    Args:
        capacity: batches.
    """

    def __init__(self, capacity: int) -> None:
        self._kept: deque[dict[str, Any]] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, example: Example) -> None:
        """Keep an example; the oldest goes when there are too many."""
        pyramid = example.pyramid
        self._kept.append(
            {
                "cells": list(pyramid.grid.cells),
                "levels": [level.to(torch.bfloat16) for level in pyramid.levels],
                "valid": pyramid.valid,
                "look": None if pyramid.look is None else pyramid.look.tokens.to(torch.bfloat16),
                "images": example.images.to(torch.bfloat16),
                "target": list(example.target),
                "asked": list(example.asked),
            }
        )

    def draw(self, generator: torch.Generator | None = None) -> Example:
        """One of them at random."""
        kept = self._kept[int(torch.randint(len(self), (), generator=generator))]
        levels = tuple(level.float() for level in kept["levels"])
        look = None
        if kept["look"] is not None:
            tokens = kept["look"].float()
            nothing = tokens.new_zeros(tokens.shape[0], 0, tokens.shape[2])  # policies read the tokens alone
            look = Look(tokens, torch.zeros_like(tokens), nothing)
        rows, cols = kept["cells"]
        pyramid = Pyramid(levels, Grid((rows, cols), len(levels) - 1), kept["valid"], look)
        return Example(pyramid, kept["images"].float(), tuple(kept["target"]), tuple(kept["asked"]))

    def state_dict(self) -> dict[str, Any]:
        return {"kept": list(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = deque(state["kept"], maxlen=self._kept.maxlen)

"""What the data sets share: batching, normalisation, and the check of an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from split_core.errors import SplitError
from split_core.task import DataContext

SPLITS = ("train", "val", "test")


def check_split(split: str) -> str:
    """`split` itself, or ValueError naming those there are."""
    if split not in SPLITS:
        raise SplitError(f"split: '{split}' is none of {', '.join(SPLITS)}")
    return split


def check_index(index: int, length: int) -> int:
    """`index` counted from the front; IndexError outside, which is also what ends a plain for loop."""
    if not -length <= index < length:
        raise IndexError(f"index {index} is outside a data set of {length} images")
    return index % length


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Stack images and every target that is one tensor or number per image; keep ragged ones as lists.

    What `RAGGED` names (objects per image differ), strings and tuples stay lists of b.
    """
    targets = [sample["target"] for sample in samples]
    batch: dict[str, Any] = {}
    for key in targets[0] if targets else ():
        values = [target[key] for target in targets]
        if key in RAGGED or isinstance(values[0], str | tuple):
            batch[key] = values
        elif isinstance(values[0], Tensor):
            batch[key] = torch.stack(values)
        else:
            batch[key] = torch.tensor(values)
    return {"image": torch.stack([sample["image"] for sample in samples]), "target": batch}


RAGGED = frozenset({"boxes", "labels", "masks"})
"""Target keys whose length is the number of objects of the image."""


def normalise(images: Float[Tensor, "b ch H W"], context: DataContext) -> Float[Tensor, "b c H W"]:
    """[0, 1] pixels to (x - mean) / std, with the channels that the model wants.

    Grey becomes colour by repetition and colour becomes grey by the luma weights of ITU-R 601.

    Raises:
        ValueError: mean or std has a length other than 1 or the number of channels.
    """
    have, want = images.shape[1], context.in_chans
    if have == 1 and want > 1:
        images = images.expand(-1, want, -1, -1)
    elif have == 3 and want == 1:
        images = (images * images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    elif have != want:
        raise SplitError(f"the model wants {want} channels, these images have {have}")
    for name, values in (("mean", context.mean), ("std", context.std)):
        if len(values) not in (1, want):
            raise SplitError(f"{name} has {len(values)} values for {want} channels")
    mean, std = (images.new_tensor(v).view(1, -1, 1, 1) for v in (context.mean, context.std))
    return (images - mean) / std

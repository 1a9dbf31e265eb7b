"""One placeholder per image becomes as many as the image has tokens: the sequence that the language model reads.

With adaptive patches every image has its own number of tokens. Counts are checked sample by sample: a check of the
batch's total alone would let one image's tokens slide into the next one's places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from split_core.errors import SplitError

IGNORED = -100
"""Label of what is not learned."""
Side = Literal["left", "right"]
Ids = Int[Tensor, " _"]


@dataclass(frozen=True)
class Expanded:
    """A batch of prompts, padded to one length.

    Args:
        ids: (b, l) token ids; 0 where an image or padding stands.
        mask: (b, l) what is no padding.
        image: (b, l) where the images' tokens go, sample after sample, image after image.
        labels: (b, l) the ids to be learned, IGNORED elsewhere.
    """

    ids: Int[Tensor, "b l"]
    mask: Bool[Tensor, "b l"]
    image: Bool[Tensor, "b l"]
    labels: Int[Tensor, "b l"]

    @property
    def positions(self) -> Int[Tensor, "b l"]:
        """Position of every token in its own sample, whatever is padded before it."""
        return (self.mask.long().cumsum(1) - 1).clamp_min(0)

    def to(self, device: torch.device | str) -> Expanded:
        """The same on a device."""
        return Expanded(*(part.to(device) for part in (self.ids, self.mask, self.image, self.labels)))


def expand(
    prompts: Sequence[Ids], counts: Sequence[Sequence[int]], *, image_token: int, labels: Sequence[Ids] | None = None,
    side: Side = "left", limit: int | None = None, truncate: bool = False, names: Sequence[str] | None = None,
) -> Expanded:  # fmt: skip
    """Make room for the images' tokens and pad.

    Args:
        prompts: token ids of each sample, image_token once for each of its images.
        counts: tokens of each image of each sample.
        image_token: the placeholder's id; it need not be in the vocabulary.
        labels: ids to be learned, aligned with the prompts; none are by default.
        side: where padding goes.
        limit: longest sequence that the language model reads.
        truncate: cut what is too long at its end instead of refusing it; an image is never cut.
        names: of the samples, for messages; their numbers in the batch by default.

    Raises:
        SplitError: a sample has more or fewer placeholders than images, or is too long; the message names it.
    """
    rows = []
    for index, (prompt, images) in enumerate(zip(prompts, counts, strict=True)):
        name = f"sample {index} of the batch" if names is None else names[index]
        learned = torch.full_like(prompt, IGNORED) if labels is None else labels[index]
        ids, image, learned = _sample(prompt, images, learned, image_token, name)
        if limit is not None and len(ids) > limit:
            ids, image, learned = _cut(ids, image, learned, limit, truncate=truncate, name=name)
        rows.append((ids.masked_fill(image, 0), torch.ones_like(image), image, learned))
    length = max((len(row[0]) for row in rows), default=0)
    parts: list[Sequence[Tensor]] = [[row[field] for row in rows] for field in range(4)]
    fill = (0, False, False, IGNORED)
    return Expanded(*(_padded(part, length, value, side) for part, value in zip(parts, fill, strict=True)))


def _sample(prompt: Ids, images: Sequence[int], labels: Ids, token: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, image places and labels of one sample, expanded."""
    places = prompt == token
    found = int(places.sum())
    if found != len(images):
        raise SplitError(
            f"{name}: its prompt has {_many(found, '<image> placeholder')} for {_many(len(images), 'image')}"
        )
    times = torch.ones_like(prompt)
    times[places] = torch.tensor(list(images), dtype=times.dtype, device=times.device)
    size = len(prompt) - found + sum(images)
    ids, image, learned = (
        torch.repeat_interleave(x, times, output_size=size)
        for x in (prompt, places, labels.masked_fill(places, IGNORED))
    )
    return ids, image, learned


def _cut(
    ids: Tensor, image: Tensor, labels: Tensor, limit: int, *, truncate: bool, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    size, visual = len(ids), int(image.sum())
    after = int(image.nonzero().max()) + 1 if visual else 0
    if not truncate or after > limit:
        within = " would be cut inside an image" if truncate else " is too long"
        raise SplitError(
            f"{name}{within}: {size} tokens, {visual} of them visual, and at most {limit} are read. Shorten the prompt "
            f"or spend fewer visual tokens"
        )
    if (labels != IGNORED).any() and not (labels[:limit] != IGNORED).any():
        raise SplitError(f"{name}: nothing of its answer is left within {limit} tokens; its prompt alone has more")
    return ids[:limit], image[:limit], labels[:limit]


def _padded(rows: Sequence[Tensor], length: int, value: int | bool, side: Side) -> Tensor:
    if not rows:
        return torch.full((0, 0), value)
    out = torch.full((len(rows), length), value, dtype=rows[0].dtype, device=rows[0].device)
    for line, row in zip(out, rows, strict=True):
        start = length - len(row) if side == "left" else 0
        line[start : start + len(row)] = row
    return out


def collapse(prompts: Sequence[Ids], images: int, *, image_token: int, dense: int) -> tuple[list[Tensor], list[Tensor]]:
    """Prompts with one placeholder per image, from such prompts or from those of a processor for the dense model.

    A processor for fixed grids writes `dense` placeholders for each image. The number of images in the batch tells
    which of the two it was.

    Returns:
        The prompts, and for each which of its tokens were kept (labels are kept alike).

    Raises:
        SplitError: the placeholders fit neither reading; the sample that shows it is named.
    """
    found = [int((prompt == image_token).sum()) for prompt in prompts]
    if sum(found) == images:
        return list(prompts), [torch.ones_like(prompt, dtype=torch.bool) for prompt in prompts]
    for index, count in enumerate(found):
        if images and count % dense and sum(found) > images:
            raise SplitError(
                f"sample {index} of the batch: {count} image placeholders are no multiple of the {dense} of an image; "
                f"was its prompt cut inside an image?"
            )
    if sum(found) != images * dense:
        listed = ", ".join(map(str, found))
        raise SplitError(
            f"the batch has {_many(images, 'image')} and its prompts have {listed} placeholders; "
            f"one for each image is needed, or {dense}"
        )
    kept = []
    for prompt in prompts:
        places = prompt == image_token
        kept.append(~places | (places & ((places.long().cumsum(0) - 1) % dense == 0)))
    return [prompt[keep] for prompt, keep in zip(prompts, kept, strict=True)], kept


def _many(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"

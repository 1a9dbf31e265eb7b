"""Region proposal network: which anchors hold something, and where it ends (Faster R-CNN)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import batched_nms

from split_tasks.detection.anchors import RATIOS, anchors
from split_tasks.detection.geometry import RPN_WEIGHTS, centres, clip, decode, encode, has_area
from split_tasks.detection.matching import NOTHING, match, weights

NMS = 0.7
POSITIVE, NEGATIVE = 0.7, 0.3
"""Overlap from which an anchor holds an object, and below which it holds none."""
SHARE = 0.5
"""Of the anchors that count, at most this share holds objects."""


@dataclass(frozen=True)
class Scored:
    """What the network says of every anchor, levels one after the other.

    Args:
        objectness: (b, a) logits.
        codes: (b, a, 4) towards the object.
        anchors: (a, 4).
        counts: anchors of each level.
    """

    objectness: Float[Tensor, "b a"]
    codes: Float[Tensor, "b a 4"]
    anchors: Float[Tensor, "a 4"]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Proposals:
    """Boxes that may hold an object, equally many for each image.

    Args:
        boxes: (b, n, 4).
        live: (b, n) the ones that are there; the others are empty.
    """

    boxes: Float[Tensor, "b n 4"]
    live: Bool[Tensor, "b n"]


class ProposalNetwork(nn.Module):
    """Objectness and codes for three anchors at each point of each map.

    Args:
        channels: of the maps.
        convs: shared 3 x 3 convolutions.
        candidates: best anchors of each level that go into non-maximum suppression, in training and otherwise.
        proposals: boxes of an image that leave it.
        samples: anchors of an image that its error is the mean over.
    """

    def __init__(
        self, channels: int, *, convs: int, candidates: tuple[int, int], proposals: int, samples: int
    ) -> None:  # fmt: skip
        super().__init__()
        self.head = RPNHead(channels, len(RATIOS), conv_depth=convs)
        self.candidates, self.proposals, self.samples = candidates, proposals, samples

    def forward(self, maps: Sequence[Float[Tensor, "b k _ _"]], strides: Sequence[float]) -> Scored:
        """Score every anchor."""
        objectness, codes = self.head(list(maps))
        shapes = [(level.shape[2], level.shape[3]) for level in objectness]
        levels = anchors(shapes, strides, maps[0].device)
        return Scored(
            torch.cat([level.permute(0, 2, 3, 1).flatten(1) for level in objectness], 1).float(),
            torch.cat([_by_anchor(level) for level in codes], 1).float(),
            torch.cat(levels),
            tuple(map(len, levels)),
        )

    @torch.no_grad()
    def propose(self, scored: Scored, sizes: Int[Tensor, "b 2"]) -> Proposals:
        """The best boxes of each image after non-maximum suppression within each level."""
        start, scores, index = 0, [], []
        most = self.candidates[0 if self.training else 1]
        for count in scored.counts:
            best, at = scored.objectness[:, start : start + count].topk(min(most, count))
            scores.append(best)
            index.append(at + start)
            start += count
        score, chosen = torch.cat(scores, 1), torch.cat(index, 1)
        codes = scored.codes.gather(1, chosen[..., None].expand(-1, -1, 4))
        boxes = clip(decode(codes, scored.anchors[chosen], RPN_WEIGHTS), sizes)
        level = torch.repeat_interleave(
            torch.arange(len(scores), device=score.device),
            torch.tensor([s.shape[1] for s in scores], device=score.device),
        )
        result = Proposals(
            boxes.new_zeros(len(boxes), self.proposals, 4),
            torch.zeros(len(boxes), self.proposals, dtype=torch.bool, device=boxes.device),
        )
        for image, (own, value, there) in enumerate(zip(boxes, score, has_area(boxes), strict=True)):
            own, value, group = own[there], value[there], level[there]
            kept = batched_nms(own, value, group, NMS)[: self.proposals]
            result.boxes[image, : len(kept)] = own[kept]
            result.live[image, : len(kept)] = True
        return result

    def errors(
        self, scored: Scored, truth: Sequence[Float[Tensor, "_ 4"]], sizes: Int[Tensor, "b 2"], *, sample: bool
    ) -> Float[Tensor, "b a"]:
        """Each anchor's share of its image's objectness and box error, a mean over `samples` anchors (see `matching`).

        Anchors that are centred on padding are nobody's fault.
        """
        with torch.no_grad():
            known: dict[int, tuple[Tensor, Tensor]] = {}  # rollouts of an image share its boxes
            for boxes in truth:
                if id(boxes) not in known:
                    known[id(boxes)] = self._wanted(boxes, scored.anchors)
            found, codes = (torch.stack(part) for part in zip(*(known[id(boxes)] for boxes in truth), strict=True))
            positive = found >= 0
            inside = (centres(scored.anchors) < sizes.flip(1)[:, None]).all(-1)
            weight = weights(
                positive, (found == NOTHING) & inside, size=self.samples, share=SHARE, sample=sample
            )  # fmt: skip
        objectness = F.binary_cross_entropy_with_logits(scored.objectness, positive.float(), reduction="none")
        box = (scored.codes - codes).abs().sum(-1) * positive
        return (objectness + box) * weight / self.samples

    def _wanted(self, truth: Float[Tensor, "g 4"], boxes: Float[Tensor, "a 4"]) -> tuple[Tensor, Tensor]:
        """Object of each anchor, and the codes that would move it there; zeros where there is none."""
        found = match(truth, boxes, high=POSITIVE, low=NEGATIVE, best=True)
        codes = torch.zeros_like(boxes)
        held = found >= 0
        codes[held] = encode(truth[found[held]], boxes[held], RPN_WEIGHTS)
        return found, codes


def _by_anchor(codes: Float[Tensor, "b a4 r c"]) -> Float[Tensor, "b n 4"]:
    """Cells in raster order, the anchors of a cell side by side."""
    return codes.unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3)

"""Mask head: which pixels of its box an object covers, 28 x 28 points for the class that it is (Mask R-CNN)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import roi_align

from split_tasks.detection.cascade import Truth, channel_norm, pool, pool_regions
from split_tasks.detection.matching import match

SIDE = 14
"""Points that a box is pooled to, each way; its mask has twice as many."""


class MaskHead(nn.Module):
    """One for all stages of a cascade.

    Args:
        channels: of the maps.
        classes: without the background; each has a mask of its own.
        convs: 3 x 3 convolutions with LayerNorm on the pooled map.
        threshold: overlap from which a box holds an object.
    """

    def __init__(self, channels: int, *, classes: int, convs: int, threshold: float) -> None:
        super().__init__()
        self.convs = MaskRCNNHeads(channels, [channels] * convs, 1, norm_layer=channel_norm)
        self.predictor = MaskRCNNPredictor(channels, channels, classes)
        self.threshold = threshold

    def forward(self, pooled: Float[Tensor, "n k 14 14"], labels: Int[Tensor, " n"]) -> Float[Tensor, "n 28 28"]:
        """Logits of each box's own class."""
        every = self.predictor(self.convs(pooled))
        return every[torch.arange(len(labels), device=labels.device), labels].float()

    def detect(
        self, maps: Sequence[Tensor], strides: Sequence[float], boxes: Float[Tensor, "1 n 4"], labels: Int[Tensor, " n"]
    ) -> Float[Tensor, "n 28 28"]:  # fmt: skip
        """Probabilities for the boxes found in one image, whose maps these are."""
        return self(pool(maps, strides, boxes, SIDE), labels).sigmoid()

    def errors(
        self, maps: Sequence[Tensor], strides: Sequence[float], boxes: Float[Tensor, "b m 4"],
        weight: Float[Tensor, "b m"], truth: Truth, masks: Sequence[Bool[Tensor, "_ _ _"]],
    ) -> Float[Tensor, "b m"]:  # fmt: skip
        """A box's share of its image's mask error: a mean over the boxes that hold an object, as they count, and over
        their points; 0 where no box does.

        Args:
            weight: how much each box counts (`matching.weights`).
            masks: of each image's objects, on its picture.
        """
        images, places, labels, wanted = [], [], [], []
        for image, ((own, kinds), pixels) in enumerate(zip(truth, masks, strict=True)):
            found = match(own, boxes[image], high=self.threshold, low=self.threshold)
            place = ((found >= 0) & (weight[image] > 0)).nonzero()[:, 0]
            places.append(place)
            images.append(torch.full_like(place, image))
            labels.append(kinds[found[place]].long())
            wanted.append(cropped(pixels, boxes[image, place], found[place]))
        which, place = torch.cat(images), torch.cat(places)
        counted = weight[which, place]
        held = weight.new_zeros(len(weight)).index_add(0, which, counted)
        rois = torch.cat([which[:, None].to(boxes.dtype), boxes[which, place]], 1)
        logits = self(pool_regions(maps, strides, rois, SIDE), torch.cat(labels))
        off = F.binary_cross_entropy_with_logits(logits, torch.cat(wanted), reduction="none").mean((1, 2))
        return torch.zeros_like(weight).index_put((which, place), off * counted / held[which])


def cropped(
    masks: Bool[Tensor, "g H W"], boxes: Float[Tensor, "n 4"], index: Int[Tensor, " n"]
) -> Float[Tensor, "n 28 28"]:  # fmt: skip
    """What a box should see of its object: 1 where at least half of a point's share of the box is on it."""
    if not len(boxes):
        return boxes.new_zeros(0, 2 * SIDE, 2 * SIDE)
    used, index = index.unique(return_inverse=True)
    rois = torch.cat([index[:, None].to(boxes.dtype), boxes], 1)
    read = roi_align(masks[used, None].to(boxes.dtype), rois, 2 * SIDE, 1.0, sampling_ratio=0, aligned=True)
    return (read[:, 0] >= 0.5).to(boxes.dtype)

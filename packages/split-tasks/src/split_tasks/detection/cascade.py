"""Box heads, one or a cascade of them: each classifies the boxes and moves them, the next goes on from there.

Classes come first and the background last; boxes are the same for all classes; their error is the plain L1 distance
of the codes. Pooling samples at exact positions (RoIAlign with half-pixel centres) as densely as a box is large.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.ops import roi_align

from split_tasks.detection.geometry import CASCADE_WEIGHTS, clip, decode, encode, has_area
from split_tasks.detection.matching import match, weights
from split_tasks.detection.proposals import Proposals

SIDE = 7
"""Points that a box is pooled to, each way."""
CANONICAL = 14.0
"""Side of a box, in cells of a level, from which that level reads it; below twice that. 224 px at stride 16."""
SHARE = 0.25
"""Of the proposals that count, at most this share holds objects."""
Truth = Sequence[tuple[Float[Tensor, "_ 4"], Int[Tensor, " _"]]]
"""Boxes and labels of each image."""


class BoxHead(nn.Module):
    """One stage.

    Args:
        channels: of the maps.
        classes: without the background.
        convs: 3 x 3 convolutions with LayerNorm on the pooled map.
        hidden: width of the linear layer behind them.
    """

    def __init__(self, channels: int, *, classes: int, convs: int, hidden: int) -> None:
        super().__init__()
        self.features = FastRCNNConvFCHead(
            (channels, SIDE, SIDE), [channels] * convs, [hidden], norm_layer=channel_norm
        )
        self.classifier = nn.Linear(hidden, classes + 1)
        self.mover = nn.Linear(hidden, 4)
        for layer, spread in ((self.classifier, 0.01), (self.mover, 0.001)):
            nn.init.normal_(layer.weight, std=spread)
            nn.init.zeros_(layer.bias)

    def forward(self, pooled: Float[Tensor, "n k 7 7"]) -> tuple[Float[Tensor, "n classes1"], Float[Tensor, "n 4"]]:
        """Class logits and codes of each box."""
        features = self.features(pooled)
        return self.classifier(features).float(), self.mover(features).float()


class Cascade(nn.Module):
    """Box heads in sequence.

    Args:
        channels, classes, convs, hidden: of each head.
        thresholds: overlap from which a box holds an object, by stage.
        samples: proposals of an image that its error is the mean over.
    """

    def __init__(
        self, channels: int, *, classes: int, convs: int, hidden: int, thresholds: Sequence[float], samples: int
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            BoxHead(channels, classes=classes, convs=convs, hidden=hidden) for _ in thresholds
        )  # fmt: skip
        self.thresholds, self.samples, self.classes = tuple(thresholds), samples, classes

    def detect(
        self, maps: Sequence[Tensor], strides: Sequence[float], proposals: Proposals, sizes: Int[Tensor, "b 2"]
    ) -> tuple[Float[Tensor, "b n 4"], Float[Tensor, "b n classes"]]:
        """Boxes of the last stage, and class probabilities averaged over the stages; 0 where there is no proposal."""
        boxes, total = proposals.boxes, torch.zeros((), device=proposals.boxes.device)
        for stage in range(len(self.heads)):
            logits, codes = self._read(stage, maps, strides, boxes)
            total = total + logits.softmax(-1)
            boxes = clip(decode(codes, boxes, self._weights(stage)), sizes)
        scores = total[..., : self.classes] / len(self.heads)
        return boxes, scores * proposals.live[..., None]

    def errors(
        self, maps: Sequence[Tensor], strides: Sequence[float], proposals: Proposals, truth: Truth,
        sizes: Int[Tensor, "b 2"], *, sample: bool,
    ) -> tuple[Float[Tensor, "b m"], Float[Tensor, "b m 4"], Float[Tensor, "b m"]]:  # fmt: skip
        """Each box's share of its image's class and box error, summed over the stages, a mean over the proposals (see
        `matching`); the boxes; and how much each counts.

        The objects themselves are among the proposals, as in the reference. All shares are 0 without a proposal.
        """
        boxes, live = _with_truth(proposals, truth)
        with torch.no_grad():
            labels, _ = self._wanted(0, boxes, truth)
            held = labels < self.classes
            weight = weights(held & live, ~held & live, size=self.samples, share=SHARE, sample=sample)
            if sample and boxes.shape[1] > self.samples:
                chosen = weight.topk(self.samples).indices
                weight, boxes = weight.gather(1, chosen), boxes.gather(1, chosen[..., None].expand(-1, -1, 4))
        start, counted, total = boxes, weight, torch.zeros_like(weight)
        for stage in range(len(self.heads)):
            logits, codes = self._read(stage, maps, strides, boxes)
            with torch.no_grad():
                labels, wanted = self._wanted(stage, boxes, truth)
            off = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            off = off + (codes - wanted).abs().sum(-1) * (labels < self.classes)
            total = total + off * weight / weight.sum(1, keepdim=True).clamp_min(1e-9)
            with torch.no_grad():
                boxes = clip(decode(codes, boxes, self._weights(stage)), sizes)
                weight = weight * has_area(boxes)
        return total, start, counted

    def _read(
        self, stage: int, maps: Sequence[Tensor], strides: Sequence[float], boxes: Float[Tensor, "b n 4"]
    ) -> tuple[Float[Tensor, "b n classes1"], Float[Tensor, "b n 4"]]:
        pooled = pool(maps, strides, boxes)
        # all stages read the same maps; a policy that learns from slopes wants the error's own
        if self.training and pooled.requires_grad and len(self.heads) > 1:
            pooled.register_hook(lambda gradient: gradient / len(self.heads))
        logits, codes = self.heads[stage](pooled)
        return logits.view(*boxes.shape[:2], -1), codes.view(*boxes.shape[:2], 4)

    def _wanted(self, stage: int, boxes: Float[Tensor, "b n 4"], truth: Truth) -> tuple[Tensor, Tensor]:
        """Class of each box (the background's where it holds nothing), and the codes that would move it there."""
        threshold = self.thresholds[stage]
        labels = torch.full(boxes.shape[:2], self.classes, device=boxes.device)
        codes = torch.zeros_like(boxes)
        for image, (own, kinds) in enumerate(truth):
            found = match(own, boxes[image], high=threshold, low=threshold)
            held = found >= 0
            labels[image, held] = kinds[found[held]].long()
            codes[image, held] = encode(own[found[held]], boxes[image, held], self._weights(stage))
        return labels, codes

    def _weights(self, stage: int) -> tuple[float, ...]:
        return tuple(weight * (stage + 1) for weight in CASCADE_WEIGHTS)


def pool(
    maps: Sequence[Float[Tensor, "b k _ _"]], strides: Sequence[float], boxes: Float[Tensor, "b n 4"], side: int = SIDE
) -> Float[Tensor, "bn k q q"]:
    """A map of side x side points for each box, read from the level that suits its size."""
    batch, count = boxes.shape[:2]
    image = torch.arange(batch, device=boxes.device, dtype=boxes.dtype).repeat_interleave(count)
    return pool_regions(maps, strides, torch.cat([image[:, None], boxes.flatten(0, 1)], 1), side)


def pool_regions(
    maps: Sequence[Float[Tensor, "b k _ _"]], strides: Sequence[float], rois: Float[Tensor, "n 5"], side: int
) -> Float[Tensor, "n k q q"]:
    """The same for boxes that say first whose image they are of, however many each has."""
    level = level_of(rois[:, 1:], strides)
    pooled = maps[0].new_zeros(len(rois), maps[0].shape[1], side, side, dtype=torch.float32)
    for index, (features, stride) in enumerate(zip(maps, strides, strict=True)):
        own = (level == index).nonzero()[:, 0]
        read = roi_align(features.float(), rois[own], side, 1 / stride, sampling_ratio=0, aligned=True)
        pooled = pooled.index_copy(0, own, read)
    return pooled


def level_of(boxes: Float[Tensor, "*n 4"], strides: Sequence[float]) -> Int[Tensor, "*n"]:
    """The coarsest level on which a box is at least CANONICAL cells wide, by the root of its area; else the finest."""
    side = (boxes[..., 2:] - boxes[..., :2]).clamp_min(0).prod(-1).sqrt()
    starts = torch.tensor([CANONICAL * stride for stride in strides[1:]], device=boxes.device)
    return (side[..., None] >= starts - 1e-4).sum(-1)


def _with_truth(proposals: Proposals, truth: Truth) -> tuple[Float[Tensor, "b m 4"], Bool[Tensor, "b m"]]:
    most = max((len(own) for own, _ in truth), default=0)
    extra = proposals.boxes.new_zeros(len(truth), most, 4)
    live = torch.zeros(len(truth), most, dtype=torch.bool, device=extra.device)
    for image, (own, _) in enumerate(truth):
        extra[image, : len(own)] = own
        live[image, : len(own)] = True
    return torch.cat([proposals.boxes, extra], 1), torch.cat([proposals.live, live], 1)


def channel_norm(channels: int) -> nn.Module:
    """LayerNorm over the channels of a map."""
    return LayerNorm2d(channels, eps=1e-6)

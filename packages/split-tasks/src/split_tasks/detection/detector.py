"""Neck and heads together, and what they make of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from split_core.types import Grid
from split_tasks.detection.cascade import Cascade, Truth
from split_tasks.detection.configs import DetectConfig
from split_tasks.detection.geometry import centres
from split_tasks.detection.masks import MaskHead
from split_tasks.detection.proposals import ProposalNetwork, Proposals, Scored
from split_tasks.detection.pyramid import SimplePyramid
from split_tasks.detection.softnms import Detections, soft_nms

MASKED = 100
"""Detections of an image that get a mask, the best ones."""


class Detector(nn.Module):
    """Simple feature pyramid, proposals, box heads, and if they are asked for masks.

    Args:
        config: sizes of all of them.
        dim: width of the tokens.
        classes: without the background.
    """

    def __init__(self, config: DetectConfig, *, dim: int, classes: int) -> None:
        super().__init__()
        self.config = config
        self.neck = SimplePyramid(dim, channels=config.channels, scales=config.scales)
        self.rpn = ProposalNetwork(
            config.channels, convs=config.rpn_convs, candidates=config.candidates, proposals=config.proposals,
            samples=config.anchor_samples,
        )  # fmt: skip
        self.cascade = Cascade(
            config.channels, classes=classes, convs=config.convs, hidden=config.hidden, thresholds=config.thresholds,
            samples=config.box_samples,
        )  # fmt: skip
        self.masks = (
            MaskHead(
                config.channels, classes=classes, convs=config.mask_convs, threshold=config.thresholds[0]
            ) if config.masks else None
        )  # fmt: skip

    def forward(
        self, features: Float[Tensor, "b d r c"], *, grid: Grid, patch: int, sizes: Int[Tensor, "b 2"]
    ) -> Reading:  # fmt: skip
        """Maps, scored anchors and proposals of a batch.

        Args:
            features: the ViT's map.
            grid: its fine cells.
            patch: side of a fine patch in px.
            sizes: height and width that each picture reaches, in px of the canvas.
        """
        maps = self.neck(features)
        strides = tuple(patch / scale for scale in self.neck.scales)
        scored = self.rpn(maps, strides)
        return Reading(self, maps, strides, scored, self.rpn.propose(scored, sizes), sizes, grid, patch)


@dataclass(frozen=True)
class Reading:
    """What the detector made of a batch, up to the proposals; its box heads run when errors or detections are wanted.

    Args:
        detector: whose heads.
        maps, strides: finest first; px between two points.
        scored: every anchor.
        proposals: what the box heads read.
        sizes: (b, 2) px that each picture reaches.
        grid, patch: fine cells of the canvas, and their side in px.
    """

    detector: Detector
    maps: tuple[Float[Tensor, "b k _ _"], ...]
    strides: tuple[float, ...]
    scored: Scored
    proposals: Proposals
    sizes: Int[Tensor, "b 2"]
    grid: Grid
    patch: int

    def error(
        self, truth: Truth, masks: Sequence[Bool[Tensor, "_ _ _"]] | None = None, *, sample: bool = False
    ) -> Float[Tensor, " b"]:  # fmt: skip
        """Errors of the proposal network, of all stages of the box heads and of the mask head, image by image."""
        return self.shares(truth, masks, sample=sample)[0].sum(1)

    def shares(
        self, truth: Truth, masks: Sequence[Bool[Tensor, "_ _ _"]] | None = None, *, sample: bool = False
    ) -> tuple[Float[Tensor, "b m"], Float[Tensor, "b m 2"]]:  # fmt: skip
        """What each anchor and each proposal adds to the error of its image, and where its middle is.

        Args:
            masks: of each image's objects, which a detector with a mask head wants.
        """
        detector, read = self.detector, len(self._read)
        first = detector.rpn.errors(self.scored, [own for own, _ in truth], self.sizes, sample=sample)
        second, boxes, weight = detector.cascade.errors(
            self._read, self.strides[:read], self.proposals, truth, self.sizes, sample=sample
        )  # fmt: skip
        if detector.masks is not None:
            assert masks is not None
            second = second + detector.masks.errors(self._read, self.strides[:read], boxes, weight, truth, masks)
        middles = centres(self.scored.anchors).expand(len(first), -1, -1)
        return torch.cat([first, second], 1), torch.cat([middles, centres(boxes)], 1)

    @cached_property
    def detections(self) -> list[Detections]:
        """What was found in each image, best first."""
        config, read = self.detector.config, len(self._read)
        with torch.no_grad():
            boxes, scores = self.detector.cascade.detect(
                self._read, self.strides[:read], self.proposals, self.sizes
            )  # fmt: skip
            found = soft_nms(boxes, scores, iou=config.nms, least=config.least_score, limit=config.detections)
            return [self._with_masks(image, one) for image, one in enumerate(found)]

    def _with_masks(self, image: int, found: Detections) -> Detections:
        head, read = self.detector.masks, self._read
        if head is None:
            return found
        maps = [level[image : image + 1] for level in read]
        boxes, labels = found.boxes[:MASKED], found.labels[:MASKED]
        return replace(found, masks=head.detect(maps, self.strides[: len(read)], boxes[None], labels))

    @property
    def _read(self) -> tuple[Tensor, ...]:
        """Box heads read no map at a quarter of the ViT's resolution, unless it is the only one."""
        return self.maps[:-1] if len(self.maps) > 1 and self.detector.neck.scales[-1] == 0.25 else self.maps

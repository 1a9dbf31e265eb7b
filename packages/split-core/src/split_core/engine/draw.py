"""``do=draw``: where the tokens went, one column per method, on images of the data or on a picture of one's own.

A picture of one's own is shrunk or enlarged with its proportions kept until it has about as many pixels as the
model's own input, so that it is seen whole and at the token counts that the model was trained with. A model with
windows sees it on a canvas of its own size, whose rest makes no token.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from split_core.config import RunConfig
from split_core.engine.adapt import own_settings
from split_core.engine.assemble import chooser
from split_core.engine.calibration import objects_of
from split_core.engine.deploy import deployed
from split_core.engine.loader import evaluation_batches, to_device, valid_of
from split_core.engine.methods import WARM, is_learned, plan, policy_class
from split_core.engine.patchmap import draw, enlargement, to_rgb
from split_core.engine.session import Learner, Session
from split_core.errors import SplitError
from split_core.model import SplitViT
from split_core.pictures import read_rgb
from split_core.reducer import Reducer
from split_core.wrapping import backbone_info

SIDE, GAP, TOP, CAPTION, LEFT, DPI = 200, 10, 30, 22, 8, 100
"""Of a sheet, in pixels: pictures, space between them, title line, caption line, left edge; and per inch."""


@dataclass(frozen=True)
class Column:
    """One method on all images.

    Args:
        title: above.
        pictures: one per image.
        captions: one below each.
    """

    title: str
    pictures: list[Image.Image]
    captions: list[str]


def main(config: RunConfig) -> None:
    """Draw the run's methods, trained if it has weights; print where the picture is.

    Raises:
        SplitError: the picture cannot be read, or the policy is learned and the run has no weights.
    """
    session = Session(config)
    learners = _learners(session)
    folder = session.run_dir / "report"
    if config.draw.image is None:
        path = folder / "patchmaps.png"
        sheet(session, learners, path)
    else:
        path = folder / f"draw_{Path(config.draw.image).stem}.png"
        any_model = next(iter(learners.values())).model
        batch = to_device(own_picture(config.draw.image, any_model), session.device)
        target = None if config.draw.question is None else {"question": [config.draw.question]}
        shown = {n: x for n, x in learners.items() if not chooser(x.model).analysis}
        save(columns(session, shown, batch["image"], target, valid_of(any_model, batch)), path)
    Console().print(str(path), soft_wrap=True, markup=False, highlight=False)


def sheet(session: Session, learners: Mapping[str, Learner], path: Path) -> None:
    """Methods side by side on the first images of the evaluated split."""
    config = session.config
    batch = next(iter(evaluation_batches(session.data(config.eval.split), config.draw.count, range(config.draw.count))))
    batch = to_device(batch, session.device)
    valid = valid_of(next(iter(learners.values())).model, batch)
    save(columns(session, learners, batch["image"], batch["target"], valid), path)


@torch.no_grad()
def columns(
    session: Session,
    learners: Mapping[str, Learner],
    images: Float[Tensor, "b ch H W"],
    target: Mapping[str, Any] | None,
    valid: Bool[Tensor, "b r c"] | None = None,
) -> list[Column]:
    """The plain images and, where the task paints them, the truth; then each splitting method's partition with its
    token fraction and, for classes, its guess, or the task's picture of its output beside it."""
    learners = {name: learner for name, learner in learners.items() if isinstance(learner.model, SplitViT)}
    first = next(iter(learners.values())).model
    info = backbone_info(first.vit, stages=session.config.stages, budget=None)
    mean, std = info.mean[: images.shape[1]], info.std[: images.shape[1]]
    labels = None if target is None else target.get("label")
    truth = [""] * len(images) if labels is None else [str(session.classes[int(label)]) for label in labels]
    truth = truth if target is None else target.get("question", truth)
    plain = [_enlarged(pixels) for pixels in to_rgb(images, mean, std)]
    result = [Column("image", plain, truth)]
    size = (images.shape[2], images.shape[3])
    painted = None if target is None else next(iter(learners.values())).task.paint(plain, size, target=target)
    if painted is not None:
        result.append(Column("truth", painted, [""] * len(images)))
    trained = (session.run_dir / "models").is_dir()
    for name, learner in learners.items():
        model = learner.split
        generator = torch.Generator().manual_seed(session.config.seed)
        with session.accelerator.autocast():
            pyramid = model.pyramid(images, valid)
            objects = None if target is None else objects_of(learner, target, pyramid.grid)
            layout = model.decide(pyramid, images, objects=objects, generator=generator)
            features = model.encode(pyramid, layout)
            said = learner.task.say(model, features, target) if trained or learner.task.pretrained else None
            output = learner.task.output(model, features) if trained and said is None else None
        captions = [f"{fraction:.2f}" for fraction in layout.token_fraction.tolist()]
        if isinstance(output, Tensor) and output.shape == (len(images), len(session.classes)):
            for index, guess in enumerate(output.argmax(1).tolist()):
                right = "" if labels is None else " ✓" if guess == int(labels[index]) else " ✗"
                captions[index] += f"   {session.classes[guess]}{right}"
        captions = captions if said is None else said
        patch = model.embed.patch_size
        pictures = draw(images, layout, mean=mean, std=std, patch_size=patch, short_side=SIDE)
        result.append(Column(name, pictures, captions))
        painted = None if output is None else learner.task.paint(plain, size, output=output)
        if painted is not None:
            scores = None if target is None else learner.task.score(output, target)
            below = [""] * len(images)
            if scores is not None and len(scores) == len(images):
                below = [f"{learner.task.metric_name} {score:.2f}" for score in scores.tolist()]
            result.append(Column(f"{name}: output", painted, below))
    return result


def save(table: list[Column], path: Path) -> None:
    """Columns of equal pictures on a white sheet, pixel by pixel (no resampling)."""
    width, height = table[0].pictures[0].size
    rows = len(table[0].pictures)
    across, down = width + GAP, height + CAPTION + GAP
    size = (LEFT + len(table) * across, TOP + rows * down)
    figure = Figure(figsize=(size[0] / DPI, size[1] / DPI), dpi=DPI)
    for x, column in enumerate(table):
        left = LEFT + x * across
        figure.text(
            (left + width / 2) / size[0], 1 - TOP / 2 / size[1], column.title, ha="center", va="center", weight="bold"
        )
        for y, (picture, caption) in enumerate(zip(column.pictures, column.captions, strict=True)):
            top = TOP + y * down
            figure.figimage(np.asarray(picture), left, size[1] - top - height, origin="upper")
            at = ((left + width / 2) / size[0], 1 - (top + height + CAPTION / 2) / size[1])
            figure.text(*at, caption, ha="center", va="center", fontsize=9, parse_math=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of what a language model writes, the font shows what it has
        figure.savefig(path, dpi=DPI)


def own_picture(path: str, model: SplitViT | Reducer) -> dict[str, Tensor]:
    """A batch of a picture file as the model wants it: its channels, its normalisation, about its number of pixels.

    Raises:
        SplitError: it cannot be read.
    """
    try:
        picture = read_rgb(path)
    except ValueError as error:
        raise SplitError(f"draw.image: {error}") from error
    vit = model.vit
    height, width = vit.patch_embed.img_size
    unit = max(vit.patch_embed.patch_size)
    if model.windows is None:
        factor = (height * width / (picture.width * picture.height)) ** 0.5
    else:
        factor = min(height / picture.height, width / picture.width)
    sides = [max(2 * unit, round(side * factor)) for side in picture.size]
    picture = picture.resize((sides[0], sides[1]), Image.Resampling.BICUBIC, reducing_gap=3.0)
    channels = vit.patch_embed.proj.in_channels
    values = np.asarray(picture if channels == 3 else picture.convert("L"), dtype=np.float32) / 255
    image = torch.from_numpy(values).view(sides[1], sides[0], channels).permute(2, 0, 1)
    info = backbone_info(vit, stages=1, budget=None)
    mean, std = (torch.tensor(v[:channels]).view(-1, 1, 1) for v in (info.mean, info.std))
    pixels = ((image - mean) / std)[None]
    if model.windows is None:
        return {"image": pixels}
    right, below = width - pixels.shape[3], height - pixels.shape[2]
    return {"image": F.pad(pixels, (0, right, 0, below)), "size": torch.tensor([pixels.shape[2:]])}


def _learners(session: Session) -> dict[str, Learner]:
    """Methods of the run; without trained weights, the unlearned ones on the backbone as it is."""
    config, methods = session.config, plan(session.config)
    if (session.run_dir / "models").is_dir():
        return {m.name: deployed(session, m) for m in methods}
    own = config.policy["name"]
    if is_learned(own):
        raise SplitError(
            f"policy {own} is learned, and {session.run_dir} holds no trained weights: train it first (do=train"
            f" run_dir={session.run_dir}), or draw one that needs no training, e.g. policy=entropy"
        )
    names = [m.name for m in methods if not m.name.endswith(WARM) and not policy_class(m.policy).learned]
    return {name: session.learner(own_settings(config, name), rule=config.decision).eval() for name in names}


def _enlarged(pixels: NDArray[Any]) -> Image.Image:
    """The image alone, at the size that `draw` gives it."""
    height, width = pixels.shape[:2]
    times = enlargement(height, width, SIDE)
    return Image.fromarray(pixels.round().astype(np.uint8).repeat(times, 0).repeat(times, 1))

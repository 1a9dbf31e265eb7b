"""What a task is: how features become an output, and what an output costs, image by image.

The estimators need errors per image (never a batch mean): E(x, M) of Sec. 3.3. Everything else a run needs
of a task (metric, target cells of objects for recall) hangs here too, so that the engine knows no task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor, nn

from split_core.errors import SplitError
from split_core.types import Grid

if TYPE_CHECKING:
    from split_core.features import Features
    from split_core.model import SplitViT
    from split_core.reducer import Reducer

Target = Mapping[str, Any]
"""Labels of a batch: "label" (b,), "mask" (b, H, W) ...; tensors lead with b, ragged ones are lists of b."""


@dataclass(frozen=True)
class DataContext:
    """What a data set is built with.

    Args:
        split: "train", "val" or "test"; nothing is shared between splits beyond what its settings say.
        seed: decides generated samples together with split and index.
        image_size: (H, W) the model wants, or None for the data's own.
        mean, std: normalisation that `image` comes back with.
        in_chans: channels the model wants.
        strict: refuse files that do not fit together; otherwise they are left out, and `problems` tells of them.
    """

    split: str
    seed: int = 0
    image_size: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    in_chans: int = 3
    strict: bool = True


@dataclass(frozen=True)
class Problem:
    """Something in a data set's files, for ``do=check``.

    Args:
        kind: under which it is counted ("missing pictures").
        what: the file or record, and what it is.
        fault: a run would fail at it, or learn from it what is wrong; otherwise it is only worth knowing.
    """

    kind: str
    what: str
    fault: bool = True


@dataclass(frozen=True)
class ModelContext:
    """What a backbone is built with.

    Args:
        num_classes: outputs of its head; 0 leaves the head out.
        image_size: (H, W) its position table is made for, or None for the model's own default.
        in_chans: channels of the images, or None for the model's own.
    """

    num_classes: int
    image_size: tuple[int, int] | None = None
    in_chans: int | None = None


@runtime_checkable
class Dataset(Protocol):
    """A map-style data set. Item i is the same whenever it is asked for.

    Attributes:
        classes: names, in index order.
    Methods:
        __getitem__(i): {"image": (c, H, W) float32 normalised, "target": {"label": int, "mask": (H, W) bool
            tensor or absent, "boxes": ..., ...}}.
        collate(samples): {"image": (b, c, H, W), "target": Target}, and where pictures of different sizes share a
            canvas "size": (b, 2) int, the height and width that each fills from the top left; the rest is padding,
            which makes no token.
    An optional ``__getitems__(indices)`` makes many at once; an optional ``problems() -> Iterable[Problem]`` reads all
    files and tells what is wrong with any. A class whose batches may have a "size" says ``shared_canvas = True``, so
    that reducers, which would read the padding, are refused before anything is trained or timed.
    """

    classes: Sequence[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class TaskContext:
    """What a task is built with.

    Args:
        classes: class names of the data.
        dim: width of the backbone's tokens.
        depth: L, its blocks.
        data: a split of the data set, for what only this task reads of it (`segment_classes` ...).
        backbone: the backbone itself, for a task whose head comes with it.
    """

    classes: tuple[str, ...]
    dim: int
    depth: int = 0
    data: Dataset | None = None
    backbone: nn.Module | None = None


@runtime_checkable
class Metric(Protocol):
    """What no mean of per-image numbers gives (mIoU, average precision): one accumulator over a data set.

    `update` takes each batch once. `compute` sums over the processes of a run before it answers, as torchmetrics does,
    and returns numbers of the whole data set by name; "per_class" may hold one more number for each class name. An
    optional ``files() -> dict[str, str]``, asked after that, gives what was predicted in a format that others read, by
    file name; it goes to run_dir/report/METHOD/.
    """

    def update(self, output: Any, target: Target) -> None: ...

    def compute(self) -> dict[str, Any]: ...


class Task(nn.Module):
    """Base of all tasks. Its parameters (a head, an auxiliary loss) train with the backbone and freeze with it.

    Attributes:
        metric_name: what `score` is called in results.
        model_head: the task reads the timm model's own head; without it the model is built without one.
        output_name: what the work of `output` is called where it is timed apart.
        taps: numbers of the blocks whose output the task reads (`Features.taps`), rising; with any, the tokens after
            the final norm are not read. The session hands them to the model, whose `encode` then brings them along.
    """

    metric_name: str = ""
    model_head: ClassVar[bool] = True
    output_name: ClassVar[str] = "head"
    taps: tuple[int, ...] = ()

    maps_error: ClassVar[bool] = False
    """Its error has a place in the picture: `error_map` says where."""

    pretrained: bool = False
    """What it says means something before any training: its head came with the model."""

    def output(self, model: SplitViT | Reducer, features: Features, target: Target | None = None) -> Any:
        """The task's output for a batch, from the backbone's features.

        Args:
            target: what the output may depend on (a question); None where images come alone, to be timed or drawn.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define output(model, features, target)")

    def flops(self, tokens: Any) -> Any:
        """FLOPs of `output` for an image of so many patch tokens (array or number), where they depend on them."""
        return 0.0

    def beyond(self, model: SplitViT | Reducer, features: Features) -> Mapping[str, Callable[[], object]]:
        """Work that follows `output` when the model is used (decoding words), by name, ready to be timed apart."""
        return {}

    def say(self, model: SplitViT | Reducer, features: Features, target: Target | None) -> list[str] | None:
        """A few words for under each image's picture, or None."""
        return None

    def error(self, output: Any, target: Target) -> Float[Tensor, " b"]:
        """E(x, M): one finite number per image, lower is better."""
        raise NotImplementedError(f"{type(self).__name__} does not define error(output, target)")

    def distance(self, output: Any, reference: Any) -> Float[Tensor, " b"]:
        """How far an output is from that of the all-fine model: an error that needs no labels (`error=distill`).

        Raises:
            SplitError: the task does not define one.
        """
        raise SplitError(f"error=distill: {type(self).__name__} defines no distance between outputs; use error=task")

    def loss(self, output: Any, target: Target, features: Features) -> Float[Tensor, ""]:
        """What the backbone trains on; the mean error unless a task adds auxiliary terms."""
        return self.error(output, target).mean()

    def score(self, output: Any, target: Target) -> Float[Tensor, " b"] | None:
        """A per-image score to average and to pair between methods (accuracy: 0 or 1), or None."""
        return None

    def metric(self) -> Metric | None:
        """A new accumulator of the task's data-set numbers, or None when `score` says it all."""
        return None

    def error_map(self, output: Any, target: Target) -> Float[Tensor, "b r c"] | None:
        """Where the error lies: a share for each fine cell of the padded grid, zero where there is no picture; its mean
        over an image's valid cells is `error`. None when an error has no place."""
        return None

    def per_image(self, values: Float[Tensor, " n"], target: Target) -> Float[Tensor, " b"]:
        """Sums over the rows of a batch that show one image; a row is an image unless the data cuts windows."""
        return values

    def objects(self, target: Target, grid: Grid, patch_size: tuple[int, int]) -> Bool[Tensor, "b r c"] | None:
        """Fine cells that lie on labelled objects, for recall and for the oracle policy; None if unlabelled."""
        return None

    def boundaries(self, target: Target, grid: Grid, patch_size: tuple[int, int]) -> Bool[Tensor, "b r c"] | None:
        """Fine cells on the boundary between labels, for recall (App. F); None if there are none to know."""
        return None

    def paint(
        self,
        pictures: Sequence[Image.Image],
        size: tuple[int, int],
        *,
        output: Any = None,
        target: Target | None = None,
    ) -> list[Image.Image] | None:
        """The output, or without one the truth, drawn on plain pictures of the images; None if there is nothing to.

        Args:
            pictures: the images as the model saw them, enlarged by a whole number.
            size: (H, W) of the images before that.
        """
        return None


def repeat_target(target: Target, times: int) -> dict[str, Any]:
    """The target of `times` rollouts of a batch, rollout after rollout (row k * b + i is image i)."""
    return {key: _repeated(value, times) for key, value in target.items()}


def _repeated(value: Any, times: int) -> Any:
    """Tensors and lists of b repeated; of a dataclass (an output, say) its tensors."""
    if isinstance(value, Tensor):
        return torch.cat([value] * times)
    if isinstance(value, list | tuple):
        return list(value) * times
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    return replace(value, **{name: _repeated(x, times) for name, x in held.items() if isinstance(x, Tensor)})

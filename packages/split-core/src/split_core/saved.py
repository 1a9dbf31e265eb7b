"""What the config.json of a saved model holds, checked when it is read: one line names the file and the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from split_core.decision import Decision
from split_core.errors import SplitError, nearest
from split_core.features import Pooling
from split_core.pyramid import Down
from split_core.rope import Place

FORMAT = 1


class Strict(BaseModel):
    """No unknown keys, no values of another type, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Options(Strict):
    """The options of `SplitViT`."""

    attention: str = "auto"
    down: Down = "area"
    pooling: Pooling = "area"
    antialias: bool = True
    rope: Place = "center"
    compile_blocks: bool = False
    windows: dict[str, Any] | None = None


class Spec(Strict):
    """What a model is besides its backbone and decision, in plain values; it keeps this so that it can be saved.

    Args:
        policy: its name and all of its settings.
        stages: S.
        budget: token fraction that the policy was made for, or None.
    """

    policy: dict[str, Any]
    stages: int = Field(ge=1)
    budget: float | None = Field(gt=0, le=1)
    options: Options = Options()


class Transforms(Strict):
    """Arguments of `timm.data.create_transform`."""

    input_size: tuple[int, int, int]
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    crop_mode: str


class Saved(Strict):
    """The whole file.

    Args:
        split_core: the format's number.
        backbone: timm's name of the architecture.
        model_args: further arguments of `timm.create_model`.
        dtype: of every floating tensor among the weights.
    """

    split_core: Literal[1]
    backbone: str
    model_args: dict[str, Any]
    transforms: Transforms
    spec: Spec
    decision: Decision
    license: str = "other"
    dtype: Literal["float16", "bfloat16", "float32", "float64"]


def read(path: Path) -> Saved:
    """The file's content.

    Raises:
        SplitError: it cannot be read, or names the first key that is wrong.
    """
    try:
        return Saved.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SplitError(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        raise explained(path, error) from error


def explained(source: object, error: ValidationError) -> SplitError:
    """One line on the first fault; another format explains every other."""
    return SplitError(_line(source, min(error.errors(), key=lambda fault: fault["loc"] != ("split_core",))))


def _line(path: object, fault: Any) -> str:
    key, kind = ".".join(map(str, fault["loc"])), fault["type"]
    if kind == "json_invalid":
        return f"{path} cannot be read: {fault['msg']}"
    if not key or key == "split_core":
        return f"{path} is no configuration of a wrapped model in format {FORMAT}"
    if kind in ("missing", "missing_argument"):
        return f"{path} lacks {key}"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        parent = fault["loc"][:-1]
        sections: dict[tuple[str, ...], type[BaseModel]] = {
            (): Saved, ("spec",): Spec, ("spec", "options"): Options, ("transforms",): Transforms,
        }  # fmt: skip
        section = sections.get(parent)
        close = nearest(fault["loc"][-1], section.model_fields if section else Decision.__dataclass_fields__)
        return f"{path}: there is no key {key}" + (f"; did you mean {close}?" if close else "")
    return f"{path}: {key}={fault['input']!r}: {fault['msg']}"

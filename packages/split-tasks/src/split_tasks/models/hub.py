"""Model `timm`: any Vision Transformer of timm, with weights from its hub, from a file, or random."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import timm
from torch import nn

from split_core.errors import SplitError, first_line
from split_core.task import ModelContext
from split_tasks.configs import TimmConfig
from split_tasks.models.weights import load_strict, read_weights


def build(config: TimmConfig, context: ModelContext) -> nn.Module:
    """The timm model.

    Args:
        config: architecture and weights. A file must fit key by key, the position table included; only a head for other
            classes is made anew.
        context: classes, image size and channels; config.img_size goes before the context's.

    Raises:
        ValueError: no such model, weights that do not fit, or a hub that cannot be reached.
    """
    base = config.architecture.split(".")[0]
    if not timm.is_model(base):
        near = difflib.get_close_matches(base, timm.list_models(), n=1)
        hint = f"; the nearest is '{near[0]}'" if near else ""
        raise SplitError(f"model.architecture: timm has no '{config.architecture}'{hint}")
    options: dict[str, Any] = {"num_classes": context.num_classes}
    if context.in_chans is not None:
        options["in_chans"] = context.in_chans
    if config.drop_path:
        options["drop_path_rate"] = config.drop_path
    size = config.img_size or context.image_size
    if size is not None:
        options["img_size"] = size
    if config.weights == "hub":
        return _from_hub(config.architecture, options)
    model = timm.create_model(config.architecture, pretrained=False, **options)
    if config.weights != "none":
        path = Path(config.weights).expanduser()
        settings: Any = model.pretrained_cfg
        classifier = settings.get("classifier") or "head"
        heads = classifier if isinstance(classifier, str) else classifier[0]
        load_strict(model, read_weights(path), source=str(path), head=heads)
    return model


def _from_hub(name: str, options: dict[str, Any]) -> nn.Module:
    """timm's pretrained model; its failures (no network, no weights of that name) become one line."""
    try:
        return timm.create_model(name, pretrained=True, **options)
    except (OSError, RuntimeError, ValueError) as error:
        # huggingface_hub's errors derive from these three; their texts run over many lines.
        raise SplitError(
            f"model.weights=hub: cannot get the weights of {name}: {first_line(error)}. Give a file with "
            f"model.weights=PATH, or model.weights=none for random ones"
        ) from None

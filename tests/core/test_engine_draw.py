"""Pictures of partitions, against a plain loop over pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import split_core
from split_core import Windows, wrap
from split_core.engine.draw import own_picture
from split_core.engine.loader import valid_of
from split_core.engine.patchmap import LINE_OPACITY, draw, to_rgb
from split_core.errors import SplitError
from split_core.quadtree import build_layout, uniform_splits
from split_core.types import Grid, Layout, Splits
from tiny import Logits, tiny_vit


def layout_of(grid: Grid, batch: int, seed: int) -> Layout:
    """A random partition."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [grid.shape(s) for s in range(1, grid.stages + 1)]
    return build_layout(Splits(tuple(torch.rand(batch, *s, generator=generator) < 0.5 for s in shapes), grid))


def outlines(layout: Layout, index: int, size: tuple[int, int], patch: int, times: int) -> np.ndarray:
    """Pixels that lie on the top or left edge of a token, or on the frame."""
    height, width = size[0] * times, size[1] * times
    edge = np.zeros((height, width), dtype=bool)
    for y in range(height):
        for x in range(width):

            def owner(y: int, x: int) -> int:
                return int(layout.owner[index, y // times // patch, x // times // patch])

            frame = y in (0, height - 1) or x in (0, width - 1)
            edge[y, x] = frame or owner(y, x) != owner(y - 1, x) or owner(y, x) != owner(y, x - 1)
    return edge


@given(
    height=st.integers(5, 24), width=st.integers(5, 24), patch=st.sampled_from([2, 3, 4]), stages=st.integers(1, 2),
    seed=st.integers(0, 99), channels=st.sampled_from([1, 3]),
)  # fmt: skip
def test_every_token_is_outlined_at_any_size(
    height: int, width: int, patch: int, stages: int, seed: int, channels: int
) -> None:
    grid = Grid((-(-height // patch), -(-width // patch)), stages)
    layout = layout_of(grid, 1, seed)
    (picture,) = draw(
        torch.zeros(1, channels, height, width), layout, patch_size=patch, short_side=2 * min(height, width)
    )
    assert picture.size == (2 * width, 2 * height)
    # on black pictures only outlines are bright
    bright = np.asarray(picture).min(2) >= round(255 * LINE_OPACITY) - 1
    assert (bright == outlines(layout, 0, (height, width), patch, 2)).all()


def test_fine_tokens_keep_their_colours_and_coarse_ones_do_not() -> None:
    grid = Grid((4, 4), 1)
    images = torch.zeros(2, 3, 16, 16)
    images[:, 0] = 1.0
    layout = build_layout(Splits((torch.tensor([[[True, False], [False, False]], [[False] * 2] * 2]),), grid))
    first, second = (np.asarray(p).astype(int) for p in draw(images, layout, short_side=16))
    assert tuple(first[2, 2]) == (255, 0, 0)
    for coarse in (first[4 * 2 + 4, 13], second[2, 2]):
        assert coarse[0] < 120
        assert coarse[2] > 30


def test_the_public_name_draws_what_a_model_did(tmp_path: Path) -> None:
    model = wrap(tiny_vit(), policy=Logits(), budget=0.5).eval()
    images = torch.randn(3, 3, 40, 24)
    with torch.no_grad():
        model(images)
    assert model.layout is not None
    pictures = split_core.draw(images, model.layout, path=tmp_path / "new" / "p.png")
    assert [p.size for p in pictures] == [(14 * 24, 14 * 40)] * 3
    with Image.open(tmp_path / "new" / "p.png") as sheet:
        assert sheet.size == (2 * 336 + 8, 2 * 560 + 8)


def test_normalisation_is_undone_or_stretched() -> None:
    images = torch.tensor([0.0, 0.5, 1.0]).view(1, 1, 1, 3)
    assert np.allclose(to_rgb(images)[0, 0, :, 0], [0, 127.5, 255], atol=1e-3)
    assert np.allclose(to_rgb((images - 0.2) / 0.3, [0.2], [0.3])[0, 0, :, 1], [0, 127.5, 255], atol=1e-3)
    assert np.allclose(to_rgb(images * 8 - 4)[0, 0, :, 2], [0, 127.5, 255], atol=1e-3)
    assert np.allclose(to_rgb(torch.full((1, 3, 2, 2), 7.0)), 0)


def test_images_and_layouts_that_do_not_belong_together_are_refused() -> None:
    layout = build_layout(uniform_splits(Grid((4, 4), 1), 2, split=True))
    with pytest.raises(SplitError, match="3 images cannot be drawn with a layout of 2"):
        draw(torch.zeros(3, 3, 16, 16), layout)
    with pytest.raises(SplitError, match="4x4 cells"):
        draw(torch.zeros(2, 3, 16, 16), layout, patch_size=8)
    with pytest.raises(SplitError, match="patch_size="):
        draw(torch.zeros(2, 3, 50, 50), layout)
    with pytest.raises(SplitError, match="1 or 3 channels"):
        draw(torch.zeros(2, 2, 16, 16), layout)
    assert draw(torch.zeros(2, 3, 15, 14), layout)[0].size[1] >= 320, "4 px is the only patch that fits"


@pytest.mark.parametrize(
    ("mode", "size"), [("RGB", (640, 160)), ("L", (90, 300)), ("RGBA", (33, 31)), ("P", (500, 20))]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_own_pictures_keep_their_proportions_and_the_model_s_pixels(
    tmp_path: Path, mode: str, size: tuple[int, int], channels: int
) -> None:
    Image.new(mode, size).save(tmp_path / "own.png")
    image = own_picture(str(tmp_path / "own.png"), wrap(tiny_vit(in_chans=channels, img_size=128), Logits()))["image"]
    height, width = image.shape[2:]
    assert image.shape[:2] == (1, channels)
    assert abs(height * width - 128**2) < 0.05 * 128**2
    assert width / height == pytest.approx(size[0] / size[1], rel=0.1)


@pytest.mark.parametrize("size", [(640, 160), (90, 300), (50, 50)])
def test_a_model_with_windows_sees_own_pictures_on_its_canvas(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size, "white").save(tmp_path / "own.png")
    model = wrap(
        tiny_vit(img_size=64, class_token=False, global_pool="avg"), Logits(), windows=Windows(4), stages=1
    ).eval()
    batch = own_picture(str(tmp_path / "own.png"), model)
    assert batch["image"].shape == (1, 3, 64, 64)
    height, width = batch["size"][0].tolist()
    assert max(height, width) == 64
    assert width / height == pytest.approx(size[0] / size[1], rel=0.1)
    assert not batch["image"][:, :, height:].any()
    valid = valid_of(model, batch)
    layout = model.decide(model.pyramid(batch["image"], valid), batch["image"])
    patch = model.embed.patch_size[0]
    assert int(layout.valid_cells) == -(-height // patch) * -(-width // patch)


def test_a_file_that_is_no_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.png").write_text("not a picture")
    with pytest.raises(SplitError, match=r"draw\.image: .*own\.png"):
        own_picture(str(tmp_path / "own.png"), wrap(tiny_vit(), Logits()))

"""Rotary rows against timm's own at every size, and where coarse tokens stand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from split_core.backbone.attentions import rotate
from split_core.rope import RopeTable
from split_core.types import Grid
from split_core.wrapping import wrap
from tiny import ROTARY, Bright, Logits, images, jitter, relative, tiny_vit

GRID = Grid((4, 4), 1)


def timm_rows(family: str, cells: tuple[int, int]) -> Tensor:
    """timm's sines and cosines of each angle once: (n, e), or (L, n, h, e) where heads differ."""
    vit = tiny_vit(family, dynamic_img_size=True)
    sin, cos = vit.rope.get_embed(shape=list(cells)).detach().chunk(2, -1)
    half = vit.blocks[0].attn.rotate_half
    once = slice(0, sin.shape[-1] // 2) if half else slice(0, None, 2)
    rows = torch.cat([sin[..., once], cos[..., once]], -1)
    return rows.transpose(1, 2) if rows.ndim == 4 else rows


def level(rows: Tensor, grid: Grid, scale: int) -> Tensor:
    """Rows of one scale's cells as (..., r, c, ...)."""
    axis = 1 if rows.ndim == 4 else 0
    return rows.narrow(axis, grid.offset(scale), grid.size(scale)).unflatten(axis, grid.shape(scale))


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("cells", [(4, 4), (6, 6), (3, 5), (2, 8), (1, 1), (16, 1), (7, 4)], ids=str)
def test_fine_rows_are_timms_at_every_size(family: str, cells: tuple[int, int]) -> None:
    grid = Grid(cells, 2)
    table = RopeTable(tiny_vit(family))
    rows = table.cells(grid)
    assert rows is not None
    fine = level(rows.detach(), grid, 0)
    axis = 1 if table.per_block else 0
    fine = fine.narrow(axis, 0, cells[0]).narrow(axis + 1, 0, cells[1]).flatten(axis, axis + 1)
    torch.testing.assert_close(fine, timm_rows(family, cells), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ROTARY)
def test_the_last_row_turns_nothing(family: str) -> None:
    table = RopeTable(tiny_vit(family))
    rows = table.cells(GRID)
    assert rows is not None
    still = rows[..., -1, :, :] if table.per_block else rows[-1]
    sin, cos = still.chunk(2, -1)
    assert (sin == 0).all()
    assert (cos == 1).all()


@pytest.mark.parametrize("family", ROTARY)
def test_a_coarse_token_stands_where_it_is_put(family: str) -> None:
    """On its top-left cell, or in the middle: the angle there is the mean of the four angles, which are linear."""
    for place in ("corner", "center"):
        table = RopeTable(tiny_vit(family), place=place)
        grid = Grid((16, 16), 1)
        rows = table.cells(grid)
        assert rows is not None
        axis = 1 if table.per_block else 0
        fine, coarse = (level(rows.detach().double(), grid, s) for s in (0, 1))
        angles = angle(fine)
        blocks = angles.unflatten(axis, (8, 2)).unflatten(axis + 2, (8, 2)).transpose(axis + 1, axis + 2)
        own = angle(coarse)
        corner = blocks.select(axis + 2, 0).select(axis + 2, 0)
        # Angles are known up to full turns; neighbours differ by less than half of one.
        steps = [turn(blocks.select(axis + 2, i).select(axis + 2, j) - corner) for i in (0, 1) for j in (0, 1)]
        expected = corner if place == "corner" else corner + torch.stack(steps).mean(0)
        assert turn(own - expected).abs().max() < 1e-4


def angle(rows: Tensor) -> Tensor:
    sin, cos = rows.chunk(2, -1)
    return torch.atan2(sin, cos)


def turn(angles: Tensor) -> Tensor:
    """The same angle within half a turn of zero."""
    return torch.remainder(angles + torch.pi, 2 * torch.pi) - torch.pi


@pytest.mark.parametrize("half", [True, False])
def test_rotating_is_a_rotation_of_each_pair(half: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 6, generator=generator)
    angles = torch.randn(3, 3, generator=generator)
    out = rotate(x, torch.cat([angles.sin(), angles.cos()], -1), half=half)
    for t in range(3):
        for h in range(2):
            for i in range(3):
                a, b = (i, i + 3) if half else (2 * i, 2 * i + 1)
                turned = torch.polar(torch.ones(1), angles[t, i : i + 1]) * torch.complex(x[t, h, a], x[t, h, b])
                torch.testing.assert_close(torch.complex(out[t, h, a], out[t, h, b])[None], turned)


def test_rows_are_kept_until_the_frequencies_change() -> None:
    table = RopeTable(tiny_vit("rope_mixed")).eval()
    with torch.no_grad():
        kept = table.cells(GRID)
        assert table.cells(GRID) is kept
        assert kept is not None
        before = kept.clone()
        table.vit.rope.freqs.mul_(2)
        after = table.cells(GRID)
    assert after is not None
    assert not torch.allclose(after, before)
    table.cells(GRID).sum().backward()  # being trained, they are made anew
    assert table.vit.rope.freqs.grad.abs().sum() > 0


def test_rows_follow_the_precision_of_the_model() -> None:
    vit = tiny_vit("eva02")
    table = RopeTable(vit)
    assert table.cells(GRID).dtype == torch.float32
    vit.to(torch.bfloat16)
    assert table.cells(GRID).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ROTARY)
def test_the_place_matters_to_mixed_sequences_only(family: str) -> None:
    corner, center = (wrap(tiny_vit(family), Logits(), rope=place).eval() for place in ("corner", "center"))
    picture = images(2, 64)
    assert relative(corner(picture).detach(), center(picture).detach()) > 1e-4
    fine = wrap(tiny_vit(family), "dense").eval().tokenize(picture)
    assert torch.equal(corner(picture, layout=fine), center(picture, layout=fine))


@pytest.mark.parametrize("family", ["eva02", "rope_mixed"])
def test_looking_and_carrying_on_with_rotary_positions(family: str) -> None:
    """Blocks passed by the coarse patches alone, then by the mixed sequence, are those of the coarse sequence."""

    class Coarse(Bright):
        depth, carries = 1, True

        def forward(self, view) -> Tensor:
            assert view.context.shape == view.parents.shape
            return -view.parents.new_ones(view.parents.shape[:2])

    looking, plain = (jitter(wrap(tiny_vit(family), policy), 3).eval() for policy in (Coarse(), "coarse"))
    with torch.no_grad():
        assert relative(looking(images(2, 40)), plain(images(2, 40))) <= 1e-5

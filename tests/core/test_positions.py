"""Position tables against timm's own, at the native size and at every other."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from split_core.positions import PositionTable
from split_core.types import Grid
from tiny import FAMILIES, tiny_vit

WITH_TABLE = [name for name in FAMILIES if tiny_vit(name).pos_embed is not None]
GRID = Grid((4, 4), 1)


def fine_rows(rows: Tensor, grid: Grid) -> Tensor:
    """Rows of the fine cells that hold picture."""
    return rows[: grid.size(0)].view(*grid.shape(0), -1)[: grid.cells[0], : grid.cells[1]].flatten(0, 1)


@pytest.fixture
def table() -> PositionTable:
    return PositionTable(tiny_vit())


@pytest.mark.parametrize("family", WITH_TABLE)
def test_fine_rows_are_the_models_own_at_the_native_size(family: str) -> None:
    vit = tiny_vit(family)
    own = vit.pos_embed[0] if vit.no_embed_class else vit.pos_embed[0, vit.num_prefix_tokens :]
    rows = PositionTable(vit).patches(GRID)
    assert rows is not None
    assert rows.shape == (GRID.total, vit.embed_dim)
    assert torch.equal(rows[: GRID.size(0)], own)


@pytest.mark.parametrize("family", ["vit", "deit3", "registers", "gap"])
@pytest.mark.parametrize("cells", [(6, 6), (3, 5), (2, 8), (8, 2), (1, 1), (16, 1), (1, 16), (7, 4)], ids=str)
def test_fine_rows_are_what_timm_resamples_at_another_size(family: str, cells: tuple[int, int]) -> None:
    vit = tiny_vit(family)
    prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
    expected = resample_abs_pos_embed(vit.pos_embed, list(cells), [4, 4], prefix)[0, prefix:]
    grid = Grid(cells, 2)
    rows = PositionTable(vit).patches(grid)
    assert rows is not None
    torch.testing.assert_close(fine_rows(rows, grid), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("cells", [(8, 32), (32, 8)], ids=str)
def test_another_shape_of_equal_area_is_resampled(cells: tuple[int, int]) -> None:
    """timm itself returns a square table unchanged only for a square grid; counting cells would be a trap."""
    vit = tiny_vit(img_size=128)
    expected = resample_abs_pos_embed(vit.pos_embed, list(cells), [16, 16], 1)[0, 1:]
    rows = PositionTable(vit).patches(Grid(cells, 1))
    assert rows is not None
    torch.testing.assert_close(rows[:256], expected, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(rows[:256], vit.pos_embed[0, 1:])


def test_a_table_made_for_a_canvas_that_is_not_square() -> None:
    vit = tiny_vit(img_size=(16, 64))
    grid = Grid((2, 8), 1)
    rows = PositionTable(vit).patches(grid)
    assert rows is not None
    assert torch.equal(rows[:16], vit.pos_embed[0, 1:])
    expected = resample_abs_pos_embed(vit.pos_embed, [4, 4], [2, 8], 1)[0, 1:]
    rows = PositionTable(vit).patches(GRID)
    assert rows is not None
    torch.testing.assert_close(rows[:16], expected, atol=1e-6, rtol=1e-5)


def test_a_coarse_row_is_that_of_a_smaller_picture(table: PositionTable) -> None:
    grid = Grid((7, 4), 2)
    rows = table.patches(grid)
    assert rows is not None
    for s, cells in [(1, (4, 2)), (2, (2, 1))]:
        shape = grid.shape(s)
        level = rows[grid.offset(s) : grid.offset(s + 1)].view(*shape, -1)
        expected = resample_abs_pos_embed(table.vit.pos_embed, list(cells), [4, 4], 1)[0, 1:]
        torch.testing.assert_close(level[: cells[0], : cells[1]].flatten(0, 1), expected, atol=1e-6, rtol=1e-5)


def test_antialias_is_an_option() -> None:
    vit = tiny_vit()
    grid = Grid((3, 3), 1)
    expected = resample_abs_pos_embed(vit.pos_embed, [3, 3], [4, 4], 1, antialias=False)[0, 1:]
    rows = PositionTable(vit, antialias=False).patches(grid)
    assert rows is not None
    torch.testing.assert_close(fine_rows(rows, grid), expected, atol=1e-6, rtol=1e-5)
    smooth = PositionTable(vit).patches(grid)
    assert smooth is not None
    assert not torch.allclose(fine_rows(smooth, grid), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_is_what_timm_puts_before_the_patches(family: str) -> None:
    vit = tiny_vit(family)
    with torch.no_grad():
        embedded = vit._pos_embed(vit.patch_embed(torch.zeros(1, 3, 32, 32)))
        embedded = embedded[0] if isinstance(embedded, tuple) else embedded  # Eva adds its rotary rows
    prefix = PositionTable(vit).prefix()
    if vit.num_prefix_tokens == 0:
        assert prefix is None
    else:
        assert prefix is not None
        torch.testing.assert_close(prefix, embedded[0, : vit.num_prefix_tokens])


def test_a_model_without_a_table_has_no_rows() -> None:
    assert PositionTable(tiny_vit("no_positions")).patches(GRID) is None


def count_resampling(table: PositionTable, monkeypatch: pytest.MonkeyPatch) -> list[Grid]:
    calls: list[Grid] = []
    inner = PositionTable._resample

    def resample(self: PositionTable, grid: Grid) -> Tensor:
        calls.append(grid)
        return inner(self, grid)

    monkeypatch.setattr(PositionTable, "_resample", resample)
    return calls


def test_rows_are_kept_while_the_table_stays_the_same(table: PositionTable, monkeypatch) -> None:
    calls = count_resampling(table.eval(), monkeypatch)
    with torch.no_grad():
        first, second = table.patches(GRID), table.patches(GRID)
    assert first is second
    assert len(calls) == 1
    with torch.no_grad():  # a look while its table learns
        assert table.train().patches(GRID) is not table.patches(GRID)
    first = table.eval().patches(GRID).detach()
    table.vit.requires_grad_(False)
    kept = table.patches(GRID)
    assert table.train().eval().patches(GRID) is not kept  # switching the mode drops it
    assert table.patches(GRID) is table.patches(GRID)  # frozen: gradients are enabled, but not for the table
    torch.testing.assert_close(table.patches(GRID), first)


def step(table: PositionTable) -> None:
    optimizer = torch.optim.SGD([table.vit.pos_embed], lr=0.5)
    table.vit.pos_embed.grad = torch.ones_like(table.vit.pos_embed)
    optimizer.step()


def load(table: PositionTable) -> None:
    table.vit.load_state_dict(tiny_vit(seed=5).state_dict())


def edit_data_and_switch_mode(table: PositionTable) -> None:
    table.vit.pos_embed.data.mul_(2)
    table.train()
    table.eval()


def replace(table: PositionTable) -> None:
    table.vit.pos_embed = torch.nn.Parameter(table.vit.pos_embed.detach() + 1)


def cast(table: PositionTable) -> None:
    table.vit.to(torch.float64)


@pytest.mark.parametrize("change", [step, load, edit_data_and_switch_mode, replace, cast])
def test_rows_follow_the_table_when_it_changes(table: PositionTable, change) -> None:
    with torch.no_grad():
        before = table.patches(GRID)
        assert before is not None
        kept = before.clone()
    change(table)
    with torch.no_grad():
        after = table.patches(GRID)
    assert after is not None
    assert after.dtype == table.vit.pos_embed.dtype
    assert torch.equal(after[:16], table.vit.pos_embed[0, 1:])
    assert change is cast or not torch.equal(after, kept)


def test_rows_carry_gradients_to_a_table_that_trains(table: PositionTable) -> None:
    rows = table.patches(Grid((3, 5), 1))
    assert rows is not None
    rows.sum().backward()
    assert table.vit.pos_embed.grad[0, 1:].abs().sum() > 0
    assert (table.vit.pos_embed.grad[0, 0] == 0).all()


def test_rows_kept_in_inference_mode_serve_training_afterwards(table: PositionTable) -> None:
    table.vit.requires_grad_(False)
    with torch.inference_mode():
        table.patches(GRID)
    rows = table.patches(GRID)
    assert rows is not None
    weight = torch.ones(GRID.total, 1, requires_grad=True)
    (weight * rows).sum().backward()
    torch.testing.assert_close(weight.grad[:, 0], rows.sum(1))


def test_a_stream_of_sizes_keeps_few_tables(table: PositionTable) -> None:
    with torch.no_grad():
        for n in range(1, 30):
            table.patches(Grid((n, n + 1), 1))
    assert len(table._kept) <= 8


def test_copies_keep_no_rows_of_the_original(table: PositionTable) -> None:
    with torch.no_grad():
        table.patches(GRID)
    assert copy.deepcopy(table)._kept == {}


def test_half_precision_tables_are_resampled_in_float32() -> None:
    """The antialiased resize has no bfloat16 kernel on CPU, and rounding before it would cost more than after."""
    vit = tiny_vit().to(torch.bfloat16)
    grid = Grid((6, 5), 1)
    rows = PositionTable(vit).patches(grid)
    assert rows is not None
    assert rows.dtype == torch.bfloat16
    exact = resample_abs_pos_embed(vit.pos_embed.float(), [6, 5], [4, 4], 1)[0, 1:]
    torch.testing.assert_close(fine_rows(rows, grid), exact.bfloat16())

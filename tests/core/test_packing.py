"""pack, dense_map and the two means, against loops over tokens and cells."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from split_core.packing import Packed, area_mean, dense_map, pack, token_mean
from split_core.quadtree import build_layout, uniform_splits
from split_core.types import Grid, Layout, Pyramid, Splits
from strategies import Case, cases, grids, masks_of, random_pyramid, seeds

DIM = 3


def naive_pack(pyramid: Pyramid, layout: Layout, positions: Tensor | None, prefix: Tensor | None) -> list[Tensor]:
    """Rows of the packed sequence, image after image."""
    rows, grid = [], layout.grid
    for image in range(layout.batch):
        rows += [] if prefix is None else list(prefix)
        for token in (layout.image == image).nonzero().flatten().tolist():
            s = int(layout.scale[token])
            cell = (int(layout.row[token]) >> s) * grid.shape(s)[1] + (int(layout.col[token]) >> s)
            embedding = pyramid.levels[s][image % pyramid.batch, cell]
            rows.append(embedding if positions is None else embedding + positions[grid.offset(s) + cell])
    return rows


def values_of(layout: Layout, seed: int, dim: int = DIM) -> Tensor:
    return torch.randn(layout.total, dim, generator=torch.Generator().manual_seed(seed))


@given(cases(), seeds, st.integers(0, 3), st.booleans())
def test_pack_is_the_loop(case: Case, seed: int, k: int, positioned: bool) -> None:
    pyramid = random_pyramid(case.grid, case.batch, DIM, seed)
    layout = build_layout(case.splits, case.valid)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randn(case.grid.total, DIM, generator=generator) if positioned else None
    prefix = torch.randn(k, DIM, generator=generator) if k else None
    packed = pack(pyramid, layout, positions, prefix)
    assert torch.equal(packed.tokens, torch.stack(naive_pack(pyramid, layout, positions, prefix)))
    check_segments(packed, layout, k)


def check_segments(packed: Packed, layout: Layout, k: int) -> None:
    segments = packed.segments
    assert segments.lengths == tuple(n + k for n in layout.lengths)
    assert segments.total == packed.tokens.shape[0] == layout.total + k * layout.batch
    assert segments.cu_seqlens.dtype == torch.int32
    assert segments.cu_seqlens.diff().tolist() == list(segments.lengths)
    assert segments.max_length >= max(segments.lengths)
    assert segments.image.tolist() == [i for i, n in enumerate(segments.lengths) for _ in range(n)]
    assert torch.equal(segments.image[packed.patch_index], layout.image)
    assert torch.equal(segments.image[packed.prefix_index], torch.arange(layout.batch)[:, None].expand(-1, k))
    everything = torch.cat([packed.patch_index, packed.prefix_index.flatten()])
    assert everything.sort().values.tolist() == list(range(segments.total))


@given(grids(most_stages=2), st.integers(1, 3), st.integers(2, 3), st.data())
def test_rollouts_read_the_pyramid_of_their_image(grid: Grid, batch: int, times: int, data: st.DataObject) -> None:
    splits = Splits(data.draw(masks_of(grid, times * batch)), grid)
    pyramid = random_pyramid(grid, batch, DIM, seed=0)
    packed = pack(pyramid, build_layout(splits))
    repeated = Pyramid(tuple(level.repeat(times, 1, 1) for level in pyramid.levels), grid)
    assert torch.equal(packed.tokens, pack(repeated, build_layout(splits)).tokens)


@pytest.mark.parametrize("images", [1, 3])
def test_a_layout_that_does_not_fit_the_pyramid_is_refused(images: int) -> None:
    grid, other = Grid((4, 4), 1), Grid((4, 6), 1)
    pyramid = random_pyramid(grid, 2, DIM, seed=0)
    with pytest.raises(ValueError, match=f"layout of {images} images .* pyramid of 2"):
        pack(pyramid, build_layout(uniform_splits(grid, images, split=True)))
    with pytest.raises(ValueError, match=r"4x6 patches .* 4x4"):
        pack(pyramid, build_layout(uniform_splits(other, 2, split=True)))


@given(cases(), seeds)
def test_dense_map_fills_every_cell_with_its_owner_and_padding_with_zero(case: Case, seed: int) -> None:
    layout = build_layout(case.splits, case.valid)
    values = values_of(layout, seed)
    dense = dense_map(values, layout)
    rows, cols = case.grid.cells
    assert dense.shape == (case.batch, DIM, rows, cols)
    owner = layout.owner[:, :rows, :cols].flatten().tolist()
    expected = torch.stack([values[t] if t >= 0 else torch.zeros(DIM) for t in owner])
    assert torch.equal(dense.permute(0, 2, 3, 1).reshape(-1, DIM), expected)


@given(cases(), seeds)
def test_unpacking_what_was_packed_gives_each_cell_the_embedding_over_it(case: Case, seed: int) -> None:
    """The round trip, cell by cell: from the leaf's scale alone, not through the owner map."""
    pyramid = random_pyramid(case.grid, case.batch, DIM, seed)
    layout = build_layout(case.splits, case.valid)
    packed = pack(pyramid, layout, prefix=torch.full((2, DIM), 9.0))
    dense = dense_map(packed.tokens[packed.patch_index], layout)
    nested = [mask.tolist() for mask in case.splits.nested().masks]
    holds = case.holds_picture.tolist()
    for image in range(case.batch):
        expected = torch.zeros(*case.grid.cells, DIM)
        for row, col in [(i, j) for i in range(case.grid.cells[0]) for j in range(case.grid.cells[1])]:
            s = case.grid.stages
            while s and nested[s - 1][image][row >> s][col >> s]:
                s -= 1
            if holds[image][row][col]:
                expected[row, col] = pyramid.levels[s][image, (row >> s) * case.grid.shape(s)[1] + (col >> s)]
        assert torch.equal(dense[image].permute(1, 2, 0), expected)


def test_dense_map_where_the_middle_scale_is_absent() -> None:
    """Two stages, tokens of scale 0 and 2 only: a whole coarse patch splits to the bottom, the other not at all."""
    grid = Grid((4, 8), 2)
    masks = (torch.zeros(1, 2, 4, dtype=torch.bool), torch.tensor([[[True, False]]]))
    masks[0][:, :, :2] = True
    layout = build_layout(Splits(masks, grid))
    assert set(layout.scale.tolist()) == {0, 2}
    dense = dense_map(torch.arange(17.0)[:, None], layout)
    left = [[0, 1, 2, 3], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    assert dense[0, 0].tolist() == [row + [4.0] * 4 for row in left]


@given(cases(), seeds)
def test_area_mean_is_the_mean_of_the_dense_map(case: Case, seed: int) -> None:
    layout = build_layout(case.splits, case.valid)
    values = values_of(layout, seed)
    total = dense_map(values, layout).sum((2, 3))
    torch.testing.assert_close(area_mean(values, layout), total / layout.valid_cells[:, None], atol=1e-5, rtol=1e-5)


@given(cases(), seeds)
def test_token_mean_is_the_mean_over_the_tokens(case: Case, seed: int) -> None:
    layout = build_layout(case.splits, case.valid)
    values = values_of(layout, seed)
    expected = torch.stack([part.mean(0) for part in values.split(layout.lengths)])
    torch.testing.assert_close(token_mean(values, layout), expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(params=[Grid((4, 4), 1), Grid((3, 5), 2)], ids=str)
def layout(request) -> Layout:
    generator = torch.Generator().manual_seed(0)
    grid = request.param
    masks = (torch.rand(2, *grid.shape(s), generator=generator) < 0.6 for s in range(1, grid.stages + 1))
    return build_layout(Splits(tuple(masks), grid))


def test_gradient_of_pack(layout: Layout) -> None:
    grid = layout.grid
    pyramid = random_pyramid(grid, 2, 2, seed=1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    positions, prefix = (torch.randn(n, 2, dtype=torch.float64, generator=generator) for n in (grid.total, 2))
    inputs = [x.requires_grad_() for x in (positions, prefix, *pyramid.levels)]
    assert torch.autograd.gradcheck(lambda p, q, *x: pack(Pyramid(x, grid), layout, p, q).tokens, inputs)


def test_gradient_of_pack_with_rollouts() -> None:
    """Every rollout adds to the gradient of the one pyramid that they share."""
    grid = Grid((4, 4), 1)
    masks = (torch.rand(4, 2, 2, generator=torch.Generator().manual_seed(2)) < 0.5,)
    layout = build_layout(Splits(masks, grid))
    levels = [x.requires_grad_() for x in random_pyramid(grid, 2, 2, seed=1, dtype=torch.float64).levels]
    assert torch.autograd.gradcheck(lambda *x: pack(Pyramid(x, grid), layout).tokens, levels)


@pytest.mark.parametrize("function", [dense_map, area_mean, token_mean])
def test_gradient_of_what_reads_the_tokens(function, layout: Layout) -> None:
    values = torch.randn(layout.total, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: function(x, layout), [values])


@pytest.mark.parametrize("cells", [(4, 4), (3, 5)])
def test_a_batch_of_none(cells: tuple[int, int]) -> None:
    grid = Grid(cells, 1)
    layout = build_layout(uniform_splits(grid, 0, split=True))
    packed = pack(random_pyramid(grid, 0, DIM, seed=0), layout, torch.zeros(grid.total, DIM), torch.zeros(1, DIM))
    assert packed.tokens.shape == (0, DIM)
    assert packed.segments.uniform is None
    assert dense_map(packed.tokens, layout).shape == (0, DIM, *cells)
    assert area_mean(packed.tokens, layout).shape == token_mean(packed.tokens, layout).shape == (0, DIM)


@given(cases(), st.randoms(use_true_random=False))
def test_permuting_the_images_permutes_the_tokens(case: Case, random) -> None:
    order = list(range(case.batch))
    random.shuffle(order)
    pyramid = random_pyramid(case.grid, case.batch, DIM, seed=0)
    packed = pack(pyramid, build_layout(case.splits, case.valid))
    moved = Splits(tuple(mask[order] for mask in case.masks), case.grid)
    shuffled = Pyramid(tuple(level[order] for level in pyramid.levels), case.grid)
    valid = None if case.valid is None else case.valid[order]
    expected = torch.cat([packed.tokens.split(packed.segments.lengths)[i] for i in order])
    assert torch.equal(pack(shuffled, build_layout(moved, valid)).tokens, expected)


@given(grids(), seeds)
def test_children_are_the_four_cells_below_a_parent_in_raster_order(grid: Grid, seed: int) -> None:
    pyramid = random_pyramid(grid, 2, DIM, seed)
    for s in range(1, grid.stages + 1):
        (rows, cols), below = grid.shape(s), grid.shape(s - 1)[1]
        index = [
            [(2 * i + y) * below + 2 * j + x for y in (0, 1) for x in (0, 1)] for i in range(rows) for j in range(cols)
        ]
        assert torch.equal(pyramid.children(s), pyramid.levels[s - 1][:, torch.tensor(index)])


@pytest.mark.parametrize("with_positions", [True, False])
@pytest.mark.parametrize("k", [0, 2])
def test_an_all_fine_batch_is_packed_without_a_gather_as_with_one(with_positions: bool, k: int) -> None:
    grid = Grid((4, 8), 2)
    generator = torch.Generator().manual_seed(0)
    levels = tuple(torch.randn(3, grid.size(s), 5, generator=generator) for s in range(3))
    pyramid = Pyramid(levels, grid)
    positions = torch.randn(grid.total, 5, generator=generator) if with_positions else None
    prefix = torch.randn(k, 5, generator=generator) if k else None
    layout = build_layout(uniform_splits(grid, 3, split=True))
    assert layout.all_fine
    gathered = pack(pyramid, replace(layout, full=False), positions, prefix)
    packed = pack(pyramid, layout, positions, prefix)
    assert torch.equal(packed.tokens, gathered.tokens)
    rollouts = build_layout(uniform_splits(grid, 6, split=True))
    assert torch.equal(pack(pyramid, rollouts, positions, prefix).tokens, gathered.tokens.repeat(2, 1))
    assert not build_layout(uniform_splits(grid, 3, split=False)).all_fine
    assert not build_layout(uniform_splits(Grid((3, 8), 2), 3, split=True)).all_fine  # padded cells make no tokens

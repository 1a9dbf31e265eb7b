"""Window attention over mixed tokens: the order against sorting, blocks against window partition and naive loops."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat
from timm.models.eva import Eva
from torch import Tensor, nn

from reads import Reads, counted_forward
from split_core import Windows, load_pretrained, wrap
from split_core.attention import choose_backend
from split_core.attention.masked import MaskedAttention
from split_core.attention.sdpa import SdpaAttention
from split_core.backbone.stream import drop_path
from split_core.engine.reference import dense_reference, windowed
from split_core.engine.session import Learner
from split_core.errors import SplitError
from split_core.features import Features
from split_core.flops import backbone_flops, forward_flops
from split_core.learn.credit import credit
from split_core.learn.union import encode_union, union_layout
from split_core.model import SplitViT
from split_core.packing import Segments, pack
from split_core.policy import SplitPolicy, StageView
from split_core.quadtree import build_layout, in_order, rank, uniform_splits
from split_core.reducer import build_reducer
from split_core.task import Task
from split_core.types import Grid, Layout, Pyramid, Splits
from strategies import Case, batches, bits, masks_of, random_pyramid, validity_of
from tiny import FAMILIES, Bright, images, relative, tiny_vit

DETECTOR: dict[str, Any] = {
    "class_token": False, "use_rot_pos_emb": True, "ref_feat_shape": (3, 3), "swiglu_mlp": True, "scale_mlp": True,
    "qkv_fused": False, "use_post_transformer_norm": False, "use_fc_norm": False,
}  # fmt: skip
"""EVA-02 as in its detector: no class token, no final norm."""
KINDS = ("detector", "gap", "rope_axial_gap", "mixed")
WINDOWS = Windows(4, (1, 3))


def vit_of(kind: str = "detector", side: int = 64, **options: Any) -> nn.Module:
    """Four blocks on 8 px patches, without prefix tokens."""
    own = {"detector": DETECTOR, "mixed": {**FAMILIES["rope_mixed"], "class_token": False, "global_pool": "avg"}}
    family = kind if kind in FAMILIES else "rope_mixed" if kind == "mixed" else "eva"
    return tiny_vit(family, **{"depth": 4, "img_size": side, **own.get(kind, {}), **options})


def model_of(kind: str = "detector", *, policy: Any = None, stages: int = 2, **options: Any) -> SplitViT:
    options = {"windows": WINDOWS, **options}
    return wrap(vit_of(kind), policy or Bright(), stages=stages, **options).eval()


def random_splits(grid: Grid, batch: int, seed: int = 0) -> Splits:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, *grid.shape(s)) for s in range(1, grid.stages + 1))
    return Splits(tuple(torch.rand(shape, generator=generator) < 0.5 for shape in shapes), grid)


# ---------------------------------------------------------------- the order


@st.composite
def canvases(draw: st.DrawFn) -> Case:
    """A batch of quadtrees on a grid of whole windows of whole coarse patches."""
    stages = draw(st.integers(1, 3))
    window = draw(st.integers(1, 2 if stages < 3 else 1)) << stages
    grid = Grid((draw(st.integers(1, 3)) * window, draw(st.integers(1, 3)) * window), stages, window)
    batch = draw(batches)
    return Case(grid, draw(masks_of(grid, batch)), draw(validity_of(grid, batch)))


def in_raster(case: Case) -> Layout:
    """The same partition without windows."""
    plain = Grid(case.grid.cells, case.grid.stages)
    return build_layout(Splits(case.masks, plain), case.valid)


def tokens_of(layout: Layout) -> list[tuple[int, ...]]:
    """Image, scale, row and column of each token."""
    return list(zip(*(x.tolist() for x in (layout.image, layout.scale, layout.row, layout.col)), strict=True))


@given(canvases())
def test_tokens_are_sorted_by_image_window_and_raster(case: Case) -> None:
    side = case.grid.window
    layout, plain = build_layout(case.splits, case.valid), in_raster(case)
    expected = sorted(tokens_of(plain), key=lambda t: (t[0], t[2] // side, t[3] // side, t[2], t[3]))
    assert tokens_of(layout) == expected
    assert layout.lengths == plain.lengths
    assert torch.equal(layout.cu_seqlens, plain.cu_seqlens)
    assert torch.equal(layout.valid_cells, plain.valid_cells)


@given(canvases())
def test_each_window_with_tokens_is_one_run(case: Case) -> None:
    side = case.grid.window
    layout = build_layout(case.splits, case.valid)
    window = [(image, row // side, col // side) for image, _, row, col in tokens_of(layout)]
    runs = [(key, len(list(group))) for key, group in itertools.groupby(window)]
    assert len({key for key, _ in runs}) == len(runs)
    assert layout.windows is not None
    assert layout.windows.lengths == tuple(length for _, length in runs)
    assert layout.windows.cu_seqlens.tolist() == [0, *itertools.accumulate(layout.windows.lengths)]
    assert layout.windows.cu_seqlens.dtype == torch.int32
    squares = Counter[int]()
    for (image, *_), length in runs:
        squares[image] += length**2
    assert layout.window_pairs().tolist() == [squares[image] for image in range(case.batch)]


@given(canvases())
def test_owners_dense_maps_and_areas_are_those_of_the_raster_order(case: Case) -> None:
    layout, plain = build_layout(case.splits, case.valid), in_raster(case)
    assert torch.equal(layout.owner < 0, plain.owner < 0)
    held = layout.owner >= 0
    ours, theirs = (torch.tensor(tokens_of(x))[x.owner[held]] for x in (layout, plain))
    assert torch.equal(ours, theirs)
    assert torch.equal(layout.area[layout.owner[held]], plain.area[plain.owner[held]])
    assert torch.equal(layout.fine(), plain.fine())
    assert layout.full == plain.full


@given(canvases())
def test_cells_count_from_the_corner_of_the_window(case: Case) -> None:
    layout, side = build_layout(case.splits, case.valid), case.grid.window
    alone = Grid((side, side), case.grid.stages)
    for token, (_, s, row, col) in enumerate(tokens_of(layout)):
        inside = alone.offset(s) + (row % side >> s) * alone.shape(s)[1] + (col % side >> s)
        assert layout.window_cell[token] == inside


@given(canvases())
def test_rank_says_where_in_order_puts_a_cell(case: Case) -> None:
    grid = case.grid
    rows, cols = (torch.arange(n) for n in grid.shape(0))
    places = rank(rows[:, None], cols, grid)[None]
    assert torch.equal(in_order(places, grid), torch.arange(grid.size(0))[None])


@given(canvases())
def test_union_tokens_stand_window_by_window(case: Case) -> None:
    grid, side = case.grid, case.grid.window
    layout = union_layout(grid, case.batch, torch.device("cpu"))
    count = grid.size(0) // side**2
    window = (layout.row // side) * (grid.shape(0)[1] // side) + layout.col // side + count * layout.image
    assert torch.equal(window, window.sort().values)
    assert layout.windows is not None
    assert torch.equal(window.bincount(), layout.windows.cu_seqlens.diff().long())
    assert layout.cell.view(case.batch, -1).sort(1).values.tolist() == [list(range(grid.total))] * case.batch
    owners = layout.owner
    assert torch.equal(layout.row[owners], torch.arange(grid.shape(0)[0])[:, None].expand_as(owners))
    assert torch.equal(layout.col[owners], torch.arange(grid.shape(0)[1]).expand_as(owners))
    assert (layout.scale[owners] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_packed_tokens_are_those_of_their_cells(seed: int) -> None:
    grid = Grid((8, 12), 2, 4)
    pyramid = random_pyramid(Grid(grid.cells, 2), 2, 6, seed)
    pyramid = Pyramid(pyramid.levels, grid)
    table = torch.randn(grid.total, 6, generator=torch.Generator().manual_seed(seed))
    cells = torch.cat(pyramid.levels, 1) + table
    for splits in (random_splits(grid, 4, seed), random_splits(grid, 2, seed), uniform_splits(grid, 2, split=True)):
        layout = build_layout(splits)
        torch.testing.assert_close(pack(pyramid, layout, table).tokens, cells[layout.image % 2, layout.cell])


# ---------------------------------------------------------------- blocks


def rotary_rows(vit: nn.Module, shape: tuple[int, int]) -> Tensor:
    """timm's rows for a grid; what is built for one size ignores the size asked for."""
    rope = vit.rope
    if isinstance(rope, RotaryEmbeddingCat):
        rope = RotaryEmbeddingCat(
            rope.dim, in_pixels=False, feat_shape=list(shape), ref_feat_shape=rope.ref_feat_shape,
            grid_indexing=rope.grid_indexing,
        )  # fmt: skip
        return rope.get_embed()
    return rope.get_embed(shape=list(shape))


def partitioned(vit: nn.Module, picture: Tensor, windows: Windows) -> Tensor:
    """ViTDet with timm's own modules: (b, r, c, d) after the last block; window partition, block, unpartition."""
    x = vit.patch_embed(picture)
    x = x if vit.pos_embed is None else x + vit.pos_embed
    rows, cols = vit.patch_embed.grid_size
    b, _, d = x.shape
    w = windows.size
    for index, block in enumerate(vit.blocks):
        across = index in windows.global_blocks
        options = {}
        if getattr(vit, "rope", None) is not None:
            rope = rotary_rows(vit, (rows, cols) if across else (w, w))
            options = {"rope": rope[index] if vit.rope_mixed else rope}
        if not across:
            x = x.view(b, rows // w, w, cols // w, w, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, d)
        x = block(x, **options)
        if not across:
            x = x.view(b, rows // w, cols // w, w, w, d).permute(0, 1, 3, 2, 4, 5).reshape(b, rows * cols, d)
    return vit.norm(x).view(b, rows, cols, d)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(64, 64), (32, 96)], ids=str)
def test_all_fine_is_the_window_partition(kind: str, size: tuple[int, int]) -> None:
    """Forward, and the gradient of every weight."""
    found = []
    for split in (False, True):
        vit = vit_of(kind, img_size=size)
        if split:
            model = wrap(vit, "dense", stages=2, windows=WINDOWS).train()
            dense = model.forward_features(images(2, *size)).dense().permute(0, 2, 3, 1)
        else:
            dense = partitioned(vit.train(), images(2, *size), WINDOWS)
        dense.square().sum().backward()
        grads = [p.grad for n, p in vit.named_parameters() if p.grad is not None and "head" not in n]
        found.append((dense.detach(), grads))
    (expected, theirs), (dense, ours) = found
    torch.testing.assert_close(dense, expected, atol=1e-5, rtol=1e-4)
    assert len(ours) == len(theirs) > 40
    for own, their in zip(ours, theirs, strict=True):
        assert relative(own, their) < 1e-4


@pytest.mark.parametrize("kind", [*KINDS, "half"])
def test_the_dense_reference_has_windows_too(kind: str) -> None:
    """With rotary positions that pair the halves of a head as well, and with or without a head of the task's own."""
    vit = vit_of("detector", rope_rotate_half=True) if kind == "half" else vit_of(kind)
    model, picture = wrap(vit, "dense", stages=2, windows=WINDOWS).eval(), images(2, 64)
    model.taps = (0, 2)
    with torch.no_grad():
        fine = model.forward_features(picture)
        tokens, tapped = windowed(model, picture, model.taps)
        raster = fine.dense().flatten(2).transpose(1, 2)
        torch.testing.assert_close(tokens, raster, atol=1e-5, rtol=1e-4)
        for tap in (0, 1):
            torch.testing.assert_close(tapped[tap], fine.dense(tap).flatten(2).transpose(1, 2), atol=1e-5, rtol=1e-4)
        task = Whole()
        assert relative(dense_reference(Learner(model, task))(picture), model(picture)) < 1e-5
        task.model_head = False
        whole = task.output(model, fine)
        assert relative(dense_reference(Learner(model, task))(picture), whole) < 1e-5
        plain = wrap(vit, "dense", stages=2).eval()
        plain.taps = model.taps
        expected = task.output(plain, plain.forward_features(picture))
        assert relative(dense_reference(Learner(plain, task))(picture), expected) < 1e-5
        assert relative(whole, expected) > 1e-3


class Whole(Task):
    """Gives all that it reads."""

    model_head = True

    def output(self, model: Any, features: Features, target: Any = None) -> Tensor:
        return torch.cat([features.dense(tap) for tap in (None, 0, 1)], 1)


def naive_mixed(model: SplitViT, pyramid: Pyramid, layout: Layout) -> Tensor:
    """Blocks of the detector by loops over images and windows, each a plain call of timm's block, angle by angle."""
    vit, side, windows = model.vit, model.windows.size, model.windows
    table, dim = model.positions.patches(pyramid.grid), vit.rope.dim
    pairs = dim // 2
    bands = [1 / 10000 ** (k / (pairs // 2)) for k in range(pairs // 2)]
    tokens = tokens_of(layout)
    x = [pyramid.levels[s][i % pyramid.batch, layout.cell[t] - pyramid.grid.offset(s)] + table[layout.cell[t]]
         for t, (i, s, _, _) in enumerate(tokens)]  # fmt: skip
    for index, block in enumerate(vit.blocks):
        groups: dict[tuple[int, ...], list[int]] = {}
        for t, (image, _, row, col) in enumerate(tokens):
            across = index in windows.global_blocks
            groups.setdefault((image,) if across else (image, row // side, col // side), []).append(t)
        out = list(x)
        for group, members in groups.items():
            shape = pyramid.grid.cells if len(group) == 1 else (side, side)
            rows = []
            for t in members:
                _, s, row, col = tokens[t]
                middle = ((1 << s) - 1) / 2
                y, z = (row, col) if len(group) == 1 else (row % side, col % side)
                places = ((y + middle) / shape[0] * 3, (z + middle) / shape[1] * 3)
                angles = torch.tensor([place * band for place in places for band in bands for _ in (0, 1)])
                rows.append(torch.cat([angles.sin(), angles.cos()]))
            attended = block(torch.stack([x[t] for t in members])[None], rope=torch.stack(rows))[0]
            for t, value in zip(members, attended, strict=True):
                out[t] = value
        x = out
    return torch.stack(x)


def valid_corner(grid: Grid, sizes: list[tuple[int, int]]) -> Tensor:
    valid = torch.zeros(len(sizes), *grid.shape(0), dtype=torch.bool)
    for image, (rows, cols) in enumerate(sizes):
        valid[image, :rows, :cols] = True
    return valid


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_mixed_tokens_are_a_loop_over_images_and_windows(stages: int, padded: bool) -> None:
    """Two rollouts of two images; in the padded one, windows of an image are partly or wholly empty."""
    model = model_of(stages=stages)
    picture = images(2, 64)
    grid = model.embed.grid((64, 64))
    valid = valid_corner(grid, [(8, 3), (5, 8)]) if padded else None
    with torch.no_grad():
        pyramid = model.pyramid(picture, valid)
        layout = build_layout(random_splits(grid, 4), None if valid is None else valid.repeat(2, 1, 1))
        assert layout.windows is not None
        assert len(layout.windows.lengths) == (12 if padded else 16)
        expected = naive_mixed(model, pyramid, layout)
        torch.testing.assert_close(model.encode(pyramid, layout).patches, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_that_hold_the_image_change_nothing(kind: str) -> None:
    picture = images(3, 32)
    local, plain = (wrap(vit_of(kind, 32), Bright(), stages=2, windows=w).eval() for w in (Windows(4), None))
    with torch.no_grad():
        assert relative(local(picture), plain(picture)) < 1e-6


def test_windows_change_what_is_computed() -> None:
    picture = images(2, 64)
    outs = [model_of(windows=windows)(picture) for windows in (WINDOWS, Windows(4), Windows(8), None)]
    for one, other in itertools.combinations(outs[:3], 2):
        assert relative(one, other) > 1e-4
    assert relative(outs[2], outs[3]) < 1e-5


@pytest.mark.parametrize("backend", ["sdpa", "masked"])
@pytest.mark.parametrize("lengths", [(4, 4, 4, 4), (16, 1, 4, 16, 1, 1, 7, 4), (1,), (4, 16, 4, 4, 4, 4, 4, 16)])
def test_backends_agree_on_windows(backend: str, lengths: tuple[int, ...]) -> None:
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    segments = Segments(starts, lengths, 16)
    q, k, v = torch.randn(3, sum(lengths), 2, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    attention = {"sdpa": SdpaAttention, "masked": MaskedAttention}[backend]()
    out = attention.attend(q, k, v, segments, scale=0.3)
    for a, b in itertools.pairwise(starts.tolist()):
        weight = (torch.einsum("the,she->hts", q[a:b], k[a:b]) * 0.3).softmax(-1)
        torch.testing.assert_close(out[a:b], torch.einsum("hts,she->the", weight, v[a:b]), atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["varlen", "xformers", "sdpa"])
def test_backends_of_the_gpu_agree_on_windows(backend: str) -> None:
    try:
        choose_backend(backend, torch.device("cuda"), torch.bfloat16)
    except SplitError as reason:
        pytest.skip(str(reason))
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        models = [model_of(attention=name).cuda() for name in (backend, "masked")]
        one, other = (model(images(3, 64).cuda()) for model in models)
    assert relative(one.float(), other.float()) < 2e-2


def test_each_image_is_dropped_whole() -> None:
    """Stochastic depth knows images, also where attention knows windows."""
    model = model_of()
    picture = images(6, 64)
    pyramid = model.pyramid(picture)
    layout = build_layout(random_splits(pyramid.grid, 6))
    stream = model.streams(model.pack(pyramid, layout), layout)(0)
    assert len(stream.segments.lengths) == 24
    dropped = Counter[tuple[int, bool]]()
    for seed in range(8):
        torch.manual_seed(seed)
        out = drop_path(timm.layers.DropPath(0.5).train(), torch.ones(layout.total, 3), stream.images)
        for image in range(6):
            kept = out[layout.image == image]
            assert (kept == kept[0, 0]).all()
            dropped[image, bool(kept[0, 0] == 0)] += 1
    assert len({key for _, key in dropped}) == 2


class Late(SplitPolicy):
    """Decides after the first block, and the mixed sequence goes on from there."""

    depth, carries = 1, True

    def forward(self, view: StageView) -> Tensor:
        return view.context[..., 0]


class Coarse(Late):
    """Looks and carries, and then splits nothing: the coarse sequence, its first block passed before."""

    depth: ClassVar[int] = 2

    def forward(self, view: StageView) -> Tensor:
        return -torch.ones_like(view.context[..., 0])


@pytest.mark.parametrize("kind", KINDS)
def test_looking_and_carrying_on_within_windows(kind: str) -> None:
    looking, plain = (model_of(kind, policy=policy) for policy in (Coarse(), "coarse"))
    with torch.no_grad():
        assert relative(looking(images(2, 64)), plain(images(2, 64))) < 1e-5
        with_padding = valid_corner(looking.embed.grid((64, 64)), [(8, 3), (5, 8)])
        outs = []
        for model in (looking, plain):
            pyramid = model.pyramid(images(2, 64), with_padding)
            outs.append(model.encode(pyramid, model.decide(pyramid, images(2, 64))).patches)
        assert relative(*outs) < 1e-5


def test_taps_checkpoints_and_rollouts() -> None:
    model = model_of().train()
    picture = images(2, 64)
    pyramid = model.pyramid(picture)
    splits = random_splits(pyramid.grid, 6)
    layout = build_layout(splits)
    features = model.encode(pyramid, layout, taps=[0, 3])
    loss = features.taps[0].square().sum() + features.tokens.sum()
    grads = torch.autograd.grad(loss, list(model.vit.blocks.parameters()), retain_graph=True)
    torch.testing.assert_close(features.taps[1], features.tokens)
    model.vit.grad_checkpointing = True
    again = model.encode(pyramid, layout, taps=[0, 3])
    loss = again.taps[0].square().sum() + again.tokens.sum()
    for one, other in zip(grads, torch.autograd.grad(loss, list(model.vit.blocks.parameters())), strict=True):
        torch.testing.assert_close(one, other)
    for k in range(3):
        alone = build_layout(Splits(tuple(mask[2 * k : 2 * k + 2] for mask in splits.masks), splits.grid))
        expected = model.encode(pyramid, alone).dense()
        torch.testing.assert_close(features.dense()[2 * k : 2 * k + 2], expected, atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------- union


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", ["area", "token"])
def test_binary_gates_give_the_mixed_forward(kind: str, pooling: str) -> None:
    model = model_of(kind, pooling=pooling)
    pyramid = model.pyramid(images(2, 64))
    splits = random_splits(pyramid.grid, 4)
    mixed = model.encode(pyramid, build_layout(splits), taps=(1,))
    union = encode_union(model, pyramid, gates_of(splits), taps=(1,))
    assert relative(model.forward_head(union), model.forward_head(mixed)) < 1e-5
    torch.testing.assert_close(union.dense(), mixed.dense(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(union.dense(0), mixed.dense(0), atol=1e-4, rtol=1e-4)
    spread = [x.spread(x.at(0)[:, None, None].expand(-1, 2, 2, -1), 0) for x in (union, mixed)]
    torch.testing.assert_close(*spread, atol=1e-4, rtol=1e-4)
    sums = []
    for features in (union, mixed):
        x, image, weight = features.weighted(pooling, prefix=False)
        sums.append(torch.zeros(4, x.shape[1]).index_add(0, image, x * weight[:, None]))
    torch.testing.assert_close(*sums, atol=1e-3, rtol=1e-4)


def gates_of(splits: Splits, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(mask.flatten(1).to(dtype) for mask in splits.masks)


@settings(max_examples=15)
@given(st.data())
def test_union_is_mixed_on_any_padded_canvas(data: st.DataObject) -> None:
    """Windows without picture included, which give neither NaN nor slope."""
    model = model_of(policy=Late())
    grid = model.embed.grid((64, 64))
    valid = data.draw(bits(2, *grid.shape(0)))
    valid[:, 4:] &= data.draw(st.booleans())
    valid[:, 0, 0] = True
    pyramid = model.pyramid(images(2, 64), valid)
    splits = Splits(data.draw(masks_of(grid, 2)), grid)
    mixed = model.encode(pyramid, build_layout(splits, valid))
    union = encode_union(model, pyramid, gates_of(splits))
    torch.testing.assert_close(union.dense(), mixed.dense(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.forward_head(union), model.forward_head(mixed), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inside", [True, False])
def test_credit_is_the_finite_difference_within_windows(inside: bool) -> None:
    model = model_of(stages=1).double()
    grid = model.embed.grid((64, 64))
    valid = valid_corner(grid, [(4, 8)])
    pyramid = model.pyramid(images(1, 64).double(), valid)
    gates = tuple(0.2 + 0.6 * gate for gate in gates_of(random_splits(grid, 1), torch.float64))

    def error_of(features: Features) -> Tensor:
        return model.forward_head(features).square().sum(1)

    _, saved, _ = credit(model, pyramid, error_of, gates, inside=inside)
    step = 1e-6
    for parent in range(gates[0].shape[1]):
        errors = []
        for sign in (1, -1):
            moved = gates[0].clone()
            moved[:, parent] += sign * step
            with torch.no_grad():
                errors.append(error_of(encode_union(model, pyramid, (moved,))))
        torch.testing.assert_close(saved[0][:, parent], (errors[1] - errors[0]) / (2 * step), atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------- costs, refusals, saving


@pytest.mark.parametrize("kind", ["detector", "mixed"])
def test_a_forward_reads_the_device_once_and_takes_as_many_operations_at_any_batch(kind: str, monkeypatch) -> None:
    model = model_of(kind, attention="masked")
    counted_forward(model, 1, (64, 64))
    assert counted_forward(model, 2, (64, 64)) == counted_forward(model, 12, (64, 64))
    assert counted_forward(model, 2, (64, 64))[1] == 0
    with torch.no_grad():
        seen = Reads(monkeypatch)
        model(images(3, 64))
    assert seen.calls == ["tolist"]


def test_attention_counts_within_windows() -> None:
    model = model_of()
    picture = images(2, 64)
    model(picture)
    layout = model.layout
    d, found = 32, forward_flops(model, layout)
    mlp = sum(m.weight.numel() for m in model.vit.blocks[0].mlp.modules() if isinstance(m, nn.Linear))
    for image in range(2):
        n = layout.lengths[image]
        groups = Counter((r // 4, c // 4) for i, _, r, c in tokens_of(layout) if i == image)
        squares = sum(count**2 for count in groups.values())
        expected = n * 2 * model.vit.patch_embed.proj.weight.numel() + 4 * n * (8 * d * d + 2 * mlp)
        assert found[image] == expected + 2 * 4 * d * (n * n + squares)
    dense = model_of(policy="dense")
    dense(picture)
    assert forward_flops(dense, dense.layout)[0] == backbone_flops(dense.vit, 64, WINDOWS)
    looking = model_of(policy=Coarse())
    looking(picture)
    coarse = model_of(policy="coarse")
    coarse(picture)
    assert torch.equal(*(torch.from_numpy(forward_flops(m, m.layout)) for m in (looking, coarse)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windows": Windows(6)}, "windows.size=6 with stages=2: a coarse patch spans 4x4 .* size 4 or 8 would fit"),
        ({"windows": Windows(4, (1, 4))}, "windows.global_blocks: 4; the model has blocks 0 to 3"),
        ({"windows": {"size": 4, "globalblocks": [1]}}, "Did you mean global_blocks"),
        ({"windows": {"global_blocks": [1]}}, "windows: size is missing"),
        ({"windows": {"size": 0}}, "windows.size=0: a whole number"),
        ({"windows": {"size": 4, "global_blocks": [-1]}}, "numbers of blocks from 0 are needed"),
    ],
)
def test_windows_that_do_not_fit_the_model_are_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SplitError, match=message) as caught:
        model_of(**options)
    assert "\n" not in str(caught.value)


def test_something_else_than_windows_is_refused() -> None:
    with pytest.raises(SplitError, match=r"windows=4: a split_core\.Windows is needed, or None"):
        Windows.of(4)


def test_images_that_do_not_divide_into_windows_are_one_clear_line() -> None:
    with pytest.raises(SplitError, match=r"4x4 patches do not divide a grid of 8x5 .* resize to 64x64 px"):
        model_of()(images(1, 64, 40))
    assert model_of()(images(1, 60, 91)).shape == (1, 5)  # 8 x 12 cells, the last not full


def test_prefix_tokens_and_reducers_are_refused() -> None:
    with pytest.raises(SplitError, match=r"1 class or register token\(s\), which lie in no window"):
        wrap(tiny_vit("eva02", depth=4), "dense", windows=WINDOWS)
    vit = vit_of("gap")
    vit.windows = WINDOWS
    with pytest.raises(SplitError, match="window attention between layers"):
        build_reducer("tome", vit)


def test_a_layout_in_another_order_is_refused() -> None:
    model = model_of()
    plain = build_layout(random_splits(Grid((8, 8), 2), 1))
    with pytest.raises(ValueError, match=r"8x8 patches and 2 stages, the images have 8x8 .* in windows of 4"):
        model(images(1, 64), layout=plain)


def test_a_model_says_itself_that_it_has_windows() -> None:
    vit = vit_of()
    vit.windows = WINDOWS
    assert wrap(vit, "dense", stages=2).windows == WINDOWS
    assert wrap(vit, "dense", stages=2, windows=Windows(8)).windows == Windows(8)


def test_windows_come_back_with_the_model(tmp_path: Path) -> None:
    vit = timm.create_model(
        "eva02_tiny_patch14_224", embed_dim=32, num_heads=2, depth=4, img_size=64, patch_size=8, class_token=False,
        num_classes=5,
    )  # fmt: skip
    model = wrap(vit, "entropy", stages=2, budget=0.5, windows=Windows(4, (1, 3))).eval()
    again = load_pretrained(model.save_pretrained(tmp_path))
    assert isinstance(again.vit, Eva)
    assert again.windows == Windows(4, (1, 3))
    assert torch.equal(again(images(2, 64)), model(images(2, 64)))

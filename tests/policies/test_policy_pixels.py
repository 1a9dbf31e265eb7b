"""Pixel heuristics against loops over patches, and what partial patches, canvases and grey images do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from split_core.errors import SplitError
from split_core.types import Pyramid
from split_policies.configs import EntropyConfig, LaplacianConfig, UpsampleMSEConfig
from split_policies.entropy import Entropy, bincount, block_entropy, scatter_count
from split_policies.pixels import luma
from split_policies.resample import Laplacian, UpsampleMSE, resample

SIZES = [((64, 64), 8, 1), ((230, 210), 16, 2), ((37, 90), 8, 2), ((9, 5), 4, 1)]
HALF = (0.5, 0.5, 0.5)


def blocks(view, patch):
    """(image, parent, slice of rows, slice of columns) of the pixels under every parent, none for pure padding."""
    side = patch << view.scale
    rows, cols = view.grid.shape(view.scale)
    for i in range(view.pyramid.batch):
        for n in range(rows * cols):
            r, c = divmod(n, cols)
            yield i, n, slice(r * side, (r + 1) * side), slice(c * side, (c + 1) * side)


def by_loop(view, patch, quantity):
    """quantity(pixels of the block) for every parent, 0 where it holds none."""
    expected = torch.zeros(view.pyramid.batch, view.grid.size(view.scale), dtype=torch.float64)
    for i, n, rows, cols in blocks(view, patch):
        if rows.start < view.images.shape[-2] and cols.start < view.images.shape[-1]:
            expected[i, n] = float(quantity(i, rows, cols))
    return expected


def grey_of(view):
    return luma(view.images, mean=HALF[: view.images.shape[1]], std=HALF[: view.images.shape[1]])


@pytest.mark.parametrize(("size", "patch", "stages"), SIZES)
@pytest.mark.parametrize("channels", [1, 3])
def test_entropy_equals_a_histogram_per_patch(size, patch, stages, channels, make_view, make_info):
    policy = Entropy(EntropyConfig(), make_info(patch=patch, stages=stages, channels=channels))
    for scale in range(1, stages + 1):
        view = make_view(size, patch=patch, stages=stages, scale=scale, channels=channels, batch=2)
        grey = grey_of(view).numpy()

        def histogram(i, rows, cols, grey=grey):
            # Values of 8-bit pixels lie on bin edges, so both sides must bin the same float32 numbers.
            counts = np.bincount(np.minimum((grey[i, rows, cols].ravel() * np.float32(2)).astype(int), 511))
            p = counts / counts.sum()
            return -(p * np.log2(p + 1e-10)).sum()

        expected = by_loop(view, patch, histogram)
        torch.testing.assert_close(policy.score(view).double(), expected, rtol=1e-5, atol=1e-5)


def test_entropy_agrees_with_torch_histc(make_view, make_info):
    policy = Entropy(EntropyConfig(), make_info(patch=8))
    view = make_view((96, 64))
    view = replace(view, images=torch.rand(3, 3, 96, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1)
    grey = grey_of(view)

    def histc(i, rows, cols):
        p = torch.histc(grey[i, rows, cols], bins=512, min=0, max=256) / 256
        return -(p * (p + 1e-10).log2()).sum()

    torch.testing.assert_close(policy.score(view).double(), by_loop(view, 8, histc), rtol=1e-5, atol=1e-5)


def test_entropy_known_values(make_info, make_view):
    policy = Entropy(EntropyConfig(tau=1.5), make_info(patch=2))
    pattern = torch.tensor([[10.0, 10.0, 200.0, 200.0]]).expand(4, 4) / 255  # two levels, half each: one bit
    sixteen = torch.arange(16.0).view(4, 4) / 255  # sixteen levels: four bits
    images = (torch.cat([pattern, sixteen], dim=1) - 0.5) / 0.5
    view = make_view((4, 8), patch=2, images=images.expand(3, 3, 4, 8))
    torch.testing.assert_close(policy(view), torch.tensor([[-0.5, 2.5]]).expand(3, 2))


def test_each_scale_has_its_threshold_and_the_last_serves_the_rest(make_info, make_view):
    policy = Entropy(EntropyConfig(tau=(3, 2)), make_info(patch=4, stages=3))
    for scale, tau in ((1, 3), (2, 2), (3, 2)):
        view = make_view((64, 64), patch=4, stages=3, scale=scale)
        torch.testing.assert_close(policy(view), policy.score(view) - tau)


@pytest.mark.parametrize(("size", "patch", "stages"), SIZES)
def test_laplacian_equals_a_loop_over_neighbours(size, patch, stages, make_view, make_info):
    policy = Laplacian(LaplacianConfig(), make_info(patch=patch, stages=stages))
    view = make_view(size, patch=patch, stages=stages, scale=stages, batch=2)
    grey = grey_of(view).double()
    padded = F.pad(grey[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    edges = 8 * grey
    for dy in (0, 1, 2):
        for dx in (0, 1, 2):
            if (dy, dx) != (1, 1):
                edges = edges - padded[:, dy : dy + size[0], dx : dx + size[1]]
    expected = by_loop(view, patch, lambda i, rows, cols: edges[i, rows, cols].abs().mean())
    torch.testing.assert_close(policy.score(view).double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("size", "patch", "stages"), SIZES)
def test_upsample_mse_equals_a_loop(size, patch, stages, make_view, make_info):
    """With nearest enlarging, the loss is the variance inside every 2^s x 2^s group of pixels."""
    policy = UpsampleMSE(UpsampleMSEConfig(mode="nearest"), make_info(patch=patch, stages=stages))
    view = make_view(size, patch=patch, stages=stages, scale=stages, batch=2)
    grey, factor = grey_of(view).double(), 1 << stages

    def loss(i, rows, cols):
        block, total = grey[i, rows, cols], 0.0
        for y in range(0, block.shape[0], factor):
            for x in range(0, block.shape[1], factor):
                group = block[y : y + factor, x : x + factor]
                total += ((group - group.mean()) ** 2).sum()
        return total / block.numel()

    torch.testing.assert_close(policy.score(view).double(), by_loop(view, patch, loss), rtol=1e-4, atol=1e-3)


def test_bilinear_enlarging_by_hand():
    """Centres of the small pixels lie at 0.5 and 2.5 of the large ones; between them the value is linear."""
    large = resample(torch.tensor([[[0.0, 8.0, 16.0, 24.0]]]).expand(1, 2, 4), 2, mode="bilinear")
    torch.testing.assert_close(large[0], torch.tensor([[4.0, 8.0, 16.0, 20.0]]).expand(2, 4))


@pytest.mark.parametrize(
    ("policy", "config"), [(Entropy, EntropyConfig), (Laplacian, LaplacianConfig), (UpsampleMSE, UpsampleMSEConfig)]
)
def test_constant_images_score_zero(policy, config, make_view, make_info):
    view = make_view((50, 46), images=torch.full((3, 3, 50, 46), 0.3))
    score = policy(config(), make_info()).score(view)
    torch.testing.assert_close(score, torch.zeros_like(score), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("policy", "config"), [(Entropy, EntropyConfig), (UpsampleMSE, UpsampleMSEConfig)])
def test_canvas_outside_the_picture_does_not_count(policy, config, make_view, make_info):
    """A 40x24 picture on a 64x64 canvas of noise scores as it does alone."""
    settings = {"mode": "nearest"} if config is UpsampleMSEConfig else {}
    policy = policy(config(**settings), make_info(patch=8, stages=2))
    canvas = make_view((64, 64), patch=8, stages=2, scale=2)
    valid = torch.zeros(3, 8, 8, dtype=torch.bool)
    valid[:, :5, :3] = True
    canvas = replace(canvas, pyramid=Pyramid(canvas.pyramid.levels, canvas.grid, valid))
    alone = make_view((40, 24), patch=8, stages=2, scale=2, images=canvas.images[:, :, :40, :24])
    expected = torch.zeros(3, 2, 2)
    expected[:, :2, :1] = policy.score(alone).view(3, 2, 1)
    torch.testing.assert_close(policy.score(canvas), expected.flatten(1))


def test_luma_undoes_the_normalisation():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    levels = torch.randint(0, 256, (2, 3, 5, 7)).float()
    images = (levels / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    expected = (levels * torch.tensor([0.2989, 0.5870, 0.1140])[:, None, None]).sum(1)
    torch.testing.assert_close(luma(images, mean=mean, std=std), expected, atol=1e-3, rtol=0)


def test_grey_images_under_an_even_rgb_normalisation():
    assert torch.allclose(luma(torch.ones(1, 1, 2, 2), mean=HALF, std=HALF), torch.full((1, 2, 2), 255.0))


@pytest.mark.parametrize(
    ("channels", "means", "message"), [(4, 4, "1 or 3 channels, these have 4"), (3, 1, "3 channels but")]
)
def test_wrong_channels_are_named(channels, means, message):
    with pytest.raises(SplitError, match=message):
        luma(torch.zeros(1, channels, 4, 4), mean=(0.5,) * means, std=(0.5,) * means)


class Census(TorchDispatchMode):
    """Largest tensor made, in bytes, and number of operators run."""

    largest = 0
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
            self.calls += 1
        return result


@pytest.mark.parametrize(("side", "block"), [(256, 4), (256, 8), (256, 64)])
def test_entropy_stays_near_the_memory_of_the_image(side, block):
    census, images = {}, {b: torch.rand(b, 3, side, side) for b in (1, 8)}
    settings = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "block": (block, block)}
    for b, batch in images.items():
        with Census() as census[b]:
            block_entropy(batch, shape=(side // block, side // block), **settings)
        assert census[b].largest <= batch.nbytes
    assert census[8].calls == census[1].calls
    one_go = block_entropy(images[8][:, :, :block], shape=(1, side // block), **settings)
    banded = block_entropy(images[8], shape=(side // block, side // block), **settings)
    torch.testing.assert_close(banded[:, : side // block], one_go)


@pytest.mark.parametrize("size", [7, 12])
def test_both_ways_to_count_agree(size):
    """One serves the CPU, the other devices that must not be waited for."""
    index = torch.randint(0, 7, (100,), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    expected = torch.tensor([(index == i).sum() for i in range(size)])
    assert torch.equal(bincount(index, size), expected)
    assert torch.equal(scatter_count(index, size).long(), expected)


def test_a_nan_pixel_spoils_no_other_patch(make_view, make_info):
    policy, view = Entropy(EntropyConfig(), make_info()), make_view()
    images = view.images.clone()
    images[1, :, 3, 3] = float("nan")
    difference = policy(replace(view, images=images)) - policy(view)
    difference[1, 0] = 0
    assert (difference == 0).all()

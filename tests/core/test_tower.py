"""Vision towers of vision-language models: CLIP and SigLIP on mixed tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel

from split_core.backbone.tower import VisionTower
from split_core.errors import SplitError
from split_core.wrapping import wrap
from tiny import Everywhere, Linear, images, jitter, relative

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip


def encoder(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = {"clip": CLIPVisionModel, "siglip": SiglipVisionModel}[kind](
        {"clip": CLIPVisionConfig, "siglip": SiglipVisionConfig}[kind](**SIZES)
    )
    return jitter(model).eval()


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("layer", [-2, -3, 2])
def test_all_fine_tokens_are_the_encoders_hidden_states(kind: str, layer: int) -> None:
    model, pixels = encoder(kind), images(2, 56)
    with torch.no_grad():
        expected = model(pixels, output_hidden_states=True).hidden_states[layer]
        wrapped = wrap(VisionTower(model, layers=layer), Everywhere())
        features = wrapped.forward_features(pixels)
        prefix = int(kind == "clip")
        assert relative(features.patches.view(2, 16, 32), expected[:, prefix:]) < 1e-5
        assert relative(wrapped.vit.tokens(pixels), expected) < 1e-6
        assert relative(wrapped(pixels), wrapped.vit(pixels)) < 1e-5


def test_several_layers_are_taps() -> None:
    model, pixels = encoder("clip"), images(2, 56)
    tower = VisionTower(model, layers=[-1, -3, 1])
    assert (tower.taps, tower.order, len(tower.blocks)) == ((0, 2), (1, 0, 0), 3)
    with torch.no_grad():
        wrapped = wrap(tower, Everywhere())
        states = model(pixels, output_hidden_states=True).hidden_states
        for dense, index in zip(wrapped.features(pixels, tower.taps), (1, 3), strict=True):
            dense = dense.flatten(2).transpose(1, 2)
            assert relative(dense, states[index][:, 1:]) < 1e-5


def test_mixed_tokens_train_the_tower() -> None:
    wrapped = wrap(VisionTower(encoder("clip")), Linear(), budget=0.6, rule="image")
    features = wrapped.forward_features(images(2, 70, 42))
    assert features.layout.token_fraction.max() <= 0.6
    features.patches.sum().backward()
    assert wrapped.vit.embeddings.position_embedding.weight.grad.abs().sum() > 0
    assert wrapped.vit.blocks[0].layer.self_attn.q_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("layer", [0, 4, -4, -5])
def test_a_layer_that_is_not_there_is_named(layer: int) -> None:
    with pytest.raises(SplitError, match=f"vision_feature_layer {layer}: the tower has 3 layers"):
        VisionTower(encoder("clip"), layers=layer)


def test_encoders_with_other_parts_are_refused() -> None:
    with pytest.raises(SplitError, match="cannot wrap a Linear as vision tower"):
        VisionTower(nn.Linear(2, 2))
    model = encoder("clip")
    model.encoder.layers[1] = nn.Identity()
    with pytest.raises(SplitError, match=r"of Identitys: layer_norm1, .*self_attn.out_proj missing"):
        VisionTower(model)
    model = encoder("clip")
    model.encoder.layers[0].register_forward_hook(lambda module, args, out: out + 1)
    with pytest.raises(SplitError, match=r"blocks\.0\.layer .* has forward hooks"):
        wrap(VisionTower(model), Everywhere())
    model = encoder("clip")
    model.embeddings.image_size = 70
    with pytest.raises(SplitError, match="16 positions and a grid of 5x5"):
        VisionTower(model)


def in_a_tuple(forward: Callable[..., Tensor]) -> Callable[..., tuple[Tensor]]:
    return lambda self, *args, **options: (forward(self, *args, **options),)


class Older(nn.Module):
    """As transformers 4 had it: the encoder inside a wrapper, layers that return a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_model = encoder("siglip")
        for layer in self.vision_model.encoder.layers:
            layer.__class__ = type("OlderLayer", (type(layer),), {"forward": in_a_tuple(type(layer).forward)})


def test_older_models_serve_too() -> None:
    pixels = images(2, 56)
    with torch.no_grad():
        assert torch.equal(VisionTower(Older()).tokens(pixels), VisionTower(encoder("siglip")).tokens(pixels))
        wrap(VisionTower(Older()), Everywhere())

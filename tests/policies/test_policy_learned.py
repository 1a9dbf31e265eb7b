"""The decision networks: sizes (Table 15), the formula of Eq. 1, one network for all stages, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from split_core.errors import SplitError
from split_core.policy import BackboneInfo
from split_core.types import Pyramid
from split_policies.configs import CrossAttentionConfig, MLPConfig
from split_policies.mlp import ConcatMLP, ParentMLP
from split_policies.sizes import attention_parameters, attention_sizes, mlp_hidden, mlp_parameters
from split_policies.xattn import CrossAttention

NETWORKS = {
    "xattn": (CrossAttention, CrossAttentionConfig),
    "mlp_parent": (ParentMLP, MLPConfig),
    "mlp_concat": (ConcatMLP, MLPConfig),
}
networks = pytest.mark.parametrize("name", NETWORKS)


def build(name: str, dim: int = 64, *, stages: int = 1, **settings):
    policy, config = NETWORKS[name]
    return policy(config(**settings), BackboneInfo(dim=dim, patch_size=(8, 8), stages=stages))


def parameters(policy) -> int:
    return sum(p.numel() for p in policy.parameters())


@pytest.mark.parametrize(("name", "paper"), [("xattn", 1.115e6), ("mlp_parent", 1.115e6), ("mlp_concat", 1.116e6)])
def test_table_15(name, paper):
    assert parameters(build(name, 1024)) == pytest.approx(paper, rel=0.005)


@pytest.mark.parametrize("dim", [64, 192, 384, 768, 1280])
def test_variants_have_equally_many_parameters_at_other_widths(dim):
    counts = [parameters(build(name, dim)) for name in NETWORKS]
    assert max(counts) <= 1.01 * min(counts)


@given(st.integers(1, 2048))
def test_size_rule(dim):
    width, heads, hidden = attention_sizes(dim)
    assert width % heads == 0
    target = attention_parameters(dim, width=width, hidden=hidden)
    for inputs in (dim, 5 * dim):
        # No other hidden size comes nearer, short of a network without any unit.
        gap = abs(mlp_parameters(inputs, mlp_hidden(dim, inputs=inputs)) - target)
        assert gap <= (inputs + 2) / 2 or mlp_hidden(dim, inputs=inputs) == 1


def test_size_formula_counts_the_module():
    policy = build("xattn", 96, width=40, heads=5, hidden=7)
    assert parameters(policy) == attention_parameters(96, width=40, hidden=7)


def test_width_must_be_a_multiple_of_heads():
    with pytest.raises(SplitError, match="width 10 is not a multiple of heads 4"):
        build("xattn", width=10, heads=4)


@networks
def test_one_network_serves_every_stage(name, make_view):
    torch.manual_seed(0)
    policy = build(name, stages=3)
    assert policy.state_dict().keys() == build(name, stages=1).state_dict().keys()
    view = make_view((128, 128), patch=8, stages=3)
    same = torch.randn(64)
    levels = tuple(same.expand(3, view.grid.size(s), 64) for s in range(4))
    logits = [policy(replace(view, scale=s, pyramid=Pyramid(levels, view.grid)))[0, 0] for s in (1, 2, 3)]
    torch.testing.assert_close(torch.stack(logits), logits[0].expand(3))


@networks
@pytest.mark.parametrize("norm", [True, False])
def test_gradients_reach_every_parameter_and_training_moves_decisions(name, norm, make_view):
    torch.manual_seed(0)
    policy = build(name, norm=norm)
    view = make_view((128, 128))
    logits = policy(view)
    assert logits.abs().max() < 0.5, "decisions start undecided"
    target = (view.parents[..., 0] > 0).float()
    F.binary_cross_entropy_with_logits(logits, target).backward()
    for parameter_name, parameter in policy.named_parameters():
        assert parameter.grad.abs().sum() > 0, parameter_name
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(25):
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(policy(view), target).backward()
        optimizer.step()
    assert ((policy(view) > 0) == target.bool()).float().mean() > 0.9


@networks
def test_norm_makes_logits_independent_of_the_scale_of_embeddings(name, make_view):
    view = make_view()
    larger = replace(view, pyramid=Pyramid(tuple(100 * level for level in view.pyramid.levels), view.grid))
    with_norm, without = build(name, norm=True), build(name, norm=False)
    torch.testing.assert_close(with_norm(view), with_norm(larger), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(without(view), without(larger), rtol=1e-2, atol=1e-2)


def test_cross_attention_is_equation_1(make_view):
    torch.manual_seed(0)
    policy = build("xattn", width=32, heads=2, norm=False)
    view = make_view((40, 24))
    rows, cols = view.grid.shape(1)
    fine = view.pyramid.levels[0].unflatten(1, view.grid.shape(0))
    for i in range(view.pyramid.batch):
        for r in range(rows):
            for c in range(cols):
                parent = view.parents[i, r * cols + c]
                children = fine[i, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].reshape(4, -1)
                key, value = policy.comparison.key_value(children).chunk(2, dim=-1)
                heads = [t.view(-1, 2, 16).transpose(0, 1) for t in (policy.comparison.query(parent[None]), key, value)]
                pooled = F.scaled_dot_product_attention(*heads).transpose(0, 1).reshape(32)
                hidden = F.gelu(policy.expand(torch.cat([parent, policy.comparison.output(pooled)])))
                torch.testing.assert_close(policy(view)[i, r * cols + c], policy.decide(hidden)[0])


def test_concat_reads_parent_then_children_in_raster_order(make_view):
    policy = build("mlp_concat", norm=False)
    view = make_view((32, 32))
    fine = view.pyramid.levels[0].unflatten(1, (4, 4))[1]
    features = torch.cat([view.parents[1, 3], fine[2, 2], fine[2, 3], fine[3, 2], fine[3, 3]])
    torch.testing.assert_close(policy(view)[1, 3], policy.head(features.view(1, 1, -1))[0, 0])


def test_parent_mlp_does_not_see_children(make_view):
    policy, view = build("mlp_parent"), make_view()
    blind = Pyramid((torch.zeros_like(view.pyramid.levels[0]), view.parents), view.grid)
    assert torch.equal(policy(view), policy(replace(view, pyramid=blind)))

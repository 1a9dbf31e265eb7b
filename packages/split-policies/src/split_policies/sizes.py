"""Inner sizes of the decision networks, matched in parameters for any width d (App. G, Table 15).

The paper gives totals at d = 1024 (1.115M, 1.115M, 1.116M) and no inner sizes. Attention width d / 4 with q, k, v
unbiased, an output projection back to d with bias, and an MLP of d / 32 hidden units give 1.115M there; the two MLPs
take the hidden size that comes nearest to the cross-attention's total at the same d. Below d = 1024 the hidden size
stays 32: an MLP of two units (d = 64) cannot compare parent and summary.
"""

from __future__ import annotations

HEAD_WIDTH = 64


def attention_sizes(
    dim: int, *, width: int | None = None, heads: int | None = None, hidden: int | None = None
) -> tuple[int, int, int]:
    """(width, heads, hidden) of the cross-attention network, with what is None derived from d."""
    if width is None:
        unit = heads or 1
        width = max(1, -(-dim // (4 * unit))) * unit
    if heads is None:
        heads = max(1, width // HEAD_WIDTH)
        while width % heads:
            heads -= 1
    return width, heads, hidden or max(32, dim // 32)


def context_sizes(dim: int, *, width: int | None = None) -> tuple[int, int]:
    """(width, heads) of the transformer over parents: a quarter of d, in heads of at most 32 channels.

    At two layers on 49 parents of a ViT-S/16 that is 0.3% of the ViT's FLOPs.
    """
    width = width or max(8, dim // 4)
    heads = next(h for h in range(max(1, width // 32), 0, -1) if width % h == 0)
    return width, heads


def attention_parameters(dim: int, *, width: int, hidden: int) -> int:
    """q, k, v: 3 d w; output: w d + d; h on [parent; summary]: 2 d m + m, then m + 1."""
    return 4 * dim * width + dim + mlp_parameters(2 * dim, hidden)


def mlp_parameters(inputs: int, hidden: int) -> int:
    """Parameters of a two-layer MLP with one output."""
    return (inputs + 2) * hidden + 1


def mlp_hidden(dim: int, *, inputs: int) -> int:
    """Hidden units that bring a two-layer MLP on `inputs` features nearest to the default cross-attention at d."""
    width, _, hidden = attention_sizes(dim)
    return max(1, round((attention_parameters(dim, width=width, hidden=hidden) - 1) / (inputs + 2)))

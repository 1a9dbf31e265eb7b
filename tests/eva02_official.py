"""Names and shapes inside the official EVA-02 checkpoints."""

from __future__ import annotations


def official_block(dim: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a block, under its official name."""
    return {
        "norm1.weight": (dim,), "norm1.bias": (dim,), "norm2.weight": (dim,), "norm2.bias": (dim,),
        "attn.q_bias": (dim,), "attn.v_bias": (dim,), "attn.q_proj.weight": (dim, dim),
        "attn.k_proj.weight": (dim, dim), "attn.v_proj.weight": (dim, dim), "attn.proj.weight": (dim, dim),
        "attn.proj.bias": (dim,), "attn.rope.freqs_cos": (16, 16), "attn.rope.freqs_sin": (16, 16),
        "mlp.w1.weight": (hidden, dim), "mlp.w1.bias": (hidden,), "mlp.w2.weight": (hidden, dim),
        "mlp.w2.bias": (hidden,), "mlp.ffn_ln.weight": (hidden,), "mlp.ffn_ln.bias": (hidden,),
        "mlp.w3.weight": (dim, hidden), "mlp.w3.bias": (dim,),
    }  # fmt: skip

"""Attention over a packed sequence: a token sees the tokens of its own image and no others.

`AttentionBackend` is the protocol; sdpa (portable), masked (reference), varlen and xformers implement it.
"""

from split_core.attention.base import AttentionBackend, choose_backend

__all__ = ["AttentionBackend", "choose_backend"]

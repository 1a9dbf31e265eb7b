"""The paper's decision network (Sec. 3.2, Eq. 1): logit = h([z_parent ; CrossAttn(q = z_parent, kv = 4 children)]).

Inner sizes are open in the paper (`sizes`), as are normalisation (`LearnedConfig.norm`) and h's activation (GELU).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from split_core.errors import SplitError
from split_core.policy import BackboneInfo, StageView
from split_policies.configs import CrossAttentionConfig
from split_policies.learned import LearnedPolicy, normalised
from split_policies.sizes import attention_sizes


class Comparison(nn.Module):
    """[z_parent ; what it found in its four children], (b, n, 2d): the parent's query attends to the children.

    Args:
        config: inner sizes.
        info: width of the embeddings.

    Raises:
        SplitError: the width is not a multiple of the heads.
    """

    def __init__(self, config: CrossAttentionConfig, info: BackboneInfo) -> None:
        super().__init__()
        width, self.heads, _ = attention_sizes(info.dim, width=config.width, heads=config.heads)
        if width % self.heads:
            raise SplitError(f"policy xattn: width {width} is not a multiple of heads {self.heads}")
        self.norm = config.norm
        self.query = nn.Linear(info.dim, width, bias=False)
        self.key_value = nn.Linear(info.dim, 2 * width, bias=False)
        self.output = nn.Linear(width, info.dim)

    def forward(self, view: StageView) -> Float[Tensor, "b n features"]:
        parents = normalised(view.parents, self.norm)
        return torch.cat([parents, self.attend(parents, normalised(view.children, self.norm))], dim=-1)

    def attend(self, parents: Float[Tensor, "b n d"], children: Float[Tensor, "b n 4 d"]) -> Float[Tensor, "b n d"]:
        """Pool four children per parent. One query and four keys: elementwise products beat a batched matmul."""
        query = self.query(parents).unflatten(-1, (1, self.heads, -1))
        key, value = self.key_value(children).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        weight = ((query * key).sum(-1, keepdim=True) * query.shape[-1] ** -0.5).softmax(2)
        return self.output((weight * value).sum(2).flatten(-2))


class CrossAttention(LearnedPolicy):
    """An MLP decides from the parent and what it found in its children."""

    def __init__(self, config: CrossAttentionConfig, info: BackboneInfo) -> None:
        hidden = attention_sizes(info.dim, hidden=config.hidden)[2]
        super().__init__(2 * info.dim, hidden=hidden, config=config)
        self.comparison = Comparison(config, info)

    def forward(self, view: StageView) -> Float[Tensor, "b n"]:
        return self.head(self.comparison(view))

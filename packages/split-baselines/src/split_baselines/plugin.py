"""What this distribution offers: rivals to learned splitting. Importing it imports no torch.

Reducers take tokens away between the layers of a ViT, where splitting decides before the first; `quadformer` splits,
and is therefore a policy. `split_baselines.shaping` holds the loss that MSViT's gate is trained with beside.
"""

from __future__ import annotations

from split_baselines import configs
from split_core.plugins import Entry, hookimpl


@hookimpl
def split_reducers() -> list[Entry]:
    """Methods that merge or drop tokens between layers, and the plain smaller image."""
    return [
        Entry("tome", "split_baselines.tome:ToMe", configs.ToMeConfig, "merges the most similar tokens in every block"),
        Entry(
            "evit",
            "split_baselines.evit:EViT",
            configs.EViTConfig,
            "drops what the class token attends to least, fused",
        ),
        Entry("dtem", "split_baselines.dtem:DTEM", configs.DTEMConfig, "ToMe on a learned merging embedding"),
        Entry(
            "dynamicvit",
            "split_baselines.dynamicvit:DynamicViT",
            configs.DynamicViTConfig,
            "learned scores drop tokens",
        ),
        Entry("resize", "split_baselines.resize:Resize", configs.ResizeConfig, "the whole image at a lower resolution"),
    ]


@hookimpl
def split_policies() -> list[Entry]:
    """Methods that choose patches before the first layer."""
    return [
        Entry(
            "quadformer",
            "split_baselines.quadformer:Quadformer",
            configs.QuadformerConfig,
            "best-first quadtree with an exact token count, by what blurring the patch loses",
        )
    ]

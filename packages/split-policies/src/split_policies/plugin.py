"""What this distribution offers.  Importing this module imports no torch."""

from __future__ import annotations

from split_core.plugins import Entry, PluginConfig, hookimpl
from split_policies import configs


@hookimpl
def split_policies() -> list[Entry]:
    """The learned policies of the paper, the heuristics it is compared with, and the fixed references."""
    return [
        Entry(
            "xattn",
            "split_policies.xattn:CrossAttention",
            configs.CrossAttentionConfig,
            "learned: parent attends to its children (Sec. 3.2)",
        ),
        Entry(
            "mlp_parent",
            "split_policies.mlp:ParentMLP",
            configs.MLPConfig,
            "learned: MLP of the parent alone (Table 15)",
        ),
        Entry(
            "mlp_concat",
            "split_policies.mlp:ConcatMLP",
            configs.MLPConfig,
            "learned: MLP of parent and children (Table 15)",
        ),
        Entry(
            "xattn_context",
            "split_policies.context:ContextAttention",
            configs.ContextConfig,
            "learned: xattn, and parents attend to each other",
        ),
        Entry(
            "look",
            "split_policies.context:Look",
            configs.LookConfig,
            "learned: xattn after a coarse look through the first blocks",
        ),
        Entry(
            "late",
            "split_policies.context:Late",
            configs.LookConfig,
            "learned: look, and fine tokens join where it ended",
        ),
        Entry("entropy", "split_policies.entropy:Entropy", configs.EntropyConfig, "pixel entropy of the patch (APT)"),
        Entry(
            "upsample_mse",
            "split_policies.resample:UpsampleMSE",
            configs.UpsampleMSEConfig,
            "what shrinking the patch loses (Quadformer)",
        ),
        Entry(
            "laplacian", "split_policies.resample:Laplacian", configs.LaplacianConfig, "mean edge strength of the patch"
        ),
        Entry(
            "cosine",
            "split_policies.cosine:Cosine",
            configs.CosineConfig,
            "parent against children; the warm-start rule (Sec. 3.4)",
        ),
        Entry(
            "random",
            "split_policies.random:Random",
            configs.RandomConfig,
            "each parent splits by chance, meeting the budget on average",
        ),
        Entry("dense", "split_policies.fixed:Dense", PluginConfig, "every parent splits: the plain ViT"),
        Entry("coarse", "split_policies.fixed:Coarse", PluginConfig, "no parent splits: the fewest tokens"),
        Entry("oracle", "split_policies.oracle:Oracle", PluginConfig, "fine tokens on labelled objects, for analysis"),
    ]

"""What reading a prompt costs: FLOPs of projector and language model by the number of visual tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from split_tasks.vqa.reader import Reader


def prefill_flops(reader: Reader, visual: Any, words: int) -> Any:
    """Multiply-adds times two of the projector and of one pass over a prompt, of which only the last token is answered.

    Per token two for each weight of the layers' matrices; attention of every token to itself and those before it.
    Padding is not counted: it is no use of anybody's.

    Args:
        reader: projector and language model.
        visual: tokens of an image (array or number).
        words: tokens of the text around it.
    """
    config = reader.language.config.get_text_config()
    weights = _matrices(reader.language.get_decoder().layers)
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    visual = np.asarray(visual, dtype=np.float64)
    n = visual + words
    attention = 4 * config.num_hidden_layers * width * n * (n + 1) / 2
    head = 2 * config.vocab_size * config.hidden_size
    return visual * 2 * _matrices(reader.projector) + n * 2 * weights + attention + head


def _matrices(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)

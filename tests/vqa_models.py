"""Language models and LLaVA checkpoints that tests build in milliseconds, with a tokenizer of single bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

from tiny import jitter

SIDES = {"image_size": 56, "patch_size": 14, "num_hidden_layers": 3, "num_attention_heads": 4}
PAD, BOS, EOS, IMAGE = 0, 1, 2, 259
BYTES = 260


def tokenizer(*, image: bool = False) -> PreTrainedTokenizerFast:
    """Every byte is a token; ids 0, 1, 2 are padding, begin and end; <image> is the last id where it is known."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": PAD, "<s>": BOS, "</s>": EOS} | {letter: 3 + i for i, letter in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    if image:
        wrapped.add_tokens(["<image>"], special_tokens=True)
    return wrapped


def text_config(vocab: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip


def save_language(folder: Path) -> Path:
    """A causal language model with its tokenizer."""
    torch.manual_seed(0)
    jitter(LlamaForCausalLM(text_config(BYTES)), spread=0.05).save_pretrained(folder)  # type: ignore[operator]
    tokenizer().save_pretrained(folder)
    return folder


def tiny_llava(tower: str = "clip", *, vocab: int = 200, token: int = 199, **options: Any) -> Any:
    """A LLaVA of 56 px images and 14 px patches."""
    torch.manual_seed(0)
    vision: Any = {"clip": CLIPVisionConfig, "siglip": SiglipVisionConfig}[tower](
        hidden_size=32, intermediate_size=64, **SIDES
    )
    sizes = {"image_token_index": token, "image_seq_length": 16}
    config = LlavaConfig(vision_config=vision, text_config=text_config(vocab), **sizes, **options)
    return jitter(LlavaForConditionalGeneration(config), spread=0.05).eval()


def save_llava(folder: Path) -> Path:
    """A LLaVA checkpoint as transformers writes it."""
    tiny_llava(vocab=BYTES, token=IMAGE).save_pretrained(folder)
    tokenizer(image=True).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    LlavaImageProcessor(**sizes).save_pretrained(folder)
    return folder

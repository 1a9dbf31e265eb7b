"""Compare what a model computes with what is computed for it on packed tokens, part by part, before it is accepted.

Both run in float64, where neither half precision, TF32 nor a LayerScale of 1e-6 beside its residual hides a difference;
and every module that both call must give the same, relative to its own size. A module that only the original calls is
replaced by our own code, so that nothing may hang on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from timm.layers.drop import DropPath
from torch import Tensor, nn
from torch.func import functional_call

from split_core.attention.masked import MaskedAttention
from split_core.backbone.attentions import ATTENTION
from split_core.backbone.blocks import BLOCKS
from split_core.backbone.pooling import pool_attention
from split_core.backbone.stream import Stream
from split_core.errors import SplitError
from split_core.packing import Segments

TOLERANCE = 1e-4
"""Relative difference allowed; some norms compute in float32 whatever they are given."""
FAINT = 1e-9
"""What a block adds to tokens of size 1 is nothing below this."""
PASSIVE = (nn.Identity, nn.Dropout, DropPath)
"""Modules without parts of their own that executors may stand for: in eval mode they do nothing."""
PATCHES = 5


def probe(block: Any, index: int, dim: int, *, rope: str | None = None, prefix: int = 0) -> None:
    """Compare a block with its executor on random input.

    Args:
        rope: "shared" if the model gives its blocks rotary positions, "per_head" if each head has its own.
        prefix: tokens before the patches, which are not turned.

    Raises:
        SplitError: the block's class has no executor, or the two differ.
    """
    unknown = _unknown(block)
    if unknown is not None:
        raise SplitError(
            f"blocks.{index} is a {type(unknown).__name__}, which has no packed executor; supported are "
            f"{', '.join(c.__name__ for c in (*BLOCKS, *ATTENTION))}"
        )
    x, segments = _sample(block, dim, PATCHES + prefix)
    options, rows = {}, None
    if rope is not None:
        pairs = block.attn.head_dim // 2
        angles = torch.randn(PATCHES, block.attn.num_heads, pairs, generator=_generator(1)).to(x)
        angles = angles[:, 0] if rope == "shared" else angles
        turned = torch.cat([angles.new_zeros(prefix, *angles.shape[1:]), angles]).repeat(2, *[1] * (angles.ndim - 1))
        rows = torch.cat([turned.sin(), turned.cos()], -1)
        half = getattr(block.attn, "rotate_half", False)
        wide = torch.cat([angles, angles], -1) if half else angles.repeat_interleave(2, -1)
        # timm's layout: both functions at the width of a head, heads before tokens
        own = torch.cat([wide.sin(), wide.cos()], -1)
        options = {"rope": own if rope == "shared" else own.transpose(0, 1)}

    def packed(block: Any, x: Tensor) -> Tensor:
        out = BLOCKS[type(block)](block, x.flatten(0, 1), Stream(segments, segments, MaskedAttention(), rows))
        return out.view_as(x) - x

    _agree(f"blocks.{index}", block, x, lambda block, x: block(x, **options) - x, packed)


def probe_pool(pool: Any, dim: int) -> None:
    """Compare attention pooling with its packed form.

    Raises:
        SplitError: the two differ.
    """
    x, segments = _sample(pool, dim, PATCHES)

    def packed(pool: Any, x: Tensor) -> Tensor:
        return pool_attention(pool, x.flatten(0, 1), segments.image, 2, torch.ones_like(x.flatten(0, 1)[:, 0]))

    _agree("attn_pool", pool, x, lambda pool, x: pool(x), packed)


def check_untouched(name: str, module: nn.Module) -> None:
    """Refuse a module whose call is bypassed if something hangs on the call.

    Args:
        name: its path in the model, "" for the model itself.

    Raises:
        SplitError: it has forward hooks, or a forward of its own.
    """
    what = f"{name or 'the model'} ({type(module).__name__})"
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    # transformers notes hidden states by hooks of its own, which change nothing
    if any(not str(getattr(hook, "__module__", None)).startswith("transformers.") for hook in hooks):
        raise SplitError(
            f"{what} has forward hooks, which would not run: packed tokens do not pass through its call. Remove them "
            f"(hook.remove()) and read features with `features(images, taps=...)`"
        )
    if "forward" in vars(module):
        raise SplitError(
            f"{what} has a forward of its own, patched on the instance, which would not run: packed tokens do not pass "
            f"through its call. Delete it (del module.forward) or wrap another model"
        )


def _unknown(block: Any) -> nn.Module | None:
    """The part of a block that no executor stands for."""
    if type(block) not in BLOCKS:
        return block
    attentions = [part.attn for part in block.attns] if hasattr(block, "attns") else [getattr(block, "attn", None)]
    return next((attn for attn in attentions if attn is not None and type(attn) not in ATTENTION), None)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _sample(module: nn.Module, dim: int, length: int) -> tuple[Tensor, Segments]:
    device = next(module.parameters()).device
    # Apple's GPUs have no float64
    x = torch.randn(2, length, dim, generator=_generator(0)).to(device, _wide(device))
    starts = torch.tensor([0, length, 2 * length], device=device, dtype=torch.int32)
    return x, Segments(starts, (length, length), length)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


Run = Callable[[Any, Tensor], Tensor]


class _Called(nn.Module):
    """A part that is run in some way, so that `functional_call` can lend it other parameters meanwhile."""

    def __init__(self, part: nn.Module, run: Run) -> None:
        super().__init__()
        self.part, self.run = part, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.part, x)


def _agree(name: str, part: nn.Module, x: Tensor, by_itself: Run, packed: Run) -> None:
    """Run a part both ways on copies of its parameters in x's dtype; compare what is called and what comes out."""
    tensors = {**dict(part.named_parameters()), **dict(part.named_buffers())}
    copies = {f"part.{key}": t.detach().to(x.dtype) if t.is_floating_point() else t for key, t in tensors.items()}
    with _as_in_eval(part):
        with _outputs(part) as alone:
            expected = functional_call(_Called(part, by_itself), copies, (x,))
        with _outputs(part) as ours:
            found = functional_call(_Called(part, packed), copies, (x,))
    _check_bypassed(name, part, alone.keys() - ours.keys())
    for key in alone.keys() & ours.keys():
        pair = _comparable(ours[key], alone[key])
        if pair is not None:
            _compare(f"{name}.{key}", part, *pair)
    _compare(name, part, found, expected)


@contextmanager
def _outputs(part: nn.Module) -> Iterator[Mapping[str, Any]]:
    """What each module inside returns, by its path; "" is the part itself."""
    outputs: dict[str, Any] = {}
    with ExitStack() as stack:
        for key, module in part.named_modules():
            hook = module.register_forward_hook(lambda _, args, out, key=key: outputs.update({key: out}))
            stack.callback(hook.remove)
        yield outputs


def _check_bypassed(name: str, part: nn.Module, bypassed: set[str]) -> None:
    for key in sorted(bypassed):
        module, path = part.get_submodule(key), f"{name}.{key}".removesuffix(".")
        check_untouched(path, module)
        if not any(module.children()) and not isinstance(module, PASSIVE):
            raise SplitError(
                f"{path} is a {type(module).__name__}, which packed tokens do not pass through, so the result would "
                f"differ. Wrap a plain timm VisionTransformer or Eva"
            )


def _comparable(packed: Any, expected: Any) -> tuple[Tensor, Tensor] | None:
    """Both outputs as rows of tokens; None where heads or a batch of queries are laid out in another way."""
    if not (isinstance(packed, Tensor) and isinstance(expected, Tensor)) or expected.ndim != 3:
        return None
    packed, expected = packed.flatten(0, -2), expected.flatten(0, -2)
    return (packed, expected) if packed.shape == expected.shape else None


@contextmanager
def _as_in_eval(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def _compare(name: str, part: nn.Module, packed: Tensor, expected: Tensor) -> None:
    error = ((packed - expected).norm() / expected.norm().clamp_min(FAINT)).item()
    if not error <= TOLERANCE:
        raise SplitError(
            f"{name} ({type(part).__name__}) gives other values packed than by itself (relative difference "
            f"{error:.2g}): it computes something its class does not; it was probably patched or hooked. Not wrapped."
        )

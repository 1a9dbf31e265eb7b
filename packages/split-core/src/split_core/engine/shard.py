"""FSDP2: gradients, optimizer state and, between steps, weights divided among the processes (`adapt.shard`).

The module is one group: its weights are gathered for a step and divided again after the backward. Blocks of their own
would need their `forward` called, and the packed executors call a block's parts instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from split_core.engine.ranks import Ranks
from split_core.errors import SplitError


def shard(module: nn.Module, ranks: Ranks, precision: str) -> None:
    """Divide the module's parameters among the processes, in place; one process keeps them all.

    Raises:
        SplitError: as `check_precision`.
    """
    check_precision(precision)
    if ranks.world > 1:
        fully_shard(module, mesh=init_device_mesh(ranks.device.type, (ranks.world,)))


def check_precision(precision: str) -> None:
    """Refuse fp16, whose scaled gradients would have to be unscaled in parts."""
    if precision == "fp16":
        raise SplitError("adapt.shard=true needs precision=bf16 or no; fp16's scaled gradients are not divided")


def whole(module: nn.Module) -> dict[str, Tensor]:
    """The module's state dict with whole tensors. Every process has to ask."""
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in module.state_dict().items()
    }


def state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What a checkpoint holds, the same for any number of processes; whole on rank 0, and every process has to ask."""
    weights, moments = get_state_dict(module, optimizer, options=_options())
    return {"weights": weights, "optimizer": moments}


def load(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Inverse of `state`; every process reads the whole file."""
    set_state_dict(
        module, optimizer, model_state_dict=saved["weights"], optim_state_dict=saved["optimizer"], options=_options()
    )


def _options() -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, cpu_offload=True)

"""What is spread over several processes: weights by FSDP, and tensors as DTensors.

Who has not imported those has none of them, and it takes long.
"""

import sys
from typing import Any

from torch import Tensor, nn


def _fsdp() -> Any:
    """Return FSDP's module, if somebody has imported it; another thread may do so."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = "FSDPModule", "FullyShardedDataParallel"
    return fsdp if all(hasattr(fsdp, it) for it in names) else None


def swaps_parameters(module: nn.Module) -> bool:
    """Tell whether FSDP gives a module other parameters for the time of a call."""
    fsdp = _fsdp()
    return fsdp is not None and isinstance(
        module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel
    )


def flattened(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return the modules whose weights are parts of a flat parameter of FSDP.

    With ``use_orig_params=False`` a module's own are plain views of that one, which
    FSDP puts there anew for each forward. Each module comes with their names.
    """
    fsdp = _fsdp()
    found: dict[nn.Module, list[str]] = {}
    for part in (
        () if fsdp is None else fsdp.FullyShardedDataParallel.fsdp_modules(model)
    ):
        handle = part._handle
        if handle is not None and not handle._use_orig_params:
            flat = handle.flat_param
            found.setdefault(part.module, [])  # which holds the flat one itself
            for name, owner, *_ in (*flat._param_infos, *flat._shared_param_infos):
                found.setdefault(owner, []).append(name)
    return found


def is_sharded(model: nn.Module) -> bool:
    """Tell whether each process holds only a part of a model's weights."""
    imported = "torch.distributed.fsdp", "torch.distributed.tensor"
    if sys.modules.keys().isdisjoint(imported):
        return False
    inner: Any = model
    return any(map(swaps_parameters, inner.modules())) or any(
        map(is_distributed, inner.parameters())
    )


def is_distributed(value: object) -> bool:
    """Tell whether a value is a tensor of which each process holds a part."""
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds; most often all of it."""
    given: Any = tensor
    return given.to_local() if is_distributed(given) else given

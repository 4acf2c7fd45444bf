"""What is sharded over processes: weights by FSDP, and tensors as DTensors.

Their modules are not imported here, which takes long: a program that has not imported
them has no such weights or tensors.
"""

import sys
from typing import Any

from torch import Tensor, nn

from gradlib.private.modules import modules_in


def _fsdp() -> Any:
    """Return FSDP's module if its import, perhaps in another thread, is complete."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = "FSDPModule", "FullyShardedDataParallel"
    return fsdp if all(hasattr(fsdp, it) for it in names) else None


def swaps_parameters(module: nn.Module) -> bool:
    """Tell whether FSDP gives a module other parameters during a call."""
    fsdp = _fsdp()
    return fsdp is not None and isinstance(
        module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel
    )


def flattened(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return by module the names of weights that are parts of a flat FSDP parameter.

    With ``use_orig_params=False`` such weights are plain views of the flat parameter,
    which FSDP sets anew for each forward.
    """
    fsdp = _fsdp()
    found: dict[nn.Module, list[str]] = {}
    for part in (
        () if fsdp is None else fsdp.FullyShardedDataParallel.fsdp_modules(model)
    ):
        handle = part._handle
        if handle is not None and not handle._use_orig_params:
            flat = handle.flat_param
            found.setdefault(part.module, [])  # it holds the flat parameter itself
            for name, owner, *_ in (*flat._param_infos, *flat._shared_param_infos):
                found.setdefault(owner, []).append(name)
    return found


def is_sharded(model: nn.Module) -> bool:
    """Tell whether each process holds only a part of a model's weights."""
    imported = "torch.distributed.fsdp", "torch.distributed.tensor"
    if sys.modules.keys().isdisjoint(imported):
        return False
    inner: Any = model
    return any(map(swaps_parameters, modules_in(model))) or any(
        map(is_distributed, inner.parameters())
    )


def is_distributed(value: object) -> bool:
    """Tell whether a value is a DTensor, of which each process holds a part."""
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and issubclass(type(value), tensor.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor; any other tensor as it is."""
    given: Any = tensor
    return given.to_local() if is_distributed(given) else given

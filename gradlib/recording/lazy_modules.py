"""Replaying lazy modules of torch, whose first call makes their weights.

A replay uses the weights they got. But that call drew these from a random generator,
so the replay must draw them too, for what it draws afterwards to be the same.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from gradlib.private.hooks import forward_pre_hooks
from gradlib.private.modules import BUFFERS, PARAMETERS, own_buffers, own_parameters


def draw_again(
    module: nn.Module, kind: type[nn.Module], made: Mapping[str, Tensor]
) -> None:
    """Have the next call of a lazy module first draw its weights, as the recorded did.

    Args:
        module: The module, with its weights, and with hooks that may be changed.
        kind: The class that it had at the recorded call, lazy or not.
        made: The weights that the recorded call made, by name; none if it had them.
    """
    if not issubclass(kind, LazyModuleMixin):
        return
    hooks = forward_pre_hooks(module)
    for key, hook in [*hooks.items()]:
        if getattr(hook, "__func__", None) is cast(Any, kind)._infer_parameters:
            del hooks[key]  # it would remove itself, which it has done already
    if not made:
        return

    def draw(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        handle.remove()
        with _lazy(module, kind, made), torch.no_grad():
            module.initialize_parameters(*args, **kwargs)

    handle = module.register_forward_pre_hook(draw, prepend=True, with_kwargs=True)


@contextmanager
def _lazy(
    module: nn.Module, kind: type[nn.Module], made: Mapping[str, Tensor]
) -> Generator[None]:
    """Make a module lazy again, without its weights, and then put all back."""
    state, now = vars(module), type(module)
    parameters, buffers = own_parameters(module), own_buffers(module)
    state[PARAMETERS] = _emptied(parameters, made, UninitializedParameter)
    state[BUFFERS] = _emptied(buffers, made, UninitializedBuffer)
    module.__class__ = kind
    try:
        yield
    finally:
        module.__class__ = now
        state[PARAMETERS], state[BUFFERS] = parameters, buffers


def _emptied(
    own: Mapping[str, Tensor | None],
    made: Mapping[str, Tensor],
    empty: Callable[..., Tensor],
) -> dict[str, Tensor | None]:
    return {
        name: empty(device=made[name].device, dtype=made[name].dtype)
        if name in made
        else tensor
        for name, tensor in own.items()
    }

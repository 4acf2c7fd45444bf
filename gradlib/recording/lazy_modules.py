"""Lazy modules of torch, whose first call makes their weights.

They are computed again with the weights they got. But these were drawn by chance in
that call, and what it draws afterwards comes after them.
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
    """Have the next call of a lazy module begin with what made its weights then.

    Args:
        module: It has its weights, and hooks that may be changed.
        kind: The class it had, lazy or not.
        made: Those that its call made, by name; none where it had them by then.
    """
    if not issubclass(kind, LazyModuleMixin):
        return
    hooks = forward_pre_hooks(module)
    for key, hook in [*hooks.items()]:
        if getattr(hook, "__func__", None) is cast(Any, kind)._infer_parameters:
            del hooks[key]  # it takes itself away, which was done
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
    """Have a module without weights, and afterwards with them again."""
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

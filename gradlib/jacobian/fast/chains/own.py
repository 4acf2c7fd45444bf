"""Whether torch's layers, functions and methods are still torch's own.

Modules call functions, and functions call one another. So where one was replaced, every
layer and function that may call one of its name counts as replaced.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradlib.jacobian.fast.chains.layers import IDLE, SOFTMAXES
from gradlib.jacobian.fast.chains.noted import Found, note_own
from gradlib.jacobian.fast.chains.pointwise import OPERATIONS, POINTWISE
from gradlib.private.modules import torchs_own


def found(name: str, *spaces: Any) -> Found:
    """Return torch's own attribute of a name, in each class or module that has one."""
    return tuple(
        (it, name, torchs_own(getattr(it, name) if _is_own(it) else None))
        for it in spaces
        if hasattr(it, name)
    )


def _is_own(space: Any) -> bool:
    return not isinstance(space, type) or torchs_own(space) is space


_FUNCTIONS = {
    name: found(name, F, torch, Tensor)
    for name in (
        *(it.name for it in (*POINTWISE.values(), *OPERATIONS)),
        *("softmax", "log_softmax", "flatten", "dropout", "alpha_dropout"),
    )
}

_BATCH_NORM = found("batch_norm", F, torch)

_CALLED: dict[type[nn.Module], Found] = {
    **dict.fromkeys((*IDLE, *POINTWISE, *SOFTMAXES), ()),
    nn.Sequential: found("__iter__", nn.Sequential),
    nn.Linear: found("linear", F),
    nn.Conv2d: found("_conv_forward", nn.Conv2d) + found("conv2d", F),
    nn.Flatten: _FUNCTIONS["flatten"],
    nn.Dropout: _FUNCTIONS["dropout"],
    nn.AlphaDropout: _FUNCTIONS["alpha_dropout"],
    nn.AdaptiveAvgPool2d: found("adaptive_avg_pool2d", F),
    nn.AvgPool2d: found("avg_pool2d", F),
    nn.MaxPool2d: found("max_pool2d", F, torch),
    nn.GroupNorm: found("group_norm", F, torch),
    nn.LayerNorm: found("layer_norm", F, torch),
    nn.BatchNorm1d: found("_check_input_dim", nn.BatchNorm1d) + _BATCH_NORM,
    nn.BatchNorm2d: found("_check_input_dim", nn.BatchNorm2d) + _BATCH_NORM,
}
"""What the ``forward`` of each known layer calls; see `run_by` for functions."""

_RUN = {kind: found("forward", kind) + called for kind, called in _CALLED.items()}

KNOWN = frozenset(_RUN)
"""The types of layers that are known."""


def is_own_function(name: str) -> bool:
    """Tell whether the functions and methods of a name are still torch's own."""
    note_own(_FUNCTIONS[name])
    return are_same(_FUNCTIONS[name])


def is_own_layer(kind: type[nn.Module]) -> bool:
    """Tell whether all that a known type of layer runs is still torch's own."""
    note_own(_RUN[kind])
    return are_same(_RUN[kind])


def run_by(kind: type[nn.Module]) -> Found:
    """Return the attributes of torch that a known type of layer runs."""
    known = POINTWISE.get(kind)
    return _RUN[kind] + (() if known is None else _FUNCTIONS[known.name])


def are_same(found: Found) -> bool:
    """Tell whether attributes still have the values that were found."""
    for space, name, was in found:  # noqa: SIM110 (with all() it takes twice as long)
        if getattr(space, name) is not was:
            return False
    return True

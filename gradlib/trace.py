"""What the recorder writes down, flat; `recording` gives it its form."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradlib.tree import Tree
from gradlib.views import Region

Gradients = dict[int | str, Tensor]
"""Gradients by position among the flat inputs or outputs, or by parameter name."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a gradient goes: a field of `PassTrace`, and the keys in it."""

    field: str
    keys: list[int] | list[str]
    region: Region | None = None  # the part of the gradient that is meant
    dtype: torch.dtype | None = None  # of what the gradient belongs to

    def of(self, grad: Tensor) -> Tensor:
        """Return what `grad` holds for this place."""
        part = grad if self.region is None else self.region.of(grad)
        return part if self.dtype is None else part.to(self.dtype)


@dataclass(slots=True)
class PassTrace:
    """The gradients that one backward pass gave one call."""

    backward: int
    input_shares: Gradients = field(default_factory=Gradients)
    input_totals: Gradients = field(default_factory=Gradients)
    outputs: Gradients = field(default_factory=Gradients)
    param_shares: Gradients = field(default_factory=Gradients)
    param_totals: Gradients = field(default_factory=Gradients)
    # What the call's own computation gave to one of its outputs.
    inner: Gradients = field(default_factory=Gradients)


@dataclass(slots=True)
class CallTrace:
    """One call of one module."""

    name: str
    index: int
    forward: int
    module_type: str
    inputs: Tree  # of (args, kwargs)
    parameters: dict[str, bool]  # own parameters -> whether they require grad
    output: Tree | None = None
    # Places of the tensors that require grad.
    inputs_asked: list[int] = field(default_factory=list[int])
    outputs_asked: list[int] = field(default_factory=list[int])
    returned_inputs: list[int] = field(default_factory=list[int])
    recomputed_in: int | None = None  # torch's number of the pass that did
    calls_others: bool = False
    no_pass_because: str = ""
    passes: dict[int, PassTrace] = field(default_factory=dict[int, PassTrace])

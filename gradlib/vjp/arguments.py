"""The arguments of an autograd call, in one form however they were given."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.overrides
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gradlib.private.nodes import forms_at
from gradlib.vjp.source import Site

Shape: TypeAlias = tuple[int, ...]

NO_FLAG = object()
"""Stands for a tensor that was passed where True or False belongs."""


@dataclass(frozen=True, eq=False)
class Argument:
    """One argument, with its entries in a tuple.

    Attributes:
        name: Its name in the call, such as ``"grad_outputs"``.
        letter: Its letter in the code of an explanation, such as ``"v"``.
        values: The entries. On a bad call they may be anything.
        keys: The keys of a dict of inputs, or ``None``.
        several: Whether a sequence or a dict was given, of any length.
        alone: What a message calls the only entry, where no sequence was given.
    """

    name: str
    letter: str
    values: tuple[Any, ...]
    keys: tuple[Any, ...] | None = None
    several: bool = False
    alone: str = ""

    @property
    def is_given(self) -> bool:
        """Whether any entry is not ``None``."""
        return any(it is not None for it in self.values)

    @property
    def places(self) -> tuple[str, ...]:
        """What a message calls the entries: ``"inputs[1]"``, ``'inputs["w"]'``."""
        return self._each(self.name) if self.several else (self.alone,)

    @property
    def spelled(self) -> tuple[str, ...]:
        """What code calls the entries: ``"x"``, ``"x[1]"``, ``'x["w"]'``."""
        return self._each(self.letter) if self.several else (self.letter,)

    def _each(self, name: str) -> tuple[str, ...]:
        steps = range(len(self.values)) if self.keys is None else self.keys
        return tuple(f"{name}[{written_key(step)}]" for step in steps)


@dataclass(frozen=True, eq=False)
class Arguments:
    """One call of ``torch.autograd.grad``, or of ``backward``.

    Attributes:
        outputs: Tensors and gradient edges.
        inputs: Tensors and gradient edges.
        grad_outputs: Tensors and ``None``, one for each output on a good call.
        options: The keyword arguments that differ from their defaults.
        function: What was called: ``"gradlib.grad"``, ``"torch.autograd.grad"``,
            ``"torch.autograd.backward"``, or ``"backward"`` for the method.
        site: Where the call is, if that is known.
        frames: Where to look for the names of tensors, the innermost first.
        into_leaves: Whether this is a ``backward`` that was given no inputs.
    """

    outputs: Argument
    inputs: Argument
    grad_outputs: Argument
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    function: str = "gradlib.grad"
    site: Site | None = None
    frames: Sequence[FrameType] = ()
    into_leaves: bool = False

    @property
    def by_letter(self) -> dict[str, Argument]:
        """Outputs, inputs and grad_outputs, by their letters in code."""
        every = (self.outputs, self.inputs, self.grad_outputs)
        return {it.letter: it for it in every}

    @property
    def accumulates(self) -> bool:
        """Whether this is a ``backward``, which adds to ``.grad``."""
        return self.function.endswith("backward")

    @property
    def is_grads_batched(self) -> bool:
        """Whether the first axis of each grad_output counts vectors."""
        return self._is_on("is_grads_batched")

    @property
    def materialize_grads(self) -> bool:
        """Whether an unused input gets zeros."""
        return self._is_on("materialize_grads")

    @property
    def allow_unused(self) -> bool:
        """Whether an input may be unused, by either of the options that say so."""
        return self._is_on("allow_unused", default=self.materialize_grads)

    def _is_on(self, option: str, *, default: bool = False) -> bool:
        value = self.options.get(option, default)
        return value is not NO_FLAG and bool(value)


def written_key(key: object) -> str:
    """Return the code of a key, or of an index."""
    if isinstance(key, Enum):
        return f"{type(key).__name__}.{key.name}"
    return f'"{key}"' if isinstance(key, str) else repr(key)


class Form(NamedTuple):
    """The shape, dtype and device that autograd expects of a gradient."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device


def read_arguments(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
    site: Site | None = None,
) -> Arguments:
    """Read the arguments of ``torch.autograd.grad``, good or bad, and raise nothing.

    Iterators are used up: their entries are in the result.
    """
    given = read_argument("outputs", "y", outputs)
    options: dict[str, Any] = {
        "retain_graph": flag(retain_graph),
        "create_graph": flag(create_graph) or None,
        "allow_unused": flag(allow_unused),
        "is_grads_batched": flag(is_grads_batched) or None,
        "materialize_grads": flag(materialize_grads) or None,
    }
    return Arguments(
        given,
        read_argument("inputs", "x", inputs),
        read_grad_outputs("grad_outputs", grad_outputs, given),
        {name: value for name, value in options.items() if value is not None},
        site=site,
        frames=() if site is None else (site.frame,),
    )


def flag(option: Any) -> Any:
    """Return an option; for a tensor the bool that torch takes it for, or `NO_FLAG`."""
    if not isinstance(option, Tensor):
        return option
    is_one = option.numel() == 1 and not option.is_floating_point()
    return bool(option) if is_one else NO_FLAG


def read_grad_outputs(name: str, argument: Any, outputs: Argument) -> Argument:
    """Read grad_outputs; for several outputs ``None`` becomes a ``None`` for each."""
    if argument is None and outputs.several:
        argument = (None,) * len(outputs.values)
    return read_argument(name, "v", argument)


def read_argument(name: str, letter: str, argument: Any) -> Argument:
    """Read one argument.

    Args:
        name: Its name in the call.
        letter: Its letter in the code of an explanation.
        argument: A tensor, a gradient edge, several of them, or anything else.
    """
    if is_differentiable(argument) or (letter == "v" and argument is None):
        return Argument(name, letter, (argument,), alone=f"{name}[0]")
    if letter == "x" and _is_dict(argument):
        keys, values = tuple(argument), tuple(argument.values())
        return Argument(name, letter, values, keys, several=True)
    if _opens(argument):
        return Argument(name, letter, tuple(argument), several=True)
    return Argument(name, letter, (argument,), alone=name)


def is_differentiable(value: Any) -> bool:
    """Tell whether a value may be an output or input: a tensor or a gradient edge."""
    overrides = cast(Any, torch.overrides)
    is_tensor = overrides.is_tensor_like(value) and not isinstance(value, type)
    return is_tensor or isinstance(value, GradientEdge)


def form_of(output: Tensor | GradientEdge) -> Form | None:
    """Return the shape, dtype and device that a gradient of `output` has.

    Returns:
        ``None`` for a nested tensor, whose shape is no tuple of numbers.
    """
    known: Any = output
    if isinstance(output, GradientEdge):
        known = forms_at(output.node)[output.output_nr]
    is_nested = known.is_nested if known is output else known.is_nested_tensor
    if is_nested:
        return None
    return Form(tuple(known.shape), known.dtype, known.device)


def shape_of(value: Any) -> Shape | None:
    """Return the shape of an entry; ``None`` if it is nested, or not a tensor."""
    form = form_of(value) if isinstance(value, Tensor | GradientEdge) else None
    return None if form is None else form.shape


def _is_dict(argument: Any) -> bool:
    return type(argument) is dict  # torch opens no subclass of it


def _opens(argument: Any) -> bool:
    """Tell whether an argument is a collection, whose elements become the entries."""
    if isinstance(argument, nn.Module) and not isinstance(argument, nn.ParameterList):
        return False
    if isinstance(argument, str | bytes | Mapping) or hasattr(argument, "__array__"):
        return False
    return isinstance(argument, Iterable)


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``: ``float32``."""
    return str(dtype).removeprefix("torch.")

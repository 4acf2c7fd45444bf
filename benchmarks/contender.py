"""The common interface of all ways of recording.

Each says how it is used and how its recording is read, so that the tests can compare
all of them with the same gradients.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from benchmarks.nets import Net

Attach = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclass
class Seen:
    """What was recorded of one call, tuples throughout."""

    args: tuple[Any, ...]
    output: tuple[Any, ...]
    grad_output: tuple[Any, ...]
    grad_input_share: tuple[Any, ...] | None = None
    grad_input_total: tuple[Any, ...] | None = None


@dataclass
class SeenAll:
    """What was recorded of one step: calls by module, gradients by parameter."""

    calls: dict[str, Seen] = field(default_factory=dict)
    param_grads: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """A way of recording."""

    name: str
    records: str
    """What it records, in words."""
    use: Callable[[Net], Any]
    """Everything for one step: attach, step, remove. Returns what was recorded."""
    read: Callable[[Any], SeenAll] = lambda _recorded: SeenAll()
    attach: Attach | None = None
    """The hooks alone; ``None`` if the contender runs the model itself."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """What is set up around its turns, and not timed."""
    every: int = 1
    """It takes its turn once every so many rounds."""
    absent: str = ""
    """Why it cannot be used here, or ``""``."""
    peer: bool = False
    """Whether it is another project's: then an error counts as a result."""
    version: str = ""


def with_hooks(name: str, records: str, attach: Attach, **more: Any) -> Contender:
    """Return a contender that attaches hooks to a model, which its caller then runs."""

    def use(net: Net) -> Any:
        with attach(net.model) as recorded:
            net.step()
        return recorded

    return Contender(name, records, use, attach=attach, **more)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a single value as a tuple of one."""
    return value if isinstance(value, tuple) else (value,)

"""The use of a parameter: the one operation that it goes into."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.jacobian.form import form_at


@dataclass(frozen=True)
class Use:
    """The one operation that a parameter goes into.

    Attributes:
        point: The number of the parameter.
        node: The operation's node.
        index: Which of the things that go in it is.
        turned: Whether it is transposed before.
        seen_as: The shape that what comes out is given afterwards, if it is.
    """

    point: int
    node: Any
    index: int
    turned: bool
    seen_as: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what comes out."""
        return shape_of(self.node)

    @property
    def of_rows(self) -> bool:
        """Whether the first axis of what comes out is samples and tokens in one."""
        return self.node.name() in ("AddmmBackward0", "MmBackward0")

    def saved(self, name: str) -> Any:
        """Return what the node has saved, without its graph."""
        value = getattr(self.node, "_saved_" + name)
        return value.detach() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Samples:
    """Where the samples are in what comes out of an operation, and what goes in.

    Attributes:
        batch: How many there are.
        axis: 0, or 1 where tokens come first.
        of_rows: Whether the first axis holds the tokens too.
    """

    batch: int
    axis: int
    of_rows: bool

    def first(self, tensor: Tensor, before: int = 0) -> Tensor:
        """Return a tensor whose samples come first, after some other axes."""
        if self.of_rows:
            shape = list(tensor.shape)
            tokens = shape[before] // self.batch
            sizes = (self.batch, tokens) if self.axis == 0 else (tokens, self.batch)
            shape[before : before + 1] = sizes
            tensor = tensor.reshape(shape)
        return tensor.movedim(before + self.axis, before)


def shape_of(node: Node) -> tuple[int, ...]:
    """Return the shape of what comes out of an operation."""
    return form_at((node, 0)).shape

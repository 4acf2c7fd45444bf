"""The use of a parameter: the one operation that it goes into."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradlib.jacobian.form import form_at


@dataclass(frozen=True)
class Use:
    """The one operation that a parameter goes into.

    Attributes:
        point: The number of the parameter among the graph's points.
        node: The operation's node.
        index: Which input of the operation the parameter is.
        turned: Whether the parameter is transposed first.
        seen_as: The shape that a view gives the output afterwards; ``()`` for none.
    """

    point: int
    node: Any
    index: int
    turned: bool
    seen_as: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the operation's output."""
        return form_at((self.node, 0)).shape

    @property
    def of_rows(self) -> bool:
        """Whether the first axis of the output holds samples and tokens together."""
        return self.node.name() in ("AddmmBackward0", "MmBackward0")

    def saved(self, name: str) -> Any:
        """Return a value that the node has saved, by its name, without its graph."""
        value = getattr(self.node, "_saved_" + name)
        return value.detach() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Samples:
    """The layout of the samples in the output and input of an operation.

    Attributes:
        batch: How many samples there are.
        axis: 0 if samples come first, 1 if tokens do.
        of_rows: Whether the first axis holds samples and tokens together.
    """

    batch: int
    axis: int
    of_rows: bool

    def first(self, tensor: Tensor, before: int = 0) -> Tensor:
        """Return a tensor with the samples moved to the axis `before`."""
        if self.of_rows:
            shape = list(tensor.shape)
            tokens = shape[before] // self.batch
            sizes = (self.batch, tokens) if self.axis == 0 else (tokens, self.batch)
            shape[before : before + 1] = sizes
            tensor = tensor.reshape(shape)
        return tensor.movedim(before + self.axis, before)

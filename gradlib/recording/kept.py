"""A parameter, a buffer or another tensor of a module, as it was."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from gradlib.private import data_address, is_copy_on_write
from gradlib.values import keep, same_values


class Kept:
    """A tensor as it was."""

    __slots__ = (
        "_address",
        "_is_copy",
        "_shares_memory",
        "_version",
        "requires_grad",
        "tensor",
        "value",
    )

    def __init__(self, tensor: Tensor) -> None:
        """Keep the value `tensor` has now."""
        self.tensor = tensor
        self._version = UNKNOWN if tensor.is_inference() else tensor._version
        self.requires_grad = tensor.requires_grad
        self._keep()

    @property
    def has_signs(self) -> bool:
        """Whether its version, its address and the like show every change."""
        return (
            self._version != UNKNOWN and not self._is_copy and self._address is not None
        )

    def was_written_to(self) -> bool:
        """Tell whether the tensor's version says so; `has_changed` sees more."""
        return self._version not in (UNKNOWN, self.tensor._version)

    def has_changed(self) -> bool:
        """Tell whether the tensor is not what was kept."""
        tensor = self.tensor
        if self._version == UNKNOWN:
            return False
        if (
            self._version != tensor._version
            or self.requires_grad != tensor.requires_grad
        ):
            return True
        if self._is_copy:  # a look at another device's memory would wait for the device
            return tensor.device.type != "cpu" or not same_values(tensor, self.value)
        if not self._shares_memory:
            return (
                tensor.dtype != self.value.dtype or address_of(tensor) != self._address
            )
        if is_copy_on_write(tensor):
            return False
        if not same_values(tensor, self.value):
            return True  # BatchNorm, fused optimizers, NumPy leave the version as it is
        self._keep()  # somebody asked for a pointer to its memory, and only read
        return False

    def _keep(self) -> None:
        tensor = self.tensor
        # What is not learned may be given another size, which ends in an error inside
        # torch where memory is shared until somebody writes.
        learned = isinstance(tensor, nn.Parameter)
        self._is_copy = not learned and tensor.numel() <= SMALL
        self.value = tensor.detach().clone() if self._is_copy else keep(tensor)
        # Until somebody writes to one of the two, behind torch's back too.
        self._shares_memory = not self._is_copy and _shares_memory(tensor)
        self._address = address_of(tensor)  # tensor.data = other changes no version


class AllKept:
    """Many tensors as they were: one look tells whether any of them has changed.

    There is no loop in Python: it is asked at each forward, and mostly says no.
    """

    def __init__(self, several: Iterable[Kept]) -> None:
        """Take what was kept of each."""
        several = list(several)
        self._tensors = [kept.tensor for kept in several]
        self._signs: list[Any] | None = None  # where they do not tell all
        if all(kept.has_signs for kept in several):
            self._signs = _signs_of(self._tensors)

    def are_the_same(self) -> bool:
        """Tell whether all are known to be what was kept."""
        try:
            return self._signs is not None and self._signs == _signs_of(self._tensors)
        except (RuntimeError, NotImplementedError):  # one has lost its memory
            return False


def _signs_of(tensors: Sequence[Tensor]) -> list[Any]:
    # Who writes to memory that is shared with what was kept moves the tensor.
    return [*map(_SIGNS, tensors), *map(data_address, tensors)]


_SIGNS = attrgetter("_version", "requires_grad", "dtype")

UNKNOWN = -1
"""The version of an inference tensor: nothing tells if it is overwritten."""

SMALL = 2**12
"""Up to how many entries a buffer is copied."""


def _shares_memory(tensor: Tensor) -> bool:
    """Tell whether a lazy clone is one: not so where `keep` had to copy."""
    try:
        return is_copy_on_write(tensor)
    except NotImplementedError:  # no memory of its own, as inside torch.func
        return False


def address_of(tensor: Tensor) -> int | None:
    """Return where a tensor's data begins; ``None`` for one that has no such place."""
    try:
        return data_address(tensor)
    except (RuntimeError, NotImplementedError):
        return None

"""A parameter, a buffer or another tensor of a module, as it was."""

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradlib.private.tensors import data_address, is_copy_on_write, memory_is_held
from gradlib.subclasses import is_of_other_class
from gradlib.values import copied, keep, place_of, same_values


class Kept:
    """A tensor, and the value and version that it had."""

    __slots__ = (
        "_address",
        "_place",
        "_shares_memory",
        "is_copy",
        "requires_grad",
        "tensor",
        "value",
        "version",
    )

    def __init__(self, tensor: Tensor) -> None:
        """Keep the value `tensor` has now."""
        self.tensor = tensor
        self.version = version_of(tensor)
        self.requires_grad = tensor.requires_grad
        self._keep()

    def was_written_to(self) -> bool:
        """Tell whether the tensor's version, address or copy shows a write.

        This is fast for a tensor that was not copied. `has_changed` sees more, and
        tells a write from a read.
        """
        tensor = self.tensor
        if self.version == UNKNOWN:
            return False
        if self.version != tensor._version:
            return True
        if self.is_copy:  # a write through ``.data`` leaves address and version alone
            return tensor.device.type == "cpu" and not same_values(tensor, self.value)
        return self._address is not None and data_address(tensor) != self._address

    def has_changed(self, *, may_wait: bool = False) -> bool:
        """Tell whether the tensor's value or ``requires_grad`` is not the kept one.

        Args:
            may_wait: Whether to read the memory of another device too, which waits for
                that device. Otherwise a tensor copied there counts as changed.
        """
        tensor = self.tensor
        if self.version == UNKNOWN:
            return False
        if (
            self.version != tensor._version
            or self.requires_grad != tensor.requires_grad
        ):
            return True
        if self.is_copy:
            looks = may_wait or tensor.device.type == "cpu"
            return not (looks and same_values(tensor, self.value))
        if not self._shares_memory:
            return place_of(tensor) != self._place
        if is_copy_on_write(tensor) and place_of(tensor) == self._place_as_kept():
            return False
        if not same_values(tensor, self.value):
            return True  # BatchNorm, fused optimizers, NumPy leave the version as it is
        self._keep()  # its memory was copied for a pointer through which nobody wrote
        return False

    def _place_as_kept(self) -> int:
        """Return the place that the tensor had, computed only when it is needed."""
        if self._place is None:  # nobody writes to the lazy clone, so it has not moved
            self._place = place_of(self.value)
        return self._place

    def _keep(self) -> None:
        tensor = self.tensor
        # A tensor that is no parameter may be resized, and torch raises an error inside
        # as it resizes lazily shared memory.
        learned = isinstance(tensor, nn.Parameter)
        # On a GPU nothing shows that BatchNorm has written to its statistics.
        of_features = tensor.is_cuda and tensor.ndim == 1
        small = not learned and (of_features or tensor.numel() <= SMALL)
        self.is_copy = small or memory_is_held(tensor)
        self.value = copied(tensor) if self.is_copy else keep(tensor)
        try:
            self._address = data_address(tensor)
            # They share until one of the two is written to, behind torch's back too.
            # Only a lazy clone is copy-on-write, and it shares the tensor's memory.
            self._shares_memory = not self.is_copy and is_copy_on_write(self.value)
        except RuntimeError:  # the tensor has no such memory, as a sparse one
            self._address, self._shares_memory = None, False
        # The place may change while the version stays. A lazy clone has the same one.
        self._place = None if self._shares_memory else place_of(tensor)


UNKNOWN = -1
"""The version of an inference tensor, which counts no writes."""


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version, which grows with each write that torch sees."""
    return UNKNOWN if tensor.is_inference() else tensor._version


SMALL = 2**12
"""A buffer of at most this many entries is copied."""


def refuses_to_be_kept(tensor: Tensor) -> bool:
    """Tell whether a tensor's class raises as its value is kept or compared."""
    if not is_of_other_class(tensor) or is_lazy(tensor):
        return False
    try:
        Kept(tensor).has_changed()
    except Exception:
        return True
    return False

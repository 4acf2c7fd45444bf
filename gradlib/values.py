"""Keeping a tensor's value as it is now, at the price of a copy only if it changes."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from gradlib.private.modes import (
    dispatch_modes,
    enable_grad,
    grad_is_enabled,
    saved_are_known_by_address,
    unseen,
)
from gradlib.private.tensors import copy_of_quantized, data_address, lazy_clone

Keep: TypeAlias = Callable[[Tensor], Any]
"""A function that returns what to keep of a tensor."""


def keep(tensor: Tensor) -> Tensor:
    """Return a detached tensor that keeps the value `tensor` has now.

    Later in-place operations on `tensor`, or on a view of it, do not reach the result.

    Args:
        tensor: Any tensor.

    Returns:
        A tensor of the same shape, dtype and device, without autograd history. It
        shares memory with `tensor` until one of the two is written to, where torch can
        do that, and is a copy otherwise.
    """
    if not (tensor.requires_grad and grad_is_enabled()):
        return clone(tensor)
    try:  # an interrupt may come right after the next line
        enable_grad(False)  # in a third of the time of detach()
        return clone(tensor)
    finally:
        enable_grad(True)


def clone(tensor: Tensor) -> Tensor:
    """Return a differentiable copy that shares the tensor's memory where it can."""
    if tensor.is_cuda or tensor.is_quantized or dispatch_modes():
        return _clone_of_odd(tensor)
    try:
        return lazy_clone(tensor)
    except Exception:
        # Memory that torch does not own (NumPy's, shared memory), another layout, or a
        # tensor subclass that does not support it, each with its own exception.
        return _copy(tensor)


def _clone_of_odd(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        # A write would make a lazy clone copy in the default stream, whichever stream
        # writes, and a replayed CUDA graph would write without a copy. See
        # copy_data() in https://github.com/pytorch/pytorch/blob/001074d25084fdb87a799823e395a50f5ec044d3/c10/cuda/CUDACachingAllocator.cpp
        with unseen():
            return _copy(tensor)
    if tensor.is_quantized:  # lazy_clone() would crash the process
        return copy_of_quantized(tensor)
    if saved_are_known_by_address():  # a write to a lazy clone's memory moves it
        return tensor.clone()
    with unseen():
        return clone(tensor)


def copied(tensor: Tensor) -> Tensor:
    """Return a detached copy.

    An expanded tensor is copied as it was before: an expanded mask is large.
    """
    with unseen():
        return _copy(tensor.detach())


def _copy(tensor: Tensor) -> Tensor:
    part = in_memory(tensor)
    return tensor.clone() if part is tensor else part.clone().expand(tensor.shape)


def in_memory(tensor: Tensor) -> Tensor:
    """Return an expanded tensor as it was before, any other as it is."""
    if tensor.layout != torch.strided or tensor.is_nested or 0 not in tensor.stride():
        return tensor
    part = tensor
    for axis, step in enumerate(tensor.stride()):
        if not step and tensor.size(axis) > 1:
            part = part.narrow(axis, 0, 1)
    return part


def same_values(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have the same shape, kind and values.

    Args:
        a: Any tensor: dense, sparse or nested.
        b: Another one.

    Returns:
        ``False`` also where torch cannot tell, as for some dtypes. NaN equals NaN.
    """
    with unseen():
        return _are_same(a, b)


def _are_same(a: Tensor, b: Tensor) -> bool:
    if _kind(a) != _kind(b):
        return False
    if a.is_nested:
        a, b = a.detach(), b.detach()
        parts, others = a.unbind(), b.unbind()
        return len(parts) == len(others) and all(map(_are_same, parts, others))
    if a.shape != b.shape:  # torch.allclose would broadcast them
        return False
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    try:
        if torch.equal(a, b):
            return True
        if not (a.is_floating_point() or a.is_complex()):
            return False
        total = a.detach().sum().item()
        return total != total and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    except NotImplementedError:
        return False


def place_of(tensor: Tensor) -> int:
    """Return a number for the memory that a tensor shows, and for how it shows it.

    ``tensor.data = other`` changes the number. For a tensor without such a place, as a
    sparse one, it depends on the dtype and layout only.
    """
    # One number, not five objects, for each of many tensors: the more objects, the
    # longer the garbage collector takes.
    try:
        place = (
            data_address(tensor),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
        )
        return hash(place)
    except (RuntimeError, TypeError):
        return hash((tensor.dtype, tensor.layout))


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tensor.layout, tensor.is_nested


class Transfers:
    """Copies from GPUs to the CPU that may still run; wait before reading any."""

    def __init__(self) -> None:
        """Begin with none."""
        # By device: how many copies were begun, and how many were waited for.
        self._begun: defaultdict[torch.device, int] = defaultdict(int)
        self._made: defaultdict[torch.device, int] = defaultdict(int)

    def moved(self, tensor: Tensor, device: torch.device | str | int) -> Tensor:
        """Return a tensor on a device; itself if it is there already.

        A copy from a GPU to the CPU goes into pinned memory, in the current stream.
        """
        if tensor.is_meta:  # no values to move
            return tensor
        part = in_memory(tensor)
        result = part.to(device, non_blocking=tensor.is_cuda)
        if result is part:
            return tensor
        if tensor.is_cuda and result.device.type == "cpu":
            self._begun[tensor.device] += 1
        return result if part is tensor else result.expand(tensor.shape)

    def wait(self) -> None:
        """Wait until all copies are made."""
        for device, begun in self._begun.copy().items():
            if self._made[device] < begun:  # set after the wait: other threads wait too
                torch.cuda.synchronize(device)
                self._made[device] = max(begun, self._made[device])


def keeper(
    reduce: Callable[[Tensor], Any] | None,
    device: torch.device | str | int | None,
    copies: Transfers,
) -> Keep:
    """Return the function that returns what to keep of a tensor.

    Args:
        reduce: A function of the tensor, whose result is kept instead.
        device: Where kept tensors go.
        copies: Makes the copies there, and is waited for before they are read.
    """
    if reduce is None and device is None:
        return keep

    def kept(tensor: Tensor) -> Any:
        with unseen():
            result = tensor.detach() if reduce is None else _reduced(reduce, tensor)
            if device is None or not isinstance(result, Tensor):
                return result
            moved = copies.moved(result, device)
            if moved is result:
                return keep(tensor) if reduce is None else result
        cast(Any, moved).came_from = result.device
        return moved

    return kept


def _reduced(reduce: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    value = keep(tensor)
    try:
        return reduce(value)
    except Exception as error:
        cast(Any, error).is_of_reduce = True  # not of the tensor's class
        raise


def came_from(kept: Tensor) -> torch.device:
    """Return the device that a kept tensor was on before it was moved."""
    return getattr(kept, "came_from", kept.device)

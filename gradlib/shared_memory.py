"""Which memory tensors show, and which of them show the same."""

import torch
from torch import Tensor


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a tensor, one object for all that share it."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    try:
        return tensor.untyped_storage()
    except (RuntimeError, ValueError):  # it has none, or is lazy
        return None


def overlap(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors of one storage share the memory of some entry."""
    if a.dtype != b.dtype:  # entries of the one lie between those of the other
        return True
    far = max(it.storage_offset() + extent(it) for it in (a, b))
    met = torch.zeros(far, dtype=torch.bool, device="cpu")
    met.as_strided(a.size(), a.stride(), a.storage_offset()).fill_(True)
    return bool(met.as_strided(b.size(), b.stride(), b.storage_offset()).any())


def same_part(made: Tensor, whole: Tensor, part: Tensor) -> Tensor | None:
    """Return the part of `made`, a copy of `whole`, that `part` shows of `whole`.

    Returns:
        ``None`` where it shows other memory too, or the copy is laid out otherwise.
    """
    shift = part.storage_offset() - whole.storage_offset()
    covers = (
        whole.dtype == part.dtype
        and not (part.is_conj() or part.is_neg())
        and whole.numel() == extent(whole)  # it has no gaps
        and 0 <= shift <= extent(whole) - extent(part)
    )
    is_like = made.size() == whole.size() and made.stride() == whole.stride()
    if not (covers and is_like):
        return None
    offset = made.storage_offset() + shift
    return made.detach().as_strided(part.size(), part.stride(), offset)


def extent(tensor: Tensor) -> int:
    """Return how many entries lie in memory from a tensor's first to its last."""
    sizes = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in sizes) if tensor.numel() else 0

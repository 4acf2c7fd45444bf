"""Whether a tensor is one of real numbers, whose derivatives torch computes."""

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from gradlib.errors import NotDifferentiableDtypeError
from gradlib.private.tensors import has_values


def is_real(tensor: Tensor) -> bool:
    """Tell whether `require_real` takes a tensor."""
    is_floating = tensor.is_floating_point() and tensor.itemsize > 1
    return is_floating and is_dense(tensor) and has_values(tensor)


def require_real(tensor: Tensor, name: str, fix: str) -> None:
    """Raise unless a tensor is dense, has values, and a real floating dtype.

    Args:
        tensor: Any tensor.
        name: What messages call it.
        fix: What to do where it holds integers.

    Raises:
        NotDifferentiableDtypeError: It does not.
    """
    if not is_dense(tensor) or not has_values(tensor):
        raise NotDifferentiableDtypeError(
            f"{name} is sparse, nested, masked, fake or on the device meta, and must "
            "be dense and have values: .to_dense(), to_padded_tensor() or .to_tensor() "
            "may make it so."
        )
    if tensor.is_complex():
        raise NotDifferentiableDtypeError(
            f"{name} has dtype {tensor.dtype}, shape {list(tensor.shape)}. A complex "
            "function has a Jacobian only where it is holomorphic, and nobody can tell "
            "that it is. Pass torch.view_as_real of it, and return that of the result: "
            "then real and imaginary part are two entries each."
        )
    if not tensor.is_floating_point():
        raise NotDifferentiableDtypeError(
            f"{name} has dtype {tensor.dtype}, shape {list(tensor.shape)}, and there "
            f"is no derivative of integers or with respect to them. {fix} If it stands "
            "for real numbers, convert it with .float() first."
        )
    if tensor.itemsize == 1:  # a float8
        raise NotDifferentiableDtypeError(
            f"{name} has dtype {tensor.dtype}, with which torch hardly computes. "
            "Convert it with .float() first."
        )


def is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor is strided, neither sparse, nested nor masked."""
    is_strided = tensor.layout == torch.strided and not tensor.is_nested
    return is_strided and not isinstance(tensor, MaskedTensor)

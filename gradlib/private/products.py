"""How torch multiplies."""

# Private names are what this folder is for, and torch's stubs leave some of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

_C = cast(Any, torch._C)

# Whether this build has oneDNN with the operation below (2.13 has it, other releases
# may), and whether torch may use it now.
_has_onednn_linear = torch.backends.mkldnn.is_available() and hasattr(
    torch.ops.mkldnn, "_linear_pointwise"
)
_onednn_is_allowed: Callable[[], bool] = _C._get_mkldnn_enabled


def onednn_is_enabled() -> bool:
    """Tell whether `onednn_linear` may be used."""
    return _has_onednn_linear and _onednn_is_allowed()


def onednn_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, then: str = "none"
) -> Tensor:
    """Do what ``torch.nn.functional.linear`` does, by oneDNN and without a graph.

    Args:
        x: Contiguous, or of two dimensions, in float32, on the CPU.
        weight: The same, but laid out in any way.
        bias: What is added; ``None`` for nothing.
        then: The function of each entry, such as ``"tanh"``; ``"none"`` for none.
    """
    if bias is not None:
        bias = bias.contiguous()  # oneDNN ignores its strides
    of_onednn: Any = torch.ops.mkldnn
    return of_onednn._linear_pointwise.default(x, weight, bias, then, [], "")


def how_products_are_computed() -> tuple[object, ...]:
    """Return the settings of kernels and precision for float32 products on a GPU."""
    return tuple([it() for it in _PRODUCTS])


# Releases with newer settings refuse to read the older ones once the newer were used.
_precision_of: Any = getattr(_C, "_get_fp32_precision_getter", None)
_PRODUCTS: list[Callable[[], object]] = [
    *(
        (_C._get_cublas_allow_tf32, _C._get_cudnn_allow_tf32)
        if _precision_of is None
        else (partial(_precision_of, "cuda", it) for it in ("matmul", "conv"))
    ),
    _C._get_cudnn_enabled,
    _C._get_cudnn_benchmark,
    _C._get_cudnn_deterministic,
    _C._get_deterministic_algorithms,
]

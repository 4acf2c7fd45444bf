"""The kernels that only GPUs have, for every test of the folder `fast`."""

from collections.abc import Iterator

import pytest
import torch

from . import operations


@pytest.fixture(scope="module", autouse=True)
def _kernels_of_a_gpu() -> Iterator[None]:  # pyright: ignore (pytest uses it)
    """Bring a CPU the kernels that only GPUs have, in float64 too."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", operations.attend, "CPU")
    library.impl(
        "_scaled_dot_product_efficient_attention_backward",
        operations.attend_back,
        "CPU",
    )
    library.impl("_fused_rms_norm", operations.rms_norm, "CPU")
    library.impl("_fused_rms_norm_backward", operations.rms_norm_back, "CPU")
    yield
    library._destroy()

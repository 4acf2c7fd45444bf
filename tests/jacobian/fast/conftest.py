"""What holds for every test of the folder `fast`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradlib.jacobian.fast.chains import find, recalled
from gradlib.jacobian.fast.chains.assembled import found_on, is_for_chains
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.layers import Joined

from . import operations


@pytest.fixture(scope="module", autouse=True)
def _kernels_of_a_gpu() -> Iterator[None]:
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


@pytest.fixture(autouse=True)
def _all_digits() -> Iterator[None]:
    """Have the convolutions of a GPU multiply with all digits of float32."""
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture(autouse=True)
def _every_chain_is_held_against_a_fresh_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hold what is recalled of a chain against what is found anew, at every call."""
    real = recalled.chain_of

    def held(fn: Any, inputs: tuple[Any, ...]) -> Chain | None:
        if not is_for_chains(inputs):
            return real(fn, inputs)
        fresh, _ = found_on(fn, inputs[0]) or (None, None)
        for _ in range(3):  # met, noted, and recalled; or recalled as it was before
            chain = real(fn, inputs)
            plain = chain and chain._replace(replays=None)
            assert are_same(plain, fresh), "what is recalled is not what is there"
        return fresh

    monkeypatch.setattr(recalled, "TRIES", 10**9)
    monkeypatch.setattr(find, "chain_of", held)


def are_same(one: Any, other: Any) -> bool:
    """Tell whether two chains, or parts of them, are the same, by identity."""
    if isinstance(one, (Chain, Joined, tuple, list)):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(map(are_same, one, other))
        )
    if type(one) in (int, float, bool, str):
        return type(one) is type(other) and repr(one) == repr(other)
    is_eye = type(one) is torch.Tensor and type(other) is torch.Tensor
    if is_eye and one is not other:  # made for the rows that come out of maps
        return torch.equal(one, other)
    return one is other

"""The memory of a result is nobody else's."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import gradlib

from .points import points, require_close


def test_no_two_blocks_share_memory() -> None:
    # Their gradients do: those of a sum are one tensor.
    x, y = points(4, 3), points(4, 3)
    of_x, of_y = gradlib.per_sample_jacobian(
        lambda x, y: (x + y).sin(), x, y, argnums=(0, 1), mode="reverse"
    )
    of_x.zero_()
    torch.testing.assert_close(of_y, (x + y).cos().diag_embed())


def test_no_two_entries_share_memory() -> None:
    # The gradient of a sum is one number, seen several times.
    weight = points(6, 6)

    def fn(x: Tensor) -> Tensor:
        more = torch.ones(len(x), 5, dtype=x.dtype, device=x.device)
        return torch.cat([x.sum(1, keepdim=True), more], 1) @ weight

    x = points(4, 6)
    rows = gradlib.per_sample_jacobian(fn, x, mode="reverse")
    rows[0, 0, 0] = 7
    assert rows[0, 0, 1] != 7
    truth = gradlib.per_sample_jacobian(fn, x, mode="loop")
    torch.testing.assert_close(rows[1:], truth[1:])


@pytest.mark.parametrize("mode", ["reverse", "loop"])
def test_what_a_backward_returns_is_copied(mode: str) -> None:
    kept = points(1, 3)

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return (x * kept).sum(1)

        @staticmethod
        def backward(ctx: Any, *_grads: Tensor) -> Tensor:
            del ctx
            return kept

    before = kept.clone()
    rows = gradlib.per_sample_jacobian(
        cast(Any, Same.apply), points(1, 3), mode=mode, check=False
    )
    rows.zero_()
    assert torch.equal(kept, before)


class GivesItsWeight(torch.autograd.Function):
    """x · w, whose backward hands out the saved weight itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (x * weight).sum(1)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        return ctx.saved_tensors[0], None


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_result_is_no_weight(batch: int, create_graph: bool) -> None:
    weight = points(batch, 3).requires_grad_()
    x = points(batch, 3)

    def fn(x: Tensor) -> Tensor:
        return cast(Any, GivesItsWeight.apply)(x, weight)

    for mode in ("reverse", "loop", "auto"):
        ours = gradlib.per_sample_jacobian(
            fn, x, mode=mode, create_graph=create_graph, check=False
        )
        require_close(ours.detach(), weight.detach())
        assert memory(ours) != memory(weight)


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("mode", ["reverse", "forward", "loop", "auto"])
def test_the_result_shares_no_memory(mode: str, create_graph: bool) -> None:
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    x = points(1, 3)
    fns: list[Callable[..., Any]] = [
        model,
        lambda x: x,
        lambda x: x * model.weight,
        lambda x: (x * model.weight).sum(1),
        lambda x: x.view_as(x),
    ]
    for fn in fns:
        before = model.weight.detach().clone()
        ours = gradlib.per_sample_jacobian(fn, x, mode=mode, create_graph=create_graph)
        assert memory(ours) not in {memory(it) for it in (x, model.weight)}
        with torch.no_grad():
            ours.mul_(7)
        assert torch.equal(model.weight, before)


def test_the_result_of_tensors_that_are_there_shares_no_memory() -> None:
    weight = points(1, 3).requires_grad_()
    x = points(1, 3).requires_grad_()
    for y in (cast(Any, GivesItsWeight.apply)(x, weight), (x * weight).sum(1)):
        for create_graph in (True, False):
            ours = gradlib.per_sample_jacobian_from_graph(
                y, x, create_graph=create_graph
            )
            assert memory(ours) not in {memory(it) for it in (x, y, weight)}


def test_blocks_share_no_memory_with_each_other() -> None:
    ours = gradlib.per_sample_jacobian(
        lambda x, y: x + y, points(2, 3), points(2, 3), argnums=(0, 1)
    )
    assert memory(ours[0]) != memory(ours[1])
    assert all(it.is_contiguous() for it in ours)

"""Outputs that do not depend on an input are named, or zero beside others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib import IndependentOutputError

from ..one_way import one_way
from .points import alone, points, require_close


def seen(x: Tensor) -> Tensor:
    """Return a view that requires grad, and has no graph."""
    with torch.no_grad():
        return x[:, :2]


APART: dict[str, Callable[[Tensor], Any]] = {
    "detached": lambda x: x.detach().sin(),
    "another one beside it": lambda x: (x.sin(), x.detach()),
    "a constant": lambda x: torch.ones(len(x), 2, requires_grad=True) * 2,
    "a cast to integers": lambda x: x.long().to(x),
    "NumPy": lambda x: torch.from_numpy(x.detach().cpu().numpy()).to(x),
    "item": lambda x: torch.tensor([it.item() for it in x[:, 0]], dtype=x.dtype),
    "a comparison": lambda x: (x > 0).to(x),
    "a view without a graph": seen,
    "such a view of what was computed": lambda x: (x.sin(), seen(2 * x)),
    "what such a view leads to": lambda x: (seen(x).sin(), x),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", APART)
def test_an_output_that_does_not_depend(name: str, check: bool) -> None:
    with pytest.raises(IndependentOutputError, match="output"):
        gradlib.per_sample_jacobian(APART[name], points(4, 3), check=check)


def test_an_input_that_nothing_depends_on() -> None:
    with pytest.raises(IndependentOutputError, match=r"inputs\[1\]"):
        gradlib.per_sample_jacobian(
            lambda x, _: x.sin(), points(4, 3), points(4, 2), argnums=(0, 1)
        )


def test_an_unused_tensor_beside_others_in_an_input_is_to_be_set_apart() -> None:
    given = {"x": points(4, 3), "y": points(4, 2)}
    own = r"inputs\[0\]\['y'\]\. See .* own: lambda x, y: fn\(\{'x': x, 'y': y\}\)\."
    with pytest.raises(IndependentOutputError, match=own):
        gradlib.per_sample_jacobian(lambda it: it["x"].sin(), given)
    with pytest.raises(IndependentOutputError, match="Leave it out, or see"):
        gradlib.per_sample_jacobian(
            lambda x, _: x.sin(), points(4, 3), [points(4, 2)], argnums=(0, 1)
        )


def test_an_output_that_is_there_already_and_does_not_depend() -> None:
    x, y = points(4, 3).requires_grad_(), points(4, 3).requires_grad_()
    with pytest.raises(IndependentOutputError):
        gradlib.per_sample_jacobian_from_graph(x.sin(), y)


def test_an_input_that_is_a_view_without_a_graph() -> None:
    x = points(4, 3).requires_grad_()
    view = seen(x)
    for output in (view, view.sin(), x.sin()):
        with pytest.raises(IndependentOutputError):
            gradlib.per_sample_jacobian_from_graph(output, view)
    with pytest.raises(gradlib.UnusedInputError):
        gradlib.grad(view.sum(), view)


def test_an_input_that_was_changed_in_place_since_is_named() -> None:
    x = points(4, 3).requires_grad_()
    h, other = 2 * x, 2 * x
    y = h.sin()
    h.add_(1)
    with pytest.raises(IndependentOutputError, match="inputs was changed in place"):
        gradlib.per_sample_jacobian_from_graph(y, h)
    with pytest.raises(
        IndependentOutputError, match=r"inputs\[1\] was changed in place"
    ):
        gradlib.per_sample_jacobian_from_graph(y * other, (other, h))


@pytest.mark.parametrize("beside", [True, False])
def test_an_output_of_the_other_part_alone(beside: bool) -> None:
    # One node made both parts, so to reach it is not to reach the part asked for.
    ours, other = (points(4, 6).requires_grad_() * 2).chunk(2, 1)
    outputs = (ours.sin(), other.sin()) if beside else other.sin()
    with pytest.raises(IndependentOutputError, match="output"):
        gradlib.per_sample_jacobian_from_graph(outputs, ours)


def test_both_parts_of_one_node() -> None:
    parts = (points(4, 6).requires_grad_() * 2).chunk(2, 1)
    rows = gradlib.per_sample_jacobian_from_graph(parts[1].sin() * 3 + parts[0], parts)
    torch.testing.assert_close(rows[0], torch.eye(3).to(rows[0]).expand(4, 3, 3))
    torch.testing.assert_close(rows[1], (3 * parts[1].cos()).diag_embed())


def test_blocks_that_are_zero_beside_others() -> None:
    x, y = points(4, 3), points(4, 2)
    ours = gradlib.per_sample_jacobian(
        lambda x, y: (x.sin(), y.sin()), x, y, argnums=(0, 1)
    )
    assert not ours[0][1].any()
    assert not ours[1][0].any()
    require_close(ours[0][0], torch.diag_embed(x.cos()))
    require_close(ours[1][1], torch.diag_embed(y.cos()))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("mode", ["auto", "reverse", "forward", "split", "loop"])
def test_a_backward_that_gives_nothing(mode: str, create_graph: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 4)).double()
    x, y = points(4, 3), points(4, 3)
    how: dict[str, Any] = {"mode": mode, "create_graph": create_graph}
    by_x, by_y = gradlib.per_sample_jacobian(
        lambda x, y: net(one_way(x, y)),
        *(x, y),
        argnums=(0, 1),
        check=False,
        **how,
    )
    require_close(by_x, alone(net, x * y) * y[:, None])
    assert by_y.shape == (4, 4, 3)
    assert not by_y.any()

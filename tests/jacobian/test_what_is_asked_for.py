"""The Jacobian by what is asked for: some inputs, nested or shared, or parameters."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.testing import assert_close

import gradlib
from gradlib import NoSuchWayError, progress

from .samples_alone import MODES, alone, require_close, three


def product_of_three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.sin(x)[:, :, None] * y.square()[:, None] + z[:, None, :2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("argnums", [(0, 1, 2), (2, 0), (1,), (-1, 0)])
def test_a_tuple_of_inputs(argnums: tuple[int, ...], mode: str) -> None:
    inputs = three()
    try:
        ours = gradlib.per_sample_jacobian(
            product_of_three, *inputs, argnums=argnums, mode=mode
        )
    except NoSuchWayError:
        assert mode == "split"  # nothing is passed by all
        return
    assert type(ours) is tuple
    [blocks] = alone(product_of_three, *inputs)
    for block, number in zip(ours, argnums, strict=True):
        require_close(block, blocks[number])


@pytest.mark.parametrize("number", [0, 1, 2, -1])
def test_one_input_of_several(number: int) -> None:
    inputs = three()
    ours = gradlib.per_sample_jacobian(product_of_three, *inputs, argnums=number)
    [blocks] = alone(product_of_three, *inputs)
    require_close(ours, blocks[number])


@dataclass
class Both:
    mean: Tensor
    rest: Any


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("mode", ["reverse", "forward", "loop", "auto"])
def test_nested_inputs_and_outputs(mode: str) -> None:
    x, y, z = three()

    def flat(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return product_of_three(x, y, z), (x.sum(1) * y[:, 0]).exp(), z @ z.new_ones(5)

    def nested(state: dict[str, Any], other: Both) -> Both:
        first, second, third = flat(state["x"], state["deep"][0], other.mean)
        return Both(first, {"a": (second, None), "b": Named(third, first)})

    ours = gradlib.per_sample_jacobian(
        nested, {"x": x, "deep": [y, 3]}, Both(z, "left as it is"),
        argnums=(0, 1), mode=mode,
    )  # fmt: skip
    first, second, third = alone(flat, x, y, z)
    assert type(ours) is Both
    assert list(ours.rest) == ["a", "b"]
    assert type(ours.rest["b"]) is Named
    assert ours.rest["a"][1] is None
    found = (ours.mean, ours.rest["a"][0], ours.rest["b"].x, ours.rest["b"].y)
    for made, blocks in zip(found, (first, second, third, first), strict=True):
        assert type(made) is tuple
        assert list(made[0]) == ["x", "deep"]
        assert type(made[0]["deep"]) is list
        assert made[0]["deep"][1] is None
        assert type(made[1]) is Both
        assert made[1].rest is None
        parts = (made[0]["x"], made[0]["deep"][0], made[1].mean)
        for part, block in zip(parts, blocks, strict=True):
            require_close(part, block)


def test_nested_tensors_that_are_there_already() -> None:
    x, y, z = (it.requires_grad_() for it in three())
    outputs = {"a": product_of_three(x, y, z), "b": [x.sum(1) + y[:, 0] + z[:, 0]]}
    ours = gradlib.per_sample_jacobian_from_graph(outputs, {"x": x, "rest": (y, z)})
    first, second = alone(
        lambda x, y, z: (product_of_three(x, y, z), x.sum(1) + y[:, 0] + z[:, 0]),
        x,
        y,
        z,
    )
    for made, blocks in ((ours["a"], first), (ours["b"][0], second)):
        parts = (made["x"], *made["rest"])
        for part, block in zip(parts, blocks, strict=True):
            require_close(part, block)
    outputs["a"].sum().backward()  # the graph is still there
    assert x.grad is not None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("argnums", [0, 1, (0, 1), (1, 0)])
def test_an_input_that_all_samples_share(
    argnums: int | tuple[int, ...], mode: str
) -> None:
    x, _, _ = three()
    torch.manual_seed(2)
    weight = torch.randn(3, 2, dtype=torch.float64)

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight) * weight.sum().cos()

    def call() -> Any:
        return gradlib.per_sample_jacobian(
            fn, x, weight, argnums=argnums, in_dims=(0, None), mode=mode
        )

    if mode == "split" and argnums != 0:
        with pytest.raises(NoSuchWayError):
            call()
        return
    [blocks] = alone(fn, x, weight, shared=[1])
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    ours = call()
    for i, number in enumerate(numbers):
        part = ours[i] if isinstance(argnums, tuple) else ours
        require_close(part, blocks[number])


@pytest.mark.parametrize("argnums", [0, (0, 1), (1, 0)])
def test_a_split_of_several_inputs(argnums: int | tuple[int, ...]) -> None:
    x, y, _ = three()
    last = torch.randn(2, 6, dtype=torch.float64)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (torch.tanh(x[:, :2] * y).sin() @ last).exp()

    ours = gradlib.per_sample_jacobian(fn, x, y, argnums=argnums, mode="split")
    [blocks] = alone(fn, x, y)
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    for i, number in enumerate(numbers):
        require_close(ours[i] if isinstance(argnums, tuple) else ours, blocks[number])


def test_a_split_that_cannot_be_says_why() -> None:
    x, y, _ = three()
    weight = torch.ones(3, 2, dtype=torch.float64)

    def split(fn: Callable[..., Any], *inputs: Tensor, **how: Any) -> None:
        with pytest.raises(NoSuchWayError) as planned:
            gradlib.plan_jacobian(fn, *inputs, mode="split", **how)
        with pytest.raises(NoSuchWayError, match=re.escape(str(planned.value))):
            gradlib.per_sample_jacobian(fn, *inputs, mode="split", **how)
        raise planned.value

    with pytest.raises(NoSuchWayError, match="fn has 2 outputs"):
        split(lambda x: (x.sin(), x.cos()), x)
    with pytest.raises(NoSuchWayError, match="all samples share"):
        split(torch.matmul, x, weight, argnums=1, in_dims=(0, None))
    with pytest.raises(NoSuchWayError, match="no tensor inside that all pass"):
        split(lambda x, y: x[:, :2] * y, x, y, argnums=(0, 1))


def test_in_dims_may_be_nested_as_the_inputs_are() -> None:
    x, y, _ = three()
    shared = torch.full((3,), 0.5, dtype=torch.float64)

    def fn(state: dict[str, Tensor], y: Tensor) -> Tensor:
        return (state["x"] * state["shared"]).sin() @ y.new_ones(3, 2) * y

    ours = gradlib.per_sample_jacobian(
        fn, {"x": x, "shared": shared}, y, in_dims=({"x": 0, "shared": None}, 0)
    )
    [[by_x, by_shared, _]] = alone(
        lambda x, shared, y: fn({"x": x, "shared": shared}, y),
        x, shared, y, shared=[1],
    )  # fmt: skip
    require_close(ours["x"], by_x)
    require_close(ours["shared"], by_shared)


def by_vmap(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the Jacobian by the parameters, as torch.func computes it."""

    def one(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, parameters, (row[None],))[0]

    asked = {name: it.detach() for name, it in model.named_parameters()}
    return cast(Any, vmap(jacrev(one), (None, 0))(asked, x))


@pytest.mark.parametrize("mode", ["reverse", "forward", "loop", "auto"])
@pytest.mark.parametrize("chunk", [1, 3, "auto"])
def test_parameters(mode: str, chunk: int | str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.GroupNorm(1, 3), nn.GELU(), nn.Flatten(), nn.Linear(6, 2)
    ).double()
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(
        model, x, argnums="parameters", mode=mode, chunk_size=chunk
    )
    theirs = by_vmap(model, x)
    assert list(ours) == list(theirs)
    for name, block in ours.items():
        require_close(block, theirs[name])


def test_parameters_of_a_narrow_net_and_a_frozen_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 9)).double()
    model[0].requires_grad_(False)
    x = torch.randn(3, 1, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(model, x, argnums="parameters")
    assert list(ours) == ["2.weight", "2.bias"]
    for name, block in ours.items():
        require_close(block, by_vmap(model, x)[name])


def test_parameters_that_are_tied_or_unused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, dtype=torch.float64)
            self.second = nn.Linear(3, 3, dtype=torch.float64)
            self.second.weight = self.first.weight
            self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    torch.manual_seed(0)
    model, x = Tied(), torch.randn(2, 3, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(model, x, argnums="parameters")
    theirs = by_vmap(model, x)
    assert list(ours) == list(theirs)
    for name, block in ours.items():
        require_close(block, theirs[name])
    assert not ours["unused"].any()


def test_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    x = torch.randn(3, 4)
    quiet = gradlib.per_sample_jacobian(torch.sin, x, progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    gradlib.per_sample_jacobian(torch.sin, x, mode="loop")
    assert capsys.readouterr().err == ""
    shown = gradlib.per_sample_jacobian(torch.sin, x, mode="loop", progress=True)
    told = capsys.readouterr().err
    assert told.startswith(
        "\rJacobian: 25%\rJacobian: 50%\rJacobian: 75%\rJacobian: 100%"
    )
    assert told.endswith(" \r")
    assert torch.equal(quiet, shown)


def test_numbers_of_numpy_are_as_good() -> None:
    x, weight, zero = torch.randn(3, 2), torch.randn(2, 2), numpy.int64(0)
    numbers: Any = {
        "argnums": (numpy.int64(1), zero),
        "in_dims": (zero, None),
        "chunk_size": numpy.int32(2),
        "max_bytes": numpy.int64(2**20),
    }
    plain: Any = {"argnums": (1, 0), "in_dims": (0, None)}
    found = gradlib.per_sample_jacobian(torch.matmul, x, weight, **numbers)
    wanted = gradlib.per_sample_jacobian(torch.matmul, x, weight, **plain)
    assert_close(found, wanted)
    assert gradlib.plan_jacobian(torch.matmul, x, weight, **numbers).chunk == 2
    one: Any = {"argnums": zero, "in_dims": zero, "max_bytes": numbers["max_bytes"]}
    wanted = gradlib.per_sample_jacobian(torch.sin, x)
    assert_close(gradlib.per_sample_jacobian(torch.sin, x, **one), wanted)
    x.requires_grad_()
    found = gradlib.per_sample_jacobian_from_graph(
        x.sin(), x, max_bytes=numbers["max_bytes"]
    )
    assert_close(found, wanted)

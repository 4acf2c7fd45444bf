"""A comparison has every error, and draws them module by module."""

import copy
from typing import Any, cast

import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor, nn

import gradlib


@pytest.fixture
def net() -> nn.Sequential:
    layers = [nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)]
    return nn.Sequential(*layers, nn.Linear(8, 2))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8)


def recorded(model: nn.Module, x: Tensor, steps: int = 1) -> gradlib.Recording:
    with gradlib.record(model) as recording:
        for _ in range(steps):
            model(x).float().square().mean().backward()
    return recording


def with_eps(net: nn.Sequential, eps: float) -> nn.Sequential:
    other = copy.deepcopy(net)
    norm = other[3]
    assert isinstance(norm, nn.LayerNorm)
    norm.eps = eps
    return other


def texts(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def lines(ax: Axes) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for line in ax.get_lines():
        across, down = (list(cast(Any, it)) for it in line.get_data())
        found[str(line.get_label())] = [*zip(across, down, strict=True)]
    return found


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a - b).norm() / max(a.norm(), b.norm())).item()


def test_errors_are_those_of_each_value_in_its_order(
    net: nn.Sequential, x: Tensor
) -> None:
    one, another = recorded(net, x), recorded(with_eps(net, 0.1), x)
    found = one.compare(another)
    output = [it for it in found.errors if it.field == "output"]
    assert [it.name for it in output] == ["0", "1", "2", "3", "4", ""]
    for it in output:
        error = relative(one[it.name].output, another[it.name].output)
        assert it.error == pytest.approx(error, rel=1e-6)
    grads = [it for it in found.errors if it.field == "grad_output[0]"]
    assert [it.name for it in grads] == ["", "4", "3", "2", "1", "0"]
    for it in grads:
        error = relative(one[it.name].grad_output[0], another[it.name].grad_output[0])
        assert it.error == pytest.approx(error, rel=1e-6)
    assert any(it is found.first for it in found.errors)
    assert found.errors.index(found.first) == found.errors.index(output[3])


def test_a_call_that_only_one_has_has_no_row(net: nn.Sequential, x: Tensor) -> None:
    other = copy.deepcopy(net)
    other[3] = nn.Sequential(other[3])
    (ax,) = recorded(other, x).compare(recorded(net, x)).plot().axes
    assert texts(ax) == ["0", "1", "2", "3", "4", "(root)"]


def test_the_errors_are_no_part_of_the_repr(net: nn.Sequential, x: Tensor) -> None:
    one = recorded(net, x)
    assert len(repr(one.compare(one))) < 200


def test_the_figure_shows_the_jump(net: nn.Sequential, x: Tensor) -> None:
    found = recorded(net, x).compare(recorded(with_eps(net, 0.1), x))
    (ax,) = found.plot().axes
    assert texts(ax) == ["0", "1", "2", "3", "4", "(root)"]
    drawn = lines(ax)
    errors = {it.name: it.error for it in found.errors if it.field == "output"}
    # A field that is equal has no marker.
    assert drawn["output"] == [(errors["3"], 3), (errors["4"], 4), (errors[""], 5)]
    assert [row for _, row in drawn["grad_output"]] == [0, 1, 2, 3, 4, 5]
    assert [row for _, row in drawn["param_grads"]] == [0, 1, 2, 3, 4]
    assert drawn["they part first"] == [(errors["3"], 3)]
    assert drawn["rtol 1.1e-05"][0][0] == pytest.approx(found.rtol)


def test_of_several_parameters_the_one_furthest_apart_is_drawn(
    net: nn.Sequential, x: Tensor
) -> None:
    found = recorded(net, x).compare(recorded(with_eps(net, 0.1), x))
    (ax,) = found.plot().axes
    for row in range(5):
        own = [
            it.error
            for it in found.errors
            if it.name == str(row) and it.field.startswith("param_grads")
        ]
        assert len(own) == 2
        assert (max(own), row) in lines(ax)["param_grads"]


def test_each_step_has_rows_of_its_own(net: nn.Sequential, x: Tensor) -> None:
    found = recorded(net, x, 2).compare(recorded(with_eps(net, 0.1), x, 2))
    (ax,) = found.plot().axes
    assert texts(ax)[5:8] == ["(root)", "0 (1)", "1 (1)"]


@pytest.mark.parametrize("keep", [["grad_output"], ["args", "param_grads"]])
def test_modules_stand_in_forward_order_whatever_was_kept(
    net: nn.Sequential, x: Tensor, keep: Any
) -> None:
    with gradlib.record(net, keep=keep) as one:
        for _ in range(2):
            net(x).square().mean().backward()
    (ax,) = one.compare(one).plot().axes
    calls = ["0", "1", "2", "3", "4", "(root)"]
    assert texts(ax) == [
        *calls,
        "0 (1)",
        "1 (1)",
        "2 (1)",
        "3 (1)",
        "4 (1)",
        "(root) (1)",
    ]


@pytest.mark.parametrize("rtol", [0.0, float("inf")])
def test_a_tolerance_that_has_no_place_leaves_the_axis_to_the_errors(
    net: nn.Sequential, x: Tensor, rtol: float
) -> None:
    found = recorded(net, x).compare(recorded(with_eps(net, 0.1), x), rtol=rtol)
    (ax,) = found.plot().axes
    errors = [it.error for it in found.errors if it.error]
    low, high = ax.get_xlim()
    assert min(errors) / 10 < low < high < max(errors) * 10
    assert not [label for label in lines(ax) if label.startswith("rtol")]


def test_two_passes_through_one_call_share_its_row(
    net: nn.Sequential, x: Tensor
) -> None:
    def twice(model: nn.Module) -> gradlib.Recording:
        with gradlib.record(model) as recording:
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        return recording

    found = twice(net).compare(twice(with_eps(net, 0.1)))
    fields = {it.field for it in found.errors if it.name == "4"}
    assert {"passes[0].grad_output[0]", "passes[1].grad_output[0]"} <= fields
    (ax,) = found.plot().axes
    assert [row for _, row in lines(ax)["grad_output"]] == [0, 1, 2, 3, 4, 5]


def test_equal_ones_leave_it_empty(net: nn.Sequential, x: Tensor) -> None:
    one = recorded(net, x)
    (ax,) = one.compare(one).plot().axes
    assert ax.get_title() == "the two are equal"


def test_what_differs_elsewhere_is_not_called_equal(x: Tensor) -> None:
    class First(nn.Module):
        def forward(self, x: Tensor, _unused: Tensor) -> Tensor:
            return x

    model = First()
    recordings: list[gradlib.Recording] = []
    for unused in torch.zeros(2), torch.ones(2):
        with gradlib.record(model) as recording:
            model(x, unused)
        recordings.append(recording)
    found = recordings[0].compare(recordings[1])
    assert found.first is not None
    assert found.first.field == "args[1]"
    (ax,) = found.plot().axes
    assert ax.get_title() == "nothing that is drawn here differs"


def test_equal_ones_are_called_so_whatever_was_kept(
    net: nn.Sequential, x: Tensor
) -> None:
    with gradlib.record(net, keep=["args"]) as one:
        net(x).sum().backward()
    (ax,) = one.compare(one).plot().axes
    assert ax.get_title() == "the two are equal"


def test_what_has_nothing_in_common_leaves_it_empty(
    net: nn.Sequential, x: Tensor
) -> None:
    renamed = nn.Sequential()
    renamed.add_module("only", nn.Linear(8, 2))
    with gradlib.record(net, modules=["0"]) as one:
        net(x).sum().backward()
    with gradlib.record(renamed, modules=["only"]) as another:
        renamed(x).sum().backward()
    (ax,) = one.compare(another).plot().axes
    assert ax.get_title() == "nothing is in both that could be compared"


def test_shapes_that_differ_have_a_cross(net: nn.Sequential, x: Tensor) -> None:
    (ax,) = recorded(net, x).compare(recorded(net, x[:2])).plot().axes
    assert [row for _, row in lines(ax)["incomparable"]] == [0, 1, 2, 3, 4, 5]


def test_the_first_of_several_crosses_has_the_ring(
    net: nn.Sequential, x: Tensor
) -> None:
    broken = copy.deepcopy(net)
    cast(Any, broken[2]).weight.data.fill_(float("nan"))
    found = recorded(net, x).compare(recorded(broken, x))
    (ax,) = found.plot().axes
    assert [row for _, row in lines(ax)["incomparable"]] == [0, 1, 2, 3, 4, 5]
    assert [row for _, row in lines(ax)["they part first"]] == [2]


def test_a_ring_around_nothing_that_is_drawn_says_what_it_is(
    net: nn.Sequential, x: Tensor
) -> None:
    (ax,) = recorded(net, x).compare(recorded(net, x + 0.1)).plot().axes
    assert [row for _, row in lines(ax)["they part first: args[0]"]] == [5]


def test_it_is_drawn_on_given_axes(net: nn.Sequential, x: Tensor) -> None:
    found = recorded(net, x).compare(recorded(with_eps(net, 0.1), x))
    figure, ax = plt.subplots()
    assert found.plot(ax) is figure
    with pytest.raises(gradlib.RecordingArgumentError, match="of type str"):
        found.plot("flow")  # pyright: ignore[reportArgumentType] (on purpose)


def test_a_dollar_sign_in_a_name_begins_no_formula(x: Tensor) -> None:
    model = nn.Sequential()
    model.add_module(r"$\frac$", nn.Linear(8, 2))
    one = recorded(model, x)
    figure = one.compare(one).plot()
    figure.canvas.draw()
    assert texts(figure.axes[0]) == [r"$\frac$", "(root)"]

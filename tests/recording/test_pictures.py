"""The pictures of a recording: what they show, and that they can be read."""

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any, cast

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

import gradlib

KINDS = ("flow", "steps", "histogram")
each_kind = pytest.mark.parametrize("kind", KINDS)


def record(
    model: nn.Module, scales: Sequence[float] = (1,), **options: Any
) -> gradlib.Recording:
    """Record one step for each factor of the loss."""
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=next(model.parameters()).dtype)
    with gradlib.record(model, **options) as recording:
        for scale in scales:
            (model(x).abs().sum() * scale).backward()
    return recording


def layers(count: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + 0.1 * self.branch(x)


def drawn(figure: Figure) -> Axes:
    """Draw a figure, and return its first axes."""
    figure.canvas.draw()
    return figure.axes[0]


def legend(axes: Axes) -> list[str]:
    shown = axes.get_legend()
    return [text.get_text() for text in shown.get_texts()] if shown else []


def line(axes: Axes, label: str) -> Any:
    return next(it for it in axes.get_lines() if it.get_label() == label)


def marks(axes: Axes, label: str) -> list[tuple[float, float]]:
    """Return the places of the markers of one kind."""
    drawn = [
        it.get_offsets()
        for it in axes.collections
        if isinstance(it, PathCollection) and it.get_label() == label
    ]
    drawn += [it.get_xydata() for it in axes.lines if it.get_label() == label]
    return [tuple(at) for it in drawn for at in np.asarray(it).tolist()]


def test_marks_beside_the_axes_are_inside_the_figure() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with gradlib.record(model) as recording:
        (model(torch.ones(3, 2)) * torch.nan).sum().backward()
    figure = recording.plot()
    figure.draw_without_rendering()
    (crosses,) = [it for it in figure.axes[0].lines if it.get_label() == "nan or inf"]
    extent = crosses.get_window_extent()
    assert figure.bbox.x0 <= extent.x0
    assert extent.x1 <= figure.bbox.x1


def image(axes: Axes) -> Any:
    (found,) = axes.images
    return np.ma.filled(cast(Any, found.get_array()), np.nan)


def row_names(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize("kind", ["heat", "", None])
def test_an_unknown_kind_names_those_there_are(kind: Any) -> None:
    with pytest.raises(gradlib.UnknownKindError) as caught:
        record(layers()).plot(kind)
    assert isinstance(caught.value, ValueError)
    assert 'There are: "flow", "steps", "histogram"' in str(caught.value)


def test_axes_in_the_place_of_the_kind_are_told_where_they_belong() -> None:
    with pytest.raises(gradlib.UnknownKindError, match=r"plot\(ax=\.\.\.\)"):
        record(layers()).plot(plt.figure().subplots())  # pyright: ignore (on purpose)


@each_kind
def test_it_draws_where_it_is_told(kind: str) -> None:
    figure, axes = plt.subplots()
    assert record(layers()).plot(kind, ax=axes) is figure
    assert axes.get_xlabel()


def test_totals_are_drawn_where_they_differ_from_the_shares() -> None:
    recording = record(Residual())
    axes = drawn(recording.plot())
    totals = line(axes, "grad_input_total")
    assert totals.get_ydata().tolist() == [1]
    total = recording["branch"].grad_input_total[0].norm().item()
    assert totals.get_xdata() == pytest.approx([total])
    assert legend(axes) == [
        *("grad_output", "grad_input", "param_grads", "grad_input_total")
    ]


def test_the_lines_of_a_legend_are_about_as_long() -> None:
    shown = drawn(record(Residual()).plot()).get_legend()
    assert shown is not None
    assert len(shown.get_texts()) == 4
    columns = {round(it.get_window_extent().x0) for it in shown.get_texts()}
    assert len(columns) == 2


@pytest.mark.parametrize("count", [1, 3, 4, 5, 20])
def test_what_stands_beside_an_axis_is_no_longer_than_it(count: int) -> None:
    axes = drawn(record(layers(count)).plot())
    label = axes.yaxis.label
    assert " ".join(label.get_text().split()) == "the gradient flows upwards"
    assert ("\n" in label.get_text()) == (count < 5)
    assert label.get_window_extent().height < axes.get_window_extent().height * 1.1


class TwoUses(nn.Module):
    """A layer whose input is also used elsewhere."""

    def __init__(self, other: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), other

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.other(x)


def test_a_total_that_is_smaller_than_its_share_is_drawn() -> None:
    model = TwoUses(lambda x: -x / 2)
    nn.init.eye_(model.layer.weight)
    x = torch.randn(8, 4, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).mean().backward()
    totals = line(drawn(recording.plot()), "grad_input_total")
    share = recording["layer"].grad_input[0].norm().item()
    assert totals.get_xdata() == pytest.approx([share / 2])


def test_the_legend_names_what_is_drawn() -> None:
    with gradlib.record(model := nn.Tanh()) as recording:
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    axes = drawn(recording.plot())
    legend = axes.get_legend()
    assert legend is not None
    assert [it.get_text() for it in legend.get_texts()] == ["grad_output", "grad_input"]


def test_a_total_that_is_no_number_is_not_drawn() -> None:
    model = TwoUses(lambda x: (0 * x).sqrt())
    x = torch.randn(8, 4, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).mean().backward()
    assert recording["layer"].grad_input_total[0].isnan().all()
    axes = drawn(recording.plot())
    assert legend(axes) == ["grad_output", "grad_input", "param_grads"]


def test_where_no_total_differs_none_is_drawn() -> None:
    axes = drawn(record(layers()).plot())
    assert legend(axes) == ["grad_output", "grad_input", "param_grads"]


def test_the_totals_of_shared_parameters_are_drawn() -> None:
    shared = nn.Linear(4, 4)
    recording = record(nn.Sequential(shared, nn.Tanh(), shared))
    totals = line(drawn(recording.plot()), "param_grads_total")
    assert totals.get_ydata().tolist() == [0, 2]
    assert len(set(totals.get_xdata())) == 1


class Scaled(nn.Module):
    """A module that calls another, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x)


def test_of_a_module_that_calls_others_its_own_parameters_are_drawn() -> None:
    recording = record(nn.Sequential(Scaled(), nn.Linear(4, 4)))
    axes = drawn(recording.plot())
    assert [it.get_text() for it in axes.get_yticklabels()] == ["0", "0.linear", "1"]
    norms, rows = line(axes, "param_grads").get_data()
    assert [*rows] == [0, 1, 2]
    grad = cast(Tensor, recording["0"].param_grads["scale"])
    assert norms[0] == pytest.approx(grad.norm().item())
    assert [*line(axes, "grad_output").get_ydata()] == [1, 2]


def test_a_module_that_calls_others_has_no_row_where_nothing_of_it_is_drawn() -> None:
    net = nn.Sequential(Scaled(), nn.Linear(4, 4))
    for kind in ("steps", "histogram"):
        axes = drawn(record(net).plot(kind))
        assert "0" not in [it.get_text() for it in axes.get_yticklabels()]
    axes = drawn(record(net, keep=["param_grads"]).plot("steps"))
    assert [it.get_text() for it in axes.get_yticklabels()] == ["0", "0.linear", "1"]
    cast(Scaled, net[0]).scale.requires_grad_(False)
    axes = drawn(record(net).plot())
    assert [it.get_text() for it in axes.get_yticklabels()] == ["0.linear", "1"]


def test_flow_marks_what_has_no_size() -> None:
    axes = drawn(record(layers(2), (2, 1)).plot())
    assert legend(axes)[3:] == []
    for scales in (0,), (0, 1):
        axes = drawn(record(layers(2), scales).plot())
        assert [y for _, y in marks(axes, "zero")] == [0, 1]
    axes = drawn(record(layers(2), (math.nan, 1)).plot())
    assert [y for _, y in marks(axes, "nan or inf")] == [0, 1]


def test_flow_marks_a_layer_that_died_on_the_way() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with gradlib.record(model) as recording:
        for bias in (1, -100, -100):
            nn.init.constant_(model.get_parameter("0.bias"), bias)
            model(torch.randn(5, 4)).sum().backward()
    axes = drawn(recording.plot())
    assert [y for _, y in marks(axes, "zero")] == [0, 1]


def test_steps_show_the_norm_of_each_module_in_each_forward() -> None:
    recording = record(layers(2), (1, 0.1, 0.001))
    axes = drawn(recording.plot("steps"))
    expected = [
        [call.grad_output[0].norm().log10().item() for call in recording.calls(name)]
        for name in ("0", "1")
    ]
    np.testing.assert_allclose(image(axes), expected, rtol=1e-6)
    assert row_names(axes) == ["0", "1"]
    assert axes.get_xlim() == (-0.5, 2.5)
    assert axes.get_xlabel() == "forward pass"
    assert axes.figure.axes[1].get_ylabel().split() == ["norm", "of", "grad_output"]


def test_the_grid_of_a_style_is_not_on_the_cells() -> None:
    with plt.style.context("ggplot"):
        axes = drawn(record(layers(), (1, 2)).plot("steps"))
    lines = [*axes.get_xgridlines(), *axes.get_ygridlines()]
    assert not any(line.get_visible() for line in lines)


def test_steps_mark_what_a_colour_cannot_show() -> None:
    axes = drawn(record(layers(2), (1, 0, math.nan, math.inf, 2)).plot("steps"))
    assert marks(axes, "zero") == [(1, 0), (1, 1)]
    assert marks(axes, "nan or inf") == [(2, 0), (3, 0), (2, 1), (3, 1)]
    assert np.isnan(image(axes)).any(axis=0).tolist() == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert legend(axes) == ["zero", "nan or inf"]


def test_steps_without_a_colour_have_their_places_too() -> None:
    axes = drawn(record(layers(2), (0, 0, 0)).plot("steps"))
    assert axes.get_xlim() == (-0.5, 2.5)


def test_steps_show_the_largest_of_several_passes() -> None:
    model = layers(1)
    with gradlib.record(model) as recording:
        loss = model(torch.randn(5, 4)).sum()
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    expected = recording["0"].passes[1].grad_output[0].norm().log10().item()
    assert image(drawn(recording.plot("steps"))) == pytest.approx(expected)


@pytest.mark.parametrize("scales", [(1, math.nan), (math.nan, 1)])
def test_a_pass_that_is_no_number_is_the_largest(scales: Sequence[float]) -> None:
    model = layers(1)
    with gradlib.record(model) as recording:
        loss = model(torch.randn(5, 4)).sum()
        for scale in scales:
            (scale * loss).backward(retain_graph=True)
    axes = drawn(recording.plot("steps"))
    assert marks(axes, "nan or inf") == [(0, 0)]


def test_a_forward_without_a_pass_is_blank_and_keeps_its_number() -> None:
    model = layers(1)
    with gradlib.record(model) as recording:
        model(torch.randn(5, 4)).sum().backward()
        model(torch.randn(5, 4))
        model(torch.randn(5, 4)).sum().backward()
    axes = drawn(recording.plot("steps"))
    assert np.isnan(image(axes)).tolist() == [[False, True, False]]
    assert legend(axes) == []
    last = drawn(recording.forwards[2].plot("steps"))
    numbers = [label.get_text() for label in last.get_xticklabels()]
    assert [number for number in numbers if number] == ["2"]


@pytest.mark.parametrize("keep", ["grad_input", "param_grads"])
def test_without_grad_output_another_gradient_is_shown(keep: str) -> None:
    recording = record(layers(2), keep=keep)
    axes = drawn(recording.plot("steps"))
    assert axes.figure.axes[1].get_ylabel().split() == ["norm", "of", keep]
    axes = drawn(recording.plot("histogram"))
    assert axes.get_xlabel() == f"magnitude of the entries of {keep}"
    assert legend(drawn(recording.plot()))[0] == keep


def ridges(axes: Axes) -> list[StepPatch]:
    return [patch for patch in axes.patches if isinstance(patch, StepPatch)]


def test_a_histogram_counts_entries_by_magnitude() -> None:
    model = nn.Sequential(nn.Linear(4, 50), nn.Linear(50, 50))
    recording = record(model, (1, 2))
    axes = drawn(recording.plot("histogram"))
    assert not axes.texts  # no zeros to tell of
    for row, ridge in enumerate(ridges(axes)):
        tops, edges, baseline = ridge.get_data()
        heights = np.asarray(baseline) - np.asarray(tops)
        grads = [call.grad_output[0] for call in recording.calls(str(row))]
        entries = torch.cat(grads).flatten().double().abs().log10().cpu().numpy()
        counts, _ = np.histogram(entries, edges)
        np.testing.assert_allclose(heights, counts / counts.max() * 0.8, atol=1e-9)
        assert row - 0.5 < np.asarray(tops).min() < row


def test_a_histogram_tells_the_share_of_zeros_and_marks_the_rest() -> None:
    model = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 50))
    recording = record(model, (1, math.nan))
    axes = drawn(recording.plot("histogram"))
    grads = torch.cat([call.grad_output[0] for call in recording.calls("0")])
    texts = [text.get_text() for text in axes.texts]
    assert texts[:2] == ["zeros", f"{(grads == 0).double().mean():.0%}"]
    assert [y for _, y in marks(axes, "nan or inf")] == [0, 1, 2]


def test_beside_a_row_without_entries_there_is_no_share_of_zeros() -> None:
    model = nn.ModuleList([nn.ReLU(), nn.ReLU()])
    with gradlib.record(model) as recording:
        x = torch.tensor([1.0, -1.0], requires_grad=True)
        model[0](model[0](x)).sum().backward()
        model[1](x[:0]).sum().backward()
    axes = drawn(recording.plot("histogram"))
    shares = [text for text in axes.texts if text.get_text().endswith("%")]
    assert [text.get_position()[1] for text in shares] == [0]


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float64])
def test_a_histogram_of_any_dtype(dtype: torch.dtype) -> None:
    recording = record(layers(2).to(dtype))
    assert len(ridges(drawn(recording.plot("histogram")))) == 2


def test_a_histogram_of_sparse_gradients() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    with gradlib.record(model, keep="param_grads") as recording:
        model(torch.tensor([1, 2])).sum().backward()
    axes = drawn(recording.plot("histogram"))
    assert [text.get_text() for text in axes.texts] == ["zeros", "60%"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_histogram_of_nested_gradients(layout: torch.layout) -> None:
    parts = [torch.ones(2, 2), torch.ones(3, 2)]
    x = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    weights = torch.tensor([[1.0, 0.0]])
    with gradlib.record(model := nn.Linear(2, 2)) as recording:
        (torch.nested.to_padded_tensor(model(x), 0.0) * weights).sum().backward()
    axes = drawn(recording.plot("histogram"))
    assert [text.get_text() for text in axes.texts] == ["zeros", "50%"]


def test_a_histogram_of_what_its_class_cannot_count() -> None:
    x = TwoTensor(torch.ones(2, 3), torch.ones(2, 3)).requires_grad_()
    with gradlib.record(model := nn.Tanh()) as recording:
        model(x).sum().backward()
    axes = drawn(recording.plot("histogram"))
    assert marks(axes, "nan or inf")


def test_statistics_are_enough_for_all_but_a_histogram() -> None:
    recording = record(layers(), reduce=gradlib.tensor_stats)
    whole = record(layers())
    assert_close(
        image(drawn(recording.plot("steps"))), image(drawn(whole.plot("steps")))
    )
    recording.plot("flow")
    with pytest.raises(gradlib.NotKeptError, match="counts the entries of gradients"):
        recording.plot("histogram")


@pytest.mark.parametrize(
    ("reduce", "made"),
    [
        (None, ""),
        (lambda tensor: gradlib.tensor_stats(tensor), ""),
        (lambda tensor: tensor.abs(), "what reduce gave"),
    ],
    ids=["none", "statistics", "tensors"],
)
def test_the_norm_of_what_was_reduced_is_called_so(reduce: Any, made: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with gradlib.record(model, reduce=reduce) as recording:
        model(torch.randn(4, 3)).sum().backward()
    (axes,) = recording.plot("flow").axes
    assert axes.get_xlabel() == f"norm of {made or 'the gradient'}"
    _, bar = recording.plot("steps").axes
    of = f"{made} of grad_output" if made else "grad_output"
    assert " ".join(bar.get_ylabel().split()) == f"norm of {of}"


@each_kind
def test_what_has_no_norm_cannot_be_drawn(kind: str) -> None:
    recording = record(layers(), reduce=Tensor.numel)
    said = "counts the entries" if kind == "histogram" else "has none"
    with pytest.raises(gradlib.NotKeptError, match=said):
        recording.plot(kind)
    with pytest.raises(gradlib.NotKeptError, match="left them all out"):
        record(layers(), keep="output").plot(kind)


@each_kind
def test_without_a_backward_pass_the_picture_says_so(kind: str) -> None:
    with gradlib.record(model := layers()) as recording:
        model(torch.ones(1, 4))
    axes = drawn(recording.plot(kind))
    assert axes.get_title() == "no backward pass was recorded"


def deep(model: nn.Module) -> gradlib.Recording:
    """Record gradients that fall from 1 to below 1e-200."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-10)
    return record(model.double(), (1, 1))


def record_on_meta(model: nn.Module) -> gradlib.Recording:
    with gradlib.record(model.to("meta")) as recording:
        model(torch.ones(2, 4, device="meta")).sum().backward()
    return recording


AWKWARD: dict[str, Callable[[], gradlib.Recording]] = {
    "one module": lambda: record(nn.Linear(4, 4)),
    "all zero": lambda: record(layers(), (0,)),
    "all nan": lambda: record(layers(), (math.nan,)),
    "all inf": lambda: record(layers(), (math.inf, math.inf)),
    "huge range": lambda: deep(layers(20)),
    "no values": lambda: record_on_meta(layers()),
}


@each_kind
@pytest.mark.parametrize("awkward", AWKWARD)
def test_awkward_gradients_are_drawn(awkward: str, kind: str) -> None:
    recording = AWKWARD[awkward]()
    with torch.device("meta"):  # the default device has no say
        axes = drawn(recording.plot(kind))
    assert axes.get_title() == ""


@each_kind
@pytest.mark.parametrize("count", [1, 3, 40, 200])
def test_names_do_not_overlap(count: int, kind: str) -> None:
    recording = record(nn.Sequential(nn.Linear(4, 4), *[nn.Tanh()] * (count - 1)))
    apart(recording.plot(kind))
    small = plt.figure(figsize=(4, 3)).subplots()
    apart(recording.plot(kind, ax=small))


@each_kind
def test_numbers_do_not_overlap(kind: str) -> None:
    small = plt.figure(figsize=(4, 3)).subplots()
    apart(deep(layers(20)).plot(kind, ax=small))


@each_kind
@pytest.mark.parametrize("words", [4, 12])
def test_long_names_leave_room_for_the_rest(words: int, kind: str) -> None:
    model = nn.Sequential()
    model.add_module("attention_" * words, layers(10))
    figure = deep(model).plot(kind)
    apart(figure)
    axes = drawn(figure)
    assert axes.bbox.width > 0.4 * 6 * figure.dpi  # 6 inches where names are short
    title = axes.xaxis.label.get_window_extent()
    assert title.x0 > 0
    assert title.x1 < figure.bbox.width


@each_kind
def test_a_name_that_is_too_long_lacks_its_middle(kind: str) -> None:
    model = nn.Sequential()
    model.add_module("begins" + "_" * 400, layers(10))
    figure = deep(model).plot(kind)
    assert figure.get_figwidth() < 15
    assert any(re.fullmatch(r"begins_+…_+\.9", it) for it in row_names(drawn(figure)))


@each_kind
def test_a_name_is_in_one_line(kind: str) -> None:
    model = nn.Sequential()
    model.add_module("first\nsecond\t", layers(1))
    assert r"first\nsecond\t.0" in row_names(drawn(deep(model).plot(kind)))


@pytest.mark.parametrize("scale", [1e-3, 3e-12])
@pytest.mark.parametrize(
    ("ratio", "size"),
    [(1.5, (6, 3)), *product([9, 30, 90, 1e3], [(6, 3), (4, 3), (3, 2.5)])],
)
def test_numbers_of_a_flow_are_right_and_apart(
    ratio: float, scale: float, size: tuple[float, float]
) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.eye(4) * ratio**-0.25)
    with gradlib.record(model) as recording:
        (model(torch.ones(2, 4)).sum() * scale).backward()
    figure = plt.figure(figsize=size, layout="constrained")
    axes = drawn(recording.plot(ax=figure.subplots()))
    low, high = axes.get_xlim()
    shown = {
        at: label
        for minor in (False, True)
        for at, label in zip(
            axes.xaxis.get_ticklocs(minor=minor),
            axes.xaxis.get_ticklabels(minor=minor),
            strict=True,
        )
        if label.get_text() and low <= at <= high
    }
    for at, label in shown.items():
        assert float(label.get_text()) == pytest.approx(at)
    boxes = [shown[at].get_window_extent() for at in sorted(shown)]
    assert boxes
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def apart(figure: Figure) -> None:
    """Check that no name lies on another, and that there are some."""
    axes = drawn(figure)
    assert figure.get_size_inches()[1] < 40
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(above.y0 > below.y1 for above, below in pairwise(boxes))
    across = [
        label.get_window_extent()
        for label in axes.get_xticklabels()
        if label.get_text()
    ]
    assert all(left.x1 < right.x0 for left, right in pairwise(across))


@pytest.mark.parametrize("scale", [1e-7, 1e-38, 1e7])
@pytest.mark.parametrize("kind", ["steps", "histogram"])
def test_numbers_between_two_powers_of_ten_are_plain(kind: str, scale: float) -> None:
    figure = record(layers(2), (scale, 1.01 * scale)).plot(kind)
    axes = drawn(figure)
    shown = axes.get_xticklabels() if kind == "histogram" else labels_of_bar(figure)
    numbers = [it.get_text() for it in shown if it.get_text()]
    assert len(numbers) > 1
    assert all(re.fullmatch(r"\d(\.\d{1,2})?e-?\d+", it) for it in numbers), numbers
    assert [*map(float, numbers)] == sorted(map(float, numbers))


def labels_of_bar(figure: Figure) -> Sequence[Any]:
    bar = figure.axes[1]
    low, high = bar.get_ylim()
    shown = zip(bar.get_yticks(), bar.get_yticklabels(), strict=True)
    return [label for at, label in shown if low <= at <= high]


def test_hundreds_of_steps_have_few_numbers() -> None:
    axes = drawn(record(layers(2), [1] * 300).plot("steps"))
    apart(axes.get_figure(root=True))  # pyright: ignore (it has one)
    numbers = [label.get_text() for label in axes.get_xticklabels()]
    assert 3 < len([number for number in numbers if number]) < 15


def test_a_histogram_of_an_empty_batch_says_so() -> None:
    with gradlib.record(model := nn.Linear(4, 2)) as recording:
        model(torch.zeros(0, 4)).sum().backward()
    (axes,) = recording.plot("histogram", None).axes
    assert axes.get_title() == "no gradient has an entry"

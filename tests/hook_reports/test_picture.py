"""The figure of a hook report shows each tuple where its hook gets it."""

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import Tensor, nn

import gradlib
from gradlib.hook_reports.hooks import FULL, LEGACY
from gradlib.hook_reports.picture import COLOURS, NOTHING
from gradlib.hook_reports.tensor_names import COMPUTED, OUTSIDE
from gradlib.plot_graph import HEIGHT

from .reported import given

OF = {COLOURS[FULL]: "full ", COLOURS[LEGACY]: "old "}


def boxes(figure: Figure) -> list[tuple[str, float, float]]:
    """Return what is written where; a full or an old hook's entry says which it is."""
    ax = figure.axes[0]
    whose: dict[tuple[float, float], str] = {}
    for patch in ax.patches:
        if isinstance(patch, FancyBboxPatch):
            centre = (
                patch.get_x() + patch.get_width() / 2,
                patch.get_y() + patch.get_height() / 2,
            )
            whose[rounded(*centre)] = OF.get(to_hex(patch.get_facecolor()).upper(), "")
    return [
        (whose.get(rounded(*it.get_position()), "") + it.get_text(), *it.get_position())
        for it in ax.texts[1:]  # the first is the title
        if it.get_text() != "↑"
    ]


def rounded(x: float, y: float) -> tuple[float, float]:
    return round(x, 6), round(y, 6)


def texts(figure: Figure) -> Counter[str]:
    return Counter(text for text, *_ in boxes(figure))


def colour_of(meaning: str, figure: Figure) -> str:
    """Return the colour beside a line of the legend."""
    ax = figure.axes[0]
    (line,) = (it.get_position()[1] for it in ax.texts if it.get_text() == meaning)
    (colour,) = (
        to_hex(it.get_facecolor())
        for it in ax.patches
        if isinstance(it, Rectangle)
        if abs(it.get_y() + it.get_height() / 2 - line) < 1e-6
    )
    return colour


def arrows(figure: Figure) -> set[tuple[str, str]]:
    """Return between what there are arrows, by where these end."""
    found: set[tuple[str, str]] = set()
    at = boxes(figure)

    def text_at(x: float, y: float) -> str:
        return min(at, key=lambda it: abs(it[2] - y) + abs(it[1] - x) / 20)[0]

    for patch in figure.axes[0].patches:
        if isinstance(patch, FancyArrowPatch):
            (start, low), *_, (end, high) = cast(Any, patch)._path_original.vertices
            ends = text_at(start, low - HEIGHT / 2), text_at(end, high + HEIGHT / 2)
            found.add(ends)
    return found


def test_a_linear_layer() -> None:
    assert arrows_of(nn.Linear(20, 30), given(4, 20)) == {
        ("output [4, 30]", "full grad_output[0] [4, 30]"),
        ("full grad_output[0] [4, 30]", "old grad_output[0] [4, 30]"),
        ("old grad_output[0] [4, 30]", "AddmmBackward0"),
        ("AddmmBackward0", "old grad_input[0] [30]"),
        ("AddmmBackward0", "old grad_input[1] [4, 20]"),
        ("AddmmBackward0", "old grad_input[2] [20, 30]"),
        ("old grad_input[0] [30]", "bias [30]"),
        ("old grad_input[1] [4, 20]", "full grad_input[0] [4, 20]"),
        ("old grad_input[2] [20, 30]", "TBackward0"),
        ("TBackward0", "weight [30, 20]"),
        ("full grad_input[0] [4, 20]", "input [4, 20]"),
    }


class Of(nn.Module):
    """A function of a parameter ``w`` and its inputs, as a module."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(*shape))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.w, *args, **kwargs)


def arrows_of(module: nn.Module, *args: Any, **kwargs: Any) -> set[tuple[str, str]]:
    return arrows(gradlib.hook_report(module, *args, **kwargs).plot())


def test_no_grey_is_explained_where_there_is_none() -> None:
    figure = gradlib.hook_report(nn.Linear(20, 30), given(4, 20)).plot()
    assert not texts(figure)["an entry that is None or zeros"]


def test_one_tensor_in_two_places_is_told_apart() -> None:
    x = given(4, 3)
    found = arrows_of(nn.Bilinear(3, 3, 2), x, x)
    assert ("full grad_input[0] [4, 3]", "input1 [4, 3]") in found
    assert ("full grad_input[1] [4, 3]", "input2 [4, 3]") in found


def test_an_argument_of_a_forward_pre_hook_is_inside() -> None:
    def doubled(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] * 2,)

    module = nn.Linear(3, 2)
    module.register_forward_pre_hook(doubled)
    found = arrows_of(module, given(4, 3))
    assert ("old grad_input[1] [4, 3]", "full grad_input[0] [4, 3]") in found
    assert ("full grad_input[0] [4, 3]", "MulBackward0") in found
    assert ("MulBackward0", "input [4, 3]") in found


def test_one_tensor_returned_twice_has_two_entries() -> None:
    found = arrows_of(Of(lambda w, x: (x * w,) * 2, 3), given(4, 3))
    for i in range(2):
        assert (f"output[{i}] [4, 3]", f"full grad_output[{i}] [4, 3]") in found
        assert (f"full grad_output[{i}] [4, 3]", "old grad_output[0] [4, 3]") in found


def test_what_nothing_flows_to_is_there_without_an_arrow() -> None:
    figure = gradlib.hook_report(nn.Linear(3, 2), torch.randn(4, 3)).plot()
    found = arrows(figure)
    assert texts(figure)["input [4, 3]"] == texts(figure)["grad_input[0] None"] == 1
    assert not {end for _, end in found} & {"input [4, 3]", "grad_input[0] None"}
    assert ("AddmmBackward0", "grad_input[1] None") in found


def test_zeros_that_stand_for_nothing_are_no_shape() -> None:
    module = Of(lambda w, x, mask: x * w * mask, 3)
    figure = gradlib.hook_report(module, given(4, 3), torch.randn(4, 3)).plot()
    assert texts(figure)["grad_input[1] zeros"] == 1
    assert texts(figure)["an entry that is None or zeros"] == 1


def test_each_tensor_without_a_name_has_a_box() -> None:
    one, other = given(3), given(4, 3)
    found = arrows_of(Of(lambda w, x: x * w + one * other, 3), given(4, 3))
    for shape in "[3]", "[4, 3]":
        assert ("MulBackward0", f"{OUTSIDE} {shape}") in found


def test_what_was_computed_outside_is_outside() -> None:
    there = given(4, 3).exp()
    module = Of(lambda w, x: x * w * there, 3)
    report = gradlib.hook_report(module, given(4, 3))
    what = report.kinds[LEGACY].grad_input[1].what
    assert what == f"gradient for {COMPUTED}"
    figure = report.plot()
    assert ("old grad_input[1] [4, 3]", COMPUTED) in arrows(figure)
    assert not texts(figure)["ExpBackward0"]
    (frame,) = [it for it in figure.axes[0].patches if type(it) is Rectangle][:1]
    ((_, _, height),) = [it for it in boxes(figure) if it[0] == COMPUTED]
    assert height > frame.get_y() + frame.get_height()


def test_tensors_in_a_list_or_a_dict_have_their_place_as_name() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaves = [given(3), given(3)]
            self.computed = {"bias": given(3).exp()}

        def forward(self, x: Tensor) -> Tensor:
            return x * self.leaves[1] + self.computed["bias"]

    report = gradlib.hook_report(Holds(), given(4, 3))
    whats = [entry.what for entry in report.kinds[LEGACY].grad_input]
    assert whats[1] == "gradient of computed['bias']"
    found = arrows(report.plot())
    assert ("MulBackward0", "leaves[1] [3]") in found
    assert ("old grad_input[1] [3]", "computed['bias'] [3]") in found


def test_a_keyword_argument_is_reached_past_the_tuple() -> None:
    module = Of(lambda w, x, *, scale: torch.stack([x * w, scale]), 3)
    found = arrows_of(module, given(4, 3), scale=given(4, 3))
    assert ("old grad_input[1] [4, 3]", "scale [4, 3]") in found
    assert ("full grad_input[0] [4, 3]", "args[0] [4, 3]") in found


def test_the_share_of_each_use_flows_into_the_same_entry() -> None:
    found = arrows_of(Of(lambda w, x: (x * w + x.sum()).relu(), 3), given(4, 3))
    into = {start for start, end in found if end == "full grad_input[0] [4, 3]"}
    assert into == {"MulBackward0", "SumBackward0"}


def test_nodes_far_from_the_output_are_one() -> None:
    layers = [nn.Linear(3, 3) for _ in range(20)]
    figure = gradlib.hook_report(nn.Sequential(*layers), given(4, 3)).plot()
    found = texts(figure)
    assert found["19.bias [3]"] == found["19.weight [3, 3]"] == 1
    assert not found["0.weight [3, 3]"]
    more = next(text for text in found if text.endswith("more nodes"))
    shown = found["AddmmBackward0"] + found["TBackward0"]
    assert int(more.split()[0]) + shown == 2 * len(layers)
    assert (more, "full grad_input[0] [4, 3]") in arrows(figure)


def test_from_one_box_arguments_are_reached_in_their_order() -> None:
    attention = nn.MultiheadAttention(4, 2)
    figure = gradlib.hook_report(attention, *(given(5, 2, 4) for _ in range(3))).plot()
    at = {text: x for text, x, _ in boxes(figure)}
    assert at["query [5, 2, 4]"] < at["key [5, 2, 4]"] < at["value [5, 2, 4]"]


def test_of_a_wide_graph_the_rows_next_to_the_output_are_shown() -> None:
    module = Of(lambda w, x: torch.cat([(x * w).exp().tanh() for _ in range(9)]), 3)
    found = texts(gradlib.hook_report(module, given(4, 3)).plot())
    assert found["TanhBackward0"] == 9
    assert found["18 more nodes"] == 1


def test_the_node_of_the_old_hook_is_shown_where_it_is_far_from_an_output() -> None:
    def twice(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        first = x.exp() * w
        last = first
        for _ in range(20):
            last = last.neg()
        return first, last

    figure = gradlib.hook_report(Of(twice, 3), given(4, 3)).plot()
    assert f"{LEGACY}: at MulBackward0" in texts(figure)
    assert texts(figure)["14 more nodes"] == texts(figure)["1 more node"] == 1
    assert arrows(figure) >= {
        ("full grad_output[0] [4, 3]", "old grad_output[0] [4, 3]"),
        ("14 more nodes", "old grad_output[0] [4, 3]"),
        ("old grad_output[0] [4, 3]", "MulBackward0"),
        ("MulBackward0", "old grad_input[0] [4, 3]"),
        ("old grad_input[0] [4, 3]", "1 more node"),
        ("1 more node", "full grad_input[0] [4, 3]"),
        ("MulBackward0", "old grad_input[1] [3]"),
        ("old grad_input[1] [3]", "w [3]"),
    }


def test_no_node_is_one_more() -> None:
    module = Of(lambda w, x: (x * w).exp().neg().exp().neg().exp().neg(), 3)
    found = texts(gradlib.hook_report(module, given(4, 3)).plot())
    assert found["MulBackward0"] == 1


def test_a_hook_that_sits_outside_is_said_to() -> None:
    figure = gradlib.hook_report(nn.Identity(), given(4, 3) * 2).plot()
    assert f"{LEGACY}: outside of the module" in texts(figure)
    assert arrows(figure) == {
        ("output [4, 3]", "full grad_output[0] [4, 3]"),
        ("full grad_output[0] [4, 3]", "full grad_input[0] [4, 3]"),
        ("full grad_input[0] [4, 3]", "input [4, 3]"),
    }


def test_a_hook_that_is_never_called_has_no_entries() -> None:
    module = Of(lambda w, x: {"y": x * w}, 3)
    figure = gradlib.hook_report(module, given(4, 3)).plot()
    assert f"{FULL}: never called" in texts(figure)
    assert colour_of(f"{FULL}: never called", figure) == to_hex(NOTHING)
    assert colour_of(f"{LEGACY}: at MulBackward0", figure) == COLOURS[LEGACY].lower()
    assert ("output['y'] [4, 3]", "old grad_output[0] [4, 3]") in arrows(figure)
    assert ("old grad_input[0] [4, 3]", "args[0] [4, 3]") in arrows(figure)


class Closed:
    """Holds a tensor where nobody finds it."""

    def __init__(self, inside: Tensor) -> None:
        self._inside = inside


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Linear(3, 2).requires_grad_(False), torch.ones(3)),
        (Of(lambda w, x: Closed(w * x), 3), given(3)),
    ],
)
def test_without_a_gradient_the_figure_says_so(module: nn.Module, x: Tensor) -> None:
    said = gradlib.hook_report(module, x).plot().axes[0].texts[0].get_text()
    words = " ".join(said.split())
    assert words == "No tensor that requires grad is found in the output."


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda: nn.Conv2d(3, 8, 3), [(2, 3, 8, 8)]),
        (lambda: nn.LSTM(5, 4), [(3, 2, 5)]),
        (lambda: nn.MultiheadAttention(4, 2), [(3, 2, 4)] * 3),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), [(3, 2, 4)]),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4)), [(2, 3)]),
    ],
)
def test_every_entry_is_there_once(
    make: Callable[[], nn.Module], shapes: list[tuple[int, ...]]
) -> None:
    report = gradlib.hook_report(make(), *(given(*shape) for shape in shapes))
    shown = Counter(it.get_text() for it in report.plot().axes[0].texts)
    entries = Counter(
        f"{entry.place} {list(entry.value.shape) if entry.value is not None else None}"
        for kind in (FULL, LEGACY)
        for entry in report.kinds[kind].entries
    )
    assert entries == {text: n for text, n in shown.items() if text.startswith("grad_")}


def test_it_is_drawn_on_given_axes() -> None:
    report = gradlib.hook_report(nn.Linear(3, 2), given(4, 3))
    figure, ax = plt.subplots()
    assert report.plot(ax) is figure
    with pytest.raises(gradlib.RecordingArgumentError, match="of type int"):
        report.plot(3)  # pyright: ignore[reportArgumentType] (on purpose)

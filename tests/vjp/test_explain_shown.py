"""How an explanation prints, renders in a notebook and is drawn."""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bs4 import BeautifulSoup
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import gradlib
from gradlib.render import WIDTH


def outer(v: Tensor | None = None) -> gradlib.VJPExplanation:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    v = torch.ones(4, 4) if v is None else v
    return gradlib.explain_vjp(torch.outer(x, x), x, v)


def doubled(size: int) -> gradlib.VJPExplanation:
    x = torch.randn(size, requires_grad=True)
    return gradlib.explain_vjp(x * 2, x, torch.ones(size))


def of_a_model() -> gradlib.VJPExplanation:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    y = model(torch.randn(5, 3))
    return gradlib.explain_vjp(y, dict(model.named_parameters()), torch.ones(5, 2))


def two_of_each() -> gradlib.VJPExplanation:
    a, b = (torch.randn(2, requires_grad=True) for _ in "ab")
    outputs = [a * b, (a**2).sum()]
    return gradlib.explain_vjp(outputs, [a, b], [torch.tensor([1.0, -2.0]), None])


# Text


def test_the_text_shows_shapes_the_einsum_and_both_ways() -> None:
    lines = str(outer()).splitlines()
    assert lines[1:7] == [
        "     shape      what",
        "y    [4, 4]     outputs",
        "x    [4]        inputs",
        "v    [4, 4]     grad_outputs: all ones",
        "J    [4, 4, 4]  dy/dx",
        'vᵀJ  [4]        einsum("jk,jki->i", v, J)',
    ]
    assert (
        lines[7] == "Computed twice, by einsum and by one call of autograd: the same."
    )


def test_the_text_shows_the_numbers_where_they_are_few() -> None:
    explanation = outer(torch.arange(16.0).view(4, 4))
    rows = [line.split() for line in str(explanation).splitlines()]
    start = rows.index(["v", "x[0]", "x[1]", "x[2]", "x[3]"]) + 1
    numbers = [list(map(float, row[-5:])) for row in rows[start : start + 16]]
    expected = explanation.jacobian.reshape(16, 4)
    assert [row[0] for row in numbers] == list(range(16))
    assert [row[1:] for row in numbers] == expected.tolist()
    assert rows[-1] == ["vᵀJ", *(f"{it:g}" for it in explanation.result.tolist())]
    assert str(explanation).count("y[2, 1]") == 1


def test_the_numbers_of_several_tensors_stand_in_one_table() -> None:
    explanation = two_of_each()
    rows = [line.split() for line in str(explanation).splitlines()]
    assert ["v", "x[0][0]", "x[0][1]", "x[1][0]", "x[1][1]"] in rows
    ((to_a, to_b), _) = explanation.jacobian
    row = next(row for row in rows if row[:1] == ["y[0][1]"])
    assert row[1:] == ["-2", *(f"{it + 0:.4g}" for it in (*to_a[1], *to_b[1]))]


def test_large_tables_are_left_out() -> None:
    assert "J, with v" in str(doubled(5))
    assert "J, with v" not in str(doubled(19))
    x = torch.tensor(1.0, requires_grad=True)
    for rows, shown in ((20, True), (21, False)):
        explanation = gradlib.explain_vjp(x * torch.ones(rows), x, torch.ones(rows))
        assert ("J, with v" in str(explanation)) == shown


def test_zero_has_no_sign() -> None:
    x = torch.randn(2, requires_grad=True)
    assert (
        "-0" not in str(gradlib.explain_vjp(-x, x, torch.zeros(2))).split("J, with")[1]
    )


@pytest.mark.parametrize("make", [outer, of_a_model, two_of_each, lambda: doubled(300)])
def test_lines_fit_a_terminal(make: Any) -> None:
    assert max(map(len, str(make()).splitlines())) <= WIDTH


def test_many_tensors_are_counted() -> None:
    x = [torch.randn(1, requires_grad=True) for _ in range(20)]
    text = str(gradlib.explain_vjp(torch.stack(x).sum(), x))
    assert text.count(" inputs\n") == 6
    assert text.count("14 more") == 3  # inputs, blocks and results


def test_the_repr_is_short() -> None:
    x = torch.ones(2, requires_grad=True)
    assert repr(outer()) == "<VJPExplanation: ok>"
    assert repr(gradlib.explain_vjp(x, x)) == "<VJPExplanation: GL101>"


def in_own_names() -> gradlib.VJPExplanation:
    images = torch.tensor([1.0, 2.0], requires_grad=True)
    scores = torch.outer(images, images)
    shares = torch.ones(2, 2)
    return gradlib.explain_vjp(scores, [images], shares)


def test_the_text_tells_what_the_caller_calls_the_tensors() -> None:
    lines = str(in_own_names()).splitlines()
    assert "y       [2, 2]     outputs (`scores`)" in lines
    assert "x[0]    [2]        inputs (`images`)" in lines
    assert "v       [2, 2]     grad_outputs (`shares`): all ones" in lines
    assert "`" not in str(outer())  # y is an expression there, x and v are letters


def test_entries_are_named_by_the_variable_that_holds_them() -> None:
    layer = nn.Linear(2, 2)
    parameters = dict(layer.named_parameters())
    output = layer(torch.ones(2))
    text = str(gradlib.explain_vjp(output, parameters, torch.ones(2)))
    assert 'inputs (`parameters["bias"]`)' in text
    text = str(gradlib.explain_vjp(output, [layer.bias, *parameters.values()], output))
    assert "inputs\n" in text


# HTML


def cells(html: str) -> list[list[str]]:
    rows = BeautifulSoup(html, "html.parser").find_all("tr")
    return [[it.get_text() for it in row.find_all(["td", "th"])] for row in rows]


def test_a_notebook_shows_what_the_text_does() -> None:
    explanation = outer()
    html = explanation._repr_html_()
    assert ["J", "[4, 4, 4]", "dy/dx"] in cells(html)
    assert ["y[3, 3]", "1", "0", "0", "0", "8"] in cells(html)
    assert explanation.meaning in BeautifulSoup(html, "html.parser").get_text()
    names = cells(in_own_names()._repr_html_())
    assert ["x[0]", "[2]", "inputs (`images`)"] in names


def test_a_notebook_shows_a_bad_call_line_by_line() -> None:
    x = torch.ones(2, requires_grad=True)
    explanation = gradlib.explain_vjp(x * 2, x, torch.ones(3))
    found = BeautifulSoup(explanation._repr_html_(), "html.parser").find("pre")
    assert found
    assert found.get_text() == str(explanation)


# The figure


def numbers(axes: Axes) -> list[str]:
    return [
        text.get_text() for text in axes.texts if text.get_text()[-1] in "0123456789nf"
    ]


def labels(axis: Any) -> list[str]:
    return [it.get_text() for it in axis.get_ticklabels()]


def images(axes: Axes) -> list[Any]:
    return [image.get_array() for image in axes.images]


def drawn(figure: Figure) -> Any:
    figure.canvas.draw()
    (axes,) = figure.axes
    return axes


def test_the_figure_shows_v_beside_the_rows_and_the_product_below() -> None:
    explanation = outer(torch.arange(16.0).view(4, 4))
    axes = drawn(explanation.plot())
    v, j, product = images(axes)
    assert v.flatten().tolist() == list(range(16))
    assert j.tolist() == explanation.jacobian.reshape(16, 4).tolist()
    assert product.tolist() == [explanation.result.tolist()]
    left, middle, below = (image.get_extent() for image in axes.images)
    assert left[1] < middle[0]  # v ends before J begins
    assert left[2:] == middle[2:]  # and has the same rows
    assert below[3] > middle[2]  # vᵀJ begins below J, whose rows go down
    assert below[:2] == middle[:2]
    names = [f"y[{j}, {k}]" for j in range(4) for k in range(4)]
    assert labels(axes.yaxis) == [*names, "vᵀJ"]
    assert labels(axes.xaxis) == [f"x[{i}]" for i in range(4)]
    assert {text.get_text() for text in axes.texts} >= {"v", "J = dy/dx"}
    assert len(numbers(axes)) == 16 + 64 + 4


def test_the_figure_has_the_names_of_the_caller() -> None:
    axes = drawn(in_own_names().plot())
    assert labels(axes.yaxis)[:2] == ["scores[0, 0]", "scores[0, 1]"]
    assert labels(axes.xaxis) == ["images[0]", "images[1]"]
    assert "J = dscores/dimages" in {it.get_text() for it in axes.texts}


def test_the_figure_says_what_j_is_in_the_names_that_it_shows() -> None:
    x, w = (torch.ones(2, requires_grad=True) for _ in range(2))
    it = SimpleNamespace(y=x * w)

    def above(explanation: gradlib.VJPExplanation, ax: Axes | None = None) -> str:
        (found,) = (
            text.get_text()
            for text in drawn(explanation.plot(ax)).texts
            if text.get_text().startswith("J")
        )
        return found

    assert above(gradlib.explain_vjp(it.y, x, w)) == "J = d(it.y)/dx"
    assert above(gradlib.explain_vjp([it.y], [x, w], [w])) == "J"
    y = [x * w, (x**2).sum()]
    assert above(gradlib.explain_vjp(y, x, [w, None])) == "J = dy/dx"
    a_name_of_20_letters = x.sum()
    found = gradlib.explain_vjp(a_name_of_20_letters, x)
    assert above(found) == "J = da_name_of_20_letters/dx"
    narrow = plt.figure(figsize=(1, 1)).subplots()
    assert above(found, narrow) == "J"  # it has no room for more


def test_a_name_that_is_too_long_for_a_figure_is_left_out() -> None:
    images_of_all_the_samples = torch.ones(2, requires_grad=True)
    scores = images_of_all_the_samples * 2
    explanation = gradlib.explain_vjp(scores, images_of_all_the_samples, scores)
    assert labels(drawn(explanation.plot()).xaxis) == ["x[0]", "x[1]"]
    assert "inputs (`images_of_all_the_samples`)" in str(explanation)


def test_a_long_key_is_shown_without_its_middle() -> None:
    x = torch.ones(1, requires_grad=True)
    for key, name in {
        "a$b$": 'x["a$b$"][0]',
        "key" * 20: f'x["{"key" * 7}…ey{"key" * 6}"][0]',
    }.items():
        axes = drawn(gradlib.explain_vjp(2 * x, {key: x}, x).plot())
        assert labels(axes.xaxis) == [name]
        assert not axes.get_xticklabels()[0].get_parse_math()


def test_each_block_has_its_place() -> None:
    explanation = two_of_each()
    axes = drawn(explanation.plot())
    assert len(axes.images) == 2 + 4 + 2
    first, second = axes.images[:2]
    blocks = axes.images[2:6]
    for image, (a, b) in zip(blocks, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        block = explanation.jacobian[a][b].reshape(-1, 2)
        torch.testing.assert_close(torch.tensor(image.get_array().tolist()), block)
        assert image.get_extent()[2:] == (first, second)[a].get_extent()[2:]
        assert image.get_extent()[:2] == axes.images[6 + b].get_extent()[:2]


def test_colours_are_white_at_zero_and_one_scale_for_v_for_j_and_for_the_product() -> (
    None
):
    axes = drawn(two_of_each().plot())
    limits = [image.get_clim() for image in axes.images]
    assert all(low == -high for low, high in limits)
    assert [len({*limits[at]}) for at in (slice(2), slice(2, 6), slice(6, 8))] == [
        1
    ] * 3
    image = axes.images[0]
    assert image.cmap(image.norm(0.0))[:3] == pytest.approx((1, 1, 1), abs=0.01)
    above, below = image.cmap(0.99), image.cmap(0.01)
    assert above[2] > above[0]  # blue
    assert below[0] > below[2]  # orange


def test_rounding_is_not_coloured() -> None:
    x = torch.randn(20, requires_grad=True)
    y, v = torch.cat([x / 7 * 3, x * 3 / 7]), torch.randn(20)
    explanation = gradlib.explain_vjp(y, x, torch.cat([v, -v]))
    assert explanation.result.any()
    image = drawn(explanation.plot()).images[-1]
    colours = image.cmap(image.norm(image.get_array()))
    assert colours.min() > 0.98


def test_numbers_are_left_out_where_they_could_not_be_read() -> None:
    axes = drawn(doubled(40).plot())
    assert not numbers(axes)
    assert re.fullmatch(
        "blue above 0, orange below: v ±1, J ±2, vᵀJ ±2", axes.get_xlabel()
    )
    assert not drawn(doubled(5).plot()).get_xlabel()


def test_few_numbers_are_left_out_too_where_they_have_no_room() -> None:
    x = torch.randn(60, requires_grad=True)
    y = torch.randn(2, 60) @ x
    assert not numbers(drawn(gradlib.explain_vjp(y, x, torch.ones(2)).plot()))


def of_a_loss() -> gradlib.VJPExplanation:
    model = nn.ModuleDict({"encoder": nn.Linear(3, 3)})
    loss = model["encoder"](torch.ones(2, 3)).sum()
    return gradlib.explain_vjp(loss, dict(model.named_parameters()))


DRAWN = {str(it): partial(doubled, it) for it in (1, 4, 8, 12, 40, 90)}


@pytest.mark.parametrize("make", [*DRAWN.values(), of_a_loss], ids=[*DRAWN, "keys"])
def test_nothing_in_the_figure_overlaps_or_is_cut_off(
    make: Callable[[], gradlib.VJPExplanation],
) -> None:
    figure = make().plot()
    axes = drawn(figure)
    for row in (axes.get_xticklabels(), axes.get_yticklabels(), axes.texts):
        boxes = [it.get_window_extent() for it in row]
        for box in boxes:
            assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(it) for it in boxes[:i])


def test_numbers_stay_inside_their_cells() -> None:
    x = torch.randn(6, requires_grad=True)
    axes = plt.figure(figsize=(5, 3)).subplots()
    drawn(gradlib.explain_vjp(-0.00123 * x, x, torch.ones(6)).plot(ax=axes))
    assert numbers(axes)
    cell = axes.get_window_extent().width / abs(axes.get_xlim()[1] - axes.get_xlim()[0])
    widths = [
        it.get_window_extent().width
        for it in axes.texts
        if it.get_text() in numbers(axes)
    ]
    assert max(widths) < cell


def test_what_is_not_finite_is_grey() -> None:
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    axes = drawn(gradlib.explain_vjp(x.sqrt(), x, torch.ones(2)).plot())
    image = axes.images[1]
    assert image.get_clim() == (-0.25, 0.25)
    colour = image.cmap(image.norm(image.get_array()))[0, 0]
    assert colour.tolist() == [0.8, 0.8, 0.8, 1]
    assert "inf" in [text.get_text() for text in axes.texts]


def test_numbers_can_be_read_on_a_dark_background() -> None:
    with plt.style.context("dark_background"):
        axes = drawn(outer().plot())
    assert {it.get_color() for it in axes.texts if it.get_text().isdigit()} == {"black"}
    assert {it.get_color() for it in axes.get_yticklabels()} == {"white"}


def test_it_draws_where_it_is_told() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    assert outer().plot(ax=right) is figure
    assert right.images
    assert not left.images


def test_where_there_is_no_picture_the_figure_says_why() -> None:
    x = torch.ones(2, requires_grad=True)
    z = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    explanations = [
        (doubled(300), "90,000 entries"),
        (gradlib.explain_vjp(x * 2, x, torch.ones(3)), "[GL102]"),
        (gradlib.explain_vjp(z.abs(), z, torch.ones(2)), "x is complex"),
    ]
    for explanation, expected in explanations:
        figure = explanation.plot()
        (text,) = drawn(figure).texts
        assert expected in text.get_text()
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
        axes = plt.figure().subplots()
        assert explanation.plot(ax=axes) is axes.figure


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_tensors_without_entries_are_drawn(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    drawn(gradlib.explain_vjp(x * 2, x, torch.ones(shape)).plot())
    drawn(gradlib.explain_vjp((x * 2).sum(), x).plot())


def test_the_grid_of_a_style_crosses_no_number_out() -> None:
    with plt.style.context("ggplot"):
        axes = drawn(doubled(3).plot())
    lines = [*axes.get_xgridlines(), *axes.get_ygridlines()]
    assert not any(line.get_visible() for line in lines)


@pytest.mark.parametrize("wrong", [plt, "flow", 0])
def test_it_draws_on_nothing_but_axes(wrong: Any) -> None:
    with pytest.raises(gradlib.RecordingArgumentError, match="ax must be the Axes"):
        doubled(3).plot(ax=wrong)


def test_of_several_inputs_that_are_too_wide_together_each_has_a_table() -> None:
    layer = nn.Linear(3, 2)
    x = torch.tensor([1.0, 2.0, 3.0])
    v = torch.ones(2)
    text = str(gradlib.explain_vjp(layer(x), dict(layer.named_parameters()), v))
    _, of_weight, of_bias = text.split("\n\n")
    assert of_weight.splitlines() == [
        'J["weight"], with v in front of its rows and vᵀJ["weight"] below its columns',
        "               v  [0, 0]  [0, 1]  [0, 2]  [1, 0]  [1, 1]  [1, 2]",
        "y[0]           1  1       2       3       0       0       0",
        "y[1]           1  0       0       0       1       2       3",
        'vᵀJ["weight"]     1       2       3       1       2       3',
    ]
    assert of_bias.splitlines()[1:] == [
        "             v  [0]  [1]",
        "y[0]         1  1    0",
        "y[1]         1  0    1",
        'vᵀJ["bias"]     1    1',
    ]


def test_where_one_input_is_too_wide_no_numbers_are_shown() -> None:
    layer = nn.Linear(11, 2)
    explanation = gradlib.explain_vjp(
        layer(torch.ones(11)), [*layer.parameters()], torch.ones(2)
    )
    assert "with v in front" not in str(explanation)

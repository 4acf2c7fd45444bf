import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from bs4 import BeautifulSoup, Tag
from torch import Tensor, nn

from mkdocs_hooks import cache, jacobians, playground

each_function = pytest.mark.parametrize("function", jacobians.FUNCTIONS)
Function = Callable[[], tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def same_random_numbers_after() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


# What torch computes


@each_function
def test_the_code_shown_makes_y(function: Function) -> None:
    names: dict[str, object] = {"torch": torch, "nn": nn}
    computed = jacobians.compute(function)
    exec("\n".join(computed.code), names)
    x, y = function()
    assert torch.equal(torch.as_tensor(names["x"]), x)
    assert torch.equal(torch.as_tensor(names["y"]), y)
    assert (computed.x_shape, computed.y_shape) == (x.shape, y.shape)


@each_function
def test_the_jacobian_gives_every_vjp(function: Function) -> None:
    computed = jacobians.compute(function)
    jacobian = torch.tensor(computed.jacobian)
    x, y = function()
    (loss_gradient,) = torch.autograd.grad(
        jacobians.next_function(y), y, retain_graph=True
    )
    torch.testing.assert_close(
        torch.tensor(computed.loss_gradient), loss_gradient.flatten()
    )
    for v in (torch.ones_like(y), loss_gradient, torch.randn_like(y)):
        (result,) = torch.autograd.grad(y, x, v, retain_graph=True)
        torch.testing.assert_close(v.flatten() @ jacobian, result.flatten())
    ones = torch.tensor(computed.gradient_for_ones)
    torch.testing.assert_close(ones, jacobian.sum(0))


def test_random_numbers_go_on_as_before() -> None:
    before = torch.get_rng_state()
    jacobians.compute(jacobians.network)
    assert torch.equal(torch.get_rng_state(), before)


# What the page gets


@pytest.fixture(scope="module")
def made() -> BeautifulSoup:
    return BeautifulSoup(playground.playground(), "html.parser")


def examples(made: BeautifulSoup) -> list[tuple[Tag, jacobians.Computed]]:
    computed = [jacobians.compute(function) for function in jacobians.FUNCTIONS]
    return list(zip(made.select("fieldset"), computed, strict=True))


def numbers(example: Tag, selector: str) -> list[float]:
    return [float(cell.get_text()) for cell in example.select(selector)]


def test_a_table_shows_v_j_and_the_result(made: BeautifulSoup) -> None:
    for example, computed in examples(made):
        assert [it["value"] for it in example.select("tbody input")] == ["1"] * len(
            computed.jacobian
        )
        rows = [
            numbers(row, "td:not(:has(input))") for row in example.select("tbody tr")
        ]
        for row, values in zip(rows, computed.jacobian, strict=True):
            assert row == pytest.approx(values, abs=5e-5)
        shown = numbers(example, ".results td")
        assert shown == pytest.approx(computed.gradient_for_ones, abs=5e-5)


def test_the_points_are_aligned_and_integers_have_none(made: BeautifulSoup) -> None:
    for example, computed in examples(made):
        texts = [
            cell.get_text() for cell in example.select("tbody td:not(:has(input))")
        ]
        whole = all(value.is_integer() for row in computed.jacobian for value in row)
        decimals = {len(text.partition(".")[2]) for text in texts}
        assert decimals == ({0} if whole else {4})


def test_the_module_gets_exact_numbers(made: BeautifulSoup) -> None:
    for example, computed in examples(made):
        script = example.select_one("script")
        assert script
        data = json.loads(script.get_text())
        assert data["jacobian"] == computed.jacobian
        assert data["lossGradient"] == computed.loss_gradient
        assert jacobians.LOSS in data["words"]["dL/dy"]


def test_every_field_and_row_is_named(made: BeautifulSoup) -> None:
    for example, computed in examples(made):
        rows = [name.get_text() for name in example.select("tbody th")]
        assert [it["aria-label"] for it in example.select("tbody input")] == [
            name.replace("y", "v") for name in rows
        ]
        assert rows == playground.entries("y", computed.y_shape)
    assert playground.entries("x", (2, 2)) == ["x[0,0]", "x[0,1]", "x[1,0]", "x[1,1]"]


def test_no_id_is_there_twice(made: BeautifulSoup) -> None:
    ids = [element["id"] for element in made.select("[id]")]
    assert len(ids) == len(jacobians.FUNCTIONS) == len(set(map(str, ids)))
    for result in made.select(".results button"):
        assert result["aria-describedby"] in ids


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (20.0, "20"),
        (0.0, "0"),
        (12.3456, "12.35"),
        (-0.07134844, "-0.0713"),
        (0.5, "0.5"),
        (1234.56, "1235"),
    ],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert playground.short(value) == shown


def test_it_stands_where_the_marker_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "ROOT", tmp_path)
    texts = iter(["here"])  # it is made once; the second time it is in the cache
    monkeypatch.setattr(playground, "playground", lambda: next(texts))
    assert playground.on_page_content("<p>another page</p>") == "<p>another page</p>"
    for _ in range(2):
        page = f"<p>before</p>\n{playground.MARKER}\n<p>after</p>"
        shown = playground.on_page_content(page)
        assert shown == "<p>before</p>\nhere\n<p>after</p>"

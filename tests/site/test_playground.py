"""The playground in a real browser: what it shows is what torch computes.

It is opened once. Each test begins with a fresh copy of the page's content.
"""

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, ViewportSize, expect
from torch import Tensor

from mkdocs_hooks import jacobians

from .browsing import (
    PATIENCE,
    SCHEMES,
    STILL,
    TWO_FRAMES,
    Scheme,
    Server,
    listen,
    pale_text,
    wrong_for_some_readers,
)

URL = "questions/why-does-autograd-grad-need-grad-outputs/"
EXAMPLE = "vjp-playground > fieldset"
WIDE: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 800}
# As Material's instant loading does it, when it is on.
LOAD_IN_PLACE = """async () => {
  window.loaded ??= await (await fetch(location)).text()
  const page = new DOMParser().parseFromString(loaded, "text/html")
  const content = page.querySelector(".md-content")
  document.querySelector(".md-content").replaceWith(document.adoptNode(content))
}"""
# Types each v into its example, and reads what is shown then.
TYPE_AND_READ = """asked => asked.map(([i, v]) => {
  const example = document.querySelectorAll("vjp-playground > fieldset")[i]
  example.querySelectorAll("input").forEach((input, k) => {
    input.value = v[k]
    input.dispatchEvent(new Event("input"))
  })
  const results = [...example.querySelectorAll(".results button")]
  return results.map(result => [Number(result.dataset.value), result.textContent])
})"""
READ = """example => {
  const all = selector => [...example.querySelectorAll(selector)]
  const texts = selector => all(selector).map(element => element.textContent)
  return {
    v: all("input").map(input => Number(input.value)),
    results: all(".results button").map(button => Number(button.dataset.value)),
    x: texts("thead tr:first-child th"),
    y: texts("tbody button"),
    words: example.querySelector(".words").textContent,
    pressed: texts(".choices [aria-pressed=true]"),
    hot: texts(".hot button"),
    picked: all(".picked").map(e => e.parentNode.cells.length - e.cellIndex),
    picked_result: texts(".results [aria-pressed=true]").length,
    counts: texts(".counts button"),
    sum: example.querySelector(".sum").textContent,
  }
}"""
FUNCTIONS = range(len(jacobians.FUNCTIONS))
each_function = pytest.mark.parametrize(
    "index", FUNCTIONS, ids=[function.__name__ for function in jacobians.FUNCTIONS]
)


# What torch computes


def run(index: int) -> tuple[Tensor, Tensor]:
    """Return x and y of a function."""
    with torch.random.fork_rng(devices=[]):
        return jacobians.FUNCTIONS[index]()


def size(index: int) -> int:
    return run(index)[1].numel()


def vjp(index: int, v: list[float]) -> list[float]:
    """Return what torch.autograd.grad gives."""
    x, y = run(index)
    grad_outputs = torch.tensor(v).reshape(y.shape)
    return torch.autograd.grad(y, x, grad_outputs=grad_outputs)[0].flatten().tolist()


def one_hot(index: int, at: int) -> list[float]:
    return torch.eye(size(index))[at].tolist()


def close(values: Any) -> Any:
    """Compare with numbers that torch computed in single precision."""
    return pytest.approx(values, rel=1e-5, abs=1e-5)


def as_shown(values: Any) -> Any:
    """Compare with numbers that are shown with four digits or decimals."""
    return pytest.approx(values, rel=5.1e-4, abs=5.1e-5)


# What the page shows


@pytest.fixture(scope="module")
def opened(browser: Browser, site: Server) -> Iterator[Page]:
    page = browser.new_page(reduced_motion="reduce")
    page.set_default_timeout(PATIENCE)
    heard = listen(page, site)
    page.goto(site.url + URL)
    page.add_style_tag(content=STILL)
    yield page
    assert heard == []
    page.close()


@pytest.fixture
def playground(opened: Page) -> Page:
    opened.set_viewport_size(WIDE)
    opened.emulate_media(color_scheme="light")
    opened.evaluate(LOAD_IN_PLACE)
    return opened


def choose(page: Page, index: int) -> Locator:
    """Show a function as a reader does, and return its example."""
    page.locator(".functions label").nth(index).click()
    example = page.locator(EXAMPLE).nth(index)
    expect(example).to_be_visible()
    return example


def read(example: Locator) -> Any:
    return example.evaluate(READ)


# The numbers


def test_shows_what_autograd_grad_gives(playground: Page) -> None:
    torch.manual_seed(0)
    functions = [k % len(FUNCTIONS) for k in range(50)]
    vectors = [(5 * torch.randn(size(index))).tolist() for index in functions]
    asked = list(zip(functions, vectors, strict=True))
    shown = playground.evaluate(TYPE_AND_READ, asked)
    for (index, v), entries in zip(asked, shown, strict=True):
        values, texts = zip(*entries, strict=True)
        assert list(values) == close(vjp(index, v)), (index, v)
        assert [float(text) for text in texts] == as_shown(list(values))


@each_function
def test_the_buttons_set_v(playground: Page, index: int) -> None:
    example = choose(playground, index)
    _, y = run(index)
    loss_gradient = torch.autograd.grad(jacobians.next_function(y), y)[0].flatten()
    names, last = read(example)["y"], y.numel() - 1

    def press(name: str, v: list[float], button: str, words: str) -> None:
        example.get_by_role("button", name=name, exact=True).click()
        now = read(example)
        assert now["v"] == as_shown(v), name
        assert now["results"] == close(vjp(index, v)), name
        assert now["pressed"] == [button], name
        assert now["words"].startswith(words), name
        hot = [y for y, value in zip(names, v, strict=True) if value]
        assert now["hot"] == (hot if button == "one-hot" else []), name

    def press_one_hot(name: str, at: int) -> None:
        words = f"v is one-hot at {names[at]}: vᵀJ is that row"
        press(name, one_hot(index, at), "one-hot", words)

    press("zeros", [0.0] * len(names), "zeros", "v is all zeros: so is vᵀJ")
    press("ones", [1.0] * len(names), "ones", "v is all ones: each entry of vᵀJ")
    press("dL/dy", loss_gradient.tolist(), "dL/dy", "v is dL/dy of a next function")
    press_one_hot("one-hot", 0)
    press_one_hot("one-hot, one entry on", 1)
    press_one_hot("one-hot, one entry back", 0)
    press_one_hot("one-hot, one entry back", last)
    press_one_hot("one-hot", last)
    press_one_hot("one-hot, one entry on", 0)
    press_one_hot(names[2], 2)


@each_function
def test_dl_dy_gives_the_gradient_of_the_loss(playground: Page, index: int) -> None:
    example = choose(playground, index)
    example.get_by_role("button", name="dL/dy").click()
    x, y = run(index)
    (gradient,) = torch.autograd.grad(jacobians.next_function(y), x)
    assert read(example)["results"] == close(gradient.flatten().tolist())


def test_weights(playground: Page) -> None:
    example = choose(playground, 2)
    example.get_by_label("v[0,1]").fill("2.5")
    now = read(example)
    assert now["results"] == close(vjp(2, [1, 2.5, 1, 1]))
    assert now["words"].startswith("v holds weights")
    assert now["pressed"] == []


def test_stepping_goes_on_from_what_was_typed(playground: Page) -> None:
    example = choose(playground, 0)
    example.get_by_role("button", name="zeros").click()
    example.get_by_label("v[1,1]").fill("1")
    assert read(example)["hot"] == ["y[1,1]"]
    example.get_by_role("button", name="one-hot, one entry on").click()
    assert read(example)["hot"] == ["y[1,2]"]


def test_a_field_without_a_number_counts_as_zero(playground: Page) -> None:
    example = choose(playground, 2)
    field = example.get_by_label("v[0,0]")
    field.fill("")
    assert read(example)["results"] == close(vjp(2, [0, 1, 1, 1]))
    field.blur()
    expect(field).to_have_value("0")


def test_scrolling_over_a_field_does_not_edit_it(playground: Page) -> None:
    field = choose(playground, 0).get_by_label("v[1,1]")
    field.click()
    playground.mouse.wheel(0, 100)
    playground.evaluate(TWO_FRAMES)
    expect(field).to_have_value("1")


# What makes an entry


def worth(terms: str) -> float:
    """Compute a written sum, such as 2 · 3 + 1 · (-4)."""
    total = 0.0
    for term in terms.replace("\xa0", " ").split(" + "):
        v, entry = (float(factor.strip("()")) for factor in term.split(" · "))
        total += v * entry
    return total


@each_function
def test_the_column_and_the_v_that_make_an_entry(playground: Page, index: int) -> None:
    example = choose(playground, index)
    n = size(index)
    v = [2.0, *[-1.5] * (n - 2), 0.0]
    playground.evaluate(TYPE_AND_READ, [[index, v]])
    jacobian = [vjp(index, one_hot(index, i)) for i in range(n)]
    for j, result in enumerate(vjp(index, v)):
        example.locator(".results button").nth(j).focus()
        now = read(example)
        # Its name, the entry itself, and the column of J.
        assert now["picked"] == [len(now["x"]) - j] * (2 + n)
        assert now["picked_result"] == 1
        made_of = [now["y"][i] for i in range(n) if v[i] and jacobian[i][j]]
        assert now["counts"] == made_of
        if not made_of:
            assert now["sum"] == f"{now['x'][j]}: 0, as every term is 0"
            continue
        name, terms, shown = re.split(r":\s|\s[=≈]\s", now["sum"])
        assert name == now["x"][j]
        assert worth(terms) == pytest.approx(result, abs=1e-3)
        assert float(shown) == as_shown(result)


def test_what_picks_an_entry(playground: Page) -> None:
    example = choose(playground, 1)
    entry = example.locator(".results button").nth(4)
    name = example.locator("thead th[scope=col]").nth(4)
    cell = example.locator("tbody tr").nth(1).locator("td").nth(5)
    for pick in (entry.hover, name.hover, cell.hover, entry.focus, entry.click):
        example.get_by_label("v[0,0]").focus()
        playground.mouse.move(0, 0)
        example.locator("thead th[scope=col]").first.hover()
        assert "x[0,0]" in read(example)["sum"]
        pick()
        assert "x[1,1]" in read(example)["sum"]


def test_the_sum_says_when_it_is_rounded(playground: Page) -> None:
    example = choose(playground, 0)
    expect(example.locator(".sum")).to_contain_text("=")
    example.get_by_label("v[0,0]").fill("0.123456")
    expect(example.locator(".sum")).to_contain_text("≈")


# Who reads it, and on what


def test_without_javascript(browser: Browser, site: Server) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(site.url + URL)
    expect(page.locator("vjp-playground noscript")).to_be_visible()
    for index in FUNCTIONS:
        example = choose(page, index)
        assert page.locator(EXAMPLE).locator("visible=true").count() == 1
        n = size(index)
        now = read(example)
        assert now["v"] == [1] * n
        assert now["words"].startswith("v is all ones")
        shown = example.locator(".results button").all_inner_texts()
        assert [float(text) for text in shown] == as_shown(vjp(index, [1.0] * n))
        cells = example.locator("tbody td:not(:has(input))").all_inner_texts()
        jacobian = [entry for i in range(n) for entry in vjp(index, one_hot(index, i))]
        assert [float(text) for text in cells] == as_shown(jacobian)
        expect(example.locator(".choices")).to_be_hidden()
        expect(example.locator("input").first).to_be_disabled()
    page.close()


def test_a_result_is_read_out_once_the_reader_pauses(page: Page, site: Server) -> None:
    page.clock.install()
    page.goto(site.url + URL)
    page.clock.pause_at(datetime.now() + timedelta(hours=1))
    example = choose(page, 2)
    status = page.get_by_role("status")
    entry = example.get_by_role("button", name="x[0,1] 8")
    entry.hover()
    entry.focus()
    expect(entry).to_have_accessible_description("x[0,1]: 1 · 8 = 8")
    page.clock.run_for(5000)
    expect(status).to_be_empty()
    example.get_by_label("v[0,1]").focus()
    for key in "12.5":
        page.keyboard.press(key)
        page.clock.run_for(500)
        expect(status).to_be_empty()
    page.clock.run_for(1000)
    expect(status).to_have_text(
        "v holds weights. vᵀJ: x[0,0] 6, x[0,1] 100, x[1,0] 10, x[1,1] 12"
    )


def test_with_the_keyboard(playground: Page) -> None:
    playground.locator(".functions input").first.focus()
    playground.keyboard.press("ArrowRight")
    playground.keyboard.press("ArrowRight")
    example = playground.locator(EXAMPLE).nth(2)
    expect(example).to_be_visible()
    passed: list[str] = []
    for _ in range(14):
        playground.keyboard.press("Tab")
        name, outline = playground.evaluate(
            "(e => [e.ariaLabel ?? e.textContent, getComputedStyle(e).outlineStyle])"
            "(document.activeElement)"
        )
        passed.append(name)
        assert outline == "solid", f"the focus on {name} is not seen"
    assert passed == [
        *("ones", "zeros", "dL/dy"),
        *("one-hot, one entry back", "one-hot", "one-hot, one entry on"),
        *("x[0,0] 6", "x[0,1] 8", "x[1,0] 10", "x[1,1] 12"),
        *("v[0,0]", "v[0,1]", "v[1,0]", "v[1,1]"),
    ]
    playground.keyboard.type("-2")
    playground.keyboard.press("Shift+Tab")
    playground.keyboard.press("ArrowUp")
    assert read(example)["results"] == close(vjp(2, [1, 1, 2, -2]))


@each_function
def test_on_a_phone(playground: Page, index: int) -> None:
    playground.set_viewport_size(PHONE)
    example = choose(playground, index)
    example.get_by_role("button", name="dL/dy").click()
    cut = example.locator("input").evaluate_all(
        "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.value)"
    )
    assert cut == []
    targets = example.locator("button, input").evaluate_all(
        "all => all.map(e => [e.offsetWidth, e.offsetHeight])"
    )
    # They stand in rows of 44 px.
    assert [it for it in targets if it[0] < 36 or it[1] < 40] == []
    playground.evaluate(TYPE_AND_READ, [[index, [-1.23456e30] * size(index)]])
    assert playground.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    too_wide = example.locator("td, th").evaluate_all(
        "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.outerHTML)"
    )
    assert too_wide == []


def test_the_result_stays_in_view_and_hides_no_field(playground: Page) -> None:
    playground.set_viewport_size(PHONE)
    example = choose(playground, 0)
    example.get_by_label("v[3,3]").focus()
    example.evaluate("e => scrollTo(0, scrollY + e.getBoundingClientRect().bottom)")
    for _ in range(size(0) - 1):
        playground.keyboard.press("Shift+Tab")
        expect(example.locator(".results button").first).to_be_in_viewport()
        field, head = playground.evaluate(
            """[document.activeElement, document.activeElement.closest("table").tHead]
            .map(e => e.getBoundingClientRect()).map(b => [b.top, b.bottom])"""
        )
        assert field[0] >= head[1]


def test_for_some_readers(playground: Page) -> None:
    for index in FUNCTIONS:
        playground.locator(EXAMPLE).nth(index).evaluate(
            "e => e.style.display = 'block'"
        )
    found = wrong_for_some_readers(playground, within="vjp-playground")
    assert found == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours(playground: Page, scheme: Scheme) -> None:
    # A small example, to be quick, in which every kind of cell is seen.
    example = choose(playground, 2)
    example.get_by_role("button", name="one-hot", exact=True).click()
    for kind in ("hot td", "picked", "counts input", "zero", "picked.zero", "results"):
        assert example.locator(f".{kind}").count() > 0
    example.locator("table :is(td, button)").evaluate_all(
        # axe does not judge a single character.
        "all => all.forEach(e => { if (!e.children.length) e.textContent += '00' })"
    )
    playground.emulate_media(color_scheme=scheme)
    playground.evaluate(TWO_FRAMES)
    seen = f"{EXAMPLE}:nth-of-type(3)"
    assert pale_text(playground, within=seen) == []

"""Tables and explanations in a notebook, as Jupyter Lab shows them."""

from typing import Any

import pytest
import torch
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook, new_output
from playwright.sync_api import Page

import gradlib

COMPUTED = (
    "node => { const s = getComputedStyle(node); return [s.textAlign, s.fontFamily] }"
)


def shown(page: Page, thing: Any) -> None:
    """Open a notebook whose only cell shows a thing."""
    html = {"text/html": thing._repr_html_()}
    cell = new_code_cell(outputs=[new_output("execute_result", html)])
    text, _ = HTMLExporter().from_notebook_node(new_notebook(cells=[cell]))
    # What it would fetch is for formulas and widgets.
    page.route("http*://**", lambda route: route.abort())
    page.set_content(text, wait_until="domcontentloaded")


@pytest.fixture(scope="module")
def y() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) ** 2


def test_cells_of_tables_begin_at_the_left(page: Page, y: torch.Tensor) -> None:
    shown(page, gradlib.hook_report(torch.nn.Linear(2, 1), y.detach()))
    for cell in ("th", "td"):
        aligned, _ = page.locator(f".gradlib {cell}").first.evaluate(COMPUTED)
        assert aligned == "left"


def test_the_code_of_an_explanation_is_in_a_font_for_code(
    page: Page, y: torch.Tensor
) -> None:
    shown(page, gradlib.explain_vjp(y, y))
    assert page.locator(".gradlib pre").evaluate(COMPUTED)[1] == "monospace"

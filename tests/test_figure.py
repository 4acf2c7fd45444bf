"""A recording's figure in a notebook."""

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

RECORD = """
import matplotlib.pyplot as plt
import torch
import gradlib
model = torch.nn.Linear(2, 1)
with gradlib.record(model) as recording:
    model(torch.ones(1, 2)).sum().backward()
"""


@pytest.fixture(scope="module")
def pictures() -> list[int]:
    """How many pictures each cell shows."""
    cells = [
        "recording.plot()",
        "recording.plot()\nplt.show()",
        "figure = recording.plot()",
        "figure",
        "_ = [recording.plot() for _ in range(2)]",
    ]
    notebook = new_notebook(cells=[new_code_cell(text) for text in (RECORD, *cells)])
    NotebookClient(notebook, kernel_name="python3").execute()
    assert nbformat.validate(notebook) is None
    return [
        sum("image/png" in output.get("data", {}) for output in cell.outputs)
        for cell in notebook.cells[1:]
    ]


def test_a_notebook_shows_each_figure_once(pictures: list[int]) -> None:
    assert pictures == [1, 1, 1, 1, 2]

"""The small tables of entries hold what the recordings hold."""

from copy import deepcopy
from types import SimpleNamespace
from typing import cast

import pytest
from bs4 import BeautifulSoup
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from mkdocs_hooks import hook_entries, hook_recordings

PAGE = cast(Page, SimpleNamespace(file=SimpleNamespace(src_uri="a.md")))
LINEAR = '<div class="linear-entries" data-from="1.2.0" data-to="1.7.1"></div>'


def rows(marker: str) -> list[list[str]]:
    """Return the texts of the table that replaces a marker, without its heads."""
    table = BeautifulSoup(
        hook_entries.on_page_content(marker, page=PAGE), "html.parser"
    )
    return [
        [cell.get_text() for cell in row.find_all(["th", "td"])]
        for row in table.select("tbody tr")
    ]


def test_entries_are_named_after_the_tensors_they_belong_to() -> None:
    cases = "linear-2d linear-2d-no-bias conv2d-no-bias"
    assert rows(f'<div class="entries" data-cases="{cases}"></div>') == [
        ["nn.Linear(20, 30)", "the input", "bias", "the input", "weight, transposed"],
        [
            "nn.Linear(20, 30, bias=False)",
            "the input",
            "the input",
            "weight, transposed",
            "no entry",
        ],
        ["nn.Conv2d(3, 5, 3, bias=False)", "the input", "the input", "weight", "None"],
    ]


def test_linear_layers_are_counted_by_dimensions() -> None:
    assert rows(LINEAR) == [
        ["2 dimensions", "3", "2"],
        ["1, 3 or 4 dimensions", "2", "1"],
    ]


def test_a_length_that_changes_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = deepcopy(hook_recordings.every_build())
    builds["1.7.1"]["linear-3d"]["legacy"]["calls"][0]["grad_input"].pop()
    monkeypatch.setattr(hook_recordings, "every_build", lambda: builds)
    assert ["3 dimensions", "2 then 1", "1"] in rows(LINEAR)


@pytest.mark.parametrize(
    "marker",
    [
        '<div class="entries" data-cases="linear-9d"></div>',
        LINEAR.replace("1.7.1", "1.7.9"),
        LINEAR.replace(' data-to="1.7.1"', ""),
    ],
)
def test_a_marker_that_names_nothing_fails(marker: str) -> None:
    with pytest.raises(PluginError, match=r"a\.md: .* names no case or build"):
        rows(marker)

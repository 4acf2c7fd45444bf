import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from mkdocs_hooks import cache, figures

DRAW = "import matplotlib.pyplot as plt\n\nplt.plot([0, 1])\n"
RANDOM = """import matplotlib.pyplot as plt
import torch

figure, (left, right) = plt.subplots(1, 2)
left.axis("off")
right.axis("off")
right.plot(torch.rand(9))
torch.manual_seed(0)
left.plot(torch.rand(9))
"""


def render(text: str, tmp_path: Path) -> tuple[str, Files]:
    """Return the Markdown that a page becomes, and the files it added."""
    config: Any = SimpleNamespace(
        site_dir="",
        use_directory_urls=True,
        plugins=SimpleNamespace(_current_plugin="figures"),
    )
    source = tmp_path / "docs/topic/page.md"
    source.parent.mkdir(parents=True)
    source.write_text(text)
    file = File("topic/page.md", str(tmp_path / "docs"), "", True)
    page: Any = SimpleNamespace(file=file, url=file.url)
    files = Files([])
    markdown = text.removeprefix("---\ntitle: Page\n---\n")
    shown = figures.on_page_markdown(markdown, page=page, config=config, files=files)
    return shown, files


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "ROOT", tmp_path)


def test_the_figure_stands_below_its_block(tmp_path: Path) -> None:
    text = (
        f'Before.\n\n```python {{figure="A <line> that rises."}}\n{DRAW}```\n\nAfter.\n'
    )
    shown, files = render(text, tmp_path)
    image = (
        '<span class="scrolls" tabindex="0" role="group" aria-label="Figure">'
        '<img class="figure" src="../page-1.svg" alt="A &lt;line&gt; that rises."'
        ' width="576" height="346" style="min-width: 354px"></span>'
    )
    assert shown == f"Before.\n\n```python\n{DRAW}```\n\n{image}\n\n\nAfter.\n"
    svg = files.src_uris["topic/page-1.svg"].content_string
    assert "<svg" in svg


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks that are drawn, by a stand-in that takes no time."""
    blocks: list[str] = []

    def draw(code: str, *_: object) -> str:
        blocks.append(code)
        return '<svg viewBox="0 0 72 72"/>'

    monkeypatch.setattr(figures, "draw", draw)
    return blocks


@pytest.mark.parametrize(
    ("inches", "points", "least"),
    [
        (6, 11, 354),  # where its letters are 9 pixels high
        (6.5, 11, 358),  # as wide as a telephone, which is almost enough
        (9, 9, 648),  # it scrolls
        (2, 4, 192),  # no larger than it was drawn
    ],
)
def test_letters_can_be_read_on_a_telephone(
    tmp_path: Path, inches: float, points: float, least: int
) -> None:
    code = (
        "import matplotlib.pyplot as plt\n"
        f"figure = plt.figure(figsize=({inches}, 1))\n"
        f'figure.text(0, 0.5, "text", size={points})\n'
        'figure.text(0, 0, "larger", size=14)\n'
    )
    shown, _ = render(f'```python {{figure="Texts."}}\n{code}```\n', tmp_path)
    assert f'style="min-width: {least}px"' in shown


def test_in_an_indented_block(tmp_path: Path, drawn: list[str]) -> None:
    text = '!!! note\n\n    ```python {figure="Axes."}\n    if a:\n        b\n    ```\n'
    shown, _ = render(text, tmp_path)
    assert '    ```\n\n    <span class="scrolls"' in shown
    assert '<img class="figure" src="../page-1.svg"' in shown
    assert drawn == ["if a:\n    b\n"]


@pytest.mark.parametrize(
    ("colours", "kind"),
    [
        ("viridis", "figure as-drawn"),
        ("RdBu", "figure as-drawn"),
        ("Greys", "figure"),
    ],
)
def test_what_is_told_by_lightness_is_not_turned_on_a_dark_page(
    tmp_path: Path, colours: str, kind: str
) -> None:
    code = f"import matplotlib.pyplot as plt\nplt.imshow([[1, 2]], cmap={colours!r})\n"
    shown, _ = render(f'```python {{figure="Colours."}}\n{code}```\n', tmp_path)
    assert f'<img class="{kind}" ' in shown


def test_drawn_once_for_each_block(drawn: list[str]) -> None:
    for code in ("one", "two", "one"):
        figures.cached_draw(code, "page.md", 1)
    assert drawn == ["one", "two"]


def test_only_what_is_seeded_is_drawn_the_same_again() -> None:
    axes = '<g id="axes_.">'
    ground, seeded, unseeded = re.split(axes, figures.draw(RANDOM, "page.md"))
    white = figures.draw(RANDOM, "page.md", background="white")
    white, again, other = re.split(axes, white)
    assert seeded == again
    assert unseeded != other
    assert "fill: #ffffff" in white
    assert "fill: #" not in ground


def test_a_block_that_raises_names_page_and_line(tmp_path: Path) -> None:
    text = (
        '---\ntitle: Page\n---\n\n```python {figure="None."}\na = 1\nb = a / 0\n```\n'
    )
    with pytest.raises(PluginError) as error:
        render(text, tmp_path)
    message = str(error.value)
    assert message.startswith("docs/topic/page.md:6: no figure from this block\n")
    assert 'File "docs/topic/page.md", line 7, in <module>' in message
    assert "ZeroDivisionError" in message


def test_a_block_without_a_figure_is_an_error(tmp_path: Path) -> None:
    text = '```python {figure="None."}\nprint("no figure")\n```\n'
    with pytest.raises(PluginError, match=r"page.md:2: this block draws no"):
        render(text, tmp_path)


def test_an_empty_text_is_an_error(tmp_path: Path) -> None:
    text = f'```python {{figure=" "}}\n{DRAW}```\n'
    with pytest.raises(PluginError, match=r"page.md:1: figure=\"\" must say"):
        render(text, tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        "```python {figure='Axes.'}",
        '```python { figure="Axes." }',
        '```py {figure="Axes."}',
        '````python {figure="Axes."}',
        '```python {test="skip" figure="Axes."}',
    ],
)
def test_a_header_written_otherwise_is_an_error(tmp_path: Path, header: str) -> None:
    ticks = header[: header.index("p")]
    with pytest.raises(PluginError, match=r"page.md:3: write the block of a figure as"):
        render(f"Text.\n\n{header}\na = 1\n{ticks}\n", tmp_path)


def test_only_markdown_pages_are_searched(tmp_path: Path) -> None:
    file = File("x.py", str(tmp_path), str(tmp_path), use_directory_urls=True)
    page: Any = SimpleNamespace(file=file)
    text = '# ```python {figure="x"}\n'
    config: Any = None
    assert (
        figures.on_page_markdown(text, page=page, config=config, files=Files([]))
        == text
    )

"""The pages of examples, built as a reader builds them, and what is refused."""

import logging
import shutil
from io import StringIO
from logging import StreamHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mkdocs_jupyter.convert
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort, PluginError
from mkdocs.structure.files import File, Files

from mkdocs_hooks import cache, example_pages
from mkdocs_hooks.run_code import Output

CONFIG = """
site_name: test
theme: {name: material, font: false}
plugins: [{mkdocs-jupyter: {include: ["examples/*.py"], ignore_h1_titles: true,
                            include_source: true, execute: true}}]
hooks: [mkdocs_hooks/example_pages.py, mkdocs_hooks/maths.py]
markdown_extensions: [admonition, attr_list, pymdownx.arithmatex: {generic: true},
                      pymdownx.highlight: {pygments_lang_class: true},
                      pymdownx.superfences, toc]
validation: {anchors: warn}
"""

EXAMPLE = '''\
# %% [markdown]
# # An example
# See [the start](../index.md#start) and $v^2$.
#
# !!! note
#     Noted.

# %%
def fenced():
    """Print ```ticks```."""
    print("<b>```ticks```</b>")


fenced()

# %% [markdown]
# ## A figure

# %% alt="Two points, and a \\"line\\"."
import matplotlib.pyplot as plt

_ = plt.plot([0, 1])
'''


def build_site(root: Path, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build a site of one page and one example, as `mkdocs build --strict` does."""
    shutil.copytree(cache.ROOT / "mkdocs_hooks", root / "mkdocs_hooks")
    for path, text in {
        "mkdocs.yml": CONFIG,
        "docs/index.md": "# Start\n[Title](examples/some.py#a-figure)\n",
        "examples/some.py": example,
    }.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)
    monkeypatch.setattr(cache, "ROOT", root)
    # A hook puts its own in this place, for good.
    monkeypatch.setattr(mkdocs_jupyter.convert, "nb2html", None)
    build(load_config(str(root / "mkdocs.yml"), strict=True))


def test_an_example_becomes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_site(tmp_path, EXAMPLE, monkeypatch)
    folder = tmp_path / "site/examples/some"
    page = (folder / "index.html").read_text()
    assert "<title>An example - test</title>" in page
    assert '<a href="some.py" download>' in page
    assert (folder / "some.py").read_text() == EXAMPLE
    assert '<a href="../../#start">' in page
    assert '<div class="admonition note">' in page
    assert "<math" in page
    assert '<h2 id="a-figure">' in page
    assert '<a href="#a-figure" class="md-nav__link">' in page
    assert '<div class="language-python highlight">' in page
    printed = page[page.index('<div class="language-text output') :]
    assert "<code>&lt;b&gt;```ticks```&lt;/b&gt;\n</code>" in printed
    assert 'alt="Two points, and a &quot;line&quot;."' in page
    assert "<svg" in next((tmp_path / "site/examples").glob("some-*.svg")).read_text()
    assert "jp-" not in page  # nothing of nbconvert's own page


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (
            "# %% [markdown]\n# # Title\n\n# %%\nx = 1\nx / 0\n",
            'File "examples/some.py", line 6, in <module>\n    x / 0',
        ),
        (
            "# %% [markdown]\n# # Title\n# [No](nosuch.md)\n",
            "contains a link 'nosuch.md'",
        ),
    ],
    ids=["raises", "link"],
)
def test_a_bad_example_fails_the_build(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    example: str,
    message: str,
) -> None:
    heard = StringIO()
    monkeypatch.setattr(logging.getLogger("mkdocs"), "handlers", [StreamHandler(heard)])
    with pytest.raises(Abort):
        build_site(tmp_path, example, monkeypatch)
    assert message in heard.getvalue()


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ("# %%\nx = 1\n", "begin with a Markdown cell that has a # title"),
        ("x = 1\n", "begin the file, and each cell, with `# %%`"),
        ("# %%\nx = 1\n#%%\ny = 1\n", "begin the file, and each cell, with `# %%`"),
    ],
)
def test_a_bad_shape_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str, message: str
) -> None:
    monkeypatch.setattr(cache, "ROOT", tmp_path)
    path = tmp_path / "some.py"
    path.write_text(example)
    page: Any = SimpleNamespace(file=File("some.py", str(tmp_path), "", True))
    config: Any = None
    with pytest.raises(PluginError, match=f"^some.py:1: {message}"):
        example_pages.to_markdown([[]], page, config, Files([]))


FIGURE: Output = ("svg", "<svg/>")


def check(*outputs: Output, alt: str = "") -> None:
    example_pages.check(list(outputs), alt, "examples/some.py:12")


def test_what_passes() -> None:
    check()
    check(("stdout", "printed\n"))
    check(FIGURE, alt="A line.")


def test_a_figure_needs_alt_text() -> None:
    with pytest.raises(PluginError, match=r"some.py:12: say what the figure shows"):
        check(FIGURE)


@pytest.mark.parametrize("outputs", [(), (FIGURE, FIGURE)], ids=["none", "two"])
def test_alt_text_needs_one_figure(outputs: tuple[Output, ...]) -> None:
    message = rf"some.py:12: a cell with alt shows 1 figure, this one {len(outputs)}"
    with pytest.raises(PluginError, match=message):
        check(*outputs, alt="A line.")


def test_a_warning_is_refused() -> None:
    with pytest.raises(PluginError, match=r"some.py:12: .* stderr:\nUserWarning"):
        check(("stderr", "UserWarning: careful\n"))


def test_an_address_is_refused() -> None:
    with pytest.raises(PluginError, match=r"some.py:12: .* address in memory"):
        check(("text", "<matplotlib.lines.Line2D at 0x7f5a>"))


def test_html_is_shown_as_it_is() -> None:
    assert example_pages.printed("html", "<p>h</p>") == (
        '<div class="output" markdown="0"><p>h</p></div>'
    )

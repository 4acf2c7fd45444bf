"""Draw the figures of pages: Python blocks with a `figure` attribute.

    ```python {figure="What is seen, for those who cannot see it."}

Such a block is run while building, and the last matplotlib figure it made is shown
below it.
"""

import hashlib
import html
import math
import os
import re
from textwrap import dedent

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from mkdocs_hooks import cache, fresh

FENCE = re.compile(
    r'^(?P<indent> *)```python \{figure="(?P<alt>[^"]*)"\}\n'
    r"(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
PIXELS_PER_POINT = 4 / 3

SIZE = re.compile(r"scale\(([\d.]+) -\1\)")
"""How matplotlib scales a text in SVG: by a hundredth of its font size in points."""

LEAST = 9
"""The smallest letters on a phone, in pixels; a figure too wide for that scrolls."""

PHONE = range(359, 400)
"""Least widths that are just too wide for a phone: slightly smaller letters will do."""


def draw(code: str, path: str, line: int = 1, background: str = "none") -> str:
    """Run a block of code and return the last figure it made, as SVG.

    Args:
        code: The block.
        path: The file that holds the block, for messages.
        line: The line of that file on which the code begins.
        background: The colour behind the figure; on the site there is none.
    """
    from mkdocs_hooks.run_code import last_figure  # it imports matplotlib

    try:
        svg = fresh.call(last_figure, code, path, line, background, folder=cache.ROOT)
    except RuntimeError as error:
        message = f"{path}:{line}: no figure from this block\n{error}"
        raise PluginError(message) from None
    if svg is None:
        raise PluginError(f"{path}:{line}: this block draws no matplotlib figure")
    return svg


def cached_draw(code: str, path: str, line: int) -> str:
    """Do what `draw` does, once for each block and state of gradlib."""
    key = hashlib.sha256(code.encode()).hexdigest()[:16]
    kept = cache.folder("figures") / f"{key}.svg"
    if not kept.exists():
        drawn = draw(code, path, line)
        kept.parent.mkdir(parents=True, exist_ok=True)  # another build may remove it
        kept.write_text(drawn, encoding="utf-8")
    return kept.read_text(encoding="utf-8")


def image(
    svg: str, alt: str, uri: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Put a figure into the site at `uri` and return the <img> that shows it.

    The <img> has the drawing's own size, so that the text below does not jump on
    loading.
    """
    file = File.generated(config, uri, content=svg)
    files.append(file)
    points = re.findall(r'viewBox="0 0 (\S+) (\S+)"', svg)[0]
    width, height = (round(float(size) * PIXELS_PER_POINT) for size in points)
    # `run_code.svg` marks figures whose meaning would reverse with turned colours.
    kind = "figure as-drawn" if 'data-scale="lightness"' in svg else "figure"
    least = min(width, math.ceil(LEAST / letters(svg) * width))
    least = PHONE.start - 1 if least in PHONE else least
    return (
        f'<span class="scrolls" tabindex="0" role="group" aria-label="Figure">'
        f'<img class="{kind}"'
        f' src="{get_relative_url(file.url, page.url)}" alt="{html.escape(alt)}"'
        f' width="{width}" height="{height}"'
        f' style="min-width: {least}px"></span>'
    )


def letters(svg: str) -> float:
    """Return the size in pixels of the smallest letters of a drawing."""
    sizes = [100 * float(size) for size in SIZE.findall(svg)]
    return PIXELS_PER_POINT * min(sizes, default=100)


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Show below each block with a `figure` attribute the figure it draws."""
    if not page.file.src_uri.endswith(".md"):
        return markdown
    source = page.file.content_string
    path = os.path.relpath(page.file.abs_src_path or page.file.src_uri, cache.ROOT)
    count = 0

    def with_figure(block: re.Match[str]) -> str:
        nonlocal count
        count += 1
        # page.markdown lacks the front matter, so count the lines in the file.
        line = source.count("\n", 0, source.find(block[0])) + 2
        if not block["alt"].strip():
            raise PluginError(f'{path}:{line - 1}: figure="" must say what is seen')
        svg = cached_draw(dedent(block["code"]), path, line)
        uri = f"{page.file.src_uri.removesuffix('.md')}-{count}.svg"
        shown = image(svg, block["alt"], uri, page, config, files)
        fence = f"{block['indent']}```python\n{block['code']}{block['indent']}```"
        return f"{fence}\n\n{block['indent']}{shown}\n"

    markdown = FENCE.sub(with_figure, markdown)
    for number, text in enumerate(markdown.splitlines(), 1):
        if re.search(r"```.*\{.*\bfigure\b", text):
            raise PluginError(
                f"{path}:{number}: write the block of a figure as "
                '```python {figure="what is seen"}'
            )
    return markdown

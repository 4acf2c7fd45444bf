"""Show the programs in examples/ as pages, with what they print and draw.

mkdocs-jupyter decides when an example runs, and keeps the result. This file runs the
example, and joins its cells into one Markdown text that is rendered as any other page:
same look, same extensions, and its links are checked.
"""

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jupytext
import mkdocs_jupyter.convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from mkdocs_hooks import cache, figures, fresh

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from mkdocs_hooks.run_code import Output

log = logging.getLogger("mkdocs.hooks")


def on_config(config: MkDocsConfig) -> None:
    """Make this file run the examples, again whenever gradlib or a version changes."""
    mkdocs_jupyter.convert.nb2html = run
    plugin = config.plugins["mkdocs-jupyter"]
    plugin.config["cache_dir"] = str(cache.folder("examples"))
    if cache.digest("mkdocs_hooks") != cache.HOOKS_IN_USE:
        log.warning("mkdocs_hooks/ was edited: start mkdocs serve again to use it")


@event_priority(100)  # before mkdocs-jupyter looks at the files
def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the examples, which live outside docs/, to the site's files."""
    for path in sorted((cache.ROOT / "examples").glob("*.py")):
        uri = f"examples/{path.name}"
        root = str(cache.ROOT)
        files.append(File(uri, root, config.site_dir, config.use_directory_urls))


def on_page_content(
    content: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str | None:
    """Render an example's page from the outputs that `run` left as its content."""
    if not page.file.src_uri.endswith(".py"):
        return None
    page.markdown = to_markdown(json.loads(content), page, config, files)
    Page.render(page, config, files)  # mkdocs-jupyter has replaced page.render
    return page.content


def run(path: str, **_options: object) -> str:
    """Run an example; return the outputs of each of its cells, as JSON."""
    from mkdocs_hooks.run_code import outputs_of  # it imports matplotlib

    code = [
        (cell.source if cell.cell_type == "code" else "", line + 1)
        for cell, line in located(Path(path))
    ]
    name = os.path.relpath(path, cache.ROOT)
    try:
        return json.dumps(fresh.call(outputs_of, code, name, folder=cache.ROOT))
    except RuntimeError as error:
        raise PluginError(f"{name}: this example failed\n{error}") from None


def located(path: Path) -> "Iterator[tuple[NotebookNode, int]]":
    """Yield each cell of an example with the line of its `# %%`."""
    cells = jupytext.read(path).cells
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(lines, 1) if line.startswith("# %%")]
    if len(starts) != len(cells) or starts[0] != 1:
        name = os.path.relpath(path, cache.ROOT)
        raise PluginError(f"{name}:1: begin the file, and each cell, with `# %%`")
    return zip(cells, starts, strict=True)


def to_markdown(
    outputs: "list[list[Output]]", page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Return an executed example as the Markdown of its page."""
    path = Path(str(page.file.abs_src_path))
    name = os.path.relpath(path, cache.ROOT)
    stem = page.file.src_uri.removesuffix(".py")
    parts: list[str] = []
    for (cell, line), below in zip(located(path), outputs, strict=True):
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        alt = cell.metadata.get("alt", "").strip()
        check(below, alt, f"{name}:{line}")
        parts.append(fence(cell.source, "python"))
        for kind, text in below:
            if kind == "svg":
                uri = f"{stem}-{len(parts)}.svg"
                parts.append(figures.image(text, alt, uri, page, config, files))
            else:
                parts.append(printed(kind, text))
    title, _, rest = "\n\n".join(parts).partition("\n")
    if not title.startswith("# "):
        raise PluginError(f"{name}:1: begin with a Markdown cell that has a # title")
    download = f'<a href="{path.name}" download>Download {path.name}</a>'
    return f"{title}\n\n{download}\n\n{rest}"


def check(outputs: "list[Output]", alt: str, place: str) -> None:
    """Refuse a figure without alt text, and output that is not meant for a reader."""
    drawn = [kind for kind, _ in outputs].count("svg")
    if drawn and not alt:
        raise PluginError(
            f'{place}: say what the figure shows: # %% alt="The loss falls to 0.1."'
        )
    if alt and drawn != 1:
        raise PluginError(
            f"{place}: a cell with alt shows 1 figure, this one {drawn}; "
            "a figure is shown when pyplot made it or when the cell ends with it"
        )
    for kind, text in outputs:
        if kind == "stderr":
            raise PluginError(f"{place}: this cell writes to stderr:\n{text}")
        if " at 0x" in text:
            raise PluginError(
                f"{place}: this cell's output holds an address in memory; "
                "give the last line's value a name, and it is not printed"
            )


def printed(kind: str, text: str) -> str:
    """Return an output that is text or HTML as Markdown."""
    if kind == "html":
        return f'<div class="output" markdown="0">{text}</div>'
    return fence(text.rstrip("\n"), "text {.output .no-copy}")


def fence(text: str, header: str) -> str:
    """Return text as a block, fenced by more backticks than it holds in a row."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{header}\n{text}\n{ticks}"

"""Show the programs in examples/ as pages, with what they print and draw.

mkdocs-jupyter decides when an example runs, and keeps the result. Here the example is
run, and its cells become one Markdown text that is rendered like that of any other
page: same look, same extensions, and its links are checked.
"""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import jupytext
import mkdocs_jupyter.convert
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from mkdocs_hooks import cache, figures

log = logging.getLogger("mkdocs.hooks")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def on_config(config: MkDocsConfig) -> None:
    """Have examples run by this file, again whenever gradlib or a version changes."""
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
    """Render an example's page from the notebook that `run` left as its content."""
    if not page.file.src_uri.endswith(".py"):
        return None
    page.markdown = to_markdown(nbformat.reads(content, 4), page, config, files)
    Page.render(page, config, files)  # page.render is mkdocs-jupyter's own by now
    return page.content


def run(path: str, **_options: object) -> str:
    """Run an example; return its cells and their outputs as notebook JSON."""
    notebook = jupytext.read(path)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        extra_arguments=[
            "--InlineBackend.figure_formats=svg",
            "--IPKernelApp.log_level=ERROR",  # not a word about unencrypted TCP
        ],
        resources={"metadata": {"path": str(cache.ROOT)}},
    )
    # MPLBACKEND=Agg, where somebody has set it, would leave the pages without figures.
    inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    try:
        client.execute(env=os.environ | figures.STYLE | inline)
    except CellExecutionError as error:
        for cell, place in located(notebook, Path(path)):
            if any(o.output_type == "error" for o in cell.get("outputs", [])):
                message = COLOUR.sub("", str(error))
                raise PluginError(f"{place}: this cell failed\n{message}") from None
        raise
    return nbformat.writes(notebook)


def located(notebook: NotebookNode, path: Path) -> Iterator[tuple[NotebookNode, str]]:
    """Yield each cell with its place in the file, as `examples/x.py:12`."""
    name = os.path.relpath(path, cache.ROOT)
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(lines, 1) if line.startswith("# %%")]
    if len(starts) != len(notebook.cells) or starts[0] != 1:
        raise PluginError(f"{name}:1: begin the file, and each cell, with `# %%`")
    for cell, start in zip(notebook.cells, starts, strict=True):
        yield cell, f"{name}:{start}"


def to_markdown(
    notebook: NotebookNode, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Return an executed example as the Markdown of its page."""
    path = Path(str(page.file.abs_src_path))
    stem = page.file.src_uri.removesuffix(".py")
    parts: list[str] = []
    for cell, place in located(notebook, path):
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        check(cell, place)
        parts.append(fence(cell.source, "python"))
        for output in cell.outputs:
            if svg := drawing(output):
                uri = f"{stem}-{len(parts)}.svg"
                alt = cell.metadata["alt"]
                parts.append(figures.image(svg, alt, uri, page, config, files))
            else:
                parts.append(printed(output))
    title, _, rest = "\n\n".join(parts).partition("\n")
    if not title.startswith("# "):
        name = os.path.relpath(path, cache.ROOT)
        raise PluginError(f"{name}:1: begin with a Markdown cell that has a # title")
    download = f'<a href="{path.name}" download>Download {path.name}</a>'
    return f"{title}\n\n{download}\n\n{rest}"


def check(cell: NotebookNode, place: str) -> None:
    """Refuse a figure that only some can see, and output not meant for a reader."""
    drawn = sum(drawing(output) is not None for output in cell.outputs)
    alt = cell.metadata.get("alt", "").strip()
    if drawn and not alt:
        raise PluginError(
            f'{place}: say what the figure shows: # %% alt="The loss falls to 0.1."'
        )
    if alt and drawn != 1:
        raise PluginError(
            f"{place}: a cell with alt shows 1 figure, this one {drawn}; "
            "a figure is shown when pyplot made it or when the cell ends with it"
        )
    for output in cell.outputs:
        if output.get("name") == "stderr":
            raise PluginError(f"{place}: this cell writes to stderr:\n{output.text}")
        if " at 0x" in str(output):
            raise PluginError(
                f"{place}: this cell's output holds an address in memory; "
                "give the last line's value a name, and it is not printed"
            )


def drawing(output: NotebookNode) -> str | None:
    """Return the SVG of an output that is a figure."""
    return output.get("data", {}).get("image/svg+xml")


def printed(output: NotebookNode) -> str:
    """Return an output that is text or HTML as Markdown."""
    data = output.get("data", {})
    if table := data.get("text/html"):
        return f'<div class="output" markdown="0">{table}</div>'
    text = data["text/plain"] if data else output.text
    return fence(text.rstrip("\n"), "text {.output .no-copy}")


def fence(text: str, header: str) -> str:
    """Return text as a block, in more backticks than any it holds."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{header}\n{text}\n{ticks}"

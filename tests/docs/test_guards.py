"""The guards of guards.py, on the documentation and on samples they must refuse."""

import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from . import guards
from .site_blocks import BLOCK, cells, page_paths, parsed, run_for, shown
from .snippets import ROOT, blocks_in, file_name, markdown_files, package_files

EXAMPLES = {
    file_name(path): path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("examples/*.py"))
}
RUN = blocks_in([*markdown_files(), *package_files()])

Guard = Callable[[str, str], list[str]]
GUARDS_OF_TEXT: list[Guard] = [
    guards.blocks_of_other_kinds,
    guards.code_without_fence,
    guards.typed_output,
    guards.quotes_without_source,
    guards.settings_of_fences,
    guards.addresses,
    guards.wide_output,
]


@cache
def texts() -> dict[str, str]:
    """Return the prose of each page, module and example, by the name of its file."""
    docstrings, cells = guards.docstrings, guards.markdown_cells
    pages = {file_name(it): it.read_text(encoding="utf-8") for it in markdown_files()}
    modules = {
        file_name(it): docstrings(it.read_text(encoding="utf-8"))
        for it in package_files()
    }
    return pages | modules | {name: cells(text) for name, text in EXAMPLES.items()}


def test_there_is_something_to_guard():
    assert not guards.nothing_to_guard(texts())
    nothing = {"a.md": "", "gradlib/a.py": "\n", "examples/a.py": "\n"}
    assert len(guards.nothing_to_guard(nothing)) == 4


@pytest.mark.parametrize("guard", GUARDS_OF_TEXT, ids=lambda guard: guard.__name__)
def test_the_documentation_passes(guard: Guard):
    findings = [finding for item in texts().items() for finding in guard(*item)]
    assert not findings, "\n".join(findings)


def output_in_code(name: str, program: str) -> list[str]:
    """Output typed into the code cells of an example."""
    lines = guards.code_cells(program).split("\n")
    return guards.output_in_comments(name, enumerate(lines, start=1))


def test_the_code_of_examples_passes():
    findings = [found for item in EXAMPLES.items() for found in output_in_code(*item)]
    assert not findings, "\n".join(findings)


def test_every_python_block_is_run():
    run = {name: set[int]() for name in texts()}
    for block in RUN:
        run[file_name(block.path)].add(block.start_line)
    findings = [
        finding
        for name, text in texts().items()
        for finding in guards.blocks_not_run(name, text, run[name])
    ]
    assert not findings, "\n".join(findings)


def differences(site: dict[str, BeautifulSoup]) -> list[str]:
    """Where the pages of a site show other blocks than those that are run."""
    return [
        finding
        for path, page in site.items()
        for finding in guards.unequal_blocks(
            path, shown(page), run_for(path, page, RUN)
        )
    ]


def test_the_site_shows_the_blocks_that_are_run(built_site: Path):
    site = {path: parsed(built_site, path) for path in page_paths(built_site)}
    on_site = {block for page in site.values() for block in shown(page)}
    assert on_site, "the site shows no Python block"
    found = differences(site)
    assert not found, "\n".join(found)

    in_docs = {b.source.strip() for b in RUN if b.path.is_relative_to(ROOT / "docs")}
    in_examples = {cell for p in ROOT.glob("examples/*.py") for cell in cells(p)}
    nowhere = (in_docs | in_examples) - on_site
    assert not nowhere, f"run, but on no page of the site: {nowhere}"


@pytest.mark.parametrize("kind", ["index", "questions/", "examples/", "reference/"])
def test_a_block_missing_from_a_page_is_found(kind: str, built_site: Path):
    of_kind = [path for path in page_paths(built_site) if path.startswith(kind)]
    site = ((path, parsed(built_site, path)) for path in of_kind)
    path, page = next((path, page) for path, page in site if shown(page))
    block = page.select_one(BLOCK)
    assert block
    block.decompose()
    assert [it.split(":")[0] for it in differences({path: page})] == [path]


@pytest.mark.parametrize(
    "fence",
    [
        "````python",
        "~~~python",
        "``` python",
        "```{ .python }",
        "```{.python}",
        "``` { .python",
        '```python test="skip"',
        "```Python",
        "```py",
        "```python3",
        "```pycon",
        "```pytb",
        "```ipython",
        "> ```python",
        "- ```python",
        "\t```python",
        '```python {figure="the `x`"}',
        "```python {test='skip' reason='why'}",
        '```python {test="skip",reason="why"}',
    ],
)
def test_a_fence_that_is_not_run_is_found(fence: str):
    text = f"Text.\n\n{fence}\nx = 1\n{fence.strip('> -')[:3]}\n"
    assert guards.blocks_not_run("a.md", text, {3})[0].startswith("a.md:3: ")


def test_a_block_pytest_examples_overlooks_is_found(tmp_path: Path):
    module = tmp_path / "module.py"
    module.write_text(
        'LONG = """\nsome text\n"""\n\n\ndef f():\n'
        '    """Do it.\n\n    ```python\n    x = 1\n    ```\n    """\n\n\ndef g():\n'
        "    '''Do it.\n\n    ```python\n    x = 1\n    ```\n    '''\n"
    )
    run = {block.start_line for block in blocks_in([module])}
    text = guards.docstrings(module.read_text())
    lines = [
        finding.split(":")[1] for finding in guards.blocks_not_run("m.py", text, run)
    ]
    assert lines == ["9", "18"]


@pytest.mark.parametrize("indent", ["", "    "])
@pytest.mark.parametrize("settings", ["", ' {test="skip" reason="why"}'])
def test_a_fence_that_is_run_passes(indent: str, settings: str, tmp_path: Path):
    page = tmp_path / "page.md"
    block = f"```python{settings}\nx = 1\n```\n"
    page.write_text("!!! note\n\n" + textwrap.indent(block, indent))
    run = {block.start_line for block in blocks_in([page])}
    assert run == {3}
    assert not guards.blocks_not_run("page.md", page.read_text(), run)


@pytest.mark.parametrize(
    "text",
    [
        "```\nx = 1\n```",
        "```text\nno output\n```",
        "```json\n{}\n```",
        "```text {.output}\nx\n```",
        "- ```text\n  x\n  ```",
    ],
)
def test_a_block_that_nobody_computes_is_found(text: str):
    assert guards.blocks_of_other_kinds("a.md", text)[0].startswith("a.md:1: ")


@pytest.mark.parametrize("line", ["3 passed", "0.375", "# 0.375", "pytest  # 1 passed"])
def test_what_is_no_command_is_found(line: str):
    text = f"```console\nmake test\n\n{line}\n```\n"
    assert guards.blocks_of_other_kinds("a.md", text)[0].startswith("a.md:4: ")


def test_commands_and_quoted_blocks_pass():
    text = "```console\nmake test VENV=\npip install .\n```\n\n> ```text\n> x\n> ```\n"
    assert not guards.blocks_of_other_kinds("a.md", text)


@pytest.mark.parametrize(
    "text",
    [
        "    import torch",
        "    a < b",
        "    0.375",
        "\n    #!python",
        "- item\n\n        deep",
        "!!! note\n\n        deep",
        "Text:\n\n    x",
        ">>> x",
        "<pre>x</pre>",
        "so <CODE>x</CODE>",
        "<samp>x</samp>",
        '<table class="a">',
    ],
)
def test_code_without_a_fence_is_found(text: str):
    last = text.count("\n") + 2
    found = guards.code_without_fence("a.md", f"\n{text}\n")
    assert found[-1].startswith(f"a.md:{last}: ")


@pytest.mark.parametrize(
    "text",
    [
        "- item\n\n    its second paragraph\n\n    - deeper",
        "!!! note\n\n    Text.\n\n    More.\n\n    ```python\n    x = 1\n    ```",
        '=== "Tab"\n\n    Text.',
        "::: gradlib.Call\n    options:\n      filters: []",
        "Text, and `<table>` is a tag.",
    ],
)
def test_what_is_indented_and_no_code_passes(text: str):
    assert not guards.code_without_fence("a.md", text)


def test_a_docstring_stands_where_it_was_and_is_not_indented():
    text = 'def f():\n    """Do.\n\n    Args:\n        x: One.\n    """\n'
    assert guards.docstrings(text) == "\nDo.\n\nArgs:\n    x: One.\n\n"


VALUES = [
    "tensor([1., 2.])",
    "torch.Size([4, 30])",
    "grad_fn=<AddBackward0>",
    "<AddmmBackward0 object>",
    "0.1234",
    "-0.5",
    "97 %",
    "97%",
    "loss 1e-05",
    "fc2 [4, 30]",
    "[0.5]",
    "(4, 30)",
    "(2,)",
    "Traceback (most recent call last):",
]
MESSAGES = ["RuntimeError: no", "UserWarning: careful"]


@pytest.mark.parametrize("line", VALUES)
def test_typed_output_in_prose_is_found(line: str):
    assert guards.typed_output("a.md", f"The\n{line}.")[0].startswith("a.md:2: ")


@pytest.mark.parametrize("code", ["tensor([1., 2.])", "tensor(3", "0.375"])
def test_typed_output_in_the_code_of_prose_is_found(code: str):
    assert guards.typed_output("a.md", f"This is `{code}`.")


@pytest.mark.parametrize("line", [*VALUES, *MESSAGES])
def test_typed_output_in_a_table_is_found(line: str):
    assert guards.typed_output("a.md", f"| a | `{line}` |\n")
    assert guards.typed_output("a.md", f"a|{line}\n-|-\n")


@pytest.mark.parametrize("line", [*VALUES, *MESSAGES])
def test_typed_output_in_a_comment_is_found(line: str):
    block = f"```python\nx = 1  # {line}\n```\n"
    assert guards.typed_output("a.md", block)[0].startswith("a.md:2: ")
    assert output_in_code("a.py", f"# %%\nx = 1\n# {line}\n")[0].startswith("a.py:3: ")


@pytest.mark.parametrize("indent", ["", "    "])
def test_an_output_that_a_formatter_made_a_comment_is_found(indent: str):
    block = f"```python\nif x:\n    print(1)\n{indent}# > 1\n{indent}#> 1\n```\n"
    found = guards.typed_output("a.md", block)
    assert [it.split(": ")[0] for it in found] == ["a.md:4"]


def test_a_printed_line_in_an_example_is_found():
    assert output_in_code("a.py", "# %%\nprint(1)\n#> 1\n")


def test_the_text_of_an_example_is_its_markdown():
    text = '# %% [markdown]\n# # A\n#\n# b\n\n# %% alt="0.5"\nx = 1  # c\n'
    assert guards.markdown_cells(text) == "\n# A\n\nb\n\n\n\n"
    assert guards.code_cells(text) == "\n\n\n\n\n\nx = 1  # c\n"


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(x)  # the shape, as x[0], is (batch, out)\n#> [0.5000]\n```",
        "> asked: ```torch.Size([4, 30])```",
        "> ```text\n> tensor([1.0000])\n> ```",
        "| `grad_fn` | the node | see [1](page.md) |",
        "What `torch.Size([4,\n30])` means, `lr=0.01`, or torch.tensor(2) in [0, 1).",
        "Since torch\n2.4, 2.5 and 2.6; older than 1.0; PyTorch 1.7; 1.0.1; 1.x.",
        "See <https://a.b/c-0.1/> and [1.1.0](https://a.b/1.0/).",
        "So $0.5\\,|x|$, and\n\n$$\n0.5\n$$\n",
    ],
)
def test_what_nobody_computed_may_stand(text: str):
    assert not guards.typed_output("a.md", text)


@pytest.mark.parametrize("quote", ["> loss 0.375", "> ```text\n> x\n> ```"])
def test_quoted_output_without_a_source_is_found(quote: str):
    text = f"Text.\n\n{quote}\n\nMore.\n\n[Far below](https://a.b/).\n"
    assert guards.quotes_without_source("a.md", text)[0].startswith("a.md:3: ")


def test_quoted_output_with_its_source_passes():
    text = "> loss 0.375\n\nFrom the forum:\n[the thread](https://a.b/).\n"
    assert not guards.quotes_without_source("a.md", text)


@pytest.mark.parametrize(
    "settings",
    [
        '{test="skip"}',
        '{test="skip" reason=""}',
        '{reason="why"}',
        '{test="xfail" reason="why"}',
        '{tets="skip"}',
    ],
)
def test_a_wrong_setting_is_found(settings: str):
    text = f"```python {settings}\nx = 1\n```\n"
    assert guards.settings_of_fences("a.md", text)[0].startswith("a.md:1: ")


def test_output_of_a_skipped_block_is_found():
    text = '```python {test="skip" reason="why"}\nprint(1)\n#> 1\n```\n'
    assert "remove the #> lines" in guards.settings_of_fences("a.md", text)[0]


def test_right_settings_pass():
    text = '```python {test="skip" reason="why" figure="what is seen"}\nx = 1\n```\n'
    assert not guards.settings_of_fences("a.md", text)


def test_an_address_is_found():
    text = "```python\nprint(f)\n#> <F object at 0x7f3a2b1c>\n```\n"
    assert guards.addresses("a.md", text)[0].startswith("a.md:3: ")


def test_a_printed_line_wider_than_the_page_is_found():
    text = f"```python\nprint(f)\n#> {'x' * 84}\n#> {'x' * 85}\n```\n"
    found = guards.wide_output("a.md", text)
    assert [it.split(": ")[0] for it in found] == ["a.md:4"]


def test_a_block_only_on_one_side_is_found():
    shown_not_run = guards.unequal_blocks("index.html", ["a", "a"], ["a"])[0]
    assert "shows 2 Python blocks, 1 are run" in shown_not_run
    run_not_shown = guards.unequal_blocks("index.html", ["a", "b"], ["a", "c"])
    assert len(run_not_shown) == 2
    assert not guards.unequal_blocks("index.html", ["a", "b"], ["b", "a"])


def test_the_blocks_of_a_page_are_seen(tmp_path: Path):
    (tmp_path / "index.html").write_text(
        '<article><div class="language-python highlight"><pre><code><span>x</span> = 1'
        '\n</code></pre></div><div class="language-python doc-signature highlight">'
        '<pre><code>f(x)</code></pre></div><div class="language-text highlight">'
        "<pre><code>text</code></pre></div></article>"
    )
    assert page_paths(tmp_path) == ["index.html"]
    assert shown(parsed(tmp_path, "index.html")) == ["x = 1"]

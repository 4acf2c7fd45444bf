"""The guards of guards.py, on the documentation and on samples they must refuse."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from . import guards
from .site_blocks import BLOCK, cells, pages, run_for, shown
from .snippets import ROOT, blocks_in, file_name, markdown_files, package_files

TEXTS = {file_name(path): path.read_text(encoding="utf-8") for path in markdown_files()}
TEXTS |= {
    file_name(path): guards.docstrings(path.read_text(encoding="utf-8"))
    for path in package_files()
}
RUN = blocks_in([*markdown_files(), *package_files()])

Guard = Callable[[str, str], list[str]]
GUARDS_OF_TEXT: list[Guard] = [
    guards.code_without_fence,
    guards.typed_output,
    guards.settings_of_fences,
    guards.addresses,
]


def test_there_is_something_to_guard():
    assert not guards.nothing_to_guard(TEXTS)
    assert len(guards.nothing_to_guard({"a.md": "", "a.py": "\n"})) == 3


@pytest.mark.parametrize("guard", GUARDS_OF_TEXT, ids=lambda guard: guard.__name__)
def test_the_documentation_passes(guard: Guard):
    findings = [finding for item in TEXTS.items() for finding in guard(*item)]
    assert not findings, "\n".join(findings)


def test_every_python_block_is_run():
    run = {name: set[int]() for name in TEXTS}
    for block in RUN:
        run[file_name(block.path)].add(block.start_line)
    findings = [
        finding
        for name, text in TEXTS.items()
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
    site = pages(built_site)
    on_site = {block for page in site.values() for block in shown(page)}
    assert on_site, "the site shows no Python block"
    assert not differences(site), "\n".join(differences(site))

    in_docs = {b.source.strip() for b in RUN if b.path.is_relative_to(ROOT / "docs")}
    in_examples = {cell for p in ROOT.glob("examples/*.py") for cell in cells(p)}
    nowhere = (in_docs | in_examples) - on_site
    assert not nowhere, f"run, but on no page of the site: {nowhere}"


@pytest.mark.parametrize("kind", ["", "examples/", "reference/"])
def test_a_block_missing_from_a_page_is_found(kind: str, built_site: Path):
    site = pages(built_site)
    path = next(p for p in site if p.startswith(kind) and shown(site[p]))
    block = site[path].select_one(BLOCK)
    assert block
    block.decompose()
    assert [finding.split(":")[0] for finding in differences(site)] == [path]


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
        "    import torch",
        "    from torch import nn",
        "    print(x)",
        ">>> x",
        "    :::python",
        "<pre>x</pre>",
    ],
)
def test_code_without_a_fence_is_found(text: str):
    assert guards.code_without_fence("a.md", f"\n{text}\n")[0].startswith("a.md:2: ")


@pytest.mark.parametrize(
    "line",
    [
        "tensor([1., 2.])",
        "torch.Size([4, 30])",
        "grad_fn=<AddBackward0>",
        "<AddmmBackward0 object>",
        "0.1234",
        "loss 1e-05",
        "fc2 [4, 30]",
        "[0.5]",
        "(4, 30)",
        "(2,)",
        "RuntimeError: no",
        "Traceback (most recent call last):",
        "#> 3",
    ],
)
def test_typed_output_is_found(line: str):
    block = f"```text\n{line}\n```\n"
    assert guards.typed_output("a.md", block)[0].startswith("a.md:2: ")
    if "|" not in line and line[:1] not in "#RT":
        assert guards.typed_output("a.md", f"| a | `{line}` |\n")


def test_typed_output_in_an_indented_block_is_found():
    assert guards.typed_output("a.md", "Text:\n\n    tensor([1.])\n")


@pytest.mark.parametrize(
    "text",
    [
        "```text\nx = torch.tensor(a); recording.forwards[3]; f(1, 2); 2.13.0\n```",
        "```python\nprint(x)\n#> tensor([1.0000])\n```",
        "> asked: ```torch.Size([4, 30])```",
        "> ```text\n> tensor([1.0000])\n> ```",
        "| `grad_fn` | the node | see [1](page.md) |",
        "What `torch.Size([4, 30])` means in prose.",
    ],
)
def test_what_nobody_computed_may_stand(text: str):
    assert not guards.typed_output("a.md", text)


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


def test_a_block_only_on_one_side_is_found():
    shown_not_run = guards.unequal_blocks("index.html", ["a", "a"], ["a"])[0]
    assert "shows 2 Python blocks, 1 are run" in shown_not_run
    run_not_shown = guards.unequal_blocks("index.html", ["a", "b"], ["a", "c"])
    assert len(run_not_shown) == 2
    assert not guards.unequal_blocks("index.html", ["a", "b"], ["b", "a"])


def test_the_blocks_of_a_page_are_seen(tmp_path: Path):
    (tmp_path / "index.html").write_text(
        '<div class="language-python highlight"><pre><code><span>x</span> = 1\n'
        '</code></pre></div><div class="language-python doc-signature highlight">'
        '<pre><code>f(x)</code></pre></div><div class="language-text highlight">'
        "<pre><code>text</code></pre></div>"
    )
    assert shown(pages(tmp_path)["index.html"]) == ["x = 1"]

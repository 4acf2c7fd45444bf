"""What would let a Python block, or an output, slip past the tests unseen.

Each guard takes text and returns findings, ``path:line: what is wrong, and the fix``.
None uses the way pytest-examples finds blocks: that is what they watch over.
"""

import ast
import html
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import markdown

# Quote marks and list markers may stand before a fence.
_FENCE = re.compile(
    r"(?P<lead>(?:[ \t>]|[-*+] |\d+[.)] )*)(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)$"
)
_PYTHON = re.compile(r"[\s{.]*i?py", re.IGNORECASE)  # python, py, Python3, pycon, ...
_PYTHON_FENCE = re.compile(r"[\s>*+.)\d-]*(`{3,}|~{3,})[\s{.]*i?py", re.IGNORECASE)
_RIGHT_PYTHON_FENCE = re.compile(r' *```python( \{\w+="[^"{}`]*"( \w+="[^"{}`]*")*\})?')
_SETTING = re.compile(r'(\w+)="([^"]*)"')
_SETTINGS = {"test", "reason", "figure", "title", "hl_lines"}
_COMMAND = re.compile(
    r"((\w+=\S+ )*(apt-get|bash|cd|git|make|mkdocs|pip|pytest|source"
    r"|(\.venv(-2\.8)?/bin/)?python3?)\b[^#]*)?"
)
_HTML_OR_DOCTEST = re.compile(r"\s*>>>\ \w|.*<(pre|code|samp|kbd|tt|table)\b", re.I)
# What else than code may be indented, as python-markdown calls it.
_INDENTS = [
    "admonition",
    "def_list",
    "footnotes",
    "pymdownx.details",
    "pymdownx.tabbed",
]

# Not meant: torch.tensor( is a call, x[0] an index, [1](page.md) a link, 2.13.0 a
# version.
_VALUE = re.compile(
    r"""(?<![\w.])tensor\(|torch\.Size\(\[|<\w+Backward\d*\b|grad_fn=<
    |(?<![\w.])-?\d+\.\d+(?![\w.]*\.\d|\w)                # 0.375
    |(?<![\w.])\d+\ ?%                                    # 97 %
    |\d\.?e[+-]\d\d                                       # 1e-05
    |(?<![\w\])"'.])\[-?\d[\d.]*(,\s*-?\d[\d.]*)*\](?!\() # [4, 30], [0.5]
    |(?<![\w\])"'.])\(\d+,(\s*\d+,?)*\)                   # (4, 30), (2,)
    |Traceback\ \(most""",
    re.VERBOSE,
)
_MESSAGE = re.compile(r"\w(Error|Warning): ")
_VALUE_AS_CODE = re.compile(r"(?<![\w.])tensor\(\[*-?\d|`-?\d+\.\d+`")
_VERSION = re.compile(
    r"\b(Python|(Py)?[Tt]orch|versions?|releases?( from)?|older than)\s"
    r"\d[\d.]*((,|,? and|,? or| to) \d[\d.]*)*"
)
# In prose a term stands in backticks. None of these crosses an empty line.
_CODE_LINK_OR_FORMULA = re.compile(
    r"""(?P<ticks>`+)(.|\n(?!\s*\n))+?(?P=ticks)(?!`)
    |https?://\S+
    |(?P<dollars>\${1,2})([^$\n]|\n(?!\s*\n))+(?P=dollars)""",
    re.VERBOSE,
)
_QUOTE = re.compile(r"(^[ \t]*>.*\n)+(?P<below>\s*(\S.*\n?)*)", re.MULTILINE)
_PRINTED = re.compile(r"[^#]*#>|\s*# >")  # some formatters write # > for #>
PAGE_WIDTH = 87
_ADDRESS = re.compile(r"\s*#>.*\b0x[0-9a-f]{6,}")


class Fence(NamedTuple):
    """A fenced block: its first line, what follows the ticks, the lines inside."""

    line: int
    lead: str
    info: str
    inside: list[tuple[int, str]]

    def is_python(self) -> bool:
        """Whether a reader would take it for Python."""
        return bool(_PYTHON.match(self.info))

    def source(self) -> str:
        """The text inside, as it would be copied."""
        return textwrap.dedent("".join(f"{line}\n" for _, line in self.inside))


def fences(text: str) -> list[Fence]:
    """Every fenced block, in order; one that is never closed ends with the text."""
    found: list[Fence] = []
    closing = ""
    for number, line in enumerate(text.split("\n"), start=1):
        match = _FENCE.match(line)
        if not closing and match:
            closing = match["ticks"]
            found.append(Fence(number, match["lead"], match["info"].strip(), []))
        elif match and match["ticks"].startswith(closing) and not match["info"].strip():
            closing = ""
        elif closing:
            found[-1].inside.append((number, line))
    return found


def docstrings(source: str) -> str:
    """The docstrings of a module, each line where it was; every other line is empty."""
    code = source.split("\n")
    lines = [""] * len(code)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str) and node.end_lineno:
            place = slice(node.lineno - 1, node.end_lineno)
            text = re.sub(
                r"""(?m)^(\s*)[rRuU]?(\"{3}|'{3})""", r"\1", "\n".join(code[place])
            )
            lines[place] = textwrap.dedent(text).split("\n")
    return "\n".join(lines)


def markdown_cells(program: str) -> str:
    """The Markdown of an example, each line where it was; other lines are empty."""
    return "\n".join(
        re.sub("^# ?", "", line) if kind == "markdown" else ""
        for kind, line in _cell_lines(program)
    )


def code_cells(program: str) -> str:
    """The code of an example, each line where it was; other lines are empty."""
    return "\n".join(
        line if kind == "code" else "" for kind, line in _cell_lines(program)
    )


def _cell_lines(program: str) -> Iterator[tuple[str, str]]:
    kind = "code"
    for line in program.split("\n"):
        if line.startswith("# %%"):
            kind = "markdown" if re.search(r"\[(markdown|md|raw)\]", line) else "code"
            yield "header", line
        else:
            yield kind, line


def blocks_not_run(name: str, text: str, run: Collection[int]) -> list[str]:
    """Python blocks that are not among those that run, given by their first lines."""
    findings: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not _PYTHON_FENCE.match(line):
            continue
        if not _RIGHT_PYTHON_FENCE.fullmatch(line.rstrip()):
            findings.append(
                f"{name}:{number}: this block would not run or not render: begin it "
                'with ```python, or ```python {test="skip" reason="..."}'
            )
        elif number not in run:
            findings.append(
                f"{name}:{number}: pytest-examples does not find this block: look for "
                "``` inside it, tabs before it, or in a module a string before it "
                "whose closing quotes start a line"
            )
    return findings


def blocks_of_other_kinds(name: str, text: str) -> list[str]:
    """Blocks that nothing runs: all but Python, commands, and what is quoted."""
    findings: list[str] = []
    for fence in fences(text):
        if fence.is_python() or ">" in fence.lead:
            continue
        if fence.info != "console":
            findings.append(
                f"{name}:{fence.line}: nobody computes what this block shows: print it "
                "in a ```python block, quote it with >, or write commands in ```console"
            )
            continue
        findings += [
            f"{name}:{number}: ```console holds commands, without comment or output: "
            "is this one? Then add it to _COMMAND in tests/docs/guards.py"
            for number, line in fence.inside
            if not _COMMAND.fullmatch(line.strip())
        ]
    return findings


def code_without_fence(name: str, text: str) -> list[str]:
    """Code that is shown as a block, and is none that a test would find."""
    lines = outside_fences(text)
    page = markdown.markdown("\n".join(lines), extensions=_INDENTS)
    starts = re.findall("<pre><code>(.*)", page)
    indented = {html.unescape(start).strip() for start in starts}
    return [
        f"{name}:{number}: no test finds this block: write it in a ```python block"
        for number, (line, prose) in enumerate(
            zip(lines, _prose(text), strict=True), start=1
        )
        if (line.startswith("    ") and line.strip() in indented)
        or _HTML_OR_DOCTEST.match(prose)
    ]


def outside_fences(text: str) -> list[str]:
    """Every line of a text; those of its fenced blocks are empty."""
    fenced = {
        fence.line + i for fence in fences(text) for i in range(len(fence.inside) + 2)
    }
    lines = enumerate(text.split("\n"), start=1)
    return ["" if number in fenced else line for number, line in lines]


def _prose(text: str) -> list[str]:
    """Every line of a text, without blocks, code, links, formulas and versions."""
    prose = "\n".join(outside_fences(text))
    for taken_out in (_CODE_LINK_OR_FORMULA, _VERSION):
        prose = taken_out.sub(lambda match: "\n" * match[0].count("\n"), prose)
    return prose.split("\n")


def typed_output(name: str, text: str) -> list[str]:
    """Output in prose, a table or a comment: it was typed by hand, and may be wrong.

    What is quoted (``>``) is somebody else's, and stays as it was said.
    """
    numbers = [
        number
        for number, (line, prose) in enumerate(
            zip(outside_fences(text), _prose(text), strict=True), start=1
        )
        if not line.lstrip().startswith(">")
        and (
            _VALUE.search(prose)
            or _VALUE_AS_CODE.search(line)
            or ("|" in prose and _shows_output(line))
        )
    ]
    findings = [_typed(name, number) for number in numbers]
    for fence in filter(Fence.is_python, fences(text)):
        # The tests of the snippets check the #> lines.
        code = [item for item in fence.inside if not item[1].lstrip().startswith("#>")]
        findings += output_in_comments(name, code)
    return findings


def output_in_comments(name: str, code: Iterable[tuple[int, str]]) -> list[str]:
    """Output in the comments of some numbered lines of code."""
    return [
        _typed(name, number)
        for number, line in code
        if _PRINTED.match(line) or _shows_output(line.partition("#")[2])
    ]


def _shows_output(line: str) -> bool:
    line = _VERSION.sub("", line)
    return bool(_VALUE.search(line) or _MESSAGE.search(line))


def _typed(name: str, number: int) -> str:
    return (
        f"{name}:{number}: this looks like output, which nobody computes here: print "
        "it in a block that runs, or quote it with > (a version: write torch 2.4)"
    )


def quotes_without_source(name: str, text: str) -> list[str]:
    """Somebody else's output, with no word on whose it is."""
    return [
        f"{name}:{text.count(chr(10), 0, quote.start()) + 1}: output is quoted: say "
        "below it whose it is, with a link that begins https://"
        for quote in _QUOTE.finditer(text)
        if "](https://" not in quote["below"]
        and ("```" in quote[0] or _shows_output(quote[0]))
    ]


def settings_of_fences(name: str, text: str) -> list[str]:
    """Settings that are unknown, a skip without a reason, a skip that shows output."""
    findings: list[str] = []
    for fence in filter(Fence.is_python, fences(text)):
        settings = dict(_SETTING.findall(fence.info))
        where = f"{name}:{fence.line}:"
        if unknown := settings.keys() - _SETTINGS:
            findings.append(f"{where} unknown setting {min(unknown)!r}: remove it")
        if settings.get("test", "skip") != "skip":
            findings.append(f'{where} the only test setting is test="skip"')
        if ("test" in settings) != bool(settings.get("reason", "").strip()):
            findings.append(f'{where} write both test="skip" and reason="why"')
        if "test" in settings and "#>" in fence.source():
            findings.append(
                f"{where} a block that does not run shows output: remove the #> lines"
            )
    return findings


def addresses(name: str, text: str) -> list[str]:
    """Addresses in an output: others at every run, and of no use to a reader."""
    return [
        f"{name}:{number}: an address is printed: print a name, as in grad_fn.name()"
        for number, line in enumerate(text.split("\n"), start=1)
        if _ADDRESS.match(line)
    ]


def wide_output(name: str, text: str) -> list[str]:
    """Printed lines that run past a block on a page of 1280 pixels."""
    return [
        f"{name}:{number}: the line is cut off on the page: print fewer than "
        f"{PAGE_WIDTH + 1} columns, a message with textwrap.fill(str(error), 76)"
        for number, line in enumerate(text.split("\n"), start=1)
        if line.lstrip().startswith("#>") and len(line) > PAGE_WIDTH
    ]


def nothing_to_guard(texts: dict[str, str]) -> list[str]:
    """Kinds of text that the guards find none of: then they would pass on nothing."""
    found = {
        "Python block": any(f.is_python() for t in texts.values() for f in fences(t)),
        "Markdown": any(t.strip() for name, t in texts.items() if name.endswith("md")),
        "docstring": any(
            t.strip() for name, t in texts.items() if name.startswith("gradlib/")
        ),
        "example": any(
            t.strip() for name, t in texts.items() if name.startswith("examples/")
        ),
    }
    return [f"no {kind} was found to guard" for kind, seen in found.items() if not seen]


def unequal_blocks(name: str, shown: list[str], run: list[str]) -> list[str]:
    """Blocks that a page of the site shows and nothing ran, or the other way round."""
    only_shown, only_run = Counter(shown) - Counter(run), Counter(run) - Counter(shown)
    return [
        f"{name}: the site shows {len(shown)} Python blocks, {len(run)} are run "
        "or skipped with a reason; "
        f"{what} is the one that begins {next(iter(odd)).strip().splitlines()[:1]}"
        for what, odd in (
            ("shown but not run", only_shown),
            ("run but not shown", only_run),
        )
        if odd
    ]

"""What would let a Python block, or an output, slip past the tests unseen.

Each guard takes text and returns findings, ``path:line: what is wrong, and the fix``.
None uses the way pytest-examples finds blocks: that is what they watch over.
"""

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

# Quote marks and list markers may stand before a fence.
_FENCE = re.compile(
    r"(?P<lead>(?:[ \t>]|[-*+] |\d+[.)] )*)(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)$"
)
_PYTHON = re.compile(r"[\s{.]*i?py", re.IGNORECASE)  # python, py, Python3, pycon, ...
_PYTHON_FENCE = re.compile(r"[\s>*+.)\d-]*(`{3,}|~{3,})[\s{.]*i?py", re.IGNORECASE)
_RIGHT_PYTHON_FENCE = re.compile(r" *```python( \{[^{}`]*\})?")
_UNFENCED_PYTHON = re.compile(
    r"""\s{4,}(import\ \w+(\ as\ \w+)?$|from\ [\w.]+\ import\ \w|print\(|def\ \w+\(.*:$)
    |\s*>>>\ \w         # a doctest
    |\s*(\#!|:::)python # other ways to have code highlighted
    |.*<pre\b""",
    re.VERBOSE,
)
_SETTING = re.compile(r'(\w+)="([^"]*)"')
_SETTINGS = {"test", "reason", "figure", "title", "hl_lines"}

# Not meant: torch.tensor( is a call, x[0] an index, [1](page.md) a link.
_PRINTED_TENSOR = re.compile(
    r"(?<![\w.])tensor\(|torch\.Size\(\[|<\w+Backward\d*\b|grad_fn=<"
)
_PRINTED_NUMBERS = re.compile(
    r"""\d\.\d{4}                              # 0.1234, as torch prints
    |\d\.?e[+-]\d\d                            # 1e-05
    |(?<![\w\])"'.])\[-?\d[\d.]*(,\s*-?\d[\d.]*)*\](?!\() # [4, 30], [0.5]
    |(?<![\w\])"'.])\(\d+,(\s*\d+,?)*\)                   # (4, 30), (2,)
    |^\s*\w*(Error|Warning):\ |Traceback\ \(most
    |^\s*\#>""",
    re.VERBOSE,
)
_TABLE_ROW = re.compile(r"\s*\||.*\S \| \S|\s*<t[dhr]\b")
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
            lines[node.lineno - 1 : node.end_lineno] = [
                re.sub(r"""^(\s*)[rRuU]?(\"{3}|'{3})""", r"\1   ", line)
                for line in code[node.lineno - 1 : node.end_lineno]
            ]
    return "\n".join(lines)


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


def code_without_fence(name: str, text: str) -> list[str]:
    """Python code, and blocks of no stated language, that nothing would run."""
    fenced = {number for fence in fences(text) for number, _ in fence.inside}
    findings = [
        f"{name}:{fence.line}: no language is named: write ```text, ```console, ..."
        for fence in fences(text)
        if not fence.info
    ]
    return findings + [
        f"{name}:{number}: Python outside a block is not run: use a ```python block"
        for number, line in enumerate(text.split("\n"), start=1)
        if number not in fenced and _UNFENCED_PYTHON.match(line)
    ]


def typed_output(name: str, text: str) -> list[str]:
    """Output in a plain block or a table: it was typed by hand, and may be wrong.

    What is quoted (``>``) is somebody else's, and stays as it was said.
    """
    return [
        f"{name}:{number}: this looks like output, which nobody computes here: print "
        "it in a ```python block, have the site's build write it, or quote it with >"
        for number, line, patterns in _lines_without_computed_output(text)
        if any(pattern.search(line) for pattern in patterns)
    ]


def _lines_without_computed_output(
    text: str,
) -> Iterator[tuple[int, str, list[re.Pattern[str]]]]:
    everything = [_PRINTED_TENSOR, _PRINTED_NUMBERS]
    inside: set[int] = set()
    for fence in fences(text):
        inside |= {number for number, _ in fence.inside}
        if not fence.is_python() and ">" not in fence.lead:
            yield from ((number, line, everything) for number, line in fence.inside)
    for number, line in enumerate(text.split("\n"), start=1):
        if number in inside or line.lstrip().startswith(">"):
            continue
        if _TABLE_ROW.match(line):
            yield number, line, everything
        else:  # an indented block; in prose a term stands in backticks
            yield number, re.sub("`[^`]*`", "", line), [_PRINTED_TENSOR]


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


def nothing_to_guard(texts: dict[str, str]) -> list[str]:
    """Kinds of text that the guards find none of: then they would pass on nothing."""
    found = {
        "Python block": any(f.is_python() for t in texts.values() for f in fences(t)),
        "Markdown": any(t.strip() for name, t in texts.items() if name.endswith("md")),
        "docstring": any(t.strip() for name, t in texts.items() if name.endswith("py")),
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

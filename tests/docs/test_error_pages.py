"""Every code of a wrong call has its page, and the page shows what it is.

Of an autograd call the programs of a page are those of its case, so that neither can be
changed alone. Of a Jacobian they stand on the page only.
"""

import ast
import contextlib
import io
import re
from typing import Any

import pytest
import yaml

import gradlib
from gradlib import errors
from gradlib.errors import GradlibError, more_about, page_about
from gradlib.vjp.cases import CASES, Case
from gradlib.vjp.wordings import WORDINGS

from ..vjp.programs import run
from ..vjp.recorded_errors import releases, said_by
from .printing import without_printed
from .snippets import ROOT

INDEX = ROOT / "docs/errors/index.md"
PAGES = {page.stem: page for page in INDEX.parent.glob("*.md") if page != INDEX}
SECTIONS = [
    "Wrong code",
    "What gradlib says",
    "The cause",
    "Right code",
    "How to spot it early",
    "What torch says, release by release",
    "Where to go next",
]
JACOBIAN_SECTIONS = [
    "Wrong code",
    "The cause",
    "Right code",
    "How to spot it early",
    "Where to go next",
]
JACOBIAN_ERRORS: list[type[GradlibError]] = [
    it for it in vars(errors).values() if getattr(it, "code", "").startswith("GL3")
]
CODES = [*CASES, *(error.code for error in JACOBIAN_ERRORS)]
WIDTH = 76  # of a line of torch's message, which is one long line
FRONT_MATTER = re.compile(r"\A---\n.*?^---\n\n", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

each_case = pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.code)
each_jacobian_error = pytest.mark.parametrize(
    "error", JACOBIAN_ERRORS, ids=lambda error: error.code
)
each_code = pytest.mark.parametrize("code", CODES)


def text_of(code: str) -> str:
    text = (ROOT / page_about(code)).read_text(encoding="utf-8")
    return FRONT_MATTER.sub("", text)


def section(code: str, heading: str) -> str:
    """Return what stands between a heading of a code's page and the next one."""
    return text_of(code).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def blocks(code: str, heading: str) -> list[str]:
    """Return the blocks of a section, with what they print."""
    found = BLOCK.findall(section(code, heading))
    assert found, f"{page_about(code)}: no block below {heading!r}"
    return found


def first_block(case: Case, heading: str) -> str:
    """Return the first block of a section, with what it prints."""
    return blocks(case.code, heading)[0]


def headings(code: str) -> list[str]:
    code_left_out = BLOCK.sub("", text_of(code))
    return re.findall(r"^##+ (.*)$", code_left_out, re.MULTILINE)


def title(code: str) -> str:
    return text_of(code).splitlines()[0].removeprefix("# ")


def by_gradlib(program: str) -> str:
    """Return a program of torch.autograd.grad as one of gradlib.grad."""
    program = program.replace("import torch\n", "import torch\n\nimport gradlib\n", 1)
    return program.replace("torch.autograd.grad", "gradlib.grad")


def in_try(program: str, error: str, wide: bool = False) -> str:
    """Return a program whose last line raises as one that prints what is said."""
    *lines, last = program.splitlines()
    start = ["from textwrap import fill", ""] if wide else []
    said = f"fill(str(error), {WIDTH})" if wide else "error"
    end = ["try:", f"    {last}", f"except {error} as error:", f"    print({said})"]
    return "\n".join([*start, *lines, *end, ""])


def printing(program: str) -> str:
    """Return a program that prints what its last line gives."""
    *lines, last = program.splitlines()
    return "\n".join([*lines, f"print({last})", ""])


def error_of(program: str) -> Exception | None:
    """Run a program, and return what it raised."""
    try:
        run(program)
    except Exception as error:
        return error
    return None


def printed_by(program: str) -> list[str]:
    """Run a program, and return the lines it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run(program)
    return output.getvalue().splitlines()


def shown_as_printed(block: str) -> list[str]:
    """Return the lines that a block says it prints."""
    return [line[1:] for line in re.findall(r"^ *#>(.*)$", block, re.MULTILINE)]


def raising(program: str, error: type[GradlibError]) -> str:
    """Return a program that catches an error as one that fails where there is none.

    So each round of a loop has to raise, and nothing else can be caught.
    """
    tree = ast.parse(program)
    tries = [it for it in ast.walk(tree) if isinstance(it, ast.Try)]
    assert tries, "it catches nothing"
    for it in tries:
        caught = [ast.unparse(handler.type) for handler in it.handlers if handler.type]
        assert caught == [f"gradlib.{error.__name__}"]
        it.orelse = ast.parse('raise AssertionError("nothing was raised")').body
    return ast.unparse(ast.fix_missing_locations(tree))


def check(block: str, program: str) -> None:
    """Hold a block against the program it shall be, and against what that prints."""
    assert without_printed(block) == program
    assert shown_as_printed(block) == printed_by(program)


def test_every_code_has_a_page_and_every_page_a_code() -> None:
    call_errors = [it for it in vars(gradlib).values() if is_call_error(it)]
    assert sorted(error.code for error in call_errors) == sorted(CASES)
    assert sorted(PAGES) == sorted(CODES)
    for code in CODES:
        assert ROOT / page_about(code) == PAGES[code]


def is_call_error(it: Any) -> bool:
    """Tell whether an exception is raised for a wrong call, and not for others only."""
    if not isinstance(it, type) or not issubclass(it, gradlib.GradlibError):
        return False
    return it.code.startswith("GL1") and it is not gradlib.GradOutputsError


@each_case
def test_the_title_is_that_of_the_case(case: Case) -> None:
    assert title(case.code) == f"{case.code}: {case.title}"


@each_case
def test_every_page_has_the_same_sections(case: Case) -> None:
    assert headings(case.code) == SECTIONS


@each_case
def test_the_wrong_code_is_that_of_the_case_and_goes_wrong(case: Case) -> None:
    error = error_of(case.wrong)
    assert (error is not None) == case.torch_refuses
    program = printing(case.wrong)
    if error:
        wide = len(str(error)) > WIDTH
        program = in_try(case.wrong, type(error).__name__, wide)
    check(first_block(case, "Wrong code"), program)


@each_case
def test_gradlib_says_the_code_of_the_page(case: Case) -> None:
    error = error_of(by_gradlib(case.wrong))
    assert type(error) is case.error
    assert isinstance(error, gradlib.GradlibError)
    assert error.code == case.code
    assert str(error).endswith(f"documentation: {page_about(case.code)}")
    program = in_try(by_gradlib(case.wrong), f"gradlib.{case.error.__name__}")
    check(first_block(case, "What gradlib says"), program)


@each_case
def test_the_right_code_is_that_of_the_case_and_gives_its_value(case: Case) -> None:
    block = first_block(case, "Right code")
    check(block, case.right)
    assert shown_as_printed(block), "it shows no value"
    assert printed_by(by_gradlib(case.right)) == printed_by(case.right)


@each_case
def test_all_words_of_the_newest_torch_are_on_the_page(case: Case) -> None:
    shown = shown_as_printed(section(case.code, "Wrong code"))
    newest = [it.message for it in said_by(releases()[-1]) if it.code == case.code]
    for wording in WORDINGS:
        if wording.code == case.code and any(
            re.match(wording.words, it) for it in newest
        ):
            on_from = (" ".join(shown[i:]) for i in range(len(shown)))
            assert any(re.match(wording.words, text) for text in on_from), wording


@each_case
def test_a_page_shows_what_every_release_says_of_its_mistakes(case: Case) -> None:
    text = section(case.code, "What torch says, release by release")
    assert re.findall(r'<div class="wordings" data-code="(.*)"></div>', text) == [
        case.code
    ]


@each_jacobian_error
def test_a_page_of_jacobians_has_its_code_and_the_same_sections(
    error: type[GradlibError],
) -> None:
    assert title(error.code).startswith(f"{error.code}: ")
    assert headings(error.code) == JACOBIAN_SECTIONS
    assert "wordings" not in text_of(error.code)  # torch has none of its own


@each_jacobian_error
def test_all_wrong_code_of_jacobians_raises_the_error_of_the_page(
    error: type[GradlibError],
) -> None:
    for block in blocks(error.code, "Wrong code"):
        program = without_printed(block)
        assert printed_by(raising(program, error)) == shown_as_printed(block)
        said = re.findall(r"\[(GL\d+)\]", "\n".join(shown_as_printed(block)))
        assert set(said) == {error.code}
        assert "GL" not in program, "it says the code itself"


@each_jacobian_error
def test_a_page_of_jacobians_shows_a_whole_message(error: type[GradlibError]) -> None:
    shown = [shown_as_printed(it) for it in blocks(error.code, "Wrong code")]
    ends = more_about(error.code)
    assert any(" ".join(" ".join(it).split()).endswith(ends) for it in shown)


@each_jacobian_error
def test_all_right_code_of_jacobians_runs_and_gives_a_value(
    error: type[GradlibError],
) -> None:
    for block in blocks(error.code, "Right code"):
        assert "try:" not in block
        assert shown_as_printed(block), "it shows no value"
        check(block, without_printed(block))


@each_code
def test_a_page_leads_on_to_a_question_and_to_another_code(code: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", section(code, "Where to go next"))
    pages = [(INDEX.parent / link).resolve() for link in links]
    assert {page.parent.name for page in pages} == {"questions", "errors"}
    assert PAGES[code] not in pages


def test_the_index_lists_every_page_by_its_title() -> None:
    listed = re.findall(r"^- \[(.*)\]\((.*)\)$", INDEX.read_text(), re.MULTILINE)
    assert listed == [(title(code), PAGES[code].name) for code in CODES]


def test_the_nav_has_every_page_in_the_order_of_the_codes() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    (pages,) = (part["Errors"] for part in nav if "Errors" in part)
    assert pages == ["errors/index.md", *(f"errors/{code}.md" for code in CODES)]

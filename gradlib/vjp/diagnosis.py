"""An explained error, and its parts."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from textwrap import fill, indent

from gradlib.errors import GradlibError, more_about
from gradlib.render import WIDTH
from gradlib.vjp.arguments import Argument, Arguments
from gradlib.vjp.cases import CASES
from gradlib.vjp.fixes import ORIGINAL, mended, recomputed
from gradlib.vjp.tensor_names import in_reach


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with an autograd call.

    Attributes:
        code: The code of the case, as ``"GL102"``.
        what: What is wrong, with names, shapes, dtypes or devices.
        intent: What was probably meant.
        fix: A few lines of code that run, where ``y``, ``x`` and ``v`` are the
            outputs, inputs and grad_outputs of the call, and ``f`` computes ``y``
            from ``x``.
        others: What further letters in `fix` stand for, by letter.
        mends: For each wrong entry of grad_outputs, by index, the line that mends it,
            with ``{y}`` and ``{v}`` for the output and the entry.
        is_refused: Whether torch refuses this call, though not every call of its case.
        rule: What was expected, and why; ``""`` if the rule of the case says it.
    """

    code: str
    what: str
    intent: str
    fix: str = ""
    others: dict[str, str] = field(default_factory=dict[str, str])
    mends: dict[int, str] = field(default_factory=dict[int, str])
    is_refused: bool = False
    rule: str = ""

    @property
    def why(self) -> str:
        """What was expected, and why."""
        return self.rule or CASES[self.code].cause

    @property
    def text(self) -> str:
        """The explanation without its code, in lines that fit a terminal."""
        code, what = f"[{self.code}] ", re.sub("^the ", "The ", self.what)
        parts = [
            fill(code + what, WIDTH).removeprefix(code),
            fill(self.why, WIDTH),
            fill(self.intent, WIDTH),
            indent(self.fix, "    "),
            more_about(self.code),
        ]
        return "\n\n".join(part for part in parts if part)

    def __str__(self) -> str:
        """Return the explanation, its code in front."""
        return f"[{self.code}] {self.text}"

    def error(self) -> GradlibError:
        """Return the exception that says the same."""
        return CASES[self.code].error(self.text)


def together(found: Iterable[Diagnosis], arguments: Arguments) -> Diagnosis | None:
    """Return the first diagnosis of an entry of grad_outputs, or ``None``.

    Its code mends every entry that is wrong.
    """
    every = list(found)
    if not every or not every[0].mends:
        return every[0] if every else None
    mends = {i: line for it in every for i, line in it.mends.items()}
    return replace(every[0], fix=mended(arguments, mends))


def passing(
    name: str,
    found: Diagnosis,
    arguments: Arguments,
    argument: Argument,
) -> Diagnosis:
    """Return the diagnosis with code that passes the tensor `name`, if it can."""
    if not name or argument.several or not in_reach(name, arguments.frames):
        return found
    place = "outputs" if argument is arguments.outputs else "inputs"
    fix = recomputed(arguments, **{place: ORIGINAL})
    return replace(found, fix=fix, others={ORIGINAL: name})

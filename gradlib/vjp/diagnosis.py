"""An explained error: its parts, and the code that mends it."""

from dataclasses import dataclass, field
from textwrap import fill, indent
from typing import Any

from torch import Tensor

from gradlib.errors import GradlibError
from gradlib.render import WIDTH
from gradlib.vjp.arguments import Arguments
from gradlib.vjp.cases import CASES

# Weights of one, in the code of an explanation.
ONES = "torch.ones_like({y})"
ALL_ONES = "v = [torch.ones_like(each) for each in y]"

# In the code of an explanation, another tensor than the call was given, and another
# call.
ORIGINAL, CALL = "w", "u"


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with an autograd call.

    Attributes:
        code: The code of the case, as ``"GL102"``.
        argument: The argument at fault, as ``"grad_outputs[1]"`` or ``'inputs["w"]'``;
            ``""`` where none is.
        what: What is wrong, with names, shapes, dtypes or devices.
        why: What was expected, and why.
        intent: What was probably meant.
        fix: Two or three lines of code that run, where ``y``, ``x`` and ``v`` are the
            outputs, inputs and grad_outputs of the call, and ``f`` computes ``y``
            from ``x``.
        others: What other letters stand for in `fix`, by letter.
    """

    code: str
    argument: str
    what: str
    why: str
    intent: str
    fix: str
    others: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def text(self) -> str:
        """The explanation without its code, in lines that fit a terminal."""
        head = fill(f"[{self.code}] {self.what}", WIDTH).removeprefix(f"[{self.code}] ")
        prose = (head, fill(self.why, WIDTH), fill(self.intent, WIDTH))
        parts = [
            *prose,
            indent(self.fix, "    "),
            f"More in gradlib's documentation: {CASES[self.code].page}",
        ]
        return "\n\n".join(part for part in parts if part)

    def __str__(self) -> str:
        """Return the explanation, its code in front."""
        return f"[{self.code}] {self.text}"

    def error(self) -> GradlibError:
        """Return the exception that says the same."""
        return CASES[self.code].error(self.text)


def diagnosis(
    code: str, argument: str, what: str, *, intent: str, fix: str
) -> Diagnosis:
    """Return the diagnosis of a case, with the case's own reason."""
    what = what[0].upper() + what[1:] if what.startswith("the ") else what
    return Diagnosis(code, argument, what, CASES[code].cause, intent, fix)


def call(
    arguments: Arguments,
    vectors: str | None = None,
    outputs: str = "y",
    inputs: str = "x",
    **changed: Any,
) -> str:
    """Return the line of code that makes the call again.

    Args:
        arguments: Of the call. Its options are spelled as they were given.
        vectors: What to pass as grad_outputs, ``""`` for nothing; as the call did if
            left out.
        outputs: What to pass as outputs.
        inputs: What to pass as inputs.
        changed: The options that shall differ; ``None`` leaves one out.
    """
    if vectors is None:
        given = any(it is not None for it in arguments.grad_outputs.values)
        vectors = "v" if given else ""
    options = {
        k: it for k, it in (arguments.options | changed).items() if it is not None
    }
    passed = [vectors] * bool(vectors) + [f"{k}={it!r}" for k, it in options.items()]
    if arguments.accumulates and not arguments.into_leaves:
        passed.append(f"inputs={inputs}")
    if arguments.function == "backward":
        return f"{outputs}.backward({', '.join(passed)})"
    between = [] if arguments.accumulates else [inputs]
    return f"{arguments.function}({', '.join([outputs, *between, *passed])})"


def recomputed(arguments: Arguments, *lines: str, **changed: Any) -> str:
    """Return the code that computes the outputs anew, as `lines` say, and calls again.

    Weights of one are filled in where the call had none and needs some.
    """
    outputs, vectors = arguments.outputs, arguments.grad_outputs
    pairs = zip(outputs.values, vectors.values, strict=False)
    if any(v is None and isinstance(y, Tensor) and y.numel() != 1 for y, v in pairs):
        ones = ALL_ONES if outputs.several else f"v = {ONES.format(y='y')}"
        return "\n".join([*lines, ones, call(arguments, "v", **changed)])
    return "\n".join([*lines, call(arguments, **changed)])


def mended(arguments: Arguments, i: int, expression: str) -> str:
    """Return the code that gives one entry of grad_outputs another value.

    Args:
        arguments: Of the call.
        i: Which entry.
        expression: Its value, with ``{y}`` and ``{v}`` for the output and the entry.
    """
    y, v = arguments.outputs.spelled[i], arguments.grad_outputs.spelled[i]
    unpacked = ["v = list(v)"] if arguments.grad_outputs.several else []
    line = f"{v} = {expression.format(y=y, v=v)}"
    return "\n".join([*unpacked, line, call(arguments, "v")])

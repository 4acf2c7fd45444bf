"""How torch words its errors, from release to release, and the code each has here.

What every release said that was run stands beside the tests.
"""

import re
from typing import NamedTuple


class Wording(NamedTuple):
    """The words of an error.

    Attributes:
        code: The code of the case.
        words: A pattern for the beginning of the message.
        first: The oldest release that was run and says so.
        last: The newest one; all that were run in between say so too.
    """

    code: str
    words: str
    first: str
    last: str


WORDINGS = (
    Wording("GL101", "grad can be implicitly created only for ", "1.0.0", "2.13.0"),
    Wording("GL102", r"Mismatch in shape: grad_output\[", "1.7.1", "2.13.0"),
    Wording("GL102", r"invalid gradient at index \d+ - got \[", "1.0.0", "1.2.0"),
    Wording("GL103", r"got \d+ tensors and \d+ gradients$", "1.0.0", "2.13.0"),
    Wording(
        "GL105",
        "For complex Tensors, both grad_output and output are required",
        "1.7.1",
        "2.13.0",
    ),
    Wording(
        "GL105",
        r"invalid gradient at index \d+ - expected type torch\.",
        "1.0.0",
        "1.2.0",
    ),
    Wording(
        "GL106",
        r"invalid gradient at index \d+ - expected type TensorOptions",
        "1.10.2",
        "1.10.2",
    ),
    Wording(
        "GL106", r"invalid gradient at index \d+ - expected device ", "1.12.1", "2.13.0"
    ),
    Wording(
        "GL107",
        "If `is_grads_batched=True`, we interpret the first dimension",
        "1.12.1",
        "2.13.0",
    ),
    Wording(
        "GL108", r"element \d+ of tensors does not require grad", "1.0.0", "2.13.0"
    ),
    Wording(
        "GL109",
        "One of the differentiated Tensors appears to not have been used",
        "1.0.0",
        "2.4.1",
    ),
    Wording(
        "GL109",
        r"The differentiated Tensor at index \d+ appears to not have been used",
        "2.13.0",
        "2.13.0",
    ),
    Wording(
        "GL110",
        "One of the differentiated Tensors does not require grad",
        "1.0.0",
        "2.13.0",
    ),
    Wording(
        "GL110",
        "can't retain_grad on Tensor that has requires_grad=False",
        "1.10.2",
        "2.13.0",
    ),
    Wording(
        "GL111", "Trying to backward through the graph a second time", "1.0.0", "2.13.0"
    ),
    Wording(
        "GL112",
        "one of the variables needed for gradient computation has been modified",
        "1.0.0",
        "2.13.0",
    ),
    Wording("GL114", "all inputs have to be Tensors", "1.0.0", "2.13.0"),
    Wording(
        "GL114",
        r"['`]inputs['`] argument to `?\w+\(\)`? cannot be empty",
        "1.10.2",
        "2.13.0",
    ),
)


def code_of(message: str) -> str | None:
    """Return the code of an error of autograd, told by its message."""
    found = (it.code for it in WORDINGS if re.match(it.words, message))
    return next(found, None)

"""How each supported release of torch words autograd's errors, and their codes.

``docs/data/errors`` records the messages of these releases, and of older ones.
"""

import re
from typing import NamedTuple


class Wording(NamedTuple):
    """How torch words an error.

    Attributes:
        code: The code of the case.
        words: A pattern for the beginning of the message.
    """

    code: str
    words: str


WORDINGS = (
    Wording("GL101", "grad can be implicitly created only for "),
    Wording("GL102", r"Mismatch in shape: grad_output\["),
    Wording("GL103", r"got \d+ tensors and \d+ gradients$"),
    Wording("GL105", "For complex Tensors, both grad_output and output are required"),
    Wording("GL106", r"invalid gradient at index \d+ - expected device "),
    Wording("GL107", "If `is_grads_batched=True`, we interpret the first dimension"),
    Wording("GL108", r"element \d+ of tensors does not require grad"),
    Wording("GL108", r"Can't call numpy\(\) on Tensor that requires grad"),
    Wording("GL109", "One of the differentiated Tensors appears to not have been used"),
    Wording(
        "GL109", r"The differentiated Tensor at index \d+ appears to not have been used"
    ),
    Wording("GL110", "One of the differentiated Tensors does not require grad"),
    Wording("GL110", "can't retain_grad on Tensor that has requires_grad=False"),
    Wording("GL111", "Trying to backward through the graph a second time"),
    Wording(
        "GL112",
        "one of the variables needed for gradient computation has been modified",
    ),
    Wording("GL112", "a (view of a )?leaf Variable that requires grad is being used"),
    Wording("GL114", "all inputs have to be Tensors"),
    Wording("GL114", r"['`]inputs['`] argument to `?\w+\(\)`? cannot be empty"),
    Wording("GL115", r"invalid gradient at index \d+ - expected layout "),
)


def code_of(message: str) -> str | None:
    """Return the code of an autograd error by its message; ``None`` for any other."""
    found = (it.code for it in WORDINGS if re.match(it.words, message))
    return next(found, None)

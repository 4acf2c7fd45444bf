"""Recording what goes through modules, forward and backward."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from textwrap import shorten
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradlib.errors import NotAModuleError, RecordingArgumentError, UnknownFieldError
from gradlib.recorder.attached import kept_from_compile
from gradlib.recorder.with_block import WithBlock
from gradlib.recording.recording import Recording
from gradlib.recording.trace import FIELDS
from gradlib.selection import selector
from gradlib.wording import in_brief, no_module


@kept_from_compile
def record(
    model: nn.Module,
    *,
    modules: str | Iterable[str] | Callable[[str, nn.Module], bool] | None = None,
    keep: str | Iterable[str] = (
        "args",
        "output",
        "grad_input",
        "grad_output",
        "param_grads",
    ),
    reduce: Callable[[Tensor], Any] | None = None,
    device: torch.device | str | int | None = None,
) -> AbstractContextManager[Recording]:
    """Record every module call in the block, forward and backward.

    Call ``backward()`` inside the block too: no hook is left after it. Results and
    gradients are the same as without recording, but for rounding in
    ``torch.nn.TransformerEncoderLayer``: in evaluation and without gradients it takes
    its ordinary path instead of the fused one.

    Args:
        model: The module to record, with all modules inside it, on any device.
        modules: Which of these modules to record: names as in ``named_modules()``,
            patterns such as ``"layers.*"``, or a function ``(name, module) -> bool``.
            Default: all.
        keep: Which fields of a call to keep: one or several of ``"args"``,
            ``"output"``, ``"grad_input"``, ``"grad_output"`` and ``"param_grads"``.
            ``"args"`` includes keyword arguments, and each share its total.
        reduce: A function of a tensor, such as `tensor_stats`. What it returns is kept
            instead of the tensor. It gets each tensor detached, on its own device. If
            it draws torch's random numbers, the model still draws the same as without.
        device: Where to put the kept tensors, such as ``"cpu"`` to save a GPU's memory.
            The end of the block, or reading a value, waits for the copies.

    Returns:
        A context manager that gives the recording, which grows as the block runs.

    Raises:
        NotAModuleError: `model` is not a ``torch.nn.Module``.
        NoSuchModuleError: A name or pattern in `modules` fits no module, or it is a
            class or a module, or a function that does not take a name and a module.
        UnknownFieldError: `keep` names something that no call has.
        RecordingArgumentError: `reduce` is not a function, tensors cannot be put on
            `device`, two modules are equal by their class's ``__eq__``, or the block is
            begun a second time.

    Example:
        ```python
        import torch
        from torch import nn

        import gradlib

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        x = torch.ones(4, 3)
        with gradlib.record(model) as recording:
            model(x).sum().backward()

        print(recording)
        #> Recording: 4 calls, 1 forward, 1 backward pass
        #> module  type        output  grad_output  grad_input  param_grads
        #> (root)  Sequential  [4, 2]  2.83         -           -
        #> 0       Linear      [4, 5]  1.01         -           4.06
        #> 1       ReLU        [4, 5]  1.94         1.01        -
        #> 2       Linear      [4, 2]  2.83         1.94        7.04
        #> output: shape; gradients: norm over all entries, - where there is none
        print(recording["2"].grad_output[0])
        #> tensor([[1., 1.],
        #>         [1., 1.],
        #>         [1., 1.],
        #>         [1., 1.]])
        print(recording["0"].note)
        #> args[0] does not require grad
        ```
    """
    if not isinstance(cast(object, model), nn.Module):
        of_function = "Put a function into the forward() of a module."
        raise NotAModuleError(
            "record(model): model must be a torch.nn.Module, but "
            + no_module(model, of_function if callable(model) else "Pass the model.")
        )
    _require_usable(reduce, device)
    return WithBlock(model, selector(model, modules), _fields(keep), reduce, device)


def _require_usable(reduce: object, device: Any) -> None:
    """Raise for a bad argument here, and not in the middle of the model."""
    if not (reduce is None or callable(reduce)):
        raise RecordingArgumentError(
            "record(reduce=...): reduce must be a function of a tensor, as "
            f"gradlib.tensor_stats, but it is {in_brief(reduce)}, of type "
            f"{type(reduce).__name__}."
        )
    try:
        if device is not None:
            torch.empty(0, device=device)
    except Exception as error:
        # For an unknown device torch lists all that it knows.
        said = shorten(str(error), 240, placeholder=" ...")
        raise RecordingArgumentError(
            f"record(device=...): no tensor can be put on {in_brief(device)}. Give "
            f'what tensor.to(device) takes, as "cpu". torch says: {said}'
        ) from error


def _fields(keep: object) -> frozenset[Any]:
    several = isinstance(keep, Iterable) and not isinstance(keep, str | Tensor)
    fields: list[Any] = list(cast(Any, keep if several else [keep]))
    for name in fields:
        if name not in FIELDS:
            known = ", ".join(f'"{field}"' for field in FIELDS)
            raise UnknownFieldError(
                f'record(keep=...): "{name}" is no field that can be kept. There are: '
                f"{known}."
            )
    return frozenset(fields)

"""What gradlib uses of torch.compile."""

# Private names are what this folder is for, and torch's stubs leave some of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import sys
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_C = cast(Any, torch._C)


def never_compiled(function: Function, because: str) -> Function:
    """Keep torch.compile out of a function: it breaks the graph there, and runs it.

    Args:
        function: Any function.
        because: The reason torch gives if ``fullgraph=True`` forbids a graph break.
    """
    cast(Any, function)._torchdynamo_disable = True
    cast(Any, function)._torchdynamo_disable_msg = because
    evaluator = _C._dynamo.eval_frame
    skip = evaluator._FrameAction.SKIP
    strategy = evaluator._FrameExecStrategy(skip, skip)  # for it and its callees
    evaluator.set_code_exec_strategy(cast(Any, function).__code__, strategy)
    return function


def as_written(function: Function) -> Function:
    """Keep torch.compile out of a function of ours that a user's code calls.

    What it would make of our code is warnings and a long wait, and it refuses parts.
    """
    return never_compiled(function, "gradlib itself is not compiled")


def forget_compiled() -> None:
    """Make torch.compile compile anew everything it has compiled until now.

    Compiled code does not notice that a module got hooks, or lost them, since.
    """
    dynamo = cast(Any, sys.modules.get("torch._dynamo"))
    frames = getattr(dynamo, "convert_frame", None)  # its import may still be running
    codes = getattr(frames, "input_codes", None)
    if codes is not None and codes.seen:
        with warnings.catch_warnings():
            # With a GPU, reset() imports code whose import warns.
            warnings.simplefilter("ignore", DeprecationWarning)
            dynamo.reset()


@contextmanager
def run_eagerly() -> Generator[None]:
    """Run what torch.compile has compiled as it was written, eagerly.

    torch has one stance for all threads. So that none restores what another has set,
    the first thread to enter sets the stance, and the last to leave restores it.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _EAGER_LOCK:
        stance = cast(Any, torch.compiler).set_stance
        _eager.append(None if _eager else stance("force_eager"))
    try:
        yield
    finally:
        with _EAGER_LOCK:
            if len(_eager) == 1:
                _eager[0].__exit__(None, None, None)
            _eager.pop()


_EAGER_LOCK = threading.Lock()
_eager: list[Any] = []  # the stance, then None for each further thread within

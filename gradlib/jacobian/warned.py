"""Warnings that name the caller's line, from however deep inside they come."""

import inspect
import warnings
from types import FrameType


def warn(message: str) -> None:
    """Warn of something, at the innermost line that is neither torch's nor ours.

    Args:
        message: What to say.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and _is_inside(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _is_inside(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.split(".")[0] in ("gradlib", "torch")

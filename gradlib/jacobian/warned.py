"""Warnings that name the user's line, however deep inside they are raised."""

import inspect
import warnings
from types import FrameType


def warn(message: str) -> None:
    """Warn at the innermost line that is neither torch's nor ours."""
    _, depth = theirs()
    warnings.warn(message, stacklevel=depth)


def theirs() -> tuple[FrameType | None, int]:
    """Return the innermost frame that is neither torch's nor ours, and its depth."""
    frame, depth = inspect.currentframe(), 0
    while frame is not None and _is_inside(frame):
        frame, depth = frame.f_back, depth + 1
    return frame, depth


def _is_inside(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.split(".")[0] in ("gradlib", "torch", "contextlib")

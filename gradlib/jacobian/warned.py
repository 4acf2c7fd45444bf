"""Warnings that name the user's line, however deep inside they are raised."""

import warnings
from types import FrameType

from gradlib.private.passes import running_frame


def warn(message: str) -> None:
    """Warn at the innermost line that is neither torch's nor ours."""
    _, depth = theirs()
    warnings.warn(message, stacklevel=depth)


def theirs() -> tuple[FrameType, int]:
    """Return the innermost frame that is neither torch's nor ours, and its depth.

    Where all are, this is the outermost.
    """
    frame, depth = running_frame(0), 0
    while _is_inside(frame) and frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return frame, depth


def _is_inside(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.split(".")[0] in ("gradlib", "torch", "contextlib")

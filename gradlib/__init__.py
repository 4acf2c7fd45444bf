"""See how gradients flow through PyTorch modules."""

from gradlib.call import Call, Pass
from gradlib.errors import (
    AmbiguousCallError,
    GradlibError,
    NoSuchCallError,
    NotAModuleError,
)
from gradlib.recorder import record
from gradlib.recording import Recording

__all__ = [
    "AmbiguousCallError",
    "Call",
    "GradlibError",
    "NoSuchCallError",
    "NotAModuleError",
    "Pass",
    "Recording",
    "record",
]

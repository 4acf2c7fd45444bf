"""See how gradients flow through PyTorch modules."""

from gradlib.call import Call, Pass
from gradlib.errors import (
    AmbiguousCallError,
    GradlibError,
    NoSuchCallError,
    NoSuchModuleError,
    NotAModuleError,
    NotCopyableError,
    NotKeptError,
    UnknownFieldError,
)
from gradlib.hook_reports import HookEntry, HookKind, HookReport, hook_report
from gradlib.recorder import record
from gradlib.recording import Recording
from gradlib.stats import TensorStats, tensor_stats

__all__ = [
    "AmbiguousCallError",
    "Call",
    "GradlibError",
    "HookEntry",
    "HookKind",
    "HookReport",
    "NoSuchCallError",
    "NoSuchModuleError",
    "NotAModuleError",
    "NotCopyableError",
    "NotKeptError",
    "Pass",
    "Recording",
    "TensorStats",
    "UnknownFieldError",
    "hook_report",
    "record",
    "tensor_stats",
]

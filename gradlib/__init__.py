"""See how gradients flow through PyTorch modules."""

from gradlib.call import Call, Pass
from gradlib.compare import Comparison, Unmatched
from gradlib.difference import Difference
from gradlib.errors import (
    AmbiguousCallError,
    BrokenFileError,
    CannotReplayError,
    GradlibError,
    MissingPackageError,
    NoSuchCallError,
    NoSuchModuleError,
    NotAModuleError,
    NotCopyableError,
    NotKeptError,
    NotStorableError,
    UnknownFieldError,
    UnknownKindError,
)
from gradlib.hook_reports import HookEntry, HookKind, HookReport, hook_report
from gradlib.nonfinite import Nonfinite
from gradlib.recorder import record
from gradlib.recording import Recording, load_recording
from gradlib.stats import TensorStats, tensor_stats
from gradlib.storage import NotSaved
from gradlib.verify import Skipped, Verification

__all__ = [
    "AmbiguousCallError",
    "BrokenFileError",
    "Call",
    "CannotReplayError",
    "Comparison",
    "Difference",
    "GradlibError",
    "HookEntry",
    "HookKind",
    "HookReport",
    "MissingPackageError",
    "NoSuchCallError",
    "NoSuchModuleError",
    "Nonfinite",
    "NotAModuleError",
    "NotCopyableError",
    "NotKeptError",
    "NotSaved",
    "NotStorableError",
    "Pass",
    "Recording",
    "Skipped",
    "TensorStats",
    "UnknownFieldError",
    "UnknownKindError",
    "Unmatched",
    "Verification",
    "hook_report",
    "load_recording",
    "record",
    "tensor_stats",
]

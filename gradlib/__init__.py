"""See how gradients flow through PyTorch modules."""

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
from gradlib.hook_reports.report import HookEntry, HookKind, HookReport, hook_report
from gradlib.recorder.record import record
from gradlib.recording.call import Call, Pass
from gradlib.recording.compare import Comparison, Unmatched
from gradlib.recording.difference import Difference
from gradlib.recording.nonfinite import Nonfinite
from gradlib.recording.recording import Recording, load_recording
from gradlib.recording.verify import Skipped, Verification
from gradlib.stats import TensorStats, tensor_stats
from gradlib.storage import NotSaved

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

"""See how gradients flow through PyTorch modules."""

from gradlib.errors import (
    AmbiguousCallError,
    BrokenFileError,
    CannotReplayError,
    ChangedInPlaceError,
    FreedGraphError,
    GradlibError,
    GradOutputsCountError,
    GradOutputsDeviceError,
    GradOutputsDtypeError,
    GradOutputsError,
    GradOutputsShapeError,
    GradOutputsTypeError,
    GradsBatchedError,
    InputNeedsNoGradError,
    MissingPackageError,
    NoGradOutputsError,
    NoSuchCallError,
    NoSuchModuleError,
    NotAModuleError,
    NotCopyableError,
    NotDifferentiableArgumentError,
    NotKeptError,
    NotStorableError,
    OutputNeedsNoGradError,
    SeveralLossesError,
    UnknownFieldError,
    UnknownKindError,
    UnusedInputError,
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
from gradlib.vjp.explain import explain_vjp
from gradlib.vjp.explain_errors import explain_errors
from gradlib.vjp.explanation import VJPExplanation
from gradlib.vjp.grad import grad

__all__ = [
    "AmbiguousCallError",
    "BrokenFileError",
    "Call",
    "CannotReplayError",
    "ChangedInPlaceError",
    "Comparison",
    "Difference",
    "FreedGraphError",
    "GradOutputsCountError",
    "GradOutputsDeviceError",
    "GradOutputsDtypeError",
    "GradOutputsError",
    "GradOutputsShapeError",
    "GradOutputsTypeError",
    "GradlibError",
    "GradsBatchedError",
    "HookEntry",
    "HookKind",
    "HookReport",
    "InputNeedsNoGradError",
    "MissingPackageError",
    "NoGradOutputsError",
    "NoSuchCallError",
    "NoSuchModuleError",
    "Nonfinite",
    "NotAModuleError",
    "NotCopyableError",
    "NotDifferentiableArgumentError",
    "NotKeptError",
    "NotSaved",
    "NotStorableError",
    "OutputNeedsNoGradError",
    "Pass",
    "Recording",
    "SeveralLossesError",
    "Skipped",
    "TensorStats",
    "UnknownFieldError",
    "UnknownKindError",
    "Unmatched",
    "UnusedInputError",
    "VJPExplanation",
    "Verification",
    "explain_errors",
    "explain_vjp",
    "grad",
    "hook_report",
    "load_recording",
    "record",
    "tensor_stats",
]

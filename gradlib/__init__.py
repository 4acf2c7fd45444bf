"""See how gradients flow through PyTorch modules."""

from gradlib.errors import (
    AmbiguousCallError,
    BrokenFileError,
    CannotReplayError,
    ChangedInPlaceError,
    CoupledSamplesError,
    DetachedPathError,
    FreedGraphError,
    GradlibError,
    GradOutputsCountError,
    GradOutputsDeviceError,
    GradOutputsDtypeError,
    GradOutputsError,
    GradOutputsLayoutError,
    GradOutputsShapeError,
    GradOutputsTypeError,
    GradsBatchedError,
    IndependentOutputError,
    InputNeedsNoGradError,
    JacobianArgumentError,
    MissingPackageError,
    NoGradOutputsError,
    NoSuchCallError,
    NoSuchModuleError,
    NoSuchWayError,
    NotAModuleError,
    NotCopyableError,
    NotDifferentiableArgumentError,
    NotDifferentiableDtypeError,
    NotKeptError,
    NotPerSampleError,
    NotRepeatableError,
    NotScriptableError,
    NotStorableError,
    OutOfBytesError,
    OutputNeedsNoGradError,
    RecordingArgumentError,
    SeveralLossesError,
    UnknownFieldError,
    UnknownKindError,
    UnusedInputError,
)
from gradlib.hook_reports.hook_report import hook_report
from gradlib.hook_reports.report import HookEntry, HookKind, HookReport
from gradlib.jacobian.from_graph import per_sample_jacobian_from_graph
from gradlib.jacobian.per_sample import per_sample_jacobian
from gradlib.jacobian.plan import JacobianPlan
from gradlib.jacobian.plan_jacobian import plan_jacobian
from gradlib.opaque import NotSaved
from gradlib.recorder.record import record
from gradlib.recording.backward_pass import Pass
from gradlib.recording.call import Call
from gradlib.recording.comparison import Comparison, Unmatched
from gradlib.recording.difference import Difference
from gradlib.recording.load import load_recording
from gradlib.recording.nonfinite import Nonfinite
from gradlib.recording.recording import Recording
from gradlib.recording.verification import Skipped, Verification
from gradlib.stats import TensorStats, tensor_stats
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
    "CoupledSamplesError",
    "DetachedPathError",
    "Difference",
    "FreedGraphError",
    "GradOutputsCountError",
    "GradOutputsDeviceError",
    "GradOutputsDtypeError",
    "GradOutputsError",
    "GradOutputsLayoutError",
    "GradOutputsShapeError",
    "GradOutputsTypeError",
    "GradlibError",
    "GradsBatchedError",
    "HookEntry",
    "HookKind",
    "HookReport",
    "IndependentOutputError",
    "InputNeedsNoGradError",
    "JacobianArgumentError",
    "JacobianPlan",
    "MissingPackageError",
    "NoGradOutputsError",
    "NoSuchCallError",
    "NoSuchModuleError",
    "NoSuchWayError",
    "Nonfinite",
    "NotAModuleError",
    "NotCopyableError",
    "NotDifferentiableArgumentError",
    "NotDifferentiableDtypeError",
    "NotKeptError",
    "NotPerSampleError",
    "NotRepeatableError",
    "NotSaved",
    "NotScriptableError",
    "NotStorableError",
    "OutOfBytesError",
    "OutputNeedsNoGradError",
    "Pass",
    "Recording",
    "RecordingArgumentError",
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
    "per_sample_jacobian",
    "per_sample_jacobian_from_graph",
    "plan_jacobian",
    "record",
    "tensor_stats",
]

__version__ = "0.1.0"

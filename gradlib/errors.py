"""The exceptions gradlib raises. Each class has a stable code."""


def page_about(code: str) -> str:
    """Return the path of the page that explains a code."""
    return f"docs/errors/{code}.md"


def more_about(code: str) -> str:
    """Return the last line of a message whose code has a page."""
    return f"More in gradlib's documentation: {page_about(code)}"


class GradlibError(Exception):
    """Base of every exception gradlib raises.

    Attributes:
        code: Stable name of the kind of error, such as ``"GL201"``. The message may be
            reworded; the code is not.
    """

    code = "GL000"

    def __str__(self) -> str:
        """Return the message with its code in front."""
        return f"[{self.code}] {super().__str__()}"


class NotAModuleError(GradlibError, TypeError):
    """GL200: the argument that must be a ``torch.nn.Module`` is something else."""

    code = "GL200"


class NoSuchCallError(GradlibError, LookupError):
    """GL201: a recording holds no call under that key; the message says why."""

    code = "GL201"


class AmbiguousCallError(GradlibError, LookupError):
    """GL202: a key fits several calls, or a shortcut several backward passes."""

    code = "GL202"


class NotCopyableError(GradlibError, RuntimeError):
    """GL203: a module cannot be copied, so it cannot be tried on a copy."""

    code = "GL203"


class UnknownFieldError(GradlibError, ValueError):
    """GL204: ``keep`` names a field that calls do not have."""

    code = "GL204"


class NoSuchModuleError(GradlibError, LookupError):
    """GL205: ``modules`` fits no module, or is no name, pattern or function."""

    code = "GL205"


class NotKeptError(GradlibError, LookupError):
    """GL206: the recording was told not to keep what you ask for."""

    code = "GL206"


class CannotReplayError(GradlibError, RuntimeError):
    """GL207: a call cannot be computed again; the message says why and what to do."""

    code = "GL207"


class BrokenFileError(GradlibError, ValueError):
    """GL208: a file is not the recording it should be; the message says why."""

    code = "GL208"


class MissingPackageError(GradlibError, ImportError):
    """GL209: what you ask for needs a package that is not installed."""

    code = "GL209"


class NotStorableError(GradlibError, TypeError):
    """GL210: a recording holds what a file cannot hold; the message says what to do."""

    code = "GL210"


class UnknownKindError(GradlibError, LookupError, ValueError):
    """GL211: there is no picture, or no hook, of that kind."""

    code = "GL211"


class RecordingArgumentError(GradlibError, TypeError, ValueError):
    """GL212: an argument of a recording or its tools is not what it must be."""

    code = "GL212"


class NotScriptableError(GradlibError, AttributeError):
    """GL213: ``torch.jit.script`` was given a module that is being recorded."""

    code = "GL213"


class GradOutputsError(GradlibError, RuntimeError):
    """GL100: ``grad_outputs`` is wrong; each kind of mistake has its own subclass."""

    code = "GL100"


class NoGradOutputsError(GradOutputsError):
    """GL101: an output that is not a single real number has no ``grad_outputs``."""

    code = "GL101"


class GradOutputsShapeError(GradOutputsError):
    """GL102: a ``grad_outputs`` does not have its output's shape."""

    code = "GL102"


class GradOutputsCountError(GradOutputsError):
    """GL103: there are more ``grad_outputs`` than outputs, or fewer."""

    code = "GL103"


class GradOutputsTypeError(GradOutputsError, TypeError):
    """GL104: a ``grad_outputs`` is a number, a list or something else, not a tensor."""

    code = "GL104"


class GradOutputsDtypeError(GradOutputsError):
    """GL105: a ``grad_outputs`` has a dtype that no gradient of its output has."""

    code = "GL105"


class GradOutputsDeviceError(GradOutputsError):
    """GL106: a ``grad_outputs`` is not on its output's device."""

    code = "GL106"


class GradsBatchedError(GradOutputsError):
    """GL107: ``is_grads_batched`` and the first axis of ``grad_outputs`` disagree."""

    code = "GL107"


class OutputNeedsNoGradError(GradlibError, RuntimeError):
    """GL108: an output does not require grad, so there is no graph behind it."""

    code = "GL108"


class UnusedInputError(GradlibError, RuntimeError):
    """GL109: an input is not part of the graph behind the outputs."""

    code = "GL109"


class InputNeedsNoGradError(GradlibError, RuntimeError):
    """GL110: an input does not require grad."""

    code = "GL110"


class FreedGraphError(GradlibError, RuntimeError):
    """GL111: an earlier backward pass freed what this one needs."""

    code = "GL111"


class ChangedInPlaceError(GradlibError, RuntimeError):
    """GL112: a tensor that the backward pass needs was changed in place."""

    code = "GL112"


class SeveralLossesError(GradOutputsError):
    """GL113: one vector holds several losses, and a backward pass wants one loss."""

    code = "GL113"


class NotDifferentiableArgumentError(GradlibError, RuntimeError, TypeError):
    """GL114: ``outputs`` or ``inputs`` is nothing that autograd can differentiate."""

    code = "GL114"


class GradOutputsLayoutError(GradOutputsError):
    """GL115: a ``grad_outputs`` has another layout than its output, such as sparse.

    It is also raised where an operation does not accept a sparse gradient.
    """

    code = "GL115"


class _JacobianError(GradlibError):
    """Base of the errors about Jacobians, whose codes all have a page."""

    def __str__(self) -> str:
        """Return the message with its code in front, and its page below."""
        return f"{super().__str__()}\n{more_about(self.code)}"


class JacobianArgumentError(_JacobianError, ValueError):
    """GL300: an argument of ``per_sample_jacobian`` is not what it must be."""

    code = "GL300"


class CoupledSamplesError(_JacobianError, RuntimeError):
    """GL301: samples influence each other, so no sample has a Jacobian of its own."""

    code = "GL301"


class DetachedPathError(_JacobianError, RuntimeError):
    """GL302: an output depends on an input in a way that autograd does not see."""

    code = "GL302"


class IndependentOutputError(_JacobianError, RuntimeError):
    """GL303: autograd knows no path from an output to an input."""

    code = "GL303"


class NotRepeatableError(_JacobianError, RuntimeError):
    """GL304: a function's output differs each time, whatever torch's seed."""

    code = "GL304"


class NotPerSampleError(_JacobianError, ValueError):
    """GL305: an output is not a tensor with one row for each sample."""

    code = "GL305"


class NotDifferentiableDtypeError(_JacobianError, TypeError):
    """GL306: a tensor is not dense with real floats, as a derivative needs it."""

    code = "GL306"


class NoSuchWayError(_JacobianError, RuntimeError):
    """GL307: the Jacobian cannot be computed in the way you ask for."""

    code = "GL307"


class OutOfBytesError(_JacobianError, RuntimeError):
    """GL308: the Jacobian does not fit into the memory that it may take."""

    code = "GL308"

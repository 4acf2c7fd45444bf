"""The exceptions gradlib raises. Each class has a stable code."""


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
    """GL202: the key fits several calls, or the shortcut several passes."""

    code = "GL202"


class NotCopyableError(GradlibError, RuntimeError):
    """GL203: a module that is to be tried on a copy cannot be copied."""

    code = "GL203"


class UnknownFieldError(GradlibError, ValueError):
    """GL204: a field that is to be kept is none that a call has."""

    code = "GL204"


class NoSuchModuleError(GradlibError, LookupError):
    """GL205: a name or pattern that selects modules fits none."""

    code = "GL205"


class NotKeptError(GradlibError, LookupError):
    """GL206: the recording was told not to keep what is asked for."""

    code = "GL206"


class CannotReplayError(GradlibError, RuntimeError):
    """GL207: a call cannot be computed again; the message says why and what to do."""

    code = "GL207"


class BrokenFileError(GradlibError, ValueError):
    """GL208: a file is not the recording it should be; the message says in what way."""

    code = "GL208"


class MissingPackageError(GradlibError, ImportError):
    """GL209: what was asked for needs a package that is not installed."""

    code = "GL209"


class NotStorableError(GradlibError, TypeError):
    """GL210: a recording holds a tensor that a file cannot hold."""

    code = "GL210"


class UnknownKindError(GradlibError, ValueError):
    """GL211: there is no picture of that kind."""

    code = "GL211"

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

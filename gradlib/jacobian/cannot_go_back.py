"""Says why torch cannot go back through a graph, and what to do about it."""

from typing import NoReturn

from gradlib.errors import GradlibError, NoSuchWayError
from gradlib.jacobian.memory import is_out_of_memory


def refuse(error: RuntimeError) -> NoReturn:
    """Raise an error of ours in place of one that torch raised as it went back.

    Our own errors are raised as they are, as is torch's where memory has run out.

    Raises:
        NoSuchWayError: torch cannot go back.
    """
    if isinstance(error, GradlibError) or is_out_of_memory(error):
        raise error
    raise NoSuchWayError(_explained(error)) from error


def _explained(error: RuntimeError) -> str:
    """Return why torch cannot go back, and what to do about it."""
    text = str(error)
    if "use_reentrant" in text or "Checkpointing is not compatible" in text:
        return (
            "A checkpoint inside fn is of the reentrant kind, which refuses "
            "torch.autograd.grad. Pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint."
        )
    if "cudnn RNN backward" in text:
        return (
            f"cuDNN goes back through an RNN in training mode only ({text}). Call this "
            "under torch.backends.cudnn.flags(enabled=False), or .train() the RNN."
        )
    if "numpy() on Tensor" in text:  # torch says to detach it, which would be wrong
        return (
            "A backward of yours calls .numpy(), so autograd cannot go back through "
            "that in its turn, as forward mode, a split and create_graph=True do. Pass "
            'mode="reverse", or let it compute with torch\'s operations.'
        )
    return f"torch cannot go back from the output: {text}"

"""Reading a recording from a file."""

from typing import TYPE_CHECKING

from gradlib import storage
from gradlib.private.compiling import as_written
from gradlib.recording import saving
from gradlib.recording.recording import Recording

if TYPE_CHECKING:
    from os import PathLike


@as_written
def load_recording(path: "str | PathLike[str]") -> Recording:
    """Return the recording that `Recording.save` wrote.

    It answers all that the saved one did but `Call.replay` and `Recording.verify`,
    which need the model. Tensors are on the CPU; sparse ones have become dense.

    Arguments and outputs keep their structure. Named tuples and dataclasses are made
    anew from their names and fields; classes made of dicts come back as dicts; any
    other class that was opened, as tuples. A value that is neither a tensor, a NumPy
    array nor one of Python's plain values comes back as `NotSaved`, which has its
    ``repr``.

    Args:
        path: The file.

    Returns:
        The recording, all of it or nothing.

    Raises:
        RecordingArgumentError: `path` is no path.
        OSError: There is no file at `path`, or it cannot be read.
        BrokenFileError: The file is no recording, was cut off or changed, or has
            another version of the format.

    Example:
        ```python
        from pathlib import Path
        from tempfile import TemporaryDirectory

        import torch
        from torch import nn

        import gradlib

        model = nn.Linear(2, 1)
        with gradlib.record(model) as recording:
            model(torch.ones(3, 2)).sum().backward()

        with TemporaryDirectory() as folder:
            recording.save(Path(folder, "run.safetensors"))
            loaded = gradlib.load_recording(Path(folder, "run.safetensors"))
        print(loaded[""].param_grads["weight"])
        #> tensor([[3., 3.]])
        ```
    """
    saving.require_path(path)
    return Recording(*saving.restored(storage.load(path, saving.CLASSES)))

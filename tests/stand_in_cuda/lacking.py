"""What the stand-in lacks, and the tests that need it."""

import re

CUDNN = "the stand-in has no cuDNN"

LACKING = {
    "test_an_lstm_of_cudnn": CUDNN,
    "test_an_lstm_of_cudnn_is_replayed": CUDNN,
    "test_an_lstm_whose_dropout_is_cudnns_is_not_replayed": CUDNN,
    "test_channels_last": f"{CUDNN}, whose convolutions keep channels last",
    "test_data_parallel_on_one_device": "the stand-in does not scatter to replicas",
}
"""The name of each, and why it is skipped."""

SAID = {
    (
        NotImplementedError,
        r"Could not run 'aten::\w+' with arguments from the 'QuantizedCUDA' backend\.",
    ): "quantized tensors",
    (
        RuntimeError,
        r"Backend doesn't support synchronizing streams\.$",
    ): "communication between processes",
}
"""The errors that torch raises where the stand-in lacks something, and what that is.

A GPU raises none of them: there it has the kernels, streams and memory they miss.
"""


def lack_in(error: Exception) -> str:
    """Return what the stand-in lacks by an error, or ``""``."""
    for (kind, said), lack in SAID.items():
        if type(error) is kind and re.match(said, str(error)):
            return lack
    return ""

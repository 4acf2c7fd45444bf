"""What the stand-in lacks, and the tests that need it."""

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
    "QuantizedCUDA": "quantized tensors",
    "Storage device not recognized": "storages that Python makes, as torch.load does",
    "built without USE_CUDA": "storages that are resized, as FSDP does",
    "support synchronizing streams": "communication between processes",
    "storage that is not resizable": "kernels that resize what they write to",
}
"""What torch says where the stand-in lacks something, and what that is."""


def lack_in(error: Exception) -> str:
    """Return what the stand-in lacks by an error, or ``""``."""
    return next((lack for said, lack in SAID.items() if said in str(error)), "")

"""The tests of ``tests/gpu`` that need more than the stand-in has."""

CUDNN = "the stand-in has no cuDNN"

LACKING = {
    "test_an_lstm_of_cudnn": CUDNN,
    "test_an_lstm_of_cudnn_is_replayed": CUDNN,
    "test_an_lstm_whose_dropout_is_cudnns_is_not_replayed": CUDNN,
    "test_channels_last": f"{CUDNN}, whose convolutions keep channels last",
    "test_data_parallel_on_one_device": "the stand-in does not scatter to replicas",
}
"""The name of each, and why it is skipped."""

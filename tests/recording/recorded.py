"""A recording of one forward and its backward pass."""

from typing import Any

import torch
from torch import Tensor, nn

import gradlib


def recorded(model: nn.Module, *args: Tensor, **options: Any) -> gradlib.Recording:
    with gradlib.record(model, **options) as recording:
        output = model(*args)
        output = output if isinstance(output, Tensor) else output[0]
        weights = torch.randn_like(output)
        loss = (output * weights).sum()
        (loss.abs() if loss.is_complex() else loss).backward()
    return recording

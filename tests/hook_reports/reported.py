"""Modules to report on, and what a report says of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradlib

HERE = torch.ones(()).device


def given(*shape: int) -> Tensor:
    made = torch.randn(*shape, device="cpu")
    return made.to(HERE).requires_grad_()


class Of(nn.Module):
    """A function of modules and tensors, as a module."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*self.parts, *args, **kwargs)


def report_of(module: nn.Module, *args: Any, **kwargs: Any) -> gradlib.HookReport:
    report = gradlib.hook_report(module, *args, **kwargs)
    lines = [line.strip() for line in str(report).splitlines()]
    of_words = [line for line in lines if " " in line]  # and no address alone
    assert max(map(len, of_words)) <= 100
    with_entries = sum(bool(it.entries) for it in report.kinds.values())
    assert report._repr_html_().count("<table>") == with_entries
    return report


def whats(kind: gradlib.HookKind) -> dict[str, str]:
    return {entry.place: entry.what for entry in kind.entries}


LINEAR = ["gradient of bias", "gradient of input", "gradient of weight, transposed"]


class Does(nn.Module):
    """A function of the module itself and what it is given."""

    def __init__(self, does: Callable[..., Any], **own: Any) -> None:
        super().__init__()
        self.does = does
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)

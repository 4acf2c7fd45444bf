"""Reports where gradients are disabled, and what a module may ask of its inputs."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradlib.hook_reports.hooks import (
    ACCUMULATED,
    BORDER,
    FULL,
    FULL_PRE,
    KINDS,
    LEGACY,
    TENSOR,
)

from .reported import LINEAR, Of, given, report_of, whats


def forces(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)[0]


def saliency(layer: nn.Module, x: Tensor) -> Tensor:
    layer(x).pow(2).sum().backward(retain_graph=True)
    assert x.grad is not None
    return x * x.grad


ASKING: dict[str, tuple[Callable[..., Tensor], tuple[nn.Module, ...]]] = {
    "its .grad": (saliency, (nn.Linear(3, 2),)),
    "for a copy of it": (lambda x: copy.deepcopy(x) + x, ()),
    "whether it is a leaf": (lambda x: x * 2 if x.is_leaf else x.missing, ()),
}


@pytest.mark.parametrize("name", ASKING)
def test_a_module_may_ask_a_leaf(name: str) -> None:
    does, parts = ASKING[name]
    report = report_of(Of(does, *parts), given(4, 3))
    assert report.kinds[ACCUMULATED].entries[0].what.startswith("gradient of args[0]")


def test_a_module_that_enables_gradients_where_they_are_disabled() -> None:
    with torch.no_grad():
        report = report_of(Of(forces), given(3))
    assert report.kinds[ACCUMULATED].entries[0].what == "gradient of args[0]"
    for kind in BORDER:
        assert report.kinds[kind].why == (
            "Never called: gradients are disabled where the module is called."
        )


def test_names_where_gradients_are_disabled() -> None:
    def enables(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return layer(x)

    for x in (given(4, 3), given(4, 3) * 2):
        with torch.no_grad():
            report = report_of(Of(enables, nn.Linear(3, 2)), x)
        named = [it.what for it in report.kinds[LEGACY].grad_input]
        assert named == [
            "gradient of parts.0.bias",
            "gradient of args[0]",
            "gradient of parts.0.weight, transposed",
        ]


def test_a_view_made_where_gradients_are_disabled() -> None:
    """It says that it requires grad, and autograd has no node for it."""

    def viewed(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        with torch.no_grad():
            return y, y.view(-1)

    linear = nn.Linear(3, 2)
    kinds = report_of(Of(viewed, linear), torch.ones(4, 3)).kinds
    assert len(kinds[LEGACY].grad_input) == len(LINEAR)
    assert whats(kinds[TENSOR]) == {
        "grad of output[0]": "gradient of output[0]",
        "grad of output[1]": "None: nothing flows to it",
    }
    alone = report_of(Of(lambda *given: viewed(*given)[1], linear), given(4, 3)).kinds
    # A full hook makes torch put a node of its own there.
    assert whats(alone[FULL_PRE]) == {"grad_output[0]": "gradient of output"}
    assert "waits for the gradient of one, and none comes" in alone[FULL].why


def test_inference_mode() -> None:
    module, x = nn.Linear(3, 2), given(4, 3)
    with torch.inference_mode():
        report = report_of(module, x)
        of_its_own = report_of(module, torch.ones(4, 3))
    said = "Never called: no output requires grad: gradients are disabled."
    for kinds in (report.kinds, of_its_own.kinds):
        assert {kinds[kind].why for kind in KINDS} == {said}
    assert report.notes == ()


def test_what_would_require_grad_but_for_inference_mode() -> None:
    def enables(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 2

    with torch.inference_mode():
        report = report_of(Of(enables), given(3))
    assert "in torch.inference_mode() nothing that is computed" in report.notes[0]

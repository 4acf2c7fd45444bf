"""An entry is named by where it stands; that another gradient is equal, is added."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradlib.hook_reports.hooks import (
    ACCUMULATED,
    FULL,
    LEGACY,
    NODE,
    SEVERAL,
    TENSOR,
)

from .reported import Of, given, report_of, whats


def legacy(module: nn.Module, *args: Tensor) -> list[str]:
    return [it.what for it in report_of(module, *args).kinds[LEGACY].grad_input]


@pytest.mark.parametrize("shape", [(4, 3), (3,)])
def test_the_output_of_a_layer_is_not_its_bias(shape: tuple[int, ...]) -> None:
    """Whose gradient is the same, where there is one sample."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    assert legacy(model, given(*shape)) == ["gradient of output of 0"]


def test_what_is_added_up_is_told_apart() -> None:
    def with_skip(fc: nn.Module, x: Tensor, skip: Tensor) -> Tensor:
        return fc(x) + skip

    assert legacy(Of(with_skip, nn.Linear(3, 3)), given(4, 3), given(4, 3)) == [
        "gradient of output of parts.0",
        "gradient of args[1]",
    ]
    assert legacy(Of(lambda fc, x: fc(x) + x, nn.Linear(3, 3)), given(4, 3)) == [
        "gradient of output of parts.0",
        "a part of the gradient of args[0], which has other uses, too",
    ]
    assert legacy(Of(lambda x, skip: x.sin() + skip), given(3), given(3)) == [
        "gradient of an inner tensor, from SinBackward0, equal to that of args[1] "
        "and of output",
        "gradient of args[1]",
    ]


def test_a_nan_is_equal_to_none() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Softplus(), nn.Linear(3, 3), nn.Tanh())
    for number in (1.0, math.nan):
        x = torch.full((4, 3), number, requires_grad=True)
        assert legacy(model, x) == ["gradient of output of 2"]
    lost = legacy(Of(lambda x: x.sin().exp()), x)
    assert lost == ["gradient of an inner tensor, from SinBackward0"]


def test_what_is_laid_out_anew_keeps_its_name() -> None:
    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x.mean(0, keepdim=True) + self.bias.view(1, 3).expand(2, 3)

    assert legacy(Bias(), given(2, 3)) == [
        "gradient of an inner tensor, from MeanBackward1, equal to that of bias, "
        "reshaped",
        "gradient of bias, before it is summed",
    ]


class Hooks(nn.Module):
    """Has a hook on what it is given, or on what it returns."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        {"input": x, "output": y}[self.which].register_hook(lambda grad: 3 * grad)
        return y


def test_what_hooks_of_the_forward_have_changed() -> None:
    kinds = report_of(Hooks("output"), given(3)).kinds
    changed = "gradient of output, changed by a hook that the forward sets"
    assert whats(kinds[TENSOR]) == {"grad of output": changed}
    assert whats(kinds[LEGACY]) == {
        "grad_input[0]": "gradient of x",
        "grad_output[0]": changed,
    }
    kinds = report_of(Hooks("input"), given(3)).kinds
    before = "gradient of x, before a hook that the forward sets"
    assert whats(kinds[LEGACY])["grad_input[0]"] == before


def test_an_output_that_has_the_gradient_of_a_bias() -> None:
    """It is named after itself, whatever else is equal to it."""
    layer = nn.Linear(3, 3)

    def hooked(fc: nn.Module, x: Tensor) -> Tensor:
        y = fc(x)
        y.register_hook(lambda grad: 7 * grad)
        return y

    changed = "gradient of output, changed by a hook that the forward sets"
    for shape in ((3,), (1, 3), (4, 3)):
        kinds = report_of(Of(hooked, layer), given(*shape)).kinds
        assert whats(kinds[TENSOR]) == {"grad of output": changed}


def test_zeros_that_are_a_part() -> None:
    def gate(fc: nn.Module, x: Tensor) -> Tensor:
        return torch.where(fc(x) > -100, fc(x), x)

    part = "zeros: a part of the gradient of args[0], which has other uses, too"
    x = given(4, 3)
    assert part in legacy(Of(gate, nn.Linear(3, 3)), x)
    whole = "zeros: gradient of args[0]"
    assert legacy(Of(lambda x: torch.where(x > 100, x, 0)), x)[0] == whole


@pytest.mark.parametrize("times", [1, 5])
def test_an_argument_that_a_pre_hook_uses_too(times: int) -> None:
    module = Of(lambda a, b: 2 * a + 3 * b)
    module.register_forward_pre_hook(lambda _, args: (args[0], times * args[0]))
    x = given(4)
    kinds = report_of(module, x, given(4)).kinds
    part = "a part of the gradient of args[0], which has other uses, too"
    assert kinds[FULL].grad_input[0].what == part
    assert whats(kinds[SEVERAL])["grads[0]"] == "gradient of args[0]"


def test_what_the_forward_has_overwritten() -> None:
    kinds = report_of(Of(lambda x: x.mul_(2).sin()), given(3) * 1).kinds
    overwritten = {"grads[0]": "gradient of args[0] as it was overwritten"}
    assert whats(kinds[SEVERAL]) == overwritten


def test_words_of_the_length_are_about_what_the_module_got() -> None:
    scale = nn.Parameter(torch.randn(3))
    linear = nn.Linear(3, 2)
    linear.register_forward_pre_hook(lambda _, args: (args[0] * scale,))
    why = report_of(linear, torch.randn(2, 3)).kinds[FULL].why
    assert "requires grad" not in why
    linear = nn.Linear(3, 2)

    def reorder(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> Any:
        return (kwargs["input"] * 2,), {}

    linear.register_forward_pre_hook(reorder, with_kwargs=True)
    why = report_of(linear, input=given(2, 3)).kinds[FULL].why
    assert "keyword" not in why
    assert "requires grad" not in why


@pytest.mark.parametrize("first", [3, None])
def test_no_tensor_where_torch_looks_for_one(first: Any) -> None:
    why = report_of(Of(lambda x: (first, x * 2)), given(3)).kinds[NODE].why
    assert why.endswith(f"comes to a value of type {type(first).__name__}.")
    assert "leaf" not in why


def test_the_output_on_whose_node_the_old_hook_sits() -> None:
    module = Of(lambda x: {"a": {"b": x * 2}, "c": x.sin()})
    why = report_of(module, given(3)).kinds[LEGACY].why
    assert "SinBackward0, the node of output['c']." in why


def test_what_is_another_gradient_at_each_run_is_not_known() -> None:
    times = iter(range(1, 1000))

    class Another(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 (torch's form)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004 (torch's form)
            return grads[0] * next(times)

    assert legacy(Of(lambda x: Another.apply(x)), given(3)) == [
        "not known: it is another gradient at each run"
    ]


def test_one_tensor_as_several_arguments_has_other_uses() -> None:
    attention, x = nn.MultiheadAttention(4, 2), given(3, 1, 4)
    kinds = report_of(attention, x, x, x).kinds
    for kind in (SEVERAL, ACCUMULATED):
        assert [it.what for it in kinds[kind].entries][:3] == [
            f"gradient of {name}, with all its other uses"
            for name in ("query", "key", "value")
        ]
    x = given(3)
    as_one = Of(lambda a, b: a * 2 if a is b else a * b)
    assert legacy(as_one, x, x)[0] == "gradient of args[0], with all its other uses"
    difference = report_of(Of(lambda a, b: a - b), x, x).kinds
    assert set(whats(difference[SEVERAL]).values()) == {
        f"zeros: gradient of args[{i}], with all its other uses" for i in (0, 1)
    }
    assert [it.what for it in difference[FULL].grad_input] == [
        "gradient of args[0]",
        "gradient of args[1]",
    ]


def test_an_output_that_is_used_for_another_keeps_its_name() -> None:
    def both(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = layer(x)
        return hidden * 3, hidden

    said = "a part of the gradient of output[1], which has other uses, too"
    assert legacy(Of(both, nn.Linear(3, 3)), given(4, 3))[0] == said


@pytest.mark.parametrize(
    ("factor", "what"),
    [
        (0.0, "zeros: gradient of an inner tensor"),
        (1.0, "gradient of an inner tensor, equal to that of output"),
    ],
)
def test_what_a_pre_hook_has_put_there_is_no_argument(factor: float, what: str) -> None:
    module = Of(lambda x: x * factor)
    module.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    (entry,) = report_of(module, given(3)).kinds[FULL].grad_input
    assert entry.what == what
    unused = Of(lambda *args: args[1] * 1)
    unused.register_forward_pre_hook(lambda _, args: (args[0] * 2, args[1]))
    (first, _) = report_of(unused, given(3), given(3)).kinds[FULL].grad_input
    said = "zeros: nothing flows to what a forward pre-hook has put there"
    assert first.what == said


def test_an_argument_that_was_overwritten_and_used_twice() -> None:
    def squared(x: Tensor) -> Tensor:
        x.exp_()
        return x * x

    said = "a part of the gradient of an inner tensor, from ExpBackward0"
    assert set(legacy(Of(squared), given(3) * 1)) == {said}


@pytest.mark.parametrize("place", ["a list", "a parameter"])
def test_what_a_pre_hook_only_moves_keeps_its_name(place: str) -> None:
    module: Any = Of(lambda a, b: a * b)
    module.weight = nn.Parameter(torch.randn(3))

    def moved(module: Any, args: Any) -> Any:
        return (args[0][0] if place == "a list" else module.weight, args[1])

    module.register_forward_pre_hook(moved)
    entries = report_of(module, [given(3)], given(3)).kinds[FULL].grad_input
    name = "args[0][0]" if place == "a list" else "weight"
    assert [it.what for it in entries] == [
        f"gradient of {name}",
        "gradient of args[1]",
    ]


def test_an_argument_that_is_a_parameter_too_has_other_uses() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002 (unused)
            return x * self.weight

    module = Tied()
    named = whats(report_of(module, given(3), module.weight).kinds[ACCUMULATED])
    assert named["v.grad"] == "gradient of v, with all its other uses"

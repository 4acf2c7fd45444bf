"""What is no name, pattern or function of modules is refused with the fix."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib


@pytest.mark.parametrize("choice", [nn.Linear, [nn.Linear], ["0", nn.Linear]])
def test_a_class_is_no_predicate(choice: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with pytest.raises(gradlib.NoSuchModuleError) as caught:
        gradlib.record(model, modules=choice)
    fix = "lambda name, module: isinstance(module, Linear)"
    assert str(caught.value).endswith(f"modules={fix}.")
    chosen = eval(fix, {"Linear": nn.Linear})
    with gradlib.record(model, modules=chosen) as recording:
        model(torch.ones(1, 2))
    assert [call.name for call in recording] == ["0"]


def test_the_model_is_told_its_name() -> None:
    model = nn.Linear(2, 2)
    with gradlib.record(model) as recording:
        model(torch.ones(1, 2))
    assert "(root)" in str(recording)
    with pytest.raises(gradlib.NoSuchCallError, match=r'Ask for recording\[""\]'):
        recording["(root)"]
    wanted = 'The model itself has the name ""'
    with pytest.raises(gradlib.NoSuchModuleError, match=wanted):
        gradlib.record(model, modules="(root)")


def test_a_module_is_told_its_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    choices: Any = (model[1], [model[1]])
    for choice in choices:
        with pytest.raises(gradlib.NoSuchModuleError, match='It has the name "1"'):
            gradlib.record(model, modules=choice)
    stranger: Any = [nn.ReLU()]
    said = r"type ReLU is no name\. Give names, patterns as"
    with pytest.raises(gradlib.NoSuchModuleError, match=said):
        gradlib.record(model, modules=stranger)


@pytest.mark.parametrize("modules", ["d.conv[1]", "d.conv[[]1]", ["d.*"]])
def test_a_name_with_brackets(modules: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.d = nn.ModuleDict({"conv[1]": nn.Linear(2, 2)})

        def forward(self, x: Tensor) -> Tensor:
            return self.d["conv[1]"](x)

    model = Net()
    with gradlib.record(model, modules=modules) as recording:
        model(torch.ones(1, 2))
    assert [call.name for call in recording] == ["d.conv[1]"]


@pytest.mark.parametrize("choice", [lambda: True, lambda _name: True, str.isalpha])
def test_a_function_that_takes_something_else(choice: Any) -> None:
    with pytest.raises(gradlib.NoSuchModuleError, match="lambda name, module"):
        gradlib.record(nn.Linear(2, 1), modules=choice)


@pytest.mark.parametrize(
    "choice",
    [lambda *_: True, isinstance, lambda _n, _m: 1, getattr],  # it has no signature
)
def test_a_function_that_takes_both(choice: Any) -> None:
    gradlib.record(nn.Linear(2, 1), modules=choice)

"""Structures, flat and back."""

import gc
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib
from gradlib.tree import Tree, tensors_in


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]
    name: str = "output"


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


class ModelOutput(OrderedDict[str, Any]):
    """A dict whose keys are attributes too, as some libraries return it."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.__dict__.update(values)


@pytest.mark.parametrize(
    ("structure", "paths"),
    [
        (Output(torch.ones(1), [torch.ones(2)]), [".logits", ".hidden[0]", ".name"]),
        ([Frozen(torch.ones(1))], ["[0].value"]),
        (ModelOutput(loss=torch.ones(1), rest=None), ["['loss']", "['rest']"]),
        (Pair(torch.ones(1), None), ["[0]", "[1]"]),
        (torch.ones(1), [""]),
    ],
    ids=["dataclass", "frozen", "dict class", "named tuple", "bare"],
)
def test_flat_and_back(structure: object, paths: list[str]) -> None:
    tree = Tree.of(structure)
    assert [tree.path(i) for i in range(len(tree.leaves))] == paths
    built = tree.build()
    assert type(built) is type(structure)
    assert all(map(torch.equal, tensors_in(built), tensors_in(structure)))
    assert tensors_in(tree.filled({})) == []


def test_the_original_is_neither_changed_nor_held() -> None:
    source = Output(torch.ones(1), [])
    held = weakref.ref(source.logits)
    tree = Tree.of(source).map(
        lambda leaf: leaf + 1 if isinstance(leaf, Tensor) else leaf
    )
    assert source.logits.item() == 1
    del source
    gc.collect()
    assert held() is None
    assert tree.build().logits.item() == 2
    assert tree.build().name == "output"


def test_a_dict_class_fills_its_attributes() -> None:
    tree = Tree.of(ModelOutput(loss=torch.ones(1)))
    filled = tree.filled({0: torch.zeros(1)})
    assert filled.loss.item() == filled["loss"].item() == 0


@pytest.mark.parametrize("kind", [Output, ModelOutput])
def test_gradients_of_outputs_in_a_class(kind: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            return kind(logits=3 * y, hidden=[5 * y])

    model = Model()
    with gradlib.record(model) as recording:
        output = model(torch.ones(1, 2))
        (7 * output.logits).sum().backward()
    call = recording[""]
    assert isinstance(call.output, kind)
    assert_close(call.grad_output.logits, torch.full((1, 2), 7.0))
    assert call.grad_output.hidden == [None]
    assert_close(recording["linear"].grad_output[0], torch.full((1, 2), 21.0))
    assert "gave output" in call.note

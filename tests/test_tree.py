"""Structures, flat and back."""

import gc
import pickle
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib
from gradlib.tree import Tree, tensors_in, tensors_in_call


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


@dataclass
class Heads(dict[str, Any]):
    """A dict class with fields, which are no keys."""

    first: Any = None
    second: Any = None


def with_attribute(made: Any, value: Any) -> Any:
    made.extra = value
    return made


@pytest.mark.parametrize(
    ("structure", "paths"),
    [
        (Heads(torch.ones(1), torch.ones(2)), [".first", ".second"]),
        (
            with_attribute(ModelOutput(y=torch.ones(1)), torch.ones(2)),
            ["['y']", ".extra"],
        ),
        (
            with_attribute(ModelOutput(y=torch.ones(1)), [torch.ones(2), 3]),
            ["['y']", ".extra[0]", ".extra[1]"],
        ),
        (
            with_attribute(Output(torch.ones(1), []), {"z": torch.ones(2)}),
            [".logits", ".name", ".extra['z']"],
        ),
        (with_attribute(ModelOutput(y=torch.ones(1)), object()), ["['y']"]),
    ],
    ids=["dict class with fields", "dict class", "list", "dataclass", "no tensor"],
)
def test_attributes_besides_keys_and_fields(structure: Any, paths: list[str]) -> None:
    tree = Tree.of(structure)
    assert tree.paths() == paths
    assert tree.own_order() == [*range(len(paths))]
    again = pickle.loads(pickle.dumps(tree))
    assert again.paths() == paths
    assert all(map(torch.equal, tensors_in(tree.build()), tensors_in(structure)))
    assert tensors_in(tree.filled({})) == []
    assert Tree.of(tree.filled({})).paths() == paths


def test_dicts_have_an_order_of_their_own() -> None:
    structure: Any = [{"z": 1, "a": [{"y": 2, "b": 3}, 4]}, (5, {"d": 6, "c": 7})]
    tree = Tree.of(structure)
    assert [tree.leaves[place] for place in tree.own_order()] == [1, 2, 3, 4, 5, 6, 7]
    assert Tree.of(1).own_order() == [0]
    assert Tree.of({}).own_order() == []


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


@dataclass
class Unfilled:
    value: Any
    later: Any = field(init=False)


@dataclass
class Uncopied:
    value: Any

    def __copy__(self) -> "Uncopied":
        raise RuntimeError("not to be copied")


@dataclass
class Unpickled:
    value: Any

    def __getstate__(self) -> object:
        raise RuntimeError("not to be pickled")


@dataclass(frozen=True)
class Shared:
    """Its copy is the object itself, as who cannot be changed may do it."""

    value: Any

    def __copy__(self) -> "Shared":
        return self


class Unchanging(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("it cannot be changed")


class OnlyTensors(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"{key} must be a tensor")
        super().__setitem__(key, value)


@dataclass
class Node:
    value: Any
    parent: Any = None


def ring(value: Any) -> Node:
    """Return one of two nodes that hold each other."""
    node = Node(value)
    node.parent = Node(value, node)
    return node


def round_list(value: Any) -> list[Any]:
    """Return a list that holds itself."""
    values = [value]
    values.append(values)
    return values


CLOSED: list[Any] = [
    *(Unfilled, Uncopied, Unpickled, Shared, ring, round_list),
    *(lambda value: Unchanging(value=value), lambda value: OnlyTensors(value=value)),
]


class Returns(nn.Module):
    """Returns what is made of its output; what it is given besides is not used."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(2, 2), make

    def forward(self, x: Tensor, _: object = None) -> Any:
        return self.make(self.linear(x))


def test_several_classes_that_are_met_for_the_first_time() -> None:
    kinds = [type(f"New{i}", (OrderedDict,), {}) for i in range(20)]
    x = torch.ones(2)
    tree = Tree.of([kind(a=x, b=[x]) for kind in kinds])
    assert len(tree.leaves) == 40
    assert [type(it) for it in tree.build()] == kinds


@pytest.mark.parametrize("make", CLOSED)
def test_what_cannot_be_opened_is_a_leaf(make: Any) -> None:
    closed, tensor = make(torch.ones(1)), torch.zeros(1)
    for _ in range(2):
        tree = Tree.of([tensor, {"b": closed, "a": [Output(tensor, [])]}])
        assert tree.leaves[:3] == [tensor, tensor, "output"]
        assert tree.leaves[3] is closed
        assert tree.path(3) == "[1]['b']"
        assert tree.build()[1]["b"] is closed
        assert Tree.of(closed).is_leaf()


@pytest.mark.parametrize("make", CLOSED)
def test_a_model_that_handles_it_is_recorded(make: Any) -> None:
    model = nn.Sequential(Returns(make))
    with gradlib.record(model) as recording:
        output = model[0](torch.ones(1, 2), make(torch.ones(1)))
    assert isinstance(recording["0"].output, gradlib.NotSaved)
    assert isinstance(recording["0"].args[1], gradlib.NotSaved)
    assert recording["0"].output.text == type(output).__name__
    assert isinstance(recording["0.linear"].output, Tensor)
    with pytest.raises(gradlib.NotPerSampleError, match="Return tensors only"):
        gradlib.per_sample_jacobian(model, torch.ones(1, 2))


def test_its_values_stay_where_they_are() -> None:
    value = torch.ones(1)
    shared = Shared(value)
    Tree.of(shared)
    assert shared.value is value


def test_what_stands_in_two_places_is_opened_in_both() -> None:
    pair = [torch.ones(1), ()]
    assert Tree.of([pair, Unfilled(1), pair]).paths() == ["[0][0]", "[1]", "[2][0]"]


def test_a_chain_too_long_to_be_opened() -> None:
    node = Node(torch.ones(1))
    for _ in range(2000):
        node = Node(torch.ones(1), node)
    tree = Tree.of(node)
    assert isinstance(tree.leaves[-1], Node)
    assert torch.equal(tree.build().parent.parent.value, torch.ones(1))


def test_structures_agree_whatever_their_class_says_of_equality() -> None:
    @dataclass
    class Unequal:
        value: Any

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("not to be compared")

    assert Tree.of(Unequal(1)).spec == Tree.of(Unequal(2)).spec


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
    assert "gave no gradient to output" in call.note


def test_tensors_in_a_call_are_found_also_where_they_are_nested() -> None:
    x, y = torch.ones(1), torch.ones(2)
    for args, kwargs in (((x, 1), {"y": y}), (([x], 1), {"of": {"y": y}})):
        found = tensors_in_call(args, kwargs)
        assert [*map(id, found)] == [id(x), id(y)]

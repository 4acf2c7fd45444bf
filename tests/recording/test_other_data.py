"""Calls are replayed after a module's tensors got other memory or another size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import gradlib
from gradlib.recording.kept import Kept

LARGE = 5000
"""A buffer with that many entries is kept without a copy."""


def agrees(model: nn.Module, change: Callable[[], None] = lambda: None) -> bool:
    """Return whether each of three steps can be replayed, with a change after each."""
    with gradlib.record(model) as recording:
        for _ in range(3):
            model(torch.randn(4, 6)).square().sum().backward()
            model.zero_grad()
            change()
    return recording.verify().agreed == len(recording)


def _shows_a_part(layer: nn.Linear) -> None:
    rows = max(len(layer.weight) - 1, 1)
    layer.weight.data = layer.weight.data[:rows]
    layer.bias.data = layer.bias.data[:rows]


def _is_transposed(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.t()


def _grows(layer: nn.Linear) -> None:
    layer.weight.data = torch.cat([layer.weight.data, torch.ones(1, 6)])
    layer.bias.data = torch.cat([layer.bias.data, torch.ones(1)])


def _shrinks(layer: nn.Linear) -> None:
    _shows_a_part(layer)
    layer.weight.data = layer.weight.data.clone()
    layer.bias.data = layer.bias.data.clone()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("change", [_shows_a_part, _is_transposed, _grows, _shrinks])
def test_weights_of_another_shape(
    change: Callable[[nn.Linear], None], shared: bool
) -> None:
    layer = nn.Linear(6, 6)
    if shared:  # then nothing tells of it, as on a GPU, but where the data is
        layer.share_memory()
    assert agrees(nn.Sequential(layer), lambda: change(layer))


def test_weights_that_become_parts_of_one_vector() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))

    def change() -> None:
        vector = parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(2 * vector, model.parameters())

    assert agrees(model, change)


def test_weights_that_take_the_memory_of_others() -> None:
    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.online(x) - 2 * self.target(x)

    model = Difference()

    def change() -> None:
        model.target.weight.data = model.online.weight.data
        model.online.weight.data = model.online.weight.data * 2

    assert agrees(model, change)


def test_complex_weights_that_are_conjugated() -> None:
    weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    kept = Kept(weight)
    assert not kept.has_changed()
    weight.data = weight.data.conj()
    assert kept.has_changed()


def test_weights_whose_bits_are_read_as_another_dtype() -> None:
    weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float16))
    kept = Kept(weight)
    assert not kept.has_changed()
    weight.data = weight.data.view(torch.bfloat16)
    assert kept.has_changed()


class Observes(nn.Module):
    """Keeps the largest entries, at first none, as torch.ao's observers do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y * self.seen(y.detach().amax(0)).sum()

    def seen(self, largest: Tensor, /) -> Tensor:
        raise NotImplementedError


class Resizes(Observes):
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.empty(0))

    def seen(self, largest: Tensor, /) -> Tensor:
        if not len(self.largest):
            self.largest.resize_(6).zero_()
        return self.largest.copy_(torch.maximum(self.largest, largest))


class ResizesAttribute(Resizes):
    def __init__(self) -> None:
        super().__init__()
        del self.largest
        self.largest = torch.empty(0)


class Appends(Resizes):
    def seen(self, largest: Tensor, /) -> Tensor:
        self.largest.data = torch.cat([self.largest, largest])
        return self.largest


class AppendsToAttribute(ResizesAttribute):
    seen = Appends.seen


class AppendsToMany(Appends):
    def __init__(self) -> None:
        super().__init__()
        self.largest.data = torch.zeros(LARGE)


KINDS = (Resizes, ResizesAttribute, Appends, AppendsToAttribute, AppendsToMany)


@pytest.mark.parametrize("kind", KINDS)
def test_what_begins_with_another_size(kind: type[nn.Module]) -> None:
    assert agrees(kind())


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_shape_that_the_other_broadcasts_to(is_buffer: bool) -> None:
    class Scales(Observes):
        def __init__(self) -> None:
            super().__init__()
            if is_buffer:
                self.register_buffer("scale", torch.zeros(1))
            else:
                self.scale = torch.zeros(1)

        def seen(self, _: Tensor) -> Tensor:
            return torch.ones(self.scale.numel())

    model = Scales()
    sizes = iter((5, 1, 5))

    def change() -> None:
        model.scale.data = torch.zeros(next(sizes))

    assert agrees(model, change)


def test_a_large_attribute_that_shows_a_part_of_itself() -> None:
    class Sums(Observes):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.ones(70_000)

        def seen(self, _: Tensor) -> Tensor:
            return self.rows.mean() * len(self.rows)

    model = Sums()

    def change() -> None:
        model.rows.data = model.rows.data[:-1]

    assert agrees(model, change)


@pytest.mark.parametrize("size", [10, 100_000])
def test_an_attribute_may_be_given_another_size_after_a_replay(size: int) -> None:
    class Reads(Observes):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.ones(size)

        def seen(self, _: Tensor) -> Tensor:
            return self.rows[:3]

    model = Reads()
    assert agrees(model)
    assert model.rows.resize_(size + 1).zero_().sum() == 0


def _mkldnn(tensor: Tensor) -> Any:
    return tensor.to_mkldnn()


def _jagged(tensor: Tensor) -> Any:
    return torch.nested.nested_tensor([*tensor], layout=torch.jagged)


def _nested(tensor: Tensor) -> Any:
    return torch.nested.nested_tensor([*tensor])


def _half_complex(tensor: Tensor) -> Any:
    return tensor.to(torch.complex32)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "layout",
    [
        *(Tensor.to_sparse, Tensor.to_sparse_csr, _jagged, _nested),
        pytest.param(_mkldnn, marks=pytest.mark.cpu),
        _half_complex,
    ],
)
def test_buffers_that_are_not_dense(layout: Callable[[Tensor], Any]) -> None:
    class Reads(Observes):
        graph: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("graph", layout(torch.eye(3)))

        def seen(self, _: Tensor) -> Tensor:
            return torch.ones(self.graph.numel())

    assert agrees(Reads())

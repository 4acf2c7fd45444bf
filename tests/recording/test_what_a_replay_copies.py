"""What a module gets copies of during a replay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib


class Shows(nn.Module):
    """Holds a tensor, and a view of a part of it."""

    whole: Tensor
    part: Any

    def __init__(self, hold: Callable[[Any, Tensor], None], size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        hold(self, torch.zeros(size, size))

    def tensors(self) -> list[Tensor]:
        part = self.part
        return [self.whole, part[0] if isinstance(part, list) else part]

    def forward(self, x: Tensor, *, writes: int) -> Tensor:
        held = self.tensors()
        with torch.no_grad():
            held[writes].add_(1)
        return self.linear(x) + held[1 - writes].sum()


def row_of_a_buffer(net: Any, zeros: Tensor) -> None:
    net.register_buffer("whole", zeros)
    net.part = net.whole[0]


def rows_in_a_list(net: Any, zeros: Tensor) -> None:
    net.register_buffer("whole", zeros)
    net.part = [net.whole[1], net.whole[2]]


def turned(net: Any, zeros: Tensor) -> None:
    net.register_buffer("whole", zeros)
    net.part = net.whole.T[1:]


def of_the_data(net: Any, zeros: Tensor) -> None:
    net.register_buffer("whole", zeros)
    net.part = net.whole.data[2]


def of_an_attribute(net: Any, zeros: Tensor) -> None:
    net.whole = zeros
    net.part = net.whole[0]


def another_buffer(net: Any, zeros: Tensor) -> None:
    net.register_buffer("whole", zeros)
    net.register_buffer("part", net.whole[1])


def of_a_weight(net: Any, _zeros: Tensor) -> None:
    net.whole = net.linear.weight.detach()
    net.part = net.whole[0]


HOLD = (
    row_of_a_buffer,
    rows_in_a_list,
    turned,
    of_the_data,
    of_an_attribute,
    another_buffer,
    of_a_weight,
)


@pytest.mark.cpu  # on a GPU a write through .data would show only to who waits for it
@pytest.mark.parametrize("size", [4, 100])  # large buffers are kept in another way
@pytest.mark.parametrize("writes", [0, 1])
@pytest.mark.parametrize("hold", HOLD, ids=lambda it: it.__name__)
def test_two_tensors_that_share_memory(
    hold: Callable[[Any, Tensor], None], writes: int, size: int
) -> None:
    torch.manual_seed(0)
    net = Shows(hold, size)
    with gradlib.record(net) as recording:
        for _ in range(2):
            x = torch.randn(3, size, requires_grad=True)
            net(x, writes=writes).square().sum().backward()
    before = [it.clone() for it in net.tensors()]
    found = recording.verify()
    assert found.agreed == len(recording), str(found)
    for now, then in zip(net.tensors(), before, strict=True):
        assert torch.equal(now, then)


def test_one_buffer_of_two_modules() -> None:
    class Reads(nn.Module):
        state: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return x * self.state

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads = Reads()
            self.register_buffer("state", torch.ones(3))
            self.reads.register_buffer("state", self.state)

        def forward(self, x: Tensor) -> Tensor:
            self.state += 1
            return self.reads(x)

    net = Writes()
    with gradlib.record(net) as recording:
        net(torch.ones(3, requires_grad=True)).sum().backward()
    found = recording.verify()
    assert found.agreed == 2, str(found)


def test_what_a_module_keeps_in_slots_stays() -> None:
    class Slots(nn.Module):
        __slots__ = ("calls", "empty", "seen")

        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen = 0, [torch.zeros(2)]

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.empty = x.detach()
            self.seen[0] += 1
            self.seen.append(x.detach())
            del self.seen[-1]
            return 2 * x

    net = Slots()
    with gradlib.record(net) as recording:
        net(torch.ones(2, requires_grad=True)).sum().backward()
    del net.empty
    seen = net.seen
    assert recording.verify().ok
    assert net.calls == 1
    assert not hasattr(net, "empty")
    assert net.seen is seen
    assert torch.equal(net.seen[0], torch.ones(2))


class Scales(nn.Module):
    """Reads attributes of a parameter and of a buffer."""

    b: Any

    def __init__(self) -> None:
        super().__init__()
        self.w: Any = nn.Parameter(torch.ones(2))
        self.register_buffer("b", torch.ones(2))
        self.w.scale, self.b.scale = 3.0, 5.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w * self.w.scale + x * self.b * self.b.scale


class Doubles(nn.Parameter):
    """A parameter that counts twice where a tensor is multiplied by it."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = super().__torch_function__(function, types, args, kwargs or {})
        return made * 2 if function is Tensor.mul else made


class HasDoubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = Doubles(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul(self.w).as_subclass(Tensor)


@pytest.mark.parametrize("kind", [Scales, HasDoubles])
def test_the_class_and_attributes_of_a_tensor(kind: type[nn.Module]) -> None:
    model = kind()
    with gradlib.record(model) as recording:
        model(torch.ones(2)).sum().backward()
    assert recording.verify().disagreements == ()
    assert recording.verify().skipped == ()


@pytest.mark.cpu  # whose memory an array shows
def test_an_array_of_a_weight_follows_it_and_shows_nothing_that_is_freed() -> None:
    layer = nn.Linear(64, 64)
    array = layer.weight.detach().numpy()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with gradlib.record(layer) as recording:
        layer(torch.randn(2, 64)).sum().backward()
        optimizer.step()
    # The recording is there still: what it shares is not freed before the look.
    assert array.ctypes.data == layer.weight.data_ptr()
    assert torch.equal(torch.from_numpy(array), layer.weight)
    assert recording.verify().ok

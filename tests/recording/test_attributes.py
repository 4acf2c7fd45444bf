"""A call is computed again with what stood in the attributes when it began."""

import gc
import weakref
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.recording.past_attributes import PastAttributes


class Inside(nn.Module):
    """Calls a layer, and has state beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc: Any = nn.Linear(3, 3)


class Counts(Inside):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.fc(x) * self.count


class Remembers(Inside):
    """Adds what it computed the last time."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.last is not None:
            y = y + self.last
        self.last = y.detach()
        return y.tanh()


class Goes(Remembers):
    """Keeps the graph of the last step, and never goes back through it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).tanh()
        out = y if self.last is None else y * self.last.detach().mean()
        self.last = y
        return out


class Overwrites(Inside):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return self.fc(x - self.mean.clone())


class Wide(Overwrites):
    """Has more entries than are copied at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(5000, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x[:, None])
        return out.mean(1)


class Caches(Inside):
    """Appends to a list, as with keys and values of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: Any = []
        self.seen: Any = {"rows": {"all": 0}, "shapes": set[Any]()}

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.keys.append(y.detach())
        self.seen["rows"]["all"] += len(x)
        self.seen["shapes"].add((len(self.keys), *x.shape))
        return (
            (y + sum(self.keys)) * self.seen["rows"]["all"] * len(self.seen["shapes"])
        )


class Window(Caches):
    def __init__(self) -> None:
        super().__init__()
        self.keys = deque[Tensor](maxlen=2)


class Made(Inside):
    """Has its attribute from the first call on."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = x.detach().abs().mean()
            return self.fc(x)
        return self.fc(x) / self.scale


class Removed(Inside):
    def __init__(self) -> None:
        super().__init__()
        self.is_first = True

    def forward(self, x: Tensor) -> Tensor:
        if "is_first" in vars(self):
            del self.is_first
            return self.fc(x).tanh()
        return self.fc(x)


class Builds(Inside):
    """Makes its layer at the first call, and then draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_built = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_built:
            self.is_built = True
            self.fc = nn.Linear(3, 3)
        return nn.functional.dropout(self.fc(x), 0.5, self.training)


class Shares(nn.Module):
    """Two modules that write to one tensor, and read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Overwrites(), Overwrites()
        self.second.mean = self.first.mean

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.first.mean.clone() + self.first(x)


class Sets(nn.Module):
    """Changes what the module in it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counts()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.inner.count += 5
        return out + self.inner(x)


KINDS: list[type[nn.Module]] = [
    *(Counts, Remembers, Goes, Overwrites, Wide, Caches, Window, Made, Removed),
    *(Builds, Shares, Sets),
]


def step(model: nn.Module) -> None:
    model(torch.randn(4, 3, requires_grad=True)).square().sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", [False, True])
def test_state_that_goes_from_call_to_call(
    kind: type[nn.Module], *, inside: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), kind(), nn.Tanh()) if inside else kind()
    with gradlib.record(model) as recording:
        for _ in range(3):
            step(model)
    found = recording.verify()
    assert found.ok, str(found)
    assert found.agreed == found.calls


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_as_it_was_left(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    alone, model = kind(), kind()
    model.load_state_dict(alone.state_dict())
    model.load_state_dict(alone.state_dict())
    torch.manual_seed(1)
    with gradlib.record(model) as recording:
        for _ in range(2):
            step(model)
    recording.verify()
    torch.manual_seed(1)
    for _ in range(2):
        step(alone)
    again = torch.randn(4, 3)
    torch.manual_seed(2)
    expected = alone(again)
    torch.manual_seed(2)
    assert torch.equal(model(again), expected)


def test_settings_that_somebody_changes_between_steps() -> None:
    class Scaled(Inside):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * self.scale

    model: Any = nn.Sequential(Scaled(), nn.Dropout(0.1), nn.LeakyReLU(0.1))
    with gradlib.record(model) as recording:
        for part in (0.2, 0.5, 0.5, 0.9):
            model[0].scale = model[1].p = model[2].negative_slope = part
            step(model)
        model[0].scale = 7.0
    model[1].p = 0.0
    found = recording.verify()
    assert found.ok, str(found)
    assert (model[0].scale, model[1].p) == (7.0, 0.0)


def test_a_setting_that_is_changed_after_the_last_call() -> None:
    model: Any = Counts()
    with gradlib.record(model) as recording:
        step(model)
        step(model)
    model.count, model.new = 100, 1
    assert recording.verify().ok
    assert (model.count, model.new) == (100, 1)


def test_no_graph_is_held_by_what_was_kept() -> None:
    model = Goes()
    with gradlib.record(model, keep=["args", "grad_output"]) as recording:
        step(model)
        left: Any = model.last
        held = Inside()  # by the node
        left.grad_fn.register_hook(lambda *_, _held=held: None)
        node, tensor = weakref.ref(held), weakref.ref(left)
        del left, held
        step(model)
        gc.collect()
        assert node() is tensor() is None
    assert recording.verify().ok


def test_of_thousands_of_things_there_is_one() -> None:
    class Looks(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.words = {str(number): number for number in range(5000)}

        def forward(self, x: Tensor) -> Tensor:
            self.words["new"] = 7
            return self.fc(x) * self.words["new"]

    model = Looks()
    with gradlib.record(model) as recording:
        step(model)
        step(model)
    assert recording.verify().ok
    assert len(model.words) == 5001


def test_a_module_that_is_never_called() -> None:
    class Settings(nn.Module):
        scale = 1.0

    class Reads(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * self.settings.scale

    reads = Reads()
    model = nn.Sequential(nn.Linear(3, 3), reads)
    with gradlib.record(model) as recording:
        for reads.settings.scale in (2.0, 3.0):
            step(model)
    reads.settings.scale = 7.0
    assert recording.verify().ok


def test_what_the_last_call_has_left_for_others() -> None:
    class Last(Inside):
        def __init__(self, before: Counts) -> None:
            super().__init__()
            self.before = [before]

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * self.before[0].count

    counts = Counts()
    model = nn.Sequential(counts, Last(counts))
    with gradlib.record(model) as recording:
        step(model)
        step(model)
    counts.count = 100
    assert recording.verify().ok


# What is kept, and of what there is one


def test_a_list_is_known_only_where_it_stands() -> None:
    past = PastAttributes()
    first: Any = Inside()
    second: Any = Inside()
    first.rows = second.rows = rows = [torch.ones(1)]
    past.look_at_called(first, 0)
    past.look_at_called(second, 1)
    assert original(past, first, 0, "rows") is original(past, second, 1, "rows")
    first.rows = []
    past.look_at_called(first, 2)
    past.look_at_called(second, 3)  # who says that its list was not made since?
    assert second.rows is rows
    assert original(past, first, 0, "rows") is not original(past, second, 3, "rows")


def test_tensors_that_take_each_others_place_in_memory() -> None:
    past = PastAttributes()
    module: Any = Inside()
    for number in range(20):
        module.last = torch.tensor(number)
        past.look_at_called(module, number)
    for number in range(20):
        assert kept(past, module, number, "last").value == number


def test_tensors_that_change_without_a_new_version() -> None:
    past = PastAttributes()
    module: Any = Inside()
    with torch.inference_mode():
        module.count = torch.zeros(3)
    module.scale = torch.ones(3)
    for number in range(3):
        past.look_at_called(module, number)
        with torch.inference_mode():
            module.count += 1
        module.scale.requires_grad_(number == 0)
    values = [kept(past, module, number, "count").value[0] for number in range(3)]
    assert values == [0, 1, 2]
    needs = [kept(past, module, number, "scale").requires_grad for number in range(3)]
    assert needs == [False, True, False]


def test_what_is_not_gone_through() -> None:
    past = PastAttributes()
    module: Any = Inside()
    module.words = {str(number): number for number in range(1001)}
    module.deep = [[[[torch.ones(1)]]]]
    past.look_at_called(module, 0)
    assert kept(past, module, 0, "words") is module.words
    inner = kept(past, module, 0, "deep").value[0]
    assert inner is not module.deep[0]
    assert inner[0][0] is module.deep[0][0][0]
    for still in (nn.Linear(2, 2), nn.LayerNorm(2)):
        past.look_at_called(still, 1)
        assert past.at(still, 1) is None


def kept(past: PastAttributes, module: nn.Module, moment: int, name: str) -> Any:
    found = past.at(module, moment)
    assert found is not None
    return found[name]


def original(past: PastAttributes, module: nn.Module, moment: int, name: str) -> object:
    return kept(past, module, moment, name).original

"""A replay gives the module the attributes that it had when the call began."""

import gc
import random
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from random import Random
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy
import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.recording import left_behind, past_attributes
from gradlib.recording.history import History
from gradlib.recording.past_attributes import NOT_KEPT, Attributes

from ..steps import python_steps
from .recorded import recorded
from .replayed import loss_of


class Inside(nn.Module):
    """Calls a layer, and keeps state in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc: Any = nn.Linear(3, 3)


class Counts(Inside):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.fc(x) * self.count


class Remembers(Inside):
    """Adds the output of its last call."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.last is not None:
            y = y + self.last
        self.last = y.detach()
        return y.tanh()


class Goes(Remembers):
    """Keeps the graph of the last step, and never goes backward through it."""

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
    """Has more entries than the recorder copies at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(5000, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x[:, None])
        return out.mean(1)


class Caches(Inside):
    """Appends to a list, as a cache of attention's keys and values."""

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
    """Makes its attribute in the first call."""

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
    """Makes its layer in the first call, and then draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_built = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_built:
            self.is_built = True
            self.fc = nn.Linear(3, 3)
        return nn.functional.dropout(self.fc(x), 0.5, self.training)


class Shares(nn.Module):
    """Has two modules that write to and read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Overwrites(), Overwrites()
        self.second.mean = self.first.mean

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.first.mean.clone() + self.first(x)


class Sets(nn.Module):
    """Changes an attribute that its child reads."""

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
    model = nn.Sequential(counts, Last(counts), counts)
    with gradlib.record(model) as recording:
        step(model)
        step(model)
    counts.count = 100
    assert recording.verify().ok


# What recording must not change


def outputs(model: nn.Module, steps: int, *, recorded: bool) -> list[Tensor]:
    torch.manual_seed(1)
    found: list[Tensor] = []
    with gradlib.record(model) if recorded else nullcontext():
        for _ in range(steps):
            out = model(torch.randn(4, 3, requires_grad=True))
            out.square().sum().backward()
            found.append(out.detach())
    return found


def test_a_tensor_of_any_size_may_be_given_another() -> None:
    class Grows(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(70_000)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.resize_(len(self.seen) + 10)
            return self.fc(x)

    outputs(model := Grows(), 3, recorded=True)
    assert len(model.seen) == 70_030


@pytest.mark.cpu  # where NumPy has the same memory
@pytest.mark.parametrize("size", [10, 100_000])
def test_an_array_that_has_the_same_memory_sees_what_is_written(size: int) -> None:
    class Reads(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(size)
            self.array = self.seen.numpy()

        def forward(self, x: Tensor) -> Tensor:
            self.seen[0] += 1
            return self.fc(x) * float(self.array[0])

    model, alone = Reads(), Reads()
    alone.load_state_dict(model.state_dict())
    for out, expected in zip(
        outputs(model, 3, recorded=True),
        outputs(alone, 3, recorded=False),
        strict=True,
    ):
        assert torch.equal(out, expected)


class Remembered(nn.Module):
    """Counts inputs by size in a dict, as caches of positions do."""

    def __init__(self, key_of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.key_of = key_of
        self.rows: dict[Any, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = self.key_of(x)
        self.rows[key] = self.rows.get(key, torch.zeros(())) + 1
        return x * self.rows[key]


def test_rows_by_what_never_changes() -> None:
    keys: dict[str, Callable[[Tensor], Any]] = {
        "shape": lambda x: x.shape,
        "tuple": lambda x: (len(x), str(x.device)),
        "tuple in a tuple": lambda x: (len(x), (x.device, x.dtype)),
    }
    for name, key_of in keys.items():
        model = Remembered(key_of)
        with gradlib.record(model) as recording:
            for _ in range(3):
                model(torch.ones(2, requires_grad=True)).sum().backward()
        assert recording.verify().ok, name


def test_rows_by_what_may_change() -> None:
    class Key:
        """An object, in a tuple or alone."""

    key = Key()
    for of in (lambda _: key, lambda _: (1, key)):
        model = Remembered(of)
        with gradlib.record(model) as recording:
            for _ in range(2):
                model(torch.ones(2, requires_grad=True)).sum().backward()
        found, _ = recording.verify().disagreements
        assert (found.index, found.field) == (1, "output")
        assert "what was not kept" in found.reason


def test_attributes_that_other_threads_change() -> None:
    class Busy(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.rows: dict[int, int] = {}

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    model: Any = Busy()
    ended = threading.Event()

    def change() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            setattr(model, f"made_{number % 7}", number)
            model.rows[number % 500] = number
            if number % 7 == 3:
                delattr(model, "made_3")
                model.rows.clear()

    thread = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        with gradlib.record(model):
            for _ in range(300):
                model(torch.randn(2, 3))
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()


def test_attributes_that_change_at_every_step_of_who_looks_at_them() -> None:
    """Another thread could do this, but would hit the same place once in weeks."""
    model: Any = Counts()
    model.last = torch.ones(2, requires_grad=True) * 2

    chance = random.Random(0)
    rows: dict[int, Any] = {}
    row: deque[Any] = deque()
    kinds: set[Any] = set()
    model.rows, model.row, model.kinds = rows, row, kinds

    def change() -> None:
        if hasattr(model, "made"):
            del model.made
            for it in (rows, row, kinds):
                it.clear()
        else:
            model.made = [model.last]
            rows.update({1: [model.last], 2: model.last})
            row.extend([rows, model.last])
            kinds.update({model.last, 3})

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        looks = frame.f_code.co_filename in (
            left_behind.__file__,
            past_attributes.__file__,
        )
        if not looks:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and chance.random() < 0.5:
            change()
        return trace

    change()
    before = sys.gettrace()
    with gradlib.record(model) as recording:
        sys.settrace(trace)
        try:
            for _ in range(100):
                model(torch.randn(2, 3))
        finally:
            sys.settrace(before)
        step(model)
    assert len(recording) == 202


def test_an_attribute_that_comes_while_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = Inside()
    module.rows = [torch.ones(1)]
    past = History([module])

    def meanwhile(_tensor: Tensor) -> None:
        module.new = 1
        module.rows.append(1)

    monkeypatch.setattr(past._attributes, "_was", meanwhile)
    past.look(0)
    assert "new" not in at(past, module, 0).found


def test_what_vmap_leaves_in_an_attribute() -> None:
    class Leaves(Inside):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            def one(row: Tensor) -> Tensor:
                self.last = row * 2
                return self.fc(row)

            return torch.vmap(one)(x)

    model = Leaves()
    with gradlib.record(model) as recording:
        step(model)
        step(model)
    found = recording.verify()
    assert found.disagreements == ()
    reasons = " ".join(it.reason for it in found.skipped)
    assert "Copying the attributes for it" in reasons


def test_a_table_of_thousands_of_numbers_is_not_looked_through() -> None:
    module: Any = Inside()
    module.table = [[0] * 100] * 5
    few = python_steps(lambda: left_behind.nodes_left_in(module, ()))
    module.table = [[[0] * 100] * 100] * 100
    many = python_steps(lambda: left_behind.nodes_left_in(module, ()))
    assert many < 100 * few


def test_tensors_are_found_in_lists_as_deep_as_these_are_read() -> None:
    h = 2 * torch.ones(3, requires_grad=True)
    module = nn.Identity()
    assert left_behind.nodes_left_in(module, [h, [h], [[h]]]) == [h.grad_fn] * 3
    assert left_behind.nodes_left_in(module, [[[[h]]]]) == []


class Pair(NamedTuple):
    y: Tensor


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "named tuple": Pair,
    "object": lambda y: SimpleNamespace(y=y),
    "partial": lambda y: partial(torch.add, y),
    "list of named tuples": lambda y: [Pair(y)],
    "set": lambda y: {y},
    "deep list": lambda y: [[[[y]]]],
    "long list": lambda y: [y, *range(2000)],
    "subclass": lambda y: y.as_subclass(Named),
    "dict": lambda y: {"y": (y,)},
}


class Named(Tensor):
    pass


@pytest.mark.parametrize("kind", HOLDERS)
def test_what_holds_a_graph_is_not_held(kind: str) -> None:
    class Keeps(Inside):
        state: Any = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x).tanh()
            tensors.append(weakref.ref(y))
            self.state = HOLDERS[kind](y)
            return y.sum(1)

    tensors: list[weakref.ref[Tensor]] = []
    model = Keeps()
    with gradlib.record(model, keep=["args", "grad_output"]):
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
        model.state = None
        gc.collect()
        assert [it() for it in tensors] == [None] * 3


# Of which state, where several modules have a part in it


@pytest.mark.cpu  # reading another device's values would wait for the device
def test_values_that_change_without_a_new_version() -> None:
    class Fills(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.is_ready = torch.zeros(3), False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_ready:
                self.table.data.copy_(x.detach().mean(0))
                self.is_ready = True
            return self.fc(x) * self.table

    assert verified(Fills()).ok


def test_one_list_below_nested_modules() -> None:
    class Appends(Inside):
        def __init__(self, rows: list[Any]) -> None:
            super().__init__()
            self.rows = rows

        def forward(self, x: Tensor) -> Tensor:
            self.rows.append(len(x))
            return self.fc(x) * len(self.rows)

    rows: list[Any] = []
    inner = [nn.Sequential(Appends(rows), nn.Tanh()) for _ in range(2)]
    assert verified(nn.Sequential(nn.Linear(3, 3), nn.Sequential(*inner))).ok


def test_a_parent_that_changes_what_it_calls_next() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Counts()

        def forward(self, x: Tensor) -> Tensor:
            self.child.count += 1
            return self.child(x)

    assert verified(Parent()).ok


def test_a_module_that_has_a_method_in_place_of_a_call() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[Tensor] = []

        def update(self, y: Tensor) -> Tensor:
            self.rows.append(y.detach())
            return y + sum(self.rows)

    class Uses(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.cache = Cache()

        def forward(self, x: Tensor) -> Tensor:
            return self.cache.update(self.fc(x))

    assert verified(Uses()).ok
    assert verified(nn.Sequential(nn.Linear(3, 3), Uses())).ok


def test_what_is_put_back_between_steps() -> None:
    class Tap(nn.Module):
        y: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.y = x.detach()
            return x * 1

    class Skip(Inside):
        def __init__(self, tap: Tap) -> None:
            super().__init__()
            self.tap = [tap]

        def forward(self, x: Tensor) -> Tensor:
            assert self.tap[0].y is not None
            return self.fc(x) + self.tap[0].y

    tap = Tap()
    model = nn.Sequential(tap, Skip(tap))
    with gradlib.record(model) as recording:
        for _ in range(3):
            step(model)
            tap.y = None
    found = recording.verify()
    assert found.ok, str(found)
    assert found.agreed == found.calls


def test_modules_of_torch_with_other_settings() -> None:
    def counted(x: Tensor) -> Tensor:
        layer.count += 1
        return nn.functional.linear(x, layer.weight) * layer.count

    layer: Any = nn.Linear(3, 3)
    layer.count, layer.forward = 0, counted
    model: Any = nn.Sequential(layer, nn.Dropout(0))
    with gradlib.record(model) as recording:
        for model[1].p in (0, 0.5):
            step(model)
    found = recording.verify()
    assert found.ok, str(found)


class ByTensor(nn.Module):
    """Has dicts and a set keyed by tensors, which cannot be sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.scales = {self.fc.weight: 2.0, self.fc.bias: 3.0}
        self.doubled = {self.fc.weight}
        self.made: dict[Tensor, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * self.scales[self.fc.weight]
        y = y * self.scales[self.fc.bias]
        self.made = {x: y, y: y.sum(1), y.sum(1): x}
        return y * 2 if self.fc.weight in self.doubled else y


def test_dicts_and_sets_of_tensors() -> None:
    """Trainers keep such dicts of the parameters that required grad."""
    model = ByTensor()
    before = [*model.scales], [*model.doubled]
    verified = recorded(model, torch.randn(2, 3)).verify()
    assert (verified.agreed, verified.skipped) == (2, ())
    assert ([*model.scales], [*model.doubled]) == before


class Notes(NamedTuple):
    values: Tensor
    others: Tensor


class Writes(nn.Module):
    """Writes to tensors in named tuples."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        made = (Notes(torch.zeros(3), torch.zeros(3)), torch.ones(2, 2).max(0))
        self.fc = nn.Linear(3, 3)
        self.kept: Any = [*made] if nested else made[0]
        self.most: Any = made[1]

    def forward(self, x: Tensor) -> Tensor:
        notes = self.kept[0] if isinstance(self.kept, list) else self.kept
        notes.values.add_(1)
        self.most.values.add_(1)
        return self.fc(x)


@pytest.mark.parametrize("nested", [False, True])
def test_named_tuples_stay_as_they_are(nested: bool) -> None:
    model = Writes(nested)
    recording = recorded(model, torch.randn(2, 3))
    for _ in range(2):
        assert recording.verify().ok
    notes: Any = cast(Any, model.kept)[0] if nested else model.kept
    assert notes.values.tolist() == [1, 1, 1]
    assert model.most.values.tolist() == [2, 2]


class Bound(nn.Module):
    """Has a parameter and a state bound in partials, by place and by name."""

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.fc, self.weight = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
        self.by_place = partial(torch.mul, self.weight)
        self.nested = [partial(torch.add, gain, alpha=2)]
        self.by_name: Any = partial(torch.addcmul, value=2, tensor2=gain)

    def forward(self, x: Tensor) -> Tensor:
        gain: Tensor = self.by_name.keywords["tensor2"]
        y: Tensor = self.by_place(self.fc(x))
        y = self.by_name(y, self.nested[0](y))
        self.by_name = partial(torch.addcmul, value=3, tensor2=gain + 1)
        self.nested[0].args[0].add_(1)
        return y


def test_what_is_bound_in_a_partial_is_as_it_was() -> None:
    gain = torch.ones(3)
    model = Bound(gain)
    with gradlib.record(model) as recording:
        for _ in range(3):
            model(torch.randn(2, 3, requires_grad=True)).detach()
            loss_of(model(torch.randn(2, 3, requires_grad=True))).backward()
    assert gain.tolist() == [7, 7, 7]
    bound = model.by_name
    verified = recording.verify()
    assert verified.agreed == 6
    assert not verified.disagreements
    assert model.by_name is bound
    assert gain.tolist() == [7, 7, 7]


def test_what_is_left_in_a_partial_is_known() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.again: Any = partial(torch.mul)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x).tanh()
            self.again = partial(torch.mul, y)
            return y.sin()

    model = Leaves()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        (loss_of(model(x)) + model.again(x).sum()).backward()
    verified = recording.verify()
    assert (verified.agreed, verified.skipped) == (2, ())


@pytest.mark.parametrize("held_by", ["a closure", "an object"])
def test_a_parameter_that_a_replay_cannot_put_in_is_said(held_by: str) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = self.weight = nn.Parameter(torch.ones(3))
            self.spare = nn.Parameter(torch.ones(3))
            self.held = SimpleNamespace(weight=weight)
            self.used = (lambda: weight) if held_by == "a closure" else None

        def forward(self, x: Tensor) -> Tensor:
            weight = self.used() if self.used else self.held.weight
            return x * weight * self.spare

    model = nn.Sequential(nn.Linear(3, 3), Holds())
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(2, 3))).backward()
    said = "takes weight not only from its module"
    with pytest.raises(gradlib.CannotReplayError, match=f"^.GL207. call 0 .* {said}"):
        recording["1"].replay()
    verified = recording.verify()
    assert (verified.agreed, verified.disagreements) == (2, ())
    (skipped,) = verified.skipped
    assert skipped.reason.startswith(f"it {said}")


def test_what_is_kept_on_a_parameter_stays_as_it_is() -> None:
    """Per-sample gradients, for example, are kept on parameters."""
    fc = nn.Linear(3, 3)
    weight: Any = fc.weight
    weight.seen, weight.total = [], torch.zeros(())

    def look(_module: nn.Module, _grad_input: object, grad_output: Any) -> None:
        seen: Any = fc.weight
        seen.seen.append(grad_output[0])
        seen.total += grad_output[0].abs().sum()

    fc.register_full_backward_hook(look)
    recording = recorded(fc, torch.randn(2, 3, requires_grad=True))
    seen, total = [*weight.seen], weight.total.clone()
    assert recording.verify().ok
    assert weight.seen == seen
    assert weight.total == total


class Leaks(nn.Module):
    """Carries the graph of each step on in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.state = x + self.state / 2
        return self.state.tanh()


def test_a_state_in_a_buffer_that_requires_grad() -> None:
    """The last step's output requires grad only through the buffer."""
    model = Leaks()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        outputs = [model(it) for it in (x, 2 * x, x.detach())]
        torch.stack(outputs).sum().backward()
    verified = recording.verify()
    assert (verified.agreed, verified.skipped) == (3, ())


def test_a_list_that_holds_itself() -> None:
    model: Any = Counts()
    model.rows = rows = [torch.ones(1)]
    rows.append(cast(Any, rows))
    with gradlib.record(model) as recording:
        step(model)
    (skipped,) = recording.verify().skipped[:1]
    assert "Copying the attributes for it" in skipped.reason
    assert model.rows is rows


def verified(model: nn.Module) -> gradlib.Verification:
    with gradlib.record(model) as recording:
        for _ in range(3):
            step(model)
    found = recording.verify()
    assert found.agreed == found.calls, str(found)
    return found


class Appends(nn.Module):
    """Reads the last of the tensors in a list, and appends what it returns."""

    def __init__(self, made: list[Tensor]) -> None:
        super().__init__()
        self.made, self.scale = made, nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        self.made.append(self.scale * x + self.made[-1].sin())
        return self.made[-1]


def test_a_tensor_in_an_attribute_that_is_an_argument_too() -> None:
    """It is one tensor, and both uses are in its share."""
    made = [torch.zeros(3)]
    model = nn.Sequential(Appends(made), Appends(made), Appends(made))
    recording = recorded(model, torch.randn(2, 3, requires_grad=True))
    made.clear()  # the tensors are gone
    verified = recording.verify(numerical=True)
    assert verified.agreed == verified.calls, str(verified)


def test_an_argument_that_a_call_overwrites_through_an_attribute() -> None:
    class Doubles(nn.Module):
        held: Any = None

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            self.held.mul_(2)
            return x * mask

    model, x = Doubles(), torch.ones(3, requires_grad=True)
    with gradlib.record(model) as recording:
        for _ in range(2):
            model.held = torch.ones(3)
            model(x, mask=model.held).sum().backward()
    verified = recording.verify()
    assert verified.agreed == 2, str(verified)


class Gone:
    """Something to which a proxy leads, until it is gone."""


class RaisesInDict(dict[str, int]):
    """Lets nobody look at its values."""

    def values(self) -> Any:
        raise LookupError


class RaisesInTuple(tuple[int, ...]):
    """Lets nobody look at its entries."""

    __slots__ = ()

    def __iter__(self) -> Any:
        raise LookupError


class RefusesItsClass:
    """Does not tell its class."""

    __class__ = property(lambda _: 1 / 0)  # type: ignore[assignment] (on purpose)


ODD: dict[str, Callable[[], Any]] = {
    "proxy": lambda: weakref.proxy(Gone()),
    "dict": lambda: RaisesInDict(a=1),
    "tuple": lambda: RaisesInTuple((1, 2)),
    "class": RefusesItsClass,
}


@pytest.mark.parametrize("within", ["list", "module"])
@pytest.mark.parametrize("kind", ODD)
def test_attributes_that_raise_when_they_are_looked_at(kind: str, within: str) -> None:
    class Holds(Inside):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    model = nn.Sequential(Holds(), Holds())
    value = ODD[kind]()
    # Not by setattr(): torch looks at the class too.
    vars(model[1])["held"] = [value] if within == "list" else value
    verified = recorded(model, torch.randn(2, 3)).verify()
    assert verified.agreed == verified.calls, str(verified)


def test_an_attribute_that_is_called_modules() -> None:
    class Shadows(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.modules: Any = [self.fc]

        def forward(self, x: Tensor) -> Tensor:
            return self.modules[0](x)

    for modules in (None, "*.fc"):
        model = nn.Sequential(Shadows(), nn.Tanh())
        with gradlib.record(model, modules=modules) as recording:
            model(torch.randn(2, 3)).sum().backward()
        verified = recording.verify()
        assert verified.agreed == verified.calls, str(verified)


def test_an_argument_that_is_a_proxy_of_the_caller() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor, caller: Any) -> Tensor:
            return x * caller.factor

    class Caller(Inside):
        factor = 2

        def __init__(self) -> None:
            super().__init__()
            self.asks = Asks()

        def forward(self, x: Tensor) -> Tensor:
            return self.asks(self.fc(x), weakref.proxy(self))

    verified = recorded(Caller(), torch.randn(2, 3)).verify()
    (skipped,) = verified.skipped
    assert (verified.agreed, skipped.name) == (2, "asks")
    assert "CallableProxyType" in skipped.reason


# What is kept, and of what there is one


def test_a_list_is_known_only_where_it_stands() -> None:
    first: Any = Inside()
    second: Any = Inside()
    past = History([first, second])
    first.rows = second.rows = rows = [torch.ones(1)]
    past.look(0)
    assert original(past, first, 0, "rows") is original(past, second, 0, "rows")
    first.rows = []
    past.look(1)  # who says that the list of the second was not made since?
    assert second.rows is rows
    assert original(past, first, 0, "rows") is not original(past, second, 1, "rows")


def test_tensors_that_take_each_others_place_in_memory() -> None:
    module: Any = Inside()
    past = History([module])
    for number in range(20):
        module.last = torch.tensor(number)
        past.look(number)
    for number in range(20):
        assert kept(past, module, number, "last").value == number


def test_tensors_that_change_without_a_new_version() -> None:
    module: Any = Inside()
    past = History([module])
    with torch.inference_mode():
        module.count = torch.zeros(3)
    module.scale = torch.ones(3)
    for number in range(3):
        past.look(number)
        with torch.inference_mode():
            module.count += 1
        module.scale.requires_grad_(number == 0)
    values = [kept(past, module, number, "count").value[0] for number in range(3)]
    assert values == [0, 1, 2]
    needs = [kept(past, module, number, "scale").requires_grad for number in range(3)]
    assert needs == [False, True, False]


def test_large_tensors_that_are_put_elsewhere() -> None:
    module: Any = Inside()
    past = History([module])
    module.rows = torch.zeros(70_000)
    with torch.inference_mode():
        module.fixed = torch.zeros(70_000)
    past.look(0)
    module.rows.data = torch.ones(70_000)
    past.look(1)
    values = [kept(past, module, number, "rows").value[0] for number in range(2)]
    assert values == [0, 1]
    assert kept(past, module, 1, "fixed").value is not module.fixed


def test_what_has_not_changed_is_kept_once() -> None:
    module: Any = Inside()
    past = History([module])
    module.rows = {"a": [torch.ones(1), {1, 2}], "b": (1, 2)}
    for number in range(3):
        past.look(number)
    assert past.attributes(module, 0) is past.attributes(module, 2)
    module.rows["a"][1].add(3)
    module.rows["a"][1].remove(1)
    past.look(3)
    assert past.attributes(module, 0) is not past.attributes(module, 3)


def test_what_is_not_kept() -> None:
    module: Any = Inside()
    past = History([module])
    module.words = {str(number): number for number in range(1001)}
    module.rows = [[0] * 600, [1] * 600]
    module.deep = [[[[torch.ones(1)]]]]
    module.left = object()
    module.tensors = {torch.ones(1)}
    past.look(0)
    for name in ("words", "rows", "deep", "left", "tensors"):
        assert kept(past, module, 0, name) is NOT_KEPT


def at(past: History, module: nn.Module, moment: int) -> Attributes:
    found = past.attributes(module, moment)
    assert found is not None
    return found


def kept(past: History, module: nn.Module, moment: int, name: str) -> Any:
    return at(past, module, moment).found[name]


def original(past: History, module: nn.Module, moment: int, name: str) -> object:
    return kept(past, module, moment, name).original


def _of_generator(it: torch.Generator) -> Any:
    return torch.rand(1, generator=it, device=it.device).item()


def _of_array(it: Any) -> Any:
    it += 1
    return float(it.sum())


def _of_counter(it: Counter[str]) -> Any:
    it["calls"] += 1
    return it["calls"]


def _of_bytes(it: bytearray) -> Any:
    it.append(1)
    return len(it)


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]]
STATES = {
    "a generator": (
        lambda: torch.Generator(torch.get_default_device()).manual_seed(3),
        _of_generator,
        lambda it: it.get_state().tolist(),
    ),
    "Python's": (lambda: random.Random(3), lambda it: it.random(), Random.getstate),
    "NumPy's": (
        lambda: numpy.random.default_rng(3),
        lambda it: float(it.random()),
        lambda it: it.bit_generator.state,
    ),
    "NumPy's old one": (
        lambda: numpy.random.RandomState(3),
        lambda it: float(it.rand()),
        lambda it: str(it.get_state()),
    ),
    "an array": (lambda: numpy.ones(3), _of_array, lambda it: it.tolist()),
    "a large array": (lambda: numpy.ones(2**18), _of_array, lambda it: it.tolist()),
    "a counter": (Counter[str], _of_counter, dict),
    "bytes": (bytearray, _of_bytes, bytes),
}


@pytest.mark.parametrize("within", ["an attribute", "a dict"])
@pytest.mark.parametrize("name", STATES)
def test_what_has_a_state_of_its_own(name: str, within: str) -> None:
    make, use, state_of = STATES[name]

    class Stateful(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.held: Any = make() if within == "an attribute" else {"it": make()}

        def forward(self, x: Tensor) -> Tensor:
            held = self.held if within == "an attribute" else self.held["it"]
            return self.fc(x) * use(held)

    with gradlib.record(net := Stateful()) as recording:
        for _ in range(2):
            net(torch.ones(2, 3)).sum().backward()
    held = net.held if within == "an attribute" else net.held["it"]
    before = state_of(held)
    found = recording.verify()
    assert state_of(held) == before
    assert held is (net.held if within == "an attribute" else net.held["it"])
    # A large array is not copied at each call: the replay sees the current one.
    assert found.ok is (name != "a large array")
    refused = pytest.raises(gradlib.CannotReplayError)
    with nullcontext() if found.ok else refused:
        recording["", 0].replay()
    assert state_of(held) == before


@pytest.mark.parametrize("other", [(1, 4, "f4"), (2, 2, "i4")])
def test_arrays_of_the_same_bytes_are_told_apart(other: tuple[int, int, str]) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.tables = nn.Linear(3, 3), [numpy.zeros((2, 2), "f4")]

        def forward(self, x: Tensor) -> Tensor:
            (table,) = self.tables
            return self.fc(x) * (len(table) + 2 * (table.dtype.kind == "f"))

    model, x = Reads(), torch.randn(2, 3)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
        *shape, dtype = other
        model.tables[0] = numpy.zeros(shape, dtype)
        model(x).sum().backward()
    assert recording.verify().agreed == 4


def test_one_generator_in_two_modules_stays_one() -> None:
    class Draws(Inside):
        def __init__(self, generator: torch.Generator) -> None:
            super().__init__()
            self.generator = generator

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * _of_generator(self.generator)

    shared = torch.Generator(torch.get_default_device()).manual_seed(3)
    net = nn.Sequential(Draws(shared), Draws(shared))
    with gradlib.record(net) as recording:
        for _ in range(2):
            net(torch.ones(2, 3)).sum().backward()
    state = shared.get_state()
    assert recording.verify().ok
    assert torch.equal(shared.get_state(), state)

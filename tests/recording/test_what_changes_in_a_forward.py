"""A replay has the state of the recorded call, even if a forward changed it since."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradlib

Change = Callable[[Any], object]


class Net(nn.Module):
    """Is changed by a function in each forward, before it calls its block."""

    def __init__(self, change: Change, *inner: nn.Module) -> None:
        super().__init__()
        self.change = change
        self.fc = nn.Linear(4, 4)
        self.block = nn.Sequential(*inner)
        self.spare: Any = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        self.change(self)
        return self.block(x)


# Modes


@pytest.mark.parametrize("inner", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_a_mode_that_a_forward_sets(inner: nn.Module) -> None:
    model = Net(lambda net: net.block.eval(), inner)
    all_agree(model, before=lambda net: net.train())


def test_a_mode_of_what_is_called_by_another() -> None:
    model = Net(lambda net: net.block[0][0].eval(), nn.Sequential(nn.Dropout(0.5)))
    all_agree(model, before=lambda net: net.train())


def test_a_mode_that_changes_from_call_to_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.block = nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            x = self.fc(x)
            self.block.eval()
            y = self.block(x)
            self.block.train()
            return y + self.block(x)

    all_agree(Twice())


def test_a_mode_is_not_that_of_a_later_forward() -> None:
    model = Net(_nothing, nn.Dropout(0.5))
    all_agree(model, before=lambda net: net.train(not net.training), steps=4)


# Random numbers


def add_noise(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return output + torch.randn_like(output)


def add_noise_before(_module: nn.Module, args: tuple[Tensor]) -> Tensor:
    return args[0] + torch.randn_like(args[0])


def hook(module: nn.Module) -> None:
    module.register_forward_hook(add_noise)


def hook_before(module: nn.Module) -> None:
    module.register_forward_pre_hook(add_noise_before)


def put_in(module: Any) -> None:
    forward = module.forward
    module.forward = lambda x: forward(x) + torch.randn(4)


@pytest.mark.parametrize("noisy", [hook, hook_before, put_in])
def test_noise_that_is_put_into_modules_of_torch(noisy: Change) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    for module in (model[0], model[2]):
        noisy(module)
    all_agree(model)


def test_noise_of_a_hook_for_every_module() -> None:
    handle = nn.modules.module.register_module_forward_hook(cast(Any, add_noise))
    try:
        all_agree(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    finally:
        handle.remove()


# Settings of torch's modules


def option(name: str, value: object) -> Change:
    return lambda module: setattr(module, name, value)


SETTINGS: dict[str, tuple[Callable[[], nn.Module], Change]] = {
    "LayerNorm": (lambda: nn.LayerNorm(4), option("eps", 0.5)),
    "MaxPool1d": (lambda: nn.MaxPool1d(2), option("stride", 1)),
    "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(2), option("output_size", 1)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2.0), option("scale_factor", 3.0)),
    "Conv1d": (lambda: nn.Conv1d(3, 3, 2), option("padding", (1,))),
    "LogSoftmax": (lambda: nn.LogSoftmax(-1), option("dim", 0)),
    "GELU": (nn.GELU, option("approximate", "tanh")),
    "ELU": (nn.ELU, option("alpha", 2.0)),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        option("activation", functional.silu),
    ),
}
every_setting = pytest.mark.parametrize(
    ("make", "change"), SETTINGS.values(), ids=SETTINGS
)


@every_setting
@pytest.mark.parametrize("number", [1, 2])
def test_a_setting_that_changes_between_forwards(
    make: Callable[[], nn.Module], change: Change, number: int
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(make() for _ in range(number)))
    all_agree(model, between=lambda net: [*map(change, net[1:])])


@every_setting
def test_a_setting_that_changes_after_the_block(
    make: Callable[[], nn.Module], change: Change
) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), make())
    all_agree(model, after=lambda net: change(net[1]))


@every_setting
def test_a_setting_that_a_forward_changes(
    make: Callable[[], nn.Module], change: Change
) -> None:
    all_agree(Net(lambda net: change(net.block[0]), make()))


def test_a_reduction_that_changes() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.loss = nn.Linear(4, 4), nn.MSELoss()

        def forward(self, x: Tensor) -> Tensor:
            return self.loss(self.fc(x), x)

    all_agree(Loss(), between=lambda net: setattr(net.loss, "reduction", "none"))


def test_a_setting_that_another_module_reads() -> None:
    class Reads(nn.Module):
        def __init__(self, drop: nn.Dropout) -> None:
            super().__init__()
            self.of = [drop]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.of[0].p

    drop = nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(4, 4), drop, Reads(drop))
    all_agree(model, between=option_of(1, "p", 0.2), after=option_of(1, "p", 0.9))


def option_of(place: int, name: str, value: object) -> Change:
    return lambda net: setattr(net[place], name, value)


def test_a_function_in_an_attribute() -> None:
    class Acts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act = nn.Linear(4, 4), functional.relu

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.fc(x))

    all_agree(Acts(), between=option("act", functional.gelu))


@pytest.mark.parametrize("kind", [nn.Linear, type("Own", (nn.Linear,), {})])
def test_a_weight_that_another_module_computes(kind: type[Any]) -> None:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights, self.fc = nn.Linear(4, 12), kind(4, 3)
            del self.fc.weight, self.fc.bias

        def forward(self, x: Tensor) -> Tensor:
            self.fc.weight = self.weights(x.mean((0, 1))).view(3, 4)
            self.fc.bias = self.fc.weight.mean(1)
            return self.fc(x)

    all_agree(Hyper())


def times(factor: int, module: Any) -> None:
    forward = type(module).forward
    module.forward = lambda x: forward(module, x) * factor


def test_a_forward_that_is_put_in_between_forwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    all_agree(model, between=lambda net: times(2, net[1]))
    all_agree(model, between=lambda net: times(3, net[1]))  # over the first
    all_agree(model, between=lambda net: delattr(net[1], "forward"), steps=2)


# Weights


def normalize(fc: Any) -> None:
    fc.weight.data = functional.normalize(fc.weight.data)


WRITES: dict[str, Change] = {
    "another": normalize,
    "in place": lambda fc: fc.weight.data.clamp_(-0.1, 0.1),
    "a copy": lambda fc: fc.weight.data.copy_(torch.eye(4)),
}


@pytest.mark.cpu  # on a GPU a write through .data would show only to who waits for it
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_weight_whose_data_a_forward_writes(write: Change) -> None:
    all_agree(Net(lambda net: write(net.block[0]), nn.Linear(4, 4)))


@pytest.mark.cpu
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_weight_whose_memory_is_also_an_array_and_whose_data_is_written(
    write: Change,
) -> None:
    fc = nn.Linear(4, 4)
    array = fc.weight.detach().numpy()
    all_agree(Net(lambda _: write(fc), fc))
    assert array.shape == (4, 4)


def test_a_bias_that_a_forward_takes_away_and_puts_back() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.block = nn.Sequential(self.fc)

        def forward(self, x: Tensor) -> Tensor:
            bias = self.fc.bias
            self.fc.bias = None  # pyright: ignore (as torch allows)
            x = self.block(x)
            self.fc.bias = bias
            return self.block(x)

    all_agree(Biased())


def test_a_weight_whose_data_is_only_read() -> None:
    model = Net(lambda net: net.block[0].weight.data_ptr(), nn.Linear(4, 4))
    all_agree(model)


def test_a_sparse_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    all_agree(model)


# What depends on how it was before


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.drop = nn.Dropout(0.5)
        self.scale, self.rows = 1.0, [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x * self.weight) * self.scale * self.rows[0]


def scale_weight(scaled: Any) -> None:
    with torch.no_grad():
        scaled.weight.mul_(0.5)


def scale_data(scaled: Any) -> None:
    scaled.weight.data = scaled.weight.data * 0.5


def scale_more(scaled: Any) -> None:
    scaled.scale += 1


def scale_list(scaled: Any) -> None:
    scaled.rows[0] += 1


def turn_mode(scaled: Any) -> None:
    scaled.train(not scaled.training)


@pytest.mark.parametrize(
    "change", [scale_weight, scale_data, scale_more, scale_list, turn_mode]
)
def test_what_an_inner_module_changes_before_its_call(change: Change) -> None:
    inner = Net(lambda net: change(net.block[0]), Scaled())
    all_agree(nn.Sequential(nn.Linear(4, 4), nn.Sequential(inner, nn.Tanh())))


# Hooks


def double(_module: object, _args: object, output: Tensor) -> Tensor:
    return 2 * output


def double_argument(_module: object, args: tuple[Tensor]) -> tuple[Tensor]:
    return (2 * args[0],)


def halve(_module: object, grads: tuple[Tensor], *_: object) -> tuple[Tensor]:
    return (grads[0] / 2,)


HOOKED: dict[str, Change] = {
    "after": lambda fc: fc.register_forward_hook(double),
    "before": lambda fc: fc.register_forward_pre_hook(double_argument),
    "before ours": lambda fc: fc.register_forward_pre_hook(
        double_argument, prepend=True
    ),
    "backward": lambda fc: fc.register_full_backward_hook(halve),
    "before backward": lambda fc: fc.register_full_backward_pre_hook(halve),
}


@pytest.mark.parametrize("sets", HOOKED.values(), ids=HOOKED)
def test_a_hook_that_stands_for_one_call_of_three(sets: Change) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.block(self.first(x))
            handle: Any = sets(self.block[0])
            x = self.block(x)
            handle.remove()
            return self.block(x)

    all_agree(Once())


@pytest.mark.parametrize("sets", HOOKED.values(), ids=HOOKED)
def test_a_hook_that_a_forward_takes_away(sets: Change) -> None:
    model = Net(lambda net: net.handle.remove(), nn.Linear(4, 4))

    def hook_again(net: Any) -> None:
        net.handle = sets(net.block[0])

    all_agree(nn.Sequential(model), before=lambda net: hook_again(net[0]), steps=1)


def test_a_hook_that_runs_in_the_first_of_two_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x))

    def hook_once(net: Any) -> None:
        def once(*args: Any) -> Tensor:
            handle.remove()
            return double(*args)

        handle = net.fc.register_forward_hook(once)

    all_agree(Twice(), before=hook_once)


def test_a_hook_of_one_forward_is_not_one_of_the_next() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.is_hooked = True

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_hooked:
                return self.fc(x)
            handle = self.fc.register_forward_hook(double)
            x = self.fc(x)
            handle.remove()
            return x

    all_agree(Leaves(), between=lambda net: vars(net).update(is_hooked=False))


def test_a_replay_leaves_hooks_in_their_places() -> None:
    fc: Any = nn.Linear(4, 4)
    model = Net(_nothing, fc)
    with gradlib.record(model) as recording:
        model(torch.randn(2, 4)).sum().backward()
        handles: list[Any] = [sets(fc) for sets in HOOKED.values()]
        places = [fc._forward_hooks, fc._forward_pre_hooks, fc._backward_hooks]
        before = [[*place.items()] for place in places]
        assert recording.verify().agreed == 4
        assert [[*place.items()] for place in places] == before
    for handle in handles:
        handle.remove()
    assert not any(places)


# Children


def test_a_child_that_a_forward_replaces() -> None:
    class Swaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.act: nn.Module = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(self.fc(x))
            self.act = nn.Sigmoid() if isinstance(self.act, nn.ReLU) else nn.ReLU()
            return self.act(x)

    all_agree(Swaps(), steps=3)


def test_a_child_of_another_module_that_a_forward_replaces() -> None:
    def swap(net: Any) -> None:
        net.spare, net.block[0] = net.block[0], net.spare

    all_agree(Net(swap, nn.ReLU(), nn.Linear(4, 4)), steps=3)


def test_children_that_two_calls_swap_and_swap_back() -> None:
    """So each forward begins with the modules that the one before began with."""

    class Swaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.one(x))
            self.one, self.other = self.other, self.one
            return x

    swaps = Swaps()
    all_agree(nn.Sequential(swaps, swaps), steps=3)


def test_a_child_that_a_forward_makes_and_one_that_it_replaces() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(self.fc(x))
            self.act: nn.Module = nn.Tanh()
            x = self.act(x)
            if "more" not in self._modules:
                self.more = nn.Linear(4, 4)
            return self.more(x)

    all_agree(Makes())


def _nothing(_net: object) -> None:
    pass


def all_agree(
    model: Any,
    *,
    before: Change = _nothing,
    between: Change = _nothing,
    after: Change = _nothing,
    steps: int = 2,
) -> None:
    """Check that every call of several steps repeats.

    Args:
        model: The model.
        before: Done to it before each step.
        between: Done to it between two steps.
        after: Done to it after the block.
        steps: How many steps.
    """
    torch.manual_seed(0)
    learned = [it for it in model.parameters() if it.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=0.01)
    with gradlib.record(model) as recording:
        for step in range(steps):
            if step:
                between(model)
            before(model)
            model(torch.randn(2, 3, 4)).square().sum().backward()
            optimizer.step()
    after(model)
    found = recording.verify()
    assert found.agreed == found.calls, str(found)

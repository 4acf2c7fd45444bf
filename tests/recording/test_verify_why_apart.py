"""`verify` names another path by which a gradient may have reached a call."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.recording.another_output import ANOTHER_OUTPUT
from gradlib.recording.check_call import PAST_OUTPUT
from gradlib.recording.why_apart import HOOKED, PERHAPS_BY_HOOK


class Experts(nn.Module):
    """Keeps a loss in an attribute, and other tensors that do not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(3, 2)
        self.log = [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        self.auxiliary = {"loss": p.square().mean(), "size": p.abs().sum()}
        self.seen = p.detach()
        self.log.append(self.seen)
        self.first = getattr(self, "first", p.sum())
        self.returned = p @ torch.ones(2, 3) * x
        return self.returned


@pytest.mark.parametrize("modules", [None, ["1"]])
@pytest.mark.parametrize("add", [0, 1])
def test_what_came_through_the_attribute_of_a_module_that_is_left_out(
    add: int, modules: list[str] | None
) -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Experts()))
    with gradlib.record(net, modules=modules) as recording:
        loss = net(torch.randn(4, 3)).sum()
        (loss + add * net[1][0].auxiliary["loss"]).backward()
    verified = recording.verify(numerical=True)
    assert not verified.disagreements
    said = "gradients also came by attribute 0.auxiliary, 0.first, and a replay lacks"
    expected = [f"{said} them"] if add and modules else []
    assert [it.reason for it in verified.skipped] == expected


def test_a_gradient_that_came_to_a_call_inside_is_the_reason() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    net = nn.Sequential(nn.Linear(3, 3), inner)
    seen: list[Tensor] = []

    def look(_module: nn.Module, _args: object, output: Tensor) -> None:
        seen.append(output)

    inner[1].register_forward_hook(look)
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(net) as recording:
        for _ in range(2):
            loss = net(x).sum()
            loss.backward(retain_graph=True)
            (loss + seen[-1].square().mean()).backward()
    wrong = recording.verify().disagreements
    assert [(it.name, it.index, it.field) for it in wrong] == [
        ("1", i, "passes[1].grad_input[0]") for i in range(2)
    ]
    for it, said in zip(wrong, ("output of 1.1", "output of 1.1 (1)"), strict=True):
        assert it.reason.endswith(f"by another way too: {said}")
    assert not any(module._forward_hooks for module in (net, inner, inner[0]))


class Doubles(nn.Module):
    """Doubles its input in place."""

    def __init__(self, gives: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gives = gives

    def forward(self, x: Tensor) -> Tensor:
        return self.gives(x.mul_(2))


@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize(
    ("gives", "shows"),
    [
        (Tensor.clone, lambda base: base[:, :2]),
        (Tensor.clone, lambda base: base),
        (lambda x: x, lambda base: base[:, :2]),
    ],
    ids=["another, of a view", "another", "itself, a view"],
)
def test_a_gradient_that_came_by_an_input_it_overwrites_is_the_reason(
    gives: Callable[[Tensor], Tensor], shows: Callable[[Tensor], Tensor], is_used: bool
) -> None:
    first, doubles = nn.Linear(3, 4), Doubles(gives)
    with gradlib.record(nn.ModuleList([first, doubles])) as recording:
        base = first(torch.randn(5, 3))
        loss = doubles(shows(base)).sum()
        (loss + base.square().sum() if is_used else loss).backward()
    found = [it.reason for it in recording.verify().disagreements]
    said = "gradients may have come by another way too: args[0], which it overwrites"
    is_view = shows(torch.zeros(5, 4)).shape != (5, 4)
    assert found == [said] * (is_used and is_view)


def assert_named_as_another_way(model: Any, of: Callable[[Any], Tensor]) -> None:
    """Go back by what ``model.tells`` returned too, and find that this is the reason.

    Args:
        model: What calls that module.
        of: Gives, of what it returned, the tensor.
    """
    net = nn.Sequential(nn.Linear(3, 3), model)
    seen: list[Tensor] = []
    model.tells.register_forward_hook(lambda *_: seen.append(of(_[-1])))
    with gradlib.record(net) as recording:
        loss = net(torch.randn(4, 3)).sum()
        (loss + seen[0].square().mean()).backward()
    (wrong,) = recording.verify().disagreements
    assert (wrong.name, wrong.field) == ("1", "grad_input[0]")
    assert wrong.reason.endswith("by another way too: output of 1.tells")


def test_a_call_inside_that_returns_more_than_tensors_is_the_reason() -> None:
    class Tells(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None, int, Tensor]:
            return x.tanh(), None, 7, x.detach()

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tells = Tells()

        def forward(self, x: Tensor) -> Tensor:
            y, _, times, _ = self.tells(x)
            return y * times

    assert_named_as_another_way(Uses(), lambda output: output[0])


def test_a_call_inside_is_the_reason_where_others_have_no_like() -> None:
    more = iter(range(99))  # none while it is recorded

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tells, self.mapped = nn.Tanh(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            y = self.tells(x)
            for _ in range(next(more)):
                self.tells(x)
            mapped: Any = torch.vmap(self.mapped)(x)  # whose call has no values
            return y + mapped

    assert_named_as_another_way(Uses(), lambda output: output)


class Given(nn.Module):
    """Cannot be replayed, as it receives an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, _object: object = None) -> Tensor:
        return 2 * self.linear(x)


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given = Given()

    def forward(self, x: Tensor) -> Tensor:
        return self.given(x, object()).tanh()


def test_it_may_have_come_to_a_call_in_one_that_is_skipped() -> None:
    seen: list[Tensor] = []

    def look(_module: nn.Module, _args: object, output: Tensor) -> None:
        seen.append(output)

    net = Gives()
    net.given.linear.register_forward_hook(look)
    with gradlib.record(net) as recording:
        out = net(torch.randn(4, 3, requires_grad=True))
        (out.sum() + seen[-1].square().sum()).backward()
    found = recording.verify()
    assert [it.name for it in found.skipped] == ["given"]
    (wrong,) = found.disagreements
    assert wrong.reason.endswith("output of given.linear")


@pytest.mark.parametrize("through_the_output_too", [False, True])
def test_a_pass_that_began_inside_of_a_call_is_not_held_against_it(
    through_the_output_too: bool,
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            inner = torch.tanh(self.first(x))
            seen.append(inner)
            return self.last(inner)

    seen: list[Tensor] = []
    net, x = Net(), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(net) as recording:
        y = net(x)
        torch.autograd.grad(seen[0].sum(), x, retain_graph=True)
        if through_the_output_too:
            torch.autograd.grad(y.sum(), x)
    found = recording.verify()
    assert found.ok
    skipped = {it.name: it.reason for it in found.skipped}
    assert ("" in skipped) is not through_the_output_too
    if not through_the_output_too:
        assert skipped[""] == PAST_OUTPUT


class Remembers:
    """An object of a class of its own, to which a forward appends."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Attends(nn.Module):
    """Adds up all that it was given so far."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.cache = Remembers()

    def forward(self, x: Tensor) -> Tensor:
        self.cache.keys.append(self.inner(x))
        return torch.stack(self.cache.keys).sum(0)


def test_a_pass_that_came_through_a_cache_did_not_begin_in_the_call() -> None:
    net, x = Attends(), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(net) as recording:
        net(x)
        net(x).sum().backward()
    found = recording.verify()
    assert [(it.index, it.reason) for it in found.skipped] == [(0, PAST_OUTPUT)]
    # A replay appends once more.
    wrong = {(it.index, it.field, it.reason) for it in found.disagreements}
    assert wrong == {(index, "output", ANOTHER_OUTPUT) for index in range(2)}


class Saves(nn.Module):
    """Calls a module under hooks for the tensors that autograd saves."""

    def __init__(self, hooks: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.hooks = hooks

    def forward(self, x: Tensor) -> Tensor:
        with self.hooks():
            return self.inner(x)


@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("is_lossy", [True, False])
def test_hooks_that_do_not_give_back_what_was_saved_are_the_reason(
    is_lossy: bool, where: str
) -> None:
    def half() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(Tensor.half, Tensor.float)

    torch.manual_seed(0)
    hooks = half if is_lossy else torch.autograd.graph.save_on_cpu
    net = nn.Sequential(Saves(hooks if where == "inside" else nullcontext))
    with gradlib.record(net) as recording:
        with hooks() if where == "around" else nullcontext():
            y = net(torch.randn(5, 3))
        y.sum().backward()
    checked = recording.verify()
    assert checked.ok is not is_lossy
    assert {it.reason for it in checked.disagreements} <= {HOOKED}
    said = {it.name for it in checked.disagreements}
    assert said == ({"0.inner.0", "0.inner.1"} if is_lossy else set())


def test_hooks_of_saved_tensors_are_no_reason_where_they_have_ended() -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 3), Experts())
    seen: list[Tensor] = []
    net[1].router.register_forward_hook(lambda *_: seen.append(_[-1]))
    with gradlib.record(net) as recording:
        with torch.autograd.graph.save_on_cpu():
            net(torch.randn(4, 3)).sum().backward()
        loss = net(torch.randn(4, 3)).sum()
        (loss + seen[-1].square().sum()).backward()
    (only,) = recording.verify().disagreements
    assert only.index == 1
    assert HOOKED not in only.reason


class Wave(nn.Module):
    """Several nodes, of which a hook may be on any."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.factor = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.factor).sin()


class HooksNode(nn.Module):
    """Calls a layer twice, and hooks the graph of the second call."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.wave, self.last = Wave(), nn.Linear(3, 3)
        self.method = method

    def forward(self, x: Tensor) -> Tensor:
        y: Any = self.wave(self.wave(x))
        getattr(y.grad_fn, self.method)(lambda grads, *_: tuple(2 * it for it in grads))
        return self.last(y)


@pytest.mark.parametrize("is_deeper", [False, True])
@pytest.mark.parametrize("method", ["register_hook", "register_prehook"])
def test_a_hook_that_the_caller_set_on_a_node_of_a_call_is_not_held_against_it(
    method: str, is_deeper: bool
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 3), HooksNode(method))
    if is_deeper:
        model[1].wave = nn.Sequential(model[1].wave, nn.Identity())
    with gradlib.record(model) as recording:
        model(torch.randn(4, 3)).square().sum().backward()
    assert len(recording.calls("1.wave")) == 2
    verified = recording.verify()
    assert not verified.disagreements
    said = "1 has set a hook on its graph after it had returned"
    assert ("1.wave", 1) in [(it.name, it.index) for it in verified.skipped]
    for it in verified.skipped:
        assert it.index == 1
        assert it.reason.startswith(said)


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("method", ["register_hook", "register_prehook"])
def test_a_hook_on_a_node_by_no_module_is_not_held_against_a_call(
    method: str, is_inner: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Wave())
    with gradlib.record(model) as recording:
        y = model(torch.randn(4, 3))
        y.sum().backward(retain_graph=True)
        node: Any = y.grad_fn
        node = node.next_functions[0][0] if is_inner else node
        getattr(node, method)(lambda grads, *_: tuple(2 * it for it in grads))
        y.sum().backward()
    verified = recording.verify()
    assert not verified.disagreements
    assert ("1", 1) in [(it.name, it.backward) for it in verified.skipped]
    for it in verified.skipped:
        assert it.backward == 1
        assert it.reason == PERHAPS_BY_HOOK


@pytest.mark.parametrize("when", ["before the forward", "after the pass"])
def test_a_hook_set_at_another_time_is_no_reason(when: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        if when == "before the forward":
            x.register_hook(lambda grad: grad)
        y = model(x)
        y.sum().backward(retain_graph=True)
        if when == "after the pass":
            y.register_hook(lambda grad: grad)
    (grads,) = (it.shares["weight"] for it in recording["0"]._trace.flows)
    (number,) = grads
    grads[number] = 2 * grads[number]  # as if its backward were wrong
    (wrong,) = recording.verify().disagreements
    assert (wrong.name, wrong.reason) == ("0", "")


def test_a_hook_of_the_caller_on_other_nodes_is_no_reason() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 3), HooksNode("register_hook"))
    with gradlib.record(model) as recording:
        y = model(torch.randn(4, 3))
        y.square().sum().backward()
    trace = recording["1.last"]._trace
    (grads,) = (it.shares["weight"] for it in trace.flows)
    (number,) = grads
    grads[number] = 2 * grads[number]  # as if its backward were wrong
    (wrong,) = recording.verify().disagreements
    assert (wrong.name, wrong.field) == ("1.last", "param_grads['weight']")

"""A hook report leaves the module as it was, and nothing of the copies."""

import random
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import gradlib
from gradlib.hook_reports.hooks import FULL, FULL_PRE, LEGACY

from .reported import Does, Of, given, report_of, whats


def state(module: nn.Module) -> list[Any]:
    """Everything a report might change, functions and gradients by their ids."""
    parts: list[Any] = list(module.modules())
    parameters = list(module.parameters())
    hooks = [
        [id(hook) for hook in value.values()]
        for part in parts
        for key, value in vars(part).items()
        if key.endswith("_hooks")
    ]
    return [
        {name: x.clone() for name, x in module.state_dict().items()},
        [x.data_ptr() for x in (*parameters, *module.buffers())],
        [None if p.grad is None else p.grad.clone() for p in parameters],
        [id(p.grad) for p in parameters],
        hooks,
        [(part.training, part._is_full_backward_hook) for part in parts],
        [sorted(vars(part)) for part in parts],
        torch.get_rng_state(),
        str(random.getstate()),
        str(numpy.random.get_state()),
        torch.is_warn_always_enabled(),
    ]


def draws(layer: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    factor = random.random() + numpy.random.rand()
    return norm(F.dropout(layer(x))) * factor


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_changes(raises: bool) -> None:
    def forward(*args: Any) -> Tensor:
        y = draws(*args)
        if raises:
            raise KeyError("of the user")
        return y

    module = Of(forward, nn.Linear(3, 2), nn.BatchNorm1d(2))
    calls: list[str] = []
    module.register_full_backward_hook(lambda *_: calls.append("full"))
    module.parts[0].register_full_backward_pre_hook(lambda *_: calls.append("pre"))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    x = given(4, 3)
    x.grad = torch.ones(4, 3)
    torch.set_warn_always(False)
    before = state(module)
    if raises:
        with pytest.raises(KeyError, match="of the user") as caught:
            gradlib.hook_report(module, x)
        assert caught.type is KeyError
    else:
        report = gradlib.hook_report(module, x)
        assert report.notes == (
            "Left out of the copies: 2 backward hook(s), of it or inside it.",
        )
        for kind in (LEGACY, FULL, FULL_PRE):
            assert report.kinds[kind].grad_output[0].what == "gradient of output"
    after = state(module)
    torch.testing.assert_close(after[:3], before[:3], rtol=0, atol=0)
    assert after[7].equal(before[7])
    assert [*after[3:7], *after[8:]] == [*before[3:7], *before[8:]]
    assert x.grad.equal(torch.ones(4, 3))
    assert calls == []


def test_the_inputs_stay_as_they_are() -> None:
    x = given(3, 4).clone()
    value, version, node = x.detach().clone(), x._version, x.grad_fn
    gradlib.hook_report(nn.ReLU(inplace=True), x)
    assert x.equal(value)
    assert (x._version, x.grad_fn) == (version, node)


def test_a_recording_sees_no_trial() -> None:
    module = nn.Linear(3, 2)
    with gradlib.record(module) as recording:
        gradlib.hook_report(module, given(4, 3))
    assert len(recording) == 0


class Slotted(nn.Module):
    """Keeps a tensor where torch's copies forget it."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor([2.0, 3.0, 4.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_slots_are_copied() -> None:
    module = Slotted()
    before = module.factor
    report = gradlib.hook_report(module, given(4, 3))
    (entry,) = report.kinds["register_full_backward_hook"].grad_input
    assert entry.what == "gradient of x"
    assert module.factor is before

    cannot_be_copied: Any = (item for item in "a generator")
    module.factor = cannot_be_copied
    with pytest.raises(gradlib.NotCopyableError, match="Slotted with its arguments"):
        gradlib.hook_report(module, given(4, 3))


def test_nothing_is_left_of_the_copies(
    tensors_alive: Callable[[], Counter[str]],
) -> None:
    modules = [nn.Linear(3, 2), nn.Tanh(), nn.GRU(3, 2)]
    counts: list[Counter[str]] = []
    for _ in range(3):
        for module in modules:
            gradlib.hook_report(module, given(4, 3))
        counts.append(tensors_alive())
    assert counts[1] == counts[2]


def test_a_copy_that_is_none() -> None:
    class Same(nn.Linear):
        def __deepcopy__(self, memo: object) -> "Same":
            return self

    module = Same(3, 2)
    with pytest.raises(gradlib.NotCopyableError, match="shares tensors with it"):
        gradlib.hook_report(module, given(4, 3))
    assert not module._backward_hooks


def test_a_graph_outside_stays() -> None:
    leaf = given(3)
    outside = leaf.exp()
    module = Does(lambda _self, x: x * outside)
    report = report_of(module, x := given(4, 3))
    assert not any(kind.error for kind in report.kinds.values())
    module(x).sum().backward()
    assert leaf.grad is not None


def test_a_function_that_refers_to_the_module_itself() -> None:
    module = Does(lambda self, x: self.does_it(x), norm=nn.BatchNorm1d(3))
    module.does_it = lambda x: module.norm(x)  # type: ignore[assignment,operator] (stubs)
    hooks: list[object] = []
    module.norm.register_full_backward_hook(lambda *_: hooks.append(_))  # type: ignore[operator] (stubs)
    report = report_of(module, given(4, 3))
    state = module.state_dict()
    assert state["norm.num_batches_tracked"] == 0
    assert state["norm.running_mean"].tolist() == [0, 0, 0]
    assert not hooks
    assert "gradient of norm.weight" in whats(report.kinds[LEGACY]).values()
    assert "of the module itself, which a function" not in str(report.notes)


def test_a_forward_that_was_put_in() -> None:
    module: Any = nn.Linear(3, 2)
    before = module.forward

    def forward(x: Tensor, again: bool = True) -> Tensor:
        module.seen = x
        return forward(x, again=False) if again else before(x)

    module.forward = forward
    report = report_of(module, given(4, 3))
    plain = report_of(nn.Linear(3, 2), given(4, 3))
    assert report.last_node == plain.last_node
    assert report.last_node_inputs == ("bias", "x", "TBackward0")
    assert "gradient of weight, transposed" in whats(report.kinds[LEGACY]).values()
    assert not hasattr(module, "seen")
    assert module.forward is forward


def test_a_forward_that_refers_to_the_module_by_a_global_name() -> None:
    everywhere: dict[str, Any] = {"net": nn.Linear(3, 2)}
    lines = (
        "before = net.forward",
        "def forward(x):",
        " net.seen = 1",
        " return before(x)",
    )
    exec("\n".join(lines), everywhere)
    everywhere["net"].forward = everywhere["forward"]
    report = report_of(everywhere["net"], given(4, 3))
    assert report.last_node_inputs == ("bias", "x", "TBackward0")
    assert not hasattr(everywhere["net"], "seen")
    assert everywhere["before"].__self__ is everywhere["net"]


def test_a_hook_that_refers_to_the_module_itself() -> None:
    module = nn.Linear(3, 2)
    module.register_forward_hook(lambda *_: setattr(module, "seen", 1))
    report_of(module, given(4, 3))
    assert not hasattr(module, "seen")


def test_a_function_that_gives_the_module_other_data() -> None:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    module: Any = Does(lambda self, x: self.does_it(x), a=a, b=b)
    module.register_buffer("seen", torch.empty(0))
    before = {name: it.clone() for name, it in module.state_dict().items()}
    # An object, which a copy of the function refers to, too.
    these = SimpleNamespace(a=a, b=b, module=module)

    def does_it(x: Tensor) -> Tensor:
        these.b.weight.data = these.a.weight.data
        these.module.seen.resize_(3).zero_()
        return these.b(x)

    module.does_it = does_it
    notes = report_of(module, given(4, 3)).notes
    assert "b.weight, seen of the module itself" in str(notes)
    assert_close(module.state_dict(), before, rtol=0, atol=0)
    b.weight.data.zero_()
    assert_close(a.weight, before["a.weight"], rtol=0, atol=0)


@pytest.mark.parametrize(
    "held",
    ["list", "dict", "tuple", "default", "partial", "cache", "object", "closure"],
)
def test_functions_that_are_held_in_something_run_the_copy(held: str) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.calls = 0
            self.holds: Any = None

        def step(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.fc(x)

        def forward(self, x: Tensor) -> Tensor:
            match self.holds:
                case [function] | {"it": function} | SimpleNamespace(it=function):
                    return function(x)
                case function:
                    return function(x)

    module, heard = Module(), list[object]()
    module.fc.register_full_backward_hook(lambda *it: heard.append(it))

    def run(x: Tensor) -> Tensor:
        return module.step(x)

    steps = [module.step]
    module.holds = {
        "list": [run],
        "dict": {"it": run},
        "tuple": (run,),
        "default": lambda x, me=module: me.step(x),
        "partial": partial(run),
        "cache": lru_cache(run),
        "object": SimpleNamespace(it=run),
        "closure": lambda x: steps[0](x),
    }[held]
    before = module.holds
    report = report_of(module, given(2, 3))
    assert (module.calls, heard, module.holds) == (0, [], before)
    assert report.last_node == "AddmmBackward0"
    run(given(2, 3))
    assert module.calls == 1


def test_a_function_that_refers_to_nothing_copied_stays_itself() -> None:
    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.functions = [F.relu]

        def forward(self, x: Tensor) -> Tensor:
            assert self.functions[0] is F.relu
            return F.relu(x)

    assert report_of(Activated(), given(3)).last_node == "ReluBackward0"


def test_an_autocast_around_it_keeps_no_copies(
    tensors_alive: Callable[[], Counter[str]],
) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), given(4, 3)
    with torch.autocast(x.device.type, torch.bfloat16):
        model(x)  # whose casts stay
        before = tensors_alive()
        report = report_of(model, x)
        assert report.last_node == "AddmmBackward0"
        assert torch.is_autocast_cache_enabled()
        del report
        assert tensors_alive() == before


@pytest.mark.parametrize("size", [1, 3])
def test_a_function_that_closes_over_a_parameter(size: int) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            w = self.w = nn.Parameter(torch.ones(size))
            self.scale = lambda x: x * w  # its copy is another tensor, and equal

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(x)

    entries = report_of(Scales(), given(size)).kinds[LEGACY].grad_input
    assert [it.what for it in entries] == ["gradient of x", "gradient of w"]


def test_hooks_of_tensors_are_left_out_and_counted() -> None:
    module, x = nn.Linear(3, 2), given(4, 3)
    assert gradlib.hook_report(module, x).notes == ()
    module.weight.register_hook(lambda grad: grad * 2)
    module.bias.register_post_accumulate_grad_hook(lambda _: None)
    x.register_hook(lambda grad: grad * 5)
    (note,) = gradlib.hook_report(module, x).notes
    assert note.startswith("Left out of the copies: 3 hook(s) of parameters")
    plain = nn.Linear(3, 2)
    with gradlib.record(plain):  # whose own are none of the user's
        plain(given(4, 3)).sum().backward()
        assert gradlib.hook_report(plain, given(4, 3)).notes == ()

"""Models that change while recorded: modules are added, replaced or renamed."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing import assert_close
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

import gradlib

from .truth import all_hooks_of, assert_same_bits, grads_of, loss_of, run


def test_forward_called_directly_is_no_call() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.fc.forward(x)

    model = Parent()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    assert_close(recording[""].grad_input, (x.grad,))
    assert "fc" not in recording
    with pytest.raises(gradlib.NoSuchCallError, match=r"module\.forward\(x\)"):
        _ = recording["fc"]


class UsesWeights(nn.Module):
    """Uses the weights of the modules in it, and calls one of these."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.used = nn.Linear(3, 2), nn.Linear(3, 2)
        self.tied, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)
        self.tied.weight = self.called.weight

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.used.weight)
        return self.called(x) + y + nn.functional.linear(x, self.tied.weight)


def test_weights_that_a_parent_uses_are_said_to_be_in_no_call() -> None:
    model = UsesWeights()
    with gradlib.record(model) as recording:
        model(torch.randn(2, 3)).sum().backward()
    # A call of another module has the gradient of the tied one; "idle" has none.
    assert "no call was seen of used: recording[name] says why" in str(recording)
    with pytest.raises(gradlib.NoSuchCallError, match="yet its weight got a gradient"):
        _ = recording["used"]
    for name in ("tied", "idle"):
        with pytest.raises(gradlib.NoSuchCallError, match="was not called in the"):
            _ = recording[name]


def test_a_module_added_in_the_block() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        model.append(late := nn.Linear(3, 2))
        run(model, x)
    assert_close(recording["1"].param_grads["weight"], late.weight.grad)
    assert not late._forward_hooks
    assert not late._forward_pre_hooks


def test_a_module_that_a_forward_adds_and_does_not_call() -> None:
    class Grows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.late = nn.Linear(3, 2)
            return 2 * x

    model, x = Grows(), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    assert_close(recording[""].grad_input, (x.grad,))
    with pytest.raises(gradlib.NoSuchCallError, match='"late" was not called'):
        _ = recording["late"]


@pytest.mark.parametrize("options", [{}, {"reduce": gradlib.tensor_stats}])
def test_a_module_inserted_in_the_block(options: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    with gradlib.record(model, **options) as recording:
        run(model, x)
        model.insert(0, nn.Linear(3, 3))  # a way that fires no registration hook
        run(model, x)
        run(model, x)
    names = [call.name for call in recording]
    assert names == ["", "0", *2 * ["", "0 (new)", "0"]]
    grads = recording["0 (new)", 1].param_grads
    assert grads is not None
    assert grads["weight"] is not None
    assert not model[0]._forward_hooks


def test_a_module_replaced_in_the_block() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        model(x)
        model[2] = nn.Linear(4, 5)
        output = model(x)
    assert [call.index for call in recording.calls("2")] == [0, 1]
    assert_close(recording["2", 1].output, output)


class Adapted(nn.Module):
    """A frozen layer, and a correction that is trained instead."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.up = base, nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(x)


@pytest.mark.parametrize("inside", [True, False])
def test_a_module_wrapped_before_its_first_call(inside: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    x = torch.randn(2, 3)
    if not inside:
        model[0] = Adapted(model[0])
    with gradlib.record(model) as recording:
        if inside:
            model[0] = Adapted(model[0])
        run(model, x)
    assert [call.name for call in recording] == ["", "0", "0.base", "0.up", "1"]
    assert recording["0"].module_type == "Adapted"
    assert recording["0.base"].module_type == "Linear"
    assert recording.verify().ok
    assert not model[0].base._forward_hooks


def test_a_module_wrapped_after_its_first_call() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3)
    with gradlib.record(model) as recording:
        run(model, x)
        model[0] = Adapted(model[0])
        run(model, x)
        run(model, x)
    names = [call.name for call in recording.forwards[2]]
    assert names == ["", "0 (new)", "0", "0.up", "1"]
    assert len(recording.calls("0")) == 3  # no two calls share a name and index
    assert recording["0.base", 2].output is recording["0", 2].output
    assert len({(call.name, call.index) for call in recording}) == len(recording)
    assert recording.verify().ok


@pytest.mark.parametrize("chosen", [["0*"], ["1"]])
def test_a_module_wrapped_of_which_some_are_recorded(chosen: list[str]) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3)
    with gradlib.record(model, modules=chosen) as recording:
        model[0] = Adapted(model[0])
        run(model, x)
    names = ["0", "0.base", "0.up"] if chosen == ["0*"] else ["1"]
    assert [call.name for call in recording] == names


@pytest.mark.parametrize("first", [True, False])
def test_a_forward_hook_set_in_the_block_replaces_the_output(first: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        if not first:
            run(model, x)
        model[1].register_forward_hook(lambda _m, _args, output: 2 * output)
        run(model, x)
    last = recording.forwards[-1]
    assert torch.equal(last["1"].output, last["2"].args[0])
    assert_close(last["1"].grad_output, last["2"].grad_input)
    assert recording.verify().ok
    assert len(model[1]._forward_hooks) == 1


def doubled(_module: object, _args: object, output: Tensor) -> Tensor:
    return 2 * output


class HooksItsLast(nn.Module):
    """Its first forward sets a hook on a module, and then calls the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.last.register_forward_hook(doubled)
            self.is_hooked = True
        return self.last(self.first(x))


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_forward_hook_set_in_the_middle_of_a_forward(blocks: int) -> None:
    torch.manual_seed(0)
    model, x = HooksItsLast(), torch.randn(2, 3)
    with ExitStack() as stack:
        recordings = [stack.enter_context(gradlib.record(model)) for _ in range(blocks)]
        output = run(model, x)
        run(model, x)
    leaf = output.detach().requires_grad_()
    (expected,) = torch.autograd.grad(loss_of(leaf), leaf)
    for it in recordings:
        for index in range(2):
            assert torch.equal(it["last", index].output, output)
            assert_close(it["last", index].grad_output[0], expected)
        assert it.verify().ok
    assert len(model.last._forward_hooks) == 1


def test_hooks_that_somebody_clears_in_the_block() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    with gradlib.record(model) as recording:
        run(model, x)
        model._forward_hooks.clear()
        run(model, x)
    assert recording["", 0].grad_output is not None
    assert recording["", 1].grad_output is not None


def replaced_with_its_hooks(module: nn.Module, **options: Any) -> nn.Module:
    """Return a replacement for a module, with the module's hooks registered on it."""
    other = copy.deepcopy(module)
    for hook in module._forward_pre_hooks.values():
        other.register_forward_pre_hook(hook, **options)
    for hook in module._forward_hooks.values():
        other.register_forward_hook(hook, **options)
    return other


@pytest.mark.parametrize("with_kwargs", [False, True])
@pytest.mark.parametrize("is_told", [False, True])
def test_a_module_replaced_by_one_with_its_hooks(
    is_told: bool, with_kwargs: bool
) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    with gradlib.record(model), gradlib.record(model) as recording:
        run(model, x)
        other = replaced_with_its_hooks(model[0], with_kwargs=with_kwargs)
        if is_told:
            model[0] = other
        else:  # as torch.ao.quantization does
            model._modules["0"] = other
        output = run(model, x)
    assert [call.name for call in recording] == 2 * ["", "0", "1"]
    assert_close(recording["0", 1].output, recording["0", 0].output)
    assert_close(recording["", 1].output, output)
    assert_close(recording["0", 1].param_grads["weight"], other.weight.grad)
    assert not any(map(len, all_hooks_of(model)))
    run(model, x)
    assert len(recording) == 6


def test_hooks_set_anew_on_a_module_elsewhere_do_nothing_after_the_block() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    with gradlib.record(model) as recording:
        run(model, x)
        others = [
            replaced_with_its_hooks(model, with_kwargs=it) for it in (False, True)
        ]
    held = weakref.ref(recording)
    for other in others:
        run(other, x)
    assert len(recording) == 1
    del recording
    gc.collect()
    assert held() is None


QUANTIZED: dict[str, Callable[[Any, nn.Module], object]] = {
    "fused": lambda quantization, model: quantization.fuse_modules(
        model.eval(), [["0", "1", "2"]], inplace=True
    ),
    "prepared": lambda quantization, model: quantization.prepare_qat(
        model, inplace=True
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("way", QUANTIZED)
def test_a_model_quantized_in_place_in_the_block(way: str) -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()
    model, x = nn.Sequential(*layers), torch.randn(1, 1, 5, 5)
    model.qconfig = cast(Any, quantization.get_default_qat_qconfig("fbgemm"))
    with gradlib.record(model) as recording:
        model(x)
        QUANTIZED[way](quantization, model)
        output = model(x)
    assert_close(recording["", 1].output, output)
    assert recording["0", 1].module_type == type(model[0]).__name__
    assert "broken off" not in str([call.note for call in recording])
    count = len(recording)
    assert_close(model(x), output)
    assert len(recording) == count
    for hook in all_module_hooks(model):
        assert "gradlib" not in type(hook).__module__


def all_module_hooks(model: nn.Module) -> list[Any]:
    modules = [*model.modules()]
    before = [it for module in modules for it in module._forward_pre_hooks.values()]
    return before + [it for module in modules for it in module._forward_hooks.values()]


def test_a_chosen_module_stands_where_one_was_left_out() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)

    def chosen(_name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    with gradlib.record(model, modules=chosen) as recording:
        model[1] = nn.Linear(3, 2)
        run(model, x)
    assert [call.name for call in recording] == ["0", "1"]


def test_a_chosen_module_that_is_not_called_stands_where_one_was_left_out() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)

    def chosen(_name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    with gradlib.record(model, modules=chosen) as recording:
        with pytest.raises(gradlib.NoSuchCallError, match="left it out"):
            _ = recording["1"]
        model[1] = nn.Linear(3, 2)
        run(model[0], x)
    with pytest.raises(gradlib.NoSuchCallError, match='"1" was not called'):
        _ = recording["1"]


def test_modules_are_named_after_where_they_stand_at_their_first_call() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
    last = model[1]
    with gradlib.record(model) as recording:
        model.insert(0, nn.Tanh())
        run(model, x)
        run(model, x)
        last(x)
    names = [*2 * ["", "0", "1", "2"], "2"]
    assert [call.name for call in recording] == names
    assert recording["1", 1].module_type == "Linear"
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    last = model[1]
    with gradlib.record(model) as recording:
        model.insert(0, nn.Tanh())
        last(x)  # the first call of all
        last(x)
    assert [(call.name, call.index) for call in recording] == [("2", 0), ("2", 1)]


def test_every_place_leads_to_the_calls_of_its_module() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        model.append(model[0])
        run(model, x)
        away = model[1]
        model[1] = nn.Linear(3, 3)
        run(model, x)
        model.add_module("back", away)
        run(model, x)
    assert recording["2", 0].output is recording["0", 0].output
    assert recording["back", 0].name == "1"
    assert len({(call.name, call.index) for call in recording}) == len(recording)
    assert len(recording) == 4 + 4 + 5
    assert recording.verify().ok


def test_an_only_child_moves_to_a_sibling() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(2, 2)), nn.Sequential()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh())

    model, x = Moves(), torch.randn(3, 2)
    with gradlib.record(model) as recording:
        run(model, x)
        model.b.append(model.a.pop(0))
        run(model, x)
    assert recording.verify().ok


def test_a_pre_hook_set_before_ours_in_the_block() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2)
    with gradlib.record(model) as recording:
        model[0].register_forward_pre_hook(lambda _m, it: (it[0] * 2,), prepend=True)
        run(model, x)
    assert_close(recording["0"].args[0], x)
    assert recording.verify().ok


def test_parameters_that_change_their_names() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(3, 2)
    prune.l1_unstructured(model[0], "weight", 0.5)
    with gradlib.record(model) as recording:
        run(model, x)
        prune.remove(model[0], "weight")
        run(model, x)
    grads = recording["0", 1].param_grads
    assert grads is not None
    assert set(grads) == {"weight", "bias"}
    assert recording.verify().agreed == len(recording)


def test_what_is_chosen_is_asked_by_the_places() -> None:
    x = torch.randn(2, 3)
    found: list[list[str]] = []
    for way in ("assigned", "inserted"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        with gradlib.record(model, modules="0") as recording:
            run(model, x)
            if way == "assigned":
                model.append(model[0])
                model[0] = nn.Linear(3, 3)
            else:
                model.insert(0, nn.Linear(3, 3))
            run(model, x)
        found.append([call.name for call in recording])
    assert found == [["0", "0 (new)", "0"]] * 2
    wrapped: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    with gradlib.record(wrapped, modules="0") as recording:
        wrapped[0] = Adapted(wrapped[0])
        run(wrapped, x)
    assert [call.name for call in recording] == ["0"]
    assert not wrapped[0].base._forward_hooks


def test_a_place_is_given_to_a_module_that_a_forward_makes() -> None:
    class Unties(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.Linear(3, 3)
            self.unties = False

        def forward(self, x: Tensor) -> Tensor:
            if self.unties:
                self.b = nn.Linear(3, 3)
            return self.b(self.a(x))

    model, x = Unties(), torch.randn(2, 3)
    with gradlib.record(model) as recording:
        run(model, x)
        model.unties = True
        run(model, x)
    assert [(it.name, it.index) for it in recording.calls("b")] == [("b", 0)]
    assert [it.index for it in recording.calls("a")] == [0, 1, 2]


def test_weights_that_are_put_in_for_a_call_are_let_go_of() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    with gradlib.record(model, reduce=gradlib.tensor_stats) as recording:
        dead: list[Any] = []

        def step() -> None:
            weights = {
                name: it.detach().clone().requires_grad_()
                for name, it in model.named_parameters()
            }
            torch.func.functional_call(model, weights, (x,)).sum().backward()
            dead.append(weakref.ref(weights["weight"]))

        for _ in range(5):
            step()
        gc.collect()
        assert sum(it() is not None for it in dead) <= 1  # the last is at hand
    assert recording["", 0].param_grads is not None


def test_weights_that_are_put_in_where_others_were() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    with gradlib.record(model, keep="param_grads") as recording:
        for _ in range(20):  # Python reuses the memory of a module that is gone
            weight = nn.Parameter(torch.randn(3, 3))
            torch.func.functional_call(model, {"weight": weight}, (x,)).sum().backward()
            del weight
    for call in recording:
        assert_close(call.param_grads_total, call.param_grads)
        assert call.param_grads["weight"] is not None


def test_a_module_taken_out_and_put_back_is_recorded_once() -> None:
    model = nn.Sequential(first := nn.Linear(3, 3))
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        for module in (nn.Linear(3, 3), first, first):
            model[0] = module
            run(model, x)
            with torch.no_grad():
                first.weight *= 2
    assert [call.name for call in recording] == 3 * ["", "0"]
    assert recording.verify().ok


def test_a_module_built_at_each_forward_outlives_a_look_back() -> None:
    class Builds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.layer = nn.Linear(3, 3)
            return self.layer(x)

    model = Builds()
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        run(model, x)
        recording.verify()
        live = model.layer
        run(live, x)
    assert [call.name for call in recording] == ["", "layer", "layer"]
    assert_close(recording["layer", 1].output, live(x))


def test_an_input_that_the_call_makes_require_grad() -> None:
    class Forces(nn.Module):
        """Returns energies, and the force on each atom."""

        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            energy = self.energy(x.requires_grad_())
            forces = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return energy, -forces[0]

    model = Forces()
    x = torch.randn(5, 3)
    with gradlib.record(model) as recording:
        energy, forces = model(x)
        forces.retain_grad()
        (energy.sum() + forces.pow(2).sum()).backward()
    # The pass inside brought no gradient through an output, so one pass is left.
    (only,) = recording[""].passes
    assert only.backward == 1
    assert_close(only.grad_output, (torch.ones(5, 1), forces.grad))
    assert_close(only.grad_input, (x.grad,))
    assert_close(only.grad_input_total, (x.grad,))
    assert recording[""].note == ""


def test_a_parameter_that_is_returned_in_every_step() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.tensor([2.0, 3.0]))

        def forward(self) -> Tensor:
            return self.by

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale()

    model = Scaled()
    with gradlib.record(model) as recording:
        for step in (1.0, 2.0):
            model(torch.ones(2)).mul(step).sum().backward()
    (last,) = recording["scale", 1].passes
    assert last.backward == 1
    assert_close(last.grad_output, (torch.full((2,), 2.0),))
    assert_close(last.param_grads["by"], torch.full((2,), 2.0))


def test_a_selective_checkpoint() -> None:
    def keep_products() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(
                lambda it: self.last(self.first(it).tanh()),
                x,
                use_reentrant=False,
                context_fn=keep_products,
            )

    model = Checkpointed()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    assert_close(recording["first"].grad_input, (x.grad,))
    assert_close(recording["last"].param_grads["weight"], model.last.weight.grad)


def test_a_module_deleted_in_the_block() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    gone = weakref.ref(model[1])
    hooks = model[1]._forward_hooks
    with gradlib.record(model) as recording:
        run(model, torch.randn(2, 3))
        del model[1]
        run(model, torch.randn(2, 3))
    assert len(recording.calls("0")) == 2
    assert len(recording.calls("1")) == 1
    assert not hooks
    del recording
    gc.collect()
    assert gone() is None


def test_one_module_under_two_names() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = Two()
    with gradlib.record(model) as recording:
        run(model, torch.randn(2, 3))
    assert [call.name for call in recording] == ["", "a", "a"]
    assert recording["b", 1].index == 1
    shares = [call.param_grads["weight"] for call in recording.calls("b")]
    assert_close(sum(shares), model.a.weight.grad)


def test_a_module_called_inside_a_function_of_autograd() -> None:
    inner = nn.Linear(3, 3)

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return inner(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                output = inner(x)
                output.backward(grads[0])
            return x.grad

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = inner, nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Inside.apply(x))

    model = Outer()
    x = torch.randn(2, 3, requires_grad=True)
    run(model, x)
    expected = grads_of(model), x.grad
    for tensor in (x, *model.parameters()):
        tensor.grad = None
    with gradlib.record(model) as recording:
        run(model, x)
    assert_same_bits((grads_of(model), x.grad), expected)
    assert_close(recording[""].grad_input, (x.grad,))
    assert_close(recording["last"].param_grads["bias"], model.last.bias.grad)
    call = recording.calls("inner")[-1]
    assert_close(call.param_grads["weight"], inner.weight.grad)
    assert_close(call.grad_input, (x.grad,))


def test_very_deep_nesting() -> None:
    class Deep(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.01))
            self.inner = Deep(depth - 1) if depth else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.inner(x)

    model = Deep(100)
    x = torch.ones(2, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert len(recording) == 102
    for name, owner in model.named_modules():
        if isinstance(owner, Deep):
            assert_close(recording[name].param_grads["scale"], owner.scale.grad)
    assert_close(recording[""].grad_input, (x.grad,))


class Equal(nn.Module):
    """Equals every other of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("way", ["by its place", "in the dict of children"])
@pytest.mark.parametrize("is_called_before", [False, True])
def test_an_equal_module_in_the_place_of_another_is_said(
    is_called_before: bool, way: str
) -> None:
    model = nn.Sequential(Equal(), nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        if is_called_before:
            model(x).sum().backward()
        if way == "by its place":
            model[0] = Equal()
        else:
            model._modules["0"] = Equal()
        model(x).sum().backward()
    name = "0 (new)" if is_called_before else "0"
    assert f"no call was seen of {name}:" in str(recording)
    with pytest.raises(gradlib.NoSuchCallError, match="it and another module are two"):
        recording[name]
    verified = recording.verify()
    assert not verified.disagreements
    assert verified.agreed == 1 + 3 * is_called_before
    (skipped,) = verified.skipped
    assert (skipped.name, skipped.index) == ("", int(is_called_before))
    assert skipped.reason.startswith("it contains a module that equals another")

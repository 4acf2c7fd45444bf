"""What is left behind: nothing is kept alive, hooked or copied along."""

import copy
import copyreg
import gc
import io
import pickle
import weakref
from collections import OrderedDict
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import gradlib

from .truth import Net, all_hooks_of, assert_same_bits, grad_of, run


@pytest.mark.cpu
def test_memory_is_freed_behind_the_tensors() -> None:
    """FSDP frees the memory of weights so, and other tools that of activations."""
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)
    hidden: list[Tensor] = []
    model.first.register_forward_hook(lambda *given: hidden.append(given[2]))
    with gradlib.record(model) as recording:
        run(model, x)
        own = [*hidden, x, *model.first.parameters()]
        freed = [*own, *(grad_of(it) for it in own[1:])]
        expected = [it.detach().clone() for it in freed]
        for tensor in freed:
            tensor.untyped_storage().resize_(0)
    call = recording["first"]
    found = [call.output, *call.args, None, None]
    found += [*call.grad_input, *call.param_grads.values()]
    pairs = [pair for pair in zip(found, expected, strict=True) if pair[0] is not None]
    for ours, wanted in pairs:
        assert_same_bits(ours, wanted)
    assert recording.verify().ok


class CopiedByHand(Net):
    """Copies its hooks along with itself, as some classes do."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: OrderedDict(value) if isinstance(value, OrderedDict) else value
            for name, value in vars(self).items()
        }


def test_pickles_and_copies_inside_the_block() -> None:
    model, x = Net(), torch.randn(2, 3)
    model.register_forward_hook(print_nothing)
    hooks, file = module_hooks(model), io.BytesIO()
    with gradlib.record(model), gradlib.record(model) as recording:
        expected = run(model, x)
        torch.save(model, file)
        twin = copy.deepcopy(model)
        run(twin, x)
        assert module_hooks(twin) == hooks
    assert b"gradlib" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert module_hooks(loaded) == hooks
    assert_close(loaded(x), expected)
    assert len(recording) == 3
    run(model, x)
    assert len(recording) == 3
    assert module_hooks(model) == hooks
    assert not any(map(vars, all_hooks_of(model)))


def test_hooks_that_are_copied_by_themselves_do_nothing() -> None:
    model, x = Net(), torch.randn(2, 3)
    with gradlib.record(model) as recording:
        hooks = [it for every in all_hooks_of(model) for it in every.values()]
        assert hooks
        for twins in (copy.deepcopy(hooks), pickle.loads(pickle.dumps(hooks))):
            for hook in twins:
                assert hook(model, (x,), {}, x) is None
        run(model, x)
    assert len(recording) == 3


def test_copies_after_an_inner_block_has_ended() -> None:
    model = Net()
    with gradlib.record(model):
        with gradlib.record(model):
            pass
        assert not any(module_hooks(copy.deepcopy(model)).values())


def test_other_ordered_dicts_are_copied_inside_the_block_as_ever() -> None:
    plain: Any = OrderedDict(a=[1], b=[2])
    plain.note = "kept"
    with gradlib.record(Net()):
        pickled = pickle.loads(pickle.dumps(plain))
        twins: list[Any] = [copy.copy(plain), copy.deepcopy(plain), pickled]
    for twin in twins:
        assert type(twin) is OrderedDict
        assert twin == plain
        assert [*twin] == ["a", "b"]
        assert vars(twin) == {"note": "kept"}


def test_nothing_is_left_in_the_way_python_copies() -> None:
    before = dict(copyreg.dispatch_table)
    with gradlib.record(Net()), gradlib.record(Net()):
        assert copyreg.dispatch_table != before
    assert copyreg.dispatch_table == before


def test_somebody_elses_way_to_copy_ordered_dicts_stays_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def as_list(given: OrderedDict[Any, Any]) -> Any:
        return list, ([*given],)

    monkeypatch.setitem(copyreg.dispatch_table, OrderedDict, as_list)
    model, x = Net(), torch.randn(2, 3)
    with gradlib.record(model), gradlib.record(Net()):
        assert copy.copy(OrderedDict(a=1)) == ["a"]
    with gradlib.record(model) as recording:
        run(model, x)
        assert copy.copy(OrderedDict(a=1)) == ["a"]
    assert copyreg.dispatch_table[OrderedDict] is as_list
    assert len(recording) == 3


def test_a_copy_that_hands_hooks_on_does_not_record() -> None:
    model, x = CopiedByHand(), torch.randn(2, 3)
    with gradlib.record(model) as recording:
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        run(twin, x)
    assert len(recording) == 0
    run(twin, x)


def test_tensors_are_pickled_inside_the_block_without_a_warning() -> None:
    model, x = Net(), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model):
        output = model(x)
        torch.save([x, output, *model.parameters()], io.BytesIO())


def print_nothing(*_: object) -> None:
    """Do nothing, as a hook that can be pickled."""


def module_hooks(model: nn.Module) -> dict[int, dict[Any, Any]]:
    """Return what is in these dicts, in their order."""
    return dict(enumerate(map(dict, all_hooks_of(model))))


def test_mixed_devices_of_meta() -> None:
    model = Net().to("meta")
    x = torch.randn(2, 3, device="meta", requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert recording["first"].grad_input[0].is_meta
    str(recording)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "some modules": {"modules": "first"},
    "values only": {"keep": ("args", "output")},
    "gradients only": {"keep": ("grad_input", "grad_output", "param_grads")},
    "nothing": {"keep": ()},
    "reduce": {"reduce": gradlib.tensor_stats},
    "device": {"device": "cpu"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_kept_alive_after_the_block(
    options: dict[str, Any], backward: bool
) -> None:
    made: list[weakref.ref[Any]] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            made.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            assert ctx.needs_input_grad[0]
            return grads[0]

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = Watched.apply(self.first(x))
            made.append(weakref.ref(h))
            return self.second(h)

    model = Model()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model, **options) as recording:
        output = model(x)
        if backward:
            output.sum().backward()
    made += [weakref.ref(x), weakref.ref(output)]
    del x, output
    gc.collect()
    assert [dead() for dead in made] == [None] * 4
    made = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    kept_weights = "args" in options.get("keep", ("args",))
    del model
    gc.collect()
    if not kept_weights:
        assert [dead() for dead in made] == [None] * 5
    del recording
    gc.collect()
    assert [dead() for dead in made] == [None] * 5


def test_a_block_left_by_an_exception_lets_go() -> None:
    model = Net()
    made: list[weakref.ref[Any]] = []

    def broken() -> None:
        with gradlib.record(model):
            output = model(torch.randn(2, 3))
            made.append(weakref.ref(output))
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    gc.collect()
    assert made[0]() is None
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for parameter in model.parameters():
        assert not parameter._backward_hooks


def test_no_hook_is_left_on_tensors_that_live_on() -> None:
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        hidden = F.relu(output)
        hidden.sum().backward(retain_graph=True)
    for tensor in (x, output, *model.parameters()):
        assert not tensor._backward_hooks
    before = len(recording["second"].passes)
    hidden.sum().backward()
    assert len(recording["second"].passes) == before == 1


def test_no_class_that_was_met_is_kept() -> None:
    """A class made in a function holds the function's variables, such as a model."""

    def recorded_classes() -> list[weakref.ref[type[Any]]]:
        class Doubles(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return x * 2

            @staticmethod
            def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
                return grad_outputs[0] * 2 * ctx.saved_tensors[0].isfinite()

        class Kept:
            pass

        class Own(nn.Module):
            __slots__ = ("slot",)

            def __init__(self) -> None:
                super().__init__()
                self.kept, self.slot = Kept(), 1

            def forward(self, x: Tensor) -> Tensor:
                return cast(Any, Doubles).apply(x)

        with gradlib.record(model := Own()) as recording:
            run(model, torch.ones(2, 3, requires_grad=True))
        assert recording.verify().ok
        return [*map(weakref.ref, (Doubles, Kept, Own))]

    made = recorded_classes()
    gc.collect()
    assert [it() for it in made] == [None] * 3


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_model_with_parametrizations_is_not_kept(name: str) -> None:
    """Each parametrized module has a class of its own, which refers to the module."""

    def recorded_weight() -> weakref.ref[Tensor]:
        model = Net()
        getattr(parametrizations, name)(model.first)
        with gradlib.record(model) as recording:
            run(model, torch.ones(2, 3, requires_grad=True))
        assert recording.verify().ok
        return weakref.ref(next(model.parameters()))

    weight = recorded_weight()
    gc.collect()
    assert weight() is None

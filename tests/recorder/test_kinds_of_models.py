"""Kinds of models: parametrizations, frozen weights, inference mode, scripts."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib
from gradlib.recording import notes

from .truth import Net, assert_same_bits, grad_of, grads_of, loss_of, run, twins


def test_weight_norm_and_spectral_norm_of_old() -> None:
    for wrap in (_old_weight_norm, nn.utils.spectral_norm):
        torch.manual_seed(0)
        model, plain = twins_of(lambda wrap=wrap: nn.Sequential(wrap(nn.Linear(3, 3))))
        x = torch.randn(2, 3)
        for _ in range(2):
            run(plain, x)
        with gradlib.record(model) as recording:
            for _ in range(2):
                run(model, x)
        assert_same_bits(grads_of(model), grads_of(plain))
        calls = recording.calls("0")
        for name, parameter in model[0].named_parameters():
            shares = [call.param_grads[name] for call in calls]
            assert_close(sum(shares), parameter.grad)
            totals = [call.param_grads_total[name] for call in calls]
            assert_close(sum(totals), parameter.grad)


def twins_of(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """Return two equal models, made twice where a model cannot be copied."""
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(make())
    return made[0], made[1]


def _old_weight_norm(module: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(module)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(name: str) -> None:
    wrap = getattr(nn.utils.parametrizations, name)
    model, plain = twins_of(
        lambda: nn.Sequential(wrap(nn.Linear(3, 3)), nn.Tanh(), wrap(nn.Linear(3, 3)))
    )
    x = torch.randn(2, 3, requires_grad=True)
    run(plain, x)
    expected = x.grad
    x.grad = None
    with gradlib.record(model) as recording:
        run(model, x)
    assert_same_bits(grads_of(model), grads_of(plain))
    assert_same_bits(x.grad, expected)
    assert_close(recording["0"].grad_input, (x.grad,))
    assert_close(recording["0"].param_grads["bias"], model[0].bias.grad)
    for call in recording:
        for own, grad in call.param_grads.items():
            place = f"{call.name}.{own}" if call.name else own
            assert_close(grad, model.get_parameter(place).grad)


def test_inference_mode_and_no_grad_parts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.frozen(x)
            return self.head(h)

    model = Model()
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        with torch.inference_mode():
            silent = model(x)
        run(model, x)
    assert silent.is_inference()
    assert recording["frozen", 0].output.shape == (2, 3)
    assert recording["frozen", 1].note == "gradients were disabled when it was called"
    assert_close(recording["head", 1].param_grads["weight"], model.head.weight.grad)
    assert recording["head", 1].note == "args[0] does not require grad"
    str(recording)


def test_inference_tensors_keep_their_value() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    plain = copy.deepcopy(model)
    with torch.inference_mode(), gradlib.record(model) as recording:
        x = torch.randn(2, 3)
        model(x)
        expected = plain[0](x)
        x.zero_()
    assert_close(recording["0"].output, expected)
    assert not torch.equal(recording["0"].args[0], torch.zeros(2, 3))


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = Net()
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording, torch.no_grad():
        outputs = [model(x) for _ in range(2)]
    assert [call.name for call in recording] == 2 * ["", "first", "second"]
    for i, output in enumerate(outputs):
        assert_close(recording["second", i].output, output)


def test_gradients_enabled_inside_no_grad() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return self.fc(x)

    model = Model()
    with gradlib.record(model) as recording:
        with torch.no_grad():
            output = model(torch.randn(2, 3))
        loss_of(output).backward()
    assert_close(recording["fc"].param_grads["weight"], model.fc.weight.grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_scripted_and_traced_modules() -> None:
    scripted: Any = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    traced: Any = torch.jit.trace(nn.Linear(3, 2), torch.randn(2, 3))
    model = nn.Sequential(nn.Linear(3, 3), scripted, traced)
    x = torch.randn(2, 3, requires_grad=True)
    run(model, x)
    expected = copy.deepcopy(grads_of(model))
    model.zero_grad()
    x.grad = None
    with gradlib.record(model) as recording:
        run(model, x)
    assert_close(grads_of(model), expected)
    assert_close(recording["0"].grad_input, (x.grad,))
    assert_close(recording["0"].param_grads["weight"], model[0].weight.grad)
    with pytest.raises(gradlib.NoSuchCallError, match="a ScriptModule takes no hooks"):
        _ = recording["1"]
    assert "2" not in recording


class Around(nn.Module):
    """A class of one's own: what its calls leave in modules inside it is looked for."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.first, self.inside = nn.Linear(3, 3), nn.Sequential(*inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(self.first(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.")
@pytest.mark.parametrize("in_thread", [False, True])
def test_scripted_modules_in_a_class_of_ones_own(in_thread: bool) -> None:
    scripted: Any = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    traced: Any = torch.jit.trace(nn.Linear(3, 2), torch.randn(2, 3))
    model = Around(scripted, torch.jit.freeze(copy.deepcopy(scripted).eval()), traced)
    x = torch.randn(2, 3)
    run(model, x)
    expected = copy.deepcopy(grads_of(model))
    model.zero_grad()
    with gradlib.record(model) as recording:
        if in_thread:
            thread = threading.Thread(target=run, args=(model, x))
            thread.start()
            thread.join()
        else:
            run(model, x)
    assert_close(grads_of(model), expected)
    assert_close(recording["first"].param_grads["weight"], model.first.weight.grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_frozen_scripted_modules() -> None:
    """Frozen scripted modules have no attribute `training`."""
    scripted: Any = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).eval())
    model = nn.Sequential(torch.jit.freeze(scripted), nn.Linear(3, 2))
    x = torch.randn(2, 3, requires_grad=True)
    run(model, x)
    expected = copy.deepcopy(grads_of(model))
    model.zero_grad()
    with gradlib.record(model) as recording:
        run(model, x)
    assert_close(grads_of(model), expected)
    assert_close(recording["1"].param_grads["weight"], model[1].weight.grad)
    with pytest.raises(gradlib.NoSuchCallError, match="a ScriptModule takes no hooks"):
        _ = recording["0"]


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_tracing_a_recorded_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.randn(2, 3)
    expected = model(x)
    with gradlib.record(model):
        traced: Any = torch.jit.trace(model, x, check_trace=False)
    assert_close(traced(x), expected)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap": lambda model, x: torch.vmap(model)(x),
    "grad": lambda model, x: torch.func.grad(_loss_with(model))(_named(model), x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[0]),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x[0]),
    "vmap grad": lambda model, x: torch.vmap(
        torch.func.grad(_loss_with(model)), in_dims=(None, 0)
    )(_named(model), x),
}


def _named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def _loss_with(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    return loss


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_model_that_is_recorded_is_not_scripted_but_its_copy_is() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    expected = model(x)
    with gradlib.record(model):
        with pytest.raises(gradlib.NotScriptableError, match=r"copy\.deepcopy"):
            torch.jit.script(model)
        scripted: Any = torch.jit.script(copy.deepcopy(model))
        assert torch.equal(scripted(x), expected)
        # Code that prints a hook's name finds none, as for a hook without a name.
        (hook,) = model[0]._forward_hooks.values()
        assert getattr(hook, "__name__", "unnamed") == "unnamed"
    assert torch.equal(cast(Any, torch.jit.script(model))(x), expected)


EXCHANGED: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, x),
    "torch.export": lambda model, x: torch.export.export(model, (x,)).module(),
    "torch.fx": lambda model, _: torch.fx.symbolic_trace(model),
    "copy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
@pytest.mark.parametrize("name", EXCHANGED)
def test_what_is_made_of_a_model_in_the_block_computes_what_the_model_does(
    name: str,
) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    expected = model(x)
    with gradlib.record(model) as recording:
        made = EXCHANGED[name](model, x)
        assert torch.equal(made(x), expected)
        model(x).sum().backward()
    assert torch.equal(made(x), expected)
    assert len(recording.calls("0")[-1].passes) == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_function_transforms_bend_nothing(
    transform: Callable[[nn.Module, Tensor], Any],
) -> None:
    model = Net()
    x = torch.randn(4, 3)
    expected = transform(model, x)
    with gradlib.record(model) as recording:
        found = transform(model, x)
        run(model, x)
    assert_close(found, expected)
    call = recording.calls("first")[-1]
    assert_close(call.param_grads["weight"], model.first.weight.grad)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["vmap", "jacrev", "vmap grad"])
def test_what_was_kept_of_a_function_transform_can_be_read(name: str) -> None:
    model = Net()
    with gradlib.record(model) as recording:
        TRANSFORMS[name](model, torch.randn(4, 3))
    for call in recording:
        assert "torch.func" in str(call)
        assert call.output is None


@pytest.mark.filterwarnings("ignore:.torch.jit.")
@pytest.mark.parametrize("way", ["vmap", "trace", "captured"])
@pytest.mark.parametrize("chosen", [None, ["0", "0.*"]])
def test_a_forward_whose_tensors_have_no_values_is_one(
    way: str, chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.Tanh())
    x = torch.randn(5, 3)
    with gradlib.record(model, modules=chosen) as recording:
        if way == "vmap":
            torch.vmap(model)(x)
        elif way == "trace":
            torch.jit.trace(model, x, check_trace=False)
        else:
            with monkeypatch.context() as patch:
                module = "gradlib.recorder.module_calls.graph_is_captured"
                patch.setattr(module, lambda: True)
                model(x)
        first = len(recording.forwards)
        run(model, x)
    assert way == "trace" or first == 1  # this calls the model more than once
    names = ["0", "0.0"] if chosen else ["", "0", "0.0", "1"]
    for calls in recording.forwards:
        assert [call.name for call in calls] == names
    assert recording["0.0", 0].note in {notes.STAND_INS, notes.CAPTURED}
    assert recording["0.0", 0].output is None
    assert recording["0.0", first].passes[0].param_grads["weight"] is not None
    assert recording.verify().agreed == len(names)


def test_a_vmap_that_raises_is_over() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    x = torch.randn(5, 3)
    with gradlib.record(model) as recording:
        with pytest.raises(RuntimeError):
            torch.vmap(model)(x)
        model[0](x)
    assert "forward raised RuntimeError" in recording["", 0].note
    assert [call.forward for call in recording] == [0, 0, 0, 1]


def test_a_vmap_inside_a_call_belongs_to_it() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.vmap(self.first)(x))

    model = Inside()
    with gradlib.record(model) as recording:
        run(model, torch.randn(5, 3))
    (calls,) = recording.forwards
    assert [call.name for call in calls] == [
        *("", "first", "first.first", "first.second", "second")
    ]
    assert_close(recording["second"].param_grads["weight"], model.second.weight.grad)


def test_a_vmap_over_a_recorded_model_warns_of_nothing() -> None:
    model = Net()
    with gradlib.record(model):
        torch.vmap(model)(torch.randn(4, 3))


def test_functional_call_with_other_parameters() -> None:
    model = Net()
    x = torch.randn(2, 3)
    others = {
        name: torch.randn_like(parameter).requires_grad_()
        for name, parameter in model.named_parameters()
    }
    with gradlib.record(model) as recording:
        loss_of(torch.func.functional_call(model, others, (x,))).backward()
    assert_close(recording["first"].param_grads["weight"], others["first.weight"].grad)
    assert model.first.weight.grad is None


def test_a_parameter_that_is_frozen_for_one_call() -> None:
    model, alone = twins(nn.Linear(2, 2))
    x = torch.ones(1, 2)
    with gradlib.record(model) as recording:
        model.weight.requires_grad_(False)
        run(model, x)
        model.weight.requires_grad_(True)
        run(model, x)
    run(alone, x)
    frozen, free = recording.calls("")
    assert frozen.param_grads["weight"] is None
    assert "weight does not require grad" in frozen.note
    assert_same_bits(free.param_grads["weight"], grad_of(alone.weight))
    assert_same_bits(free.param_grads_total["weight"], grad_of(alone.weight))


def test_a_parameter_that_was_frozen_before_the_block() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    model.weight.requires_grad_(False)
    with gradlib.record(model) as recording:
        run(model, x)
        model.weight.requires_grad_(True)
        run(model, x)
    frozen, free = recording.calls("")
    assert frozen.param_grads_total["weight"] is None
    assert_same_bits(free.param_grads["weight"], grad_of(model.weight))
    assert_same_bits(free.param_grads_total["weight"], grad_of(model.weight))


class Sized(nn.Module):
    """Resizes its buffer at the first data, as observers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.get_buffer("seen")
        if self.training:
            seen.resize_(x.shape[1]).copy_(x.detach().mean(0))
        return x - seen


def test_buffers_that_grow_in_the_block_and_after_it() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model := Sized()) as recording:
        run(model, x)
    assert_close(recording[""].output, x.detach() - x.detach().mean(0))
    with gradlib.record(model := Sized().eval()):
        run(model, x)
    model.train()(x)


def test_weights_that_were_computed() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    fast = {name: 2 * weight for name, weight in model.named_parameters()}
    for weight in fast.values():
        weight.retain_grad()
    with gradlib.record(model) as recording:
        output = torch.func.functional_call(model, fast, (torch.randn(4, 3),))
        loss_of(output).backward()
    (call,) = recording
    for name, weight in fast.items():
        assert_same_bits(call.param_grads[name], grad_of(weight))
        assert_same_bits(call.param_grads_total[name], grad_of(weight))

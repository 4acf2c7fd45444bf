"""Traps that recorders fall into, one a test, against gradients without a recorder."""

import copy
import copyreg
import gc
import io
import pickle
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import gradlib
from gradlib.recording import notes


class Net(nn.Module):
    """Two layers with a name each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def loss_of(output: Tensor) -> Tensor:
    """Weigh the entries differently, so that no two gradients agree by chance."""
    # Threads have a default device of their own.
    kind: Any = {"dtype": output.real.dtype, "device": output.device}
    weights = torch.arange(1.0, output.numel() + 1, **kind)
    return (
        (output.abs() if output.is_complex() else output)
        .mul(weights.view_as(output))
        .sum()
    )


def run(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Run forward and backward, and return the output."""
    output = model(*args, **kwargs)
    loss_of(output).backward()
    return output


def grad_of(tensor: Tensor) -> Tensor:
    """Return ``tensor.grad``, which must be there."""
    assert tensor.grad is not None
    return tensor.grad


def grads_of(model: nn.Module) -> dict[str, Any]:
    """Return what is in every ``.grad`` of a model."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def twins(model: nn.Module) -> tuple[Any, Any]:
    """Return two copies of a model."""
    return copy.deepcopy(model), copy.deepcopy(model)


def assert_same_bits(found: object, expected: object) -> None:
    assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def assert_is_vjp(call: gradlib.Call, module: nn.Module) -> None:
    """Hold a call's shares against the VJP of the module alone."""
    args = [
        arg.detach().clone().requires_grad_(given is not None)
        for arg, given in zip(call.args, call.grad_input, strict=True)
    ]
    alone = copy.deepcopy(module)
    output = alone(*args)
    outputs = [output] if isinstance(output, Tensor) else list(output)
    wanted = [arg for arg in args if arg.requires_grad]
    wanted += [p for p in alone.parameters(recurse=False) if p.requires_grad]
    pairs = zip(outputs, call.grad_output, strict=True)
    flowed = [(out, grad) for out, grad in pairs if grad is not None]
    expected = torch.autograd.grad(
        [out for out, _ in flowed], wanted, [grad for _, grad in flowed]
    )
    found = [grad for grad in call.grad_input if grad is not None]
    found += [grad for grad in call.param_grads.values() if grad is not None]
    assert_close(found, list(expected))


# Layers


@pytest.mark.parametrize(
    "dropout",
    [nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d],
)
def test_dropout_in_place(dropout: type[nn.Module]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.end = nn.Linear(4, 4), nn.Linear(4, 2)
            self.drop = dropout(0.5, inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.drop(self.fc(x)))

    model, plain = twins(Model())
    x = torch.randn(5, 3, 4)
    torch.manual_seed(1)
    before = plain.fc(x)
    before.retain_grad()
    after = plain.drop(before.clone())
    after.retain_grad()
    loss_of(plain.end(after)).backward()
    torch.manual_seed(1)
    with gradlib.record(model) as recording:
        run(model, x)
    assert_close(recording["fc"].output, before.detach())
    assert_close(recording["fc"].grad_output, (before.grad,))
    assert_close(recording["drop"].args, (before.detach(),))
    assert_close(recording["drop"].grad_input, (before.grad,))
    assert_close(recording["drop"].grad_output, (after.grad,))
    assert_same_bits(grads_of(model), grads_of(plain))


def test_shares_add_up_over_several_rounds() -> None:
    model = nn.Sequential(shared := nn.Linear(3, 3), nn.Tanh(), shared)
    with gradlib.record(model) as recording:
        for _ in range(3):
            run(model, torch.randn(2, 3))
    calls = recording.calls("0")
    assert len(calls) == 6
    for name, parameter in shared.named_parameters():
        assert_close(sum(call.param_grads[name] for call in calls), parameter.grad)
        rounds = [forward["0", 2 * i] for i, forward in enumerate(recording.forwards)]
        total = sum(call.param_grads_total[name] for call in rounds)
        assert_close(total, parameter.grad)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("train", [False, True])
def test_attention(need_weights: bool, kind: str, train: bool) -> None:
    model, plain = twins(nn.MultiheadAttention(4, 2, batch_first=True).train(train))
    x = torch.randn(2, 3, 4, requires_grad=True)
    memory = torch.randn(2, 5, 4, requires_grad=kind == "cross")
    inputs = (x, x, x) if kind == "self" else (x, memory, memory)
    asked = [x] if kind == "self" else [x, memory]

    def grads(model: nn.Module) -> tuple[Tensor, ...]:
        output, weights = model(*inputs, need_weights=need_weights)
        loss = loss_of(output) + (loss_of(weights) if need_weights else 0)
        return torch.autograd.grad(loss, [*asked, *model.parameters()])

    expected = grads(plain)
    with gradlib.record(model) as recording:
        found = grads(model)
    assert_same_bits(found, expected)
    call = recording[""]
    total = dict(zip(map(id, asked), expected, strict=False))
    assert_close(call.grad_input, tuple(total[id(tensor)] for tensor in inputs))
    own = dict(zip(dict(model.named_parameters()), expected[len(asked) :], strict=True))
    assert_close(call.param_grads["in_proj_weight"], own["in_proj_weight"])
    assert_close(call.param_grads_total["in_proj_bias"], own["in_proj_bias"])
    assert (call.grad_output[1] is not None) == need_weights
    if "out_proj" not in recording:
        with pytest.raises(gradlib.NoSuchCallError, match="uses its weights directly"):
            _ = recording["out_proj"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers(kind: Callable[..., nn.Module], packed: bool) -> None:
    model, plain = twins(kind(3, 4, num_layers=2, batch_first=True))
    for copied in (model, plain):  # else cuDNN warns of how the copies lie
        assert isinstance(copied, nn.RNNBase)
        copied.flatten_parameters()
    x = torch.randn(2, 5, 3, requires_grad=True)

    def grads(model: nn.Module) -> tuple[Tensor, ...]:
        given: Any = pack_padded_sequence(x, [5, 3], batch_first=True) if packed else x
        output, state = model(given)
        if packed:
            assert isinstance(output, PackedSequence)
            output, _ = pad_packed_sequence(output, batch_first=True)
        last = state[1] if isinstance(state, tuple) else state
        loss = loss_of(output) + last.sum()
        return torch.autograd.grad(loss, [x, *model.parameters()])

    expected = grads(plain)
    with gradlib.record(model) as recording:
        found = grads(model)
    assert_same_bits(found, expected)
    call = recording[""]
    names = [name for name, _ in model.named_parameters()]
    assert_close(call.param_grads, dict(zip(names, expected[1:], strict=True)))
    given, flowed = call.args[0], call.grad_input[0]
    if packed:
        assert isinstance(call.output[0], PackedSequence)
        flowed, _ = pad_packed_sequence(
            PackedSequence(flowed.data, given.batch_sizes), batch_first=True
        )
    assert_close(flowed, expected[0])
    assert "LSTM" in str(call) or kind is not nn.LSTM
    repr(call)
    str(recording)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings(kind: type[nn.Module], sparse: bool) -> None:
    model, plain = twins(kind(5, 3, sparse=sparse))
    indices = torch.tensor([[0, 2], [2, 4]])
    run(plain, indices)
    with gradlib.record(model) as recording:
        run(model, indices)
        run(model, indices)
    first, second = recording.calls("")
    expected = grad_of(plain.weight)
    for call in (first, second):
        assert call.param_grads["weight"].is_sparse == sparse
        for share in (call.param_grads, call.param_grads_total):
            assert_close(share["weight"].to_dense(), expected.to_dense())
        assert call.grad_input == (None,)
        assert call.note == "args[0] does not require grad"
    str(first)


def test_a_sparse_gradient_of_a_weight_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(5, 3, sparse=True)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.e(a) * 2 + self.e(b)

    model = Twice()
    with gradlib.record(model) as recording:
        run(model, torch.tensor([0, 1]), torch.tensor([1, 2]))
    shares = [call.param_grads["weight"].to_dense() for call in recording.calls("e")]
    assert_close(sum(shares), grad_of(model.e.weight).to_dense())
    assert shares[0][2].count_nonzero() == 0
    assert_close(
        recording["e", 0].param_grads_total["weight"].to_dense(),
        grad_of(model.e.weight).to_dense(),
    )


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    model, plain = twins(model)
    x = torch.randn(2, 3).to(dtype).requires_grad_()
    expected = torch.autograd.grad(loss_of(plain(x)), [x, *plain.parameters()])
    with gradlib.record(model) as recording:
        found = torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()])
    assert_same_bits(found, expected)
    assert_same_bits(recording["0"].grad_input, (expected[0],))
    assert_same_bits(list(recording["0"].param_grads.values()), list(expected[1:3]))
    assert recording["1"].grad_output[0].dtype == dtype
    str(recording)


# Higher derivatives


def penalty(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Return second-order gradients: of a gradient penalty."""
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return torch.autograd.grad(
        grad.square().sum(), [x, *model.parameters()], allow_unused=True
    )


def test_double_backward() -> None:
    model, plain = twins(Net())
    x = torch.randn(5, 3, requires_grad=True)
    output = plain(x)
    first = torch.autograd.grad(output.sum(), [x, *plain.parameters()])
    expected = penalty(plain, x)
    with gradlib.record(model) as recording:
        found = penalty(model, x)
    assert_same_bits(found, expected)
    for call in recording:
        assert [pass_.backward for pass_ in call.passes] == [0, 1]
    call = recording["first"]
    assert_close(call.passes[0].grad_input, (first[0],))
    # Also through the second pass the weights got what autograd says.
    assert_close(call.passes[1].param_grads_total["weight"], expected[1])
    assert_close(call.passes[1].grad_input_total, (expected[0],))
    hidden = recording["second"]
    assert_close(hidden.passes[1].param_grads_total["weight"], expected[3])
    assert_close(hidden.passes[1].param_grads["weight"], expected[3])
    assert "is in its totals" not in hidden.note


# Some lay out their weight anew before they use it.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(3, 3),
    "Linear without bias": lambda: nn.Linear(3, 3, bias=False),
    "Conv1d": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 3, 1), nn.Flatten()
    ),
    "LayerNorm": lambda: nn.LayerNorm(3),
    "PReLU": lambda: nn.PReLU(3),
}


class Aliased(nn.Module):
    """Calls a module with aliases of what it is given, and of its own parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls: list[dict[str, Tensor]] = []

    def forward(self, *args: Tensor) -> Any:
        own = {
            name: it.clone() for name, it in self.module.named_parameters(recurse=False)
        }
        aliases = {it: it.clone() for it in args}  # one for what is passed twice
        given = tuple(aliases[it] for it in args)
        self.calls.append(own | {str(i): it for i, it in enumerate(given)})
        for it in self.calls[-1].values():
            if it.requires_grad:
                it.retain_grad()
        return torch.func.functional_call(self.module, own, given)


class Waves(nn.Module):
    """Several operations on parameters of its own, one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.v).sin() * self.w).exp() @ self.v.t() + x * self.w


DEEP: dict[str, Callable[[], list[nn.Module]]] = {
    **{
        name: lambda layer=layer: [nn.Linear(3, 3), nn.Tanh(), layer(), nn.Tanh()]
        for name, layer in LAYERS.items()
    },
    "several operations": lambda: [nn.Linear(3, 3), Waves(), nn.Softplus()],
    "of straight pieces": lambda: [nn.Linear(3, 3), nn.LeakyReLU(), nn.Linear(3, 1)],
    "two inputs": lambda: [nn.Linear(3, 3), Doubled(), nn.Tanh(), nn.Linear(3, 2)],
    "one three times": lambda: (
        lambda it: [it, nn.Tanh(), it, nn.Sigmoid(), it, nn.Linear(3, 1)]
    )(nn.Linear(3, 3)),
    "squares": lambda: [nn.Linear(3, 3), Powers(2), nn.Linear(3, 1), Powers(3)],
    "scales at first": lambda: [Waves(), Powers(2), nn.Linear(3, 2)],
    "norm at first": lambda: [nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)],
    "copies": lambda: [nn.Linear(3, 3), WithCopies(), nn.Linear(3, 1)],
    "GRU": lambda: [nn.Unflatten(1, (1, 3)), nn.GRUCell(3, 3), nn.Linear(3, 1)],
}


class Powers(nn.Module):
    """A power, by products of what it is given with itself."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        if self.power == 1:
            return 2 * x
        y = x * x
        return y if self.power == 2 else y * x


class WithCopies(nn.Module):
    """A product of what it is given with a copy of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.clone() + x.clone().sin()


class Doubled(nn.Module):
    """A bilinear form of its input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(3, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, x)


@pytest.mark.parametrize("reduce", [None, Tensor.clone])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", DEEP)
def test_the_share_of_a_call_where_a_pass_goes_through_the_graph_of_another(
    name: str, again: bool, reduce: Any
) -> None:
    """It is what an alias gets that the call alone had."""
    torch.manual_seed(0)
    parts = DEEP[name]()
    if "GRU" in name:
        parts[0] = nn.Identity()
    model, plain = twins(nn.Sequential(*parts).double())
    aliased = {it: Aliased(it) for it in plain.modules() if not [*it.children()]}
    for it in [*plain.modules()]:
        for key, inner in it._modules.items():
            if inner in aliased:
                it._modules[key] = aliased[inner]
    x, other = torch.randn(2, 4, 3).double()

    def run(net: nn.Module) -> None:
        given = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(net(given).sum(), given, create_graph=True)
        if again:  # and one more order
            (grad,) = torch.autograd.grad(
                grad.square().sum(), given, create_graph=True, retain_graph=True
            )
        (net(other).square().sum() + grad.square().sum()).backward()

    with gradlib.record(model, reduce=reduce) as recording:
        run(model)
    run(plain)
    for name, it in plain.named_modules():
        if isinstance(it, Aliased):
            calls = recording.calls(name)
            assert len(calls) == len(it.calls)
            for call, expected in zip(calls, it.calls, strict=True):
                assert_adds_up(call, expected)
    assert not any("a hook has made" in call.note for call in recording)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.SiLU(inplace=True),
        lambda: nn.Mish(inplace=True),
        lambda: nn.ELU(inplace=True),
    ],
)
def test_the_share_of_what_is_overwritten_and_differentiated_again(
    make: Callable[[], nn.Module], times: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), make(), nn.Linear(3, 1)).double()
    x = torch.randn(4, 3).double().requires_grad_()
    with gradlib.record(model) as recording:
        y = model(x).square().sum()
        grads = [
            *(torch.autograd.grad(y, x, create_graph=True)[0] for _ in range(times))
        ]
        sum(grads, start=torch.zeros(()).double()).square().sum().backward()
    last = recording["1"].passes[-1]
    assert last.grad_input[0] is not None
    assert_close(last.grad_input, last.grad_input_total)
    assert "through this call" not in recording["1"].note


class Reshaped(nn.Module):
    """What a view of its input is, overwritten in it or by the module after it."""

    def __init__(self, view: Callable[[Tensor], Tensor], then: nn.Module) -> None:
        super().__init__()
        self.view, self.then = view, then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.view(x))


class UsedBefore(Reshaped):
    """The same, and what is overwritten was used before."""

    def forward(self, x: Tensor) -> Tensor:
        view = self.view(x)
        return 2 * view + self.then(view)


ACTIVATIONS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "silu": F.silu,  # saves what it is given
    "tanh": lambda x, inplace: x.tanh_() if inplace else x.tanh(),  # its result
}
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "reshaped": lambda x: x.view(-1),
    "a part": lambda x: x[:, :2],
    "a part of a part": lambda x: x.view(2, 6)[:, 1:].t(),
}


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    "where", ["inside", "by a child", "by a child at last", "by the next"]
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_view_that_is_overwritten_and_differentiated_again(
    activation: str, form: str, where: str, elsewhere: bool
) -> None:
    """What it was before is saved as a copy, through which the later pass comes back.

    It is the same as without overwriting anything.
    """
    view, activate = FORMS[form], ACTIVATIONS[activation]

    class Activation(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.inplace = inplace

        def forward(self, x: Tensor) -> Tensor:
            return activate(x, self.inplace)

    def built(inplace: bool) -> nn.Sequential:
        torch.manual_seed(0)
        last = Activation(inplace)
        if where == "inside":
            act: list[nn.Module] = [
                Reshaped(lambda x: activate(view(x), inplace), nn.Identity())
            ]
        elif where == "by a child":
            act = [Reshaped(view, last)]
        elif where == "by a child at last":
            act = [UsedBefore(view, last)]
        else:
            act = [Reshaped(view, nn.Identity()), last]
        return nn.Sequential(nn.Linear(3, 3), *act, nn.Softplus()).double()

    x = torch.randn(4, 3).double()

    def recorded(net: nn.Module) -> gradlib.Recording:
        given = x.clone().requires_grad_()

        def backward(loss: Tensor) -> None:
            (grad,) = torch.autograd.grad(loss, given, create_graph=True)
            grad.square().sum().backward()

        with gradlib.record(net) as recording:
            loss = net(given).square().sum()
            if elsewhere:  # in a thread that numbers what it makes for itself
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(backward, loss).result()
            else:
                backward(loss)
        return recording

    recording, plain = recorded(built(inplace=True)), recorded(built(inplace=False))
    for call, expected in zip(recording, plain, strict=True):
        for pass_, it in zip(call.passes, expected.passes, strict=True):
            assert_close(pass_.grad_input, it.grad_input)
            assert_close(pass_.grad_input_total, it.grad_input_total)
            assert_close(pass_.grad_output, it.grad_output)
        assert call.note == expected.note


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize(
    "overwrite", [Tensor.sigmoid_, Tensor.tanh_, Tensor.exp_, Tensor.relu_]
)
def test_a_part_that_is_overwritten_where_the_whole_goes_on(
    overwrite: Callable[[Tensor], Tensor], itself: bool
) -> None:
    """As boxes of a detector: the operation has saved its result, or what it was."""

    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return overwrite(x)

    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: Tensor) -> Tensor:
            (overwrite if itself else self.part)(x[:, 1:])
            return x

    x = torch.randn(2, 3).double().requires_grad_()
    with gradlib.record(model := Boxes()) as recording:
        cubes = model(x * 1.5) ** 3
        (grad,) = torch.autograd.grad(cubes.sum(), x, create_graph=True)
        grad.square().sum().backward()
    for call in recording:  # who alone uses what it was given
        assert [it.backward for it in call.passes] == [0, 1]
        for pass_ in call.passes:
            assert_close(pass_.grad_input, pass_.grad_input_total)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor, inplace: bool) -> Tensor:
        return x.mul_(self.w) if inplace else x * self.w


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_part_that_two_calls_overwrite_in_three_orders(elsewhere: bool) -> None:
    """The calls share a weight, and what each returns is dropped in place."""

    class Model(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.scale, self.inplace = Scale(), inplace

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1.5
            for _ in range(2):
                part = self.scale(h[1:], self.inplace)
                h = h if self.inplace else torch.cat([h[:1], part])
            return h

    start = torch.randn(3).double()

    def recorded(inplace: bool) -> gradlib.Recording:
        model, x = Model(inplace).double(), start.clone().requires_grad_()

        def differentiate(y: Tensor) -> None:
            last = (y**3).sum()
            for _ in range(2):
                asked = [x, model.scale.w]
                grads = torch.autograd.grad(last, asked, create_graph=True)
                last = torch.stack([it.square().sum() for it in grads]).sum()
            last.backward()

        with gradlib.record(model) as recording:
            y = model(x)
            if elsewhere:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(differentiate, y).result()
            else:
                differentiate(y)
        return recording

    calls, others = (recorded(it).calls("scale") for it in (True, False))
    for call, expected in zip(calls, others, strict=True):
        assert len(call.passes) == len(expected.passes) == 3
        for pass_, it in zip(call.passes, expected.passes, strict=True):
            assert_close(pass_.grad_input[0], it.grad_input[0])
            assert_close(pass_.param_grads, it.param_grads)
            assert_close(pass_.param_grads_total, it.param_grads_total)


def test_results_are_the_same_where_a_backward_returns_what_it_has_saved(
    tmp_path: Path,
) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return (x * w).sum()

        @staticmethod
        def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, ...]:
            x, w = ctx.saved_tensors
            return w, x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Any:
            return Product.apply(x, self.w)

    model, x = Model(), torch.ones(3, requires_grad=True)
    with gradlib.record(model) as recording:
        (grad,) = torch.autograd.grad(model(x), x, create_graph=True)
        assert grad is model.w
    recording.save(tmp_path / "it.safetensors")
    for it in recording, gradlib.load_recording(tmp_path / "it.safetensors"):
        assert it[""].note.endswith(notes.GAVE_BACK)


def test_two_recordings_take_each_others_hooks_for_no_others() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Aliased(nn.Linear(3, 3)), nn.Linear(3, 1))
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model) as one, gradlib.record(model) as other:
        penalty(model, x)
    assert not any("a hook has made" in call.note for call in (*one, *other))


def test_a_pass_inside_a_backward_that_gives_a_call_nothing() -> None:
    """The backward of cat() computes what nobody has asked for: it is dropped."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(torch.cat([x, x], 1)).tanh()
            z = y.detach().requires_grad_()
            again = self.fc(torch.cat([z, x], 1)).tanh()
            y.register_hook(
                lambda v: v + torch.autograd.grad(again, z, v, retain_graph=True)[0]
            )
            return y

    with gradlib.record(model := Model()) as recording:
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    (pass_,) = recording[""].passes
    assert pass_.grad_output[0] is not None
    assert [len(call.passes) for call in recording.calls("fc")] == [1, 1]


def test_a_pass_that_first_meets_a_call_by_a_node() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            self.h = x.sin() * self.w
            return x + 1

    model = Leaves()
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x)
        (grad,) = torch.autograd.grad(model.h.sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert_close(recording[""].passes[1].param_grads["w"], grad_of(model.w))


def assert_adds_up(call: gradlib.Call, aliases: dict[str, Tensor]) -> None:
    """Hold what all passes gave a call against the gradients of its aliases."""
    for name, alias in aliases.items():
        if not alias.requires_grad:
            continue
        shares = [
            it.grad_input[int(name)] if name.isdigit() else it.param_grads[name]
            for it in call.passes
        ]
        found = [it for it in shares if it is not None]
        assert (alias.grad is None) == (not found), name
        if found:
            assert_close(torch.stack(found).sum(0), grad_of(alias))


@pytest.mark.parametrize("name", LAYERS)
def test_a_pass_that_reaches_calls_through_the_graph_of_another_alone(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), LAYERS[name](), nn.Linear(3, 1))
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        for _ in range(2):  # the graph of the first lives on as the second begins
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            grad.square().sum().backward()
    recording.save(tmp_path / "both.safetensors")
    for it in recording, gradlib.load_recording(tmp_path / "both.safetensors"):
        for number, call in enumerate(it.calls("3")):
            both = [2 * number, 2 * number + 1]
            assert [pass_.backward for pass_ in call.passes] == both
            assert call.passes[1].grad_output == (None,)
            assert call.passes[1].param_grads["bias"] is None
            share, total = (
                getattr(call.passes[1], it)["weight"]
                for it in ("param_grads", "param_grads_total")
            )
            assert_close(share, total)
    parameter: Any = model.get_parameter("3.weight")
    totals = [call.passes[1].param_grads_total for call in recording.calls("3")]
    assert_close(totals[0]["weight"] + totals[1]["weight"], parameter.grad)


def test_a_pass_through_the_gradient_that_one_was_given() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    other, model = nn.Linear(3, 3), Shift()
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(nn.ModuleDict({"other": other, "shift": model})) as recording:
        v = other(torch.randn(4, 3))
        torch.autograd.grad(model(x), x, v, create_graph=True)
        v.square().sum().backward()  # which the shift has nothing to do with
        w = other(torch.randn(4, 3))
        (same,) = torch.autograd.grad(model(w), w, w, create_graph=True)
        same.square().sum().backward()
    for number, call in enumerate(recording.calls("shift")):
        assert [it.backward for it in call.passes] == [2 * number]
        assert notes.GAVE_BACK not in call.note
    assert recording.verify().ok


class Laid(nn.Module):
    """Somebody's hook on what a call has only laid out anew."""

    def __init__(self, lay: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.lay = lay

    def forward(self, x: Tensor) -> Tensor:
        h, w = self.lay(x), self.weight.t()
        for it in (h, w):
            it.register_hook(lambda grad: 3 * grad)
        return h.reshape(-1, 3) @ w


@pytest.mark.parametrize(
    "lay",
    [Tensor.t, lambda x: x.transpose(0, 1), lambda x: x.view(-1), lambda x: x.view(9)],
)
def test_a_hook_on_what_was_only_laid_out_anew(lay: Any) -> None:
    torch.manual_seed(0)
    model, plain = twins(nn.Sequential(nn.Linear(3, 3), Laid(lay)))
    x = torch.randn(3, 3)
    with gradlib.record(model) as recording:
        model(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert_same_bits(recording["1"].param_grads["weight"], plain[1].weight.grad)
    assert recording["1"].grad_input is not None
    assert_same_bits(recording["1"].grad_input, recording["1"].grad_input_total)
    assert recording.verify().ok


def test_double_backward_through_the_parameters() -> None:
    model, plain = twins(Net())
    x = torch.randn(5, 3)

    def second_order(model: nn.Module) -> tuple[Tensor, ...]:
        loss = model(x).square().sum()
        grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        (loss + sum(grad.square().sum() for grad in grads)).backward()
        return tuple(map(grad_of, model.parameters()))

    expected = second_order(plain)
    with gradlib.record(model) as recording:
        found = second_order(model)
    assert_same_bits(found, expected)
    total = recording["first"].passes[1].param_grads_total
    assert_close(total["weight"], expected[0])


# Who calls what


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
        model.insert(0, nn.Linear(3, 3))  # which fires no registration hook
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
    """A layer, and a correction that is learned instead."""

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
    assert len(recording.calls("0")) == 3  # each call has a name and index of its own
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
    """Its first forward sets a hook on a module that it calls then."""

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
    """Return another in place of a module, with its hooks set anew."""
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
        else:  # as torch.ao.quantization does it
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
        for _ in range(20):  # whose memory Python uses again
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
        """Energies, and what pulls at each atom."""

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
        (energy.sum() + forces.pow(2).sum()).backward()
    last = recording[""].passes[-1]
    assert_close(last.grad_input, (x.grad,))
    assert_close(last.grad_input_total, (x.grad,))
    assert "does not require grad" not in recording[""].note


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


# Hooks of other people


def _tripled(_module: nn.Module, args: Any) -> tuple[Tensor]:
    return (args[0] * 3,)


def test_a_pre_hook_that_changes_the_arguments() -> None:
    model = Net()
    model.first.register_forward_pre_hook(_tripled)
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    call = recording["first"]
    # What the caller gave, and what came back to the caller.
    assert_close(call.args, (x.detach(),))
    assert_close(call.grad_input, (x.grad,))
    (grad,) = call.grad_output
    assert_close(call.grad_input[0], 3 * grad @ model.first.weight.detach())
    assert_close(call.param_grads["weight"], model.first.weight.grad)


def _tripled_output(_module: nn.Module, _args: Any, output: Any) -> Tensor:
    return output * 3


def test_a_forward_hook_that_changes_the_output() -> None:
    model = Net()
    model.first.register_forward_hook(_tripled_output)
    x = torch.randn(2, 3, requires_grad=True)
    plain = copy.deepcopy(model)
    changed = plain.first(x)
    (expected,) = torch.autograd.grad(
        loss_of(plain.second(torch.tanh(changed))), changed
    )
    with gradlib.record(model) as recording:
        run(model, x)
    call = recording["first"]
    assert_close(call.output, changed.detach())
    assert_close(call.grad_output, (expected,))
    assert_close(call.param_grads["weight"], model.first.weight.grad)
    assert_close(call.grad_input, (x.grad,))


def test_full_backward_hooks_that_change_gradients() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].register_full_backward_hook(lambda _m, grads, _out: (grads[0] * 2,))
    model[2].register_full_backward_pre_hook(lambda _m, grads: (grads[0] * 3,))
    model, plain = twins(model)
    x = torch.randn(2, 3, requires_grad=True)
    hidden = torch.tanh(plain[0](x))
    hidden.retain_grad()
    loss_of(plain[2](hidden)).backward()
    expected = x.grad
    x.grad = None
    with gradlib.record(model) as recording:
        run(model, x)
    assert_same_bits(x.grad, expected)
    call = recording["2"]
    assert_close(call.grad_input, (hidden.grad,))
    # What entered the module is what its parameters got.
    assert_close(call.grad_output[0].sum(0), model[2].bias.grad)
    assert_close(call.param_grads["bias"], model[2].bias.grad)
    assert_close(recording["1"].grad_output, (hidden.grad,))
    assert_is_vjp(recording["0"], model[0])


@pytest.mark.parametrize("when", ["before", "in the forward", "after"])
def test_a_tensor_hook_on_a_hidden_tensor(when: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if when == "before":
                h.register_hook(lambda grad: grad * 10)
            y = self.b(h)
            if when == "in the forward":
                h.register_hook(lambda grad: grad * 10)
            self.hidden = h
            return y

    model = Model()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        if when == "after":
            model.hidden.register_hook(lambda grad: grad * 10)
        model.hidden.retain_grad()
        loss_of(output).backward()
    # The share of b is what b gave; what enters a is what the hook made of it.
    assert_close(recording["b"].grad_input[0] * 10, model.hidden.grad)
    assert_close(recording["b"].grad_input_total, (model.hidden.grad,))
    assert_close(recording["a"].grad_output, (model.hidden.grad,))
    assert_close(recording["a"].param_grads["bias"], model.a.bias.grad)
    assert_is_vjp(recording["a"], model.a)


@pytest.mark.parametrize("inside", [False, True])
def test_a_tensor_hook_on_an_output(inside: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            if inside:
                y.register_hook(lambda grad: grad * 5)
            return y

    model = Model()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        if not inside:
            output.register_hook(lambda grad: grad * 5)
        loss_of(output).backward()
    (given,) = torch.autograd.grad(
        loss_of(other := output.detach().requires_grad_()), other
    )
    for name in ("", "fc"):
        assert_close(recording[name].grad_output, (5 * given,))
    assert_is_vjp(recording["fc"], model.fc)
    assert_close(recording[""].grad_input, (x.grad,))


@pytest.mark.parametrize("when", ["before the block", "before the call", "after"])
def test_a_tensor_hook_on_a_leaf(when: str) -> None:
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)

    def hook() -> None:
        for leaf in (x, model.first.weight):
            leaf.register_hook(lambda grad: grad * 7)

    if when == "before the block":
        hook()
    with gradlib.record(model) as recording:
        if when == "before the call":
            hook()
        output = model(x)
        if when == "after":
            hook()
        loss_of(output).backward()
    call = recording["first"]
    assert_close(call.grad_input_total, (x.grad,))
    assert_close(call.grad_input[0] * 7, x.grad)
    assert_close(call.param_grads_total["weight"], model.first.weight.grad)
    assert_close(call.param_grads["weight"] * 7, model.first.weight.grad)
    assert_is_vjp(call, model.first)


def test_a_tensor_hook_that_sets_a_gradient_to_zero_in_place() -> None:
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        output.register_hook(lambda grad: grad * 0)
        loss_of(output).backward()
    assert_close(recording["second"].grad_output, (torch.zeros(2, 2),))


def test_a_node_hook_that_changes_what_leaves_the_node() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        output.grad_fn.register_hook(
            lambda grads, _: tuple(grad if grad is None else grad * 4 for grad in grads)
        )
        loss_of(output).backward()
    call = recording[""]
    assert_close(call.param_grads["weight"], model.weight.grad)
    assert_close(call.param_grads["bias"], model.bias.grad)
    assert_close(call.grad_input, (x.grad,))


def test_a_node_hook_that_changes_what_enters_the_node() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        output.retain_grad()  # what torch calls its gradient: before the node's hooks
        output.grad_fn.register_prehook(lambda grads: (grads[0] * 4,))
        loss_of(output).backward()
    call = recording[""]
    assert_close(call.grad_output, (output.grad,))
    assert_close(call.grad_input, (x.grad,))
    assert_close(call.param_grads["weight"], model.weight.grad)
    assert not recording.verify().ok  # the hook's factor is not the module's


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_old_style_backward_hooks_that_change_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].register_backward_hook(
        lambda _m, grads, _out: tuple(grad * 4 for grad in grads)
    )
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    call = recording["2"]
    assert_close(call.param_grads["weight"], model[2].weight.grad)
    assert_close(call.param_grads["bias"], model[2].bias.grad)
    assert_close(call.grad_input, recording["1"].grad_output)
    assert_close(recording["0"].grad_input, (x.grad,))


@pytest.mark.parametrize(
    "kind",
    [
        "pre",
        "forward",
    ],
)
def test_forward_hooks_that_raise(kind: str) -> None:
    model = Net()

    def refuse(*_: object) -> None:
        raise ValueError("no")

    if kind == "pre":
        handle = model.second.register_forward_pre_hook(refuse)
    else:
        handle = model.second.register_forward_hook(refuse)
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        with pytest.raises(ValueError, match="no"):
            model(x)
        handle.remove()
        run(model, x)
    assert recording["second", 0].note == "its forward raised ValueError"
    assert recording["", 0].note == "its forward raised ValueError"
    assert recording["", 1].index == 1
    assert_close(recording["", 1].grad_input, (x.grad,))


def test_a_backward_hook_that_raises() -> None:
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)

    def refuse(_: Tensor) -> None:
        raise ValueError("no")

    def hook_input(_module: nn.Module, args: Any) -> None:
        args[0].register_hook(refuse)

    with gradlib.record(model) as recording:
        first = model(x)
        first.register_hook(refuse)
        with pytest.raises(ValueError, match="no"):
            loss_of(first).backward()
        run(model, x)
    assert_close(recording["", 1].grad_input, (x.grad,))
    for reduced in (False, True):
        model.zero_grad()
        x.grad = None
        reduce = gradlib.tensor_stats if reduced else None
        with gradlib.record(model, reduce=reduce) as recording:
            handle = model.second.register_forward_pre_hook(hook_input)
            output = model(x)
            handle.remove()
            with pytest.raises(ValueError, match="no"):
                loss_of(output).backward()
        assert recording["second"].param_grads["bias"] is not None
        assert recording["first"].passes == ()
        str(recording)


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
    """Return two models that are alike, where they cannot be copied."""
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


# Modes


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


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_frozen_scripted_modules() -> None:
    """They do not even know whether they are in training."""
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
    assert way == "trace" or first == 1  # which calls the model more than once
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


@pytest.mark.cpu
def test_memory_is_freed_behind_the_tensors() -> None:
    """As FSDP does it with weights, and others with activations."""
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


class Narrow(nn.Module):
    """Returns a part of its input, as a view."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:]


@pytest.mark.parametrize("reduce", [None, torch.norm])
@pytest.mark.parametrize("also_before", [False, True])
@pytest.mark.parametrize(
    "views",
    [
        [nn.Flatten(0)],
        [nn.Flatten(0), nn.Unflatten(0, (2, 4))],
        [Narrow()],
        [nn.Unflatten(1, (2, 2)), nn.Flatten(), Narrow(), nn.Flatten(0)],
        [nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (2, 4))), Narrow()],
    ],
    ids=["whole", "twice", "part", "several", "nested"],
)
def test_modules_that_return_views_which_are_overwritten(
    views: list[nn.Module], also_before: bool, reduce: Any
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.views = nn.Linear(3, 4), nn.Sequential(*views)
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor, apart: bool = False) -> Tensor:
            h = self.fc(x)
            self.seen = [h]
            for view in self.views:  # their own values, in the reference
                h = view(h).clone() if apart else view(h)
                self.seen.append(h)
            before = (5 * h).sum() if also_before else 0
            h = h.mul(3) if apart else h.mul_(3)
            return torch.exp(h).sum() + before

    model, plain = twins(Model())
    x = torch.randn(2, 3)
    y = plain(x, apart=True)
    expected = torch.autograd.grad(y, plain.seen)
    with gradlib.record(model, reduce=reduce) as recording:
        model(x).backward()
    if reduce is not None:
        expected = [reduce(it) for it in expected]
    for i in range(len(views)):
        call = recording[f"views.{i}"]
        assert call.note == ""
        assert_close(call.grad_output, (expected[i + 1],))
        given = call.grad_input[0]
        if reduce is None:  # what it shows, and zeros around it
            assert_close(views[i](given), expected[i + 1])
            assert_close(given.norm(), expected[i + 1].norm())
        else:
            assert_close(given, expected[i + 1])
    if reduce is None:
        assert recording.verify().ok


# Threads and processes


def _in_threads(*functions: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,)) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Copies(torch.autograd.Function):
    """Stands for what copies weights to several devices, and adds their gradients."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.each = len(tensors)
        return tuple(it.clone() for _ in range(count) for it in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(sum(grads[i :: ctx.each]) for i in range(ctx.each))


Parallel: Any = nn.DataParallel


class OnTwo(Parallel):
    """DataParallel on two devices that are one."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device = module, [0, 1], 0
        self.src_device_obj = next(module.parameters()).device

    def scatter(self, inputs: Any, *_: object) -> Any:
        return [(part,) for part in inputs[0].chunk(2)], [{}, {}]

    def parallel_apply(self, replicas: Any, inputs: Any, _: object) -> Any:
        found: dict[int, Tensor] = {}

        def call(i: int) -> None:
            found[i] = replicas[i](*inputs[i])

        _in_threads(*(lambda i=i: call(i) for i in range(2)))
        return [found[0], found[1]]

    def gather(self, outputs: Any, _: object) -> Tensor:
        return torch.cat(outputs)


@pytest.mark.cpu
def test_data_parallel_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(tensors: list[Tensor], devices: list[int], *_: bool, **__: bool) -> Any:
        made = Copies.apply(len(devices), *tensors) if tensors else ()
        return [made[: len(made) // 2], made[len(made) // 2 :]]

    torchs = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(torchs, "_broadcast_coalesced_reshape", copied)
    monkeypatch.setattr(torchs, "_get_device_index", lambda it, _: it)
    model: Any = OnTwo(Net())
    x: Any = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    calls = recording.calls("module.first")
    assert len(calls) == 2
    for name, parameter in model.module.first.named_parameters():
        assert_close(sum(it.param_grads[name] for it in calls), parameter.grad)
    given = sorted((it.grad_input[0] for it in calls), key=torch.sum)
    assert_close(given, sorted(x.grad.chunk(2), key=torch.sum))
    assert_close(recording[""].grad_input[0], x.grad)
    assert {call.forward for call in recording} == {0}
    assert recording.verify().ok


@pytest.mark.cpu
def test_two_threads_run_one_model() -> None:
    model = Net()
    inputs = [torch.randn(2, 3, requires_grad=True) for _ in range(4)]
    with gradlib.record(model) as recording:
        _in_threads(*(lambda x=x: run(model, x) for x in inputs))
    calls = recording.calls("")
    assert sorted(call.index for call in calls) == [0, 1, 2, 3]
    for x in inputs:
        (call,) = (call for call in calls if torch.equal(call.args[0], x))
        assert_close(call.grad_input, (x.grad,))
    for name, parameter in model.first.named_parameters():
        shares = [call.param_grads[name] for call in recording.calls("first")]
        assert_close(sum(shares), parameter.grad)


@pytest.mark.cpu
def test_two_threads_run_two_models() -> None:
    model: Any = nn.ModuleList([Net(), Net()])
    inputs = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    with gradlib.record(model) as recording:
        _in_threads(*(lambda i=i: run(model[i], inputs[i]) for i in range(2)))
    for i in range(2):
        call = recording[f"{i}.first"]
        assert_close(call.grad_input, (inputs[i].grad,))
        assert_close(call.param_grads["weight"], model[i].first.weight.grad)
        assert call.forward == recording[str(i)].forward


def test_a_forward_here_and_its_backward_there() -> None:
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        loss = loss_of(model(x))
        _in_threads(loss.backward)
    assert_close(recording["first"].grad_input, (x.grad,))


class Branches(nn.Module):
    """Computes two branches, each in a thread of its own, or one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 3)
        self.right = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.scale = nn.Parameter(torch.randn(3))
        self.pool: Any = None

    def forward(self, x: Tensor) -> Tensor:
        def branch(part: nn.Module) -> Tensor:
            return torch.sin(part(x * self.scale) * self.scale)

        parts = (self.left, self.right)
        done = self.pool.map(branch, parts) if self.pool else map(branch, parts)
        return sum(done, 2 * x)


class Threaded(nn.Module):
    """Has a module in the middle that may use threads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(3, 3), Branches()
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


@pytest.mark.cpu
@pytest.mark.parametrize("nodes", [0, 300])
def test_threads_compute_parts_of_a_call(nodes: int) -> None:
    """Each thread counts the nodes of the graph for itself: here few, or many."""

    def work() -> None:
        x = torch.ones(1, requires_grad=True)
        for _ in range(nodes):
            x = 2 * x

    model, plain = twins(Threaded())
    x: Any = torch.randn(4, 3, requires_grad=True)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
        model.middle.pool = pool
        with gradlib.record(model) as recording, gradlib.record(plain) as expected:
            for _ in range(2):
                run(model, x)
                run(plain, x)
        assert recording.verify().ok
    fields = ("forward", "grad_input", "grad_input_total", "grad_output")
    fields += ("param_grads", "param_grads_total")
    for name, _ in model.named_modules():
        pairs = zip(recording.calls(name), expected.calls(name), strict=True)
        for ours, theirs in pairs:
            for field in fields:
                found, wanted = getattr(ours, field), getattr(theirs, field)
                assert_close(found, wanted)
    assert recording.compare(expected).first is None


def test_two_threads_with_threads_of_their_own() -> None:
    """Which of the two a thread works for is not known, but every share is right."""
    model = Threaded()
    inputs = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    meet, has_met = threading.Barrier(2), threading.local()

    def wait(*_: object) -> None:
        if not hasattr(has_met, "done"):
            has_met.done = True
            meet.wait(10)

    model.middle.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool, gradlib.record(model) as recording:
        model.middle.pool = pool
        _in_threads(*(lambda x=x: run(model, x) for x in inputs))
    for x in inputs:
        (call,) = (it for it in recording.calls("") if torch.equal(it.args[0], x))
        assert_close(call.grad_input[0], x.grad)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            shares = [call.param_grads[key] for call in recording.calls(name)]
            assert_close(sum(shares), parameter.grad)


@pytest.mark.cpu
def test_a_forward_begins_while_a_pass_runs_in_another_thread() -> None:
    """What a pass is still to add to is not reduced yet."""
    in_the_middle, may_go_on = threading.Event(), threading.Event()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(*given: Any) -> Tensor:
            return given[1].clone()

        @staticmethod
        def backward(*given: Any) -> Tensor:  # pyright: ignore (it has no names)
            in_the_middle.set()
            may_go_on.wait(10)
            return given[1]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale
            return Waits.apply(y) + y * self.scale

    def another() -> None:
        in_the_middle.wait(10)
        with torch.no_grad():
            model(x)
        may_go_on.set()

    model: Any = Twice()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model, reduce=torch.norm) as recording:
        _in_threads(lambda: run(model, x), another)
    call = next(call for call in recording if call.passes)
    expected = model.scale.grad.norm()
    assert_close(call.param_grads["scale"], expected)
    assert_close(call.param_grads_total["scale"], expected)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["plain", "unused", "static"],
)
def test_distributed_data_parallel(inner: bool, options: dict[str, Any]) -> None:
    model, plain = twins(Net())
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    with gradlib.record(model if inner else ddp) as recording:
        for _ in range(3):
            x = torch.randn(2, 3)
            run(ddp, x)
            run(plain, x)
    assert_close(grads_of(model), grads_of(plain))
    prefix = "" if inner else "module."
    calls = recording.calls(prefix + "first")
    assert len(calls) == 3
    weight = sum(call.param_grads["weight"] for call in calls)
    assert_close(weight, plain.first.weight.grad)
    for call in calls:
        assert_close(call.grad_output[0].sum(0), call.param_grads["bias"])
        assert_close(call.param_grads_total["bias"], call.param_grads["bias"])


@pytest.mark.usefixtures("one_process")
def test_what_talks_to_other_processes_is_not_replayed() -> None:
    ddp = nn.parallel.DistributedDataParallel(Net())
    with gradlib.record(ddp) as recording:
        run(ddp, torch.randn(2, 3))
    with pytest.raises(gradlib.CannotReplayError, match="module that it wraps") as told:
        recording[""].replay()
    assert "DistributedDataParallel" in str(told.value)
    replayed = recording["module"].replay()
    assert_close(replayed.grad_output, recording["module"].grad_output)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("parts", ["", "first second", "first"])
def test_fully_sharded_data_parallel(parts: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, plain = twins(Net())
    plain.first.bias.requires_grad_(False)
    model.first.bias.requires_grad_(False)
    for part in (*map(model.get_submodule, parts.split()), model):
        fully_shard(part)
    inputs = [torch.randn(2, 3, requires_grad=True) for _ in range(4)]
    with gradlib.record(model) as recording:
        for a, b in (inputs[:2], inputs[2:]):
            loss_of(model(a) + model(b)).backward()
            loss_of(plain(a) + plain(b)).backward()
    for name in ("first", "second"):
        calls = recording.calls(name)
        own = dict(getattr(plain, name).named_parameters())
        for key in ("weight", "bias"):
            grads = [call.param_grads[key] for call in calls]
            found = None if grads[0] is None else sum(grads)
            assert_close(found, own[key].grad)
            now = getattr(getattr(model, name), key).grad
            assert_close(None if now is None else now.full_tensor(), own[key].grad)
        assert calls[0].note == ("bias does not require grad" * (name == "first"))
    with pytest.raises(gradlib.CannotReplayError, match="FSDP has sharded"):
        recording.verify()


@pytest.fixture
def collected() -> Iterator[None]:
    """Collect what a test leaves, of which older releases of torch may warn."""
    yield
    gc.collect()


@pytest.mark.cpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="it takes the GPU then")
@pytest.mark.usefixtures("one_process", "collected")
@pytest.mark.filterwarnings("ignore")  # torch's own: this FSDP is the older one
@pytest.mark.parametrize("parts", ["", "first second", "first"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_older_fully_sharded_data_parallel(
    parts: str, use_orig_params: bool
) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def sharded(part: nn.Module) -> nn.Module:
        on = torch.device("cpu")
        return FullyShardedDataParallel(
            part, use_orig_params=use_orig_params, device_id=on
        )

    model, plain = twins(Net())
    for name in parts.split():
        setattr(model, name, sharded(getattr(model, name)))
    model = sharded(model)
    a, b = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    with gradlib.record(model) as recording:
        for _ in range(2):
            loss_of(model(a) + 3 * model(b)).backward()
    for _ in range(2):
        loss_of(plain(a) + 3 * plain(b)).backward()
    for name in ("first", "second"):
        path = f"_fsdp_wrapped_module.{name}"
        path += "._fsdp_wrapped_module" * (name in parts)
        calls = recording.calls(path)
        assert [call.note for call in calls] == [""] * 4
        for key, parameter in getattr(plain, name).named_parameters():
            assert_close(sum(call.param_grads[key] for call in calls), parameter.grad)
            for call in calls:
                assert_close(call.grad_output[0].sum(0), call.param_grads["bias"])
    for call in recording:
        assert not {"_flat_param"} & set(call.param_grads)
    with pytest.raises(gradlib.CannotReplayError, match="FSDP has sharded"):
        recording.verify()


@pytest.mark.cpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="it takes the GPU then")
def test_data_parallel_without_devices() -> None:
    model = nn.DataParallel(Net())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    assert_close(recording["module.first"].grad_input, (x.grad,))


# Checkpoints


class Block(nn.Module):
    """What checkpoints recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


def assert_shares(found: gradlib.Recording, expected: gradlib.Recording) -> None:
    """Hold every gradient of every pass of two recordings against each other."""
    assert [call.name for call in found] == [call.name for call in expected]
    fields = ("grad_input", "grad_output", "param_grads", "param_grads_total")
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours.passes) == len(theirs.passes)
        for one, other in zip(ours.passes, theirs.passes, strict=True):
            assert one.backward == other.backward
            for field in fields:
                assert_close(
                    getattr(one, field),
                    getattr(other, field),
                    msg=lambda text, field=field, ours=ours: (
                        f"{ours.name} {field}: {text}"
                    ),
                )


@pytest.mark.parametrize(
    "reentrant",
    [
        False,
        True,
    ],
)
def test_a_checkpoint_with_two_backward_passes(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(3, 3), Block()

        def forward(self, x: Tensor, again: bool) -> Tensor:
            h = self.first(x)
            if again:
                return checkpoint(self.block, h, use_reentrant=reentrant)
            return self.block(h)

    model, plain = twins(Model())
    x = torch.randn(2, 3)

    def both(model: nn.Module, again: bool) -> gradlib.Recording:
        with gradlib.record(model) as recording:
            output = model(x, again)
            loss_of(output).backward(retain_graph=True)
            (3 * output).sum().backward()
        return recording

    expected, found = both(plain, again=False), both(model, again=True)
    assert_close(grads_of(model), grads_of(plain))
    assert_shares(found, expected)


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_total_counts_uses_outside_a_checkpoint(
    use_reentrant: bool, reduce: Any
) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.fc = Block(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            y = checkpoint(self.inner, h, use_reentrant=use_reentrant)
            return 3 * h + y  # pyright: ignore (checkpoint is not typed)

    model, x = Residual(), torch.randn(4, 3)
    plain = copy.deepcopy(model)
    h = plain.fc(x)
    h.retain_grad()
    for pass_ in range(2):
        (3 * h + plain.inner(h)).square().sum().backward(retain_graph=pass_ == 0)
    total = grad_of(h) / 2
    with gradlib.record(model, reduce=reduce) as recording:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for name in ("inner", "inner.fc"):
        for pass_ in recording[name].passes:
            found = pass_.grad_input_total[0]
            if reduce is None:
                assert_close(found, total)
            else:
                assert found.norm == pytest.approx(total.norm().item())


@pytest.mark.parametrize(
    "outer",
    [
        False,
        True,
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_nested_checkpoints(outer: bool, inner: bool) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x: Tensor, again: bool) -> Tensor:
            if again:
                return self.b(checkpoint(self.a, x, use_reentrant=inner))
            return self.b(self.a(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.nested = nn.Linear(3, 3), Nested()

        def forward(self, x: Tensor, again: bool) -> Tensor:
            h = self.first(x)
            if again:
                return checkpoint(self.nested, h, again, use_reentrant=outer)
            return self.nested(h, again)

    model, plain = twins(Model())
    x = torch.randn(2, 3)
    with gradlib.record(plain) as expected:
        run(plain, x, again=False)
    with gradlib.record(model) as found:
        run(model, x, again=True)
    assert_close(grads_of(model), grads_of(plain))
    for name in ("first", "nested", "nested.a", "nested.a.fc", "nested.b"):
        for field in ("grad_output", "param_grads", "param_grads_total"):
            assert_close(getattr(found[name], field), getattr(expected[name], field))
        assert found[name].grad_input[0] is None or torch.allclose(
            found[name].grad_input[0], expected[name].grad_input[0]
        )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_passes_that_nested_checkpoints_run_are_one() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def outer(self, x: Tensor) -> Tensor:
            h = self.a(x)
            y: Any = checkpoint(self.b, h, use_reentrant=True)
            return h + y

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.outer, x, use_reentrant=True)

    model, x = Nested(), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        for number in range(2):
            x.grad = None
            model(x).sum().backward()
            for name in ("", "a", "a.fc", "b", "b.fc"):
                (found,) = recording[name, number].passes
                assert found.backward == number
            assert_close(recording["a", number].grad_input_total, (x.grad,))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_parameter_that_a_checkpoint_uses_itself(reentrant: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            y: Any = checkpoint(lambda x: x * self.w, x, use_reentrant=reentrant)
            return y + self.w

    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model := Scaled()) as recording:
        model(x).sum().backward()
    # The guide says what it gets wrong.
    expected = torch.full((3,), 2.0) if reentrant else model.w.grad
    assert_close(recording[""].param_grads["w"], expected)
    assert_close(recording[""].param_grads_total["w"], expected)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_total_of_what_an_inner_checkpoint_is_given(reentrant: bool) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled()

        def outer(self, x: Tensor) -> Any:
            h = x.exp()
            y: Any = checkpoint(self.scaled, h, use_reentrant=reentrant)
            return y + 3 * h

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.outer, x, use_reentrant=True)

    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model := Nested()) as recording:
        model(x).sum().backward()
    # The guide says what it gets wrong.
    expected = torch.full_like(x, 2 if reentrant else 5)
    assert_close(recording["scaled"].grad_input_total, (expected,))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_sequential(reentrant: bool) -> None:
    layers = nn.Sequential(*(Block() for _ in range(4)))
    model, plain = twins(layers)
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(plain) as expected:
        run(plain, x)
    given = x.grad
    x.grad = None
    with gradlib.record(model) as found:
        loss_of(checkpoint_sequential(model, 2, x, use_reentrant=reentrant)).backward()
    assert_close(x.grad, given)
    for i in range(4):
        for name in (f"{i}", f"{i}.fc"):
            assert len(found.calls(name)) == 1
            for field in ("grad_input", "grad_output", "param_grads"):
                assert_close(
                    getattr(found[name], field), getattr(expected[name], field)
                )


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_a_module_called_twice(reentrant: bool) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor, again: bool) -> Tensor:
            if again:
                return checkpoint(self.block, x, use_reentrant=reentrant)
            return self.block(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Linear(3, 3), Half()

        def forward(self, x: Tensor, again: bool) -> Tensor:
            h = self.first(x)
            return self.part(self.part(h, again), again)

    model, plain = twins(Model())
    x = torch.randn(2, 3)
    with gradlib.record(plain) as expected:
        for _ in range(2):
            run(plain, x, again=False)
    with gradlib.record(model) as found:
        for _ in range(2):
            run(model, x, again=True)
    assert_close(grads_of(model), grads_of(plain))
    assert [call.name for call in found] == [call.name for call in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for field in ("grad_output", "param_grads", "param_grads_total"):
            if ours.name not in ("", "part"):
                assert_close(getattr(ours, field), getattr(theirs, field))


@pytest.mark.parametrize(
    "reentrant",
    [
        False,
        True,
    ],
)
def test_a_module_that_checkpoints_its_child(reentrant: bool) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Block()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.child, self.scale * x, use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(3, 3), Parent())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    call = recording["1"]
    assert call.note == ""
    assert_close(call.param_grads["scale"], model[1].scale.grad)
    assert_close(call.grad_input, recording["0"].grad_output)


@pytest.mark.parametrize(
    "order", [(0, 1), pytest.param((1, 0), id="last first"), (0,), (1,)]
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_same_inputs(
    reentrant: bool, order: tuple[int, ...]
) -> None:
    model = nn.Sequential(Block(), nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        outputs = [checkpoint(model, x, use_reentrant=reentrant) for _ in range(2)]
        for i in order:
            (outputs[i] * (i + 1)).sum().backward()
    for i in range(2):
        call = recording["1", i]
        assert len(call.passes) == (i in order)
        if i in order:
            assert_close(call.grad_output, (torch.full((2, 3), i + 1.0),))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_call_says_so_that_a_checkpoint_computed_again(
    reentrant: bool, which: int
) -> None:
    model = nn.Sequential(Block(), nn.Tanh())
    with gradlib.record(model) as recording:
        outputs: list[Any] = [
            checkpoint(
                model,
                torch.randn(size, 3, requires_grad=True),
                use_reentrant=reentrant,
            )
            for size in (2, 4)
        ]
        outputs[which].sum().backward()
    for i in range(2):
        said = notes.RECOMPUTED in recording["1", i].note
        assert said == (i == which)


class Slope(nn.Module):
    """Goes backward through its child in its forward, as a force field does."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Block()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            energy = self.child(x).square().sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return slope + x


def slopes(reentrant: bool) -> tuple[gradlib.Recording, gradlib.Recording, Tensor]:
    """Return the recordings with a checkpoint and without, and the first's output."""
    model, plain = twins(Slope())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(plain) as expected:
        loss_of(plain(x)).backward()
    with gradlib.record(model) as found:
        y: Any = checkpoint(model, x, use_reentrant=reentrant)
        loss_of(y).backward()
    return found, expected, y


def test_a_checkpoint_that_computes_again_inside_of_the_forward() -> None:
    """The inner pass needs values before the call that made them has returned."""
    found, expected, y = slopes(reentrant=False)
    assert_shares(found, expected)
    assert found[""].note == notes.RECOMPUTED
    assert torch.equal(found[""].output, y)


def test_a_pass_inside_of_what_a_reentrant_checkpoint_computes_again() -> None:
    found, expected, _ = slopes(reentrant=True)
    assert [call.name for call in found] == [call.name for call in expected]
    for name in ("child", "child.fc"):
        inner, outer = expected[name].passes
        first, again, last = found[name].passes
        for ours, theirs in ((first, inner), (again, inner), (last, outer)):
            for field in ("grad_input", "grad_output", "param_grads"):
                assert_close(getattr(ours, field), getattr(theirs, field))
    totals = [it["child"].passes[-1].grad_input_total for it in (found, expected)]
    assert_close(*totals)
    assert_close(found[""].grad_input, expected[""].grad_input)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_vmap_that_a_checkpoint_computes_again_is_no_new_call(
    reentrant: bool,
) -> None:
    model = Block()
    with gradlib.record(model) as recording:
        x = torch.randn(2, 3, requires_grad=True)
        y: Any = checkpoint(torch.vmap(model), x, use_reentrant=reentrant)
        y.sum().backward()
    assert [call.name for call in recording] == ["", "fc"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_last_of_calls_with_the_same_inputs_is_computed_again(
    reentrant: bool,
) -> None:
    model = nn.Sequential(Block(), nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        checkpoint(model, x, use_reentrant=reentrant)
        last: Any = checkpoint(model, x, use_reentrant=reentrant)
        last.sum().backward()
    said = [notes.RECOMPUTED in call.note for call in recording.calls("1")]
    assert said == [False, True]


# Values


def test_an_output_that_is_a_view_and_overwritten() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.flat = nn.Linear(3, 4), nn.Flatten()

        def forward(self, x: Tensor) -> Tensor:
            h = self.flat(self.fc(x))
            h.mul_(3)
            return h

    model = Model()
    x = torch.randn(2, 5, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = run(model, x)
    weights = torch.arange(1.0, 41).view(2, 20)
    assert_close(recording[""].output, output.detach())
    assert_close(recording[""].grad_output, (weights,))
    assert_close(recording["flat"].output, output.detach() / 3)
    assert_close(recording["flat"].grad_output, (3 * weights,))
    assert_close(recording["fc"].grad_output, (3 * weights.view(2, 5, 4),))
    assert_close(recording["fc"].grad_input, (x.grad,))


@pytest.mark.parametrize("reduce", [None, torch.norm])
@pytest.mark.parametrize("identities", [1, 2])
def test_a_view_that_modules_hand_on_and_one_overwrites(
    identities: int, reduce: Callable[[Tensor], Any] | None
) -> None:
    hand_on = [nn.Dropout(0.0) for _ in range(identities)]
    model = nn.Sequential(
        nn.Linear(3, 4), *hand_on, nn.ReLU(inplace=True), nn.Linear(4, 2)
    )
    x = torch.randn(2, 5, 3)  # so the first output is a view of a matrix
    y = model[0](x).detach().requires_grad_()
    weights = torch.arange(1.0, 21).view(2, 5, 2)
    (model[-1](F.relu(y)) * weights).sum().backward()
    with gradlib.record(model, reduce=reduce) as recording:
        (model(x) * weights).sum().backward()
    assert y.grad is not None
    expected = y.grad if reduce is None else reduce(y.grad)
    for number in range(identities + 1):
        assert_close(recording[str(number)].grad_output, (expected,))
    for number in range(1, identities + 1):
        assert_close(recording[str(number)].grad_input, (expected,))
        assert_close(recording[str(number)].grad_input_total, (expected,))


SHOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "real numbers": lambda z: torch.view_as_real(z)[:, 1:],
    "complex numbers": lambda z: torch.view_as_complex(torch.view_as_real(z) * 1),
    "the real part": lambda z: z.real[1:],
    "the imaginary part": lambda z: z.imag,
    "the conjugate": lambda z: z.conj().T,
    "the imaginary part of that": lambda z: z.conj().imag[:, :1],
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_complex_output_that_is_a_view_and_overwritten(name: str) -> None:
    class Show(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return SHOWN[name](z * 1)

    show, z = Show(), torch.randn(2, 3, dtype=torch.complex64, requires_grad=True)

    def loss(y: Tensor) -> Tensor:
        y = y * torch.arange(1, y.numel() + 1).view(y.shape)
        return y.sum().real + 2 * y.abs().sum()

    y = show(z)
    y.retain_grad()
    loss(y * (3 + 2 * (y.is_complex() and 1j))).backward()
    expected, z.grad = z.grad, None
    with gradlib.record(show) as recording:
        overwritten = show(z)
        overwritten.mul_(3 + 2 * (y.is_complex() and 1j))
        loss(overwritten).backward()
    assert y.grad is not None
    assert_close(recording[""].grad_output, (y.grad,))
    assert_close(recording[""].grad_input, (expected,))
    assert recording.verify().ok


class Left(nn.Module):
    """Returns a view of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2]


def test_a_view_whose_base_is_overwritten_later() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = Left()

        def forward(self, x: Tensor) -> Tensor:
            h = 1 * x
            used = 2 * self.left(h)
            h.mul_(10)
            return torch.cat([used, h], dim=1)

    x = torch.ones(1, 3, requires_grad=True)
    with gradlib.record(model := Model()) as recording:
        model(x).sum().backward()
    call = recording["left"]
    assert_close(call.grad_output, (torch.full((1, 2), 2.0),))
    assert_close(call.grad_input, (torch.tensor([[2.0, 2.0, 0.0]]),))
    assert_close(call.grad_input_total, (torch.tensor([[12.0, 12.0, 10.0]]),))


def test_a_view_that_is_used_and_then_overwritten() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = Left()

        def forward(self, x: Tensor) -> Tensor:
            h = 1 * x
            part = self.left(h)
            used = 2 * part
            part.mul_(10)
            return torch.cat([used, part, 100 * h], dim=1)

    x = torch.ones(1, 3, requires_grad=True)
    with gradlib.record(model := Model()) as recording:
        model(x).sum().backward()
    # 2 from the first use, 10 times (1 + 100) from what overwrote it.
    assert_close(recording["left"].grad_output, (torch.full((1, 2), 1012.0),))


class Overwrites(nn.Module):
    """Overwrites a view that a module inside returned, and uses its base too."""

    def __init__(self, times: int, early: float) -> None:
        super().__init__()
        self.left, self.times, self.early = Left(), times, early

    def forward(self, x: Tensor) -> Tensor:
        h = 1 * x
        part = self.left(h)
        before = torch.cat([7 * h, self.early * part], dim=1)
        for _ in range(self.times):
            part.mul_(10)
        return torch.cat([before, part], dim=1)


@pytest.mark.parametrize(
    ("times", "early", "grad"), [(1, 0.0, 10.0), (2, 0.0, 100.0), (2, 3.0, 103.0)]
)
def test_a_view_overwritten_beside_another_use_of_its_base(
    times: int, early: float, grad: float
) -> None:
    x = torch.ones(1, 3, requires_grad=True)
    with gradlib.record(model := Overwrites(times, early)) as recording:
        model(x).sum().backward()
    assert_close(recording["left"].grad_output, (torch.full((1, 2), grad),))


def test_statistics_of_a_view_that_is_overwritten() -> None:
    x = torch.ones(1, 3, requires_grad=True)
    model = Overwrites(2, 3.0)
    with gradlib.record(model, reduce=torch.norm) as recording:
        model(x).sum().backward()
    expected = torch.full((1, 2), 103.0).norm()
    assert_close(recording["left"].grad_output, (expected,))


@pytest.mark.cpu
@pytest.mark.parametrize("way", ["data", "set data", "numpy"])
def test_a_hidden_tensor_changed_behind_the_back_of_torch(way: str) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if way == "data":
                h.data.mul_(2)
            elif way == "set data":
                h.data = h.data * 2
            else:
                h.detach().numpy()[...] *= 2
            return self.second(h)

    model = Model()
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        run(model, x)
    before = F.linear(x, model.first.weight, model.first.bias).detach()
    assert_close(recording["first"].output, before)
    assert_close(recording["second"].args, (2 * before,))
    assert_is_vjp(recording["second"], model.second)


@pytest.mark.cpu
def test_a_hidden_tensor_with_other_data_is_summed_up_anew() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h.data = h.data * 2
            return self.second(h)

    model, x = Model(), torch.randn(2, 3)
    with gradlib.record(model, reduce=lambda it: it.sum().item()) as recording:
        run(model, x)
    before = F.linear(x, model.first.weight, model.first.bias).sum().item()
    assert_close(recording["first"].output, before)
    assert_close(recording["second"].args, (2 * before,))


class Chained(nn.Module):
    """Two outputs, one made of the other."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = 2 * x
        return h, 3 * h


@pytest.mark.parametrize(
    ("weights", "grads"),
    [((0, 1), (None, 1.0)), ((1, 0), (1.0, None)), ((5, 1), (5, 1))],
)
@pytest.mark.parametrize("reduce", [None, Tensor.clone])
def test_an_output_that_only_another_output_is_made_of(
    weights: tuple[int, int], grads: tuple[float | None, ...], reduce: Any
) -> None:
    """What the call itself gives to its output is no gradient of that output's."""
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model := Chained(), reduce=reduce) as recording:
        outputs = model(x)
        used = zip(weights, outputs, strict=True)
        torch.stack([it * out.sum() for it, out in used if it]).sum().backward()
    call = recording[""]
    found = [None if it is None else it.mean().item() for it in call.grad_output]
    assert found == [*grads]
    for place, grad in enumerate(grads):
        said = f"backward pass 0 gave output[{place}] no gradient"
        assert (said in call.note) == (grad is None)
    if reduce is None:
        assert recording.verify().ok


def test_several_inputs_that_a_call_returns() -> None:
    class Passes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, x * y, y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.passes = Passes()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b, c = self.passes(2 * x, 3 * y)
            return 5 * a + b + 7 * c

    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model := Model()) as recording:
        model(x, y).sum().backward()
    call = recording["passes"]
    assert_close(call.grad_input, ((5 + 3 * y).detach(), (7 + 2 * x).detach()))
    assert [it[0, 0].item() for it in call.grad_output] == [5, 1, 7]
    for place in range(2):
        assert f"it returned args[{place}] as it was" in call.note
    assert recording.verify().ok


@pytest.mark.parametrize(
    "change", [lambda it: it[:2], Tensor.t], ids=["a part", "transposed"]
)
def test_a_hidden_tensor_that_shows_its_memory_in_another_way(
    change: Callable[[Tensor], Tensor],
) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).detach()
            self.second(h)
            h.data = change(h.data)
            return self.second(h)

    model = Model()
    model.first = nn.Linear(3, 3)
    model.second = nn.Linear(3, 2)
    x = torch.randn(3, 3)
    with gradlib.record(model) as recording:
        run(model, x)
    before = model.first(x).detach()
    assert_close(recording["second", 0].args, (before,))
    assert_close(recording["second", 1].args, (change(before),))
    assert_is_vjp(recording["second", 1], model.second)


def test_a_tensor_detached_in_place() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).detach_().requires_grad_())

    model = Model()
    with gradlib.record(model) as recording:
        run(model, torch.randn(2, 3))
    call = recording["second"]
    (grad,) = call.grad_output
    assert_close(call.grad_input, (grad @ model.second.weight.detach(),))
    assert recording["first"].passes == ()


def test_a_tensor_detached_in_place_after_its_use() -> None:
    class Model(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.first, self.twice = nn.Linear(3, 3), Powers(1)
            self.second, self.inplace = nn.Linear(3, 3), inplace

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            y = self.twice(h)
            return y + self.second(h.detach_() if self.inplace else h.detach())

    x, weights = torch.randn(2, 3), copy.deepcopy(Model(inplace=True).state_dict())
    recordings: list[gradlib.Recording] = []
    for inplace in True, False:
        model = Model(inplace)
        model.load_state_dict(weights)
        with gradlib.record(model) as recording:
            model(x).square().sum().backward()
        recordings.append(recording)
    for call, expected in zip(*recordings, strict=True):
        assert call.note == expected.note
        for field in ("grad_input", "grad_input_total", "grad_output"):
            assert_same_bits(getattr(call, field), getattr(expected, field))


class Recurrent(nn.Module):
    """A cell, whose second output is its next state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(x) + state / 2
        return state.sum(1), state


@pytest.mark.parametrize("each", [False, True])
def test_a_state_detached_in_place_between_forwards(each: bool) -> None:
    """It keeps the hooks of what it was, and is another tensor since."""
    model, steps = Recurrent(), torch.randn(3, 2, 3)

    def run(cut: Callable[[Tensor], Tensor]) -> gradlib.Recording:
        state, losses = torch.zeros(2, 3), []
        with gradlib.record(model) as recording:
            for x in steps:
                y, state = model(x, state)
                losses.append(y.square().sum())
                if each:
                    losses[-1].backward()
                state = cut(state)
            if not each:
                torch.stack(losses).sum().backward()
        return recording

    inplace = run(lambda state: state.detach_().requires_grad_())
    apart = run(lambda state: state.detach().requires_grad_())
    for call, expected in zip(inplace, apart, strict=True):
        assert call.note == expected.note
        assert len(call.passes) == len(expected.passes) == 1
        for field in ("grad_input", "grad_input_total", "grad_output"):
            assert_same_bits(getattr(call, field), getattr(expected, field))
    assert inplace.verify().ok


@pytest.mark.parametrize("hooked", [False, True])
def test_the_gradient_of_a_hidden_tensor_is_asked_for(hooked: bool) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.first(x)
            return self.second(self.hidden)

    model = Model()
    with gradlib.record(model) as recording:
        output = model(torch.randn(2, 3))
        if hooked:
            model.hidden.register_hook(lambda grad: 10 * grad)
        (grad,) = torch.autograd.grad(loss_of(output), model.hidden)
    assert_close(recording["second"].grad_input_total, (grad,))
    assert_close(recording["first"].grad_output, (grad,))


def test_a_new_call_inside_a_backward_pass() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h.register_hook(lambda grad: self.first(5 * x).detach()[:, :4] + grad)
            return self.second(h)

    model = Model()
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        run(model, x)
    assert [call.index for call in recording.calls("first")] == [0, 1]
    assert_close(recording["first", 1].args, (5 * x,))
    assert recording["first", 0].note == "args[0] does not require grad"


def test_outputs_changed_in_place_without_gradients() -> None:
    model = Net()
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        output = model(x)
        expected = output.detach().clone()
        loss = loss_of(output)
        loss.backward()
        with torch.no_grad():
            output.mul_(0).add_(1)
            for parameter in model.parameters():
                parameter.sub_(grad_of(parameter))
                grad_of(parameter).zero_()
    assert_close(recording[""].output, expected)
    assert_close(recording["second"].output, expected)
    assert recording["first"].param_grads["weight"].abs().sum() > 0
    assert recording["first"].param_grads_total["weight"].abs().sum() > 0


def test_an_argument_that_the_model_overwrites() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.add_(1))

    model, x = Model(), torch.randn(2, 3)
    before = x.clone()
    with gradlib.record(model) as recording:
        run(model, x)
    assert_close(recording[""].args, (before,))
    assert_close(recording["fc"].args, (before + 1,))


def test_an_optimizer_step_between_rounds() -> None:
    model, plain = twins(Net())
    x = torch.randn(2, 3)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    expected: list[dict[str, Tensor]] = []
    for _ in range(3):
        optimizers[1].zero_grad()
        run(plain, x)
        expected.append({k: v.clone() for k, v in grads_of(plain).items()})
        optimizers[1].step()
    with gradlib.record(model) as recording:
        for _ in range(3):
            optimizers[0].zero_grad(set_to_none=False)
            run(model, x)
            optimizers[0].step()
    for forward, grads in zip(recording.forwards, expected, strict=True):
        call = next(call for call in forward if call.name == "first")
        assert_close(call.param_grads["weight"], grads["first.weight"])
        assert_close(call.param_grads_total["weight"], grads["first.weight"])
    assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))


class Tagged(Tensor):
    """A tensor with a class of its own."""


def test_a_subclass_of_tensor() -> None:
    model = Net()
    x = torch.randn(2, 3).as_subclass(Tagged).requires_grad_()
    plain = copy.deepcopy(model)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    with gradlib.record(model) as recording:
        output = model(x)
        output.sum().backward()
    assert type(output) is Tagged
    assert_close(x.grad, expected)
    call = recording["first"]
    assert_close(call.grad_input, (x.grad,))
    assert type(call.args[0]) is Tagged
    assert_close(call.param_grads["weight"], model.first.weight.grad)


def test_a_tensor_with_torch_function() -> None:
    seen: list[str] = []

    class Watching(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    x = torch.randn(2, 3).as_subclass(Watching).requires_grad_()
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert_close(recording["0"].grad_input[0].as_subclass(Tensor), x.grad)


def test_a_backward_that_gives_nothing() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> None:
            assert ctx.needs_input_grad == (True,)
            assert len(grads) == 1

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Nothing.apply(x)

    model, x = nn.Sequential(Net(), Last()), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    assert x.grad is None
    assert recording["1"].grad_input == (None,)
    assert recording["1"].note == "backward pass 0 gave args[0] no gradient"
    assert recording["0.first"].note == "no backward pass reached it inside the block"


def test_gradients_that_are_nan() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0).sqrt() * 0

    model = nn.Sequential(nn.Linear(3, 2), Root())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert recording["0"].grad_output[0].isnan().all()
    assert_same_bits(recording["0"].param_grads["weight"], model[0].weight.grad)
    assert_same_bits(recording["0"].grad_input, (x.grad,))
    assert "nan" in str(recording)


def test_a_batch_of_none() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(0, 3, requires_grad=True)
    for reduce in (None, gradlib.tensor_stats):
        model.zero_grad()
        with gradlib.record(model, reduce=reduce) as recording:
            model(x).sum().backward()
        call = recording["0"]
        assert call.grad_input[0].shape == (0, 3)
        assert call.param_grads["weight"].shape == (4, 3)
        str(recording)
        str(call)


def test_outputs_without_any_tensor() -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor, what: Any) -> Any:
            assert x.requires_grad
            return what

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = Empty()

        def forward(self, x: Tensor) -> Tensor:
            for what in ((), [], {}, None, "text", 3, ((), [()])):
                assert self.empty(x, what) == what
            return 2 * x

    x = torch.ones(2, requires_grad=True)
    with gradlib.record(model := Model()) as recording:
        model(x).sum().backward()
    assert [call.output for call in recording.calls("empty")] == [
        (), [], {}, None, "text", 3, ((), [()]),
    ]  # fmt: skip
    for call in recording.calls("empty"):
        assert call.note == "it returned no tensor that requires grad"
        assert call.grad_output is None
    assert_close(recording[""].grad_input, (x.grad,))
    str(recording)


class CopiedByHand(Net):
    """Hands its hooks on to a copy, as some classes do."""

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


@pytest.mark.filterwarnings("error")
def test_tensors_are_pickled_inside_the_block_without_a_warning() -> None:
    model, x = Net(), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model):
        output = model(x)
        torch.save([x, output, *model.parameters()], io.BytesIO())


def print_nothing(*_: object) -> None:
    """Be a hook that can be pickled."""


def all_hooks_of(model: nn.Module) -> list[dict[Any, Any]]:
    """Return every dict of a model that has to do with hooks."""
    return [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if "_hooks" in name
    ]


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


# Memory


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


class Force(nn.Module):
    """Asks for a gradient before its own forward has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        energy = self.energy(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


def test_a_backward_pass_inside_a_forward() -> None:
    torch.manual_seed(0)
    model, alone = twins(Force())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    first, second = recording["energy.0"].passes
    assert_same_bits(first.grad_input[0], alone(x))
    run(alone, x)
    assert second.param_grads_total is not None
    total = second.param_grads_total["weight"]
    assert_same_bits(total, grad_of(alone.energy[0].weight))
    assert first.param_grads == {"weight": None, "bias": None}


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


class Asks(nn.Module):
    """Asks for a pointer to the memory of its input, as some convolutions do."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.data_ptr()
        return 2 * x


def test_memory_that_moves_when_somebody_asks_for_a_pointer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right = nn.Linear(3, 3), Asks(), Asks()

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.left(h) + self.right(h)

    model = Model()
    with gradlib.record(model) as recording:
        run(model, torch.ones(2, 3))
    both = 2 * grad_like((2, 3))
    assert_close(recording["left"].grad_input, (both,))
    assert_close(recording["right"].grad_input_total, (2 * both,))
    assert recording["left"].args[0].equal(recording["right"].args[0])


def grad_like(shape: tuple[int, ...]) -> Tensor:
    """Return what `loss_of` gives to an output of a shape."""
    output = torch.ones(shape, requires_grad=True)
    loss_of(output).backward()
    return grad_of(output)


def test_convolutions_that_share_their_input() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()
            self.a, self.b = nn.Conv2d(16, 64, 1), nn.Conv2d(16, 64, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(x)
            return self.a(x) + self.b(x)

    torch.manual_seed(0)
    model, alone = twins(Model())
    x = torch.randn(1, 16, 15, 15, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    hidden = alone.act(x).detach().requires_grad_()
    run(nn.Identity(), alone.a(hidden) + alone.b(hidden))
    assert_same_bits(recording["act"].grad_output[0], hidden.grad)
    assert recording.verify().ok


class Sized(nn.Module):
    """Gives its buffer a size when it first sees data, as observers do."""

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


@pytest.mark.parametrize("shared", [True, False])
def test_tied_weights_written_to_without_a_new_version(shared: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, i: Tensor) -> Tensor:
            return self.head(self.embedding(i))

    torch.manual_seed(0)
    model = Tied()
    if shared:  # then torch cannot share it with what is kept, as on a GPU
        model.share_memory()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    with gradlib.record(model) as recording:
        for _ in range(3):
            run(model, torch.arange(5))
            optimizer.step()
    assert recording.verify().ok


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout: torch.layout) -> None:
    model, parts = nn.Linear(4, 3), [torch.ones(2, 4), torch.ones(3, 4)]
    x = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        torch.nested.to_padded_tensor(output, 0.0).sum().backward()
    (call,) = recording
    assert_close(
        call.param_grads, {"weight": torch.full((3, 4), 5.0)} | grads_of(model)
    )
    assert "2 nested" in str(recording) or "j" in str(recording)
    assert gradlib.tensor_stats(output).zeros == 0


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_a_batched_backward_pass_is_left_out(reduce: Any) -> None:
    model, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=True)
    vectors = torch.eye(15).view(15, 5, 3)
    with gradlib.record(model, reduce=reduce) as recording:
        output = model(x)
        (rows,) = torch.autograd.grad(
            output, x, vectors, is_grads_batched=True, retain_graph=True
        )
        output.sum().backward()
    assert rows.shape == (15, 5, 4)
    (call,) = recording
    assert call.passes[0].backward == 0
    assert len(call.passes) == 1
    assert call.note == "a backward pass with is_grads_batched is not recorded"
    assert str(recording)


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


@pytest.mark.parametrize(
    ("model", "shape"), [(nn.Conv1d(3, 2, 1), (5, 3, 4)), (nn.LayerNorm(3), (5, 3))]
)
def test_a_pass_through_the_graph_of_another(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, requires_grad=True)
    with gradlib.record(model) as recording:
        (g,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        g.square().sum().backward()
    (call,) = recording
    for field in ("param_grads", "param_grads_total"):
        found = getattr(call.passes[1], field)
        assert_close(found["weight"], grad_of(model.get_parameter("weight")))


def test_passes_over_one_input_belong_to_their_own_calls() -> None:
    model, x = nn.Sequential(nn.Linear(2, 1)), torch.ones(1, 2, requires_grad=True)
    with gradlib.record(model) as recording:
        for _ in range(2):
            (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            g.square().sum().backward()
    found = [[it.backward for it in call.passes] for call in recording.calls("0")]
    assert found == [[0, 1], [2, 3]]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_quantized_tensors(reduce: Any) -> None:
    class Quantizes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.quantize_per_tensor(x, 0.5, 0, torch.qint8)

    with gradlib.record(model := Quantizes(), reduce=reduce) as recording:
        model(torch.tensor([1.0, 2.0, 2.0]))
    kept = recording[""].output
    found = gradlib.tensor_stats(kept) if reduce is None else kept
    assert (found.shape, found.norm, found.dtype) == ((3,), 3, torch.qint8)
    assert recording.to_frame()["output"].tolist() == [3]


def test_what_a_backward_computes_and_the_pass_drops_is_no_share() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, by: Tensor) -> Tensor:
            ctx.save_for_backward(x, by)
            return x * by

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            x, by = ctx.saved_tensors
            return grads[0] * by, (grads[0] * x).sum(0)

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return cast(Any, Scale.apply)(x, self.by)

    model = Scales()
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        y = model(x).sum()
        torch.autograd.grad(y, x, retain_graph=True)
        torch.autograd.grad(y, model.by, retain_graph=True)
        y.backward()
    first, second, third = recording[""].passes
    assert first.param_grads == first.param_grads_total == {"by": None}
    assert second.grad_input == second.grad_input_total == (None,)
    assert_close(third.param_grads["by"], grad_of(model.by))
    assert_close(third.grad_input, (x.grad,))
    assert recording[""].note == (
        "backward pass 0 gave by no gradient; backward pass 1 gave args[0] no gradient"
    )


@pytest.mark.cpu  # no GPU was asked whether it has such tensors
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # they are deprecated
@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_quantized_tensors_with_floating_zero_points(reduce: Any) -> None:
    class Quantizes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scales, zeros = torch.full((3,), 0.5), torch.zeros(3)
            return torch.quantize_per_channel(x, scales, zeros, 1, torch.quint8)

    with gradlib.record(model := Quantizes(), reduce=reduce) as recording:
        output = model(torch.tensor([[1.0, 2.0, 2.0]]))
    kept = recording[""].output
    assert kept is not output
    found = gradlib.tensor_stats(kept) if reduce is None else kept
    assert (found.norm, found.dtype) == (3, torch.quint8)
    if reduce is None:
        assert torch.equal(kept.int_repr(), output.int_repr())
        assert (kept.qscheme(), kept.q_per_channel_axis()) == (output.qscheme(), 1)


@pytest.mark.cpu  # no GPU was asked whether it has such tensors
def test_a_dtype_that_torch_does_not_turn_into_numbers() -> None:
    class Packs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(torch.bits8)

    with gradlib.record(model := Packs()) as recording:
        model(torch.ones(3, dtype=torch.uint8))
    assert "bits8" in str(recording[""].output.dtype)
    assert str(recording).splitlines()[2].split() == [
        *("(root)", "Packs", "[3]", "-", "-", "-")
    ]
    assert "nan" in str(recording[""])


class Attends(nn.Module):
    """Attention of a tensor to itself, maybe behind a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Mixes()
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.reentrant is None:
            return self.inner(h, h, h)
        y: Any = checkpoint(self.inner, h, h, h, use_reentrant=self.reentrant)
        return y


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (self.query(q) @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
@pytest.mark.parametrize("reentrant", [True, False])
def test_one_tensor_in_several_places_of_a_checkpoint(
    reentrant: bool, reduce: Any
) -> None:
    torch.manual_seed(0)
    model = Attends()
    x = torch.randn(2, 5, 4)
    recordings: list[Any] = []
    for model.reentrant in (None, reentrant):
        with gradlib.record(model, reduce=reduce) as recording:
            model(x).square().sum().backward()
        recordings.append(recording)
    plain, found = recordings
    assert plain.compare(found).ok
    if reduce is None:
        assert found.verify().ok
        assert_close(found["inner"].grad_input, plain["inner"].grad_input)
    else:
        given = zip(plain["inner"].grad_input, found["inner"].grad_input, strict=True)
        assert all(abs(a.norm - b.norm) < 1e-5 for a, b in given)


@pytest.mark.parametrize(
    "keep", [["args"], ["output"], ["args", "output"], ["output", "param_grads"]]
)
def test_what_a_checkpoint_computes_again_is_no_new_call(keep: Any) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.a, x, use_reentrant=True))

    model, x = Checkpointed(), torch.ones(3, 2, requires_grad=True)
    with gradlib.record(model, keep=keep) as recording:
        model(x).sum().backward()
    assert [call.name for call in recording] == ["", "a", "b"]
    assert len(recording.forwards) == 1


def test_a_fused_way_that_torch_takes_without_hooks() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x, padding = torch.randn(4, 5, 16), torch.arange(5).expand(4, 5) > 3
    with torch.no_grad():
        fused = layer(x, src_key_padding_mask=padding)
        with gradlib.record(layer):
            recorded = layer(x, src_key_padding_mask=padding)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            plain = layer(x, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(recorded, plain)
    assert_close(recorded[~padding], fused[~padding])

"""Passes through what other passes have made: second derivatives, passes inside."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib
from gradlib.recording import notes

from .truth import Net, Powers, assert_same_bits, grad_of, run, twins


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
    if again and name == "norm at first" and torch.__version__ >= "2.14":
        pytest.skip("this torch has no third derivative of batch norm")
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
    assert notes.GAVE_BACK not in recording["1"].note


def test_a_saved_copy_that_a_first_pass_with_a_graph_leaves_aside() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return x.mul_(w)

    model = Model()
    x, w = (torch.randn(3, requires_grad=True) for _ in range(2))
    with gradlib.record(model) as recording:
        y = model(x * 1, w).exp().sum()
        torch.autograd.grad(y, x, create_graph=True)
        (grad,) = torch.autograd.grad(y, w, create_graph=True)
        grad.square().sum().backward()
    last = recording[""].passes[-1]
    assert_close(last.grad_input, last.grad_input_total)


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


# Where a GPU's thread has numbered the nodes of the first pass, torch itself says that
# the second goes through the graph a second time.
@pytest.mark.cpu
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


def test_a_backward_that_returns_a_copy_which_it_was_given() -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square().sum() / 2

        @staticmethod
        def backward(ctx: Any, *_grads: Tensor) -> Tensor:
            return ctx.saved_tensors[0]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Half.apply(x)

    model, x = Model(), torch.ones(3, requires_grad=True)
    with gradlib.record(model) as recording:
        torch.autograd.grad(model(x.clone()), x, create_graph=True)
    assert recording[""].note == notes.GAVE_BACK


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


@pytest.mark.parametrize("of_input", [True, False])
def test_an_output_behind_the_graph_of_a_batched_pass(of_input: bool) -> None:
    """What comes from one output to another that way is not told apart."""

    class Sine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.fc(x)
            return y, y.sin()

    model, x = Sine(), torch.randn(2, 3, requires_grad=of_input)
    of = x if of_input else model.fc.weight
    with gradlib.record(model) as recording:
        (slope,) = torch.autograd.grad(
            model(x)[1],
            of,
            torch.ones(1, 2, 3),
            is_grads_batched=True,
            create_graph=True,
        )
        slope.square().sum().backward()
    call = recording[""]
    assert call.grad_output[0] is not None  # though nobody has used it outside
    assert notes.SECOND_ORDER.format(0) + notes.BETWEEN_OUTPUTS in call.note
    (skipped,) = [it for it in recording.verify().skipped if it.name == ""]
    assert "the graph of a pass with is_grads_batched" in skipped.reason


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
        "backward pass 0 gave no gradient to by; "
        "backward pass 1 gave no gradient to args[0]"
    )


class Gated(nn.Module):
    """Makes one output of another, and keeps what its backward needs of that."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        return y, (y * x).sin()


@pytest.mark.parametrize("uses", [0.0, 2.0])
def test_what_a_penalty_brings_to_an_output_by_another_is_not_in_its_share(
    uses: float,
) -> None:
    """What the call itself makes of an output is no use of it outside."""
    model, seen = Gated(), list[Tensor]()

    def penalise(x: Tensor, out: Any) -> None:
        first, second = out
        used = uses * first.pow(3).sum() if uses else 0.0
        (slope,) = torch.autograd.grad(second.sin().sum() + used, x, create_graph=True)
        slope.square().sum().backward()

    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        penalise(x, model(x))
    alias, second = model(x)
    if uses:
        alias = alias.clone()  # what others use of it
        alias.register_hook(seen.append)
    penalise(x, (alias, second))
    for call, number in ((recording[""].passes[0], 0), (recording[""].passes[1], 1)):
        got = call.grad_output[0]
        if uses:
            assert_close(got, seen[number])
        else:
            assert got is None

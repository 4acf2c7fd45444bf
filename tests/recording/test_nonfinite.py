"""`first_nonfinite` names where NaN or inf first appeared."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib

NAN, INF = float("nan"), float("inf")


class Applies(nn.Module):
    """A module that applies a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Wrong(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        assert ctx.needs_input_grad[0]
        return grads[0] * NAN


class Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(3, 3), nn.Linear(3, 3)
        self.act = Applies(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.act(self.before(x)))


def net(function: Callable[[Tensor], Tensor] = torch.tanh) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), Block(function), nn.Linear(3, 2))


@pytest.fixture(params=[None, gradlib.tensor_stats, lambda t: t.norm().item()])
def reduce(request: pytest.FixtureRequest) -> Any:
    return request.param


def found_in(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], Tensor] = torch.sum,
    **options: Any,
) -> tuple[str, int, str, str] | None:
    with gradlib.record(model, **options) as recording:
        loss(model(*args)).backward()
    found = recording.first_nonfinite()
    return found and (found.name, found.index, found.direction, found.field)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 3, requires_grad=True)


def test_nothing(x: Tensor, reduce: Any) -> None:
    assert found_in(net(), x, reduce=reduce) is None


def test_made_in_the_forward(x: Tensor, reduce: Any) -> None:
    model = net(lambda x: (x - 100).sqrt())
    assert found_in(model, x, reduce=reduce) == ("1.act", 0, "forward", "output")
    model = net(lambda x: (1000 * x.abs()).exp())
    assert found_in(model, x, reduce=reduce) == ("1.act", 0, "forward", "output")


def test_made_only_in_the_backward(x: Tensor, reduce: Any) -> None:
    found = found_in(net(Wrong.apply), x, reduce=reduce)
    assert found == ("1.act", 0, "backward", "grad_input[0]")
    # The slope of a square root at 0.
    found = found_in(net(lambda x: (x * 0).abs().sqrt()), x, reduce=reduce)
    assert found == ("1.act", 0, "backward", "grad_input[0]")


def test_made_by_the_loss(x: Tensor, reduce: Any) -> None:
    found = found_in(net(), x, loss=lambda y: y.sum() * NAN, reduce=reduce)
    assert found == ("", 0, "backward", "grad_output[0]")


def test_given_to_the_model(x: Tensor, reduce: Any) -> None:
    bad = x.detach().index_fill(0, torch.tensor(1), INF).requires_grad_()
    assert found_in(net(), bad, reduce=reduce) == ("", 0, "forward", "args[0]")


def test_made_between_the_calls(x: Tensor, reduce: Any) -> None:
    model = net()
    model[1].forward = lambda x: model[1].after((model[1].before(x) - 100).log())
    # The block's own code made the NaN, before this call.
    found = found_in(model, x, reduce=reduce)
    assert found == ("1.after", 0, "forward", "args[0]")
    model[1].forward = lambda x: (model[1].after(x) - 100).log()
    assert found_in(model, x, reduce=reduce) == ("1", 0, "forward", "output")
    model[1].forward = lambda x: model[1].after(Wrong.apply(model[1].before(x)))
    found = found_in(model, x, reduce=reduce)
    assert found == ("1.before", 0, "backward", "grad_output[0]")


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_in_a_parameter(x: Tensor, name: str) -> None:
    model = net()
    with torch.no_grad():
        getattr(model[1].after, name)[0] = NAN
    assert found_in(model, x) == ("1.after", 0, "forward", f"param {name}")


def test_in_a_buffer(x: Tensor) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    model[1].running_var[1] = NAN
    assert found_in(model, x) == ("1", 0, "forward", "buffer running_var")


def test_in_a_parameters_gradient(x: Tensor) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * Wrong.apply(self.scale)

    model = nn.Sequential(nn.Linear(3, 3), Scaled())
    assert found_in(model, x) == ("1", 0, "backward", "param_grads['scale']")


def test_the_step_in_which_it_appeared(x: Tensor) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 3), Applies(lambda x: x), nn.Linear(3, 2))
    with gradlib.record(model) as recording:
        for step in range(3):
            if step == 1:
                model[1].function = Wrong.apply
            model.zero_grad()
            model(x).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad)
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.index, found.direction) == ("1", 1, "backward")
    last = recording.forwards[2].first_nonfinite()
    assert last is not None
    assert (last.name, last.index, last.field) == ("0", 2, "param weight")


def test_a_mask_that_does_its_work(x: Tensor, reduce: Any) -> None:
    model = Applies(lambda x, mask: (x + mask).softmax(-1).log_softmax(-1))
    mask = torch.tensor([0.0, 0.0, -INF])
    assert found_in(model, x, mask, reduce=reduce) is None
    # NaN comes from a row in which every entry is masked.
    found = found_in(model, x, mask - INF, reduce=reduce)
    assert found == ("", 0, "forward", "args[1]")


def test_a_nan_that_is_taken_out_again(x: Tensor) -> None:
    model = net(lambda x: torch.where(x > 0, x, NAN))
    model.insert(2, Applies(torch.nan_to_num))
    assert found_in(model, x) == ("1.act", 0, "forward", "output")


def test_keyword_arguments_and_nested_outputs(x: Tensor) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Applies(lambda *, a, b: {"sum": [a + b, a / (b * 0)]})

        def forward(self, x: Tensor, bad: float) -> Tensor:
            return self.inner(a=x, b=x + bad)["sum"][0]

    model = Model()
    assert found_in(model, x, 0.0) == ("inner", 0, "forward", "output['sum'][1]")
    assert found_in(model, x, NAN) == ("", 0, "forward", "args[1]")


def test_the_gradient_of_a_keyword_argument(x: Tensor) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Applies(lambda *, a, b: a + Wrong.apply(b))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(a=x, b=2 * x)

    assert found_in(Model(), x) == ("inner", 0, "backward", "grad_kwargs['b']")


def test_other_dtypes(x: Tensor) -> None:
    def many(_x: Tensor, bad: complex) -> tuple[Tensor, ...]:
        return (
            _x,
            torch.arange(3),
            _x > 0,
            torch.ones(2).to(torch.float8_e4m3fn),
            torch.eye(2).to_sparse(),
            torch.ones(2, dtype=torch.complex64) * bad,
        )

    model = Applies(
        lambda x, bad: many(x, complex(0, 1) if bad == 0 else complex(0, INF))
    )
    loss = lambda output: output[0].sum()  # noqa: E731 (one line says it)
    assert found_in(model, x, 0, loss=loss) is None
    assert found_in(model, x, 1, loss=loss) == ("", 0, "forward", "output[5]")


def test_only_some_modules(x: Tensor) -> None:
    model = net(lambda x: (x - 100).sqrt())
    found = found_in(model, x, modules=["1.after", "2"])
    assert found == ("1.after", 0, "forward", "args[0]")


def test_the_outputs_are_needed(x: Tensor) -> None:
    with pytest.raises(gradlib.NotKeptError, match='needs "output" to tell'):
        found_in(net(), x, keep=["grad_output"])
    model = net(lambda x: (x - 100).sqrt())
    assert found_in(model, x, keep=["output"]) == ("1.act", 0, "forward", "output")


def test_without_a_call() -> None:
    with gradlib.record(net()) as recording:
        pass
    assert recording.first_nonfinite() is None


def test_without_a_backward_pass(x: Tensor) -> None:
    with gradlib.record(model := net(lambda x: (x - 100).sqrt())) as recording:
        model(x)
    found = recording.first_nonfinite()
    assert found is not None
    assert found.name == "1.act"


def test_several_passes(x: Tensor) -> None:
    with gradlib.record(model := net()) as recording:
        output = model(x)
        output.sum().backward(retain_graph=True)
        assert recording.first_nonfinite() is None
        (output.sum() * INF).backward()
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.field) == ("", "passes[1].grad_output[0]")
    assert "It came with the gradient" in str(found)


@pytest.mark.parametrize("place", [0, 1])
def test_which_of_several_passes_made_it(x: Tensor, place: int) -> None:
    model = Applies(lambda x: (x * 2, Wrong.apply(x)))
    with gradlib.record(model) as recording:
        outputs = model(x)
        for output in outputs if place else outputs[::-1]:
            output.sum().backward(retain_graph=True)
    found = recording.first_nonfinite()
    assert found is not None
    assert found.field == f"passes[{place}].grad_input[0]"
    assert "The call made it" in str(found)


def test_the_printed_answer(x: Tensor) -> None:
    with gradlib.record(model := net(Wrong.apply)) as recording:
        model(x).sum().backward()
    found = recording.first_nonfinite()
    assert str(found).replace("\n ", "") == (
        'NaN or inf first appeared in the backward of "1.act", call 0: grad_input[0]. '
        "The call made it: the gradient that came to it is finite."
    )
    assert found is not None
    assert "1.act" in found._repr_html_()


@pytest.mark.parametrize(
    ("function", "bad", "factor", "expected"),
    [
        (torch.tanh, NAN, 1.0, "was given it: look at what comes before the call."),
        (torch.log, -9.0, 1.0, "The call made it: what it was given is finite."),
        (torch.tanh, 0.0, NAN, "the call's output: look at what comes after it."),
    ],
)
def test_who_made_it_is_said(
    function: Callable[[Tensor], Tensor], bad: float, factor: float, expected: str
) -> None:
    x = torch.full((4, 3), bad, requires_grad=True)
    with gradlib.record(model := Applies(function)) as recording:
        (factor * model(x).sum()).backward()
    assert str(recording.first_nonfinite()).replace("\n ", "").endswith(expected)


class Between(nn.Module):
    """Makes NaN between two layers, or before both."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({it: nn.Linear(3, 3) for it in ("fc1", "fc2")})
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.inner.items():
            is_wrong = name == ("fc1" if self.is_first else "fc2")
            x = layer(x.abs().neg().sub(1).log() if is_wrong else x)
        return x


@pytest.mark.parametrize(
    ("is_first", "expected"),
    [
        (True, "at what comes before the call."),
        (False, 'at what comes after "1.inner.fc1", call 0, before the call.'),
    ],
)
def test_the_forward_that_made_it_between_two_calls_is_named(
    x: Tensor, is_first: bool, expected: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Between(is_first=is_first))
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    said = str(recording.first_nonfinite()).replace("\n ", "")
    assert 'given it by the forward of "1": look ' + expected in said


@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_of_what_was_there_before_it_is_said(x: Tensor, name: str) -> None:
    model = nn.BatchNorm1d(3).eval()
    model.state_dict()[name].fill_(NAN)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    found = str(recording.first_nonfinite())
    assert f" {name}. It was there when the call began." in found.replace("\n ", "")


def test_a_gradient_of_a_nested_output(x: Tensor, reduce: Any) -> None:
    model = Applies(lambda x: (x.sin(), {"more": [x.cos(), x.exp()]}))
    found = found_in(
        model,
        x,
        loss=lambda y: y[0].sum() + NAN * y[1]["more"][1].sum(),
        reduce=reduce,
    )
    assert found == ("", 0, "backward", "grad_output[1]['more'][1]")


def test_a_gradient_that_came_to_the_first_of_two_forwards(reduce: Any) -> None:
    model, x = net(), torch.randn(4, 3)
    with gradlib.record(model, reduce=reduce) as recording:
        first, second = model(x), model(x)
        (Wrong.apply(first) + second).sum().backward()
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.index) == ("", 0)  # and no module inside it
    assert (found.direction, found.field) == ("backward", "grad_output[0]")


def test_a_pass_that_reaches_further_than_a_later_one() -> None:
    model, x = net(), torch.randn(4, 3)
    with gradlib.record(model) as recording:
        first, second = model(x), model(x)
        (first + Wrong.apply(second)).sum().backward(retain_graph=True)
        Wrong.apply(first).sum().backward()
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.index, found.field) == ("", 1, "grad_output[0]")


def test_after_loading(x: Tensor, tmp_path: Path) -> None:
    def asked(change: Callable[[Any], None]) -> str:
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
        with torch.no_grad():
            change(model)
        with gradlib.record(model) as recording:
            model(x).sum().backward()
        recording.save(tmp_path / "run")
        loaded = gradlib.load_recording(tmp_path / "run").first_nonfinite()
        assert str(loaded) == str(recording.first_nonfinite())
        return loaded.field if loaded else ""

    assert asked(lambda model: model[1].weight[0].fill_(NAN)) == "param weight"
    assert asked(lambda model: model[1].running_var[0].fill_(NAN)) == (
        "buffer running_var"
    )
    assert asked(lambda model: model[1].running_mean[0].fill_(INF)) == (
        "buffer running_mean"
    )
    assert asked(lambda model: model[1].running_var[0].fill_(-1)) == "output"
    assert asked(lambda _: None) == ""


def test_a_mask_beside_what_was_nan_before(x: Tensor) -> None:
    mask = torch.tensor([0.0, 0.0, -INF])

    class Masked(nn.Linear):
        def forward(self, mask: Tensor, x: Tensor) -> Tensor:  # type: ignore[override] (more)
            return (super().forward(x) + mask).softmax(-1)

    model = Masked(3, 3)
    assert found_in(model, mask, x) is None
    assert found_in(model, mask, x * NAN) == ("", 0, "forward", "args[1]")
    nn.init.constant_(model.weight, NAN)
    assert found_in(model, mask, x) == ("", 0, "forward", "param weight")


def test_inf_that_becomes_nan_further_in(x: Tensor, reduce: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(3, 3), Applies(lambda x, y: (x + y) - y)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.inner(self.first(x), mask)

    model, mask = Model(), torch.tensor([0.0, 0.0, -INF])
    with gradlib.record(model, reduce=reduce) as recording:
        model(x, mask)
    is_number = reduce not in (None, gradlib.tensor_stats)
    assert str(recording.first_nonfinite()).replace("\n ", "") == (
        "NaN or inf first appeared in the forward of the root, call 0: args[1]. The "
        'call was given inf. The first output with NaN is that of "inner", call 0.'
        + " Or reduce made it, whose result this is."
        * is_number
    )


def test_what_a_reduce_makes_not_finite_is_said_to_be_its_own() -> None:
    model = nn.Linear(3, 1)
    with gradlib.record(model, reduce=lambda it: (it.mean(), it.log())) as recording:
        (-model(torch.ones(4, 3))).sum().backward()
    said = " ".join(str(recording.first_nonfinite()).split())
    assert said.endswith("finite. Or reduce made it, whose result this is.")


def test_what_was_not_kept_may_have_had_it(x: Tensor) -> None:
    def said(model: nn.Module, **options: Any) -> str:
        with gradlib.record(model, **options) as recording:
            model(x).sum().backward()
        text = str(recording.first_nonfinite()).replace("\n ", "")
        return text.removeprefix("NaN or inf first appeared in the ")

    model = net()
    nn.init.constant_(model[1].after.weight, NAN)
    assert said(model, reduce=gradlib.tensor_stats) == (
        'forward of "1.after", call 0: output. The call made it, or its weights or '
        "buffers had it: these were not kept. What it was given is finite."
    )
    assert said(model, keep=["output"]) == (
        'forward of "1.after", call 0: output. The call made it, or was given it: its '
        "arguments were not kept."
    )
    assert said(net(Wrong.apply), keep=["args", "output", "param_grads"]) == (
        "backward of \"1.before\", call 0: param_grads['weight']. The call made it, or "
        "it came with the gradient of its output, which was not kept."
    )


def test_a_buffer_that_has_inf_beside_what_becomes_nan(x: Tensor) -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, 0.0, -INF]))

        def forward(self, x: Tensor) -> Tensor:
            return 0 * x / (0 * x)

    model = Masks()
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    said = re.sub(r"\s+", " ", str(recording.first_nonfinite()))
    assert "It has inf, as a mask may. The first output with NaN is that of" in said


def test_a_number_that_the_model_returns_is_no_work_of_a_reduce(x: Tensor) -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, float]:
            return x, INF

    model = Returns()
    with gradlib.record(model) as recording:
        model(x)
    found = recording.first_nonfinite()
    assert found is not None
    assert found.field == "output[1]"
    assert "reduce" not in str(found)


@pytest.mark.parametrize(
    "several",
    [
        lambda t: (t.mean().item(), t.abs().max().item()),
        lambda t: {"mean": t.mean(), "shape": t.shape},
        lambda t: t.cpu().numpy().copy(),
        lambda t: t.cpu().numpy().max(),
        lambda t: gradlib.tensor_stats(t).numbers(),
    ],
)
def test_what_else_a_function_may_return(x: Tensor, several: Any) -> None:
    model = net(lambda x: (x - 100).sqrt())
    found = found_in(model, x, reduce=several)
    assert found == ("1.act", 0, "forward", "output")
    assert found_in(net(), x, reduce=several) is None


class Distances(nn.Module):
    def forward(self, p: Tensor) -> Tensor:
        return (p[:, None] - p).square().sum(-1).sqrt()  # steep where it is zero


class Forces(nn.Module):
    """Returns an energy, and forces by a backward pass in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.distances, self.energy = Distances(), nn.Linear(3, 1)
        self.head = nn.Linear(3, 3)

    def forward(self, p: Tensor) -> tuple[Tensor, Tensor]:
        p = p.requires_grad_()
        energy = self.energy(self.distances(p)).tanh().sum()
        (pull,) = torch.autograd.grad(energy, p, create_graph=True)
        return energy, self.head(-pull)


def test_made_by_a_pass_inside_a_forward(tmp_path: Path) -> None:
    with gradlib.record(model := nn.Sequential(Forces())) as recording:
        model(torch.randn(3, 3))
    recording.save(tmp_path / "run")
    for it in (recording, gradlib.load_recording(tmp_path / "run")):
        found = it.first_nonfinite()
        assert found is not None
        assert (found.name, found.direction) == ("0.distances", "backward")
        assert found.field == "grad_input[0]"


def test_made_in_a_forward_before_the_pass_inside_it() -> None:
    model = Forces()
    nn.init.constant_(model.energy.weight, NAN)
    with gradlib.record(model) as recording:
        model(torch.randn(3, 3))
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.field) == ("energy", "param weight")


class Adjoint(torch.autograd.Function):
    """Its backward runs a backward pass through a module, as an adjoint solver does."""

    @staticmethod
    def forward(ctx: Any, function: nn.Module, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, torch.autograd.grad(ctx.function(x), x, grads[0])[0]


def test_made_by_a_pass_inside_a_pass(x: Tensor) -> None:
    class Solves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.f = nn.Sequential(nn.Linear(3, 3), Applies(Wrong.apply))

        def forward(self, x: Tensor) -> Tensor:
            return Adjoint.apply(self.f, self.first(x))

    with gradlib.record(model := Solves()) as recording:
        model(x).sum().backward()
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.field) == ("f.1", "grad_input[0]")


def test_a_forward_that_the_pass_after_it_does_not_reach(x: Tensor) -> None:
    model: Any = nn.ModuleDict(
        {"actor": nn.Linear(3, 3), "critic": Applies(lambda x: x * NAN)}
    )
    with gradlib.record(model) as recording:
        action, value = model["actor"](x), model["critic"](x)
        (action * value.detach()).sum().backward()
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.direction) == ("critic", "forward")


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_made_by_a_penalty_on_a_weight(x: Tensor, tmp_path: Path, reduce: Any) -> None:
    last = nn.Linear(3, 3)
    model = nn.Sequential(nn.Linear(3, 3), last)
    nn.init.zeros_(last.bias)
    with gradlib.record(model, reduce=reduce) as recording:
        (model(x).sum() + last.bias.square().sum().sqrt()).backward()
    assert last.bias.grad is not None
    assert last.bias.grad.isnan().any()
    recording.save(tmp_path / "nan.safetensors")
    for it in recording, gradlib.load_recording(tmp_path / "nan.safetensors"):
        found = it.first_nonfinite()
        assert found is not None
        assert (found.name, found.direction) == ("1", "backward")
        assert found.field == "param_grads_total['bias']"
        assert "another use of the tensor made it" in str(found)


def test_made_by_another_use_of_the_input() -> None:
    model = nn.Linear(3, 3)
    x = torch.zeros(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        (model(x).sum() + x.square().sum().sqrt()).backward()
    found = recording.first_nonfinite()
    assert found is not None
    assert found.field == "grad_input_total[0]"


def test_made_by_a_penalty_that_goes_through_a_graph() -> None:
    torch.manual_seed(0)
    last = nn.Linear(8, 1)
    model = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), last)
    nn.init.zeros_(last.weight)
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.mean() + grad.square().sum(1).sqrt().sum()).backward()
    found = recording.first_nonfinite()
    assert found is not None
    field = "passes[1].param_grads['weight']"
    assert (found.name, found.field) == ("2", field)


def test_of_a_penalty_the_call_itself_may_have_made_it() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.norm(dim=1)

    model = nn.Sequential(nn.Identity(), Norm(), nn.Linear(2, 1))
    x = torch.zeros(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (grad * torch.arange(1.0, 4)).sum().backward()
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.field) == ("1", "passes[1].grad_output[0]")
    said = " ".join(str(found).split())
    assert said.endswith(
        "look at what comes after it, and, as this pass may have gone through the "
        "graph of pass 0 too, at the call itself."
    )


def test_a_weight_inside_that_was_nan_before() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    with torch.no_grad():
        attention.out_proj.weight[0, 0] = NAN  # which attention uses itself
    x = torch.randn(2, 3, 4)
    with gradlib.record(attention) as recording:
        attention(x, x, x)
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.field) == ("", "param out_proj.weight")


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("field", ["weight", "running_var"])
def test_a_block_that_is_recorded_as_one(
    field: str, saved: bool, tmp_path: Path
) -> None:
    blocks = [nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(*blocks).eval()
    with torch.no_grad():
        getattr(blocks[1][0], field)[0] = NAN
    with gradlib.record(model, modules="[01]") as recording:
        model(torch.randn(3, 4))
    if saved:
        recording.save(tmp_path / "file")
        recording = gradlib.load_recording(tmp_path / "file")
    kind = "param" if field == "weight" else "buffer"
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.field) == ("1", f"{kind} 0.{field}")
    assert "It was there when the call began." in " ".join(str(found).split())


def test_a_weight_of_a_module_whose_output_was_finite_is_not_accused() -> None:
    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masked = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.masked(x).nan_to_num() / 0

    class Masked(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
            return super().forward(input).nan_to_num()

    model: Any = Divides()
    model.masked = Masked(3, 3)
    with torch.no_grad():
        model.masked.weight[0, 0] = NAN
    with gradlib.record(model) as recording:
        model(torch.zeros(2, 3))
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.field) == ("", "output")


@pytest.mark.parametrize("affine", [True, False])
def test_a_buffer_that_was_not_kept_may_have_had_it(affine: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, affine=affine), nn.ReLU()).eval()
    running: Any = model[0].running_var
    running[0] = NAN
    for modules in ("0", None):
        options: Any = {"modules": modules, "reduce": gradlib.tensor_stats}
        with gradlib.record(model, **options) as recording:
            model(torch.randn(3, 4))
        said = " ".join(str(recording.first_nonfinite()).split())
        assert "these were not kept" in said


def test_a_weight_of_a_module_that_one_forward_calls_twice() -> None:
    model = nn.Sequential(layer := nn.Linear(3, 3), nn.Tanh(), layer)
    with torch.no_grad():
        layer.bias[0] = NAN
    with gradlib.record(model) as recording:
        model(torch.ones(2, 3)).sum().backward()
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.index, found.field) == ("0", 0, "param bias")


def test_a_weight_of_which_a_call_makes_what_it_gives_on(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.scale)

    model = nn.Sequential(nn.Linear(3, 3), scaled := Scaled())
    nn.init.constant_(scaled.scale, NAN)
    with gradlib.record(model) as recording:
        model(torch.ones(2, 3)).sum().backward()
    recording.save(path := tmp_path / "run.safetensors")
    for it in recording, gradlib.load_recording(path):
        found = it.first_nonfinite()
        assert found is not None
        assert (found.name, found.field) == ("1", "param scale")

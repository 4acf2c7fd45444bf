"""A gradient is named after what has it, if it is that in every digit that counts."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib.hook_reports.hooks import ACCUMULATED, FULL, LEGACY
from gradlib.hook_reports.known import KnownGradients
from gradlib.hook_reports.naming import name_by_value
from gradlib.hook_reports.tensor_names import Names
from gradlib.hook_reports.trial import Trial, cotangent
from gradlib.tree import Tree

from ..one_way import one_way
from .reported import HERE, LINEAR, Does, Of, given, report_of, whats


class Times(torch.autograd.Function):
    """Gives both inputs their gradient, whether they require it or not."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grads[0] * b, grads[0] * a


class Held(nn.Module):
    """Multiplies what it is given by what it holds."""

    def __init__(self, held: Tensor, *, buffer: bool = False) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("held", held)
        else:
            self.held = held

    def forward(self, *xs: Tensor) -> Tensor:
        return Times.apply(sum(xs), self.held)


SUM = "an inner tensor, from AddBackward0, equal to that of args[0]"


def test_a_gradient_for_what_does_not_require_it() -> None:
    x, idle = given(4, 3), given(4, 3).detach()
    frozen = nn.Parameter(given(4, 3).detach(), requires_grad=False)
    counting = Held(frozen)
    counting.register_buffer("count", torch.tensor(0))
    cases = [
        (Held(nn.Parameter(given(4, 3).detach())), idle, 0, "args[0]"),
        (Held(idle, buffer=True), x, 1, "held"),
        (Held(idle), x, 1, "held"),
        (counting, x, 1, "held"),
    ]
    for module, given_x, place, name in cases:
        entries = report_of(module, given_x).kinds[LEGACY].grad_input
        other = "held" if place == 0 else SUM
        assert entries[place].what == f"gradient of {name}, which does not require grad"
        assert entries[1 - place].what == f"gradient of {other}"
        factor = module.held if place == 0 else given_x
        v = cotangent(0, module(given_x))
        assert_close(entries[place].value, v * factor.detach())


def test_a_gradient_for_a_computed_tensor_that_does_not_require_it() -> None:
    module = Of(lambda x: Times.apply(x.detach().exp(), x))
    entries = report_of(module, given(4, 3)).kinds[LEGACY].grad_input
    assert [entry.what for entry in entries] == [
        "gradient for a tensor that does not require grad",
        "gradient of args[0]",
    ]


def test_a_module_that_cannot_run_with_all_requiring_grad() -> None:
    class Counts(Held):
        def forward(self, *xs: Tensor) -> Tensor:
            self.held += 1
            return super().forward(*xs)

    module = Counts(given(4, 3).detach(), buffer=True)
    entries = report_of(module, given(4, 3)).kinds[LEGACY].grad_input
    assert entries[1].what == "gradient for a tensor that does not require grad"


def test_gradients_that_are_nearly_equal_are_told_apart() -> None:
    x = given(2, 4, 5, 5)
    entries = report_of(nn.LocalResponseNorm(2), x).kinds[LEGACY].grad_input
    assert [entry.what for entry in entries] == [
        "a part of the gradient of input, which has other uses, too",
        "gradient of an inner tensor, from PowBackward0",
    ]
    v = cotangent(0, x)
    value = entries[0].value
    assert value is not None
    assert 1e-6 < (value - v).abs().max() / v.abs().max() < 1e-3


class Adds(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(given(*shape).detach())

    def forward(self, x: Tensor) -> Tensor:
        return Noisy.apply(x, self.w)


class Noisy(torch.autograd.Function):
    """Adds, and gives another gradient each time, as a GPU may: far apart it is not."""

    times = itertools.count()

    @staticmethod
    def forward(_ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x + w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004 (torch's form)
        return 2 * grads[0], 3 * grads[0] * (1 + 1e-4 * (next(Noisy.times) % 2))


def test_what_differs_each_time_is_named_all_the_same() -> None:
    for _ in range(2):  # it differs from the first run, and from the second
        entries = report_of(Adds(4, 3), given(4, 3)).kinds[LEGACY].grad_input
        assert [it.what for it in entries] == ["gradient of x", "gradient of w"]
        next(Noisy.times)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_much_are_named(dtype: torch.dtype) -> None:
    x = torch.randn(20_000, 8, device="cpu")
    x = x.to(HERE, dtype).requires_grad_()
    cases: list[tuple[nn.Module, list[str]]] = [
        (nn.Linear(8, 8), ["bias", "input", "weight, transposed"]),
        (nn.LayerNorm(8), ["input", "weight", "bias"]),
        (Held(given(8)), [SUM, "held"]),
    ]
    for module, names in cases:
        if isinstance(module, Held):
            module.held = module.held.detach().to(dtype).requires_grad_()
        entries = report_of(module.to(HERE, dtype), x).kinds[LEGACY].grad_input
        assert [entry.what for entry in entries] == [f"gradient of {n}" for n in names]


def test_a_part_of_an_inner_gradient_is_called_one() -> None:
    def dense(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
        h = a(x)
        return torch.cat([h, b(h), x.sin()])

    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    x = given(4, 3)
    entries = report_of(Of(dense, first, second), x).kinds[LEGACY].grad_input
    assert [entry.what for entry in entries] == [
        "a part of the gradient of output of parts.0, which has other uses, too",
        "gradient of output of parts.1",
        "gradient of an inner tensor, from SinBackward0",
    ]
    v = cotangent(0, dense(first, second, x))
    assert_close(entries[0].value, v[:4])


def test_a_part_of_the_gradient_of_a_tied_weight_is_called_one() -> None:
    fc, x = nn.Linear(3, 3), given(4, 3)
    entries = report_of(nn.Sequential(fc, fc), x).kinds[LEGACY].grad_input
    assert [entry.what for entry in entries] == [
        "a part of the gradient of 0.bias, which has other uses, too",
        "gradient of output of 0",
        "a part of the gradient of 0.weight, in another layout, which has other uses, "
        "too",
    ]
    h = fc(x).detach()
    assert_close(entries[2].value, h.T @ cotangent(0, h))


def test_a_later_call_of_an_inner_module_is_told_from_its_first() -> None:
    def twice(a: nn.Module, x: Tensor) -> Tensor:
        g = a(h := a(x))
        return torch.cat([h, g, g.exp()])

    entries = report_of(Of(twice, nn.Tanh()), given(4, 3)).kinds[LEGACY].grad_input
    assert [entry.what for entry in entries[:2]] == [
        "a part of the gradient of output of parts.0, which has other uses, too",
        "a part of the gradient of output of parts.0, call 1, which has other uses, "
        "too",
    ]


def test_nested_inputs_have_their_path_as_name() -> None:
    module = Of(lambda batch, *, more: batch["x"] * more[0])
    report = report_of(module, {"x": given(3)}, more=[given(3)])
    legacy = [entry.what for entry in report.kinds[LEGACY].grad_input]
    assert legacy == ["gradient of args[0]['x']", "gradient of more[0]"]


def test_an_argument_that_is_called_as_a_parameter() -> None:
    class Scaled(nn.Linear):
        def forward(self, weight: Tensor) -> Tensor:  # type: ignore[override] (fewer)
            return super().forward(weight)

    report = report_of(Scaled(3, 2), given(4, 3))
    legacy = [entry.what for entry in report.kinds[LEGACY].grad_input]
    assert legacy[1:] == ["gradient of argument weight", LINEAR[2]]


def test_gradients_that_vanish() -> None:
    x = (-torch.ones(3)).requires_grad_()
    kinds = report_of(nn.ReLU(), x).kinds
    for kind in (FULL, LEGACY):
        assert kinds[kind].grad_input[0].what == "zeros: gradient of input"
    report = report_of(nn.Linear(2, 2), torch.zeros(1, 2, requires_grad=True))
    legacy = "zeros: gradient of input 2 of AddmmBackward0"
    assert report.kinds[LEGACY].grad_input[2].what == legacy


def test_an_argument_that_is_not_used() -> None:
    class Second(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            del x
            return 2 * y

    report = report_of(Second(), given(2), given(2))
    entry = report.kinds[FULL].grad_input[0]
    assert entry.what == "zeros: nothing flows to x"


def test_where_the_last_node_lets_nothing_flow() -> None:
    part = report_of(Of(lambda x: x.chunk(2)[1]), given(4)).kinds[LEGACY]
    nothing = "None: nothing flows into output 0 of SplitBackward0"
    assert part.grad_output[0].what == nothing
    assert part.grad_output[1].what == "gradient of output"
    product = report_of(Of(one_way), given(4), given(4)).kinds[LEGACY]
    nothing = "None: nothing flows out of input 1 of OneWayBackward"
    assert product.grad_input[1].what == nothing


def test_an_argument_that_a_hook_adds() -> None:
    module = Of(lambda x, y: x * 2 + y)
    module.register_forward_pre_hook(lambda _, args: (*args, torch.ones(4)))
    entries = report_of(module, given(4)).kinds[FULL].grad_input
    assert [it.what for it in entries] == [
        "gradient of args[0]",
        "zeros: a forward pre-hook added the argument",
    ]


def test_a_tensor_from_outside_keeps_its_gradient() -> None:
    outside = given(3)
    outside.grad = before = torch.ones(3)
    report = report_of(Of(lambda x: x * outside), given(3))
    legacy = [entry.what for entry in report.kinds[LEGACY].grad_input]
    outsider = "a leaf that is itself no argument or attribute"
    assert legacy == ["gradient of args[0]", f"gradient for {outsider}"]
    assert report.last_node_inputs == ("args[0]", outsider)
    returned = report_of(Of(lambda x: (x * 2, outside)), given(3))
    assert returned.kinds[FULL].grad_output[1].what == "gradient of output[1]"
    assert outside.grad is before
    assert before.equal(torch.ones(3))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    report = report_of(nn.Linear(3, 2, dtype=dtype), x)
    assert [entry.what for entry in report.kinds[LEGACY].grad_input] == LINEAR


def test_a_tensor_that_two_modules_return_is_named_after_the_inner_one() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    report = report_of(module, given(4, 3))
    weight = "gradient of output of parametrizations.weight.0, transposed"
    assert report.kinds[LEGACY].grad_input[2].what == weight


def saved(layer: nn.Module, x: Tensor) -> Any:
    return checkpoint(layer, x, use_reentrant=True)


def test_a_parameter_whose_gradient_comes_in_parts() -> None:
    layer, x = nn.Linear(3, 3), given(4, 3)
    y = layer(layer(x))
    (total,) = torch.autograd.grad(y, layer.weight, cotangent(0, y))
    module = Of(lambda inner, v: saved(inner, saved(inner, v)), layer)
    trial = Trial(module, Tree.of(((x,), {})))
    known = KnownGradients(trial, Names(module, (x,), {}))
    name = known.name(total, outputs_first=False)
    assert name == "gradient of parts.0.weight"


class Residual(nn.Module):
    """What its branch adds to the gradient is a hundredth, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(3, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + 0.01 * self.branch(x))
        return y


def test_what_is_nearly_a_gradient_in_bfloat16_is_not_named_so() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    kinds = gradlib.hook_report(Residual(), x).kinds
    found = kinds["register_backward_hook"].grad_input[0].what
    assert found == "gradient of an inner tensor, from AddBackward0"
    assert kinds["register_full_backward_hook"].grad_input[0].what == "gradient of x"


class Narrow(nn.Module):
    """Goes through eight bits, with which torch computes next to nothing."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float8_e4m3fn)
        return y.float() if self.back else y


@pytest.mark.parametrize("back", [False, True])
def test_gradients_in_eight_bits(back: bool) -> None:
    x = torch.randn(3, requires_grad=True)
    kinds = gradlib.hook_report(Narrow(back), x).kinds
    entry = kinds["register_full_backward_hook"].grad_input[0]
    assert entry.what.startswith("gradient of x")


KNOWN = {"w": torch.arange(1.0, 7).reshape(2, 3), "v": torch.tensor([7.0, -2, 3])}


@pytest.mark.parametrize(
    ("grad", "name"),
    [
        (KNOWN["w"], "gradient of w"),
        (KNOWN["w"] * (1 + 3e-7), "gradient of w"),
        (KNOWN["w"] * (1 + 1e-5), None),
        (KNOWN["w"].bfloat16() * (1 + 2**-8), "gradient of w"),
        (KNOWN["w"].bfloat16() * (1 + 2**-6), None),
        (KNOWN["w"].T, "gradient of w, transposed"),
        (KNOWN["w"].reshape(6), "gradient of w, reshaped"),
        (KNOWN["v"].expand(4, 3), "gradient of v, expanded"),
        (KNOWN["w"].sum(0), "gradient of w, summed"),
        (KNOWN["w"].sum(1, keepdim=True), "gradient of w, summed"),
        (
            KNOWN["v"] + torch.tensor([[-1.0], [1], [0]]) - KNOWN["v"] * 2 / 3,
            "gradient of v, before it is summed",
        ),
        (KNOWN["v"].double(), "gradient of v"),
        (torch.tensor([5.0, 5, 5]), None),
        (torch.full((3,), torch.nan), None),
    ],
)
def test_forms(grad: Tensor, name: str | None) -> None:
    assert name_by_value(grad, {}, KNOWN) == name


def test_exact_goes_before_close_and_both_are_named_when_equal() -> None:
    near = {"a": KNOWN["v"] * (1 + 1e-6), "b": KNOWN["v"]}
    assert name_by_value(KNOWN["v"], {}, near) == "gradient of b"
    equal = {"a": KNOWN["v"], "b": KNOWN["v"]}
    assert name_by_value(KNOWN["v"], {}, equal) == "gradient of a and of b"
    nearly = {"a": KNOWN["v"] * (1 + 1e-5), "b": KNOWN["v"] * (1 + 3e-7)}
    assert name_by_value(KNOWN["v"], {}, nearly) == "gradient of b"
    assert name_by_value(KNOWN["v"], {}, {}, KNOWN) == "gradient of v"
    assert name_by_value(KNOWN["v"], {}, {"a": near["a"]}, KNOWN) == "gradient of v"


def test_close_by_rounding_goes_before_close_as_two_runs_are() -> None:
    w = KNOWN["w"]
    known = {"w": w, "noisy": w * (1 + 1e-3)}
    noise = {"noisy": 1e-2}
    assert name_by_value(w * (1 + 3e-7), noise, known) == "gradient of w"
    assert name_by_value(w * (1 + 2e-3), noise, known) == "gradient of noisy"
    assert name_by_value(w * (1 + 2e-3), {}, known) is None


def test_infinite_entries_do_not_make_everything_close() -> None:
    grad = torch.tensor([torch.inf, 1.0])
    assert name_by_value(grad, {}, {"a": torch.tensor([torch.inf, 2.0])}) is None
    assert name_by_value(grad, {}, {"a": grad.clone()}) == "gradient of a"


@pytest.mark.parametrize(
    "module",
    [
        nn.L1Loss(),
        nn.SmoothL1Loss(),
        nn.KLDivLoss(),
        nn.GaussianNLLLoss(),
        nn.MarginRankingLoss(),
        Of(lambda x, *_: x.abs().mean(1)),
    ],
)
def test_a_mean_is_no_sum_of_its_gradient(module: nn.Module) -> None:
    args = [given(4, 3), given(4, 3).detach()]
    if isinstance(module, nn.GaussianNLLLoss | nn.MarginRankingLoss):
        args.append(torch.ones(4, 3))
    assert "before it is summed" not in str(report_of(module, *args))


def test_names_that_two_have() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = given(3)
            self.output = nn.Parameter(given(3).detach())

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return torch.addcmul(x * self.output, self.scale, scale)

    kinds = report_of(Scales(), given(4, 3), given(4, 3)).kinds
    found = whats(kinds[LEGACY])
    assert found["grad_input[1]"] == "gradient of scale"
    assert found["grad_input[2]"] == "gradient of argument scale"
    full = whats(kinds[FULL])
    assert full["grad_input[1]"] == "gradient of argument scale"
    assert "gradient of output" in full["grad_output[0]"]


def test_a_computed_tensor_in_a_list_of_the_module() -> None:
    module: Any = Does(lambda self, x: x * self.hidden[0])
    module.hidden = [given(3) * 2]
    report = report_of(module, given(3))
    assert whats(report.kinds[FULL])["grad_input[0]"] == "gradient of x"


def test_a_list_that_is_called_as_one_of_the_module() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.states = [given(3)]

        def forward(self, states: list[Tensor]) -> Tensor:
            return states[0] * 3 + self.states[0]

    kinds = report_of(Adds(), [given(4, 3)]).kinds
    assert kinds[LEGACY].grad_input[1].what == "gradient of states[0]"
    assert whats(kinds[ACCUMULATED]) == {
        "argument states[0].grad": "gradient of argument states[0]"
    }
    plain = Does(lambda it, x: x * it.parts[0].sum(), parts=[given(2)])
    assert whats(report_of(plain, given(3)).kinds[FULL])["grad_input[0]"] == (
        "gradient of x"  # no path of it is one of the module's
    )


def test_cubes_are_not_compared_in_every_order() -> None:
    comparisons: Any = torch.allclose
    whole: list[int] = []

    def counted(a: Tensor, b: Tensor, **how: Any) -> bool:
        whole.extend([a.numel()] * (a.numel() > 4096))
        return comparisons(a, b, **how)

    cube = Of(lambda conv, x: torch.sigmoid((conv(x) + x) * 2), nn.Conv3d(6, 6, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "allclose", counted)
        gradlib.hook_report(cube, given(6, 6, 6, 6, 6))
    assert len(whole) < 120  # the orders of five dimensions, for one gradient alone


def test_zeros_for_an_inner_tensor_with_other_uses_name_the_input_of_the_node() -> None:
    def forward(f: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        h = f(x)
        return h * torch.zeros(2), h.exp()

    report = report_of(Of(forward, nn.Linear(3, 2)), given(4, 3))
    (entry, *_) = report.kinds[LEGACY].grad_input
    assert entry.what == "zeros: gradient of input 0 of MulBackward0"

"""What once gave another Jacobian, refused a good call, or left something behind."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradlib
from gradlib import (
    DetachedPathError,
    JacobianArgumentError,
    NoSuchWayError,
    NotDifferentiableArgumentError,
)
from gradlib.edges import edge_of
from gradlib.jacobian import retained

Function = Callable[[Tensor], Tensor]
MODES = ("auto", "reverse", "forward", "split", "loop")


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 3, dtype=torch.float64)


def diagonal(values: Tensor) -> Tensor:
    return torch.diag_embed(values)


# The graph is that of the arguments, and of nothing else.


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("check", [True, False])
def test_one_tensor_as_two_inputs(x: Tensor, create_graph: bool, check: bool) -> None:
    x.requires_grad_()
    how: dict[str, Any] = {"create_graph": create_graph, "check": check}
    assert torch.equal(gradlib.per_sample_jacobian(torch.mul, x, x, **how), diagonal(x))
    found = gradlib.per_sample_jacobian(torch.mul, x, 2 * x, **how)
    assert torch.equal(found, diagonal(2 * x))


def test_an_input_that_is_also_in_the_closure(x: Tensor) -> None:
    x.requires_grad_()
    found = gradlib.per_sample_jacobian(
        lambda it: it * x, x, create_graph=True, check=False
    )
    assert torch.equal(found, diagonal(x))


def test_an_input_made_of_the_parameters(x: Tensor) -> None:
    model = nn.Linear(3, 3).double()
    made = model(x)
    expected = gradlib.per_sample_jacobian(model, made.detach(), argnums="parameters")
    for check in (True, False):
        found = gradlib.per_sample_jacobian(
            model, made, argnums="parameters", check=check
        )
        assert torch.equal(found["weight"], expected["weight"])
    with pytest.raises(JacobianArgumentError, match=r"inputs\[0\] was computed from"):
        gradlib.per_sample_jacobian(
            model, made, argnums="parameters", create_graph=True
        )


def test_hooks_on_what_is_differentiated_for_change_nothing(x: Tensor) -> None:
    model = nn.Linear(3, 2).double()
    expected = gradlib.per_sample_jacobian(model, x, argnums="parameters")["weight"]
    model.weight.register_hook(lambda grad: grad / 2)
    found = gradlib.per_sample_jacobian(model, x, argnums="parameters")["weight"]
    assert torch.equal(found, expected)
    model(x).sum().backward()  # the hook is there again
    weight = model.weight.grad
    assert weight is not None
    assert torch.allclose(weight, expected.sum((0, 1)) / 2)


@pytest.mark.cpu  # a GPU takes so few rows in one pass
def test_hooks_inside_are_in_the_rows_and_never_in_columns_alone(x: Tensor) -> None:
    first, last = nn.Linear(3, 32).double(), nn.Linear(32, 64).double()

    def clipped(x: Tensor) -> Tensor:
        h = first(x)
        h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return last(h.tanh())

    rows = gradlib.per_sample_jacobian(clipped, x, mode="loop", check=False)
    auto = gradlib.per_sample_jacobian(clipped, x, check=False)
    assert gradlib.plan_jacobian(clipped, x).mode in ("pushed", "forward")
    assert torch.equal(auto, rows)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(clipped, x)


@pytest.mark.parametrize("mode", MODES)
def test_an_input_of_no_entries(mode: Any) -> None:
    found = gradlib.per_sample_jacobian(
        lambda x: x.sum(1) + 1, torch.ones(3, 0), mode=mode
    )
    assert found.shape == (3, 0)


def test_a_split_where_slopes_are_nan() -> None:
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0], [1.0, 1.0]])

    def fn(x: Tensor) -> Tensor:
        return torch.where(x > 0, x.sqrt(), 0.0)

    rows = gradlib.per_sample_jacobian(fn, x, mode="loop")
    assert rows.isnan().any()
    found = gradlib.per_sample_jacobian(fn, x, mode="split")
    torch.testing.assert_close(found, rows, equal_nan=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_plan_of_a_compiled_module(
    backend: str, recwarn: pytest.WarningsRecorder
) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    compiled, x = torch.compile(model, backend=backend), torch.randn(5, 3)
    assert gradlib.plan_jacobian(compiled, x, mode="reverse").counts["reverse"] == 4
    torch.testing.assert_close(
        gradlib.per_sample_jacobian(compiled, x), gradlib.per_sample_jacobian(model, x)
    )
    assert not [it for it in recwarn if "global hooks" in str(it.message)]


def test_a_check_takes_what_a_function_brings_along_to_float64(x: Tensor) -> None:
    weight, seen = torch.randn(2, 3), list[torch.dtype]()

    def fn(x: Tensor) -> Tensor:
        y = torch.mm(weight, x.mT).mT
        seen.append(y.dtype)
        return y.sin()

    gradlib.per_sample_jacobian(fn, x.float())
    assert seen == [torch.float32, torch.float64, torch.float64]


def test_a_complex_tensor_inside_is_no_place_to_split() -> None:
    x = torch.randn(3, 64, dtype=torch.float64)

    def filtered(x: Tensor) -> Tensor:
        h = torch.fft.rfft(x)[:, :4]
        return torch.fft.irfft(h * torch.arange(1.0, 5.0), n=64)

    expected = gradlib.per_sample_jacobian(filtered, x, mode="loop")
    assert torch.allclose(gradlib.per_sample_jacobian(filtered, x), expected)


class Marked(Tensor):
    """A tensor of somebody's own class, whose views have a node of their own."""


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", ["auto", "reverse", "forward", "loop"])
def test_inputs_of_a_class_of_their_own(x: Tensor, mode: str, check: bool) -> None:
    given = x.as_subclass(Marked)
    found = gradlib.per_sample_jacobian(
        lambda x: x.sin(), given, mode=mode, check=check
    )
    assert torch.allclose(found.as_subclass(Tensor), diagonal(x.cos()))


def test_where_autograd_records_no_view_it_is_said() -> None:
    leaf = torch.ones(2, requires_grad=True)
    below: Any = torch._C._AutoDispatchBelowAutograd
    with below(), pytest.raises(NotDifferentiableArgumentError, match=r"shape \[2\]"):
        edge_of(leaf)


def test_inside_of_torch_func_it_is_refused_by_name(x: Tensor) -> None:
    def inside(x: Tensor) -> Tensor:
        return gradlib.per_sample_jacobian(torch.sin, x).sum()

    def planned(x: Tensor) -> Tensor:
        return x * gradlib.plan_jacobian(torch.sin, x).chunk

    def by_graph(x: Tensor) -> Tensor:
        return gradlib.per_sample_jacobian_from_graph(x.sin(), x)

    for fn in (inside, planned, by_graph):
        for transform in (torch.func.grad, torch.func.vmap):
            with pytest.raises(JacobianArgumentError, match=r"inside of torch\.func"):
                cast(Any, transform)(fn)(x)


# Good calls.

SCALES = torch.tensor([1e6, 1e-2, 30.0], dtype=torch.float64)
GOOD: dict[str, Function] = {
    "features of very different size": lambda x: (
        (x * SCALES)[:, 0] * torch.exp(-(x * SCALES)[:, 1] * 0.1)
    ),
    "a softmax's sum": lambda x: x.softmax(1).sum(1),
    "a sure softmax": lambda x: (100 * x).softmax(1),
    "a norm's norm": lambda x: F.normalize(x).norm(dim=1),
    "saturated": lambda x: (30 + x).sigmoid(),
    "a large constant": lambda x: 1e6 + x.sin(),
    "rounded inside": lambda x: (x + 1e8) - 1e8,
    "through complex numbers": lambda x: (x.to(torch.cfloat) * 1j).exp().real,
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_call_passes(x: Tensor, name: str) -> None:
    assert gradlib.per_sample_jacobian(GOOD[name], x).isfinite().all()


def test_inputs_of_very_different_size(x: Tensor) -> None:
    x[:, 0] = 1.7e9 + 1e5 * x[:, 0]
    gradlib.per_sample_jacobian(
        lambda x: torch.stack([x[:, 1].sin(), x[:, 0] / 1e9 * x[:, 1].cos()], 1), x
    )


@pytest.mark.parametrize("argnums", [0, "parameters"])
def test_under_autocast(argnums: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    x = torch.randn(6, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for mode in ("auto", "loop", "forward"):
            gradlib.per_sample_jacobian(model, x, argnums=argnums, mode=mode)


def test_not_a_number_in_one_sample_and_a_kink_in_another(x: Tensor) -> None:
    x[0, 0], x[1, 1] = float("nan"), 0
    found = gradlib.per_sample_jacobian(torch.relu, x)
    assert torch.equal(found[1:], diagonal((x > 0).double())[1:])


def test_zero_times_infinity_takes_rows() -> None:
    x = torch.randn(3, 1, dtype=torch.float64)

    def masked(x: Tensor) -> Tensor:
        repeated = torch.cat([x * k for k in range(1, 9)], 1)
        hidden = torch.arange(8) % 2 == 0
        return repeated.masked_fill(hidden, float("-inf")).logcumsumexp(1)

    rows = gradlib.per_sample_jacobian(masked, x, mode="loop", check=False)
    auto = gradlib.per_sample_jacobian(masked, x, check=False)
    assert torch.equal(rows.isnan(), auto.isnan())


def test_a_sparse_embedding() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 4, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens).sin().sum(1)

    tokens = torch.tensor([[1, 2], [3, 3]])
    found = gradlib.per_sample_jacobian(Bag().double(), tokens, argnums="parameters")
    assert found["table.weight"].shape == (2, 4, 6, 4)


@pytest.mark.parametrize("constant", [0.0, 1e5, 1e9])
def test_a_constant_hides_no_cut_path(x: Tensor, constant: float) -> None:
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(lambda x: constant + x.sin() + x.detach().cos(), x)


class Tagged(nn.Module):
    """Words, of which the first is none; what some of them say may be cut off."""

    def __init__(self, *, cut: bool, by_hand: bool) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 2)
        self.cut, self.by_hand = cut, by_hand
        nn.init.normal_(self.table.weight)  # the row of padding is not zero

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.table(tokens)
        if self.by_hand:
            words = F.embedding(tokens, self.table.weight, padding_idx=0)
        if self.cut:
            words = words * words.detach()
        return self.out(words.mean(1))


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_row_of_padding_is_constant(by_hand: bool) -> None:
    torch.manual_seed(0)
    tokens = torch.tensor([[1, 2, 0], [3, 0, 0]])
    model = Tagged(cut=False, by_hand=by_hand).double()
    found = gradlib.per_sample_jacobian(model, tokens, argnums="parameters")
    table = found["table.weight"]
    assert not table[:, :, 0].any()
    assert torch.allclose(table[0, :, 1], model.out.weight / 3)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(
            Tagged(cut=True, by_hand=by_hand), tokens, argnums="parameters"
        )


def test_a_row_of_padding_of_an_input_is_constant() -> None:
    table = torch.randn(6, 4, dtype=torch.float64)
    tokens = torch.tensor([[1, 2, 0], [3, 0, 0]])
    found = gradlib.per_sample_jacobian(
        lambda tokens, table: F.embedding(tokens, table, padding_idx=0).sum((1, 2)),
        tokens,
        table,
        argnums=1,
        in_dims=(0, None),
    )
    assert not found[:, 0].any()
    assert (found[0, 1] == 1).all()


def log_likelihood(a: Tensor) -> Tensor:
    normal = torch.distributions.MultivariateNormal(a.new_zeros(3), a)
    return normal.log_prob(a.new_ones(3))


FOR_SYMMETRIC: dict[str, Function] = {
    "cholesky": torch.linalg.cholesky,
    "eigvalsh": torch.linalg.eigvalsh,
    "eigenvectors": lambda a: torch.linalg.eigh(a)[1].abs(),
    "log-determinant": lambda a: torch.linalg.cholesky(a).diagonal(0, 1, 2).log(),
    "a likelihood": log_likelihood,
    "pseudo-inverse": lambda a: torch.linalg.pinv(a, hermitian=True),
}


def matrices(*, symmetric: bool) -> Tensor:
    torch.manual_seed(0)
    a = torch.randn(4, 3, 3, dtype=torch.float64)
    a = a @ a.mT + 3 * torch.eye(3)
    return a if symmetric else a + 0.01 * torch.randn(4, 3, 3)


@pytest.mark.parametrize("mode", ["auto", "loop", "forward"])
@pytest.mark.parametrize("name", FOR_SYMMETRIC)
def test_symmetric_matrices(name: str, mode: str) -> None:
    fn, a = FOR_SYMMETRIC[name], matrices(symmetric=True)
    found = gradlib.per_sample_jacobian(fn, a, mode=mode)
    whole = torch.autograd.functional.jacobian(fn, a)
    assert isinstance(whole, Tensor)
    alone = torch.stack([whole[i].select(-3, i) for i in range(len(a))])
    assert torch.allclose(found, alone)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(lambda a: fn(a) * fn(a).detach(), a)


def test_a_matrix_taken_for_symmetric_that_is_not() -> None:
    a = matrices(symmetric=False)
    with pytest.raises(DetachedPathError, match=r"cholesky .*\(A \+ A.mT\) / 2"):
        gradlib.per_sample_jacobian(torch.linalg.cholesky, a)
    gradlib.per_sample_jacobian(lambda a: torch.linalg.cholesky((a + a.mT) / 2), a)


FOR_TRIANGULAR: dict[str, Function] = {
    "cholesky_inverse": lambda a: torch.cholesky_inverse(a),
    "cholesky_solve": lambda a: torch.cholesky_solve(a.new_ones(4, 3, 2), a),
}


def slopes_by_differences(fn: Function, a: Tensor) -> Tensor:
    """Return dY/dA for each sample, by moving one entry after the other."""
    step = a.new_zeros(a.shape[1:])
    columns: list[Tensor] = []
    for place in range(a[0].numel()):
        step.zero_().flatten()[place] = 1e-6
        columns.append((fn(a + step) - fn(a - step)) / 2e-6)
    slopes = torch.stack(columns, -1)
    return slopes.reshape(*slopes.shape[:-1], *a.shape[1:])


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("mode", ["auto", "loop", "forward"])
@pytest.mark.parametrize("name", FOR_TRIANGULAR)
def test_triangular_matrices(name: str, mode: str, upper: bool) -> None:
    def fn(a: Tensor) -> Tensor:
        if name == "cholesky_inverse":
            return torch.cholesky_inverse(a, upper=upper)
        return torch.cholesky_solve(a.new_ones(4, 3, 2), a, upper=upper)

    a = torch.linalg.cholesky(matrices(symmetric=True), upper=upper)
    found = gradlib.per_sample_jacobian(fn, a, mode=mode)
    half = torch.ones(3, 3, dtype=torch.bool)
    half = half.triu() if upper else half.tril()
    expected = slopes_by_differences(fn, a)
    assert torch.allclose(found[..., half], expected[..., half], atol=1e-6)
    assert not expected[..., ~half].any()  # it reads nothing there
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(lambda a: fn(a) * fn(a).detach(), a)


@pytest.mark.parametrize("name", FOR_TRIANGULAR)
def test_a_matrix_taken_for_triangular_that_is_not(name: str) -> None:
    fn, a = FOR_TRIANGULAR[name], matrices(symmetric=True)
    with pytest.raises(DetachedPathError, match=rf"{name} .*wants A.tril\(\)"):
        gradlib.per_sample_jacobian(fn, a)
    found = gradlib.per_sample_jacobian(lambda a: fn(a.tril()), a)
    expected = slopes_by_differences(lambda a: fn(a.tril()), a)
    assert torch.allclose(found, expected, atol=1e-6)


CANCELLED: dict[str, Function] = {
    "a softmax's sum": lambda x: x.softmax(1).sum(1),
    "a steep softmax's sum": lambda x: (1e6 * x).softmax(1).sum(1),
    "a norm's norm": lambda x: F.normalize(x).norm(dim=1),
    "the one of Pythagoras": lambda x: x.sin() ** 2 + x.cos() ** 2,
}

CANCELLED_INSIDE: dict[str, Function] = {
    "a layer norm's sum": lambda x: F.layer_norm(x, x.shape[1:]).sum(1),
    "a layer norm's length": lambda x: F.layer_norm(x, x.shape[1:]).norm(dim=1),
    "a group norm's sum": lambda x: F.group_norm(x, 1).sum(1),
    "an instance norm's sum": lambda x: F.instance_norm(x[:, None]).sum((1, 2)),
    "a layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "a group norm": lambda x: F.group_norm(x, 1),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CANCELLED)
def test_columns_of_which_rounding_is_left(
    name: str, dtype: torch.dtype, check: bool
) -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        for shape in ((1, 2), (4, 3)):
            x = torch.randn(*shape).to(dtype)
            gradlib.per_sample_jacobian(CANCELLED[name], x, mode="forward", check=check)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CANCELLED_INSIDE)
def test_columns_of_which_rounding_inside_of_an_operation_is_left(
    name: str, dtype: torch.dtype
) -> None:
    for seed in range(24):
        torch.manual_seed(seed)
        for shape in ((1, 2), (1, 3), (2, 2)):
            x = torch.randn(*shape).to(dtype)
            # A GPU's kernels round columns there, and not rows: those are refused.
            narrow = x.is_cuda and dtype == torch.bfloat16
            with suppress(NoSuchWayError) if narrow else nullcontext():
                gradlib.per_sample_jacobian(
                    CANCELLED_INSIDE[name], x, mode="forward", check=False
                )


class MoreInRows(torch.autograd.Function):
    """Nothing; its backward adds a fifth of the gradient that has no graph."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return grads[0] + 0.2 * grads[0].detach()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("check", [True, False])
def test_columns_that_are_a_fifth_off_are_no_rounding(
    check: bool, dtype: torch.dtype
) -> None:
    more = cast(Any, MoreInRows.apply)
    for seed in range(8):
        torch.manual_seed(seed)
        for shape in ((1, 3), (4, 3), (2, 16)):
            x = torch.randn(*shape).to(dtype)
            with pytest.raises(NoSuchWayError, match="is not what a backward pass"):
                gradlib.per_sample_jacobian(
                    lambda x: more(x.sin() * x), x, mode="forward", check=check
                )


def test_columns_of_what_all_samples_share_that_are_a_fifth_off() -> None:
    more = cast(Any, MoreInRows.apply)
    shared = torch.randn(3)
    with pytest.raises(NoSuchWayError, match="is not what a backward pass"):
        gradlib.per_sample_jacobian(
            lambda x, shared: more(x * shared.sin()),
            torch.randn(4, 3),
            shared,
            argnums=1,
            in_dims=(0, None),
            mode="forward",
            check=False,
        )


@pytest.mark.parametrize(
    "hook",
    [
        lambda grad: (1.05 * grad).detach(),
        lambda grad: grad.clamp(-0.1, 0.1),
        lambda grad: grad + 0.05 * torch.randn_like(grad),
    ],
    ids=["detached", "clamped", "noisy"],
)
def test_what_a_hook_makes_is_no_rounding(hook: Function) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 2), torch.randn(2, 30)

    def fn(x: Tensor) -> Tensor:
        y = x @ weight
        y.register_hook(hook)
        return y.sin()

    with pytest.raises(NoSuchWayError):
        gradlib.per_sample_jacobian(fn, x, mode="forward", check=False)


@pytest.mark.parametrize("constant", [1e11, 1e12, 1e13, 1e16])
def test_an_input_lost_in_rounding_is_no_cut_path(constant: float) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(1, 2, dtype=torch.float64)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            gradlib.per_sample_jacobian(lambda x: (x + constant) - constant, x)
        assert all("rounding hides it" in str(it.message) for it in told)
        assert told or constant < 1e12


def test_what_cannot_be_told_is_said(x: Tensor) -> None:
    def chaotic(x: Tensor) -> Tensor:
        x = x.sigmoid().clamp(0, 1)  # of which chains know nothing
        for _ in range(60):
            x = 3.9 * x * (1 - x)
        return x

    with pytest.warns(UserWarning, match="cannot tell whether output changes") as said:
        gradlib.per_sample_jacobian(chaotic, x)
    assert said[0].filename == __file__


@pytest.mark.cpu  # with other draws, as of a GPU, one call in eight looks again
@pytest.mark.parametrize("seed", range(8))
def test_slopes_that_happen_to_cancel_are_no_doubt(seed: int) -> None:
    """Of thousands of samples a few change hardly along the direction of the check."""
    calls: list[Tensor] = []
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def fn(x: Tensor) -> Tensor:
        calls.append(x)
        return net(x).sin()

    gradlib.per_sample_jacobian(fn, torch.randn(8192, 2))
    assert len(calls) <= 5  # one, a pair, and perhaps a closer one, but no second look


def test_entries_too_steep_for_any_step_do_not_hide_among_others() -> None:
    """Of all entries together differences settle, as those of one are far larger."""
    x = torch.tensor([[0.7, 1.3], [0.4, 2.1]], dtype=torch.float64)

    def steep(x: Tensor) -> Tensor:
        return torch.cat([1e9 * x.sinh(), (1e11 * x).sin()], 1)

    def cut(x: Tensor) -> Tensor:
        return steep(x) + 1e7 * torch.cat([x.detach(), 0 * x], 1)

    with pytest.warns(UserWarning, match="too steep"):
        gradlib.per_sample_jacobian(steep, x)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(cut, x)


# Nothing is left behind.


class Retaining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.hidden: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.first(x).tanh()
        self.hidden.retain_grad()
        return self.last(self.hidden)


@pytest.mark.parametrize("mode", MODES)
def test_retained_gradients_are_not_filled(x: Tensor, mode: str) -> None:
    model = Retaining().double()
    for argnums in (0, "parameters") if mode != "split" else (0,):
        gradlib.per_sample_jacobian(model, x, mode=mode, argnums=argnums)
        assert model.hidden.retains_grad
        assert model.hidden.grad is None
    gradlib.plan_jacobian(model.forward, x)
    model(x).sum().backward()
    retained = model.hidden.grad
    assert retained is not None
    assert torch.equal(retained, model.last.weight.sum(0).expand(4, 4))


def test_the_class_of_tensors_is_changed_once_only(x: Tensor) -> None:
    gradlib.per_sample_jacobian(torch.sin, x)
    told = vars(Tensor)["retain_grad"]
    gradlib.per_sample_jacobian(torch.sin, x)
    assert vars(Tensor)["retain_grad"] is told


def test_retained_gradients_of_tensors_that_are_there_are_left(x: Tensor) -> None:
    given = x.requires_grad_() * 1
    given.retain_grad()
    y = given.sin()
    y.retain_grad()
    y.sum().backward(retain_graph=True)
    before = given.grad, y.grad
    gradlib.per_sample_jacobian_from_graph(y, given)
    assert (given.grad, y.grad) == before


def one_between(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h = x.sin()
    h.retain_grad()
    return h.cos(), [h]


def filled_before(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h = x.sin()
    h.retain_grad()
    h.cos().sum().backward(retain_graph=True)
    return h * h, [h]


def several_between(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h, between = x, list[Tensor]()
    for _ in range(4):
        h = (1.5 * h).tanh()
        h.retain_grad()
        between.append(h)
    between[1].grad = torch.ones_like(h)
    return h.exp() + between[0], between


def views_between(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h = x @ x.new_ones(3, 5)
    between = [h, h[:, 1:3], h.mT]
    for it in between:
        it.retain_grad()
    return between[1].sin() + between[2].mT[:, :2], between


def written_between(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h = x.sin()
    h.retain_grad()
    h.mul_(2)
    return h.cos(), [h]


def cast_between(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h = x.sin()
    h.retain_grad()
    return h.float().cos(), [h]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "make",
    [
        one_between,
        filled_before,
        several_between,
        views_between,
        written_between,
        cast_between,
    ],
)
def test_retained_gradients_between_tensors_that_are_there_are_left(
    x: Tensor,
    make: Callable[[Tensor], tuple[Tensor, list[Tensor]]],
    batch: int,
    create_graph: bool,
) -> None:
    x = x[:batch].clone().requires_grad_()
    elsewhere = x.cos()
    elsewhere.retain_grad()
    y, between = make(x)
    before = [it.grad for it in between]
    values = [None if it is None else it.clone() for it in before]
    gradlib.per_sample_jacobian_from_graph(y, x, create_graph=create_graph)
    for it, grad, value in zip(between, before, values, strict=True):
        assert it.grad is grad
        assert grad is None or (value is not None and torch.equal(grad, value))
        it.grad = None
    y.sum().backward()  # they are still retained
    assert all(it.grad is not None for it in between)
    assert elsewhere.retains_grad
    assert elsewhere.grad is None


def test_a_retained_gradient_of_which_only_the_graph_knows_is_left(x: Tensor) -> None:
    x.requires_grad_()
    h = x.sin()
    h.retain_grad()
    y = h * h
    del h
    gradlib.per_sample_jacobian_from_graph(y, x)
    node: Any = y.grad_fn
    assert node._saved_self.retains_grad
    assert node._saved_self.grad is None


def test_where_none_is_retained_nobody_looks_through_all_tensors(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> list[Tensor]:
        raise AssertionError("for nothing")

    monkeypatch.setattr(retained, "retaining", look)
    attention = nn.MultiheadAttention(3, 1, batch_first=True).double()
    x = x[:, None].requires_grad_()
    y = attention(x, x, x)[0] + x.sin() * x  # copies and sums on the way
    gradlib.per_sample_jacobian_from_graph(y, x)
    y.retain_grad()
    with pytest.raises(AssertionError, match="for nothing"):
        gradlib.per_sample_jacobian_from_graph(y, x)


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cpu").manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator, device="cpu").to(x)
        return (x * noise).sin()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["auto", "loop", "forward"])
def test_a_generator_of_its_own_draws_once(
    x: Tensor, mode: str, dtype: torch.dtype
) -> None:
    model, once = Noisy(), Noisy()
    x = x.to(dtype)
    gradlib.plan_jacobian(model, x)
    found = gradlib.per_sample_jacobian(model, x, mode=mode)
    given = x.clone().requires_grad_()
    [grad] = torch.autograd.grad(once(given).sum(), given)
    assert torch.allclose(found.sum(1), grad, 0.02)
    assert torch.equal(model.generator.get_state(), once.generator.get_state())


def test_a_generator_of_its_own_hides_no_cut_path(x: Tensor) -> None:
    model = Noisy()
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(lambda x: model(x) * x.detach(), x)


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x * torch.randn(3)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", ["auto", "loop", "forward", "split"])
@pytest.mark.parametrize("fn", [seeded, F.dropout], ids=["seeded", "dropout"])
def test_random_state_is_left_as_one_call_leaves_it(
    x: Tensor, fn: Function, mode: str, check: bool
) -> None:
    torch.manual_seed(2)
    fn(x)
    expected = torch.get_rng_state()
    torch.manual_seed(2)
    gradlib.per_sample_jacobian(fn, x, mode=mode, check=check)
    assert torch.equal(torch.get_rng_state(), expected)


def test_the_default_generator_by_name_is_replayed(x: Tensor) -> None:
    generator, calls = torch.default_generator, list[int]()

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        how: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        noise = torch.rand(x.shape, **how)
        return x * (noise * torch.rand(x.shape, generator=generator, **how)).to(x)

    before = generator.get_state()
    found = gradlib.per_sample_jacobian(fn, x)
    after = generator.get_state()
    assert len(calls) == 3  # no second look
    generator.set_state(before)
    assert torch.equal(found.sum(1), fn(torch.ones_like(x)))
    assert torch.equal(generator.get_state(), after)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def encode(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).tanh()


def ensemble(members: list[Counting]) -> Function:
    return lambda x: torch.stack([it.encode(x) for it in members], 1)


def by_name(members: dict[str, Counting]) -> Function:
    return lambda x: torch.stack([it.encode(x) for it in members.values()], 1)


METHODS: dict[str, Callable[[Counting], Function]] = {
    "method": lambda model: model.encode,
    "lambda": lambda model: lambda x: model.encode(x),
    "partial": lambda model: partial(model.encode),
    "partial of a function": lambda model: partial(Counting.encode, model),
    "partial of a lambda": lambda model: partial(lambda x: model.encode(x)),
    "member of a list": lambda model: ensemble([model]),
    "member of a dict": lambda model: by_name({"a": model}),
}


@pytest.mark.parametrize("how", METHODS)
def test_a_method_changes_its_module_once(x: Tensor, how: str) -> None:
    model = Counting()
    encode = METHODS[how](model)
    gradlib.plan_jacobian(encode, x)
    assert model.calls == 0
    gradlib.per_sample_jacobian(encode, x)
    assert model.calls == 1


class Rebuilds(nn.Module):
    """Makes a layer anew at each call, takes the next of several, and sets hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module = nn.Identity()
        self.pool = nn.ModuleList([nn.Tanh(), nn.Tanh(), nn.Tanh()])
        self.now: nn.Module = self.pool[2]
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.norm = nn.LayerNorm(x.shape[-1], device=x.device)
        self.norm.to(torch.float32)
        self.now = self.pool[self.calls]
        self.calls += 1
        self.register_full_backward_hook(lambda *_: None)
        return self.now(self.norm(x.float()).to(x))


@pytest.mark.parametrize("check", [True, False])
def test_children_and_hooks_that_a_call_sets_are_those_of_one(
    x: Tensor, check: bool
) -> None:
    model = Rebuilds()
    gradlib.plan_jacobian(model, x)
    assert (type(model.norm), model.now, model.calls) == (nn.Identity, model.pool[2], 0)
    assert not model._backward_hooks
    gradlib.per_sample_jacobian(model, x, check=check)
    assert (model.now, model.calls) == (model.pool[0], 1)
    assert (len(model._backward_hooks), len(model._modules)) == (1, 3)
    assert cast(Any, model.norm).weight.dtype == torch.float32


class Slotted(nn.Module):
    """Keeps what it counts in slots."""

    __slots__ = ("calls", "log", "seen")

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, torch.zeros(())
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(len(x))
        self.seen += 1
        return x.sin()


@pytest.mark.parametrize("check", [True, False])
def test_slots_are_those_of_one_call(x: Tensor, check: bool) -> None:
    model = Slotted()
    gradlib.plan_jacobian(model, x)
    assert (model.calls, model.log, model.seen) == (0, [], 0)
    gradlib.per_sample_jacobian(model, x, check=check)
    assert (model.calls, model.log, model.seen) == (1, [len(x)], 1)


@pytest.mark.parametrize("inside", [False, True])
def test_a_script_changes_its_buffers_once(x: Tensor, inside: bool) -> None:
    class Script(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x)

    script: Any = torch.jit.script(Script())
    model = nn.Sequential(script, nn.Tanh()) if inside else script
    gradlib.plan_jacobian(model, x)
    assert script.calls == 0
    gradlib.per_sample_jacobian(model, x)
    assert script.calls == 1


def test_a_function_with_a_name_that_is_nowhere_yet(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() if x.dim() else later(x)

    found = gradlib.per_sample_jacobian(fn, x)
    later = fn
    assert torch.equal(found, gradlib.per_sample_jacobian(later, x))


def test_a_plan_leaves_written_weights(x: Tensor) -> None:
    class Clamped(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name)
            self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(input)

    model = Clamped(3, 2).double()
    before = model.weight.clone()
    gradlib.plan_jacobian(model, x)
    assert torch.equal(model.weight, before)


def test_the_default_device_is_not_used(x: Tensor) -> None:
    with torch.device("meta"):  # as "cuda" would, where there is one
        found = gradlib.per_sample_jacobian(torch.sin, x)
    assert torch.equal(found, diagonal(x.cos()))


def test_a_result_in_a_buffer_is_refused(x: Tensor) -> None:
    model = nn.BatchNorm1d(3).double().eval()
    model.register_buffer("mine", torch.empty(4, 3, 3, dtype=torch.float64))
    with pytest.raises(JacobianArgumentError, match="shares memory with mine"):
        gradlib.per_sample_jacobian(model, x, out=model.mine)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_gradients_of_it(mode: str) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(3, 2).double(), nn.Linear(2, 3).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def jacobian(x: Tensor, weight: Tensor) -> Tensor:
        def fn(x: Tensor) -> Tensor:
            return last(torch.tanh(F.linear(x, weight)))

        return gradlib.per_sample_jacobian(
            fn, x, mode=mode, create_graph=True, check=False
        )

    assert torch.autograd.gradcheck(jacobian, (x, first.weight))
    assert torch.autograd.gradgradcheck(jacobian, (x, first.weight))


class _Forces(nn.Module):
    """It differentiates its output for an input that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        energy = self.energy(x) * scale
        if not x.requires_grad:
            return {"energy": energy}
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return {"energy": energy, "force": -slope}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("create_graph", [True, False])
def test_inputs_that_are_not_asked_for_keep_requiring_grad(
    check: bool, create_graph: bool
) -> None:
    torch.manual_seed(0)
    model = _Forces().double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(5, 1, dtype=torch.float64)
    for argnums in (1, "parameters"):
        found = gradlib.per_sample_jacobian(
            model,
            x,
            scale,
            argnums=argnums,
            check=check,
            create_graph=create_graph,
        )
        assert [*found] == ["energy", "force"]
        plan = gradlib.plan_jacobian(model, x, scale, argnums=argnums)
        assert plan.shapes[-1][:2] == (5, 3)
    assert x.grad is None


class _Residual(nn.Module):
    """It differentiates for one of its inputs, which need not require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        u = self.net(torch.cat([x, t], 1)).sin()
        return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("argnums", [1, "parameters"])
def test_a_plan_calls_as_the_checked_call_does(argnums: int | str) -> None:
    x, t = torch.rand(5, 1), torch.rand(5, 1)
    found: Any = gradlib.per_sample_jacobian(_Residual(), x, t, argnums=argnums)
    blocks = [found] if argnums == 1 else found.values()
    plan = gradlib.plan_jacobian(_Residual(), x, t, argnums=argnums)
    assert [*plan.shapes] == [it.shape for it in blocks]


class Adjoint(torch.autograd.Function):
    """A step of an equation whose backward calls the module again."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(y, *parameters)
        return y + f(y) / 8

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            slopes = torch.autograd.grad(ctx.f(y), [y, *parameters], grads[0] / 8)
        return None, grads[0] + slopes[0], *slopes[1:]


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Any, Adjoint).apply(self.f, x, *self.f.parameters())


@pytest.mark.parametrize("argnums", [0, "parameters"])
def test_a_backward_that_calls_modules(argnums: Any) -> None:
    """To count what they multiply, torch would set hooks that it forbids there."""
    model, x = Steps(), torch.randn(5, 4)
    plan = gradlib.plan_jacobian(model, x, argnums=argnums)
    assert plan.mode == "reverse"
    assert plan.work["reverse"] > 0
    gradlib.per_sample_jacobian(model, x, argnums=argnums)


def test_a_plan_makes_what_is_lazy() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LazyLinear(4), nn.Tanh()).double(), torch.randn(5, 3)
    plan = gradlib.plan_jacobian(model, x.double())
    assert [*plan.shapes] == [(5, 4, 3)]
    found = gradlib.per_sample_jacobian(model, x.double())
    reference = gradlib.per_sample_jacobian(model, x.double(), mode="loop", check=False)
    torch.testing.assert_close(found, reference)

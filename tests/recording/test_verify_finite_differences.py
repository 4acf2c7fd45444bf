"""`verify(numerical=True)` is right where plain finite differences are wrong."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib.recording import finite_differences

from .recorded import recorded


@pytest.mark.parametrize("slope", [2.0, 2.2])
@pytest.mark.parametrize("offset", [0.0, 100.0, 1e6])
def test_an_output_that_is_large_beside_its_slopes(slope: float, offset: float) -> None:
    class Energy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square().sum(1) + offset

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return slope * x * grads[0][:, None]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Energy.apply(x)

    torch.manual_seed(0)
    with gradlib.record(model := Model()) as recording:
        model(torch.randn(8, 5).double().requires_grad_()).sum().backward()
    found = recording.verify(numerical=True)
    assert found.ok == (slope == 2.0)
    if not found.ok:
        assert found.disagreements[0].error == pytest.approx(1 - 2.0 / slope, rel=0.5)


@pytest.mark.cpu
def test_finite_differences_of_what_onednn_lays_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            packed: Any = x
            return self.act(packed.to_mkldnn()).to_dense()

    with gradlib.record(model := Model()) as recording:
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert recording.verify().ok
    found = recording.verify(numerical=True)
    assert not found.disagreements
    reasons = {it.name: it.reason for it in found.skipped}
    assert "oneDNN, which knows no float64" in reasons["act"]


class Norm32(nn.Module):
    """Computes in float32 for inputs of any dtype, as many models do."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide @ torch.ones(x.shape[-1], x.shape[-1]).tril()
        scale = torch.ones(x.shape[-1], dtype=torch.float32)
        return (wide * scale * wide.float().square().mean(-1, True).rsqrt()).to(x.dtype)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).exp()


class Taking(nn.Module):
    """Receives its own parameter as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        if weight is None:
            return self(x, self.weight)
        return (x * weight).sin() + self.weight.cos()


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return y, y, x


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice()

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.twice(2 * x)
        return a + 2 * b + 3 * c


RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "kinks at the recorded point": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU()
        ),
        lambda: torch.randn(2, 2, 12, 12),
    ),
    "zeros": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        lambda: torch.zeros(3, 4),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()),
        lambda: torch.randn(6, 4),
    ),
    "float32 inside": (
        lambda: nn.Sequential(nn.Linear(4, 4), Norm32()),
        lambda: torch.randn(6, 4),
    ),
    "complex": (lambda: nn.Sequential(Complex(), Complex()), lambda: torch.randn(2, 3)),
    "words": (
        lambda: nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.GELU()),
        lambda: torch.tensor([[0, 3], [3, 3]]),
    ),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Tanh()),
        lambda: torch.tensor([[0, 3], [3, 3]]),
    ),
    "recurrent": (lambda: nn.LSTM(3, 4, 2, dropout=0.4), lambda: torch.randn(5, 2, 3)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
        lambda: torch.randn(2, 5, 4),
    ),
    "its own parameter as argument": (Taking, lambda: torch.randn(3, 4)),
    "one tensor returned twice": (Both, lambda: torch.randn(3, requires_grad=True)),
    "bfloat16": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(torch.bfloat16),
        lambda: torch.randn(3, 4, dtype=torch.bfloat16),
    ),
}

# cuDNN has a random state of its own for dropout: such a call is not replayed.
ON_A_CPU = pytest.param("recurrent", marks=pytest.mark.cpu)


@pytest.mark.parametrize(
    "kind", [ON_A_CPU if it == "recurrent" else it for it in RIGHT]
)
def test_right_ones_pass(kind: str) -> None:
    torch.manual_seed(0)
    make, given = RIGHT[kind]
    net = make()
    recording = recorded(net, given())
    before = torch.get_rng_state(), torch.get_default_dtype()
    found = recording.verify(numerical=True)
    assert found.ok, str(found)
    assert found.skipped == ()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_default_dtype() == before[1]


NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def nested(layout: torch.layout, *lengths: int) -> Tensor:
    parts = [torch.randn(length, 4) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)


def recorded_nested(net: nn.Module, x: Tensor) -> gradlib.Recording:
    with gradlib.record(net) as recording:
        torch.nested.to_padded_tensor(net(x), 0.0).square().sum().backward()
    return recording


@NESTED
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout: torch.layout) -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nested(layout, *lengths) if lengths else x

    lengths: tuple[int, ...] = ()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4), Cut())
    recording = recorded_nested(net, nested(layout, 2, 3))
    found = recording.verify(numerical=True)
    assert found.agreed == len(recording), str(found)
    lengths = (4, 1)
    found = recording.verify().disagreements[-1]
    assert found.name == "3"
    assert found.reason.startswith("shapes [[2, 4], [3, 4]] and [[4, 4], [1, 4]]: ")


@NESTED
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_wrong_gradient_of_a_nested_tensor(layout: torch.layout) -> None:
    class Cheat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight, self.bias)
            return y + y.detach()

    net = nn.Sequential(Cheat(), nn.Linear(3, 2))
    found = recorded_nested(net, nested(layout, 2, 3)).verify(numerical=True)
    assert {(it.name, it.field) for it in found.disagreements} == {
        ("0", "grad_input[0]"),
        ("0", "param_grads['weight']"),
        ("0", "param_grads['bias']"),
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs(layout: torch.layout, factor: float) -> None:
    class Dense(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.to_dense()
            return factor * y + (1 - factor) * y.detach()

    x = torch.tensor([[1.0, 0.0], [3.0, 2.0]]).to_sparse(layout=layout)
    found = recorded(Dense(), x.requires_grad_()).verify(numerical=True)
    assert found.ok == (factor == 1)
    assert not found.skipped


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_outputs(layout: torch.layout, factor: float) -> None:
    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = factor * x + (1 - factor) * x.detach()
            return y.to_sparse(layout=layout)

    x = torch.tensor([[1.0, 0.0], [3.0, 2.0]], requires_grad=True)
    with gradlib.record(model := Sparse()) as recording:
        model(x).to_dense().square().sum().backward()
    found = recording.verify(numerical=True)
    assert found.ok == (factor == 1)
    assert not found.skipped


@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast(backward_inside: bool) -> None:
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    weights = torch.randn(2, 5, 8)
    with gradlib.record(net) as recording:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            loss = (net(torch.randn(2, 5, 8)).float() * weights).sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
    found = recording.verify(numerical=True)
    assert found.ok, str(found)
    assert recording.verify(rtol=1e-5).ok


@pytest.mark.parametrize("wrong", ["weight", "bias"])
def test_a_wrong_gradient_of_one_parameter(wrong: str) -> None:
    class Affine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            x, weight = ctx.saved_tensors
            (grad,) = grads
            of_weight, of_bias = grad.T @ x, grad.sum(0)
            if wrong == "weight":
                of_weight = of_weight + 0.01
            else:
                of_bias = of_bias[[1, 0, *range(2, len(of_bias))]]
            return grad @ weight, of_weight, of_bias

    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
            return Affine.apply(input, self.weight, self.bias)

    recording = recorded(nn.Sequential(Layer(3, 5), nn.Tanh()), torch.randn(6, 3))
    assert recording.verify().ok
    (found,) = recording.verify(numerical=True).disagreements
    assert (found.name, found.field) == ("0", f"param_grads[{wrong!r}]")


def test_what_has_no_float64_is_skipped() -> None:
    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("float32 only")
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            assert ctx.needs_input_grad[0]
            return 2 * grads[0]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Narrow.apply(x)

    recording = recorded(Model(), torch.randn(3, requires_grad=True))
    assert recording.verify().ok
    found = recording.verify(numerical=True)
    assert not found.ok
    reason = found.skipped[0].reason
    assert "again raised TypeError: float32 only. Finite differences compute" in reason


@pytest.mark.parametrize("padding", [0, -1, None])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_padding_gets_no_gradient_on_purpose(kind: Any, padding: int | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(kind(5, 3, padding_idx=padding), nn.Linear(3, 2))
    recording = recorded(net, torch.tensor([[1, 0, 2, 2], [3, 4, 0, 0]]))
    found = recording.verify(numerical=True)
    assert (found.disagreements, found.skipped) == ((), ())


def test_a_wrong_gradient_of_an_embedding_with_padding() -> None:
    class Wrong(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as torch names it)
            found = super().forward(input)
            return found + found.detach()

    recording = recorded(Wrong(5, 3, padding_idx=0), torch.tensor([1, 0, 2]))
    (found,) = recording.verify(numerical=True).disagreements
    assert found.field == "param_grads['weight']"


def test_weights_of_a_module_that_is_not_called_are_said_to_be_left_out() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 4)
            self.own = nn.Parameter(torch.ones(4))
            self.frozen = nn.Linear(3, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.own * nn.functional.linear(x, self.lin.weight, self.lin.bias)

    model = nn.Sequential(Fused(), nn.Linear(4, 2))
    found = recorded(model, torch.randn(5, 3)).verify(numerical=True)
    assert found.ok
    assert found.unchecked == ("0.lin.weight", "0.lin.bias")
    said = "not checked: the gradients of 0.lin.weight, 0.lin.bias. Each stands in"
    assert said in " ".join(str(found).split())
    assert recorded(model, torch.randn(5, 3)).verify().unchecked == ()


def test_a_shared_module_is_checked_by_whichever_name_it_is_called() -> None:
    trunk = nn.Linear(3, 4)
    model = nn.ModuleDict({"trunk": trunk, "q": nn.Sequential(trunk, nn.Tanh())})
    model.forward = lambda x: model["q"](x)
    found = recorded(model, torch.randn(5, 3)).verify(numerical=True)
    assert found.ok
    assert found.unchecked == ()


def test_weights_that_the_first_batch_sets_are_said_to_be_left_out() -> None:
    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))
            self.is_set = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_set:
                with torch.no_grad():
                    self.shift.copy_(-x.mean(0))
                self.is_set = True
            return x + self.shift

    model = nn.Sequential(Centres(), nn.Tanh())
    for unchecked in (("0.shift",), ()):
        found = recorded(model, torch.randn(5, 3)).verify(numerical=True)
        assert (found.disagreements, found.unchecked) == ((), unchecked)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [nn.Tanh, nn.Sigmoid])
def test_saturated_activations_are_rounding(
    kind: type[nn.Module], dtype: torch.dtype
) -> None:
    for value in (4.0, 6.0, 9.0, 17.0, 40.0):
        x = torch.full((3, 2), value, dtype=dtype, requires_grad=True)
        assert recorded(kind(), x).verify(numerical=True).ok, value


class Steps(torch.autograd.Function):
    """Rounds; its backward passes the gradient on unchanged."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return grads[0]


@pytest.mark.parametrize("size", [1.0, 1e-5, 1e-9, 1e-11, 1e-20])
def test_values_next_to_nothing(size: float) -> None:
    drawn = size * torch.randn(5, 3, dtype=torch.float64)
    for function, is_right in ((lambda x: x.exp() - 1, True), (Steps.apply, False)):
        recording = recorded(Calls(function), drawn.clone().requires_grad_())
        assert recording.verify(numerical=True).ok == is_right


class Calls(nn.Module):
    """A module that applies a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_all_modules_are_called() -> None:
    whole = recorded(nn.Sequential(nn.Linear(3, 2)), torch.randn(5, 3))
    assert whole.verify(numerical=True).unchecked == ()


def test_what_a_call_does_not_use_as_it_is_said_to_be_left_out() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.empty(3, device="meta"))
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x)

    net = nn.Sequential(Unused(), whole := nn.Linear(2, 5))
    cast(Any, whole).gathered = [whole.weight.detach().clone()]
    whole.weight.data = torch.empty(0)  # another is gathered for each call

    def gather(module: Any, _: object) -> None:
        module.weight.data = module.gathered[0]

    whole.register_forward_pre_hook(gather)
    found = recorded(net, torch.randn(3, 4)).verify(numerical=True)
    assert found.ok
    assert set(found.unchecked) == {"0.unused", "1.weight"}
    assert "has no values, is written to or replaced in a call" in " ".join(
        str(found).split()
    )


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_values_that_cannot_be_checked_hide_no_other(factor: float) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.empty(3, device="meta"))
            self.shift = nn.Parameter(torch.zeros(3))
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.shift.fill_(2)
            weight = self.weight * 1
            if weight.requires_grad:
                weight.register_hook(lambda grad: grad * factor)
            return x * weight + self.shift

    x = torch.randn(5, 3, requires_grad=True)
    found = recorded(nn.Sequential(Several()), x).verify(numerical=True)
    fields = [it.field for it in found.disagreements]
    assert fields == ["param_grads['weight']"] * (factor > 1)
    assert set(found.unchecked) == {"0.unused", "0.shift"}


class OfFloat32Alone(nn.Module):
    """A linear layer around a kernel that knows no float64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("no kernel")
        return self.linear(x)


@pytest.mark.parametrize("of_input", [False, True])
def test_a_call_that_raises_in_float64(of_input: bool) -> None:
    x = torch.randn(5, 3, requires_grad=of_input)
    recording = recorded(OfFloat32Alone(), x)
    assert recording.verify().agreed == 2
    (skipped,) = recording.verify(numerical=True).skipped
    assert skipped.reason == (
        "Computing it again raised RuntimeError: no kernel. Finite differences compute "
        "it in float64; as it was recorded, verify() without numerical=True compares it"
    )


def test_a_leaf_that_the_forward_makes_is_a_leaf_in_float64() -> None:
    class OwnLeaf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale = torch.ones(3, requires_grad=True)
            with torch.enable_grad():
                scale.square().sum().backward()
            return x * cast(Tensor, scale.grad)

    found = recorded(OwnLeaf(), torch.randn(5, 3, requires_grad=True))
    assert found.verify(numerical=True).agreed == 1


def test_another_shape_in_float64() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight
            return y.flatten() if y.dtype == torch.float64 else y

    with gradlib.record(model := Flat()) as recording:
        model(torch.randn(5, 3)).sum().backward()
    found = recording.verify(numerical=True)
    assert found.ok
    assert found.unchecked == ("weight",)


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_parameter_in_eight_bits(factor: float) -> None:
    class Widened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn))

        def forward(self, x: Tensor) -> Tensor:
            wide = self.narrow.to(x.dtype) * 1
            if wide.requires_grad:
                wide.register_hook(lambda grad: grad * factor)
            return x @ wide

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Widened())
    found = recorded(net, torch.randn(3, 4)).verify(numerical=True)
    assert found.ok == (factor == 1.0)
    fields = {it.field for it in found.disagreements}
    assert fields == ({"param_grads['narrow']"} if factor > 1 else set())


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize(
    "x", [[0.0, 3.0], [[1.0, 2.0], [0.0, 0.0], [1.0, 1.0]]], ids=["entries", "rows"]
)
def test_the_shape_of_an_output_that_hangs_on_zeros(x: Any, factor: float) -> None:
    class NotPadding(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = x[x != 0] if x.dim() == 1 else x[x.abs().sum(1) > 0]
            return factor * y + (1 - factor) * y.detach()

    model, inputs = NotPadding(), torch.tensor(x, requires_grad=True)
    with gradlib.record(model) as recording:
        model(inputs).square().sum().backward()
    found = recording.verify(numerical=True)
    assert found.ok == (factor == 1), str(found)
    assert found.unchecked == ()


def test_an_output_of_another_shape_for_each_value_is_said_to_be_unchecked() -> None:
    class Some(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x[: 1 + next(lengths) % 3]

    lengths = iter(range(1, 1000))
    model, x = Some(), torch.ones(4, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    lengths = iter([1, *range(1000)])  # the first call again, and then any
    found = recording.verify(numerical=True)
    assert not found.disagreements
    assert found.unchecked == ("args[0]",)
    assert "has no slope along it, or" in " ".join(str(found).split())


@pytest.mark.parametrize("seed", range(8))
def test_a_loss_over_other_random_numbers_in_float64_is_not_accused(seed: int) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8) / 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy((x * torch.rand_like(x)) @ self.weight.T, y)

    torch.manual_seed(seed)
    model, x = Noisy(), torch.randn(32, 8, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x, torch.randint(0, 3, (32,))).backward()
    found = recording.verify(numerical=True)
    assert found.ok, str(found)


class Sum(nn.Module):
    """Sums functions of many tensors up, and counts how often it is called."""

    times = 0

    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, several: list[Tensor]) -> Tensor:
        Sum.times += 1
        pairs = zip(self.functions, several, strict=True)
        return torch.stack([function(x).sum() for function, x in pairs]).sum()


class Cube(torch.autograd.Function):
    """Its gradient is off by a part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, off: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.off = off
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        slope = 3 * x**2
        return grads[0] * (slope + ctx.off * slope.norm()), None


def wrong_among(functions: list[Any], tensors: list[Tensor]) -> tuple[set[str], int]:
    """Return the fields that disagree, and how often the forward was run for that."""
    with gradlib.record(model := Sum(*functions)) as recording:
        model(tensors).backward()
    before = Sum.times
    found = recording.verify(numerical=True)
    assert not found.skipped
    assert found.unchecked == ()
    return {it.field for it in found.disagreements}, Sum.times - before


def drawn(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, requires_grad=True) for _ in range(count)]


def test_of_many_tensors_all_are_moved_at_once() -> None:
    few, many = (wrong_among([torch.sin] * count, drawn(count))[1] for count in (4, 64))
    assert few == many


@pytest.mark.parametrize("wrong", [[5], [0, 7, 8]])
def test_of_many_tensors_the_wrong_ones_are_named(wrong: list[int]) -> None:
    functions: list[Any] = [torch.sin] * 16
    for place in wrong:
        functions[place] = lambda x: Cube.apply(x, 1e-3)
    fields, _ = wrong_among(functions, drawn(16))
    assert fields == {f"grad_input[0][{it}]" for it in wrong}


def test_the_wrong_one_of_many_tensors_is_found_by_halves() -> None:
    functions: list[Any] = [torch.sin] * 32
    functions[17] = lambda x: Cube.apply(x, 1e-3)
    fields, times = wrong_among(functions, drawn(32))
    assert fields == {"grad_input[0][17]"}
    # All looks at it alone, and for each time that its part is halved, two looks at one
    # half and one at the other: a look at each of the 32 alone would be more.
    assert times < 32 * 9


@pytest.mark.parametrize("right", [0, 8])
def test_where_very_many_are_wrong_the_first_are_named(
    monkeypatch: pytest.MonkeyPatch, right: int
) -> None:
    monkeypatch.setattr(finite_differences, "MOST_NAMED", 2)
    times: list[int] = []
    for count in (16, 32):
        wrong: list[Any] = [lambda x: Cube.apply(x, 1e-3)] * count
        functions = [*wrong, *[torch.sin] * right]
        with gradlib.record(model := Sum(*functions)) as recording:
            model(drawn(count + right)).backward()
        before = Sum.times
        found = recording.verify(numerical=True)
        times.append(Sum.times - before)
        assert len(found.disagreements) in (2, 3)
        named = {it.field for it in found.disagreements} | {
            it.replace("args", "grad_input") for it in found.unchecked
        }
        assert {f"grad_input[0][{it}]" for it in range(count)} <= named
        said = "or comes after dozens in its call that are wrong"
        assert said in " ".join(str(found).split())
    assert times[1] < 1.5 * times[0]  # each once more would be twice as many


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_a_wrong_gradient_next_to_a_far_larger_one_is_named(size: float) -> None:
    functions = [lambda x: 1e3 * x.sin(), lambda x: size * Cube.apply(x, 0.5)]
    assert wrong_among(functions, drawn(2))[0] == {"grad_input[0][1]"}


def test_of_tensors_that_are_moved_at_once_none_is_accused() -> None:
    twice, ones = drawn(2)
    functions: list[Any] = [
        *[torch.sin] * 2,  # of one tensor
        lambda x: 1e-9 * x.cos(),
        lambda x: 0 * x,
        torch.relu,  # at a kink
        lambda x: x.abs().sqrt(),  # with infinite slopes, and NaN for its gradient
    ]
    zeros = [torch.zeros(3, requires_grad=True) for _ in range(3)]
    tensors = [twice, twice, ones, *zeros[:2], torch.ones(3, requires_grad=True)]
    assert wrong_among(functions, tensors)[0] == set()


def test_a_gradient_that_is_cut_off_is_named_among_others() -> None:
    def cut(x: Tensor) -> Tensor:
        return x.detach() + 0 * x

    fields, _ = wrong_among([torch.sin, cut, lambda x: 0 * x, torch.cos], drawn(4))
    assert fields == {"grad_input[0][1]"}


class InFloat32(nn.Module):
    """Computes in float32, by name, inside a checkpoint, as large models do."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.reentrant = reentrant

    def inner(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        weights = h.softmax(-1, dtype=torch.float32)
        return (weights * self.norm(h).float()).to(h.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_in_float64_again(
    reentrant: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), InFloat32(reentrant)).to(dtype)
    with gradlib.record(net) as recording:
        net(torch.randn(5, 4, dtype=dtype)).square().sum().backward()
    found = recording.verify(numerical=True)
    assert (found.agreed, found.skipped) == (5, ())

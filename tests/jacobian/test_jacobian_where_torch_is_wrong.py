"""Where torch goes wrong behind a Jacobian, and with what: each must stay so, or go."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.testing import assert_close

import gradlib
from gradlib import NoSuchWayError
from gradlib.random_state import seed_all


class Kernel(nn.Module):
    """Distances to centres, as in a network of radial basis functions."""

    def __init__(self, p: float = 2.0) -> None:
        super().__init__()
        seed_all(0)
        self.centres = nn.Parameter(torch.randn(4, 2))
        self.p, self.out = p, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((-torch.cdist(x, self.centres, self.p)).exp())


def test_torch_goes_wrong_for_several_vectors_through_cdist() -> None:
    a, b = torch.randn(5, 2, requires_grad=True), torch.randn(4, 2)
    y, vectors = torch.cdist(a, b), torch.randn(3, 5, 4)

    def one(v: Tensor) -> Tensor:
        return torch.autograd.grad(y, a, v, retain_graph=True)[0]

    right = torch.stack([one(v) for v in vectors])
    assert not torch.allclose(vmap(one)(vectors), right)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("mode", ["auto", "reverse"])
@pytest.mark.parametrize("argnums", [0, "parameters"])
def test_distances(check: bool, p: float, mode: str, argnums: Any) -> None:
    model, x = Kernel(p), torch.randn(5, 2)

    def jacobian(**options: Any) -> Any:
        return gradlib.per_sample_jacobian(model, x, argnums=argnums, **options)

    found = jacobian(mode=mode, check=check)
    assert_close(found, jacobian(mode="loop"))
    found = jacobian(mode="reverse", check=check, chunk_size=2)
    assert_close(found, jacobian(mode="loop"))


class Distances(nn.Module):
    """Distances to centres by so many weights that samples are taken apart for them."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2**17, 1)
        self.register_buffer("centres", torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        centres: Any = self.centres
        h = self.lin(x)[:, None]
        return torch.cdist(h, centres.expand(len(x), -1, -1))[:, 0]


def test_distances_by_many_parameters() -> None:
    seed_all(11)
    model, x = Distances(), torch.randn(3, 2**17)
    found = gradlib.per_sample_jacobian(model, x, argnums="parameters")
    truth = gradlib.per_sample_jacobian(model, x, argnums="parameters", mode="loop")
    assert_close(found, truth)


def test_distances_from_a_graph() -> None:
    model, x = Kernel(), torch.randn(5, 2, requires_grad=True)
    found = gradlib.per_sample_jacobian_from_graph(model(x), x)
    assert_close(found, gradlib.per_sample_jacobian(model, x, mode="loop"))


def test_the_plan_says_why_rows_go_one_by_one() -> None:
    plan = gradlib.plan_jacobian(Kernel(), torch.randn(5, 2))
    assert (plan.mode, plan.chunk) == ("loop", 1)
    assert "wrong for several rows of CdistBackward0 at once" in plan.why


def _distances(x: Tensor) -> Tensor:
    return torch.cdist(x[:, None], torch.linspace(0, 1, 40).view(20, 2))[:, 0]


def _attention(x: Tensor) -> Tensor:
    """Attend over 20 tokens of one head, by a fused kernel."""
    tokens = x[:, None, None, :] * torch.linspace(0, 1, 20)[:, None]
    return F.scaled_dot_product_attention(tokens, tokens, tokens).flatten(1)


ONCE = pytest.mark.skipif(
    torch.__version__ >= "2.14", reason="torch 2.14.1 has its second derivative"
)
_ON_CPU = torch.get_default_device().type == "cpu"
FUSED = pytest.mark.skipif(not _ON_CPU, reason="a GPU may have no such kernel")


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        pytest.param(_distances, "Cdist", marks=ONCE),
        pytest.param(_attention, "ScaledDotProduct", marks=FUSED),
    ],
)
def test_the_plan_has_no_columns_where_torch_has_no_second_derivative(
    fn: Callable[[Tensor], Tensor], name: str
) -> None:
    x = torch.randn(3, 2)
    with pytest.raises(NoSuchWayError, match="cannot be differentiated twice"):
        gradlib.per_sample_jacobian(fn, x, mode="forward")
    plan = gradlib.plan_jacobian(fn, x)
    why = str(plan.counts["forward"])
    assert re.fullmatch(rf"torch differentiates {name}\w*Backward0 only once", why)
    assert plan.mode != "forward"
    truth = gradlib.per_sample_jacobian(fn, x, mode="loop")
    assert_close(gradlib.per_sample_jacobian(fn, x), truth)


@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch has none before 2.14")
@pytest.mark.parametrize("mode", ["auto", "forward"])
def test_distances_have_columns_where_torch_has_their_second_derivative(
    mode: str,
) -> None:
    x = torch.randn(3, 2)
    assert isinstance(gradlib.plan_jacobian(_distances, x).counts["forward"], int)
    truth = gradlib.per_sample_jacobian(_distances, x, mode="loop")
    assert_close(gradlib.per_sample_jacobian(_distances, x, mode=mode), truth)


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(_distances, marks=ONCE),
        pytest.param(_attention, marks=FUSED),
    ],
)
def test_a_split_may_have_it_before_its_tensor_but_not_after(
    fn: Callable[[Tensor], Tensor],
) -> None:
    narrow, wide = nn.Linear(2, 1), torch.linspace(0, 1, 40)

    def before(x: Tensor) -> Tensor:
        return fn(x.tanh()).mean(1, keepdim=True).sin() * wide

    def after(x: Tensor) -> Tensor:
        return fn(narrow(x).sin() * wide[:2])

    x = torch.randn(3, 2)
    assert gradlib.plan_jacobian(before, x, mode="split").counts["split"] == 1
    found = gradlib.per_sample_jacobian(before, x, mode="split")
    assert_close(found, gradlib.per_sample_jacobian(before, x, mode="loop"))
    plan = gradlib.plan_jacobian(after, x, mode="split")
    assert "only once" in str(plan.counts["split"])
    with pytest.raises(NoSuchWayError, match="cannot be differentiated twice"):
        gradlib.per_sample_jacobian(after, x, mode="split")


class Triples(torch.autograd.Function):
    """Right for one vector, and wrong for several."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        del ctx, inputs, output

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return (2 if info else 0) * args[0], in_dims[0]

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override] (torch's form)
        return 3 * grad


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Any:  # type: ignore[override] (torch's form)
        return Triples.apply(grad)


@pytest.mark.parametrize(
    "ask",
    [
        lambda fn, x: gradlib.per_sample_jacobian(fn, x),
        lambda fn, x: gradlib.per_sample_jacobian(fn, x, mode="reverse"),
        lambda fn, x: gradlib.per_sample_jacobian(fn, x, chunk_size=2),
        lambda fn, x: gradlib.per_sample_jacobian_from_graph(fn(x), x),
        lambda fn, x: gradlib.per_sample_jacobian(fn, x, create_graph=True),
    ],
)
def test_a_check_holds_several_rows_against_one(
    ask: Callable[[Any, Tensor], Tensor],
) -> None:
    def fn(x: Tensor) -> Tensor:
        return Tripled.apply(x.tanh()).cumsum(1)

    x = torch.randn(4, 6, requires_grad=True)
    right = gradlib.per_sample_jacobian(fn, x, mode="loop")
    assert_close(ask(fn, x), right)
    wrong = gradlib.per_sample_jacobian(fn, x, mode="reverse", check=False)
    assert not torch.allclose(wrong, right)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh()),
    "LayerNorm first": lambda: nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)),
    "LayerNorm of tokens": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)), nn.Linear(1, 4), nn.LayerNorm(4), nn.Flatten()
    ),
    "InstanceNorm1d": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        nn.Conv1d(1, 2, 1),
        nn.InstanceNorm1d(2, affine=True),
        nn.Flatten(),
    ),
    "GroupNorm": lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4)),
    "RMSNorm": lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)),
}


@pytest.mark.parametrize("mode", ["auto", "reverse", "loop"])
@pytest.mark.parametrize("name", NORMS)
def test_a_loss_of_the_jacobian_by_the_weights_of_a_norm(name: str, mode: str) -> None:
    seed_all(0)
    model, x = NORMS[name]().double(), torch.randn(2, 3).double().requires_grad_()
    for parameter in model.parameters():
        nn.init.normal_(parameter)

    def loss(**how: Any) -> Tensor:
        found = gradlib.per_sample_jacobian(
            model, x, argnums="parameters", mode=mode, **how
        )
        return sum((it.sin().sum() for it in found.values()), torch.zeros(()))

    weight = next(it for it in model.parameters() if it.dim() > 1 or len(it) > 1)
    grads = torch.autograd.grad(loss(create_graph=True), [x, weight])
    for grad, along in zip(grads, (x, weight), strict=True):
        expected = differences(partial(loss, check=False), along)
        assert_close(grad, expected, rtol=1e-6, atol=1e-7)


def differences(value: Callable[[], Tensor], along: Tensor) -> Tensor:
    step, entries = 1e-5, along.detach().view(-1)
    found = torch.empty_like(entries)
    for i in range(len(entries)):
        was = entries[i].item()
        sides: list[float] = []
        for moved in (was + step, was - step):
            entries[i] = moved
            sides.append(value().item())
        entries[i] = was
        found[i] = (sides[0] - sides[1]) / (2 * step)
    return found.view_as(along)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "reverse", "loop"])
def test_one_sample_in_channels_last(mode: Any, batch: int) -> None:
    seed_all(0)
    norm = nn.BatchNorm2d(3).eval()
    nn.init.uniform_(cast(Tensor, norm.running_var), 0.5, 2)
    model = nn.Sequential(norm, nn.Tanh(), nn.Conv2d(3, 2, 3), nn.Flatten()).double()
    x = (
        torch.randn(batch, 3, 4, 4)
        .double()
        .contiguous(memory_format=torch.channels_last)
    )
    x.requires_grad_()

    def loss() -> Tensor:
        found = gradlib.per_sample_jacobian(model, x, mode=mode, create_graph=True)
        return found.sin().sum()

    (grad,) = torch.autograd.grad(loss(), x)
    along, step = torch.randn_like(x), 1e-5
    sides: list[float] = []
    for times in (step, -2 * step):
        with torch.no_grad():
            x += times * along
        sides.append(loss().item())
    slope = (sides[0] - sides[1]) / (2 * step)
    assert (grad * along).sum().item() == pytest.approx(slope, rel=1e-6)


@pytest.mark.cpu
def test_torch_goes_wrong_for_instance_norm_of_one_sample_in_channels_last() -> None:
    seed_all(0)

    def last(x: Tensor) -> Tensor:
        return F.instance_norm(x).permute(0, 2, 3, 1).sin()

    x = torch.randn(1, 4, 3, 3).double()
    with pytest.raises(gradlib.DetachedPathError, match="may be an instance norm"):
        gradlib.per_sample_jacobian(last, x)
    found = gradlib.per_sample_jacobian(last, x.repeat(2, 1, 1, 1))[:1]
    right = gradlib.per_sample_jacobian(lambda x: F.instance_norm(x).sin(), x)
    assert_close(found, right.permute(0, 2, 3, 1, 4, 5, 6))


@pytest.mark.cpu  # a GPU takes the root in float32: differences of 1e-6 are lost in it
def test_torch_goes_wrong_for_the_second_derivative_of_weight_norm() -> None:
    v = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    g = torch.rand(2, 1, dtype=torch.double, requires_grad=True)

    def norm(v: Tensor, g: Tensor) -> Tensor:
        normed: Any = torch._weight_norm  # type: ignore[attr-defined] (stubs)
        return normed(v, g, 0)

    assert torch.autograd.gradcheck(norm, (v, g))
    with pytest.raises(RuntimeError, match="mismatch"):
        torch.autograd.gradgradcheck(norm, (v, g))


def test_torch_goes_wrong_for_the_second_derivative_of_logcumsumexp() -> None:
    x = torch.tensor([0.5, 0.3], dtype=torch.double, requires_grad=True)
    v = torch.tensor([1.0, 0.0], dtype=torch.double, requires_grad=True)
    y = torch.logcumsumexp(x, 0)
    (grad,) = torch.autograd.grad(y, x, v, create_graph=True)
    (of_v,) = torch.autograd.grad(grad.sum(), v)
    assert of_v.isnan().any()  # one by one, it would be
    with pytest.raises(gradlib.NoSuchWayError, match="second derivative of Logcumsum"):
        gradlib.per_sample_jacobian(
            lambda x: x.logcumsumexp(1).square(), x[None], create_graph=True
        )


SINGULAR = torch.stack([torch.tensor([[1.0, 2], [2, 4]]), torch.eye(2)]).double()
COFACTORS = torch.stack([torch.tensor([[4.0, -2], [-2, 1]]), torch.eye(2)]).double()


def test_torch_goes_wrong_for_the_determinant_of_a_singular_matrix() -> None:
    a = SINGULAR[0].clone().requires_grad_()
    y = torch.linalg.det(a)
    assert torch.autograd.grad(y, a, retain_graph=True)[0].tolist() == [[0, 0], [0, 0]]
    (right,) = torch.autograd.grad(y, a, create_graph=True)
    assert_close(right.detach(), COFACTORS[0])


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", ["auto", "reverse", "loop"])
@pytest.mark.parametrize("create_graph", [True, False])
def test_determinants_of_singular_matrices(
    mode: Any, create_graph: bool, check: bool
) -> None:
    options = {"mode": mode, "create_graph": create_graph, "check": check}
    det: Any = torch.linalg.det
    found = gradlib.per_sample_jacobian(det, SINGULAR, **options)
    assert_close(found.detach(), COFACTORS)
    assert found.requires_grad == create_graph
    out = torch.empty_like(COFACTORS)
    if not create_graph:
        gradlib.per_sample_jacobian(det, SINGULAR, out=out, **options)
        assert_close(out, COFACTORS)
        assert not out.requires_grad
    x = SINGULAR.clone().requires_grad_()
    y = torch.stack([det(x), 2 * det(x)], 1)
    rows = gradlib.per_sample_jacobian_from_graph(y, x)
    assert_close(rows, torch.stack([COFACTORS, 2 * COFACTORS], 1))


def test_parameters_behind_the_determinant_of_a_singular_matrix() -> None:
    class Determinant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 2).double())

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.det(x + self.weight)

    found = gradlib.per_sample_jacobian(Determinant(), SINGULAR, argnums="parameters")
    assert_close(found["weight"], COFACTORS)


def test_batch_norm_by_its_newer_name() -> None:
    weights = [torch.ones(2).double() for _ in range(4)]

    def one(z: Tensor) -> Tensor:
        norm: Any = torch.ops.aten._batch_norm_with_update
        return norm(z.view(3, 2), *weights, 0.1, 1e-5)[0].flatten()

    def fn(x: Tensor) -> Tensor:
        return torch.stack([one(z) for z in x])

    x = torch.randn(2, 6).double()
    with pytest.raises(gradlib.NoSuchWayError, match="third derivative of BatchNormW"):
        gradlib.per_sample_jacobian(
            fn, x, mode="forward", create_graph=True, check=False
        )


@pytest.mark.parametrize("mode", ["auto", "reverse", "loop", "forward", "split"])
def test_weight_norm_in_a_loss_of_the_jacobian_is_refused(mode: Any) -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    model, x = nn.Sequential(model, nn.Tanh()), torch.randn(4, 3)

    def jacobian(**options: Any) -> Any:
        return gradlib.per_sample_jacobian(model, x, mode=mode, **options)

    jacobian(create_graph=True)  # by x: its parameters are constants
    if mode != "split":
        jacobian(argnums="parameters")
    with pytest.raises(gradlib.NoSuchWayError, match="second derivative of WeightNorm"):
        jacobian(argnums="parameters", create_graph=True)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_divided_by_frequency_are_no_slopes(
    kind: type[nn.Embedding | nn.EmbeddingBag],
) -> None:
    class Looks(nn.Module):
        def __init__(self, *, scaled: bool) -> None:
            super().__init__()
            self.table = kind(5, 3, scale_grad_by_freq=scaled)

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.tensor([[0, 1, 1, 2]]).expand(len(x), 4)
            return self.table(rows).view(len(x), -1) * x.sum(1, keepdim=True)

    x = torch.randn(3, 4)
    with pytest.raises(gradlib.DetachedPathError, match="scale_grad_by_freq=True"):
        gradlib.per_sample_jacobian(Looks(scaled=True), x, argnums="parameters")
    gradlib.per_sample_jacobian(Looks(scaled=False), x, argnums="parameters")


def test_samples_of_the_gamma_family_move_with_their_parameters_on_average() -> None:
    seed_all(0)

    def sample(x: Tensor) -> Tensor:
        return torch.distributions.Gamma(x, torch.ones_like(x)).rsample()

    with pytest.raises(gradlib.DetachedPathError, match="StandardGammaBackward0 diff"):
        gradlib.per_sample_jacobian(sample, torch.rand(4, 2) + 1)
    many = torch.full((20000, 1), 1.5)
    found = gradlib.per_sample_jacobian(sample, many, check=False)
    assert_close(found.mean(), torch.tensor(1.0), rtol=0.05, atol=0)


def test_a_function_that_takes_two_derivatives_of_layer_norm_itself() -> None:
    seed_all(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1))

    def laplacian(x: Tensor) -> Tensor:
        grad = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        parts = [
            torch.autograd.grad(grad[:, i].sum(), x, create_graph=True)[0][:, i]
            for i in range(3)
        ]
        return torch.stack(parts, 1).sum(1)

    with pytest.raises(gradlib.DetachedPathError, match="NativeLayerNormBackwardBack"):
        gradlib.per_sample_jacobian(laplacian, torch.randn(4, 3).requires_grad_())


class Thin(nn.Module):
    """A batch norm of images that are one wide, as tokens of what comes next."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        seed_all(0)
        self.norm = norm(3).double()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.norm, nn.BatchNorm2d):
            y = self.norm(x).squeeze(3)
        else:
            y = self.norm(x.squeeze(3))
        return self.linear(y.mT).tanh()


@pytest.mark.cpu
@pytest.mark.parametrize("training", [True, False])
def test_torch_goes_wrong_for_batch_norm_of_thin_images(training: bool) -> None:
    model, right = (Thin(it).train(training) for it in (nn.BatchNorm2d, nn.BatchNorm1d))
    x = torch.randn(2, 3, 4, 1, dtype=torch.float64, requires_grad=True)
    (wrong,) = torch.autograd.grad(model(x).square().sum(), x)
    (gradient,) = torch.autograd.grad(right(x).square().sum(), x)
    assert_close(model(x), right(x))
    assert not torch.allclose(wrong, gradient)
    with gradlib.record(model) as recording:
        model(x).square().sum().backward()
    wrongs = recording.verify(numerical=True).disagreements
    assert {it.name for it in wrongs} == {"norm"}


MAY_END = torch.__version__ < "2.14"  # torch 2.14.1 has mended it
GROUP_NORM = """
import torch
from torch import nn

norm = nn.GroupNorm(2, 4)
x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
norm(x).sum().backward()
"""


@pytest.mark.cpu
def test_torch_ends_the_process_for_group_norm_of_channels_last() -> None:
    run = subprocess.run(
        [sys.executable, "-c", GROUP_NORM], check=False, capture_output=True
    )
    assert (run.returncode < 0) is MAY_END


@pytest.mark.cpu
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", ["auto", "loop", "forward"])
def test_group_norm_of_channels_last(check: bool, mode: str) -> None:
    seed_all(0)
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 2))
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)

    def jacobian(x: Tensor, argnums: Any) -> Any:
        return gradlib.per_sample_jacobian(
            model, x, argnums=argnums, check=check, mode=mode
        )

    for it in (x, x.detach().requires_grad_()):
        if MAY_END:
            with pytest.raises(gradlib.NoSuchWayError, match=r"x\.contiguous\(\)"):
                jacobian(it, "parameters")
        else:
            found, right = (jacobian(y, "parameters") for y in (it, x.contiguous()))
            assert_close(found, right)
    assert_close(jacobian(x, 0), jacobian(x.contiguous(), 0))
    jacobian(x.contiguous(), "parameters")
    convolution: Any = nn.Conv2d(4, 4, 1)
    model.insert(0, convolution.to(memory_format=torch.channels_last))
    found = jacobian(x, "parameters")
    assert_close(found, jacobian(x.contiguous(), "parameters"))


@pytest.mark.cpu
def test_a_jacobian_through_batch_norm_of_thin_images() -> None:
    model, right = (Thin(it).eval() for it in (nn.BatchNorm2d, nn.BatchNorm1d))
    x = torch.randn(2, 3, 4, 1, dtype=torch.float64)
    gradlib.per_sample_jacobian(right, x)
    with pytest.raises(gradlib.DetachedPathError, match="Use BatchNorm1d"):
        gradlib.per_sample_jacobian(model, x, mode="loop")

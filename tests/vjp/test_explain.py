"""`explain_vjp` computes what autograd computes, from J too, and changes nothing."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.testing import assert_close

import gradlib
from gradlib.vjp.product import ENTRIES, ROWS

A = torch.tensor(
    [[1.0, 2.0, 0.0, -1.0], [0.5, 1.0, 3.0, 1.0], [2.0, 0.0, 1.0, 4.0]],
    dtype=torch.float64,
)


def net(x: Tensor) -> Tensor:
    first = torch.linspace(-1, 1, 15, dtype=x.dtype).view(5, 3)
    second = torch.linspace(1, -2, 10, dtype=x.dtype).view(2, 5)
    return (x @ first.T).tanh() @ second.T


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], str]] = {
    "outer": (lambda x: torch.outer(x, x), (4,), "jk,jki->i"),
    "mm": (lambda x: x @ A, (2, 3), "kl,klij->ij"),
    "elementwise": (lambda x: (x + 2) ** 2, (2, 2), "kl,klij->ij"),
    "softmax": (lambda x: torch.softmax(x, 0), (5,), "j,ji->i"),
    "net": (net, (4, 3), "kl,klij->ij"),
    "sum": (lambda x: x.exp().sum(), (2, 3), ",ij->ij"),
    "to a matrix of one entry": (lambda x: x.prod().view(1, 1), (3,), "jk,jki->i"),
    "from a scalar": (lambda x: torch.stack([x, x**2, x.sin()]), (), "i,i->"),
    "scalar to scalar": (lambda x: x.sin(), (), ",->"),
    "three axes": (lambda x: x.cumsum(1) * x[:1], (2, 3, 2), "lmn,lmnijk->ijk"),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the Jacobian by central differences, without autograd."""
    step = 1e-6
    flat = x.detach().flatten()
    columns = [
        (function((flat + h).view_as(x)) - function((flat - h).view_as(x))) / (2 * step)
        for h in step * torch.eye(len(flat), dtype=x.dtype)
    ]
    return torch.stack(columns, -1).reshape((*columns[0].shape, *x.shape))


@each_function
def test_known_functions_against_finite_differences(name: str) -> None:
    function, shape, equation = FUNCTIONS[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = function(x)
    v = torch.randn_like(y)
    explanation = gradlib.explain_vjp(y, x, v)
    expected = slope(function, x)
    assert explanation.ok
    assert explanation.code == explanation.note == ""
    assert explanation.equation == equation
    assert_close(explanation.jacobian, expected, rtol=1e-6, atol=1e-8)
    contracted = (v.reshape(-1, 1) * expected.reshape(y.numel(), -1)).sum(0)
    assert_close(explanation.result, contracted.view_as(x), rtol=1e-6, atol=1e-8)
    assert_close(explanation.by_einsum, explanation.result)
    assert explanation.difference == pytest.approx(0, abs=1e-12)
    assert explanation.shapes == {
        "grad_output": tuple(y.shape),
        "jacobian": (*y.shape, *x.shape),
        "result": tuple(x.shape),
    }


@each_function
def test_known_functions_against_torch(name: str) -> None:
    function, shape, equation = FUNCTIONS[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = function(x)
    v = torch.randn_like(y)
    explanation = gradlib.explain_vjp(y, x, v)
    (expected,) = torch.autograd.grad(y, x, v, retain_graph=True)
    assert torch.equal(explanation.result, expected)
    jacobian: Any = torch.autograd.functional.jacobian(function, x)
    assert_close(explanation.jacobian, jacobian)
    assert_close(torch.einsum(equation, v, explanation.jacobian), expected)


def test_a_scalar_needs_no_grad_outputs() -> None:
    x = torch.randn(3, requires_grad=True)
    explanation = gradlib.explain_vjp((x**2).sum(), x)
    assert_close(explanation.result, 2 * x.detach())
    assert_close(explanation.by_einsum, 2 * x.detach())


# Several outputs and inputs


def two_of_each() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return outputs, of which the second does not depend on the second input."""
    a = torch.randn(3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    outputs = [a.sum() * b, a**3]
    return outputs, [a, b], [torch.randn_like(y) for y in outputs]


def test_the_outputs_structure_is_outside_and_the_inputs_inside() -> None:
    outputs, (a, b), v = two_of_each()
    explanation = gradlib.explain_vjp(outputs, [a, b], v)
    assert explanation.equation == (
        ("jk,jki->i", "kl,klij->ij"),
        ("j,ji->i", "k,kij->ij"),
    )
    assert explanation.shapes[1][0]["jacobian"] == (3, 3)
    assert explanation.shapes[0][1]["jacobian"] == (2, 2, 2, 2)
    (to_a, to_b), (cubes, nothing) = explanation.jacobian
    assert_close(to_a, b.detach()[..., None].expand(2, 2, 3))
    eye = torch.eye(4, dtype=torch.float64).view(2, 2, 2, 2)
    assert_close(to_b, a.detach().sum() * eye)
    assert_close(cubes, torch.diag(3 * a.detach() ** 2))
    assert_close(nothing, torch.zeros(3, 2, 2, dtype=torch.float64))
    expected = torch.autograd.grad(outputs, [a, b], v)
    assert_close(explanation.result, expected)
    assert_close(explanation.by_einsum, expected)


def test_a_dict_of_inputs_makes_dicts() -> None:
    linear = nn.Linear(3, 2)
    y = linear(torch.randn(4, 3))
    v = torch.randn_like(y)
    inputs = dict(linear.named_parameters())
    explanation = gradlib.explain_vjp(y, inputs, v)
    assert list(explanation.result) == ["weight", "bias"]
    for key, parameter in inputs.items():
        (expected,) = torch.autograd.grad(y, parameter, v, retain_graph=True)
        assert torch.equal(explanation.result[key], expected)
        assert_close(explanation.by_einsum[key], expected)
        assert explanation.jacobian[key].shape == (4, 2, *parameter.shape)
    assert explanation.equation == {"weight": "kl,klij->ij", "bias": "jk,jki->i"}
    assert_close(explanation.jacobian["bias"][1], torch.eye(2))


def test_a_dict_keeps_the_order_of_its_keys() -> None:
    inputs = {name: torch.randn(2, requires_grad=True) for name in "bca"}
    y = inputs["b"] + 2 * inputs["c"] + 3 * inputs["a"]
    explanation = gradlib.explain_vjp([y], inputs, [torch.ones(2)])
    assert list(explanation.result) == list("bca")
    assert [it[0].item() for it in explanation.result.values()] == [1, 2, 3]
    (blocks,) = explanation.jacobian
    assert [it[0, 0].item() for it in blocks.values()] == [1, 2, 3]


def test_a_sequence_of_one_makes_a_tuple() -> None:
    x = torch.randn(3, requires_grad=True)
    v = torch.ones(3)
    assert gradlib.explain_vjp([x * 2], x, v).jacobian[0].shape == (3, 3)
    assert gradlib.explain_vjp(x * 2, [x], v).jacobian[0].shape == (3, 3)
    ((block,),) = gradlib.explain_vjp((x * 2 for _ in "1"), iter([x]), [v]).jacobian
    assert_close(block, 2 * torch.eye(3))


def test_gradient_edges_are_outputs_and_inputs_too() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x**2
    edges = get_gradient_edge(y), get_gradient_edge(x)
    explanation = gradlib.explain_vjp(*edges, torch.ones(3))
    assert_close(explanation.jacobian, torch.diag(2 * x.detach()))


# What `explain_vjp` leaves unchanged


def test_the_graph_can_be_used_again_and_no_grad_is_touched() -> None:
    x = torch.randn(3, requires_grad=True)
    h = x * 2
    h.retain_grad()
    y = h**2
    y.retain_grad()
    before = torch.randn(3)
    h.grad = before
    gradlib.explain_vjp(y, x, torch.ones(3))
    gradlib.explain_vjp(y, [x, h], torch.ones(3))
    assert x.grad is None
    assert y.grad is None
    assert h.grad is before
    y.sum().backward()
    assert_close(x.grad, 8 * x.detach())
    assert_close(h.grad, before + 2 * h.detach())


def test_a_retained_grad_of_a_subclass_is_not_touched() -> None:
    class Mine(Tensor):
        pass

    x = torch.randn(3, requires_grad=True)
    h: Any = (x * 2).as_subclass(Mine)
    h.retain_grad()
    y = h * 3
    gradlib.explain_vjp(y, x, torch.ones(3))
    assert h.grad is None


def test_grads_are_kept_where_a_backward_raises() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 (torch's form)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_grads: Any) -> Any:  # noqa: ARG004 (torch's form)
            raise ZeroDivisionError("in a backward")

    x = torch.randn(3, requires_grad=True)
    h = Fails.apply(x)
    y = h * 2
    y.retain_grad()
    with pytest.raises(ZeroDivisionError, match="in a backward"):
        gradlib.explain_vjp(y, x, torch.ones(3))
    assert y.grad is None


def test_nothing_it_returns_has_a_graph() -> None:
    x = torch.randn(3, requires_grad=True)
    v = torch.randn(3, requires_grad=True)
    explanation = gradlib.explain_vjp(x**3, x, v)
    for it in (explanation.result, explanation.jacobian, explanation.by_einsum):
        assert not it.requires_grad


by_another_name = gradlib.explain_vjp


@pytest.mark.parametrize("aliased", [False, True])
def test_it_keeps_neither_the_graph_nor_a_tensor_alive(aliased: bool) -> None:
    x = torch.randn(3, requires_grad=True)
    y = x**2
    reference = weakref.ref(y)
    if aliased:
        explanation = by_another_name(y, x, torch.ones(3))
    else:
        explanation = gradlib.explain_vjp(y, x, torch.ones(3))
    del y
    gc.collect()
    assert reference() is None
    assert explanation.ok


def test_it_keeps_the_values_there_were() -> None:
    x = torch.randn(3, requires_grad=True)
    v = torch.ones(3)
    explanation = gradlib.explain_vjp(x.view(3), x, v)  # the gradient is v itself
    before = str(explanation)
    v.fill_(7)
    assert explanation.result.tolist() == [1, 1, 1]
    assert str(explanation) == before


def test_inside_a_recording() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        y = model(x)
        explanation = gradlib.explain_vjp(y, x, torch.ones(4, 2))
    assert explanation.difference == pytest.approx(0, abs=1e-6)
    assert len(recording[""].passes) == 1 + y.numel()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode(mode: Callable[[], Any]) -> None:
    x = torch.randn(3, requires_grad=True)
    y = x**2
    with mode():
        explanation = gradlib.explain_vjp(y, x, torch.ones(3))
    assert_close(explanation.jacobian, torch.diag(2 * x.detach()))


# When there is no Jacobian


def test_the_largest_jacobian_there_is() -> None:
    side = int(ENTRIES**0.5)
    x = torch.randn(side, requires_grad=True)
    assert gradlib.explain_vjp(x * 2, x, torch.ones(side)).jacobian.numel() == ENTRIES
    x = torch.randn(side + 1, requires_grad=True)
    explanation = gradlib.explain_vjp(x * 2, x, torch.ones(side + 1))
    assert explanation.ok
    assert explanation.jacobian is explanation.by_einsum is None
    assert explanation.difference is None
    assert_close(explanation.result, torch.full((side + 1,), 2.0))
    assert f"{(side + 1) ** 2:,} entries" in explanation.note
    assert f"{(side + 1) ** 2 * 4 / 1024:.4g} KiB" in explanation.note
    assert f"{ENTRIES:,}" in explanation.note
    assert explanation.shapes["jacobian"] == (side + 1, side + 1)
    assert explanation.equation == "j,ji->i"


def test_the_bound_counts_all_pairs_together() -> None:
    x = torch.randn(20, requires_grad=True)
    outputs = [x * i for i in range(1, 30)]
    v = [torch.ones(20)] * 29
    assert gradlib.explain_vjp(outputs[:25], x, v[:25]).jacobian is not None
    explanation = gradlib.explain_vjp(outputs, x, v)
    assert explanation.jacobian is None
    assert "11,600 entries" in explanation.note


def test_the_most_rows_there_are() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    y = x * torch.ones(ROWS + 1)
    assert gradlib.explain_vjp(y[:ROWS], x, torch.ones(ROWS)).jacobian is not None
    explanation = gradlib.explain_vjp(y, x, torch.ones(ROWS + 1))
    assert explanation.jacobian is None
    assert f"{ROWS + 1:,} rows" in explanation.note


def test_the_docstring_names_the_bounds() -> None:
    text = " ".join((gradlib.explain_vjp.__doc__ or "").split())
    assert f"at most {ENTRIES:,} entries in {ROWS:,} rows" in text


def test_more_axes_than_letters() -> None:
    x = torch.ones([1] * 27, requires_grad=True)
    explanation = gradlib.explain_vjp(x * 2, x, torch.ones([1] * 27))
    assert explanation.jacobian is explanation.equation is None
    assert "letters" in explanation.note
    x = torch.ones([1] * 26, requires_grad=True)
    explanation = gradlib.explain_vjp(x * 2, x, torch.ones([1] * 26))
    assert explanation.jacobian.ndim == 52


def test_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.ones(3, requires_grad=True)
        inside = gradlib.explain_vjp(x * 2, x, torch.ones(3))
    outside = gradlib.explain_vjp(x * 2, x, torch.ones_like(x.detach()))
    for explanation in (inside, outside):
        assert explanation.ok
        assert "FakeTensorMode" in explanation.note
        assert "without values" in str(explanation)


@pytest.mark.filterwarnings("ignore")  # those of the compiler
def test_errors_in_code_that_torch_compile_has_written_are_autograds() -> None:
    compute: Any = torch.compile(lambda x: x.square().sin(), backend="aot_eager")
    x = torch.ones(3, requires_grad=True)
    loss = compute(x).sum()
    loss.backward()
    with pytest.raises(gradlib.FreedGraphError):
        gradlib.grad(loss, x)
    assert gradlib.explain_vjp(loss, x).code == "GL111"
    h = x * 1
    loss = compute(h).sum()
    h.add_(1)
    with pytest.raises(gradlib.ChangedInPlaceError):
        gradlib.grad(loss, x)


@pytest.mark.filterwarnings("ignore")  # those of the compiler
def test_what_was_compiled_for_one_pass_is_refused_with_a_way_out() -> None:
    x = torch.ones(3, requires_grad=True)

    def written(x: Tensor) -> Tensor:
        return x.exp().sin().sum()

    compute = torch.compile(written, backend="aot_eager")
    compute(x).backward()
    with pytest.raises(RuntimeError, match="donated buffers") as caught:
        gradlib.explain_vjp(compute(x), x)
    assert "force_eager" in caught.value.__notes__[0]
    with torch.compiler.set_stance("force_eager"):
        assert gradlib.explain_vjp(compute(x), x).ok


def test_on_the_meta_device() -> None:
    x = torch.ones(3, device="meta", requires_grad=True)
    explanation = gradlib.explain_vjp(x * 2, x, torch.ones(3, device="meta"))
    assert explanation.ok
    assert '"meta"' in explanation.note
    assert explanation.note in str(explanation).replace("\n  ", " ")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_of_nested_tensors(layout: torch.layout) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    x = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    explanation = gradlib.explain_vjp(x * 2, x, torch.ones_like(x))
    assert explanation.ok
    assert "nested" in explanation.note
    assert "grad_outputs: all ones" in str(explanation)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_the_entries_of_a_nested_v_are_named(layout: torch.layout) -> None:
    def said(*parts: Tensor) -> str:
        v = torch.nested.nested_tensor([*parts], layout=layout)
        x = v.detach().clone().requires_grad_()
        return str(gradlib.explain_vjp(x * 2, x, v))

    assert "all 0.5" in said(torch.full((2,), 0.5), torch.full((3,), 0.5))
    assert "all zeros" in said(torch.zeros(2), torch.zeros(3))
    assert "a weight for each entry" in said(torch.ones(2), torch.zeros(3))
    if layout == torch.strided:  # a jagged one has parts
        assert "no entries" in said()


# Dtypes and layouts


def test_in_bfloat16() -> None:
    x = torch.randn(5, dtype=torch.bfloat16, requires_grad=True)
    y = torch.softmax(x, 0)
    explanation = gradlib.explain_vjp(y, x, torch.randn(5, dtype=torch.bfloat16))
    assert explanation.jacobian.dtype is torch.bfloat16
    assert explanation.by_einsum.dtype is torch.bfloat16
    assert_close(explanation.by_einsum, explanation.result, rtol=0.1, atol=0.01)
    assert "is rounding" in str(explanation).replace("\n  ", " ")


def test_of_a_narrower_input() -> None:
    x = torch.randn(5, dtype=torch.bfloat16, requires_grad=True)
    explanation = gradlib.explain_vjp(x.double() * 3, x, torch.ones(5).double())
    assert explanation.jacobian.dtype is torch.bfloat16
    assert explanation.result.tolist() == [3] * 5


def test_v_in_another_floating_type_is_cast_as_torch_does() -> None:
    x = torch.randn(3, requires_grad=True)
    v = torch.randn(3, dtype=torch.float64)
    explanation = gradlib.explain_vjp(x * 1, x, v)
    assert torch.equal(explanation.result, v.float())
    assert explanation.difference == 0


def test_a_real_output_of_a_complex_input() -> None:
    x = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    y = (x * x.flip(0)).abs()
    v = torch.randn(3, dtype=torch.float64)
    explanation = gradlib.explain_vjp(y, x, v)

    def of_parts(parts: Tensor) -> Tensor:
        z = torch.view_as_complex(parts)
        return (z * z.flip(0)).abs()

    parts = slope(of_parts, torch.view_as_real(x.detach()))
    expected = torch.view_as_complex(parts.contiguous())
    assert_close(explanation.jacobian, expected, rtol=1e-6, atol=1e-8)
    assert_close(explanation.by_einsum, explanation.result)
    assert "x is complex" in str(explanation)


def test_a_complex_output_has_no_jacobian_but_a_meaning() -> None:
    x = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    v = torch.randn(3, dtype=torch.complex128)
    explanation = gradlib.explain_vjp(x**2, x, v)
    assert explanation.jacobian is explanation.equation is None
    assert "view_as_real" in explanation.note
    formula = explanation.meaning.split("gradient of ")[1].split(". If")[0]
    loss = eval(formula, {"y": x**2, "v": v})
    (expected,) = torch.autograd.grad(loss, x)
    assert_close(explanation.result, expected)
    parts = gradlib.explain_vjp(torch.view_as_real(x**2), x, torch.view_as_real(v))
    assert_close(parts.by_einsum, expected)


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    y = embedding(torch.tensor([1, 1, 3]))
    explanation = gradlib.explain_vjp(y, embedding.weight, torch.ones(3, 2))
    assert explanation.result.is_sparse
    assert explanation.difference == 0
    assert explanation.jacobian[0, 0].tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_tensors_without_entries(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    explanation = gradlib.explain_vjp(x * 2, x, torch.ones(shape))
    assert explanation.jacobian.shape == shape * 2
    assert explanation.difference == 0
    assert "does not connect" not in str(explanation)
    assert gradlib.explain_vjp((x * 2).sum(), x).jacobian.shape == shape


# Two ways to one result


def test_a_hook_that_is_not_linear_is_found_out() -> None:
    x = torch.randn(4, requires_grad=True)
    h = x * 2
    h.register_hook(lambda grad: grad.clamp(-1, 1))
    y = h * 1
    explanation = gradlib.explain_vjp(y, x, torch.full((4,), 3.0))
    assert explanation.difference == 4
    text = str(explanation).replace("\n  ", " ")
    assert "THEY DIFFER" in text
    assert text.startswith("What autograd returns as the gradient of 3 * y.sum(). The")
    assert "dy/dx, in doubt" in text
    assert "diagonal" not in text
    linear = gradlib.explain_vjp(y, x, torch.full((4,), 0.5))
    assert "THEY DIFFER" not in str(linear)


def test_a_backward_that_is_random_is_found_out() -> None:
    x = torch.randn(4, requires_grad=True)
    h = x * 2
    h.register_hook(lambda grad: grad + torch.randn_like(grad))
    assert "THEY DIFFER" in str(gradlib.explain_vjp(h * 1, x, torch.ones(4)))


def test_rounding_is_measured_by_what_is_added_up() -> None:
    """The gradient of softmax(x).sum() is zero, up to rounding of its terms."""
    x = torch.randn(50, requires_grad=True)
    explanation = gradlib.explain_vjp(torch.softmax(x, 0), x, torch.ones(50))
    assert explanation.difference
    assert explanation.difference < 1e-7
    assert "is rounding" in str(explanation).replace("\n  ", " ")


def test_terms_that_cancel_round_as_they_are_large() -> None:
    x = torch.randn(50, requires_grad=True)
    y = torch.cat([x * 1e6 / 7 * 3, x * 3e6 / 7])
    v = torch.randn(50)
    explanation = gradlib.explain_vjp(y, x, torch.cat([v, -v]))
    assert explanation.difference
    assert explanation.difference > 1e-2
    assert "THEY DIFFER" not in str(explanation)


def test_nan_and_infinity_are_equal_to_themselves() -> None:
    x = torch.tensor([0.0, 1.0, 4.0], requires_grad=True)
    explanation = gradlib.explain_vjp(x.sqrt(), x, torch.tensor([0.0, 1.0, 1.0]))
    assert explanation.result.isnan().tolist() == [True, False, False]
    assert explanation.difference == 0


def test_nan_on_one_side_is_a_difference() -> None:
    x = torch.ones(3, requires_grad=True)
    h = x * 2
    h.register_hook(lambda grad: grad * (torch.nan if grad.sum() > 2 else 1))
    clean = torch.ones(3, requires_grad=True)
    outputs = [x * clean, h * 1]
    explanation = gradlib.explain_vjp(outputs, [clean, x], [torch.ones(3)] * 2)
    assert explanation.difference != explanation.difference
    assert "THEY DIFFER" in str(explanation)


def test_terms_that_are_not_finite_are_no_difference() -> None:
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    explanation = gradlib.explain_vjp(x.sqrt(), x, torch.ones(2))
    assert explanation.result.tolist() == [torch.inf, 0.25]
    assert explanation.by_einsum.isnan().tolist() == [True, False]
    assert explanation.difference == 0
    text = str(explanation).replace("\n  ", " ")
    assert "Not compared: 1 of the entries of vᵀJ. J or v holds nan or inf" in text
    assert "THEY DIFFER" not in text
    v = torch.tensor([0.0, torch.inf])
    explanation = gradlib.explain_vjp(x * 2, x, v)
    assert explanation.result.tolist() == [0, torch.inf]
    assert explanation.by_einsum.isnan().tolist() == [True, False]
    assert "Not compared: 1 of" in str(explanation)


def test_where_no_term_is_finite_nothing_is_the_same() -> None:
    x = torch.zeros(3, requires_grad=True)
    explanation = gradlib.explain_vjp(x.sqrt(), x, torch.ones(3))
    assert explanation.difference is None
    text = str(explanation)
    assert "Computed twice" not in text
    assert "Not compared: 3 of" in text


def test_a_difference_beside_terms_that_are_not_finite_is_found() -> None:
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    h = x * 1
    h.register_hook(lambda grad: grad.clamp(-1, 1))
    explanation = gradlib.explain_vjp(h.sqrt(), x, torch.tensor([1.0, 8.0]))
    assert explanation.difference == 1
    text = str(explanation)
    assert "THEY DIFFER" in text
    assert "Not compared: 1 of" in text


def test_what_is_not_finite_by_both_ways_is_not_spoken_of() -> None:
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    explanation = gradlib.explain_vjp(x.sqrt(), x, torch.tensor([0.0, 1.0]))
    assert "Not compared" not in str(explanation)


# Bad calls


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x, y: (y, x), gradlib.NoGradOutputsError),
        (lambda x, y: (y, x, torch.ones_like(x)), gradlib.GradOutputsShapeError),
        (lambda x, y: (y, x, [torch.ones(4, 4)] * 2), gradlib.GradOutputsCountError),
        (lambda x, y: (y.sum(), x, 1.0), gradlib.GradOutputsTypeError),
        (lambda x, y: (y, x, torch.ones(4, 4).int()), gradlib.GradOutputsDtypeError),
        (
            lambda x, y: (y, x, torch.ones(4, 4).to_sparse_csr()),
            gradlib.GradOutputsLayoutError,
        ),
        (lambda x, y: (y.detach(), x), gradlib.OutputNeedsNoGradError),
        (lambda x, y: (y.sum(), x[0]), gradlib.UnusedInputError),
        (lambda x, _: ("y", x), gradlib.NotDifferentiableArgumentError),
        (lambda *_: (None, None), gradlib.NotDifferentiableArgumentError),
    ],
)
def test_a_bad_call_raises_nothing_and_is_explained_as_grad_does(
    call: Callable[[Tensor, Tensor], tuple[Any, ...]],
    error: type[gradlib.GradlibError],
) -> None:
    x = torch.arange(4.0, requires_grad=True)
    arguments = call(x, torch.outer(x, x))
    explanation = gradlib.explain_vjp(*arguments)
    assert not explanation.ok
    assert explanation.code == error.code
    for field in ("result", "jacobian", "equation", "shapes", "by_einsum"):
        assert getattr(explanation, field) is None
    with pytest.raises(error) as caught:
        gradlib.grad(*arguments)
    assert str(explanation) == str(caught.value)
    assert explanation.meaning in str(caught.value)


def test_what_shows_only_when_it_runs_is_explained() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = (x**2).sum()
    loss.backward()
    assert gradlib.explain_vjp(loss, x).code == gradlib.FreedGraphError.code
    h = x.exp()
    loss = (h * h).sum()
    h += 1
    assert gradlib.explain_vjp(loss, x).code == gradlib.ChangedInPlaceError.code


def test_a_bad_call_leaves_the_graph_alone() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x**2
    gradlib.explain_vjp(y, x, torch.ones(2))
    y.sum().backward()
    assert_close(x.grad, torch.full((3,), 2.0))


def test_a_loss_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    loss = F.mse_loss(model(torch.randn(5, 3)), torch.randn(5, 2))
    explanation = gradlib.explain_vjp(loss, dict(model.named_parameters()))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(explanation.result[name], parameter.grad)
        assert_close(explanation.jacobian[name], parameter.grad)


def test_an_error_of_a_call_inside_a_hook_is_not_this_calls() -> None:
    x = torch.ones(3, requires_grad=True)
    used_up = x.exp().sum()
    used_up.backward()
    h = 2 * x
    h.register_hook(lambda _: torch.autograd.grad(used_up, x)[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradlib.explain_vjp(h.sum(), x)


def test_a_tensor_that_is_none_any_more() -> None:
    class Gone(Tensor):
        @property
        def retains_grad(self) -> bool:  # pyright: ignore (a property here too)
            raise RuntimeError("undefined tensor")

    gone = torch.ones(1).as_subclass(Gone)
    x = torch.ones(2, requires_grad=True)
    assert gradlib.explain_vjp(x.sum(), x).ok
    assert gone is not None


@pytest.mark.parametrize("other", [None, "a", 3.0, nn.Linear(1, 1)], ids=str)
def test_an_output_that_is_no_tensor_is_explained(other: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    assert gradlib.explain_vjp([x * 2, other], x).code == "GL114"
    with pytest.raises(gradlib.GradlibError, match="GL114"):
        gradlib.grad([x * 2, other], x)


def test_grad_outputs_that_are_arrays_without_a_shape() -> None:
    class Array:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return torch.ones(3).numpy()

    x = torch.ones(3, requires_grad=True)
    given: Any = Array()
    assert gradlib.explain_vjp(x * 2, x, given).code.startswith("GL")


@pytest.mark.parametrize("ask", [gradlib.grad, gradlib.explain_vjp])
def test_a_call_in_a_compiled_function(ask: Any) -> None:
    def step(x: Tensor) -> str:
        return str(ask(x.square().sum(), x))

    x = torch.tensor([1.0, -2.0], requires_grad=True)
    torch.compiler.reset()
    assert torch.compile(step, backend="eager")(x) == step(x)

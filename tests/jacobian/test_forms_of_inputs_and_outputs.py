"""Inputs and outputs of any form have their Jacobian, or are refused by name."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import MaskedTensor
from torch.utils.data import DataLoader

import gradlib
from gradlib import (
    GradlibError,
    JacobianArgumentError,
    NoSuchWayError,
    NotDifferentiableDtypeError,
    NotPerSampleError,
)

from .samples_alone import MODES, X, alone, require_close, smooth_net


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [1, 3])
def test_one_number_for_each_sample(batch: int, mode: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(batch, 3, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(lambda x: x.sin().prod(1), x, mode=mode)
    assert ours.shape == (batch, 3)
    require_close(ours, alone(lambda x: x.sin().prod(1), x)[0][0])


@pytest.mark.parametrize("mode", MODES)
def test_one_number_from_one_number(mode: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    ours = gradlib.per_sample_jacobian(torch.square, x, mode=mode)
    assert torch.equal(ours, 2 * x)


@pytest.mark.parametrize("mode", MODES)
def test_no_sample_at_all(mode: str) -> None:
    model, x = smooth_net(3, 4, 2), torch.zeros(0, 3, dtype=torch.float64)
    try:
        ours = gradlib.per_sample_jacobian(model, x, mode=mode)
    except NoSuchWayError:
        assert mode == "split"
        return
    assert ours.shape == (0, 2, 3)
    assert ours.dtype == torch.float64


def test_no_sample_at_all_and_parameters() -> None:
    model, x = smooth_net(3, 4, 2), torch.zeros(0, 3, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(model, x, argnums="parameters")
    for name, parameter in model.named_parameters():
        assert ours[name].shape == (0, 2, *parameter.shape)


@pytest.mark.parametrize("mode", ["reverse", "forward", "loop", "auto"])
def test_no_entries(mode: str) -> None:
    x = torch.zeros(3, 0)
    assert gradlib.per_sample_jacobian(torch.sin, x, mode=mode).shape == (3, 0, 0)
    weight = torch.ones(2, 0)
    nothing = gradlib.per_sample_jacobian(lambda x: F.linear(x, weight), x, mode=mode)
    assert nothing.shape == (3, 2, 0)


def test_inputs_that_are_integers_or_no_tensors_are_passed_on() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(5, 3, dtype=torch.float64)
    x, ids = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 3, 1, 3])

    def fn(x: Tensor, ids: Tensor, name: str, factor: float) -> Tensor:
        assert name == "name"
        return torch.sin(table(ids) * x) * factor

    ours = gradlib.per_sample_jacobian(fn, x, ids, "name", 2.0)
    slope = 2 * torch.cos(table(ids) * x) * table(ids)
    require_close(ours, torch.diag_embed(slope))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("place", [0, 1])
def test_integers_and_complex_numbers_are_refused_by_name(
    place: int, dtype: torch.dtype
) -> None:
    inputs = [torch.ones(2, 3), torch.ones(2, 3)]
    inputs[place] = inputs[place].to(dtype)
    with pytest.raises(NotDifferentiableDtypeError) as caught:
        gradlib.per_sample_jacobian(lambda x, y: x * y, *inputs, argnums=place)
    assert f"inputs[{place}] has dtype {dtype}, shape [2, 3]" in str(caught.value)


def test_only_an_integer_beside_others_is_to_be_left_out() -> None:
    embedding, tokens, scale = nn.Embedding(5, 3), torch.ones(2).long(), torch.ones(2)
    with pytest.raises(NotDifferentiableDtypeError, match=r"argnums=.parameters."):
        gradlib.per_sample_jacobian(embedding, tokens)
    with pytest.raises(NotDifferentiableDtypeError, match="Leave it out of argnums"):
        gradlib.per_sample_jacobian(lambda _, x: x, tokens, scale)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (
            lambda x, ids: ({"x": x, "ids": ids},),
            r"own: lambda x, ids: fn\(\{'x': x, 'ids': ids\}\)\. If it",
        ),
        (
            lambda x, ids: ({"x": x, "class": ids, "y": x}, x),
            r"lambda rest, it, \*others: fn\(\{\*\*rest, 'class': it\}, \*others\)\.",
        ),
        (
            lambda x, ids: ([x, ids],),
            r"own: lambda rest, it: fn\(\.\.\.\), which puts",
        ),
        (lambda x, ids: ([ids], x), "Leave it out of argnums"),
    ],
)
def test_an_integer_beside_others_in_an_input_is_to_be_set_apart(
    inputs: Callable[[Tensor, Tensor], tuple[Any, ...]], said: str
) -> None:
    given = inputs(torch.ones(2, 3), torch.ones(2).long())
    with pytest.raises(NotDifferentiableDtypeError, match=said):
        gradlib.per_sample_jacobian(lambda *_: torch.ones(2), *given)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("inside", "outside"),
    [(torch.float32, torch.float64), (torch.float64, torch.float32)],
)
def test_the_dtype_is_that_of_the_input(
    inside: torch.dtype, outside: torch.dtype, mode: str, check: bool
) -> None:
    model, x = smooth_net(5, 2, 4, dtype=inside), torch.randn(3, 5, dtype=outside)

    def fn(x: Tensor) -> Tensor:
        return model(x.to(inside))

    ours = gradlib.per_sample_jacobian(fn, x, mode=mode, check=check)
    assert ours.dtype == outside
    require_close(ours, alone(fn, x)[0][0], 1e-6)


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("mode", ["reverse", "loop", "forward"])
@pytest.mark.parametrize("size", [(0, 4), (3, 0)])
def test_chunks_of_what_has_no_entries(size: Any, mode: Any, chunk: int) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True) * torch.ones(3)

    x = torch.randn(size)
    found = gradlib.per_sample_jacobian(fn, x, mode=mode, chunk_size=chunk)
    assert found.shape == (size[0], 3, size[1])


@pytest.mark.parametrize("mode", ["auto", "loop", "forward"])
def test_numbers_of_one_byte_are_refused_by_name(mode: Any) -> None:
    x = torch.ones(2, 3).to(torch.float8_e4m3fn)
    with pytest.raises(
        NotDifferentiableDtypeError, match=r"inputs.0. has dtype.*float8"
    ):
        gradlib.per_sample_jacobian(lambda x: x.float() * 2, x, mode=mode)


def masked(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a prototype
        return cast(Any, MaskedTensor)(x, x > 0)


@pytest.mark.parametrize(
    "make",
    [
        Tensor.to_sparse,
        lambda x: x.to("meta"),
        lambda x: FakeTensorMode().from_tensor(x),
        masked,
    ],
)
def test_what_is_not_dense_is_refused_by_name(make: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(NotDifferentiableDtypeError, match=r"inputs.1. is sparse, nest"):
        gradlib.per_sample_jacobian(torch.mul, x, make(x), argnums=1)


def test_what_is_computed_in_a_mode_of_fake_tensors_is_refused() -> None:
    with FakeTensorMode():
        x = torch.ones(2, 3, requires_grad=True)
        y = x.sin()
        with pytest.raises(JacobianArgumentError, match="in a mode of fake tensors"):
            gradlib.per_sample_jacobian_from_graph(y, x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_outputs_of_integers_and_complex_numbers_are_refused_by_name(
    dtype: torch.dtype,
) -> None:
    with pytest.raises(NotDifferentiableDtypeError) as caught:
        gradlib.per_sample_jacobian(
            lambda x: {"a": x, "b": x.to(dtype)}, torch.ones(2, 3)
        )
    assert f"output['b'] has dtype {dtype}" in str(caught.value)


@pytest.mark.parametrize("check", [True, False])
def test_a_complex_tensor_inside_is_no_matter(check: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x) * 2).real

    x = torch.randn(2, 3, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(fn, x, check=check)
    require_close(ours, 2 * torch.eye(3, dtype=torch.float64).expand(2, 3, 3))


def test_a_parameter_of_complex_numbers_is_refused_by_name() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.phase).real

    with pytest.raises(NotDifferentiableDtypeError, match="phase has dtype"):
        gradlib.per_sample_jacobian(Complex(), torch.ones(2, 3), argnums="parameters")


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "a mean over the batch": lambda x: x.mean(),
    "the batch last": lambda x: x.mT,
    "a number": lambda x: x.sum().item(),
    "nothing": lambda _: None,
    "a string beside it": lambda x: (x, "name"),
}


@pytest.mark.parametrize("fn", OUTPUTS.values(), ids=list(OUTPUTS))
def test_outputs_that_are_not_one_row_for_each_sample(
    fn: Callable[[Tensor], Any],
) -> None:
    with pytest.raises(NotPerSampleError):
        gradlib.per_sample_jacobian(fn, torch.ones(2, 3))


def test_an_output_whose_batch_comes_later_is_to_be_moved() -> None:
    lstm, x = nn.LSTM(3, 5, batch_first=True), torch.ones(4, 7, 3)
    with pytest.raises(NotPerSampleError, match=r"output.1..0..movedim.1, 0."):
        gradlib.per_sample_jacobian(lstm, x)
    jacobian = gradlib.per_sample_jacobian(lambda x: lstm(x)[1][0].movedim(1, 0), x)
    assert jacobian.shape == (4, 1, 5, 7, 3)


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_what_to_write_for_a_batch_on_another_axis_is_for_that_axis(axis: int) -> None:
    x = torch.rand(3, 4, 5)
    advised = rf"fn\(x.movedim\(0, {axis}\)\), and pass x.movedim\({axis}, 0\)"
    with pytest.raises(JacobianArgumentError, match=advised):
        gradlib.per_sample_jacobian(torch.sin, x, in_dims=axis)
    assert torch.equal(x.movedim(axis, 0).movedim(0, axis), x)


def test_what_is_there_already_and_has_no_row_for_each_sample_is_named() -> None:
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.raises(NotPerSampleError, match=r"inputs.1. has .*with in_dims"):
        gradlib.per_sample_jacobian_from_graph(x * w, (x, w))


def test_a_graph_cannot_give_the_jacobian_by_a_parameter() -> None:
    model = nn.Linear(3, 2)
    y = model(torch.ones(5, 3))
    with pytest.raises(
        NotPerSampleError,
        match=r'output has shape \[5, 2\].*2 samples in inputs:.*argnums="parameters"',
    ):
        gradlib.per_sample_jacobian_from_graph(y, model.weight)


@pytest.mark.parametrize(
    "ask",
    [gradlib.per_sample_jacobian, gradlib.plan_jacobian],
    ids=lambda it: it.__name__,
)
def test_a_batch_with_its_labels_is_no_input(ask: Callable[..., Any]) -> None:
    layer, x = nn.Linear(3, 2), torch.ones(4, 3)
    for batch in ((x, x), [x, x], {"x": x}):
        with pytest.raises(TypeError, match="linear") as caught:
            ask(layer, batch)
        (note,) = caught.value.__notes__
        assert f"inputs[0] as it is: a {type(batch).__name__}." in note
    with pytest.raises(TypeError) as caught:
        ask(lambda: x, x)
    assert not hasattr(caught.value, "__notes__")


def odd(value: Any) -> Any:
    """Return what no type checker would let pass."""
    return value


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "fn is a tensor": (lambda: gradlib.per_sample_jacobian(cast(Any, X), X), "fn"),
    "no inputs": (lambda: gradlib.per_sample_jacobian(torch.sin), "no inputs"),
    "inputs of lists": (
        lambda: gradlib.per_sample_jacobian(torch.sin, [1.0, 2.0]),
        "no tensor among the inputs, which hold float",
    ),
    "inputs of nothing": (
        lambda: gradlib.per_sample_jacobian(torch.sin, []),
        "no tensor among the inputs, which hold nothing: torch.as_tensor",
    ),
    "progress in words": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, progress=odd("no")),
        "progress must be True or False, but it is 'no', of type str",
    ),
    "a loader": (
        lambda: gradlib.per_sample_jacobian(torch.sin, DataLoader(odd([X]))),
        r"hold DataLoader: pass a batch .* next\(iter\(loader\)\)",
    ),
    "a path": (
        lambda: gradlib.per_sample_jacobian(odd("model.pt"), X),
        r"of type str\. A file .* load_state_dict\(\)",
    ),
    "parameters of a graph": (
        lambda: gradlib.per_sample_jacobian_from_graph(X, odd(iter([X]))),
        'argnums="parameters"',
    ),
    "an array beside a tensor": (
        lambda: gradlib.per_sample_jacobian(torch.add, np.ones((2, 3)), X),
        r"inputs\[0\] is asked for by argnums .* torch.as_tensor makes one",
    ),
    "argnums of nothing": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, argnums=()),
        "argnums is ()",
    ),
    "argnums beyond": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, argnums=1),
        "argnums is 1: .* here only 0",
    ),
    "a class": (
        lambda: gradlib.per_sample_jacobian(nn.ReLU, X),
        r"class ReLU, .* ReLU\(...\)",
    ),
    "argnums twice": (
        lambda: gradlib.per_sample_jacobian(torch.add, X, X, argnums=(0, -2)),
        "argnums",
    ),
    "argnums is a bool": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, argnums=True),
        "argnums",
    ),
    "argnums is another word": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, argnums="weights"),
        "argnums",
    ),
    "argnums is an array": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, argnums=odd(np.array([0]))),
        r"argnums is array\(\[0\]\): it is an int",
    ),
    "argnums is an array, for a plan": (
        lambda: gradlib.plan_jacobian(torch.sin, X, argnums=odd(np.array([]))),
        "argnums is array",
    ),
    "in_dims holds an array": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, in_dims=(np.array([0, 0]),)),
        "in_dims holds array",
    ),
    "chunk_size is an array": (
        lambda: gradlib.per_sample_jacobian(
            torch.sin, X, chunk_size=odd(np.array([1, 2]))
        ),
        r"chunk_size is array\(\[1, 2\]\)",
    ),
    "chunk_size is an array, for a plan": (
        lambda: gradlib.plan_jacobian(torch.sin, X, chunk_size=odd(np.array([1, 2]))),
        "chunk_size is array",
    ),
    "mode is an array": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, mode=odd(np.array([1, 2]))),
        "mode is array",
    ),
    "check is a word": (
        lambda: gradlib.per_sample_jacobian(nn.Linear(3, 2), X, check=odd("no")),
        "check must be True or False, but it is 'no', of type str",
    ),
    "check is an array": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, check=odd(np.array([0, 1]))),
        "check must be True or False, but it is array",
    ),
    "check is a word, for a plan": (
        lambda: gradlib.plan_jacobian(torch.sin, X, check=odd("no")),
        "check must be True or False",
    ),
    "check is a word, for tensors": (
        lambda: gradlib.per_sample_jacobian_from_graph(X, X, check=odd("no")),
        "check must be True or False",
    ),
    "create_graph is a word": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, create_graph=odd("yes")),
        "create_graph must be True or False, but it is 'yes', of type str",
    ),
    "create_graph is a word, for a plan": (
        lambda: gradlib.plan_jacobian(torch.sin, X, create_graph=odd("yes")),
        "create_graph must be True or False",
    ),
    "create_graph is a word, for tensors": (
        lambda: gradlib.per_sample_jacobian_from_graph(X, X, create_graph=odd("yes")),
        "create_graph must be True or False",
    ),
    "parameters of a function": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, argnums="parameters"),
        "needs fn to be a module, not sin",
    ),
    "parameters of none": (
        lambda: gradlib.per_sample_jacobian(nn.ReLU(), X, argnums="parameters"),
        "No parameter",
    ),
    "argnums without a tensor": (
        lambda: gradlib.per_sample_jacobian(torch.mul, X, 2.0, argnums=1),
        r"inputs\[1\]",
    ),
    "in_dims of another axis": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, in_dims=1),
        "in_dims",
    ),
    "in_dims too many": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, in_dims=(0, 0)),
        r"in_dims must be .* \(1 here\); it is \(0, 0\)",
    ),
    "in_dims nested otherwise": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, in_dims=({"x": 0},)),
        r"in_dims is \(\{'x': 0\},\), which is not nested as the inputs are\. It has",
    ),
    "nothing has samples": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, in_dims=None),
        "in_dims",
    ),
    "samples disagree": (
        lambda: gradlib.per_sample_jacobian(torch.add, X, torch.ones(1, 3)),
        r"inputs\[0\] has 2, inputs\[1\] has 1",
    ),
    "a single number": (
        lambda: gradlib.per_sample_jacobian(torch.sin, torch.tensor(1.0)),
        r"inputs\[0\]",
    ),
    "no such mode": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, mode="fast"),
        "mode",
    ),
    "chunk_size 0": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, chunk_size=0),
        "chunk_size",
    ),
    "max_bytes is a float": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, max_bytes=cast(Any, 1e9)),
        "max_bytes",
    ),
    "out nested otherwise": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, out=[torch.empty(2, 3, 3)]),
        r"out has out\[0\], and the result one tensor: out must",
    ),
    "out and a graph": (
        lambda: gradlib.per_sample_jacobian(
            torch.sin, X, out=torch.empty(2, 3, 3), create_graph=True
        ),
        "create_graph",
    ),
    "no tensor that is there already": (
        lambda: gradlib.per_sample_jacobian_from_graph(X.sin(), "x"),
        "inputs must be a tensor, or hold some; it is 'x'",
    ),
    "tensors without a graph": (
        lambda: gradlib.per_sample_jacobian_from_graph(X.sin(), X),
        "requires_grad",
    ),
}


@pytest.mark.parametrize(("call", "named"), WRONG.values(), ids=list(WRONG))
def test_wrong_arguments_are_named(call: Callable[[], Any], named: str) -> None:
    with pytest.raises(JacobianArgumentError, match=named):
        call()


def test_every_error_is_ours() -> None:
    for call, _ in WRONG.values():
        with pytest.raises(GradlibError):
            call()


@dataclass
class HandsOn:
    """No copy of it can be made: before it has `data`, it looks for it in itself."""

    data: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)


def test_a_shared_input_that_stays_closed() -> None:
    itself: list[Any] = []
    itself.append(itself)

    def fn(x: Tensor, _closed: object) -> Tensor:
        return x.sin()

    for closed in (HandsOn(2), itself):
        found = gradlib.per_sample_jacobian(fn, X, closed, in_dims=(0, None))
        assert torch.equal(found, gradlib.per_sample_jacobian(torch.sin, X))

"""How `explain_vjp` says what a call computed, for each kind of v and J."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib


def said(*call: Any) -> str:
    """Return the whole text, without line breaks."""
    explanation = gradlib.explain_vjp(*call)
    text = str(explanation)
    words = re.sub(r"\n  (?=\S)", " ", text)
    assert words.startswith(explanation.meaning + "\n")
    return words


def meaning(*call: Any) -> str:
    return gradlib.explain_vjp(*call).meaning


def given(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def one_hot(*index: int, shape: tuple[int, ...], value: float = 1.0) -> Tensor:
    v = torch.zeros(shape)
    v[index] = value
    return v


# One output, one input: by v, for J = d outer(x, x)/dx, which is full


@pytest.mark.parametrize(
    ("v", "expected"),
    [
        (
            torch.ones(4, 4),
            "The gradient of y.sum(): each entry is the sum of a column of J, not "
            "dy/dx.",
        ),
        (
            torch.full((4, 4), 0.1),
            "The gradient of 0.1 * y.sum(): each entry is 0.1 times the sum of a "
            "column of J, not dy/dx.",
        ),
        (
            torch.full((4, 4), 1 / 3),
            "The gradient of (y * v).sum(): each entry is 0.3333 times the sum of a "
            "column of J, not dy/dx.",
        ),
        (
            torch.full((4, 4), 1 / 16),
            "The gradient of y.mean(): each entry is the mean of a column of J, not "
            "dy/dx.",
        ),
        (torch.zeros(4, 4), "Zero: v gives every row of J the weight 0."),
        (
            one_hot(1, 2, shape=(4, 4)),
            "Row [1, 2] of J: the gradient of y[1, 2].",
        ),
        (
            one_hot(1, 2, shape=(4, 4), value=-2),
            "-2 times row [1, 2] of J: the gradient of -2 * y[1, 2].",
        ),
        (
            one_hot(1, 2, shape=(4, 4), value=1 / 3),
            "0.3333 times row [1, 2] of J: the gradient of y[1, 2] * v[1, 2].",
        ),
        (
            torch.eye(4),
            "The gradient of (y * v).sum(): the rows of J, each times its weight in "
            "v, summed. If v is dL/dy, this is dL/dx.",
        ),
    ],
)
def test_by_the_values_of_v(v: Tensor, expected: str) -> None:
    x = given(4)
    assert meaning(torch.outer(x, x), x, v) == expected


def test_a_row_of_a_vector_is_a_number() -> None:
    x = given(4)
    v = one_hot(2, shape=(4,))
    assert meaning(torch.softmax(x, 0), x, v) == "Row 2 of J: the gradient of y[2]."


@pytest.mark.parametrize("value", [1.0, 3.0, 0.1, 1 / 3, 1 / 16])
@pytest.mark.parametrize("kind", ["constant", "one-hot", "mixed"])
def test_the_formula_is_the_function_that_v_is_the_gradient_of(
    value: float, kind: str
) -> None:
    x = given(4)
    y = torch.outer(x, x)
    v = {
        "constant": torch.full((4, 4), value),
        "one-hot": one_hot(3, 0, shape=(4, 4), value=value),
        "mixed": value * torch.randn(4, 4),
    }[kind]
    formula = meaning(y, x, v).split("gradient of ")[1].split(": ")[0].rstrip(".")
    loss = eval(formula, {"y": torch.outer(x, x), "v": v})
    (expected,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(gradlib.explain_vjp(y, x, v).result, expected)


# Ones, by J


def test_ones_are_dydx_of_one_entry() -> None:
    x = given(3)
    expected = "This is dy/dx: y has one entry, so J is one row."
    assert meaning((x**2).sum(), x) == expected
    assert meaning((x**2).sum().view(1, 1), x, torch.ones(1, 1)) == expected
    assert meaning((x**2).sum(), x, torch.tensor(0.5)) == expected.replace(
        "dy/dx", "0.5 times dy/dx"
    )
    assert meaning((x**2).sum(), x, torch.tensor(0.0)).startswith("Zero:")
    assert "dy/dx\n" in said((x**2).sum(), x)  # a row has no pattern to speak of


@pytest.mark.parametrize(
    ("value", "formula", "one"),
    [
        (1.0, "y.sum()", "dy/dx"),
        (3.0, "3 * y.sum()", "3 times dy/dx"),
        (0.25, "y.mean()", "1/4 of dy/dx"),
    ],
)
def test_ones_are_dydx_of_an_elementwise_function(
    value: float, formula: str, one: str
) -> None:
    x = given(2, 2)
    assert meaning((x + 2) ** 2, x, torch.full((2, 2), value)) == (
        f"The gradient of {formula}. Here that is {one}, entry by entry: J is diagonal "
        "at this x, so each sum has one term."
    )


def test_weights_of_an_elementwise_function_multiply_dydx() -> None:
    x = given(3)
    assert meaning(x**2, x, torch.randn(3)).endswith(
        "J is diagonal at this x: each entry is v times dy/dx."
    )
    assert "diagonal" not in meaning(torch.softmax(x, 0), x, torch.randn(3))


def test_ones_are_dydx_where_no_two_outputs_share_an_input() -> None:
    """A batch with one output for each sample, for example."""
    x = given(5, 3)
    y = nn.Linear(3, 1)(x)
    expected = (
        "The gradient of y.sum(). Here each entry is dy/dx, of the one entry of y that "
        "changes with that x: at this x no column of J has two nonzero entries."
    )
    assert meaning(y, x, torch.ones(5, 1)) == expected
    assert meaning(x[1:], x, torch.ones(4, 3)) == expected
    twice = meaning(y, x, torch.full((5, 1), 2.0))
    assert "Here each entry is 2 times dy/dx" in twice


def test_a_batch_with_several_outputs_for_each_sample() -> None:
    x = given(5, 3)
    text = said(nn.Linear(3, 2)(x), x, torch.ones(5, 2))
    assert "each entry is the sum of a column of J, not dy/dx." in text
    assert "At this x, x[b] reaches y[b] alone, as a sample of a batch does" in text
    assert "block diagonal" in text


def test_samples_that_influence_each_other_are_not_called_alone() -> None:
    x = given(5, 3)
    y = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))(x)
    text = said(y, x, torch.ones(5, 2))
    assert "alone" not in text
    assert "block diagonal" not in text


def test_a_jacobian_of_zeros() -> None:
    x = given(3)
    y = (x - 100).relu()
    expected = "The gradient of y.sum(): zero, because J is zero at this x."
    assert meaning(y, x, torch.ones(3)) == expected


def test_an_elementwise_function_with_zeros_is_still_one() -> None:
    x = torch.tensor([-1.0, 1.0, 2.0], requires_grad=True)
    assert "J is diagonal" in meaning(x.relu(), x, torch.ones(3))


def test_without_a_jacobian_it_is_not_guessed() -> None:
    x = given(200)
    assert meaning(x * 2, x, torch.ones(200)) == (
        "The gradient of y.sum(): each entry is the sum of a column of J, in general "
        "not dy/dx."
    )
    v = torch.randn(200)
    assert "diagonal" not in meaning(x * 2, x, v)
    assert "not computed" in said(x * 2, x, v)


# Several


def test_the_inputs_that_ones_give_dydx_of_are_named() -> None:
    x = given(1, 3)
    linear = nn.Linear(3, 2)
    y = linear(x)
    text = meaning(y, dict(linear.named_parameters()), torch.ones(1, 2))
    assert "Here each entry is dy/dx" in text
    text = meaning(y, {"x": x, "bias": linear.bias}, torch.ones(1, 2))
    assert text.endswith('of a column of J, not dy/dx, but for x["bias"].')


def test_several_outputs_are_one_sum() -> None:
    x = given(4)
    outputs = [torch.outer(x, x), x**2, x.sum(), x.exp(), x.sin()]
    v = [one_hot(1, 2, shape=(4, 4)), torch.randn(4), None, torch.zeros(4)]
    assert meaning(outputs, x, [*v, torch.full((4,), 0.25)]) == (
        "The gradient of L = y[0][1, 2] + (y[1] * v[1]).sum() + y[2] + y[4].mean(). "
        "Each input gets the sum over all outputs: no output is paired with an input."
    )
    many = meaning([x * i for i in range(1, 8)], x, [torch.ones(4)] * 7)
    assert "y[3].sum() + ... (3 more). Each" in many


def test_all_zeros_for_several_outputs() -> None:
    x = given(4)
    text = meaning([x**2, x**3], x, [torch.zeros(4)] * 2)
    assert text == "Zero: v gives every row of J the weight 0."


def test_unconnected_pairs_are_named() -> None:
    a, b = given(3), given(2)
    outputs = [a**2, a.sum() * b]
    text = said(outputs, {"a": a, "b": b}, [torch.ones(3), torch.ones(2)])
    assert 'The graph does not connect y[0] and x["b"]: J is zero there.' in text
    assert "does not connect" not in said(a * 0, a, torch.ones(3))


# What is not finite, and complex numbers


def test_nan_and_infinity_are_counted() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    text = said(x.sqrt(), x, torch.tensor([torch.nan, 1.0]))
    assert "J holds nan or inf: 2 of its entries." in text
    assert "v holds nan or inf: 1 of its entries." in text
    assert "vᵀJ holds nan or inf: 1 of its entries." in text
    assert "nan or inf" not in said(x**2, x, torch.ones(2))


def test_nan_may_hide_the_zeros_of_a_diagonal() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    assert "a column of J, in general not dy/dx." in said(x.sqrt(), x, torch.ones(2))
    assert "J is diagonal at this x" in said((x + 1).sqrt(), x, torch.ones(2))


def test_zeros_that_do_not_make_zero_are_not_said_to() -> None:
    x = torch.zeros(2, requires_grad=True)
    assert meaning(x.sqrt(), x, torch.zeros(2)) == (
        "v gives every row of J the weight 0."
    )


def test_complex_numbers_are_explained() -> None:
    x = torch.randn(2, dtype=torch.complex64, requires_grad=True)
    v = torch.ones(2, dtype=torch.complex64)
    text = said(x**2, x, v)
    assert "x is complex" in text
    assert "y is complex" in text
    assert "a complex weight for each entry" in text
    text = said(x.abs(), x, torch.ones(2))
    assert "x is complex" in text
    assert "y is complex" not in text


# The words for v in the table


def test_no_entries_in_a_few_words() -> None:
    x = given(2, 3)
    text = said(x[:0] ** 2, x, torch.ones(0, 3))
    assert text.startswith("Zero: v has no entries, and J no rows.\n")
    assert "grad_outputs: no entries\n" in text


@pytest.mark.parametrize(
    ("v", "expected"),
    [
        (torch.ones(2, 3), "all ones"),
        (torch.zeros(2, 3), "all zeros"),
        (torch.full((2, 3), -2.5), "all -2.5"),
        (torch.full((2, 3), 100.0), "all 100"),
        (torch.full((2, 3), 1 / 6), "all 1/6"),
        (one_hot(1, 2, shape=(2, 3)), "one-hot at [1, 2]"),
        (one_hot(1, 2, shape=(2, 3), value=4), "one-hot at [1, 2], 4"),
        (torch.arange(6.0).view(2, 3), "a weight for each entry"),
    ],
)
def test_v_in_a_few_words(v: Tensor, expected: str) -> None:
    x = given(2, 3)
    assert f"grad_outputs: {expected}\n" in said(x**2, x, v)


@pytest.mark.parametrize(
    ("v", "expected"), [(None, "1"), (1.0, "1"), (-2.5, "-2.5"), (1 / 6, "0.1667")]
)
def test_a_single_v_in_a_few_words(v: float | None, expected: str) -> None:
    x = given(2, 3)
    text = said((x**2).sum(), x, None if v is None else torch.tensor(v))
    assert f"grad_outputs: {expected}\n" in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_v_in_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(3, dtype=dtype, requires_grad=True)
    third = torch.full((3,), 1 / 3, dtype=dtype)
    assert meaning(x * 2, x, third).startswith("The gradient of y.mean()")
    tenth = torch.full((3,), 0.1, dtype=dtype)
    assert meaning(x * 2, x, tenth).startswith("The gradient of 0.1 * y.sum()")

"""Hooks of tensors and of nodes get what a report says that they get."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F
from torch.testing import assert_close

from gradlib.hook_reports.hooks import (
    ACCUMULATED,
    FULL,
    LEGACY,
    NODE,
    NODE_PRE,
    SEVERAL,
    TENSOR,
)
from gradlib.hook_reports.trial import cotangent

from .reported import HERE, Of, given, report_of, whats


def test_what_hooks_of_tensors_and_nodes_get() -> None:
    linear, x = nn.Linear(3, 2), given(4, 3)
    kinds = report_of(linear, x).kinds
    named = {"input": x, "weight": linear.weight, "bias": linear.bias}
    got: dict[str, list[Any]] = {}
    y = linear(x)
    graph.register_multi_grad_hook(
        [*named.values()], lambda grads: got.update({SEVERAL: [*grads]})
    )
    y.grad_fn.register_hook(lambda i, o: got.update({NODE: [*i, *o]}))
    y.grad_fn.register_prehook(lambda o: got.update({NODE_PRE: [*o]}))
    accumulated: dict[str, Tensor] = {}
    for name, leaf in named.items():
        leaf.register_post_accumulate_grad_hook(
            lambda it, name=name: accumulated.update({f"{name}.grad": it.grad.clone()})
        )
    y.backward(cotangent(0, y))
    for kind, expected in got.items():
        assert_close([entry.value for entry in kinds[kind].entries], expected)
    found = {entry.place: entry.value for entry in kinds[ACCUMULATED].entries}
    assert_close(found, accumulated)
    of_all = [f"gradient of {name}" for name in named]
    assert [*whats(kinds[ACCUMULATED]).values()] == of_all
    assert [*whats(kinds[SEVERAL]).values()] == of_all
    assert whats(kinds[NODE]) == whats(kinds[LEGACY])
    assert whats(kinds[NODE_PRE]) == {"grad_output[0]": "gradient of output"}
    assert "3 entries in grad_input: one for each input of Addmm" in kinds[NODE].why
    assert "1 entry in grad_output: one for each output of Addmm" in kinds[NODE_PRE].why


def test_a_tensor_that_gets_nothing() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Parameter(torch.full((3,), 2.0))
            self.unused = nn.Parameter(torch.full((3,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.used

    kinds = report_of(Leaves(), given(3).exp()).kinds
    nothing = "None: nothing flows to it"
    assert whats(kinds[ACCUMULATED]) == {  # x is no leaf
        "used.grad": "gradient of used",
        "unused.grad": nothing,
    }
    assert whats(kinds[SEVERAL]) == {
        "grads[0]": "gradient of x",
        "grads[1]": "gradient of used",
        "grads[2]": nothing,
    }


def test_a_tensor_that_the_pass_begins_at_is_not_counted() -> None:
    class Overwrites(nn.Module):
        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return x.mul_(by)

    several = report_of(nn.Identity(), given(3)).kinds[SEVERAL]
    assert several.entries == ()
    assert several.why.startswith("Never called: torch does not count a tensor")
    several = report_of(Overwrites(), given(3).exp(), given(3)).kinds[SEVERAL]
    assert [*whats(several).values()] == [
        "None: torch called the hook without it",
        "gradient of by",
    ]


def test_no_gradient_comes_to_an_argument() -> None:
    class GivesItsOwn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            del x
            return self.own.sin()

    kinds = report_of(GivesItsOwn(), given(3)).kinds
    assert kinds[FULL].entries == ()
    assert "waits for the gradient of one, and none comes" in kinds[FULL].why
    assert len(report_of(GivesItsOwn(), torch.ones(3)).kinds[FULL].entries) == 2


def test_no_node_where_no_tensor_is_the_first() -> None:
    kinds = report_of(Of(lambda x: ["a word", x * 2]), given(3)).kinds
    assert {kinds[kind].why for kind in (NODE, NODE_PRE)} == {
        "Not tried: there is no node that register_backward_hook would sit on."
    }


def test_no_leaf_and_no_gradient() -> None:
    kinds = report_of(nn.Tanh(), given(3).exp()).kinds
    assert kinds[ACCUMULATED].entries == ()
    assert kinds[ACCUMULATED].why.startswith("Never called: neither an argument nor")
    assert [*whats(kinds[SEVERAL]).values()] == ["gradient of input"]
    alone = report_of(Of(lambda: torch.ones(3, requires_grad=True).exp())).kinds
    assert alone[SEVERAL].entries == ()
    assert alone[SEVERAL].why.startswith("Never called: no gradient comes to")
    assert len(alone[NODE].entries) == 2


def test_an_output_used_in_another_output() -> None:
    def chained(a: Tensor) -> tuple[Tensor, Tensor]:
        y = a.exp()
        return y, y.sin()

    x = given(3)
    kinds = report_of(Of(chained), x).kinds
    total = kinds[TENSOR].entries[0]
    assert total.what == "gradient of output[0] with its use in other outputs"
    assert kinds[LEGACY].grad_output[0].what == total.what
    assert kinds[FULL].grad_output[0].what == "gradient of output[0]"
    y = x.exp().detach().requires_grad_()
    expected = cotangent(0, y) + cotangent(1, y) * y.cos()
    assert total.value is not None
    torch.testing.assert_close(total.value, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_use_in_another_output_that_hardly_shows(dtype: torch.dtype) -> None:
    x = torch.randn(3000, 3, device="cpu")
    x = x.to(HERE, dtype).requires_grad_()
    label = torch.zeros(3000, dtype=torch.long)
    module = Of(lambda x: (y := 2 * x, F.cross_entropy(y, label)))
    first, loss = (entry.what for entry in report_of(module, x).kinds[TENSOR].entries)
    assert first.endswith("output[0] with its use in other outputs")
    assert loss == "gradient of output[1]"
    both = report_of(Of(lambda x: (x * 1, x * 2)), x).kinds[TENSOR].entries
    assert [entry.what for entry in both] == [
        f"gradient of output[{i}]" for i in (0, 1)
    ]

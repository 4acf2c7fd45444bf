"""Equal graphs have one drawing, and what follows from it alone is worked out once."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.edges import edge_of
from gradlib.jacobian import drawing, planning
from gradlib.jacobian.arguments import read
from gradlib.jacobian.drawing import Drawing, drawn, kept_for_each
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.pass_memory import bytes_of_pass
from gradlib.jacobian.run import run

Function = Callable[[Tensor], Tensor]

W = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)


def cube(batch: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return samples whose axes are all as long as the batch."""
    torch.manual_seed(0)
    return torch.randn(batch, 4, 4, dtype=dtype)


def graph_of(fn: Function, x: Tensor) -> Graph:
    return run(read(fn, (x,), 0, 0))[0]


def drawing_of(fn: Function, x: Tensor) -> Drawing:
    return graph_of(fn, x).drawing


def plain(x: Tensor) -> Tensor:
    return (x @ W).tanh() + x


def test_equal_graphs_have_one_drawing() -> None:
    first = drawing_of(plain, cube())
    assert drawing_of(plain, cube() + 1) is first
    assert drawing_of(lambda x: (x @ W.mT).tanh() + x, cube()) is first


OTHERS: dict[str, tuple[Function, Tensor]] = {
    "another operation": (lambda x: (x @ W).sigmoid() + x, cube()),
    "one more": (lambda x: (x @ W).tanh().neg() + x, cube()),
    "the sum the other way round": (lambda x: x + (x @ W).tanh(), cube()),
    "another batch": (plain, cube(3)),
    "another dtype": (lambda x: (x @ W.float()).tanh() + x, cube(dtype=torch.float32)),
    "a constant instead": (lambda x: (x @ W).tanh() + W, cube()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_have_another(name: str) -> None:
    fn, x = OTHERS[name]
    assert drawing_of(fn, x) is not drawing_of(plain, cube())


def test_the_order_in_which_nodes_were_made() -> None:
    def sine_first(x: Tensor) -> Tensor:
        sine, power = x.sin(), x.exp()
        return sine * power

    def sine_last(x: Tensor) -> Tensor:
        power, sine = x.exp(), x.sin()
        return sine * power

    one, other = (drawing_of(it, cube()) for it in (sine_first, sine_last))
    assert one.names == other.names
    passed = [[it.names[i] for i in it.order] for it in (one, other)]
    assert passed[0].index("ExpBackward0") < passed[0].index("SinBackward0")
    assert passed[1].index("ExpBackward0") > passed[1].index("SinBackward0")


def test_which_of_its_inputs_an_operation_leads_on_to() -> None:
    w = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    x = cube()[:, 0]
    for fn, index in ((lambda x: x @ w, 0), (lambda x: w @ x.t(), 1)):
        found = drawing_of(fn, x)
        number = found.names.index("MmBackward0")
        assert tuple(found.positions[number]) == (index,)


def test_what_leads_nowhere_does_not_lead_to_an_input_that_is_not_met() -> None:
    x, other, unmet = (cube().requires_grad_() for _ in range(3))
    y = x.sin() + other * 2  # the edge of a number leads nowhere
    found, _ = drawn([edge_of(y)], [edge_of(x), edge_of(unmet)])
    assert found.names == ("AddBackward0", "SinBackward0", ACCUMULATES)
    assert found.ends == ((2, 0), None)
    alone, _ = drawn([edge_of(y)], [edge_of(unmet)])
    assert alone.names == ()
    assert alone.lost == (0,)


ACCUMULATES = "torch::autograd::AccumulateGrad"


def test_what_follows_is_worked_out_once() -> None:
    asked: list[Drawing] = []
    kept = kept_for_each(asked.append)
    for _ in range(3):
        kept(drawing_of(plain, cube()))
    kept(drawing_of(plain, cube(3)))
    assert len(asked) == 2


def test_what_a_pass_takes_is_no_matter_of_values() -> None:
    net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)).double()
    taken = {bytes_of_pass(drawing_of(net, cube() * it)) for it in (1, 2)}
    assert len(taken) == 1
    assert bytes_of_pass(drawing_of(net, cube(8))) == 2 * taken.pop()


# Of all pairs the shapes, names and edges are the same: what differs has been saved.
ALIKE: dict[str, tuple[Function, Function]] = {
    "transposed": (
        lambda x: (x.transpose(0, 1) @ W).transpose(0, 1),
        lambda x: (x.transpose(1, 2) @ W).transpose(1, 2),
    ),
    "permuted": (
        lambda x: (x.permute(1, 0, 2) @ W).permute(1, 0, 2),
        lambda x: (x.permute(1, 2, 0) @ W).permute(2, 0, 1),
    ),
    "selected": (lambda x: x[:, 0].sin() @ W, lambda x: x[:, 3].sin() @ W),
    "sliced": (lambda x: x[:, :2].sin() @ W, lambda x: x[:, 2:].sin() @ W),
    "unbound": (
        lambda x: x.unbind(1)[0] @ W * x.unbind(1)[3],
        lambda x: x.unbind(1)[1] @ W * x.unbind(1)[2],
    ),
    "split": (lambda x: x.split(2, 1)[0] @ W, lambda x: x.split(2, 2)[0].mT @ W),
    "joined": (
        lambda x: torch.cat([x, x.sin()], 1) @ W,
        lambda x: torch.cat([x.sin(), x], 1) @ W,
    ),
    "added": (lambda x: torch.add(x, x @ W, alpha=2), lambda x: x + x @ W),
    "a softmax": (lambda x: x.softmax(1) @ W, lambda x: x.softmax(2) @ W),
    "a mean": (lambda x: x.sin().mean(1) @ W, lambda x: x.sin().mean(2) @ W),
    "a power": (lambda x: x.square() @ W, lambda x: x.pow(3) @ W),
    "a product": (lambda x: x @ W * 2, lambda x: x @ W.mT * 3),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_saved_is_read_at_every_call(name: str) -> None:
    x = cube()
    for _ in range(2):
        for fn in ALIKE[name]:
            found = gradlib.per_sample_jacobian(fn, x, check=False)
            loop = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
            torch.testing.assert_close(found, loop, rtol=1e-12, atol=1e-12)


def test_large_drawings_are_not_remembered() -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(drawing.MOST):
            x = x.neg()
        return x

    found = drawing_of(long, cube())
    assert len(found.names) > drawing.MOST
    gone = weakref.ref(found)
    assert drawing_of(long, cube()) is not found
    bytes_of_pass(found)
    del found
    gc.collect()
    assert gone() is None


def test_a_drawing_keeps_nothing_alive() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Softmin(1)).double()
    x = cube()[:, 0]
    found = drawing_of(net, x)
    gradlib.per_sample_jacobian(net, x)
    gone = [weakref.ref(it) for it in (net, x, *net.parameters())]
    del net, x
    gc.collect()
    assert not any(it() for it in gone)
    assert found.names


@pytest.mark.cpu  # how much is free on a GPU is asked each time
def test_a_plan_is_made_once_for_equal_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_a_cpu(x: Tensor) -> Tensor:
        return (x @ W.to(x)).tanh() + x

    made: list[object] = []
    choose = planning.chunk_of

    def noted(*args: Any, **options: Any) -> int:
        made.append(args)
        return choose(*args, **options)

    monkeypatch.setattr(planning, "chunk_of", noted)
    for _ in range(3):
        gradlib.per_sample_jacobian(on_a_cpu, cube(), check=False)
    assert len(made) == 1
    options: list[dict[str, Any]] = [
        *({"mode": it} for it in ("reverse", "forward", "loop")),
        *({"chunk_size": it} for it in (1, 3)),
        *({"max_bytes": it} for it in (2**20, 2**21)),
        *({"create_graph": True}, {"out": torch.empty(4, 4, 4, 4, 4).double()}),
    ]
    for number, asked in enumerate(options, 2):
        gradlib.per_sample_jacobian(on_a_cpu, cube(), check=False, **asked)
        assert len(made) == number


def test_a_plan_that_was_changed_changes_no_other() -> None:
    plan = gradlib.plan_jacobian(plain, cube())
    before = dict(plan.counts)
    plan.counts.clear()
    assert gradlib.plan_jacobian(plain, cube()).counts == before

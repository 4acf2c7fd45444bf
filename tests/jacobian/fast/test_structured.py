"""Structure makes a Jacobian cheaper, never another: the loop in float64 says so."""

import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradlib
from gradlib.edges import nodes_behind
from gradlib.jacobian import planning
from gradlib.jacobian.arguments import read
from gradlib.jacobian.fast.door import find_in_graph
from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.structure import chunks, structured
from gradlib.jacobian.fast.structure.rules import RULES
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.run import run
from gradlib.random_state import seed_all

from .lines import double
from .operations import (
    ALONE,
    ON_CPU,
    UNSEEN,
    Block,
    Function,
    Net,
    Own,
    W,
    by_rows,
    graph_of,
    half_of_it,
    looks_asked,
    of_a_gpu,
    written_into,
)

AMPLE = 10**12


@pytest.fixture(autouse=True)
def _always_worth_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(structured, "WORTH", 0)
    monkeypatch.setattr(structured, "promises", lambda *_: True)
    monkeypatch.setattr("gradlib.jacobian.choice.FEW", 0)  # for a GPU too


def found_for(graph: Graph, rows: int, room: int) -> structured.Structured | None:
    """Look for structure, where it would take so many rows otherwise."""
    otherwise = planning.make(graph, "loop", "auto", None)
    counts = otherwise.counts | {"loop": rows}
    instead = replace(otherwise, counts=counts, max_bytes=room, result_bytes=0)
    return structured.find_structured(graph, instead)


def by_structure(graph: Graph) -> Tensor | None:
    """Return the Jacobian, or ``None`` where its structure is not known."""
    found = found_for(graph, AMPLE, AMPLE)
    return None if found is None else found.blocks(graph)[0, 0]


def require_same(fn: Function, x: Tensor, *, wrong: str = "") -> None:
    """Fail unless structure gives the same as rows."""
    graph = graph_of(fn, x)
    found, truth = by_structure(graph), by_rows(graph)
    assert found is not None, wrong
    assert found.shape == truth.shape, wrong
    error = (found - truth).abs().max() / truth.abs().max().clamp(min=1e-3)
    assert error <= 1e-12, wrong


@pytest.mark.parametrize("name", ALONE)
def test_an_operation(name: str) -> None:
    seed_all(len(name))
    require_same(ALONE[name], double(4, 4, 4), wrong=name)


def test_every_rule_is_among_them() -> None:
    seen: set[str] = set()
    for fn in ALONE.values():
        seen |= {
            node.name() for node in nodes_behind(graph_of(fn, double(4, 4, 4)).roots)
        }
    assert set(RULES) - seen == UNSEEN


@pytest.mark.parametrize("seed", range(40))
def test_a_random_net(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    seed_all(seed)
    monkeypatch.setattr(chunks, "CHUNK", chance.choice([2**6, 2**10, 2**14, 2**21]))
    samples, tokens = chance.choice([(4, 4), (1, 3), (2, 1), (3, 5), (8, 2)])
    width = 4 if samples == tokens else chance.choice([4, 12])
    net = Net(width, chance.choice([1, 2, 4]), tokens, chance).double()
    net.requires_grad_(chance.random() < 0.5)
    # The factors of a norm may be more than the Jacobian of few outputs.
    monkeypatch.setattr(structured, "MOST", AMPLE)
    require_same(net, double(samples, tokens, width))


def test_an_axis_may_be_split_after_a_sum() -> None:
    seed_all(0)
    layer = nn.Linear(8, 8).double()

    def fn(x: Tensor) -> Tensor:
        y = (x.sin() @ W).reshape(4, 2, 8)
        return layer(y) + y.tanh()

    require_same(fn, double(4, 4, 4))


def test_one_axis_may_come_in_two_orders() -> None:
    seed_all(0)
    layer = nn.Linear(8, 8).double()

    def fn(x: Tensor) -> Tensor:
        y = layer(x)
        return y.view(-1, 2, 4).sin() + y.view(-1, 4, 2).mT.cos()

    require_same(fn, double(3, 8))


@pytest.mark.parametrize("size", [2**8, 2**21])
def test_a_term_may_take_fewer_rows_at_a_time_than_those_before(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before is kept for more rows, so that none may add to it."""
    seed_all(0)
    monkeypatch.setattr(chunks, "CHUNK", size)
    monkeypatch.setattr(structured, "MOST", AMPLE)
    narrow, wide = (
        nn.Sequential(nn.Linear(4, it), nn.Tanh(), nn.Linear(it, 4)).double()
        for it in (2, 32)
    )

    def block(x: Tensor) -> Tensor:
        return narrow(x) + wide(x)

    require_same(lambda x: block(block(x)), double(3, 4, 4))


def split_after_a_sum(x: Tensor) -> Tensor:
    y = (x @ SIX).view(-1, 3, 2).cos().view(-1, 6)
    z = y + y.sin()
    return (z + z @ SIX) + x.view(-1, 2, 3).sin().view(-1, 6)


def split_in_one_term(x: Tensor) -> Tensor:
    y = x.view(-1, 4, 4).sin()
    return y + y.mT + y.view(-1, 4, 2, 2).mean((1, 2, 3))[:, None, None]


SIX = torch.arange(36, dtype=torch.float64).sin().view(6, 6)

ACROSS: dict[str, tuple[Function, int]] = {
    "longer than an axis": (
        lambda x: x.sin().view(-1, 3, 2).view(-1, 2, 3).cos(),
        6,
    ),
    "shorter than an axis": (
        lambda x: x.sin().view(-1, 2, 3).view(-1, 3, 2).cos(),
        6,
    ),
    "longer than one axis, shorter than another": (
        lambda x: x.sin().view(-1, 2, 3, 4).view(-1, 3, 8).cos(),
        24,
    ),
    "of one tensor, whose remainders agree": (
        lambda x: x.view(-1, 3, 7).sin() + x.view(-1, 7, 3).mT.cos(),
        21,
    ),
    "of one tensor": (
        lambda x: x.view(-1, 2, 3).sin() + x.view(-1, 3, 2).mT.cos(),
        6,
    ),
    "of one on the way": (
        lambda x: (lambda y: y.view(-1, 2, 3) + y.view(-1, 3, 2).mT.cos())(x @ SIX),
        6,
    ),
    "after a sum": (split_after_a_sum, 6),
    "in one term": (split_in_one_term, 16),
    "nothing": (lambda x: torch.cat([x.sin(), x[:, :0].cos()], 1) @ SIX, 6),
}


@pytest.mark.parametrize("name", ACROSS)
def test_parts_that_lie_across_axes_are_left_to_others(name: str) -> None:
    seed_all(0)
    fn, size = ACROSS[name]
    x = double(3, size)
    assert by_structure(graph_of(fn, x)) is None
    found = gradlib.per_sample_jacobian(fn, x, check=False)
    truth = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


WIDE: dict[str, Function] = {
    "probabilities": lambda y: y.softmax(-1),
    "their logarithms": lambda y: y.log_softmax(-1),
    "norm": lambda y: F.layer_norm(y, y.shape[-1:]),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_factor_that_is_more_than_the_jacobian_is_not_computed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_all(0)
    one, other = nn.Linear(4, 50).double(), nn.Linear(50, 2).double()

    def fn(x: Tensor) -> Tensor:
        return other(WIDE[name](one(x)))

    x = double(3, 4)
    assert by_structure(graph_of(fn, x)) is None
    monkeypatch.setattr(structured, "MOST", AMPLE)
    require_same(fn, x)


UNKNOWN: dict[str, Function] = {
    "single numbers": lambda x: torch.stack([it.exp() * it[0, 0].sum(0) for it in x]),
    "probabilities of one": lambda x: torch.stack(
        [it.exp() * it[0, 0].softmax(0) for it in x]
    ),
    "another sample": lambda x: x - x.mean(0),
    "samples turned": lambda x: x.flip(0),
    "samples for tokens": lambda x: x.transpose(0, 1).sin(),
    "samples for features": lambda x: x.transpose(0, 2) @ W,
    "samples shifted": lambda x: torch.cat([x[1:], x[:1]]),
    "samples multiplied": lambda x: (x.reshape(4, 16) @ x.reshape(4, 16).T) @ W,
    "all to one": lambda x: x.sin() + x.sum(),
    "picked": lambda x: x[:, [0, 2]],
    "gathered": lambda x: x.gather(1, torch.zeros(4, 1, 4, dtype=torch.long)),
    "batch norm that learns": lambda x: F.batch_norm(
        x.transpose(1, 2), None, None, training=True
    ),
    "written into": written_into,
    "somebody's own": lambda x: Own.apply(x),
    "sorted": lambda x: x.sort(1).values,
    "cumulative": lambda x: x.cumsum(1),
    "dtypes": lambda x: x.float().sin().double(),
    "infinite": lambda x: F.linear(x, W * math.inf),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_left_to_others(name: str) -> None:
    seed_all(0)
    assert by_structure(graph_of(UNKNOWN[name], double(4, 4, 4))) is None


@pytest.mark.skipif(not ON_CPU, reason="a GPU has that kernel for float32 only")
@pytest.mark.parametrize("unknown", ["", "dropout_p", "is_causal", "query"])
def test_attention_that_is_not_the_formula_is_left_to_others(
    unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropout = 0.0 if unknown else 0.1
    graph = graph_of(lambda x: of_a_gpu(x, x, x, dropout_p=dropout), double(4, 2, 4, 4))
    saved = Operation.saved
    monkeypatch.setattr(
        Operation, "saved", lambda op, it: None if it == unknown else saved(op, it)
    )
    assert by_structure(graph) is None


def test_autocast_is_left_to_others() -> None:
    assert by_structure(graph_of(half_of_it, torch.randn(4, 4, 4))) is None


def test_narrow_dtypes_are_left_to_others() -> None:
    x = torch.randn(4, 4, 4, dtype=torch.bfloat16)
    assert by_structure(graph_of(torch.sin, x)) is None


def test_two_dtypes_in_one_product_are_left_to_others() -> None:
    assert by_structure(graph_of(lambda x: x * W, torch.randn(4, 4, 4))) is None


def test_several_inputs_are_left_to_others() -> None:
    given = read(torch.mul, (double(2, 3), double(2, 3)), (0, 1), 0)
    graph, _ = run(given)
    plan = planning.make(graph, "loop", "auto", None)
    assert not isinstance(find_in_graph(graph, plan), structured.Structured)


def test_what_a_node_has_saved_may_be_overwritten() -> None:
    weight = W.clone()
    graph = graph_of(lambda x: F.linear(x, weight), double(4, 4, 4))
    weight.zero_()
    plan = planning.make(graph, "reverse", "auto", None)
    assert find_in_graph(graph, plan) is None


def test_weights_are_read_at_every_call() -> None:
    seed_all(0)
    layer = nn.Linear(4, 4).double()
    x = double(2, 3, 4)
    require_same(layer, x)
    with torch.no_grad():
        layer.weight.data.mul_(2)
    require_same(layer, x)


def test_it_is_not_taken_where_it_does_not_fit() -> None:
    graph = graph_of(ALONE["attention"], double(4, 4, 4))
    found = found_for(graph, AMPLE, AMPLE)
    assert found is not None
    assert found_for(graph, AMPLE, found.bytes) is not None
    assert found_for(graph, AMPLE, found.bytes - 1) is None


def test_it_writes_into_what_it_is_given() -> None:
    graph = graph_of(ALONE["attention"], double(4, 4, 4))
    found = found_for(graph, AMPLE, AMPLE)
    assert found is not None
    out = torch.full(graph.shape(0, 0), math.nan, dtype=torch.float64)
    made = found.blocks(graph, {(0, 0): out})
    assert made[0, 0] is out
    assert torch.equal(out, found.blocks(graph)[0, 0])


def test_tokens_are_worth_it_and_rows_of_few_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    seed_all(0)
    tokens = graph_of(
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
        torch.randn(4, 16, 32),
    )
    assert found_for(tokens, tokens.rows(0), AMPLE) is not None
    assert found_for(tokens, 1, AMPLE) is None
    flat = graph_of(nn.Linear(32, 32), torch.randn(4, 32))
    assert found_for(flat, AMPLE, AMPLE) is None


def test_a_hook_inside_is_heard() -> None:
    seed_all(0)
    layer = nn.Linear(4, 4).double()

    def hooked(x: Tensor) -> Tensor:
        y = layer(x.sin())
        y.register_hook(lambda grad: grad * grad.sign())
        return y.tanh()

    x = double(4, 4, 4)
    found = gradlib.per_sample_jacobian(hooked, x, check=False)
    truth = gradlib.per_sample_jacobian(hooked, x, mode="loop", check=False)
    assert by_structure(graph_of(hooked, x)) is not None, "a hook is not seen there"
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def test_it_is_proven_without_a_check_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are others than those of rows."""
    asked = looks_asked(monkeypatch)
    gradlib.per_sample_jacobian(ALONE["linear"], double(4, 4, 4), check=False)
    assert len(asked) == 1


@pytest.mark.parametrize("check", [False, True])
def test_a_block_as_a_whole(check: bool) -> None:
    seed_all(0)
    block = Block(4, 2, random.Random(0)).double()
    x = double(3, 5, 4)
    plan = gradlib.plan_jacobian(block, x, check=check)
    assert plan.mode == "structure"
    assert "each token, or each head, by itself" in plan.why
    truth = gradlib.per_sample_jacobian(block, x, mode="loop", check=False)
    found = gradlib.per_sample_jacobian(block, x, check=check)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    out = torch.empty_like(truth).mT.contiguous().mT
    assert gradlib.per_sample_jacobian(block, x, out=out, check=check) is out
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)

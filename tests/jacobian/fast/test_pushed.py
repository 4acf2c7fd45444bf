"""Columns that go forward together are what rows are, one by one."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradlib
from gradlib.jacobian import planning
from gradlib.jacobian.fast.door import find_in_graph
from gradlib.jacobian.fast.pushed.pushed import Passed, Pushed, find_pushed
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.graph_of_tensors import of_tensors
from gradlib.random_state import seed_all

from .lines import double
from .operations import ON_CPU, SLICE, Function, by_rows, graph_of, looks_asked

TRANSPOSED: Any = F.conv_transpose2d


def weights(*shape: int) -> Tensor:
    """Return numbers that are the same at every call."""
    return torch.arange(math.prod(shape)).double().add(1).sin().view(shape)


def wider(x: Tensor) -> Tensor:
    """Return more entries than there are, so that there are fewer columns than rows."""
    return x.flatten(1) @ weights(x[0].numel(), 150)


def found_for(graph: Graph) -> Pushed | None:
    """Return the way forward."""
    return find_pushed(graph, planning.make(graph, "forward", "auto", None))


IMAGES: dict[str, Function] = {
    "convolution": lambda x: F.conv2d(x, weights(9, 2, 3, 3), weights(9), padding=1),
    "convolution in strides": lambda x: F.conv2d(
        x, weights(40, 2, 2, 3), stride=(2, 1), padding=1, dilation=(1, 2)
    ),
    "convolution in groups": lambda x: F.conv2d(x, weights(20, 1, 2, 2), groups=2),
    "convolution, unpadded": lambda x: F.conv2d(
        x, weights(20, 2, 2, 2), padding="valid"
    ),
    "convolution by lists of one": lambda x: F.conv2d(
        x, weights(30, 2, 2, 2), stride=[2], padding=[1], dilation=[2]
    ),
    "convolution of lines": lambda x: F.conv1d(x.flatten(2), weights(9, 2, 3)),
    "convolution of spaces": lambda x: F.conv3d(x[:, None], weights(9, 1, 2, 2, 2)),
    "transposed": lambda x: TRANSPOSED(x, weights(2, 3, 3, 3), weights(3)),
    "transposed in strides": lambda x: TRANSPOSED(
        x, weights(2, 3, 3, 3), stride=2, padding=1, output_padding=1
    ),
    "transposed by lists of one": lambda x: TRANSPOSED(
        x, weights(2, 3, 3, 3), stride=[2]
    ),
    "transposed in groups": lambda x: TRANSPOSED(
        x, weights(2, 3, 2, 2), stride=2, groups=2, dilation=2
    ),
    "transposed with taps apart": lambda x: TRANSPOSED(
        x, weights(2, 3, 3, 3), stride=(1, 2), output_padding=(1, 2), dilation=3
    ),
    "transposed from many": lambda x: TRANSPOSED(
        F.conv2d(x, weights(12, 2, 1, 1)),
        weights(12, 5, 3, 3),
        stride=2,
        output_padding=1,
    ),
    "larger": lambda x: F.interpolate(x, scale_factor=2.0),
    "much larger": lambda x: F.interpolate(x, size=(7, 9), mode="bilinear"),
    "larger to the corners": lambda x: F.interpolate(
        x, size=(7, 9), mode="bilinear", align_corners=True
    ),
    "shuffled": lambda x: F.pixel_shuffle(F.conv2d(x, weights(8, 2, 1, 1)), 2),
    "shuffled back": lambda x: wider(F.pixel_unshuffle(x, 2)),
    "largest": lambda x: wider(F.max_pool2d(x.sin(), 2, 1)),
    "mean of places": lambda x: wider(F.avg_pool2d(x, 2, 1, padding=1)),
    "layer norm": lambda x: wider(
        F.layer_norm(x, (4, 4), weights(4, 4), weights(4, 4))
    ),
    "layer norm, plain": lambda x: wider(F.layer_norm(x, (2, 4, 4))),
    "group norm": lambda x: F.conv2d(
        F.group_norm(F.conv2d(x, weights(6, 2, 1, 1)), 3, weights(6), weights(6)),
        weights(9, 6, 2, 2),
    ),
    "group norm, plain": lambda x: wider(F.group_norm(x, 2)),
    "softmax": lambda x: wider(x.softmax(1)),
    "logarithms of a softmax": lambda x: wider(x.log_softmax(-1)),
    "norm in use": lambda x: wider(
        F.batch_norm(x, weights(2), weights(2).abs() + 1, weights(2), weights(2))
    ),
}

OTHERS: dict[str, Function] = {
    "sum": lambda x: torch.add(wider(x), wider(x.sin()), alpha=2),
    "scaled sum": lambda x: torch.sub(wider(x), wider(x.cos()), alpha=3),
    "repeated": lambda x: x.flatten(1)[:, None] - x.flatten(1).exp()[:, :, None],
    "fewer axes": lambda x: x.mean((1, 2, 3))[:, None] * weights(200),
    "negative": lambda x: -wider(x).clone(),
    "product": lambda x: x.flatten(1)[:, None] * x.flatten(1)[:, :, None].tanh(),
    "moved": lambda x: wider(x.permute(0, 2, 3, 1).transpose(1, 2).reshape(-1, 32)),
    "picked": lambda x: wider(x[:, 0, 1:, ::2]),
    "picked by a script": lambda x: wider(SLICE(x, 2, None, 3)),
    "parts": lambda x: torch.cat([wider(it) for it in x.sin().split([1, 3], 2)], 1),
    "rows": lambda x: wider(torch.cat([it.exp() for it in x.unbind(1)], 1)),
    "one part": lambda x: torch.cat([wider(x), x.detach().flatten(1)], 1),
    "reduced": lambda x: wider(x.sum((1, 3)) + x.mean(1).sum(-1, keepdim=True)[..., 0]),
    "tokens": lambda x: F.linear(x.flatten(2), weights(99, 16), weights(99)).sin(),
    "frames": lambda x: F.conv2d(x.view(-1, 1, 4, 4), weights(9, 1, 2, 2)).view(
        3, 2, 9, 3, 3
    ),
    "twice": lambda x: (lambda y: y * y + y)(wider(x)),
    "layers": nn.Sequential(
        nn.Flatten(), nn.Linear(32, 40), nn.GELU(), nn.Linear(40, 50), nn.Softplus()
    ).double(),
    "two steps of one": lambda x: (lambda y: torch.cat([y[:, :70], y[:, 9:].sin()], 1))(
        wider(x)
    ),
}


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", [*IMAGES, *OTHERS])
def test_an_operation(name: str, few: bool) -> None:
    fn = (IMAGES | OTHERS)[name]
    graph = graph_of(fn, double(3, 2, 4, 4))
    found = found_for(graph)
    assert found is not None
    if few:
        found = Pushed(found.steps, found.drawing, 5, 0, 0, needs_proof=False)
    made = found.blocks(graph)[0, 0]
    torch.testing.assert_close(made, by_rows(graph), rtol=1e-11, atol=1e-11)
    assert not found.needs_proof


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", IMAGES)
def test_a_call(name: str, dtype: torch.dtype) -> None:
    def fn(x: Tensor) -> Tensor:
        return IMAGES[name](x.double()).to(dtype).sin()

    x = double(3, 2, 4, 4).to(dtype)
    found = gradlib.per_sample_jacobian(fn, x)
    truth = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    torch.testing.assert_close(found, truth)


def test_a_decoder_takes_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradlib.jacobian.choice.FEW", 0)  # for a GPU too
    model = nn.Sequential(
        nn.Linear(5, 24),
        nn.ReLU(),
        nn.Unflatten(1, (6, 2, 2)),
        nn.ConvTranspose2d(6, 3, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(3, 1, 4, 2, 1),
    ).double()
    x = double(4, 5)
    plan = gradlib.plan_jacobian(model, x)
    assert (plan.mode, plan.counts["pushed"], plan.passes) == ("pushed", 5, 1)
    fn = of_sum(model)
    for inputs in (x,), (x, double(4, 5)):
        numbers = tuple(range(len(inputs)))
        found = gradlib.per_sample_jacobian(fn, *inputs, argnums=numbers)
        truth = gradlib.per_sample_jacobian(fn, *inputs, argnums=numbers, mode="loop")
        torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-11)


def test_an_operation_that_one_input_does_not_reach() -> None:
    x, y = double(3, 2, 4, 4), double(3, 2, 4, 4)
    points = (x.requires_grad_(), y.requires_grad_())
    graph, _ = of_tensors(wider(x.sin()) * wider(y.cos()).tanh(), points)
    found = found_for(graph)
    assert found is not None
    for point, made in enumerate(found.blocks(graph).values()):
        one = replace(
            graph, points=(points[point],), ends=(graph.ends[point],), shared=(False,)
        )
        torch.testing.assert_close(made, by_rows(one), rtol=1e-11, atol=1e-11)


def of_sum(model: nn.Module) -> Callable[..., Tensor]:
    """Return a function of several inputs."""
    return lambda *inputs: model(torch.stack(inputs).sum(0))


MIXING: dict[str, Function] = {
    "mean": lambda x: wider(x.sin() - x.sin().mean(0)),
    "kept mean": lambda x: wider(x.sin() - x.sin().mean(0, keepdim=True)),
    "sum": lambda x: wider(x) * x.sum(0).flatten()[:1],
    "shifted": lambda x: wider(torch.cat([x[1:], x[:1]])),
    "samples for channels": lambda x: wider(x.permute(1, 0, 2, 3).sin()),
    "exchanged": lambda x: wider(x.transpose(0, 1).sin()),
    "channels of one sample": lambda x: wider(x[0].sin()),
    "channels of another": lambda x: wider(x.unbind(0)[1].sin()),
    "means of channels": lambda x: wider(x.mean(0).sin()),
    "sums of channels": lambda x: wider(x.sum((0, 2)).sin()),
    "samples of three": lambda x: wider(torch.cat([x[2:], x[:1], x[1:2]]).sin()),
    "softmax of samples": lambda x: wider(x.softmax(0)),
    "logarithms of that": lambda x: wider(x.log_softmax(0)),
    "softmax of tokens": lambda x: wider(x.view(9, 16).softmax(0).view(3, 3, 16)),
    "tokens exchanged": lambda x: wider(x.transpose(0, 1).reshape(9, 16).view(3, 48)),
    "tokens shifted": lambda x: wider(
        (lambda y: torch.cat([y[1:], y[:1]]))(x.view(9, 16)).view(3, 48)
    ),
    "samples of two": lambda x: wider(torch.cat([x.cos(), x.sin()])[2:5]),
    "norm of all": lambda x: wider(F.layer_norm(x, (3, 3, 4, 4))),
    "tokens of two samples": lambda x: wider(
        (x.view(16, 9) @ weights(9, 9)).view(3, 48)
    ),
    "along other axes": lambda x: x.flatten(1).mean(1) + wider(x).view(3, 50, 3),
}


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_may_mix_are_held_against_rows(name: str) -> None:
    x = double(3, 3, 4, 4)
    graph = graph_of(MIXING[name], x)
    found = found_for(graph)
    assert found is None or found.needs_proof
    made = gradlib.per_sample_jacobian(MIXING[name], x, check=False)
    torch.testing.assert_close(made, by_rows(graph), rtol=1e-11, atol=1e-11)


def test_a_proof_is_asked_for_where_samples_may_mix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = looks_asked(monkeypatch)
    for number, name in enumerate(["kept mean", "along other axes"], 1):
        gradlib.per_sample_jacobian(MIXING[name], double(3, 3, 4, 4), check=False)
        assert len(asked) >= number


UNKNOWN: dict[str, Function] = {
    "both sides of a product": lambda x: wider(x.sin() @ (x.T @ x)),
    "filters": lambda x: wider(
        F.conv2d(x.view(4, 1, 3, 3), x[:, :4].reshape(4, 1, 2, 2).sin())
    ),
    "scales of a norm": lambda x: wider(F.layer_norm(x, (9,), x.sin().mean(0))),
    "shifts of a norm": lambda x: wider(F.layer_norm(x, (9,), None, x.sin().mean(0))),
    "scales of groups": lambda x: wider(F.group_norm(x, 3, x.sin().mean(0))),
    "scales of known means": lambda x: wider(
        F.batch_norm(x, weights(9), weights(9).exp(), x.sin().mean(0))
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_weights_made_of_x_are_left_to_others(name: str) -> None:
    x = double(4, 9)
    graph = graph_of(UNKNOWN[name], x)
    assert found_for(graph) is None
    made = gradlib.per_sample_jacobian(UNKNOWN[name], x, check=False)
    torch.testing.assert_close(made, by_rows(graph), rtol=1e-11, atol=1e-11)


def test_parts_of_unknown_size_are_left_to_others() -> None:
    graph = graph_of(
        lambda x: wider(torch.cat([weights(4, 1), x, weights(4, 2)], 1)), double(4, 9)
    )
    assert found_for(graph) is None


def test_no_samples() -> None:
    def fn(x: Tensor) -> Tensor:
        return x @ weights(5, 150)

    assert found_for(graph_of(fn, double(0, 5))) is None
    assert gradlib.per_sample_jacobian(fn, double(0, 5)).shape == (0, 150, 5)


def decoder() -> nn.Module:
    """Return a net with fewer columns than rows."""
    seed_all(0)
    layers = nn.Linear(5, 24), nn.ReLU(), nn.Unflatten(1, (6, 2, 2))
    return nn.Sequential(*layers, nn.ConvTranspose2d(6, 3, 4, 2, 1)).double()


def test_into_memory_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradlib.jacobian.choice.FEW", 0)  # for a GPU too
    model, x = decoder(), double(4, 5)
    assert gradlib.plan_jacobian(model, x).mode == "pushed"
    out = torch.full((4, 3, 4, 4, 5), math.nan, dtype=torch.float64)
    assert gradlib.per_sample_jacobian(model, x, out=out) is out
    truth = gradlib.per_sample_jacobian(model, x, mode="loop", check=False)
    torch.testing.assert_close(out, truth, rtol=1e-11, atol=1e-11)
    graph = graph_of(model, x)
    found = found_for(graph)
    assert found is not None
    assert found.blocks(graph, {(0, 0): out.fill_(math.nan)})[0, 0] is out
    torch.testing.assert_close(out, truth, rtol=1e-11, atol=1e-11)


def test_without_room_for_slopes_it_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradlib.jacobian.choice.FEW", 0)  # for a GPU too
    monkeypatch.setattr("gradlib.jacobian.choice.LITTLE", 0)
    model, x = decoder(), double(4, 5)
    needed = gradlib.plan_jacobian(model, x, mode="forward", chunk_size=1).bytes
    assert gradlib.plan_jacobian(model, x, max_bytes=needed).mode == "forward"
    found = gradlib.per_sample_jacobian(model, x, max_bytes=needed)
    truth = gradlib.per_sample_jacobian(model, x, mode="loop", check=False)
    torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-11)


def test_what_a_node_has_saved_may_be_overwritten() -> None:
    def fn(x: Tensor) -> Tensor:
        matrix = weights(5, 150)
        y = x.sin() @ matrix
        matrix.zero_()
        return y

    graph = graph_of(fn, double(4, 5))
    assert find_in_graph(graph, planning.make(graph, "forward", "auto", None)) is None
    with pytest.raises(gradlib.NoSuchWayError, match="inplace operation"):
        gradlib.per_sample_jacobian(fn, double(4, 5), check=False)


def test_where_columns_are_no_fewer_they_are_not_taken() -> None:
    graph = graph_of(
        lambda x: F.conv2d(x, weights(2, 2, 3, 3), padding=1), double(3, 2, 4, 4)
    )
    assert found_for(graph) is None


@pytest.mark.skipif(not ON_CPU, reason="a GPU takes few rows in one pass")
def test_few_small_rows_go_back() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x @ weights(3, 40)
        return (y.sin() * y.cos()) @ weights(40, 5)

    plans = [gradlib.plan_jacobian(fn, double(batch, 3)) for batch in (8, 2048)]
    assert [it.mode for it in plans] == ["reverse", "pushed"]


def test_each_pass_lets_go_of_what_nobody_waits_for() -> None:
    graph = graph_of(lambda x: wider(x.sin().exp().tanh().cos()), double(2, 3))
    found = found_for(graph)
    assert found is not None
    made: list[ReferenceType[Tensor]] = []
    held: list[int] = []

    def watched(step: Passed) -> Passed:
        def forth(given: Any) -> Tensor:
            tangent = step.forth(given)
            held.append(sum(it() is not None for it in made))
            made.append(ref(tangent))
            return tangent

        return step._replace(forth=forth)

    steps = [watched(step) for step in found.steps]
    replace(found, steps=steps, chunk=1).blocks(graph)
    assert len(held) == 3 * len(steps)
    assert max(held) <= 2  # what it is given, and the result of the pass before

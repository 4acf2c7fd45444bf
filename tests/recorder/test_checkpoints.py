"""Checkpoints, which recompute calls in the backward pass."""

import copy
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
)

import gradlib
from gradlib.recording import notes

from .truth import grad_of, grads_of, loss_of, run, twins


class Block(nn.Module):
    """The module that checkpoints recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


def assert_shares(found: gradlib.Recording, expected: gradlib.Recording) -> None:
    """Compare every gradient of every pass of two recordings."""
    assert [call.name for call in found] == [call.name for call in expected]
    fields = ("grad_input", "grad_output", "param_grads", "param_grads_total")
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours.passes) == len(theirs.passes)
        for one, other in zip(ours.passes, theirs.passes, strict=True):
            assert one.backward == other.backward
            for field in fields:
                assert_close(
                    getattr(one, field),
                    getattr(other, field),
                    msg=lambda text, field=field, ours=ours: (
                        f"{ours.name} {field}: {text}"
                    ),
                )


@pytest.mark.parametrize(
    "reentrant",
    [
        False,
        True,
    ],
)
def test_a_checkpoint_with_two_backward_passes(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(3, 3), Block()

        def forward(self, x: Tensor, again: bool) -> Tensor:
            h = self.first(x)
            if again:
                return checkpoint(self.block, h, use_reentrant=reentrant)
            return self.block(h)

    model, plain = twins(Model())
    x = torch.randn(2, 3)

    def both(model: nn.Module, again: bool) -> gradlib.Recording:
        with gradlib.record(model) as recording:
            output = model(x, again)
            loss_of(output).backward(retain_graph=True)
            (3 * output).sum().backward()
        return recording

    expected, found = both(plain, again=False), both(model, again=True)
    assert_close(grads_of(model), grads_of(plain))
    assert_shares(found, expected)


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_total_counts_uses_outside_a_checkpoint(
    use_reentrant: bool, reduce: Any
) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.fc = Block(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            y = checkpoint(self.inner, h, use_reentrant=use_reentrant)
            return 3 * h + y

    model, x = Residual(), torch.randn(4, 3)
    plain = copy.deepcopy(model)
    h = plain.fc(x)
    h.retain_grad()
    for pass_ in range(2):
        (3 * h + plain.inner(h)).square().sum().backward(retain_graph=pass_ == 0)
    total = grad_of(h) / 2
    with gradlib.record(model, reduce=reduce) as recording:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for name in ("inner", "inner.fc"):
        for pass_ in recording[name].passes:
            found = pass_.grad_input_total[0]
            if reduce is None:
                assert_close(found, total)
            else:
                assert found.norm == pytest.approx(total.norm().item())


@pytest.mark.parametrize(
    "outer",
    [
        False,
        True,
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_nested_checkpoints(outer: bool, inner: bool) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x: Tensor, again: bool) -> Tensor:
            if again:
                return self.b(checkpoint(self.a, x, use_reentrant=inner))
            return self.b(self.a(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.nested = nn.Linear(3, 3), Nested()

        def forward(self, x: Tensor, again: bool) -> Tensor:
            h = self.first(x)
            if again:
                return checkpoint(self.nested, h, again, use_reentrant=outer)
            return self.nested(h, again)

    model, plain = twins(Model())
    x = torch.randn(2, 3)
    with gradlib.record(plain) as expected:
        run(plain, x, again=False)
    with gradlib.record(model) as found:
        run(model, x, again=True)
    assert_close(grads_of(model), grads_of(plain))
    for name in ("first", "nested", "nested.a", "nested.a.fc", "nested.b"):
        for field in ("grad_output", "param_grads", "param_grads_total"):
            assert_close(getattr(found[name], field), getattr(expected[name], field))
        assert found[name].grad_input[0] is None or torch.allclose(
            found[name].grad_input[0], expected[name].grad_input[0]
        )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_passes_that_nested_checkpoints_run_are_one() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def outer(self, x: Tensor) -> Tensor:
            h = self.a(x)
            y: Any = checkpoint(self.b, h, use_reentrant=True)
            return h + y

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.outer, x, use_reentrant=True)

    model, x = Nested(), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        for number in range(2):
            x.grad = None
            model(x).sum().backward()
            for name in ("", "a", "a.fc", "b", "b.fc"):
                (found,) = recording[name, number].passes
                assert found.backward == number
            assert_close(recording["a", number].grad_input_total, (x.grad,))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_parameter_that_a_checkpoint_uses_itself(reentrant: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            y: Any = checkpoint(lambda x: x * self.w, x, use_reentrant=reentrant)
            return y + self.w

    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model := Scaled()) as recording:
        model(x).sum().backward()
    # The guide says what it gets wrong.
    expected = torch.full((3,), 2.0) if reentrant else model.w.grad
    assert_close(recording[""].param_grads["w"], expected)
    assert_close(recording[""].param_grads_total["w"], expected)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_total_of_what_an_inner_checkpoint_is_given(reentrant: bool) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled()

        def outer(self, x: Tensor) -> Any:
            h = x.exp()
            y: Any = checkpoint(self.scaled, h, use_reentrant=reentrant)
            return y + 3 * h

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.outer, x, use_reentrant=True)

    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model := Nested()) as recording:
        model(x).sum().backward()
    # The guide says what it gets wrong.
    expected = torch.full_like(x, 2 if reentrant else 5)
    assert_close(recording["scaled"].grad_input_total, (expected,))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_sequential(reentrant: bool) -> None:
    layers = nn.Sequential(*(Block() for _ in range(4)))
    model, plain = twins(layers)
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(plain) as expected:
        run(plain, x)
    given = x.grad
    x.grad = None
    with gradlib.record(model) as found:
        loss_of(checkpoint_sequential(model, 2, x, use_reentrant=reentrant)).backward()
    assert_close(x.grad, given)
    for i in range(4):
        for name in (f"{i}", f"{i}.fc"):
            assert len(found.calls(name)) == 1
            for field in ("grad_input", "grad_output", "param_grads"):
                assert_close(
                    getattr(found[name], field), getattr(expected[name], field)
                )


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_a_module_called_twice(reentrant: bool) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor, again: bool) -> Tensor:
            if again:
                return checkpoint(self.block, x, use_reentrant=reentrant)
            return self.block(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Linear(3, 3), Half()

        def forward(self, x: Tensor, again: bool) -> Tensor:
            h = self.first(x)
            return self.part(self.part(h, again), again)

    model, plain = twins(Model())
    x = torch.randn(2, 3)
    with gradlib.record(plain) as expected:
        for _ in range(2):
            run(plain, x, again=False)
    with gradlib.record(model) as found:
        for _ in range(2):
            run(model, x, again=True)
    assert_close(grads_of(model), grads_of(plain))
    assert [call.name for call in found] == [call.name for call in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for field in ("grad_output", "param_grads", "param_grads_total"):
            if ours.name not in ("", "part"):
                assert_close(getattr(ours, field), getattr(theirs, field))


@pytest.mark.parametrize(
    "reentrant",
    [
        False,
        True,
    ],
)
def test_a_module_that_checkpoints_its_child(reentrant: bool) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Block()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.child, self.scale * x, use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(3, 3), Parent())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    call = recording["1"]
    assert call.note == ""
    assert_close(call.param_grads["scale"], model[1].scale.grad)
    assert_close(call.grad_input, recording["0"].grad_output)


@pytest.mark.parametrize(
    "order", [(0, 1), pytest.param((1, 0), id="last first"), (0,), (1,)]
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_same_inputs(
    reentrant: bool, order: tuple[int, ...]
) -> None:
    model = nn.Sequential(Block(), nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        outputs = [checkpoint(model, x, use_reentrant=reentrant) for _ in range(2)]
        for i in order:
            (outputs[i] * (i + 1)).sum().backward()
    for i in range(2):
        call = recording["1", i]
        assert len(call.passes) == (i in order)
        if i in order:
            assert_close(call.grad_output, (torch.full((2, 3), i + 1.0),))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_call_says_so_that_a_checkpoint_computed_again(
    reentrant: bool, which: int
) -> None:
    model = nn.Sequential(Block(), nn.Tanh())
    with gradlib.record(model) as recording:
        outputs: list[Any] = [
            checkpoint(
                model,
                torch.randn(size, 3, requires_grad=True),
                use_reentrant=reentrant,
            )
            for size in (2, 4)
        ]
        outputs[which].sum().backward()
    for i in range(2):
        said = notes.RECOMPUTED in recording["1", i].note
        assert said == (i == which)


class Slope(nn.Module):
    """Runs a backward pass through its child in its forward, as a force field does."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Block()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            energy = self.child(x).square().sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return slope + x


def slopes(reentrant: bool) -> tuple[gradlib.Recording, gradlib.Recording, Tensor]:
    """Return recordings with and without a checkpoint, and the output with it."""
    model, plain = twins(Slope())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(plain) as expected:
        loss_of(plain(x)).backward()
    with gradlib.record(model) as found:
        y: Any = checkpoint(model, x, use_reentrant=reentrant)
        loss_of(y).backward()
    return found, expected, y


def test_a_checkpoint_that_computes_again_inside_of_the_forward() -> None:
    """The inner pass needs values before the call that made them has returned."""
    found, expected, y = slopes(reentrant=False)
    assert_shares(found, expected)
    assert found[""].note == notes.RECOMPUTED
    assert torch.equal(found[""].output, y)


def test_a_pass_inside_of_what_a_reentrant_checkpoint_computes_again() -> None:
    found, expected, _ = slopes(reentrant=True)
    assert [call.name for call in found] == [call.name for call in expected]
    for name in ("child", "child.fc"):
        inner, outer = expected[name].passes
        first, again, last = found[name].passes
        for ours, theirs in ((first, inner), (again, inner), (last, outer)):
            for field in ("grad_input", "grad_output", "param_grads"):
                assert_close(getattr(ours, field), getattr(theirs, field))
    totals = [it["child"].passes[-1].grad_input_total for it in (found, expected)]
    assert_close(*totals)
    assert_close(found[""].grad_input, expected[""].grad_input)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_vmap_that_a_checkpoint_computes_again_is_no_new_call(
    reentrant: bool,
) -> None:
    model = Block()
    with gradlib.record(model) as recording:
        x = torch.randn(2, 3, requires_grad=True)
        y: Any = checkpoint(torch.vmap(model), x, use_reentrant=reentrant)
        y.sum().backward()
    assert [call.name for call in recording] == ["", "fc"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_last_of_calls_with_the_same_inputs_is_computed_again(
    reentrant: bool,
) -> None:
    model = nn.Sequential(Block(), nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        checkpoint(model, x, use_reentrant=reentrant)
        last: Any = checkpoint(model, x, use_reentrant=reentrant)
        last.sum().backward()
    said = [notes.RECOMPUTED in call.note for call in recording.calls("1")]
    assert said == [False, True]


class Attends(nn.Module):
    """Self-attention, with or without a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Mixes()
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.reentrant is None:
            return self.inner(h, h, h)
        y: Any = checkpoint(self.inner, h, h, h, use_reentrant=self.reentrant)
        return y


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (self.query(q) @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
@pytest.mark.parametrize("reentrant", [True, False])
def test_one_tensor_in_several_places_of_a_checkpoint(
    reentrant: bool, reduce: Any
) -> None:
    torch.manual_seed(0)
    model = Attends()
    x = torch.randn(2, 5, 4)
    recordings: list[Any] = []
    for model.reentrant in (None, reentrant):
        with gradlib.record(model, reduce=reduce) as recording:
            model(x).square().sum().backward()
        recordings.append(recording)
    plain, found = recordings
    assert plain.compare(found).ok
    if reduce is None:
        assert found.verify().ok
        assert_close(found["inner"].grad_input, plain["inner"].grad_input)
    else:
        given = zip(plain["inner"].grad_input, found["inner"].grad_input, strict=True)
        assert all(abs(a.norm - b.norm) < 1e-5 for a, b in given)


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("has_graph", [False, True])
def test_a_view_that_a_reentrant_checkpoint_makes_without_gradients(
    has_graph: bool, is_given: bool
) -> None:
    """Torch says that it requires grad, as what it is a view of does."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x if is_given else x[None])

    torch.manual_seed(0)
    model, x = Views(), torch.randn(3, 4, requires_grad=True)
    given = (2 * x if has_graph else x)[:, :]
    given.retain_grad()
    with gradlib.record(model) as recording:
        loss_of(checkpoint(model, given, use_reentrant=True)).backward()
    call = recording["fc"]
    expected = grad_of(given) if is_given else grad_of(given)[None]
    assert_close(call.grad_input, (expected,))
    assert_close(call.grad_input_total, (expected,))
    assert recording.verify().agreed == 2


class Opens(nn.Module):
    """Is given a list or a dict of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, given: Any, y: Tensor) -> Tensor:
        a, b = given.values() if isinstance(given, dict) else given
        return self.first(a) * y + self.second(b)


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("has_graph", [False, True])
def test_a_container_that_a_reentrant_checkpoint_does_not_open(
    has_graph: bool, kind: type[Any]
) -> None:
    """Its own pass goes on through what is in there, as torch detaches none of it."""
    torch.manual_seed(0)
    model = Opens()
    x, z = (torch.randn(3, 2, requires_grad=True) for _ in range(2))
    recordings: list[Any] = []
    for called in (model, partial(checkpoint, model, use_reentrant=True)):
        a, b = (x + 1, z + 2) if has_graph else (x, z)  # additions save nothing
        given: Any = [a, b] if kind is list else {"a": a, "b": b}
        with gradlib.record(model) as recording:
            called(given, 3 * x).sum().backward()
        assert recording.verify().agreed == 3
        recordings.append(recording)
    plain, found = recordings
    for name in ("", "first", "second"):
        assert_close(found[name].grad_input, plain[name].grad_input)
        assert_close(found[name].param_grads, plain[name].param_grads)


@pytest.mark.parametrize(
    "keep", [["args"], ["output"], ["args", "output"], ["output", "param_grads"]]
)
def test_what_a_checkpoint_computes_again_is_no_new_call(keep: Any) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.a, x, use_reentrant=True))

    model, x = Checkpointed(), torch.ones(3, 2, requires_grad=True)
    with gradlib.record(model, keep=keep) as recording:
        model(x).sum().backward()
    assert [call.name for call in recording] == ["", "a", "b"]
    assert len(recording.forwards) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_several_threads_are_told_apart(reentrant: bool) -> None:
    """Each thread numbers the nodes of its graphs from the same start."""
    model = nn.Linear(3, 3)
    xs = [torch.full((2, 3), it, requires_grad=True) for it in (1.0, 2.0, 3.0)]
    outputs: list[Tensor] = []

    def step(x: Tensor) -> None:
        y: Any = checkpoint(model, x, use_reentrant=reentrant)
        outputs.append(y.detach())
        loss_of(y).backward()

    with gradlib.record(model) as recording:
        for x in xs:
            thread = threading.Thread(target=step, args=(x,))
            thread.start()
            thread.join()
    for call, x, y in zip(recording, xs, outputs, strict=True):
        assert torch.equal(call.output, y)
        assert len(call.passes) == 1
        assert_close(call.grad_input[0], x.grad)
    assert recording.verify().ok


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_with_another_result(reentrant: bool) -> None:
    """The call keeps its first output, and has the gradients of the recomputed one."""
    model, x = nn.Dropout(), torch.ones(4, 5, requires_grad=True)
    with gradlib.record(model) as recording:
        y: Any = checkpoint(model, x, use_reentrant=reentrant, preserve_rng_state=False)
        y.sum().backward()
    call = recording[""]
    assert torch.equal(call.output, y)
    assert_close(call.grad_input[0], x.grad)
    (found,) = recording.verify().disagreements
    assert found.field == "grad_input[0]"
    assert "the checkpoint that computed it again" in found.reason

"""`verify` skips passes that raised, had tangents or went through another's graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import gradlib


class Forgets(torch.autograd.Function):
    """Squares, with a backward that forgets a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * grads[0]


class Squares(nn.Module):
    def __init__(self, square: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.square = square

    def forward(self, x: Tensor) -> Tensor:
        return self.square(x)


def test_passes_that_were_skipped_for_one_reason_are_named_together() -> None:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(2, 3)
    with gradlib.record(net) as recording:
        rows = torch.autograd.functional.jacobian(net, x, create_graph=True)
        rows.square().sum().backward()
    found = recording.verify()
    passes = [*range(1, len(recording[""].passes))]
    assert [(it.name, it.backward) for it in found.skipped] == [
        (name, number) for name in ("", "0", "1") for number in passes
    ]
    footer = " ".join(str(found).split())
    assert footer.count("not replayed") == 1
    assert f"not replayed in passes 1 to {passes[-1]}, 3 calls: (root), 0, 1" in footer
    assert recording["0"].note.startswith(
        f"backward passes 0 to {passes[-1] - 1} gave no gradient to weight, bias"
    )


@pytest.mark.parametrize("is_right", [True, False])
def test_of_a_penalty_the_pass_that_made_the_graph_is_checked(is_right: bool) -> None:
    square: Any = torch.square if is_right else Forgets.apply
    net = nn.Sequential(nn.Linear(3, 4), Squares(square), nn.Linear(4, 1))
    x = torch.randn(5, 3, requires_grad=True)
    with gradlib.record(net) as recording:
        y = net(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.mean() + grad.square().sum()).backward()
    found = recording.verify(numerical=True)
    names = ["", "0", "1", "2"] if is_right else ["0", "1", "2"]
    assert [(it.backward, it.name) for it in found.skipped] == [
        (1, name) for name in names
    ]
    footer = " ".join(str(found).split())
    assert f"not replayed in pass 1, {len(names)} calls: " in footer
    if is_right:
        assert (found.ok, found.agreed) == (True, 4)
    else:
        (wrong,) = found.disagreements
        assert (wrong.name, wrong.field) == ("1", "passes[0].grad_input[0]")
        assert "not checked: 1 call, with a disagreement inside" in footer


def test_a_pass_that_raised_half_way() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc(x)

    model, x = Residual(), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        y = model(x)
        y.sum().backward(retain_graph=True)
        with torch.no_grad():
            model.fc.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    found = recording.verify()
    assert found.disagreements == ()
    assert "The backward pass raised" in found.skipped[0].reason


def test_tangents_are_not_kept() -> None:
    net, x = nn.Linear(2, 2), torch.randn(3, 2)
    with gradlib.record(net) as recording:
        net(x).sum().backward()
        with forward_ad.dual_level():
            dual = net(forward_ad.make_dual(x, torch.ones_like(x)))
            primal, tangent = forward_ad.unpack_dual(dual)
            assert tangent is not None
            (primal.sum() + tangent.sum()).backward()
    found = recording.verify()
    assert found.disagreements == ()
    assert found.agreed == 1
    assert "may have carried tangents" in found.skipped[0].reason


def test_a_pass_through_the_graph_of_another() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 3, requires_grad=True)
    with gradlib.record(net) as recording:
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        grad.norm().backward()
    found = recording.verify()
    assert found.disagreements == ()
    reason = found.skipped[0].reason
    assert "the graph of pass 0, which had" in reason
    assert reason.endswith("Pass 0 can be computed again.")
    assert len(found.skipped) == found.calls == 4
    again = recording["0"].passes[0].replay()
    torch.testing.assert_close(again.grad_input, recording["0"].passes[0].grad_input)


class Forces(nn.Module):
    """Returns a derivative, which a checkpoint first computes without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            y: Tensor = self.net(x).sum()
            return x + torch.autograd.grad(y, x, create_graph=True)[0]
        first, tanh, last = self.net
        return x + ((1 - tanh(first(x)) ** 2) * last.weight) @ first.weight


def test_a_pass_through_the_graph_of_one_that_ran_inside_of_it() -> None:
    """The inner pass has a higher number, and ends before the outer pass."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.forces = Forces()

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.forces, x, use_reentrant=True)

    model, x = Model().double(), torch.ones(2, 3, dtype=torch.double).requires_grad_()
    with gradlib.record(model) as recording:
        model(x).square().sum().backward()
    found = recording.verify()
    assert found.disagreements == ()
    behind = {it.name for it in found.skipped if "graph of pass 1" in it.reason}
    assert behind == {"forces.net", "forces.net.0", "forces.net.1", "forces.net.2"}


@pytest.mark.cpu  # torch has no batching rule for cuDNN's way back
def test_a_pass_through_the_graph_of_a_batched_one() -> None:
    net: Any = nn.GRU(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3, requires_grad=True)
    with gradlib.record(net) as recording:
        net(x)[0].sum().backward()
        output, _ = net(x)
        vectors = torch.ones(2, *output.shape)
        (grads,) = torch.autograd.grad(
            output, x, vectors, is_grads_batched=True, create_graph=True
        )
        (grads.square().sum() + output.sum()).backward()
    found = recording.verify()
    assert found.disagreements == ()
    (skipped,) = found.skipped
    assert "the graph of a pass with is_grads_batched" in skipped.reason
    assert "Without is_grads_batched, the first of its rows can be" in skipped.reason
    assert (found.calls, skipped.index) == (2, 1)


class OtherKernel(torch.autograd.Function):
    """Computes its gradient in another way if that is to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 2
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] * (ctx.factor + torch.is_grad_enabled())


class UsesKernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return OtherKernel.apply(x)


@pytest.mark.parametrize("with_graph", [False, True])
def test_a_pass_with_a_graph_is_replayed_with_one(with_graph: bool) -> None:
    """Torch's own LSTM has other kernels then."""
    model, x = UsesKernel(), torch.ones(3, requires_grad=True)
    with gradlib.record(model) as recording:
        torch.autograd.grad(model(x).sum(), x, create_graph=with_graph)
    expected = [3.0 if with_graph else 2.0] * 3
    again = recording[""].replay().grad_input[0]
    assert again.tolist() == recording[""].grad_input[0].tolist() == expected
    assert not again.requires_grad
    assert recording.verify().agreed == 1

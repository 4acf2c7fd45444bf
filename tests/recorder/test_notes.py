"""Each note that a call can have, and that there is no other."""

import re
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib.recording import notes

Run = Callable[[nn.Module, Tensor], object]


class Parts(nn.Module):
    """Two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Both(nn.Module):
    """The same with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.ones(2)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.left, x * self.right


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(x.shape)


class Interrupted(nn.Module):
    """Ends once without a word to any hook."""

    done = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.done = True
            raise KeyboardInterrupt
        return 2 * x


def forward_only(model: nn.Module, x: Tensor) -> None:
    model(x)


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def without_grad(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def failing(model: nn.Module, x: Tensor) -> None:
    with suppress(ValueError):
        model(x)


def interrupted(model: nn.Module, x: Tensor) -> None:
    with suppress(KeyboardInterrupt):
        model(x)
    model(x)


def left_only(model: nn.Module, x: Tensor) -> None:
    model(x)[0].sum().backward()


def checkpointed(model: nn.Module, x: Tensor) -> None:
    x.requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()


def with_gradient(model: nn.Module, x: Tensor) -> None:
    backward(model, x.requires_grad_())


def vectorized(model: nn.Module, x: Tensor) -> None:
    torch.vmap(model)(x)


def batched(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    vectors = torch.ones(1, *output.shape)
    torch.autograd.grad(
        output, list(model.parameters()), vectors, is_grads_batched=True
    )


def twice(model: nn.Module, x: Tensor) -> None:
    output = model(x).pow(2).sum()
    gradients = torch.autograd.grad(output, list(model.parameters()), create_graph=True)
    gradients[0].sum().backward()


def left_and_penalty(model: nn.Module, x: Tensor) -> None:
    """The weight of the right layer gets a gradient, and none through a call."""
    assert isinstance(model, Both)
    model(x)[0].sum().add(model.right.square().sum()).backward()


def twice_batched(model: nn.Module, x: Tensor) -> None:
    output = model(x).pow(2)
    vectors = torch.ones(1, *output.shape)
    weight = next(model.parameters())
    (grads,) = torch.autograd.grad(
        output, weight, vectors, is_grads_batched=True, create_graph=True
    )
    grads.sum().backward()


def captured(model: nn.Module, x: Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        model(x)


CASES: list[tuple[str, nn.Module, Run]] = [
    (notes.STAND_INS, nn.Linear(2, 1), vectorized),
    (notes.CAPTURED, nn.Linear(2, 1), captured),
    (notes.DISABLED, nn.Linear(2, 1), without_grad),
    (notes.NO_GRAD_OUT, nn.ReLU(), forward_only),
    (notes.RAISED, Fails(), failing),
    (notes.BROKEN_OFF, Interrupted(), interrupted),
    (notes.NOT_REACHED, nn.Linear(2, 1), forward_only),
    (notes.NO_GRAD, nn.Linear(2, 1), backward),
    (notes.NOTHING_GIVEN, Parts(), left_only),
    (notes.NOT_THROUGH_IT, Both(), left_and_penalty),
    (notes.RETURNED, nn.Identity(), with_gradient),
    (notes.SECOND_ORDER, nn.Linear(2, 1), twice),
    (notes.SECOND_ORDER, nn.Linear(2, 1), twice_batched),
    (notes.RECOMPUTED, nn.Linear(2, 1), checkpointed),
    (notes.BATCHED, nn.Linear(2, 1), batched),
]


def fits(text: str, note: str) -> bool:
    return bool(re.search(re.escape(text).replace(r"\{\}", r"[^;]+?"), note))


@pytest.mark.parametrize(("text", "model", "run"), CASES)
def test_it_is_said_when_it_happens(text: str, model: nn.Module, run: Run) -> None:
    with gradlib.record(model) as recording:
        run(model, torch.randn(3, 2))
    assert fits(text, next(iter(recording)).note)


def test_nothing_asked() -> None:
    model = nn.Linear(2, 1)
    with gradlib.record(model, keep=["output"]) as recording:
        backward(model, torch.ones(3, 2))
    assert recording[""].note == notes.NOT_ASKED


def test_nothing_missing_nothing_said() -> None:
    model = nn.Linear(2, 1)
    with gradlib.record(model) as recording:
        with_gradient(model, torch.ones(3, 2))
    assert recording[""].note == ""


def test_these_are_all() -> None:
    texts = {text for name, text in vars(notes).items() if name.isupper()}
    assert texts == {text for text, _, _ in CASES} | {notes.NOT_ASKED}

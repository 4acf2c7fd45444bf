"""Casts of leaves: autocast's cast counts per use, the model's own cast as a whole."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib.recording import notes


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class Times(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return x * w


class Hands(nn.Module):
    """Passes the cast of its own weight to a child."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.times = Times()

    def forward(self, x: Tensor) -> Tensor:
        return self.times(x, self.w.double())


class Leaves(Hands):
    """Keeps the cast of its weight in an attribute, for the next call to use."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is None:
            self.last = self.w.double()
        return x * self.last


class Returns(Hands):
    """Returns the cast of its weight beside the result."""

    def forward(self, x: Tensor) -> Any:
        w = self.w.double()
        return x * w, w


class Beside(Hands):
    """Uses both its weight and the cast."""

    def forward(self, x: Tensor) -> Tensor:
        return self.times(x, self.w.double()) + self.w


class Checkpointed(Hands):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Half(nn.Module):
    """Casts its weight to the dtype that autocast would use."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.to(torch.bfloat16))


def results(output: Any) -> Tensor:
    every: Any = output if isinstance(output, tuple) else (output,)
    return torch.stack([it.sum() for it in every]).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a child": lambda: nn.Sequential(Cast(), nn.Linear(2, 2).double()),
    "an argument": Hands,
    "an attribute": Leaves,
    "a result": Returns,
    "and a use": Beside,
    "a checkpoint": Checkpointed,
}


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_what_flows_through_a_cast_counts_once(model: Callable[[], nn.Module]) -> None:
    ours = model()
    alone = copy.deepcopy(ours)
    x, y = (torch.tensor([[1.0, 5.0]], requires_grad=True) for _ in range(2))
    with gradlib.record(ours) as recording:
        loss = results(ours(x)) + results(ours(x))
        loss.backward()
    (results(alone(y)) + results(alone(y))).backward()
    of_root = [call for call in recording if call.name == ""]
    assert_close(sum(call.grad_input[0] for call in of_root), y.grad)
    for name, parameter in alone.named_parameters(recurse=False):
        shares = [call.param_grads[name] for call in of_root]
        # The second call of `Leaves` only uses the cast that the first call made.
        assert_close(sum(it for it in shares if it is not None), parameter.grad)
    if model is not Leaves:
        assert recording.verify().disagreements == ()


def test_a_cast_of_the_models_own_under_autocast() -> None:
    model = Half()
    alone = copy.deepcopy(model)
    x, y = (torch.tensor([[1.0, 5.0]], requires_grad=True) for _ in range(2))
    device = x.device.type
    with torch.autocast(device, torch.bfloat16), gradlib.record(model) as recording:
        model(x).sum().backward()
    with torch.autocast(device, torch.bfloat16):
        alone(y).sum().backward()
    assert_close(recording[""].grad_input[0], y.grad)
    assert_close(recording["fc"].param_grads["weight"], alone.fc.weight.grad)


def test_a_weight_that_one_call_uses_twice_under_autocast() -> None:
    """Autograd sums gradients of its cast in bfloat16, the recorder in float32."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.nn.functional.linear(x, self.w).relu()
            return torch.nn.functional.linear(h, self.w).float()

    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    device = x.device.type
    with gradlib.record(model := Twice()) as recording:
        with torch.autocast(device, torch.bfloat16):
            y = model(x)
        y.square().sum().backward()
    assert recording.verify().ok
    call = recording[""]
    assert call.param_grads is not None
    assert model.w.grad is not None
    assert not torch.equal(call.param_grads["w"], model.w.grad)
    assert_close(call.param_grads["w"], model.w.grad, rtol=0.02, atol=0.5)


class Scaled(nn.Module):
    """Sets a hook on the cast of its weight, or on the cast's node."""

    def __init__(self, cast: Callable[[Tensor], Tensor], on_node: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.cast, self.on_node = cast, on_node

    def forward(self, x: Tensor) -> Tensor:
        w: Any = self.cast(self.w)
        if self.on_node:
            w.grad_fn.register_hook(lambda grads, _: (grads[0] / 2,))
        else:
            w.register_hook(lambda grad: grad.clamp(-1, 1))
        return (x.to(w.dtype) * w).float()


@pytest.mark.parametrize("on_node", [False, True])
@pytest.mark.parametrize("around", [nn.Identity, nn.Sequential])
@pytest.mark.parametrize("cast", [Tensor.bfloat16, Tensor.half, Tensor.double])
def test_a_hook_on_a_cast_of_the_models_own(
    cast: Callable[[Tensor], Tensor], around: type[nn.Module], on_node: bool
) -> None:
    scaled = Scaled(cast, on_node)
    model = scaled if around is nn.Identity else around(scaled)
    with gradlib.record(model) as recording:
        model(torch.full((3, 2), 2.0)).sum().backward()
    call = recording["0" if scaled is not model else ""]
    assert call.param_grads is not None
    assert scaled.w.grad is not None
    assert torch.equal(call.param_grads["w"], scaled.w.grad)
    assert recording.verify().ok


@pytest.mark.parametrize("around", [False, True])
def test_a_hook_on_the_cast_of_an_input(around: bool) -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Any = x.double()
            y.register_hook(lambda grad: grad / 2)
            return y * 3

    model = nn.Sequential(Wide()) if around else Wide()
    x = torch.ones(2, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    for call in recording:
        assert torch.equal(call.grad_input[0], torch.full((2,), 1.5))
    assert recording.verify().ok


def test_what_a_cast_of_the_models_own_sums_up_to() -> None:
    """The share is summed in the narrow dtype, as autograd does."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            w = self.w.half()
            return (x * w + x * w).float()

    x = torch.full((1, 2), 200.0, dtype=torch.float16)
    with gradlib.record(model := Twice()) as recording:
        (model(x) * 200).sum().backward()
    shares = recording[""].param_grads
    assert shares is not None
    assert shares["w"].isinf().all()
    assert recording.verify().ok


def test_a_hook_on_a_cast_under_autocast_is_noted(tmp_path: Path) -> None:
    """Autocast may keep that cast for later calls, and each use counts alone."""
    model = nn.Sequential(Scaled(Tensor.bfloat16, on_node=False), nn.Linear(2, 1))
    x = torch.full((3, 2), 2.0)
    device = x.device.type
    with torch.autocast(device, torch.bfloat16), gradlib.record(model) as recording:
        model(x).sum().backward()
    assert notes.HOOKED_CASTS in recording["0"].note
    assert notes.HOOKED_CASTS not in recording["1"].note
    recording.save(tmp_path / "casts.safetensors")
    loaded = gradlib.load_recording(tmp_path / "casts.safetensors")
    assert loaded["0"].note == recording["0"].note


def test_a_real_weight_that_is_cast_to_a_complex_one() -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.cfloat) * self.w.to(torch.cfloat) * 1j).abs()

    x = torch.randn(2, 3)
    # torch warns where it drops an imaginary part, and warnings are errors here.
    with gradlib.record(model := Filter()) as recording:
        model(x).sum().backward()
    assert_close(recording[""].param_grads["w"], model.w.grad)


def test_autocasts_own_casts_are_shared_by_use() -> None:
    layer = nn.Linear(2, 2, bias=False)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    x = torch.ones(1, 2)
    device = x.device.type
    with torch.autocast(device, torch.bfloat16), gradlib.record(model) as recording:
        (model(x) + model(x + 1)).sum().backward()  # both forwards use one cast
    shares = [call.param_grads["weight"] for call in recording if call.param_grads]
    assert len(shares) == 4
    assert_close(sum(shares), layer.weight.grad, rtol=0.01, atol=0)
    assert len({float(share.sum()) for share in shares}) == 4


def test_a_leaf_whose_cast_inside_has_two_uses_is_verified() -> None:
    """Autograd sums in the dtype of the cast, and a replay in the dtype of the leaf."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                return self.a(x) + self.b(x)

    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model := Twice()) as recording:
        model(x).float().square().sum().backward()
    assert_close(recording[""].grad_input[0], x.grad)
    assert recording.verify().ok


def test_a_complex_cast_under_autocast_gives_a_real_gradient() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w.to(x.dtype) * x).abs().square().sum()

    device = torch.get_default_device().type
    model, x = Turns(), torch.tensor([1 + 2j, 3j])
    with torch.autocast(device, torch.bfloat16), gradlib.record(model) as recording:
        model(x).backward()
    assert_close(recording[""].param_grads["w"], torch.tensor([10.0, 18.0]))


class HandsChild(nn.Module):
    """Passes the cast of a layer's weight to the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2, bias=False)

    def forward(self) -> Tensor:
        return self.child(self.child.weight.bfloat16())


def test_the_cast_of_a_weight_that_is_an_argument_counts_as_that() -> None:
    model = HandsChild()
    w = torch.tensor([[1.0, 2], [4, 8]])
    model.child.weight.data.copy_(w)
    autocast = torch.autocast(w.device.type, torch.bfloat16)
    with autocast, gradlib.record(model) as recording:
        model().sum().backward()
    call = recording["child"]
    ones = torch.ones(2, 2)
    assert_close(call.grad_input[0].float(), ones @ w)
    assert_close(call.param_grads["weight"], ones @ w)
    assert_close(call.param_grads_total["weight"], 2 * (ones @ w))
    assert recording.verify().ok


class OwnCast(nn.Module):
    """Casts its weight where autocast is off, and uses the cast once or twice."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.w, self.uses = nn.Parameter(torch.randn(8, 8)), uses

    def forward(self, x: Tensor) -> Tensor:
        w, h = self.w.bfloat16(), x.bfloat16()
        for _ in range(self.uses):
            h = (h @ w).sin()
        return h.float()


class SwitchesOff(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.inner(x)


@pytest.mark.parametrize("uses", [1, 2])
def test_the_sum_of_several_uses_of_a_cast_is_as_coarse_as_the_cast(uses: int) -> None:
    """Under autocast a share is taken at the cast; autograd sums there."""
    torch.manual_seed(0)
    model, x = SwitchesOff(OwnCast(uses)), torch.randn(16, 8)
    autocast = torch.autocast(x.device.type, torch.bfloat16)
    with autocast, gradlib.record(model) as recording:
        model(x).square().sum().backward()
    call = recording["inner"]
    assert call.param_grads["w"].equal(model.inner.w.grad) is (uses == 1)
    assert recording.verify().ok
    assert call._trace.summed_in == ({torch.bfloat16} if uses == 2 else set())

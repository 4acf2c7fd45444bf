"""`compare` names the call in which two runs part."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.opaque import NotSaved
from gradlib.recording.comparison import BY_NAME
from gradlib.recording.trace import FIELDS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * torch.tanh(self.norm(self.fc(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def recorded(
    model: nn.Module,
    x: Tensor,
    run: Callable[[Tensor], Tensor] | None = None,
    loss: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> gradlib.Recording:
    with gradlib.record(model, **options) as recording:
        output = (run or model)(x)
        weights = torch.arange(1.0, output.numel() + 1).view_as(output)
        (loss(output) if loss else (output.float() * weights).sum()).backward()
    return recording


@pytest.fixture
def net() -> Any:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(16, 4)


def where(found: gradlib.Comparison) -> tuple[object, ...]:
    first = found.first
    assert first is not None
    return first.name, first.index, first.direction, first.field


def test_two_runs_of_one_model(net: Any, x: Tensor) -> None:
    found = recorded(net, x).compare(recorded(copy.deepcopy(net), x))
    assert found.ok
    assert found.first is None
    assert found.unmatched == found.skipped == ()
    assert str(found) == "Comparison of 12 calls: they agree, rtol 1.1e-05"


def test_it_says_which_error_is_allowed(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    first, coarse = recorded(model, x), recorded(model.bfloat16(), x.bfloat16())
    assert str(first.compare(first, rtol=0.25)).endswith("they agree, rtol 0.25")
    assert str(first.compare(coarse)).endswith("they agree, rtol 0.016")


def test_of_gradients_alone_too(net: Any, x: Tensor) -> None:
    one = recorded(net, x, keep=["grad_output"])
    assert str(one.compare(one)).endswith("they agree, rtol 1.1e-05")


def test_calls_that_are_in_one_recording_only(x: Tensor) -> None:
    x.requires_grad_()
    some, more = nn.Sequential(nn.Tanh()), nn.Sequential(nn.Tanh(), nn.Identity())
    found = recorded(some, x).compare(recorded(more, x))
    assert not found.ok
    lines = str(found).splitlines()
    assert lines[0].startswith("Comparison of 2 calls: they agree, rtol")
    assert lines[0].endswith(", but not all are in both")
    assert lines[1:] == ["only in the other recording: 1"]
    one, other = (nn.Sequential(OrderedDict({it: nn.Tanh()})) for it in "ab")
    found = recorded(one, x, modules="a").compare(recorded(other, x, modules="b"))
    assert str(found).splitlines() == [
        "Comparison of 0 calls: nothing is in both that could be compared",
        "only in this recording: a",
        "only in the other recording: b",
        BY_NAME,
    ]


@pytest.mark.parametrize("name", ["first", "blocks.1.fc", "blocks.2.norm", "head"])
def test_the_one_layer_that_differs(net: Any, x: Tensor, name: str) -> None:
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.get_submodule(name).bias.add_(0.1)
    found = recorded(net, x).compare(recorded(other, x))
    assert not found.ok
    assert where(found) == (name, 0, "forward", "output")
    assert found.first is not None
    assert 0.001 < found.first.error < 1
    lines = str(found).splitlines()
    assert lines[0] == "Comparison of 12 calls: they part first at"
    assert lines[2].split()[:3] == [name, "forward", "output"]
    assert name in found._repr_html_()


def test_what_a_modules_own_code_does_differently(net: Any, x: Tensor) -> None:
    other = copy.deepcopy(net)
    other.blocks[1].forward = lambda x: Block.forward(other.blocks[1], 1.5 * x) - x / 2
    found = recorded(net, x).compare(recorded(other, x))
    # The runs differ first in the input of the block's first layer.
    assert where(found) == ("blocks.1.fc", 0, "forward", "args[0]")
    other.blocks[1].forward = lambda x: 2 * Block.forward(other.blocks[1], x)
    found = recorded(net, x).compare(recorded(other, x))
    assert where(found) == ("blocks.1", 0, "forward", "output")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_two_dtypes(net: Any, x: Tensor, dtype: torch.dtype) -> None:
    this = recorded(net, x)
    other = copy.deepcopy(net).to(dtype)
    assert this.compare(recorded(other, x.to(dtype))).ok
    with torch.no_grad():
        other.blocks[1].fc.weight.mul_(1.3)
    found = this.compare(recorded(other, x.to(dtype)))
    assert where(found) == ("blocks.1.fc", 0, "forward", "output")


def test_autocast(net: Any, x: Tensor) -> None:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    found = recorded(net, x).compare(recorded(net, x, run))
    assert found.ok, str(found)


def test_autocast_of_which_no_tensor_that_was_kept_tells(tmp_path: Path) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).float()

    net, x = Narrow(), torch.randn(8, 64)
    this = recorded(net, x)
    with torch.autocast(x.device.type, torch.bfloat16):
        other = recorded(net, x)
    other.save(path := tmp_path / "run.safetensors")
    for it in other, gradlib.load_recording(path):
        found = this.compare(it)
        assert found.ok, str(found)
        assert 1e-4 < max(error.error for error in found.errors) < found.rtol
    assert not this.compare(other, rtol=1e-5).ok


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_eager_and_compiled(net: Any, x: Tensor) -> None:
    this = recorded(net, x)
    other = copy.deepcopy(net)
    compiled: Any = torch.compile(other, backend="aot_eager")
    found = this.compare(recorded(compiled, x))
    assert found.ok, str(found)
    assert found.compared == 12
    with torch.no_grad():
        other.blocks[1].norm.weight.mul_(1.3)
    found = this.compare(recorded(compiled, x))
    assert where(found) == ("blocks.1.norm", 0, "forward", "output")


def test_rounding_adds_up_but_not_without_end() -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(*[nn.Linear(16, 16) for _ in range(40)])
    x = torch.randn(8, 16)
    for parameter in net.parameters():
        parameter.data.mul_(1.7)
    this, other = (
        recorded(net, x),
        recorded(copy.deepcopy(net).bfloat16(), x.bfloat16()),
    )
    gaps = [
        (one.output - two.output).norm() / one.output.norm()
        for one, two in zip(this, other, strict=True)
    ]
    assert this.compare(other).ok
    assert not this.compare(other, rtol=float(max(gaps)) / 2).ok
    other = copy.deepcopy(net)
    for layer in other:  # a little each time, as rounding, but too much in total
        layer.weight.data.mul_(1 + 8e-6)
    found = this.compare(recorded(other, x)).first
    assert found is not None
    assert 10 < int(found.name) < 30
    other = copy.deepcopy(net)
    for layer in other[20:]:  # each a little off, but by more than rounding
        layer.weight.data.mul_(1.003)
    assert where(this.compare(recorded(other, x))) == ("20", 0, "forward", "output")


def test_other_inputs(net: Any, x: Tensor) -> None:
    found = recorded(net, x).compare(recorded(net, x + 1))
    assert where(found) == ("", 0, "forward", "args[0]")
    found = recorded(net, x).compare(recorded(net, x[:3]))
    assert found.first is not None
    assert found.first.reason == "shapes [16, 4] and [3, 4]"


def test_another_loss(net: Any, x: Tensor) -> None:
    found = recorded(net, x).compare(recorded(net, x, loss=Tensor.sum))
    assert where(found) == ("", 0, "backward", "grad_output[0]")


def test_a_backward_that_differs(net: Any, x: Tensor) -> None:
    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            assert ctx.needs_input_grad[0]
            return grads[0] / 2

    other = copy.deepcopy(net)
    norm = other.blocks[1].norm
    norm.forward = lambda x: nn.LayerNorm.forward(norm, Halves.apply(x))
    found = recorded(net, x).compare(recorded(other, x))
    assert where(found) == ("blocks.1.norm", 0, "backward", "grad_input[0]")


def test_a_parameters_gradient_that_differs(net: Any, x: Tensor) -> None:
    other = copy.deepcopy(net)
    head = other.head
    head.forward = lambda x: nn.functional.linear(x, head.weight, head.bias.detach())
    found = recorded(net, x).compare(recorded(other, x))
    assert where(found) == ("head", 0, "backward", "param_grads['bias']")


def test_steps_are_compared_in_the_order_they_happened(net: Any, x: Tensor) -> None:
    def trained(net: Any, wrong: int) -> gradlib.Recording:
        net = copy.deepcopy(net)
        with gradlib.record(net) as recording:
            for step in range(3):
                net.zero_grad()
                output = net(x)
                (output.square().sum() * (2 if step == wrong else 1)).backward()
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.sub_(0.001 * parameter.grad)
        return recording

    right = trained(net, wrong=-1)
    assert right.compare(trained(net, wrong=-1)).ok
    found = right.compare(trained(net, wrong=1))
    # Not at the end of the second step, whose result the third step starts from.
    assert where(found) == ("", 1, "backward", "grad_output[0]")


def test_two_forwards_of_one_recording(net: Any, x: Tensor) -> None:
    with gradlib.record(net) as recording:
        for _ in range(2):
            net(x).sum().backward()
    first, second = recording.forwards
    assert first.compare(second).ok
    assert first.compare(second).compared == 12


def test_a_difference_and_a_call_that_only_one_has_print() -> None:
    model, x = nn.Sequential(nn.ReLU(), nn.ReLU()), torch.ones(2, requires_grad=True)
    found = recorded(model, x).compare(recorded(model[:1], 2 * x))
    assert str(found.first).splitlines() == [
        "Difference",
        "module  direction  field    error  reason",
        "(root)  forward    args[0]  0.5",
    ]
    assert str(found.unmatched[0]).splitlines() == [
        "Unmatched",
        "module  only in",
        "1       this",
    ]


def test_calls_that_only_one_has(net: Any, x: Tensor) -> None:
    other = copy.deepcopy(net)
    del other.blocks[2]
    this, that = recorded(net, x), recorded(other, x)
    found = this.compare(that)
    assert not found.ok
    names = [(it.name, it.only_in) for it in found.unmatched]
    assert names == [
        ("blocks.2", "this"),
        ("blocks.2.fc", "this"),
        ("blocks.2.norm", "this"),
    ]
    assert {it.only_in for it in that.compare(this).unmatched} == {"other"}
    assert "only in this recording: blocks.2.fc" in str(found)


def test_modules_of_one_name_and_two_classes(x: Tensor) -> None:
    linear = nn.Linear(4, 4)
    some = recorded(nn.Sequential(nn.Tanh(), linear), x)
    for other, reason in (
        (nn.Sequential(nn.Tanh(), nn.ReLU(), linear), "classes Linear and ReLU"),
        (
            nn.Sequential(nn.Tanh(), nn.Flatten(0)),
            "classes Linear and Flatten, shapes [16, 4]",
        ),
        (nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), ""),
    ):
        first = some.compare(recorded(other, x.requires_grad_())).first
        assert first is not None
        assert (first.name, first.field) == ("1", "output")
        assert first.reason.startswith(reason)
        assert reason or not first.reason


def test_some_calls_of_each_are_printed(x: Tensor) -> None:
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)])
    wrapped = nn.Sequential(OrderedDict(model=net))
    lines = str(recorded(net, x).compare(recorded(wrapped, x))).splitlines()
    assert lines[1] == "only in this recording: 0"
    assert lines[10:12] == [
        "only in this recording: 9",
        "and 2 more only in this recording",
    ]
    assert lines[12:14] == [
        "only in the other recording: model",
        "only in the other recording: model.0",
    ]
    assert lines[-2] == "and 3 more only in the other recording"
    assert lines[-1] == BY_NAME


def test_a_forward_more_is_a_difference(net: Any, x: Tensor) -> None:
    with gradlib.record(net) as twice:
        for _ in range(2):
            net(x).sum().backward()
    found = recorded(net, x, loss=Tensor.sum).compare(twice)
    assert found.first is None
    assert len(found.unmatched) == 12
    assert not found.ok


def test_a_bias_before_batch_norm_gets_rounding_only() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
    x = torch.randn(64, 4)
    this = recorded(net, x)
    other = recorded(copy.deepcopy(net).double(), x.double())
    bias = this["0"].param_grads["bias"], other["0"].param_grads["bias"]
    assert (bias[0].double() - bias[1]).norm() > 0.1 * bias[0].norm()
    assert this.compare(other).ok


def test_what_stands_in_a_dict_is_compared_in_its_own_order() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"z": x * 2, "a": x * 3}

    model = Two()
    with gradlib.record(model) as recording:
        model(torch.ones(2))
        model(torch.ones(2) * 5)
    one, other = recording.forwards
    fields = [it.field for it in one.compare(other).errors]
    assert fields == ["args[0]", "output['z']", "output['a']"]


def test_integers_must_be_equal() -> None:
    class Counts(nn.Module):
        def __init__(self, offset: int) -> None:
            super().__init__()
            self.offset = offset

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, (x > 0).sum() + 10**6 + self.offset

    x = torch.ones(2, requires_grad=True)
    recordings: list[gradlib.Recording] = []
    for offset in (0, 1):
        with gradlib.record(model := Counts(offset)) as recording:
            model(x)[0].sum().backward()
        recordings.append(recording)
    this, other = recordings
    assert where(this.compare(other)) == ("", 0, "forward", "output[1]")
    assert not this.compare(other, rtol=1e-9).ok
    assert this.compare(other, rtol=1e-5).ok


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_integers() -> None:
    class Words(nn.Module):
        def forward(self, last: int) -> Any:
            parts = [torch.tensor([1, 2]), torch.tensor([last])]
            return torch.nested.nested_tensor(parts)

    def of(last: int) -> gradlib.Recording:
        with gradlib.record(model := Words(), keep="output") as recording:
            model(last)
        return recording

    assert of(3).compare(of(3)).ok
    assert where(of(3).compare(of(4))) == ("", 0, "forward", "output")


def test_plain_arguments() -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor, scale: float, mode: str) -> Tensor:
            assert mode
            return x * scale

    recordings: list[gradlib.Recording] = []
    for scale, mode in ((2.0, "a"), (2.0, "b"), (3.0, "a")):
        with gradlib.record(model := Scales()) as recording:
            model(torch.ones(2, requires_grad=True), scale, mode=mode).sum().backward()
        recordings.append(recording)
    this, other_mode, other_scale = recordings
    assert this.compare(this).ok
    assert where(this.compare(other_mode)) == ("", 0, "forward", "kwargs['mode']")
    assert where(this.compare(other_scale)) == ("", 0, "forward", "args[1]")


@pytest.mark.parametrize("make", [float, np.float64, lambda by: np.array([by])])
def test_the_default_device_has_no_say(make: Callable[[float], Any]) -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor, by: Any) -> Tensor:
            return x * float(by.item() if isinstance(by, np.ndarray) else by)

    def of(by: float) -> gradlib.Recording:
        with gradlib.record(model := Scales()) as recording:
            model(torch.ones(2, requires_grad=True), make(by)).sum().backward()
        return recording

    this, near, far = of(2.0), of(2.0 + 1e-12), of(3.0)
    with torch.device("meta"):
        assert this.compare(near).ok
        assert where(this.compare(far)) == ("", 0, "forward", "args[1]")


def test_tolerances(net: Any, x: Tensor) -> None:
    this, other = recorded(net, x), recorded(net, x * 1.001)
    assert not this.compare(other).ok
    assert this.compare(other, rtol=0.01).ok
    assert not this.compare(other, rtol=0, atol=1e-4).ok
    assert this.compare(other, rtol=0, atol=10.0).ok


def test_nan_in_the_same_place_agrees() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    model = nn.Tanh()
    assert recorded(model, x).compare(recorded(model, x)).ok
    found = recorded(model, x).compare(recorded(model, x.nan_to_num()))
    assert found.first is not None
    assert found.first.reason == "NaN or inf in one of the two"


def test_reduced_recordings(net: Any, x: Tensor) -> None:
    def reduced(net: Any) -> gradlib.Recording:
        return recorded(net, x, reduce=gradlib.tensor_stats)

    other = copy.deepcopy(net)
    assert reduced(net).compare(reduced(other)).ok
    assert recorded(net, x).compare(reduced(other)).ok
    with torch.no_grad():
        other.blocks[1].fc.weight.mul_(1.3)
    for this in (recorded(net, x), reduced(net)):
        found = this.compare(reduced(other))
        assert where(found) == ("blocks.1.fc", 0, "forward", "output")


def test_reduced_to_numbers(net: Any, x: Tensor) -> None:
    def reduced(net: Any) -> gradlib.Recording:
        return recorded(net, x, reduce=lambda tensor: tensor.norm().item())

    other = copy.deepcopy(net)
    assert reduced(net).compare(reduced(other)).ok
    with torch.no_grad():
        other.head.weight.mul_(1.3)
    found = reduced(net).compare(reduced(other))
    assert where(found) == ("head", 0, "forward", "output")


def test_what_is_not_compared_is_said(net: Any, x: Tensor) -> None:
    this = recorded(net, x)
    with gradlib.record(net) as forward_only:
        net(x)
    found = this.compare(forward_only)
    assert found.ok
    assert found.skipped == ("gradients: the other recording has no backward pass",)
    assert "not compared: gradients" in str(found)
    found = this.compare(recorded(net, x, keep=["output", "grad_output"]))
    assert found.ok
    assert found.skipped[0] == '"args", which only one of the two has kept'
    found = this.compare(recorded(net, x, keep="output"))
    assert not any("no backward pass" in it for it in found.skipped)
    found = forward_only.compare(forward_only)
    assert found.ok
    assert found.skipped == ("gradients: neither recording has a backward pass",)


def test_nothing_compared_is_not_ok(net: Any, x: Tensor) -> None:
    one, other = (recorded(net, x, keep=it) for it in ("output", "grad_output"))
    with gradlib.record(net, keep="param_grads") as forward_only:
        net(x)
    with gradlib.record(net) as nothing:
        pass
    for found in (
        one.compare(other),
        forward_only.compare(forward_only),
        nothing.compare(nothing),
    ):
        assert not found.ok
        assert found.compared == 0
        title = "Comparison of 0 calls: nothing is in both that could be compared"
        assert str(found).splitlines()[0] == title


def test_one_has_a_pass_more(net: Any, x: Tensor) -> None:
    with gradlib.record(net) as twice:
        output = net(x)
        output.sum().backward(retain_graph=True)
        output.sum().backward()
    found = twice.compare(recorded(net, x, loss=Tensor.sum))
    assert found.first is not None
    assert found.first.reason == "2 and 1 backward passes"


def test_a_loaded_recording(net: Any, x: Tensor, tmp_path: Any) -> None:
    this = recorded(net, x)
    this.save(tmp_path / "run")
    loaded = gradlib.load_recording(tmp_path / "run")
    assert this.compare(loaded).ok
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.blocks[1].fc.weight.mul_(1.3)
    found = loaded.compare(recorded(other, x))
    assert where(found) == ("blocks.1.fc", 0, "forward", "output")


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_without_values(reduce: Any) -> None:
    with gradlib.record(model := nn.Linear(3, 2, device="meta"), reduce=reduce) as one:
        model(torch.ones(4, 3, device="meta")).sum().backward()
    with gradlib.record(model := nn.Linear(3, 2), reduce=reduce) as other:
        model(torch.ones(4, 3)).sum().backward()
    for found, which in (
        (one.compare(one), "both recordings have"),
        (one.compare(other), "this recording has"),
        (other.compare(one), "the other recording has"),
    ):
        assert found.ok  # as far as shapes go
        assert found.skipped == (f'values: {which} tensors on the device "meta"',)
    assert not any("meta" in it for it in other.compare(other).skipped)


@pytest.mark.parametrize("counts", [(1, 1), (1, 2)])
def test_statistics_of_what_is_not_finite(counts: tuple[int, int]) -> None:
    found: list[gradlib.Recording] = []
    for count in counts:
        x = torch.ones(4)
        x[:count] = torch.nan
        with gradlib.record(
            model := nn.ReLU(), reduce=gradlib.tensor_stats
        ) as recording:
            model(x)
        found.append(recording)
    assert found[0].compare(found[1]).ok == (counts[0] == counts[1])


def test_a_backward_pass_through_two_forwards(net: Any, x: Tensor) -> None:
    def recorded_twice(model: nn.Module) -> gradlib.Recording:
        with gradlib.record(model) as recording:
            (model(x).sum() + model(x).sum()).backward()
        return recording

    other, calls = copy.deepcopy(net), 0

    def wrong_at_first(grad: Tensor) -> Tensor:
        return 2 * grad

    def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            output.register_hook(wrong_at_first)

    other.first.register_forward_hook(hook)
    found = recorded_twice(net).compare(recorded_twice(other))
    assert found.first is not None
    assert (found.first.name, found.first.index) == ("first", 0)
    assert found.first.direction == "backward"


def test_a_call_that_passes_have_reached_in_one_alone_is_named_by_both() -> None:
    class Residual(nn.Module):
        def __init__(self, *, is_cut: bool) -> None:
            super().__init__()
            self.f, self.g, self.is_cut = nn.Linear(4, 4), nn.Tanh(), is_cut

        def forward(self, x: Tensor) -> Tensor:
            y = self.g(self.f(x))
            return x + (y.detach() if self.is_cut else y)

    models = [
        nn.Sequential(nn.Linear(4, 4), Residual(is_cut=it)) for it in (False, True)
    ]
    models[1].load_state_dict(models[0].state_dict())
    x, found = torch.randn(3, 4), list[gradlib.Recording]()
    for model in models:
        with gradlib.record(model) as recording:
            model(x).square().sum().backward()
        found.append(recording)
    for one, other, said in ((*found, "1 and 0"), (*found[::-1], "0 and 1")):
        first = one.compare(other).first
        assert first is not None
        assert (first.name, first.field) == ("1.g", "grad_output")
        assert first.reason == f"{said} backward passes"


@pytest.mark.parametrize("keep", [FIELDS, ("output", "param_grads")])
def test_a_backward_pass_that_only_one_of_the_two_has(keep: Any) -> None:
    model, x = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)), torch.ones(3, 4)

    def run(*, both: bool) -> gradlib.Recording:
        with gradlib.record(model, keep=keep) as recording:
            first, second = model(x), model(x)
            first.sum().backward()
            if both:
                second.sum().backward()
        return recording

    one, two = run(both=False), run(both=True)
    for found, reason in (
        (one.compare(two), "0 and 1 backward passes"),
        (two.compare(one), "1 and 0 backward passes"),
    ):
        assert found.first is not None
        assert (found.first.index, found.first.reason) == (1, reason)


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats, torch.Tensor.item])
def test_it_says_which_of_the_two_has_no_gradient(reduce: Any) -> None:
    """For example of a layer that is frozen in one run, or cut off by detach()."""
    model = nn.Linear(1, 1, bias=False)
    frozen = copy.deepcopy(model).requires_grad_(False)
    x = torch.ones(1, 1, requires_grad=True)
    one, two = (recorded(it, x, reduce=reduce) for it in (model, frozen))
    with torch.device("meta"):  # the default device has no say
        compared = one.compare(two), two.compare(one)
    for found, which in zip(compared, ("the other", "this"), strict=True):
        assert found.first is not None
        assert found.first.field == "param_grads['weight']"
        assert found.first.reason == f"None in {which} recording"


def test_zeros_and_no_gradient_agree_without_a_reason() -> None:
    model = nn.Linear(1, 1, bias=False)
    frozen = copy.deepcopy(model).requires_grad_(False)
    x = torch.zeros(1, 1, requires_grad=True)
    found = recorded(model, x).compare(recorded(frozen, x))
    assert found.ok
    assert not any(it.reason for it in found.errors)


class Dict(dict[str, Tensor]):
    """Returns a dict, in an order of its own."""


def returned(output: Any, reduce: Any = None) -> gradlib.Recording:
    class Returns(nn.Module):
        def forward(self) -> Any:
            return output

    with gradlib.record(model := Returns(), reduce=reduce) as recording:
        model()
    return recording


def test_values_are_paired_by_their_names(tmp_path: Path) -> None:
    x = torch.arange(3.0)
    recording = returned(Dict(b=x, a=x.sum()))
    recording.save(tmp_path / "file")
    assert gradlib.load_recording(tmp_path / "file").compare(recording).ok
    assert recording.compare(returned({"a": x.sum(), "b": x})).ok
    assert not recording.compare(returned(Dict(a=x, b=x.sum()))).ok
    found = returned({"a": x, "b": x + 1}).compare(returned({"a": x, "c": x + 1}))
    assert found.first is not None
    assert found.first.reason == "'b' and 'c'"


@pytest.mark.parametrize("number", [2**80, -(2**63) - 1, 10**400])
def test_numbers_that_no_tensor_holds(number: int) -> None:
    assert returned(number).compare(returned(number)).ok
    assert not returned(number).compare(returned(number + 1)).ok


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0, 2**62]), torch.tensor([0, 2**62 + 1])),
        (np.arange(3.0), np.arange(3.0) + 1),
        (np.array(["a"]), np.array(["b"])),
        (np.array([1, "NaT"], "M8[s]"), np.array([2, "NaT"], "M8[s]")),
        (np.array([2**64 - 1], np.uint64), np.array([2**64 - 2], np.uint64)),
        (np.float32(2), np.float32(3)),
        (np.int8(2), np.int8(3)),
        (np.bool_(True), np.bool_(False)),
        (np.arange(3), np.arange(4)),
        (np.arange(3), None),
        (1.0, np.ones(())),
    ],
)
def test_what_is_told_apart(one: Any, other: Any) -> None:
    assert returned(one).compare(returned(copy.deepcopy(one))).ok
    found = returned(one).compare(returned(other)).first
    assert found is not None
    assert found.error > 0


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (torch.ones(3), None, "only one of the two is a tensor"),
        (np.ones(3), torch.ones(3), "only one of the two is a tensor"),
        (np.ones(3), "a", "only one of the two is an array"),
        ((1, 2, 3), (1, 2), "3 and 2 values"),
        ({"a": 1, "b": 2}, {"a": 1, "c": 2}, "'b' and 'c'"),
        (torch.ones(3), torch.ones(2), "shapes [3] and [2]"),
    ],
)
@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_why_two_cannot_be_compared(
    one: Any, other: Any, reason: str, reduce: Any
) -> None:
    found = returned(one, reduce).compare(returned(other, reduce)).first
    assert found is not None
    assert (found.error, found.reason) == (math.inf, reason)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda x: x + 0, 0.0),
        (lambda x: 2 * x, 0.5),
        (lambda x: x / 2, 0.5),
        (lambda x: -x, 10 / 30**0.5),  # of another mean only
        (lambda x: torch.full_like(x, 7.5**0.5), None),  # of the same norm
    ],
)
def test_each_of_the_statistics_counts(
    change: Callable[[Tensor], Tensor], error: float | None
) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    one, other = (returned(it, gradlib.tensor_stats) for it in (x, change(x)))
    found = one.compare(other).first
    assert (found is None) == (error == 0.0)
    if found is not None and error is not None:
        assert found.error == pytest.approx(error)


def test_what_is_no_value_is_not_compared() -> None:
    for other in (object(), np.ones(3), 1):
        assert returned(object()).compare(returned(other)).ok
    (reason,) = [
        it for it in returned(object()).compare(returned(1)).skipped if "type" in it
    ]
    assert "(output is of type object: tensors in it" in reason


def test_something_and_nothing_part() -> None:
    for one, other in (object(), None), (None, object()):
        first = returned(one).compare(returned(other)).first
        assert first is not None
        assert first.reason == "only one of the two is there"


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_no_gradient_and_one_of_zeros_agree(reduce: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self, *, uses: bool) -> None:
            super().__init__()
            self.weight, self.uses = nn.Parameter(torch.ones(3)), uses

        def forward(self, x: Tensor) -> Tensor:
            return x + 0 * self.weight if self.uses else x * 1

    x = torch.ones(2, 3, requires_grad=True)
    one, other = (
        recorded(Scaled(uses=uses), x, reduce=reduce) for uses in (True, False)
    )
    assert one.compare(other).ok
    assert other.compare(one).ok


class Backwards(torch.autograd.Function):
    """The identity; its backward multiplies by a factor that the test sets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * grads[0], None


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return Backwards.apply(x, self.factor)


def test_a_pass_inside_a_forward_comes_before_what_is_made_of_it() -> None:
    class Forces(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.scaled = Scaled(factor)

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            energy = self.scaled(x).square().sum()
            return torch.autograd.grad(energy, x)[0]

    recordings: list[gradlib.Recording] = []
    for factor in (1.0, 2.0):
        with gradlib.record(model := Forces(factor)) as recording:
            model(torch.ones(2, 3))
        recordings.append(recording)
    found = recordings[0].compare(recordings[1])
    assert where(found) == ("scaled", 0, "backward", "grad_input[0]")


def test_zeros_agree_also_where_anything_does() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(1.0))
    with gradlib.record(model) as recording:
        model(torch.ones(1, 2)).sum().backward()
    assert recording.compare(recording, rtol=float("inf")).ok


class Port(nn.Module):
    """Computes what `Net` computes, with other names of modules."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.embed = net.first
        self.layers = net.blocks
        self.out = net.head

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.out(h)


PAIRS = {"first": "embed", "head": "out"} | {
    f"blocks.{i}{inner}": f"layers.{i}{inner}"
    for i in range(3)
    for inner in ("", ".fc", ".norm")
}


def test_other_names_are_paired(net: Net, x: Tensor) -> None:
    one, same = recorded(net, x), recorded(Port(copy.deepcopy(net)), x)
    assert not one.compare(same).ok
    found = one.compare(same, names=PAIRS)
    assert found.ok
    assert found.compared == len(one)
    port = Port(copy.deepcopy(net))
    with torch.no_grad():
        port.get_parameter("layers.1.norm.weight")[0] += 1
    found = one.compare(recorded(port, x), names=PAIRS)
    assert where(found) == ("blocks.1.norm", 0, "forward", "output")
    back = {theirs: ours for ours, theirs in PAIRS.items()}
    assert where(recorded(port, x).compare(one, names=back))[0] == "layers.1.norm"


def test_each_call_of_a_paired_module_finds_its_like(x: Tensor) -> None:
    def called_twice(name: str) -> gradlib.Recording:
        torch.manual_seed(0)
        model = nn.Sequential()
        model.add_module(name, nn.Linear(4, 4))
        with gradlib.record(model) as recording:
            (model(x) + model(2 * x)).sum().backward()
        return recording

    found = called_twice("a").compare(called_twice("b"), names={"a": "b"})
    assert found.ok
    assert found.compared == 4


def test_a_compiled_module_is_paired_by_either_name(net: Net, x: Tensor) -> None:
    one, other = recorded(net, x), Port(copy.deepcopy(net))
    compiled = nn.ModuleDict({"_orig_mod": other})
    recording = recorded(compiled, x, run=compiled["_orig_mod"])
    names = {ours: f"_orig_mod.{theirs}" for ours, theirs in PAIRS.items()}
    assert one.compare(recording, names=names).ok


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["first"], "names must map names .* of type list"),
        ({"frist": "embed"}, 'this recording has no call of .frist.*Nearest: "first"'),
        ({"first": "embd"}, 'the other recording has no call of .embd.*"embed"'),
        ({"first": 1}, "the other recording has no call of 1"),
        (
            {"first": "embed", "head": "embed"},
            '"first" and "head" would both be compared with "embed"',
        ),
    ],
)
def test_names_that_pair_nothing_are_refused(
    net: Net, x: Tensor, names: Any, said: str
) -> None:
    one, other = recorded(net, x), recorded(Port(copy.deepcopy(net)), x)
    with pytest.raises(gradlib.RecordingArgumentError, match=said):
        one.compare(other, names=names)


def test_a_name_that_is_taken_is_refused(net: Net, x: Tensor) -> None:
    one = recorded(net, x)
    said = '"first" and "head" would both be compared with "head"'
    with pytest.raises(gradlib.RecordingArgumentError, match=said):
        one.compare(one, names={"first": "head"})
    assert one.compare(one, names={"first": "head", "head": "first"}).first is not None


def test_two_classes_of_tensors_that_do_not_know_each_other(net: Net) -> None:
    class A(Tensor):
        pass

    class B(Tensor):
        pass

    x = torch.randn(3, 4)
    one, other, apart = (
        recorded(net, it) for it in (x.as_subclass(A), x.as_subclass(B), 2 * x)
    )
    assert one.compare(other).ok
    assert where(one.compare(apart))[-1] == "args[0]"


class Head(Enum):
    CLASS = "class"


@pytest.mark.parametrize("key", [Head.CLASS, b"class", frozenset({"class"})], ids=str)
def test_keys_that_no_file_holds_are_known_again(tmp_path: Path, key: Any) -> None:
    x = torch.arange(3.0)
    recording = returned({key: x, "other": x + 1})
    recording.save(tmp_path / "file")
    loaded = gradlib.load_recording(tmp_path / "file")
    assert recording.compare(loaded).ok
    assert loaded.compare(recording).ok
    assert not returned({key: x + 1, "other": x}).compare(loaded).ok
    found = returned({key: x, "another": x + 1}).compare(loaded)
    assert found.first is not None
    assert found.first.reason == "'another' and 'other'"


class Key:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def test_keys_that_look_alike_in_one_of_two() -> None:
    x = torch.arange(3.0)
    one = returned({Key("a"): x, Key("b"): x + 1})
    other = returned({Key("a"): x, Key("a"): x + 1})
    assert one.compare(other).ok
    assert other.compare(one).ok
    assert not other.compare(returned({Key("a"): x, Key("b"): x + 2})).ok


def test_a_key_that_does_not_say_whether_another_is_equal() -> None:
    class ByTensor(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {2 * x: 3 * x}

    def recorded_by_tensor(x: Tensor) -> gradlib.Recording:
        with gradlib.record(model := ByTensor()) as recording:
            (scaled,) = model(x).values()
            scaled.sum().backward()
        return recording

    x = torch.randn(3, requires_grad=True)
    one, other, apart = map(recorded_by_tensor, (x, x, 2 * x))
    assert one.verify().ok
    assert one.compare(other).ok
    assert not one.compare(apart).ok


def test_names_of_values_are_no_gradients() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, grad_scale: Tensor) -> Any:
            return {"grad_norm": x * grad_scale}

    x, model = torch.ones(3, requires_grad=True), Scaled()
    recordings: list[gradlib.Recording] = []
    for scale in (1.0, 2.0):
        with gradlib.record(model) as recording:
            model(x, grad_scale=torch.tensor(scale))["grad_norm"].sum().backward()
        recordings.append(recording)
    one, other = recordings
    found = [(it.direction, it.field) for it in one.compare(other).errors if it.error]
    assert found == [
        ("forward", "kwargs['grad_scale']"),
        ("forward", "output['grad_norm']"),
        ("backward", "grad_input[0]"),
    ]


def test_arrays_in_another_order_of_bytes(tmp_path: Path) -> None:
    one, other = (returned(np.array([1.0, 2.0], dtype=it)) for it in (">f8", "<f8"))
    assert one.compare(other).ok
    one.save(tmp_path / "file")
    loaded = gradlib.load_recording(tmp_path / "file")
    assert loaded.compare(one).ok
    assert loaded[""].output.tolist() == [1.0, 2.0]


def test_long_doubles_are_compared_and_not_saved(tmp_path: Path) -> None:
    array = np.array([1.0], dtype=np.longdouble)
    recording = returned(array)
    assert recording.compare(returned(array)).ok
    assert not recording.compare(returned(array + 1)).ok
    recording.save(tmp_path / "file")
    assert isinstance(gradlib.load_recording(tmp_path / "file")[""].output, NotSaved)


@pytest.mark.parametrize("reduce", [gradlib.tensor_stats, torch.linalg.vector_norm])
def test_it_is_said_that_only_statistics_were_compared(
    net: Any, x: Tensor, reduce: Any
) -> None:
    whole, one, other = (
        recorded(net, it, loss=Tensor.sum, reduce=by)
        for it, by in ((x, None), (x, reduce), (x.flip(0), reduce))
    )
    assert whole.compare(whole).skipped == ()
    found = one.compare(other)
    assert found.ok  # though each row is another
    assert found.skipped == (
        "entries: both recordings kept only what reduce gave of tensors",
    )
    said = "entries: the other recording kept only what reduce gave of tensors"
    assert said in whole.compare(one).skipped

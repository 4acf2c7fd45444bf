"""Odd modules and tensors are reported as any others, or refused by name."""

import collections
import itertools
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib import NotCopyableError
from gradlib.hook_reports.hooks import (
    ACCUMULATED,
    FULL,
    FULL_PRE,
    LEGACY,
    SEVERAL,
    TENSOR,
)
from gradlib.hook_reports.trial import cotangent

from ..elsewhere import passes_elsewhere
from .reported import LINEAR, Of, given, report_of, whats

GROUP_NORM = """
import torch
from torch import nn

import gradlib

norm = nn.Sequential(nn.Identity(), nn.GroupNorm(2, 4))
x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
for given in x.contiguous(), x.clone().requires_grad_():
    gradlib.hook_report(norm, given)
try:
    gradlib.hook_report(norm, x)
except gradlib.NotCopyableError as error:
    print(error)
"""


@pytest.mark.cpu
def test_a_group_norm_that_torch_would_not_survive() -> None:
    run = subprocess.run(
        [sys.executable, "-c", GROUP_NORM], check=False, capture_output=True, text=True
    )
    assert run.returncode == 0
    is_refused = "Pass x.contiguous(), or x.requires_grad_()." in run.stdout
    assert is_refused is (torch.__version__ < "2.14")  # which survives it


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    def forward(layer: nn.Module, x: Tensor) -> Any:
        return checkpoint(lambda v: layer(v).tanh(), x, use_reentrant=reentrant)

    report = report_of(Of(forward, nn.Linear(3, 2)), given(4, 3))
    assert report.kinds[FULL].grad_input[0].what == "gradient of args[0]"
    assert report.kinds[LEGACY].entries


def test_a_module_that_calls_itself_is_reported_as_called_from_outside() -> None:
    class Again(nn.Linear):
        def forward(self, input: Tensor, times: int = 2) -> Tensor:  # noqa: A002 (a usual name)
            y = super().forward(input).tanh()
            return self(y, times - 1) * 2 if times else y

    kinds = report_of(Again(3, 3), given(4, 3)).kinds
    assert kinds[FULL].grad_input[0].what == "gradient of input"
    for kind in (LEGACY, FULL, FULL_PRE):
        assert kinds[kind].grad_output[0].what == "gradient of output"


def test_forward_hooks_are_part_of_the_module() -> None:
    with pytest.warns(FutureWarning):
        module = nn.utils.weight_norm(nn.Linear(3, 2))
    module(torch.randn(4, 3))  # from now on it holds a weight that was computed
    report = report_of(module, given(4, 3))
    assert report.kinds[LEGACY].grad_input[1].what == "gradient of input"


def test_a_parameter_that_is_passed_stays_one() -> None:
    classes: list[type[Tensor]] = []

    def forward(x: Tensor) -> Tensor:
        classes.append(type(x))
        return x * 2

    report_of(Of(forward), nn.Parameter(given(3).detach()))
    # torch itself gives the module another tensor where there is a full backward hook.
    others = [it for it in classes if it is not nn.Parameter]
    assert len(others) == len([FULL, FULL_PRE]) < len(classes)


class WithoutHooks(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


def test_a_call_of_its_own_that_runs_no_hooks() -> None:
    report = report_of(WithoutHooks(3, 2), given(4, 3))
    why = "Never called: WithoutHooks has a __call__ of its own, without hooks."
    assert report.kinds[FULL].why == why


def test_what_is_no_module() -> None:
    with pytest.raises(gradlib.NotAModuleError, match=r"\[GL200\] hook_report\(module"):
        gradlib.hook_report(F.relu, given(3))  # type: ignore[arg-type] (on purpose)
    with pytest.raises(
        gradlib.NotAModuleError, match=r"class Linear, .* Linear\(...\)"
    ):
        gradlib.hook_report(nn.Linear, given(3))  # type: ignore[arg-type] (on purpose)


def test_what_cannot_be_copied() -> None:
    module = nn.Linear(3, 2)
    vars(module)["stream"] = (item for item in "generators cannot be copied")
    inside = nn.Sequential(nn.Linear(3, 3), module)
    for whole, place in ((module, "stream"), (inside, "1.stream")):
        inside[0].last = inside[0](given(4, 3))  # computed, and copied all the same
        said = f"cannot be copied: TypeError.* It is the attribute {place}: take it"
        with pytest.raises(gradlib.NotCopyableError, match=said):
            gradlib.hook_report(whole, given(4, 3))
    del module.stream
    assert report_of(inside, given(4, 3)).kinds[FULL].entries
    stream = (item for item in "nor can this")
    with pytest.raises(gradlib.NotCopyableError, match="without what cannot"):
        gradlib.hook_report(Of(lambda x, _: x * 2), given(3), stream)


def test_modules_that_make_their_weights_in_the_first_call() -> None:
    lazy, x = nn.LazyLinear(2), given(4, 3)
    before = lazy.weight
    assert list(whats(report_of(lazy, x).kinds[LEGACY]).values())[:3] == LINEAR
    assert lazy.weight is before
    assert nn.parameter.is_lazy(before)
    norm = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(gradlib.NotCopyableError, match="Call the module once before"):
        gradlib.hook_report(norm, x)
    norm(x)
    assert report_of(norm, x).kinds[FULL].entries


def test_torch_does_not_count_a_leaf_of_another_class() -> None:
    class Other(Tensor):
        pass

    assert report_of(nn.Tanh(), given(3).as_subclass(Other)).kinds[SEVERAL].entries
    leaf = given(3).detach().as_subclass(Other).requires_grad_()
    said = " ".join(str(report_of(nn.Tanh(), leaf).kinds[SEVERAL]).split())
    assert said.endswith("torch finds no node to count for a leaf of class Other.")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    class Nest(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nested.as_nested_tensor([x, x], layout=layout)

    x = torch.nested.nested_tensor([torch.ones(2, 3)], layout=layout)
    with pytest.raises(gradlib.NotCopyableError, match="Pass a padded tensor"):
        gradlib.hook_report(nn.Linear(3, 2), x)
    with pytest.raises(gradlib.NotCopyableError, match="Return a padded tensor"):
        gradlib.hook_report(Nest(), given(2, 3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_inside(layout: torch.layout) -> None:
    class Nests(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = torch.nested.as_nested_tensor([x[0], x[1, :2]], layout=layout)
            return self.fc(parts).to_padded_tensor(0.0)

    report = gradlib.hook_report(Nests(), given(2, 5, 3))
    (entry,) = report.kinds["register_backward_hook"].grad_input
    assert entry.what == "gradient of an inner tensor, which is nested"
    (entry,) = report.kinds["register_full_backward_hook"].grad_input
    assert entry.what == "gradient of x"
    assert "nested" in str(report)
    report.plot()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_script_modules() -> None:
    scripted = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(gradlib.NotAModuleError, match="takes no hooks"):
        gradlib.hook_report(scripted, given(4, 3))
    report = gradlib.hook_report(nn.Sequential(scripted, nn.Tanh()), given(4, 3))
    full = report.kinds["register_full_backward_hook"]
    assert full.grad_input[0].what == "gradient of input"


@pytest.mark.parametrize("where", ["module", "input"])
def test_what_has_no_values(where: str) -> None:
    module = nn.Linear(3, 2, device="meta" if where == "module" else None)
    x = torch.ones(4, 3, device="meta" if where == "input" else None)
    with pytest.raises(gradlib.NotCopyableError, match="on the device meta, or made"):
        gradlib.hook_report(module, x)


def test_what_was_made_in_a_fake_tensor_mode() -> None:
    with FakeTensorMode():
        module, x = nn.Linear(3, 2), torch.ones(4, 3)
        with pytest.raises(gradlib.NotCopyableError, match="or a FakeTensorMode tens"):
            gradlib.hook_report(module, x)
    with pytest.raises(gradlib.NotCopyableError, match="made in a FakeTensorMode, "):
        gradlib.hook_report(module, x)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_argument() -> None:
    class Times(nn.Module):
        def forward(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(a, x)

    a = torch.diag(torch.tensor([1.0, 2.0])).to_sparse_csr()
    report = gradlib.hook_report(Times(), a, given(2, 3))
    assert report.kinds["Tensor.register_hook"].entries[0].what == "gradient of output"
    error = report.kinds["register_full_backward_hook"].error
    assert error.startswith("NotImplementedError: Could not run 'aten::view'")
    assert error.endswith("backend.")


def test_a_sparse_weight() -> None:
    fc, x = nn.Linear(3, 3, bias=False), given(4, 3).detach()
    fc.weight = nn.Parameter(torch.diag(given(3).detach()).to_sparse())
    entries = gradlib.hook_report(fc, x).kinds["Node.register_hook"].entries
    assert entries[1].what == "gradient of weight, transposed"
    assert_close(entries[1].value, x.T @ cotangent(0, x))
    assert fc.weight.grad is None


def test_a_pass_inside_that_runs_in_another_thread() -> None:
    def forces(fc: nn.Module, x: Tensor) -> Tensor:
        x = 2 * x
        return torch.autograd.grad(fc(x).tanh().sum(), x, create_graph=True)[0]

    module, x = Of(forces, nn.Linear(3, 2)), given(4, 3)
    here = str(gradlib.hook_report(module, x))
    for how in ({"behind": 1000}, {"ahead": 1000}):  # of the numbers of nodes
        with passes_elsewhere(**how):
            assert str(gradlib.hook_report(module, x)) == here


def test_arguments_that_a_hook_puts_in_another_order() -> None:
    module = Of(lambda a, b: a * b)
    module.register_forward_pre_hook(lambda _module, args: args[::-1])
    found = whats(report_of(module, given(4, 3), given(3).detach()).kinds[FULL])
    assert found["grad_input[0]"] == "zeros: args[1] does not require grad"
    assert found["grad_input[1]"].startswith("gradient of args[0]")


class Frozen(nn.Linear):
    def train(self, mode: bool = True) -> "Frozen":
        raise RuntimeError(f"no mode {mode} for me")


def test_a_module_that_cannot_be_switched() -> None:
    module = Frozen(3, 2)
    report = gradlib.hook_report(module, torch.ones(1, 3))
    assert "Without bias" in str(report)
    assert module.training


@pytest.mark.parametrize("chance", ["a generator", "a counter"])
def test_a_module_that_does_not_repeat(chance: str) -> None:
    generator, calls = torch.Generator("cpu"), [0]

    def drawn(x: Tensor) -> Tensor:
        calls[0] += 1
        if chance == "a counter":
            generator.manual_seed(calls[0])
        return torch.rand(x.shape, generator=generator, device="cpu").to(x)

    module = Of(lambda x, w: (x * drawn(x)) * (w + drawn(x)))
    report = report_of(module, given(4, 3), given(4, 3))
    unknown = "not known: it is another gradient at each run"
    for kind in (LEGACY, FULL):
        found = whats(report.kinds[kind])
        assert found["grad_input[0]"] == found["grad_input[1]"] == unknown
        assert found["grad_output[0]"] == "gradient of output"
    assert "Two runs gave different gradients" in str(report.notes)


def test_an_inner_output_of_another_length_each_time() -> None:
    calls = itertools.count(1)

    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.repeat(next(calls), 1))[:4]

    report = report_of(Of(forward, nn.Identity()), given(4, 3))
    assert "Two runs gave different gradients" in str(report.notes)


def test_a_module_that_nearly_repeats() -> None:
    calls = itertools.count()
    module = Of(lambda x: x * (1 + 1e-4 * (next(calls) % 2)))
    found = whats(report_of(module, given(4, 3)).kinds[FULL])
    assert found["grad_input[0]"] == "gradient of args[0]"


def test_a_module_that_goes_backward_itself() -> None:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        h = layer(x)
        h.sum().backward(retain_graph=True)
        return h * 2

    report = report_of(Of(forward, nn.Linear(3, 2)), given(4, 3))
    assert whats(report.kinds[FULL])["grad_input[0]"] == "gradient of args[0]"


def test_arguments_that_are_one_object() -> None:
    module = nn.MultiheadAttention(4, 1)
    x = torch.randn(3, 1, 4)
    found = whats(report_of(module, x, x, x).kinds[FULL])
    names = "query", "key", "value"
    for i, name in enumerate(names):
        assert found[f"grad_input[{i}]"] == f"None: {name} does not require grad"


def test_no_samples_at_all() -> None:
    report = report_of(nn.Linear(3, 2), given(0, 3))
    for kind in report.kinds.values():
        for entry in kind.entries:
            assert "nothing flows" not in entry.what


def test_torch_func_around_a_module_inside() -> None:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        def loss(v: Tensor) -> Tensor:
            return layer(v).tanh().sum()

        return torch.func.vmap(torch.func.grad(loss))(x)

    report = report_of(Of(forward, nn.Linear(3, 2)), given(4, 3))
    assert whats(report.kinds[TENSOR])["grad of output"] == "gradient of output"


def test_inside_of_torch_func() -> None:
    def fn(x: Tensor) -> Tensor:
        gradlib.hook_report(nn.ReLU(), x)
        return x

    with pytest.raises(NotCopyableError, match=r"torch\.func"):
        torch.func.vmap(fn)(torch.ones(2, 3))


class Indexed:
    """What torch looks into for a tensor, though it is no list."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, _: int) -> Tensor:
        return self.tensor


@pytest.mark.parametrize("kind", [Indexed, lambda it: collections.deque([it])])
def test_an_output_that_torch_indexes(kind: Callable[[Tensor], Any]) -> None:
    report = report_of(Of(lambda x: kind(x * 2)), given(3))
    assert report.last_node == "MulBackward0"
    if kind is Indexed:
        assert "no tensor is found" in report.kinds[FULL].why


def test_a_forward_without_a_signature() -> None:
    module = nn.ReLU()
    module.forward = torch.relu
    report = report_of(module, torch.tensor([-1.0, 2.0, 3.0], requires_grad=True))
    assert whats(report.kinds[FULL])["grad_input[0]"] == "gradient of args[0]"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_argument() -> None:
    x = torch.quantize_per_tensor(3 * torch.ones(2, 3), 0.1, 0, torch.quint8)
    module = Of(lambda q, y: q.dequantize() * y)
    report = report_of(module, x, given(2, 3))
    assert "gradient of args[1]" in whats(report.kinds[LEGACY]).values()


def test_a_keyword_called_module() -> None:
    module = Of(lambda x, module: x * module)
    report = gradlib.hook_report(module, given(3), module=2)
    assert report.kinds[FULL].entries


def test_what_the_copies_are_not() -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    module.compile(backend="eager")
    assert "not compiled" in str(report_of(module, given(4, 3)).notes)
    hook = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        assert "for every module" in str(report_of(nn.ReLU(), given(3)).notes)
    finally:
        hook.remove()


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_module_runs_as_it_would_alone(whole: bool) -> None:
    pytest.importorskip("torch._dynamo")
    module = torch.compile(
        nn.Sequential(nn.Linear(3, 2), nn.Tanh()), fullgraph=whole, backend="aot_eager"
    )
    report = gradlib.hook_report(cast(nn.Module, module), given(4, 3))
    assert report.last_node == "CompiledFunctionBackward"


@pytest.mark.parametrize("is_weak", [False, True])
def test_a_child_that_knows_its_parent(is_weak: bool) -> None:
    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parent: Any = weakref.ref(parent) if is_weak else [parent]

        def forward(self, x: Tensor) -> Tensor:
            parent = self.parent() if is_weak else self.parent[0]
            return x.sin() * parent.scale

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))
            self.child = Child(self)

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x)

    report = report_of(model := Parent(), given(4, 3))
    assert report.kinds[LEGACY].grad_input[1].what == "gradient of scale"
    assert whats(report.kinds[ACCUMULATED])["scale.grad"] == "gradient of scale"
    assert model.scale.grad is None


def test_what_stands_on_tensors_is_there_in_the_copy() -> None:
    class Gains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w: Any = nn.Parameter(torch.ones(3))
            self.w.gain = 2.0

        def forward(self, x: Any) -> torch.Tensor:
            return x * self.w * self.w.gain * x.gain

    x: Any = given(3)
    x.gain = 3.0
    assert report_of(Gains(), x).last_node == "MulBackward0"
    assert vars(x) == {"gain": 3.0}


def test_one_tensor_twice_that_is_overwritten() -> None:
    x = given(3).exp()
    said = "args[0] and args[1] are one tensor, which the module overwrites"
    assert said in str(report_of(Of(lambda a, b: a.mul_(2) * b), x, x).notes)
    assert report_of(Of(lambda a, b: a * b), x, x).notes == ()


class Caches(nn.Module):
    """Computes from its weight once, and keeps that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = self.weight.exp()
        return x * self.cache


def test_what_was_computed_from_a_parameter_before() -> None:
    module, x = Caches(), given(3)
    assert report_of(module, x).notes == ()
    module(x)
    said = "cache was computed from weight before, and its copy is cut from that"
    assert said in str(report_of(module, x).notes)
    said = "args[0] was computed from parts.0.0.weight before"
    shared = nn.Sequential(nn.Linear(3, 3, bias=False))
    assert said in str(report_of(Of(lambda _, y: y, shared), shared(x)).notes)


def test_a_class_that_warns_when_it_is_made() -> None:
    class Old(nn.Module):
        def __deepcopy__(self, memo: object) -> "Old":
            warnings.warn("there is a new one", FutureWarning, stacklevel=2)
            return Old()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report_of(Old(), given(3)).last_node == "SinBackward0"


def test_inputs_that_share_memory() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(3))

        def forward(self, x: torch.Tensor, *views: torch.Tensor) -> torch.Tensor:
            return x * sum(views)

    module: Any = Adds()
    said = "args[1] shares memory with cache, and its copy does not"
    assert said in str(report_of(module, given(3), module.cache[:]).notes)
    both = torch.zeros(4)
    said = "args[2] shares memory with args[1], and its copy does not"
    assert said in str(report_of(module, given(3), both[:3], both[1:]).notes)
    numbers = both[2:], both.view(torch.float64)[1:]
    assert said in str(report_of(module, given(2), *numbers).notes)
    alike = both[:1], both[1:3], both[1:3].view(2)
    (note,) = report_of(module, given(2), *alike).notes
    assert note.startswith("args[3] shares memory with args[2], ")
    apart: Any = both.view(2, 2).t()  # as an attention's q, k and v are cut from one
    for parts in ((both[:2], both[2:]), apart):
        assert not report_of(module, given(2), *parts).notes
    for given_twice in (both[:3], module.cache):
        notes = report_of(module, given(3), given_twice, given_twice).notes
        assert "memory" not in str(notes)


def test_what_is_only_looked_at_warns_nobody() -> None:
    program = torch.export.export(nn.Linear(3, 2), (torch.ones(4, 3),)).module()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradlib.hook_report(program, given(4, 3))
    assert not caught


class Scaled(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).relu()


class Added(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return torch.addmm(x.sum(0)[:2], super().__call__(x), torch.eye(2) * 3)


class Twice(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        super().__call__(x)
        return super().__call__(x)


class First(nn.Linear):
    def forward(self, input: Tensor) -> Any:  # noqa: A002 (its name)
        y = super().forward(input)
        return y, y.sum()

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x)[0]


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", [FULL, LEGACY])
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("made", [Scaled, Added, Twice, First])
def test_a_call_that_makes_something_else_of_what_hooks_see(
    made: type[nn.Linear], asks: bool, kind: str
) -> None:
    module, x = made(3, 2), torch.randn(4, 3, requires_grad=asks)
    found: list[tuple[int, int]] = []

    def hook(_module: object, grads: Any, outs: Any) -> None:
        found.append((len(grads), len(outs)))

    tried = report_of(module, x).kinds[kind]
    handle = getattr(module, kind)(hook)
    module(x).sum().backward()
    handle.remove()
    assert (len(tried.grad_input), len(tried.grad_output)) == found[-1]
    whats = [it.what for it in tried.entries]
    if kind == LEGACY:
        assert whats[0] == "gradient of bias"
        assert whats[2] == "gradient of weight, transposed"
    is_output = [what.startswith("gradient of output") for what in whats]
    assert any(is_output) == (made in (Twice, First))


def test_an_input_that_the_module_makes_require_grad() -> None:
    """As for forces: it required none when a full hook looked."""

    def energy(x: Tensor) -> Tensor:
        return x.requires_grad_().sin()

    report = report_of(Of(energy), given(3, 4).detach())
    assert report.last_node_inputs == ("args[0]",)
    for kind in (LEGACY, ACCUMULATED, SEVERAL):
        assert report.kinds[kind].entries[0].what == "gradient of args[0]"
    full = report.kinds[FULL]
    why = "None: args[0] did not require grad when the module was called"
    assert full.grad_input[0].what == why
    assert "None of these is a tensor that requires grad." in full.why


def test_an_input_that_is_overwritten_with_what_requires_grad() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(given(4).detach())

        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(self.w)

    report = report_of(Scales(), given(3, 4).detach())
    full = report.kinds[FULL].grad_input[0].what
    assert full == "None: x did not require grad when the module was called"
    for kind in (ACCUMULATED, SEVERAL):  # x gets none of its own
        assert [it.what for it in report.kinds[kind].entries] == ["gradient of w"]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_tensor_that_a_full_hook_does_not_see_may_require_grad(by_name: bool) -> None:
    def doubled(*args: Any, x: Any = None) -> Tensor:
        (inside,) = args[0] if args else (x,)
        return 2 * inside

    module, x = Of(doubled), given(3)
    report = report_of(module, x=x) if by_name else report_of(module, [x])
    said = "None of these is a tensor that requires grad."
    assert said in report.kinds[FULL].why


def test_a_report_in_a_compiled_function() -> None:
    def report(module: nn.Module, x: Tensor) -> str:
        return str(gradlib.hook_report(module, x))

    module, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), given(4, 3)
    torch.compiler.reset()
    assert torch.compile(report, backend="eager")(module, x) == report(module, x)


@pytest.mark.parametrize("spec", [Tensor, nn.Module])
def test_an_attribute_that_stands_for_something_else(spec: Any) -> None:
    module = nn.Linear(3, 2)
    module.__dict__["trainer"] = MagicMock(spec=spec)
    kind = report_of(module, given(4, 3)).kinds["register_backward_hook"]
    assert [it.what for it in kind.grad_input] == LINEAR


def test_a_weak_proxy_of_what_is_gone_is_to_be_taken_away() -> None:
    module = nn.Linear(3, 2)
    module.__dict__["trainer"] = weakref.proxy(nn.ReLU())
    with pytest.raises(gradlib.NotCopyableError, match="the attribute trainer: take"):
        gradlib.hook_report(module, given(4, 3))

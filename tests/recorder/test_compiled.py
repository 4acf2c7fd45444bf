"""Recording models that torch.compile has compiled: each module runs compiled."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.compiled_autograd
from torch import Tensor, fx, nn
from torch.testing import assert_close

import gradlib

# torch warns so where it resumes after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Net(nn.Module):
    """A residual block with a keyword, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.act = nn.ReLU()
        self.scale = Scale()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + self.scale(self.act(h), by=h))


class Scale(nn.Module):
    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return x * by.sigmoid()


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    output = model(x)
    (output * torch.arange(1.0, output.numel() + 1).view_as(output)).sum().backward()


def recorded(model: nn.Module, x: Tensor, run_it: Any = None) -> gradlib.Recording:
    with gradlib.record(model) as recording:
        run(model if run_it is None else run_it, x)
    return recording


def assert_same(found: gradlib.Recording, wanted: gradlib.Recording) -> None:
    assert len(wanted) == 5
    for call in wanted:
        twin = found[call.name]
        assert_close(twin.args, call.args)
        assert_close(twin.output, call.output)
        for field in ("grad_input", "grad_kwargs", "grad_output", "grad_input_total"):
            assert_close(getattr(twin, field), getattr(call, field))
        assert_close(twin.param_grads, call.param_grads)
        assert_close(twin.param_grads_total, call.param_grads_total)


@pytest.mark.parametrize(("backend", "runs_before"), [("eager", 2), ("aot_eager", 0)])
def test_compiled_before_the_block(backend: str, runs_before: int) -> None:
    model, x = Net(), torch.randn(5, 3, requires_grad=True)
    twin = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend=backend)
    for _ in range(runs_before):
        compiled(x)
    assert_same(recorded(model, x, compiled), recorded(twin, x))
    # Recorded on the compiled module itself, names begin with _orig_mod.
    found = recorded(compiled, x)
    assert found["first"].name == "_orig_mod.first"
    assert_close(found["scale"].grad_kwargs, recorded(twin, x)["scale"].grad_kwargs)


def test_compiled_in_place() -> None:
    model, x = Net(), torch.randn(5, 3, requires_grad=True)
    twin = copy.deepcopy(model)
    model.compile(backend="aot_eager")
    model(x)
    assert_same(recorded(model, x), recorded(twin, x))


def test_compiled_inside_the_block() -> None:
    model, x = Net(), torch.randn(5, 3)
    twin = copy.deepcopy(model)
    with gradlib.record(model) as found:
        run(torch.compile(model, backend="aot_eager"), x)
    assert_same(found, recorded(twin, x))


def test_a_compiled_step_that_calls_the_model() -> None:
    model, x = Net(), torch.randn(5, 3)
    twin = copy.deepcopy(model)
    compiled: Any = torch.compile(lambda x: model(x), backend="aot_eager")
    compiled(x)
    assert_same(recorded(model, x, compiled), recorded(twin, x))


def test_what_was_compiled_in_the_block_has_no_hook_after_it() -> None:
    model, x = Net(), torch.randn(5, 3)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    recording = recorded(model, x)
    with gradlib.record(model):
        torch.compile(model, backend="aot_eager")(x)
    compiled(x)  # a hook left in the model would break the graph
    assert len(recording) == 5


def test_each_module_really_runs_compiled() -> None:
    def wrong(graph: fx.GraphModule, _inputs: object) -> Any:
        for node in graph.graph.nodes:
            if node.target == "sigmoid":
                node.target = "tanh"
        graph.recompile()
        return graph.forward

    model, x = Net(), torch.randn(5, 3)
    found = recorded(model, x, torch.compile(model, backend=wrong))
    wanted = recorded(model, x)
    assert torch.equal(found["first"].output, wanted["first"].output)
    x, by = found["scale"].args[0], found["scale"].kwargs["by"]
    assert torch.equal(found["scale"].output, x * by.tanh())
    assert not torch.equal(found["scale"].output, wanted["scale"].output)


def test_a_full_graph_cannot_be_recorded_and_says_so() -> None:
    model, x = Net(), torch.randn(5, 3)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    compiled(x)
    with (
        pytest.raises(RuntimeError, match="record sees each module call"),
        gradlib.record(model),
    ):
        compiled(x)
    compiled(x)


def test_a_backward_pass_that_is_compiled_is_recorded_and_verified() -> None:
    def compile_it(graph: fx.GraphModule) -> Any:
        return torch.compile(graph, backend="eager")

    model, x = Net(), torch.randn(5, 3)
    twin = copy.deepcopy(model)
    with gradlib.record(model) as found:
        output = model(x)
        weights = torch.arange(1.0, output.numel() + 1).view_as(output)
        with torch._dynamo.compiled_autograd._enable(compile_it):
            (output * weights).sum().backward()
    assert_same(found, recorded(twin, x))
    verification = found.verify()
    assert verification.ok
    assert not verification.skipped


def test_what_comes_into_a_compiled_model_has_its_plain_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    compiled: Any = torch.compile(model, backend="eager")
    x = torch.randn(2, 3)
    with gradlib.record(compiled) as recording:
        compiled(x)
        model.append(nn.Tanh())
        compiled(x)
    assert recording["1"].output is recording["_orig_mod.1"].output


def step_and_ask(net: Net, x: Tensor, ask: Callable[[gradlib.Recording], Any]) -> Any:
    """Record a step and ask about it, where torch.compile compiles the caller."""
    with gradlib.record(net) as recording:
        run(net, x)
    return ask(recording)


QUESTIONS: dict[str, Callable[[gradlib.Recording], Any]] = {
    "verify": lambda it: it.verify(numerical=True).ok,
    "replay": lambda it: it["last"].replay().param_grads,
    "compare": lambda it: it.compare(it).ok,
    "first_nonfinite": lambda it: it.first_nonfinite(),
    "print": str,
    "html": lambda it: it["last"]._repr_html_(),
    "plot": lambda it: len(it.plot().axes),
    "to_frame": lambda it: len(it.to_frame()),
}


def test_questions_in_a_compiled_function() -> None:
    def all_answers(recording: gradlib.Recording) -> dict[str, str]:
        return {name: str(ask(recording)) for name, ask in QUESTIONS.items()}

    net, x = Net(), torch.randn(3, 3)
    found = torch.compile(step_and_ask, backend="eager")(net, x, all_answers)
    assert found == step_and_ask(net, x, all_answers)


def test_a_file_in_a_compiled_function(tmp_path: Path) -> None:
    def there_and_back(recording: gradlib.Recording) -> str:
        recording.save(tmp_path / "run.safetensors")
        return str(gradlib.load_recording(tmp_path / "run.safetensors"))

    net, x = Net(), torch.randn(3, 3)
    found = torch.compile(step_and_ask, backend="eager")(net, x, there_and_back)
    assert found == step_and_ask(net, x, str)

"""Asking a recording: look-ups, texts and pictures."""

import copy
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

import gradlib
from gradlib import NoSuchCallError
from gradlib.recording.order import steps
from gradlib.recording.table import ROWS
from gradlib.recording.trace import Block, CallTrace

from ..steps import python_steps


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.first(x)))


@pytest.fixture
def recording() -> gradlib.Recording:
    """Two steps: four calls of `first`, two of `last`."""
    torch.manual_seed(0)
    model = Twice()
    with gradlib.record(model) as recording:
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
    return recording


def test_looking_up_calls(recording: gradlib.Recording) -> None:
    assert len(recording) == 8
    assert [call.name for call in recording.forwards[0]] == [
        "",
        "first",
        "first",
        "last",
    ]
    assert [call.index for call in recording.calls("first")] == [0, 1, 2, 3]
    assert recording["first", 2].forward == 1
    assert recording.forwards[1]["last"].index == 1
    assert recording.forwards[1]["first", 3].index == 3
    assert "first" in recording
    assert "never" not in recording
    assert 3 not in recording


def test_several_calls_are_ambiguous(recording: gradlib.Recording) -> None:
    with pytest.raises(gradlib.AmbiguousCallError) as caught:
        recording["first"]
    assert isinstance(caught.value, LookupError)
    assert str(caught.value) == (
        '[GL202] "first" was called 4 times. Name one call: recording["first", i] with '
        "i from 0 to 3."
    )
    with pytest.raises(gradlib.AmbiguousCallError) as caught:
        recording["last"]
    assert str(caught.value).endswith('or recording.forwards[i]["last"].')
    with pytest.raises(gradlib.AmbiguousCallError, match="i from 2 to 3"):
        recording.forwards[1]["first"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("frist", 'The model has no module "frist". Nearest: "first"'),
        ("xyz", 'The model has no module "xyz". Its modules: "", "first", "last"'),
        ("never", '"never" was not called in the block. Only module(x) is a call'),
        (0, "recording[0]: name a call by its module"),
        (("last", 0, 1), "recording[('last', 0, 1)]: name a call by its module"),
        (("last", 2), '"last" has no call 2 here; its calls are 0, 1.'),
        ("(root)", '"(root)" is what tables show. Ask for recording[""].'),
        ("(root) (1)", 'Ask for recording["", 1].'),
        ("first (3)", '"first (3)" is what tables show. Ask for recording["first", 3]'),
        ("frist (3)", 'The model has no module "frist (3)". Nearest: "first"'),
        ("7", 'The model has no module "7". Its modules: "", "first", "last"'),
    ],
)
def test_a_failed_look_up_says_why(
    recording: gradlib.Recording, key: Any, message: str
) -> None:
    with pytest.raises(gradlib.NoSuchCallError) as caught:
        recording[key]
    assert isinstance(caught.value, LookupError)
    assert caught.value.code == "GL201"
    assert message in str(caught.value)


def test_of_a_list_of_modules_an_error_names_those_that_were_called() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    holder = nn.ModuleDict({"blocks": model})
    with gradlib.record(holder) as recording:
        model[1](model[0](torch.ones(1, 2)))
    with pytest.raises(gradlib.NoSuchCallError) as caught:
        recording["blocks"]
    assert '; in it were "blocks.0", "blocks.1". Only' in str(caught.value)


@pytest.mark.parametrize(
    ("count", "listed"),
    [(8, "0, 1, 2, 3, 4, 5, 6, 7."), (100, "0, 1, 2, 3, 4, 5, 6, ..., 99.")],
)
def test_of_many_calls_an_error_lists_a_few(count: int, listed: str) -> None:
    with gradlib.record(model := nn.Linear(2, 1)) as recording:
        for _ in range(count):
            model(torch.ones(1, 2))
    with pytest.raises(gradlib.NoSuchCallError) as caught:
        recording["", 100]
    assert str(caught.value).endswith(f"its calls are {listed}")


def test_it_can_be_read_inside_the_block() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with gradlib.record(model) as recording:
        output = model(torch.ones(1, 2))
        assert recording["0"].output.shape == (1, 2)
        assert recording["0"].passes == ()
        output.sum().backward()
        assert recording["0"].grad_output[0].tolist() == [[1.0, 1.0]]


def test_the_printed_table(recording: gradlib.Recording) -> None:
    lines = str(recording).splitlines()
    assert lines[0] == "Recording: 8 calls, 2 forwards, 2 backward passes"
    assert lines[1].split() == [
        *("module", "type", "pass"),
        *("output", "grad_output", "grad_input", "param_grads"),
    ]
    assert lines[3].split()[:5] == ["first", "Linear", "0", "[4,", "3]"]
    assert lines[4].startswith("first (1)")
    last = recording["last", 0]
    assert lines[5].split()[-1] == (
        f"{torch.stack([g.norm() for g in last.param_grads.values()]).norm():.3g}"
    )
    assert not any(line != line.rstrip() for line in lines)
    assert repr(recording) == f"<{lines[0]}>"


class Scale(nn.Module):
    def forward(self, *, x: Tensor) -> Tensor:
        return 3 * x


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(3, 3), Scale()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h + self.scale(x=h)


def test_the_passes_of_one_call_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    with gradlib.record(model, keep=["grad_output"]) as recording:
        model(x).sum().backward()
        y = model(x)
        y.sum().backward(retain_graph=True)
        y.prod().backward()
        model(x)
    lines = str(recording).splitlines()
    rows = [line.split() for line in lines if line.startswith("1 ")]
    assert lines[1].split() == ["module", "type", "pass", "grad_output"]
    assert [row[-2] for row in rows] == ["0", "1", "2", "-"]
    assert "pass: which backward pass of the block" in lines
    assert "pass: which" not in str(recording.forwards[0])
    footer = str(recording["1", 1]).splitlines()[-1]
    assert footer == "passes: backward passes 1, 2 of the block"
    fields = [line.split()[0] for line in str(recording["1", 1]).splitlines()[2:-1]]
    assert fields == ["passes[0].grad_output[0]", "passes[1].grad_output[0]"]
    assert str(recording["1", 0]).splitlines()[2].split()[0] == "grad_output[0]"


def fields_of(printed: object) -> list[str]:
    return [line.split()[0] for line in str(printed).splitlines()[2:]]


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats, torch.norm])
def test_totals_that_equal_their_shares_have_no_rows(reduce: Any) -> None:
    said = "a _total without a row is equal to its share"
    torch.manual_seed(0)
    net = nn.LSTM(3, 4)
    with gradlib.record(net, reduce=reduce) as recording:
        net(torch.randn(5, 2, 3, requires_grad=True))[0].sum().backward()
    (call,) = recording
    assert not any("_total" in field for field in fields_of(call))
    assert {f"param_grads['{name}']" for name, _ in net.named_parameters()} < {
        *fields_of(call)
    }
    assert said in str(call).splitlines()
    assert said in str(call.passes[0]).splitlines()
    assert said in call._repr_html_()


def test_totals_that_differ_from_their_shares_have_rows() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(x) + x @ self.layer.weight

    with gradlib.record(model := Twice()) as recording:
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    for printed in (recording["layer"], recording["layer"].passes[0]):
        totals = [it for it in fields_of(printed) if "_total[" in it]
        assert totals == ["grad_input_total[0]", "param_grads_total['weight']"]
    with gradlib.record(model, keep=["grad_input"]) as recording:
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert fields_of(recording["layer"])[:2] == ["grad_input[0]", "grad_input_total[0]"]
    assert "without a row" not in str(recording["layer"])


@pytest.mark.parametrize("blocks", [1, 250])
def test_rows_of_calls_with_one_of_several_passes_are_told_apart(blocks: int) -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(blocks)))

    model = nn.ModuleDict({"generator": layers(), "discriminator": layers()})
    with gradlib.record(model) as recording:
        fake = model["generator"](torch.ones(1, 2))
        model["discriminator"](fake).sum().backward()
        model["discriminator"](fake.detach()).sum().backward()
        model["discriminator"](fake.detach())
    table = recording._table()
    which = {row[0]: row[2] for row in table.rows if not row[0].startswith("...")}
    calls = [(it, str(it.passes[0].backward) if it.passes else "-") for it in recording]
    named = {f"{it.name} ({it.index})".removesuffix(" (0)"): of for it, of in calls}
    assert table.columns[2] == "pass"
    assert which == {name: named[name] for name in which}
    assert which["generator.0"] == "0"
    assert len(which) == min(len(calls), 60)
    assert set(which.values()) <= {"0", "1", "-"}
    assert "<th>pass</th>" in recording._repr_html_()
    assert "pass" not in recording.forwards[0]._table().columns


def test_a_call_with_keywords_only_shows_its_gradients() -> None:
    model = ByKeyword()
    with gradlib.record(model) as recording:
        model(torch.ones(4, 3)).sum().backward()
    pass_ = recording["scale"].passes[0]
    share = pass_.grad_kwargs["x"].norm().item()
    total = recording["first"].grad_output[0].norm().item()
    assert total == pytest.approx(share * 4 / 3)
    assert f"{share:.3g}" in str(recording).splitlines()[4].split()
    frame: Any = recording.to_frame().set_index("name")
    assert frame.loc["scale", "grad_input"] == pytest.approx(share)
    assert frame.loc["scale", "grad_input_total"] == pytest.approx(total)
    lines = {it.get_label(): it for it in recording.plot().axes[0].get_lines()}
    assert share in [pytest.approx(at) for at in points(lines["grad_input"])]
    assert total in [pytest.approx(at) for at in points(lines["grad_input_total"])]


def points(line: Any) -> list[float]:
    return np.asarray(line.get_xdata()).tolist()


def test_a_long_recording_leaves_out_the_middle() -> None:
    model = nn.ReLU()
    with gradlib.record(model) as recording:
        for _ in range(ROWS + 40):
            model(torch.ones(1))
    lines = str(recording).splitlines()
    assert len(lines) == ROWS + 6
    assert "... 40 more rows" in lines
    assert lines[-2] == "recording.to_frame() has every row"
    assert lines[-1] == "recording.forwards[i] prints one forward"


class ManyOutputs(nn.Module):
    def forward(self, x: Tensor, *, flag: bool, mask: Tensor | None) -> list[Tensor]:
        return [x if flag and mask is None else x * 2] * 6


def test_an_output_of_many_tensors_takes_no_more_room() -> None:
    with gradlib.record(model := ManyOutputs()) as recording:
        model(torch.ones(2, requires_grad=True), flag=True, mask=None)
    assert "[2], [2], [2], 3 more " in str(recording)
    frame: Any = recording.to_frame()
    assert ", ".join(["[2]"] * 6) in [*frame.loc[0]]


def test_flags_have_no_row_among_the_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    with gradlib.record(model := ManyOutputs()) as recording:
        torch.stack(model(x, flag=False, mask=x.detach())).sum().backward()
    text = str(recording[""])
    assert "kwargs['flag']       -      False" in text
    assert "grad_kwargs['flag']" not in text
    assert "grad_kwargs['mask']" in text


class Scaled(nn.Module):
    def forward(self, x: Tensor, *, by: float) -> list[Tensor]:
        return [*(x * by).expand(100, -1)]


def test_numbers_have_no_row_among_the_gradients() -> None:
    with gradlib.record(model := Scaled()) as recording:
        torch.stack(model(torch.ones(2, requires_grad=True), by=2.0)).sum().backward()
    assert "grad_kwargs" not in str(recording[""])


def test_a_field_with_many_entries_shows_some() -> None:
    with gradlib.record(model := Scaled()) as recording:
        torch.stack(model(torch.ones(2, requires_grad=True), by=2.0)).sum().backward()
    text = str(recording[""])
    assert "output[19]" in text
    assert "output[20]" not in text
    assert "... 80 more in output" in text
    assert "... 80 more in grad_output" in text


class HoldsParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.ones(2)])
        self.named = nn.ParameterDict({"a": torch.ones(2)})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.many[0] + self.named["a"]


def test_parameters_in_a_list_are_said_to_be_in_no_call() -> None:
    with gradlib.record(model := HoldsParameters()) as recording:
        model(torch.ones(2)).sum().backward()
    assert "no call was seen of many, named: recording[name] says" in str(recording)
    for name, kind in (("many", "ParameterList"), ("named", "ParameterDict")):
        why = f"a {kind} is never called, and its parameters .* read their .grad"
        with pytest.raises(NoSuchCallError, match=why):
            recording[name]


class CallsAtOnce(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_class_with_a_call_of_its_own() -> None:
    model = nn.Sequential(CallsAtOnce(), nn.ReLU())
    x = torch.ones(2, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert [call.name for call in recording] == ["", "1"]
    with pytest.raises(NoSuchCallError, match="CallsAtOnce has a __call__ of its own"):
        recording["0"]
    said = "no call was seen of 0: recording[name] says why"
    assert said in str(recording)
    with gradlib.record(model, modules="1") as asked:  # for no others
        model(x).sum().backward()
    assert "no call was seen" not in str(asked)
    with gradlib.record(model[0]) as recording:
        model[0](x).sum().backward()
    assert said.replace("0", "(root)") in str(recording)
    report = gradlib.hook_report(CallsAtOnce(), x)
    full = report.kinds["register_full_backward_hook"]
    assert (
        full.why
        == "Never called: CallsAtOnce has a __call__ of its own, without hooks."
    )


def test_the_end_of_a_name_finds_whole_names() -> None:
    layers = (nn.Sequential(OrderedDict(q_proj=nn.ReLU())) for _ in range(2))
    with gradlib.record(nn.Sequential(*layers)) as recording:
        pass
    with pytest.raises(NoSuchCallError, match=r'Nearest: "0\.q_proj", "1\.q_proj"\.'):
        recording["q_proj"]


def test_calls_and_passes_print_entry_by_entry(recording: gradlib.Recording) -> None:
    call = recording["last", 1]
    text = str(call)
    assert text.startswith("last, call 1 in forward 1: Linear\nfield")
    assert "param_grads['weight']" in text
    assert str(call.passes[0]).startswith(
        "backward pass 1 of last, call 1 in forward 1"
    )
    assert repr(call) == "<last, call 1 in forward 1>"
    assert "note: args[0] does not require grad" in str(recording["first", 0])


def test_the_gradient_of_a_keyword_has_a_row_where_reduce_makes_numbers() -> None:
    class Doubles(nn.Module):
        def forward(self, *, x: Tensor) -> Tensor:
            return 2 * x

    x = torch.ones(4, requires_grad=True)
    reduce: Any = lambda it: it.norm().item()  # noqa: E731 (one line says it)
    with gradlib.record(model := Doubles(), reduce=reduce) as recording:
        model(x=x).sum().backward()
    assert "grad_kwargs['x']  -      4" in str(recording[""])


def test_html_escapes_what_it_shows() -> None:
    model = nn.Sequential()
    model.add_module("<b>", nn.Linear(1, 1))
    with gradlib.record(model) as recording:
        model(torch.ones(1)).sum().backward()
    html = recording._repr_html_()
    assert "<td>&lt;b&gt;</td>" in html
    assert html.count("<tr>") == 3
    assert "<table>" in recording["<b>"]._repr_html_()


def test_the_plot_shows_each_module_that_works(recording: gradlib.Recording) -> None:
    figure = recording.plot()
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["first", "first (1)", "last"]
    lines = {line.get_label(): line for line in axes.get_lines()}
    grads = [
        recording[key].grad_output[0].norm() for key in (("first", 0), ("last", 0))
    ]
    drawn = np.asarray(lines["grad_output"].get_xdata())[::2].tolist()
    assert drawn == pytest.approx([grad.item() for grad in grads])
    assert axes.get_xscale() == "log"


def test_the_plot_goes_where_it_is_told(recording: gradlib.Recording) -> None:
    figure, axes = plt.subplots()
    assert recording.plot(ax=axes) is figure


def test_the_plot_without_a_backward_pass_says_so() -> None:
    with gradlib.record(model := nn.ReLU()) as recording:
        model(torch.ones(1))
    figure = recording.plot()
    figure.canvas.draw()
    (axes,) = figure.axes
    assert axes.get_title() == "no backward pass was recorded"


def test_calls_go_backwards_too(recording: gradlib.Recording) -> None:
    names = [call.name for call in recording]
    assert [call.name for call in reversed(recording)] == names[::-1]


def test_without_calls_it_says_what_to_do() -> None:
    model = nn.Linear(3, 2)
    loss = model(torch.ones(1, 3)).sum()
    with gradlib.record(model) as recording:
        loss.backward()
    title, *advice = str(recording).split("\n")
    assert title == "Recording: 0 calls, 0 forwards, 0 backward passes"
    assert " ".join(advice).startswith("Call the model inside the block")
    assert "Call the model inside the block" in recording._repr_html_()


def test_without_a_backward_pass_it_says_where_that_belongs() -> None:
    """The backward pass most often runs outside of the block."""
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    advice = "call backward() there too"
    with gradlib.record(model) as recording:
        loss = model(x).sum()
    loss.backward()
    assert advice in " ".join(str(recording).split())
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert advice not in " ".join(str(recording).split())


def test_where_no_backward_pass_can_come_the_table_asks_for_none() -> None:
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    with gradlib.record(model) as recording, torch.no_grad():
        model(x)
    assert "backward()" not in str(recording)
    with gradlib.record(model, keep=["output"]) as recording:
        model(x)
    assert "backward()" not in str(recording)
    with gradlib.record(model) as recording:  # the pass ran, but was not recorded
        vectors = torch.ones(5, 1, 2)
        torch.autograd.grad(model(x), model.bias, vectors, is_grads_batched=True)
    assert "backward()" not in str(recording)


def test_where_no_gradient_was_kept_no_passes_are_counted() -> None:
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    with gradlib.record(model, keep=["args", "output"]) as recording:
        model(x).sum().backward()
    assert str(recording).startswith("Recording: 1 call, 1 forward\n")
    assert repr(recording) == "<Recording: 1 call, 1 forward>"
    assert "gradients" not in str(recording)


def test_calls_with_integers_print() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    with gradlib.record(model) as recording:
        model(torch.tensor([1, 2])).sum().backward()
    assert "args[0]" in str(recording[""])
    assert "param_grads['weight']" in str(recording[""])


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf")])
def test_the_plot_of_gradients_without_a_size(factor: float) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with gradlib.record(model) as recording:
        (factor * model(torch.ones(1, 2))).sum().backward()
    figure = recording.plot()
    figure.canvas.draw()
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert ("nan or inf" in labels) == (factor != 0)


def test_a_plot_of_many_modules_stays_within_bounds() -> None:
    model = nn.Sequential(*[nn.Tanh() for _ in range(250)])
    with gradlib.record(model) as recording:
        model(torch.ones(1, requires_grad=True)).backward()
    figure = recording.plot()
    figure.canvas.draw()
    assert figure.get_size_inches()[1] < 40
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[:2] == ["0", "3"]


def test_the_order_of_calls_that_threads_made_at_once() -> None:
    """They are listed one after the other, each with the calls inside it."""
    block = Block(frozenset(), {})
    calls: list[CallTrace] = []
    for moment, (name, caller) in enumerate(
        [("root", -1), ("a", 0), ("b", 0), ("a.in", 1), ("b.in", 2), ("next", -1)]
    ):
        call = CallTrace(block, name, 0, "", moment)
        call.caller = caller
        calls.append(call)
    found = [(call.name, begins) for call, begins in steps(calls)]
    a, b = ("a", "a.in", "a.in", "a"), ("b", "b.in", "b.in", "b")
    assert [name for name, _ in found] == ["root", *a, *b, "root", "next", "next"]
    assert [begins for _, begins in found[1:5]] == [True, True, False, False]


READS: dict[str, Callable[[gradlib.Recording], object]] = {
    "names": lambda it: [it["0", i] for i in range(len(it.calls("0")))],
    "forwards": lambda it: [it.forwards[i]["0"] for i in range(len(it.forwards))],
    "gradients": lambda it: [(c.grad_input, c.param_grads_total) for c in it],
    "first_nonfinite": lambda it: it.first_nonfinite(),
    "compare": lambda it: it.compare(it),
    "verify": lambda it: it.verify(),
    "print": str,
    "to_frame": lambda it: it.to_frame(),
}


@pytest.mark.parametrize("name", READS)
def test_a_recording_of_twice_the_steps_is_read_in_twice_the_work(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    READS[name](_steps(model, 2))  # what is imported then is not counted
    few, many = _steps(model, 40), _steps(model, 80)
    assert python_steps(lambda: READS[name](many)) < 2.2 * python_steps(
        lambda: READS[name](few)
    )


def test_who_reads_after_each_step_pays_for_that_step() -> None:
    model, x, costs = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.ones(2, 3), []
    with gradlib.record(model) as recording:
        for step in range(40):
            model(x).sum().backward()

            def read(step: int = step) -> None:
                assert recording.forwards[step]["1"].index == step
                assert recording["0", step].forward == step
                assert "1" in recording

            costs.append(python_steps(read))
    assert sum(costs[20:]) <= 1.02 * sum(costs[1:21])


def test_only_the_rows_that_are_printed_are_made() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    few, many = _steps(model, 40), _steps(model, 80)
    str(few)  # what is imported then is not counted
    assert python_steps(lambda: str(many)) < 1.5 * python_steps(lambda: str(few))


class Tokens(nn.Module):
    def forward(self, x: Tensor, tokens: list[int]) -> Tensor:
        return x * len(tokens)


def test_a_call_with_twice_the_arguments_is_printed_in_twice_the_work() -> None:
    model, x = Tokens(), torch.ones(3, requires_grad=True)
    with gradlib.record(model) as recording:
        for count in 200, 400:
            model(x, [*range(count)]).sum().backward()
    few, many = recording
    str(few)  # what is imported then is not counted
    assert python_steps(lambda: str(many)) < 2.2 * python_steps(lambda: str(few))


def _steps(model: nn.Module, count: int) -> gradlib.Recording:
    with gradlib.record(model) as recording:
        for _ in range(count):
            model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    return recording


def _pickled(it: Any) -> Any:
    return pickle.loads(pickle.dumps(it))


@pytest.mark.parametrize("again", [_pickled, copy.deepcopy])
def test_a_recording_of_a_model_is_saved_and_not_pickled(
    recording: gradlib.Recording, again: Callable[[Any], Any]
) -> None:
    call = recording["", 0]
    for it in (recording, call, call.passes[0]):
        with pytest.raises(gradlib.NotStorableError, match=r"recording\.save\(path\)"):
            again(it)


@pytest.mark.parametrize("again", [_pickled, copy.deepcopy])
def test_a_recording_without_its_model_can_be_pickled(
    tmp_path: Any, recording: gradlib.Recording, again: Callable[[Any], Any]
) -> None:
    recording.save(tmp_path / "a.safetensors")
    loaded = gradlib.load_recording(tmp_path / "a.safetensors")
    assert str(again(loaded)) == str(recording)
    assert again(loaded).compare(recording).ok


@dataclass
class Scored:
    """A named tuple that a model returns."""

    scores: Tensor


def test_a_loaded_recording_is_pickled_with_the_classes_it_names(
    tmp_path: Path,
) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Scored(2 * x), x.max(1)

    with gradlib.record(model := Model()) as recording:
        model(torch.ones(2, 3))
    recording.save(tmp_path / "it.safetensors")
    loaded = gradlib.load_recording(tmp_path / "it.safetensors")
    for again in _pickled, copy.copy, copy.deepcopy:
        assert again(loaded).compare(recording).ok
    # Another process has none of these classes.
    (tmp_path / "it.pickle").write_bytes(pickle.dumps(loaded))
    program = (
        "import pickle, sys\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    call = pickle.load(file)['']\n"
        "scored, most = call.output\n"
        "print(scored.scores.tolist(), most.indices.tolist())"
    )
    path = str(tmp_path / "it.pickle")
    run = subprocess.run(
        [sys.executable, "-c", program, path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]] [0, 0]\n"


@dataclass
class Heads(dict[str, Any]):
    """A dict class with fields, which are no keys."""

    first: Any = None
    second: Any = None


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_tensors_in_attributes_of_a_dict_are_kept_and_saved(
    tmp_path: Path, reduce: Any
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            y = self.inner(x)
            output = Heads(y, y.sin())
            output["third"] = y.cos()
            return output

    with gradlib.record(model := Model(), reduce=reduce) as recording:
        output = model(torch.ones(2, 3))
        (output.second + output["third"]).sum().backward()
    recording.save(tmp_path / "it.safetensors")
    loaded = gradlib.load_recording(tmp_path / "it.safetensors")
    said = "gave no gradient to output.first from outside of this call"
    for call in recording[""], loaded[""]:
        assert said in call.note
        assert call.output.second.shape == call.output["third"].shape == (2, 3)
        gradient = call.grad_output
        assert gradient.first is None
        assert gradient.second.shape == (2, 3)
    assert str(loaded) == str(recording)
    assert loaded.compare(recording).ok
    assert loaded[""].grad_output.keys() == {"third"}
    if reduce is None:
        assert not recording[""].output.second.requires_grad
        assert recording.verify(numerical=True).ok
        assert _pickled(loaded)[""].output.second.equal(output.second.cpu())


def test_a_call_is_the_same_however_one_asks_for_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with gradlib.record(model) as recording, gradlib.record(model) as other:
        for _ in range(2):
            model(torch.ones(1, 2))
    call = recording["0", 1]
    assert call == recording.forwards[1]["0"] == recording.calls("0")[1]
    assert call in recording
    assert call in [*recording]
    assert len({call, recording["0", 1], recording["0", 0]}) == 2
    assert call != recording["0", 0]
    assert call not in other
    assert call != "0"
    assert ("0", 1) in recording
    for absent in ("0", 2), ("1", 0), ("0", None), ("0", 1, 2), (0, "0"), "1", 0:
        assert absent not in recording


def test_an_integer_beyond_all_floats_prints() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, number: int) -> Tensor:
            del number
            return 2 * x

    with gradlib.record(model := Model()) as recording:
        model(torch.ones(2), 10**400)
    assert "1.00e+400" in str(recording[""])


def test_a_duration_is_no_number() -> None:
    class Takes(nn.Module):
        def forward(self, x: Tensor, duration: Any) -> Tensor:
            return x * float(duration / np.timedelta64(1, "s"))

    with gradlib.record(model := Takes()) as recording:
        model(torch.ones(3), np.timedelta64(2, "s"))
    assert "args[1]  -      -" in str(recording[""])


@pytest.mark.parametrize(
    ("reduce", "said"),
    [
        (None, "output: shape; gradients: norm over all entries,"),
        (gradlib.tensor_stats, "output: shape; gradients: norm over all entries,"),
        (
            lambda tensor: gradlib.tensor_stats(tensor),
            "output: shape; gradients: norm over all entries,",
        ),
        (
            lambda tensor: tensor.min(),
            "output: shape of what reduce gave; gradients: norm over all entries of "
            "what reduce gave,",
        ),
        (
            lambda tensor: tensor.min().item(),
            "output: shape of what reduce gave; gradients: what reduce gave,",
        ),
    ],
    ids=["none", "statistics", "called statistics", "tensors", "numbers"],
)
def test_what_was_reduced_is_called_so(reduce: Any, said: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with gradlib.record(model, reduce=reduce) as recording:
        model(torch.randn(4, 3)).sum().backward()
    assert said in " ".join(str(recording).split())
    recording.save(tmp_path / "run")
    loaded = gradlib.load_recording(tmp_path / "run")
    assert str(loaded) == str(recording)
    if reduce is not None:
        with pytest.raises(gradlib.NotKeptError, match="counts the entries"):
            loaded.plot("histogram")


def test_the_table_of_deep_modules_fits_into_100_columns() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    x = torch.randn(2, 3, 8)
    with gradlib.record(model) as recording:
        model(x, x).sum().backward()
    lines = str(recording).splitlines()
    assert max(map(len, lines)) <= 100
    assert "decoder.layers.0.multihead_attn" in lines


def test_what_is_printed_of_a_dict_has_its_order() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.layer(x)
            return {"y": y, "mean": y.mean()}

    model = Both()
    with gradlib.record(model) as recording:
        model(torch.ones(4, 3))["mean"].backward()
    lines = str(recording[""]).splitlines() + str(recording["layer"]).splitlines()
    shown = [line.split("  ")[0] for line in lines]
    assert shown.index("output['y']") < shown.index("output['mean']")
    names = ["param_grads['weight']", "param_grads['bias']"]
    assert [it for it in shown if it in names] == names
    assert "[4, 2], []" in str(recording)

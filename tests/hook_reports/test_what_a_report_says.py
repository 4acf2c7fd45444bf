"""A report says why a hook gets that many entries, or none, and what goes wrong."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradlib
from gradlib.hook_reports.hooks import FULL, FULL_PRE, LEGACY, SEVERAL, TENSOR

from ..steps import python_steps
from .reported import Does, Of, given, report_of, whats


def test_what_requires_grad_is_further_inside() -> None:
    kinds = report_of(Of(lambda x: (x.detach(), [x * 2])), given(3)).kinds
    for kind in (FULL, FULL_PRE):
        assert kinds[kind].entries == ()
        assert kinds[kind].why.endswith(
            "no tensor that requires grad is at the top level."
        )
    (entry,) = kinds[TENSOR].entries
    assert entry.place == "grad of output[1][0]"


def test_inplace() -> None:
    report = report_of(nn.ReLU(inplace=True), given(3, 4).clone())
    kinds = report.kinds
    assert (report.last_node, report.last_node_inputs) == ("ReluBackward0", ("input",))
    assert whats(kinds[LEGACY]) == {
        "grad_input[0]": "gradient of input",
        "grad_output[0]": "gradient of output",
    }
    assert whats(kinds[TENSOR]) == {"grad of output": "gradient of output"}
    for kind in (FULL, FULL_PRE):
        assert kinds[kind].entries == ()
        assert kinds[kind].why.startswith(
            "Never called: with this hook there is an err"
        )
        assert kinds[kind].error.startswith(
            "RuntimeError: Output 0 of BackwardHookFunc"
        )
        assert "is a view and is being modified inplace" in kinds[kind].error
        assert "RuntimeError: Output 0 of BackwardHookFunc" in str(kinds[kind])


def test_data_that_the_module_overwrites() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            x += self.bias
            return x

    report = report_of(Shifted(), torch.ones(4, 3))
    assert whats(report.kinds[LEGACY]) == {
        "grad_input[0]": "None: input 0 of AddBackward0 needs no gradient",
        "grad_input[1]": "gradient of bias",
        "grad_output[0]": "gradient of output",
    }


def test_a_report_begins_with_the_last_node_and_its_inputs() -> None:
    report = report_of(nn.Linear(3, 2), given(4, 3))
    inputs = ", ".join(report.last_node_inputs)
    title = f"Linear, last autograd node: AddmmBackward0({inputs})"
    assert str(report).splitlines()[0] == title


def test_an_entry_prints() -> None:
    (entry,) = report_of(nn.ReLU(), given(4, 3)).kinds[FULL].grad_input
    assert str(entry).splitlines() == [
        "HookEntry",
        "entry          shape   what it is",
        "grad_input[0]  [4, 3]  gradient of input",
    ]


def test_dict_output() -> None:
    module = Of(lambda f, x: {"a": f(x), "b": x * 2}, nn.Linear(3, 2))
    kinds = report_of(module, given(4, 3)).kinds
    for kind in (FULL, FULL_PRE):
        assert kinds[kind].entries == ()
        assert "the output is of type dict" in kinds[kind].why
        (warning,) = kinds[kind].warnings
        assert warning.startswith(
            "UserWarning: For backward hooks to be called, module"
        )
    assert whats(kinds[TENSOR])["grad of output['b']"] == "gradient of output['b']"
    assert kinds[LEGACY].grad_output[0].what == "gradient of output['a']"


def test_what_stands_in_a_dict_is_named_in_its_own_order() -> None:
    def forward(x: Tensor, **scaled: Tensor) -> dict[str, Tensor]:
        return {"z": x * scaled["by"], "a": x * scaled["and_by"]}

    module = Of(forward)
    report = gradlib.hook_report(module, given(2), by=given(2), and_by=given(2))
    outputs = whats(report.kinds[TENSOR])
    assert [*outputs] == ["grad of output['z']", "grad of output['a']"]
    grads = whats(report.kinds[SEVERAL]).values()
    assert [*grads] == [f"gradient of {name}" for name in ("args[0]", "by", "and_by")]


def test_a_dict_whose_first_value_is_no_tensor() -> None:
    module = Of(lambda f, x: {"count": 4, "y": f(x)}, nn.Linear(3, 2))
    report = report_of(module, given(4, 3))
    assert report.last_node == "AddmmBackward0"
    assert report.kinds[LEGACY].grad_output[0].what == "gradient of output['y']"


def test_what_the_module_warns_of_itself_is_no_warning_of_a_hook() -> None:
    module, args = nn.MSELoss(), (given(3), torch.randn(1, 3))
    kinds = report_of(module, *args).kinds
    assert kinds[TENSOR].warnings == ()
    with pytest.warns(UserWarning, match="broadcasting"):
        module(*args)


def test_a_kind_is_printed_as_a_table() -> None:
    name, head, *rows = str(
        report_of(nn.Linear(3, 2), given(4, 3)).kinds[FULL]
    ).splitlines()
    assert name == FULL
    assert head.split() == ["entry", "shape", "what", "it", "is"]
    assert rows[0].split(maxsplit=3) == [
        "grad_input[0]",
        "[4,",
        "3]",
        "gradient of input",
    ]
    nothing = str(report_of(nn.ReLU(), torch.randn(3)).kinds[FULL])
    assert "entry" not in nothing


def test_the_legacy_hook_warns() -> None:
    (warning,) = report_of(nn.Linear(3, 2), given(4, 3)).kinds[LEGACY].warnings
    assert warning.startswith("FutureWarning: Using a non-full backward hook when the")


def test_a_first_layer_has_no_gradient_of_its_input() -> None:
    kinds = report_of(nn.Linear(3, 2), torch.randn(4, 3)).kinds
    (entry,) = kinds[FULL].grad_input
    assert (entry.value, entry.what) == (None, "None: input does not require grad")
    assert "None of these is a tensor that requires grad" in kinds[FULL].why
    assert (
        kinds[FULL].warnings[0].startswith("UserWarning: Full backward hook is firing")
    )


def test_nothing_requires_grad() -> None:
    module = nn.Linear(3, 2)
    reports = [report_of(nn.ReLU(), torch.randn(3))]
    with torch.no_grad():
        reports.append(report_of(module, given(4, 3)))
    for report, end in zip(reports, ("grad.", "gradients are disabled."), strict=True):
        assert report.last_node == ""
        assert "last autograd node: none" in str(report)
        for kind in report.kinds.values():
            assert kind.entries == ()
            assert kind.why.startswith("Never called: no output requires grad")
            assert kind.why.endswith(end)


def test_a_module_that_returns_its_input() -> None:
    x = given(3)
    leaf = report_of(nn.Identity(), x)
    assert leaf.last_node == ""
    assert "has no autograd node" in leaf.kinds[LEGACY].why
    made = report_of(nn.Identity(), x * given(3))
    assert made.last_node == "MulBackward0"
    assert "node that made input, MulBackward0" in made.kinds[LEGACY].why
    assert "it receives 2 entries" in made.kinds[LEGACY].why
    assert made.kinds[FULL].grad_input[0].what == "gradient of input"
    assert made.kinds[FULL].grad_output[0].what == "gradient of output"


def test_a_str_as_first_output_would_hang() -> None:
    report = report_of(Of(lambda x: ("text", x.exp())), given(3))
    assert report.kinds[LEGACY].why.startswith("Not tried")
    assert report.kinds[FULL].grad_output[1].what == "gradient of output[1]"


def test_what_would_change_the_length_was_tried() -> None:
    linear, x = nn.Linear(3, 2), given(4, 3)
    why = report_of(linear, x).kinds[LEGACY].why
    found = re.findall(r"([A-Z][a-z ]+): (\d), for (\w+)\.", why)
    assert [words for words, _, _ in found] == [
        "Without bias",
        "With one more leading dimension",
    ]
    nodes = [F.linear(x, linear.weight).grad_fn, linear(x.unsqueeze(0)).grad_fn]
    for (_, count, name), node in zip(found, nodes, strict=True):
        assert node is not None
        assert (int(count), name) == (len(node.next_functions), node.name())
    assert why.startswith(
        "3 entries in grad_input: one for each input of AddmmBackward0"
    )


def test_the_mode_may_change_it() -> None:
    why = report_of(nn.Dropout(), given(3)).kinds[LEGACY].why
    assert why.endswith("In eval mode: never called.")

    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x if self.training else x.exp()

    why = report_of(Squares().eval(), given(3)).kinds[LEGACY].why
    assert why.endswith("In training mode: 2, for MulBackward0.")


@pytest.mark.parametrize("output", [None, 3.0, (), {"boxes": [1]}])
def test_what_is_changed_may_end_in_an_error(output: Any) -> None:
    class InTraining(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 2 if self.training else output

    why = report_of(InTraining(), given(3)).kinds[LEGACY].why
    said = "In eval mode: an error, as torch looks for a tensor in the output and finds"
    assert said in why
    module = InTraining().eval()
    module.register_backward_hook(lambda *_: None)
    with pytest.raises((TypeError, IndexError, StopIteration, KeyError)):
        module(given(3))


def test_what_is_changed_may_have_torch_look_for_ever() -> None:
    class InTraining(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 2 if self.training else "abc"

    why = report_of(InTraining(), given(3)).kinds[LEGACY].why
    assert "In eval mode: torch looks for a tensor in the output for ever." in why


def test_an_error_without_words() -> None:
    report = report_of(Of(lambda x: {"first": 1, "second": {"x": x * 2}}), given(3))
    assert report.kinds[LEGACY].error == "StopIteration"


def test_a_node_has_one_name_everywhere() -> None:
    def copied(x: Tensor) -> Tensor:
        made = torch.empty(3)
        return made.copy_(x)

    report = report_of(Of(copied), given(3))
    assert report.last_node == "CopyBackwards"
    assert "torch::autograd" not in str(report)


def test_where_nothing_tried_changes_it_only_the_rule_is_said() -> None:
    why = report_of(nn.Conv2d(2, 3, 3), given(2, 2, 5, 5)).kinds[LEGACY].why
    assert why.endswith("Another last operation may give another length.")


def test_the_results_have_short_names() -> None:
    report = report_of(nn.Linear(3, 2), given(4, 3))
    assert repr(report) == "<HookReport: Linear>"
    assert repr(report.kinds[FULL]) == "<HookKind: register_full_backward_hook>"


def test_the_node_of_an_argument_that_is_returned() -> None:
    x = torch.randn(3, requires_grad=True) * 1
    kinds = gradlib.hook_report(nn.Identity(), x).kinds
    for kind, field in (
        ("Node.register_hook", "input"),
        ("Node.register_prehook", "output"),
    ):
        assert kinds[kind].why == (
            "The module returns input itself, so the node is MulBackward0, which made "
            "input outside the module: there the hook receives one entry for each "
            f"{field} of MulBackward0. In the copy a stand-in has 1."
        )


def legacy_length(module: nn.Module, x: Tensor) -> int:
    """Return how many entries the old hook gets in truth."""
    found: list[int] = []
    handle: Any = module.register_backward_hook(lambda _m, g, _o: found.append(len(g)))
    module(x).sum().backward(retain_graph=True)
    handle.remove()
    return found[0]


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_what_would_change_the_length_of_a_module_that_returns_its_input() -> None:
    x = given(4, 3)
    long = torch.addcmul(x, x, x)  # three entries
    why = report_of(nn.Dropout(), long).kinds[LEGACY].why
    assert f"In eval mode: {legacy_length(nn.Dropout().eval(), long)}, for " in why
    assert "3, for AddcmulBackward0" in why


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("overwrites", [True, False])
def test_a_module_that_has_kept_what_it_is_given(overwrites: bool) -> None:
    module = Does(lambda _self, x: x.relu_() if overwrites else x)
    x = given(4, 3)
    module.x = y = x * 2
    report = report_of(module, y)
    assert not report.kinds[LEGACY].error
    if overwrites:
        assert len(report.kinds[LEGACY].grad_input) == legacy_length(module, y) == 1
    else:
        why = report.kinds[LEGACY].why
        assert f"receives {legacy_length(module, y)} entries" in why


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_a_module_that_returns_what_it_has_kept() -> None:
    x = given(4, 3)
    module = Does(lambda self, _x: self.kept, kept=x * 2)
    why = report_of(module, x).kinds[LEGACY].why
    assert "returns kept itself" in why
    assert f"{legacy_length(module, x)} entries" in why
    # And what it computes from that has a name.
    module = Does(lambda self, x: x * self.kept, kept=x * 2)
    assert "gradient of kept" in whats(report_of(module, x).kinds[LEGACY]).values()


def test_an_empty_str_before_the_output() -> None:
    report = report_of(Of(lambda x: ("", x * 2)), given(3))
    assert "IndexError" in report.kinds[LEGACY].error


@pytest.mark.filterwarnings("ignore:Using non-full backward hooks")
def test_the_first_tensor_in_an_object_that_is_not_opened() -> None:
    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def __getitem__(self, place: int) -> Tensor:
            return self.tensor

    def run(x: Tensor) -> Any:
        h = x * 2
        return Box(h), h + 3, h + 4

    why = report_of(Of(run), given(3)).kinds[LEGACY].why
    assert "MulBackward0, the node of the first tensor in the output" in why


def test_twice_the_arguments_are_named_in_twice_the_work() -> None:
    module, x = Of(lambda x, tokens: x * len(tokens)), given(3)

    def spent(count: int) -> int:
        return python_steps(lambda: gradlib.hook_report(module, x, [*range(count)]))

    spent(1)  # what is imported then is not counted
    assert spent(400) - spent(200) < 2.2 * (spent(200) - spent(100))


def test_another_kind_is_told_which_kinds_there_are() -> None:
    kinds = gradlib.hook_report(nn.Linear(2, 1), torch.ones(1, 2)).kinds
    with pytest.raises(gradlib.UnknownKindError) as caught:
        kinds["register_hook"]
    assert isinstance(caught.value, LookupError)
    assert all(f'"{name}"' in str(caught.value) for name in kinds)
    assert "register_hook" not in kinds
    assert kinds.get("register_hook") is None

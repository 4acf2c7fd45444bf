"""What hooks got in each build: the tool, and the recordings it made."""

import inspect
import json
import re
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradlib
from gradlib.tree import Tree

from .tools import DATA, load, printed_alone

FOLDER = DATA / "hooks"
FILES = sorted(FOLDER.rglob("*.json"))
TODAY = torch.__version__.split("+")[0]


tool: Any = load("record_hooks")
without_python = load("check_versions").without_python


@cache
def recording(version: str) -> dict[str, Any]:
    path = FOLDER / f"{version}.json"
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the tool prints: one file, with nothing beside it."""
    return printed_alone("record_hooks", tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def today_cases(today: str) -> dict[str, Any]:
    """The cases of what the tool prints."""
    return json.loads(today)["cases"]


# ---- The tool.


def test_today_is_as_committed(today: str) -> None:
    committed = FOLDER / f"{TODAY}.json"
    if not committed.exists():
        pytest.skip(f"no recording of torch {TODAY} is committed")
    text = committed.read_text(encoding="utf-8")
    assert without_python(today) == without_python(text)
    assert without_python(today) != today


def test_it_writes_what_it_else_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tool, "recording_of", lambda device: {"device": device})
    out = tmp_path / "out.json"
    for arguments in [[], ["--device", "cpu", str(out)]]:
        monkeypatch.setattr(sys, "argv", ["record_hooks.py", *arguments])
        tool.main()
    assert out.read_text() == capsys.readouterr().out == '{\n "device": "cpu"\n}\n'


def test_it_refuses_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["record_hooks.py", "--device", "cuda"])
    with pytest.raises(SystemExit):
        tool.main()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bad (f at /pytorch/a.cpp:31)\nframe #0: x", "RuntimeError: bad"),
        (
            "old. (Triggered internally at ../torch/csrc/a.cpp:9.)",
            "RuntimeError: old.",
        ),
        ("<object at 0x7f1e>", "RuntimeError: <object at 0x...>"),
        ("returned (got 1, but expected 3)", None),
    ],
)
def test_texts_lose_what_differs_between_machines(text: str, said: str | None) -> None:
    expected = f"RuntimeError: {text}" if said is None else said
    assert tool.said(RuntimeError, text) == expected


def test_labels_name_forms_the_simplest_first() -> None:
    x = torch.arange(1.0, 7).reshape(2, 3).double()
    column = torch.tensor([[7.0], [9.0]]).double()
    known = {"x": x, "again": x.clone(), "column": column, "zeros": x * 0}
    forms = [
        (x, ["x", "again"]),
        (x.t(), ["T(x)", "T(again)"]),
        (x.reshape(3, 2), ["reshape(x)", "reshape(again)"]),
        (column.t(), ["T(column)"]),
        (column[:, 0], ["reshape(column)"]),
        (column.expand(2, 4), ["expand(column)"]),
        (x.sum(0), ["sum(x)", "sum(again)"]),
        (x.sum(), ["sum(x)", "sum(again)"]),
        (x + 0.1, []),
        (torch.zeros(2, 3).double(), []),
    ]
    for value, labels in forms:
        assert tool.labels(value, known) == labels


def test_what_a_module_warns_of_itself_is_left_out() -> None:
    def doubled(x: Tensor) -> Tensor:
        warnings.warn("its own", stacklevel=1)
        return x * 2

    one = tool.case(lambda: tool.Computes(doubled), tool.grad(2, 3))
    (warned,) = tool.recorded(one, "cpu")["legacy"]["warnings"]
    assert "non-full backward hook" in warned


def test_the_order_of_labels() -> None:
    labels = ["out0", "weight", "kwarg:scale", "arg1", "output.bias", "arg0"]
    ranked = sorted(labels, key=lambda label: (tool.rank(label), label))
    assert ranked == ["arg0", "arg1", "kwarg:scale", "output.bias", "weight", "out0"]


def test_values_are_drawn_apart() -> None:
    drawn = tool.values("a", 1000)
    assert torch.equal(drawn, tool.values("a", 1000))
    assert len(set(drawn.tolist())) > 990
    assert not set(drawn.tolist()) & set(tool.values("b", 1000).tolist())
    assert drawn.min() < -0.9
    assert drawn.max() > 0.9


# ---- The committed files.

NAMES = """
    linear-2d linear-2d-no-bias linear-2d-data-input linear-2d-frozen linear-1d
    linear-3d linear-3d-no-bias linear-4d thread-fc1 thread-fc2 thread-fc3 thread-linear
    thread-conv thread-conv-no-bias conv1d conv2d conv2d-no-bias conv2d-data-input
    conv3d convtranspose2d conv-then-bias-add linear-expanded-bias batchnorm1d
    batchnorm2d layernorm embedding relu relu-inplace linear-relu-inplace dropout-train
    dropout-eval maxpool2d avgpool2d softmax bilinear lstm gru lstmcell
    multiheadattention transformerencoderlayer sequential-linear-relu
    sequential-linear-linear crossentropyloss mseloss two-inputs-add two-inputs-mul
    two-outputs dict-output nested-output keyword-tensor identity unused-output
"""  # links are made of them
VERSIONS = "1.0.1 1.2.0 1.4.0 1.5.1 1.7.0 1.7.1 1.8.1 1.9.1 1.11.0 1.12.1 2.13.0"
NAME = r"(arg\d+|kwarg:\w+|out\d+|[A-Za-z_]\w*(\.\w+)*|\d+(\.\w+)+)"
LABEL = re.compile(rf"{NAME}|(T|sum|reshape|expand)\({NAME}\)")


def wrong_entries(entries: list[Any]) -> list[Any]:
    return [it for it in entries if it.keys() != {"shape", "is"} or wrong_entry(**it)]


def wrong_entry(shape: list[int] | None, **labels: list[str]) -> bool:
    if shape is None:
        return labels["is"] != []
    sizes = all(isinstance(size, int) for size in shape)
    return not (sizes and all(map(LABEL.fullmatch, labels["is"])))


def wrong_texts(texts: list[str]) -> list[str]:
    return [
        text
        for text in texts
        if not re.match(r"\w+: \S", text) or re.search(r"\.(cpp|py|h):\d|frame #", text)
    ]


def test_every_version_and_every_case_is_there() -> None:
    committed = {path.stem for path in FOLDER.glob("*.json")}
    assert set(VERSIONS.split()) <= committed
    assert set(NAMES.split()) <= tool.CASES.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_fit_the_schema(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    whole = json.loads(text)
    assert text == json.dumps(whole, indent=1, sort_keys=True) + "\n"
    assert whole.keys() == {"torch", "python", "device", "cases"}
    assert whole["torch"] == path.stem
    assert re.fullmatch(r"3\.\d+", whole["python"])
    assert whole["device"] == ("cuda" if path.parent.name == "cuda" else "cpu")
    assert whole["cases"].keys() == tool.CASES.keys()
    for case in whole["cases"].values():
        assert case.keys() == {"legacy", "full", "full_pre", "last_node"}
        assert case["last_node"].keys() == {"name", "inputs"}
        for kind in tool.KINDS:
            if case[kind] != {"absent": True}:
                check_kind(kind, case[kind])


def check_kind(kind: str, got: dict[str, Any]) -> None:
    assert got.keys() == {"calls", "warnings", "error"}
    assert not wrong_texts([*got["warnings"], *filter(None, [got["error"]])])
    for call in got["calls"]:
        assert call.keys() == {"grad_input", "grad_output"}
        assert (call["grad_input"] is None) == (kind == "full_pre")
        assert not wrong_entries([*(call["grad_input"] or []), *call["grad_output"]])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kinds_are_absent_from_all_cases_or_none(path: Path) -> None:
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"].values()
    release = tuple(map(int, path.stem.split(".")))
    since = {"legacy": (1, 0), "full": (1, 8), "full_pre": (2, 0)}
    for kind, first in since.items():
        absent = {case[kind] == {"absent": True} for case in cases}
        assert absent == {release < first}, kind


# ---- What is in them, where it is known by hand.


def grad_input(cases: dict[str, Any], name: str, kind: str) -> list[list[str] | None]:
    """Return the labels of each entry, or ``None`` for a missing gradient."""
    (call,) = cases[name][kind]["calls"]
    return [
        None if entry["shape"] is None else entry["is"] for entry in call["grad_input"]
    ]


def test_known_by_hand_today(today_cases: dict[str, Any]) -> None:
    linear = today_cases["linear-2d"]
    assert grad_input(today_cases, "linear-2d", "legacy") == [
        ["bias"],
        ["arg0"],
        ["T(weight)"],
    ]
    (call,) = linear["legacy"]["calls"]
    assert [entry["shape"] for entry in call["grad_input"]] == [[30], [4, 20], [20, 30]]
    assert call["grad_output"] == [{"shape": [4, 30], "is": ["out0"]}]
    assert grad_input(today_cases, "linear-2d", "full") == [["arg0"]]
    assert linear["full_pre"]["calls"] == [
        {"grad_input": None, "grad_output": call["grad_output"]}
    ]
    assert grad_input(today_cases, "linear-2d-frozen", "legacy") == [
        None,
        ["arg0"],
        None,
    ]
    assert grad_input(today_cases, "keyword-tensor", "legacy") == [
        ["arg0"],
        ["kwarg:scale"],
    ]
    assert grad_input(today_cases, "keyword-tensor", "full") == [["arg0"]]
    assert grad_input(today_cases, "two-inputs-mul-first-data", "full") == [
        [],  # zeros
        ["arg1"],
    ]
    assert today_cases["dropout-eval"]["last_node"] == {"name": None, "inputs": []}
    assert today_cases["dropout-eval"]["legacy"]["calls"] == []
    assert today_cases["relu-inplace"]["full"]["error"].startswith("RuntimeError: ")
    assert today_cases["unused-output"]["legacy"]["calls"] == []


def test_known_by_hand_of_old_builds() -> None:
    for version in ("1.0.1", "1.2.0", "1.7.1"):
        cases = recording(version)["cases"]
        assert grad_input(cases, "thread-fc2", "legacy") == [
            ["bias"],
            ["arg0"],
            ["T(weight)"],
        ]
        assert grad_input(cases, "linear-expanded-bias", "legacy") == [
            ["out0"],
            ["arg0"],
            ["T(weight)"],
        ]
        assert grad_input(cases, "relu-inplace", "legacy") == [["arg0"]]
    missing = recording("1.0.1")["cases"]["multiheadattention"]["legacy"]
    assert missing["calls"] == []
    assert re.match("AttributeError: .*MultiheadAttention", missing["error"])


# ---- Against hook_report, which finds out the same in another way.

FORMS = {
    "transposed": "T",
    "reshaped": "reshape",
    "expanded": "expand",
    "summed": "sum",
}
UNSUMMED = "before it is summed"
# A hook inside is not hook_report's subject, and it gives every output a gradient.
COMPARED = [
    name
    for name, one in tool.CASES.items()
    if not one.hooked and one.used is None and name != "identity"
]


def labels_by_word(
    module: torch.nn.Module, args: list[Tensor], kwargs: dict[str, Tensor]
) -> dict[str, str]:
    """Return the tool's label for what hook_report calls a tensor."""
    output = Tree.of(module(*args, **kwargs))
    parameters = inspect.signature(module.forward).parameters.values()
    named = [it.name for it in parameters if it.kind is it.POSITIONAL_OR_KEYWORD]
    words = {name: name for name, _ in module.named_parameters()}
    words |= {name: f"kwarg:{name}" for name in kwargs}
    for i, _ in enumerate(args):
        words[named[i] if i < len(named) else f"args[{i}]"] = f"arg{i}"
    for i, _ in enumerate(output.leaves):
        words[f"output{output.path(i)}"] = f"out{i}"
    return words


def labels_of(what: str, words: dict[str, str]) -> set[str]:
    """Return the labels that the words of an entry come to.

    An inner tensor's has none, but for one that is equal to an output's.
    """
    found: set[str] = set()
    if what.startswith("gradient of an inner tensor"):
        _, is_equal, same = what.partition(", equal to that of ")
        what = f"gradient of {same}" if is_equal else ""
    if what.startswith("gradient of "):
        for part in what.removeprefix("gradient of ").split(" and of "):
            name, _, form = part.partition(", ")
            if name in words and form != UNSUMMED:
                label = words[name]
                found.add(f"{FORMS[form]}({label})" if form else label)
    return found


def agrees(what: str, words: dict[str, str], known: set[str]) -> bool:
    """Tell whether the words of an entry are among the tool's labels for its value.

    The tool gives all that are equal, and the words which of them it is: it may be one
    for which there is no label.
    """
    found = labels_of(what, words)
    has_none = "output of " in what or what.endswith(UNSUMMED)
    return found <= known and (bool(found) == bool(known) or has_none)


@pytest.mark.parametrize("name", COMPARED)
def test_hook_report_says_the_same(name: str, today_cases: dict[str, Any]) -> None:
    one, recorded = tool.CASES[name], today_cases[name]
    module = tool.made(one, "cpu")
    args = [tool.drawn(f"arg{i}", x, "cpu") for i, x in enumerate(one.args)]
    kwargs = {name: tool.drawn(name, x, "cpu") for name, x in one.kwargs.items()}
    report = gradlib.hook_report(module, *args, **kwargs)
    if name == "relu-inplace":
        args = [x.clone() for x in args]
    words = labels_by_word(module, args, kwargs)

    assert report.last_node == (recorded["last_node"]["name"] or "")
    assert len(report.last_node_inputs) == len(recorded["last_node"]["inputs"])
    for kind, method in tool.KINDS.items():
        said, got = report.kinds[method], recorded[kind]
        assert list(said.warnings) == got["warnings"]
        assert said.error == (got["error"] or "")
        calls = got["calls"] or [{"grad_input": [], "grad_output": []}]
        for entries, field in [
            (said.grad_input, "grad_input"),
            (said.grad_output, "grad_output"),
        ]:
            wanted = calls[0][field] or []
            assert [shape_of(it.value) for it in entries] == [
                it["shape"] for it in wanted
            ]
            for entry, it in zip(entries, wanted, strict=True):
                assert agrees(entry.what, words, set(it["is"])), entry.what


def shape_of(value: Tensor | None) -> list[int] | None:
    return None if value is None else list(value.shape)

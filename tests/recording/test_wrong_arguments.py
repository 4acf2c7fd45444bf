"""An error about an argument has its name, what is wrong, and what to give instead."""

from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy
import pytest
import torch
from torch import nn

import gradlib

MODEL = nn.Sequential(nn.Linear(3, 4), nn.ReLU())


def recorded(**options: Any) -> gradlib.Recording:
    with gradlib.record(MODEL, **options) as recording:
        MODEL(torch.ones(2, 3)).sum().backward()
    return recording


# In the place of an option of record(): what is said of it.
OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "modules, a number": (
        {"modules": 3},
        gradlib.NoSuchModuleError,
        r"record\(modules=...\): something of type int is no name",
    ),
    "keep, a number": (
        {"keep": 3},
        gradlib.UnknownFieldError,
        r'record\(keep=...\): "3" is no field that can be kept. There are: "args"',
    ),
    "modules, a number in a tensor": (
        {"modules": torch.tensor(0)},
        gradlib.NoSuchModuleError,
        "something of type Tensor is no name",
    ),
    "keep, a number in a tensor": (
        {"keep": torch.tensor(0)},
        gradlib.UnknownFieldError,
        '"0" is no field',
    ),
    "keep, None": ({"keep": None}, gradlib.UnknownFieldError, '"None" is no field'),
    "keep, of two types": (
        {"keep": [1, "arg"]},
        gradlib.UnknownFieldError,
        '"1" is no field',
    ),
    "keep, a list in a list": (
        {"keep": [["output"]]},
        gradlib.UnknownFieldError,
        r'"\[\'output\'\]" is no field',
    ),
    "reduce, a name": (
        {"reduce": "norm"},
        gradlib.RecordingArgumentError,
        "reduce must be a function of a tensor, as gradlib.tensor_stats, but it is "
        "'norm', of type str",
    ),
    "device, a name": (
        {"device": "gpu"},
        gradlib.RecordingArgumentError,
        r"record\(device=...\): no tensor can be put on 'gpu'",
    ),
    "device, of another machine": (
        {"device": "fpga"},  # torch's own message has a hundred lines
        gradlib.RecordingArgumentError,
        r"\A[^\n]{,400}\Z",
    ),
    "device, a number": (
        {"device": 1.5},
        gradlib.RecordingArgumentError,
        "no tensor can be put on 1.5",
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_record(option: str) -> None:
    options, error, said = OPTIONS[option]
    hooks = dict(MODEL._forward_hooks)
    with pytest.raises(error, match=said):
        gradlib.record(MODEL, **options)
    assert hooks == MODEL._forward_hooks


Ask = Callable[[gradlib.Recording], Any]
QUESTIONS: dict[str, tuple[Ask, type[Exception], str]] = {
    "calls, a number": (
        lambda it: it.calls(0),  # pyright: ignore (what is wrong)
        gradlib.NoSuchCallError,
        r"recording\[0\]: name a call by its module",
    ),
    "calls, a model": (
        lambda it: it.calls(MODEL),  # pyright: ignore (what is wrong)
        gradlib.NoSuchCallError,
        r"recording\[[^\n]{,40}\]: name a call by its module",
    ),
    "statistics, a model": (
        lambda _: gradlib.tensor_stats(MODEL),  # pyright: ignore (what is wrong)
        gradlib.RecordingArgumentError,
        r"tensor is [^\n]{,40} of type Sequential",
    ),
    "verify, text": (
        lambda it: it.verify(rtol="1"),  # pyright: ignore (what is wrong)
        gradlib.RecordingArgumentError,
        "rtol must be a number from 0 on, or None for what the dtypes allow, but it is "
        "'1', of type str",
    ),
    "verify, negative": (
        lambda it: it.verify(atol=-1.0),
        gradlib.RecordingArgumentError,
        "atol must be a number from 0 on",
    ),
    "verify, text in the place of a flag": (
        lambda it: it.verify(numerical="no"),  # pyright: ignore (what is wrong)
        gradlib.RecordingArgumentError,
        "numerical must be True or False, but it is 'no', of type str",
    ),
    "verify, an array in the place of a flag": (
        lambda it: it.verify(numerical=torch.ones(2)),  # pyright: ignore (the same)
        gradlib.RecordingArgumentError,
        r"numerical must be True or False.* of type Tensor",
    ),
    "compare, no number": (
        lambda it: it.compare(it, rtol=float("nan")),
        gradlib.RecordingArgumentError,
        "rtol must be a number from 0 on",
    ),
    "compare, a tensor": (
        lambda it: it.compare(it, atol=torch.ones(2)),  # pyright: ignore (the same)
        gradlib.RecordingArgumentError,
        "atol must be a number from 0 on.* of type Tensor",
    ),
    "compare, a model": (
        lambda it: it.compare(MODEL),  # pyright: ignore (what is wrong)
        gradlib.RecordingArgumentError,
        "other must be a Recording, but it is of type Sequential",
    ),
    "plot, a list": (
        lambda it: it.plot([]),  # pyright: ignore (what is wrong)
        gradlib.UnknownKindError,
        r"plot\(kind=\[\]\): there is no such picture",
    ),
    "plot, several axes in the place of a kind": (
        lambda it: it.plot(plt.subplots(1, 2)[1]),
        gradlib.UnknownKindError,
        r"there is no such picture.* where to draw is plot\(ax=...\)",
    ),
    "plot, a figure": (
        lambda it: it.plot(ax=plt.figure()),  # pyright: ignore (what is wrong)
        gradlib.RecordingArgumentError,
        "ax must be the Axes to draw on, but it is of type Figure",
    ),
    "plot, pyplot": (
        lambda it: it.plot(ax=plt),  # pyright: ignore (what is wrong)
        gradlib.RecordingArgumentError,
        "ax must be the Axes to draw on, but it is of type module",
    ),
    "plot, several axes": (
        lambda it: it.plot(ax=plt.subplots(1, 2)[1]),
        gradlib.RecordingArgumentError,
        "ax must be the Axes to draw on, but it is of type ndarray",
    ),
    "save, nowhere": (
        lambda it: it.save(None),  # pyright: ignore (what is wrong)
        gradlib.RecordingArgumentError,
        "path must name a file.* type NoneType",
    ),
    "load, a number": (
        lambda _: gradlib.load_recording(3),  # pyright: ignore (what is wrong)
        gradlib.RecordingArgumentError,
        "path must name a file.* type int",
    ),
    "save, a name with a null character": (
        lambda it: it.save("run\0"),
        gradlib.RecordingArgumentError,
        r"path must name a file.* no file can have the name 'run\\x00'",
    ),
    "load, a name that cannot be encoded": (
        lambda _: gradlib.load_recording("run\ud800"),
        gradlib.RecordingArgumentError,
        r"path must name a file.* no file can have the name 'run\\ud800'",
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_to_a_recording(question: str) -> None:
    ask, error, said = QUESTIONS[question]
    with pytest.raises(error, match=said):
        ask(recorded())
    plt.close("all")


def test_numbers_and_flags_of_numpy_are_as_good() -> None:
    recording = recorded()
    assert recording["0", numpy.int64(0)] == recording["0", 0]  # pyright: ignore (NumPy)
    assert ("0", numpy.int64(0)) in recording
    assert ("0", numpy.int64(1)) not in recording
    assert recording.verify(numerical=numpy.bool_(False)).ok  # pyright: ignore (NumPy)
    assert recording.verify(rtol=numpy.float32(0.1)).ok  # pyright: ignore (NumPy)

"""Whatever stands in the place of an argument, it works or the error is one of ours."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import matplotlib.pyplot as plt
import numpy
import pytest
import torch
from torch import nn

import gradlib

WRONG: dict[str, Any] = {
    "text": "abc",
    "float": 2.5,
    "None": None,
    "number in a tensor": torch.tensor(1.5),
    "tensor": torch.ones(2),
    "array": numpy.ones(2),
    "list": [[1.0]],
    "object": object(),
    "class": dict,
}
MODEL = nn.Sequential(nn.Linear(3, 4), nn.ReLU())


@cache
def recording() -> Any:
    with gradlib.record(MODEL) as made:
        MODEL(torch.ones(2, 3)).sum().backward()
    return made


@cache
def report() -> gradlib.HookReport:
    return gradlib.hook_report(MODEL, torch.ones(2, 3))


def begun(model: Any = MODEL, **options: Any) -> Any:
    return gradlib.record(model, **options)


def graph() -> dict[str, Any]:
    x = torch.ones(3, requires_grad=True)
    return {"outputs": x**2, "inputs": x, "grad_outputs": torch.ones(3)}


def of_graph() -> dict[str, Any]:
    x = torch.ones(2, 3, requires_grad=True)
    return {"outputs": MODEL(x), "inputs": x}


def jacobian(ask: Callable[..., Any], fn: Any = MODEL, **options: Any) -> Any:
    return ask(fn, torch.ones(2, 3), **options)


def explained(**given: Any) -> None:
    """Raise the code of a bad call, which `explain_vjp` returns instead."""
    if not (found := gradlib.explain_vjp(**(graph() | given))).ok:
        raise gradlib.GradlibError(found.code)


# Each by a function of the argument's name and of what stands in its place.
Ask = Callable[[str, Any], Any]
ASKS: dict[str, Ask] = {
    "record": lambda name, it: begun(**{name: it}),
    "hook_report": lambda _, it: gradlib.hook_report(it, torch.ones(3)),
    "load_recording": lambda _, it: gradlib.load_recording(it),
    "tensor_stats": lambda _, it: gradlib.tensor_stats(it),
    "grad": lambda name, it: gradlib.grad(**(graph() | {name: it})),
    "explain_vjp": lambda name, it: explained(**{name: it}),
    "per_sample_jacobian": lambda name, it: jacobian(
        gradlib.per_sample_jacobian, **{name: it}
    ),
    "plan_jacobian": lambda name, it: jacobian(gradlib.plan_jacobian, **{name: it}),
    "per_sample_jacobian_from_graph": lambda name, it: (
        gradlib.per_sample_jacobian_from_graph(**(of_graph() | {name: it}))
    ),
    "JacobianPlan.passes_of": lambda _, it: jacobian(gradlib.plan_jacobian).passes_of(
        it
    ),
    "Recording.calls": lambda _, it: recording().calls(it),
    "Recording.compare": lambda name, it: (made := recording()).compare(
        **({"other": made} | {name: it})
    ),
    "Recording.plot": lambda name, it: recording().plot(**{name: it}),
    "Recording.save": lambda _, it: recording().save(it),
    "Recording.verify": lambda name, it: recording().verify(**{name: it}),
    "Comparison.plot": lambda _, it: (made := recording()).compare(made).plot(it),
    "HookReport.plot": lambda _, it: report().plot(it),
    "VJPExplanation.plot": lambda _, it: gradlib.explain_vjp(**graph()).plot(it),
}
# What has no name to be asked by.
KEYS: dict[str, Callable[[Any], Any]] = {
    "recording[it]": lambda it: recording()[it],
    "recording[it, 0]": lambda it: recording()[it, 0],
    'recording["0", it]': lambda it: recording()["0", it],
    'compare(names={"0": it})': lambda it: recording().compare(
        recording(), names={"0": it}
    ),
    "kinds[it]": lambda it: report().kinds[it],
    "explain_errors()(it)": lambda it: gradlib.explain_errors()(it),
}
# Not asked: what is handed on to the user's function, or what a plan is built by.
OPEN = {
    *itertools.product(["hook_report"], ["args", "kwargs"]),
    *itertools.product(["plan_jacobian", "per_sample_jacobian"], ["inputs"]),
}
INSIDE = {"JacobianPlan.shortened", "JacobianPlan.together", "JacobianPlan.pieces"}
# What is right in a place, or is raised by the function that was given.
RIGHT = {
    *itertools.product(["None"], ["modules", "reduce", "device", "names", "ax"]),
    *itertools.product(["None"], ["rtol", "atol", "max_bytes", "out"]),
    *itertools.product(["None"], ["retain_graph", "allow_unused"]),
    *itertools.product(["float"], ["rtol", "atol"]),
    *itertools.product(["tensor", "number in a tensor"], ["tensor"]),
    *itertools.product(["class"], ["reduce", "fn"]),
    ("text", "path"),
}


def parameters() -> Iterator[tuple[str, str]]:
    """Yield each public function and method with each of its parameters, by name."""
    for public in gradlib.__all__:
        it = getattr(gradlib, public)
        if inspect.isfunction(it):
            yield from ((public, name) for name in inspect.signature(it).parameters)
        elif not issubclass(it, BaseException):
            for name, method in inspect.getmembers(it, inspect.isfunction):
                if not name.startswith("_"):
                    _, *names = inspect.signature(method).parameters
                    yield from ((f"{public}.{name}", each) for each in names)


CASES = [
    (function, name, what)
    for function, name in dict.fromkeys(parameters())
    for what in WRONG
    if function not in INSIDE
    and (function, name) not in OPEN
    and (what, name) not in RIGHT
]


@pytest.fixture(autouse=True)
def figures_closed() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.mark.parametrize(
    ("function", "name", "what"), CASES, ids=map("{0[0]}({0[1]}) {0[2]}".format, CASES)
)
def test_what_is_wrong_in_the_place_of_an_argument(
    function: str, name: str, what: str
) -> None:
    with pytest.raises(gradlib.GradlibError):
        ASKS[function](name, WRONG[what])


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("key", KEYS)
def test_what_is_wrong_in_the_place_of_a_key(key: str, what: str) -> None:
    with pytest.raises(gradlib.GradlibError):
        KEYS[key](WRONG[what])


@pytest.mark.parametrize("name", ["retain_graph", "create_graph", "allow_unused"])
def test_options_of_grad_that_are_as_good_as_true(name: str) -> None:
    for true in (True, 1, 2, numpy.bool_(True), torch.tensor(True)):
        (found,) = ASKS["grad"](name, true)
        assert found.tolist() == [2, 2, 2]
    with pytest.raises(gradlib.RecordingArgumentError, match=f"{name} must be True or"):
        ASKS["grad"](name, "no")


def test_a_mode_that_a_plan_does_not_have() -> None:
    plan = gradlib.plan_jacobian(MODEL, torch.ones(2, 3))
    said = r"passes_of\(mode\): mode is 'rows'; it is one of 'reverse', 'forward'"
    with pytest.raises(gradlib.JacobianArgumentError, match=said):
        plan.passes_of("rows")


def test_a_decorator_above_what_is_no_function() -> None:
    said = "in a class above each method, and below @classmethod"
    with pytest.raises(gradlib.RecordingArgumentError, match=said):

        @gradlib.explain_errors()
        class Unused(nn.Module): ...

"""The printed code runs at the place of the call, with the caller's names."""

import ast
import builtins
import linecache
import re
import warnings
from collections.abc import Iterator
from enum import Enum
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.vjp.cases import CASES, Case

from .programs import run
from .releases import older_than_dicts

CALLS = [(case, "gradlib.grad") for case in CASES.values()]
CALLS += [(case, "torch.autograd.grad") for case, _ in CALLS if case.torch_refuses]
OTHERS = {
    "x": "images",
    "y": "scores",
    "v": "shares",
    "h": "hidden",
    "loss": "penalty",
    "losses": "penalties",
    "weight": "layer",
    "model": "network",
}


def renamed(program: str) -> str:
    """Return a program with other names for its variables."""
    return re.sub(r"\w+", lambda it: OTHERS.get(it[0], it[0]), program)


def error_of(program: str, names: dict[str, Any]) -> Exception:
    """Run a function that fails, and return its error."""
    with pytest.raises(Exception) as caught, gradlib.explain_errors():  # noqa: PT011 (any)
        run(program, names)
    return caught.value


def fix_in(error: Exception) -> str:
    """Return the code that an error's message shows, or its note."""
    (text,) = getattr(error, "__notes__", [str(error)])
    return dedent(text.split("\n\n")[-2])


def fixed(program: str, **names: Any) -> str:
    """Run a program that fails, then the code its error shows, and return that code."""
    names = {"torch": torch, "nn": nn, "gradlib": gradlib, "f": square_sum} | names
    code = fix_in(error_of(dedent(program), names))
    run(code, names)
    return code


def square_sum(x: Any) -> Tensor:
    parts = [x] if isinstance(x, Tensor) else x.values() if type(x) is dict else x
    return torch.stack([(it**2).sum() for it in parts]).sum()


def letters_in(code: str) -> set[str]:
    """Return the letters among a program's variables."""
    nodes = ast.walk(ast.parse(code))
    return {it.id for it in nodes if isinstance(it, ast.Name)} & {"x", "y", "v", "w"}


def first_read(code: str) -> set[str]:
    """Return the variables that a program reads and does not bind."""
    nodes = [it for it in ast.walk(ast.parse(code)) if isinstance(it, ast.Name)]
    bound = {it.id for it in nodes if isinstance(it.ctx, ast.Store)}
    read = {it.id for it in nodes if isinstance(it.ctx, ast.Load)}
    return read - bound - vars(builtins).keys()


@pytest.mark.parametrize(("case", "by"), CALLS, ids=lambda it: getattr(it, "code", it))
def test_the_fix_of_a_case_runs_in_other_names(case: Case, by: str) -> None:
    program = renamed(case.wrong).replace("torch.autograd.grad", by)
    names: dict[str, Any] = {"gradlib": gradlib, "f": square_sum}
    error = error_of(program, names)
    code = fix_in(error)
    *_, last = code.splitlines()
    assert last.startswith(f"{by}(")
    assert first_read(code) <= names.keys()
    result = run(code.replace(last, f"result = {last}"), names)["result"]
    assert all(isinstance(it, Tensor) for it in result)
    # a letter stands only for a tensor without a name, and is bound first
    assert letters_in(code) <= {it[0] for it in re.findall(r"^(\w+) = ", code, re.M)}


START = """
    from types import SimpleNamespace

    images = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    spare = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    scores = torch.outer(images, images)
    total = scores.sum()
    kept = SimpleNamespace(scores=scores, images=images, parts=[images, spare])
    batch = {"images": images, 3: scores}
    layer = nn.Linear(3, 2)
"""
ONES = "v = torch.ones_like(scores)\n"

WRITTEN: dict[str, tuple[str, str]] = {
    "names": ("gradlib.grad(scores, images)", ONES + "gradlib.grad(scores, images, v)"),
    "keywords": (
        "gradlib.grad(inputs=images, outputs=scores)",
        ONES + "gradlib.grad(scores, images, v)",
    ),
    "an attribute": (
        "gradlib.grad(kept.scores, kept.images)",
        "v = torch.ones_like(kept.scores)\ngradlib.grad(kept.scores, kept.images, v)",
    ),
    "an entry of a dict": (
        'gradlib.grad(batch[3], batch["images"])',
        'v = torch.ones_like(batch[3])\ngradlib.grad(batch[3], batch["images"], v)',
    ),
    "over several lines": (
        """
        gradlib.grad(
            scores,
            # the input
            images,
        )
        """,
        ONES + "gradlib.grad(scores, images, v)",
    ),
    "an expression over several lines": (
        """
        gradlib.grad(kept
                     .scores if False else (
                         scores * 1), images)
        """,
        "y = kept.scores if False else scores * 1\n"
        "v = torch.ones_like(y)\n"
        "gradlib.grad(y, images, v)",
    ),
    "inside another call": (
        "print(len(gradlib.grad(scores, images)), max(1, 2))",
        ONES + "gradlib.grad(scores, images, v)",
    ),
    "the second on its line": (
        "gradlib.grad(total, images, retain_graph=True); gradlib.grad(scores, images)",
        ONES + "gradlib.grad(scores, images, v)",
    ),
    "the inner of two": (
        "gradlib.grad(total, images, gradlib.grad(scores, images)[0])",
        ONES + "gradlib.grad(scores, images, v)",
    ),
    "after a letter of several bytes": (
        "größe = 'ä'; gradlib.grad(scores, images)",
        ONES + "gradlib.grad(scores, images, v)",
    ),
    "in an f-string": (
        'f"{gradlib.grad(scores, images)}"',
        ONES + "gradlib.grad(scores, images, v)",
    ),
    "by another name": (
        "from gradlib import grad as differentiate\ndifferentiate(scores, images)",
        ONES + "gradlib.grad(scores, images, v)",
    ),
    "by the name alone": (
        "from gradlib import grad\ngrad(scores, images)",
        ONES + "gradlib.grad(scores, images, v)",
    ),
    "with a variable bound inside": (
        "gradlib.grad(found := scores * 1, images)",
        "v = torch.ones_like(found)\ngradlib.grad(found, images, v)",
    ),
    "a list bound inside": (
        "gradlib.grad(total, many := [images, spare])",
        "gradlib.grad(total, many, allow_unused=True)",
    ),
    "an iterator": (
        "gradlib.grad(total, iter([images, spare]))",
        "x = list(iter([images, spare]))\ngradlib.grad(total, x, allow_unused=True)",
    ),
    "written out": (
        "gradlib.grad([total, scores], (images,), [None, images])",
        "v = [None, images]\n"
        "v = list(v)\n"
        "v[1] = torch.ones_like(scores)\n"
        "gradlib.grad([total, scores], (images,), v)",
    ),
    "a list": (
        "gradlib.grad(scores, kept.parts)",
        "v = torch.ones_like(scores)\n"
        "gradlib.grad(scores, kept.parts, v, allow_unused=True)",
    ),
    "a long way to what has a name": (
        "gradlib.grad(scores, kept.__class__(parts=images).parts)",
        ONES + "gradlib.grad(scores, images, v)",
    ),
    "a long way to what has none": (
        "inner = SimpleNamespace(scores_of_images=scores * 1)\n"
        "outer = SimpleNamespace(with_scores=inner)\n"
        "gradlib.grad(outer.with_scores.scores_of_images, images)",
        "y = outer.with_scores.scores_of_images\n"
        "v = torch.ones_like(y)\n"
        "gradlib.grad(y, images, v)",
    ),
    "a letter that is taken": (
        "y = 2.0\ngradlib.grad(y * scores, images)",
        "outputs = y * scores\n"
        "v = torch.ones_like(outputs)\n"
        "gradlib.grad(outputs, images, v)",
    ),
    "a part of a tensor": (
        "gradlib.grad(total, images[0])",
        "gradlib.grad(total, images)",
    ),
    "an attribute of a tensor": (
        "gradlib.grad(total, images.data)",
        "gradlib.grad(total, images)",
    ),
    "a new attribute of a tensor": (
        "wide = torch.ones(2, 3)\ngradlib.grad(total, wide.T)",
        "x = wide.T\nx.requires_grad_()\ntotal = f(x)\ngradlib.grad(total, x)",
    ),
    "arguments unpacked": (
        "pair = (scores, images)\ngradlib.grad(*pair)",
        ONES + "gradlib.grad(scores, images, v)",
    ),
    "by functools.partial": (
        "from functools import partial\npartial(gradlib.grad, scores)(images)",
        ONES + "gradlib.grad(scores, images, v)",
    ),
    "an unused one of several": (
        "gradlib.grad(total, [images, spare])",
        "gradlib.grad(total, [images, spare], allow_unused=True)",
    ),
    "wrong way round": ("gradlib.grad(images, total)", "gradlib.grad(total, images)"),
    "a module": (
        "gradlib.grad(layer(images).sum(), layer)",
        "y = layer(images).sum()\nx = tuple(layer.parameters())\ngradlib.grad(y, x)",
    ),
    "a module as the output": (
        "gradlib.grad(layer, images, torch.ones(2))",
        "v = torch.ones(2)\ny = layer(images)\ngradlib.grad(y, images, v)",
    ),
    "a number": (
        "gradlib.grad(scores, images, 0.5)",
        "v = torch.full_like(scores, 0.5)\ngradlib.grad(scores, images, v)",
    ),
    "integers in a tuple": (
        "words = torch.tensor([1])\nmany = (images, words)\ngradlib.grad(total, many)",
        "x = [it for it in many if it.requires_grad]\ngradlib.grad(total, x)",
    ),
    "integers among what requires no grad": (
        "words = torch.tensor([1])\nmany = (words, images.exp().detach())\n"
        "gradlib.grad(total, many)",
        "x = list(many)\n"
        "x[0] = x[0].to(torch.float32).requires_grad_()\n"
        "x[1].requires_grad_()\n"
        "total = f(x)\n"
        "gradlib.grad(total, x)",
    ),
    "a complex number": (
        "wave = total * 1j\ngradlib.grad(wave, images)",
        "gradlib.grad(wave.real, images)",
    ),
    "a complex number, by a method": (
        "wave = total * 1j\nwave.backward()",
        "wave.real.backward()",
    ),
    "a detached one": (
        "cut = total.detach()\ngradlib.grad(cut, images)",
        "gradlib.grad(total, images)",
    ),
    "a detached input": (
        "cut = images.detach()\ngradlib.grad(total, cut)",
        "gradlib.grad(total, images)",
    ),
    "a detached input that the output was computed from": (
        "cut = images.detach()\nother = (cut * spare).sum()\ngradlib.grad(other, cut)",
        "cut.requires_grad_()\nother = f(cut)\ngradlib.grad(other, cut)",
    ),
    "detached from what another function has": (
        """
        def outer():
            secret = images.exp().sum()
            inner(secret.detach())

        def inner(cut):
            gradlib.grad(cut, images)

        outer()
        """,
        "cut = f(images)\ngradlib.grad(cut, images)",
    ),
    "a method": ("scores.backward()", "scores.mean().backward()"),
    "a method of what stands on other lines": (
        """
        (
            kept
            .scores
            .backward(
                retain_graph=True)
        )
        """,
        "scores.mean().backward(retain_graph=True)",  # found by its value
    ),
    "a method of an expression": (
        "(scores * 2).backward(images)",
        "y = scores * 2\nv = images.expand_as(y)\ny.backward(v)",
    ),
    "torch.autograd.backward": (
        "torch.autograd.backward([total, scores], [None, images])",
        "v = [None, images]\n"
        "v = list(v)\n"
        "v[1] = v[1].expand_as(scores)\n"
        "torch.autograd.backward([total, scores], v)",
    ),
    "torch wraps one in a tuple": (
        "torch.autograd.grad([scores], images)",
        "v = torch.ones_like(scores)\ntorch.autograd.grad(scores, images, v)",
    ),
    "not by that method": (
        "torch.Tensor.backward(scores)",
        "scores.mean().backward()",
    ),
    "a list that torch opens": (
        "one = [scores]\ntorch.autograd.grad(one, images)",
        "v = torch.ones_like(scores)\ntorch.autograd.grad(scores, images, v)",
    ),
    "a list of what has no name, that torch opens": (
        "one = [scores * 1]\ntorch.autograd.grad(one, images)",
        "(y,) = one\nv = torch.ones_like(y)\ntorch.autograd.grad(y, images, v)",
    ),
    "a set of what has no name, that torch opens": (
        "one = {scores * 1}\ntorch.autograd.grad(one, images)",
        "(y,) = one\nv = torch.ones_like(y)\ntorch.autograd.grad(y, images, v)",
    ),
    "a dict in a variable": (
        "named = {'a': images}\ngradlib.grad(scores, named)",
        ONES + "gradlib.grad(scores, named, v)",
    ),
    "a list of one in a variable": (
        "one = [scores * 1]\ngradlib.grad(one, images)",
        "v = [torch.ones_like(each) for each in one]\ngradlib.grad(one, images, v)",
    ),
    "a set": (
        "many = {scores}\ngradlib.grad(many, images)",
        "y = list(many)\n"
        "v = [torch.ones_like(each) for each in y]\n"
        "gradlib.grad(y, images, v)",
    ),
    "a set in a variable that has the letter": (
        "y = {scores}\ngradlib.grad(y, images)",
        "outputs = list(y)\n"
        "v = [torch.ones_like(each) for each in outputs]\n"
        "gradlib.grad(outputs, images, v)",
    ),
    "a second pass": (
        "total.backward()\ntotal.backward()",
        "total = f(x)\n"
        "total.backward(retain_graph=True)  # the earlier pass\n"
        "total.backward()",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_names_are_read_where_the_call_is(name: str) -> None:
    program, code = WRITTEN[name]
    start = dedent(START) + dedent(program)
    unnamed = {"x": torch.ones(3, requires_grad=True)} if "backward" in program else {}
    assert fixed(start, **unnamed) == code


@pytest.mark.parametrize(
    "call",
    [
        "gradlib.grad(*(scores * 1, images), torch.ones(2))",
        "partial(gradlib.grad, scores * 1)(kept.images, torch.ones(2))",
        "torch.autograd.grad([scores * 1], images)",
    ],
)
def test_what_cannot_be_read_keeps_its_letter(call: str) -> None:
    setup = "from functools import partial\n"
    names = {"torch": torch, "nn": nn, "gradlib": gradlib}
    first, last = fix_in(error_of(dedent(START) + setup + call, names)).splitlines()
    assert first == "v = torch.ones_like(y)"
    assert last.endswith(".grad(y, images, v)")


@pytest.mark.parametrize("others", ["pair", "()"])
def test_a_list_that_opens_another_is_written_again(others: str) -> None:
    names = {"torch": torch, "nn": nn, "gradlib": gradlib}
    call = f"gradlib.grad([scores, *{others}], images)"
    program = f"{dedent(START)}pair = scores, scores\n{call}"
    code = fix_in(error_of(program, names))
    assert f"[scores, *{others}]" in code
    run(code, names)


def test_what_was_sent_in_is_not_asked_for_again() -> None:
    program = """
    def run():
        gradlib.grad((yield), images)

    waiting = run()
    next(waiting)
    waiting.send(scores * 1)
    """
    names = {"torch": torch, "nn": nn, "gradlib": gradlib}
    code = fix_in(error_of(dedent(START) + dedent(program), names))
    assert code == "v = torch.ones_like(y)\ngradlib.grad(y, images, v)"


def test_the_variable_of_a_comprehension_is_a_name_there() -> None:
    program = dedent(START) + "[gradlib.grad(it, images) for it in [scores]]"
    names = {"torch": torch, "nn": nn, "gradlib": gradlib}
    assert "torch.ones_like(it)" in fix_in(error_of(program, names))


class Curious:
    """Notes any look at it beyond reading the variable."""

    def __init__(self, scores: Tensor) -> None:
        self.asked = 0
        self.hidden = scores

    @property
    def scores(self) -> Tensor:
        self.asked += 1
        return self.hidden

    def __getitem__(self, _: Any) -> Tensor:
        return self.scores

    def __call__(self) -> Tensor:
        return self.scores

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self.scores])


@pytest.mark.parametrize("way", ["", ".scores", "[0]", "()", "[0].mT"])
@pytest.mark.parametrize("tool", ["grad", "explain_vjp"])
def test_nothing_is_evaluated_again(way: str, tool: str) -> None:
    curious = Curious(torch.ones(2, 2, requires_grad=True) * 2)
    names = {"curious": curious, "gradlib": gradlib}
    program = f"gradlib.{tool}(curious{way}, curious{way})"
    if tool == "grad":
        assert "curious" in fix_in(error_of(program, names)) or not way
    else:
        run(program, names)
    assert curious.asked == 2


SCORES = torch.ones(2, 2, requires_grad=True)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("gradlib.grad(scores * 1, scores)", "v = torch.ones_like(y)"),
        ("gradlib.grad(scores, [scores])", "v = torch.ones_like(scores)"),
        ("gradlib.grad([scores], scores)", "gradlib.grad(y, scores, v)"),
    ],
)
def test_without_a_source_variables_are_found_by_their_values(
    program: str, code: str
) -> None:
    names = {"gradlib": gradlib, "scores": SCORES}
    with pytest.raises(gradlib.NoGradOutputsError) as caught:
        exec(program, names)
    assert code in fix_in(caught.value)


def test_the_rest_of_the_file_need_not_be_python() -> None:
    page: str = "What follows\n  (is code:\n\nfound = gradlib.grad(scores * 1,\nscores)"
    code, file = page.replace("What follows\n  (is code:", "\n"), "<page>"
    lines: list[str] = [*page.splitlines(True)]
    linecache.cache[file] = (len(page), None, lines, file)
    with pytest.raises(gradlib.NoGradOutputsError) as caught:
        exec(compile(code, file, "exec"), {"gradlib": gradlib, "scores": SCORES})
    assert fix_in(caught.value).startswith("y = scores * 1\n")


@pytest.mark.parametrize(
    "source",
    [
        "",
        "\n\n",
        "def broken(:\n",
        "gradlib.grad(other, another)\n",  # as long, and changed
        "gradlib.grades(scores * 1, spare)\n",
        "\0",
        "('" * 500,
    ],
)
def test_a_source_that_is_another_by_now_does_not_mislead(source: str) -> None:
    names: dict[str, Any] = {"gradlib": gradlib, "scores": SCORES}
    names |= {"other": SCORES * 2, "another": SCORES * 3, "spare": SCORES * 4}
    file = "<changed>"
    code = compile("gradlib.grad(scores    , scores)", file, "exec")
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    with pytest.raises(gradlib.NoGradOutputsError) as caught:
        exec(code, names)
    code = "v = torch.ones_like(scores)\ngradlib.grad(scores, scores, v)"
    assert fix_in(caught.value) == code


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("gradlib.grad(scores * 1, {'\\d': scores})", "    y = scores * 1\n"),
        (
            "'\\d'; x = scores.detach() * 1; gradlib.grad(x, scores)",
            "`scores.detach()` seems",
        ),
    ],
)
def test_a_source_that_python_warned_of_gives_no_second_warning(
    program: str, words: str
) -> None:
    file = "<warned of>"
    linecache.cache[file] = (len(program), None, [program], file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = compile(program, file, "exec")
    names = {"gradlib": gradlib, "scores": SCORES}
    with pytest.raises(gradlib.GradlibError) as caught:
        exec(code, names)  # any warning is an error here
    assert words in str(caught.value)


def test_an_iterator_is_opened_where_the_call_is() -> None:
    setup = """
        y = (it for it in [scores, layer(images)])
        inputs = iter([images])
        v = iter([torch.ones(1, 3), images[:2]])
    """
    start, call = dedent(START) + dedent(setup), "gradlib.grad(y, inputs, v)"
    names = {"torch": torch, "nn": nn, "gradlib": gradlib}
    code = fix_in(error_of(start + call, names))
    assert code == (
        "grad_outputs = list(v)\n"
        "outputs = list(y)\n"
        "x = list(inputs)\n"
        "grad_outputs = list(grad_outputs)\n"
        "grad_outputs[0] = grad_outputs[0].expand_as(outputs[0])\n"
        "gradlib.grad(outputs, x, grad_outputs)"
    )
    run(start + code, names)


def test_a_call_that_torch_makes_is_not_taken_for_the_callers() -> None:
    program = """
        def square(it):
            hidden = it.exp()
            result = (hidden * hidden).sum()
            hidden += 1
            return result

        torch.autograd.functional.vjp(square, images)
    """
    names = {"torch": torch, "nn": nn, "gradlib": gradlib}
    error = error_of(dedent(START) + dedent(program), names)
    assert "[GL112]" in error.__notes__[0]
    assert "f(x)" not in error.__notes__[0]


def test_a_graph_that_a_call_of_torchs_freed() -> None:
    program = """
        import torch

        _, back = torch.func.vjp(torch.exp, torch.ones(2))
        back(torch.ones(2), retain_graph=False)
        back(torch.ones(2))
    """
    note = error_of(dedent(program), {}).__notes__[0]
    assert "[GL111]" in note
    assert "\n    " not in note


@pytest.mark.parametrize(
    "call", ["torch.func.vjp(net, x)[1](torch.ones(2))", "back(torch.ones(2))"]
)
def test_code_is_not_in_the_names_of_a_call_that_torch_makes(call: str) -> None:
    setup = """
        import torch, gradlib

        net, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
        y, back = torch.func.vjp(net, x)
    """
    error = error_of(f"{dedent(setup)}\n{call}", {"torch": torch, "gradlib": gradlib})
    note = error.__notes__[0]
    assert "[GL102] grad_outputs[0] has shape [2], and outputs[0] has [4, 2]" in note
    assert "\n    " not in note


LOSSES = """
    import torch, gradlib

    images = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    def f(images):
        hidden = images.exp()
        return hidden.sum(), (hidden * hidden).sum()

    def passes():
        first, second = f(images)
        {}

    passes()
"""
SAME = "second.backward(retain_graph=True)  # the earlier pass\nsecond.backward()"

EARLIER: dict[str, tuple[str, str]] = {
    "of another loss": (
        "first.backward(); second.backward()",
        "first, second = f(x)\n"
        "first.backward(retain_graph=True)  # the earlier pass\n"
        "second.backward()",
    ),
    "of a loss that is detached by now": (
        "first.backward(); first = first.detach(); second.backward()",
        "first, second = f(x)\n"
        "first.backward(retain_graph=True)  # the earlier pass\n"
        "second.backward()",
    ),
    "by grad, over several lines": (
        "gradlib.grad(first,\n            images,); gradlib.grad(second, images)",
        "first, second = f(images)\n"
        "gradlib.grad(first, images, retain_graph=True)  # the earlier pass\n"
        "gradlib.grad(second, images)",
    ),
    "with one between that retains": (
        "second.backward(); third = images.exp().sum(); "
        "third.backward(retain_graph=True); second.backward()",
        f"second = f(x)\n{SAME}",
    ),
    "the last of two": (
        "third = images.exp().sum(); third.backward(); "
        "second.backward(); second.backward()",
        f"second = f(x)\n{SAME}",
    ),
    "with a comma at its end": (
        "gradlib.grad(first, images,); gradlib.grad(second, images)",
        "first, second = f(images)\n"
        "gradlib.grad(first, images, retain_graph=True)  # the earlier pass\n"
        "gradlib.grad(second, images)",
    ),
    "with one between that has nothing to do with it": (
        "second.backward(); third = images.exp().sum(); third.backward(); "
        "second.backward()",
        f"second = f(x)\n{SAME}",
    ),
    "with one between that needed nothing of the graph": (
        "part = -images; second, other = (part * part).sum(), part.sum(); "
        "second.backward(); other.backward(); second.backward()",
        f"second = f(x)\n{SAME}",
    ),
    "with an unrelated one alone": (
        "third = images.exp().sum(); third.backward(); "
        "sum([second]).backward(); second.backward()",
        f"second = f(x)\n{SAME}",
    ),
    "of a variable that holds a number by now": (
        "second.backward(); kept, second = second, second.item(); kept.backward()",
        "second, kept = f(x)\n"
        "second.backward(retain_graph=True)  # the earlier pass\n"
        "kept.backward()",
    ),
    "in a loop": ("for _ in 'ab': second.backward()", f"second = f(x)\n{SAME}"),
    "with weights": (
        "second.backward(torch.tensor(2.0)); second.backward()",
        "second = f(x)\n"
        "second.backward(torch.tensor(2.0), retain_graph=True)  # the earlier pass\n"
        "second.backward()",
    ),
    "in another function": (
        "second.backward(); (lambda: second.backward())(); first.backward()",
        f"second = f(x)\n{SAME}",
    ),
    "with options by position": (
        "second.backward(None, False); second.backward()",
        f"second = f(x)\n{SAME}",
    ),
    "that says not to retain": (
        "second.backward(retain_graph=False); second.backward()",
        f"second = f(x)\n{SAME}",
    ),
    "with options of a dict": (
        "options = {}; second.backward(**options); second.backward()",
        f"second = f(x)\n{SAME}",
    ),
    "with options of a tuple": (
        "second.backward(*(None, False)); second.backward()",
        f"second = f(x)\n{SAME}",
    ),
    "by what runs passes for others": (
        "engine = type('Engine', (), {'backward': lambda _, it: it.backward()})(); "
        "engine.backward(first); second.backward()",
        f"second = f(x)\n{SAME}",
    ),
    "by a function of torch": (
        "torch.autograd.backward(first); second.backward()",
        "first, second = f(x)\n"
        "torch.autograd.backward(first, retain_graph=True)  # the earlier pass\n"
        "second.backward()",
    ),
    "with a gradient of a function between": (
        "g = lambda it: f(it)[0]; first.backward(); "
        "torch.func.grad(g)(images.detach()); second.backward()",
        "first, second = f(x)\n"
        "first.backward(retain_graph=True)  # the earlier pass\n"
        "second.backward()",
    ),
    "of no variable": (
        "sum([second]).backward(); second.backward()",
        f"second = f(x)\n{SAME}",
    ),
}


def test_what_stands_the_wrong_way_round_keeps_what_fits() -> None:
    x = torch.ones(3, requires_grad=True)
    names = {"x": x, "y": x * x}
    code = fixed("gradlib.grad(x, y, torch.ones(3), create_graph=True)", **names)
    assert code == "v = torch.ones(3)\ngradlib.grad(y, x, v, create_graph=True)"
    names["y"] = (x * x).sum()
    assert fixed("gradlib.grad(x, y, torch.ones(3))", **names) == "gradlib.grad(y, x)"


def test_all_that_is_nested_is_opened() -> None:
    x = torch.ones(3, requires_grad=True)
    fixed("gradlib.grad(y, [[x], x, (x, x)])", x=x, y=(x * x).sum())


@pytest.mark.parametrize("name", EARLIER)
def test_the_earlier_pass_is_the_one_that_changes(name: str) -> None:
    program, code = EARLIER[name]
    names: dict[str, Any] = {}
    shown = fix_in(error_of(dedent(LOSSES).replace("{}", program), names))
    assert shown == code
    f = names["f"] if ", " in code.split(" = ")[0] else lambda x: names["f"](x)[1]
    run(shown, names | {"f": f, "x": names["images"]})


BY_TORCH: dict[str, tuple[str, str]] = {
    "outputs by name": (
        'torch.autograd.grad({"a": total, "b": total}, images)',
        'y = {"a": total, "b": total}\ny = y.values()\ntorch.autograd.grad(y, images)',
    ),
    "outputs by name, in a variable": (
        'losses = {"a": total, "b": total}\ntorch.autograd.backward(losses)',
        "y = losses.values()\ntorch.autograd.backward(y)",
    ),
    "a list in the list of outputs": (
        "torch.autograd.grad([[total, total]], images)",
        "y = [[total, total]]\ny = [*y[0]]\ntorch.autograd.grad(y, images)",
    ),
    "detached inputs": (
        "torch.autograd.grad(total, [images.detach(), images])",
        "x = [images.detach(), images]\n"
        "x = list(x)\n"
        "x[0] = images\n"
        "torch.autograd.grad(total, x)",
    ),
    "a detached input with the letter of inputs": (
        "x = torch.ones(3, requires_grad=True)\ncut, total = x.detach(), x.sum()\n"
        "torch.autograd.grad(total, (cut, x))",
        "inputs = list((cut, x))\ninputs[0] = x\ntorch.autograd.grad(total, inputs)",
    ),
    "the few entries of a state": (
        "images = layer(torch.ones(3)).sum()\n"
        "torch.autograd.grad(images, layer.state_dict().values())",
        "x = list(layer.state_dict().values())\n"
        "x = list(x)\n"
        "x[0], x[1] = layer.weight, layer.bias\n"
        "torch.autograd.grad(images, x)",
    ),
    "detached inputs that no module has": (
        "parts = [images + i for i in range(4)]\nloss = sum(parts).sum()\n"
        "cut = [parts[0], *(it.detach() for it in parts[1:])]\n"
        "torch.autograd.grad(loss, cut)",
        "x = list(cut)\n"
        "x[1], x[2], x[3] = parts[1], parts[2], parts[3]\n"
        "torch.autograd.grad(loss, x)",
    ),
    "the entries of a state, with buffers": (
        "net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))\n"
        "total = net(torch.ones(2, 3)).sum()\n"
        "torch.autograd.grad(total, list(net.state_dict().values()))",
        "x = list(net.parameters())\ntorch.autograd.grad(total, x)",
    ),
    "the entries of a state, by name": (
        "net = nn.Sequential(layer, nn.Linear(2, 2))\n"
        "total = net(images).sum()\n"
        "gradlib.grad(total, dict(net.state_dict()))",
        "x = dict(net.named_parameters())\ngradlib.grad(total, x)",
    ),
    "a detached layer of several": (
        "net = nn.Sequential(layer, nn.Linear(2, 2))\n"
        "total = net(images).sum()\n"
        "torch.autograd.grad(total, net[1].weight.detach())",
        "torch.autograd.grad(total, net[1].weight)",
    ),
    "numbered inputs": (
        "torch.autograd.grad(total, list(enumerate([images])))",
        "x = list(enumerate([images]))\n"
        "x = [it for each in x for it in each if isinstance(it, torch.Tensor)]\n"
        "torch.autograd.grad(total, x)",
    ),
    "outputs with their names": (
        'losses = {"a": total, "b": total}\ntorch.autograd.backward(losses.items())',
        "y = list(losses.items())\n"
        "y = [it for each in y for it in each if isinstance(it, torch.Tensor)]\n"
        "torch.autograd.backward(y)",
    ),
    "a function among outputs": (
        "torch.autograd.grad([total, f], images)",
        "y = list([total, f])\ny[1] = y[1](images)\ntorch.autograd.grad(y, images)",
    ),
    "other variables with the letters": (
        "x, v, scores = 3, 4, layer(images)\n"
        "torch.autograd.grad(scores, list(layer.parameters()))",
        "inputs = list(layer.parameters())\n"
        "grad_outputs = torch.ones_like(scores)\n"
        "torch.autograd.grad(scores, inputs, grad_outputs)",
    ),
    "another variable with the name of a loop's": (
        "i = 3\nscores = [images * k for k in (1.0, 2.0, 3.0)]\n"
        "torch.autograd.grad(scores, images, [2.0, 2.0, 2.0])",
        "v = list([2.0, 2.0, 2.0])\n"
        "for i_ in range(3):\n"
        "    v[i_] = torch.full_like(scores[i_], v[i_])\n"
        "torch.autograd.grad(scores, images, v)",
    ),
    "an option by position": (
        "total.backward(True)",
        "total.backward(retain_graph=True)",
    ),
    "an option that another one sets": (
        "torch.autograd.grad(total, spare.detach(), create_graph=True)",
        "x = spare.detach()\n"
        "x.requires_grad_()\n"
        "total = f(x)\n"
        "torch.autograd.grad(total, x, create_graph=True)",
    ),
    "an option against what another one sets": (
        "torch.autograd.grad(scores, images, None, False, True)",
        ONES + "torch.autograd.grad("
        "scores, images, v, retain_graph=False, create_graph=True)",
    ),
    "a vector where an option belongs": (
        "outputs = images * 2, images.exp()\n"
        "torch.autograd.grad(outputs, images, torch.ones(3), torch.ones(3))",
        "v = [torch.ones_like(each) for each in outputs]\n"
        "torch.autograd.grad(outputs, images, v)",
    ),
    "the output of an earlier pass, unpacked": (
        "total = images.exp().sum()\ntotal.backward()\npair = total, images\n"
        "torch.autograd.grad(*pair)",
        "total = f(images)\n"
        "total.backward(retain_graph=True)  # the earlier pass\n"
        "torch.autograd.grad(total, images)",
    ),
    "rows where a batch of them is wanted": (
        "doubled, rows = images * 2, [images.detach(), spare.detach()]\n"
        "torch.autograd.grad(doubled, images, rows, is_grads_batched=True)",
        "v = torch.stack(list(rows))\n"
        "torch.autograd.grad(doubled, images, v, is_grads_batched=True)",
    ),
}


@pytest.mark.parametrize("name", BY_TORCH)
def test_the_code_for_what_torch_opens_or_refuses_runs(name: str) -> None:
    program, code = BY_TORCH[name]
    assert fixed(f"{dedent(START)}\n{program}") == code


def test_what_is_no_function_does_not_compute_the_outputs() -> None:
    program = f"{dedent(START)}\ntorch.autograd.grad(images.detach() + 1, images)"
    code = fix_in(error_of(program, {"torch": torch, "nn": nn, "f": 3}))
    assert "y = f_(images)" in code


class Role(Enum):
    DATA = 1
    WEIGHT = 2


def test_words_say_what_the_code_does_for_more_detached_inputs_than_fit() -> None:
    program = "parts = [images + i for i in range(40)]\nloss = sum(parts).sum()\n"
    program += "torch.autograd.grad(loss, [it.detach() for it in parts])"
    error = error_of(f"{dedent(START)}\n{program}", {"torch": torch, "nn": nn})
    (note,) = error.__notes__
    assert "it is `parts[0]`, detached." in note
    assert "Let it require grad, then compute the output from it." in note
    assert ".requires_grad_()" in note


@pytest.mark.skipif(older_than_dicts(), reason="this torch takes no dict of inputs")
def test_members_of_an_enumeration_are_keys() -> None:
    program = "by_role = {Role.DATA: images.detach(), Role.WEIGHT: spare}\n"
    program += "loss = by_role[Role.WEIGHT].sum()\ntorch.autograd.grad(loss, by_role)"
    assert fixed(f"{dedent(START)}\n{program}", Role=Role) == (
        "by_role[Role.DATA].requires_grad_()\n"
        "loss = f(by_role)\n"
        "torch.autograd.grad(loss, by_role)"
    )


@pytest.mark.skipif(older_than_dicts(), reason="this torch takes no dict of inputs")
def test_the_inputs_of_a_backward_by_name() -> None:
    call = "total.backward(inputs=named)"
    program = 'named = {"a": images, "b": spare.detach()}'
    code = fixed(f"{dedent(START)}\n{program}\n{call}")
    assert code == f'named["b"].requires_grad_()\ntotal = f(named)\n{call}'

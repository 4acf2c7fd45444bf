"""`explain_errors` adds one note to errors of autograd, and to no others."""

import re
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.errors import page_about
from gradlib.vjp.cases import CASES, Case
from gradlib.vjp.wordings import WORDINGS, Wording, code_of

from .programs import run
from .recorded_errors import Said, messages
from .releases import where_shown

# Errors raised before autograd runs, or while torch builds its own message.
NOT_TOLD = re.compile(
    r"bool(ean)? value of Tensor|The size of tensor"
    r"|Output \d of \w+ is a view|Expected one of .* device type"
    r"|Complex dtype|Cannot register complex|.*\bComplexCPU"
    r"|reshape is not implemented for sparse|sparse tensors do not have strides",
    re.IGNORECASE,
)


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def note_of(fail: Callable[[], object]) -> str:
    """Run a function that fails, and return the one note on its error."""
    with pytest.raises(Exception) as caught, gradlib.explain_errors():  # noqa: PT011 (any)
        fail()
    (note,) = notes(caught.value)
    return note


def vector() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


refused = [case for case in CASES.values() if case.torch_refuses]


@pytest.mark.parametrize("case", refused, ids=[case.code for case in refused])
def test_the_wrong_program_gets_its_code(case: Case) -> None:
    note = note_of(lambda: run(case.wrong))
    assert note.startswith(f"\n[{case.code}] ")
    assert page_about(case.code) in note
    assert "gradlib.grad" not in note  # the code is torch's, as the program is


def test_what_torch_does_not_refuse_is_known() -> None:
    accepted = {case.code: case for case in CASES.values() if not case.torch_refuses}
    assert sorted(accepted) == ["GL103", "GL105"]
    for case in accepted.values():
        with gradlib.explain_errors():
            run(case.wrong)


@pytest.mark.parametrize("code", ["GL101", "GL108", "GL111", "GL112", "GL113"])
def test_backward_gets_the_same_code(code: str) -> None:
    program = re.sub(
        r"torch\.autograd\.grad\((\w+), x\)", r"\1.backward()", CASES[code].wrong
    )
    found = re.search(r"(\w+)\.backward\(\)", program)
    assert found
    note = note_of(lambda: run(program))
    assert note.startswith(f"\n[{code}] ")
    assert re.search(rf"\n    {found[1]}(\.mean\(\))?\.backward\(", note)


def test_the_note_is_what_grad_says() -> None:
    x = vector()
    y = torch.outer(x, x)
    note = note_of(lambda: torch.autograd.grad(y, x, torch.ones(3)))
    with pytest.raises(gradlib.GradOutputsShapeError) as caught:
        gradlib.grad(y, x, torch.ones(3))
    assert note.strip() == str(caught.value).replace(
        "gradlib.grad", "torch.autograd.grad"
    )


def test_too_few_vectors_are_that_and_not_of_another_shape() -> None:
    x = vector()
    losses = [(x * i).sum() for i in (1, 2)]
    for v in (torch.ones(2), [torch.ones(2)], [torch.ones(())]):
        note = note_of(lambda v=v: torch.autograd.grad(losses, x, v))
        assert note.startswith("\n[GL103] ")
        assert "torch.autograd.grad(losses, x, v)" in note
    too_many = [torch.ones(2), torch.ones(())]  # of which torch takes the first
    note = note_of(lambda: torch.autograd.grad(losses[0], x, too_many))
    assert note.startswith("\n[GL102] grad_outputs[0] has shape [2], and ")
    other = torch.ones(3)
    weights = [torch.ones(()), torch.ones(())]
    note = note_of(lambda: torch.autograd.grad(losses[0], other, weights))
    assert note.startswith("\n[GL110] inputs[0] (`other`) does not require grad.")


@pytest.mark.parametrize("first", [torch.float32, torch.complex64])
@pytest.mark.parametrize("count", [3, 4])
def test_a_complex_output_that_is_not_the_first(first: torch.dtype, count: int) -> None:
    """To find the index of an output torch compares tensors, and raises the result."""
    second = torch.complex64 if first == torch.float32 else torch.float32
    a = torch.randn(3, dtype=first, requires_grad=True)
    b = torch.randn(count, dtype=second, requires_grad=True)
    vectors = [torch.ones(3, dtype=first), torch.ones(count, dtype=first)]
    note = note_of(lambda: torch.autograd.grad([a * 1, b * 1], [a, b], vectors))
    assert note.startswith("\n[GL105] grad_outputs[1] is ")


def test_no_inputs_at_all() -> None:
    loss = vector().sum()
    calls: list[Callable[[], object]] = [
        lambda: loss.backward(inputs=[]),
        lambda: torch.autograd.backward(loss, inputs=[]),
    ]
    for fail in calls:
        note = note_of(fail)
        assert note.startswith("\n[GL114] inputs is empty.\n")
        assert "\n    x = list(f.parameters())\n" in note
        assert re.search(r"\n    .*backward\(.*inputs=x\)\n", note)


def test_type_message_and_traceback_stay() -> None:
    x = vector()

    def fail() -> None:
        (x * 2).backward()

    with pytest.raises(RuntimeError) as bare:
        fail()
    with pytest.raises(RuntimeError) as explained, gradlib.explain_errors():
        fail()
    assert type(explained.value) is type(bare.value)
    assert explained.value.args == bare.value.args
    lines, others = (
        [(it.filename, it.name) for it in traceback.extract_tb(error.tb)]
        for error in (explained, bare)
    )
    assert lines == others
    assert explained.value.__cause__ is explained.value.__context__ is None


def test_one_note_however_deeply_nested() -> None:
    x = vector()

    @gradlib.explain_errors()
    def fail() -> None:
        with gradlib.explain_errors(), gradlib.explain_errors():
            (x * 2).backward()

    assert "[GL101]" in note_of(fail)


def test_it_decorates_a_function() -> None:
    @gradlib.explain_errors()
    def add(one: int, *, other: int) -> int:
        return one + other

    assert add(1, other=2) == 3


async def later() -> None: ...


def one_by_one() -> Iterator[int]:
    yield 1


async def one_by_one_later() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [later, one_by_one, one_by_one_later])
def test_it_refuses_a_function_whose_body_runs_later(function: Any) -> None:
    with pytest.raises(gradlib.RecordingArgumentError, match=function.__name__):
        gradlib.explain_errors()(function)


def test_one_object_serves_many_blocks() -> None:
    explaining = gradlib.explain_errors()
    x = vector()

    def fail() -> None:
        with explaining, explaining:
            (x * 2).backward()

    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            fail()
        (note,) = notes(caught.value)
        assert note.startswith("\n[GL101] ")


def error_of(fail: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (any)
        fail()
    return caught.value


def test_errors_in_a_group_are_explained() -> None:
    x = vector()
    first, second = error_of((x * 2).backward), error_of(torch.ones(()).backward)
    others = [ExceptionGroup("inner", [second]), KeyError("mine")]
    with pytest.raises(ExceptionGroup) as caught, gradlib.explain_errors():
        raise ExceptionGroup("outer", [first, *others])
    assert [len(notes(it)) for it in (caught.value, *others)] == [0, 0, 0]
    assert notes(first)[0].startswith("\n[GL101] ")
    assert notes(second)[0].startswith("\n[GL108] ")


def test_the_error_that_another_was_raised_from_is_explained() -> None:
    first = error_of((vector() * 2).backward)

    def by_cause() -> None:
        raise ValueError("mine") from first

    def by_context() -> None:
        try:
            raise first
        except RuntimeError:
            raise ValueError("mine")  # noqa: B904 (that is the question)

    def by_neither() -> None:
        try:
            raise first
        except RuntimeError:
            raise ValueError("mine") from None

    for fail, count in (by_neither, 0), (by_context, 1), (by_cause, 1):
        with (
            pytest.raises(ValueError, match="mine") as caught,
            gradlib.explain_errors(),
        ):
            fail()
        assert notes(caught.value) == []
        assert len(notes(first)) == count


def test_what_gradlib_has_explained_is_not_explained_again() -> None:
    x = vector()
    loss = (x**2).sum()
    loss.backward()
    with pytest.raises(gradlib.FreedGraphError) as caught, gradlib.explain_errors():
        gradlib.grad(loss, x)
    assert notes(caught.value) == notes(cast(Any, caught.value.__cause__)) == []


def test_notes_of_others_stay() -> None:
    error = RuntimeError("grad can be implicitly created only for scalar outputs")
    error.add_note("mine")
    with pytest.raises(RuntimeError), gradlib.explain_errors():
        raise error
    first, second = notes(error)
    assert first == "mine"
    assert second.startswith("\n[GL101]")


def fail_in_a_hook() -> None:
    x = vector()
    h = x * 2
    h.register_hook(lambda _: torch.ones(3) @ torch.ones(4))
    h.sum().backward()


def fail_in_a_function() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            del ctx, gradients
            raise ValueError("mine")

    y: Any = Broken.apply(vector())
    y.sum().backward()


def fail_with_a_wrong_gradient() -> None:
    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            del ctx
            return gradients[0][:2]

    y: Any = Narrow.apply(vector())
    y.sum().backward()


def fail_while_integers_are_weights() -> None:
    x = vector()
    h = x * 2
    h.register_hook(lambda _: torch.ones(3) @ torch.ones(4))
    torch.autograd.grad(h, x, torch.ones(3, dtype=torch.int64))


def fail_in_nothing_of_autograd() -> None:
    torch.mv(torch.ones(3, 3), torch.ones(4))


def fail_with_a_quotation() -> None:
    raise RuntimeError("I read: Trying to backward through the graph a second time")


def fail_as_another_kind() -> None:
    raise ValueError("grad can be implicitly created only for scalar outputs")


def fail_by_gradlib() -> None:
    x = vector()
    gradlib.grad(x * 2, x)


def fail_to_look_up() -> None:
    dict[str, int]().pop("missing")


OTHERS = [
    fail_in_a_hook,
    fail_in_a_function,
    fail_with_a_wrong_gradient,
    fail_while_integers_are_weights,
    fail_in_nothing_of_autograd,
    fail_with_a_quotation,
    fail_as_another_kind,
    fail_by_gradlib,
    fail_to_look_up,
]


@pytest.mark.parametrize("fail", OTHERS)
def test_other_errors_are_not_touched(fail: Callable[[], None]) -> None:
    with pytest.raises(Exception) as caught, gradlib.explain_errors():  # noqa: PT011 (any)
        fail()
    assert notes(caught.value) == []


def test_what_leaves_by_force_is_not_touched() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, gradlib.explain_errors():
        raise KeyboardInterrupt
    assert notes(caught.value) == []


def test_a_good_block_runs() -> None:
    x = vector()
    with gradlib.explain_errors():
        (x**2).sum().backward()
    assert torch.equal(x.grad, 2 * x) if x.grad is not None else False


def test_the_tensor_is_named() -> None:
    my_losses = vector() * 2
    assert "The output (`my_losses`) has shape [3]" in note_of(my_losses.backward)


def test_the_attribute_of_a_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    loss = model[0](torch.ones(3)).sum()
    note = note_of(lambda: torch.autograd.grad(loss, list(model.parameters())))
    assert "inputs[2] (`model[1].weight`) is not part of the graph" in note
    assert "`model[0].bias`" in note


@where_shown
def test_an_optimizers_step_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(5, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    note = note_of(loss.backward)
    assert "`model[1].weight` was changed in place" in note
    assert "step()" in note


def test_the_detached_tensor_is_named() -> None:
    loss = (vector() ** 2).sum()
    cut = loss.detach()
    note = note_of(cut.backward)
    assert "(`cut`) does not require grad: it is `loss`, detached" in note


def test_several_outputs_of_backward() -> None:
    x = vector()
    y = [x * 2, torch.outer(x, x)]
    wrong = [torch.ones(3), torch.ones(3)]
    note = note_of(lambda: torch.autograd.backward(y, wrong))
    assert "grad_tensors[1] has shape [3], and tensors[1] (`y[1]`) has [3, 3]" in note
    assert "torch.autograd.backward(y, v)" in note
    names: dict[str, Any] = {"torch": torch, "y": y, "wrong": wrong}
    exec(note[note.index("    v") : note.index("More in")].replace("    ", ""), names)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * gradients[0]


def saved(ctx: Any) -> Tensor:
    return ctx.saved_tensors[0]


class SquaredByHelper(Squared):
    """Reads its saved tensors in a helper function."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * saved(ctx) * gradients[0]


def custom_operation() -> Any:
    """Return the same, as an operation that was registered."""

    @torch.library.custom_op("gradlib_tests::squared", mutates_args=())
    def squared(x: Tensor) -> Tensor:
        return x**2

    def keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    def back(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient

    squared.register_autograd(back, setup_context=keep)
    return squared


@pytest.mark.parametrize(
    "make",
    [lambda: Squared.apply, lambda: SquaredByHelper.apply, custom_operation],
    ids=["function", "helper", "registered"],
)
def test_a_saved_tensor_of_ones_own_function(make: Any) -> None:
    operation = make()
    loss = operation(vector()).sum()
    loss.backward()
    assert note_of(loss.backward).startswith("\n[GL111] ")
    x = vector()
    hidden = x * 1
    loss = operation(hidden).sum()
    hidden.add_(1)
    note = note_of(partial(loss.backward, retain_graph=True))
    assert note.startswith("\n[GL112] ")
    assert "`hidden`" in note
    with pytest.raises(gradlib.ChangedInPlaceError):
        gradlib.grad(loss, x)


def test_a_call_that_torch_makes_is_explained() -> None:
    weight = vector()
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure() -> Any:
        my_losses = weight * 2
        my_losses.backward()

    assert "(`my_losses`) has shape [3]" in note_of(lambda: optimizer.step(closure))


def code_by_words(said: Said) -> str | None:
    """Return the code that follows from the message of an error alone."""
    if NOT_TOLD.match(said.message):
        return None
    if said.code == "GL113":
        return "GL101"
    return "GL102" if said.message.startswith("Mismatch in shape") else said.code


@pytest.mark.parametrize("said", messages(), ids=lambda it: it.message[:40])
def test_what_every_release_says_gets_its_code(said: Said) -> None:
    code = code_by_words(said)
    assert code_of(said.message) == code
    error = RuntimeError(said.message)
    with pytest.raises(RuntimeError), gradlib.explain_errors():
        raise error
    expected = [] if code is None else [f"\n[{code}] "]
    assert [note[:9] for note in notes(error)] == expected


@pytest.mark.parametrize("wording", WORDINGS, ids=lambda it: it.words[:40])
def test_each_wording_was_said_by_a_release(wording: Wording) -> None:
    here = str(error_of(vector().cpu().numpy))  # no recording has this error
    every = (here, *(said.message for said in messages()))
    assert any(re.match(wording.words, message) for message in every)


class Mistaken(torch.autograd.Function):
    """Raises a given error in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, None]:
        raise ctx.error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't retain_grad on Tensor that has requires_grad=False"),
        RuntimeError("got 2 tensors and 1 gradients"),
        KeyError("mine"),
    ],
)
def test_what_a_hook_or_function_raises_is_no_error_of_the_call(
    error: Exception,
) -> None:
    x, unused = vector(), vector()

    def fail(_: Tensor) -> None:
        raise error

    hooked = x.clone()
    hooked.register_hook(fail)
    for y in hooked, cast(Tensor, Mistaken.apply(x, error)):
        v = torch.ones_like(y)
        for ask in gradlib.grad, gradlib.explain_vjp:
            with pytest.raises(type(error)) as caught:
                ask(y, x, v)
            assert caught.value is error
        # The unused input, which torch would find only after the pass, is not named.
        with pytest.raises(type(error)), gradlib.explain_errors():
            torch.autograd.grad(y, [x, unused], v)
        assert not hasattr(error, "__notes__")


def test_an_error_of_a_call_that_a_hook_makes_on_the_same_output() -> None:
    def again(h: Tensor, x: Tensor, _: Tensor) -> Tensor:
        return torch.autograd.grad(h, x, retain_graph=True)[0]  # without a v

    for ask in gradlib.grad, gradlib.explain_vjp:
        x = vector()
        y = x.square()
        h = y * 2
        y.register_hook(partial(again, h, x))
        with pytest.raises(RuntimeError) as caught:
            ask(h, x, torch.ones_like(h))
        assert not isinstance(caught.value, gradlib.GradlibError)


OLD = "which is output 0 of ExpBackward, is at version 1; expected version 0 instead."


@pytest.mark.parametrize(("shape", "name"), [("[4]", "hidden"), ("[3, 2]", "matrix")])
def test_a_change_in_place_is_named_in_old_words_too(shape: str, name: str) -> None:
    hidden, matrix, other = torch.ones(4), torch.ones(2, 3), torch.ones(4)
    hidden += 1
    matrix += 1
    del other

    error = RuntimeError(
        "one of the variables needed for gradient computation has been modified by "
        f"an inplace operation: [torch.FloatTensor {shape}], {OLD}"
    )
    y: Any = Mistaken.apply(vector(), error)
    with pytest.raises(RuntimeError) as caught, gradlib.explain_errors():
        y.sum().backward()
    # No node has saved the tensor, so the name is a guess.
    assert f"perhaps `{name}`, which" in notes(caught.value)[0].replace("\n", " ")
    assert hidden is not matrix


def changed_by(y: Tensor) -> str:
    note = note_of(lambda: y.sum().backward())
    return re.sub(r"\s+", " ", note)


@where_shown
def test_the_tensors_that_are_not_named_are_counted() -> None:
    h = torch.ones(3, requires_grad=True).exp()
    a, b, c, d, e = h[:], h[:], h[:], h[:], h[:]
    h.add_(1)
    said = re.search(r"One of (`\w`, ){3}`\w` and 2 more was changed", changed_by(h))
    assert said, (a, b, c, d, e)


def test_the_tensors_that_may_be_meant_are_counted() -> None:
    a, b, c, d, e = (torch.ones(4).add_(1) for _ in range(5))
    y: Any = Mistaken.apply(
        vector(),
        RuntimeError(
            "one of the variables needed for gradient computation has been modified by "
            f"an inplace operation: [torch.FloatTensor [4]], {OLD}"
        ),
    )
    said = re.search(r"perhaps (`\w` or ){4}one of 1 more, which", changed_by(y))
    assert said, (a, b, c, d, e)


def test_what_torch_says_is_explained_first() -> None:
    x, unused = vector(), vector()
    loss = (x**2).sum()
    loss.backward()
    note = note_of(lambda: torch.autograd.grad(loss, [x, unused]))
    assert note.startswith("\n[GL111]")


def test_iterators_that_torch_used_up() -> None:
    x, spare = vector(), vector()
    loss = (x**2).sum()
    used_up: Any = iter([loss]), iter([x, spare])
    note = note_of(lambda: torch.autograd.grad(*used_up))
    assert "[GL109] inputs[1] (`spare`)" in note


def test_a_leaf_made_anew_of_losses() -> None:
    losses = [3.0, 4.0]
    note = note_of(lambda: torch.tensor(losses, requires_grad=True).backward())
    assert "torch.stack(losses) keeps" in note


def derivative(r: Tensor) -> Any:
    return torch.autograd.grad((r**2).sum(), r)[0]


@pytest.mark.parametrize(
    ("call", "is_hidden"),
    [
        (lambda x: torch.vmap(derivative)(x), True),
        (lambda x: torch.vmap(derivative, chunk_size=2)(x), True),
        (lambda x: torch.func.jvp(derivative, (x,), (x,)), True),
        (lambda x: torch.func.grad(lambda r: torch.vmap(derivative)(r).sum())(x), True),
        (lambda x: torch.func.grad(lambda r: derivative(r.detach()).sum())(x), False),
        (lambda x: torch.func.vjp(lambda r: derivative(r.detach()), x), False),
    ],
)
def test_where_the_transform_has_ended_since(
    call: Callable[[Tensor], object], is_hidden: bool
) -> None:
    said = "in a function that torch.vmap or torch.func.jvp calls"
    note = note_of(lambda: call(torch.ones(3)))
    assert (said in re.sub(r"\s+", " ", note)) == is_hidden


def test_a_tensor_of_several_names_is_named_once() -> None:
    h = torch.ones(3, requires_grad=True).exp()
    alias, acts = h, [h]
    h.add_(1)

    def fail() -> None:
        alias.sum().backward()

    assert "One of `" not in note_of(fail)
    assert acts


def test_a_global_is_named() -> None:
    program = """
        import torch

        global_losses = torch.ones(3, requires_grad=True) * 2

        def fail():
            global_losses.backward()
        """
    names: dict[str, Any] = {}
    exec(dedent(program), names)
    assert "(`global_losses`)" in note_of(names["fail"])


@where_shown
def test_parameters_that_have_no_shape_yet_are_passed_over() -> None:
    lazy = nn.LazyLinear(2)
    hidden = vector() * 2
    loss = (hidden**2).sum()
    hidden += 1
    with pytest.raises(RuntimeError) as caught, gradlib.explain_errors():
        loss.backward()
    assert "[GL112] `hidden` was changed in place" in notes(caught.value)[0]
    assert lazy.in_features == 0


@pytest.mark.parametrize(
    "call",
    [
        "y.backward(inputs=[x])",
        "y.backward(torch.ones(2), inputs=x)",
        "torch.autograd.backward([y], [torch.ones(2)], inputs=[x])",
    ],
)
def test_the_inputs_of_a_backward_stay_its_inputs(call: str, tmp_path: Path) -> None:
    x, w = (torch.randn(3, requires_grad=True) for _ in range(2))
    names = {"torch": torch, "x": x, "w": w, "y": x * w}
    file = tmp_path / "call.py"
    file.write_text(call)
    with pytest.raises(RuntimeError) as raised, gradlib.explain_errors():
        exec(compile(call, str(file), "exec"), names)
    lines = raised.value.__notes__[0].splitlines()
    exec("\n".join(it[4:] for it in lines if it.startswith("    ")), names)
    assert x.grad is not None
    assert w.grad is None


def test_options_that_contradict_each_other_are_torchs_to_explain() -> None:
    x, unused = vector(), vector()
    loss = (x**2).sum()
    options = {"materialize_grads": True, "allow_unused": False}
    for ask in torch.autograd.grad, gradlib.grad:
        with (
            pytest.raises(ValueError, match="allow_unused=False") as caught,
            gradlib.explain_errors(),
        ):
            ask(loss, [x, unused], torch.ones(2), **options)
        assert notes(caught.value) == []


def test_a_discriminator_shall_not_free_the_graph_of_a_generator() -> None:
    generator, discriminator = (
        nn.Linear(2, 3),
        nn.Sequential(nn.Linear(3, 1), nn.Tanh()),
    )
    fake = generator(torch.ones(4, 2)).exp()
    discriminator(fake).mean().backward()
    note = note_of(discriminator(fake).mean().backward)
    assert note.startswith("\n[GL111] ")
    assert "detach() the part" in " ".join(note.split())

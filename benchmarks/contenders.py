"""The ways of recording that are compared."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial

import gradlib
from benchmarks import by_hand
from benchmarks.contender import Contender, Seen, SeenAll, as_tuple, with_hooks
from benchmarks.names import BY_HAND, FULL, NONE, OURS, OURS_STATISTICS
from benchmarks.peers import peers


def contenders() -> list[Contender]:
    """Return every contender; the first two are what the others are compared with."""
    return [
        with_hooks(NONE, "nothing", lambda _: nullcontext()),
        with_hooks(
            BY_HAND,
            "args, output, grad_input (the tensor's total), grad_output, parameter "
            "gradients; references",
            by_hand.tensor_hooks,
            read=partial(_read_by_hand, grad_input="total"),
        ),
        with_hooks(
            "tensor hooks on aliases by hand",
            "args, output, grad_input (this call's share), grad_output, parameter "
            "gradients; references",
            by_hand.tensor_hooks_on_aliases,
            read=partial(_read_by_hand, grad_input="share"),
        ),
        with_hooks(
            FULL,
            "args, output, grad_input (this call's share), grad_output, parameter "
            "gradients; references",
            by_hand.full_backward_hooks,
            read=partial(_read_by_hand, grad_input="share"),
            around=_quiet,
        ),
        with_hooks(
            OURS,
            "args, kwargs, output, grad_input (share and total), grad_output, "
            "parameter gradients (share and total) of the modules called; values as "
            "they were",
            gradlib.record,
            read=_read_gradlib,
        ),
        with_hooks(
            OURS_STATISTICS,
            "statistics of the same",
            partial(gradlib.record, reduce=gradlib.tensor_stats),
            read=_read_gradlib,
        ),
        *peers(),
    ]


def _read_by_hand(recorded: by_hand.Calls, grad_input: str) -> SeenAll:
    seen = SeenAll()
    for call in recorded.calls:
        output = as_tuple(call.output)
        seen.calls[call.name] = Seen(
            call.args,
            output,
            tuple(map(call.grad_output.get, range(len(output)))),
            **{
                f"grad_input_{grad_input}": tuple(
                    map(call.grad_input.get, range(len(call.args)))
                )
            },
        )
    for name, (grad,) in recorded.param_grads.items():
        seen.param_grads[name] = grad
    return seen


@contextmanager
def _quiet() -> Generator[None]:
    # The hook warns that the first module's input needs no gradient.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        yield


def _read_gradlib(recording: gradlib.Recording) -> SeenAll:
    seen = SeenAll()
    for call in recording:
        seen.calls[call.name] = Seen(
            call.args,
            as_tuple(call.output),
            as_tuple(call.grad_output),
            call.grad_input,
            call.passes[0].grad_input_total,
        )
        for key, grad in (call.param_grads or {}).items():
            seen.param_grads[f"{call.name}.{key}"] = grad
    return seen

"""Other projects' recorders. They are used if they are installed."""

# Where the others are installed, their imports are no errors to ignore.
# pyright: reportUnnecessaryTypeIgnoreComment=false

import importlib.metadata
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from benchmarks.contender import Contender, Seen, SeenAll, as_tuple
from benchmarks.nets import Net


def peers() -> list[Contender]:
    """Return the other projects' recorders."""
    return [
        Contender(
            "TorchLens",
            "more: every operation with its output and its gradient, by reference, and "
            "its place in the graph; a module's args and output are found through it",
            _use_torchlens,
            read=_read_torchlens,
            around=_torchlens_at_work,
            every=10,
            absent=_why_absent("torchlens"),
            peer=True,
            version=_version("torchlens"),
        ),
        Contender(
            "captum",
            "args, output, grad_input (share), grad_output; clones; no parameter "
            "gradients. Nothing in it gives them in one pass, so: LayerActivation and "
            "LayerGradientXActivation(multiply_by_inputs=False), each for the inputs "
            "and for the outputs of all modules: four forwards and two backwards",
            _use_captum,
            read=_read_captum,
            every=2,
            absent=_why_absent("captum"),
            peer=True,
            version=_version("captum"),
        ),
    ]


def _use_torchlens(net: Net) -> Any:
    import torchlens  # pyright: ignore[reportMissingImports] # not a dependency

    # The cheapest options that keep the five quantities.
    options = torchlens.options.CaptureOptions(save_grads=True, save_code_context=False)
    trace = torchlens.trace(net.model, net.x, save_mode="view", capture=options)
    trace.log_backward(net.loss(trace[trace.output_layers[0]].out))
    return trace


@contextmanager
def _torchlens_at_work() -> Generator[None]:
    """Let TorchLens wrap torch's functions, and unwrap them for the others' turns."""
    from torchlens.backends.torch import wrappers  # pyright: ignore (not a dependency)

    wrappers.wrap_torch()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        wrappers.unwrap_torch()


def _read_torchlens(trace: Any) -> SeenAll:
    seen = SeenAll()
    for module in trace.modules:
        inputs = [trace[label] for label in module.input_ops]
        outputs = [trace[label] for label in module.output_ops]
        seen.calls["" if module.address == "self" else module.address] = Seen(
            tuple(op.out for op in inputs),
            tuple(op.out for op in outputs),
            tuple(op.grad for op in outputs),
            grad_input_total=tuple(op.grad for op in inputs),
        )
    for parameter in trace.params:
        if parameter.has_grad:
            seen.param_grads[parameter.address] = parameter.grad
    return seen


def _use_captum(net: Net) -> dict[str, list[Any]]:
    from captum import attr  # pyright: ignore[reportMissingImports] # not a dependency

    def loss(x: Tensor) -> Tensor:
        return net.loss(net.model(x)).reshape(1)

    x = net.x.detach()  # captum makes it require grad, and leaves it so
    modules = list(net.called.values())
    values = attr.LayerActivation(loss, modules)
    grads = attr.LayerGradientXActivation(loss, modules, multiply_by_inputs=False)
    return {
        "names": list(net.called),
        "args": values.attribute(x, attribute_to_layer_input=True),
        "output": values.attribute(x),
        "grad_input": grads.attribute(x, attribute_to_layer_input=True),
        "grad_output": grads.attribute(x),
    }


def _read_captum(recorded: dict[str, list[Any]]) -> SeenAll:
    seen = SeenAll()
    for name, args, output, grad_input, grad_output in zip(
        *recorded.values(), strict=True
    ):
        seen.calls[name] = Seen(
            as_tuple(args),
            as_tuple(output),
            as_tuple(grad_output),
            grad_input_share=as_tuple(grad_input),
        )
    return seen


def _why_absent(package: str) -> str:
    return "" if _version(package) else f"{package} is not installed"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""

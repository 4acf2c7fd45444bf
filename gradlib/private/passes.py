"""What gradlib uses of running backward passes."""

# Private names are what this folder is for, and torch's stubs leave some of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private.modes import (
    function_modes,
    graph_is_captured,
    values_are_stand_ins,
)
from gradlib.private.nodes import forms_at

_C = cast(Any, torch._C)

# The frame of the function that is running, or of one of its callers.
running_frame: Callable[[int], FrameType] = sys._getframe

# The number of the running backward pass, unique in this process; -1 outside of any.
backward_pass_id: Callable[[], int] = _C._current_graph_task_id

# The node whose gradients a running backward pass has just gathered.
current_node: Callable[[], Node | None] = _C._current_autograd_node

# Makes a function run when the running backward pass ends, unless the pass raises.
when_pass_ends: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def pass_is_compiled() -> bool:
    """Tell whether torch.compile has compiled the running pass.

    `when_pass_ends` does not work then. torch 2.8 and 2.13 have the name.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(compiled, "in_compiled_autograd_region", False)


def pass_began_here() -> bool:
    """Tell whether the running pass was begun in this thread, as it is on a CPU.

    On a GPU it runs in the device's own thread, which has no Python caller, while the
    thread that began it waits.
    """
    return _began_pass(running_frame(1)) is not None


def who_began_pass() -> FrameType | None:
    """Return the frame that called ``torch.autograd``, in this thread, for the pass.

    With ``loss.backward()`` that is the frame of the method.
    """
    frame = _began_pass(running_frame(1))
    return frame and frame.f_back and frame.f_back.f_back


def pass_outputs() -> list[tuple[int, Sequence[Any]]]:
    """Return the tensors, or edges of the graph, that the running pass began at.

    Returns:
        The number of the thread that began it, and the outputs. Where that is another
        thread, and several wait for a pass of theirs, those of each.
    """
    this = threading.get_ident()
    begun = [(this, _began_pass(running_frame(1)))]
    if begun[0][1] is None:
        others = sys._current_frames()
        del others[this]  # the frame of this call, which would hold itself in a cycle
        begun = [(thread, _began_pass(frame)) for thread, frame in others.items()]
    return [(thread, it.f_locals["t_outputs"]) for thread, it in begun if it]


def _began_pass(frame: FrameType | None) -> FrameType | None:
    """Return the frame that began a pass, `frame` or one of its callers."""
    while frame is not None and frame.f_code is not _BEGINS_PASSES:
        frame = frame.f_back
    return frame


_BEGINS_PASSES = torch.autograd.graph._engine_run_backward.__code__


def grad_in_modes(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    vectors: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> Sequence[Tensor | None]:
    """Return gradients, ``None`` for those that are unused.

    All function modes are in force in the pass, so they see what a custom backward does
    and a checkpoint computes. ``torch.autograd.grad`` hands itself over to the
    innermost, which is not in force meanwhile.
    """
    retain_graph |= create_graph
    if not function_modes():
        return torch.autograd.grad(
            outputs,
            inputs,
            vectors,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    ends, given, to = tuple(outputs), tuple(vectors), tuple(inputs)
    return torch.autograd.graph._engine_run_backward(
        ends, given, retain_graph, create_graph, to, True, accumulate_grad=False
    )


def backward_in_modes(outputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> None:
    """Run a backward pass as `grad_in_modes` does, to all leaves; retain the graph."""
    if not function_modes():
        torch.autograd.backward(outputs, vectors, retain_graph=True)
        return
    ends, given = tuple(outputs), tuple(vectors)
    torch.autograd.graph._engine_run_backward(
        ends, given, True, False, (), allow_unreachable=True, accumulate_grad=True
    )


def is_passed_elsewhere(node: Node) -> bool:
    """Tell whether backward passes run through a node in its device's own thread.

    The nodes made there get sequence numbers that this thread counts for itself.
    """
    return any(form.device.type not in ("cpu", "meta") for form in forms_at(node))


def are_passed_in_order(nodes: Iterable[Node]) -> bool:
    """Tell whether one thread runs all nodes in a pass, so by falling numbers.

    Each GPU has a thread of its own; one thread runs what is on no GPU.
    """
    devices = {form.device for node in nodes for form in forms_at(node)}
    return len({None if it.type in ("cpu", "meta") else it for it in devices}) < 2


def has_accelerator() -> bool:
    """Tell whether a device with a thread of its own may be in use.

    Asking CUDA how many devices it has would keep child processes from using any.
    """
    kind = _accelerator()
    if kind == "cuda":
        return torch.cuda.is_initialized()
    return bool(kind) and torch.accelerator.is_available()


@cache
def _accelerator() -> str:
    built_for = torch.accelerator.current_accelerator()
    return built_for.type if built_for else ""


# Whether this thread works under a dispatch key, and the key of is_grads_batched=True.
_key_is_included: Callable[[Any], bool] = _C._dispatch_tls_is_dispatch_key_included
_VMAP = _C._dispatch_key_parse("VmapMode")


def gradients_are_batched() -> bool:
    """Tell whether backward passes run at once, on tensors that stand for several."""
    # The key, not the level of vmap: a pass through a GPU's tensors runs in the
    # device's own thread, which is handed the dispatch keys but not the level.
    return _key_is_included(_VMAP) or values_are_stand_ins()


def gradients_have_values() -> bool:
    """Tell whether the gradients of the running pass can be kept.

    Those of a batched pass stand for several. What a CUDA graph captures is computed
    only when it is replayed, with whatever else was captured.
    """
    return not (gradients_are_batched() or graph_is_captured())

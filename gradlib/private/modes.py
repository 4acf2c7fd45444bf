"""The modes and transforms in force where something is computed."""

# Private names are what this folder is for, and torch's stubs leave some of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from threading import Lock
from types import FrameType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch._functorch import vmap as _functorch_vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import _CloneArgBeforeMutateMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from gradlib.private.hooks import any_global_hook
from gradlib.private.modules import calls_are_torchs

_P = ParamSpec("_P")
_R = TypeVar("_R")

_C = cast(Any, torch._C)

# Whether autograd records what this thread computes: torch.is_grad_enabled, unwrapped.
grad_is_enabled: Callable[[], bool] = _C.is_grad_enabled

# Switches that on and off: torch.set_grad_enabled, unwrapped.
enable_grad: Callable[[bool], None] = _C._set_grad_enabled

# The innermost transform of torch.func, and the trace of torch.jit; None without one.
_transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack
_HIDING = _C._functorch.TransformType.Vmap, _C._functorch.TransformType.Jvp
_tracing: Callable[[], object] = _C._get_tracing_state
_dispatch_mode: Callable[[object], object] = _C._get_dispatch_mode
_FAKE, _PROXY = _C._TorchDispatchModeKey.FAKE, _C._TorchDispatchModeKey.PROXY

# Whether autocast is enabled for some device.
any_autocast: Callable[[], bool] = _C._is_any_autocast_enabled

# A context outside torch.func's transforms, in which tensors are not wrapped.
no_transforms: Callable[[], AbstractContextManager[Any]] = (
    temporarily_clear_interpreter_stack
)

# A context in which no torch function mode sees anything.
no_function_modes: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunction

# A context in which no tensor subclass sees anything, nor can refuse it.
no_classes_of_tensors: Callable[[], AbstractContextManager[None]] = (
    _C.DisableTorchFunctionSubclass
)

# How many torch function modes are in force; a default device is one.
function_modes: Callable[[], int] = _C._len_torch_function_stack


def call_unseen(function: Callable[..., None], *args: Any) -> None:
    """Call a function with no function mode in force but that of a default device.

    Tensor subclasses still see what is done with them. This is no context manager: at
    an interrupt, one would exit after those around it.

    Args:
        function: It may set another default device.
        args: Its arguments.
    """
    if not _some_mode_is_unknown():
        function(*args)
        return
    modes = _get_current_function_mode_stack()
    others = [it for it in modes if type(it) is not DeviceContext]
    devices = [it for it in modes if type(it) is DeviceContext]  # torch has them first
    has_begun = False
    try:
        _put_in_force(devices)
        has_begun = True
        function(*args)
    finally:
        devices = _get_current_function_mode_stack() if has_begun else devices
        try:
            _put_in_force([*devices, *others])
        except BaseException:  # an interrupt
            _put_in_force([*devices, *others])
            raise


def call_past_classes(function: Callable[..., None], *args: Any) -> None:
    """Call a function as `call_unseen` does, unseen by tensor subclasses too."""
    with no_classes_of_tensors():
        call_unseen(function, *args)


def _put_in_force(modes: Sequence[Any]) -> None:
    for _ in range(function_modes()):
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)


# A context in which no torch dispatch mode sees anything.
no_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes


def always_recorded(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let autograd record in `function`, under no_grad() and inference_mode() too.

    This does what ``torch.inference_mode(False)`` does, at a fraction of the cost.
    """

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _C._InferenceMode(False):
            return function(*args, **kwargs)

    return called


def values_are_stand_ins() -> bool:
    """Tell whether tensors stand for others: in torch.func, or while jit traces."""
    return _transform() is not None or _tracing() is not None


def graphs_are_hidden() -> bool:
    """Tell whether no tensor requires grad here, as inside ``torch.vmap``."""
    innermost = _transform()
    return innermost is not None and innermost.key() in _HIDING


def graphs_were_hidden(frames: Iterable[FrameType]) -> bool:
    """Tell whether no tensor required grad where an error was raised.

    Args:
        frames: The frames that the error passed through, the innermost first.
    """
    for frame in frames:
        if frame.f_code in _HAD_HIDDEN:
            return True
        if frame.f_code in _HAD_SHOWN:
            return False
    return False


_HAD_HIDDEN, _HAD_SHOWN = (
    {inspect.unwrap(cast(Any, it)).__code__ for it in every}
    for every in (
        (
            _functorch_vmap._flat_vmap,
            _functorch_vmap._chunked_vmap,
            eager_transforms._jvp_with_argnums,
        ),
        (eager_transforms._vjp_with_argnums, eager_transforms.grad_and_value_impl),
    )
)


def values_are_fake() -> bool:
    """Tell whether tensors have no values, or are only traced.

    This is so in a FakeTensorMode, as in torch.export, and in make_fx.
    """
    return tensors_are_fake() or operations_are_traced()


def tensors_are_fake() -> bool:
    """Tell whether tensors have no values here, as in a FakeTensorMode."""
    return bool(dispatch_modes()) and _dispatch_mode(_FAKE) is not None


def operations_are_traced() -> bool:
    """Tell whether make_fx traces what is computed: then no number can be read."""
    return bool(dispatch_modes()) and _dispatch_mode(_PROXY) is not None


def for_several(
    function: Callable[[Tensor], Sequence[Tensor]], values: Tensor
) -> list[Tensor]:
    """Do what ``torch.func.vmap`` does, at a third of the cost.

    It does not warn of operations that loop over the values: their results are right.

    Args:
        function: A function of one value, which draws no random numbers.
        values: Several values, along the first axis.

    Returns:
        The outputs of `function`, each stacked over the values along a first axis.
    """
    _load_decompositions()
    functorch, count = _C._functorch, len(values)
    level = functorch._vmap_increment_nesting(count, "error")
    # Not by a filter of warnings: each change of those has others shown again.
    _silent_for(1)
    try:
        found = function(functorch._add_batch_dim(values, 0, level))
        return [functorch._remove_batch_dim(it, level, count, 0) for it in found]
    finally:
        _silent_for(-1)
        functorch._vmap_decrement_nesting()


def _silent_for(more: int) -> None:
    """Keep torch from warning of operations that loop, until the last of us is done.

    The switch is one for all threads.

    Args:
        more: 1 as a batched pass begins, -1 as it ends.
    """
    global _silent
    with _counting:
        _silent += more
        _C._functorch._set_vmap_fallback_warning_enabled(not _silent)


_silent, _counting = 0, Lock()


_load_decompositions = cache(_functorch_vmap.lazy_load_decompositions)


def graph_is_captured() -> bool:
    """Tell whether this thread's GPU work is captured for a CUDA graph, and not run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def tensors_may_be_dual() -> bool:
    """Tell whether tensors may carry tangents of forward-mode AD."""
    return cast(Any, forward_ad)._current_level >= 0


def nobody_looks_on() -> bool:
    """Tell whether no mode, no transform and no global hook is in force."""
    return not (
        any_autocast()
        or torch.is_inference_mode_enabled()
        or (function_modes() and _some_mode_is_unknown())
        or dispatch_modes()
        or values_are_stand_ins()
        or tensors_may_be_dual()
        or torch.compiler.is_compiling()
        or any_global_hook()
        or not calls_are_torchs()
    )


# How many torch dispatch modes are in force.
dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack


def unseen() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode sees anything; cheap if there is none.

    A user's mode counts or changes what the model computes, and nothing of ours.
    """
    return no_dispatch_modes() if dispatch_modes() else nullcontext()


def saved_are_known_by_address() -> bool:
    """Tell whether saved tensors are looked up by the address of their memory.

    They are in ``torch.autograd.graph.allow_mutation_on_saved_tensors``.
    """
    modes = map(_C._get_dispatch_stack_at, range(dispatch_modes()))
    return any(isinstance(it, _CloneArgBeforeMutateMode) for it in modes)


def _some_mode_is_unknown() -> bool:
    """Tell whether a function mode is in force that may change what is computed.

    A default device only adds ``device=`` to calls that make tensors without it.
    """
    modes: list[object] = _get_current_function_mode_stack()
    return any(type(mode) is not DeviceContext for mode in modes)

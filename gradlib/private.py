"""What gradlib uses of torch that torch does not document, functions above all.

What is read of a single tensor, node or module stands where it is read. Each was there
in torch 2.8 and in every release since, to torch 2.15, or is looked for.
"""

# Private names are what this file is for, and torch's stubs leave some of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import itertools
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from operator import attrgetter, itemgetter, methodcaller
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.testing
from torch import Tensor, nn
from torch._functorch import vmap as _functorch_vmap
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.graph import Node, _CloneArgBeforeMutateMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

Function = TypeVar("Function", bound=Callable[..., Any])

_C = cast(Any, torch._C)

# The frame of the function that is running, or of one of its callers.
running_frame: Callable[[int], FrameType] = sys._getframe

# Copy-on-write: the clone shares the storage until somebody writes to either one.
lazy_clone: Callable[[Tensor], Tensor] = torch._lazy_clone

# A view that shows every entry with its sign changed.
negative_view: Callable[[Tensor], Tensor] = torch._neg_view


def copy_of_quantized(tensor: Tensor) -> Tensor:
    """Do what ``clone`` does, also for what it does not take: floating zero points."""
    if tensor.qscheme() != torch.per_channel_affine_float_qparams:
        return tensor.clone()
    return cast(Any, torch)._make_per_channel_quantized_tensor(
        tensor.int_repr(),
        tensor.q_per_channel_scales(),
        tensor.q_per_channel_zero_points(),
        tensor.q_per_channel_axis(),
    )


# Whether a tensor still shares its memory with a lazy clone: nobody has written to it.
is_copy_on_write: Callable[[Tensor], bool] = _C._is_cow_tensor

# Where a tensor's data begins, without the copy that asking data_ptr() may cause.
data_address: Callable[[Tensor], int] = _C._data_address

# The node that adds to the .grad of a leaf.
AccumulateGrad: type[Node] = _C._functions.AccumulateGrad

# The node of an in-place operation on a view: it hands on the gradient of the base.
CopySlices: type[Node] = _C._functions.CopySlices

# The node of Tensor.clone().
CloneNode: type[Node] = _C._functions.CloneBackward0

# The node of Tensor.to() and of autocast's casts.
ToCopy: type[Node] = _C._functions.ToCopyBackward0

# The node of the CTC loss. On a CPU its threads read what the loss was, and there torch
# refuses to read memory that is shared lazily.
CtcLoss: type[Node] = _C._functions.CtcLossBackward0

# Nodes of what only lays out a tensor anew: they can be called with a gradient alone.
LAID_OUT: frozenset[type[Node]] = frozenset(
    (
        _C._functions.TBackward0,
        _C._functions.TransposeBackward0,
        _C._functions.UnsafeViewBackward0,
        _C._functions.ViewBackward0,
    )
)

# A number that is one backward pass's own in this process; -1 outside of any.
backward_pass_id: Callable[[], int] = _C._current_graph_task_id

# The node whose gradients a running backward pass has just gathered.
current_node: Callable[[], Node | None] = _C._current_autograd_node

# Has a function called when the running backward pass ends, unless it raises.
when_pass_ends: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def pass_is_compiled() -> bool:
    """Tell whether torch.compile has compiled the running pass.

    Nobody is told then when it ends. torch 2.8 and 2.13 have the name.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(compiled, "in_compiled_autograd_region", False)


def pass_began_here() -> bool:
    """Tell whether the running pass was begun in this thread, as it is on a CPU.

    A GPU's runs in a thread of the device, and nobody in Python has called what that
    runs; who has begun the pass waits meanwhile.
    """
    return _began_pass() is not None


def who_began_pass() -> FrameType | None:
    """Return who has called ``torch.autograd``, in this thread, for the running pass.

    With ``loss.backward()`` that is the method.
    """
    frame = _began_pass()
    return frame and frame.f_back and frame.f_back.f_back


def _began_pass() -> FrameType | None:
    frame: FrameType | None = running_frame(1)
    while frame is not None and frame.f_code is not _BEGINS_PASSES:
        frame = frame.f_back
    return frame


_BEGINS_PASSES = torch.autograd.graph._engine_run_backward.__code__


def is_passed_elsewhere(node: Node) -> bool:
    """Tell whether passes run through a node in a thread of its device.

    The nodes that they make there have numbers which that thread counts for itself.
    """
    return any(form.device.type not in ("cpu", "meta") for form in forms_at(node))


# Whether this machine has a device with a thread of its own.
has_accelerator: Callable[[], bool] = cache(torch.accelerator.is_available)

# The sequence number that autograd gives to the next node this thread makes.
next_sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr

# The sequence number of a node: later nodes have higher ones.
sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")

# Whether autograd records what this thread computes: torch.is_grad_enabled, bare.
grad_is_enabled: Callable[[], bool] = _C.is_grad_enabled

# Whether this build has oneDNN with the operation below, which was met in 2.13 and is
# looked for in others; and whether torch may use it now.
_has_onednn_linear = torch.backends.mkldnn.is_available() and hasattr(
    torch.ops.mkldnn, "_linear_pointwise"
)
_onednn_is_allowed: Callable[[], bool] = _C._get_mkldnn_enabled


def onednn_is_enabled() -> bool:
    """Tell whether `onednn_linear` may be used."""
    return _has_onednn_linear and _onednn_is_allowed()


def onednn_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none"
) -> Tensor:
    """Do what ``torch.nn.functional.linear`` does, by oneDNN and without a graph.

    Args:
        x: Contiguous, or of two dimensions, in float32, on the CPU.
        weight: The same, but laid out in any way.
        bias: What is added; ``None`` for nothing.
        then: What is done to each entry, as ``"tanh"``; ``"none"`` for nothing.
    """
    of_onednn: Any = torch.ops.mkldnn
    return of_onednn._linear_pointwise.default(x, weight, bias, then, [], "")


# How many hooks torch has set in this process, on whatever, with a handle to remove it.
hooks_set: Callable[[], int] = partial(getattr, cast(Any, RemovableHandle), "next_id")

# Switches that: torch.set_grad_enabled, bare.
enable_grad: Callable[[bool], None] = _C._set_grad_enabled

# Whether this thread works under a dispatch key; torch.autograd.grad's for batches.
_key_is_included: Callable[[Any], bool] = _C._dispatch_tls_is_dispatch_key_included
_VMAP = _C._dispatch_key_parse("VmapMode")

# What torch.func and torch.jit.trace do now; None while they do nothing.
_transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack
_HIDING = _C._functorch.TransformType.Vmap, _C._functorch.TransformType.Jvp
_tracing: Callable[[], object] = _C._get_tracing_state
_dispatch_mode: Callable[[object], object] = _C._get_dispatch_mode
_FAKE = _C._TorchDispatchModeKey.FAKE

# Whether autocast is enabled for some device.
any_autocast: Callable[[], bool] = _C._is_any_autocast_enabled

# The rtol and atol of torch.testing.assert_close, the coarser of all dtypes given.
default_tolerances: Callable[..., tuple[float, float]] = (
    torch.testing._comparison.default_tolerances
)


def never_compiled(function: Function, because: str) -> Function:
    """Keep torch.compile out of a function: it breaks the graph there, and runs it.

    Args:
        function: Any function.
        because: What torch says of it where ``fullgraph=True`` forbids that.
    """
    cast(Any, function)._torchdynamo_disable = True
    cast(Any, function)._torchdynamo_disable_msg = because
    evaluator, code = _C._dynamo.eval_frame, cast(Any, function).__code__
    if hasattr(evaluator, "set_code_exec_strategy"):
        skip = evaluator._FrameAction.SKIP
        strategy = evaluator._FrameExecStrategy(skip, skip)  # it, and what it calls
        evaluator.set_code_exec_strategy(code, strategy)
    else:
        evaluator.skip_code(code)
    return function


# A context in which no torch function mode sees anything.
no_function_modes: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunction


# A context in which no torch dispatch mode sees anything.
no_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes


def forget_compiled() -> None:
    """Have everything compiled anew that torch.compile has compiled until now.

    Compiled code does not look whether a module got hooks, or lost them, since.
    """
    dynamo = cast(Any, sys.modules.get("torch._dynamo"))
    if dynamo is not None and dynamo.convert_frame.input_codes.seen:
        with warnings.catch_warnings():
            # Where there is a GPU it imports what warns of itself.
            warnings.simplefilter("ignore", DeprecationWarning)
            dynamo.reset()


def hook_tensor(tensor: Tensor, hook: Callable[[Tensor], None]) -> dict[Any, Any]:
    """Set a hook as ``tensor.register_hook`` does, at a third of its price.

    Returns:
        The tensor's hooks in their order. Ours has itself as its key.
    """
    place: Any = tensor
    hooks: dict[Any, Any] | None = place._backward_hooks
    if hooks is None:
        hooks = OrderedDict()
        place._backward_hooks = hooks
        if place.grad_fn is not None:
            place.grad_fn._register_hook_dict(place)
    hooks[hook] = hook
    return hooks


def hook_modules(hooks: Mapping[nn.Module, tuple[Any, Any]]) -> None:
    """Set a hook before all others of each module, and one after them.

    Both get keyword arguments, and the second runs also where the call raises: as
    ``register_forward_pre_hook`` and ``register_forward_hook`` do it, at a fifth of
    their price. One that still stands there stays in its place.

    Args:
        hooks: The two hooks of each module.
    """
    for module, (before, after) in hooks.items():
        every = _HOOKS_AROUND_FORWARD(vars(module))
        pre_hooks, with_kwargs, forward_hooks, also_with_kwargs, always_called = every
        first, last = id(before), id(after)  # torch's own keys are small numbers
        is_new = first not in pre_hooks
        pre_hooks[first] = with_kwargs[first] = before
        forward_hooks[last] = also_with_kwargs[last] = always_called[last] = after
        if is_new and len(pre_hooks) > 1:
            pre_hooks.move_to_end(first, last=False)


def unhook_modules(hooks: Mapping[nn.Module, tuple[Any, Any]]) -> None:
    """Take away what `hook_modules` has set."""
    for module, (before, after) in hooks.items():
        every = _HOOKS_AROUND_FORWARD(vars(module))
        pre_hooks, with_kwargs, forward_hooks, also_with_kwargs, always_called = every
        first, last = id(before), id(after)
        pre_hooks.pop(first, None)
        with_kwargs.pop(first, None)
        forward_hooks.pop(last, None)
        also_with_kwargs.pop(last, None)
        always_called.pop(last, None)


# Where a module keeps its hooks, and what it shall do with them.
_FORWARD_PRE_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_FORWARD_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs"),
    "_forward_hooks_always_called",
)
_HOOKS_AROUND_FORWARD: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(
    *_FORWARD_PRE_HOOKS, *_FORWARD_HOOKS
)


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Generator[None]:
    """Keep the hooks of tensors from changing what gradients are taken of them."""
    every = [cast(Any, tensor)._backward_hooks for tensor in tensors]
    before = [(hooks, dict(hooks)) for hooks in every if hooks]
    for hooks, _ in before:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, items in before:
            hooks.update(items)


@contextmanager
def run_eagerly() -> Generator[None]:
    """Have what torch.compile has compiled run as it was written.

    torch has one stance for all threads, and each would put back what it found: it is
    the first of ours that changes it, and the last that puts it back.
    """
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        yield
        return
    with _EAGER_LOCK:
        if not _eager:
            _eager.append(cast(Any, torch.compiler).set_stance("force_eager"))
        else:
            _eager.append(None)
    try:
        yield
    finally:
        with _EAGER_LOCK:
            if len(_eager) == 1:
                _eager[0].__exit__(None, None, None)
            _eager.pop()


_EAGER_LOCK = threading.Lock()
_eager: list[Any] = []  # the stance, and a place for each thread that is within


def is_replica(module: nn.Module) -> bool:
    """Tell whether a module is a copy that `nn.DataParallel` runs on one GPU."""
    return vars(module).get("_is_replica", False)


def values_are_stand_ins() -> bool:
    """Tell whether tensors stand for others: under torch.func, or while jit traces."""
    return _transform() is not None or _tracing() is not None


def graphs_are_hidden() -> bool:
    """Tell whether no tensor requires grad here, as in what ``torch.vmap`` calls."""
    innermost = _transform()
    return innermost is not None and innermost.key() in _HIDING


# Whether a tensor stands for another, in a transform of torch.func.
is_stand_in: Callable[[Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor


def values_are_fake() -> bool:
    """Tell whether tensors have no values: in a FakeTensorMode, as in torch.export."""
    return _dispatch_mode(_FAKE) is not None


def has_values(tensor: Tensor) -> bool:
    """Tell whether a tensor has values: none has on the device "meta", and no fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def for_several(
    function: Callable[[Tensor], Sequence[Tensor]], values: Tensor
) -> list[Tensor]:
    """Do what ``torch.func.vmap`` does, at a third of its price.

    Args:
        function: A function of one value, which draws no random numbers.
        values: Several, along the first axis.

    Returns:
        What it gives for each, along a first axis.
    """
    _functorch_vmap.lazy_load_decompositions()
    functorch, count = _C._functorch, len(values)
    level = functorch._vmap_increment_nesting(count, "error")
    try:
        found = function(functorch._add_batch_dim(values, 0, level))
        return [functorch._remove_batch_dim(it, level, count, 0) for it in found]
    finally:
        functorch._vmap_decrement_nesting()


def graph_is_captured() -> bool:
    """Tell whether what this thread calls on a GPU is only noted, for a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def how_products_are_computed() -> tuple[object, ...]:
    """Return what decides with which kernels and digits a GPU multiplies float32."""
    return tuple([it() for it in _PRODUCTS])


# Releases with newer settings refuse to tell the older ones where somebody used those.
_precision_of: Any = getattr(_C, "_get_fp32_precision_getter", None)
_PRODUCTS: list[Callable[[], object]] = [
    *(
        (_C._get_cublas_allow_tf32, _C._get_cudnn_allow_tf32)
        if _precision_of is None
        else (partial(_precision_of, "cuda", it) for it in ("matmul", "conv"))
    ),
    _C._get_cudnn_enabled,
    _C._get_cudnn_benchmark,
    _C._get_cudnn_deterministic,
    _C._get_deterministic_algorithms,
]


def gradients_are_batched() -> bool:
    """Tell whether several backward passes run at once: then values stand in."""
    # Not the level that is counted meanwhile: a pass through a GPU's tensors runs in a
    # thread of the device, which is handed the dispatch keys and not the level.
    return _key_is_included(_VMAP) or values_are_stand_ins()


def is_packed(node: Node) -> bool:
    """Tell whether what a node has saved is had through somebody's hooks.

    A checkpoint's compute all of it again, whenever one asks outside of a pass. Before
    torch 2.10 a node does not tell, and is asked: what it says is right all the same.
    """
    for name in _raw_names(type(node)):
        if getattr(getattr(node, name), "unpack_hook", None) is not None:
            return True
    return False


@cache
def _raw_names(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def changed_since_saved(node: Node) -> list[Tensor]:
    """Return what a node has saved and somebody has changed in place since.

    Before torch 2.10 that does not show. What hooks have packed does not count.
    """
    found: list[Tensor] = []
    for name in _raw_names(type(node)):
        with suppress(RuntimeError):  # it has been freed
            held: Any = getattr(node, name)
            for raw in cast(Any, held if isinstance(held, tuple) else (held,)):
                saved = getattr(raw, "data", None)
                if not isinstance(saved, Tensor) or raw.unpack_hook is not None:
                    continue
                if not _is_as_saved(node, name, raw):
                    found.append(saved)
    return found


def _is_as_saved(node: Node, name: str, raw: Any) -> bool:
    unpack: Callable[[], object] | None = getattr(raw, "unpack", None)
    if unpack is not None:  # torch 2.12 has it, 2.11 has not
        with suppress(RuntimeError):
            unpack()
            return True
    # That refuses a node's own results too, which the node alone can unpack.
    for shown in (name.removeprefix("_raw"), name.removeprefix("_raw_")):
        with suppress(RuntimeError, AttributeError):
            getattr(node, shown)
            return True
    return False


def referent(reference: weakref.ref[Tensor]) -> Tensor | None:
    """Return the tensor that a weak reference leads to, if it is there still.

    As torch.utils.weak does: where autograd alone has held the tensor, older releases
    of torch free it with their graph, though we hold it by now.
    """
    tensor: Any = reference()
    if hasattr(tensor, "_fix_weakref"):
        tensor._fix_weakref()
    return tensor


def dtype_at(edge: tuple[Any, int]) -> torch.dtype:
    """Return the dtype of the output of a node that an edge leads to."""
    node, number = edge
    return node._input_metadata[number].dtype


def leaf_of(node: Node) -> Tensor | None:
    """Return the leaf whose gradient ends at `node`; ``None`` for other nodes."""
    leaf: Any = node
    return leaf.variable if type(node) is AccumulateGrad else None


# The shape, dtype and device of each gradient that comes in at a node, which
# torch.autograd.grad itself reads there.
forms_at: Callable[[Node], Sequence[Any]] = attrgetter("_input_metadata")


# What a module has under these names it uses when it is called.
PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_PRE_HOOKS = "_backward_pre_hooks"
BACKWARD_HOOKS = (BACKWARD_PRE_HOOKS, "_backward_hooks")
# All of a module's hooks, and what it shall do with them, each by the number of a hook.
HOOKS = (*_FORWARD_PRE_HOOKS, *_FORWARD_HOOKS, *BACKWARD_HOOKS)
KIND_OF_BACKWARD_HOOKS = "_is_full_backward_hook"

# The backward pre-hooks that a call of a module sets: those of every module, and its
# own. torch asks for them under this name (in 2.8, 2.13 and 2.14; 2.15 was not read).
BACKWARD_PRE_HOOKS_OF = "_get_backward_pre_hooks"
backward_pre_hooks: Callable[[nn.Module], list[Any]] = getattr(
    nn.Module, BACKWARD_PRE_HOOKS_OF
)


# What stands in a module itself, by name. ``named_parameters(recurse=False)`` says the
# same, but is slow enough to show in a hook that runs at every call.
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]]
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]]
own_children: Callable[[nn.Module], dict[str, nn.Module | None]]
own_parameters, own_buffers, own_children = map(
    attrgetter, (PARAMETERS, BUFFERS, CHILDREN)
)


# A module's hooks that run before its forward, and after it, by their numbers.
forward_pre_hooks: Callable[[nn.Module], dict[int, Any]]
forward_hooks: Callable[[nn.Module], dict[int, Any]]
forward_pre_hooks, forward_hooks = map(attrgetter, FORWARD_HOOKS)


def hook_dicts(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Return where several modules keep their hooks."""
    kinds = attrgetter(*FORWARD_HOOKS, *BACKWARD_HOOKS)
    return [*itertools.chain.from_iterable(map(kinds, modules))]


def hook_numbers(hooks: Sequence[dict[int, Any]]) -> list[int]:
    """Return how many hooks stand in each place, and the numbers of all."""
    return [*map(len, hooks), *itertools.chain.from_iterable(hooks)]


def put_hooks_around(module: nn.Module, before: int, after: int) -> bool:
    """Put a forward pre-hook before somebody's, and a forward hook after them.

    Args:
        module: The module.
        before: The number of the one.
        after: The number of the other.

    Returns:
        Whether they were elsewhere.
    """
    were_elsewhere = False
    for kind, key, last in zip(
        FORWARD_HOOKS, (before, after), (False, True), strict=True
    ):
        hooks: OrderedDict[int, Any] = vars(module)[kind]
        inwards = reversed(hooks) if last else iter(hooks)
        outside = [*itertools.takewhile(key.__ne__, inwards)]
        if key in hooks and any(it != id(hooks[it]) for it in outside):  # not ours
            hooks.move_to_end(key, last=last)
            were_elsewhere = True
    return were_elsewhere


def what_stands_in(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the names and modules that stand in each of several.

    There is no loop in Python: it is asked at each forward, and rarely says anything.
    """
    children = [*map(own_children, modules)]
    inside = [*filter(None, children)]
    names = itertools.chain.from_iterable(map(methodcaller("keys"), inside))
    standing = itertools.chain.from_iterable(map(methodcaller("values"), inside))
    return [*map(len, children), *names, *standing]


def parameters_at_call(module: nn.Module) -> dict[str, Any]:
    """Return what stands for a module's own parameters while it is called.

    A copy that ``nn.DataParallel`` makes for a device has none, but tensors in place of
    them.
    """
    return own_parameters(module) or vars(module).get("_former_parameters", {})


@cache
def is_of_torch(kind: type[nn.Module]) -> bool:
    """Tell whether torch itself brings this class of modules."""
    return kind.__module__.startswith("torch.nn.modules.")


def is_plain_module(module: nn.Module) -> bool:
    """Tell whether calling a module runs its class's ``forward`` and nothing else."""
    own, kind = vars(module), type(module)
    return not (
        kind.__call__ is not _CALL
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own[BACKWARD_PRE_HOOKS]
        or "forward" in own
        or "_call_impl" in own
        or "_conv_forward" in own
        or "weight" in own
        or "bias" in own
        or own.get("_compiled_call_impl")
    )


def is_looked_into_plainly(kind: type[nn.Module]) -> bool:
    """Tell whether modules of a class find their attributes as torch's do."""
    return (
        kind.__getattr__ is _GETATTR
        and kind.__getattribute__ is object.__getattribute__
        and cast(Any, kind)._call_impl is _CALL_IMPL
    )


# As they were when this was imported.
_MODULE: Any = nn.Module
_CALL, _GETATTR, _CALL_IMPL = _MODULE.__call__, _MODULE.__getattr__, _MODULE._call_impl


# The hooks that hold for every module, as torch keeps them for good.
_GLOBAL_HOOKS: list[dict[int, Any]] = [
    getattr(nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward_pre", "forward", "backward_pre", "backward")
]


def any_global_hook() -> bool:
    """Tell whether some hook holds for every module."""
    return any(_GLOBAL_HOOKS)


def any_global_backward_hook() -> bool:
    """Tell whether some backward hook holds for every module."""
    return any(_GLOBAL_HOOKS[2:])


_forward_ad = cast(Any, forward_ad)


def tensors_may_be_dual() -> bool:
    """Tell whether tensors may carry tangents: those of forward-mode AD."""
    return _forward_ad._current_level >= 0


def nobody_looks_on() -> bool:
    """Tell whether no mode, transform or hook that holds everywhere is in force."""
    return not (
        any_autocast()
        or torch.is_inference_mode_enabled()
        or (_C._len_torch_function_stack() and _some_mode_is_unknown())
        or dispatch_modes()
        or _C._functorch.peek_interpreter_stack() is not None
        or tensors_may_be_dual()
        or _C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
        or any_global_hook()
        or _MODULE._call_impl is not _CALL_IMPL
    )


# How many modes of torch see every operation.
dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack


def saved_are_known_by_address() -> bool:
    """Tell whether autograd looks for what it has saved by where its memory begins.

    It does in ``torch.autograd.graph.allow_mutation_on_saved_tensors``.
    """
    modes = map(_C._get_dispatch_stack_at, range(dispatch_modes()))
    return any(isinstance(it, _CloneArgBeforeMutateMode) for it in modes)


def _some_mode_is_unknown() -> bool:
    """Tell whether a function mode is in force that may change what is computed.

    A default device only adds ``device=`` to what makes tensors without saying where.
    """
    modes: list[object] = _get_current_function_mode_stack()
    return any(type(mode) is not DeviceContext for mode in modes)

"""The form of a chain: all that is kept of it, without its modules and tensors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeAlias, cast

from torch import Tensor, nn, strided
from torch.nn import Parameter

from gradlib.jacobian.fast.chains.axes import VIEWED
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.layers import Linear, every
from gradlib.jacobian.fast.chains.mapped import Kind, kind_of
from gradlib.jacobian.fast.chains.noted import Found
from gradlib.jacobian.fast.chains.own import are_same
from gradlib.jacobian.fast.chains.pointwise import POINTWISE
from gradlib.jacobian.fast.chains.template import maker
from gradlib.jacobian.fast.chains.witnesses import Reading, Witnesses, read_again
from gradlib.jacobian.fast.replayed import Replays
from gradlib.private.modules import own_buffers, own_parameters

Of: TypeAlias = list[tuple[int, Callable[[Any], Iterable[Any]]]]
"""The numbers of modules, each with a function that gives some of its values."""

_POOLED = "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"

_OPTIONS: dict[type[Any], tuple[str, ...]] = {
    nn.Conv2d: (
        *("in_channels", "out_channels", "kernel_size", "stride", "padding"),
        *("dilation", "groups", "padding_mode"),
    ),
    nn.Flatten: ("start_dim", "end_dim"),
    nn.AvgPool2d: (
        *("kernel_size", "stride", "padding", "ceil_mode"),
        *("count_include_pad", "divisor_override"),
    ),
    nn.MaxPool2d: _POOLED,
    nn.AdaptiveAvgPool2d: ("output_size",),
    nn.GroupNorm: ("num_groups", "num_channels", "eps"),
    nn.LayerNorm: ("normalized_shape", "eps"),
    nn.BatchNorm1d: ("training", "eps"),
    nn.BatchNorm2d: ("training", "eps"),
    nn.Softmax: ("dim",),
    nn.LogSoftmax: ("dim",),
    nn.Linear: (),
    Tensor: (),
    Parameter: (),
    **{kind: known.options for kind, known in POINTWISE.items()},
}
"""The options of each layer or weight, besides ``inplace`` and its tensors."""


class ChainForm(NamedTuple):
    """All that chains of one form have in common, or calls that are no chain.

    Attributes:
        of_x: The kind of x.
        own: What has to be torch's own, or Python's.
        readings: The readings that found the chain, with what each must give again.
        twice: The pairs of readings that gave the same object.
        modules: The numbers of the readings that gave the layers' modules.
        options_of: The functions that give the layers' options.
        options: The options, then the ``inplace`` of each module.
        tensors_of: The functions that give the layers' tensors.
        classes: The classes of the tensors.
        kinds: The kinds of the tensors, without those that are ``None``.
        strides: The strides of x and the tensors, where they matter.
        make: Makes the chain of the values that are read, and x; ``None`` for calls
            that are none.
    """

    of_x: Kind
    own: Found
    readings: list[Reading]
    twice: list[tuple[int, int]]
    modules: list[int]
    options_of: Of
    options: list[Any]
    tensors_of: Of
    classes: list[type[Any]]
    kinds: list[Kind]
    strides: list[tuple[int, ...]] | None
    make: Callable[[Sequence[Any], Tensor], Chain] | None


def form_of(seen: Witnesses, layers: Sequence[Any], chain: Chain) -> ChainForm | None:
    """Return the form of a chain; ``None`` where it could not be recognized again.

    Args:
        seen: The readings that found the chain.
        layers: The layers that it is made of.
        chain: The chain.
    """
    numbers = ((seen.number_of(it), it) for it in _parts(layers))
    known: dict[int, Any] = {number: it for number, it in numbers if number is not None}
    make = maker(chain._replace(replays=Replays()), layers, seen.number_of)
    is_viewed = any(it is VIEWED for it in every(layers))
    return _form(seen, chain.x, known, make, laid_out=is_viewed)


def refusal_of(seen: Witnesses, x: Tensor) -> ChainForm | None:
    """Return the form of a call that is no chain; ``None`` as for `form_of`.

    Args:
        seen: The readings until that was clear.
        x: The input of the call.
    """
    return _form(seen, x, seen.every(_OPTIONS), None, laid_out=True)


def _form(
    seen: Witnesses,
    x: Tensor,
    known: dict[int, Any],
    make: Callable[[Sequence[Any], Tensor], Chain] | None,
    *,
    laid_out: bool,
) -> ChainForm | None:
    """Return a form, or ``None``.

    Args:
        seen: The readings.
        x: The input.
        known: The layers and tensors whose options and kinds count, by number.
        make: Makes the chain.
        laid_out: Whether strides matter.
    """
    options_of: Of = [(it, of) for it in known if (of := _OPTIONS_OF[type(known[it])])]
    tensors_of: Of = [(it, of) for it in known if (of := _TENSORS_OF[type(known[it])])]
    modules = [number for number, it in known.items() if isinstance(it, nn.Module)]
    options = [*_of(options_of, known), *_inplace(modules, known)]
    if not (seen.complete and all(map(_is_for_good, options))):
        return None
    tensors = _of(tensors_of, known)
    return ChainForm(
        of_x=kind_of(x),
        own=seen.own,
        readings=seen.readings,
        twice=seen.twice,
        modules=modules,
        options_of=options_of,
        options=options,
        tensors_of=tensors_of,
        classes=[*map(type, tensors)],
        kinds=_kinds(tensors),
        strides=_strides(x, tensors) if laid_out else None,
        make=make,
    )


def values_of(form: ChainForm, fn: Any, x: Tensor) -> Sequence[Any] | None:
    """Return what is read of a function, if it has a form, else ``None``.

    Args:
        form: The form.
        fn: The function.
        x: Its input, ``(batch, *in)``.

    Raises:
        Exception: One of `line.ERRORS`: something that was read is gone.
    """
    if kind_of(x) != form.of_x or not are_same(form.own):
        return None
    values = read_again(fn, form.readings, form.twice)
    if values is None:
        return None
    options = [*_of(form.options_of, values), *_inplace(form.modules, values)]
    if not _are_alike(options, form.options):
        return None
    tensors = _of(form.tensors_of, values)
    if [*map(type, tensors)] != form.classes or _kinds(tensors) != form.kinds:
        return None
    if form.strides is not None and _strides(x, tensors) != form.strides:
        return None
    return values


def _parts(layers: Sequence[Any]) -> Iterator[Any]:
    """Yield all layers, but for `Linear`, which is made anew, its tensors."""
    for layer in every(layers):
        if type(layer) is Linear:
            yield from (it for it in layer if it is not None)
        else:
            yield layer


def _of(every: Of, modules: Any) -> list[Any]:
    return [it for number, of in every for it in of(modules[number])]


def _inplace(numbers: Iterable[int], modules: Any) -> list[Any]:
    return [modules[it].__dict__.get("inplace") for it in numbers]


def _is_for_good(value: Any) -> bool:
    """Tell whether an option is immutable, with all its parts."""
    if type(value) is tuple:
        parts = cast(tuple[Any, ...], value)
        return all(map(_is_for_good, parts))
    return type(value) in (int, float, bool, str, type(None))


def _are_alike(options: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tell whether options are the same, and of the same types: 1 is not True."""
    return all(map(is_, options, others)) or repr(options) == repr(others)


def _kinds(tensors: Iterable[Any]) -> list[Kind]:
    return [kind_of(it) for it in tensors if it is not None]


def _strides(x: Tensor, tensors: Sequence[Any]) -> list[tuple[int, ...]]:
    # A tensor of another layout has none.
    return [
        it.stride() for it in (x, *tensors) if it is not None and it.layout is strided
    ]


def _alone(weight: Tensor) -> tuple[Tensor]:
    return (weight,)


def _parameters(module: nn.Module) -> tuple[Any, ...]:
    own = own_parameters(module)
    return own.get("weight"), own.get("bias")


def _and_statistics(module: nn.Module) -> tuple[Any, ...]:
    own = own_buffers(module)
    return *_parameters(module), own.get("running_mean"), own.get("running_var")


_OPTIONS_OF: dict[type[Any], Any] = {
    kind: attrgetter(*names, names[0]) if names else None  # at least two: a tuple
    for kind, names in _OPTIONS.items()
}
_TENSORS_OF: dict[type[Any], Any] = {
    **dict.fromkeys(_OPTIONS),
    **dict.fromkeys((Tensor, Parameter), _alone),
    **dict.fromkeys((nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm), _parameters),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d), _and_statistics),
}

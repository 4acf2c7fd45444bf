"""Which modules of a model are recorded, and under which names."""

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, cast

from torch import Tensor, nn

from gradlib.errors import NoSuchModuleError, RecordingArgumentError

Choice: TypeAlias = str | Iterable[str] | Callable[[str, nn.Module], bool]
"""Names, patterns such as ``"layers.*"``, or a function of name and module."""


def has_own_call(module: nn.Module) -> bool:
    """Tell whether a module's class has its own ``__call__``, which may skip hooks."""
    return cast(Any, type(module)).__call__ is not cast(Any, nn.Module).__call__


def modules_of(
    model: nn.Module, *, remove_duplicate: bool = True
) -> dict[str, nn.Module]:
    """Return the modules of `model`, each by its first name or by all its names."""
    model_: Any = model
    try:
        return dict(model_.named_modules(remove_duplicate=remove_duplicate))
    except RecursionError:  # a module contains itself, so its names have no end
        return dict(model_.named_modules())


def first_names(every: dict[str, nn.Module]) -> dict[nn.Module, str]:
    """Return each module with the first of its names in `every`."""
    first = dict.fromkeys(every.values(), "")
    first.update(zip(reversed(every.values()), reversed(every), strict=True))
    return first


def require_apart(every: dict[str, nn.Module]) -> None:
    """Raise where two modules are equal, which torch and we would take for one.

    Args:
        every: A model's modules by all their names.

    Raises:
        RecordingArgumentError: A class of modules compares them by other than identity.
    """
    first: dict[nn.Module, tuple[str, nn.Module]] = {}
    for name, module in every.items():
        other, same = first.setdefault(module, (name, module))
        if same is not module:
            raise RecordingArgumentError(
                f'record(model): the modules "{other}" and "{name}" are two, but '
                f"{are_equal(type(module).__name__)}."
            )


def are_equal(kind: str) -> str:
    """Say that two modules of a class are equal, and what to do.

    Args:
        kind: The name of the class.
    """
    return (
        f"by the __eq__ of their class {kind} they are equal, and equal modules count "
        "as one, also for model.named_modules() and model.parameters(). Let "
        f"{kind} keep the __eq__ and __hash__ of nn.Module, as a dataclass does with "
        "@dataclass(eq=False)"
    )


def recorded_names(every: dict[str, nn.Module]) -> dict[str, str]:
    """Return every name of every module, with the name it is recorded under.

    A module inside a compiled one also has the name that it has without torch.compile.

    Args:
        every: A model's modules by all their names.
    """
    first = first_names(every)
    names = dict(zip(every, map(first.__getitem__, every.values()), strict=True))
    for name in [name for name in names if COMPILED in name]:
        names.setdefault(uncompiled(name), names[name])
    return names


def uncompiled(name: str) -> str:
    """Return the name a module would have if nothing around it were compiled."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


COMPILED = "_orig_mod"
"""The name under which torch.compile holds the module it wraps."""


def selector(
    model: nn.Module, choice: Choice | None
) -> Callable[[str, nn.Module], bool]:
    """Return a function of name and module that tells if `choice` means the module.

    Args:
        model: The model whose modules are chosen.
        choice: Names, patterns, or a predicate; ``None`` for every module.

    Raises:
        NoSuchModuleError: A name or pattern fits no module, a class or module was given
            instead of a name, or a function does not take a name and a module.
    """
    if choice is None:
        return lambda _name, _module: True
    if isinstance(choice, str | type | nn.Module):  # the last two are callable too
        patterns = [cast(str, choice)]
    elif callable(choice):
        _require_both(choice, model)
        return choice
    else:
        given = cast(object, choice)
        several = isinstance(given, Iterable) and not isinstance(given, Tensor)
        patterns = list(choice) if several else [cast(str, choice)]
    names = recorded_names(modules_of(model, remove_duplicate=False))
    for pattern in patterns:
        _require_name(pattern, model)
        if not any(_is_meant(name, [pattern]) for name in names):
            raise NoSuchModuleError(
                f'record(modules=...): no module of the model fits "{pattern}". '
                f"{nearest(pattern, names)}"
            )

    # A module with several names is meant by any of them.
    meant = {first for name, first in names.items() if _is_meant(name, patterns)}
    return lambda name, _module: name in meant or _is_meant(name, patterns)


def _is_meant(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a pattern fits a name or equals it: a name may have brackets."""
    return any(name == it or fnmatchcase(name, it) for it in patterns)


def _require_name(given: object, model: nn.Module) -> None:
    """Raise unless `given` is a name or pattern."""
    if isinstance(given, str):
        return
    if isinstance(given, type):
        said = (
            f"{given.__name__} is a class. Choose by type with a function: "
            f"modules=lambda name, module: isinstance(module, {given.__name__})."
        )
    else:
        said = f"something of type {type(given).__name__} is no name."
        named = [name for name, it in modules_of(model).items() if it is given]
        fix = 'Give names, patterns as "layers.*", or a function of name and module.'
        said += "".join(f' It has the name "{name}".' for name in named) or f" {fix}"
    raise NoSuchModuleError(f"record(modules=...): {said}")


def _require_both(choice: Callable[..., Any], model: nn.Module) -> None:
    """Raise unless a function can be called with a name and a module."""
    try:
        signature = inspect.signature(choice)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind("", model)
    except TypeError as error:
        raise NoSuchModuleError(
            "record(modules=...): a function is called with two arguments, the name "
            f"and the module, and this one takes {signature}. Write "
            "modules=lambda name, module: ..."
        ) from error


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint at which of `names` the user may have meant by `name`."""
    if name == "(root)":  # its name in tables
        return 'The model itself has the name "".'
    names = list(names)
    ending = [known for known in names if known.endswith(f".{name}")]
    near = ending[:3] or get_close_matches(name, names, n=3, cutoff=0.5)
    known = ", ".join(f'"{known}"' for known in near or names[:8])
    return f"{'Nearest' if near else 'Its modules'}: {known}."

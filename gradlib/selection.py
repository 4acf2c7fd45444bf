"""Which modules of a model are recorded, and under which names."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, cast

from torch import nn

from gradlib.errors import NoSuchModuleError

Choice: TypeAlias = str | Iterable[str] | Callable[[str, nn.Module], bool]
"""Names, patterns as ``"layers.*"``, or a function of name and module."""


def modules_of(
    model: nn.Module, *, remove_duplicate: bool = True
) -> dict[str, nn.Module]:
    """Return the modules of `model` by name: the first of each, or all of its names."""
    return dict(cast(Any, model).named_modules(remove_duplicate=remove_duplicate))


def recorded_names(model: nn.Module) -> dict[str, str]:
    """Return every name of every module, with the name it is recorded under.

    A module inside a compiled one also has the name that it has without torch.compile.
    """
    first = {module: name for name, module in modules_of(model).items()}
    every = modules_of(model, remove_duplicate=False)
    names = {name: first[module] for name, module in every.items()}
    for name in list(names):
        names.setdefault(uncompiled(name), names[name])
    return names


def uncompiled(name: str) -> str:
    """Return the name a module has where nothing around it is compiled."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def select(model: nn.Module, choice: Choice | None) -> dict[str, nn.Module]:
    """Return the modules that `choice` means, by the name they are recorded under.

    Args:
        model: Where to look.
        choice: Names, patterns, or a predicate; ``None`` for every module.

    Raises:
        NoSuchModuleError: A name or pattern fits no module.
    """
    modules = modules_of(model)
    if choice is None:
        return modules
    if callable(choice):
        return {
            name: module for name, module in modules.items() if choice(name, module)
        }
    wanted = [choice] if isinstance(choice, str) else list(choice)
    names = recorded_names(model)
    fitting = {
        pattern: [name for name in names if fnmatchcase(name, pattern)]
        for pattern in wanted
    }
    for pattern, found in fitting.items():
        if not found:
            raise NoSuchModuleError(
                f'record(modules=...): no module of the model fits "{pattern}". '
                f"{nearest(pattern, names)}"
            )
    chosen = {names[name] for found in fitting.values() for name in found}
    return {name: module for name, module in modules.items() if name in chosen}


def nearest(name: str, names: Iterable[str]) -> str:
    """Return which of `names` somebody may have meant who wrote `name`."""
    names = list(names)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    known = ", ".join(f'"{known}"' for known in near or names[:8])
    return f"{'Nearest' if near else 'Its modules'}: {known}."

"""Why what was asked of a recording is not one call of it."""

from collections.abc import Collection, Mapping, Sequence

from gradlib.errors import AmbiguousCallError, NoSuchCallError
from gradlib.recording.in_words import shown
from gradlib.recording.trace import CallTrace
from gradlib.selection import nearest
from gradlib.wording import in_brief, listed

FEW = 8
"""How many calls of a module an error lists."""


def no_name(key: object) -> NoSuchCallError:
    """Return the error for what names no call."""
    return NoSuchCallError(
        f"recording[{in_brief(key)}]: name a call by its module, as recording['fc2'], "
        "or by module and index, as recording['fc2', 1]."
    )


def no_call_of(
    name: str,
    names: Mapping[str, str],
    left_out: Mapping[str, str],
    called: Collection[str],
) -> NoSuchCallError:
    """Return the error for a module without calls.

    Args:
        name: What the user asked for.
        names: Every name that the model has for a module, with the recorded one.
        left_out: The modules that were not recorded, and why.
        called: The modules that were called.
    """
    why = left_out.get(names.get(name, name))
    if why is not None:
        return NoSuchCallError(f'"{name}" was not recorded: {why}.')
    if name in names:
        inside = listed(f'"{it}"' for it in called if it.startswith(f"{name}."))
        return NoSuchCallError(
            f'"{name}" was not called in the block'
            + (f"; in it were {inside}" if inside else "")
            + ". Only module(x) is a call: a parent that uses its weights "
            "directly, or module.forward(x), is not."
        )
    own, number = _as_printed(name)
    if own in names:
        key = f'"{own}", {number}' if number else f'"{own}"'
        return NoSuchCallError(
            f'"{name}" is what tables show. Ask for recording[{key}].'
        )
    return NoSuchCallError(f'The model has no module "{name}". {nearest(name, names)}')


def _as_printed(text: str) -> tuple[str, str]:
    """Return the name and the number of a call from the text of `numbered`."""
    name, bracket, number = text.removesuffix(")").rpartition(" (")
    if not (bracket and number.isdecimal()):
        name, number = text, ""
    return ("" if name == shown("") else name), number


def no_call_with(name: str, index: int, calls: Sequence[CallTrace]) -> NoSuchCallError:
    """Return the error for a module whose calls have other indices."""
    numbers = [str(it.index) for it in calls]
    few = numbers if len(numbers) <= FEW else [*numbers[: FEW - 1], "...", numbers[-1]]
    return NoSuchCallError(
        f'"{name}" has no call {index} here; its calls are {", ".join(few)}.'
    )


def several_calls_of(name: str, calls: Sequence[CallTrace]) -> AmbiguousCallError:
    """Return the error for a module that was called several times."""
    indices = [it.index for it in calls]
    once = len({it.forward for it in calls}) == len(calls)
    return AmbiguousCallError(
        f'"{name}" was called {len(calls)} times. Name one call: '
        f'recording["{name}", i] with i from {min(indices)} to {max(indices)}'
        + (f', or recording.forwards[i]["{name}"].' if once else ".")
    )

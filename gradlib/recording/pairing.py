"""Which call of one recording is which of another."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

from gradlib.errors import RecordingArgumentError, in_brief
from gradlib.recording.trace import CallTrace
from gradlib.selection import nearest, uncompiled


def keyed(
    traces: Iterable[CallTrace], names: Mapping[str, str]
) -> Iterator[tuple[tuple[str, int], CallTrace]]:
    """Name each call so that it finds its like.

    Args:
        traces: The calls.
        names: What modules are called in the other recording, where that differs.
    """
    counts: Counter[str] = Counter()
    for trace in traces:
        yield (_like(trace.name, names), counts[trace.name]), trace
        counts[trace.name] += 1


def require_names(
    names: object, ours: Collection[str], theirs: Collection[str]
) -> Mapping[str, str]:
    """Return what maps the modules of a recording to those of another.

    Args:
        names: What was given.
        ours: The modules that the one has calls of.
        theirs: Those that the other has calls of.

    Raises:
        RecordingArgumentError: It is no mapping, a name is not there, or two modules
            would be one.
    """
    if not isinstance(names, Mapping):
        raise RecordingArgumentError(
            "compare(names=...): names must map names of this recording to names of "
            f'the other, as {{"fc1": "0"}}, but it is of type {type(names).__name__}.'
        )
    given = cast("Mapping[Any, Any]", names)
    for pair in given.items():
        for name, known, which in zip(
            pair, (ours, theirs), ("this", "the other"), strict=True
        ):
            if name not in known:
                raise RecordingArgumentError(
                    f"compare(names=...): {which} recording has no call of "
                    f"{in_brief(name)}. {nearest(str(name), known)}"
                )
    taken: dict[str, str] = {}
    for name in ours:
        first = taken.setdefault(_like(name, given), name)
        if _like(first, {}) != _like(name, {}):
            raise RecordingArgumentError(
                f'compare(names=...): "{first}" and "{name}" would both be compared '
                f'with "{given.get(name, name)}". Give each a name of its own.'
            )
    return given


def _like(name: str, names: Mapping[str, str]) -> str:
    """Return the name by which a module finds its like.

    torch.compile wraps a module in another, whose name is no part of what it does. Of
    the two calls the inner one, which comes later, is meant.
    """
    return uncompiled(names.get(name, name))

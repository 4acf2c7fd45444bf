"""Which call of one recording is the counterpart of which of another."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

from gradlib.errors import RecordingArgumentError
from gradlib.recording.trace import CallTrace
from gradlib.selection import nearest, uncompiled
from gradlib.wording import in_brief


def keyed(
    traces: Iterable[CallTrace], names: Mapping[str, str]
) -> Iterator[tuple[tuple[str, int], CallTrace]]:
    """Yield each call with a key that it shares with its counterpart.

    Args:
        traces: The calls.
        names: The names of modules in the other recording, where they differ.
    """
    counts: Counter[str] = Counter()
    for trace in traces:
        yield (_counterpart(trace.name, names), counts[trace.name]), trace
        counts[trace.name] += 1


def require_names(
    names: object, ours: Collection[str], theirs: Collection[str]
) -> Mapping[str, str]:
    """Return `names` if it maps modules of this recording to those of the other.

    Args:
        names: What the user gave.
        ours: The modules that this recording has calls of.
        theirs: The modules that the other has calls of.

    Raises:
        RecordingArgumentError: `names` is no mapping, has a name without a call, or
            would pair two modules with one.
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
            if not isinstance(name, str) or name not in known:
                raise RecordingArgumentError(
                    f"compare(names=...): {which} recording has no call of "
                    f"{in_brief(name)}. {nearest(str(name), known)}"
                )
    taken: dict[str, str] = {}
    for name in ours:
        first = taken.setdefault(_counterpart(name, given), name)
        if _counterpart(first, {}) != _counterpart(name, {}):
            raise RecordingArgumentError(
                f'compare(names=...): "{first}" and "{name}" would both be compared '
                f'with "{given.get(name, name)}". Give each a name of its own.'
            )
    return given


def _counterpart(name: str, names: Mapping[str, str]) -> str:
    """Return the name of a module's counterpart, without what torch.compile adds.

    torch.compile wraps a module in another, so both get this name. The call of the
    inner one, which comes later, is the one compared.
    """
    return uncompiled(names.get(name, name))

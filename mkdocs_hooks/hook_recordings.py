"""What the recordings in docs/data/hooks hold, by build, and in words."""

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs_hooks import cache

Builds = dict[str, dict[str, Any]]  # what was recorded, by build, then by name
FOLDER = cache.ROOT / "docs" / "data" / "hooks"
HOOKS = {
    "legacy": "register_backward_hook",
    "full": "register_full_backward_hook",
    "full_pre": "register_full_backward_pre_hook",
}
FORMS = {
    "T": "transposed",
    "reshape": "reshaped",
    "expand": "repeated",
    "sum": "summed",
}
LABEL = re.compile(r"(?:(T|reshape|expand|sum)\((.*)\)|(.*))")


class Run(NamedTuple):
    """Successive builds in which a hook got the same, or nothing."""

    nodes: dict[str, str]  # by build: the last autograd node, "" if there is none
    got: dict[str, Any]  # what it got in the first of these builds
    messages: dict[str, list[str]]  # warnings and errors, and the builds that have them

    def builds(self) -> str:
        """Return the builds, as `1.0.1 to 1.7.1`."""
        return span(list(self.nodes))

    def builds_with(self, message: str) -> str:
        """Return the builds that have a message."""
        return spans(self.messages[message], list(self.nodes))


def span(versions: list[str]) -> str:
    """Return successive builds as `1.0.1 to 1.7.1`."""
    first, last = versions[0], versions[-1]
    return first if first == last else f"{first} to {last}"


def spans(having: list[str], among: list[str]) -> str:
    """Return the versions `having` something, successive ones as `1.0.1 to 1.7.1`."""
    runs = groupby(having, key=lambda it: among.index(it) - having.index(it))
    return ", ".join(span(list(run)) for _, run in runs)


# The recordings


def release(version: str) -> tuple[int, ...]:
    """Return the key by which versions are sorted."""
    return tuple(map(int, version.split(".")))


def every_build() -> Builds:
    """Return the cases of every build, as run on the CPU, oldest first."""
    return builds_in(FOLDER)


def on_gpu() -> Builds:
    """Return the cases of the builds that were run on a GPU, oldest first."""
    return builds_in(FOLDER / "cuda")


def builds_in(folder: Path) -> Builds:
    """Return the cases of the builds with a recording in a folder."""
    return {build: it["cases"] for build, it in recorded_in(folder).items()}


def recorded_in(folder: Path) -> Builds:
    """Return the recordings in a folder by build, the oldest first."""
    paths = sorted(folder.glob("*.json"), key=lambda path: release(path.stem))
    return {it.stem: json.loads(it.read_text(encoding="utf-8")) for it in paths}


def runs(builds: Builds, case: str, hook: str) -> list[Run]:
    """Return what a hook got, once for all successive builds that agree.

    Builds agree if the calls and the kind of error are the same. Only the wording of
    a message may differ.
    """
    found: list[Run] = []
    for version, cases in builds.items():
        got = cases[case][hook]
        if not found or outcome(found[-1].got) != outcome(got):
            found.append(Run({}, got, {}))
        found[-1].nodes[version] = cases[case]["last_node"]["name"] or ""
        for text in [*got.get("warnings", []), *filter(None, [got.get("error")])]:
            found[-1].messages.setdefault(text, []).append(version)
    return found


def outcome(got: dict[str, Any]) -> tuple[Any, ...]:
    """Return what must be equal for two builds to agree."""
    return is_absent(got), got.get("calls"), error_kind(got)


def error_kind(got: dict[str, Any]) -> str:
    """Return the name of the exception that was raised, if any."""
    return (got.get("error") or "").partition(":")[0]


def is_absent(got: dict[str, Any]) -> bool:
    """Tell whether the build has no such hook."""
    return bool(got.get("absent"))


# Recordings in words


class Words:
    """What the labels of one case stand for, as HTML."""

    def __init__(self, builds: Builds, case: str) -> None:
        """Count the case's inputs and outputs: a single one gets no number."""
        calls = [
            call
            for cases in builds.values()
            for call in cases[case]["full"].get("calls", [])
        ]
        self._one_input = {len(call["grad_input"]) for call in calls} == {1}
        self._one_output = {len(call["grad_output"]) for call in calls} == {1}

    def entry(self, entry: dict[str, Any]) -> str:
        """Return an entry: its shape, and what it is."""
        if entry["shape"] is None:
            return "<code>None</code>"
        shape = f"<code>{entry['shape']}</code>"
        if not entry["is"]:
            return f"{shape} something else"
        return f"{shape} gradient of {' and of '.join(map(self.label, entry['is']))}"

    def label(self, label: str) -> str:
        """Return what a label stands for."""
        match = LABEL.fullmatch(label)
        assert match
        form, inside, bare = match.groups()
        name = self._tensor(inside or bare)
        return f"{name}, {FORMS[form]}" if form else name

    def _tensor(self, name: str) -> str:
        if match := re.fullmatch(r"arg(\d+)", name):
            return "the input" if self._one_input else f"argument {match[1]}"
        if match := re.fullmatch(r"out(\d+)", name):
            return "the output" if self._one_output else f"output {match[1]}"
        return f"<code>{name.removeprefix('kwarg:')}</code>"

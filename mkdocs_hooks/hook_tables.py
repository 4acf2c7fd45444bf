"""Put tables of what hooks got into pages, from the recordings.

A page holds markers:

    <div class="recorded" data-case="linear-3d" data-hook="legacy"></div>
    <div class="lengths" data-from="1.2.0" data-to="1.7.1"></div>
    <div class="devices"></div>
"""

from collections.abc import Iterable
from functools import partial
from html import escape
from itertools import groupby
from typing import Any

from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from mkdocs_hooks import hook_cases, hook_recordings
from mkdocs_hooks.hook_recordings import HOOKS, Builds, Run, Words
from mkdocs_hooks.markers import replaced

PAGE = "versions/hooks-by-version/"  # where every link to a case leads
READ = "versions/what-changed/#what-was-read-through-cudnn-a-convolution-lost-its-bias"
FIELDS = ("grad_input", "grad_output")


def on_page_content(content: str, *, page: Page, **_: object) -> str:
    """Replace the markers of a page."""
    made = {
        make.__name__: partial(make, page.url) for make in (recorded, lengths, devices)
    }
    return replaced(content, page, made, "case, hook or build of docs/data/hooks")


def link(page_url: str, case: str, hook: str, version: str, text: str) -> str:
    """Return a link to a case on the page that has all cases."""
    address = get_relative_url(PAGE, page_url)
    return f'<a href="{address}#{case}/{hook}/{version}">{text}</a>'


# One hook of one case


def recorded(page_url: str, case: str, hook: str) -> str:
    """Return the table of one hook in one case, with a link to all tables."""
    builds, gpu = hook_recordings.every_build(), hook_recordings.on_gpu()
    newest = list(builds)[-1]
    about = hook_cases.cases()[case]
    caption = (
        f"<figcaption><code>{escape(about.module)}</code> on {about.given()}, "
        f"<code>{HOOKS[hook]}</code>: "
        f"{link(page_url, case, hook, newest, f'{case}, release by release')}"
        "</figcaption>"
    )
    return (
        f'<figure class="recorded">{caption}{table(builds, gpu, case, hook)}</figure>'
    )


def table(builds: Builds, gpu: Builds, case: str, hook: str, anchor: str = "") -> str:
    """Return what a hook got, one row for successive builds that agree on the CPU.

    Below is a row for each build that was run on a GPU. `anchor` is what the anchors of
    the builds begin with; without it there are none.
    """
    words = Words(builds, case)
    runs = hook_recordings.runs(builds, case, hook)
    before: list[Run | None] = [None, *runs]
    rows = [
        row(run, last, words, anchor) for run, last in zip(runs, before, strict=False)
    ]
    for version, cases in gpu.items():
        cpu, run = (
            hook_recordings.runs({version: it}, case, hook)[0]
            for it in (builds[version], cases)
        )
        rows.append(gpu_row(run, cpu, words, anchor))
    heads = column_heads("torch, last node", *FIELDS, "messages")
    return (
        f'<table class="hook" aria-label="{case}, {HOOKS[hook]}"><thead><tr>{heads}'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def column_heads(*names: str) -> str:
    """Return the cells that name the columns of a table."""
    return "".join(f'<th scope="col">{name}</th>' for name in names)


def row(run: Run, before: Run | None, words: Words, anchor: str) -> str:
    """Return the row of builds that agree, with changes since the run before marked."""
    is_change = before is not None and not hook_recordings.is_absent(before.got)
    return (
        f"<tr{' class=change' if is_change else ''}>"
        f'<th scope="row">{anchors(run, anchor)}<b>{run.builds()}</b>{nodes(run)}</th>'
        f"{cells(run, before, words)}<td>{messages(run)}</td></tr>"
    )


def gpu_row(run: Run, cpu: Run, words: Words, anchor: str) -> str:
    """Return the row of one build on a GPU, with differences from its CPU marked."""
    if run.got == cpu.got:
        shown = '<td colspan="2" class="none">The same as on the CPU.</td><td></td>'
    else:
        shown = f"{cells(run, cpu, words)}<td>{messages(run)}</td>"
    return (
        f'<tr class="gpu"><th scope="row">{anchors(run, anchor, "/cuda")}'
        f"<b>{run.builds()} on a GPU</b>{nodes(run)}</th>{shown}</tr>"
    )


def nodes(run: Run) -> str:
    """Return the names of the last node, each with its builds if there are several."""
    names = [(name, list(group)) for name, group in groupby(run.nodes, run.nodes.get)]
    return "".join(
        f'<span class="node"><code>{name}</code>'
        f"{f' {hook_recordings.span(group)}' * (len(names) > 1)}</span>"
        for name, group in names
        if name
    )


def anchors(run: Run, begin: str, end: str = "") -> str:
    """Return the anchors that links to the builds of a row lead to."""
    return "".join(
        f'<span id="{begin}/{version}{end}" data-torch="{version}" data-node="{node}">'
        "</span>"
        for version, node in run.nodes.items()
        if begin
    )


def cells(run: Run, before: Run | None, words: Words) -> str:
    """Return both tuples, or why there are none."""
    if hook_recordings.is_absent(run.got):
        return '<td colspan="2" class="none">This release has no such hook.</td>'
    if not run.got["calls"]:
        kind = hook_recordings.error_kind(run.got)
        what = f"Not called: {kind}." if kind else "Never called."
        return f'<td colspan="2" class="none">{what}</td>'
    (call,) = run.got["calls"]
    last = before.got.get("calls") if before else None
    return "".join(
        f"<td>{entries(call[field], last[0][field] if last else None, words)}</td>"
        for field in FIELDS
    )


def entries(
    got: list[dict[str, Any]] | None, last: list[dict[str, Any]] | None, words: Words
) -> str:
    """Return the entries of a tuple, with those marked that differ from `last`."""
    if got is None:
        return '<p class="none">This hook gets none.</p>'
    items: list[str] = []
    for i, entry in enumerate(got):
        changed = last is not None and (i >= len(last) or last[i] != entry)
        mark = ' <em class="changed">changed</em>' if changed else ""
        items.append(f"<li>{words.entry(entry)}{mark}</li>")
    is_other = last is not None and len(last) != len(got)
    were = f' <em class="changed">were {len(last or ())}</em>' * is_other
    count = f"{len(got)} {'entry' if len(got) == 1 else 'entries'}"
    return f'<p class="count">{count}{were}</p><ol start="0">{"".join(items)}</ol>'


def messages(run: Run) -> str:
    """Return the errors and warnings, folded, each with the builds that gave it."""
    return "".join(
        f'<details data-torch="{" ".join(versions)}"><summary>'
        f"{text.partition(':')[0]}<span>{run.builds_with(text)}</span>"
        f"</summary>{escape(text.partition(': ')[2])}</details>"
        for text, versions in run.messages.items()
    )


# Two builds, all cases


def lengths(page_url: str, **ends: str) -> str:
    """Return how many entries `register_backward_hook` got in two builds.

    A case is left out if the hook was not called in one of the two.
    """
    builds = hook_recordings.every_build()
    first, second = ends["from"], ends["to"]
    pairs: dict[tuple[int, int], list[str]] = {}
    without: dict[str, str] = {}
    for case in builds[first]:
        got = {version: builds[version][case]["legacy"] for version in (first, second)}
        sizes = [length(it) for it in got.values()]
        if None not in sizes:
            pairs.setdefault((sizes[0] or 0, sizes[1] or 0), []).append(case)
        else:
            without[case] = why_none(got)
    rows = "".join(
        f"<tr><td>{sizes[0]}</td><td>{sizes[1]}</td><td>{len(cases)}: "
        f"{', '.join(linked(cases, page_url, second))}</td></tr>"
        for sizes, cases in sorted(pairs.items())
    )
    heads = column_heads(f"torch {first}", f"torch {second}", "modules")
    return (
        f'<table class="lengths"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table><p>{fewer(pairs)}</p>"
        f"<p>{left_out(without, len(builds[first]), page_url, second)}</p>"
    )


def why_none(got: dict[str, dict[str, Any]]) -> str:
    """Say why the hook was not called, for each build in which it was not."""
    whys: dict[str, list[str]] = {}
    for version, it in got.items():
        if length(it) is None:
            why = hook_recordings.error_kind(it) or "not called"
            whys.setdefault(why, []).append(version)
    return ", ".join(
        f"{why} in torch {' and '.join(versions)}" for why, versions in whys.items()
    )


def left_out(without: dict[str, str], total: int, page_url: str, version: str) -> str:
    """Name the cases that have no length in one of the builds, and say why."""
    if not without:
        return f"All {total} recorded cases are in the table."
    names = linked(without, page_url, version)
    whys = zip(names, without.values(), strict=True)
    listed = "; ".join(f"{name} ({why})" for name, why in whys)
    return f"Left out, of {total} recorded cases: {listed}."


def linked(cases: Iterable[str], page_url: str, version: str) -> list[str]:
    """Return the names of cases, each with a link."""
    return [link(page_url, case, "legacy", version, case) for case in cases]


def length(got: dict[str, Any]) -> int | None:
    """Return the length of `grad_input`, if the hook was called."""
    return len(got["calls"][0]["grad_input"]) if got.get("calls") else None


def fewer(pairs: dict[tuple[int, int], list[str]]) -> str:
    """Say which cases have fewer entries in the second build."""
    found = [case for (a, b), cases in pairs.items() if b < a for case in cases]
    total = sum(map(len, pairs.values()))
    if not found:
        return f"In none of these {total} cases does the tuple get shorter."
    return f"Of {total} cases the tuple gets shorter in {', '.join(found)}."


# What the recordings were made on


def devices(page_url: str) -> str:
    """Say which builds were run on a GPU, and link to what was read of the others."""
    gpu = ", ".join(hook_recordings.on_gpu())
    there = f"torch {gpu} on a GPU, too" if gpu else "none on a GPU"
    others = "other releases do on a GPU" if gpu else "is said here of a GPU"
    read = f'<a href="{get_relative_url(READ, page_url)}">read in sources</a>'
    run = f"Every release was run on the CPU, {there}."
    return f"<p>{run} What {others} was {read}, not run.</p>"

"""Put the claims of docs/data/claims.toml into the page that judges them.

The page holds, above the blocks of each section, `<div class="claims"
data-section="fc2"></div>`, and once `<div class="verdicts"></div>`.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from mkdocs_hooks import cache, hook_recordings, hook_tables, recorded_programs
from mkdocs_hooks.hook_recordings import HOOKS, Builds, Words

Claim = dict[str, Any]
FILE = cache.ROOT / "docs" / "data" / "claims.toml"
MARKER = re.compile(
    r'^<div class="claims" data-section="([^"]*)"></div>$', re.MULTILINE
)
RAN = '<div class="ran" data-name="%s"></div>'
COUNTS = '<div class="verdicts"></div>'
VERDICTS = (
    "right",
    "right for old hooks only",
    "depends on version",
    "not reproduced",
    "wrong",
)


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Replace the markers, if every claim has its evidence."""
    if not MARKER.search(markdown):
        return markdown
    claims, builds = read(), hook_recordings.every_build()
    programs = recorded_programs.builds()
    if found := problems(claims, markdown, builds, programs):
        raise PluginError(f"{page.file.src_uri}:\n" + "\n".join(found))

    def section(marker: re.Match[str]) -> str:
        there = [claim for claim in claims if claim["section"] == marker[1]]
        return "\n\n".join(shown(group, builds, programs) for group in alike(there))

    return MARKER.sub(section, markdown).replace(COUNTS, counted(claims))


def read() -> list[Claim]:
    """Return the claims, in the order of the file."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))["claim"]


# Whether a claim holds


def holds(recorded: dict[str, Any], got: dict[str, Any]) -> bool:
    """Tell whether a claim about a case holds in one recording of a hook."""
    if not got.get("calls"):
        return False
    entries = got["calls"][0][recorded.get("field", "grad_input")]
    if "length" in recorded:
        return len(entries) == recorded["length"]
    if "shapes" in recorded:
        return [entry["shape"] for entry in entries] == recorded["shapes"]
    if "entries" in recorded:
        return len(entries) == len(recorded["entries"]) and all(
            map(labelled, entries, recorded["entries"])
        )
    at = recorded["entry"]
    return at < len(entries) and labelled(entries[at], recorded["is"])


def labelled(entry: dict[str, Any], label: str) -> bool:
    """Tell whether an entry has a label: "" for no label, "none" for no gradient."""
    if entry["shape"] is None:
        return label == "none"
    return label in (entry["is"] or [""])


def where(recorded: dict[str, Any], builds: Builds) -> dict[str, dict[str, bool]]:
    """Tell, for both hooks and each build, whether a claim about a case holds."""
    return {
        hook: {
            version: holds(recorded, cases[recorded["case"]][hook])
            for version, cases in builds.items()
            if not hook_recordings.is_absent(cases[recorded["case"]][hook])
        }
        for hook in ("legacy", "full")
    }


def having_changed(change: dict[str, Any], builds: Builds) -> list[str]:
    """Return the cases whose `grad_input` goes from one length to the other."""
    ends = builds[change["from"]], builds[change["to"]]
    return [
        case
        for case in ends[0]
        if [hook_tables.length(end[case]["legacy"]) for end in ends]
        == change["lengths"]
    ]


def ran_as_said(program: dict[str, Any], programs: Builds) -> dict[str, bool]:
    """Tell, for each build, whether a program prints or raises as is claimed."""

    def does(ran: dict[str, Any]) -> bool:
        if "prints" in program:
            return program["prints"] in ran["stdout"].splitlines()
        return (ran["error"] is not None) == program["raises"]

    return {
        version: does(recorded[program["name"]])
        for version, recorded in programs.items()
    }


def computed(claim: Claim, builds: Builds, programs: Builds) -> str | None:
    """Return the verdict that the recordings give, or None if they give none.

    A claim that holds in no recording is wrong, unless a source was read that supports
    it.
    """
    found = [where(recorded, builds) for recorded in claim.get("recorded", [])]
    old = [so for it in found for so in it["legacy"].values()]
    full = [so for it in found for so in it["full"].values()]
    if "change" in claim:
        old.append(bool(having_changed(claim["change"], builds)))
    if "program" in claim:
        old += ran_as_said(claim["program"], programs).values()
    if not old:
        return None
    if not any(old):
        return "not reproduced" if "read" in claim else "wrong"
    if all(old):
        return "right" if all(full) else "right for old hooks only"
    return "depends on version"


def problems(
    claims: list[Claim], markdown: str, builds: Builds, programs: Builds
) -> list[str]:
    """Return what the claims lack, and where they contradict their evidence."""
    found: list[str] = []
    printed = printed_in(markdown)
    for claim in claims:
        name = f"{FILE.name}: {claim['says']!r}"
        if claim["verdict"] not in VERDICTS:
            found.append(f"{name}: no verdict is called {claim['verdict']!r}")
        if claim["section"] not in printed:
            found.append(f"{name}: the page has no section {claim['section']!r}")
        if not claim.keys() & {"prints", "recorded", "change", "program"}:
            found.append(f"{name}: there is no evidence")
        if ("mistake" in claim) != (claim["verdict"] == "wrong"):
            found.append(f"{name}: what is wrong has a mistake, and nothing else")
        found += [
            f"{name}: it is not so of {recorded['case']} in all releases"
            for recorded in claim.get("besides", [])
            if not all(where(recorded, builds)["legacy"].values())
        ]
        found += [
            f"{name}: no block of section {claim['section']!r} prints {line!r}"
            for line in claim.get("prints", [])
            if line not in printed.get(claim["section"], [])
        ]
        if "program" in claim and RAN % claim["program"]["name"] not in markdown:
            found.append(f"{name}: the page does not show {claim['program']['name']}")
        verdict = computed(claim, builds, programs)
        if verdict not in (None, claim["verdict"]):
            found.append(
                f"{name}: the verdict is {claim['verdict']!r}, but the recordings say "
                f"{verdict!r}"
            )
    return found


def printed_in(markdown: str) -> dict[str, list[str]]:
    """Return, by section, the lines printed by the blocks up to the next section."""
    _, *parts = MARKER.split(markdown)
    return {
        section: re.findall(r"^ *#> (.*)$", text, re.MULTILINE)
        for section, text in zip(parts[::2], parts[1::2], strict=True)
    }


# On the page


def alike(claims: list[Claim]) -> list[list[Claim]]:
    """Group successive claims of one post that make the same mistake."""

    def what(claim: Claim) -> tuple[str, ...]:
        mistake = claim.get("mistake", claim["says"])
        return claim["section"], claim["place"], claim["see"], mistake

    return [list(group) for _, group in groupby(claims, key=what)]


def shown(group: list[Claim], builds: Builds, programs: Builds) -> str:
    """Return claims of one post and verdict as Markdown."""
    one = group[0]
    lines = [f"- {line}" for it in group for line in evidence(it, builds, programs)]
    says = "; ".join(claim["says"] for claim in group)
    because = " ".join(claim["because"] for claim in group)
    return (
        f'<div class="claim {one["verdict"].partition(" ")[0]}" markdown="1">\n\n'
        f"*{one['place'][0].upper()}{one['place'][1:]}:* {says}.\n\n"
        f"**{one['verdict'].capitalize()}.** {because} "
        f"More: [{titled(one['see'])}]({one['see']})\n\n"
        + "\n".join(lines)
        + "\n\n</div>"
    )


def titled(see: str) -> str:
    """Return the title of the page that a claim refers to."""
    name = see.partition("#")[0]
    folder, mark = ("docs", "# # ") if name.endswith(".py") else ("docs/versions", "# ")
    lines = (cache.ROOT / folder / name).read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(mark)).removeprefix(mark)


def evidence(claim: Claim, builds: Builds, programs: Builds) -> Iterator[str]:
    """Yield a line for each thing that was tested: what, and where it holds."""
    for line in claim.get("prints", []):
        yield f"Printed below: `{line}`"
    yield from (of_case(recorded, builds) for recorded in claim.get("recorded", []))
    if change := claim.get("change"):
        was, now = change["lengths"]
        cases = having_changed(change, builds)
        yield (
            f"`grad_input` has {was} entries in torch {change['from']} and {now} in "
            f"torch {change['to']}, on the CPU: {', '.join(cases) or 'no module'} of "
            f"{len(builds[change['from']])}"
        )
    for recorded in claim.get("besides", []):
        yield f"Beside it: {of_case(recorded, builds)}"
    if program := claim.get("program"):
        prints = f"prints `{program.get('prints')}`"
        does = "raises" if program.get("raises") else "runs to its end"
        yield (
            f"[{program['name']}](#{program['name']}) "
            f"{prints if 'prints' in program else does}: "
            f"{spoken(ran_as_said(program, programs))}"
        )
    if address := claim.get("read"):
        name = address.removeprefix("https://github.com/")
        yield f"Read, not run: [{name}]({address})"


def of_case(recorded: dict[str, Any], builds: Builds) -> str:
    """Say what was tested of a case, and with which hook and releases it holds."""
    parts = [
        f"{spoken(result)} with `{HOOKS[hook]}`"
        for hook, result in where(recorded, builds).items()
    ]
    tested = f"{link(recorded, builds)}, {asked(recorded, builds)}"
    return f"{tested}: {', '.join(parts)}"


def link(recorded: dict[str, Any], builds: Builds) -> str:
    """Return a link to the case that a claim is about."""
    case, newest = recorded["case"], list(builds)[-1]
    return f"[{case}](hooks-by-version.md#{case}/legacy/{newest})"


def asked(recorded: dict[str, Any], builds: Builds) -> str:
    """Say what is claimed of a case."""
    words, field = Words(builds, recorded["case"]), recorded.get("field", "grad_input")
    if "length" in recorded:
        count = recorded["length"]
        return f"`{field}` has {count} {'entry' if count == 1 else 'entries'}"
    if "shapes" in recorded:
        shapes = [f"`{shape}`" for shape in recorded["shapes"]]
        return f"`{field}` has entries of shape {', '.join(shapes)}"
    if "entries" in recorded:
        entries = [
            f"the gradient of {words.label(label)}" if label else "something else"
            for label in recorded["entries"]
        ]
        return f"`{field}` holds {'; '.join(entries)}"
    of = words.label(recorded["is"])
    return f"`{field}[{recorded['entry']}]` is the gradient of {of}"


def spoken(result: dict[str, bool]) -> str:
    """Say in how many of the releases something holds, and in which."""
    among, having = list(result), [version for version, so in result.items() if so]
    if not having:
        return f"in none of {len(among)} releases"
    if len(having) == len(among):
        return f"in all {len(among)} releases"
    spans = hook_recordings.spans(having, among)
    return f"in {len(having)} of {len(among)} releases (torch {spans})"


def counted(claims: list[Claim]) -> str:
    """Return a table of verdicts by thread, and the mistakes made more than once."""
    threads = sorted({claim["thread"] for claim in claims})
    counts = Counter((claim["thread"], claim["verdict"]) for claim in claims)
    rows = [
        f"| {verdict} | "
        + " | ".join(str(counts[thread, verdict]) for thread in threads)
        + f" | {sum(counts[thread, verdict] for thread in threads)} |"
        for verdict in VERDICTS
    ]
    heads = " | ".join(f"thread {thread}" for thread in threads)
    sides = "|---:" * (len(threads) + 1)  # columns of numbers
    table = [f"| verdict | {heads} | all |", f"|---{sides}|", *rows]
    return "\n".join([*table, "", mistaken(claims)])


def mistaken(claims: list[Claim]) -> str:
    """Say how many mistakes the wrong claims make, and which ones more than once."""
    made = Counter(claim["mistake"] for claim in claims if "mistake" in claim)
    often = [f"{what} ({n} claims)" for what, n in made.most_common() if n > 1]
    return (
        f"The {made.total()} wrong claims make {len(made)} mistakes. Made more than "
        f"once: {'; '.join(often)}."
    )

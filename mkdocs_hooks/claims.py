"""Put the claims of docs/data/claims.toml into the page that judges them.

The page holds, above the blocks of each section, `<div class="claims"
data-section="fc2"></div>`, and once `<div class="verdicts"></div>`.
"""

import re
import tomllib
from collections import Counter
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from mkdocs_hooks import cache, hook_recordings, recorded_programs
from mkdocs_hooks.hook_recordings import HOOKS, Builds

Claim = dict[str, Any]
FILE = cache.ROOT / "docs" / "data" / "claims.toml"
MARKER = re.compile(
    r'^<div class="claims" data-section="([^"]*)"></div>$', re.MULTILINE
)
RAN = '<div class="ran" data-name="%s"></div>'
COUNTS = '<div class="verdicts"></div>'
VERDICTS = ("right", "right for legacy hooks only", "depends on version", "wrong")


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
        return "\n\n".join(shown(claim, builds, programs) for claim in there)

    return MARKER.sub(section, markdown).replace(COUNTS, counted(claims))


def read() -> list[Claim]:
    """Return the claims, in the order of the file."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))["claim"]


# Whether it is so


def holds(recorded: dict[str, Any], got: dict[str, Any]) -> bool:
    """Tell whether what is claimed of a case is so in one recording of a hook."""
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
    """Tell whether an entry has a label; "" is no label, "none" no gradient."""
    if entry["shape"] is None:
        return label == "none"
    return label in (entry["is"] or [""])


def where(recorded: dict[str, Any], builds: Builds) -> dict[str, dict[str, bool]]:
    """Return for both hooks in which builds a claim about a case holds."""
    return {
        hook: {
            version: holds(recorded, cases[recorded["case"]][hook])
            for version, cases in builds.items()
            if not hook_recordings.is_absent(cases[recorded["case"]][hook])
        }
        for hook in ("legacy", "full")
    }


def ran_as_said(program: dict[str, Any], programs: Builds) -> dict[str, bool]:
    """Return in which builds a program raises, or does not, as is claimed."""
    return {
        version: (recorded[program["name"]]["error"] is not None) == program["raises"]
        for version, recorded in programs.items()
    }


def computed(claim: Claim, builds: Builds, programs: Builds) -> str | None:
    """Return the verdict that the recordings give, or None where they give none.

    What was read, not run, may say more than they do.
    """
    if "read" in claim:
        return None
    found = [where(recorded, builds) for recorded in claim.get("recorded", [])]
    legacy = [so for it in found for so in it["legacy"].values()]
    full = [so for it in found for so in it["full"].values()]
    if "program" in claim:
        legacy += ran_as_said(claim["program"], programs).values()
    if not legacy:
        return None
    if not any(legacy):
        return "wrong"
    if all(legacy):
        return "right" if all(full) else "right for legacy hooks only"
    return "depends on version"


def problems(
    claims: list[Claim], markdown: str, builds: Builds, programs: Builds
) -> list[str]:
    """Return what is missing from the claims, or contradicts their evidence."""
    found: list[str] = []
    printed = printed_in(markdown)
    for claim in claims:
        name = f"{FILE.name}: {claim['says']!r}"
        if claim["verdict"] not in VERDICTS:
            found.append(f"{name}: no verdict is called {claim['verdict']!r}")
        if claim["section"] not in printed:
            found.append(f"{name}: the page has no section {claim['section']!r}")
        if not claim.keys() & {"prints", "recorded", "program"}:
            found.append(f"{name}: there is no evidence")
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
    """Return by section the lines its blocks print: all up to the next section."""
    _, *parts = MARKER.split(markdown)
    return {
        section: re.findall(r"^ *#> (.*)$", text, re.MULTILINE)
        for section, text in zip(parts[::2], parts[1::2], strict=True)
    }


# On the page


def shown(claim: Claim, builds: Builds, programs: Builds) -> str:
    """Return a claim as Markdown."""
    evidence = [f"Printed below: `{line}`" for line in claim.get("prints", [])]
    evidence += [
        f"{link(recorded, builds)}: {spoken(where(recorded, builds))}"
        for recorded in claim.get("recorded", [])
    ]
    if program := claim.get("program"):
        result = {"": ran_as_said(program, programs)}
        evidence.append(f"[{program['name']}](#{program['name']}): {spoken(result)}")
    if address := claim.get("read"):
        evidence.append(f"Read, not run: <{address}>")
    lines = "\n".join(f"- {line}" for line in evidence)
    kind = claim["verdict"].partition(" ")[0]
    return (
        f'<div class="claim {kind}" markdown="1">\n\n'
        f"*{claim['place'][0].upper()}{claim['place'][1:]}:* {claim['says']}.\n\n"
        f"**{claim['verdict'].capitalize()}.** {claim['because']} "
        f"[Explained here]({claim['see']}).\n\n{lines}\n\n</div>"
    )


def link(recorded: dict[str, Any], builds: Builds) -> str:
    """Return a link to the case that a claim is about."""
    case, newest = recorded["case"], list(builds)[-1]
    return f"[{case}](hooks-by-version.md#{case}/legacy/{newest})"


def spoken(found: dict[str, dict[str, bool]]) -> str:
    """Say in which builds a claim holds."""
    parts: list[str] = []
    for hook, result in found.items():
        having = [version for version, so in result.items() if so]
        if not having:
            words = f"in none of {len(result)} builds"
        elif len(having) == len(result):
            words = f"in all {len(result)} builds"
        else:
            words = f"in torch {', '.join(having)}, of {len(result)} builds"
        parts.append(f"{words} with `{HOOKS[hook]}`" if hook else words)
    return f"holds {', '.join(parts)}"


def counted(claims: list[Claim]) -> str:
    """Return how many claims of each thread have which verdict, as a table."""
    threads = sorted({claim["thread"] for claim in claims})
    counts = Counter((claim["thread"], claim["verdict"]) for claim in claims)
    rows = [
        f"| {verdict} | "
        + " | ".join(str(counts[thread, verdict]) for thread in threads)
        + f" | {sum(counts[thread, verdict] for thread in threads)} |"
        for verdict in VERDICTS
    ]
    heads = " | ".join(f"thread {thread}" for thread in threads)
    return "\n".join(
        [f"| verdict | {heads} | all |", "|---" * (len(threads) + 2) + "|", *rows]
    )

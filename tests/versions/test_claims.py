"""Every claim of the threads has its evidence, and the evidence says what is said."""

import copy
import re
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from mkdocs_hooks import claims, hook_recordings, recorded_programs
from mkdocs_hooks.claims import Claim

PAGE = claims.cache.ROOT / "docs" / "versions" / "threads-judged.md"
MARKDOWN = PAGE.read_text(encoding="utf-8")
CLAIMS = claims.read()
BUILDS = hook_recordings.every_build()
PROGRAMS = recorded_programs.builds()
NEWEST = list(PROGRAMS)[-1]
AT_LEAST = {1: 24, 2: 12, 3: 12, 4: 8}
FIELDS = {"thread", "section", "place", "says", "verdict", "because", "see"}
EVIDENCE = {"prints", "recorded", "change", "program"}
OTHERS = {"mistake", "besides", "read"}
each_claim = pytest.mark.parametrize("claim", CLAIMS, ids=lambda it: it["says"][:40])


def found(
    changed: list[Claim] = CLAIMS,
    markdown: str = MARKDOWN,
    builds: dict[str, Any] = BUILDS,
    programs: dict[str, Any] = PROGRAMS,
) -> list[str]:
    return claims.problems(changed, markdown, builds, programs)


def the(says: str) -> Claim:
    """Return a copy of the claim whose words begin so."""
    (claim,) = [claim for claim in CLAIMS if claim["says"].startswith(says)]
    return copy.deepcopy(claim)


# ---- The file


def test_no_claim_is_missing() -> None:
    counts = Counter(claim["thread"] for claim in CLAIMS)
    assert counts.keys() == AT_LEAST.keys()
    for thread, least in AT_LEAST.items():
        assert counts[thread] >= least


@each_claim
def test_a_claim_is_complete(claim: Claim) -> None:
    assert FIELDS <= claim.keys() <= FIELDS | EVIDENCE | OTHERS
    assert all(isinstance(claim[field], str) for field in FIELDS - {"thread"})
    assert claim["verdict"] in claims.VERDICTS
    assert claim.keys() & EVIDENCE
    assert ("read" in claim) >= (claim["verdict"] == "not reproduced")
    assert re.fullmatch(r"[\w./#-]+\.(md|py)(#[\w-]+)?", claim["see"])


@each_claim
def test_a_recorded_claim_is_about_a_case_and_says_one_thing(claim: Claim) -> None:
    for recorded in claim.get("recorded", []) + claim.get("besides", []):
        assert all(recorded["case"] in cases for cases in BUILDS.values())
        about = recorded.keys() - {"case", "field"}
        assert about in ({"length"}, {"shapes"}, {"entries"}, {"entry", "is"})


def test_all_evidence_holds() -> None:
    assert found() == []


def test_the_recordings_judge_most_of_what_they_are_named_for() -> None:
    judged = [it for it in CLAIMS if claims.computed(it, BUILDS, PROGRAMS)]
    assert judged == [it for it in CLAIMS if it.keys() & EVIDENCE - {"prints"}]
    assert {claims.computed(it, BUILDS, PROGRAMS) for it in judged} == set(
        claims.VERDICTS
    )


@pytest.mark.parametrize(
    ("version", "raises"), [("1.2.0", False), ("1.7.0", True), (NEWEST, True)]
)
def test_a_vector_of_one_entry(version: str, raises: bool) -> None:
    recorded = PROGRAMS[version]["vector_of_one_entry"]
    assert (recorded["error"] is not None) == raises
    claim = the("`out.backward()` equals")
    assert claims.ran_as_said(claim["program"], PROGRAMS)[version] is not raises


# ---- The verdict follows from the recordings


def got(*entries: tuple[list[int] | None, list[str]]) -> dict[str, Any]:
    made = [{"shape": shape, "is": labels} for shape, labels in entries]
    return {"calls": [{"grad_input": made, "grad_output": made[:1]}]}


@pytest.mark.parametrize(
    ("recorded", "so"),
    [
        ({"length": 2}, True),
        ({"length": 3}, False),
        ({"field": "grad_output", "length": 1}, True),
        ({"shapes": [[3], None]}, True),
        ({"shapes": [[3]]}, False),
        ({"entries": ["bias", "none"]}, True),
        ({"entries": ["out0", "none"]}, True),
        ({"entries": ["bias"]}, False),
        ({"entries": ["bias", ""]}, False),
        ({"entry": 0, "is": "bias"}, True),
        ({"entry": 1, "is": "bias"}, False),
        ({"entry": 2, "is": "bias"}, False),
    ],
)
def test_what_holds(recorded: dict[str, Any], so: bool) -> None:
    tuples = got(([3], ["bias", "out0"]), (None, []))
    assert claims.holds(recorded, tuples) == so
    assert not claims.holds(recorded, {"calls": []})


def test_an_entry_without_label() -> None:
    assert claims.holds({"entries": [""]}, got(([3], [])))


@pytest.mark.parametrize(
    ("legacy", "full", "verdict"),
    [
        ("yes yes", "yes", "right"),
        ("yes yes", "no", "right for old hooks only"),
        ("yes no", "yes", "depends on version"),
        ("no no", "no", "wrong"),
        ("no no", "yes", "wrong"),
    ],
)
def test_verdicts(legacy: str, full: str, verdict: str) -> None:
    one = {"yes": got(([1], ["arg0"])), "no": got(([1], ["bias"]))}
    kinds = [*full.split(), *full.split()]
    builds = {
        f"1.{i}": {"a": {"legacy": one[so], "full": one[kinds[i]]}}
        for i, so in enumerate(legacy.split())
    }
    claim = {"recorded": [{"case": "a", "entry": 0, "is": "arg0"}]}
    assert claims.computed(claim, builds, {}) == verdict
    with_read = "not reproduced" if verdict == "wrong" else verdict
    assert claims.computed(claim | {"read": "https://"}, builds, {}) == with_read


def test_a_change_of_length_is_looked_for_in_every_case() -> None:
    change = {"from": "1.7.1", "to": "1.12.1", "lengths": [2, 1]}
    assert claims.having_changed(change, BUILDS) == ["linear-3d", "multiheadattention"]
    assert claims.having_changed(change | {"lengths": [1, 2]}, BUILDS) == []
    assert claims.computed({"change": change}, BUILDS, {}) == "right"
    none = {"change": change | {"lengths": [3, 2]}}
    assert claims.computed(none, BUILDS, {}) == "wrong"


def test_a_program_is_asked_for_the_line_it_is_said_to_print() -> None:
    ran = {"error": None, "stdout": "a\nb c\n"}
    programs = {"1.0": {"it": ran}, "1.1": {"it": ran | {"stdout": "b\n"}}}
    said = claims.ran_as_said({"name": "it", "prints": "b c"}, programs)
    assert said == {"1.0": True, "1.1": False}


# ---- What is wrong is found


def without_evidence(claim: Claim) -> None:
    for field in EVIDENCE:
        claim.pop(field, None)


BREAKS: dict[str, tuple[str, Callable[[Claim], Any], str]] = {
    "verdict": ("entry 1 is", lambda it: it.update(verdict="right"), "say 'wrong'"),
    "no such verdict": ("entry 1 is", lambda it: it.update(verdict="so"), "'so'"),
    "no evidence": ("entry 1 is", without_evidence, "there is no evidence"),
    "line": ("entry 1 is", lambda it: it.update(prints=["a: 1"]), "prints 'a: 1'"),
    "no mistake": (
        "entry 1 is",
        lambda it: it.pop("mistake"),
        "what is wrong has a mistake",
    ),
    "besides": (
        "their shapes",
        lambda it: it.update(besides=it["recorded"]),
        "not so of thread-fc2 in all releases",
    ),
    "not reproduced": (
        "their shapes",
        lambda it: it.pop("read"),
        "say 'wrong'",
    ),
    "prints": (
        "with ones the result",
        lambda it: it["program"].update(prints="[2]"),
        "say 'wrong'",
    ),
    "section": ("entry 1 is", lambda it: it.update(section="x"), "no section 'x'"),
    "raises": (
        "`out.backward()` equals",
        lambda it: it.update(verdict="right"),
        "say 'depends on version'",
    ),
    "program": (
        "the loop as written",
        lambda it: it.update(program={"name": "both_hooks", "raises": True}),
        "the page does not show both_hooks",
    ),
}


@pytest.mark.parametrize(("says", "change", "problem"), BREAKS.values(), ids=BREAKS)
def test_a_break_is_found(
    says: str, change: Callable[[Claim], Any], problem: str
) -> None:
    broken = the(says)
    change(broken)
    assert any(problem in it for it in found([broken])), found([broken])


def test_a_changed_output_is_found() -> None:
    line = "#> grad_input[0] is the gradient of the bias"
    assert line in MARKDOWN
    changed = MARKDOWN.replace(line, line.replace("bias", "input"))
    assert any("section 'fc2' prints" in it for it in found(markdown=changed))


def test_a_line_of_another_section_is_no_evidence() -> None:
    claim = the("entry 1 is")
    assert not found([claim])
    claim["prints"] = ["IndexError: tuple index out of range"]
    assert found([claim])


def test_one_changed_recording_is_found() -> None:
    changed = copy.deepcopy(BUILDS)
    call = changed["1.7.0"]["thread-fc2"]["legacy"]["calls"][0]
    call["grad_input"][2]["is"] = ["weight"]
    problems = found(builds=changed)
    assert len(problems) == 1
    assert "the recordings say 'depends on version'" in problems[0]


def test_one_changed_program_is_found() -> None:
    changed = copy.deepcopy(PROGRAMS)
    changed["1.7.0"]["no_vector"]["error"] = None
    assert any("'depends on version'" in it for it in found(programs=changed))


# ---- The page


def on_page(markdown: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="versions/threads-judged.md"))
    return claims.on_page_markdown(markdown, page=cast(Page, page))


def test_the_page_shows_every_claim_in_its_section() -> None:
    shown = on_page(MARKDOWN)
    assert not claims.MARKER.search(shown)
    assert claims.COUNTS not in shown
    groups = claims.alike(CLAIMS)
    for group in groups:
        says = "; ".join(claim["says"] for claim in group)
        verdict = f"{says}.\n\n**{group[0]['verdict'].capitalize()}.**"
        assert shown.count(verdict) == 1
    assert [claim for group in groups for claim in group] == CLAIMS
    assert len(groups) < len(CLAIMS)
    assert shown.count('<div class="claim ') == len(groups)


def test_claims_of_one_post_that_make_one_mistake_are_judged_together() -> None:
    (entries,) = [
        it for it in claims.alike(CLAIMS) if it[0] == the("entry 0 of the con")
    ]
    assert [it["says"][:7] for it in entries] == ["entry 0", "entry 1", "entry 2"]
    shown = claims.shown(entries, BUILDS, PROGRAMS)
    assert all(it["because"] in shown for it in entries)
    assert "`Conv2d: entry 2 is the bias: False`" in shown


def test_the_page_that_explains_is_named() -> None:
    tuple_ = claims.shown([the("entry 2 is the derivative")], BUILDS, PROGRAMS)
    named = (
        "[What is in the tuple, entry by entry?](../questions/what-is-in-the-tuple.md)"
    )
    assert named in tuple_
    program = claims.shown([the("the hook appends")], BUILDS, PROGRAMS)
    assert "[Two bugs in a hook that collects gradients](../examples/two" in program


def test_the_table_counts_them() -> None:
    _, _, *rows, _, said = claims.counted(CLAIMS).splitlines()
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    for verdict, *counts in cells:
        numbers = [int(count) for count in counts]
        assert numbers[-1] == sum(numbers[:-1])
        assert numbers[-1] == sum(it["verdict"] == verdict for it in CLAIMS)
    assert sum(int(row[-1]) for row in cells) == len(CLAIMS)
    wrong = [it["mistake"] for it in CLAIMS if it["verdict"] == "wrong"]
    mistakes = Counter(wrong)
    assert said.startswith(
        f"The {len(wrong)} wrong claims make {len(mistakes)} mistakes."
    )
    for mistake, count in mistakes.items():
        assert (f"{mistake} ({count} claims)" in said) == (count > 1)
    assert mistakes["gradients are taken for data"] == 8  # those of one post


def test_a_claim_says_in_which_builds_it_holds() -> None:
    equals = the("`out.backward()` equals")
    shown = claims.shown([equals], BUILDS, PROGRAMS)
    accepted = [
        v for v, ran in PROGRAMS.items() if not ran[equals["program"]["name"]]["error"]
    ]
    releases = f"{accepted[0]} to {accepted[-1]}"
    assert (
        "prints `the same as nothing: True`: "
        f"in {len(accepted)} of {len(PROGRAMS)} releases (torch {releases})" in shown
    )
    lost = claims.shown([the("entry 1 of `grad_input`")], BUILDS, PROGRAMS)
    assert f"runs to its end: in none of {len(PROGRAMS)} releases" in lost
    nothing = claims.shown([the("without an argument")], BUILDS, PROGRAMS)
    assert f"raises: in all {len(PROGRAMS)} releases" in nothing
    three = claims.shown([the("the `grad_input` of fc2")], BUILDS, PROGRAMS)
    assert (
        "`grad_input` has 3 entries: "
        f"in all {len(BUILDS)} releases with `register_backward_hook`, in none of "
        in three
    )


def test_releases_are_named_as_ranges() -> None:
    so = {"1.0": True, "1.1": True, "1.2": False, "1.3": True}
    assert claims.spoken(so) == "in 3 of 4 releases (torch 1.0 to 1.1, 1.3)"
    assert claims.spoken(dict.fromkeys(so, True)) == "in all 4 releases"
    assert claims.spoken(dict.fromkeys(so, False)) == "in none of 4 releases"


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ({"length": 1}, "`grad_input` has 1 entry"),
        ({"length": 2, "field": "grad_output"}, "`grad_output` has 2 entries"),
        ({"shapes": [[3], [4]]}, "`grad_input` has entries of shape `[3]`, `[4]`"),
        (
            {"entries": ["T(weight)", ""]},
            "`grad_input` holds the gradient of <code>weight</code>, transposed; "
            "something else",
        ),
        ({"entry": 0, "is": "arg0"}, "`grad_input[0]` is the gradient of the input"),
    ],
)
def test_the_evidence_says_what_was_tested(recorded: dict[str, Any], said: str) -> None:
    assert claims.asked(recorded | {"case": "linear-2d"}, BUILDS) == said


@each_claim
def test_no_evidence_contradicts_its_verdict(claim: Claim) -> None:
    lines = list(claims.evidence(claim, BUILDS, PROGRAMS))
    own = [it for it in lines if not it.startswith(("Beside it:", "Printed below:"))]
    if claim["verdict"] in ("wrong", "not reproduced", "depends on version"):
        assert not [it for it in own if ": in all " in it]


def test_the_build_fails_without_evidence() -> None:
    broken = MARKDOWN.replace("#> mended: True", "#> mended: False")
    with pytest.raises(PluginError, match="prints 'mended: True'"):
        on_page(broken)


def test_other_pages_stay_as_they_are() -> None:
    assert on_page("# A page") == "# A page"

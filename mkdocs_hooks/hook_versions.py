"""Put all recordings of hooks into the page that holds the two markers.

The tables work without JavaScript. With it, docs/assets/hook_versions.js shows one
build at a time, which it reads from the same tables.
"""

from html import escape

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from mkdocs_hooks import hook_cases, hook_recordings, hook_tables
from mkdocs_hooks.hook_cases import Case
from mkdocs_hooks.hook_recordings import HOOKS, Builds

PICKER = '<div class="hook-picker"></div>'
TABLES = '<div class="hook-cases"></div>'
SHOWN_FIRST = "linear-3d"
GROUPS = {
    "Linear": "linear-2d linear-2d-no-bias linear-2d-data-input linear-2d-frozen "
    "linear-1d linear-1d-no-bias linear-3d linear-3d-no-bias "
    "linear-3d-non-contiguous linear-4d linear-4d-no-bias "
    "linear-relu-inplace linear-relu-scaled bilinear",
    "Of the thread": "thread-fc1 thread-fc2 thread-fc3 thread-linear thread-conv "
    "thread-conv-no-bias",
    "Stand-ins": "linear-expanded-bias conv-then-bias-add",
    "Convolutions": "conv1d conv2d conv2d-no-bias conv2d-data-input conv3d "
    "convtranspose2d",
    "Normalization, embedding, dropout": "batchnorm1d batchnorm2d layernorm embedding "
    "dropout-train dropout-eval",
    "Activations, pooling, views": "relu relu-computed-input relu-inplace softmax "
    "maxpool2d avgpool2d view",
    "Recurrent nets and attention": "lstm gru lstmcell multiheadattention "
    "transformerencoderlayer",
    "Sequential": "sequential-linear-relu sequential-linear-linear",
    "Losses": "crossentropyloss mseloss",
    "Several inputs or outputs": "two-inputs-add two-inputs-mul "
    "two-inputs-mul-first-data two-inputs-mul-second-data keyword-tensor two-outputs "
    "unused-output dict-output nested-output identity",
}


def on_page_content(content: str, *, page: Page, **_: object) -> str:
    """Replace the markers."""
    if TABLES not in content:
        return content
    builds, gpu = hook_recordings.every_build(), hook_recordings.on_gpu()
    if alone := gpu.keys() - builds:
        raise PluginError(
            f"docs/data/hooks/cuda: torch {', '.join(alone)} has no recording on the "
            "CPU that this one could stand beside"
        )
    groups = grouped(builds)
    tables = "".join(group(builds, gpu, name, cases) for name, cases in groups.items())
    ends = [*builds, *(f"{version}/cuda" for version in gpu)]
    anchors = {
        f"{case}/{hook}/{end}"
        for case in hook_cases.cases()
        for hook in HOOKS
        for end in ends
    }
    anchors |= {case for cases in groups.values() for case in cases}
    page.present_anchor_ids = (page.present_anchor_ids or set()) | anchors
    return content.replace(PICKER, picker(builds, groups)).replace(
        TABLES, f'<div class="hook-cases" data-search-exclude>{tables}</div>'
    )


def grouped(builds: Builds) -> dict[str, list[str]]:
    """Return the cases by group; every recorded case must be in one."""
    groups = {name: cases.split() for name, cases in GROUPS.items()}
    listed = [case for cases in groups.values() for case in cases]
    recorded = {case for cases in builds.values() for case in cases}
    if odd := recorded.symmetric_difference(listed):
        raise PluginError(
            f"mkdocs_hooks/hook_versions.py: GROUPS and docs/data/hooks do not hold "
            f"the same cases: {', '.join(sorted(odd))}"
        )
    return groups


# The tables


def group(builds: Builds, gpu: Builds, name: str, cases: list[str]) -> str:
    """Return the tables of one group."""
    return f"<h3>{name}</h3>{''.join(folded(builds, gpu, case) for case in cases)}"


def folded(builds: Builds, gpu: Builds, case: str) -> str:
    """Return the tables of one case, folded."""
    about = hook_cases.cases()[case]
    tables = "".join(
        f"<p><code>{method}</code></p>"
        f"{hook_tables.table(builds, gpu, case, hook, f'{case}/{hook}')}"
        for hook, method in HOOKS.items()
    )
    return (
        f'<details class="case" id="{case}"><summary>{case}'
        f"<code>{escape(about.module)}</code></summary>{described(about)}{tables}"
        "</details>"
    )


def described(about: Case) -> str:
    """Return what a case calls, and with what."""
    forward = "".join(
        f"<code>{escape(line)}</code>" for line in about.forward.split("\n")
    )
    forward = f'<span class="forward">Its forward: {forward}</span>' * bool(
        about.forward
    )
    word = "Inputs" if len(about.inputs) > 1 else "Input"
    inputs = "; ".join(about.inputs)
    notes = "".join(f". {note[0].upper()}{note[1:]}" for note in about.notes)
    return f'<p class="about">{forward}{word}: {inputs}{notes}.</p>'


# The picker


def picker(builds: Builds, groups: dict[str, list[str]]) -> str:
    """Return the choice of a module, a hook and a build, hidden without JavaScript."""
    options = "".join(
        f'<optgroup label="{name}">{"".join(map(option, cases))}</optgroup>'
        for name, cases in groups.items()
    )
    hooks = "".join(
        f'<label><input type="radio" name="hook" value="{hook}"'
        f"{' checked' * (hook == 'legacy')}><code>{method}</code></label>"
        for hook, method in HOOKS.items()
    )
    ticks = "".join(f"<i>{version}</i>" for version in builds)
    last = len(builds) - 1
    return (
        "<hook-picker data-search-exclude>"
        "<noscript><p>Without JavaScript there is no slider: the tables below hold all "
        "of it.</p></noscript>"
        '<form hidden autocomplete="off"><label class="module">Module '
        f'<select name="module">{options}</select></label>'
        f'<fieldset class="hooks"><legend>Hook</legend>{hooks}</fieldset>'
        '<div class="torch"><label for="torch-build">torch</label> '
        '<output for="torch-build"></output>'
        '<input type="range" name="torch" id="torch-build" '
        f'max="{last}" value="{last}">'
        f'<div class="ticks" aria-hidden="true">{ticks}</div></div></form>'
        '<section aria-label="What the hook got" hidden></section></hook-picker>'
    )


def option(case: str) -> str:
    """Return the choice of one module."""
    about = hook_cases.cases()[case]
    shown = f"{case}: {escape(about.module)} on {about.given()}"
    selected = " selected" * (case == SHOWN_FIRST)
    return f'<option value="{case}"{selected}>{shown}</option>'

"""Put the playground into the page that holds its marker.

This part works without JavaScript: for each function a table of its Jacobian, with v
all ones. docs/assets/playground.js then lets the reader edit v.
"""

import json
from html import escape
from itertools import product
from typing import TYPE_CHECKING

from mkdocs_hooks import cache

if TYPE_CHECKING:
    from mkdocs_hooks.jacobians import Computed

MARKER = '<div class="playground"></div>'
CHOICES = """<div class="choices" role="group" aria-label="Set v to"><code>v =</code>
<button type="button" value="ones">ones</button>
<button type="button" value="zeros">zeros</button>
<button type="button" value="dL/dy">dL/dy</button>
<span>
<button type="button" value="back" aria-label="one-hot, one entry back">←</button>
<button type="button" value="one-hot">one-hot</button>
<button type="button" value="on" aria-label="one-hot, one entry on">→</button>
</span>
</div>"""


def on_page_content(content: str, **_: object) -> str:
    """Replace the marker."""
    return content.replace(MARKER, cached()) if MARKER in content else content


def cached() -> str:
    """Return the playground; torch is imported only when something has changed."""
    kept = cache.folder("playground") / "playground.html"
    if not kept.exists():
        kept.write_text(playground(), encoding="utf-8")
    return kept.read_text(encoding="utf-8")


def playground() -> str:
    """Return the choice between the functions, and an example of each."""
    from mkdocs_hooks import jacobians  # takes seconds, as it imports torch

    all_computed = [jacobians.compute(function) for function in jacobians.FUNCTIONS]
    choices = "".join(
        f'<label><input type="radio" name="playground"{" checked" * (i == 0)}>'
        f"<code>{expression(computed)}</code></label>"
        for i, computed in enumerate(all_computed)
    )
    examples = "".join(
        example(computed, jacobians.LOSS, f"vjp-{i}")
        for i, computed in enumerate(all_computed)
    )
    return (
        "<vjp-playground data-search-exclude>"
        "<noscript><p>Without JavaScript, <code>v</code> is all ones.</p></noscript>"
        '<div class="functions" role="radiogroup" aria-label="y"><code>y =</code>'
        f'{choices}</div>{examples}<p role="status"></p></vjp-playground>'
    )


def expression(computed: "Computed") -> str:
    """Return the expression that y is."""
    return escape(computed.code[-1].removeprefix("y = "))


def words(loss: str) -> dict[str, str]:
    """Return the sentence about each kind of v; playground.js fills in y[i]."""
    return {
        "ones": "<code>v</code> is all ones: each entry of <code>vᵀJ</code> is the sum "
        "of a column of <code>J</code>, the gradient of <code>y.sum()</code>.",
        "zeros": "<code>v</code> is all zeros: so is <code>vᵀJ</code>.",
        "one-hot": "<code>v</code> is one-hot at <code>y[i]</code>: <code>vᵀJ</code> "
        "is that row of <code>J</code>, the gradient of this one entry of "
        "<code>y</code>.",
        "dL/dy": f"<code>v</code> is <code>dL/dy</code> of a next function, <code>L = "
        f"{escape(loss)}</code>: <code>vᵀJ</code> is <code>dL/dx</code>.",
        "weights": "<code>v</code> holds weights: <code>vᵀJ</code> is the sum of the "
        "rows of <code>J</code>, each times its entry of <code>v</code>, the gradient "
        "of <code>(v * y).sum()</code>.",
    }


def example(computed: "Computed", loss: str, name: str) -> str:
    """Return one function with its table, and the numbers that playground.js needs.

    It is disabled until playground.js, which makes it work, enables it.
    """
    x, y = list(computed.x_shape), list(computed.y_shape)
    both = y + x
    code = "".join(f"<code>{escape(line)}</code>" for line in computed.code)
    said = words(loss)
    data = {
        "jacobian": computed.jacobian,
        "lossGradient": computed.loss_gradient,
        "words": said,
    }
    return (
        f'<fieldset disabled aria-label="{expression(computed)}">'
        f'<p class="code">{code}</p>'
        f"<p><code>v</code> has the shape of <code>y</code>, <code>{y}</code>, and "
        f"<code>vᵀJ</code> that of <code>x</code>, <code>{x}</code>. <code>J</code> "
        f"has both, <code>{both}</code>: here a row for each entry of <code>y</code>, "
        "a column for each of <code>x</code>.</p>"
        f'{CHOICES}<p class="words">{said["ones"]}</p>{table(computed, name)}'
        f'<script type="application/json">{json.dumps(data)}</script></fieldset>'
    )


def table(computed: "Computed", name: str) -> str:
    """Return a table of vᵀJ for v = ones, with v and J below it."""
    xs, ys = entries("x", computed.x_shape), entries("y", computed.y_shape)
    heads = "".join(f'<th scope="col">{x}</th>' for x in xs)
    results = "".join(
        f'<td><button type="button" aria-describedby="{name}">{short(value)}'
        "</button></td>"
        for value in computed.gradient_for_ones
    )
    rows = [row(y, values) for y, values in zip(ys, computed.jacobian, strict=True)]
    last = computed.y_shape[-1]  # the rows along y's last axis are grouped
    bodies = "".join(
        f"<tbody>{''.join(rows[i : i + last])}</tbody>"
        for i in range(0, len(rows), last)
    )
    return (
        f'<table class="vjp" style="--columns: {len(xs)}" aria-label="vᵀJ, v and J">'
        "<colgroup><col><col></colgroup>"
        f'<thead><tr><td colspan="2"></td>{heads}</tr>'
        f'<tr class="results"><th scope="row" colspan="2">vᵀJ</th>{results}</tr>'
        f'<tr class="sum"><td id="{name}" colspan="{len(xs) + 2}"></td></tr>'
        '<tr><td></td><th scope="col">v</th>'
        f'<th scope="colgroup" colspan="{len(xs)}">J</th></tr></thead>{bodies}</table>'
    )


def row(y: str, values: list[float]) -> str:
    """Return the row of one entry of y: its v and its row of J, decimals aligned."""
    v = y.replace("y", "v")
    decimals = 0 if all(value.is_integer() for value in values) else 4
    cells = "".join(
        f'<td class="{"" if value else "zero"}">{value:.{decimals}f}</td>'
        for value in values
    )
    return (
        f'<tr><th scope="row"><button type="button" tabindex="-1" title="one-hot: {v}'
        f' is 1, the rest 0">{y}</button></th>'
        '<td><input type="number" step="any" value="1" autocomplete="off" '
        f'aria-label="{v}"></td>{cells}</tr>'
    )


def entries(name: str, shape: tuple[int, ...]) -> list[str]:
    """Return the name of each entry of a tensor, row by row."""
    return [f"{name}[{','.join(map(str, at))}]" for at in product(*map(range, shape))]


def short(value: float) -> str:
    """Write a number as playground.js does."""
    return f"{float(f'{value:.4f}' if abs(value) < 1 else f'{value:.4g}'):g}"

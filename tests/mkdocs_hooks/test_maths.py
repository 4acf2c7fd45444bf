from types import SimpleNamespace
from typing import Any

import pytest
from mkdocs.exceptions import PluginError

from mkdocs_hooks import cache, maths

PAGE: Any = SimpleNamespace(
    file=SimpleNamespace(abs_src_path=str(cache.ROOT / "docs/some.md"))
)


def convert(content: str) -> str:
    return maths.on_page_content(content, page=PAGE)


def test_inline() -> None:
    shown = convert(r'<p>so <span class="arithmatex">\(a &lt; b\)</span>.</p>')
    assert shown.startswith("<p>so <math data-search-exclude ")
    assert 'display="inline"' in shown
    assert "&#x0003C;" in shown
    assert "arithmatex" not in shown


def test_display_scrolls_by_itself() -> None:
    shown = convert('<div class="arithmatex">\\[\nv^\\top J\n\\]</div>')
    assert shown.startswith('<div class="wide" tabindex="0" role="group" aria-label=')
    assert '"Formula"><math data-search-exclude' in shown
    assert 'display="block"' in shown


def test_primes_stand_beside_what_they_belong_to() -> None:
    shown = maths.mathml("u'' + u' + u^2", display=False)
    assert shown.count("<msup>") == 1
    for prime in ("&#x02033;", "&#x02032;"):
        assert f'<mi>u</mi><mo lspace="0" rspace="0">{prime}</mo>' in shown


@pytest.mark.parametrize(
    "tex",
    [
        r"\frac{\partial L}{\partial x_j} = \sum_i v_i J_{ij}",
        r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
        r"\begin{align*} a &= b \\ &= c \end{align*}",
        r"\underbrace{a}_{\text{one } \{ x }",
        r"\operatorname{diag}(\boldsymbol{x})",
    ],
)
def test_what_pages_use(tex: str) -> None:
    assert "<math" in maths.mathml(tex, display=True)


@pytest.mark.parametrize(
    ("tex", "message"),
    [
        (r"a \nosuch b", r"unknown command \\nosuch in the formula a \\nosuch b"),
        (r"\frac{a}{b", r"unbalanced braces in the formula \\frac\{a\}\{b"),
        (r"a}", r"unbalanced braces in the formula a\}"),
        (r"\left( a", r"in the formula \\left\( a"),
        (r"\begin{aligned} a \end{aligned}", "unknown environment aligned in the"),
        (r"\operatorname*{diag} x", r"\\operatorname takes \{letters\}, no star, in"),
        (r"\operatorname{arg\,max} x", r"\\operatorname takes \{letters\}, no"),
        (r"\begin{bmatrix} a", "in the formula"),
    ],
)
def test_a_mistake_names_the_page_and_the_formula(tex: str, message: str) -> None:
    with pytest.raises(PluginError, match=rf"^docs/some.md: .*{message}"):
        convert(rf'<span class="arithmatex">\({tex}\)</span>')

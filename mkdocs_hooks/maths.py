r"""Turn the TeX of pages, docstrings and examples into MathML while building.

A browser draws MathML by itself: no script, no font, no request.
"""

import html
import os
import re

from latex2mathml import commands
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from mkdocs_hooks import cache

# What pymdownx.arithmatex turns $...$ and $$...$$ into with generic: true.
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">'
    r"(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<display>.*?)\\\])</(?P=tag)>",
    re.DOTALL,
)


# A prime is high and small by itself: as a superscript it would part from its letter.
PRIMES = re.compile(r"<msup>(<mi>[^<]*</mi>)<mi>(&#x0203[2-4];)</mi></msup>")
BESIDE = r'<mrow>\1<mo lspace="0" rspace="0">\2</mo></mrow>'


def on_page_content(content: str, *, page: Page, **_: object) -> str:
    """Replace every formula of a page."""
    path = os.path.relpath(page.file.abs_src_path or page.file.src_uri, cache.ROOT)

    def replace(formula: re.Match[str]) -> str:
        tex = formula["inline"] or formula["display"]
        try:
            return mathml(html.unescape(tex).strip(), formula["inline"] is None)
        except ValueError as error:
            raise PluginError(f"{path}: {error}") from None

    return FORMULA.sub(replace, content)


def mathml(tex: str, display: bool) -> str:
    r"""Return a formula as MathML, or raise a ValueError that says what is wrong."""
    braces = re.sub(r"\\.", "", tex)
    if braces.count("{") != braces.count("}"):
        raise ValueError(f"unbalanced braces in the formula {tex}")
    for environment in re.findall(r"\\begin\{(.*?)\}", tex):
        if f"\\{environment}" not in commands.MATRICES:  # convert() would drop its name
            raise ValueError(f"unknown environment {environment} in the formula {tex}")
    if re.search(
        r"\\operatorname(?!\s*\{[A-Za-z ]+\})", tex
    ):  # convert() would drop the command
        raise ValueError(
            rf"\operatorname takes {{letters}}, no star, in the formula {tex}"
        )
    try:
        made = convert(tex, display="block" if display else "inline")
    except Exception as error:
        raise ValueError(f"{type(error).__name__} in the formula {tex}") from error
    # latex2mathml shows an unknown command's name as if it were text.
    if unknown := re.search(r"\\[A-Za-z]+", html.unescape(made)):
        raise ValueError(f"unknown command {unknown[0]} in the formula {tex}")
    made = PRIMES.sub(BESIDE, made)
    made = made.replace("<math ", "<math data-search-exclude ", 1)
    # A wide formula scrolls by itself, with the keyboard too.
    opening = '<div class="wide" tabindex="0" role="group" aria-label="Formula">'
    return f"{opening}{made}</div>" if display else made

"""Keep sizes such as 3 x 3, and short code, on one line."""

import html
import re

PIECE = re.compile(
    r"<(?P<tag>pre|svg|math|script|style)\b.*?</(?P=tag)>"
    r"|<code>(?P<code>[^<]*)</code>"
    r"|<[^>]*>"
    r"|(?P<size>\d+(?: [\N{MULTIPLICATION SIGN}x] \d+)+)",
    re.DOTALL,
)
LONGEST = 28
"""The most characters of code that fit a line on a phone without large gaps."""


def on_page_content(content: str, **_: object) -> str:
    """Mark the sizes and the short code in the text of a page."""
    return PIECE.sub(unbroken, content)


def unbroken(piece: re.Match[str]) -> str:
    """Return a piece of a page, marked if it is to stay on one line."""
    code, size = piece["code"], piece["size"]
    if size:
        return f'<span class="whole">{size}</span>'
    if code and " " in code and len(html.unescape(code)) <= LONGEST:
        return f'<code class="whole">{code}</code>'
    return piece[0]

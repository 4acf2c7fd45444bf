"""Mark the long lines of code: a telephone folds these where its screen ends.

What a block prints is not folded here: see `printed_lines`, which comes before.
"""

import html
import re

BLOCK = re.compile(
    r'(<div class="(?:language-python [^"]*)?highlight"><pre><span></span><code>)'
    "(.*?)(</code></pre>)",
    re.DOTALL,
)
MARKED = re.compile(r'(?:</span>)?(?:<span class="hll">)?')
"""What stands before a line that is marked, or below one: it is closed there."""
TAG = re.compile(r"<[^>]*>")
PRINTED = re.compile(r'class="(c1 printed|mark)\b')
SHORTEST = 34
"""Lines of so many characters, and shorter ones, fit every telephone."""


def on_page_content(content: str, **_: object) -> str:
    """Mark the lines of every block of Python, the recorded programs among them."""
    return BLOCK.sub(folded, content)


def folded(block: re.Match[str]) -> str:
    """Return a block with its long lines marked."""
    opening, code, closing = block.groups()
    return opening + "\n".join(map(marked, code.split("\n"))) + closing


def marked(line: str) -> str:
    """Return a line, marked with the column it begins in if it may be too long."""
    text = html.unescape(TAG.sub("", line))
    if len(text) <= SHORTEST or PRINTED.search(line):
        return line
    column = len(text) - len(text.lstrip())
    opening = f'<span class="folds" style="--column: {column}">'
    return MARKED.sub(rf"\g<0>{opening}", line, count=1) + "</span>"

"""Mark the long lines of code, which fold where their block ends, as on a telephone.

They fold at spaces, where a call's arguments begin, and inside words that are longer
than a telephone's line. What a block prints is not folded here: see `printed_lines`,
which comes before.
"""

import re

from mkdocs_hooks.long_words import SHORTEST, breakable, length

HANGING = 2  # spaces before what is below the start of a line
BLOCK = re.compile(
    r'(<div class="(?:language-python [^"]*)?highlight"><pre><span></span><code>)'
    "(.*?)(</code></pre>)",
    re.DOTALL,
)
LINE = re.compile(
    r'(?P<before>(?:</span>)?(?:<span class="hll">)?)'  # a mark ends in the next line
    r'(?P<opening>(?:<span class="\w+">)?)(?P<indent> *)(?P<rest>.*)'
)
PRINTED = re.compile(r'class="(c1 printed|mark)\b')
CALL = re.compile(r'(?<=\()</span>(?=<span class="(?!p"))')


def on_page_content(content: str, **_: object) -> str:
    """Mark the lines of every block of Python, the recorded programs among them."""
    return BLOCK.sub(folded, content)


def folded(block: re.Match[str]) -> str:
    """Return a block with its long lines marked."""
    opening, code, closing = block.groups()
    return opening + "\n".join(map(marked, code.split("\n"))) + closing


def marked(line: str) -> str:
    """Return a line, if it may be too long with all but its indent marked."""
    if length(line) <= SHORTEST or PRINTED.search(line):
        return line
    return LINE.sub(whole, line, count=1)


def whole(line: re.Match[str]) -> str:
    """Return a line with what is to be folded marked, and where it begins."""
    column = len(line["indent"])
    words = CALL.sub("</span><wbr>", line["rest"])
    code = line["opening"] + breakable(words, SHORTEST - column - HANGING)
    where = f"--column: {column}"
    mark = f'<span class="folds" style="{where}">{code}</span>'
    return f"{line['before']}{line['indent']}{mark}"

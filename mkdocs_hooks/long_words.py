"""Give words that are too long for a telephone places to break at.

They break before the dots, brackets and slashes in them, not in the middle of a name.
The functions here are for the hooks that fold code, and what is printed.
"""

import html
import re

SHORTEST = 34
"""Lines of so many characters, and shorter ones, fit every telephone."""

TAG = re.compile(r"<[^>]*>")
WORD = re.compile(r"(?:<(?!wbr>)[^>]*>|[^\s<])+")
"""Text without a space, with the tags in it; it may break at a <wbr> already."""

PLACE = re.compile(
    r"(?<=[\w)\]])(?=(?:<[^>]*>)*(?:\.(?:<[^>]*>)*[A-Za-z_]|\[|/\w))(?![^<]*>)",
    re.ASCII,
)
"""Where such a sign follows, outside of tags."""


def breakable(shown: str, room: int = SHORTEST) -> str:
    """Return HTML with places to break at in words of more characters than `room`."""

    def broken(word: re.Match[str]) -> str:
        return PLACE.sub("<wbr>", word[0]) if length(word[0]) > room else word[0]

    return WORD.sub(broken, shown)


def length(shown: str) -> int:
    """Return how many characters one sees of HTML."""
    return len(html.unescape(TAG.sub("", shown)))

"""Describe each page by its answer, for what shows a page without opening it.

The theme would give all pages the description of the site.
"""

import html
import re

from mkdocs.structure.pages import Page

NOT_THE_ANSWER = re.compile(
    r"<blockquote>.*?</blockquote>\s*(?:<p>From .*?</p>)?"
    r"|<p><em>(?:(?!</em>).)*</em></p>"
    r"|<p><a [^>]* download>.*?</a></p>",
    re.DOTALL,
)
"""A question and where it was asked, and the link to an example's program."""

PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
TAG = re.compile("<[^>]*>")
SENTENCE = re.compile(r".+?[.?!]\)?(?= |$)")
LONGEST = 300


def on_page_content(content: str, *, page: Page, **_: object) -> str:
    """Give a page that has no description the sentences that it begins with."""
    paragraph = PARAGRAPH.search(NOT_THE_ANSWER.sub("", content))
    if paragraph and "description" not in page.meta:
        text = " ".join(html.unescape(TAG.sub("", paragraph[1])).split())
        page.meta["description"] = html.escape(shortened(text))
    return content


def shortened(text: str) -> str:
    """Return the whole sentences of a paragraph that have room; the first always."""
    sentences = SENTENCE.findall(text) or [text]
    shown = sentences.pop(0)
    while sentences and len(shown) + len(sentences[0]) < LONGEST:
        shown += sentences.pop(0)
    return shown

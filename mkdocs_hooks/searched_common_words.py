"""Leave common words out of what is searched for, as they are out of the index.

The theme searches for all words that begin with a word. "what may a hook return" would
find the pages with the most words that begin with an a.
"""

from mkdocs.structure.files import Files

from mkdocs_hooks import search_worker

LINES = {"e=ce(e),!e": "e=withoutCommonWords(ce(e)),!e"}
# The last word may be a beginning, as it is while somebody types.
ADDED = """
function withoutCommonWords(query) {
  const terms = query.split(" ")
  const last = terms.length - 1
  return terms.filter((term, i) =>
    i === last || lunr.stopWordFilter(term.replace(/[*]$/, ""))
  ).join(" ")
}
"""


def on_files(files: Files, **_: object) -> Files:
    """Add the function to the theme's search, and the place that needs it."""
    return search_worker.replace(files, "searched_common_words.py", LINES, ADDED)

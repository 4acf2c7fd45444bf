"""Leave common words out of queries, as the index leaves them out.

The theme searches for all words that begin with each word of a query: "what may a hook
return" would find the pages with the most words that begin with an a. And it takes the
points of "w.r.t." for the ends of three words of one letter.
"""

from mkdocs.structure.files import Files

from mkdocs_hooks import search_worker

LINES = {"e=ce(e),!e": "e=withoutCommonWords(ce(spelledOut(e))),!e"}
# The last word may be unfinished, while the reader types.
ADDED = """
function spelledOut(query) {
  return query.replace(/\\bw[.]?r[.]?t\\b[.]?/gi, "with respect to")
}
function withoutCommonWords(query) {
  const terms = query.split(" ")
  const last = terms.length - 1
  return terms.filter((term, i) =>
    i === last || lunr.stopWordFilter(term.replace(/[*]$/, "").toLowerCase())
  ).join(" ")
}
"""


def on_files(files: Files, **_: object) -> Files:
    """Add the function to the theme's search, and the line that calls it."""
    return search_worker.replace(files, "searched_common_words.py", LINES, ADDED)

"""Mend the site's search, which some numbers in the pages break.

lunr, the search library, tells the nodes of its tree of words apart by a text: for each
edge out of a node, its character and the number of the node it leads to. If the
characters are digits, two nodes can have the same text. Then the tree holds words that
no page has, and a search for their first letters finds nothing at all: "Cannot read
properties of undefined (reading '_index')". Here each number ends in a comma.
"""

from mkdocs.structure.files import Files

from mkdocs_hooks import search_worker

WRONG = "var s=r[i],o=this.edges[s];e=e+s+o.id}return e}"
RIGHT = WRONG.replace("o.id", 'o.id+","')


def on_files(files: Files, **_: object) -> Files:
    """Replace the line in the theme's search."""
    return search_worker.replace(files, "searched_numbers.py", {WRONG: RIGHT})

"""Mend the site's search, which some numbers in the pages break.

lunr, which searches, tells two nodes of its tree of words apart by a text: for each
way out of the node a character, and the number of the node there. If the characters
are digits, two nodes can have the same text. Then the tree holds words that no page
has, and whoever searches for their first letters finds nothing at all: "Cannot read
properties of undefined (reading '_index')". Here each number ends in a comma.
"""

import fnmatch

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files

WORKER = "assets/javascripts/workers/search.*.min.js"
WRONG = "var s=r[i],o=this.edges[s];e=e+s+o.id}return e}"
RIGHT = WRONG.replace("o.id", 'o.id+","')


def on_files(files: Files, **_: object) -> Files:
    """Replace the line in the theme's search.

    Raises:
        PluginError: This release of the theme has another search.
    """
    workers = [it for it in files if fnmatch.fnmatch(it.src_uri, WORKER)]
    texts = [it.content_string for it in workers]
    if [text.count(WRONG) for text in texts] != [1]:
        message = "mkdocs_hooks/searched_numbers.py: the theme's search is another one"
        raise PluginError(message)
    workers[0].content_string = texts[0].replace(WRONG, RIGHT)
    return files

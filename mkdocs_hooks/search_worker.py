"""Change the theme's search, which is one minified file."""

import fnmatch

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files

WORKER = "assets/javascripts/workers/search.*.min.js"


def replace(files: Files, hook: str, lines: dict[str, str], added: str = "") -> Files:
    """Replace lines, each of which the theme's search must have once.

    Args:
        files: The files of the site.
        hook: The file that asks for this, for the message.
        lines: The old lines, each with its new one.
        added: Functions that the new lines call.

    Raises:
        PluginError: This release of the theme has another search.
    """
    workers = [it for it in files if fnmatch.fnmatch(it.src_uri, WORKER)]
    found = [[it.content_string.count(line) for line in lines] for it in workers]
    if found != [[1] * len(lines)]:
        message = f"mkdocs_hooks/{hook}: the theme's search is another one"
        raise PluginError(message)
    text = workers[0].content_string
    for line, new in lines.items():
        text = text.replace(line, new)
    workers[0].content_string = added + text
    return files

"""Replace the markers of a page, whose attributes say what is wanted there.

<div class="lengths" data-from="1.2.0" data-to="1.7.1"></div>
"""

import re
from collections.abc import Callable, Mapping

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page


def replaced(
    content: str, page: Page, made: Mapping[str, Callable[..., str]], names: str
) -> str:
    """Return the content of a page with its markers replaced.

    Args:
        content: The content of the page so far.
        page: The page, for the message.
        made: By the class of a marker, the function from its attributes to HTML.
        names: What a marker names, for the message if that does not exist.

    Raises:
        PluginError: A marker names what does not exist.
    """
    marker = rf'<div class="({"|".join(made)})"((?: data-\w+="[^"]*")*)></div>'
    alone = f"<p>{marker}</p>"  # as Markdown makes it inside of a box
    content = re.sub(alone, lambda it: it[0][len("<p>") : -len("</p>")], content)

    def shown(found: re.Match[str]) -> str:
        try:
            return made[found[1]](**dict(re.findall(r'data-(\w+)="([^"]*)"', found[2])))
        except (KeyError, TypeError) as error:
            raise PluginError(
                f"{page.file.src_uri}: {found[0]} names no {names}: {error}"
            ) from None

    return re.sub(marker, shown, content)

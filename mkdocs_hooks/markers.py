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
    """Return the content of a page with what markers stand for.

    Args:
        content: What the page has so far.
        page: The page, for the message.
        made: By the class of a marker, what makes HTML of its attributes.
        names: What a marker names, for the message where that is not there.

    Raises:
        PluginError: A marker names what is not there.
    """
    marker = rf'<div class="({"|".join(made)})"((?: data-\w+="[^"]*")*)></div>'

    def shown(found: re.Match[str]) -> str:
        try:
            return made[found[1]](**dict(re.findall(r'data-(\w+)="([^"]*)"', found[2])))
        except (KeyError, TypeError) as error:
            raise PluginError(
                f"{page.file.src_uri}: {found[0]} names no {names}: {error}"
            ) from None

    return re.sub(marker, shown, content)

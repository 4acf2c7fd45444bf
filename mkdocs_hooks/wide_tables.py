"""Let a table too wide for the screen scroll by itself, with the keyboard too."""


def on_page_content(content: str, **_: object) -> str:
    """Wrap every table of a page."""
    return content.replace("<table>", '<div class="wide" tabindex="0"><table>').replace(
        "</table>", "</table></div>"
    )

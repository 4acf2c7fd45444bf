"""Leave the numbers in tables out of the site's search.

Nobody searches for them, and a message with a "0" in it would find benchmarks first.
"""


def on_page_content(content: str, **_: object) -> str:
    """Exclude the cells of every right-aligned column, as columns of numbers are."""
    right = ' style="text-align: right;"'
    return content.replace(f"<td{right}", f"<td data-search-exclude{right}")

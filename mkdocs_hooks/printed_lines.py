"""Mark the lines a block prints (`#> ...`), so that they look unlike its comments."""


def on_page_content(content: str, **_: object) -> str:
    """Give the comments that hold printed text a class of their own."""
    return content.replace('<span class="c1">#&gt;', '<span class="c1 printed">#&gt;')

"""Numbers in tables are left out of the search, and nothing else is."""

from mkdocs_hooks import searched_tables

RIGHT = ' style="text-align: right;"'


def test_columns_set_to_the_right_are_left_out() -> None:
    content = f"<td>loop</td><td{RIGHT}>1.2 times</td><th{RIGHT}>ms</th>"
    assert searched_tables.on_page_content(content) == (
        f"<td>loop</td><td data-search-exclude{RIGHT}>1.2 times</td><th{RIGHT}>ms</th>"
    )

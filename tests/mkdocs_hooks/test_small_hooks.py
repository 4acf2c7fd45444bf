from mkdocs_hooks import printed_lines, wide_tables


def test_printed_lines_differ_from_comments() -> None:
    content = '<span class="c1"># why</span>\n<span class="c1">#&gt; 4</span>'
    assert printed_lines.on_page_content(content) == (
        '<span class="c1"># why</span>\n<span class="c1 printed">#&gt; 4</span>'
    )


def test_tables_scroll_by_themselves() -> None:
    assert wide_tables.on_page_content("<table><tr></tr></table>") == (
        '<div class="wide" tabindex="0"><table><tr></tr></table></div>'
    )

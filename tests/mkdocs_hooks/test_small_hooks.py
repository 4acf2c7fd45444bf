import pytest
import torch
from mkdocs.config import load_config
from mkdocs.structure.files import File
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink

from mkdocs_hooks import (
    breakable_contents,
    described,
    folded_code,
    not_found,
    printed_lines,
    said_below,
    unbroken,
    wide_tables,
)


def test_printed_lines_differ_from_comments() -> None:
    content = '<span class="c1"># why</span>\n<span class="c1">#&gt; 4</span>'
    assert printed_lines.on_page_content(content) == (
        '<span class="c1"># why</span>\n<span class="c1 printed">#&gt; 4</span>'
    )


FIRST = "[GL300] in_dims must be 0, None, or a tuple with one of them for each input"


def shown(*lines: str) -> str:
    """Return the page of a block that prints these lines, in a loop."""
    printed = [f'    <span class="c1">#&gt; {line}</span>' for line in lines]
    return printed_lines.on_page_content("\n".join(["<code>", *printed, "</code>"]))


def test_a_sentence_in_several_lines_is_one_paragraph() -> None:
    assert shown(FIRST, "  (1 here).", "", "Pass 0.") == (
        '<code>\n<span class="sentences" style="--column: 4; --mark: 3">'
        '    <span class="c1 printed"><span class="mark">#&gt; </span>'
        f"{FIRST}</span>\n"
        '    <span class="c1 printed"><span class="mark again">#&gt;   </span>'
        "(1 here).</span></span>\n"
        '    <span class="c1 printed">#&gt; </span>\n'
        '<span class="sentences" style="--column: 4; --mark: 3">'
        '    <span class="c1 printed"><span class="mark">#&gt; </span>'
        "Pass 0.</span></span>\n</code>"
    )


@pytest.mark.parametrize(
    "following",
    [
        "[GL301] Samples mix.",  # another message
        "GL301 Samples mix.",
        "a  table",
        "tensor([[2., 0.], [0., 4.]])",
        "    v = torch.ones_like(output)",
    ],
)
def test_what_is_no_sentence_does_not_join_one(following: str) -> None:
    assert "again" not in shown(FIRST, following)
    assert "again" not in shown(following, FIRST)
    assert "again" in shown(FIRST, "and others")


def test_a_number_goes_on_in_the_next_line_together_with_its_unit() -> None:
    before = "A pass asks for 16 of them. Held at once, on top of the forward pass:"
    assert "again" in shown(before, "  53.62 KiB, of 1 GiB.")
    assert "again" not in shown(before, "  53.62, and no unit.")


def test_the_code_in_a_message_breaks_and_a_table_or_a_tensor_does_not() -> None:
    code = ["    v = torch.ones_like(y)", "        y.backward(v)"]
    for before, after in ("Pass v.", []), ("", ["", "More is below."]):
        page = shown(before, *code, *after)
        assert page.count('style="--column: 4; --mark: 9"') == 1
        assert page.count('style="--column: 4; --mark: 13"') == 1
    assert "--mark: 9" not in shown("Pass v:", *code)
    assert "--mark: 9" not in shown("Shapes.", "    shape  what", "v   [2]    weights")
    assert "--mark" not in shown("", "        [0., 1.]])")


def test_a_list_is_no_paragraph() -> None:
    assert "again" not in shown(f"doubled {FIRST}", f"doubled {FIRST}")
    assert "again" in shown(f"doubled {FIRST}", "done")


def test_lines_that_begin_alike_are_of_one_sentence_where_it_has_begun_before() -> None:
    second = f"it is {FIRST[3:]}"
    assert shown(FIRST, second, second).count("again") == 2


@pytest.mark.parametrize(
    "end", ["`x[0]`, `x[2]`.", "&quot;&quot;, &quot;0&quot;, &quot;1&quot;."]
)
def test_a_sentence_may_end_in_names(end: str) -> None:
    assert "again" in shown(FIRST, end)
    assert "again" not in shown(FIRST, end[:-1])


def test_a_row_is_kept_where_others_show_that_it_is_one() -> None:
    rows = [
        ("x.grad           share: True", "grad_input_total share: False"),
        ("outputs  4:  5.8 times", "outputs 16: 16.2 times"),
    ]
    for wide, narrow in rows:
        for lines in (wide, narrow), (narrow, wide):
            assert "sentences" not in shown(*lines)
        assert "sentences" in shown(narrow)
        assert "sentences" in shown(wide, FIRST, "and others")


def test_what_is_above_and_below_a_table_is_a_sentence() -> None:
    title, note = "Recording: 4 calls", "output: shape; gradients: norm over all"
    page = shown(title, "module  type    output", "0       Linear  [4, 5]", note)
    assert page.count("sentences") == 2


def test_a_name_is_not_broken() -> None:
    name = "Tensor.register_post_accumulate_grad_hook"
    assert "sentences" not in shown(name)
    assert "again" in shown(FIRST, name)


def test_a_printed_shape_is_not_broken_and_a_long_name_only_at_its_dots() -> None:
    shape = '<span class="whole">[4, 30]</span>'
    assert f"Use torch.Size({shape})" in shown("Use torch.Size([4, 30])")
    assert "whole" not in shown(f"{FIRST} {[*range(9)]}")
    name = "torch.autograd.set_detect_anomaly(True)"
    broken = name.replace(".", "<wbr>.")
    assert f"Use {broken}, or a.b." in shown(f"Use {name}, or a.b.")


def test_sentences_in_the_output_of_an_example_are_paragraphs_too() -> None:
    text = f"{FIRST}\n  (1 here).\n  a  table"
    page = (
        '<div class="language-text output no-copy"><pre><span></span><code>%s\n</code>'
    )
    assert printed_lines.on_page_content(page % text) == page % (
        '<span class="sentences" style="--column: 0; --mark: 2">'
        f'<span class="mark"></span>{FIRST}\n'
        '<span class="mark again">  </span>(1 here).</span>\n  a  table'
    )


def test_a_short_line_ends_a_paragraph() -> None:
    assert "again" not in shown("no input", "requires grad")
    assert "again" not in shown("  " + FIRST, "requires grad")


LONG = '<span class="n">call</span>(a &lt; b, another_one, and_one_more)'


def program(code: str, language: str = "language-python ") -> str:
    return (
        f'<div class="{language}highlight"><pre><span></span><code>{code}\n'
        "</code></pre></div>"
    )


def folded(line: str, column: int = 4) -> str:
    mark = f'<span class="folds" style="--column: {column}">'
    return f"{' ' * column}{mark}{line}</span>"


@pytest.mark.parametrize("language", ["language-python ", ""])
def test_long_lines_of_code_are_marked(language: str) -> None:
    page = program(f"x = 1\n    {LONG}\ny = 2", language)
    assert folded_code.on_page_content(page) == program(
        f"x = 1\n{folded(LONG)}\ny = 2", language
    )


def test_the_indent_of_a_long_line_in_a_string_is_not_folded() -> None:
    opening, rest = '<span class="sd">', f"{FIRST}</span>"
    page = folded_code.on_page_content(program(f"{opening}    {rest}"))
    assert page == program(folded(opening + rest))


def test_a_line_may_fold_where_arguments_begin() -> None:
    name, parenthesis = f'<span class="n">{"f" * 40}</span>', '<span class="p">(</span>'
    page = folded_code.on_page_content(program(name + parenthesis + name))
    assert page == program(folded(f"{name}{parenthesis}<wbr>{name}", 0))
    short = program(f'{parenthesis}<span class="n">f</span>')
    assert folded_code.on_page_content(short) == short


def test_a_word_longer_than_a_line_may_fold_before_its_dots_and_brackets() -> None:
    call = '<span class="n">f</span><span class="o">.</span><span class="n">g</span>'
    key = f'<span class="p">[</span><span class="s2">{"k" * 34}</span>'
    half = '<a href="a.b"><span class="mf">0.5</span></a>'
    page = folded_code.on_page_content(program(f"{call}{key}{half} {call}"))
    broken = call.replace("f</span>", "f<wbr></span>").replace("g<", "g<wbr><")
    assert page == program(folded(f"{broken}{key}{half} {call}", 0))


def test_what_a_block_prints_is_not_folded_as_code() -> None:
    rows = (
        f'<span class="c1"># {FIRST}</span>\n<span class="c1">#&gt; 1  {FIRST}</span>'
    )
    page = folded_code.on_page_content(printed_lines.on_page_content(program(rows)))
    assert page.count("folds") == 1
    output = program(LONG, "language-text output no-copy ")
    assert folded_code.on_page_content(output) == output


def test_a_line_that_a_program_marks_is_folded_inside_its_mark() -> None:
    page = folded_code.on_page_content(
        program(f'<span class="hll">    {LONG}\n</span>    {LONG}')
    )
    assert page == program(f'<span class="hll">{folded(LONG)}\n</span>{folded(LONG)}')


def test_long_names_in_the_contents_break_where_a_word_begins() -> None:
    below = AnchorLink("register_multi_grad_hook", "b", 2)
    entry = AnchorLink(
        "<code class='NotDifferentiable'></code>NotAFloatDtypeError", "", 1
    )
    entry.children.append(below)
    breakable_contents.break_names([entry])
    assert entry.title == (
        "<code class='NotDifferentiable'></code>Not<wbr>AFloat<wbr>Dtype<wbr>Error"
    )
    assert below.title == "register_<wbr>multi_<wbr>grad_<wbr>hook"


def test_tables_scroll_by_themselves() -> None:
    assert wide_tables.on_page_content("<table><tr></tr></table>") == (
        '<div class="wide" tabindex="0" role="group" aria-label="Table">'
        "<table><tr></tr></table></div>"
    )


def test_long_names_break_where_a_word_ends() -> None:
    table = "<table><td><code>%s</code>, a_b</td></table>"
    shown = wide_tables.on_page_content(table % "Node.register_hook(x) 0.5 __init__")
    broken = table % "Node.<wbr>register_<wbr>hook(x) 0.5 __init__"
    assert broken in shown
    outside = "<code>register_hook</code>"
    assert wide_tables.on_page_content(outside) == outside
    heading = '<h2><span class="doc doc-object-name doc-function-name">a_b</span></h2>'
    assert ">a_<wbr>b<" in wide_tables.on_page_content(heading)


def test_short_names_do_not_break() -> None:
    table = "<table><td><code>grad_output</code></td></table>"
    assert table in wide_tables.on_page_content(table)


def test_sizes_and_short_code_stay_on_one_line() -> None:
    for size in "4 \N{MULTIPLICATION SIGN} 20", "1 x 8 x 8":
        assert unbroken.on_page_content(f"<p>of {size}, 3 x</p>") == (
            f'<p>of <span class="whole">{size}</span>, 3 x</p>'
        )
    assert unbroken.on_page_content("<code>a = b</code> <code>ab</code>") == (
        '<code class="whole">a = b</code> <code>ab</code>'
    )


@pytest.mark.parametrize(
    "content",
    [
        "<pre><span>3 x 3</span> <code>a = b</code></pre>",
        '<img alt="3 x 3">',
        f"<code>{'long ' * 6}</code>",
    ],
)
def test_code_to_copy_and_long_code_are_left_alone(content: str) -> None:
    assert unbroken.on_page_content(content) == content


@pytest.mark.parametrize(
    ("site", "home"), [("", "/"), ("https://somewhere.org/gradlib/", "/gradlib/")]
)
def test_the_page_for_wrong_addresses_leads_on(site: str, home: str) -> None:
    config = load_config(site_url=site)
    page = not_found.on_post_template(
        f"<title>gradlib</title><main>{not_found.BARE}</main>",
        template_name="404.html",
        config=config,
    )
    assert "<title>No such page - gradlib</title>" in page
    assert f'<a href="{home}errors/">' in page
    assert not_found.BARE not in page


def test_other_templates_stay_as_they_are() -> None:
    map_of_all = not_found.on_post_template(
        "<urlset/>", template_name="sitemap.xml", config=load_config()
    )
    assert map_of_all == "<urlset/>"


def test_a_theme_that_says_something_else_there_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"404\.html of the theme"):
        not_found.on_post_template(
            "<main/>", template_name="404.html", config=load_config()
        )


def description(content: str, **meta: str) -> str:
    page = Page("Page", File("page.md", "", "", use_directory_urls=True), load_config())
    page.meta = dict(meta)
    described.on_page_content(content, page=page)
    return page.meta["description"]


ANSWER = '<p><code>v</code> is "one".\nIt has a <a href="">shape</a>:</p>'


@pytest.mark.parametrize(
    "before",
    [
        "",
        "<blockquote>\n<p>What is v?</p>\n</blockquote>\n<p>From <a>there</a>.</p>\n",
        "<p><em>What is <code>v</code>?</em></p>\n",
        '<p><a href="a.py" download>Download a.py</a></p>\n',
    ],
)
def test_a_page_is_described_by_its_answer(before: str) -> None:
    assert description(before + ANSWER) == "v is &quot;one&quot;."
    assert description(before + ANSWER, description="Its own.") == "Its own."


def test_a_description_is_of_whole_sentences() -> None:
    long = f"It is {'very ' * 30}long. "
    said = description(f"<p>mean() (or so.) {long * 3}</p>")
    assert said == f"mean() (or so.) {long}".rstrip()


def test_each_page_says_which_torch_its_outputs_are_of() -> None:
    config = load_config()
    said_below.on_config(config)
    said = str(config.copyright)
    assert f"torch {torch.__version__.partition('+')[0]} on a CPU" in said

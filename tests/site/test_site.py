"""Every page of the built site in a real browser: wide and narrow, light and dark.

A page is loaded once, then resized and switched on the spot.
"""

import html
import re
from functools import cache
from itertools import product
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from playwright.sync_api import Page, ViewportSize, expect

from .browsing import (
    SCHEMES,
    STILL,
    TWO_FRAMES,
    Scheme,
    Server,
    listen,
    listening,
    no_browser,
    pale_text,
    wrong_for_some_readers,
)

ROOT = Path(__file__).parents[2]
WIDTHS = (1280, 390)
# Text a reader sees that is not code.
PROSE = """() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  const texts = []
  while (walker.nextNode())
    if (!walker.currentNode.parentElement.closest("code, pre, script, style"))
      texts.push(walker.currentNode.data)
  return texts.join("\\n")
}"""
# What a reader can unfold is looked at, too; what loads on scrolling, loads.
SHOW_ALL = """() => {
  document.querySelectorAll("details").forEach(d => { d.open = true })
  document.querySelectorAll("[loading=lazy]").forEach(e => { e.loading = "eager" })
  const shown = [...document.images].map(image => image.decode().catch(() => {}))
  return Promise.all(shown)
}"""
ALL_TABS = ".md-typeset .tabbed-block { display: block !important }"
# The lists of all pages, which stand on each of them: half of what there is to look at.
LISTS = ".md-sidebar--primary li, .md-tabs li, .md-search__output"
LESS = "lists => document.querySelectorAll(lists).forEach(e => e.remove())"
TEX = re.compile(r"\\[A-Za-z(\[]|\$[^\s$][^$\n]*\$")


def page_urls() -> list[str]:
    """Return the address of every page, as the source files name them."""
    docs = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    docs = [path for path in docs if path.parts[0] != "data"]  # mkdocs.yml: no page
    examples = [path.relative_to(ROOT) for path in (ROOT / "examples").glob("*.py")]
    names = [f"{path.with_suffix('').as_posix()}/" for path in docs + examples]
    pages = [re.sub(r"(^|/)index/$", r"\1", name) for name in names]
    # Those on versions, which are the largest, first: no process waits for another.
    return [*sorted(pages, reverse=True), "404.html"]


# The checks: each returns what is wrong.


def wrong_images(page: Page) -> list[str]:
    images = page.locator("img").evaluate_all(
        "all => all.map(i => [i.outerHTML, i.complete && i.naturalWidth > 0, i.alt])"
    )
    return [
        f"image {'has no alt text' if loaded else 'does not load'}: {tag}"
        for tag, loaded, alt in images
        if not (loaded and alt.strip())
    ]


@cache
def anchors(file: Path) -> set[str]:
    found = re.findall(r'\b(?:id|name)="([^"]*)"', file.read_text(encoding="utf-8"))
    return set(map(html.unescape, found))


def wrong_links(page: Page, server: Server) -> list[str]:
    links = page.locator("a[href]").evaluate_all("all => all.map(a => a.href)")
    return [f"broken link: {link}" for link in links if not link_holds(link, server)]


def link_holds(link: str, server: Server) -> bool:
    """Say whether a link leads to a file and anchor of the site, or is https."""
    if not link.startswith(server.url):
        return re.match(r"https://\w", link) is not None
    address, anchor = urldefrag(link.removeprefix(server.url))
    file = server.folder / unquote(address)
    if address.endswith("/") or not address:
        file /= "index.html"
    return file.is_file() and (not anchor or unquote(anchor) in anchors(file))


def wrong_text(page: Page) -> list[str]:
    return [f"raw TeX: {found}" for found in TEX.findall(page.evaluate(PROSE))]


def wrong_layout(page: Page, scheme: Scheme) -> list[str]:
    wrong: list[str] = []
    wide, has = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    if wide > has:
        wrong.append(f"scrolls sideways: {wide} px of content")
    worn = page.evaluate("document.body.dataset.mdColorScheme")
    if worn != SCHEMES[scheme]:
        wrong.append(f"the scheme is {worn}")
    return wrong


# The styles of the texts that are not too pale, on pages looked at before.
FINE: set[str] = set()


def problems(
    tab: Page, server: Server, url: str, *, with_lists: bool = True
) -> list[str]:
    """Open a page, look at it from all sides, and return what is wrong with it.

    Args:
        tab: Where to open it.
        server: The site.
        url: The page.
        with_lists: Whether to look at the lists of all pages, too, and not only at
            where their links lead.
    """
    tab.goto("about:blank")
    with listening(tab, server) as heard:
        found = seen_problems(tab, server, url, with_lists)
    for problem in heard:
        found[problem] = ["while it was open"]
    return [f"/{url} ({', '.join(at)}): {problem}" for problem, at in found.items()]


def seen_problems(
    page: Page, server: Server, url: str, with_lists: bool
) -> dict[str, list[str]]:
    """Return what is wrong with a page, and from which sides."""
    found: dict[str, list[str]] = {}
    open_whole(page, server.url + url)
    for problem in wrong_images(page) + wrong_links(page, server) + wrong_text(page):
        found[problem] = ["from any side"]
    if not with_lists:
        page.evaluate(LESS, LISTS)
    for width, scheme in product(WIDTHS, SCHEMES):
        look_from(page, width, scheme)
        first = width == WIDTHS[0]
        for problem in (
            *wrong_layout(page, scheme),
            # No width changes a colour, and no scheme anything but colours.
            *(pale_text(page, fine=FINE) if first else []),
            *(wrong_for_some_readers(page, first) if scheme == "light" else []),
        ):
            found.setdefault(problem, []).append(f"{width} px {scheme}")
    return found


def open_whole(page: Page, address: str) -> None:
    """Open a page with all that a reader can unfold."""
    look_from(page, WIDTHS[0], "light")
    page.goto(address, wait_until="load")
    page.add_style_tag(content=STILL + ALL_TABS)
    page.evaluate(SHOW_ALL)


def look_from(page: Page, width: int, scheme: Scheme) -> None:
    """Show a page at a width and in a scheme."""
    if page.viewport_size != (size := ViewportSize(width=width, height=800)):
        page.set_viewport_size(size)
    page.emulate_media(color_scheme=scheme)
    page.evaluate(TWO_FRAMES)


# The site


@pytest.mark.parametrize("url", page_urls(), ids=lambda url: f"/{url}")
def test_page(tab: Page, site: Server, url: str) -> None:
    # They are the same on all pages of a folder.
    one_of_folder = {it.partition("/")[0]: it for it in reversed(page_urls())}
    with_lists = url in one_of_folder.values()
    wrong = problems(tab, site, url, with_lists=with_lists)
    assert not wrong, "\n".join(wrong)


def test_every_page_is_looked_at(built_site: Path) -> None:
    built = [
        path.relative_to(built_site).as_posix().removesuffix("index.html")
        for path in built_site.rglob("*.html")
    ]
    assert sorted(built) == sorted(page_urls())


def test_search_finds_grad_input(page: Page, searchable_site: Server) -> None:
    heard = listen(page, searchable_site)
    page.goto(searchable_site.url)
    page.keyboard.press("/")
    page.keyboard.type("grad_input")
    result = page.locator(".md-search-result__item", has_text="grad_input").first
    expect(result).to_be_visible(timeout=5000)
    assert heard == []


def test_the_button_in_the_header_switches_the_scheme(page: Page, site: Server) -> None:
    page.goto(site.url)
    for name, scheme in [("Switch to light", "default"), ("Switch to dark", "slate")]:
        page.locator(f"label[title*='{name}']").click()
        expect(page.locator("body")).to_have_attribute("data-md-color-scheme", scheme)


# The checks bite: each break is put into an otherwise sound page.

SOUND = """<!doctype html>
<html lang="en"><head><title>A page</title>
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"></head>
<body><main><h1>A page</h1>BREAK</main><script>
const dark = matchMedia("(prefers-color-scheme: dark)")
const name = () => dark.matches ? "slate" : "default"
dark.onchange = () => document.body.dataset.mdColorScheme = name()
dark.onchange()
</script></body></html>"""
PICTURE = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>"
BREAKS = {
    "console": ("<script>console.error('oh')</script>", "console: oh"),
    "exception": ("<script>nosuch()</script>", "exception: nosuch is not defined"),
    "another host": (
        '<img alt="a" src="http://gradlib.invalid/a.png">',
        "request to another host: http://gradlib.invalid/a.png",
    ),
    "404": ('<script src="missing.js"></script>', "404 for http"),
    "missing image": (
        '<img alt="a" src="no.png">',
        "(from any side): image does not load",
    ),
    "no alt": (f'<img src="{PICTURE}">', "(from any side): image has no alt text"),
    "empty alt": (f'<img alt="" src="{PICTURE}">', "image has no alt text"),
    "missing page": (
        '<a href="missing/">there</a>',
        "(from any side): broken link: http",
    ),
    "missing anchor": ('<a href="#missing">there</a>', "broken link: http"),
    "http link": (
        '<a href="http://gradlib.invalid/">there</a>',
        "broken link: http://gradlib.invalid/",
    ),
    "wide": (
        '<p style="width: 600px">wide</p>',
        "(390 px light, 390 px dark): scrolls sideways: 6",
    ),
    "command": (r"<p>\frac{1}{2}</p>", r"raw TeX: \f"),
    "dollars": ("<p>is $x^2$ here</p>", "raw TeX: $x^2$"),
    "folded": (
        '<details><summary>More</summary><p style="width: 600px">wide</details>',
        "(390 px light, 390 px dark): scrolls sideways: 6",
    ),
    "second tab": (
        '<div class="md-typeset"><div class="tabbed-block" style="display: none">'
        '<p style="width: 600px">wide</div></div>',
        "(390 px light, 390 px dark): scrolls sideways: 6",
    ),
    "missing image, far below": (
        '<img alt="a" loading="lazy" style="margin-top: 9000px" src="no.png">',
        "(from any side): image does not load",
    ),
    "another host, far below": (
        '<iframe title="a" loading="lazy" style="margin-top: 9000px"'
        ' src="http://gradlib.invalid/a"></iframe>',
        "request to another host: http://gradlib.invalid/a",
    ),
    "contrast": (
        '<p style="color: #aaa">faint</p>',
        "(1280 px light, 1280 px dark): axe color-contrast",
    ),
    "contrast in the dark": (
        "<style>[data-md-color-scheme=slate] p { color: #aaa }</style><p>faint",
        "(1280 px dark): axe color-contrast",
    ),
    "label": ("<input>", "(1280 px light, 390 px light): axe label"),
    "link like its text": (
        '<p>Read on <a href="" style="color: #222; text-decoration: none">there</a>',
        "(1280 px light): axe link-in-text-block",
    ),
    "label on a phone": (
        "<style>@media (min-width: 400px) { input { display: none } }</style><input>",
        "(390 px light): axe label",
    ),
    "contrast of some only": (
        "<p>dark</p><p style='color: #aaa'>faint</p>",
        "(1280 px light, 1280 px dark): axe color-contrast",
    ),
    "scheme": (
        "<script>setTimeout(() => dark.onchange = null)</script>",
        "(1280 px dark, 390 px dark): the scheme is default",
    ),
}


def test_a_sound_page_passes(tab: Page, small_site: Server) -> None:
    (small_site.folder / "index.html").write_text(SOUND.replace("BREAK", ""))
    assert problems(tab, small_site, "") == []


@pytest.mark.parametrize(("broken", "message"), BREAKS.values(), ids=BREAKS.keys())
def test_a_check_bites(
    tab: Page, small_site: Server, broken: str, message: str
) -> None:
    (small_site.folder / "index.html").write_text(SOUND.replace("BREAK", broken))
    found = problems(tab, small_site, "")
    assert any(message in problem for problem in found), found


def test_lists_of_pages_are_looked_at_once(tab: Page, small_site: Server) -> None:
    broken = '<ul class="md-sidebar--primary"><li><a href="no/">no</a><input></ul>'
    (small_site.folder / "index.html").write_text(SOUND.replace("BREAK", broken))
    found = " ".join(problems(tab, small_site, ""))
    assert "broken link" in found
    assert "axe label" in found
    less = " ".join(problems(tab, small_site, "", with_lists=False))
    assert "broken link" in less
    assert "axe" not in less


def test_without_a_browser_ci_fails_and_others_skip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        no_browser()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        no_browser()

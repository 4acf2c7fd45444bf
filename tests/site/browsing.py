"""A site on a server, a browser to look at it with, and what goes wrong meanwhile."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NoReturn

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ConsoleMessage, Page, Request, Response

Scheme = Literal["light", "dark"]
SCHEMES: dict[Scheme, str] = {
    "light": "default",
    "dark": "slate",
}  # in Material's words
# No view is looked at half way between two colours.
STILL = "* { transition: none !important }"
# axe takes milliseconds for the colours of each text, and a page of code has thousands:
# of those with the same tags, classes and styles all the way up, below the same sheets,
# it looks at one. These are found, and kept in the page, by what they wear.
FIND_WORN = """within => {
  const sheets = [...document.querySelectorAll("style, link[rel=stylesheet]")]
  const everywhere = [
    document.body.dataset.mdColorScheme,
    ...sheets.map(sheet => sheet.href ?? sheet.textContent),
  ].join(" ")
  window.wearers = new Map()
  const texts = document.createTreeWalker(
    document.querySelector(within), NodeFilter.SHOW_TEXT
  )
  while (texts.nextNode()) {
    if (!texts.currentNode.data.trim()) continue
    const shown = texts.currentNode.parentElement
    if (!shown.getClientRects().length) continue
    let worn = everywhere
    for (let e = shown; e; e = e.parentElement)
      worn += `${e.tagName}.${e.className}[${e.getAttribute("style")}] `
    if (!wearers.has(worn)) wearers.set(worn, shown)
  }
  return [...wearers.keys()]
}"""
CONTRAST = """([worn, options]) =>
  axe.run(worn.map(it => wearers.get(it)), options)"""
# After these a page has answered to its new size and scheme.
TWO_FRAMES = "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
# How many milliseconds a page may take to answer: a busy machine is slow, not wrong.
PATIENCE = 60_000
LOUD = ("error", "warning")
AXE = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
    "resultTypes": ["violations"],
    "rules": {"color-contrast": {"enabled": False}},  # which pale_text looks at
}
# It compares the colours of each link and of the text around, for half of axe's time.
LINKS = "link-in-text-block"


class Server:
    """A folder served on the loopback interface."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        handler = partial(QuietHandler, directory=str(folder))
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/"
        Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class QuietHandler(SimpleHTTPRequestHandler):
    """A handler that leaves the terminal to pytest."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name)
        pass


def no_browser() -> NoReturn:
    """Skip, saying what to install; in CI, where it should be, fail."""
    reason = (
        "no chromium on the PATH (Debian: apt-get install chromium; elsewhere any "
        "chromium or google-chrome)"
    )
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def listen(page: Page, server: Server) -> list[str]:
    """Return a list that fills with whatever goes wrong while `page` is used."""
    heard: list[str] = []
    for event, listener in _listeners(server, heard).items():
        page.on(event, listener)
    return heard


@contextmanager
def listening(page: Page, server: Server) -> Iterator[list[str]]:
    """Do what `listen` does, and stop at the end."""
    heard: list[str] = []
    listeners = _listeners(server, heard)
    for event, listener in listeners.items():
        page.on(event, listener)
    yield heard
    for event, listener in listeners.items():
        page.remove_listener(event, listener)


def _listeners(server: Server, heard: list[str]) -> dict[Any, Callable[[Any], None]]:
    def on_request(request: Request) -> None:
        if not request.url.startswith((server.url, "data:", "blob:")):
            heard.append(f"request to another host: {request.url}")

    def on_response(response: Response) -> None:
        if response.status >= 400:
            heard.append(f"{response.status} for {response.url}")

    def on_console(message: ConsoleMessage) -> None:
        if message.type in LOUD:
            heard.append(f"console: {message.text}")

    return {
        "request": on_request,
        "requestfailed": lambda it: heard.append(f"request failed: {it.url}"),
        "response": on_response,
        "pageerror": lambda error: heard.append(f"exception: {error}"),
        "console": on_console,
    }


def wrong_for_some_readers(
    page: Page, links: bool = True, within: str = "html"
) -> list[str]:
    """Return what axe finds, but for pale text.

    Args:
        page: The page, open.
        links: Whether to look at the colours of links, too.
        within: What to look at.
    """
    rules = AXE["rules"] | {LINKS: {"enabled": links}}
    run = "([within, options]) => axe.run(within, options)"
    return _violations(_with_axe(page, run, within, AXE | {"rules": rules}))


def pale_text(
    page: Page, within: str = "html", fine: set[str] | None = None
) -> list[str]:
    """Return the texts whose colour axe finds too pale, one of those styled alike.

    Args:
        page: The page, open.
        within: What to look at.
        fine: Styles that need no look; those that are found to be fine are added.
    """
    fine = set() if fine is None else fine
    worn = set(page.evaluate(FIND_WORN, within)) - fine
    if not worn:
        return []
    options = {"runOnly": ["color-contrast"], "resultTypes": ["violations"]}
    found = _violations(_with_axe(page, CONTRAST, list(worn), options))
    if not found:
        fine |= worn
    return found


def _with_axe(page: Page, run: str, *args: object) -> dict[str, Any]:
    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    return page.evaluate(run, list(args))


def _violations(found: dict[str, Any]) -> list[str]:
    return [
        f"axe {violation['id']}: {node['html']}\n    {node['failureSummary']}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]

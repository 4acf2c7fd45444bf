"""A site on a server, a browser to look at it with, and what goes wrong meanwhile."""

import os
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NoReturn

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

Scheme = Literal["light", "dark"]
SCHEMES: dict[Scheme, str] = {
    "light": "default",
    "dark": "slate",
}  # in Material's words
# No view is looked at half way between two colours.
STILL = "* { transition: none !important }"
# axe takes milliseconds for the colours of each text, and a page of code has thousands:
# of those with the same tags, classes and styles all the way up it looks at one.
CONTRAST = """([within, options]) => {
  const alike = new Map()
  const texts = document.createTreeWalker(
    document.querySelector(within), NodeFilter.SHOW_TEXT
  )
  while (texts.nextNode()) {
    if (!texts.currentNode.data.trim()) continue
    const shown = texts.currentNode.parentElement
    if (!shown.getClientRects().length) continue
    let style = ""
    for (let e = shown; e; e = e.parentElement)
      style += `${e.tagName}.${e.className}[${e.getAttribute("style")}] `
    if (!alike.has(style)) alike.set(style, shown)
  }
  return axe.run([...alike.values()], options)
}"""
# After these a page has answered to its new size and scheme.
TWO_FRAMES = "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
LOUD = ("error", "warning")
AXE = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
    "resultTypes": ["violations"],
}


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

    def on_request(url: str) -> None:
        if not url.startswith((server.url, "data:", "blob:")):
            heard.append(f"request to another host: {url}")

    page.on("request", lambda request: on_request(request.url))
    page.on("requestfailed", lambda r: heard.append(f"request failed: {r.url}"))
    page.on(
        "response",
        lambda r: heard.append(f"{r.status} for {r.url}") if r.status >= 400 else None,
    )
    page.on("pageerror", lambda error: heard.append(f"exception: {error}"))
    page.on(
        "console",
        lambda m: heard.append(f"console: {m.text}") if m.type in LOUD else None,
    )
    return heard


def wrong_for_some_readers(page: Page, within: str = "html") -> list[str]:
    """Return what axe finds, but for colours."""
    options = AXE | {"rules": {"color-contrast": {"enabled": False}}}
    return _found(
        page, "([within, options]) => axe.run(within, options)", within, options
    )


def pale_text(page: Page, within: str = "html") -> list[str]:
    """Return the texts whose colour axe finds too pale, one of those styled alike."""
    options = {"runOnly": ["color-contrast"], "resultTypes": ["violations"]}
    return _found(page, CONTRAST, within, options)


def _found(page: Page, run: str, within: str, options: dict[str, Any]) -> list[str]:
    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    violations = page.evaluate(run, [within, options])["violations"]
    return [
        f"axe {violation['id']}: {node['html']}\n    {node['failureSummary']}"
        for violation in violations
        for node in violation["nodes"]
    ]

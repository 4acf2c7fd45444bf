"""What the tests of the built site share: the site on a server, and a browser."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from .browsing import PATIENCE, Server, no_browser

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next(filter(None, map(shutil.which, names)), None)
    if executable is None:
        no_browser()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable,
            args=[
                "--no-sandbox",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                # The scripts of a page run once: to compile them well pays off later.
                "--js-flags=--no-opt,--no-maglev",
            ],
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page: the theme remembers a chosen scheme between pages."""
    page = browser.new_page(reduced_motion="reduce")
    page.set_default_timeout(PATIENCE)
    yield page
    page.close()


@pytest.fixture(scope="package")
def tab(browser: Browser) -> Iterator[Page]:
    """A page that is not fresh: to open one takes longer than to look at it."""
    page = browser.new_page(reduced_motion="reduce")
    page.set_default_timeout(PATIENCE)
    yield page
    page.close()


@pytest.fixture(scope="session")
def site(
    built_site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The site with nothing to search: each page would take all of it in, in a second.

    In `searchable_site` it is there.
    """
    folder = tmp_path_factory.mktemp("served") / "site"
    shutil.copytree(built_site, folder)
    index = folder / "search/search_index.json"
    emptied = json.loads(index.read_text(encoding="utf-8")) | {"docs": []}
    index.write_text(json.dumps(emptied), encoding="utf-8")
    server = Server(folder)
    yield server
    server.close()


@pytest.fixture
def searchable_site(built_site: Path) -> Iterator[Server]:
    server = Server(built_site)
    yield server
    server.close()


@pytest.fixture
def small_site(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()

"""Fixtures that several folders of tests share."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

ROOT = Path(__file__).parents[1]


def nav_pages(nav: list[object]) -> list[str]:
    """Return every page that the `nav` of mkdocs.yml lists."""
    pages: list[str] = []
    for item in nav:
        for entry in item.values() if isinstance(item, dict) else [item]:
            pages += nav_pages(entry) if isinstance(entry, list) else [str(entry)]
    return pages


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what needs the site last, but for one test, which builds it meanwhile."""
    items.sort(key=lambda item: "built_site" in getattr(item, "fixturenames", ()))
    items.insert(0, items.pop())


@pytest.fixture(scope="session")
def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built the way a reader builds it; any warning fails.

    The processes of pytest-xdist share one: the first builds it, the others wait.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    site = shared / "site"
    with FileLock(shared / "site.lock"):
        if not site.exists():
            build(shared / "unfinished").rename(site)
    return site


def build(site: Path) -> Path:
    """Build the site, with every page that the nav lists."""
    if os.environ.get("CI"):  # there, everything on the site is computed anew
        shutil.rmtree(ROOT / ".cache", ignore_errors=True)
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    env.pop("MPLBACKEND", None)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"mkdocs build --strict failed:\n{done.stdout}"
    listed = nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    built = list(site.rglob("index.html"))
    assert len(built) >= len(listed) > 0, f"{len(built)} pages built, nav has {listed}"
    return site

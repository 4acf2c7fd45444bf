from pathlib import Path

import pytest

from mkdocs_hooks import cache


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "ROOT", tmp_path)
    for path in ("gradlib/deep/module.py", "mkdocs_hooks/hook.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("before = 1\n")
    return tmp_path


@pytest.mark.parametrize("path", ["gradlib/deep/module.py", "mkdocs_hooks/hook.py"])
def test_an_edit_gives_another_folder(root: Path, path: str) -> None:
    before = cache.folder("figures")
    (root / path).write_text("after = 1\n")
    assert cache.folder("figures") != before


def test_a_new_and_a_renamed_file_give_other_folders(root: Path) -> None:
    seen = {cache.folder("figures")}
    (root / "gradlib/new.py").touch()
    seen.add(cache.folder("figures"))
    (root / "gradlib/new.py").rename(root / "gradlib/newer.py")
    seen.add(cache.folder("figures"))
    assert len(seen) == 3


@pytest.mark.parametrize("package", cache.PACKAGES)
def test_another_version_gives_another_folder(
    root: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    before = cache.folder("figures")
    version = cache.version
    monkeypatch.setattr(
        cache, "version", lambda name: "0" if name == package else version(name)
    )
    assert cache.folder("figures") != before
    assert before.parent == root / ".cache/figures"


def test_what_editors_and_python_leave_behind_changes_nothing(root: Path) -> None:
    before = cache.folder("figures")
    (root / "gradlib/__pycache__").mkdir()
    (root / "gradlib/__pycache__/module.pyc").touch()
    (root / "gradlib/.module.py.swp").touch()
    assert cache.folder("figures") == before


def test_older_folders_are_removed(root: Path) -> None:
    before, other = cache.folder("figures"), cache.folder("examples")
    (before / "kept.svg").touch()
    assert (cache.folder("figures") / "kept.svg").exists()
    (root / "gradlib/new.py").touch()
    now = cache.folder("figures")
    assert list((root / ".cache/figures").iterdir()) == [now]
    assert other.exists()


def test_hooks_loaded_before_an_edit_have_a_folder_of_their_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "mkdocs_hooks/hook.py").write_text("after = 1\n")
    before = cache.folder("figures")
    monkeypatch.setattr(cache, "HOOKS_IN_USE", cache.digest("mkdocs_hooks"))
    assert cache.folder("figures") != before

"""`make versions`: what is checked, with which interpreter, and what is a failure."""

import sys
from pathlib import Path
from typing import Any

import pytest

from .tools import DATA, ROOT, load

tool: Any = load("check_versions")


def script(path: Path, text: str, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that pyenv and PATH lead to, and that holds no interpreter."""
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


# ---- Interpreters.


def in_pyenv(machine: Path) -> Path:
    return machine / "pyenv/versions/3.7.16/bin/python"


def on_path(machine: Path) -> Path:
    return machine / "bin/python3.7"


@pytest.mark.parametrize("place", [in_pyenv, on_path])
def test_an_interpreter_that_runs_is_found(machine: Path, place: Any) -> None:
    path = script(place(machine), "echo 3.7")
    assert tool.interpreter("3.7") == path


@pytest.mark.parametrize("place", [in_pyenv, on_path])
@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("echo 3.7; exit 1", 0o755),
        ("echo 'pyenv: python3.7: command not found' >&2; exit 127", 0o755),
        ("echo 3.8", 0o755),
        ("", 0o755),
        ("echo 3.7", 0o644),
    ],
)
def test_one_that_does_not_run_is_not_found(
    machine: Path, place: Any, text: str, mode: int
) -> None:
    script(place(machine), text, mode)
    with pytest.raises(tool.NotCheckedError, match=r"no Python 3\.7 that runs"):
        tool.interpreter("3.7")


def test_what_is_no_program_is_not_found(machine: Path) -> None:
    in_pyenv(machine).parent.mkdir(parents=True)
    in_pyenv(machine).write_bytes(b"\x00\x01")
    in_pyenv(machine).chmod(0o755)
    with pytest.raises(tool.NotCheckedError):
        tool.interpreter("3.7")


def test_one_that_does_not_run_hides_no_other(machine: Path) -> None:
    script(in_pyenv(machine), "exit 1")
    path = script(on_path(machine), "echo 3.7")
    assert tool.interpreter("3.7") == path


def test_uv_is_asked(machine: Path) -> None:
    path = script(machine / "uv-python", "echo 3.7")
    told = f'test "$1 $2 $4" = "python find 3.7" && echo {path}'
    script(machine / "bin/uv", told)
    assert tool.interpreter("3.7") == path


def test_a_longer_version_is_another_one(machine: Path) -> None:
    script(machine / "pyenv/versions/3.10.1/bin/python", "echo 3.1")
    with pytest.raises(tool.NotCheckedError):
        tool.interpreter("3.1")


def test_an_interpreter_has_to_be_able_to_make_environments(machine: Path) -> None:
    script(in_pyenv(machine), 'case "$2" in *ensurepip*venv*) exit 1;; esac; echo 3.7')
    with pytest.raises(tool.NotCheckedError):
        tool.interpreter("3.7")


# ---- Wheels.


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Replace pip, and return what it is asked, and what it has."""
    state: dict[str, Any] = {"calls": [], "names": [], "offers": set(), "kept": False}

    def answer(_: Path, *arguments: str) -> bool:
        state["calls"].append(f"{arguments[0]} {arguments[-1]}")
        state["names"].append([*arguments])
        if arguments[0] == "install":
            assert "--no-index" in arguments
            return state["kept"]
        state["kept"] = state["kept"] or arguments[-1] in state["offers"]
        return arguments[-1] in state["offers"]

    monkeypatch.setattr(tool, "pip", answer)
    monkeypatch.setattr(tool, "output", lambda *_: "")
    monkeypatch.setattr(tool, "WHEELS", tmp_path / "wheels")
    return state


def test_wheels_that_are_kept_are_not_downloaded(pip: Any, tmp_path: Path) -> None:
    pip["kept"] = True
    tool.install("1.2.0", Path("python3.7"), tmp_path)
    assert pip["calls"] == ["install torch==1.2.0"]


def test_what_a_build_needs_and_does_not_say_comes_with_it(
    pip: Any, tmp_path: Path
) -> None:
    pip["offers"] = {"torch==1.0.1"}
    tool.install("1.0.1", Path("python3.7"), tmp_path)
    assert [names[-2:] for names in pip["names"]] == [
        ["numpy", "torch==1.0.1"],
        ["numpy", "torch==1.0.1+cpu"],
        ["numpy", "torch==1.0.1"],
        ["numpy", "torch==1.0.1"],
    ]


def test_the_build_for_the_cpu_is_asked_for_first(pip: Any, tmp_path: Path) -> None:
    pip["offers"] = {"torch==1.2.0+cpu", "torch==1.2.0"}
    tool.install("1.2.0", Path("python3.7"), tmp_path)
    assert pip["calls"] == [
        "install torch==1.2.0",
        "download torch==1.2.0+cpu",
        "install torch==1.2.0",
    ]


def test_else_the_one_that_there_is(pip: Any, tmp_path: Path) -> None:
    pip["offers"] = {"torch==1.2.0"}
    tool.install("1.2.0", Path("python3.7"), tmp_path)
    assert pip["calls"][2:] == ["download torch==1.2.0", "install torch==1.2.0"]


def test_a_python_that_makes_no_environment_is_no_crash(
    machine: Path, tmp_path: Path
) -> None:
    python = script(in_pyenv(machine), "exit 1")
    with pytest.raises(tool.NotCheckedError, match="makes no environment"):
        tool.install("1.2.0", python, tmp_path / "made")


def test_a_build_that_pip_does_not_offer_is_not_checked(
    pip: Any, tmp_path: Path
) -> None:
    with pytest.raises(tool.NotCheckedError, match=r"downloads no torch 1\.2\.0"):
        tool.install("1.2.0", Path("python3.7"), tmp_path)
    assert pip["calls"][-1] == "download torch==1.2.0"


# ---- Recording again.

RECORDING = '{\n "a": 1,\n "python": "3.7",\n "torch": "9.0"\n}\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project whose one program prints the one recording of torch 9.0."""
    recording = tmp_path / "docs/data/errors/9.0.json"
    recording.parent.mkdir(parents=True)
    recording.write_text(RECORDING)
    program = tmp_path / "tools/record_errors.py"
    program.parent.mkdir()
    program.write_text(f"print({RECORDING!r}, end='')\n")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "DATA", tmp_path / "docs/data")
    monkeypatch.setattr(tool, "installed", lambda: "9.0")
    monkeypatch.delenv("CI", raising=False)
    return tmp_path


@pytest.mark.usefixtures("project")
def test_what_is_the_same_passes(capsys: Any) -> None:
    assert tool.main([]) == 0
    assert capsys.readouterr().out == "torch 9.0: checked, the same\n"


def test_only_the_version_of_python_may_differ(project: Path) -> None:
    path = project / "docs/data/errors/9.0.json"
    path.write_text(RECORDING.replace("3.7", "3.12"))
    assert tool.main([]) == 0
    for other in (RECORDING.replace(": 1", ": 2"), RECORDING + "\n", RECORDING[:-1]):
        path.write_text(other)
        assert tool.main([]) == 1


def test_a_difference_is_shown(project: Path, capsys: Any) -> None:
    path = project / "docs/data/errors/9.0.json"
    path.write_text(RECORDING.replace(": 1", ": 2"))
    assert tool.main([]) == 1
    out = capsys.readouterr().out
    assert "torch 9.0: differs:\n--- errors/9.0.json" in out
    assert '\n- "a": 2,\n+ "a": 1,\n' in out


def test_a_program_that_fails_is_a_difference(project: Path, capsys: Any) -> None:
    (project / "tools/record_errors.py").write_text("import no_such_module\n")
    assert tool.main([]) == 1
    assert "No module named 'no_such_module'" in capsys.readouterr().out


@pytest.fixture
def on_gpu(project: Path) -> Path:
    """Return a recording on a GPU, whose program prints what it is asked for."""
    recording = project / "docs/data/hooks/cuda/9.0.json"
    recording.parent.mkdir(parents=True)
    recording.write_text("--device cuda\n")
    program = project / "tools/record_hooks.py"
    program.write_text("import sys; print(*sys.argv[1:])\n")
    return recording


def with_torch(project: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    """Let the interpreter find a torch that finds a GPU, or none."""
    cuda = f"class cuda:\n    is_available = staticmethod(lambda: {gpu})\n"
    (project / "torch.py").write_text(cuda)
    monkeypatch.setenv("PYTHONPATH", str(project))


def test_a_recording_on_a_gpu_is_compared_where_one_is(
    on_gpu: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with_torch(project, monkeypatch, gpu=True)
    assert tool.main([]) == 0
    assert capsys.readouterr().out == "torch 9.0: checked, the same\n"
    on_gpu.write_text("another\n")
    assert tool.main([]) == 1
    assert "--- hooks/cuda/9.0.json" in capsys.readouterr().out


def test_and_else_left_alone_which_is_said_and_no_failure(
    on_gpu: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    on_gpu.write_text("another\n")
    with_torch(project, monkeypatch, gpu=False)
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(tool, "EVERY_TIME", [])
    assert tool.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "torch 9.0: hooks/cuda/9.0.json not compared: it finds no GPU",
        "torch 9.0: checked, the same",
    ]


@pytest.mark.usefixtures("project")
def test_another_build_gets_an_environment_that_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[str, str, Path]] = []

    def install(build: str, python: str, folder: Path) -> Path:
        made.append((build, python, folder))
        assert folder.exists()
        return Path(sys.executable)

    monkeypatch.setattr(tool, "installed", lambda: "10.0")
    monkeypatch.setattr(tool, "interpreter", lambda python: f"python{python}")
    monkeypatch.setattr(tool, "install", install)
    assert tool.main([]) == 0
    ((build, python, folder),) = made
    assert (build, python) == ("9.0", "python3.7")
    assert not folder.exists()


# ---- What has to be checked.


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let no build be checked, and return those that should have been."""
    builds: list[str] = []

    def checked(build: str) -> list[str]:
        builds.append(build)
        raise tool.NotCheckedError("no Python 3.7 that runs")

    monkeypatch.setattr(tool, "checked", checked)
    monkeypatch.setattr(tool, "installed", lambda: "9.0")
    monkeypatch.delenv("CI", raising=False)
    return builds


def test_without_a_name_all_are_tried_and_none_is_missed(
    asked: list[str], capsys: Any
) -> None:
    assert tool.main([]) == 0
    assert asked == tool.builds()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"torch {it}: not checked: no Python 3.7 that runs" for it in asked
    ]


def test_what_is_named_has_to_be_checked(asked: list[str]) -> None:
    assert tool.main(["1.2.0", "1.7.1"]) == 1
    assert asked == ["1.2.0", "1.7.1"]


def test_in_ci_three_have_to_be_checked(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    assert tool.main([]) == 1
    assert asked == ["1.2.0", "1.7.1", "9.0"]


@pytest.mark.usefixtures("project")
def test_a_version_without_a_recording_cannot_be_checked() -> None:
    with pytest.raises(tool.NotCheckedError, match="no recording"):
        tool.checked("8.0")


def test_the_builds_are_those_of_every_folder_the_oldest_first() -> None:
    builds = tool.builds()
    assert builds.index("1.9.1") < builds.index("1.11.0")
    for name in ("errors", "hooks", "programs"):
        assert {path.stem for path in (DATA / name).glob("*.json")} == {*builds}
        assert (ROOT / f"tools/record_{name}.py").exists()
    assert [path.parent.name for path in tool.recordings("1.2.0")] == [
        "errors",
        "hooks",
        "programs",
    ]
    assert {*tool.EVERY_TIME} <= {*builds}


def test_ci_checks_versions() -> None:
    assert "lint test versions\n" in (ROOT / ".ci/run").read_text()

"""The benchmark runs, and writes what it promises. No test looks at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import recorder
from benchmarks.contender import Contender
from benchmarks.contenders import contenders
from benchmarks.names import BY_HAND
from benchmarks.nets import mlp
from benchmarks.recorder_report import as_text

SPREAD = {"median", "lower_quartile", "upper_quartile", "least"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a quick run wrote."""
    out = tmp_path_factory.mktemp("results") / "recorder.json"
    recorder.main(["--quick", "--out", str(out)])
    return json.loads(out.read_text())


def test_it_says_what_was_measured_on_what(quick: dict[str, Any]) -> None:
    assert quick["torch"] == torch.__version__
    assert quick["machine"]["cpu"]
    assert quick["date"]
    assert quick["settings"]["device"] == "cpu"
    assert [one["contender"] for one in quick["contenders"]] == [
        one.name for one in contenders()
    ]
    assert all(one["records"] for one in quick["contenders"])


def test_every_contender_has_times_or_a_reason(quick: dict[str, Any]) -> None:
    names = [one.name for one in contenders()]
    nets = {row["net"] for row in quick["times"]}
    assert len(nets) == 2
    for net in nets:
        rows = [row for row in quick["times"] if row["net"] == net]
        assert [row["contender"] for row in rows] == names
        for row in rows:
            assert (row["use"] is None) == bool(row["skipped"])
    for row in quick["times"]:
        for compared in filter(None, (row["use"], row["step"])):
            assert compared["turns"] >= 2
            for field in ("ms", "to_none", "to_by_hand"):
                assert compared[field].keys() == SPREAD
        if row["contender"] == BY_HAND:
            assert row["use"]["to_by_hand"]["median"] == 1


def test_what_references_hold_grows_with_the_batch(quick: dict[str, Any]) -> None:
    held: dict[str, list[int]] = {}
    for row in quick["memory"]:
        if not row["skipped"]:
            held.setdefault(row["contender"], []).append(row["held_bytes"])
    small, large = held[BY_HAND]
    assert large > 2 * small
    assert held["no hooks"][0] == held["no hooks"][1] < small
    if statistics := held.get("gradlib, tensor_stats"):
        assert statistics[0] == statistics[1]


def test_the_report_shows_them_all(quick: dict[str, Any]) -> None:
    text = as_text(quick)
    for row in quick["times"]:
        assert row["net"] in text
        assert (row["skipped"] or row["contender"]) in text


def test_an_error_of_a_peer_is_a_result_and_one_of_ours_is_an_error() -> None:
    def fail(_net: object) -> None:
        raise ValueError("no such luck")

    net = mlp(torch.device("cpu"), modules=3, width=2, batch=2)
    peer = Contender("peer", "nothing", fail, peer=True)
    assert recorder.why_not(peer, net) == "it raises ValueError: no such luck"
    assert recorder.why_not(Contender("ours", "nothing", fail), net) == ""
    full = Contender(recorder.FULL, "nothing", fail)  # they raise on what is in place
    assert recorder.why_not(full, net).startswith("it raises")
    absent = Contender("absent", "nothing", fail, absent="not installed")
    assert recorder.why_not(absent, net) == "not installed"


def test_results_are_only_written_where_asked_or_measured_in_full(
    quick: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(recorder, "RESULTS", tmp_path)
    monkeypatch.setattr(recorder, "measure", lambda *_: quick)
    recorder.main(["--quick"])
    assert not list(tmp_path.iterdir())
    recorder.main([])
    assert [path.name for path in tmp_path.iterdir()] == ["recorder-cpu.json"]
    assert "recorder-cpu.json" in capsys.readouterr().out


def test_the_committed_results_are_of_the_contenders_there_are() -> None:
    for path in (Path(recorder.__file__).parent / "results").glob("recorder-*.json"):
        found = json.loads(path.read_text())
        assert [one["contender"] for one in found["contenders"]] == [
            one.name for one in contenders()
        ]

"""The benchmark runs, and writes what it promises. No test looks at a time."""

import json
import warnings
from typing import Any

import pytest
import torch

import gradlib
from benchmarks import jacobian
from benchmarks.jacobian_nets import mlp, nets
from benchmarks.jacobian_ways import every_way, loop
from benchmarks.names import OURS
from benchmarks.written_nets import written_nets

SPREAD = {"median", "lower_quartile", "upper_quartile", "least"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a quick run wrote."""
    out = tmp_path_factory.mktemp("results") / "jacobian.json"
    with warnings.catch_warnings():  # torch's own forward mode warns
        warnings.simplefilter("ignore", DeprecationWarning)
        jacobian.main(["--quick", "--out", str(out)])
    return json.loads(out.read_text())


def test_it_says_what_was_measured_on_what(quick: dict[str, Any]) -> None:
    assert quick["torch"] == torch.__version__
    assert quick["machine"]["cpu"]
    assert quick["date"]
    assert quick["settings"]["device"] == "cpu"


def test_every_way_has_times_or_a_reason(quick: dict[str, Any]) -> None:
    assert [row["contender"] for row in quick["rows"]] == [
        one.name for one in every_way()
    ]
    timed = [row for row in quick["rows"] if not row.get("skipped")]
    assert len(timed) >= len(quick["rows"]) - 1  # TorchJD may not be installed
    for row in timed:
        assert row["difference"] < 1e-4
        assert set(row["ms"]) == set(row["to_gradlib"]) == SPREAD
    ours = next(row for row in timed if row["contender"] == OURS)
    assert ours["to_gradlib"]["median"] == 1


def test_a_wrong_result_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one = every_way()[0]
    wrong = jacobian.Way("wrong", lambda m, x, s: lambda: one.prepare(m, x, s)() * 2)
    monkeypatch.setattr(jacobian, "every_way", lambda: [one, wrong])
    net = nets(torch.device("cpu"))[0]
    results = jacobian.measure(
        [net], jacobian.every_way(), (1,), 2, torch.device("cpu")
    )
    assert results["rows"][1]["skipped"] == "its result is another"
    assert "\nwrong: its result is another" in jacobian.as_text(results)


def test_the_networks_are_what_their_names_say() -> None:
    shapes = {
        net.name: (net.x.shape, net.model(net.x).shape)
        for net in nets(torch.device("cpu"))
    }
    assert shapes["MLP 3-20-2"] == ((10, 3), (10, 2))
    assert shapes["autoencoder 784-256-32-256-784"] == ((32, 784), (32, 784))
    assert shapes["CNN 28x28 to 10"] == ((64, 1, 28, 28), (64, 10))
    assert len(shapes) == 9
    assert len(mlp([2, 3, 4], torch.nn.ReLU)) == 3


@pytest.mark.parametrize("check", [False, True])
def test_short_functions_are_differentiated_right(check: bool) -> None:
    for net in written_nets(torch.device("cpu")):
        ours = gradlib.per_sample_jacobian(net.model, net.x, check=check)
        torch.testing.assert_close(ours, loop(net.model, net.x))

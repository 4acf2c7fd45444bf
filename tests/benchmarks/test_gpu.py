"""What is measured on a GPU is measured here on the CPU, and shown as it would be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_nets, jacobian_ways
from benchmarks.jacobian_nets import nets
from mkdocs_hooks import gpu_figures

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a quick run wrote; nothing was compiled."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "COMPILED", ())
        out = str(folder / "some-gpu.json")
        gpu.main(["--quick", "--device", "cpu", "--rounds", "2", "--out", out])
    return folder


def test_it_writes_what_it_promises(results: Path) -> None:
    found: dict[str, Any] = json.loads((results / "some-gpu.json").read_text())
    assert found["recorder"]["times"]
    assert found["jacobian"]["rows"]
    replayed = [
        row for row in found["jacobian"]["rows"] if "replayed" in row["contender"]
    ]
    assert [row["contender"] for row in replayed] == [
        "gradlib, replayed",
        "is_grads_batched, replayed",
    ]
    if not torch.cuda.is_available():
        assert all("it raises" in row["skipped"] for row in replayed)
    assert [row["kept"] for row in found["kept"]] == [*gpu.OPTIONS]
    assert all(row["ms"]["median"] > 0 for row in found["kept"])
    assert [row["launches"] for row in found["launches"]] == [None]


def test_the_page_shows_it(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_figures, "RESULTS", results)
    text = gpu_figures.on_page_markdown(f"before\n\n{gpu_figures.MARKER}")
    assert text.startswith("before")
    assert gpu_figures.MARKER not in text
    assert torch.__version__ in text
    assert "Measured on 20" in text
    assert "tensor hooks by hand" in text
    assert "loop over outputs" in text


def test_the_page_says_where_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_figures, "RESULTS", tmp_path)
    (tmp_path / "recorder-cpu.json").write_text('{"benchmark": "recorder"}')
    assert gpu_figures.on_page_markdown(gpu_figures.MARKER) == gpu_figures.NONE
    assert gpu_figures.on_page_markdown("no marker") == "no marker"


def test_compiling_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def compiled(call: Any) -> Any:
        return lambda: calls.append("called") or call()

    monkeypatch.setattr(torch, "compile", compiled)
    one, net = gpu.compiled(jacobian_ways.contenders()[0]), nets(CPU)[0]
    assert one.name == "gradlib, compiled"
    call = one.prepare(net.model, net.x, torch.Size())
    assert calls == ["called"]
    assert call().shape == (10, 2, 3)


def test_the_larger_networks_are_what_their_names_say() -> None:
    with torch.device("meta"):
        found = gpu_nets.resnet((3, 4, 6, 3), 1000)
        assert found(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)
    # As torchvision's resnet50 has: see the table on
    # https://docs.pytorch.org/vision/stable/models.html
    assert sum(it.numel() for it in found.parameters()) == 25_557_032
    for net in gpu_nets.differentiated(torch.device("meta")):
        assert net.model(net.x).shape[0] == len(net.x)
    for net in gpu_nets.recorded(torch.device("meta")):
        net.step()

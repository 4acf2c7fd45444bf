"""What is measured on a GPU is measured here on the CPU, and shown as it would be."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks import gpu, gpu_nets, jacobian_ways
from benchmarks.jacobian_nets import nets
from benchmarks.names import OURS
from gradlib.jacobian import memory
from mkdocs_hooks import gpu_figures

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a quick run wrote; nothing was compiled."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "COMPILED", ())
        out = str(folder / "some-gpu.json")
        how = ["--quick", "--device", "cpu", "--rounds", "2", "--resume"]
        gpu.main([*how, "--out", out])
    return folder


def test_it_writes_what_it_promises(results: Path) -> None:
    found: dict[str, Any] = json.loads((results / "some-gpu.json").read_text())
    assert found["recorder"]["times"]
    assert found["recorder"]["memory"]
    ways = {row["contender"] for row in found["jacobian"]["rows"]}
    assert ways == {it.name for it in jacobian_ways.every_way()}
    assert [row["contender"] for row in found["replayed"]] == [
        "gradlib",
        "is_grads_batched",
        "gradlib, kernel by kernel",
        "gradlib, replayed",
        "is_grads_batched, replayed",
    ]
    if not torch.cuda.is_available():
        assert all("it raises" in row["skipped"] for row in found["replayed"][3:])
    assert [row["kept"] for row in found["kept"]] == [*gpu.OPTIONS]
    assert all(row["ms"]["median"] > 0 for row in found["kept"])
    assert [row["launches"] for row in found["launches"]] == [None] * 8
    assert found["failed"] == []
    assert not list(results.glob("*.unfinished"))


def test_other_numbers_are_measured(results: Path) -> None:
    found: dict[str, Any] = json.loads((results / "some-gpu.json").read_text())
    rows = {(it["numbers"], it["contender"]): it for it in found["numbers"]}
    assert [*rows] == [(it, way) for it in gpu.NUMBERS for way in gpu.COMPARED]
    assert all(row["ms"]["median"] > 0 for row in rows.values())
    exact, coarse = (
        rows[it, "gradlib"]["difference"] for it in ("float32", "bfloat16")
    )
    assert exact < 1e-5 < 1e-3 < coarse < 0.1


def test_tf32_is_what_a_row_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def prepare(*_: object) -> Any:
        def call() -> torch.Tensor:
            flags = torch.backends.cuda.matmul, torch.backends.cudnn
            seen.append((flags[0].allow_tf32, flags[1].allow_tf32))
            return torch.ones(10, 2, 3)

        return call

    net = nets(CPU)[0]
    way = jacobian_ways.Way("a way", prepare)
    monkeypatch.setattr(gpu, "NUMBERS", {"off": gpu.NUMBERS["float32"]})
    gpu._numbers([way], 2, CPU, net)
    assert {*seen} == {(False, False)}
    seen.clear()
    monkeypatch.setattr(gpu, "NUMBERS", {"on": (torch.float32, True)})
    before = torch.backends.cudnn.allow_tf32
    gpu._numbers([way], 2, CPU, net)
    assert {*seen} == {(True, True)}
    assert torch.backends.cudnn.allow_tf32 == before


def steps(*runs: Any) -> list[gpu.Step]:
    return [gpu.Step("kept", f"net {i}", run) for i, run in enumerate(runs)]


def broken() -> Any:
    raise RuntimeError("it\n | breaks")


def test_an_error_is_a_row_and_the_rest_is_measured() -> None:
    found = gpu.measure(
        steps(lambda: [{"n": 0}], broken, lambda: [{"n": 2}]), None, lambda _: None
    )
    assert found["kept"] == [{"n": 0}, {"n": 2}]
    assert found["failed"] == [
        {"part": "kept", "net": "net 1", "error": "RuntimeError: it\n | breaks"}
    ]
    assert "| kept | net 1 | RuntimeError: it \\| breaks |" in gpu_figures.shown(
        {"failed": found["failed"]}
    )


def test_what_was_measured_is_there_when_the_machine_goes_away(tmp_path: Path) -> None:
    file = tmp_path / "results.json"

    def away() -> Any:
        raise KeyboardInterrupt

    def save(found: Any) -> None:
        file.write_text(json.dumps(found))

    with pytest.raises(KeyboardInterrupt):
        gpu.measure(steps(lambda: [{"n": 0}], away), None, save)
    begun = json.loads(file.read_text())
    assert begun["kept"] == [{"n": 0}]
    found = gpu.measure(steps(broken, lambda: [{"n": 1}]), begun, save)
    assert found["kept"] == [{"n": 0}, {"n": 1}]
    assert found["failed"] == []


def test_two_releases_are_not_mixed() -> None:
    begun = gpu.measure([], None, lambda _: None) | {"torch": "2.4.0"}
    with pytest.raises(SystemExit, match="was not begun with"):
        gpu.measure([], begun, lambda _: None)


def test_networks_are_joined_in_one_table() -> None:
    first: dict[str, Any] = {"torch": "2.13", "rows": [1], "plans": [2]}
    found = gpu.measure(
        [
            gpu.Step("jacobian", "a", lambda: first),
            gpu.Step("jacobian", "b", lambda: {"rows": [3], "plans": [4]}),
        ],
        None,
        lambda _: None,
    )
    assert found["jacobian"] == {"torch": "2.13", "rows": [1, 3], "plans": [2, 4]}


def test_a_network_on_which_ours_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError("CUDA out of memory.")

    ours = jacobian_ways.Way(OURS, fails)
    other = jacobian_ways.every_way()[5]
    monkeypatch.setattr(gpu, "every_way", lambda: [ours, other])
    monkeypatch.setattr(gpu, "COMPILED", ())
    found = gpu.measure(gpu._steps([], nets(CPU)[:1], 2, CPU)[:1], None, lambda _: None)
    assert "jacobian" not in found
    assert "CUDA out of memory" in found["failed"][0]["error"]


def test_the_page_shows_it(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_figures, "RESULTS", results)
    text = gpu_figures.on_page_markdown(f"before\n\n{gpu_figures.MARKER}")
    assert text.startswith("before")
    assert gpu_figures.MARKER not in text
    assert torch.__version__ in text
    assert "Measured on 20" in text
    assert "tensor hooks by hand" in text
    assert "loop over outputs" in text
    for numbers in gpu.NUMBERS:
        assert f"| {numbers} | gradlib |" in text
    assert "| network | kept | ms | peak, MiB | held, MiB | kernel launches |" in text
    assert "| network | recorded by | peak, MiB | held, MiB |" in text
    assert "| is_grads_batched, replayed |" in text
    found = json.loads((results / "some-gpu.json").read_text())
    assert gpu.answer(found["replayed"]) in text
    assert "| network | gradlib | fewest of another way | most |" in text
    assert "Not measured" not in text


def test_the_page_shows_who_launches_the_fewest_and_the_most() -> None:
    counts = {"gradlib": 4, "a": 7, "b": 90, "c": 3, "d": None}
    rows = [
        {"net": "n", "contender": name, "launches": count}
        for name, count in counts.items()
    ]
    assert gpu_figures._launches(rows).splitlines()[-1] == "| n | 4 | 3, c | 90, b |"


def test_the_page_says_what_was_not_measured_yet(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads((results / "some-gpu.json").read_text())
    found["planned"] += [["kept", "more"], ["numbers", "more"], ["numbers", "yet more"]]
    (tmp_path / "cut-off.json").write_text(json.dumps(found))
    monkeypatch.setattr(gpu_figures, "RESULTS", tmp_path)
    text = gpu_figures.on_page_markdown(gpu_figures.MARKER)
    kept, numbers = (gpu_figures.PARTS[it] for it in ("kept", "numbers"))
    assert f"Not measured yet: {kept} on 1 network, {numbers} on 2 networks." in text


def test_the_page_says_where_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_figures, "RESULTS", tmp_path)
    (tmp_path / "recorder-cpu.json").write_text('{"benchmark": "recorder"}')
    assert gpu_figures.on_page_markdown(gpu_figures.MARKER) == gpu_figures.NONE
    assert gpu_figures.on_page_markdown("no marker") == "no marker"


def test_what_waits_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    # A capture that fails may leave the device in a state that nothing mends.
    modes, captured = ["default"], []

    def waits(*_: object) -> Any:
        def call() -> torch.Tensor:
            if modes[-1] == "error":
                raise RuntimeError("called a synchronizing CUDA operation")
            return torch.ones(3)

        return call

    stream = MagicMock()
    for name in ("Stream", "current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, stream)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", captured.append)
    way = gpu.replayed(jacobian_ways.Way("a way", waits))
    with pytest.raises(RuntimeError, match="synchronizing"):
        way.prepare(torch.nn.Identity(), torch.ones(3), torch.Size())
    assert captured == []
    assert modes == ["default", "error", "default"]


def test_ours_asks_for_nothing_while_it_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (ours,) = (it for it in jacobian_ways.every_way() if it.name == gpu.OURS)
    for last, mode in ((torch.nn.Linear(4, 2), "auto"), (torch.nn.Softmin(1), None)):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), last)
        x = torch.randn(5, 3)
        call: Any = gpu.capturable(ours).prepare(model, x, torch.Size())
        monkeypatch.setattr(memory, "free_bytes", None)
        assert call.keywords["mode"] == (mode or "reverse")
        found = call()
        monkeypatch.undo()
        torch.testing.assert_close(found, ours.prepare(model, x, torch.Size())())


def without_graphs(*times: float) -> list[dict[str, Any]]:
    return [
        {"net": str(i), "contender": gpu.ONE_BY_ONE, "to_gradlib": {"median": it}}
        for i, it in enumerate(times)
    ]


def test_it_says_whether_cuda_graphs_pay() -> None:
    said = gpu.answer(without_graphs(1.0, 5.0, 1.6))
    assert "1.00 to 5.00 times" in said
    assert "on 2 of 3 networks" in said
    skipped = {"net": "a", "contender": gpu.ONE_BY_ONE, "skipped": "it raises"}
    assert gpu.answer([skipped]).startswith("No call of gradlib was measured")


def test_kernel_by_kernel_nothing_is_captured() -> None:
    (ours,) = (it for it in jacobian_ways.every_way() if it.name == gpu.OURS)
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 4)), torch.randn(5, 3)
    call: Any = gpu.one_by_one(ours).prepare(model, x, torch.Size())
    torch.testing.assert_close(call(), ours.prepare(model, x, torch.Size())())
    assert call.keywords == {"check": False, "max_bytes": 2**40}


def test_compiling_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def compiled(call: Any) -> Any:
        return lambda: calls.append("called") or call()

    monkeypatch.setattr(torch, "compile", compiled)
    one, net = gpu.compiled(jacobian_ways.every_way()[0]), nets(CPU)[0]
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


def test_every_network_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch gives up on a piece of code that it has compiled often enough.
    ran: list[str] = []

    def backend(module: Any, _: object) -> Any:
        ran.append("compiled")
        return module.forward

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call: compiler(call, backend=backend))
    way = gpu.compiled(jacobian_ways.Way("a way", lambda model, x, _: lambda: model(x)))

    functions: list[Any] = [torch.sin, torch.cos, torch.tan, torch.exp]

    def use(number: int) -> list[dict[str, Any]]:
        ran.clear()
        way.prepare(functions[number], torch.ones(3), torch.Size())
        return [{"compiled": ran == ["compiled"]}]

    chosen = steps(*(lambda it=it: use(it) for it in range(4)))
    with torch._dynamo.config.patch(recompile_limit=2):
        found = gpu.measure(chosen, None, lambda _: None)
    assert found["failed"] == []
    assert found["kept"] == [{"compiled": True}] * 4

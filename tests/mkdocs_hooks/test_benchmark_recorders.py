"""What pages say of recording is what was measured."""

from types import SimpleNamespace
from typing import Any, cast

from mkdocs.structure.pages import Page

from mkdocs_hooks import benchmark_recorders as recorders
from mkdocs_hooks import benchmark_tables as tables

PAGE = cast(Page, SimpleNamespace(file=SimpleNamespace(src_uri="how-fast.md")))


def results() -> dict[str, Any]:
    return tables.load("recorder-cpu", PAGE)


def test_every_network_and_recorder_is_shown() -> None:
    text = "\n".join(recorders.recorder(results()))
    for row in results()["times"]:
        assert row["net"].lower() in text.lower()
        assert f"| {row['contender']} |" in text


def test_a_time_is_held_against_a_step_without_hooks() -> None:
    found = results()
    rows = [it for it in found["times"] if it["contender"] == "gradlib"]
    rows[0]["use"]["to_none"]["median"] = 77.0
    rows[-1]["use"]["to_none"]["median"] = 0.5
    found["times"][0]["use"]["ms"]["median"] = 12.3
    (text,) = recorders.said(found)
    assert "takes 0.50 to 77.00 times as long as one without hooks" in text
    in_short = recorders.in_short(
        [row for row in found["times"] if row["threads"] == 1]
    )
    assert "| gradlib | 77.00 |" in in_short
    assert "| no hooks | 12.3 ms |" in in_short


def test_the_gpu_of_a_file_of_several_parts_is_named() -> None:
    marker = '<div class="recorder-said" data-results="nvidia-h100-80gb-hbm3"></div>'
    text = recorders.on_page_markdown(marker, page=PAGE)
    assert text.startswith("On a GPU (NVIDIA H100 80GB HBM3), a step")


def test_threads_are_named() -> None:
    of_nets = [it for it in recorders.recorder(results()) if "steps alone" in it]
    assert all("**1 thread**" in it and "**2 threads**" in it for it in of_nets)


def test_less_memory_than_none_is_explained() -> None:
    rows = [
        {"net": "n", "contender": name, "skipped": None, "peak_bytes": 2**20}
        | {"held_bytes": held}
        for name, held in {"one": 2**20, "two": -(2**20)}.items()
    ]
    text = recorders.memory(rows)
    assert "held by two on n: meanwhile memory was freed that one had left" in text
    assert "Less than nothing" not in recorders.memory(rows[:1])

"""Put the committed results of GPUs into the page that holds the marker.

``make bench DEVICE=cuda`` writes them, a file for each GPU.
"""

import json
from collections.abc import Iterator
from typing import Any

from mkdocs_hooks import cache
from mkdocs_hooks.benchmark_tables import jacobian, recorder, table, where

MARKER = '<div class="gpu-figures"></div>'
NONE = "No GPU results are committed yet: nothing on this site was measured on a GPU."
RESULTS = cache.ROOT / "benchmarks" / "results"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the marker."""
    if MARKER not in markdown:
        return markdown
    sections = [shown(results) for results in every_result()]
    return markdown.replace(MARKER, "\n\n".join(sections) or NONE)


def every_result() -> list[dict[str, Any]]:
    """Return what was measured on GPUs."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    return [results for results in found if results["benchmark"] == "gpu"]


def shown(results: dict[str, Any]) -> str:
    """Return the section of one GPU."""
    return "\n\n".join(_parts(results))


def _parts(results: dict[str, Any]) -> Iterator[str]:
    device = results["recorder"]["machine"].get("gpu", "No GPU")
    tf32 = "on" if results["tf32"] else "off"
    yield f"### {device}"
    yield f"CUDA {results['cuda']}, TF32 {tf32}. {where(results['recorder'])}"
    yield "#### Recording"
    yield from recorder(results["recorder"])
    yield "Where what is recorded is kept:"
    yield table(
        ("network", "kept", "ms", "peak MiB", "held MiB", "kernel launches"),
        [_kept(row) for row in results["kept"]],
    )
    yield "#### The Jacobian of every sample"
    # Its tables have a heading for each number of threads, one on a GPU.
    yield from [it for it in jacobian(results["jacobian"]) if not it.startswith("### ")]
    yield table(
        ("network", "kernel launches of a call"),
        [(row["net"], _count(row)) for row in results["launches"]],
    )


def _kept(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["net"],
        f"`{row['kept']}`" if "=" in row["kept"] else row["kept"],
        f"{row['ms']['median']:.3g}",
        f"{row['peak_bytes'] / 2**20:.1f}",
        f"{row['held_bytes'] / 2**20:.1f}",
        _count(row),
    )


def _count(row: dict[str, Any]) -> str:
    return "" if row["launches"] is None else str(row["launches"])

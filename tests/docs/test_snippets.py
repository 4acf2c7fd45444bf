"""Runs every Python block a reader may copy, and compares what it prints.

Each block runs alone, in a fresh module. ``--update-examples`` writes what was printed.
"""

import contextlib
from functools import cache
from pathlib import Path

import pytest
import torch
from pytest_examples import CodeExample, EvalExample

from .differing import difference, place_of_change
from .linting import lint
from .printing import Transcript, with_printed
from .snippets import block_name, blocks_in, markdown_files, package_files

BLOCKS = blocks_in([*markdown_files(), *package_files()])
each_block = pytest.mark.parametrize("block", BLOCKS, ids=block_name)


def test_there_are_blocks_to_run():
    assert BLOCKS, "no Python block was found in *.md, docs/ and gradlib/"


@each_block
@pytest.mark.usefixtures("like_fresh_interpreter")
# A reader has a screen, so plt.show() belongs in a block; here is none.
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_runs_and_prints(
    block: CodeExample,
    eval_example: EvalExample,
    capfd: pytest.CaptureFixture[str],
    to_update: list[CodeExample],
):
    settings = block.prefix_settings()
    if settings.get("test") == "skip":
        pytest.skip(settings.get("reason", "no reason given"))

    transcript = Transcript(_module_file(eval_example, block))
    seed, numbers = torch.initial_seed(), torch.get_rng_state()
    with contextlib.redirect_stdout(transcript):
        eval_example.run(block)
    _fail_if_more_was_written(block, capfd)
    drew_numbers = not torch.equal(numbers, torch.get_rng_state())
    if "figure" in settings and drew_numbers and torch.initial_seed() == seed:
        pytest.fail(
            f"{block_name(block)}: this figure is another each time, as it shows "
            "random numbers: call torch.manual_seed in the block.",
            pytrace=False,
        )

    source = with_printed(block.source, transcript.printed())
    if source == block.source:
        return
    if eval_example.update_examples:
        block.source = source
        to_update.append(block)
        return
    pytest.fail(
        f"{place_of_change(block, source)}: the #> lines are not what the block prints."
        f"\n{difference(block.source, source)}\n"
        "`make update-docs` rewrites them. If they differ each time, the block draws "
        "random numbers: call torch.manual_seed in it.",
        pytrace=False,
    )


@cache
def complaints() -> dict[str, str]:
    """Return what is to be mended in each block, by its name."""
    return dict(zip(map(block_name, BLOCKS), lint(BLOCKS), strict=True))


@each_block
def test_is_tidy(block: CodeExample):
    if complaint := complaints()[block_name(block)]:
        pytest.fail(f"{block_name(block)}:\n{complaint}", pytrace=False)


def _module_file(eval_example: EvalExample, block: CodeExample) -> Path:
    return eval_example.tmp_path / f"{block.module_name}.py"


def _fail_if_more_was_written(
    block: CodeExample, capfd: pytest.CaptureFixture[str]
) -> None:
    written = capfd.readouterr()
    if text := written.out + written.err:
        pytest.fail(
            f"{block_name(block)}: this reaches the terminal, but not through Python's "
            f"standard output, so no #> line can show it: print it there.\n{text}",
            pytrace=False,
        )

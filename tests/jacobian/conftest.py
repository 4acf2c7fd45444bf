"""Have each test to which the folder `fast` has an answer hold without it, too."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gradlib.jacobian import drawing
from gradlib.jacobian.faster import find_shorter
from gradlib.random_state import generators_of_devices

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests() -> None:  # pyright: ignore (pytest uses it)
    """Have each test make its plans itself, as it may change what these depend on."""
    drawing._kept.cache_clear()  # pyright: ignore[reportPrivateUsage]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Run the test again without the shorter way, where it was given one.

    All others are the same without it: they were told that there is none.
    """
    if item.path.parent != HERE or item.get_closest_marker("of_fast"):
        return (yield)
    answers: set[bool] = set()

    def watched(*asked: Any) -> Any:
        found = find_shorter(*asked)
        answers.add(found is not None)
        return found

    with _in_its_place(watched):
        yield
    if True in answers:
        for generator in generators_of_devices():  # as before the first run
            generator.manual_seed(0)
        try:
            with _in_its_place(lambda *_: None):
                item.runtest()
        except BaseException as error:
            error.add_note("It fails without gradlib/jacobian/fast, and not with it.")
            raise
    return None


@contextmanager
def _in_its_place(find: Any) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for file in ("per_sample", "compute"):
            patch.setattr(f"gradlib.jacobian.{file}.find_shorter", find)
        yield

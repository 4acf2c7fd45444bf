"""Have each test to which the folder `fast` has an answer hold without it, too."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gradlib.jacobian import drawing
from gradlib.jacobian.faster import find_in_call, find_in_graph
from gradlib.random_state import generators_of_devices

HERE = Path(__file__).parent
FINDING = {
    "per_sample.find_in_call": find_in_call,
    "plan_jacobian.find_in_call": find_in_call,
    "plan_jacobian.find_in_graph": find_in_graph,
    "compute.find_in_graph": find_in_graph,
}
"""Where the folder `fast` is asked."""


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests() -> None:
    """Have each test make its plans itself, as it may change what these depend on."""
    drawing._kept.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Run the test again without the shorter way, where it was given one.

    All others are the same without it: they were told that there is none.
    """
    if item.path.parent != HERE or item.get_closest_marker("of_fast"):
        return (yield)
    answers: set[bool] = set()

    def watched(find: Any) -> Any:
        def watching(*asked: Any) -> Any:
            found = find(*asked)
            answers.add(found is not None)
            return found

        return watching

    with _in_its_place(watched):
        yield
    if True in answers:
        for generator in generators_of_devices():  # as before the first run
            generator.manual_seed(0)
        try:
            with _in_its_place(lambda _: lambda *_: None):
                item.runtest()
        except BaseException as error:
            error.add_note("It fails without gradlib/jacobian/fast, and not with it.")
            raise
    return None


@contextmanager
def _in_its_place(of: Any) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for place, find in FINDING.items():
            patch.setattr(f"gradlib.jacobian.{place}", of(find))
        yield

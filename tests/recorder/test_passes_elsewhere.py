"""Backward passes inside a forward that run in another thread, as a GPU's do."""

from functools import cache

import pytest
import torch

import gradlib

from ..elsewhere import passes_elsewhere
from .passes_inside import MODELS, gradients, recorded

pytestmark = pytest.mark.cpu  # where both threads can be watched

WHERE = {
    "few": {"behind": 1000},
    "one less": {"behind": 1},
    "as many": {"ahead": 1},
    "some more": {"ahead": 7},  # a number that a forward reaches in its middle
    "even more": {"ahead": 15},
    "more": {"ahead": 1000},
}
"""How many nodes the other thread has made before, compared with this thread."""


@cache
def recorded_here(name: str) -> gradlib.Recording:
    return recorded(name)


@cache
def verified_here(name: str) -> gradlib.Verification:
    return recorded_here(name).verify()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_recorded_is_what_a_pass_in_this_thread_gives(
    name: str, where: str
) -> None:
    here = recorded_here(name)
    with passes_elsewhere(**WHERE[where]):
        there = recorded(name)
    torch.testing.assert_close(gradients(there), gradients(here))
    happened = [it._block.happened for it in (here, there)]
    assert happened[0] == happened[1]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_computed_again_is_the_same(name: str, where: str) -> None:
    here = verified_here(name)
    with passes_elsewhere(**WHERE[where]):
        there = recorded(name).verify()
    assert str(there) == str(here)
    assert name == "Learner" or here.ok  # its modules hold other weights by then

"""Boxes of a drawn graph stand in layers, above what leads to them."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlib.layered import GAP, LANE, Arrow, Key, Layout, laid_out


def laid(arrows: str, *zones: str, width: float = 1.0) -> Layout:
    """Lay out a graph written as ``"ab bc"``, its boxes by zone as ``"ab", "c"``."""
    widths: dict[Key, float] = dict.fromkeys("".join(zones), width)
    return laid_out([*zones], widths, [(a, b) for a, b in arrows.split()])


def test_a_chain_stands_upright() -> None:
    layout = laid("ab bc", "abc")
    assert [layout.layer[key] for key in "abc"] == [0, 1, 2]
    assert [layout.middle[key] for key in "abc"] == pytest.approx([0, 0, 0])


def test_a_box_is_above_all_that_leads_to_it() -> None:
    layout = laid("ab bc ac cd ad", "abcd")
    assert [layout.layer[key] for key in "abcd"] == [0, 1, 2, 3]


def test_each_zone_has_layers_of_its_own_and_one_at_least() -> None:
    layout = laid("ab bx", "ab", "", "x", "y")
    assert layout.first == [0, 2, 3, 4]
    assert [layout.layer[key] for key in "abxy"] == [0, 1, 3, 4]


def test_an_arrow_leads_through_every_layer_it_passes() -> None:
    layout = laid("ab bc cd ad", "abcd")
    start, *between, end = layout.lines[3]
    assert (start, end) == ("a", "d")
    assert [layout.layer[key] for key in between] == [1, 2]
    # Beside the box there, as far as that takes.
    assert abs(layout.middle[between[0]] - layout.middle["b"]) >= 0.5 + GAP + LANE / 2


def test_boxes_above_the_same_one_stand_in_the_order_of_its_arrows() -> None:
    layout = laid("ac ad ab", "abcd")
    assert layout.middle["c"] < layout.middle["d"] < layout.middle["b"]
    assert layout.middle["d"] == pytest.approx(0, abs=0.01)
    assert layout.middle["b"] - layout.middle["d"] == pytest.approx(1 + GAP)


def test_boxes_without_room_move_and_those_with_room_do_not() -> None:
    widths: dict[Key, float] = {"x": 6.0, "a": 6.0, "z": 1.0, "b": 1.0, "c": 1.0}
    arrows: list[Arrow] = [("x", "z"), ("a", "b"), ("a", "c")]
    middle = laid_out(["xa", "zbc"], widths, arrows).middle
    assert middle["z"] == pytest.approx(middle["x"])
    assert middle["b"] - middle["a"] == pytest.approx(-(1 + GAP) / 2, abs=0.01)
    assert middle["c"] - middle["a"] == pytest.approx((1 + GAP) / 2, abs=0.01)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20),
    st.lists(st.floats(0.1, 3), min_size=10, max_size=10),
)
def test_none_is_over_another(pairs: list[tuple[int, int]], sizes: list[float]) -> None:
    arrows: list[Arrow] = [(a, b) for a, b in dict.fromkeys(pairs) if a < b]
    widths: dict[Key, float] = dict(enumerate(sizes))
    layout = laid_out([[*range(5)], [*range(5, 10)]], widths, arrows)
    for a, b in combinations(layout.layer, 2):
        if layout.layer[a] == layout.layer[b]:
            needed = (widths.get(a, LANE) + widths.get(b, LANE)) / 2 + GAP
            assert abs(layout.middle[a] - layout.middle[b]) >= needed - 1e-9
    for line in layout.lines:
        steps = pairwise(layout.layer[key] for key in line)
        assert all(upper == lower + 1 for lower, upper in steps)

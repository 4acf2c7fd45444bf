import gc
from collections import Counter

import pytest
import torch

from benchmarks import timing

CPU = torch.device("cpu")


def test_the_contenders_take_turns_in_every_round() -> None:
    order: list[str] = []

    def turn(name: str, every: int) -> timing.Turn:
        def sample() -> float:
            order.append(name)
            return float(len(order))

        return timing.Turn(sample, every)

    turns = {"a": turn("a", 1), "b": turn("b", 1), "slow": turn("slow", 3)}
    samples = timing.interleave(turns, rounds=4, label="")
    assert Counter(order) == {"a": 4, "b": 4, "slow": 2}
    assert list(samples["slow"]) == [0, 3]
    rounds = [order[:3], order[3:5], order[5:7], order[7:]]
    assert [sorted(names) for names in rounds] == [
        ["a", "b", "slow"],
        ["a", "b"],
        ["a", "b"],
        ["a", "b", "slow"],
    ]
    assert samples["a"][1] == order[:5].index("a", 3) + 1


def test_the_collector_stays_on_and_freezes_nothing_for_good() -> None:
    seen: list[tuple[bool, int]] = []

    def sample() -> float:
        seen.append((gc.isenabled(), gc.get_freeze_count()))
        return 1.0

    frozen_before = gc.get_freeze_count()
    timing.interleave({"a": timing.Turn(sample)}, rounds=2, label="")
    assert bool(gc.get_freeze_count()) == bool(frozen_before)
    gc.unfreeze()
    timing.interleave({"a": timing.Turn(sample)}, rounds=2, label="")
    assert all(enabled and frozen > 0 for enabled, frozen in seen)
    assert gc.get_freeze_count() == 0
    if frozen_before:
        gc.freeze()


def test_a_ratio_is_taken_round_by_round() -> None:
    # The machine gets ten times slower; the contender is twice as slow throughout.
    base = {0: 1.0, 1: 1.0, 2: 1.0, 3: 10.0}
    samples = {0: 2.0, 3: 20.0}
    assert timing.ratio(samples, base) == {
        "median": 2.0,
        "lower_quartile": 2.0,
        "upper_quartile": 2.0,
        "least": 2.0,
    }


def test_spread() -> None:
    found = timing.spread(dict(enumerate([5.0, 1.0, 2.0, 3.0, 4.0])))
    assert found == {
        "median": 3.0,
        "lower_quartile": 2.0,
        "upper_quartile": 4.0,
        "least": 1.0,
    }


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_milliseconds_runs_the_call_once(device: str) -> None:
    calls: list[int] = []
    assert timing.milliseconds(lambda: calls.append(0), torch.device(device)) >= 0
    assert len(calls) == 1


def test_the_machine_is_described() -> None:
    found = timing.machine(CPU)
    assert found["cpu"]
    assert found["cores"]

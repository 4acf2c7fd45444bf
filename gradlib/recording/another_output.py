"""Where a replayed call returned something else than was recorded, and why."""

import pickle
import random
from collections.abc import Iterator

import numpy

from gradlib.random_state import generators_of_devices
from gradlib.recording.difference import Difference, Tolerance, difference_at
from gradlib.recording.gaps import gaps
from gradlib.recording.replay import Replayed, replay
from gradlib.recording.trace import CallTrace

ANOTHER_OUTPUT = (
    "it may use what was not kept as it was then, such as a global, an object of "
    "another class, a hook, a setting or what parametrize.cached() held"
)
NO_SUCH_OUTPUT = (
    f"the recorded gradient fits no output of it this time: {ANOTHER_OUTPUT}"
)
DRAWN_ELSEWHERE = (
    "it draws from Python's random or NumPy, whose states are not kept as torch's are"
)
SEEDED = "it gives torch's generators another seed each time, as torch.seed() does"


def other_outputs(
    trace: CallTrace, number: int, replayed: Replayed, tolerance: Tolerance
) -> Iterator[Difference]:
    """Yield where a replay returned something else than was recorded."""
    if trace.output is None or "output" not in trace.block.fields:
        return
    found = gaps(trace.output.build(), replayed.output.build())
    apart = [(path, it) for path, it in found if not tolerance.allows(it)]
    why = _why_another(trace, number) if apart else ""
    for path, it in apart:
        reason = ": ".join(filter(None, (it.reason, why)))
        yield difference_at(trace, "output" + path, it.error, reason)


def _why_another(trace: CallTrace, number: int) -> str:
    """Say why a forward may have returned something else than was recorded."""
    states: list[object] = []
    seeds: list[list[int]] = []

    def look() -> None:
        numpys = numpy.random.get_state(legacy=False)
        states.append((random.getstate(), pickle.dumps(numpys)))
        seeds.append([it.initial_seed() for it in generators_of_devices()])

    replay(trace, number, begin=look, turn=look)
    if states[0] != states[1]:
        return DRAWN_ELSEWHERE
    if seeds[0] != seeds[1]:  # it gives a seed, but perhaps the same each time
        replay(trace, number, turn=look)
    return SEEDED if seeds[1] != seeds[-1] else ANOTHER_OUTPUT

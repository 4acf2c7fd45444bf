"""How many rows or columns of a Jacobian one pass computes."""

import math
import sys
from typing import NamedTuple

import torch

from gradlib.errors import OutOfBytesError
from gradlib.jacobian.plan import BATCHED
from gradlib.wording import in_bytes

FAST = 2**25
"""How many bytes a batched pass holds at most on a CPU: more is slower."""

FILLING = 2**31
"""The same on other devices: an H100 gains by every row."""

SINGLE = 2 * FAST
"""How many bytes it may hold on a CPU if it takes all rows.

With torch 2.13 on a core of an Intel Xeon, two passes of half the rows took an eighth
more time, on average over normalizations, sums and gated layers of 16 to 200 rows: they
are copied into the result.
"""

CONVOLVED = 3 * 2**20
"""How many bytes of gradients, counted once, a pass through convolutions has on a CPU.

With torch 2.13 on a core of an Intel Xeon that has 2 MiB of cache, passes of 2 to 3 MiB
were the fastest, and took half to nine tenths of the time of a loop.
"""

WHOLE = 2**24
"""With `create_graph`, how many bytes per thread all rows may take in a single pass.

With two threads of an Intel Xeon, 32 MiB took a tenth less time than row by row, and
64 MiB a tenth more.
"""

PAIR = 2
"""With at most this many rows, a CPU computes one at a time.

With torch 2.13 on a core of an Intel Xeon, 2 rows of small nets, of a layer of a
transformer and of a convolution took 3 to 11 per cent longer in one pass.
"""


class Passes(NamedTuple):
    """What backward passes through a graph are like.

    Attributes:
        rows: How many rows there are.
        each: How many bytes of gradients a pass has for each row or column.
        on_cpu: Whether they run on a CPU.
        convolution: Whether they go through convolutions.
        convolved: How many bytes of gradients a pass of rows through convolutions has
            at most on a CPU.
        singly: The node that torch gets wrong for several rows at once, or ``""``.
    """

    rows: int
    each: int
    on_cpu: bool
    convolution: bool
    convolved: int
    singly: str


def chunk_of(
    mode: str, count: int | str, asked: int | str, passes: Passes, *, room: int
) -> int:
    """Return how many rows or columns a pass computes.

    Args:
        mode: The mode.
        count: How many rows or columns it computes in all, or why it is out.
        asked: How many the caller wants in a pass, or ``"auto"``.
        passes: What backward passes are like.
        room: How many bytes a pass may hold.

    Raises:
        OutOfBytesError: `asked` does not fit.
    """
    if mode == "loop" or passes.singly:
        return 1
    most = count if isinstance(count, int) else sys.maxsize
    each, on_cpu = passes.each, passes.on_cpu
    if isinstance(asked, int):
        chunk = max(1, min(asked, most))
        _require_room(chunk, room, each)
        return chunk
    if mode == "reverse" and most <= PAIR and on_cpu:
        return 1
    fitting = at_once(
        room,
        BATCHED * each,
        each,
        convolution=passes.convolution,
        on_cpu=on_cpu,
        convolved=passes.convolved if mode == "reverse" else CONVOLVED,
    )
    if (
        mode == "reverse"
        and on_cpu
        and not passes.convolution
        and BATCHED * each * most <= min(room, SINGLE)
    ):
        fitting = most
    chunk = max(1, min(fitting, most))
    if most in (0, sys.maxsize):
        return chunk
    return math.ceil(most / math.ceil(most / chunk))  # all passes alike


def at_once(
    room: int,
    held: int,
    each: int,
    *,
    convolution: bool,
    on_cpu: bool,
    convolved: int = CONVOLVED,
) -> int:
    """Return how many vectors a pass takes: as many as fit, while more is faster.

    Args:
        room: How many bytes it may hold.
        held: How many bytes it holds for each vector.
        each: How many bytes of gradients it has for each vector.
        convolution: Whether it goes through convolutions.
        on_cpu: Whether it runs on a CPU.
        convolved: How many bytes of gradients it has at most on a CPU, if it goes
            through convolutions.
    """
    fast = max(FAST, BATCHED * convolved) if on_cpu else FILLING
    many = min(room, fast) // max(1, held)
    if convolution and on_cpu:
        many = min(many, convolved // max(1, each))
    return many


def convolved_at_once(whole: int) -> int:
    """Return `convolved` for passes that a loss goes back through.

    Args:
        whole: How many bytes of gradients all rows have together.
    """
    return whole if whole <= WHOLE * torch.get_num_threads() else CONVOLVED


def _require_room(chunk: int, room: int, each: int) -> None:
    needs = BATCHED * each * chunk if chunk > 1 else each
    if room < needs:
        raise OutOfBytesError(
            f"A pass with chunk_size={chunk} takes {in_bytes(needs)}, and of "
            f"max_bytes the Jacobian leaves {in_bytes(room)}. Pass a smaller "
            'chunk_size, or "auto".'
        )

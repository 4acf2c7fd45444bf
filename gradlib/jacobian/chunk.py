"""How many rows or columns of a Jacobian one pass is to take."""

import math
import sys
from typing import NamedTuple

import torch

from gradlib.errors import OutOfBytesError
from gradlib.jacobian.plan import BATCHED, in_words

FAST = 2**25
"""How many bytes of gradients a batched pass takes at most on a CPU: more is slower."""

FILLING = 2**31
"""The same on other devices, which want much at once: an H100 gains by every row."""

CONVOLVED = 3 * 2**20
"""The same where there are convolutions, before it is counted how often it is held.

With torch 2.13 on a core of an Intel Xeon that has 2 MiB of cache, passes of 2 to 3 MiB
were the fastest, and took half to nine tenths of the time of a loop.
"""

WHOLE = 2**24
"""With `create_graph`, how many bytes all rows together may take, for each thread.

With two threads of an Intel Xeon, 32 MiB took a tenth less time than row by row, and
64 MiB a tenth more.
"""

PAIR = 2
"""Up to how many rows a CPU takes one after the other: there is little to share.

With torch 2.13 on a core of an Intel Xeon, 2 rows of small nets, of a layer of a
transformer and of a convolution took 3 to 11 per cent longer in one pass.
"""


class Passes(NamedTuple):
    """What backward passes through a graph are like.

    Attributes:
        rows: How many rows there are to ask for.
        each: How many bytes of gradients a pass has for each row or column.
        on_cpu: Whether they run there.
        convolution: Whether they go through convolutions.
        convolved: How many bytes of gradients a pass of rows has then, at most, on a
            CPU.
        singly: What torch goes wrong for where several rows go at once, or ``""``.
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
    """Return how many rows or columns a pass is to take.

    Args:
        mode: The way.
        count: How many it asks for in all.
        asked: How many the caller wants in a pass, or ``"auto"``.
        passes: What these are like.
        room: How many bytes a pass may take.

    Raises:
        OutOfBytesError: What was asked for does not fit.
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
    """Return how many vectors a pass is to take: as many as fit, while more is faster.

    Args:
        room: How many bytes it may take.
        held: How many it holds for each vector.
        each: How many of them are gradients, counted once.
        convolution: Whether it goes through convolutions.
        on_cpu: Whether it runs there.
        convolved: How many bytes of gradients it takes then, at most, on a CPU.
    """
    fast = max(FAST, BATCHED * convolved) if on_cpu else FILLING
    many = min(room, fast) // max(1, held)
    if convolution and on_cpu:
        many = min(many, convolved // max(1, each))
    return many


def convolved_at_once(whole: int) -> int:
    """Return `convolved` for passes that somebody goes back through.

    Args:
        whole: How many all rows take together.
    """
    return whole if whole <= WHOLE * torch.get_num_threads() else CONVOLVED


def _require_room(chunk: int, room: int, each: int) -> None:
    needs = BATCHED * each * chunk if chunk > 1 else each
    if room < needs:
        raise OutOfBytesError(
            f"A pass with chunk_size={chunk} takes {in_words(needs)}, and of "
            f"max_bytes the Jacobian leaves {in_words(room)}. Pass a smaller "
            'chunk_size, or "auto".'
        )

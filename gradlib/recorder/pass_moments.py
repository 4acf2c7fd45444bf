"""When each backward pass of a block runs: in which call, and until which moment."""

from collections.abc import Iterator

from gradlib.private.passes import pass_is_compiled, when_pass_ends
from gradlib.recorder.attached import Attached
from gradlib.recorder.threads import Threads
from gradlib.recording.trace import Block
from gradlib.recording.world import autocast_now


def note_when(
    block: Block,
    threads: Threads,
    moments: Iterator[int],
    attached: Attached,
    number: int,
) -> None:
    """Write down in which call and autocast a pass runs, and when it ends.

    Args:
        block: Where it is written down.
        threads: The threads that call modules.
        moments: Gives the moments of the block.
        attached: The hooks of the block, which tells those of others.
        number: Our number of the pass.
    """
    block.hooks_at_pass[number] = attached.set_by_others()
    happened, unfinished = block.happened, block.unfinished
    stack = threads.now.stack
    if not stack and len(others := threads.stacks_elsewhere()) == 1:
        (stack,) = others
    where = stack[-1].call.moment if stack else -1

    def ends() -> None:
        happened[number] = where, next(moments)
        unfinished.discard(number)

    ends()  # for a pass that raises, and so never calls it
    if autocast := autocast_now():
        block.autocast[number] = autocast
    if not pass_is_compiled():
        unfinished.add(number)
        when_pass_ends(ends)

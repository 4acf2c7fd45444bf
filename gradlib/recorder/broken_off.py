"""Calls that ended without their hook, as on KeyboardInterrupt."""

from types import FrameType

from gradlib.private.hooks import forward_hooks
from gradlib.recorder.frame import Frame
from gradlib.recorder.threads import Running
from gradlib.recording import notes


def drop_broken_off(now: Running, caller: FrameType | None) -> None:
    """Forget the calls whose Python frame no longer runs.

    They are looked for when their module is called again, or when the block ends.

    Args:
        now: What runs in this thread.
        caller: The Python frame that runs now.
    """
    stack = now.stack
    running: set[FrameType | None] = set()
    while caller is not None:
        running.add(caller)
        caller = caller.f_back
    while stack and stack[-1].python not in running:
        note_no_end(stack.pop())
    if not stack:
        now.end_forward()


def note_no_end(frame: Frame) -> None:
    """Note on a call that does not run any more why its end was not seen.

    Its hook may also be gone, if its forward has cleared those of its module.
    """
    is_hooked = frame.hooked.after_id in forward_hooks(frame.module)
    frame.call.no_pass_because = notes.BROKEN_OFF if is_hooked else notes.HOOK_TAKEN

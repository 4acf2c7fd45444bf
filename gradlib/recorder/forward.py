"""What is remembered of one forward of a block."""

import threading
from dataclasses import dataclass, field

from gradlib.recorder.ends import NumberedEnd
from gradlib.recording.flow import Flow, Grads


@dataclass(slots=True)
class Forward:
    """What is remembered of a forward when its graph is let go.

    Attributes:
        since: autograd's sequence number when it began.
        until: autograd's sequence number when its last call returned.
        thread: The number of the thread that ran it, and counted these.
        numbers: The sequence numbers of the nodes that were walked.
        hooked: Those of other nodes that the calls made, hooked when a pass met them.
        calls: For each call its first sequence number, the first after it, where the
            gradients of its inputs and parameters are gathered, and its flow.
    """

    since: int
    until: int = 0
    thread: int = field(default_factory=threading.get_ident)
    numbers: set[int] = field(default_factory=set[int])
    hooked: set[int] = field(default_factory=set[int])
    calls: list[tuple[int, int, dict[NumberedEnd, Grads], Flow]] = field(
        default_factory=list[tuple[int, int, dict[NumberedEnd, Grads], Flow]]
    )

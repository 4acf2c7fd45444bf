"""Small transformers of torch's own layers: all rows from one pass of replicas.

Each sample is repeated once for each row, and each replica gives one row: these layers
treat every sample alike, however many there are. For a small net, reading the graph of
a forward pass takes longer. A GPU that has met the net before replays a CUDA graph
instead.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradlib.jacobian import planning
from gradlib.jacobian.agreement import require_rows
from gradlib.jacobian.call import Call, asks_no_more
from gradlib.jacobian.fast.kernels import DTYPES
from gradlib.jacobian.fast.replayed import MOST, Replays, may_replay_on, replays_of
from gradlib.jacobian.fast.structure.structured import find_structured
from gradlib.jacobian.fast.transformers import Read, has_transformer, read
from gradlib.jacobian.fresh import keep_what_is_freed
from gradlib.jacobian.graph_of_tensors import of_tensors
from gradlib.jacobian.look import Look
from gradlib.jacobian.memory import room_on
from gradlib.jacobian.plan import BATCHED, JacobianPlan
from gradlib.private.modes import always_recorded, graph_is_captured

SMALL = 2**16
"""How many entries the widest layer has at most, all replicas together; with several
threads, twice as many.

Larger nets are faster by their graph, where only the backward pass is repeated for each
row. With torch 2.13 on a core of an Intel Xeon both took as long at this size or a
little above it where layers are four times as wide inside, a little below it where they
are twice as wide; at twice this size replicas took nearly half as long again. On two
cores it was so at twice these sizes.
"""

SMALL_ON_GPU = 2**25
"""The same on other devices, where few entries take about as long as many."""

SAVED = 20
"""A layer saves at most this many times the entries of its widest tensor."""

HELD = 7
"""A CUDA graph keeps this many times the result, all between included."""


class Replicas(NamedTuple):
    """A small transformer and its input.

    Attributes:
        x: The input, ``(batch, tokens, features)``.
        read: What was read of the net.
        replays: Its replays on a GPU; ``None`` on a CPU.
    """

    x: Tensor
    read: Read
    replays: Replays | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the Jacobian, ``(batch, *out, tokens, features)``."""
        return (self.x.shape[0], *self.read.size, *self.x.shape[1:])

    @property
    def may_hide(self) -> tuple[Tensor, ...]:
        """No tensors: infinity that leaves this result finite leaves rows so too."""
        return ()

    @always_recorded
    def jacobian(self) -> Tensor:
        """Return the Jacobian, ``(batch, *out, tokens, features)``."""
        result = None if self.replays is None else self._replayed(self.replays)
        return self._by_replicas() if result is None else result

    def _replayed(self, replays: Replays) -> Tensor | None:
        """Return the Jacobian by a replay; ``None`` where there is none yet."""
        x, read = self.x, self.read
        needs = HELD * x.numel() * read.rows * x.element_size()
        return replays.result(
            self._by_structure, x, read.tensors, needs, tuple(read.options)
        )

    def _by_structure(self, x: Tensor) -> Tensor:
        """Return the Jacobian at x from the structure of its graph.

        Raises:
            RuntimeError: There is none, or its result disagrees with a VJP.
        """
        point = x.detach().requires_grad_()
        y = point
        for step in self.read.steps:
            y = step(y)
        graph, _ = of_tensors(y, point)
        structured = find_structured(
            graph, planning.make(graph, "reverse", "auto", 2 * MOST)
        )
        if structured is None:
            raise RuntimeError("it would not take less")
        blocks = structured.blocks(graph)
        if not graph_is_captured():
            require_rows(graph, blocks, Look.at_all(graph))
        return blocks[0, 0]

    def _by_replicas(self) -> Tensor:
        """Return the Jacobian by one VJP, in which each replica gives one row."""
        keep_what_is_freed()
        batch, *shape = self.x.shape
        rows = self.read.rows
        replicas = (
            self.x.detach().unsqueeze(1).expand(batch, rows, *shape).flatten(0, 1)
        )
        if replicas.is_inference():  # of a single row nothing was copied
            replicas = replicas.clone()
        y = replicas.requires_grad_()
        for step in self.read.steps:
            y = step(y)
        ones = torch.eye(rows, dtype=y.dtype, device=y.device)
        asked = ones.expand(batch, rows, rows).reshape(y.shape)
        (jacobian,) = torch.autograd.grad(y, replicas, asked)
        return jacobian.reshape(self.shape)

    def planned(self, plan: JacobianPlan) -> JacobianPlan:
        """Return the plan that takes this way."""
        return plan.together(
            "replicas",
            "it is small, and its layers treat each sample alike",
            self.read.rows,
            0,
            # When the backward pass begins, all layers have saved tensors.
            plan.pass_bytes * max(BATCHED, len(self.read.steps) + 1) // BATCHED,
        )


def find_replicas(call: Call) -> Replicas | None:
    """Return the small transformer that an open call is of, or ``None``."""
    net: Any = call.fn
    if len(call.inputs) != 1 or not has_transformer(net):
        return None
    x = call.inputs[0]
    if not asks_no_more(call) or type(x) is not Tensor:
        return None
    if x.dim() != 3 or x.is_nested or x.dtype not in DTYPES:
        return None
    if not 0 < x.numel() <= _most(x):
        return None
    what = read(net, x)
    if what is None:
        return None
    entries = x.shape[0] * what.rows * what.widest
    if not 0 < entries <= _most(x):
        return None
    saved = SAVED * len(what.steps) * entries * x.element_size()
    if x.device.type != "cpu" and saved > room_on(x.device):
        return None
    return Replicas(x, what, replays_of(net) if may_replay_on(x.device) else None)


def _most(x: Tensor) -> int:
    if x.device.type != "cpu":
        return SMALL_ON_GPU
    return SMALL if torch.get_num_threads() == 1 else 2 * SMALL

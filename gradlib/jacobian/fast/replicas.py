"""Small transformers of torch's own layers: each sample once for each row.

To read what a forward pass has left takes longer than such a pass. These layers treat
each sample alike, however many there are: so all rows come from one pass of as many
replicas of the batch. Where a GPU has met one before, what was read can be kept.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradlib.jacobian import planning
from gradlib.jacobian.arguments import Call, asks_no_more, is_open
from gradlib.jacobian.fast.kernels import DTYPES
from gradlib.jacobian.fast.replayed import MOST, Replays, may_replay_on, replays_of
from gradlib.jacobian.fast.structure.structured import find_structured
from gradlib.jacobian.fast.transformers import Read, has_transformer, read
from gradlib.jacobian.fresh import keep_what_is_freed
from gradlib.jacobian.graph import of_tensors
from gradlib.jacobian.look import Look, require_rows
from gradlib.jacobian.memory import room_on
from gradlib.jacobian.plan import BATCHED, Plan
from gradlib.private.modes import graph_is_captured

SMALL = 2**17
"""How many entries go through the widest layers at most, all replicas together; with
several threads, half as many more.

Larger nets are faster by their graph, where only the way back is taken for each row.
With torch 2.13 on one core and on two of an AMD EPYC the two were equal at about so
many, each faster than the other by up to a fifth.
"""

SMALL_ON_GPU = 2**25
"""The same on other devices, which take about as long for few as for many."""

SAVED = 20
"""How many times as many entries as its widest tensor has a layer saves at most."""

HELD = 7
"""How many times the result a graph of it keeps, all that is between included."""


class Replicas(NamedTuple):
    """A small transformer, and what it is given.

    Attributes:
        x: ``(batch, tokens, features)``.
        read: What was read of it.
        replays: Replays it on a GPU, where it may be met again.
    """

    x: Tensor
    read: Read
    replays: Replays | None

    @property
    def may_hide(self) -> tuple[Tensor, ...]:
        """What may be infinite where the Jacobian is not: rows would hide the same."""
        return ()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def jacobian(self) -> Tensor:
        """Return the Jacobian, ``(batch, *out, tokens, features)``."""
        found = None if self.replays is None else self._replayed(self.replays)
        return self._by_replicas() if found is None else found

    def _replayed(self, replays: Replays) -> Tensor | None:
        """Return what a GPU launches at once; ``None`` if it does not."""
        x, read = self.x, self.read
        needs = HELD * x.numel() * read.rows * x.element_size()
        return replays.result(
            self._by_structure, x, read.tensors, needs, tuple(read.options)
        )

    def _by_structure(self, x: Tensor) -> Tensor:
        """Return the Jacobian at x from the structure of its graph.

        Raises:
            RuntimeError: There is none, or it gives something else.
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
        """Return the Jacobian from one pass, back through as many samples as rows."""
        keep_what_is_freed()
        batch, *shape = self.x.shape
        rows = self.read.rows
        replicas = (
            self.x.detach().unsqueeze(1).expand(batch, rows, *shape).flatten(0, 1)
        )
        if replicas.is_inference():  # of one row nothing was copied
            replicas = replicas.clone()
        y = replicas.requires_grad_()
        for step in self.read.steps:
            y = step(y)
        ones = torch.eye(rows, dtype=y.dtype, device=y.device)
        asked = ones.expand(batch, rows, rows).reshape(y.shape)
        (jacobian,) = torch.autograd.grad(y, replicas, asked)
        return jacobian.reshape(batch, *self.read.size, *shape)

    def planned(self, plan: Plan) -> Plan:
        """Return a plan to go back once, for all rows."""
        return plan.together(
            "replicas",
            "it is small, and its layers treat each sample alike",
            self.read.rows,
            0,
            # All layers have saved something when the way back begins.
            plan.pass_bytes * max(BATCHED, len(self.read.steps) + 1) // BATCHED,
        )


def find_replicas(call: Call) -> Replicas | None:
    """Return the small transformer that a call is, or ``None``.

    Args:
        call: The call.
    """
    net: Any = call.fn
    if len(call.inputs) != 1 or not has_transformer(net):
        return None
    x = call.inputs[0]
    if not (is_open(call) and asks_no_more(call)) or type(x) is not Tensor:
        return None
    if x.dim() != 3 or x.is_nested or x.dtype not in DTYPES:
        return None
    if not 0 < x.numel() <= _most(x):
        return None
    found = read(net, x)
    if found is None:
        return None
    entries = x.shape[0] * found.rows * found.widest
    if not 0 < entries <= _most(x):
        return None
    saved = SAVED * len(found.steps) * entries * x.element_size()
    if x.device.type != "cpu" and saved > room_on(x.device):
        return None
    return Replicas(x, found, replays_of(net) if may_replay_on(x.device) else None)


def _most(x: Tensor) -> int:
    if x.device.type != "cpu":
        return SMALL_ON_GPU
    return SMALL if torch.get_num_threads() == 1 else SMALL * 3 // 2

"""Finds the chain of known layers that a call is, and computes its Jacobian."""

import math
from itertools import chain as joined
from typing import NamedTuple, cast

from torch import Tensor, nn

from gradlib.jacobian.call import Call, asks_no_more
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.evaluate import evaluate
from gradlib.jacobian.fast.chains.plain import PlainNet, plain_net, small_net_of
from gradlib.jacobian.fast.chains.recalled import chain_of
from gradlib.jacobian.fast.chains.result import bytes_of_parts, has_room, planned
from gradlib.jacobian.fast.replayed import Replays, may_replay_on, replays_of
from gradlib.jacobian.plan import JacobianPlan


class ChainOfCall(NamedTuple):
    """A call that is a chain of known layers.

    Attributes:
        chain: The chain.
        out: A tensor to write the Jacobian to; ``None`` for new memory.
        create_graph: Whether gradients flow through the Jacobian.
        replays: Its replays on a GPU, where memory may be kept for them.
    """

    chain: Chain
    out: Tensor | None
    create_graph: bool
    replays: Replays | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the Jacobian, ``(batch, *out, *in)``."""
        return self.chain.shape

    @property
    def may_hide(self) -> list[Tensor]:
        """Tensors that may be infinite where the Jacobian is not, by a zero slope."""
        return self.chain.tensors

    def jacobian(self) -> Tensor:
        """Return the Jacobian."""
        chain, out, create_graph, replays = self
        result = None if replays is None else self._replayed(replays)
        if result is None:
            return evaluate(chain, out, create_graph=create_graph)
        return result if out is None else out.copy_(result)

    def _replayed(self, replays: Replays) -> Tensor | None:
        """Return the Jacobian by a replay; ``None`` where there is none yet."""
        chain = self.chain
        x, *others = chain.tensors
        result = math.prod(chain.shape) * x.element_size()
        return replays.result(
            lambda x: evaluate(chain._replace(x=x), None, create_graph=False),
            x,
            others,
            bytes_of_parts(chain) + result,
            # The elementwise layers; all else is fixed for the owner of `replays`.
            tuple([it.pointwise for it in joined.from_iterable(chain.bends)]),
        )

    def planned(self, plan: JacobianPlan) -> JacobianPlan:
        """Return the plan that multiplies the Jacobians of its layers."""
        return planned(plan, self.chain)


def find_plain(call: Call) -> PlainNet | ChainOfCall | None:
    """Return the chain that an open call of a plain net is; no code is read for it."""
    net = plain_net(call.fn, call.inputs)
    if net is None:
        return None
    may_replay = may_replay_on(net.x.device)
    # A replay is faster, even for a small net.
    if net.form.is_small and asks_no_more(call) and not may_replay:
        return net
    chain = net.chain
    if may_replay:
        chain = chain._replace(replays=replays_of(cast(nn.Module, call.fn)))
    return _of_call(call, chain)


def find_chain(call: Call) -> PlainNet | ChainOfCall | None:
    """Return the chain that an open call is, or ``None``.

    It is ``None`` for a wrong call too, so that the general way says what is wrong.
    """
    chain = chain_of(call.fn, call.inputs)
    if chain is None:
        return None
    if asks_no_more(call) and not may_replay_on(chain.x.device):
        small = small_net_of(chain)
        if small is not None:
            return small
    return _of_call(call, chain)


def _of_call(call: Call, chain: Chain) -> ChainOfCall | None:
    """Return a call's chain, if its arguments allow that and there is room."""
    out, create_graph = call.out, call.create_graph
    if not has_room(chain, out, call.max_bytes):
        return None
    if create_graph and (out is not None or chain.x.is_inference()):
        return None
    is_limited = create_graph or call.max_bytes is not None
    may_keep = not is_limited and may_replay_on(chain.x.device)
    replays = chain.replays if may_keep else None
    return ChainOfCall(chain, out, create_graph, replays)

"""Is a call a chain of layers, and what is its Jacobian then?"""

from typing import NamedTuple

from torch import Tensor

from gradlib.jacobian.arguments import Call, asks_no_more, is_open
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.evaluate import evaluate
from gradlib.jacobian.fast.chains.planned import planned
from gradlib.jacobian.fast.chains.recalled import chain_of
from gradlib.jacobian.fast.chains.result import has_room
from gradlib.jacobian.fast.chains.small import SmallNet, small_net, small_net_of
from gradlib.jacobian.plan import Plan


class ChainOfCall(NamedTuple):
    """A call that is a chain of known layers.

    Attributes:
        chain: The chain.
        out: Where the Jacobian is to be written; ``None`` for memory of its own.
        create_graph: Whether gradients flow through it.
    """

    chain: Chain
    out: Tensor | None
    create_graph: bool

    @property
    def may_hide(self) -> list[Tensor]:
        """What may be infinite where the Jacobian is not, as a slope is zero."""
        return self.chain.factors

    def jacobian(self) -> Tensor:
        """Return the Jacobian."""
        chain, out, create_graph = self
        return evaluate(chain, out, create_graph=create_graph)

    def planned(self, plan: Plan) -> Plan:
        """Return a plan to multiply the Jacobians of its layers."""
        return planned(plan, self.chain)


def find_small(call: Call) -> SmallNet | None:
    """Return the small net that a call is as it stands, or ``None``.

    Args:
        call: The call.
    """
    if is_open(call) and asks_no_more(call):
        return small_net(call.fn, call.inputs)
    return None


def find_chain(call: Call) -> ChainOfCall | SmallNet | None:
    """Return the chain that a call is, or ``None``.

    A call that is wrong is none, so that the general way may say what is wrong.

    Args:
        call: The call.
    """
    if not is_open(call):
        return None
    out, create_graph = call.out, call.create_graph
    chain = chain_of(call.fn, call.inputs)
    if chain is None or not has_room(chain, out, call.max_bytes):
        return None
    if create_graph and (out is not None or chain.x.is_inference()):
        return None
    small = small_net_of(chain) if asks_no_more(call) else None
    return small or ChainOfCall(chain, out, create_graph)

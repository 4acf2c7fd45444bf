"""A chain, as a plan says it."""

from dataclasses import replace

from gradlib.jacobian.fast.chain import Chain
from gradlib.jacobian.fast.result import bytes_of_parts
from gradlib.jacobian.plan import Plan


def planned(plan: Plan, chain: Chain) -> Plan:
    """Return a plan to multiply a chain's layers, beside the ways there were.

    Args:
        plan: How it would be computed without this.
        chain: What is multiplied.
    """
    order = chain.order.text()
    return replace(
        plan,
        mode="chain",
        why="the Jacobian of each of its layers is known",
        counts=plan.counts | {"chain": f"products in the order {order}"},
        work=plan.work | {"chain": chain.multiply_adds},
        part_bytes=bytes_of_parts(chain),
        pass_bytes=0,
    )

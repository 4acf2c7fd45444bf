"""A chain, as a plan says it."""

from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.result import bytes_of_parts
from gradlib.jacobian.plan import Plan


def planned(plan: Plan, chain: Chain) -> Plan:
    """Return a plan to multiply a chain's layers.

    Args:
        plan: How it would be computed without this.
        chain: What is multiplied.
    """
    return plan.shortened(
        "chain",
        "the Jacobian of each of its layers is known",
        f"products in the order {chain.order.text()}",
        chain.multiply_adds,
        bytes_of_parts(chain),
    )

"""The plan of a chain."""

from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.result import bytes_of_parts
from gradlib.jacobian.plan import JacobianPlan


def planned(plan: JacobianPlan, chain: Chain) -> JacobianPlan:
    """Return the plan that multiplies the Jacobians of a chain's layers.

    Args:
        plan: How the Jacobian would be computed otherwise.
        chain: The chain.
    """
    return plan.shortened(
        "chain",
        "the Jacobian of each of its layers is known",
        f"products in the order {chain.order.text()}",
        chain.multiply_adds,
        bytes_of_parts(chain),
    )

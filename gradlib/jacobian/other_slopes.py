"""Nodes whose derivative by torch is not the slope of the output."""

from typing import Any

import torch

from gradlib.jacobian.graph import Graph
from gradlib.jacobian.nodes import computes_statistics, is_norm_of_a_backward_pass

# Implicit reparametrization, for samples of Gamma, Beta, Dirichlet, Chi2, StudentT.
_ON_AVERAGE = ("StandardGamma", "_Dirichlet")


def differs_from_slopes(graph: Graph) -> str:
    """Return why torch's derivative is not the output's slope, if that is known."""
    for name, node in zip(graph.drawing.names, graph.nodes, strict=True):
        if name.startswith(_ON_AVERAGE):
            return (
                f"{name} differentiates a random sample of the gamma family. It says "
                "how its distribution moves with the parameters, and no single sample "
                "does so. That is meant: pass check=False."
            )
        if getattr(node, "_saved_scale_grad_by_freq", False):
            return (
                f"{name} is of an embedding with scale_grad_by_freq=True: it divides "
                "the gradient of each row by how often all samples together look it "
                "up. Make the embedding without that."
            )
        if is_norm_of_a_backward_pass(node):
            return (
                f"fn takes derivatives itself, through {name}, and torch takes for "
                "constants what that has saved: further derivatives are wrong. Compute "
                "the norm by other operations."
            )
        if graph.batch == 1 and _is_perhaps_instance_norm(node):
            return (
                f"{name} may be an instance norm. Of a single sample torch gets its "
                "gradient wrong where one comes in another layout, as from a permute "
                "or in channels_last. Pass the sample twice, and take one of the two "
                "results; if this is said again, something else cuts a path."
            )
        if _is_of_thin_images(node):
            return (
                f"{name} is a batch norm of images that are one wide or one high. On a "
                "CPU torch gets its gradient wrong where one comes in another layout, "
                "as from a permute. Use BatchNorm1d, of x.flatten(2)."
            )
        if _forgets_padding(node):
            return (
                f"{name} is of avg_pool2d with padding, of images whose channels are "
                "last in memory. On a GPU torch's backward pass forgets the padding "
                "then. Have it get images in torch.contiguous_format: x.contiguous()."
            )
    return ""


def _is_perhaps_instance_norm(node: Any) -> bool:
    return node.name() == "NativeBatchNormBackward0" and computes_statistics(node)


def _is_of_thin_images(node: Any) -> bool:
    if node.name() != "NativeBatchNormBackward0":
        return False
    x = node._saved_input
    sides = x.shape[2:] if x.dim() == 4 else ()
    return x.device.type == "cpu" and 1 in sides and max(sides) > 1


def _forgets_padding(node: Any) -> bool:
    # pytorch#188344, as in torch 2.11; later kernels may be right.
    if node.name() != "AvgPool2DBackward0":
        return False
    x = node._saved_self
    last = x.is_contiguous(memory_format=torch.channels_last)
    return x.is_cuda and last and not x.is_contiguous() and any(node._saved_padding)

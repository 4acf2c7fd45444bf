import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")  # of the old hook
got = {}


def module_hook(module, grad_input, grad_output):
    got["module"] = grad_input + grad_output


def node_hook(grad_input, grad_output):
    got["node"] = grad_input + grad_output


def same(a, b):
    return a is b or torch.equal(a, b)


for module, shape in [
    (nn.Linear(3, 2), (4, 3)),
    (nn.Conv2d(3, 2, 3), (4, 3, 5, 5)),
    (nn.BatchNorm1d(3), (4, 3)),
    (nn.Sequential(nn.Linear(3, 2), nn.ReLU()), (4, 3)),
]:
    module.register_backward_hook(module_hook)
    y = module(torch.randn(shape, requires_grad=True))
    y.grad_fn.register_hook(node_hook)
    (y * y).sum().backward()
    alike = len(got["module"]) == len(got["node"])
    alike = alike and all(map(same, got["module"], got["node"]))
    print(type(module).__name__, "the same as on its last node:", alike)

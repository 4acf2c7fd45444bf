import warnings

import torch

warnings.simplefilter("ignore")  # of the old hook
got = []


def hook(*arguments):
    got[:] = arguments


def holds(entries, gradient):
    return any(
        g is not None and g.shape == gradient.shape and torch.equal(g, gradient)
        for g in entries
    )


for kind in "register_backward_hook", "register_full_backward_hook":
    layer = torch.nn.Linear(3, 2)
    if hasattr(layer, kind):
        getattr(layer, kind)(hook)
        x = torch.ones(4, 3, requires_grad=True)
        v = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]])
        layer(x).backward(v)
        module, grad_input, grad_output = got
        right = holds(grad_input, x.grad) and holds(grad_output, v)
        print(kind, "gets all three:", module is layer and right)

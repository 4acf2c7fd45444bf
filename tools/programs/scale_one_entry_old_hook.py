import torch


def halve(module, grad_input, grad_output):
    return (grad_input[0] / 2,)


layer = torch.nn.Linear(2, 1)
layer.register_backward_hook(halve)
x = torch.ones(1, 2, requires_grad=True)
layer(x).sum().backward()

import torch


def half(g):
    return None if g is None else g / 2


def halve(module, grad_input, grad_output):
    return tuple(map(half, grad_input))


layer = torch.nn.Linear(2, 1)
layer.weight.data.fill_(1)
layer.register_backward_hook(halve)
x = torch.ones(1, 2, requires_grad=True)
layer(x).sum().backward()
print("x", x.grad.tolist())
print("weight", layer.weight.grad.tolist())
print("bias", layer.bias.grad.tolist())

import torch


def clip(g):
    return None if g is None else g / g.norm().clamp(min=1)


def hook(module, grad_input, grad_output):
    return tuple(map(clip, grad_input))


layer = torch.nn.Linear(1, 1, bias=False)
layer.register_backward_hook(hook)
first, second = torch.tensor([[2.0]]), torch.tensor([[3.0]])
(layer(first) + layer(second)).sum().backward()
print("weight", layer.weight.grad.tolist())

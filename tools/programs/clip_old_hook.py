import torch


def clip(g):
    return None if g is None else g.clamp(-1, 1)


def hook(module, grad_input, grad_output):
    return tuple(map(clip, grad_input))


layer = torch.nn.Linear(2, 1)
layer.register_backward_hook(hook)
data = torch.tensor([[3.0, 0.5]])
layer(data).sum().backward()
print("weight", layer.weight.grad.tolist())
print("bias", layer.bias.grad.tolist())

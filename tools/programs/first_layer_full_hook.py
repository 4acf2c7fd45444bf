import torch


def hook(module, grad_input, grad_output):
    for g in grad_input:
        print(None if g is None else tuple(g.shape))


layer = torch.nn.Linear(3, 2)
layer.register_full_backward_hook(hook)
data = torch.ones(4, 3)
layer(data).sum().backward()

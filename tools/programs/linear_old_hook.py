import torch


def hook(module, grad_input, grad_output):
    print([tuple(g.shape) for g in grad_input])


layer = torch.nn.Linear(3, 2)
layer.register_backward_hook(hook)
x = torch.ones(4, 3, requires_grad=True)
layer(x).sum().backward()

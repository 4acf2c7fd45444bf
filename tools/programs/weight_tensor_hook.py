import torch


def hook(gradient):
    print("weight", gradient.tolist())


layer = torch.nn.Linear(3, 2)
layer.weight.register_hook(hook)
x = torch.ones(4, 3, requires_grad=True)
layer(x).sum().backward()

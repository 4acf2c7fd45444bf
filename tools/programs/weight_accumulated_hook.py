import torch


def hook(weight):
    print("weight.grad", weight.grad.tolist())


layer = torch.nn.Linear(3, 2)
layer.weight.register_post_accumulate_grad_hook(hook)
x = torch.ones(4, 3)
layer(x).sum().backward()
layer(x).sum().backward()

import torch

layer = torch.nn.Linear(2, 1)
layer.weight.data.fill_(1)
x = torch.ones(1, 2, requires_grad=True)
x.register_hook(lambda gradient: gradient / 2)
layer(x).sum().backward()
print("x", x.grad.tolist())
print("weight", layer.weight.grad.tolist())
print("bias", layer.bias.grad.tolist())

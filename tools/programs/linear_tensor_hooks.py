import torch


def show(name):
    return lambda gradient: print(name, tuple(gradient.shape))


layer = torch.nn.Linear(3, 2)
x = torch.ones(4, 3, requires_grad=True)
y = layer(x)
y.register_hook(show("y"))
x.register_hook(show("x"))
y.sum().backward()
print("weight", tuple(layer.weight.grad.shape))
print("bias", tuple(layer.bias.grad.shape))

import torch

x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
y = torch.ger(x, x)
print(tuple(x.shape), tuple(y.shape))
print(torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y))[0].tolist())

import torch

x = torch.ones(1, 3, requires_grad=True)
out = torch.mm(x, torch.ones(3, 10))
print(tuple(out.shape))
out.backward(torch.ones(2, 10))
print(x.grad.tolist())

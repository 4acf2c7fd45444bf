import torch

x = torch.ones(2, requires_grad=True)
out = (3 * x).sum()
print(tuple(out.shape))
out.backward()
print(x.grad.tolist())

x = torch.ones(2, requires_grad=True)
out = (3 * x).sum()
out.backward(torch.Tensor([1]))
print(x.grad.tolist())

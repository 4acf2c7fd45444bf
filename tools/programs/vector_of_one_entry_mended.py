import torch

x = torch.ones(2, requires_grad=True)
out = (3 * x).sum()
out.backward(torch.tensor(1.0))
print(x.grad.tolist())

import torch

x = torch.ones(2, requires_grad=True)
(3 * x).sum().backward()
nothing = x.grad.clone()

x = torch.ones(2, requires_grad=True)
out = (3 * x).sum()
print(tuple(out.shape))
out.backward(torch.Tensor([1]))
print("the same as nothing:", torch.equal(x.grad, nothing))

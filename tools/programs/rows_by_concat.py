import torch

x = torch.ones(2, 3, requires_grad=True)
y = torch.stack([x.sum(1), (2 * x).sum(1)], dim=1)
rows = torch.tensor([])
for i in range(2):
    v = torch.zeros_like(y)
    v[:, i] = 1.0
    (row,) = torch.autograd.grad(y, x, retain_graph=True, grad_outputs=v)
    rows = torch.concat((rows, row.unsqueeze(dim=1)), dim=1)
print(rows.tolist())

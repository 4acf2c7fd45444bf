import torch

x = torch.ones(2, 3, requires_grad=True)
y = torch.stack([x.sum(1), (2 * x).sum(1)], dim=1)
rows = []
for i in range(2):
    v = torch.zeros_like(y)
    v[:, i] = 1.0
    (row,) = torch.autograd.grad(y, x, retain_graph=True, grad_outputs=v)
    rows.append(row)
rows = torch.stack(rows, dim=1)
print(rows.tolist())

one_by_one = [torch.autograd.grad(y[0, i], x, retain_graph=True) for i in range(2)]
expected = torch.stack([row[0] for (row,) in one_by_one])
print("row by row the same:", torch.equal(rows[0], expected))

import torch

x = torch.ones(2, 3, requires_grad=True)
out = torch.mm(x, torch.ones(3, 4))
out.backward()

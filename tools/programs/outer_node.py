import torch

x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
outer = getattr(torch, "outer", None)
print("torch.outer:", outer is not None)
print("y:", type((outer or torch.ger)(x, x).grad_fn).__name__)

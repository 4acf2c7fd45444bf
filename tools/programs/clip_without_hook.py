import torch

layer = torch.nn.Linear(2, 1)
data = torch.tensor([[3.0, 0.5]])
layer(data).sum().backward()
torch.nn.utils.clip_grad_value_(layer.parameters(), 1)
print("weight", layer.weight.grad.tolist())
print("bias", layer.bias.grad.tolist())

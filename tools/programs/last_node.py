import torch

layer = torch.nn.Linear(3, 2)
y = layer(torch.ones(4, 3, requires_grad=True))
print(y.grad_fn.name(), [node.name() for node, _ in y.grad_fn.next_functions])

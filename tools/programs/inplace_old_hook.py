import torch


def hook(module, grad_input, grad_output):
    print("output", grad_output[0].tolist())


layer = torch.nn.Linear(2, 2, bias=False)
layer.weight.data = torch.eye(2)
layer.register_backward_hook(hook)
relu = torch.nn.ReLU(inplace=True)
x = torch.tensor([[1.0, -1.0]], requires_grad=True)
relu(layer(x)).sum().backward()

import torch

calls = {}


def hook(module, grad_input, grad_output):
    if "layer" in calls:
        calls["layer"].append(grad_output)
    else:
        calls["layer"] = []


layer = torch.nn.Linear(3, 2)
layer.register_backward_hook(hook)
for _ in range(5):
    layer(torch.ones(1, 3, requires_grad=True)).sum().backward()
print(len(calls["layer"]))

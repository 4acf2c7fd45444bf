import torch

entries = {"grad_input": [], "grad_output": []}


def hook(module, grad_input, grad_output):
    entries["grad_input"].append(grad_input)
    entries["grad_output"].append(grad_output)


layer = torch.nn.Linear(20, 30)
layer.register_backward_hook(hook)
for _ in range(2):
    x = torch.ones(4, 20, requires_grad=True)
    layer(x).sum().backward()
print([len(entries[name][1]) for name in ("grad_input", "grad_output")])
print(entries["grad_input"][1][1] == entries["grad_output"][1][1])

import torch


def hook(module, grad_input, grad_output):
    print([g.tolist() for g in grad_input])


relu = torch.nn.ReLU()
relu.register_full_backward_hook(hook)
x = torch.ones(2, requires_grad=True)
relu(2 * x).sum().backward()

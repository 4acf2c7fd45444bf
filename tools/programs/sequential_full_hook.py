import torch


def hook(module, grad_input, grad_output):
    print([tuple(g.shape) for g in grad_input])


layers = torch.nn.Linear(3, 5), torch.nn.ReLU()
net = torch.nn.Sequential(*layers)
net.register_full_backward_hook(hook)
x = torch.ones(4, 3, requires_grad=True)
net(x).sum().backward()

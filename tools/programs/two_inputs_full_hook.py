import torch


class Weighted(torch.nn.Module):
    def forward(self, x, y):
        return 2 * x + 3 * y


def hook(module, grad_input, grad_output):
    print("hook", [g.tolist() for g in grad_input])


module = Weighted()
module.register_full_backward_hook(hook)
x = torch.ones(2, requires_grad=True)
y = torch.ones(2, requires_grad=True)
module(x, y).sum().backward()
print("true", [x.grad.tolist(), y.grad.tolist()])

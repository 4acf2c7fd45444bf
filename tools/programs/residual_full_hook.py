import torch


class Residual(torch.nn.Module):
    def forward(self, x):
        return x + 2 * x


def hook(module, grad_input, grad_output):
    print("hook", [g.tolist() for g in grad_input])


module = Residual()
module.register_full_backward_hook(hook)
x = torch.ones(2, requires_grad=True)
module(x).sum().backward()
print("true", [x.grad.tolist()])

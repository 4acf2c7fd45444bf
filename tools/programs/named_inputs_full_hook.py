import torch


class Weighted(torch.nn.Module):
    def forward(self, batch, y):
        return 2 * batch["x"] + 3 * y


def hook(module, grad_input, grad_output):
    print("hook", grad_input)


module = Weighted()
module.register_full_backward_hook(hook)
x = torch.ones(2, requires_grad=True)
y = torch.ones(2, requires_grad=True)
module({"x": x}, y=y).sum().backward()
print("true", [x.grad.tolist(), y.grad.tolist()])

# %% [markdown]
# # Vanishing gradients, and a cure
#
# A deep network that does not learn, although nothing is wrong with its code. A
# [recording](../reference/recording.md) of one backward pass shows what is wrong: the
# gradient shrinks at every layer on its way up, and little is left for the first ones.
# It also shows which modules shrink it, and so what to change.

# %%
from collections import OrderedDict
from statistics import median

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradlib

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

POINTS, WIDTH, DEPTH, STEPS = 512, 32, 10, 75
X = torch.rand(POINTS, 2, device=device) * 2 - 1
Y = (X.norm(dim=1) < X.norm(dim=1).median()).long()  # inside a circle, or outside

# %% [markdown]
# ## A deep network of sigmoids
#
# Ten hidden layers, with the weights that PyTorch gives them. One forward and one
# backward pass are recorded.


# %%
def network(activation: type[nn.Module]) -> nn.Sequential:
    """Return a network with hidden layers fc0, act0, fc1, act1 and so on."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i in range(DEPTH):
        layers[f"fc{i}"] = nn.Linear(WIDTH if i else 2, WIDTH)
        layers[f"act{i}"] = activation()
    layers["last"] = nn.Linear(WIDTH, 2)
    return nn.Sequential(layers).to(device)


def one_step(net: nn.Module) -> gradlib.Recording:
    """Record one forward and one backward pass."""
    with gradlib.record(net) as recording:
        cross_entropy(net(X), Y).backward()
    return recording


sigmoids = network(nn.Sigmoid)
before = one_step(sigmoids)
print(before)

# %% [markdown]
# Read `grad_output` from the bottom, where the loss is, to the top: each layer gets a
# smaller gradient than the one below it. The axis is logarithmic, so a straight line
# means the same factor at every layer.

# %% alt="Gradient norms, a line for each module from fc0 on top to the last one below. The gradients of outputs and inputs fall along a nearly straight line from the last layer up to fc0, by more than eight orders of magnitude, and the gradients of the parameters with them."
before.plot()
plt.show()

# %% [markdown]
# ## Where it is lost
#
# A module receives `grad_output` and passes on `grad_input`. How much smaller is the
# second?


# %%
def factors(recording: gradlib.Recording, module_type: str) -> list[float]:
    """Return how much modules of one type change the norm of a gradient."""
    return [
        (call.grad_input[0].norm() / call.grad_output[0].norm()).item()
        for call in recording
        if call.module_type == module_type and call.grad_input[0] is not None
    ]


of_sigmoid, of_linear = (median(factors(before, it)) for it in ("Sigmoid", "Linear"))
of_both = of_sigmoid * of_linear
print(f"Sigmoid {of_sigmoid:.2f}")
print(f"Linear  {of_linear:.2f}")
print(f"both    {of_both:.2f}, and through {DEPTH} layers {of_both**DEPTH:.0e}")

# %% [markdown]
# Both modules shrink it. The derivative of a sigmoid is a quarter at most, whatever
# comes in. And the weights of the linear layers start so small that a gradient gets
# smaller in passing through them. The two factors multiply, once for each layer.
# [Which layer makes my gradient so
# large?](../questions/which-layer-makes-the-gradient-large.md) looks at such factors above 1.
#
# ## The cure
#
# ReLU has the derivative one wherever it lets a value through, and `kaiming_uniform_`
# makes the weights large enough to compensate for the values that it does not let
# through.


# %%
def with_large_enough_weights(net: nn.Sequential) -> nn.Sequential:
    """Give linear layers the weights that suit ReLU."""
    for module in net:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return net


relus = with_large_enough_weights(network(nn.ReLU))
after = one_step(relus)
for module_type in ("ReLU", "Linear"):
    print(f"{module_type:8} {median(factors(after, module_type)):.2f}")

# %% [markdown]
# What the ReLU takes, the linear layer gives back: the product of the two factors is
# close to one. Both networks on the same axis:

# %% alt="Two charts of gradient norms on the same axis, one above the other, each with the modules from top to bottom. With sigmoids the gradient falls by more than eight orders of magnitude from the last layer up to the first. With ReLUs and larger weights the lines are nearly vertical: the first layer gets about as large a gradient as the last."
figure, axes = plt.subplots(2, 1, figsize=(6, 10), sharex=True, layout="constrained")
for ax, recording, title in zip(
    axes, (before, after), ("sigmoids", "ReLUs"), strict=True
):
    recording.plot(ax=ax)
    ax.set_title(title, loc="left", pad=32)
    ax.label_outer()
plt.show()

# %% [markdown]
# ## Does it learn?
#
# Both are trained, and every step is recorded. With `reduce=gradlib.tensor_stats` a
# recording holds a few numbers for each tensor of each step, however large it is.


# %%
def train(net: nn.Module) -> gradlib.Recording:
    """Train, and record the gradients of each step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    with gradlib.record(
        net, keep="grad_output", reduce=gradlib.tensor_stats
    ) as recording:
        for _ in range(STEPS):
            optimizer.zero_grad()
            cross_entropy(net(X), Y).backward()
            optimizer.step()
    return recording


trained = {"sigmoids": train(sigmoids), "ReLUs": train(relus)}
for name, net in (("sigmoids", sigmoids), ("ReLUs", relus)):
    right = (net(X).argmax(1) == Y).float().mean()
    print(f"{name:8} {right:.0%} right")

# %% [markdown]
# The network of sigmoids is no better than a guess: half of the points are inside. The
# heat maps have a column for each step, which makes one forward pass, and a row for each
# module. Each has a colour scale of its own: look at the numbers beside it.

# %% alt="Two heat maps of gradient norms over the steps of training. With sigmoids the colour changes from row to row, over eight orders of magnitude, and hardly at all over the steps: the first layers get next to nothing throughout. With ReLUs it changes from step to step, and the first layers get about as much as the last ones, or more."
figure, axes = plt.subplots(2, 1, figsize=(6, 10), layout="constrained")
for ax, (name, recording) in zip(axes, trained.items(), strict=True):
    recording.plot("steps", ax=ax)
    ax.set_title(name, loc="left")
plt.show()

# %% [markdown]
# Another cure is a skip connection: [a residual network](residual_network.py).

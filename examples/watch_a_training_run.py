# %% [markdown]
# # Watch the gradients of a training run
#
# The task of the forum thread
# [Exact meaning of grad_input and grad_output](../questions/what-are-grad-input-and-grad-output.md):
# 9000 rows of three numbers in [0, 1), and the question whether a weighted sum of a row
# is above the average. The network is the thread's, 3 → 20 → 30 → 2, trained on four rows
# at a time.
#
# The gradients are collected twice: by backward hooks into a dictionary, as the thread
# does it, and by [`gradlib.record`](../reference/recording.md). The program runs on
# a GPU where there is one.

# %%
from statistics import median

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradlib

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

ROWS, TRAIN, BATCH, STEPS = 9000, 6300, 4, 1200
X = torch.rand(ROWS, 3)
weighted = X @ torch.tensor([0.1, 2.0, 3.0])
Y = (weighted >= weighted.mean()).long()
X, Y = X.to(device), Y.to(device)


class Net(nn.Module):
    """The network of the thread, its activations as modules."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.fc1 = nn.Linear(3, 20)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(20, 30)
        self.relu2 = nn.ReLU()
        self.fc3 = nn.Linear(30, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two scores for each row."""
        x = self.relu1(self.fc1(x))
        x = self.relu2(self.fc2(x))
        return self.fc3(x)


net = Net().to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.8)

# %% [markdown]
# ## Hooks that collect into a dictionary
#
# Each layer gets a full backward hook, which a backward pass calls once for each call of
# the layer. The dictionary has its lists before that, so the first step is kept too.

# %%
LAYERS = ("fc1", "fc2", "fc3")
collected: dict[str, list[torch.Tensor]] = {name: [] for name in LAYERS}


def collect_into(gradients: list[torch.Tensor]):
    """Return a hook that appends the gradient of the output."""

    def hook(_module, _grad_input, grad_output):
        gradients.append(grad_output[0].detach().clone())

    return hook


handles = [
    net.get_submodule(name).register_full_backward_hook(collect_into(collected[name]))
    for name in LAYERS
]

# %% [markdown]
# ## Train, and record each step
#
# One recording a step. `norms` keeps how large the gradients of each layer's output and
# weight were; of the recordings themselves only the first and the last are kept.

# %%
fields = ("grad_output", "weight")
norms = {(name, field): [] for name in LAYERS for field in fields}
steps: dict[str, gradlib.Recording] = {}
losses: list[float] = []
differences: list[float] = []

for step in range(STEPS):
    rows = torch.randint(TRAIN, (BATCH,), device=device)
    # X is data. A full hook warns if no input requires grad, so let it require grad.
    inputs = X[rows].requires_grad_()
    optimizer.zero_grad()
    with gradlib.record(net) as recording:
        loss = cross_entropy(net(inputs), Y[rows])
        loss.backward()
    optimizer.step()
    steps["first step" if step == 0 else "last step"] = recording

    losses.append(loss.item())
    for name in LAYERS:
        call = recording[name]
        norms[name, "grad_output"].append(call.grad_output[0].norm().item())
        norms[name, "weight"].append(call.param_grads["weight"].norm().item())
        gap = (call.grad_output[0] - collected[name][step]).abs().max().item()
        differences.append(gap)

for handle in handles:
    handle.remove()

with torch.no_grad():
    right = net(X[TRAIN:]).argmax(1) == Y[TRAIN:]
print(f"right on the rows kept back: {right.float().mean():.1%}")
print("records per layer:", {name: len(grads) for name, grads in collected.items()})
print("largest difference between hook and recording:", max(differences))

# %% [markdown]
# The hooks and the recording saw the same `grad_output` in every step. The recording
# holds more. This is the last step: all modules, then everything about `fc2`. A `_total`
# counts all uses of a tensor, the bare name this call's share; here they agree, since
# every tensor is used once.

# %%
print(steps["last step"])

# %%
print(steps["last step"]["fc2"])

# %% [markdown]
# ## Gradient flow over training
#
# A batch of four is noisy, so each point is the median of 60 steps. At the start the
# gradient is largest at `fc3`, where it enters, and shrinks on its way to `fc1`. Early in
# the training the order reverses: now it grows on its way. At `fc1` it rises before it
# falls; at `fc3` it falls from the start, with the loss.

# %% alt="Three stacked charts over the steps of training. The loss falls from 0.7 to below 0.1. The gradient at the output of fc3 is the largest of the three at first and falls throughout; at fc2 it rises a little and falls; at fc1 it starts smallest, rises until about a third of the way and then falls slowly. After the first 200 steps fc1 is on top, then fc2, then fc3. The gradients of the weights do much the same, a little later."
WINDOW = 60
starts = range(0, STEPS, WINDOW)
middles = [start + WINDOW / 2 for start in starts]


def smooth(values: list[float]) -> list[float]:
    """Return the median of each window."""
    return [median(values[start : start + WINDOW]) for start in starts]


figure, (top, middle, bottom) = plt.subplots(
    3, 1, figsize=(6, 7), sharex=True, layout="constrained"
)
top.plot(middles, smooth(losses), color="0.35")
top.set_ylabel("loss")
for ax, field in ((middle, "grad_output"), (bottom, "weight")):
    for name, colour in zip(LAYERS, ("#0072B2", "#D55E00", "#009E73"), strict=True):
        ax.plot(middles, smooth(norms[name, field]), color=colour, label=name)
    ax.set_yscale("log")
    ax.minorticks_off()
    ax.set_yticks([0.03, 0.1, 0.3], ["0.03", "0.1", "0.3"])
middle.set_ylabel("norm of grad_output")
bottom.set_ylabel("norm of weight's gradient")
bottom.set_xlabel("step")
middle.legend(frameon=False, ncols=3)
plt.show()

# %% [markdown]
# ## The first step and the last, module by module
#
# The same reversal, seen across the network on one batch each: follow `grad_output` upwards,
# the way the gradient goes.

# %% alt="Two charts of gradient norms, a line for each module from fc1 on top to fc3 below. In the first step grad_output and grad_input shrink on the way up from fc3 to fc1. In the last step they grow on the way up. The gradients of the parameters of fc1, fc2 and fc3 are drawn as triangles."
figure, axes = plt.subplots(2, 1, figsize=(6, 6), layout="constrained")
for ax, (title, shown) in zip(axes, steps.items(), strict=True):
    shown.plot(ax=ax)
    ax.set_title(title, loc="left", pad=32)
plt.show()

# %% [markdown]
# How to record a larger model, and less of it: [Record your own
# model](../guide/record-your-model.md#training-loop)

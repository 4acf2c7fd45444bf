# %% [markdown]
# # Watch the gradients of a training run
#
# The task of the thread *Exact meaning of grad_input and grad_output*: 9000 rows of
# three numbers in [0, 1), and the question whether a weighted sum of a row is above the
# average. The network is the thread's, 3 → 20 → 30 → 2, trained on four rows at a time.
#
# The gradients are collected twice: by backward hooks into a dictionary, as the thread
# does it, and by `gradlib.record`. The program runs on a GPU where there is one.

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
# Each layer gets a full backward hook. It is called once in every backward pass, with
# one gradient for each positional argument and one for each output. The dictionary has
# its lists before the first call, so the first step is kept too.

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
    # The hooks on fc1 get no input gradient: X is data. Recent releases warn of it.
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
# The hooks and the recording saw the same gradients, in every step. The recording holds
# more of them. This is the last step: all modules, then everything about `fc2`.

# %%
print(steps["last step"])

# %%
print(steps["last step"]["fc2"])

# %% [markdown]
# ## Gradient flow over training
#
# A batch of four is noisy, so each point is the median of 60 steps. At the start the
# gradient is largest at `fc3`, where it enters; as the layers learn, their weights grow
# and it becomes largest at `fc1`.

# %% alt="Three stacked charts over the steps of training. The loss falls from 0.7 to below 0.1. The gradients at the outputs of fc1, fc2 and fc3 start with fc3 as the largest; their order turns round early, and from then on fc1 has the largest and fc3 the smallest. The gradients of the weights do the same. All fall with the loss."
WINDOW = 60
starts = range(0, STEPS, WINDOW)
middles = [start + WINDOW / 2 for start in starts]


def smooth(values: list[float]) -> list[float]:
    """Return the median of each window."""
    return [median(values[start : start + WINDOW]) for start in starts]


figure, (top, middle, bottom) = plt.subplots(
    3, 1, figsize=(7, 7), sharex=True, layout="constrained"
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
_ = middle.legend(frameon=False, ncols=3)

# %% [markdown]
# ## The first step and the last, module by module
#
# The same turn, seen across the network: follow `grad_output` from right to left, the
# way the gradient goes.

# %% alt="Two charts of gradient norms from fc1 to fc3. In the first step all three kinds of gradient are smaller at fc1 than at fc3. In the last step it is the other way round: they are larger at fc1 than at fc3."
figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
for ax, (title, shown) in zip(axes, steps.items(), strict=True):
    shown.plot(ax)
    ax.set_title(title)

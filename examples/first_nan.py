# %% [markdown]
# # The first NaN of a training run
#
# The loss is NaN, and so is every weight. By then it is too late to look: everything
# you can see came after the first NaN. A [recording](../guide/record-your-model.md) of
# the run says in which step and in which module it began.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import gradlib

ROWS, BATCH, STEPS, MARGIN = 500, 16, 50, 1.0
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1)
X = torch.rand(ROWS, 2) * 2 - 1
Y = X.norm(dim=1) < X.norm(dim=1).median()  # inside a circle, or outside
pairs = torch.randint(ROWS, (STEPS, 2, BATCH))  # which rows each step compares
X, Y, pairs = X.to(device), Y.to(device), pairs.to(device)

# %% [markdown]
# ## A network that compares
#
# The network takes two rows and returns their distance. It learns to put rows of one
# class close together, and rows of different classes at least a margin apart.


# %%
class Distance(nn.Module):
    """The length of the difference."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return one distance for each pair of rows."""
        return (a - b).square().sum(dim=1).sqrt()


class Compare(nn.Module):
    """One encoder for both rows of a pair, and a distance."""

    def __init__(self, distance: nn.Module) -> None:
        """Make the layers."""
        super().__init__()
        self.fc1 = nn.Linear(2, 32)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(32, 8)
        self.distance = distance

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the place of each row."""
        return self.fc2(self.relu(self.fc1(x)))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the distance of each pair."""
        return self.distance(self.encode(a), self.encode(b))


def train(distance: nn.Module) -> tuple[gradlib.Recording, list[float]]:
    """Train a new network. Return what was recorded, and the loss of each step."""
    torch.manual_seed(0)
    net = Compare(distance).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    with gradlib.record(net, reduce=gradlib.tensor_stats) as recording:
        for i, j in pairs:
            d = net(X[i], X[j])
            apart = (MARGIN - d).clamp(min=0)
            loss = torch.where(Y[i] == Y[j], d, apart).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return recording, losses


recording, losses = train(Distance())
found = recording.first_nonfinite()
assert found is not None
print(found)

# %% [markdown]
# With `reduce=gradlib.tensor_stats` a recording holds a few numbers for each tensor of
# each step, so the whole run fits. `found.index` counts the calls of that module. The call's
# `forward` is its step, which gives the losses before and after:

# %%
call = recording.calls(found.name)[found.index]
step = call.forward
for at in (step - 1, step, step + 1):
    print(f"loss of step {at}: {losses[at]:.3f}")

# %% [markdown]
# In the step that did the damage, the loss is still finite. The next loss is NaN, as
# the optimizer has written NaN into the weights.

# %% alt="A heat map of gradient norms, a column for each step, a row for each of fc1, relu, fc2, their second calls, and distance from top to bottom. Colours fill the first two thirds of the run. Then comes one column with crosses in every row but the lowest, distance, which still has a colour, and after it nothing but crosses."
recording.plot(kind="steps")
plt.show()

# %% [markdown]
# The colour is the norm of a call's `grad_output`; `fc1 (1)` is the second call of
# `fc1` in a step, for the other row of each pair. In the first column with crosses,
# `distance` still has a colour: the gradient it received was finite, the one it passed
# on was not.
#
# ## What was different in that step
#
# The statistics of the call show it:

# %%
print("distances that are zero:", round(call.output.zeros * BATCH))
print("NaN or inf that came:   ", call.grad_output[0].nonfinite)
print("NaN or inf handed up:   ", call.grad_input[0].nonfinite)

# %% [markdown]
# One distance is zero. The step is known, so look at its data:

# %%
for i, j in pairs[step].T.tolist():
    if i == j:
        print(f"row {i} is compared with itself")
with_itself = (pairs[:, 0] == pairs[:, 1]).any(dim=1)
print("steps with such a pair:", with_itself.nonzero().flatten().tolist())

# %% [markdown]
# The rows were drawn at random, and nothing prevents drawing the same one twice. Then
# the distance is zero, and [the derivative of a square root at zero is
# infinite](../questions/where-did-the-nan-come-from.md#why).
#
# ## The cure
#
# `torch.linalg.vector_norm` computes the same length, but its gradient is zero where
# the length is zero. [A loss that holds a derivative of a
# length](../questions/where-did-the-nan-come-from.md#at-zero) needs another cure.


# %%
class SafeDistance(nn.Module):
    """The length of the difference, which may be zero."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return one distance for each pair of rows."""
        return torch.linalg.vector_norm(a - b, dim=1)


cured, losses = train(SafeDistance())
print(cured.first_nonfinite())
for at in (step - 1, step, step + 1):
    print(f"loss of step {at}: {losses[at]:.3f}")

# %% [markdown]
# The same rows, the same first weights, the same pair in the same step:

# %% alt="The same heat map with the cure. Every cell has a colour, from the first step to the last, and there is no cross."
cured.plot(kind="steps")
plt.show()

# %% [markdown]
# Avoiding such pairs would only hide the problem until two rows of the data are equal.
# More ways to make a NaN, and cures that do not help: [Where did the NaN come
# from?](../questions/where-did-the-nan-come-from.md)

# %% [markdown]
# # A residual network: share and total
#
# In a residual block `x + branch(x)` the gradient of `x` comes back on two paths:
# through the branch, and along the skip connection. A hook on the branch sees only the
# first; `x.grad` is both together. A [recording](../reference/recording.md) has both:
# `grad_input` is the *share* of one call, `grad_input_total` the gradient of the tensor
# with all its uses.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import gradlib

torch.manual_seed(0)
WIDTH, BLOCKS = 32, 8
x = torch.randn(64, WIDTH)


class Block(nn.Module):
    """A branch, with or without a skip connection."""

    def __init__(self, *, residual: bool) -> None:
        """Make the layers."""
        super().__init__()
        self.residual = residual
        self.branch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the branch's result, added to what came in if that is asked for."""
        return x + self.branch(x) if self.residual else self.branch(x)


def record(*, residual: bool) -> gradlib.Recording:
    """Record a backward pass through a stack of blocks."""
    model = nn.Sequential(*[Block(residual=residual) for _ in range(BLOCKS)])
    with gradlib.record(model) as recording:
        model(x).square().mean().backward()
    return recording


recording = record(residual=True)

# %% [markdown]
# ## One block
#
# Here are the gradient of the block's output, the gradient that comes back through the
# branch, and the whole gradient of the block's input:

# %%
block, branch = recording["4"], recording["4.branch"]
arrives = block.grad_output[0]
share = branch.grad_input[0]
total = branch.grad_input_total[0]
print(f"arrives at the block's output: {arrives.norm():.4f}")
print(f"share, through the branch:     {share.norm():.4f}")
print(f"total, at the block's input:   {total.norm():.4f}")

# %% [markdown]
# The path past the branch is a sum, and a sum passes its gradient on unchanged. So the
# total is the share plus what arrived, entry by entry:

# %%
print("total = share + what arrived:", torch.allclose(total, share + arrives))

# %% [markdown]
# For the block itself, share and total are equal, as it contains both paths.

# %%
print("block:", torch.equal(block.grad_input[0], block.grad_input_total[0]))
print(block)

# %% [markdown]
# ## The whole network
#
# The plot draws the total as a hollow square where it visibly differs from the share:
# at the first layer of each branch.

# %% alt="Gradient norms, a line for each layer of eight residual blocks, the first on top. At the linear layer of every block except the first, whose input needs no gradient, the share of the branch lies far to the left, and a dotted line leads to a hollow square, the total, which grows from block to block on the way up."
recording.plot()
plt.show()

# %% [markdown]
# ## Without the skip connection
#
# These are the same blocks without the sum. Now the whole gradient of a block's input
# comes through its branch, so there is no separate total.

# %% alt="Two lines over the blocks, on a logarithmic axis. With skip connections the gradient at the input of a block grows a little from the last block to the first. Without it the gradient falls from block to block, to a small fraction of what it was."
plain = record(residual=False)
figure, ax = plt.subplots()
for label, shown, colour, marker in (
    ("with skip connections", recording, "#0072B2", "o"),
    ("without", plain, "#D55E00", "s"),
):
    # The input of block 0 is data, and needs no gradient.
    branches = [shown[f"{i}.branch"] for i in range(1, BLOCKS)]
    norms = [call.grad_input_total[0].norm().item() for call in branches]
    ax.plot(range(1, BLOCKS), norms, color=colour, marker=marker, label=label)
ax.invert_xaxis()  # as the gradient flows
ax.set_yscale("log")
ax.set_xlabel("block, the last first: as the gradient flows")
ax.set_ylabel("norm of the total at its input")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# If you took a branch's share for the gradient of its input, you would think that the
# first network loses its gradient too. Which tool shows which: [This call's share or
# the tensor's total?](../questions/share-or-total.md)

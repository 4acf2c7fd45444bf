# %% [markdown]
# # What an autoencoder keeps: singular values
#
# An autoencoder passes its input through a narrow code and back. How many directions
# get through? Change an input a little, by `u`, and the output changes by `Ju`, where
# `J` is the Jacobian at that input. The singular values of `J` belong to directions of
# the input: each says by what factor a change in that direction grows. Near one, the
# change is kept; near zero, it is lost.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import gradlib

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## Many pixels, two numbers
#
# Each image shows a blob. Two numbers decide all of its pixels: in which row the blob is,
# and in which column. So the images lie on a surface with two directions, in a space with
# as many directions as there are pixels.

# %%
SIZE, IMAGES, SHOWN, NOISE, BATCH, STEPS = 12, 1024, 100, 0.3, 64, 250
PIXELS, HIDDEN, CODE = SIZE**2, 64, 6


def blobs(places: torch.Tensor) -> torch.Tensor:
    """Return an image as a row of pixels for each place, of shape (batch, pixels)."""
    axis = torch.arange(SIZE, device=places.device)
    down, right = (axis - places[:, :1]) ** 2, (axis - places[:, 1:]) ** 2
    return torch.exp(-(down[:, :, None] + right[:, None, :]) / 12).flatten(1)


places = 2 + (SIZE - 5) * torch.rand(IMAGES, 2, device=device)
x = blobs(places)

# %% [markdown]
# ## The autoencoder
#
# Its code has room for more than two numbers. It gets each image with noise on every
# pixel, which is a point near the surface, and learns to return the image without the
# noise.

# %%
net = nn.Sequential(
    *(nn.Linear(PIXELS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU()),
    nn.Linear(HIDDEN, CODE),
    *(nn.Linear(CODE, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU()),
    nn.Linear(HIDDEN, PIXELS),
).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
for rows in torch.randint(IMAGES, (STEPS, BATCH)):
    clean = x[rows]
    optimizer.zero_grad()
    loss = (net(clean + NOISE * torch.randn_like(clean)) - clean).square().mean()
    loss.backward()
    optimizer.step()

with torch.no_grad():
    lost = (net(x) - x).square().mean() / x.var(dim=0).mean()
print(f"part of the variance that is lost: {lost:.3f}")

# %% [markdown]
# ## The Jacobian of every image
#
# It has a row and a column for each pixel, and there is one for each image.
# [`gradlib.plan_jacobian`](../reference/jacobian.md) says how
# `gradlib.per_sample_jacobian` would compute them:

# %%
shown = x[:SHOWN]
print(gradlib.plan_jacobian(net, shown, max_bytes=2**30))

# %% [markdown]
# Everything passes through the code. So `J` is a product: the Jacobian of the output
# with respect to the code, times that of the code with respect to the input. The column
# `multiply-adds` shows how much it saves to compute these two, both narrow, and to
# multiply them.

# %%
jacobian = gradlib.per_sample_jacobian(net, shown)
print("image, output, input:", list(jacobian.shape))
values = torch.linalg.svdvals(jacobian)

# %% [markdown]
# ## How many directions get through
#
# The singular values of every image, on a logarithmic axis:

# %% alt="Singular values, the largest first, a line for each image, on a logarithmic axis. In all images the first two lie close to one. From the third to the sixth, the last before a dashed line at the width of the code, they fall step by step to about a hundredth. After the dashed line they drop by several orders of magnitude at once, and stay there."
MOST = CODE + 4
figure, ax = plt.subplots()
lines = values[:, :MOST].T.cpu()
ax.plot(range(1, MOST + 1), lines, alpha=0.2, linewidth=1, color="#0072B2")
ax.axhline(1, color="0.6", linewidth=0.8, zorder=0)
ax.axvline(CODE + 0.5, color="0.4", linestyle="--", linewidth=1)
ax.annotate("width of the code", (CODE + 0.6, 0.05), color="0.3")
ax.set_yscale("log")
ax.set_xticks(range(1, MOST + 1))
ax.set_xlabel("number of the singular value, the largest first")
ax.set_ylabel("singular value")
plt.show()

# %%
for number in (2, 3, CODE, CODE + 1):
    median = values[:, number - 1].median()
    print(f"median of singular value {number}: {median:.2g}")

# %% [markdown]
# The code sets how many directions *can* get through: beyond its width there is only
# rounding. Fewer *do* get through. Two come out about as long as they went in, as many
# as the surface has. The others that the code has room for come out far shorter.
#
# ## Are they the right two?
#
# When a blob moves a little, its image changes along the surface. These changes are a
# Jacobian too: that of `blobs` with respect to the place. How much of them lies in the
# two directions that the net keeps best?

# %%
moves = gradlib.per_sample_jacobian(blobs, places[:SHOWN])
print("image, pixel, row or column:", list(moves.shape))
kept = torch.linalg.svd(jacobian, full_matrices=False).Vh[:, :2]
anyhow = torch.linalg.qr(torch.randn_like(kept).mT).Q.mT
for name, two in {"best kept": kept, "drawn at random": anyhow}.items():
    share = (two @ moves).norm(dim=(1, 2)) / moves.norm(dim=(1, 2))
    print(f"in the two directions {name}: {share.median():.0%}")

# %% [markdown]
# Nearly: almost all of a move lies in the two directions that the net keeps best, and
# little of it in two drawn at random.
#
# What each order of multiplication costs: [Forward, reverse, or in the
# middle?](../questions/forward-reverse-or-in-the-middle.md)

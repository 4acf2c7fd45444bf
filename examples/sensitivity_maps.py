# %% [markdown]
# # Sensitivity maps: which pixels decide the class
#
# How does the score of a class change when one pixel gets a little more ink? The
# answers for all pixels make a picture as large as the image: a sensitivity map, or
# saliency map. One call of [`gradlib.per_sample_jacobian`](../reference/jacobian.md)
# computes the maps of all images in a batch, for all classes.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradlib

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## A bar, a cross or a circle, somewhere in an image
#
# A pixel is one where there is ink and zero where there is none, and noise is added to
# all of them.

# %%
CLASSES = ("bar", "cross", "circle")
SIZE, SHAPE, NOISE, ROWS, TEST, BATCH, STEPS = 20, 7, 0.3, 512, 200, 32, 80
MIDDLE = SHAPE // 2

i, j = torch.meshgrid(torch.arange(SHAPE), torch.arange(SHAPE), indexing="ij")
away = torch.hypot(i - float(MIDDLE), j - float(MIDDLE))
bar, pole, circle = i == MIDDLE, j == MIDDLE, (away - MIDDLE).abs() < 0.6
shapes = torch.stack([bar, bar | pole, circle]).float()


def images(labels: torch.Tensor, corners: torch.Tensor) -> torch.Tensor:
    """Return an image for each label, its shape at that corner, without noise."""
    drawn = torch.zeros(len(labels), 1, SIZE, SIZE)
    for image, label, (down, right) in zip(
        drawn, labels, corners.tolist(), strict=True
    ):
        image[0, down : down + SHAPE, right : right + SHAPE] = shapes[label]
    return drawn


labels = torch.randint(len(CLASSES), (ROWS + TEST,))
corners = torch.randint(SIZE - SHAPE + 1, (ROWS + TEST, 2))
ink = images(labels, corners)
x = (ink + NOISE * torch.randn_like(ink)).to(device)
y = labels.to(device)

# %% [markdown]
# ## The classifier

# %%
net = nn.Sequential(
    nn.Conv2d(1, 8, 5, padding=2),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Conv2d(8, 16, 5, padding=2, stride=2),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.AdaptiveMaxPool2d(1),
    nn.Flatten(),
    nn.Linear(16, len(CLASSES)),
).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for rows in torch.randint(ROWS, (STEPS, BATCH)):
    optimizer.zero_grad()
    cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()

net.eval()
x, y = x[ROWS:], y[ROWS:]  # from here on: images kept back


def right(x: torch.Tensor) -> float:
    """Return the fraction of these images that the net names rightly."""
    return (net(x).argmax(1) == y).float().mean().item()


print("right on images kept back, more than 9 in 10:", right(x) > 0.9)

# %% [markdown]
# In training mode BatchNorm [mixes the images of a
# batch](../questions/when-samples-are-not-independent.md). After `net.eval()` the
# scores of an image depend on no other image, so each image has maps of its own.
#
# ## All maps in one call

# %%
jacobian = gradlib.per_sample_jacobian(net, x)
print("image, class, channel, row, column:", list(jacobian.shape))
maps = jacobian.squeeze(2)

# %% [markdown]
# `maps[b, c]` belongs to image `b` and the score of class `c`. Do these pixels really
# decide? To find out, replace as many pixels as a shape's square has by noise: those
# where the map of the right class is largest in magnitude and, for comparison, pixels
# drawn at random.


# %%
def without(chosen: torch.Tensor) -> torch.Tensor:
    """Return the images with noise in place of the pixels chosen most strongly."""
    pixels = chosen.flatten(1).topk(SHAPE**2).indices
    noise = NOISE * torch.randn(pixels.shape, device=device)
    return x.flatten(1).scatter(1, pixels, noise).view_as(x)


strength = maps[torch.arange(TEST), y].abs()
print("without the map's strongest, less than half:", right(without(strength)) < 0.5)
at_random = right(without(torch.rand_like(strength)))
print("without as many at random, more than 9 in 10:", at_random > 0.9)

# %% [markdown]
# ## The maps, and what happens when the shape moves
#
# Each shape at two places, with the same noise. Below each image are the maps of its three
# scores, on one scale: purple where ink raises the score, orange where ink lowers it.

# %% alt="A grid of six columns. The top row has images with noise: a bar in the upper left and at the lower right, then a cross and a circle at the same two places. Below each are the maps of the scores for bar, cross and circle. Each map is nearly white but for a patch of purple and orange pixels where the shape is, and in the second column of each pair the patch has moved with the shape."
shown = torch.arange(len(CLASSES)).repeat_interleave(2)
places = torch.tensor([[2, 2], [10, 10]]).repeat(len(CLASSES), 1)
noise = NOISE * torch.randn(len(CLASSES), 1, SIZE, SIZE).repeat_interleave(2, dim=0)
pairs = (images(shown, places) + noise).to(device)
maps = gradlib.per_sample_jacobian(net, pairs).squeeze(2).cpu()
end = maps.abs().quantile(0.995).item()  # a few pixels more have the strongest colours

figure, axes = plt.subplots(4, 6, figsize=(6, 4.3), layout="constrained")
for column, image in enumerate(pairs.cpu()):
    axes[0, column].imshow(image[0].numpy(), cmap="Greys", interpolation="nearest")
    for row in range(len(CLASSES)):
        axes[1 + row, column].imshow(
            maps[column, row].numpy(),
            cmap="PuOr",
            vmin=-end,
            vmax=end,
            interpolation="nearest",
        )
for ax, name in zip(axes[:, 0], ("image", *CLASSES), strict=True):
    ax.set_ylabel(name)
for ax in axes.flat:
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="0.7")
plt.show()

# %% [markdown]
# The patches of colour go where the shape goes, though the net was never told where a
# shape is. The colours say what it looks for: on bars and crosses, ink along the
# horizontal line raises the score of bar; on crosses, ink along the vertical line
# raises the score of cross.
#
# A map says how a score changes when pixels change a little. It does not say what
# happens when many pixels change a lot: for that, change them and look, as above.
#
# Of one score, or of a loss, as for an adversarial example or integrated gradients: [How do
# I get the gradient with respect to the input?](../questions/gradient-of-the-input.md)
#
# The gradient at a feature map instead of the image, as for Grad-CAM: [How do I get the
# gradient of an intermediate
# activation?](../questions/gradient-of-an-activation.md#grad-cam)

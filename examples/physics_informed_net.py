# %% [markdown]
# # Derivatives inside a loss: a physics-informed net
#
# A physics-informed net (PINN) learns a motion from the equation it obeys, without any
# data: the loss says how far the net is from fulfilling the equation. For that the loss
# needs the derivatives of the outputs with respect to the inputs, and gradients must
# flow through them to the weights. With `create_graph=True`,
# [`gradlib.per_sample_jacobian`](../reference/jacobian.md) returns such derivatives;
# applied to its own result, it returns second derivatives.

# %%
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from torch import nn

import gradlib

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## The equation, and the net
#
# Two masses stand in a row between two walls, held by three springs. Springs pull, and
# friction slows both masses: $u'' + 2d\,u' + Ku = 0$, where $u(t)$ holds the
# displacements of the two masses from rest, and $d$ is `FRICTION`. At the start the
# first is pulled aside, and both are at rest.
#
# The net takes a time and returns two displacements. Each tanh is a step at some time;
# the biases of the first layer spread these steps over the whole motion.

# %%
END, TIMES, WIDTH, FRICTION = 8.0, 61, 32, 0.15
K = torch.tensor([[2.0, -1.0], [-1.0, 2.0]], device=device)
START = torch.tensor([1.0, 0.0], device=device)
t = torch.linspace(0, END, TIMES, device=device)[:, None]

first = nn.Linear(1, WIDTH)
nn.init.ones_(first.weight)
with torch.no_grad():
    first.bias.copy_(-torch.linspace(0, END, WIDTH))
net = nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, 2)).to(device)

# %% [markdown]
# ## The derivatives
#
# The Jacobian of every sample has a row for each output and a column for each input.
# Here the time is the only input, so the single column is dropped. What is left has the
# shape of `u`, and can be differentiated again.

# %%
Motion = Callable[[torch.Tensor], torch.Tensor]


def derivative(u: Motion, *, check: bool) -> Motion:
    """Return du/dt, as a function of the time."""

    def du_dt(t: torch.Tensor) -> torch.Tensor:
        jacobian = gradlib.per_sample_jacobian(u, t, check=check, create_graph=True)
        return jacobian.squeeze(2)

    return du_dt


velocity = derivative(net, check=True)
acceleration = derivative(velocity, check=True)
for name, motion in {"u": net, "u'": velocity, "u''": acceleration}.items():
    print(f"{name:3} {list(motion(t).shape)}")

# %% [markdown]
# `torch.autograd.grad` with a vector of ones is often used for this. But it does not
# separate the masses: it returns [the sum over the
# outputs](../questions/how-do-i-get-dy-dx.md#when-ones).

# %%
times = t.clone().requires_grad_()
u = net(times)
(by_ones,) = torch.autograd.grad(u, times, torch.ones_like(u))
both = velocity(t).sum(dim=1, keepdim=True)
print("the sum of both velocities:", torch.allclose(by_ones, both, atol=1e-6))

# %% [markdown]
# ## Train
#
# The check of `per_sample_jacobian` has passed above. For the acceleration it calls the
# velocity twice more, and makes a backward pass more, each time. Training changes only the
# weights, not the function. So [the loss asks for
# `check=False`](../questions/jacobians-in-a-loss.md#check).

# %%
velocity = derivative(net, check=False)
acceleration = derivative(velocity, check=False)


def residual(u: torch.Tensor, v: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return what the equation leaves, which is zero where it is fulfilled."""
    return a + 2 * FRICTION * v + u @ K


def loss() -> torch.Tensor:
    """Return how far the net is from the equation and from the start."""
    u, v, a = net(t), velocity(t), acceleration(t)
    start = (u[0] - START).square().sum() + v[0].square().sum()
    return residual(u, v, a).square().mean() + start


optimizer = torch.optim.LBFGS(
    net.parameters(), max_iter=80, history_size=50, line_search_fn="strong_wolfe"
)


def closure() -> torch.Tensor:
    """Return the loss, with its gradients in the parameters."""
    optimizer.zero_grad()
    value = loss()
    value.backward()
    return value


print(f"loss before: {loss():.5f}")
optimizer.step(closure)
print(f"loss after:  {loss():.5f}")

# %% [markdown]
# ## Is it the motion?
#
# This equation can be solved by hand. The sum and the difference of the two
# displacements swing independently, each with its own frequency. The net has not seen
# this solution.


# %%
def swing(t: torch.Tensor, stiffness: float) -> torch.Tensor:
    """Return the displacement of a single mass on a spring, let go at one."""
    w = (stiffness - FRICTION**2) ** 0.5
    return torch.exp(-FRICTION * t) * (
        torch.cos(w * t) + FRICTION / w * torch.sin(w * t)
    )


together, apart = swing(t, 1.0), swing(t, 3.0)
exact = torch.cat([together + apart, together - apart], dim=1) / 2
with torch.no_grad():
    u = net(t)
print(f"largest displacement: {exact.abs().max():.4f}")
print(f"largest error:        {(u - exact).abs().max():.4f}")

# %% [markdown]
# Above are the net and the solution; below is the residual, the left side of the
# equation at each time, which should be zero.

# %% alt="Two charts over time. Above, the displacements of two masses: the first starts at one, the second at zero, and both swing, one taking over the motion from the other, ever less. The dashed lines of the exact solution lie on those of the net. Below, the residual of the equation for both masses, small waves around zero, far smaller than the displacements."
figure, (above, below) = plt.subplots(
    2, 1, figsize=(6, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
)
left = residual(net(t), velocity(t), acceleration(t)).detach()
for mass, colour in enumerate(("#0072B2", "#D55E00")):
    name = f"mass {mass + 1}"
    above.plot(t.cpu(), u[:, mass].cpu(), color=colour, label=f"{name}, the net")
    below.plot(t.cpu(), left[:, mass].cpu(), color=colour, label=name)
above.plot(t.cpu(), exact.cpu(), color="black", linestyle=(0, (2, 4)))
above.lines[-1].set_label("exact")
above.set_ylabel("displacement")
below.set_ylabel("residual")
below.set_xlabel("time")
for ax in (above, below):
    ax.axhline(0, color="0.6", linewidth=0.8, zorder=0)
above.legend(frameon=False)
plt.show()

# %% [markdown]
# Other losses that hold derivatives, and what they keep in memory: [Jacobians in a
# loss](../questions/jacobians-in-a-loss.md)

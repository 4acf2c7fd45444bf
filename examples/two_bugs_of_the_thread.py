# %% [markdown]
# # Two bugs in a hook that collects gradients
#
# The program in the forum thread [Exact meaning of grad_input and
# grad_output](../questions/what-are-grad-input-and-grad-output.md) has two bugs that
# have nothing to do with its question: it loses its first record, and one of its lines
# cannot run. Here both are reproduced in a small program and fixed, with full backward
# hooks. The thread's old hook has the same two bugs.

# %%
import torch
from torch import nn

import gradlib

torch.manual_seed(0)
STEPS = 5


def train(hook) -> None:
    """Run some backward passes through a small network, fc2 hooked."""
    fc1, fc2 = nn.Linear(3, 20), nn.Linear(20, 30)
    fc2.register_full_backward_hook(hook)
    for _ in range(STEPS):
        fc2(fc1(torch.randn(4, 3))).square().sum().backward()


# %% [markdown]
# ## The first record is lost
#
# The hook makes its lists the first time it is called. It makes them *instead of*
# recording: the gradients of the first step are thrown away.

# %%
store: dict[str, dict[str, list]] = {}


def forgetful_hook(_module, grad_input, grad_output):
    """Collect under a name, or make room for it."""
    if "fc2" in store:
        store["fc2"]["grad_input"].append(grad_input)
        store["fc2"]["grad_output"].append(grad_output)
    else:
        store["fc2"] = {"grad_input": [], "grad_output": []}


train(forgetful_hook)
print(f"{STEPS} steps, {len(store['fc2']['grad_output'])} records")

# %% [markdown]
# Make the lists first, then always record. `setdefault` makes them if there are none.

# %%
store = {}


def hook(_module, grad_input, grad_output):
    """Collect under a name, made when it is first needed."""
    record = store.setdefault("fc2", {"grad_input": [], "grad_output": []})
    record["grad_input"].append(grad_input)
    record["grad_output"].append(grad_output)


train(hook)
print(f"{STEPS} steps, {len(store['fc2']['grad_output'])} records")

# %% [markdown]
# ## The line that cannot run
#
# The program then compares `store["fc2"]["grad_input"][1][1]` with
# `store["fc2"]["grad_output"][1][1]`. The first index picks the step, the second an
# entry of the hook's tuple. A layer with one output has one entry in `grad_output`, so
# there is no entry 1.

# %%
step = 1
try:
    store["fc2"]["grad_output"][step][1]
except IndexError as error:
    print("IndexError:", error)

# %% [markdown]
# Look at entry 0 instead. But there is no point in comparing the two: one is the
# gradient of the layer's input, the other of its output. Even their shapes differ.

# %%
for name, steps in store["fc2"].items():
    print(f"{name:11}", [list(grad.shape) for grad in steps[step]])

# %% [markdown]
# ## The same with a recording
#
# With [`gradlib.record`](../reference/recording.md) there is no dictionary to fill:
# each step is a forward of the recording, and each gradient has a name.

# %%
model = nn.Sequential(nn.Linear(3, 20), nn.Linear(20, 30))
with gradlib.record(model) as recording:
    for _ in range(STEPS):
        model(torch.randn(4, 3)).square().sum().backward()

print(f"{STEPS} steps, {len(recording.calls('1'))} records")
call = recording.forwards[step]["1"]
print("grad_input: ", list(call.grad_input[0].shape))
print("grad_output:", list(call.grad_output[0].shape))
print("weight:     ", list(call.param_grads["weight"].shape))

# %% [markdown]
# What the two tuples hold: [What exactly are grad_input and
# grad_output?](../questions/what-are-grad-input-and-grad-output.md)

import inspect
import sys
from textwrap import dedent

import torch

module = sys.modules[torch.nn.Module.__module__]
lines = inspect.getsource(module).splitlines(True)
first = next(i for i, it in enumerate(lines) if "grad_fn = var.grad_fn" in it)
last = next(i for i, it in enumerate(lines) if "grad_fn.register_hook(" in it)
print(dedent("".join(lines[first : last + 1])), end="")

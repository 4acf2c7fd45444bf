"""Record what the torch that runs this file says of each mistake, as JSON.

``python tools/record_errors.py [OUT.json]`` prints without OUT.

One file, standard library and torch only: it runs unchanged on Python 3.6 and later and
on torch 1.0 and later, as ``record_hooks.py`` does.
``docs/data/errors/README.md`` says what the recordings hold.
"""

import argparse
import json
import re
import sys
import warnings
from pathlib import Path
from textwrap import dedent

import torch

# Where in torch's own code an error was raised: other machines have other paths.
PLACE = re.compile(r"\s*\([^()]* at \S+:\d+\)|\nException raised from|\nframe #")

START = """\
import torch

x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
y = x**2
"""

MISTAKES = {
    "GL101": [
        "torch.autograd.grad(y, x)",
        "y.backward()",
        "y.sum().to(torch.complex64).backward()",
    ],
    "GL102": [
        "torch.autograd.grad(y, x, torch.ones(2))",
        "torch.autograd.grad(y, x, torch.ones(3, 1))",
        "y.sum().backward(torch.ones(1))",
        "torch.autograd.grad([y, y], x, [torch.ones(3), torch.ones(2)])",
        "torch.autograd.grad([y, y], x, [torch.ones(3), torch.ones(1, 3)])",
    ],
    "GL103": [
        "torch.autograd.grad([y, y], x, [torch.ones(3)])",
        "torch.autograd.grad(y, x, [torch.ones(3), torch.zeros(3)])",
    ],
    "GL104": [
        "torch.autograd.grad(y.sum(), x, 0.5)",
        "torch.autograd.grad(y, x, [1.0, 1.0, 1.0])",
        "y.sum().backward(0.5)",
    ],
    "GL105": [
        "torch.autograd.grad(y, x, torch.tensor([1, 0, 1]))",
        "torch.autograd.grad(y, x, x > 0)",
        "torch.autograd.grad(y, x, torch.ones(3).double())",
        "torch.autograd.grad(y, x, torch.ones(3, dtype=torch.complex64))",
        "torch.autograd.grad(y.to(torch.complex64), x, torch.ones(3))",
    ],
    "GL106": ['torch.autograd.grad(y, x, torch.ones(3, device="meta"))'],
    "GL107": [
        "torch.autograd.grad(y, x, torch.eye(3))",
        "torch.autograd.grad(y, x, torch.ones(3), is_grads_batched=True)",
    ],
    "GL108": [
        "torch.autograd.grad(y.detach().sum(), x)",
        "y.detach().sum().backward()",
        "torch.autograd.backward([y.sum(), y.detach().sum()])",
    ],
    "GL109": [
        "torch.autograd.grad(y.sum(), x[0])",
        "torch.autograd.grad(y.sum(), [x, x[0]])",
    ],
    "GL110": [
        "torch.autograd.grad(y.sum(), torch.ones(3))",
        "torch.ones(3).retain_grad()",
    ],
    "GL111": [
        """
        torch.autograd.grad(y.sum(), x)
        torch.autograd.grad(y.sum(), x)
        """,
    ],
    "GL112": [
        """
        y = x.exp()
        y += 1
        y.sum().backward()
        """,
        """
        loss = (y * y).sum()
        y += 1
        loss.backward()
        """,
        """
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        loss = model(x.reshape(1, 3)).sum()
        with torch.no_grad():
            model[1].weight.add_(1)
        loss.backward()
        """,
        """
        first, second = y.split([1, 2])
        loss = (second * second).sum()
        second += 1
        loss.backward()
        """,
        "x += 1",
        "x[0] = 1",
    ],
    "GL113": [
        """
        losses = torch.stack([y.mean(), x.mean()])
        losses.backward()
        """,
    ],
    "GL114": [
        "torch.autograd.grad(y.sum(), torch.nn.Linear(3, 1))",
        "torch.autograd.grad(y.sum(), [None])",
        "torch.autograd.grad(y.sum(), [('x', x)])",
        "torch.autograd.grad(y.sum(), [])",
        "y.sum().backward(inputs=[])",
    ],
    "GL115": [
        "torch.autograd.grad(y.reshape(3, 1), x, torch.ones(3, 1).to_sparse_csr())",
        "torch.autograd.grad(y, x, torch.ones(3).to_mkldnn())",
        "torch.autograd.grad(y.reshape(3, 1), x, torch.ones(3, 1).to_sparse())",
    ],
}  # programs by gradlib's code; each is run after START


def error_of(program):
    """Run a program, and return what it raises, or ``None``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(program, {})
        except Exception as error:
            return f"{type(error).__name__}: {PLACE.split(str(error))[0].strip()}"
    return None


def recorded(mistake):
    """Return the recording of one mistake."""
    program = dedent(mistake).strip() + "\n"
    return {"program": program, "error": error_of(START + program)}


def recording():
    """Return the recording of all mistakes."""
    return {
        "torch": torch.__version__.split("+")[0],
        "python": ".".join(map(str, sys.version_info[:2])),
        "start": START,
        "mistakes": {
            code: [recorded(it) for it in MISTAKES[code]] for code in MISTAKES
        },
    }


def main():
    """Read the command line, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", metavar="OUT.json", type=Path)
    out = parser.parse_args().out
    text = json.dumps(recording(), indent=1, sort_keys=True) + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text)


if __name__ == "__main__":
    main()

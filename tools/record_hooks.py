"""Record what backward hooks get in the torch that runs this file, as JSON.

``python tools/record_hooks.py [--device cpu|cuda] [OUT.json]`` prints without OUT.

One file, standard library and torch only: it runs unchanged on Python 3.6 and later and
on torch 1.0 and later, so its code is older than the rest of the project's.
``docs/data/hooks/README.md`` says what the recordings hold.
"""

import argparse
import collections
import itertools
import json
import re
import sys
import warnings
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

KINDS = {
    "legacy": "register_backward_hook",
    "full": "register_full_backward_hook",
    "full_pre": "register_full_backward_pre_hook",
}
TOLERANCE = 1e-4  # of the largest entry: float32, and sums in another order

# ---- Values that are the same in every torch: its random numbers are not.

PRIME = 2147483647  # the square of a smaller number fits into int64


def values(name, *shape):
    """Return a float32 tensor in [-1, 1); another name gives other numbers."""
    size = int(torch.ones(shape).numel())
    start = zlib.crc32(name.encode())
    place = torch.arange(start, start + size, dtype=torch.int64)
    mixed = (place * 48271 + 11) % PRIME
    mixed = (mixed * mixed + place) % PRIME
    return (mixed.double() / PRIME * 2 - 1).float().reshape(shape)


Input = collections.namedtuple("Input", "make shape")


def grad(*shape):
    """Describe an input that requires grad, as a leaf."""
    return Input(lambda x: x.requires_grad_(), shape)


def data(*shape):
    """Describe an input that does not require grad."""
    return Input(lambda x: x, shape)


def computed(*shape):
    """Describe an input that another operation made."""
    return Input(
        lambda x: x.requires_grad_() * values("factor", *shape).to(x.device), shape
    )


def turned(*shape):
    """Describe a leaf whose first two dimensions are swapped in memory."""
    rows, columns, *others = shape
    drawn_as = (columns, rows, *others)
    return Input(lambda x: x.transpose(0, 1).requires_grad_(), drawn_as)


def indices(below, *shape):
    """Describe an input of integers from 0, all less than ``below``."""
    return Input(lambda x: ((x + 1) / 2 * below).long(), shape)


# ---- Modules that torch does not have.


class ThreadNet(nn.Module):
    """Three Linear layers with a loss, each layer to be hooked in its turn."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.fc1 = nn.Linear(3, 20)
        self.fc2 = nn.Linear(20, 30)
        self.fc3 = nn.Linear(30, 2)

    def forward(self, x, target):
        """Return the loss."""
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return F.cross_entropy(self.fc3(x), target)


class ConvThenBiasAdd(nn.Module):
    """A convolution whose bias is added by a node of its own.

    Stands in for what the cuDNN convolution of some builds does.
    """

    def __init__(self):
        """Make the parameters."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 16, 3, 3))
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x):
        """Convolve, then add."""
        return F.conv2d(x, self.weight, padding=1) + self.bias.reshape(1, -1, 1, 1)


class LinearExpandedBias(nn.Module):
    """A Linear whose bias is expanded by a node of its own, as before torch 1.0."""

    def __init__(self):
        """Make the parameters."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(30, 20))
        self.bias = nn.Parameter(torch.zeros(30))

    def forward(self, x):
        """Expand, then multiply and add."""
        bias = self.bias.expand(x.shape[0], 30)
        return torch.addmm(bias, x, self.weight.t())


class Computes(nn.Module):
    """A module without parameters."""

    def __init__(self, function):
        """Keep the function."""
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        """Call the function."""
        return self.function(*args, **kwargs)


class WithLayers(nn.Module):
    """Two Linear layers ``a`` and ``b``, and what is computed with them."""

    def __init__(self, function):
        """Make the layers."""
        super().__init__()
        self.function = function
        self.a = nn.Linear(20, 30)
        self.b = nn.Linear(20, 30)

    def forward(self, *args):
        """Call the function with the layers first."""
        return self.function(self.a, self.b, *args)


# ---- The cases.

Case = collections.namedtuple("Case", "make args kwargs hooked frozen used")


def case(make, *args, **options):
    """Describe a case.

    Args:
        make: Returns the module to call.
        args: Its positional inputs.
        options: ``kwargs``, its keyword inputs; ``hooked``, the name of the submodule
            to hook, by default the module itself; ``frozen``, whether parameters
            require no grad; ``used``, the numbers of the outputs that reach the loss,
            by default all.
    """
    defaults = {"kwargs": {}, "hooked": "", "frozen": False, "used": None}
    return Case(make, args, **dict(defaults, **options))


def linear(bias=True):
    """Return the Linear of most cases."""
    return nn.Linear(20, 30, bias=bias)


def thread_conv(bias=True):
    """Return the convolution of the thread."""
    return nn.Conv2d(16, 32, 3, padding=1, bias=bias)


CASES = {
    "linear-2d": case(linear, grad(4, 20)),
    "linear-2d-no-bias": case(lambda: linear(bias=False), grad(4, 20)),
    "linear-2d-data-input": case(linear, data(4, 20)),
    "linear-2d-frozen": case(linear, grad(4, 20), frozen=True),
    "linear-1d": case(linear, grad(20)),
    "linear-1d-no-bias": case(lambda: linear(bias=False), grad(20)),
    "linear-3d": case(linear, grad(4, 6, 20)),
    "linear-3d-no-bias": case(lambda: linear(bias=False), grad(4, 6, 20)),
    "linear-3d-non-contiguous": case(linear, turned(4, 6, 20)),
    "linear-4d": case(linear, grad(4, 6, 5, 20)),
    "linear-4d-no-bias": case(lambda: linear(bias=False), grad(4, 6, 5, 20)),
    "linear-expanded-bias": case(LinearExpandedBias, grad(4, 20)),
    "linear-relu-inplace": case(
        lambda: nn.Sequential(linear(), nn.ReLU(inplace=True)), grad(4, 20), hooked="0"
    ),
    "linear-relu-scaled": case(
        lambda: WithLayers(lambda a, _, x: F.relu(a(x)) * 2 + 1), grad(4, 20)
    ),
    "thread-fc1": case(ThreadNet, data(4, 3), indices(2, 4), hooked="fc1"),
    "thread-fc2": case(ThreadNet, data(4, 3), indices(2, 4), hooked="fc2"),
    "thread-fc3": case(ThreadNet, data(4, 3), indices(2, 4), hooked="fc3"),
    "thread-linear": case(lambda: nn.Linear(84, 10), grad(64, 84)),
    "thread-conv": case(thread_conv, grad(64, 16, 16, 16)),
    "thread-conv-no-bias": case(lambda: thread_conv(bias=False), grad(64, 16, 16, 16)),
    "conv-then-bias-add": case(ConvThenBiasAdd, grad(64, 16, 16, 16)),
    "conv1d": case(lambda: nn.Conv1d(3, 5, 3), grad(2, 3, 8)),
    "conv2d": case(lambda: nn.Conv2d(3, 5, 3), grad(2, 3, 8, 7)),
    "conv2d-no-bias": case(lambda: nn.Conv2d(3, 5, 3, bias=False), grad(2, 3, 8, 7)),
    "conv2d-data-input": case(lambda: nn.Conv2d(3, 5, 3), data(2, 3, 8, 7)),
    "conv3d": case(lambda: nn.Conv3d(3, 5, 3), grad(2, 3, 8, 7, 6)),
    "convtranspose2d": case(lambda: nn.ConvTranspose2d(3, 5, 3), grad(2, 3, 8, 7)),
    "batchnorm1d": case(lambda: nn.BatchNorm1d(5), grad(4, 5)),
    "batchnorm2d": case(lambda: nn.BatchNorm2d(5), grad(2, 5, 4, 3)),
    "layernorm": case(lambda: nn.LayerNorm(5), grad(4, 5)),
    "embedding": case(lambda: nn.Embedding(10, 5), indices(10, 4)),
    "relu": case(nn.ReLU, grad(4, 5)),
    "relu-computed-input": case(nn.ReLU, computed(4, 5)),
    "relu-inplace": case(lambda: nn.ReLU(inplace=True), computed(4, 5)),
    "dropout-train": case(nn.Dropout, grad(4, 5)),
    "dropout-eval": case(lambda: nn.Dropout().eval(), grad(4, 5)),
    "maxpool2d": case(lambda: nn.MaxPool2d(2), grad(2, 3, 8, 6)),
    "avgpool2d": case(lambda: nn.AvgPool2d(2), grad(2, 3, 8, 6)),
    "softmax": case(lambda: nn.Softmax(dim=1), grad(4, 5)),
    "view": case(lambda: Computes(lambda x: x.reshape(2, 10)), grad(4, 5)),
    "bilinear": case(lambda: nn.Bilinear(3, 4, 5), grad(2, 3), grad(2, 4)),
    "lstm": case(lambda: nn.LSTM(4, 3), grad(5, 2, 4)),
    "gru": case(lambda: nn.GRU(4, 3), grad(5, 2, 4)),
    "lstmcell": case(lambda: nn.LSTMCell(4, 3), grad(2, 4)),
    "multiheadattention": case(
        lambda: nn.MultiheadAttention(8, 2), *[grad(5, 2, 8)] * 3
    ),
    "transformerencoderlayer": case(
        lambda: nn.TransformerEncoderLayer(8, 2, 16), grad(5, 2, 8)
    ),
    "sequential-linear-relu": case(
        lambda: nn.Sequential(linear(), nn.ReLU()), grad(4, 20)
    ),
    "sequential-linear-linear": case(
        lambda: nn.Sequential(linear(), nn.Linear(30, 10)), grad(4, 20)
    ),
    "crossentropyloss": case(nn.CrossEntropyLoss, grad(4, 10), indices(10, 4)),
    "mseloss": case(nn.MSELoss, grad(4, 10), data(4, 10)),
    "two-inputs-add": case(
        lambda: WithLayers(lambda a, b, x, y: a(x) + b(y)), grad(4, 20), grad(4, 20)
    ),
    "two-inputs-mul": case(
        lambda: Computes(lambda x, y: x * y), grad(4, 5), grad(4, 5)
    ),
    "two-inputs-mul-first-data": case(
        lambda: Computes(lambda x, y: x * y), data(4, 5), grad(4, 5)
    ),
    "two-inputs-mul-second-data": case(
        lambda: Computes(lambda x, y: x * y), grad(4, 5), data(4, 5)
    ),
    "two-outputs": case(lambda: WithLayers(lambda a, b, x: (a(x), b(x))), grad(4, 20)),
    "unused-output": case(
        lambda: WithLayers(lambda a, b, x: (a(x), b(x))), grad(4, 20), used=[1]
    ),
    "dict-output": case(
        lambda: WithLayers(lambda a, b, x: {"a": a(x), "b": b(x)}), grad(4, 20)
    ),
    "nested-output": case(
        lambda: WithLayers(lambda a, b, x: (a(x), (b(x), x * 2))), grad(4, 20)
    ),
    "keyword-tensor": case(
        lambda: Computes(lambda x, scale: x * scale),
        grad(4, 5),
        kwargs={"scale": grad(4, 5)},
    ),
    "identity": case(lambda: Computes(lambda x: x), computed(4, 5)),
}

# ---- Running a case.


def run(one, device, prepare):
    """Run forward and backward once.

    Args:
        one: The case.
        device: ``"cpu"`` or ``"cuda"``.
        prepare: Called with the module to hook and the keyword inputs before forward.

    Returns:
        The warnings as ``"UserWarning: ..."``, each once, and the error or ``None``.
    """
    torch.manual_seed(0)  # Dropout zeroes the same elements in every run
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            module = made(one, device)
            args = [drawn(f"arg{i}", x, device) for i, x in enumerate(one.args)]
            kwargs = {name: drawn(name, x, device) for name, x in one.kwargs.items()}
            prepare(dict(module.named_modules())[one.hooked], kwargs)
            loss(tensors_in(module(*args, **kwargs)), one.used).backward()
        except Exception as raised:
            error = said(type(raised), raised)
    texts = [said(warning.category, warning.message) for warning in caught]
    return sorted(set(texts), key=texts.index), error


def made(one, device):
    """Return the module of a case, with parameters drawn by name."""
    module = one.make().to(device)
    for name, parameter in module.named_parameters():
        parameter.data.copy_(values("parameter " + name, *parameter.shape))
        parameter.requires_grad_(not one.frozen)
    return module


def drawn(name, described, device):
    """Return the tensor of an input."""
    return described.make(values("input " + name, *described.shape).to(device))


def loss(outputs, used):
    """Return the sum of the outputs, each times its weights."""
    weights = drawn_weights(outputs, used)
    return sum((outputs[i] * weights[i]).sum() for i in sorted(weights))


def drawn_weights(outputs, used):
    """Return, by the output's number, the gradient that the loss gives to it."""
    return {
        i: values(f"output {i}", *output.shape).to(output.device)
        for i, output in enumerate(outputs)
        if output.requires_grad and (used is None or i in used)
    }


def tensors_in(value):
    """Return the tensors in tuples, lists and dicts, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value] if torch.is_tensor(value) else []


def said(kind, message):
    """Return a warning or error as text, without what differs between machines."""
    text = re.split(r"\n?frame #|\nException raised from", str(message))[0]
    text = re.sub(r"\s*\(Triggered internally at [^)]*\)", "", text)
    text = re.sub(r"\s*\([^()]* at \S+:\d+\)", "", text)
    text = re.sub(r"0x[0-9a-f]+", "0x...", text)
    return f"{kind.__name__}: {text.strip()}"


def kept(gradient):
    """Return a copy of a gradient that nothing overwrites, as float64 on the CPU."""
    return gradient.detach().clone().double().cpu()


# ---- Without a hook: the gradients that entries are compared with.


def unhooked(one, device):
    """Run a case without a backward hook.

    Returns:
        The gradients by label, in the order of labels; the last node; the warnings.
    """
    found = {}
    modules = []
    outputs = []
    node = {}

    def before(module, args):
        modules.append(module)
        for i, argument in enumerate(args):
            listen(argument, f"arg{i}", found)

    def after(_module, _args, output):
        outputs.extend(tensors_in(output))
        node.update(described(outputs[0].grad_fn))
        for i, tensor in enumerate(outputs if one.hooked else []):
            listen(tensor, f"out{i}", found)

    def prepare(module, kwargs):
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        for name, argument in kwargs.items():
            listen(argument, "kwarg:" + name, found)

    warned, _ = run(one, device, prepare)
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[name] = kept(parameter.grad)
    if not one.hooked:  # A hook would also get gradients through the other outputs.
        weights = drawn_weights(outputs, one.used)
        found.update({f"out{i}": kept(weights[i]) for i in weights})
    in_order = sorted(found, key=lambda label: (rank(label), label))
    known = {label: found[label] for label in in_order}
    return known, node or described(None), warned


def listen(tensor, label, found):
    """Write the gradient of a tensor into ``found``, if the tensor gets one."""
    if not torch.is_tensor(tensor) or not tensor.requires_grad:
        return
    number = tensor.output_nr

    def on_tensor(gradient):
        found[label] = kept(gradient)

    def on_node(_grad_input, grad_output):
        if grad_output[number] is not None:
            found[label] = kept(grad_output[number])

    if tensor.grad_fn is None:
        tensor.register_hook(on_tensor)
    else:  # In older builds the hook of an overwritten tensor gets the new gradient.
        tensor.grad_fn.register_hook(on_node)


def rank(label):
    """Return the rank of a label: arguments, keywords, parameters, outputs."""
    patterns = (r"arg\d+$", r"kwarg:", r"(?!out\d+$)", r"")
    return next(i for i, pattern in enumerate(patterns) if re.match(pattern, label))


def described(node):
    """Return the name of an autograd node, and of the nodes its gradients go to."""
    if node is None:
        return {"name": None, "inputs": []}
    names = [named(before) for before, _ in node.next_functions]
    return {"name": named(node), "inputs": names}


def named(node):
    """Return the name of an autograd node, or ``None`` where there is none."""
    if node is None:
        return None
    name = type(node).__name__
    return node.name() if name == "CppFunction" else name


# ---- With a hook.


def hooked(one, device, kind, known, expected):
    """Run a case with a hook of one kind.

    Args:
        one: The case.
        device: ``"cpu"`` or ``"cuda"``.
        kind: A key of ``KINDS``.
        known: Gradients by label.
        expected: The warnings without the hook; these are left out.
    """
    if not hasattr(nn.Module, KINDS[kind]):
        return {"absent": True}
    calls = []

    def entries(gradients):
        return [entry(gradient, known) for gradient in gradients]

    def hook(_module, *got):
        grad_input = None if kind == "full_pre" else entries(got[0])
        calls.append({"grad_input": grad_input, "grad_output": entries(got[-1])})

    warned, error = run(
        one, device, lambda module, _: getattr(module, KINDS[kind])(hook)
    )
    fresh = [text for text in warned if text not in expected]
    return {"calls": calls, "warnings": fresh, "error": error}


def entry(gradient, known):
    """Return the shape of an entry, and the labels of the gradients it equals."""
    if gradient is None:
        return {"shape": None, "is": []}
    return {"shape": list(gradient.shape), "is": labels(kept(gradient), known)}


def labels(gradient, known):
    """Return the labels of known gradients that are equal in the simplest form."""
    for form, candidates in FORMS.items():
        found = [
            form % label
            for label, value in known.items()
            if any(
                same(gradient, candidate) for candidate in candidates(value, gradient)
            )
        ]
        if found:
            return found
    return []


def same(a, b):
    """Tell whether two tensors are equal up to rounding; zeros equal nothing."""
    if a.shape != b.shape or a.numel() == 0:
        return False
    largest = max(a.abs().max().item(), b.abs().max().item())
    return largest > 0 and (a - b).abs().max().item() <= TOLERANCE * largest


def as_it_is(value, _wanted):
    """Give the gradient itself."""
    return [value]


def transposed(value, _wanted):
    """Give a matrix with rows and columns exchanged."""
    return [value.t()] if value.dim() == 2 else []


def reshaped(value, wanted):
    """Give the same elements in the same order in another shape."""
    return [value.reshape(wanted.shape)] if value.numel() == wanted.numel() else []


def expanded(value, wanted):
    """Give the gradient repeated along dimensions."""
    sizes = list(reversed(value.shape))
    whole = list(reversed(wanted.shape))
    fits = len(sizes) <= len(whole) and all(
        size in (1, whole[i]) for i, size in enumerate(sizes)
    )
    return [value.expand(wanted.shape)] if fits else []


def summed(value, wanted):
    """Give the sums over any of the dimensions that lead to the wanted shape."""
    every = range(value.dim())
    for count in range(1, value.dim() + 1):
        for over in itertools.combinations(every, count):
            left = [value.shape[i] for i in every if i not in over]
            if [n for n in left if n > 1] == [n for n in wanted.shape if n > 1]:
                yield value.sum(dim=over).reshape(wanted.shape)


FORMS = collections.OrderedDict(
    [
        ("%s", as_it_is),
        ("T(%s)", transposed),
        ("reshape(%s)", reshaped),
        ("expand(%s)", expanded),
        ("sum(%s)", summed),
    ]
)

# ---- All of it.


def recorded(one, device):
    """Return the recording of one case."""
    known, node, expected = unhooked(one, device)
    recording = {kind: hooked(one, device, kind, known, expected) for kind in KINDS}
    recording["last_node"] = node
    return recording


def recording_of(device):
    """Return the recording of all cases."""
    torch.set_num_threads(1)  # torch chooses kernels by the number of threads
    torch.backends.cudnn.deterministic = True
    if hasattr(torch, "set_warn_always"):
        torch.set_warn_always(True)
    cases = {name: recorded(one, device) for name, one in CASES.items()}
    return dict(build(), device=device, cases=cases)


def build():
    """Return the version of torch, without what follows a ``+``, and the Python's."""
    return {
        "torch": torch.__version__.split("+")[0],
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def write(recording, out):
    """Write a recording to a file, or to standard output where ``out`` is ``None``."""
    text = json.dumps(recording, indent=1, sort_keys=True) + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text)


def main():
    """Read the command line, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("out", nargs="?", metavar="OUT.json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this build of torch finds no such device.")
    write(recording_of(arguments.device), arguments.out)


if __name__ == "__main__":
    main()

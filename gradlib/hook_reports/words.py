"""The words of a hook report: what each entry is, and why there are that many."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.edges import edge_of
from gradlib.hook_reports.first_tensor import ENDLESS, first_node, first_tensor
from gradlib.hook_reports.graph import name_of, read
from gradlib.hook_reports.hooks import (
    ACCUMULATED,
    FULL,
    FULL_PRE,
    LEGACY,
    NODE,
    ON_NODE,
    SEVERAL,
    TENSOR,
    Got,
)
from gradlib.hook_reports.known import (
    COMPUTED,
    OUTSIDE,
    KnownGradients,
    Names,
    each_inner_output,
    gradients_of_idle,
)
from gradlib.hook_reports.naming import name_by_value
from gradlib.hook_reports.trial import (
    Trial,
    differentiable,
    requires_grad,
    uses_in,
)
from gradlib.private import own_parameters
from gradlib.selection import has_own_call
from gradlib.tree import Tree, tensors_in

ON_LAST_NODE = (LEGACY, *ON_NODE)
"""The kinds that sit on the last node."""

BORDER = (FULL, FULL_PRE)
"""The kinds that sit at the border of a module."""

_WHY_ON_TENSORS = {
    TENSOR: "No tuple: each output that requires grad has a hook of its own.",
    ACCUMULATED: (
        "No tuple: the hook gets the leaf, and reads its .grad, to which this pass has "
        "just added. Here each argument and own parameter that is a leaf has one."
    ),
    SEVERAL: (
        "One tuple for all the tensors it was set on, in their order: here the "
        "arguments that require grad, and the module's own parameters."
    ),
}


class HookedCall:
    """A module with its inputs, and what is known of its call without a hook."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Run the module without a hook; what it raises comes through."""
        self.module = module
        self._args = args
        self._keywords = [key for key, value in kwargs.items() if tensors_in(value)]
        self.inputs = Tree.of((args, kwargs))
        self._names = Names(module, args, kwargs)
        plain = self.trial()
        self._given: tuple[Any, ...] = ()  # after hooks that may change the arguments
        plain.module.register_forward_pre_hook(self._take_given)
        self._inner: dict[tuple[Node | None, int], str] = {}
        each_inner_output(plain.module, self._name_inner)
        self._output = plain.run(backward=False)
        self._plain_args = plain.inputs.build()[0]
        self._hooked = [*self.named(SEVERAL, plain, self._output)]
        self._node = first_node(self._output)
        self._edges = self._node.next_functions if self._node else ()
        self._before = [node for node, _ in self._edges]
        self._uses = uses_in(differentiable(self._output).values())
        end_at = self._names.ends(plain)
        ends = [node and end_at(node) for node in self._before]
        self._tensors = [end and end.name for end in ends]
        # What made a tensor that the module returns as it was, and its name. In the
        # copy there is a stand-in.
        self._maker = self._returned = None
        if self._node is not None and self._node in plain.stands_for:
            self._maker = plain.stands_for[self._node]
            end = end_at(self._node)
            self._returned = end and end.name
        given = [self._position("grad_input", i) for i in range(len(self._given))]
        self.graph = read(self.trial(), self._names, given)
        self._known = KnownGradients(self.trial(), self._names)
        self._known.compare(KnownGradients(self.trial(), self._names))
        both = (*plain.warnings, *self._known.warnings)
        self.warnings = tuple(dict.fromkeys(both))  # in their order, each once

    def _take_given(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        self._given = self._given or args  # a module may call itself

    def _name_inner(self, name: str, tensor: Tensor) -> None:
        self._inner[edge_of(tensor)] = name

    @property
    def repeats(self) -> bool:
        """Whether two runs give the same gradients, but for rounding."""
        return self._known.repeats

    def last_node(self) -> tuple[str, tuple[str, ...]]:
        """Return the name of the last node, and one for each of its inputs."""
        node, tensors = self._node, self._tensors
        if self._maker is not None:
            node = self._maker
            tensors = [None] * len(node.next_functions)
        if node is None:
            return "", ()
        before = (n for n, _ in node.next_functions)
        pairs = zip(before, tensors, strict=True)
        return node.name(), tuple(name or _name(n) for n, name in pairs)

    @cached_property
    def _idle(self) -> dict[str, Tensor]:
        return gradients_of_idle(self.trial(), self._names)

    def trial(self) -> Trial:
        """Return a fresh copy of the module and its inputs."""
        return Trial(self.module, self.inputs)

    def why_not_tried(self, kind: str) -> str:
        """Say why a kind of hook cannot even be tried, or ``""``."""
        if kind not in ON_LAST_NODE:
            return ""
        if first_tensor(self._output.build()) is not ENDLESS:
            return ""
        if kind == LEGACY:
            return "Not tried: torch would look for a tensor in the output for ever."
        return f"Not tried: there is no node that {LEGACY} would sit on."

    def named(self, kind: str, trial: Trial, output: Tree) -> dict[str, Tensor]:
        """Return the tensors that a kind of hook is tried on, by their names.

        Args:
            kind: Of a hook that is set on tensors.
            trial: The copy that has run.
            output: What it returned.
        """
        outputs = {
            f"output{output.path(i)}": it for i, it in differentiable(output).items()
        }
        if kind == TENSOR or not outputs:
            return outputs
        given = {
            self._names.of_input(trial.inputs, i): it
            for i, it in differentiable(trial.inputs).items()
        }
        own = {
            name: it
            for name, it in own_parameters(trial.module).items()
            if it is not None and it.requires_grad
        }
        named = given | own
        if kind == ACCUMULATED:
            return {name: it for name, it in named.items() if it.is_leaf}
        return named

    def what(self, kind: str, got: Got) -> str:
        """Name an entry by its value, or say why it has none."""
        field, i, grad, tensor = got
        if grad is None:
            if tensor and self._known.arrives(tensor):
                return "None: torch called the hook without it"
            return f"None: {self._why_nothing(kind, field, i)}"
        if grad.is_nested:
            return "gradient of an inner tensor, which is nested"
        if grad.numel() and not grad.any():
            dtype = "" if grad.is_floating_point() else f"{grad.dtype} "
            return f"{dtype}zeros: {self._why_zeros(kind, got)}"
        of_last_node = kind in ON_LAST_NODE and field == "grad_input"
        needed = not of_last_node or self._before[i] is not None
        if not needed and (name := name_by_value(grad, {}, self._idle)):
            return f"{name}, which does not require grad"
        of_output = field == "grad_output" or tensor.startswith("output")
        name = self._known.name(grad, outputs_first=of_output)
        if name is not None:
            return name
        if not self._known.repeats:
            return "not known: it is another gradient at each run"
        if tensor:  # as of an argument that is returned
            return f"gradient of {tensor}, with all its other uses"
        if not of_last_node:
            return "gradient of an inner tensor"
        if not needed:
            return "gradient for a tensor that does not require grad"
        end = self._tensors[i]
        if end in (OUTSIDE, COMPUTED):
            return f"gradient for {end}"
        if end:
            return f"a part of the gradient of {end}, which has other uses, too"
        return self._what_inner(*self._edges[i])

    def _what_inner(self, node: Node | None, number: int) -> str:
        """Name what one use gives to a tensor that the module itself computes."""
        said = f"gradient of an inner tensor, from {_name(node)}"
        if node is None or self._uses[node, number] < 2:
            return said
        if name := self._inner.get((node, number)):
            return f"a part of the gradient of {name}, which has other uses, too"
        return f"a part of the {said}"

    def why(self, kind: str, lengths: Mapping[str, int]) -> str:
        """Say why the tuples have their lengths, and what would change them."""
        if kind == LEGACY:
            return self._why_legacy(lengths["grad_input"])
        if kind == FULL:
            return self._why_full(lengths["grad_input"])
        if kind == FULL_PRE:
            count = _entries(lengths["grad_output"])
            return f"{count} in grad_output: one for each output. No grad_input."
        if kind in ON_NODE:
            return self._why_node(kind, lengths)
        return _WHY_ON_TENSORS[kind]

    def why_never(self, kind: str) -> str:
        """Say why a hook was never called, though nothing was raised."""
        output = self._output.build()
        if not tensors_in(output) and output is not None:
            kind_of = type(output).__name__
            return f"Never called: no tensor is found in the output, a {kind_of}."
        if not differentiable(self._output):
            off = "" if torch.is_grad_enabled() else ": gradients are disabled"
            return f"Never called: no output requires grad{off}."
        if kind in ON_LAST_NODE and self._node is None:
            return (
                "Never called: the first output tensor has no autograd node, as it is "
                "a leaf or does not require grad."
            )
        if kind == ACCUMULATED:
            return (
                "Never called: neither an argument nor a parameter of the module's own "
                "is a leaf that requires grad."
            )
        if kind == SEVERAL and any(map(self._known.arrives, self._hooked)):
            return (
                "Never called: torch does not count a tensor that the backward pass "
                "begins at."
            )
        if kind == SEVERAL:
            return (
                "Never called: no gradient comes to an argument or to a parameter of "
                "the module's own."
            )
        if kind in BORDER and not isinstance(output, Tensor | tuple):
            return (
                f"Never called: the output is of type {type(output).__name__}, and "
                "this hook needs a tensor or a tuple of tensors."
            )
        top = cast(Any, output if isinstance(output, tuple) else (output,))
        if kind in BORDER and not any(map(requires_grad, top)):
            return "Never called: no tensor that requires grad is at the top level."
        given = [self._names.of_argument(i) for i in range(len(self._args))]
        asked = any(map(requires_grad, self._args))
        if kind == FULL and asked and not any(map(self._known.arrives, given)):
            return (
                "Never called: where an argument requires grad, this hook waits for "
                "the gradient of one, and none comes."
            )
        if has_own_call(self.module):
            kind_of = type(self.module).__name__
            return f"Never called: {kind_of} has a __call__ of its own, without hooks."
        return "Never called, for a reason that this report does not know."

    def _why_legacy(self, length: int) -> str:
        maker, inputs = self.last_node()
        if self._maker is not None:
            name = self._returned
            return (
                f"The module returns {name} itself, so this hook sits on the node that "
                f"made {name}, {maker}, outside the module: where that is, it receives "
                f"{_entries(len(inputs))}. In the copy a stand-in has one."
            )
        several = len(tensors_in(self._output.build())) > 1
        of = "the first output tensor" if several else "the output"
        said = (
            f"{_entries(length)} in grad_input: one for each input of {maker}, the "
            f"node of {of}."
        )
        changes = [
            f"{words}: {len(node.next_functions)}, for {node.name()}."
            if node
            else f"{words}: never called."
            for words, node in self._variants()
            if node is None or len(node.next_functions) != length
        ]
        general = "Another last operation would give another length."
        return " ".join([said, *(changes or [general])])

    def _why_node(self, kind: str, lengths: Mapping[str, int]) -> str:
        """Say what decides the lengths of the tuples that a node's hook gets."""
        field = "grad_input" if kind == NODE else "grad_output"
        if self._maker is not None:
            name, maker = self._returned, self.last_node()[0]
            return (
                f"The module returns {name} itself, so the node is {maker}, which made "
                f"{name} outside the module: there the hook receives one entry for "
                f"each {field.removeprefix('grad_')} of {maker}. In the copy a "
                f"stand-in has {lengths[field]}."
            )
        said = (
            f"{_entries(lengths[field])} in {field}: one for each "
            f"{field.removeprefix('grad_')} of {self.last_node()[0]}, the node that "
            f"{LEGACY} sets its hook on too."
        )
        return said if kind == NODE else f"{said} No grad_input."

    def _why_full(self, length: int) -> str:
        said = f"{_entries(length)} in grad_input: one for each positional argument."
        if self._keywords:
            said += f" No entry for a keyword argument ({', '.join(self._keywords)})."
        if not any(map(requires_grad, self._args)):
            said += " No tensor among them requires grad."
        return said + " The operations inside do not change that."

    def _why_zeros(self, kind: str, got: Got) -> str:
        """Say what gradient is zero, from where it stands, or why there is none."""
        field, i, _, name = got
        if (
            kind in ON_LAST_NODE
            and field == "grad_input"
            and self._before[i] is not None
        ):
            name = self._tensors[i] or f"input {i} of {self.last_node()[0]}"
            return f"gradient of {name}"
        if kind == FULL and field == "grad_input" and i < len(self._args):
            name = self._position(field, i)[0]
        if name and self._known.arrives(name):
            return f"gradient of {name}"
        return self._why_nothing(kind, field, i)

    def _why_nothing(self, kind: str, field: str, i: int) -> str:
        """Say why an entry is ``None``, or zeros that stand for it."""
        if kind in ON_LAST_NODE:
            name, _ = self.last_node()
            if field == "grad_output":
                return f"nothing flows into output {i} of {name}"
            if self._before[i] is None:
                return f"input {i} of {name} needs no gradient"
            return f"nothing flows out of input {i} of {name}"
        if field == "grad":
            return "nothing flows to it"
        if field == "grad_input" and i >= len(self._args):
            return "a forward pre-hook added the argument"
        name, value = self._position(field, i)
        if not isinstance(value, Tensor):
            lost = ", and no tensor inside gets an entry" if tensors_in(value) else ""
            return f"{name} is of type {type(value).__name__}{lost}"
        if not value.requires_grad:
            return f"{name} does not require grad"
        return f"nothing flows to {name}"

    def _position(self, field: str, i: int) -> tuple[str, Any]:
        """Return the name and value of what a full hook's entry stands for."""
        if field == "grad_input":
            value = self._given[i]
            places = [j for j, it in enumerate(self._plain_args) if it is value]
            place = i if i in places else next(iter(places), None)
            name = f"args[{i}]" if place is None else self._names.of_argument(place)
            return name, value
        output = self._output.build()
        if isinstance(output, tuple):
            return f"output[{i}]", cast("tuple[Any, ...]", output)[i]
        return "output", output

    def _variants(self) -> Iterator[tuple[str, Node | None]]:
        """Try what often changes the last node, and give the node it then is."""
        bias = self.trial()
        if own_parameters(bias.module).get("bias") is not None:
            bias.module.bias = None
            yield from _tried("Without bias", lambda: bias)
        yield from _tried(
            "With one more leading dimension",
            lambda: Trial(self.module, self.inputs, lambda it: it.unsqueeze(0)),
        )
        mode = "eval" if self.module.training else "training"
        yield from _tried(f"In {mode} mode", self._switched)

    def _switched(self) -> Trial:
        trial = self.trial()
        trial.module.train(not self.module.training)
        return trial


def _tried(words: str, made: Callable[[], Trial]) -> Iterator[tuple[str, Node | None]]:
    try:
        trial = made()
        output = trial.run(backward=False)
    except Exception:
        return  # the module does not take that
    node = first_node(output)
    yield words, node and trial.stands_for.get(node, node)


def _name(node: Node | None) -> str:
    return name_of(node) if node else "-"


def _entries(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"

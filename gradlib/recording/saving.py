"""A recording as plain values, to be written to a file, and back."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gradlib.errors import NotStorableError, RecordingArgumentError
from gradlib.plain_values import Class, Writer, dtype_named
from gradlib.recording.flow import Flow
from gradlib.recording.nonfinite import nonfinite_state
from gradlib.recording.places import input_name, output_name
from gradlib.recording.replayable import label
from gradlib.recording.trace import Block, CallTrace
from gradlib.stats import TensorStats
from gradlib.tree import Tree

# The fields of a call that are written as they are. Its inputs, output and gradients
# are written in forms of their own; what a replay needs is not.
AS_IT_IS = (
    "name",
    "index",
    "forward",
    "module_type",
    "moment",
    "caller",
    "parameters",
    "holds_state",
    "calls_others",
    "has_tangents",
    "hooks_inside",
    "passes_over_casts",
    "no_pass_because",
)
# The fields that hold keys of its inputs and own parameters, or places of its outputs.
OF_INPUTS = ("idle", "closed_inputs", "returned")
OF_OUTPUTS = ("idle_outputs", "closed_outputs")
GATHERED = ("shares", "totals", "outputs")


def require_path(path: object) -> None:
    """Raise unless `path` may name a file."""
    if not isinstance(path, str | os.PathLike):
        raise RecordingArgumentError(
            'path must name a file, as "run.safetensors", but it is of type '
            f"{type(path).__name__}."
        )
    name = os.fspath(cast("str | os.PathLike[str] | os.PathLike[bytes]", path))
    try:
        fits = isinstance(name, str) and b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # half of a pair of surrogates
        fits = False
    if not fits:
        raise RecordingArgumentError(
            'path must name a file, as "run.safetensors", and no file can have the '
            f"name {name!r}: it must be a str that the file system can encode, "
            "without a null character."
        )


def plain(
    block: Block, names: Mapping[str, str], traces: Sequence[CallTrace]
) -> dict[str, Any]:
    """Return what a recording holds, as plain values and tensors."""
    return {
        "fields": sorted(block.fields),
        "left_out": block.left_out,
        "with_graph": sorted(block.with_graph),
        "batched": sorted(block.batched),
        "captured": sorted(block.captured),
        "happened": dict(block.happened),
        "unfinished": sorted(block.unfinished),
        "cast_to": sorted(map(str, block.cast_to)),
        "is_reduced": block.is_reduced,
        "names": dict(names),
        "calls": [_plain_call(trace) for trace in tuple(traces)],
    }


def refused_in(traces: Sequence[CallTrace]) -> str:
    """Name the first argument or output that cannot be written; ``""`` for none."""
    for trace in traces:
        given = [(input_name, it) for it in enumerate(trace.inputs.leaves)]
        returned = [(output_name, it) for it in enumerate(trace.output_leaves())]
        for name_of, (place, leaf) in (*given, *returned):
            try:
                if isinstance(leaf, Tensor):
                    Writer({}).written(leaf)
            except NotStorableError:
                return f"{name_of(trace, place)} of {label(trace)}"
    return ""


def restored(
    content: dict[str, Any],
) -> tuple[Block, dict[str, str], list[CallTrace]]:
    """Return the arguments that `plain` was given."""
    numbers = sorted({n for call in content["calls"] for n in call["passes"]})
    block = Block(
        fields=frozenset(content["fields"]),
        numbers={number: number for number in numbers},
        with_graph=set(content["with_graph"]),
        batched=set(content["batched"]),
        captured=set(content["captured"]),
        happened=content["happened"],
        left_out=content["left_out"],
        unfinished=set(content["unfinished"]),
        cast_to={*map(dtype_named, content["cast_to"])},
        is_reduced=content["is_reduced"],
    )
    traces = [_restored_call(block, call) for call in content["calls"]]
    return block, content["names"], traces


def _plain_call(trace: CallTrace) -> dict[str, Any]:
    passes, numbers = trace.passes(), trace.block.numbers
    gone_through = {numbers[it] for flow in trace.flows for it in flow.gone_through}
    behind = [
        flow.behind_batched for flow in trace.flows if flow.behind_batched is not None
    ]
    return {
        **{it: getattr(trace, it) for it in (*AS_IT_IS, *OF_INPUTS, *OF_OUTPUTS)},
        "passes": passes,
        "gone_through": sorted(gone_through),
        "behind_batched": min(behind, default=None),
        "missed": [it for it in passes if trace.has_missed(it)],
        "gave_back": any(flow.gave_back for flow in trace.flows),
        "recomputed": trace.recomputed_in is not None,
        "gathers": bool(trace.flows),
        "inputs": _plain_tree(trace.inputs),
        "output": None if trace.output is None else _plain_tree(trace.output),
        "nonfinite_state": nonfinite_state(trace),
        **{gathered: _plain_grads(trace, gathered, passes) for gathered in GATHERED},
    }


def _plain_grads(trace: CallTrace, gathered: str, passes: list[int]) -> dict[Any, Any]:
    """Return the gradients of one field of `Flow`, by key and number of the pass.

    A key that waited for a gradient and got none is included: the note tells of it.
    """
    found: dict[Any, dict[int, Any]] = {
        key: {} for flow in trace.flows for key in getattr(flow, gathered)
    }
    for number in passes:
        for key, value in trace.gradients(gathered, number).items():
            found[key][number] = value
    return found


def _plain_tree(tree: Tree) -> dict[str, Any]:
    return {"form": tree.form(), "leaves": tree.leaves}


def _restored_call(block: Block, call: dict[str, Any]) -> CallTrace:
    inputs, input_places = _restored_tree(call["inputs"])
    output, output_places = (None, {})
    if call["output"] is not None:
        output, output_places = _restored_tree(call["output"])
    trace = CallTrace(block, "", 0, "", 0)
    for name in AS_IT_IS:
        setattr(trace, name, call[name])
    trace.inputs, trace.output = inputs, output
    trace.nonfinite_state = call["nonfinite_state"]
    trace.recomputed_in = 0 if call["recomputed"] else None
    for names, places in ((OF_INPUTS, input_places), (OF_OUTPUTS, output_places)):
        for name in names:
            setattr(trace, name, [places.get(key, key) for key in call[name]])
    flow = Flow()
    for gathered in GATHERED:
        places = output_places if gathered == "outputs" else input_places
        for key, grads in call[gathered].items():
            getattr(flow, gathered)[places.get(key, key)] = grads
    flow.gone_through = frozenset(call["gone_through"])
    flow.behind_batched = call["behind_batched"]
    flow.missed = frozenset(call["missed"])
    flow.gave_back = call["gave_back"]
    trace.flows = [flow] if call["gathers"] else []
    return trace


def _restored_tree(saved: dict[str, Any]) -> tuple[Tree, dict[Any, Any]]:
    """Return a tree, and the new place of each leaf by its old one.

    They differ where a class made of a dict, with its leaves in an order of their own,
    has become a dict, with its leaves in the order of its keys.
    """
    form = Tree.of(saved["form"])
    order: list[int] = form.leaves
    leaves = [saved["leaves"][place] for place in order]
    return Tree(leaves, form.spec), {old: new for new, old in enumerate(order)}


def _plain_stats(stats: TensorStats) -> list[Any]:
    return [list(stats.shape), str(stats.dtype), stats.numbers()]


def _restored_stats(saved: list[Any]) -> TensorStats:
    shape, dtype, numbers = saved
    return TensorStats(torch.Size(shape), dtype_named(dtype), numbers)


CLASSES: dict[str, Class] = {"stats": (TensorStats, _plain_stats, _restored_stats)}

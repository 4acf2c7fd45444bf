"""Every contender records what it says, held against autograd without any hooks."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from benchmarks.contender import Contender, Seen, SeenAll, as_tuple
from benchmarks.contenders import contenders
from benchmarks.names import NONE, OURS_STATISTICS
from benchmarks.nets import Net, mlp, transformer
from benchmarks.recorder import why_not

CPU = torch.device("cpu")
EVERYONE = {one.name: one for one in contenders()}
BY_VALUE = [name for name in EVERYONE if name not in (NONE, OURS_STATISTICS)]


def without_dropout(net: Net) -> Net:
    """TorchLens seeds the random state anew, so that its dropout is another."""
    for module in net.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return net


NETS: dict[str, Callable[[], Net]] = {
    "mlp": lambda: mlp(CPU, modules=6, width=4, batch=3),
    "transformer": lambda: transformer(CPU, layers=2, width=8, batch=2),
    "without dropout": lambda: without_dropout(NETS["transformer"]()),
}
PAIRS = [
    (name, kind)
    for name in BY_VALUE
    for kind in ("mlp", "without dropout" if name == "TorchLens" else "transformer")
]


def present(name: str) -> Contender:
    contender = EVERYONE[name]
    if contender.absent:
        pytest.skip(contender.absent)
    return contender


def expected(net: Net, *, shares: bool) -> SeenAll:
    """Ask autograd itself; with each call's inputs cloned, for what it gives alone."""
    model = copy.deepcopy(net.model)
    calls: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {}

    def clone(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.clone() if isinstance(x, Tensor) else x for x in args)

    def after(name: str, _module: nn.Module, args: Any, output: Any) -> None:
        calls[name] = args, as_tuple(output)

    for name, module in model.named_modules():
        if shares:
            module.register_forward_pre_hook(clone)
        module.register_forward_hook(partial(after, name))
    torch.manual_seed(7)  # dropout
    loss = net.loss(model(net.x))

    leaves = [x for args, output in calls.values() for x in (*args, *output)]
    leaves += model.parameters()
    asked = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    grads = torch.autograd.grad(loss, asked, allow_unused=True)
    found = dict(zip(map(id, asked), grads, strict=True))

    def grad(x: object) -> Tensor | None:
        return found.get(id(x))

    field = "grad_input_share" if shares else "grad_input_total"
    return SeenAll(
        {
            name: Seen(
                args,
                output,
                tuple(map(grad, output)),
                **{field: tuple(map(grad, args))},
            )
            for name, (args, output) in calls.items()
        },
        {
            name: gradient
            for name, parameter in model.named_parameters()
            if (gradient := grad(parameter)) is not None
        },
    )


def use(contender: Contender, net: Net) -> SeenAll:
    if reason := why_not(contender, net):
        pytest.skip(f"{contender.name} on {net.name}: {reason}")
    with contender.around():
        net.model.zero_grad()
        torch.manual_seed(7)
        return contender.read(contender.use(net))


def added_up(args: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a tensor that is passed in several places the sum of its gradients."""
    return tuple(
        None
        if grad is None
        else sum(g for y, g in zip(args, grads, strict=True) if y is x)
        for x, grad in zip(args, grads, strict=True)
    )


def once_each(args: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Leave out repeated tensors and what is no tensor, as TorchLens does."""
    known = {
        id(x): value
        for x, value in zip(args, values, strict=True)
        if isinstance(x, Tensor)
    }
    return tuple(known.values())


def wanted_of(name: str, total: Seen, share: Seen) -> dict[str, tuple[Any, ...]]:
    """Return what a contender's fields shall hold."""
    wanted: dict[str, Any] = {
        "args": total.args,
        "output": total.output,
        "grad_output": total.grad_output,
        "grad_input_total": total.grad_input_total,
        "grad_input_share": share.grad_input_share,
    }
    if name == "gradlib":  # what goes to one tensor is one share
        wanted["grad_input_share"] = added_up(total.args, wanted["grad_input_share"])
    if name == "TorchLens":
        for field, values in wanted.items():
            places = total.output if "output" in field else total.args
            wanted[field] = once_each(places, values)
    return wanted


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_it_records_what_it_says(name: str, kind: str) -> None:
    net = NETS[kind]()
    totals, shares = expected(net, shares=False), expected(net, shares=True)
    seen = use(present(name), net)
    assert seen.calls.keys() == totals.calls.keys()
    for module, call in seen.calls.items():
        assert call.grad_input_share or call.grad_input_total
        wanted = wanted_of(name, totals.calls[module], shares.calls[module])
        for field, values in wanted.items():
            found = getattr(call, field)
            if found is None:
                continue
            if name == "captum" and values == (None,):
                continue  # it asks for the gradient of the net's own input too
            message = f"{field} of {module!r}: {{}}".format
            assert_close(found, values, msg=message)


@pytest.mark.parametrize(
    ("name", "kind"),
    [pair for pair in PAIRS if pair[0] != "captum"],  # which gives none
)
def test_it_records_the_gradients_of_the_parameters(name: str, kind: str) -> None:
    net = NETS[kind]()
    wanted = expected(net, shares=False)
    seen = use(present(name), net)
    called = {p for p in wanted.param_grads if p.rpartition(".")[0] in net.called}
    assert called
    assert called <= seen.param_grads.keys()
    for parameter, grad in seen.param_grads.items():
        assert_close(grad, wanted.param_grads[parameter])


def test_statistics_are_those_of_the_same_tensors() -> None:
    contender, net = present(OURS_STATISTICS), NETS["transformer"]()
    wanted = expected(net, shares=False)
    seen = use(contender, net)
    assert seen.calls.keys() == wanted.calls.keys()
    for module, call in seen.calls.items():
        for field in ("args", "output", "grad_output", "grad_input_total"):
            tensors = getattr(wanted.calls[module], field)
            for found, tensor in zip(getattr(call, field), tensors, strict=True):
                if isinstance(tensor, Tensor):
                    assert_close(torch.as_tensor(found.norm), tensor.norm().detach())


@pytest.mark.parametrize("name", EVERYONE)
def test_nothing_of_it_is_left(name: str) -> None:
    contender, net = present(name), NETS["mlp"]()
    with contender.around():
        contender.use(net)
    assert not net.x.requires_grad
    for module in net.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    if not contender.peer:  # they may leave what they like
        assert not any(p._backward_hooks for p in net.model.parameters())


@pytest.mark.parametrize("name", [n for n in BY_VALUE if not EVERYONE[n].peer])
def test_what_it_recorded_goes_when_it_is_dropped(name: str) -> None:
    contender, net = present(name), NETS["mlp"]()
    with contender.around():
        recorded = contender.use(net)
    gone = [
        weakref.ref(x)
        for call in contender.read(recorded).calls.values()
        for x in (*call.output, *call.grad_output)
    ]
    assert gone
    del recorded
    gc.collect()
    assert not any(ref() is not None for ref in gone)


def test_the_transformer_does_not_take_its_fast_path() -> None:
    net = NETS["transformer"]()
    for name in ("self_attn", "linear1", "dropout", "norm2"):
        assert f"layers.1.{name}" in net.called


def test_hooks_by_hand_keep_references() -> None:
    net = NETS["mlp"]()
    recorded = EVERYONE["tensor hooks by hand"].use(net)
    first, second = recorded.calls[:2]
    assert second.args[0] is first.output
    weight = net.model.get_parameter("0.weight")
    assert weight.grad is not None
    (kept,) = recorded.param_grads["0.weight"]
    assert kept.data_ptr() == weight.grad.data_ptr()

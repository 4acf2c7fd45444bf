"""Small nets: what is known of their form is enough."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradlib
from gradlib.jacobian.call import Call
from gradlib.jacobian.fast import matmul
from gradlib.jacobian.fast.chains import plain
from gradlib.jacobian.fast.chains.find import find_plain
from gradlib.jacobian.fast.chains.plain import PlainNet
from gradlib.jacobian.fast.chains.pointwise import POINTWISE

from .lines import by_loop

pytestmark = pytest.mark.cpu  # a GPU replays a chain instead

are_close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


def net(*widths: int, kind: Callable[[], nn.Module] = nn.Tanh) -> Any:
    """Return linear layers with something between each two."""
    pairs = itertools.pairwise(widths)
    layers = [it for ins, outs in pairs for it in (nn.Linear(ins, outs), kind())]
    return nn.Sequential(*layers[:-1]).double()


def batch(samples: int, width: int) -> Tensor:
    """Return some samples."""
    return torch.randn(samples, width, dtype=torch.float64)


def small_net(fn: Any, inputs: tuple[Any, ...]) -> PlainNet | None:
    """Return the small net that a call is, if it is one."""
    found = find_plain(Call(fn, inputs, 0, 0, "auto", "auto", None, None, False))
    return found if isinstance(found, PlainNet) else None


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """Return the Jacobian of a small net."""
    found = small_net(model, (x,))
    assert isinstance(found, PlainNet)
    return found.jacobian()


@pytest.mark.parametrize("kind", [it for it in POINTWISE if not POINTWISE[it].options])
@pytest.mark.parametrize("widths", [(3, 20, 2), (3, 5, 4, 1), (2, 1, 1)])
def test_every_activation(kind: type[nn.Module], widths: tuple[int, ...]) -> None:
    model, x = net(*widths, kind=kind), batch(7, widths[0])
    found = jacobian(model, x)
    are_close(found, by_loop(model, x))
    assert not found.requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("has_bias", [*itertools.product([True, False], repeat=3)])
def test_biases_or_none(has_bias: tuple[bool, ...]) -> None:
    model, x = net(3, 5, 4, 2), batch(7, 3)
    for layer, has in zip(model[::2], has_bias, strict=True):
        if not has:
            layer.bias = None
    are_close(jacobian(model, x), by_loop(model, x))


def test_layers_that_write_in_place() -> None:
    model, x = net(3, 5, 4, 2, kind=lambda: nn.ReLU(inplace=True)), batch(7, 3)
    are_close(jacobian(model, x), by_loop(model, x))


def test_weights_are_those_of_the_call() -> None:
    model, x = net(3, 5, 2), batch(7, 3)
    jacobian(model, x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    model[2].weight = nn.Parameter(torch.ones(2, 5, dtype=torch.float64))
    model[1] = nn.Sigmoid()
    are_close(jacobian(model, x), by_loop(model, x))


@pytest.mark.parametrize("widths", [(3, 20, 2), (3, 5, 4, 1), (20, 2, 20)])
def test_its_plan_is_that_of_a_chain(widths: tuple[int, ...]) -> None:
    model, x = net(*widths), batch(7, widths[0])
    plan = gradlib.plan_jacobian(model, x)
    of_chain = gradlib.plan_jacobian(model, x, max_bytes=2**20)
    assert plan.mode == "chain"
    assert replace(plan, max_bytes=2**20) == of_chain


def test_nothing_is_kept() -> None:
    model = net(3, 5, 2)
    jacobian(model, batch(7, 3))
    gone = [weakref.ref(it) for it in (*model.modules(), *model.parameters())]
    del model
    gc.collect()
    assert not any(it() for it in gone)


def _of_a_class_of_its_own(model: Any) -> None:
    class Mine(nn.Linear):
        pass

    model[2].__class__ = Mine


def _doubled(_module: object, _args: object, y: Tensor) -> Tensor:
    return 2 * y


def _hooked(model: Any) -> None:
    model[2].register_forward_hook(_doubled)


def _hooked_as_a_whole(model: Any) -> None:
    model.register_forward_hook(_doubled)


def _in_bfloat16(model: Any) -> None:
    model.bfloat16()


def _sparse(model: Any) -> None:
    for layer in model[::2]:
        layer.weight = nn.Parameter(layer.weight.detach().to_sparse())
        layer.bias = None


def _with_a_forward_of_its_own(model: Any) -> None:
    model[1].forward = torch.sin


def _with_another_dtype(model: Any) -> None:
    model[2].float()


class Mine(nn.Parameter):
    """A class of somebody's own."""


def _with_a_subclass(model: Any) -> None:
    model[0].weight = Mine(model[0].weight.data)


def _with_a_bias_of_a_subclass(model: Any) -> None:
    model[-1].bias = Mine(model[-1].bias.data)


def _with_an_option(model: Any) -> None:
    model[1] = nn.ELU(0.5)


def _without_activation(model: Any) -> None:
    del model[1]


def _with_one_at_the_end(model: Any) -> None:
    model.append(nn.Tanh())


def _with_one_at_the_start(model: Any) -> None:
    model.insert(0, nn.Tanh())


def _within_another(model: Any) -> None:
    model[1] = nn.Sequential(nn.Tanh())


def _too_wide(model: Any) -> None:
    model[2] = nn.Linear(6, 2).double()


def _with_a_short_bias(model: Any) -> None:
    model[2].bias = nn.Parameter(torch.ones(1, dtype=torch.float64))


OTHERS: list[Callable[[Any], None]] = [
    _of_a_class_of_its_own,
    _hooked,
    _hooked_as_a_whole,
    _in_bfloat16,
    _sparse,
    _with_a_forward_of_its_own,
    _with_another_dtype,
    _with_a_subclass,
    _with_a_bias_of_a_subclass,
    _with_an_option,
    _without_activation,
    _with_one_at_the_end,
    _with_one_at_the_start,
    _within_another,
    _too_wide,
    _with_a_short_bias,
]


@pytest.mark.parametrize("change", OTHERS)
def test_others_are_no_small_nets(change: Callable[[Any], None]) -> None:
    model, x = net(3, 5, 2), batch(7, 3)
    assert small_net(model, (x,)) is not None
    change(model)
    weight = model[-1].weight if isinstance(model[-1], nn.Linear) else x
    for given in (x, x.to(weight.dtype), x.to_sparse()):
        assert small_net(model, (given,)) is None


INPUTS: dict[str, tuple[Any, ...]] = {
    "float32": (torch.ones(7, 3),),
    "one axis": (torch.ones(3).double(),),
    "three axes": (torch.ones(7, 1, 3).double(),),
    "no samples": (torch.ones(0, 3).double(),),
    "too narrow": (torch.ones(7, 2).double(),),
    "two": (torch.ones(7, 3).double(), torch.ones(7, 3).double()),
    "none": (),
    "a list": ([1.0, 2.0, 3.0],),
    "a subclass": (Mine(torch.ones(7, 3).double()),),
    "sparse": (torch.ones(7, 3, device="cpu").double().to_sparse(),),
    "elsewhere": (torch.ones(7, 3, device="meta").double(),),
}


@pytest.mark.parametrize("given", INPUTS)
def test_other_inputs(given: str) -> None:
    assert small_net(net(3, 5, 2), INPUTS[given]) is None


def test_it_is_no_module() -> None:
    assert small_net(torch.sin, (batch(7, 3),)) is None
    assert small_net(nn.Sequential(), (batch(7, 3),)) is None
    assert small_net(net(3, 2), (batch(7, 3),)) is None


def test_somebody_looks_on() -> None:
    model, x = net(3, 5, 2), batch(7, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert small_net(model, (x,)) is None


@pytest.mark.parametrize(
    ("space", "name"), [(F, "linear"), (torch, "tanh"), (nn.Linear, "forward")]
)
def test_somebody_has_replaced_a_function(
    space: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = net(3, 5, 2), batch(7, 3)
    assert small_net(model, (x,)) is not None
    real = getattr(space, name)
    monkeypatch.setattr(space, name, lambda *given: real(*given))
    assert small_net(model, (x,)) is None


@pytest.mark.parametrize("is_faster", [False, True], ids=["torch", "oneDNN"])
@pytest.mark.parametrize("kind", [nn.Tanh, nn.SiLU])
def test_where_it_matters_who_multiplies(
    kind: type[nn.Module], is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = matmul.onednn_linear, list[Tensor]()

    def counted(x: Tensor, *others: Any) -> Tensor:
        calls.append(x)
        return real(x, *others)

    monkeypatch.setattr(matmul, "onednn_linear", counted)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda *_: is_faster)
    model, x = net(32, 256, 256, 2, kind=kind).float(), batch(256, 32).float()
    found = small_net(model, (x,))
    assert found is not None
    assert found.form.library is matmul.FASTER
    made = found.jacobian()
    are_close(made.double(), by_loop(model.double(), x.double()), rtol=1e-4, atol=1e-6)
    assert bool(calls) is (is_faster and matmul.onednn_is_enabled() and x.is_cpu)


def test_no_library_is_chosen_for_small_products() -> None:
    for widths, library in (((16, 32, 8), matmul.TORCH), ((16, 512, 8), matmul.FASTER)):
        found = small_net(net(*widths), (batch(64, 16),))
        assert found is not None
        assert found.form.library is library


def test_large_ones_are_none() -> None:
    assert small_net(net(64, 256, 256, 10), (batch(1024, 64),)) is None
    assert small_net(net(200, 30, 200), (batch(32, 200),)) is None
    # Here a pass forward is cheaper.
    assert small_net(net(2, 20, 30), (batch(4, 2),)) is None


def test_it_is_the_way_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net(3, 5, 2), batch(7, 3)
    made = jacobian(model, x)
    monkeypatch.setattr(plain, "by_rows", lambda *_: made + 1)
    are_close(gradlib.per_sample_jacobian(model, x), made + 1)
    ways: list[dict[str, Any]] = [
        {"out": torch.empty_like(made)},
        {"create_graph": True},
        {"max_bytes": 10**9},
        {"mode": "reverse"},
        {"chunk_size": 1},
        {"argnums": (0,)},
        {"in_dims": (0,)},
    ]
    for asked in ways:
        found: Any = gradlib.per_sample_jacobian(model, x, **asked)
        are_close(found[0] if "argnums" in asked else found, made)


class Named(nn.Module):
    """A small net, in code of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5).double(), nn.Linear(5, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sin(F.elu(self.first(x), 0.5)))


def _softened(model: Any, x: Tensor) -> Tensor:
    return model(x).softmax(1)


def _squeezed(model: Any, x: Tensor) -> Tensor:
    return model(x).squeeze(-1)


def test_small_nets_in_code(monkeypatch: pytest.MonkeyPatch) -> None:
    named, model, one, x = Named(), net(3, 5, 4, 2), net(3, 5, 1), batch(7, 3)
    others: list[Callable[[Tensor], Tensor]] = [
        lambda x: _softened(model, x),
        lambda x: _squeezed(one, x),
        lambda x: model(x.tanh()),
        lambda x: model(x).tanh(),
        lambda x: model[2](model[0](x)),
        lambda x: model[0](x),
        nn.Sequential(nn.Flatten(), *net(4, 5, 2)),
    ]
    large = net(64, 256, 256, 10)
    inputs = [*[x] * 6, batch(7, 4).view(7, 2, 2), batch(1024, 64)]
    for fn in (named, named.forward, lambda x: model(x)):
        are_close(gradlib.per_sample_jacobian(fn, x), by_loop(fn, x))
    made = gradlib.per_sample_jacobian(model, x)
    monkeypatch.setattr(plain, "by_rows", lambda *_: made + 1)
    for fn in (named, named.forward, lambda x: model(x)):
        are_close(gradlib.per_sample_jacobian(fn, x, check=False), made + 1)
    for fn, given in zip((*others, lambda x: large(x)), inputs, strict=True):
        found = gradlib.per_sample_jacobian(fn, given, check=False)
        are_close(found, by_loop(fn, given))


def test_known_layers_made_in_inference_mode_have_a_plan() -> None:
    x = batch(4, 3)
    with torch.inference_mode():
        linear, model = nn.Linear(3, 2).double(), net(3, 5, 2)
    usual = copy.deepcopy(model)
    for fn, same in (
        (linear, copy.deepcopy(linear)),
        (model, usual),
        (lambda x: model(x).sin(), lambda x: usual(x).sin()),
    ):
        found = gradlib.per_sample_jacobian(fn, x)
        are_close(found, by_loop(same, x))
        plan = gradlib.plan_jacobian(fn, x)
        assert (plan.mode, plan.shapes) == ("chain", (found.shape,))
        assert plan.result_bytes == found.nbytes
        assert plan.counts["reverse"] == "not recorded by autograd"
        into = torch.empty_like(found)
        assert gradlib.plan_jacobian(fn, x, out=into).result_bytes == 0
        with pytest.raises(gradlib.JacobianArgumentError, match="inference_mode"):
            gradlib.plan_jacobian(fn, x, mode="reverse")

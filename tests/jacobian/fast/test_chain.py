"""Chains of known layers: right, taken only where they are what they seem, in order."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize

import gradlib
from gradlib import OutOfBytesError
from gradlib.jacobian.call import Call, is_open
from gradlib.jacobian.fast import plain_convolution
from gradlib.jacobian.fast.chains import convolutions, evaluate, order
from gradlib.jacobian.fast.chains.find import find_chain
from gradlib.jacobian.fast.chains.layers import IDLE, SOFTMAXES
from gradlib.jacobian.fast.chains.pointwise import POINTWISE
from gradlib.random_state import seed_all

SEEDS = range(40)


@pytest.fixture(autouse=True)
def no_small_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small nets go the way of large ones."""
    for name in ("plain_net", "small_net_of"):
        monkeypatch.setattr(
            f"gradlib.jacobian.fast.chains.find.{name}", lambda *_: None
        )


def chain(fn: Any, *inputs: Any, **changed: Any) -> Any:
    """Look for the chain of a call."""
    asked: dict[str, Any] = {
        "argnums": 0,
        "in_dims": 0,
        "mode": "auto",
        "chunk_size": "auto",
        "max_bytes": None,
        "out": None,
        "create_graph": False,
    }
    call = Call(fn, inputs, **(asked | changed))
    return find_chain(call) if is_open(call) else None


def require_same(model: nn.Module, x: Tensor, **changed: Any) -> Tensor:
    """Hold a chain's Jacobian against that of the loop."""
    assert chain(model, x) is not None, "this is not a chain"
    found = gradlib.per_sample_jacobian(model, x, **changed)
    reference = by_loop(model, x)
    assert found.shape == reference.shape
    assert found.dtype == reference.dtype
    close = 1e-12 if x.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(
        found, reference, rtol=close, atol=close * float(reference.abs().max())
    )
    return found


def by_loop(model: nn.Module, x: Tensor) -> Tensor:
    """Return the reference, of modules from the CPU.

    A GPU goes wrong for some means where channels are last: pytorch#188344.
    """
    with torch.device("cpu"):
        if x.is_cuda and isinstance(model, nn.Module):
            model, given = deepcopy(model).cpu(), x.cpu()
        else:
            given = x
        found = gradlib.per_sample_jacobian(model, given, mode="loop", check=False)
    return found.to(x.device)


def random_mlp(seed: int) -> nn.Sequential:
    """Return linear layers, with none, one or two elementwise ones at each place."""
    chance = random.Random(seed)
    seed_all(seed)
    width = chance.choice([1, 2, 3, 7])
    layers: list[nn.Module] = [
        kind() for kind in chance.sample([*POINTWISE], chance.choice([0, 0, 1]))
    ]
    for _ in range(chance.randint(1, 5)):
        before, width = width, chance.choice([1, 2, 3, 5, 8, 20])
        linear: nn.Module = nn.Linear(before, width, bias=chance.random() < 0.8)
        bends = [
            kind() for kind in chance.choices([*POINTWISE], k=chance.randint(0, 2))
        ]
        if chance.random() < 0.2:
            layers.append(nn.Sequential(linear, *bends))
        else:
            layers += [linear, *bends]
    if chance.random() < 0.3:
        layers.append(chance.choice(SOFTMAXES)(chance.choice([1, -1])))
    return nn.Sequential(*layers)


def ins_of(model: nn.Module) -> int:
    """Return how many inputs the first linear layer has."""
    return next(it for it in model.modules() if isinstance(it, nn.Linear)).in_features


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_mlps(seed: int, dtype: torch.dtype) -> None:
    model = random_mlp(seed).to(dtype)
    batch = 1 + seed % 4
    require_same(model, torch.randn(batch, ins_of(model), dtype=dtype))


@pytest.mark.parametrize("seed", SEEDS)
def test_in_parts_into_out_and_through_a_graph(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_mlp(seed).double()
    x = torch.randn(5, ins_of(model), dtype=torch.float64)
    whole = require_same(model, x)
    monkeypatch.setattr("gradlib.jacobian.fast.chains.result.IN_CACHE", 1)
    torch.testing.assert_close(require_same(model, x), whole)
    for at_once in (1, 2**20):
        monkeypatch.setattr("gradlib.jacobian.fast.chains.result.IN_CACHE", at_once)
        out = torch.full(whole.shape, torch.nan, dtype=x.dtype)
        assert chain(model, x, out=out) is not None
        assert gradlib.per_sample_jacobian(model, x, out=out) is out
        torch.testing.assert_close(out, whole)
    x.requires_grad_()
    ours = gradlib.per_sample_jacobian(model, x, create_graph=True)
    theirs = gradlib.per_sample_jacobian(model, x, create_graph=True, mode="loop")
    torch.testing.assert_close(ours, whole)
    places = [x, *model.parameters()]
    if ours.requires_grad and theirs.requires_grad:
        v = torch.randn_like(whole)
        for found, wanted in zip(
            torch.autograd.grad(ours, places, v, materialize_grads=True),
            torch.autograd.grad(theirs, places, v, materialize_grads=True),
            strict=True,
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.cpu  # on a GPU so few samples are computed in one part
@pytest.mark.parametrize("widths", [(30, 6, 2, 6, 30), (3, 12, 30)])
@pytest.mark.parametrize("ends", list(itertools.product([False, True], repeat=2)))
def test_the_last_product_is_written_into_the_result(
    widths: tuple[int, ...], ends: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = [it for pair in itertools.pairwise(widths) for it in pair_of_layers(*pair)]
    before, after = ([nn.Sigmoid()] if end else [] for end in ends)
    model = nn.Sequential(*before, *inside[:-1], *after).double()
    x = torch.randn(5, widths[0], dtype=torch.float64)
    whole, written = evaluate.whole_product, []

    def spied(factors: Any, tree: Any, into: Any) -> Tensor:
        made = whole(factors, tree, into)
        written.append(made is into)
        return made

    monkeypatch.setattr(evaluate, "whole_product", spied)
    columns = widths[0] < widths[-1]  # as the product is laid out then
    out = torch.empty(5, widths[-1], widths[0], dtype=torch.float64)
    monkeypatch.setattr("gradlib.jacobian.fast.chains.result.IN_CACHE", 1)
    require_same(model, x, **({} if columns else {"out": out}))
    assert written
    assert all(written)


def pair_of_layers(ins: int, outs: int) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(ins, outs), nn.Tanh()


def batch_norm(width: int, *, affine: bool = True) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(width, affine=affine)
    for number, tensor in enumerate((*norm.parameters(), *norm.buffers())):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5 + number, 2.0 + number)
    return norm


BATCH_NORMS: dict[str, Callable[[], list[nn.Module]]] = {
    "after": lambda: [
        *(nn.Linear(4, 9), batch_norm(9), nn.ReLU()),
        *(nn.Linear(9, 6), batch_norm(6, affine=False), nn.Tanh(), nn.Linear(6, 3)),
    ],
    "before": lambda: [
        *(batch_norm(4), nn.Linear(4, 9), nn.Sigmoid(), batch_norm(9)),
        *(nn.Linear(9, 5), nn.SiLU()),
    ],
    "alone between": lambda: [nn.Linear(4, 2), batch_norm(2), nn.Linear(2, 5)],
    "two": lambda: [nn.Linear(4, 7), batch_norm(7), batch_norm(7), nn.ReLU()],
    "two, and one row": lambda: [
        *(nn.Linear(4, 7), nn.ReLU(), batch_norm(7), batch_norm(7), nn.Linear(7, 1)),
    ],
    "last": lambda: [nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 8), batch_norm(8)],
    "softened": lambda: [nn.Linear(4, 7), batch_norm(7), nn.Softmax(1)],
    "no matrix": lambda: [batch_norm(4), nn.Tanh()],
    "bottleneck": lambda: [
        *(nn.Linear(9, 6), batch_norm(6), nn.ReLU(), nn.Linear(6, 2), nn.Tanh()),
        *(nn.Linear(2, 6), nn.ReLU(), batch_norm(6), nn.Linear(6, 9), nn.Sigmoid()),
    ],
}


@pytest.mark.parametrize("layers", BATCH_NORMS.values(), ids=BATCH_NORMS.keys())
def test_batch_norms_of_vectors(
    layers: Callable[[], list[nn.Module]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_all(0)
    model = nn.Sequential(*layers()).double().eval()
    x = torch.randn(5, ins_of(model) if len(model) > 2 else 4, dtype=torch.float64)
    whole = require_same(model, x)
    places = [x.requires_grad_(), *model.parameters()]
    found, wanted = (
        torch.autograd.grad(
            gradlib.per_sample_jacobian(model, x, create_graph=True, mode=mode),
            places,
            whole,
            materialize_grads=True,
        )
        for mode in ("auto", "loop")
    )
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    x = x.detach()
    monkeypatch.setattr("gradlib.jacobian.fast.chains.result.IN_CACHE", 1)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            cast(Tensor, norm.running_var).mul_(3)
    require_same(model, x, out=torch.empty_like(whole))
    assert chain(model.train(), x) is None


def test_a_result_is_not_written_over_the_statistics_of_a_batch_norm() -> None:
    norm, memory = batch_norm(2), torch.ones(40)
    norm.running_var = memory[:2]
    model, x = nn.Sequential(nn.Linear(4, 2), norm).eval(), torch.randn(5, 4)
    assert chain(model, x, out=torch.ones(5, 2, 4)) is not None
    assert chain(model, x, out=memory.view(5, 2, 4)) is None


def test_a_batch_norm_among_matrices_is_no_map() -> None:
    found = chain(nn.Sequential(*BATCH_NORMS["bottleneck"]()).eval(), torch.randn(5, 9))
    assert not found.chain.maps.layers


@pytest.mark.parametrize("kind", POINTWISE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rows", [1, 6])
def test_every_elementwise_layer(kind: type[nn.Module], rows: int) -> None:
    seed_all(0)
    options: dict[str, list[dict[str, Any]]] = {
        "GELU": [{"approximate": "tanh"}],
        "ELU": [{"alpha": 0.3}],
        "LeakyReLU": [{"negative_slope": 0.3}],
        "Softplus": [{"beta": 3.0, "threshold": 1.0}],
        "Hardtanh": [{"min_val": -0.3, "max_val": 0.2}],
        "ReLU": [{"inplace": True}],
    }
    for option in [{}, *options.get(kind.__name__, [])]:
        model = nn.Sequential(
            kind(**option), nn.Linear(4, 9), kind(**option), nn.Linear(9, rows)
        )
        x = torch.randn(7, 4, dtype=torch.float64) * 3
        before = x.clone()
        require_same(model.double(), x)
        require_same(model.append(kind(**option)), x)
        assert torch.equal(x, before)


@pytest.mark.parametrize("kind", POINTWISE, ids=lambda kind: kind.__name__)
def test_every_elementwise_layer_where_it_is_odd(kind: type[nn.Module]) -> None:
    first, last = nn.Linear(1, 1), nn.Linear(1, 2)
    nn.init.ones_(first.weight)
    nn.init.zeros_(cast(Tensor, first.bias))
    model, inf = nn.Sequential(first, kind(), last).double(), torch.inf
    x = torch.tensor([[inf, -inf, torch.nan, 0.0, -0.0, 1e3, -1e3, 1e10, -1e10]]).mT
    x = x.double()
    assert chain(model, x) is not None
    ours = gradlib.per_sample_jacobian(model, x, check=False)
    loop = gradlib.per_sample_jacobian(model, x, mode="loop", check=False)
    torch.testing.assert_close(ours, loop, equal_nan=True)


@pytest.mark.parametrize("kind", SOFTMAXES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "before",
    [
        [nn.Linear(4, 3)],
        [nn.Tanh(), nn.Linear(4, 3)],
        [nn.Linear(4, 1)],
        [nn.Linear(4, 3), nn.ReLU(inplace=True)],
        [nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2), nn.Linear(2, 9), nn.Tanh()],
        [nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3)],
        [nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 9)],
    ],
    ids=str,
)
def test_a_softmax_at_the_end(kind: Any, before: list[nn.Module]) -> None:
    model = nn.Sequential(*before, kind(dim=1), nn.Identity()).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    whole = require_same(model, x)
    out = torch.empty(whole.shape, dtype=whole.dtype)
    assert chain(model, x, out=out) is not None
    torch.testing.assert_close(gradlib.per_sample_jacobian(model, x, out=out), whole)
    weight = next(model.parameters())
    asked = {"create_graph": True, "check": False}
    ours, loop = (
        gradlib.per_sample_jacobian(model, x, mode=mode, **asked)
        for mode in ("auto", "loop")
    )
    torch.testing.assert_close(
        *(torch.autograd.grad(it.square().sum(), weight) for it in (ours, loop))
    )
    require_same(model, x)  # no weight was overwritten


@pytest.mark.parametrize("kind", SOFTMAXES, ids=lambda kind: kind.__name__)
def test_a_softmax_that_is_sure(kind: Any) -> None:
    seed_all(0)
    last = nn.Linear(9, 3)
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), last, kind(1))
    with torch.no_grad():
        last.weight *= 60
    x = torch.randn(1000, 4)
    assert chain(model, x) is not None
    ours = gradlib.per_sample_jacobian(model, x)
    exact = gradlib.per_sample_jacobian(
        model.double(), x.double(), mode="loop", check=False
    )
    size = exact.norm(dim=2)
    # Below that float64 has no digits left either, the way the loop goes.
    small = (size > 1e-9) & (size < 1e-6)
    assert small.sum() > 5
    assert ((ours - exact).norm(dim=2) <= 1e-4 * size)[small].all()


@pytest.mark.parametrize("layers", [[], [nn.Linear(4, 9), nn.ReLU()]], ids=str)
def test_a_softmax_of_many_classes(
    layers: list[nn.Module],
) -> None:
    ins = 9 if layers else 4
    model = nn.Sequential(*layers, nn.Linear(ins, 2000), nn.LogSoftmax(1))
    x = torch.randn(2, 4)
    result = 2 * 2000 * 4 * 4
    assert chain(model, x, max_bytes=2 * result) is not None
    require_same(model.double(), x.double())


def test_a_softmax_after_convolutions() -> None:
    model = cnn().append(nn.LogSoftmax(dim=-1)).double()
    require_same(model, torch.randn(3, 2, 9, 8, dtype=torch.float64))


class OwnSoftmax(nn.Softmax):
    """It may do anything."""


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(4, 3), nn.Softmax(dim=0)],
        [nn.Linear(4, 3), nn.Softmax(dim=1), nn.Linear(3, 2)],
        [nn.Linear(4, 3), nn.Softmax(dim=1), nn.Tanh()],
        [nn.Linear(4, 3), nn.Softmax(dim=1), nn.LogSoftmax(dim=1)],
        [nn.Linear(4, 3), OwnSoftmax(dim=1)],
        [nn.Softmax(dim=1)],
    ],
    ids=str,
)
def test_a_softmax_elsewhere_is_no_chain(layers: list[nn.Module]) -> None:
    assert chain(nn.Sequential(*layers), torch.randn(5, 4)) is None


@pytest.mark.parametrize("layer", [nn.Softmax(1), nn.LogSoftmax(-1)], ids=str)
def test_a_softmax_of_images_is_no_chain(layer: nn.Module) -> None:
    seed_all(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), layer).double()
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    assert chain(model, x) is None
    found = gradlib.per_sample_jacobian(model, x)
    truth = gradlib.per_sample_jacobian(model, x, mode="loop", check=False)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def test_nan_and_the_kinks_of_relu() -> None:
    first = nn.Linear(2, 2)
    with torch.no_grad():
        first.weight.copy_(torch.eye(2))
        nn.init.zeros_(first.bias)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(2, 1)).double()
    x = torch.tensor([[0.0, -0.0], [torch.nan, 1.0]], dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(model, x, check=False)
    loop = gradlib.per_sample_jacobian(model, x, mode="loop", check=False)
    torch.testing.assert_close(ours, loop, equal_nan=True)


def cnn(**changed: Any) -> nn.Sequential:
    """Return two convolutions and a linear layer, for images of 9 x 8."""
    seed_all(0)
    options: dict[str, Any] = {"kernel_size": 3} | changed
    body = nn.Sequential(nn.Conv2d(2, 4, **options), nn.Tanh(), nn.Conv2d(4, 6, 2))
    features = body(torch.randn(1, 2, 9, 8)).numel()
    return nn.Sequential(*body, nn.SiLU(), nn.Flatten(), nn.Linear(features, 3))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"stride": 2},
        {"stride": (2, 3), "padding": (1, 0)},
        {"dilation": 2, "padding": 2},
        {"groups": 2},
        {"kernel_size": (1, 4), "bias": False, "padding": (0, 3)},
        {"kernel_size": 5, "stride": 3, "padding": 1, "dilation": (1, 1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("few", [0, 4])
@pytest.mark.parametrize("back", [0, 2**18])
def test_convolutions(
    changed: dict[str, Any], few: int, back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"FEW": few, "MANY": 1, "BACK": back, "IMAGES": 0}
    for name, limit in limits.items():
        monkeypatch.setattr(plain_convolution, name, limit)
    model = cnn(**changed).double()
    x = torch.randn(3, 2, 9, 8, dtype=torch.float64)
    whole = require_same(model, x)
    monkeypatch.setattr("gradlib.jacobian.fast.chains.result.MAPS_IN_CACHE", 1)
    torch.testing.assert_close(require_same(model, x), whole)
    graphed = gradlib.per_sample_jacobian(model, x, create_graph=True)
    torch.testing.assert_close(graphed, whole)
    assert graphed.requires_grad


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Flatten(), nn.Linear(12, 3)], (2, 3, 4)),
        ([nn.Tanh(), nn.Flatten(), nn.ReLU(), nn.Linear(12, 3)], (2, 3, 2, 2)),
        ([nn.Linear(4, 3), nn.Flatten()], (5, 4)),
        ([nn.Linear(4, 4)], (5, 4)),
        ([nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(4, 2)], (5, 4)),
        ([nn.Dropout(0.5).eval(), nn.Linear(4, 3), nn.Identity()], (1, 4)),
        ([nn.Conv2d(2, 3, 2), nn.AvgPool2d(2)], (3, 2, 5, 5)),
        ([nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3)], (3, 1, 4, 4)),
        ([nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Sigmoid(), nn.Tanh()], (3, 1, 2, 3)),
    ],
    ids=str,
)
def test_other_chains(layers: list[nn.Module], shape: tuple[int, ...]) -> None:
    model = nn.Sequential(*layers).double().eval()
    x = torch.randn(*shape, dtype=torch.float64)
    found = require_same(model, x)
    found += 1  # memory of its own
    require_same(model, x)


def test_images_into_memory_that_is_there() -> None:
    before = nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 5)
    model = nn.Sequential(*before, nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    out = torch.empty(3, 3, 1, 4, 4, dtype=torch.float64)
    assert require_same(model, x, out=out) is out


def test_an_input_in_another_layout() -> None:
    model = random_mlp(3).double()
    x = torch.randn(ins_of(model), 4, dtype=torch.float64).t()
    require_same(model, x)
    image = torch.randn(3, 9, 8, 2, dtype=torch.float64).movedim(3, 1)
    require_same(cnn().double(), image)
    require_same(nn.Linear(4, 3).double(), torch.randn(1, 4).double().expand(5, 4))


def test_weights_are_read_at_every_call() -> None:
    model = random_mlp(5).double()
    x = torch.randn(3, ins_of(model), dtype=torch.float64)
    require_same(model, x)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    require_same(model, x)


def plain_net() -> nn.Sequential:
    """Return a chain that is trained."""
    seed_all(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


class MyLinear(nn.Linear):
    """A type of its own, whatever it does."""


class MyTensor(Tensor):
    """A type of its own, whatever it does."""


class MyMode(torch.overrides.TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _with(change: Callable[[nn.Sequential], object]) -> Callable[[], nn.Sequential]:
    def make() -> nn.Sequential:
        model = plain_net()
        change(model)
        return model

    return make


def _doubled(model: nn.Sequential) -> None:
    vars(model[1])["forward"] = lambda x: 2 * x.tanh()


CHANGED: dict[str, Callable[[], Any]] = {
    "forward hook": _with(lambda m: m[1].register_forward_hook(lambda *_: None)),
    "forward pre-hook": _with(lambda m: m.register_forward_pre_hook(lambda *_: None)),
    "backward hook": _with(lambda m: m[0].register_full_backward_hook(lambda *_: None)),
    "backward pre-hook": _with(
        lambda m: m[0].register_full_backward_pre_hook(lambda *_: None)
    ),
    "subclass": lambda: nn.Sequential(MyLinear(3, 5), nn.Tanh()).double(),
    "forward of its own": _with(_doubled),
    "parametrization": _with(
        lambda m: parametrize.register_parametrization(m[0], "weight", nn.Tanh())
    ),
    "weight norm": _with(lambda m: parametrizations.weight_norm(m[2])),
    "last bias of another length": _with(
        lambda m: vars(m[2])["_parameters"].update(
            bias=nn.Parameter(torch.zeros(3).double())
        )
    ),
    "last bias of another dtype": _with(
        lambda m: m[2].register_parameter("bias", nn.Parameter(torch.zeros(2)))
    ),
    "dropout in training": _with(lambda m: m.append(nn.Dropout(0.5))),
    "batch norm": _with(lambda m: m.append(nn.BatchNorm1d(2).double())),
    "another module": _with(lambda m: m.append(nn.Softmin(1))),
    "compiled": _with(lambda m: m.compile(backend="eager")),
    "scripted": lambda: torch.jit.script(plain_net()),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.")
@pytest.mark.parametrize("name", CHANGED)
def test_what_is_no_chain(name: str) -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    assert chain(plain_net(), x) is not None
    assert chain(CHANGED[name](), x) is None


@contextmanager
def _global_hook() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _device_and_mode() -> Iterator[None]:
    with torch.device("cpu"), MyMode():
        yield


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu"),
    "function mode": MyMode,
    "function mode on a default device": _device_and_mode,
    "forward AD": forward_ad.dual_level,
    "inference mode": torch.inference_mode,
    "global hook": _global_hook,
    "recording": lambda: gradlib.record(_RECORDED),
}
_RECORDED = plain_net()


@pytest.mark.parametrize("name", AROUND)
def test_where_a_chain_is_not_trusted(name: str) -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    model = _RECORDED if name == "recording" else plain_net()
    assert chain(model, x) is not None
    with AROUND[name]():
        assert chain(model, x) is None
    assert chain(model, x) is not None


@pytest.mark.parametrize("batch", [4, 2**11])
@pytest.mark.parametrize("create_graph", [False, True])
def test_on_a_default_device(create_graph: bool, batch: int) -> None:
    # Whatever is made without saying where would be on that device, and fail.
    model, x = plain_net(), torch.randn(batch, 3, dtype=torch.float64)
    expected = gradlib.per_sample_jacobian(model, x)
    with torch.device("meta"):
        assert chain(model, x) is not None
        found = gradlib.per_sample_jacobian(model, x, create_graph=create_graph)
    assert torch.equal(found, expected)


def test_inside_a_transform_of_torch_func() -> None:
    model = plain_net()
    seen: list[Any] = []

    def looked(x: Tensor) -> Tensor:
        seen.append(chain(model, x))
        return x

    torch.func.vmap(looked)(torch.randn(2, 4, 3, dtype=torch.float64))
    assert seen == [None]


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 3, dtype=torch.bfloat16),
        torch.randn(4, 3, dtype=torch.complex128),
        torch.randn(4, 3),
        torch.randn(4, 3, dtype=torch.float64).as_subclass(MyTensor),
        torch.empty(0, 3, dtype=torch.float64),
        torch.randn(3, dtype=torch.float64),
        torch.randn(4, 2, dtype=torch.float64),
        torch.randn(4, 5, 3, dtype=torch.float64),
        torch.eye(3, dtype=torch.float64, device="cpu").to_sparse(),
        [1.0],
    ],
    ids=lambda x: f"{type(x).__name__}{list(getattr(x, 'shape', []))}",
)
def test_an_input_that_is_none_for_a_chain(x: Any) -> None:
    assert chain(plain_net(), x) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_are_none_for_a_chain(dtype: torch.dtype) -> None:
    assert chain(plain_net().to(dtype), torch.ones(4, 3, dtype=dtype)) is None


@pytest.mark.parametrize(
    "asked",
    [
        {"mode": "loop"},
        {"chunk_size": 2},
        {"argnums": (0,)},
        {"argnums": "parameters"},
        {"argnums": False},
        {"argnums": 1},
        {"in_dims": None},
        {"in_dims": (0,)},
        {"in_dims": 1},
        {"max_bytes": 10},
        {"max_bytes": -1},
        {"max_bytes": "1"},
        {"out": torch.empty(4, 2, 4, dtype=torch.float64)},
        {"out": torch.empty(4, 2, 3)},
        {"out": torch.empty(4, 3, 2, dtype=torch.float64).mT},
        {"out": torch.empty(4, 2, 3, dtype=torch.float64, requires_grad=True)},
        {"out": torch.empty(4, 2, 3, dtype=torch.float64), "create_graph": True},
        {"out": [1]},
    ],
    ids=lambda asked: ", ".join(asked),
)
def test_a_call_that_is_not_for_a_chain(asked: dict[str, Any]) -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    assert chain(plain_net(), x, max_bytes=2**20) is not None
    assert chain(plain_net(), x, **asked) is None


def test_a_single_layer_takes_its_result() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    size = 4 * 2 * 3 * x.element_size()
    assert chain(layer, x, max_bytes=size - 1) is None
    assert chain(layer, x, max_bytes=size) is not None
    with pytest.raises(OutOfBytesError):
        gradlib.plan_jacobian(layer, x, mode="reverse", max_bytes=size)
    plan = gradlib.plan_jacobian(layer, x, max_bytes=size)
    assert (plan.mode, plan.max_bytes, plan.bytes) == ("chain", size, size)


def test_out_is_no_memory_that_the_result_is_computed_from() -> None:
    memory = torch.randn(24 + 12, dtype=torch.float64)
    x, out = memory[24:].view(4, 3), memory[:24].view(4, 2, 3)
    assert chain(plain_net(), x, out=out) is None
    model = plain_net()
    model[2].weight.data = memory[:10].view(2, 5)
    assert chain(model, x.clone(), out=out) is None
    conv, linear = nn.Conv2d(1, 1, (1, 2)), nn.Linear(2, 2)
    images = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), linear).double()
    x, out = x.reshape(4, 1, 1, 3).clone(), memory[:24].view(4, 2, 1, 1, 3)
    assert chain(images, x, out=out) is not None
    conv.weight.data = memory[:2].view(1, 1, 1, 2)
    assert chain(images, x, out=out) is None


def brute_force(widths: tuple[int, ...]) -> int:
    """Return the fewest multiply-adds of all ways to set parentheses."""

    @cache
    def least(first: int, last: int) -> int:
        if first == last:
            return 0
        return min(
            least(first, k)
            + least(k + 1, last)
            + widths[last + 1] * widths[k + 1] * widths[first]
            for k in range(first, last)
        )

    return least(0, len(widths) - 2)


def test_the_order_takes_the_fewest_multiply_adds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order, "ENTRY", 0)
    order.best.cache_clear()
    for widths in itertools.product([1, 4, 30], repeat=5):
        bends = (True,) * 4
        found = order.best(widths, bends, 1).multiply_adds
        assert found == brute_force(widths), widths
    order.best.cache_clear()


def test_a_bottleneck_is_worked_outwards() -> None:
    found = order.best((784, 256, 32, 256, 784), (True,) * 4, 32)
    assert found.text() == "(4 3) (2 1)"
    by_hand = 32 * (784 * 256 * 32 + 32 * 256 * 784 + 784 * 32 * 784)
    assert found.multiply_adds == by_hand


def test_matrices_without_a_bend_are_multiplied_once_for_all_samples() -> None:
    bent = order.best((5, 6, 7), (True, False), 100).multiply_adds
    straight = order.best((5, 6, 7), (False, False), 100).multiply_adds
    assert bent == 100 * straight == 100 * 5 * 6 * 7


@pytest.mark.parametrize("between", [nn.Identity(), nn.BatchNorm2d(2)], ids=str)
def test_what_all_samples_have_in_common_is_gone_back_through_once(
    between: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "IN_CACHE", "MAPS_IN_CACHE", "FILLING":  # and not once for each part
        monkeypatch.setattr(f"gradlib.jacobian.fast.chains.result.{name}", 1)
    samples: list[int] = []
    pull = convolutions.Convolved.pull

    def noted(it: convolutions.Convolved, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        samples.append(len(v))
        return pull(it, v, ours)

    monkeypatch.setattr(convolutions.Convolved, "pull", noted)
    last = nn.Conv2d(4, 2, 2), between, nn.Conv2d(2, 2, 1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), *last).double().eval()
    x = torch.randn(6, 1, 7, 7, dtype=torch.float64)
    require_same(model, x)
    assert samples == [1] * 8
    plan = gradlib.plan_jacobian(model, x)
    last_two, first = 2 * 16 * 16 + 2 * 16 * 2, 4 * 25 * 9
    assert plan.work["chain"] == 2 * 16 * (last_two + 6 * first)


def test_idle_layers_drop_nothing_in_eval() -> None:
    for kind in IDLE:
        model = nn.Sequential(kind(), nn.Linear(3, 2)).double()
        x = torch.randn(4, 3, dtype=torch.float64)
        with nullcontext() if kind is nn.Identity else pytest.raises(AssertionError):
            assert chain(model, x) is not None
        require_same(model.eval(), x)


def test_nothing_is_changed() -> None:
    model, x = plain_net(), torch.randn(4, 3, dtype=torch.float64)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    for create_graph in (False, True):
        gradlib.per_sample_jacobian(model, x, create_graph=create_graph)
        assert torch.is_grad_enabled()
    with torch.no_grad():
        gradlib.per_sample_jacobian(model, x)
        assert not torch.is_grad_enabled()
    assert not x.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Linear(3, 3), nn.Tanh(), nn.Sigmoid()], (1, 3)),
        ([nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)], (1, 3)),
        ([nn.ReLU(), nn.Linear(3, 3), nn.Softmax(1)], (1, 3)),
        ([nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)], (1, 1, 2, 2)),
        ([nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3, 2)], (1, 2, 1, 1)),
    ],
    ids=str,
)
def test_vectors_are_overwritten_but_no_weights(
    layers: list[nn.Module], shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(*layers).double()
    before = [it.clone() for it in model.parameters()]
    x = torch.randn(*shape, dtype=torch.float64)
    for _ in range(2):
        require_same(model, x)
    assert all(map(torch.equal, model.parameters(), before))


def test_the_plan_says_so() -> None:
    model = nn.Sequential(nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 64))
    plan = gradlib.plan_jacobian(model, torch.randn(8, 64))
    assert plan.mode == "chain"
    assert plan.passes == 0
    assert plan.work["chain"] == 8 * 64 * 4 * 64
    assert "in the order 2 1" in str(plan)
    general = gradlib.plan_jacobian(model, torch.randn(8, 64), mode="split")
    assert general.mode == "split"
    assert "chain" not in general.counts


def test_a_large_result_is_written_to_huge_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[tuple[int, ...]] = []

    def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
        sizes.append(shape)
        return like.new_empty(shape)

    monkeypatch.setattr("gradlib.jacobian.fast.chains.evaluate.empty", empty)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1024))
    require_same(model, torch.randn(2, 64))
    assert not sizes
    require_same(model, torch.randn(16, 64))
    assert sizes == [(16, 64, 1024)]  # by columns

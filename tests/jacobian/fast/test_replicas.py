"""Small transformers: each sample once for each row."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import gradlib
from benchmarks.memory import measure_memory
from gradlib.jacobian.call import Call, is_open
from gradlib.jacobian.fast import replicas
from gradlib.jacobian.fast.replicas import Replicas, find_replicas

from .lines import by_loop

are_close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


def layer(width: int = 8, heads: int = 2, **options: Any) -> nn.TransformerEncoderLayer:
    options = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64, **options}
    return nn.TransformerEncoderLayer(width, heads, 12, **options)


def encoder(count: int = 2, norm: nn.Module | None = None, **options: Any) -> Any:
    made = layer(**options)
    return nn.TransformerEncoder(made, count, norm, enable_nested_tensor=False)


def tokens(batch: int = 3, count: int = 4, width: int = 8) -> Tensor:
    return torch.randn(batch, count, width, dtype=torch.float64)


def find(model: Any, *inputs: Any, **asked: Any) -> Replicas | None:
    call = Call(model, inputs, 0, 0, "auto", "auto", None, None, False)
    call = call._replace(**asked)
    return find_replicas(call) if is_open(call) else None


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    found = find(model, x)
    assert found is not None
    return found.jacobian()


ACTIVATIONS = F.relu, F.gelu, nn.ReLU(), nn.GELU(), nn.GELU("tanh"), "gelu"


@pytest.mark.parametrize(
    ("norm_first", "bias", "activation"),
    [*itertools.product([True, False], [True, False], ACTIVATIONS)],
)
def test_every_layer(norm_first: bool, bias: bool, activation: Any) -> None:
    model = layer(norm_first=norm_first, bias=bias, activation=activation)
    x = tokens()
    are_close(jacobian(model, x), by_loop(model, x))
    deep = encoder(norm_first=norm_first, bias=bias, activation=activation)
    are_close(jacobian(deep, x), by_loop(deep, x))


@pytest.mark.parametrize("norm", [None, nn.LayerNorm(8), nn.LayerNorm([4, 8], 0.1)])
@pytest.mark.parametrize(("batch", "count"), [(1, 4), (5, 4), (2, 4)])
def test_every_encoder(norm: nn.Module | None, batch: int, count: int) -> None:
    model = encoder(3, norm and norm.double())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    x = tokens(batch, count)
    are_close(jacobian(model, x), by_loop(model, x))


def test_norms_of_their_own() -> None:
    model, x = layer(), tokens()
    model.norm1 = nn.LayerNorm(8, eps=0.3, elementwise_affine=False).double()
    model.norm2 = nn.LayerNorm([4, 8], eps=0.2, bias=False).double()
    are_close(jacobian(model, x), by_loop(model, x))


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_number_of_heads_in_single_precision(heads: int) -> None:
    model, x = layer(heads=heads).float(), tokens().float()
    found = jacobian(model, x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, by_loop(model.double(), x.double()).float())


def linear(ins: int, outs: int) -> nn.Linear:
    return nn.Linear(ins, outs, dtype=torch.float64)


WITH_OTHERS: dict[str, Callable[[], nn.Sequential]] = {
    "a head": lambda: nn.Sequential(encoder(), nn.Flatten(), linear(32, 3)),
    "a longer head": lambda: nn.Sequential(
        layer(), nn.Flatten(), linear(32, 5), nn.ReLU(), linear(5, 2), nn.GELU("tanh")
    ),
    "an embedding": lambda: nn.Sequential(linear(8, 6), layer(6), linear(6, 2)),
    "norms": lambda: nn.Sequential(
        nn.LayerNorm([4, 8]).double(),
        layer(norm_first=True),
        *(nn.Flatten(), nn.LayerNorm(32).double(), linear(32, 3)),
    ),
    "one in another": lambda: nn.Sequential(
        nn.Sequential(linear(8, 4), nn.GELU()), encoder(1, width=4), nn.Dropout(0.5)
    ).eval(),
    "flattened once more": lambda: nn.Sequential(
        layer(), nn.Flatten(), nn.Flatten(), linear(32, 1)
    ),
}


@pytest.mark.parametrize("name", WITH_OTHERS)
def test_other_layers_around(name: str) -> None:
    model, x = WITH_OTHERS[name](), tokens()
    found, want = jacobian(model, x), by_loop(model, x)
    are_close(found, want)
    assert found.shape == want.shape
    plan = gradlib.plan_jacobian(model, x)
    assert (plan.mode, plan.chunk) == ("replicas", model(x)[0].numel())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    are_close(gradlib.per_sample_jacobian(model, x), by_loop(model, x))


OTHERS_REFUSED: dict[str, Callable[[], nn.Module]] = {
    "no transformer": lambda: nn.Sequential(nn.Flatten(), linear(32, 3)),
    "in place": lambda: nn.Sequential(layer(), nn.ReLU(inplace=True)),
    "dropout": lambda: nn.Sequential(layer(), nn.Dropout(0.5)).train(),
    "samples as one": lambda: nn.Sequential(layer(), nn.Flatten(0)),
    "some axes as one": lambda: nn.Sequential(layer(), nn.Flatten(1, 1)),
    "a norm of samples": lambda: nn.Sequential(
        layer(), nn.Flatten(), nn.BatchNorm1d(32).double()
    ),
    "a norm over the batch": lambda: nn.Sequential(
        layer(), nn.LayerNorm([3, 4, 8]).double()
    ),
    "other sizes": lambda: nn.Sequential(layer(), linear(7, 2)),
    "tokens of rows": lambda: nn.Sequential(nn.Flatten(), layer(32)),
    "a class of its own": lambda: nn.Sequential(layer(), Linear(8, 2).double()),
    "a hook": lambda: hooked("2", nn.Sequential(layer(), nn.Flatten(), linear(32, 3))),
    "a hook on all of it": lambda: hooked("", nn.Sequential(layer(), linear(8, 3))),
    "other precision": lambda: nn.Sequential(layer(), nn.Linear(8, 3)),
    "a bias for each sample": lambda: with_bias(linear(8, 3), (3, 4, 3)),
    "a bias for each token": lambda: with_bias(linear(8, 3), (4, 3)),
}


def with_bias(last: nn.Linear, shape: tuple[int, ...]) -> nn.Module:
    last.bias = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    return nn.Sequential(layer(), last)


@pytest.mark.parametrize("name", OTHERS_REFUSED)
def test_other_layers_that_are_refused(name: str) -> None:
    assert find(OTHERS_REFUSED[name](), tokens()) is None


@pytest.mark.cpu  # a GPU takes larger ones
def test_what_widens_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x = tokens(50)  # 50 samples, layers of 4 tokens, 8 + 12 wide
    assert 50 * 16 * 4 * 20 <= replicas.SMALL < min(50 * 17 * 4 * 20, 50 * 16 * 84)
    heads = [[linear(32, 16)], [linear(32, 17)], [linear(32, 84), linear(84, 16)]]
    nets = [nn.Sequential(layer(), nn.Flatten(), *head) for head in heads]
    assert [find(net, x) is not None for net in nets] == [True, False, False]


def test_it_is_what_the_public_function_takes_and_says() -> None:
    model, x = encoder(), tokens()
    plan = gradlib.plan_jacobian(model, x)
    assert (plan.mode, plan.passes, plan.chunk) == ("replicas", 1, 32)
    assert "each sample alike" in str(plan)
    for check in (True, False):
        found: Any = gradlib.per_sample_jacobian(model, x, check=check)
        assert torch.equal(found, jacobian(model, x))
        assert found.is_contiguous()


def test_weights_are_read_at_every_call() -> None:
    model, x = encoder(), tokens()
    jacobian(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    are_close(jacobian(model, x), by_loop(model, x))
    model.layers[1].norm_first = True
    are_close(jacobian(model, x), by_loop(model, x))


def test_nothing_is_left_behind() -> None:
    model, x = encoder(), tokens().requires_grad_()
    seen: list[object] = []
    x.register_hook(seen.append)
    with torch.no_grad():
        found = jacobian(model, x)
    with torch.inference_mode():
        assert find(model, x) is None
        are_close(gradlib.per_sample_jacobian(model, x), found)
    assert not found.requires_grad
    assert x.grad is None
    assert not seen
    assert all(it.grad is None for it in model.parameters())


def test_inputs_as_they_come() -> None:
    model, x = layer(), tokens()
    want = jacobian(model, x)
    for same in (x.mT.contiguous().mT, x.repeat(2, 1, 1)[:3], x.clone().detach()):
        assert torch.equal(jacobian(model, same), want)
    with torch.inference_mode():
        made = x.clone()
    assert torch.equal(jacobian(model, made), want)
    alike = x[:1].expand(3, -1, -1)
    are_close(jacobian(model, alike), by_loop(model, alike))


def test_nan_stays_in_its_sample() -> None:
    model, x = encoder(), tokens()
    x[1, 2, 3] = torch.nan
    found, want = jacobian(model, x), by_loop(model, x)
    assert found[1].isnan().any()
    assert torch.equal(found.isnan(), want.isnan())


def test_dropout_that_does_nothing() -> None:
    x = tokens()
    for model in (encoder().train(), encoder(dropout=0.5).eval()):
        are_close(jacobian(model, x), by_loop(model, x))


def hooked(path: str, model: Any = None) -> Any:
    model = encoder() if model is None else model
    model.get_submodule(path).register_forward_hook(lambda *_: None)
    return model


def made_for_inference() -> Any:
    with torch.inference_mode():
        return replaced("linear1", nn.Linear(8, 12).double())


def replaced(name: str, by: Any, model: Any = None) -> Any:
    model = encoder() if model is None else model
    setattr(model.layers[0], name, by)
    return model


def with_attribute(name: str, value: Any) -> Any:
    model = encoder()
    setattr(model.layers[0].self_attn, name, value)
    return model


def with_attention(**options: Any) -> Any:
    own = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, **options)
    return replaced("self_attn", own)


class Layer(nn.TransformerEncoderLayer):
    """Whatever it may do."""


class Linear(nn.Linear):
    """Whatever it may do."""


def of_ones(kind: Any) -> Any:
    model = encoder()
    weight = kind(torch.ones(12, 8, dtype=torch.float64))
    model.layers[0].linear1.weight = nn.Parameter(weight)
    return model


class Odd(Tensor):
    """A tensor of one's own."""


REFUSED: dict[str, Callable[[], Any]] = {
    "another class of layers": lambda: Layer(8, 2, 12, 0.0, batch_first=True).double(),
    "a hook": lambda: hooked("layers.0.linear1"),
    "a hook on all of it": lambda: hooked(""),
    "a hook on an activation": lambda: hooked(
        "layers.0.activation", encoder(activation=nn.ReLU())
    ),
    "tensors for inference": made_for_inference,
    "tensors elsewhere": lambda: replaced(
        "linear1", nn.Linear(8, 12, device="meta").double()
    ),
    "axes in another order": lambda: encoder(batch_first=False),
    "dropout": lambda: encoder(dropout=0.5).train(),
    "dropout in the attention": lambda: with_attribute("dropout", 0.5).train(),
    "dropout elsewhere": lambda: replaced("dropout1", nn.Dropout(0.5)).train(),
    "another activation": lambda: encoder(activation=torch.tanh),
    "another module between": lambda: encoder(activation=nn.Tanh()),
    "no norm": lambda: replaced("norm1", nn.Identity()),
    "a norm of samples": lambda: replaced("norm1", nn.BatchNorm1d(4).double()),
    "a norm of other sizes": lambda: replaced("norm1", nn.LayerNorm([5, 8]).double()),
    "other sizes": lambda: replaced("linear2", nn.Linear(12, 9).double()),
    "another class of linear": lambda: replaced("linear1", Linear(8, 12).double()),
    "a part that is gone": lambda: replaced("linear1", None),
    "other widths of keys": lambda: with_attention(kdim=8, vdim=7),
    "biases of keys": lambda: with_attention(add_bias_kv=True),
    "a bias for each token": lambda: with_attribute(
        "in_proj_bias", nn.Parameter(torch.randn(4, 24, dtype=torch.float64))
    ),
    "a token of zeros": lambda: with_attention(add_zero_attn=True),
    "other precision": lambda: replaced("linear1", nn.Linear(8, 12)),
    "parameters computed": lambda: replaced(
        "linear1", parametrizations.weight_norm(nn.Linear(8, 12).double())
    ),
    "a tensor of one's own": lambda: of_ones(lambda ones: ones.as_subclass(Odd)),
    "a norm at the end": lambda: encoder(norm=nn.Identity()),
    "no layer": lambda: encoder(0),
    "a function at the end": lambda: with_function(encoder()),
    "a forward of its own": lambda: with_forward(encoder()),
    "somebody's list": lambda: listed(encoder()),
    "a block of attention": lambda: with_block("_sa_block"),
    "a block of its own": lambda: with_block("_ff_block"),
    "a weight in front": lambda: in_front("in_proj_weight", torch.ones(24, 8)),
    "a module in front": lambda: in_front("out_proj", nn.Identity()),
}


def with_block(name: str) -> Any:
    return replaced(name, lambda x, *_, **__: x.sin())


def in_front(name: str, value: Any) -> Any:
    model = encoder()
    vars(model.layers[0].self_attn)[name] = value
    return model


def with_forward(model: Any) -> Any:
    model.layers[0].forward = lambda x, **_: x
    return model


def with_function(model: Any) -> Any:
    model.norm = torch.tanh
    return model


def listed(model: Any) -> Any:
    class List(nn.ModuleList):
        pass

    model.layers = List(model.layers)
    return model


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused(kind: str) -> None:
    assert find(REFUSED[kind](), tokens()) is None


@pytest.mark.parametrize(
    "asked",
    [
        {"mode": "reverse"},
        {"chunk_size": 3},
        {"argnums": (0,)},
        {"in_dims": 1},
        {"max_bytes": 2**30},
        {"out": torch.empty(3, 4, 8, 4, 8, dtype=torch.float64)},
        {"create_graph": True},
    ],
)
def test_who_asks_for_more_gets_the_general_way(asked: dict[str, Any]) -> None:
    model, x = encoder(), tokens()
    assert find(model, x) is not None
    assert find(model, x, **asked) is None


def test_inputs_that_are_refused() -> None:
    model, x = encoder(), tokens()
    assert find(model, x, x) is None
    assert find(model) is None
    for other in (x[0], x[..., :7], x.float(), x[:0], x[:, :0], None, x.tolist()):
        assert find(model, other) is None
    for other in (nn.Parameter(x), x.as_subclass(Odd), x.to("meta"), x.bfloat16()):
        assert find(model, other) is None
    assert find(model.bfloat16(), x.bfloat16()) is None


@pytest.mark.cpu  # a GPU takes larger ones
def test_large_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder()
    found: dict[int, list[int]] = {}
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found[threads] = [n for n in (25, 26, 51, 52) if find(model, tokens(n))]
    # So many times 32 replicas of 4 tokens, 8 + 12 wide.
    assert 25 * 32 * 4 * 20 <= replicas.SMALL < 26 * 32 * 4 * 20
    assert 51 * 32 * 4 * 20 <= 2 * replicas.SMALL < 52 * 32 * 4 * 20
    assert found == {1: [25], 2: [25, 26, 51]}


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (F, "linear"),
        (F, "layer_norm"),
        (F, "scaled_dot_product_attention"),
        (F, "multi_head_attention_forward"),
        (F, "_in_projection_packed"),
        (F, "dropout"),
        (nn.ModuleList, "__iter__"),
        (nn.Linear, "_call_impl"),
        (F, "gelu"),
        (nn.Linear, "forward"),
        (nn.Sequential, "forward"),
        (nn.Flatten, "forward"),
        (Tensor, "flatten"),
        (nn.TransformerEncoderLayer, "_sa_block"),
        (nn.TransformerEncoderLayer, "_ff_block"),
        (nn.TransformerEncoderLayer, "forward"),
        (nn.MultiheadAttention, "forward"),
    ],
)
def test_what_somebody_replaced_is_seen(
    where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = encoder(), tokens()
    real = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *a, **k: real(*a, **k))
    assert find(model, x) is None


def test_under_autocast_it_is_refused() -> None:
    model, x = encoder().float(), tokens().float()
    with torch.autocast("cpu", torch.bfloat16):
        assert find(model, x) is None


@pytest.mark.cpu  # whose memory is counted here; a GPU's is had in blocks
@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_plan_says_how_much_is_held(count: int) -> None:
    model, x = encoder(count), tokens()
    plan = gradlib.plan_jacobian(model, x, check=False)
    assert plan.mode == "replicas"

    def ask() -> Any:
        return gradlib.per_sample_jacobian(model, x, check=False)

    ask()
    peak = measure_memory(ask, torch.device("cpu")).peak
    assert plan.bytes / 3 < peak <= plan.bytes


def test_one_row_of_what_was_made_in_inference_mode() -> None:
    model = nn.Sequential(layer(), nn.Flatten(), nn.Linear(32, 1).double()).eval()
    with torch.inference_mode():
        x = tokens()
    are_close(gradlib.per_sample_jacobian(model, x), by_loop(model, x.clone()))
    assert not x.requires_grad

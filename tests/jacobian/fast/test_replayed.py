"""What a GPU launches at once, with a CPU in its place: here a graph calls again."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.jacobian.fast import replayed, replicas
from gradlib.jacobian.fast.chains import find, recalled
from gradlib.jacobian.fast.replayed import Captured, Replays
from gradlib.jacobian.fast.structure import promise, structured

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give a CPU streams, memory and graphs; count what is captured, and replayed."""
    counts = [0, 0]

    def captured(compute: Callable[[Tensor], Tensor], x: Tensor) -> Captured:
        counts[0] += 1
        given = x.detach().clone()
        found = compute(given)

        def replay() -> None:
            counts[1] += 1
            found.copy_(compute(given))

        return Captured(given, found, replay, 3 * found.nbytes)

    monkeypatch.setattr(replayed, "captured", captured)
    for file in (find, replicas):
        monkeypatch.setattr(file, "may_replay_on", lambda _: True)
    monkeypatch.setattr(replayed, "stream_of", lambda _: 7)
    monkeypatch.setattr(replayed, "memory_of", lambda _: 2**33)
    return counts


@pytest.fixture(autouse=True)
def _own_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find chains as a user's calls do: without what holds them against fresh ones."""
    monkeypatch.setattr(find, "chain_of", recalled.chain_of)


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 200), nn.ReLU(), nn.Linear(200, 9)
    )


def cnn() -> Any:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3),
        nn.BatchNorm2d(8),
        nn.ELU(),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, 6),
    ).eval()


def batch_for(model: Any) -> Tensor:
    return (
        torch.randn(16, 64)
        if len(model) == 5 and isinstance(model[0], nn.Linear)
        else torch.randn(4, 2, 10, 10)
    )


def jacobian(model: Any, x: Tensor, **options: Any) -> Tensor:
    return gradlib.per_sample_jacobian(model, x, **{"check": False, **options})


def require_truth(model: nn.Module, x: Tensor) -> None:
    expected = jacobian(model, x, mode="loop")
    torch.testing.assert_close(jacobian(model, x), expected)


@pytest.mark.parametrize("make", [mlp, cnn])
def test_what_is_met_again_is_replayed(
    make: Callable[[], Any], captures: list[int]
) -> None:
    model = make()
    for _ in range(8):
        require_truth(model, batch_for(model))
    assert captures[0] == 1
    assert captures[1] >= 3


def test_a_small_net_is_replayed_too(captures: list[int]) -> None:
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2))

    def fn(x: Tensor) -> Tensor:
        return net(x)

    for call in (net, fn):
        before = list(captures)
        for _ in range(8):
            x = torch.randn(10, 3)
            expected = jacobian(net, x, mode="loop")
            torch.testing.assert_close(jacobian(call, x), expected)
        assert captures[0] == before[0] + 1
        assert captures[1] >= before[1] + 3


def test_weights_are_those_that_are_there(captures: list[int]) -> None:
    model = cnn()
    for _ in range(6):
        require_truth(model, batch_for(model))
    with torch.no_grad():
        for it in (*model.parameters(), model[1].running_mean, model[1].running_var):
            it.mul_(1.5).add_(0.1)
    before = list(captures)
    require_truth(model, batch_for(model))
    assert captures == [before[0], before[1] + 1]


CHANGES: dict[str, Callable[[Any], object]] = {
    "other memory": lambda model: setattr(
        model[4], "weight", nn.Parameter(torch.randn(6, 512))
    ),
    "data": lambda model: setattr(model[0].weight, "data", torch.randn(8, 2, 3, 3)),
    "another layout": lambda model: setattr(
        model[0].weight,
        "data",
        model[0].weight.data.to(memory_format=torch.channels_last),
    ),
    "a buffer": lambda model: setattr(model[1], "running_mean", torch.randn(8)),
    "an option": lambda model: setattr(model[1], "eps", 0.5),
    "another slope": lambda model: setattr(model[2], "alpha", 0.3),
    "another layer": lambda model: model.__setitem__(2, nn.Tanh()),
    "no bias": lambda model: setattr(model[4], "bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_seen(change: str, captures: list[int]) -> None:
    model = cnn()
    for _ in range(6):
        require_truth(model, batch_for(model))
    assert captures[0] == 1
    CHANGES[change](model)
    for _ in range(6):
        require_truth(model, batch_for(model))
    assert captures[0] == 2


def test_other_inputs_are_captured_anew(captures: list[int]) -> None:
    model = mlp()
    for size in (16, 16, 16, 16, 16, 5, 5, 5, 5, 5):
        require_truth(model, torch.randn(size, 64))
    assert captures[0] == 2
    for _ in range(4):
        require_truth(model, torch.randn(5, 64))
    assert captures[0] == 2
    for _ in range(4):
        require_truth(model, torch.randn(64, 5).mT)
    assert captures[0] == 3


def test_the_same_memory_in_another_order_is_captured_anew(captures: list[int]) -> None:
    layers = [*mlp()]
    layers[3:3] = [nn.Tanh(), nn.Linear(200, 200)]
    model: Any = nn.Sequential(*layers)
    for _ in range(5):
        require_truth(model, torch.randn(16, 64))
    model[4].weight.data = model[4].weight.data.mT
    for _ in range(5):
        require_truth(model, torch.randn(16, 64))
    assert captures[0] == 2


def test_another_precision_or_stream_is_captured_anew(
    captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = mlp(), torch.randn(16, 64)
    for _ in range(6):
        jacobian(model, x)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for _ in range(4):
            jacobian(model, x)
    finally:
        torch.set_float32_matmul_precision(before)
    assert captures[0] == 2
    for _ in range(4):
        jacobian(model, x)
    assert captures[0] == 3
    monkeypatch.setattr(replayed, "stream_of", lambda _: 8)
    for _ in range(4):
        jacobian(model, x)
    assert captures[0] == 4


def test_a_result_is_the_callers_own(captures: list[int]) -> None:
    model, x = mlp(), torch.randn(16, 64)
    first = [jacobian(model, x) for _ in range(6)][-1]
    kept = first.clone()
    jacobian(model, torch.randn(16, 64))
    assert captures[1] >= 2
    assert torch.equal(first, kept)
    out = torch.empty_like(first)
    assert jacobian(model, x, out=out) is out
    torch.testing.assert_close(out, first)
    assert captures[1] >= 3


def test_what_is_kept_has_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Captured] = []
    capture = replayed.captured

    def captured(*given: Any) -> Captured:
        made.append(capture(*given))
        return made[-1]

    monkeypatch.setattr(replayed, "captured", captured)
    model, x = mlp(), torch.randn(16, 64, requires_grad=True)
    for _ in range(5):
        found = jacobian(model, x * 1)
        assert not found.requires_grad
    assert not made[0].x.requires_grad
    assert not made[0].found.requires_grad


def test_who_limits_memory_or_asks_for_a_graph_keeps_nothing(
    captures: list[int],
) -> None:
    model, x = mlp(), torch.randn(16, 64)
    for _ in range(6):
        jacobian(model, x, max_bytes=2**30)
        jacobian(model, x, create_graph=True)
    assert captures == [0, 0]


def test_little_is_kept_in_all(
    captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replayed, "_every", type(replayed._every)())
    result = 16 * 9 * 64 * 4
    monkeypatch.setattr(replayed, "MOST", result)
    model, x = mlp(), torch.randn(16, 64)
    for _ in range(6):
        jacobian(model, x)
    assert captures == [0, 0], "by our count it is too much"
    monkeypatch.setattr(replayed, "MOST", 2**30)
    jacobian(model, x)
    assert captures[0] == 1
    (kept,) = [it.bytes for it in replayed._every]
    assert kept == 3 * result
    room = 2**20  # for one of them by our count, and not for what the first keeps too
    monkeypatch.setattr(replayed, "memory_of", lambda _: replayed.SHARE * room)
    next(iter(replayed._every)).bytes = room
    other = mlp()
    for _ in range(6):
        jacobian(other, x)
    assert captures[0] == 1
    del model
    gc.collect()
    assert not replayed._every
    jacobian(other, x)
    assert captures[0] == 2


def test_a_graph_that_takes_more_than_was_thought_is_let_go(
    captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = replayed.captured

    def captured(*given: Any) -> Captured:
        return capture(*given)._replace(bytes=replayed.MOST + 1)

    monkeypatch.setattr(replayed, "captured", captured)
    model = mlp()
    for _ in range(8):
        require_truth(model, batch_for(model))
    assert captures == [1, 0]


def test_what_cannot_be_captured_is_computed(
    captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0

    def refuse(*_: object) -> Captured:
        nonlocal tried
        tried += 1
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replayed, "captured", refuse)
    model = mlp()
    for _ in range(8):
        require_truth(model, batch_for(model))
    assert tried == 1
    assert captures == [0, 0]
    for _ in range(6):
        require_truth(model, torch.randn(3, 64))
    assert tried == 2


def test_two_threads_do_not_share_memory() -> None:
    replays, x = Replays(), torch.ones(3)
    inside, go_on = threading.Event(), threading.Event()
    found: list[Tensor | None] = []

    def slow(x: Tensor) -> Tensor:
        inside.set()
        go_on.wait(10)
        return 2 * x

    def of(compute: Callable[[Tensor], Tensor]) -> Tensor | None:
        return replays.result(compute, x, [], 0)

    assert of(slow) is None
    assert of(slow) is None
    thread = threading.Thread(target=lambda: found.append(of(slow)))
    thread.start()
    assert inside.wait(10)
    assert of(slow) is None, "somebody else is computing"
    go_on.set()
    thread.join(10)
    assert torch.equal(found[0], 2 * x) if found[0] is not None else False
    again = of(slow)
    assert again is not None
    assert torch.equal(again, 2 * x)


def transformer(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, batch_first=True, activation="gelu", **options
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_small_transformers_are_replayed(
    captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "SMALL", replicas.SMALL_ON_GPU)
    for file in (promise, structured):  # so small ones are not worth it
        monkeypatch.setattr(file, "LOOK", 1)
    monkeypatch.setattr(structured, "TURN", 1)
    model = transformer(norm_first=True).double()
    expected = None
    for _ in range(4):
        x = torch.randn(2, 6, 16, dtype=torch.float64)
        expected = jacobian(model, x, mode="reverse")
        torch.testing.assert_close(jacobian(model, x), expected)
    assert captures == [1, 2]
    with torch.no_grad():
        model.get_parameter("layers.0.linear1.weight").mul_(2)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    torch.testing.assert_close(jacobian(model, x), jacobian(model, x, mode="reverse"))
    assert captures == [1, 3]
    for change in (
        lambda it: setattr(it, "norm_first", False),
        lambda it: setattr(it.norm1, "eps", 0.1),
        lambda it: setattr(it.self_attn, "num_heads", 8),
        lambda it: setattr(it, "activation", nn.functional.relu),
    ):
        change(model.layers[1])
        found = jacobian(model, x)
        torch.testing.assert_close(found, jacobian(model, x, mode="reverse"))
    assert captures == [1, 3]

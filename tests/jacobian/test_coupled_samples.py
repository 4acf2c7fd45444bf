"""Samples that influence each other, or change places, are seen and named."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradlib
from gradlib import CoupledSamplesError
from gradlib.jacobian import coupling

from .points import alone, only_as, points, require_close

Function = Callable[[Tensor], Tensor]


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def contrastive(x: Tensor) -> Tensor:
    z = F.normalize(x)
    return F.cross_entropy(z @ z.T, torch.arange(len(x)), reduction="none")


def with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)
    ).double()


@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("mode", ["reverse", "forward", "loop", "auto"])
def test_batch_norm_in_training_is_named(mode: str, argnums: int | str) -> None:
    with pytest.raises(CoupledSamplesError, match='"2", a BatchNorm1d') as caught:
        gradlib.per_sample_jacobian(
            with_batch_norm(), points(5, 3), mode=mode, argnums=argnums
        )
    assert ".eval()" in str(caught.value)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_without_statistics_is_not_sent_to_eval(training: bool) -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh()).train(training)
    with pytest.raises(CoupledSamplesError, match="make it with track_running_stats"):
        gradlib.per_sample_jacobian(model, torch.randn(5, 3))


class Learning(nn.BatchNorm1d):
    """Uses the batch in evaluation too."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True)


def test_batch_norm_that_is_in_evaluation_is_not_sent_there() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Learning(4)).double().eval()
    with pytest.raises(CoupledSamplesError, match='"1", a Learning') as caught:
        gradlib.per_sample_jacobian(model, points(5, 3))
    assert ".eval()" not in str(caught.value)


@pytest.mark.parametrize("argnums", [0, "parameters"])
def test_batch_norm_deep_inside_is_named(argnums: int | str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3).double(), with_batch_norm()))
    with pytest.raises(CoupledSamplesError, match=r'"0\.1\.2", a BatchNorm1d'):
        gradlib.per_sample_jacobian(model, points(5, 3), argnums=argnums)


@pytest.mark.parametrize("argnums", [0, "parameters"])
def test_batch_norm_in_evaluation_works(argnums: int | str) -> None:
    model = with_batch_norm()
    model(points(9, 3))
    model.eval()
    x = points(5, 3)
    buffers = [it.clone() for it in model.buffers()]
    ours = gradlib.per_sample_jacobian(model, x, argnums=argnums)
    if argnums == 0:
        require_close(ours, alone(model, x))
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, before)


@pytest.mark.parametrize("batch", [2, 3, 5])
def test_a_mean_over_the_batch_by_hand_is_named(batch: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Centred(), nn.Linear(3, 2)).double()
    for argnums in (0, "parameters"):
        with pytest.raises(CoupledSamplesError, match='"1", a Centred'):
            gradlib.per_sample_jacobian(model, points(batch, 3), argnums=argnums)


COUPLED: dict[str, Function] = {
    "contrastive": contrastive,
    "standardized": lambda x: (x - x.mean(0)) / x.std(0),
    "a weak part of the mean": lambda x: x.sin() + 1e-6 * x.mean(0),
    "a cumulative sum": lambda x: x.cumsum(0),
    "the sample before": lambda x: x.roll(1, 0) * x,
    "one pair": lambda x: torch.cat([x[:1] + x[1:2], x[1:]]),
    "the samples turned around": lambda x: x.flip(0).sin(),
    "attention across samples": lambda x: torch.softmax(x @ x.T, 1) @ x,
    "the largest of the batch": lambda x: x / x.abs().max(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", COUPLED.values(), ids=list(COUPLED))
def test_samples_that_look_at_each_other(fn: Function, dtype: torch.dtype) -> None:
    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian(fn, points(4, 3, dtype=dtype))


@pytest.mark.parametrize("fn", COUPLED.values(), ids=list(COUPLED))
def test_samples_that_look_at_each_other_and_are_there_already(fn: Function) -> None:
    x = points(4, 3).requires_grad_()
    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian_from_graph(fn(x), x)


def test_a_large_output_hides_no_coupling_of_a_small_one() -> None:
    def fn(x: Tensor) -> Tensor:
        small = 1e-3 * (x - x.mean(0)).sin()
        return torch.stack([1e9 * x.sin(), small], 1)

    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian(fn, points(4, 3))


def partners(x: Tensor) -> Tensor:
    """Give each sample the one that is half a batch away: two views of each thing."""
    a, b = x.chunk(2)
    return torch.cat([b, a])


# Of four samples one half is drawn that has both views of one thing.
@pytest.mark.parametrize("batch", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_views_that_look_at_each_other(batch: int, dtype: torch.dtype) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() + 0.02 * (partners(x) if batch != 3 else x.roll(1, 0))

    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian(fn, points(batch, 5, dtype=dtype))


@pytest.mark.parametrize("few", [0, 4])
def test_large_entries_hide_no_small_one_that_couples(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coupling, "FEW_SAMPLES", few)

    def fn(x: Tensor) -> Tensor:
        h = x.tanh()
        return torch.cat([3e3 * h, (h * partners(h)).sum(1, keepdim=True)], 1)

    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian(fn, points(4, 5, dtype=torch.float32))


@pytest.mark.parametrize("outputs", [2, 3])
def test_a_sample_without_a_batch_is_told_what_it_lacks(outputs: int) -> None:
    model, x = nn.Linear(3, outputs), torch.ones(3)
    with pytest.raises(gradlib.GradlibError, match=r"single sample.* x\[None\]"):
        gradlib.per_sample_jacobian(model, x)
    ours = gradlib.per_sample_jacobian(model, x[None])
    torch.testing.assert_close(ours, model.weight[None])


def test_only_what_takes_a_single_sample_is_told_of_a_batch_of_one() -> None:
    model, x = nn.Conv2d(3, 3, 1).double(), points(3, 5, 5)
    with pytest.raises(CoupledSamplesError, match=r"a Conv2d.* x\[None\]"):
        gradlib.per_sample_jacobian(model, x)
    with pytest.raises(CoupledSamplesError, match="a Centred") as caught:
        gradlib.per_sample_jacobian(Centred(), points(4, 3))
    assert "x[None]" not in str(caught.value)


def test_a_second_input_that_couples_is_named() -> None:
    with pytest.raises(CoupledSamplesError, match=r"inputs\[1\]") as caught:
        gradlib.per_sample_jacobian(
            lambda x, y: x * y.mean(0), points(4, 3), points(4, 3)
        )
    assert "module" not in str(caught.value)  # there is none


def test_integers_that_couple_are_seen() -> None:
    table = nn.Embedding(5, 3).double()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids) - self.table(ids).mean(0)

    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian(
            Model(), torch.tensor([0, 1, 4]), argnums="parameters"
        )


@pytest.mark.parametrize("couples", [True, False])
def test_integers_that_couple_in_float32_alone_are_seen(couples: bool) -> None:
    class Model(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name)
            h = super().forward(input)
            if h.dtype != torch.float32:
                raise TypeError("float32 only")
            return h - h.mean(0) if couples else h.sin()

    find = partial(
        gradlib.per_sample_jacobian,
        Model(5, 3),
        torch.tensor([0, 1, 4]),
        argnums="parameters",
    )
    if couples:
        with pytest.raises(CoupledSamplesError, match="a Model"):
            find()
    else:
        assert find()["weight"].shape == (3, 3, 5, 3)


class LooksAtOne(nn.Module):
    """Every sample, or one alone, looks at one of the others."""

    def __init__(self, layer: nn.Module, one: int, who: slice) -> None:
        super().__init__()
        self.layer, self.one, self.who = layer, one, who

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        looks = torch.zeros(len(h), 1)
        looks[self.who] = 1
        return h * (1 - looks) + h * h[self.one] * looks


def every_case(batch: int) -> list[tuple[int, slice]]:
    """Return who is looked at, and by whom."""
    places = {0, 1, batch // 2, batch - 1} & {*range(batch)}
    pairs = [(i, slice(j, j + 1)) for i in places for j in places if i != j]
    return [*((i, slice(None)) for i in places), *pairs]


@pytest.mark.parametrize("batch", [2, 3, 5, 8, 33])
def test_who_looks_at_one_sample_is_seen_whoever_it_is(batch: int) -> None:
    x, z, w = torch.randn(batch, 4), torch.randn(batch, 4), torch.randn(4)
    tokens = torch.arange(batch)
    for one, who in every_case(batch):
        linear = LooksAtOne(nn.Linear(4, 3), one, who)
        embedding = LooksAtOne(nn.Embedding(batch, 3), one, who)
        looks = torch.zeros(batch, 1)
        looks[who] = 1

        def other(a: Tensor, b: Tensor, one: int = one, looks: Any = looks) -> Tensor:
            return a.square() * (b[one] * looks + 1)

        def common(a: Tensor, w: Tensor, one: int = one, looks: Any = looks) -> Tensor:
            return torch.tanh(a * w) * (a[one] * looks + 1)

        calls: list[Callable[[], Any]] = [
            partial(gradlib.per_sample_jacobian, linear, x),
            partial(gradlib.per_sample_jacobian, linear, x, argnums="parameters"),
            partial(
                gradlib.per_sample_jacobian, embedding, tokens, argnums="parameters"
            ),
            partial(gradlib.per_sample_jacobian, other, x, z),
            partial(
                gradlib.per_sample_jacobian, common, x, w, argnums=1, in_dims=(0, None)
            ),
        ]
        for call in calls:
            with pytest.raises(CoupledSamplesError):
                call()


def test_what_goes_by_the_place_in_the_batch_is_no_coupling() -> None:
    weights, tokens = torch.rand(5, 1), torch.tensor([0, 1, 1, 3, 2])
    model = nn.Sequential(nn.Embedding(4, 3), nn.Dropout(0.5))
    model.register_forward_hook(lambda *_: _[-1] * weights)
    assert gradlib.per_sample_jacobian(model, tokens, argnums="parameters")


def test_without_check_coupled_samples_give_the_sum() -> None:
    x = points(4, 3)
    ours = gradlib.per_sample_jacobian(lambda x: x - x.mean(0), x, check=False)
    assert ours.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("norm", "columns"),
    [
        (nn.BatchNorm1d(8), "NativeBatchNormBackward0 mixes the samples"),
        (nn.BatchNorm1d(8).eval(), 3),
        (nn.InstanceNorm1d(8), 3),  # of each sample, by the same kernel
    ],
    ids=["over samples", "in evaluation", "of a sample"],
)
def test_columns_are_planned_where_no_norm_mixes_samples(
    norm: nn.Module, columns: int | str
) -> None:
    def fn(x: Tensor) -> Tensor:
        h = torch.tanh(x) @ x.new_ones(3, 8)
        return norm.double()(h.unsqueeze(2).expand(-1, -1, 5)).flatten(1)

    plan = gradlib.plan_jacobian(fn, points(4, 3), check=False)
    assert plan.counts["forward"] == columns


def test_without_check_coupled_samples_that_are_there_already_give_the_sum() -> None:
    x = points(4, 3).requires_grad_()
    y = x - x.mean(0)
    ours = gradlib.per_sample_jacobian_from_graph(y, x, check=False)
    assert ours.abs().max() < 1e-12


@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_look_at_each_other_in_float32_alone(name: str) -> None:
    x = points(4, 3, dtype=torch.float32)
    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian(only_as(torch.float32, COUPLED[name]), x)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize(("mode", "width"), [("split", 12), ("forward", 2)])
def test_columns_where_samples_change_places(
    mode: Any, width: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or a GPU takes so few rows in one pass, and a CPU so little work.
    for limit in ("FEW", "LITTLE"):
        monkeypatch.setattr(f"gradlib.jacobian.choice.{limit}", 0)
    x, into, out_of = torch.randn(4, width), torch.randn(width, 2), torch.randn(2, 12)

    def fn(x: Tensor) -> Tensor:
        h = ((x.flip(0) if where == "before" else x) @ into).tanh()
        y = (h @ out_of).tanh()
        return y if where == "before" else y.flip(0)

    # It differs by more than rounding, also where that is looked at.
    with pytest.raises(gradlib.NoSuchWayError, match="samples influence each other"):
        gradlib.per_sample_jacobian(fn, x, mode=mode, check=False)
    rows = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    auto = gradlib.per_sample_jacobian(fn, x, check=False)
    assert gradlib.plan_jacobian(fn, x).mode == mode
    torch.testing.assert_close(auto, rows)


@pytest.mark.parametrize("check", [True, False])
def test_a_split_at_what_has_another_axis_first(check: bool) -> None:
    encode, decode = nn.Linear(64, 2), nn.Linear(2, 64)

    def fn(x: Tensor) -> Tensor:
        h = encode(x).transpose(0, 1).contiguous()  # the steps, and then the samples
        return decode((h + h.roll(1, 0)).tanh()).transpose(0, 1)

    for samples in (3, 4, 5):
        x = torch.randn(samples, 4, 64)
        assert gradlib.plan_jacobian(fn, x).mode == "split"
        rows = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
        torch.testing.assert_close(
            gradlib.per_sample_jacobian(fn, x, check=check), rows
        )
    with pytest.raises(gradlib.NoSuchWayError, match="another first axis"):
        gradlib.per_sample_jacobian(fn, x[:4], mode="split", check=check)


def test_a_split_of_samples_that_influence_each_other_says_where_to_learn_how() -> None:
    net = nn.Sequential(nn.Linear(9, 2), nn.Linear(2, 9), nn.BatchNorm1d(9), nn.Tanh())
    x = torch.randn(4, 9)
    with pytest.raises(
        gradlib.NoSuchWayError, match='"reverse": with check=True it says'
    ):
        gradlib.per_sample_jacobian(net, x, mode="split")
    with pytest.raises(gradlib.CoupledSamplesError, match='mixes them is "2"'):
        gradlib.per_sample_jacobian(net, x, mode="reverse")


class TimeFirst(nn.Module):
    """A recurrent net that has the time before the batch, with a narrow middle."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(60, 4), nn.Linear(4, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x.transpose(0, 1))[0]).transpose(0, 1).flatten(1)


@pytest.mark.parametrize(
    "make",
    [
        partial(nn.GRU, 8, 4),
        partial(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0),
    ],
)
def test_a_layer_that_wants_the_batch_on_axis_1_is_to_be_made_otherwise(
    make: Callable[..., nn.Module],
) -> None:
    def outputs(layer: nn.Module) -> Function:
        return lambda x: out[0] if isinstance(out := layer(x), tuple) else out

    x = torch.randn(4, 5, 8)
    with pytest.raises(CoupledSamplesError, match="make it with batch_first=True"):
        gradlib.per_sample_jacobian(outputs(make()), x)
    gradlib.per_sample_jacobian(outputs(make(batch_first=True)), x)


def test_a_sequence_without_a_batch_is_not_told_where_to_put_it() -> None:
    rnn = nn.GRU(8, 4)
    with pytest.raises(CoupledSamplesError, match="a GRU") as caught:
        gradlib.per_sample_jacobian(lambda x: rnn(x)[0], torch.randn(5, 8))
    assert "batch_first" not in str(caught.value)


@pytest.mark.parametrize("scale", [1, 0.1, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("check", [True, False])
def test_an_axis_as_long_as_the_batch_is_not_taken_for_it(
    scale: float, dtype: torch.dtype, check: bool
) -> None:
    net, x = TimeFirst().to(dtype), torch.randn(6, 6, 60, dtype=dtype)
    with torch.no_grad():
        for it in net.parameters():
            it.mul_(scale)
    expected = gradlib.per_sample_jacobian(net, x, mode="loop", check=False)
    found = gradlib.per_sample_jacobian(net, x, check=check)
    largest = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * largest)
    with pytest.raises(gradlib.NoSuchWayError, match="another first axis"):
        gradlib.per_sample_jacobian(net, x, mode="split", check=check)

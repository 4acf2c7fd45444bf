"""Layers that recorders get wrong, compared with gradients without a recorder."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close

import gradlib

from .truth import assert_same_bits, grad_of, grads_of, loss_of, run, twins


@pytest.mark.parametrize(
    "dropout",
    [nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d],
)
def test_dropout_in_place(dropout: type[nn.Module]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.end = nn.Linear(4, 4), nn.Linear(4, 2)
            self.drop = dropout(0.5, inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.drop(self.fc(x)))

    model, plain = twins(Model())
    x = torch.randn(5, 3, 4)
    torch.manual_seed(1)
    before = plain.fc(x)
    before.retain_grad()
    after = plain.drop(before.clone())
    after.retain_grad()
    loss_of(plain.end(after)).backward()
    torch.manual_seed(1)
    with gradlib.record(model) as recording:
        run(model, x)
    assert_close(recording["fc"].output, before.detach())
    assert_close(recording["fc"].grad_output, (before.grad,))
    assert_close(recording["drop"].args, (before.detach(),))
    assert_close(recording["drop"].grad_input, (before.grad,))
    assert_close(recording["drop"].grad_output, (after.grad,))
    assert_same_bits(grads_of(model), grads_of(plain))


def test_shares_add_up_over_several_rounds() -> None:
    model = nn.Sequential(shared := nn.Linear(3, 3), nn.Tanh(), shared)
    with gradlib.record(model) as recording:
        for _ in range(3):
            run(model, torch.randn(2, 3))
    calls = recording.calls("0")
    assert len(calls) == 6
    for name, parameter in shared.named_parameters():
        assert_close(sum(call.param_grads[name] for call in calls), parameter.grad)
        rounds = [forward["0", 2 * i] for i, forward in enumerate(recording.forwards)]
        total = sum(call.param_grads_total[name] for call in rounds)
        assert_close(total, parameter.grad)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("train", [False, True])
def test_attention(need_weights: bool, kind: str, train: bool) -> None:
    model, plain = twins(nn.MultiheadAttention(4, 2, batch_first=True).train(train))
    x = torch.randn(2, 3, 4, requires_grad=True)
    memory = torch.randn(2, 5, 4, requires_grad=kind == "cross")
    inputs = (x, x, x) if kind == "self" else (x, memory, memory)
    asked = [x] if kind == "self" else [x, memory]

    def grads(model: nn.Module) -> tuple[Tensor, ...]:
        output, weights = model(*inputs, need_weights=need_weights)
        loss = loss_of(output) + (loss_of(weights) if need_weights else 0)
        return torch.autograd.grad(loss, [*asked, *model.parameters()])

    expected = grads(plain)
    with gradlib.record(model) as recording:
        found = grads(model)
    assert_same_bits(found, expected)
    call = recording[""]
    total = dict(zip(map(id, asked), expected, strict=False))
    assert_close(call.grad_input, tuple(total[id(tensor)] for tensor in inputs))
    own = dict(zip(dict(model.named_parameters()), expected[len(asked) :], strict=True))
    assert_close(call.param_grads["in_proj_weight"], own["in_proj_weight"])
    assert_close(call.param_grads_total["in_proj_bias"], own["in_proj_bias"])
    assert (call.grad_output[1] is not None) == need_weights
    if "out_proj" not in recording:
        with pytest.raises(gradlib.NoSuchCallError, match="uses its weights directly"):
            _ = recording["out_proj"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers(kind: Callable[..., nn.Module], packed: bool) -> None:
    model, plain = twins(kind(3, 4, num_layers=2, batch_first=True))
    for copied in (model, plain):  # else cuDNN warns of the memory layout of the copies
        assert isinstance(copied, nn.RNNBase)
        copied.flatten_parameters()
    x = torch.randn(2, 5, 3, requires_grad=True)

    def grads(model: nn.Module) -> tuple[Tensor, ...]:
        given: Any = pack_padded_sequence(x, [5, 3], batch_first=True) if packed else x
        output, state = model(given)
        if packed:
            assert isinstance(output, PackedSequence)
            output, _ = pad_packed_sequence(output, batch_first=True)
        last = state[1] if isinstance(state, tuple) else state
        loss = loss_of(output) + last.sum()
        return torch.autograd.grad(loss, [x, *model.parameters()])

    expected = grads(plain)
    with gradlib.record(model) as recording:
        found = grads(model)
    assert_same_bits(found, expected)
    call = recording[""]
    names = [name for name, _ in model.named_parameters()]
    assert_close(call.param_grads, dict(zip(names, expected[1:], strict=True)))
    given, flowed = call.args[0], call.grad_input[0]
    if packed:
        assert isinstance(call.output[0], PackedSequence)
        flowed, _ = pad_packed_sequence(
            PackedSequence(flowed.data, given.batch_sizes), batch_first=True
        )
    assert_close(flowed, expected[0])
    assert "LSTM" in str(call) or kind is not nn.LSTM
    repr(call)
    str(recording)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings(kind: type[nn.Module], sparse: bool) -> None:
    model, plain = twins(kind(5, 3, sparse=sparse))
    indices = torch.tensor([[0, 2], [2, 4]])
    run(plain, indices)
    with gradlib.record(model) as recording:
        run(model, indices)
        run(model, indices)
    first, second = recording.calls("")
    expected = grad_of(plain.weight)
    for call in (first, second):
        assert call.param_grads["weight"].is_sparse == sparse
        for share in (call.param_grads, call.param_grads_total):
            assert_close(share["weight"].to_dense(), expected.to_dense())
        assert call.grad_input == (None,)
        assert call.note == "args[0] does not require grad"
    str(first)


def test_a_sparse_gradient_of_a_weight_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(5, 3, sparse=True)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.e(a) * 2 + self.e(b)

    model = Twice()
    with gradlib.record(model) as recording:
        run(model, torch.tensor([0, 1]), torch.tensor([1, 2]))
    shares = [call.param_grads["weight"].to_dense() for call in recording.calls("e")]
    assert_close(sum(shares), grad_of(model.e.weight).to_dense())
    assert shares[0][2].count_nonzero() == 0
    assert_close(
        recording["e", 0].param_grads_total["weight"].to_dense(),
        grad_of(model.e.weight).to_dense(),
    )


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    model, plain = twins(model)
    x = torch.randn(2, 3).to(dtype).requires_grad_()
    expected = torch.autograd.grad(loss_of(plain(x)), [x, *plain.parameters()])
    with gradlib.record(model) as recording:
        found = torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()])
    assert_same_bits(found, expected)
    assert_same_bits(recording["0"].grad_input, (expected[0],))
    assert_same_bits(list(recording["0"].param_grads.values()), list(expected[1:3]))
    assert recording["1"].grad_output[0].dtype == dtype
    str(recording)


def test_convolutions_that_share_their_input() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()
            self.a, self.b = nn.Conv2d(16, 64, 1), nn.Conv2d(16, 64, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(x)
            return self.a(x) + self.b(x)

    torch.manual_seed(0)
    model, alone = twins(Model())
    x = torch.randn(1, 16, 15, 15, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    hidden = alone.act(x).detach().requires_grad_()
    run(nn.Identity(), alone.a(hidden) + alone.b(hidden))
    assert_same_bits(recording["act"].grad_output[0], hidden.grad)
    assert recording.verify().ok


def test_a_fused_way_that_torch_takes_without_hooks() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x, padding = torch.randn(4, 5, 16), torch.arange(5).expand(4, 5) > 3
    with torch.no_grad():
        fused = layer(x, src_key_padding_mask=padding)
        with gradlib.record(layer):
            recorded = layer(x, src_key_padding_mask=padding)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            plain = layer(x, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(recorded, plain)
    assert_close(recorded[~padding], fused[~padding])

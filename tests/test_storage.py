"""Saving a recording, and what a loaded one answers."""

import json
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from matplotlib.figure import Figure
from safetensors import safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib import plain_values, storage
from gradlib.private.tensors import is_copy_on_write, lazy_clone
from gradlib.recording import saving
from gradlib.recording.kept_fields import CALL_FIELDS, PASS_FIELDS
from gradlib.recording.trace import Block, CallTrace
from gradlib.tree import Tree

# What is loaded is on the CPU.
assert_close = partial(torch.testing.assert_close, check_device=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.safetensors"


def round_trip(value: Any, path: Path) -> Any:
    storage.save(path, value, {})
    return storage.load(path, {})


def record(model: nn.Module, *args: Any, **options: Any) -> gradlib.Recording:
    with gradlib.record(model, **options) as recording:
        for _ in range(2):
            leaves = Tree.of(model(*args)).leaves
            torch.stack(
                [t.sum() for t in leaves if isinstance(t, Tensor)]
            ).sum().backward()
    return recording


def reloaded(recording: gradlib.Recording, path: Path) -> gradlib.Recording:
    recording.save(path)
    return gradlib.load_recording(path)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.twice = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.frozen(x))
        return self.twice(x + self.inner(x))


def assert_alike(loaded: gradlib.Recording, saved: gradlib.Recording) -> None:
    """Check that two recordings answer every question alike."""
    assert len(loaded) == len(saved) > 0
    assert str(loaded) == str(saved)
    assert loaded._repr_html_() == saved._repr_html_()
    assert len(loaded.forwards) == len(saved.forwards)
    for a, b in zip(loaded, saved, strict=True):
        assert (a.name, a.index, a.forward) == (b.name, b.index, b.forward)
        assert (a.module_type, a.note, str(a)) == (b.module_type, b.note, str(b))
        assert len(a.passes) == len(b.passes)
        assert_same_fields(a, b, CALL_FIELDS)
        for one, other in zip(a.passes, b.passes, strict=True):
            assert one.backward == other.backward
            assert_same_fields(one, other, PASS_FIELDS)


def assert_same_fields(a: Any, b: Any, names: Any) -> None:
    for name in names:
        x, y = Tree.of(getattr(a, name)), Tree.of(getattr(b, name))
        assert x.spec == y.spec, name
        assert_close(x.leaves, y.leaves, rtol=0, atol=0, equal_nan=True)


def test_a_loaded_recording_answers_what_the_saved_one_did(path: Path) -> None:
    saved = record(Residual(), torch.randn(4, 3))
    loaded = reloaded(saved, path)
    assert_alike(loaded, saved)
    assert loaded["twice", 1].name == "twice"
    assert "returned no tensor that requires grad" in loaded["frozen", 0].note
    with pytest.raises(gradlib.NoSuchCallError, match="was not called in the block"):
        loaded["never"]
    with pytest.raises(gradlib.AmbiguousCallError, match="i from 0 to 3"):
        loaded["twice"]
    assert_alike(reloaded(loaded, path), saved)


def test_a_loaded_recording_can_be_compared_and_searched(path: Path) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 3), Residual()
    saved = record(model, x)
    loaded = reloaded(saved, path)
    assert loaded.compare(saved).ok
    assert loaded.first_nonfinite() is None
    with torch.no_grad():
        model.inner.weight.fill_(torch.nan)
    broken = reloaded(record(model, x), path)
    for one, other in ((loaded, broken), (broken, loaded)):
        first = one.compare(other).first
        assert first is not None
        assert first.name == "inner"
    found = broken.first_nonfinite()
    assert found is not None
    assert found.name == "inner"


def test_a_forward_can_be_saved_alone(path: Path) -> None:
    saved = record(Residual(), torch.randn(4, 3)).forwards[1]
    assert_alike(reloaded(saved, path), saved)


def drawn(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file)
    return file.getvalue()


@pytest.mark.cpu  # which a loaded recording is on: a GPU rounds norms in another way
def test_pictures_and_frames_of_a_loaded_recording(path: Path) -> None:
    saved = record(Residual(), torch.randn(4, 3))
    loaded = reloaded(saved, path)
    assert loaded.to_frame().equals(saved.to_frame())
    for kind in ("flow", "steps", "histogram"):
        assert drawn(loaded.plot(kind)) == drawn(saved.plot(kind))


def test_what_was_kept_and_left_out_is_still_known(path: Path) -> None:
    saved = record(Residual(), torch.randn(4, 3), modules="twice", keep="output")
    loaded = reloaded(saved, path)
    with pytest.raises(gradlib.NotKeptError):
        _ = loaded["twice", 0].args
    with pytest.raises(gradlib.NoSuchCallError, match="left it out"):
        loaded["inner"]


def test_a_call_that_raised_has_no_output(path: Path) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(x.shape)

    model = nn.Sequential(nn.Linear(3, 3), Fails())
    with gradlib.record(model) as saved, suppress(ValueError):
        model(torch.randn(2, 3))
    loaded = reloaded(saved, path)
    assert loaded["1"].output is None
    assert loaded["1"].note == saved["1"].note == "its forward raised ValueError"
    assert_alike(loaded, saved)


def test_the_note_on_a_checkpoint_is_still_there(path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    saved = record(Checkpointed(), torch.randn(4, 3))
    assert "checkpoint" in saved["inner", 0].note
    assert_alike(reloaded(saved, path), saved)


def test_the_notes_on_other_passes_are_still_there(path: Path) -> None:
    model, x = nn.Sequential(nn.Softplus(), nn.Softplus()), torch.ones(2)
    x.requires_grad_()
    with gradlib.record(model) as recording:
        y = model(x)
        torch.autograd.grad(y, x, torch.ones(3, 2), True, is_grads_batched=True)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gradient.sum().backward()
        with torch.no_grad():
            model(x)
    assert "is_grads_batched" in recording["0", 0].note
    assert "is_grads_batched" not in recording["0", 1].note
    assert_alike(reloaded(recording, path), recording)


def test_the_note_on_the_graph_of_a_batched_pass_is_still_there(path: Path) -> None:
    model, x = nn.Softplus(), torch.ones(2, requires_grad=True)
    with gradlib.record(model) as recording:
        y = model(x)
        torch.autograd.grad(y, x, torch.ones(3, 2), True, True, is_grads_batched=True)
        y.sum().backward()
    assert "the graph of a pass with is_grads_batched" in recording["", 0].note
    assert_alike(reloaded(recording, path), recording)


def test_a_loaded_recording_cannot_be_replayed_and_says_why(path: Path) -> None:
    loaded = reloaded(record(nn.Linear(2, 2), torch.randn(4, 2)), path)
    with pytest.raises(gradlib.GradlibError, match="loaded from a file"):
        loaded["", 0].replay()
    with pytest.raises(gradlib.GradlibError, match="loaded from a file"):
        loaded.verify()


def test_saving_inside_the_block_saves_what_is_there(path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with gradlib.record(model) as recording:
        output = model(torch.randn(3, 2))
        recording.save(path)
        assert gradlib.load_recording(path)["0"].passes == ()
        output.sum().backward()
        assert_alike(reloaded(recording, path), recording)
        before = gradlib.load_recording(path)
        model(torch.randn(3, 2))
    assert len(recording) == len(before) + 2


@pytest.mark.parametrize(
    "reduce",
    [
        gradlib.tensor_stats,
        lambda t: t.abs().max().item(),
        lambda t: t.numel(),
        lambda t: {"mean": t.mean().cpu(), "shape": t.shape, 3: (t.numel(), [1.5])},
        lambda t: t.detach().cpu().numpy(),
    ],
    ids=["stats", "float", "int", "dict", "array"],
)
def test_a_reduced_recording_saves_what_it_kept(
    reduce: Callable[[Tensor], Any], path: Path
) -> None:
    saved = record(Residual(), torch.randn(4, 3), reduce=reduce)
    loaded = reloaded(saved, path)
    assert str(loaded) == str(saved)
    for a, b in zip(loaded, saved, strict=True):
        assert repr(a.output) == repr(b.output)


def test_statistics_are_exact(path: Path) -> None:
    values = torch.tensor([1.1 + 2j, 0, 3, torch.nan])
    for tensor in (values, values.real, values.real.to(torch.bfloat16)):
        saved = gradlib.tensor_stats(tensor)
        storage.save(path, saved, saving.CLASSES)
        loaded = storage.load(path, saving.CLASSES)
        assert repr(loaded) == repr(saved)
        assert loaded.shape == saved.shape
        assert isinstance(loaded.shape, torch.Size)
        for name, number in saved.numbers().items():
            assert type(loaded.numbers()[name]) is type(number)
            np.testing.assert_equal(loaded.numbers()[name], number)


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Result:
    scores: Tensor
    label: str


class Output(dict[str, Any]):
    """Its keys are attributes too, as those of many models' outputs."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass(frozen=True)
class Task:
    name: str


def test_keys_that_are_dataclasses(tmp_path: Path) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return {Task("a"): self.head(x), Task("b"): x * 2}

    model = Heads()
    with gradlib.record(model) as recording:
        model(torch.ones(1, 2))[Task("a")].sum().backward()
    recording.save(tmp_path / "run")
    loaded = gradlib.load_recording(tmp_path / "run")
    (first, second) = loaded[""].output.items()
    assert [it.name for it, _ in (first, second)] == ["a", "b"]
    assert torch.equal(first[1], recording[""].output[Task("a")].cpu())


class Alike:
    """A key that looks like any other of its class."""

    def __repr__(self) -> str:
        return "Alike"


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_keys_that_look_alike(tmp_path: Path, kind: Any) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return kind([(Alike(), self.head(x)), (Alike(), x * 2), (Alike(), x * 3)])

    model = Heads()
    with gradlib.record(model) as recording:
        torch.cat([*model(torch.ones(1, 2)).values()]).sum().backward()
    assert recording.verify().ok
    recording.save(tmp_path / "run")
    loaded = gradlib.load_recording(tmp_path / "run")
    output = loaded[""].output
    assert [str(it) for it in output] == [
        f"NotSaved(Alike{number})" for number in ("", " (2)", " (3)")
    ]
    pairs = zip(output.values(), recording[""].output.values(), strict=True)
    assert all(torch.equal(read, kept.cpu()) for read, kept in pairs)
    assert loaded.compare(recording).ok


class Opaque:
    def __repr__(self) -> str:
        return "Opaque()"


class Many(nn.Module):
    def forward(self, x: Tensor, *_rest: Any, **_named: Any) -> Any:
        return {
            "z": (x * 1, [x * 2, None]),
            "a": Pair(x * 3, Opaque()),
            "result": Result(x * 4, "four"),
            "ordered": OrderedDict(z=x * 5, a=x * 6),
            "output": Output(z=x * 7, a=x * 8),
            "largest": torch.max(x * 9, dim=0),
            7: x * 10,
        }


def test_structures_keep_their_look_ups(path: Path) -> None:
    model = Many()
    x = torch.randn(2, 3, requires_grad=True)
    y = torch.randn(2, requires_grad=True)
    with gradlib.record(model) as recording:
        out = model(x, {"b": y, "a": [1, "text"]}, shift=y, rate=float("inf"), c=2j)
        (out["output"]["z"] * 2 + out["output"].a * 3).sum().backward()
    saved, call = recording[""], reloaded(recording, path)[""]
    output = call.output
    assert list(output) == list(saved.output)
    assert isinstance(output["z"], tuple)
    assert output["z"][1][1] is None
    assert output["a"]._fields == ("left", "right")
    assert repr(output["a"].right) == "NotSaved(Opaque)"
    assert output["a"].right == saved.output["a"].right == gradlib.NotSaved("Opaque")
    assert output["result"].label == "four"
    assert type(output["result"]).__name__ == "Result"
    assert [field.name for field in fields(output["result"])] == ["scores", "label"]
    assert list(output["ordered"]) == ["z", "a"]
    assert_close(output["output"]["a"], saved.output["output"]["a"])
    assert_close(output["largest"].indices, saved.output["largest"].indices)
    assert_close(output[7], saved.output[7])
    # The leaves of a class made of a dict change places: the gradients go with them.
    grads = call.grad_output["output"]
    assert (grads["z"] == 2).all()
    assert (grads["a"] == 3).all()
    assert call.args[1]["a"] == [1, "text"]
    assert (call.kwargs["rate"], call.kwargs["c"]) == (float("inf"), 2j)
    assert call.note == saved.note
    assert_close(call.grad_input[0], saved.grad_input[0])


def test_objects_as_keys_and_other_containers(path: Path) -> None:
    given = [{Opaque(): 1}, deque([1, torch.ones(2)]), Result]
    by_object, several, kind = round_trip(given, path)
    assert by_object[gradlib.NotSaved("Opaque()")] == 1
    assert several[0] == 1
    assert_close(several[1], torch.ones(2))
    assert kind == gradlib.NotSaved(repr(Result))


def test_a_structure_that_checks_its_parts(path: Path) -> None:
    lengths = torch.tensor([2, 3], device="cpu")
    x = torch.randn(3, 2, 4)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    model = nn.LSTM(4, 2)
    with gradlib.record(model) as recording:
        model(packed)[0].data.sum().backward()
    call, loaded = recording[""], reloaded(recording, path)[""]
    assert loaded.args[0]._fields == call.args[0]._fields
    assert_close(tuple(loaded.args[0]), tuple(call.args[0]))
    assert_close(loaded.output[0].data, call.output[0].data)
    assert_close(loaded.grad_output[0].data, call.grad_output[0].data)
    assert str(loaded) == str(call)
    with gradlib.record(model, reduce=gradlib.tensor_stats) as recording:
        model(packed)[0].data.sum().backward()
    call = recording[""]
    assert call.args[0].data.shape == packed.data.shape
    assert str(reloaded(recording, path)[""]) == str(call)


def test_one_class_for_one_structure(path: Path) -> None:
    first, second = (
        round_trip([Pair(torch.ones(1), 2), Result(torch.ones(1), "a")], path)
        for _ in range(2)
    )
    assert [type(part) for part in first] == [type(part) for part in second]


sparse = torch.tensor([[0.0, 1.0], [2.0, 0.0]])


class Tagged(Tensor):
    """A class of tensors as users make them."""


TENSORS = {
    "of another class": torch.randn(3).as_subclass(Tagged),
    "complex64": torch.randn(2, 3, dtype=torch.complex64),
    "complex128": torch.randn(2, 3, dtype=torch.complex128),
    "conjugated": torch.randn(2, dtype=torch.complex64).conj(),
    "negated": torch.randn(2, dtype=torch.complex64).conj().imag,
    "bfloat16": torch.randn(5).bfloat16(),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "scalar": torch.tensor(1.5),
    "complex scalar": torch.tensor(1.5j),
    "empty": torch.empty(0, 3),
    "strided": torch.randn(4, 6)[:, ::2].T,
    "expanded": torch.randn(1, 3).expand(4, 3),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "parameter": nn.Parameter(torch.randn(3)),
    "nan": torch.tensor([torch.nan, torch.inf, -0.0]),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_tensors_come_back_as_they_were(tensor: Tensor, path: Path) -> None:
    loaded = round_trip({"x": tensor}, path)["x"]
    assert type(loaded) is Tensor
    assert loaded.dtype == tensor.dtype
    both = (it.detach().cpu() for it in (loaded, tensor))  # without entries: anywhere
    bits = [it.resolve_neg().as_subclass(Tensor) for it in both]
    assert_close(*bits, rtol=0, atol=0, equal_nan=True)
    if not tensor.is_complex():
        assert torch.equal(*(it.float().signbit() for it in bits))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["to_sparse_coo", "to_sparse_csr", "to_mkldnn"])
def test_other_layouts_become_dense(layout: str, path: Path) -> None:
    given = sparse.cpu() if layout == "to_mkldnn" else sparse  # it is the CPU's
    loaded = round_trip(getattr(given, layout)(), path)
    assert loaded.layout == torch.strided
    assert_close(loaded, sparse)


def test_a_tensor_without_values_keeps_its_form(path: Path) -> None:
    loaded = round_trip(torch.empty(2, 3, dtype=torch.half, device="meta"), path)
    assert (loaded.shape, loaded.dtype) == ((2, 3), torch.half)
    assert loaded.is_meta


def test_equal_tensors_are_stored_once(path: Path) -> None:
    x = torch.randn(1000)
    same = [x, x.clone(), x.view(10, 100), x.view(torch.int32), x + 1]
    loaded = round_trip(same, path)
    assert loaded[0] is loaded[1]
    with safe_open(path, "pt") as file:
        assert len(file.keys()) == 5  # four tensors, and the JSON
    complexes = round_trip([torch.tensor([1j])] * 2, path)
    assert complexes[0] is complexes[1]


def test_scalars_of_numpy_become_plain_numbers(path: Path) -> None:
    scalars = [np.float32(0.5), np.int8(3), np.bool_(True), np.complex64(2j)]
    loaded = round_trip(scalars, path)
    assert [type(number) for number in loaded] == [float, int, bool, complex]
    assert loaded == scalars


def test_an_integer_of_any_size(path: Path) -> None:
    numbers = [2**70, -(10**5000), 2**64, 0, -1]
    assert round_trip(numbers, path) == numbers


def test_what_is_nested_too_deep(path: Path) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(gradlib.NotStorableError, match="levels deep"):
        storage.save(path, deep, {})
    assert not path.exists()


def test_inside_of_torch_func(path: Path) -> None:
    model = nn.Linear(2, 1)
    with gradlib.record(model) as recording:
        model(torch.ones(3, 2)).sum().backward()
    found: list[gradlib.Recording] = []

    def save_and_load(x: Tensor) -> Tensor:
        recording.save(path)
        found.append(gradlib.load_recording(path))
        return x.sum()

    torch.vmap(save_and_load)(torch.ones(2, 3))
    torch.func.grad(save_and_load)(torch.ones(3))
    for loaded in found:
        assert_close(loaded[""].param_grads["weight"], torch.full((1, 2), 3.0))
        assert recording.compare(loaded).ok


def test_a_shape_stays_a_shape(path: Path) -> None:
    (loaded,) = round_trip([torch.Size([2, 3])], path)
    assert isinstance(loaded, torch.Size)
    assert loaded == torch.Size([2, 3])


def test_arrays_made_while_writing_are_not_mixed_up(path: Path) -> None:
    arrays = [np.full(3, i) for i in range(20)]
    with torch.device("meta"):  # the default device has no say
        loaded = round_trip(arrays, path)
    assert all((a == b).all() for a, b in zip(loaded, arrays, strict=True))


def test_a_long_recording_has_room(path: Path) -> None:
    """The header of a safetensors file holds no more than 100 MB."""
    text = "x" * 110_000_000
    assert round_trip(text, path) == text


@pytest.mark.cpu
def test_saving_leaves_the_memory_of_the_recording_alone() -> None:
    x = torch.randn(10)
    kept = lazy_clone(x)
    saved, _ = plain_values._plain(kept)
    assert is_copy_on_write(kept)
    assert_close(saved, x)


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(2)


def strided_nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


REFUSED = {
    "strided nested": strided_nested,
    "quantized": quantized,
    "nested": lambda: torch.nested.as_nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "fake": fake,
    "what only a reader refuses": lambda: torch.ones(2).to(torch.float8_e8m0fnu),
}


@pytest.mark.cpu  # torch 2.11 cannot make them all on a GPU
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, on making them
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stored_is_refused(
    make: Callable[[], Tensor], path: Path
) -> None:
    path.write_text("old")
    with pytest.raises(
        gradlib.NotStorableError, match=r"cannot (be written|write)"
    ) as caught:
        storage.save(path, [torch.ones(1), make()], {})
    assert isinstance(caught.value, TypeError)
    assert ("nested" in str(caught.value)) is make().is_nested
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


class ReturnsNested(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), torch.nested.nested_tensor([x[0].detach(), x[1, :1].detach()])


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_value_that_cannot_be_stored_is_named(path: Path) -> None:
    model = nn.ModuleList([nn.ReLU(), ReturnsNested()])
    with gradlib.record(model) as recording:
        model[1](model[0](torch.ones(2, 3)))
    with pytest.raises(
        gradlib.NotStorableError, match=r'output\[1\] of call 0 of "1": A nested tensor'
    ):
        recording.save(path)
    assert not path.exists()


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, on making them
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_that_cannot_be_stored_are_refused(path: Path) -> None:
    def reduce(_: Tensor) -> Tensor:
        return quantized()

    model, x = nn.ReLU(), torch.ones(2, requires_grad=True)
    with gradlib.record(model, keep="grad_input", reduce=reduce) as recording:
        model(x).sum().backward()
    with pytest.raises(gradlib.NotStorableError, match=r"^\[GL210\] A tensor of"):
        recording.save(path)
    assert not path.exists()


@pytest.mark.parametrize("broken", ["os.fsync", "pathlib.Path.replace"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    broken: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    recording = record(nn.Linear(2, 2), torch.ones(1, 2))
    recording.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(broken, fail)
    with pytest.raises(OSError, match="no space left"):
        record(nn.Linear(2, 2), torch.ones(1, 2)).save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_where_one_cannot_write_the_message_is_the_systems(tmp_path: Path) -> None:
    recording = record(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(FileNotFoundError, match=r"directory: '\S+/missing/run'$"):
        recording.save(tmp_path / "missing" / "run")
    with pytest.raises(OSError, match=f": '{tmp_path}'$"):
        recording.save(tmp_path)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(FileNotFoundError, match="never"):
        gradlib.load_recording(tmp_path / "never")


def test_a_link_stays_a_link(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    record(nn.Linear(2, 2), torch.ones(1, 2)).save(str(link))
    assert link.is_symlink()
    assert len(gradlib.load_recording(str(path))) == 2


@pytest.fixture
def content(path: Path) -> bytes:
    storage.save(path, {"x": torch.arange(4.0)}, {})
    return path.read_bytes()


def test_any_changed_byte_is_noticed(path: Path, content: bytes) -> None:
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 0x20
        path.write_bytes(changed)
        with pytest.raises(gradlib.BrokenFileError) as caught:
            gradlib.load_recording(path)
        assert str(path) in str(caught.value)


def test_any_missing_end_is_noticed(path: Path, content: bytes) -> None:
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(gradlib.BrokenFileError):
            gradlib.load_recording(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(gradlib.BrokenFileError, match="was cut off or changed"):
        gradlib.load_recording(path)


def sealed(json_text: str, **metadata: str) -> bytes:
    """Return a file that fits its checksum, whatever it says."""
    tensors = {
        "json": torch.frombuffer(bytearray(json_text.encode()), dtype=torch.uint8)
    }
    given = {"format": storage.FORMAT, "version": "1", "sha256": storage.BLANK}
    return b"".join(storage._sealed(safetensors.torch.save(tensors, given | metadata)))


def headed(text: str) -> bytes:
    """Return a file that begins as those of safetensors do."""
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is no safetensors file"),
        (b"PK\x03\x04 a torch.save file, perhaps", "is no safetensors file"),
        (headed("[1]"), "is no safetensors file"),
        (headed('{"__metadata__": 1}'), "is no safetensors file"),
        (safetensors.torch.save({"x": torch.ones(2)}), "holds no recording"),
        (sealed("{}", format="other"), "holds no recording"),
        (sealed("{}", version="2"), "has version 2 of the format"),
        (sealed('{"not json'), "not its contents"),
        (sealed('{"eval": "1"}'), "nothing is written as 'eval'"),
        (sealed('{"tensor": "5"}'), "KeyError"),
        (sealed('{"dataclass": ["A", ["b c"], [1]]}'), "not its contents"),
        (sealed('{"meta": ["torch.load", []]}'), "torch.load is no dtype"),
    ],
    # safetensors 0.8 writes the metadata in another order each time.
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_a_foreign_file_is_told_from_a_recording(
    data: bytes, message: str, path: Path
) -> None:
    path.write_bytes(data)
    with pytest.raises(gradlib.BrokenFileError, match=message) as caught:
        gradlib.load_recording(path)
    assert isinstance(caught.value, ValueError)
    assert caught.value.code == "GL208"
    assert str(caught.value).startswith(f"[GL208] {path} ")


def test_the_json_is_strict(path: Path) -> None:
    storage.save(path, [float("nan"), float("-inf")], {})
    text = safetensors.torch.load_file(path)["json"].numpy().tobytes()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(text, parse_constant=refuse)


def test_everything_a_call_has_is_saved_or_left_out_on_purpose() -> None:
    own_form = {"inputs", "output", "flows", "idle", "returned", "recomputed_in"}
    own_form |= {"nonfinite_state", "idle_outputs", "closed_inputs", "closed_outputs"}
    left_out = {"block", "module", "world", "checkpoints", "summed_in"}
    left_out |= {"given_modules", "held_inputs"}
    nothing: Any = None
    own = vars(CallTrace(nothing, "", 0, "", 0))
    by_default = {
        name
        for name, value in vars(CallTrace).items()
        if not (name.startswith("_") or callable(value))
    }
    assert {*own, *by_default} == {*saving.AS_IT_IS, *own_form, *left_out}
    assert {field.name for field in fields(Block)} == {
        *("fields", "left_out", "numbers", "copies", "with_graph", "batched"),
        "captured",
        *("happened", "unfinished", "is_reduced", "cast_to"),
        # Left out: for replays and verify(), of which a file has none.
        *("history", "autocast", "hooks_at_end", "hooks_at_pass"),
        "_inverse",  # of `numbers`
    }


def test_a_file_keeps_its_permissions(path: Path) -> None:
    path.write_bytes(b"")
    path.chmod(0o600)
    storage.save(path, [1], {})
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_no_file_stays_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    with pytest.raises(gradlib.NotStorableError, match="fifo is no regular file"):
        storage.save(fifo, [1], {})
    assert fifo.is_fifo()
    assert [*tmp_path.iterdir()] == [fifo]

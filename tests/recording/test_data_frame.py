"""A recording as a pandas data frame."""

import math
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import gradlib


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch = nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.unused(x)
        return x + self.branch(x)


def record(**options: object) -> gradlib.Recording:
    torch.manual_seed(0)
    model = Residual()
    with gradlib.record(model, **options) as recording:  # pyright: ignore (any options)
        for _ in range(2):
            loss = model(torch.randn(3, 4)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
    return recording


def test_a_row_for_each_call_and_pass() -> None:
    recording = record()
    frame: Any = recording.to_frame()
    assert list(frame.columns) == [
        *("forward", "name", "index", "module_type", "output_shape", "output"),
        *("backward", "grad_output", "grad_input", "grad_input_total"),
        *("param_grads", "param_grads_total", "note"),
    ]
    assert len(frame) == 2 * (3 * 2 + 1)
    rows = frame[(frame["name"] == "branch") & (frame["forward"] == 1)]
    assert rows["backward"].tolist() == [2, 3]
    call = recording["branch", 1]
    for (_, row), pass_ in zip(rows.iterrows(), call.passes, strict=True):
        assert (row["index"], row["module_type"]) == (1, "Linear")
        assert row["output_shape"] == "[3, 4]"
        assert row["output"] == pytest.approx(call.output.norm().item())
        for field in ("grad_output", "grad_input", "grad_input_total"):
            norm = getattr(pass_, field)[0].norm().item()
            assert row[field] == pytest.approx(norm)
        weight, bias = pass_.param_grads.values()
        norm = math.hypot(weight.norm(), bias.norm())
        assert row["param_grads"] == pytest.approx(norm)
        assert row["note"] == call.note


def test_a_call_without_a_pass_has_a_row_and_says_why() -> None:
    frame: Any = record().to_frame()
    unused = frame[frame["name"] == "unused"]
    assert unused["backward"].isna().all()
    assert unused["grad_output"].isna().all()
    assert unused["note"].str.contains("no backward pass reached its output").all()
    assert frame["backward"].dtype == "Int64"
    assert frame["grad_input"].dtype == float


def test_what_was_not_kept_has_no_column() -> None:
    frame: Any = record(keep=("output", "grad_output")).to_frame()
    assert "grad_output" in frame
    assert not {"grad_input", "grad_input_total", "param_grads"} & set(frame.columns)
    assert "output" not in record(keep="grad_output").to_frame()


def test_statistics_have_norms_and_numbers_are_shown_as_they_are() -> None:
    whole, stats = record().to_frame(), record(reduce=gradlib.tensor_stats).to_frame()
    pd.testing.assert_frame_equal(whole, stats)
    numbers: Any = record(reduce=Tensor.numel).to_frame()
    branch = numbers[numbers["name"] == "branch"].iloc[0]
    assert branch["output"] == 12
    assert branch["param_grads"] == (4, 16)  # by name: bias, weight


@pytest.mark.cpu  # where NumPy has the same memory
def test_numbers_of_numpy_are_shown_as_they_are() -> None:
    recording = record(reduce=lambda tensor: np.abs(tensor.numpy()).max())
    frame: Any = recording.to_frame()
    call = recording["branch", 0]
    given = call.passes[0].grad_output[0]
    assert isinstance(given, np.floating)
    assert frame[frame["name"] == "branch"].iloc[0]["grad_output"] == given
    rows = [it.split() for it in str(recording).splitlines()]
    assert f"{given:.3g}" in next(row for row in rows if row[0] == "branch")
    assert f"{given:.3g}" in str(call).split()
    assert "gradients: what reduce gave, -" in " ".join(str(recording).split())


def test_nothing_recorded_is_an_empty_frame() -> None:
    with gradlib.record(nn.Linear(1, 1)) as recording:
        pass
    frame: Any = recording.to_frame()
    assert len(frame) == 0
    assert "note" in frame


def test_without_pandas_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        gradlib.MissingPackageError, match="pip install pandas"
    ) as caught:
        record().to_frame()
    assert isinstance(caught.value, ImportError)
    assert caught.value.code == "GL209"

"""A Jacobian keeps within the memory it is given, and a plan says what it takes."""

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradlib
from gradlib import DetachedPathError, JacobianPlan, OutOfBytesError
from gradlib.jacobian import planning
from gradlib.jacobian.chunk import CONVOLVED, SINGLE, WHOLE
from gradlib.jacobian.plan import BATCHED
from mkdocs_hooks import fresh

from .measured_memory import (
    images,
    measure,
    measure_columns,
    measure_maps,
    measure_parameters,
    measure_together,
)

pytestmark = pytest.mark.of_fast  # plans say what it takes

MIB = 2**20

SLACK = 4 * MIB
"""What the process takes meanwhile for Python's objects."""


def measured(
    net: str,
    max_bytes: int | None = None,
    chunk_size: int | str = "auto",
    known: bool = False,
    check: bool = False,
    anew: bool = False,
) -> tuple[int, int]:
    """Return by how many bytes a process grew beyond its forward, and the result's."""
    asked = net, max_bytes, chunk_size, known, check, anew
    return fresh.call(measure, *asked, folder=Path.cwd())


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be no shorter way."""
    for file in ("per_sample", "plan_jacobian"):
        monkeypatch.setattr(f"gradlib.jacobian.{file}.find_in_call", lambda _: None)
    for file in ("compute", "plan_jacobian"):
        monkeypatch.setattr(f"gradlib.jacobian.{file}.find_in_graph", lambda *_: None)


linux = pytest.mark.skipif(sys.platform != "linux", reason="it is read from /proc")


@linux
@pytest.mark.parametrize("budget", [48, 160])
@pytest.mark.parametrize("net", ["wide", "bottleneck"])
@pytest.mark.parametrize("known", [False, True], ids=["function", "chain"])
def test_a_jacobian_keeps_within_its_budget(net: str, budget: int, known: bool) -> None:
    grown, result = measured(net, max_bytes=budget * MIB, known=known)
    assert result == 32 * MIB
    assert result / 2 <= grown <= budget * MIB + SLACK


@pytest.mark.cpu
@linux
def test_convolutions_keep_within_what_is_planned() -> None:
    plan = gradlib.plan_jacobian(*images())
    assert plan.mode == "chain"
    grown = fresh.call(measure_maps, plan.bytes, folder=Path.cwd())
    assert plan.bytes / 3 <= grown <= plan.bytes + SLACK


@pytest.mark.cpu
@pytest.mark.parametrize("check", [False, True])
def test_a_chain_may_have_what_its_plan_says(check: bool) -> None:
    ending = nn.Tanh(), nn.Flatten(), nn.Linear(128**2, 10)
    model, x = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), *ending), images()[1]
    x = x.repeat(4, 1, 1, 1)
    needed = gradlib.plan_jacobian(model, x, check=check)
    plan = gradlib.plan_jacobian(model, x, check=check, max_bytes=needed.bytes)
    assert plan.mode == needed.mode == "chain"
    assert plan.bytes == plan.max_bytes == needed.bytes
    with pytest.raises(OutOfBytesError):  # as the other ways take more
        gradlib.plan_jacobian(model, x, check=check, max_bytes=needed.bytes - 1)


@linux
@pytest.mark.parametrize("net", ["wide", "bottleneck"])
def test_the_check_keeps_within_it_too(net: str) -> None:
    grown, result = measured(net, max_bytes=48 * MIB, check=True)
    direction = 2 * MIB  # at most: like the input, it waits for the Jacobian
    assert result == 32 * MIB
    assert result / 2 <= grown <= 48 * MIB + direction + SLACK


@linux
@pytest.mark.parametrize("budget", [54, 160])
def test_so_does_one_with_respect_to_parameters(budget: int) -> None:
    folder = Path.cwd()
    grown, result = fresh.call(measure_parameters, budget * MIB, folder=folder)
    assert 32 * MIB < result < 36 * MIB
    assert result / 2 <= grown <= budget * MIB + SLACK


@linux
@pytest.mark.parametrize(
    ("net", "mode", "budget"),
    [
        ("norms", "stacked", 64),
        ("attention", "stacked", 30),
        ("generator", "pushed", 24),
    ],
)
def test_so_do_those_that_go_together(net: str, mode: str, budget: int) -> None:
    asked = net, mode, budget * MIB
    grown, result, chunk = fresh.call(measure_together, *asked, folder=Path.cwd())
    assert 1 < chunk < 16
    assert result / 2 <= grown <= budget * MIB + SLACK


@linux
def test_more_rows_at_once_take_more() -> None:
    few, result = measured("deep", max_bytes=30 * MIB)
    many, _ = measured("deep", chunk_size=24, anew=True)
    assert result == 24 * MIB
    assert few <= 30 * MIB + SLACK
    assert many > 40 * MIB  # some 45


@linux
def test_columns_are_taken_where_the_graph_that_they_keep_has_room() -> None:
    folder = Path.cwd()
    little, much = 16 * MIB, 160 * MIB
    assert fresh.call(measure_columns, "auto", little, folder=folder) <= little + SLACK
    assert fresh.call(measure_columns, "forward", much, folder=folder) > 2 * little
    with pytest.raises(RuntimeError, match='Or pass mode="reverse"'):
        fresh.call(measure_columns, "forward", little, folder=folder)


# What does not fit.


def chain(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def test_a_result_that_does_not_fit_is_refused() -> None:
    model, x = chain(8, 16, 32), torch.randn(4, 8)
    size = 4 * 32 * 8 * 4
    with pytest.raises(OutOfBytesError, match=r"takes 4 KiB .* is 3.999 KiB.*out="):
        gradlib.per_sample_jacobian(model, x, mode="loop", max_bytes=size - 1)
    with pytest.raises(OutOfBytesError):
        gradlib.plan_jacobian(model, x, mode="loop", max_bytes=size)
    gradlib.per_sample_jacobian(model, x, mode="loop", max_bytes=2 * size, check=False)
    out = torch.empty(4, 32, 8)
    how: dict[str, Any] = {"mode": "loop", "max_bytes": size, "check": False}
    gradlib.per_sample_jacobian(model, x, **how, out=out)


def test_memory_of_ones_own_is_advised_only_where_it_helps() -> None:
    model, x = chain(8, 16, 32), torch.randn(4, 8)
    for out in (None, torch.empty(4, 32, 8)):
        with pytest.raises(OutOfBytesError) as found:
            gradlib.per_sample_jacobian(model, x, mode="loop", max_bytes=9, out=out)
        assert "pass out=" not in str(found.value)
    assert re.search(r"fits: a pass takes \S+ \S+ besides out, and", str(found.value))


def test_rows_are_advised_where_columns_keep_too_much() -> None:
    model, x = chain(8, 16, 32), torch.randn(4, 8)
    budget = gradlib.plan_jacobian(model, x, mode="reverse", chunk_size=1).bytes
    for room in (budget, budget - 1):
        with pytest.raises(OutOfBytesError) as found:
            gradlib.plan_jacobian(model, x, mode="forward", max_bytes=room)
        assert ('pass mode="reverse"' in str(found.value)) == (room == budget)


def test_half_of_what_is_free_is_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SURE", 0)
    monkeypatch.setattr(planning, "room_on", lambda _: 9)
    with pytest.raises(OutOfBytesError, match="and half of what is free is 9 bytes"):
        gradlib.per_sample_jacobian(chain(8, 2), torch.randn(4, 8), mode="loop")


def test_a_check_that_does_not_fit_is_refused() -> None:
    model, x = chain(8, 1024, 2), torch.randn(64, 8)
    plan = gradlib.plan_jacobian(model.forward, x, mode="loop")
    size = plan.check_bytes
    assert size > plan.bytes
    with pytest.raises(OutOfBytesError, match="check=False"):
        gradlib.per_sample_jacobian(model, x, mode="loop", max_bytes=size - 1)
    assert gradlib.plan_jacobian(model, x, mode="loop", max_bytes=size).check_first
    gradlib.per_sample_jacobian(model, x, mode="loop", max_bytes=size)
    gradlib.per_sample_jacobian(model, x, mode="loop", max_bytes=size - 1, check=False)
    assert gradlib.plan_jacobian(model, x, check=False).check_bytes == 0


@pytest.mark.usefixtures("general")
def test_a_check_takes_what_is_free_unless_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = chain(4, 100, 100, 2), torch.randn(1, 4)
    unlimited = gradlib.plan_jacobian(model, x)
    monkeypatch.setattr(planning, "SURE", unlimited.check_bytes - 1)
    assert unlimited.bytes <= planning.SURE // 16  # else nobody takes them for granted
    gradlib.per_sample_jacobian(model, x)


def test_a_cut_path_is_seen_where_the_check_comes_first() -> None:
    x = torch.randn(4, 30)

    def fn(x: Tensor) -> Tensor:
        return x.sin() + x.detach().cos()

    plan = gradlib.plan_jacobian(fn, x, mode="loop")
    budget = plan.bytes
    assert plan.check_bytes <= budget
    assert gradlib.plan_jacobian(fn, x, mode="loop", max_bytes=budget).check_first
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(fn, x, mode="loop", max_bytes=budget)


def test_a_chunk_that_does_not_fit_is_refused() -> None:
    model, x = chain(64, 64, 24), torch.randn(64, 64)
    needed = gradlib.plan_jacobian(model, x, chunk_size=24).bytes
    gradlib.per_sample_jacobian(model, x, chunk_size=24, max_bytes=needed)
    with pytest.raises(OutOfBytesError):
        gradlib.per_sample_jacobian(model, x, chunk_size=24, max_bytes=needed - 1)


@pytest.mark.usefixtures("general")
@pytest.mark.parametrize("budget", [2**19, 2**20, 2**22])
def test_a_plan_keeps_within_its_budget(budget: int) -> None:
    model, x = chain(64, 64, 24), torch.randn(64, 64)
    plan = gradlib.plan_jacobian(model.forward, x, max_bytes=budget)
    assert plan.bytes <= plan.max_bytes == budget
    assert plan.result_bytes == 64 * 24 * 64 * 4


def test_a_plan_of_a_chain_needs_no_room_for_other_ways() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 64))
    x = torch.randn(8, 64)
    room = 8 * 64 * 64 * 4 + 10 * 2**10  # the result's, and little more
    plan = gradlib.plan_jacobian(model, x, max_bytes=room)
    assert (plan.mode, plan.max_bytes) == ("chain", room)
    assert plan.bytes <= room
    found = gradlib.per_sample_jacobian(model, x, max_bytes=room)
    reference = gradlib.per_sample_jacobian(model, x, mode="loop", check=False)
    torch.testing.assert_close(found, reference)


def test_a_larger_budget_has_larger_chunks() -> None:
    model, x = chain(64, 64, 24), torch.randn(64, 64)
    chunks = [
        gradlib.plan_jacobian(model, x, mode="reverse", max_bytes=it).chunk
        for it in (2**19, 2**20, 2**22)
    ]
    assert chunks[0] < chunks[1] < chunks[2] == 24


@pytest.mark.usefixtures("general")
def test_gradients_of_weights_take_nothing() -> None:
    model, x = chain(128, 128, 128), torch.randn(4, 128)
    plan = gradlib.plan_jacobian(model.forward, x)
    frozen = gradlib.plan_jacobian(model.requires_grad_(False).forward, x)
    assert plan.pass_bytes == frozen.pass_bytes
    assert plan.chunk == frozen.chunk


# The plan.


@pytest.mark.cpu  # a GPU takes so few rows in one pass
@pytest.mark.usefixtures("general")
def test_multiply_adds_are_those_counted_by_hand() -> None:
    batch, wide, narrow = 8, 64, 4
    net = chain(wide, narrow, wide)
    plan = gradlib.plan_jacobian(net.forward, torch.randn(batch, wide))
    once = batch * (wide * narrow + narrow * wide)  # a vector through both layers
    product = batch * wide * narrow * wide
    assert plan.counts == {
        "reverse": wide,
        "forward": wide,
        "split": narrow,  # rows before the tensor, and as many columns after it
        "loop": wide,
    }
    assert plan.work == {
        "reverse": wide * once,
        "forward": wide * once,
        "split": narrow * once + product,
        "loop": wide * once,
    }
    assert plan.mode == "split"
    assert (plan.chunk, plan.passes) == (narrow, 2)
    assert plan.shapes == ((batch, wide, wide),)


@pytest.mark.cpu
@pytest.mark.usefixtures("general")
def test_of_little_work_a_cpu_takes_rows() -> None:
    modes = {
        batch: gradlib.plan_jacobian(chain(2, 16, 64).forward, torch.randn(batch, 2))
        for batch in (8, 8000)
    }
    assert [it.mode for it in modes.values()] == ["reverse", "forward"]
    assert modes[8].why == "all 64 rows at once are little work"


@pytest.mark.cpu
@pytest.mark.usefixtures("general")
@pytest.mark.parametrize(
    ("widths", "mode"),
    [((64, 4, 64), "split"), ((2, 16, 64), "forward"), ((64, 16, 2), "reverse")],
)
def test_auto_takes_the_cheapest(
    widths: tuple[int, ...], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradlib.jacobian.choice.LITTLE", 0)
    model, x = chain(*widths), torch.randn(8, widths[0])
    plan = gradlib.plan_jacobian(model.forward, x)
    assert plan.mode == mode
    assert plan.work[mode] == min(plan.work.values())
    text = str(plan)
    assert f"mode={mode!r}, as {plan.why}." in " ".join(text.split())
    assert f"Jacobian [8, {widths[-1]}, {widths[0]}]" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    for way, count in plan.counts.items():
        if isinstance(count, int):
            assert rows[way][1] == str(plan.passes_of(way))
            assert float(rows[way][2]) == pytest.approx(plan.work[way], rel=0.01)
            assert rows[way][3] == str(count)


@pytest.mark.cpu  # whose attention is differentiated only once
def test_a_long_reason_in_a_plan_is_wrapped() -> None:
    net = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    plan = gradlib.plan_jacobian(net, torch.randn(2, 3, 4))
    assert len(str(plan.counts["forward"])) > 60
    assert max(map(len, str(plan).splitlines())) <= 80


@pytest.mark.cpu
def test_large_convolutions_go_row_by_row() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(18, 2))
    plan = gradlib.plan_jacobian(model, torch.randn(16384, 2, 8))
    assert plan.mode == "loop"
    assert "convolutions" in plan.why
    assert plan.passes == 2
    assert gradlib.plan_jacobian(model, torch.randn(4, 2, 8)).mode == "reverse"


@pytest.mark.cpu
@pytest.mark.parametrize(("rows", "passes"), [(1, 1), (2, 2), (3, 1), (5, 1)])
def test_a_pair_of_rows_shares_nothing(rows: int, passes: int) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Softmin(1), nn.Linear(4, rows))
    x = torch.randn(4, 8)
    assert gradlib.plan_jacobian(model, x).passes == passes
    assert gradlib.plan_jacobian(model, x, mode="reverse").passes == passes
    assert gradlib.plan_jacobian(model, x, chunk_size=rows).passes == 1


@pytest.mark.cpu
def test_half_of_the_rows_go_alone_only_where_all_hold_much() -> None:
    def planned(batch: int) -> JacobianPlan:
        x = torch.ones(batch, 64)
        return gradlib.plan_jacobian(lambda x: F.normalize(x, dim=1), x, mode="reverse")

    each = BATCHED * 64 * planned(1).pass_bytes
    assert (planned(SINGLE // each).chunk, planned(SINGLE // each).passes) == (64, 1)
    assert planned(SINGLE // each + 1).passes > 1


@pytest.mark.cpu
def test_passes_through_convolutions_are_alike_and_fit_into_caches() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(18, 16))
    plan = gradlib.plan_jacobian(model, torch.randn(1450, 2, 8))
    assert CONVOLVED / 2 < plan.chunk * plan.pass_bytes <= CONVOLVED
    assert (plan.chunk, plan.passes) == (8, 2)  # not as many as fit, and the others


@pytest.mark.cpu
@pytest.mark.parametrize("threads", [1, 2])
def test_convolutions_that_somebody_goes_back_through_go_together(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(18, 20))

    def planned(batch: int) -> JacobianPlan:
        x = torch.randn(batch, 2, 8)
        return gradlib.plan_jacobian(model, x, create_graph=True)

    fitting = WHOLE * threads // (20 * planned(1).pass_bytes)
    assert (planned(fitting).mode, planned(fitting).chunk) == ("reverse", 20)
    large = planned(fitting + 1)
    assert large.chunk * large.pass_bytes <= CONVOLVED
    assert planned(CONVOLVED // planned(1).pass_bytes).mode == "loop"


def test_passes_are_rows_by_chunks() -> None:
    model, x = chain(5, 6, 7), torch.randn(4, 5)
    plan = gradlib.plan_jacobian(model, x, mode="reverse", chunk_size=3)
    assert (plan.mode, plan.why) == ("reverse", "it was asked for")
    assert (plan.chunk, plan.passes) == (3, 3)
    assert plan.passes_of("forward") == 2
    assert plan.passes_of("loop") == 7


def test_a_pass_asks_for_no_more_than_there_is() -> None:
    model, x = chain(5, 6, 7), torch.randn(4, 5)
    ours = {"mode": "reverse", "max_bytes": 2**15}
    plan = gradlib.plan_jacobian(model, x, chunk_size=10**6, **cast(Any, ours))
    assert (plan.chunk, plan.passes) == (7, 1)


def test_passes_are_those_that_are_made() -> None:
    model, x = chain(5, 6, 7), torch.randn(4, 5)
    seen: list[int] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            del ctx
            seen.append(1)
            return grads[0]

    def fn(x: Tensor) -> Tensor:
        return cast(Any, Seen.apply)(model(x))

    for mode, chunk in (("reverse", 1), ("reverse", 3), ("loop", 5)):
        plan = gradlib.plan_jacobian(fn, x, mode=mode, chunk_size=chunk)
        seen.clear()
        gradlib.per_sample_jacobian(fn, x, mode=mode, chunk_size=chunk, check=False)
        assert len(seen) == plan.passes


def test_a_way_that_cannot_be_taken_says_why() -> None:
    plan = gradlib.plan_jacobian(
        lambda x, y: x * y, torch.randn(4, 3), torch.randn(4, 3), argnums=(0, 1)
    )
    why = plan.counts["split"]
    assert isinstance(why, str)
    assert why in " ".join(str(plan).split())


def test_a_plan_leaves_random_state_and_buffers_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = [torch.get_rng_state(), *(it.clone() for it in model.buffers())]
    gradlib.plan_jacobian(model, torch.zeros(5, 3))
    after = [torch.get_rng_state(), *model.buffers()]
    assert all(map(torch.equal, before, after))

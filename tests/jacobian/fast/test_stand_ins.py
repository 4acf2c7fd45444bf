"""Code is run on stand-ins in no time, and not where somebody would notice."""

import signal
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from gradlib.jacobian.fast.chains import stand_ins
from gradlib.jacobian.fast.chains.line import layers_of

from .lines import double, make
from .test_chain import chain


def test_an_error_of_somebody_else_is_not_taken() -> None:
    class LateError(Exception):
        pass

    def late(*_: object) -> None:
        raise LateError

    def fn(x: Tensor) -> Tensor:
        for _ in range(10**9):
            pass
        return x

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(LateError):
            layers_of(fn, double(5, 4))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_has_many_parts_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(200))
    many, x, asked = tuple(range(10**5)), double(2, 4), 0
    known = vars(stand_ins)["_known"]

    def counted(value: object) -> Any:
        nonlocal asked
        asked += 1
        return known(value)

    def fn(x: Tensor) -> Tensor:
        for i in range(len(listed)):
            x = listed[i](x)
        return x

    monkeypatch.setattr(stand_ins, "_known", counted)
    found = layers_of(fn, x)
    assert found == [*listed]
    assert asked < 2 * len(listed)
    asked = 0
    assert chain(lambda x: fn(x) if many else x, x) is None
    assert asked < 50


def test_monitored_code_is_not_run_on_stand_ins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, x = make(), double(5, 4)
    tools: dict[int, str] = {}
    monitoring = SimpleNamespace(DEBUGGER_ID=0, get_tool=tools.get)
    monkeypatch.setattr(sys, "monitoring", monitoring, raising=False)
    assert chain(lambda x: net(x), x) is not None
    tools[0] = "a debugger"
    assert chain(lambda x: net(x), x) is None


def test_who_debugs_sees_no_stand_ins() -> None:
    net, x = make(), double(5, 4)
    seen: list[str] = []

    def trace(frame: FrameType, *_: object) -> Any:
        seen.append(type(frame.f_locals.get("x")).__name__)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = chain(lambda x: net(x), x)
    finally:
        sys.settrace(before)
    assert found is None
    assert "StandIn" not in seen

"""The profiler of calls: an error of it ends the profile, and no call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.roles.profiler import CallProfiler


class FullDisk(torch.profiler.profile):
    def export_chrome_trace(self, path: str) -> None:
        raise OSError("no space left on device")


class Refusing(torch.profiler.profile):
    def start(self) -> None:
        raise RuntimeError("profiler is in use")


def calls(profiler: CallProfiler, count: int) -> None:
    for _ in range(count):
        with profiler.around_call():
            torch.ones(3).add(1)


@pytest.mark.parametrize("broken", [FullDisk, Refusing])
def test_an_error_of_the_profiler_is_logged_and_the_next_profile_is_written(
    broken: type, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = CallProfiler()
    with monkeypatch.context() as patched:
        patched.setattr(torch.profiler, "profile", broken)
        profiler.arm(tmp_path / "trace.json", 2)
        calls(profiler, 3)
    assert f"{tmp_path}/trace.json is not written" in caplog.text
    profiler.arm(tmp_path / "next.json", 1)
    calls(profiler, 1)
    events = json.loads((tmp_path / "next.json").read_text())["traceEvents"]
    assert any("aten::add" in event.get("name", "") for event in events)


def test_the_error_of_a_call_is_not_replaced_by_that_of_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler, "profile", FullDisk)
    profiler = CallProfiler()
    profiler.arm(tmp_path / "trace.json", 1)
    with pytest.raises(ValueError, match="of the call"), profiler.around_call():
        raise ValueError("of the call")

"""Pauses of a wait on a GPU or a peer, on a clock of the test."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from nccl_transfer.transports.gpu import liveness
from nccl_transfer.transports.gpu.liveness import (
    LONGEST_PAUSE_S,
    PAUSE_OF_WAIT,
    POLLING_S,
    LivenessStream,
)

TIMER_SLACK_S = 6e-5


class Clock:
    """A clock on which a call takes a microsecond, and a sleep as long as was asked for and the slack of a timer; a
    sleep of 0 takes a microsecond."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + TIMER_SLACK_S if seconds else 1e-6


@pytest.mark.parametrize("due", [5e-5, 2e-4, 5e-4, 3e-3, 0.5])
def test_a_wait_ends_at_once_or_a_short_pause_late(monkeypatch: pytest.MonkeyPatch, due: float):
    clock = Clock()
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    stream = LivenessStream(iter(()), threading.Event())
    monkeypatch.setattr(stream, "_ended", threading.Event())
    stream.wait(lambda: clock.now >= due, deadline=1.0, where="source")
    pause = 0.0 if due < POLLING_S else min(PAUSE_OF_WAIT * due, LONGEST_PAUSE_S) + TIMER_SLACK_S
    assert due <= clock.now <= due + pause + 3e-6

"""Use of devices over time, against a count of every moment."""

from __future__ import annotations

import random

import pytest

from controller.role_groups.device_meter import DeviceMeter
from controller.role_groups.placement import Placement

NAMES = ("a", "b", "c")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(20))
def test_shares_equal_a_count_of_every_second(seed: int) -> None:
    draw, clock = random.Random(seed), Clock()
    meter = DeviceMeter(clock)
    meter.add(frozenset(NAMES))
    calls = []
    for _ in range(12):
        begin = draw.randrange(40)
        devices = frozenset(draw.sample(NAMES, draw.randint(1, 3)))
        calls.append((begin, begin + draw.randint(0, 9), devices))
    together = busy = 0
    for second in range(50):
        clock.now = 100.0 + second
        for begin, end, devices in calls:
            if end == second and end > begin:
                meter.end(devices)
        for begin, end, devices in calls:
            if begin == second and end > begin:
                meter.begin(devices)
        running = [devices for begin, end, devices in calls if begin <= second < end]
        together += any(not one & other for one in running for other in running)
        busy += len(frozenset[str]().union(*running))
    clock.now = 150.0
    use = meter.take()
    assert (use.seconds, use.together_s, use.busy_s, use.devices) == (50, together, busy, 3)
    assert use.metrics() == pytest.approx(
        {"time/overlap_share": together / 50, "time/idle_share": 1 - busy / 150}
    )
    assert meter.take().metrics() == {}


def test_a_call_that_was_never_sent_uses_nothing() -> None:
    clock = Clock()
    meter = DeviceMeter(clock)
    meter.add(frozenset({"a"}))
    placement = Placement(meter=meter)
    failed, sent = (placement.enter(frozenset({"a"}), object(), 1.0) for _ in range(2))
    clock.now += 1
    failed.leave()
    sent.was_sent()
    clock.now += 2
    sent.leave()
    clock.now += 1
    use = meter.take()
    assert (use.seconds, use.busy_s, use.together_s) == (4, 2, 0)

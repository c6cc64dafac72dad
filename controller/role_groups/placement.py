"""The order of calls on devices: calls that share a device run in call order, all others at the same time.

An algorithm is therefore the same text whether its roles are colocated, split or interleaved; the resource pools of the
config decide (HybridFlow, sections 4.1 and 4.2).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from client.session import StepContext
from controller.role_groups.device_meter import DeviceMeter
from controller.role_groups.futures import Promise, resolve_after
from controller.role_groups.residency import NO_MOVES, OFFLOAD, ONLOAD, Residency

LONGEST_WAIT_S = threading.TIMEOUT_MAX / 2
"""Longest wait for calls, in seconds: with some more time added, it is below the longest that a thread can wait."""


class Place:
    """Place of a call in the order of calls on its devices.

    Args:
        queue: Object that identifies the queue of calls that the call is sent to: the `FanOut` of its service.
        before: Places of the last calls on each of its devices.
        patience_s: See Attributes.
        devices: Names of its devices.
        meter: Follows the calls on devices. Default: nothing does.

    Attributes:
        queue: See Args.
        first: Futures that must be resolved before the call may be sent; none once `ended` is resolved.
        patience_s: Longest time, in seconds, that the call may wait for its inputs and for the calls before it.
        sent: Future that is resolved when the call has been sent, or will not be made.
        ended: Future that is resolved when this call and all before it on its devices have ended.
    """

    def __init__(
        self,
        queue: object,
        before: Sequence[Place],
        patience_s: float,
        devices: frozenset[str] = frozenset(),
        meter: DeviceMeter | None = None,
    ) -> None:
        self.queue = queue
        self.patience_s = patience_s
        self._devices, self._meter, self._in_use = devices, meter, False
        # The ranks order calls of one queue themselves: the next may be sent as soon as this one has been.
        self.first = [each.sent if each.queue is queue else each.ended for each in before]
        self.sent, self.ended = Promise(), Promise()
        self._all_before = [each.ended for each in before]
        self._has_left = False

    def was_sent(self) -> None:
        """Records that the requests of the call have been sent to its ranks."""
        if self._meter:
            self._meter.begin(self._devices)
            self._in_use = True
        if not self.sent.done():
            self.sent.set_result(None)

    def was_lost(self) -> None:
        """Records that the ranks were lost with the call, which is going to be sent again. Later calls wait on."""
        self._end_use()

    def _end_use(self) -> None:
        if self._meter and self._in_use:
            self._meter.end(self._devices)
            self._in_use = False

    def leave(self) -> None:
        """Records that the call has ended, or will not be made. Later calls still wait for the calls before it. Again:
        does nothing."""
        if self._has_left:
            return
        self._has_left = True
        self._end_use()
        if not self.sent.done():
            resolve_after(self.first, self.sent)
        resolve_after(self._all_before, self.ended)

    def forget_before(self) -> None:
        """Drops the futures of the preceding calls, which have ended. Otherwise each place would keep all earlier
        places of the run in memory."""
        self.first, self._all_before = [], []


Move = Callable[[str, StepContext, Sequence[Future[Any]]], Future[Any]]
"""Function that starts a call of `offload` or `onload` on all ranks of a service, and returns its future. It takes the
name of the method, the step that the call belongs to, and the futures of moves that have to succeed before it."""


class Placement:
    """Orders calls: calls that share a device are executed in the order in which they entered. Thread-safe.

    Args:
        residency: Tells which services are offloaded and onloaded before a call. Default: none are.
        meter: Follows the calls on devices. Default: nothing does.
    """

    def __init__(self, residency: Residency | None = None, meter: DeviceMeter | None = None) -> None:
        self._meter = meter
        self._last: dict[str, Place] = {}
        self._unfinished: dict[Future[None], tuple[Place, float]] = {}
        self._lock = threading.Lock()
        self._residency = residency
        self._movers: dict[str, Move] = {}
        self._turn = threading.RLock()

    @property
    def moving(self) -> frozenset[str]:
        """Names of the services that may be offloaded before calls of others."""
        return self._residency.moving if self._residency else frozenset()

    def moved_by(self, service: str, move: Move) -> None:
        """Sets the function that offloads and onloads a service."""
        self._movers[service] = move

    @contextmanager
    def turn(self, services: Iterable[str], method: str, step: StepContext) -> Iterator[list[Future[Any]]]:
        """Context manager in which a call enters the order of calls. No other call enters between the call and the
        `offload` and `onload` calls that it requires. Yields the futures of these calls.

        Args:
            services: Names of the services that are called.
            method: Python name of the method.
            step: Step that the call belongs to.
        """
        with self._turn:
            moved: list[Future[Any]] = []
            for service in services:
                moves = self._residency.before(service, method) if self._residency else NO_MOVES
                moved += [self._movers[other](OFFLOAD, step, ()) for other in moves.offload]
                if moves.onload:
                    moved.append(self._movers[service](ONLOAD, step, tuple(moved)))
            yield moved

    def longest_wait_s(self) -> float:
        """Returns the longest time, in seconds, that all unfinished calls on all devices may take one after another, at
        most `LONGEST_WAIT_S`."""
        return min(sum(time_s for _, time_s in self._unfinished.copy().values()), LONGEST_WAIT_S)

    def enter(self, devices: frozenset[str], queue: object, time_s: float) -> Place:
        """Appends a call to the order and returns its place. Calls that change the results of others must be entered in
        the order of the program.

        A call may wait for the sum of the times of all unfinished calls before it, on any devices, plus `time_s`. So a
        call within its time never makes a later one give up, and no call waits for ever.

        Args:
            devices: Names of the devices that the call runs on.
            queue: Object that identifies the queue of calls that the call is sent to: the `FanOut` of its service.
                Its ranks execute calls in the order in which they were sent, so that several may be under way.
            time_s: Longest time of the call itself, in seconds, after the calls before it have ended.
        """
        with self._lock:
            before = list({id(last): last for device in devices if (last := self._last.get(device))}.values())
            place = Place(queue, before, self.longest_wait_s() + time_s, devices, self._meter)
            self._last.update(dict.fromkeys(devices, place))
            self._unfinished[place.ended] = place, time_s
        place.ended.add_done_callback(self._finish)
        return place

    def _finish(self, ended: Future[None]) -> None:
        """Removes a call that has ended, as have all before it, from those that later calls may wait for."""
        place, _ = self._unfinished.pop(ended)
        place.forget_before()

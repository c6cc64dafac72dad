"""The order of calls on devices: calls that share a device run in call order, all others at the same time.

An algorithm is therefore the same text whether its roles are colocated, split or interleaved; the resource pools of the
config decide (HybridFlow, sections 4.1 and 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence

from controller.role_groups.futures import promise, resolve_after


class Place:
    """A call's place in the order of calls on its devices.

    Args:
        queue: The queue of calls that the call goes to.
        before: The last calls on its devices.
        patience_s: See below.

    Attributes:
        first: Futures that have to be resolved before the call may be sent.
        patience_s: Longest time that the call may wait for its inputs and for its turn, in seconds.
    """

    def __init__(self, queue: object, before: Sequence[Place], patience_s: float) -> None:
        self.queue = queue
        self.patience_s = patience_s
        # The ranks order calls of one queue themselves: the next may be sent as soon as this one has been.
        self.first = [each.sent if each.queue is queue else each.ended for each in before]
        self.sent, self.ended = promise(), promise()
        self._all_before = [each.ended for each in before]

    def was_sent(self) -> None:
        """Notes that the call's ranks have it."""
        self.sent.set_result(None)

    def leave(self) -> None:
        """Notes that the call has ended, or will not be made. Calls behind it still wait for those before it."""
        if not self.sent.done():
            resolve_after(self.first, self.sent)
        resolve_after(self._all_before, self.ended)


class Placement:
    """Keeps calls on common devices in call order."""

    def __init__(self) -> None:
        self._last: dict[str, Place] = {}
        self._unfinished: dict[Place, float] = {}

    def longest_wait_s(self) -> float:
        """Seconds that all unfinished calls may take, one after another."""
        return sum(self._unfinished.copy().values())

    def enter(self, devices: frozenset[str], queue: object, time_s: float) -> Place:
        """Takes a place in the order; called in program order.

        A call may wait for as long as all unfinished calls before it, on any devices, may take one after another.
        So a call within its time never makes a later one give up, and no call waits for ever.

        Args:
            devices: Devices that the call runs on.
            queue: The queue of calls that the call goes to: calls of one queue run on the same ranks in the order in
                which they are sent, so several may be under way.
            time_s: Longest time of the call itself, once its turn has come, in seconds.
        """
        before = list({id(last): last for device in devices if (last := self._last.get(device))}.values())
        place = Place(queue, before, self.longest_wait_s() + time_s)
        self._last.update(dict.fromkeys(devices, place))
        self._unfinished[place] = time_s
        place.ended.add_done_callback(lambda _: self._unfinished.pop(place, None))
        return place

"""Replacement of a service that is lost during a run and holds none of its state: calls wait until the service serves
again, by new processes or by those that did not answer for a time, and are sent again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from client.session import steady_unix_s
from rlhf.errors import PeerFailed, Restarted, RlhfError, ServiceLost, ShuttingDown

REPORT_S = 3.0
"""Longest time, in seconds, to wait until the launcher reports why a service was lost."""
POLL_S = 0.1
RESTARTS = "restarts/"
"""Prefix, before the name of a service, of the metric that counts its losses in a step and its evaluation."""


class LostAgain(ServiceLost):
    """A call whose service was lost with it more often than `restarts` of the service allows."""


class Launcher(Protocol):
    """Starts the services of a run, and starts lost ones again."""

    def take_loss(self, service: str) -> str:
        """Returns why a service was lost, the oldest report that was not taken before; empty where there is none."""
        ...

    def has_failed(self) -> bool:
        """Whether the launcher has ended, or stops all services."""
        ...


@dataclass(frozen=True)
class Replaced:
    """A service that was lost and serves again. Times are Unix times, in seconds.

    Attributes:
        service: Name of the service.
        step: Step of the call that was lost first.
        cause: Why it was lost.
        lost_s: When the loss was noticed.
        serves_s: When the service was in the session again.
    """

    service: str
    step: int
    cause: str
    lost_s: float
    serves_s: float


def is_loss(error: BaseException) -> bool:
    """Whether a call has failed since a process of its service has ended, is about to end, or has left the collectives
    of the service. False for a ServiceLost that a rank reports of another service."""
    if isinstance(error, ServiceLost):
        return not error.service or isinstance(error, ShuttingDown)
    return isinstance(error, PeerFailed | Restarted)


def may_answer_again(error: BaseException) -> bool:
    """Whether the processes of a service that a call was lost with may be as they were: they could not be reached, as
    while one is stopped. False where one of them has said that it ends, or was started again."""
    return isinstance(error, ServiceLost) and not error.service


class Replacement:
    """Waits for one service when it is lost, once for all calls that were lost with it. Use it from the event loop
    only.

    Args:
        service: Name of the service.
        allowed: Number of times that a call may be sent again, `restarts` of the service.
        wait_s: Longest time, in seconds, to wait until the service serves again.
        rejoin: Coroutine function that returns when the service serves again and is in the session: whether by new
            processes. Its arguments are the latest time, of `time.monotonic`, at which it raises ServiceLost, and
            whether the processes may be those of before, as of `may_answer_again`.
        say: Called with lines of text for the terminal.
        report: Called with each replacement.
        launcher: Launcher of the service. Default: the run has started none.

    Attributes:
        number: Number of replacements so far.
        wait_s: See Args.
    """

    def __init__(
        self,
        service: str,
        allowed: int,
        wait_s: float,
        rejoin: Callable[[float, bool], Awaitable[bool]],
        say: Callable[[str], None],
        report: Callable[[Replaced], None],
        launcher: Launcher | None = None,
    ) -> None:
        self.number, self.wait_s = 0, wait_s
        self._service, self._allowed, self._rejoin = service, allowed, rejoin
        self._say, self._report, self._launcher = say, report, launcher
        self._under_way: asyncio.Task[None] | None = None
        self._lost_calls: Counter[str] = Counter()

    def longest_s(self, call_s: float) -> float:
        """Returns the longest time, in seconds, that a call may take with all replacements, where it takes `call_s`
        seconds at most without any."""
        return call_s + self._allowed * (self.wait_s + call_s)

    async def ready(self) -> None:
        """Waits while the service is being replaced. Raises the error of a replacement that has failed, also later."""
        if self._under_way:
            await asyncio.shield(self._under_way)

    async def after(self, error: RlhfError, call: str, step: int, number: int, losses: int) -> bool:
        """Returns when a call may be sent again: whether it was the first that was lost with the service this time.

        Args:
            error: Error of the call.
            call: Name of its method, for messages.
            step: Its step.
            number: `number` when it was sent.
            losses: How many times the call was lost, this time included.

        Raises:
            RlhfError: `error`, where it is no loss; LostAgain, where the call was lost too often; the error of the
                replacement, where the service does not serve again in time.
        """
        if not is_loss(error):
            raise error
        named = f"{call} of step {step}"
        if losses > self._allowed:
            cause = await self._cause()
            raise LostAgain(
                f"{self._service}: {named} was lost with the service {losses} times, and services.{self._service}."
                f"restarts is {self._allowed}; the last time: {cause}; {error}"
            ) from error
        self._lost_calls[f"{named} ({losses} of {self._allowed})"] += 1
        is_first = number == self.number and self._under_way is None
        if is_first:
            self._under_way = asyncio.ensure_future(self._replace(error, step))
        await self.ready()
        return is_first

    async def _replace(self, error: RlhfError, step: int) -> None:
        lost_s, deadline, latest = steady_unix_s(), time.monotonic() + self.wait_s, error
        self._say(f"{error}; waiting up to {self.wait_s:g} s until services.{self._service} serves again")
        while True:
            try:
                is_new = await self._rejoined(deadline, may_be_same=may_answer_again(latest))
                break
            except RlhfError as again:
                latest = again
                if not is_loss(again) or self._is_hopeless(deadline):
                    raise self._failed(error, again) from error
            await asyncio.sleep(POLL_S)
        cause, how = "it could not be reached", "it answers again"
        if is_new:
            cause, how = await self._cause(), "it was started again"
        self.number, self._under_way = self.number + 1, None
        calls = ", ".join(
            f"{call}{f', {count} calls' if count > 1 else ''}" for call, count in self._lost_calls.items()
        )
        self._lost_calls.clear()
        self._say(f"{self._service}: {cause}; {how}, sent again: {calls}")
        self._report(Replaced(self._service, step, cause, lost_s, steady_unix_s()))

    async def _rejoined(self, deadline: float, *, may_be_same: bool) -> bool:
        """Calls `rejoin`, and returns its result. Raises ServiceLost, without waiting for it any longer, where the
        launcher has failed."""
        rejoin = asyncio.ensure_future(self._rejoin(deadline, may_be_same))
        try:
            while not (await asyncio.wait([rejoin], timeout=POLL_S))[0]:
                if self._has_failed():
                    raise ServiceLost("the launcher stops all services")
            return await rejoin
        finally:
            rejoin.cancel()

    def _failed(self, error: RlhfError, again: RlhfError) -> RlhfError:
        """Returns the error of a replacement that has failed with `again`, after the loss `error`."""
        return ServiceLost(f"{error}; {again}").of_call(self._service) if is_loss(again) else again

    def _is_hopeless(self, deadline: float) -> bool:
        return time.monotonic() >= deadline or self._has_failed()

    def _has_failed(self) -> bool:
        return bool(self._launcher and self._launcher.has_failed())

    async def _cause(self) -> str:
        """Returns why the service was lost, as the launcher reports; without a launcher, that it cannot be known."""
        if self._launcher is None:
            return f"a process has ended (see the log of services.{self._service})"
        for _ in range(round(REPORT_S / POLL_S)):
            if cause := self._launcher.take_loss(self._service):
                return cause
            await asyncio.sleep(POLL_S)
        return f"it was lost (see the log of services.{self._service})"

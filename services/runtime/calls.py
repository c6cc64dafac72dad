"""A call on one rank, from its arrival to its response."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rlhf.contract import Method
from rlhf.errors import DeadlineExceeded
from rlhf.v1 import common_pb2
from services.runtime.turns import Ticket
from services.runtime.worker import CallContext, CallRows, Registration


@dataclass(eq=False)
class ActiveCall:
    """A call on this rank, from its arrival until it ends. After that only its response is kept, for retries.

    Attributes:
        method: Method that is called.
        registration: How the worker has registered the method.
        request: The request message of the method.
        context: The call as its method sees it.
        timing: Timing message of the response, filled in while the call runs.
        ticket: Place of the call in the order of calls. That of a call that runs beside the others waits in no queue.
        beside: Whether the call runs concurrently with ordered calls.
        fetch: Future of the call's rows; None for a call without rows, or before the fetch is queued.
        stopped: Event that is set when the call is asked to stop, together with `context.cancelled`.
        callers: Number of callers that wait for the response; a caller whose connection is lost no longer counts.
        is_held: Whether the call came by the Dispatch stream of a session. A stream may break and be reopened, so
            such a call goes on without callers until its session ends.
        arrived_at: When the call arrived, in seconds of `time.monotonic()`.
    """

    method: Method
    registration: Registration
    request: Any
    context: CallContext
    timing: common_pb2.Timing
    ticket: Ticket
    beside: bool = False
    fetch: asyncio.Future[CallRows] | None = None
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    callers: int = 0
    is_held: bool = False
    arrived_at: float = field(default_factory=time.monotonic)

    @property
    def call_id(self) -> str:
        """Id of the call, from its caller or, if that gave none, from `CallQueue.start`."""
        return self.context.call.call_id

    @property
    def has_batch(self) -> bool:
        """Whether the request has rows to fetch."""
        return self.method.takes_rows and self.request.HasField("batch")

    def raise_late(self, progressed_at: float) -> NoReturn:
        """Raises DeadlineExceeded for a call that still runs past its deadline; the message says how far it is.

        Args:
            progressed_at: When the worker last made progress, in seconds of `time.monotonic()`.
        """
        context = self.context
        last = max(context.progressed_at, progressed_at)
        when = f"the last {time.monotonic() - last:.1f} s ago" if last > self.arrived_at else "none so far"
        done = f", {context.done} of {context.done_of} done" if context.done_of else ""
        raise DeadlineExceeded(
            f"{self.method.name} ran past its deadline and is still running{done}; signs of progress: {when}"
        )

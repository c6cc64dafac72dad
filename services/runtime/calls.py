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
    """A call that has not ended. Its response alone is remembered after that, not its rows.

    Attributes:
        request: The request message of the method.
        timing: Filled in as the call goes on.
        ticket: Claim to a turn.
        fetch: Rows on their way since the call arrived; None for a call without rows.
        stopped: Set together with the context's `cancelled`, for the event loop.
        callers: Number of callers that wait, each of which leaves with its connection.
        is_held: Whether a session's stream of calls brought it. The stream may break and come back, so the call goes on
            without callers until the session ends.
    """

    method: Method
    registration: Registration
    request: Any
    context: CallContext
    timing: common_pb2.Timing
    ticket: Ticket
    fetch: asyncio.Future[CallRows] | None = None
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    callers: int = 0
    is_held: bool = False

    @property
    def call_id(self) -> str:
        return self.context.call.call_id

    @property
    def has_batch(self) -> bool:
        """Whether the request has rows to fetch."""
        return self.method.takes_rows and self.request.HasField("batch")

    def raise_late(self, progressed_at: float) -> NoReturn:
        """Raises DeadlineExceeded for a call that goes on past its deadline, with its progress.

        Args:
            progressed_at: `time.monotonic()` of the worker's newest progress.
        """
        context = self.context
        since_s = time.monotonic() - max(context.progressed_at, progressed_at)
        is_known = since_s < time.time() - self.timing.arrived_unix_s
        when = f"the last {since_s:.1f} s ago" if is_known else "none so far"
        done = f", {context.done} of {context.done_of} done" if context.done_of else ""
        raise DeadlineExceeded(
            f"{self.method.name} ran past its deadline and goes on{done}; signs of progress: {when}"
        )

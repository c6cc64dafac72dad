"""How the two sides of a lasting arrangement hear of each other's end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc

from rlhf.channels import open_channel
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import DeadlineExceeded, Refused, RlhfError, ServiceLost, from_rpc_error

CLOSED = "the transport was closed"
"""Why this side waits no longer."""

LONGEST_PAUSE_S = 1e-3
"""Between two looks at something awaited; the first pauses are shorter."""


def liveness_channel(address: str) -> grpc.Channel:
    """A channel on a connection of its own, whose streams are read in the background."""
    return open_channel(address, (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))


class LivenessStream:
    """A stream from a source that gives one message and then stays open while both sides live. Its end, whichever side
    closed it or died, tells the other side to free its memory.

    Args:
        stream: The call, just started.
        closed: Set where this side is to wait no longer.
    """

    def __init__(self, stream: Any, closed: threading.Event) -> None:
        self._stream = stream
        self._closed = closed
        self._first: Future[Any] = Future()
        self._ended = threading.Event()
        threading.Thread(target=self._read, name="liveness", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether the other side is still there, as far as is known."""
        return not self._ended.is_set()

    def first(self, deadline: float, where: str) -> Any:
        """The message. Errors as in `wait`, and those with which the source refused."""
        self.wait(self._first.done, deadline, where)
        return self._first.result()

    def wait(self, done: Callable[[], bool], deadline: float, where: str) -> None:
        """Returns once `done` says so.

        Raises:
            DeadlineExceeded: It was not done by the deadline, as of `time.monotonic`.
            ServiceLost: The other side has gone.
            Refused: This side was closed.
        """
        pause = LONGEST_PAUSE_S / 64
        while True:
            if self._closed.is_set():
                raise Refused(f"{where}: {CLOSED}")
            if done():
                return
            if self._ended.is_set() and not done():
                raise self._why_ended(where)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{where}: no answer by the deadline")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def end_cause(self, where: str, within_s: float) -> RlhfError | None:
        """Why the other side has gone; None where it is still there after `within_s` seconds."""
        return self._why_ended(where) if self._ended.wait(within_s) else None

    def _why_ended(self, where: str) -> RlhfError:
        if self._stream.code() is grpc.StatusCode.OK:
            return ServiceLost(f"{where}: the source gave up")
        return from_rpc_error(self._stream, where)

    def cancel(self) -> None:
        """Ends the stream from here."""
        self._stream.cancel()

    def _read(self) -> None:
        try:
            for message in self._stream:
                self._first.set_result(message)
        except grpc.RpcError:
            pass  # what it says is read from the stream, by `end`
        finally:
            self._ended.set()


def wait_for_answer(call: Any, liveness: LivenessStream, deadline: float, where: str) -> None:
    """Waits for the answer to a call.

    Raises:
        RlhfError: The one it failed with; or the source has gone; or it did not answer in time.
    """
    try:
        liveness.wait(call.done, deadline, where)
        call.result()
    except grpc.RpcError as error:
        raise from_rpc_error(error, where) from error
    finally:
        call.cancel()
